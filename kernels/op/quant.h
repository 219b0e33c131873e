/*
 * GGUF block formats, scalar: the one place that knows their bit layouts.
 * Repacking and the oracle read weights through it.
 */

#ifndef KERNELS_OP_QUANT_H
#define KERNELS_OP_QUANT_H

#include <stdint.h>

#include "kernels/op/tensor.h"

/*
 * One block as integers: value[i] = d[i / sub] * q[i] + m[i / sub], exactly
 * (d and m are f32 products of the file's scales; q is what the format stores,
 * made signed where the format has an offset).
 */
typedef struct {
    int n;    /* values in the block: 32 or 256 */
    int sub;  /* values per scale: 32 or 16 */
    int bits; /* q fits 4 bits (0 … 15 or −8 … 7) or 8 bits signed */
    int has_min;
    int8_t q[256];
    float d[16];
    float m[16];
} op_block_t;


/* Unpacks one block of a quantised dtype. */
void op_block_unpack(op_dtype_t dtype, const void *block, op_block_t *out);

/* n values of any dtype as f32 (n a multiple of the block). */
void op_dequant_row(op_dtype_t dtype, const void *row, float *out, int64_t n);

/* n finite f32 values into a quantised or half format, round to nearest, the
 * plain rule of each format; F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 only.  0,
 * or -1 for another type.  For tests and tools. */
int op_quant_row(op_dtype_t dtype, const float *x, void *row, int64_t n);

#endif /* KERNELS_OP_QUANT_H */
