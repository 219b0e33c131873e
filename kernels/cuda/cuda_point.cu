/*
 * The ops that look at one row at a time: embed, RMSNorm, the gated
 * activation, picking rows, and quantising what a product reads.
 *
 * A row that is summed is one thread block's, whose size is always the same,
 * so that its sums have one order.
 */

#include "kernels/cuda/cuda_dot.cuh"
#include "kernels/cuda/cuda_input.cuh"
#include "kernels/cuda/cuda_point.h"

enum { THREADS = 128 };


/* --- embed --- */

/* The row's token, which may be one that was drawn on the device. */
static __device__ __forceinline__ int
token_of(const cuda_ids_t *ids, int row)
{
    const int token = ids->tokens[row];

    return token >= 0 ? token : ids->drawn[-1 - token].token;
}


template <int LAYOUT>
static __device__ __forceinline__ float
value_at(const cuda_segment_t *seg, int row, int i)
{
    const size_t at = (size_t) row * seg->n_blocks + i / 32;
    const uint8_t *q = seg->q + at * lay_t<LAYOUT>::quant_bytes;
    const cuda_scale_t scale = cuda_scale_load<LAYOUT>(
        seg->scales
        + ((size_t) row * seg->stride + i / 32) * lay_t<LAYOUT>::scale_bytes);
    int value;

    if (lay_t<LAYOUT>::bits == 8) {
        value = (int8_t) q[i % 32];
    } else {
        value = q[i % 16] >> (i % 32 < 16 ? 0 : 4) & 15;
        value = lay_t<LAYOUT>::shift ? (value ^ 8) - 8 : value;
    }

    if (lay_t<LAYOUT>::halves == 2) {
        return (i % 32 < 16 ? scale.d : scale.m) * (float) value;
    }

    return lay_t<LAYOUT>::has_min ? scale.d * (float) value + scale.m
                                  : scale.d * (float) value;
}


template <int LAYOUT>
__global__ void
__launch_bounds__(THREADS)
    embed(const cuda_segment_t seg, float *x, const cuda_ids_t ids)
{
    const int row = token_of(&ids, (int) blockIdx.x) - seg.first_out;

    if (row < 0 || row >= seg.n_out) {
        return;
    }

    for (int i = threadIdx.x; i < seg.n_in; i += THREADS) {
        x[(size_t) blockIdx.x * seg.n_in + i] = value_at<LAYOUT>(&seg, row, i);
    }
}


__global__ void
__launch_bounds__(THREADS)
    embed_float(const cuda_segment_t seg, float *x, const cuda_ids_t ids)
{
    const int row = token_of(&ids, (int) blockIdx.x) - seg.first_out;

    if (row < 0 || row >= seg.n_out) {
        return;
    }

    for (int i = threadIdx.x; i < seg.n_in; i += THREADS) {
        const size_t at = (size_t) row * seg.stride + i;
        float value;

        if (seg.layout == OP_LAY_F32) {
            value = ((const float *) seg.q)[at];
        } else if (seg.layout == OP_LAY_F16) {
            value = f16_to_f32(((const uint16_t *) seg.q)[at]);
        } else {
            value = __uint_as_float((uint32_t) ((const uint16_t *) seg.q)[at]
                                    << 16);
        }

        x[(size_t) blockIdx.x * seg.n_in + i] = value;
    }
}


#define EMBED(layout)                                                         \
    LAUNCH((embed<layout>), (unsigned) all.rows, THREADS, 0, stream, segment, \
           x, all)


extern "C" void
cuda_embed_launch(const cuda_segment_t *seg, float *x, const cuda_ids_t *ids,
                  cudaStream_t stream)
{
    const cuda_segment_t segment = *seg;
    const cuda_ids_t all = *ids;

    if (segment.n_blocks == 0) {
        LAUNCH(embed_float, (unsigned) all.rows, THREADS, 0, stream, segment, x,
               all);
        return;
    }

    CUDA_BY_LAYOUT(segment.layout, EMBED);
}


/* --- RMSNorm --- */

static __device__ __forceinline__ void
store4(float *row, int i, int dim, float4 v)
{
    if (dim % 4 == 0) {
        *(float4 *) (row + i) = v;
        return;
    }

    row[i] = v.x;
    if (i + 1 < dim) {
        row[i + 1] = v.y;
    }
    if (i + 2 < dim) {
        row[i + 2] = v.z;
    }
    if (i + 3 < dim) {
        row[i + 3] = v.w;
    }
}


__global__ void
__launch_bounds__(CUDA_ROW_THREADS)
    rmsnorm(float *y, const float *x, const float *w, int dim, float eps)
{
    __shared__ float sums[CUDA_ROW_WARPS];
    const float *from = x + (size_t) blockIdx.x * dim;
    float *to = y + (size_t) blockIdx.x * dim;
    const float factor = cuda_norm_factor(from, dim, eps, sums);

    for (int i = threadIdx.x * 4; i < dim; i += CUDA_ROW_THREADS * 4) {
        store4(to, i, dim,
               cuda_norm4(cuda_load4(from, i, dim), cuda_load4(w, i, dim),
                          factor));
    }
}


extern "C" void
cuda_rmsnorm_launch(const cuda_rows_t *job, float eps, cudaStream_t stream)
{
    LAUNCH(rmsnorm, (unsigned) job->rows, CUDA_ROW_THREADS, 0, stream, job->y,
           job->x, job->w, job->dim, eps);
}


/* --- the gated activation --- */

__global__ void
__launch_bounds__(THREADS) silu_mul(float *y, const float *gate_up, int dim)
{
    const int i = blockIdx.y * THREADS + threadIdx.x;
    const float *gate = gate_up + (size_t) blockIdx.x * 2 * dim;

    if (i < dim) {
        y[(size_t) blockIdx.x * dim + i] = cuda_gated(gate[i], gate[dim + i]);
    }
}


extern "C" void
cuda_silu_mul_launch(const cuda_rows_t *job, cudaStream_t stream)
{
    const dim3 grid((unsigned) job->rows,
                    (unsigned) ((job->dim + THREADS - 1) / THREADS));

    LAUNCH(silu_mul, grid, THREADS, 0, stream, job->y, job->x, job->dim);
}


/* --- picking rows --- */

__global__ void
__launch_bounds__(THREADS)
    gather(float *y, const float *x, const int32_t *idx, int dim)
{
    const float *from = x + (size_t) idx[blockIdx.x] * dim;
    float *to = y + (size_t) blockIdx.x * dim;

    for (int i = threadIdx.x * 4; i < dim; i += THREADS * 4) {
        store4(to, i, dim, cuda_load4(from, i, dim));
    }
}


extern "C" void
cuda_gather_launch(const cuda_rows_t *job, const int32_t *idx,
                   cudaStream_t stream)
{
    LAUNCH(gather, (unsigned) job->rows, THREADS, 0, stream, job->y, job->x,
           idx, job->dim);
}


/* --- quantising --- */

__global__ void
__launch_bounds__(CUDA_ROW_THREADS)
    quantise_rows(const cuda_act_t act, const cuda_input_t in)
{
    __shared__ float sums[CUDA_ROW_WARPS];

    cuda_quantise_row(&in, blockIdx.x, &act, blockIdx.x, sums);
}


extern "C" void
cuda_quantise_launch(const cuda_act_t *act, const cuda_input_t *in, int rows,
                     cudaStream_t stream)
{
    LAUNCH(quantise_rows, (unsigned) rows, CUDA_ROW_THREADS, 0, stream, *act,
           *in);
}
