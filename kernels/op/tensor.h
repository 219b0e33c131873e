/*
 * Types of stored tensors, by GGUF's numbers, and a view of one tensor as the
 * file holds it.
 */

#ifndef KERNELS_OP_TENSOR_H
#define KERNELS_OP_TENSOR_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    OP_F32 = 0,
    OP_F16 = 1,
    OP_Q4_0 = 2,
    OP_Q4_1 = 3,
    OP_Q5_0 = 6,
    OP_Q5_1 = 7,
    OP_Q8_0 = 8,
    OP_Q4_K = 12,
    OP_Q5_K = 13,
    OP_Q6_K = 14,
    OP_BF16 = 30,
} op_dtype_t;

/* A matrix of n_out rows, each n_in values, contiguous, in GGUF's block
 * format: y[o] = sum over i of w[o][i] * x[i].  A vector has n_out = 1. */
typedef struct {
    const void *data;
    op_dtype_t dtype;
    int64_t n_in;
    int64_t n_out;
} op_tensor_t;


/* "Q4_1"; NULL for a type this project does not read. */
const char *op_dtype_name(int dtype);

/* Values per block (1, 32 or 256) and its bytes; 0 for an unknown type. */
int op_dtype_block(int dtype);
int op_dtype_bytes(int dtype);

/* Bytes of n_in values; n_in is a multiple of the block. */
size_t op_row_bytes(int dtype, int64_t n_in);

/* IEEE half precision, round to nearest even, in portable C. */
float op_half_to_float(uint16_t h);
uint16_t op_float_to_half(float f);

#endif /* KERNELS_OP_TENSOR_H */
