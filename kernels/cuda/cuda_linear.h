/*
 * Weights on the device, quantised activations, and the order of additions in
 * linear() of the CUDA backend.
 *
 * Order: the blocks of 32 inputs of an output are dealt to 16 classes, block b
 * to class b % 16.  A class adds its blocks ascending,
 *   acc = fmaf((float) dot, d_w * d_x, acc), for each half of a Q6_K block,
 *   acc = fmaf(m_w, s_x, acc) behind it, s_x = d_x * sum(q_x), with minima,
 * and the classes are added as a tree: class j and j + 8, then + 4, + 2, + 1.
 * With OP_FINE the product of what quantising left over is a sum of its own,
 * added to the first one.  One warp that reads a row has a class a lane; eight
 * warps that multiply tiles have two classes a warp: both give the same bits,
 * so the number of rows may choose.
 *
 * F16 and BF16 weights are cuda_dense.cu's.  F32 ones, and those where there
 * are no tensor cores for them or n_in is no multiple of 8, are
 * cuda_float.cu's: class (i / 8) % 16 of input i, acc = fmaf(w, x, acc), the
 * same tree.  Both have one order for any number of rows, too.
 *
 * A quantised weight is kept as two arrays: quants, 16 or 32 bytes a block in
 * one piece, and scales, so that a lane reads a block by 128-bit loads and a
 * tile of blocks is copied by 16 bytes at a time.
 */

#ifndef KERNELS_CUDA_CUDA_LINEAR_H
#define KERNELS_CUDA_CUDA_LINEAR_H

#include "kernels/cuda/prim.cuh"

extern "C" {

#include "kernels/op/op.h"
#include "kernels/op/repack.h"

enum {
    CUDA_CLASSES = 16, /* partial sums of an output, see above */
    CUDA_OUTS = 32, /* outputs of a tile; rows of a weight are padded to it */
    CUDA_CHUNK = 8  /* float inputs in a row that one class takes */
};

/* Some rows of a weight, of one layout.  Device memory. */
typedef struct {
    op_layout_t layout;
    int n_in;
    int n_out;
    int first_out; /* where in y they go */
    int n_blocks;  /* of 32 inputs; 0: float */
    int stride;    /* blocks in a row of scales: n_blocks, to a multiple of 16;
                      of a float layout, values in a row, to a multiple of 8 */
    uint8_t *q;    /* [rows][n_blocks][16 or 32]; float: [rows][stride] */
    uint8_t *scales; /* [rows][stride] of cuda_scale_bytes() */
} cuda_segment_t;

/* Activations as a product reads them: columns, which are rows of x; with
 * OP_FINE two of them a row, the second one what the first left over. */
typedef struct {
    int8_t *q;  /* [cols][n_in] */
    float2 *ds; /* [cols][stride] d and d * sum(q) */
    int stride; /* of ds: blocks, to a multiple of 16 */
    int n_cols;
    int fine;
} cuda_act_t;

/* What is quantised: op_input_t on the device. */
typedef struct {
    int kind;
    int n_in;
    const float *x;
    const float *norm;
    float eps;
} cuda_input_t;

/* One segment's product. */
typedef struct {
    cuda_segment_t w;
    cuda_input_t in; /* kind OP_PLAIN for a float layout, unless
                        cuda_dense_reads() */
    cuda_act_t act;  /* of a quantised layout */
    float *y;        /* of the segment's first output */
    int ldy;
    int rows;
    int add;
    int max_smem;       /* shared memory that a thread block may have */
    int max_blocks;     /* thread blocks that the device has room for */
    bool tensor_floats; /* it multiplies TF32 matrices */
} cuda_dot_t;


/* --- cuda_weight.cu --- */

op_weight_t *cuda_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts,
                         op_err_t *err);
void cuda_weight_free(op_dev_t *dev, op_weight_t *weight);
size_t cuda_weight_bytes(const op_weight_t *weight);

/* The segments of a weight. */
const cuda_segment_t *cuda_weight_segments(const op_weight_t *weight, int *n);

/* --- cuda_point.cu --- */

/* Rows → q and ds of the columns, for n_in a multiple of 32. */
void cuda_quantise_launch(const cuda_act_t *act, const cuda_input_t *in,
                          int rows, cudaStream_t stream);

/* Tokens of rows, as op_batch_t has them; all is device memory. */
typedef struct {
    const int32_t *tokens;
    const op_drawn_t *drawn; /* or NULL: no token is negative */
    int rows;
} cuda_ids_t;

/* Rows of x whose token lies in the segment. */
void cuda_embed_launch(const cuda_segment_t *seg, float *x,
                       const cuda_ids_t *ids, cudaStream_t stream);

/* --- cuda_gemv.cu, cuda_gemm.cu, cuda_dense.cu, cuda_float.cu --- */

/* Few columns, which it quantises itself, act.q and act.ds not being used;
 * any number of quantised columns; F16 and BF16 weights, any number of rows,
 * where the device and the shape allow it; float weights. */
bool cuda_gemv_fits(const cuda_dot_t *dot);
void cuda_gemv_launch(const cuda_dot_t *dot, cudaStream_t stream);
void cuda_gemm_launch(const cuda_dot_t *dot, cudaStream_t stream);
bool cuda_dense_fits(const cuda_dot_t *dot);
bool cuda_dense_reads(const cuda_dot_t *dot); /* norms and gates, too */
void cuda_dense_launch(const cuda_dot_t *dot, cudaStream_t stream);
void cuda_float_launch(const cuda_dot_t *dot, cudaStream_t stream);


/* Bytes of a block's quants, and of its scales. */
static inline int
cuda_quant_bytes(int layout)
{
    return layout == OP_LAY_Q4_D16 || layout == OP_LAY_Q4_DM16
                   || layout == OP_LAY_Q4_DM32
               ? 16
               : 32;
}


static inline int
cuda_scale_bytes(int layout)
{
    switch (layout) {
    case OP_LAY_Q4_D16:
    case OP_LAY_Q8_D16:
        return 2;
    case OP_LAY_Q4_DM16:
    case OP_LAY_Q8_DM16:
        return 4;
    default:
        return 8;
    }
}


/* Bytes of a value of a float layout. */
static inline int
cuda_float_bytes(int layout)
{
    return layout == OP_LAY_F32 ? 4 : 2;
}


} /* extern "C" */

#endif /* KERNELS_CUDA_CUDA_LINEAR_H */
