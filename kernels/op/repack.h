/*
 * Compute layouts of weights: the few forms that kernels read.
 *
 * "Lanes are outputs": a group is 16 output rows.  A group is a run of
 * records, one for each 32 inputs (quantised) or each input (float), and a
 * record holds all 16 outputs.  So one sequential stream feeds a kernel, one
 * accumulator per output needs no horizontal sum, and every instruction set
 * can keep the same order of additions.
 *
 * A quantised record:
 *   4-bit: 4 × 64 bytes; byte 4 c + j of the v-th 64 holds for output c, in
 *          the low nibble input 4 v + j, in the high one input 16 + 4 v + j;
 *   8-bit: 8 × 64 bytes, signed; byte 4 c + j of the v-th: input 4 v + j;
 *   then 16 scales d (two rows of 16, if a scale covers 16 inputs), then, if
 *   the format has them, 16 minima m; f16 or f32.
 *   w = d * (q − zero) + m.
 * A float record is 16 values of the stored type.
 */

#ifndef KERNELS_OP_REPACK_H
#define KERNELS_OP_REPACK_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/op/op.h"
#include "kernels/op/tensor.h"

enum {
    OP_LANES = 16,        /* outputs in a group */
    OP_MAX_SIDE = 1 << 30 /* of a matrix; sizes then fit 64 bits by far */
};

typedef enum {
    OP_LAY_F32 = 0,
    OP_LAY_F16,
    OP_LAY_BF16,
    OP_LAY_Q4_D16,  /* Q4_0 (zero = 8) */
    OP_LAY_Q4_DM16, /* Q4_1 */
    OP_LAY_Q4_DM32, /* Q4_K */
    OP_LAY_Q8_D16,  /* Q8_0, Q5_0 */
    OP_LAY_Q8_DM16, /* Q5_1 */
    OP_LAY_Q8_DM32, /* Q5_K */
    OP_LAY_Q8_DD32, /* Q6_K: two scales, for inputs 0-15 and 16-31 */
    OP_LAY_COUNT
} op_layout_t;

/* The parts of a record, in bytes from its start. */
typedef struct {
    int span; /* inputs in a record: 1 or 32 */
    int bits; /* of q: 4 or 8; 0 for float layouts */
    int zero; /* what is subtracted from q: 0 or 8 */
    int has_min;
    int halves; /* scales per output: 1 or 2 */
    int wide;   /* scales are f32, else f16 */
    int d_at;   /* where the scales are */
    int m_at;   /* where the minima are */
    int bytes;  /* of the record */
} op_record_t;


/* Can a matrix of n_in inputs be a part of a weight?  0, or -1 with err. */
int op_part_check(const op_tensor_t *part, int64_t n_in, op_err_t *err);

/* -1 for a type that is not known. */
int op_layout_of(op_dtype_t dtype);

const op_record_t *op_layout_record(op_layout_t layout);

/* Bytes of one group of 16 outputs. */
size_t op_layout_group_bytes(op_layout_t layout, int64_t n_in);

/* Writes one row of a tensor as output `lane` of a group, which was zeroed.
 * n_in is a multiple of the type's block. */
void op_repack_row(op_dtype_t dtype, const void *row, int64_t n_in,
                   uint8_t *group, int lane);

/* The way back, dequantised: bit for bit what op_dequant_row() gives. */
void op_unpack_row(op_layout_t layout, const uint8_t *group, int lane,
                   float *out, int64_t n_in);

#endif /* KERNELS_OP_REPACK_H */
