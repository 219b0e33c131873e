/*
 * The ops that look at one row at a time: embed, RMSNorm, the gated
 * activation, picking rows, and quantising what a product reads.
 *
 * A row is one thread block's, whose size follows from the row's width alone,
 * so that its sums have one order.
 */

#include "kernels/cuda/cuda_dot.cuh"
#include "kernels/cuda/cuda_lanes.cuh"
#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/cuda_point.h"

enum {
    THREADS = 128,
    NORM_THREADS = 256, /* for wide rows */
    NORM_WIDE = 1024,
    QUANT_BLOCKS = THREADS / 8 /* blocks of 32 that a thread block quantises */
};


/* --- embed --- */

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
__global__ void __launch_bounds__(THREADS)
embed(const cuda_segment_t seg, float *x, const int32_t *tokens)
{
    const int row = tokens[blockIdx.x] - seg.first_out;

    if (row < 0 || row >= seg.n_out) {
        return;
    }

    for (int i = threadIdx.x; i < seg.n_in; i += THREADS) {
        x[(size_t) blockIdx.x * seg.n_in + i] = value_at<LAYOUT>(&seg, row, i);
    }
}


__global__ void __launch_bounds__(THREADS)
embed_float(const cuda_segment_t seg, float *x, const int32_t *tokens)
{
    const int row = tokens[blockIdx.x] - seg.first_out;

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


#define EMBED(layout)                                                          \
    LAUNCH((embed<layout>), (unsigned) rows, THREADS, 0, stream, segment, x,   \
           tokens)


extern "C" void
cuda_embed_launch(const cuda_segment_t *seg, float *x, const int32_t *tokens,
                  int rows, cudaStream_t stream)
{
    const cuda_segment_t segment = *seg;

    if (segment.n_blocks == 0) {
        LAUNCH(embed_float, (unsigned) rows, THREADS, 0, stream, segment, x,
               tokens);
        return;
    }

    CUDA_BY_LAYOUT(segment.layout, EMBED);
}


/* --- RMSNorm --- */

/* Four values of a row, those behind its end 0; by one load where rows begin
 * at a multiple of 16 bytes. */
static __device__ __forceinline__ float4
load4(const float *row, int i, int dim)
{
    if (dim % 4 == 0) {
        return *(const float4 *) (row + i);
    }

    return make_float4(row[i], i + 1 < dim ? row[i + 1] : 0.0f,
                       i + 2 < dim ? row[i + 2] : 0.0f,
                       i + 3 < dim ? row[i + 3] : 0.0f);
}


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


__global__ void __launch_bounds__(NORM_THREADS)
rmsnorm(float *y, const float *x, const float *w, int dim, float eps)
{
    __shared__ float sums[NORM_THREADS / 32];
    const float *from = x + (size_t) blockIdx.x * dim;
    float *to = y + (size_t) blockIdx.x * dim;
    const int n_warps = blockDim.x / 32;
    float sum = 0.0f;

    for (int i = threadIdx.x * 4; i < dim; i += blockDim.x * 4) {
        const float4 v = load4(from, i, dim);

        sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }

    sum = warp_sum(sum);

    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }

    __syncthreads();
    sum = sums[0];

    for (int i = 1; i < n_warps; i++) {
        sum += sums[i];
    }

    const float factor = 1.0f / sqrtf(sum / (float) dim + eps);

    for (int i = threadIdx.x * 4; i < dim; i += blockDim.x * 4) {
        const float4 v = load4(from, i, dim);
        const float4 g = load4(w, i, dim);

        store4(to, i, dim,
               make_float4(v.x * factor * g.x, v.y * factor * g.y,
                           v.z * factor * g.z, v.w * factor * g.w));
    }
}


extern "C" void
cuda_rmsnorm_launch(const cuda_rows_t *job, float eps, cudaStream_t stream)
{
    const unsigned threads = job->dim > NORM_WIDE ? NORM_THREADS : THREADS;

    LAUNCH(rmsnorm, (unsigned) job->rows, threads, 0, stream, job->y, job->x,
           job->w, job->dim, eps);
}


/* --- the gated activation --- */

__global__ void __launch_bounds__(THREADS)
silu_mul(float *y, const float *gate_up, int dim)
{
    const int i = blockIdx.y * THREADS + threadIdx.x;
    const float *gate = gate_up + (size_t) blockIdx.x * 2 * dim;

    if (i < dim) {
        y[(size_t) blockIdx.x * dim + i] =
            gate[i] / (1.0f + cuda_exp(-gate[i])) * gate[dim + i];
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

__global__ void __launch_bounds__(THREADS)
gather(float *y, const float *x, const int32_t *idx, int dim)
{
    const float *from = x + (size_t) idx[blockIdx.x] * dim;
    float *to = y + (size_t) blockIdx.x * dim;

    for (int i = threadIdx.x * 4; i < dim; i += THREADS * 4) {
        store4(to, i, dim, load4(from, i, dim));
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

typedef struct {
    uint32_t q; /* four of a lane */
    float d;
    int sum; /* of the block's 32 */
} quants_t;


static __device__ __forceinline__ int
quantise_one(float x, float d, int bits)
{
    const float even = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    float v = 0.0f;

    if (d > 0.0f && bits < 0x7f800000) {
        v = x / d;
        v = v < 127.0f ? v : 127.0f;
        v = v > -127.0f ? v : -127.0f;
    }

    return (int) ((v + even) - even);
}


/* A block of 32 is eight lanes', four values each.  As integers magnitudes
 * keep their order, and NaN is the largest. */
static __device__ __forceinline__ quants_t
quantise(float4 x)
{
    const float v[4] = { x.x, x.y, x.z, x.w };
    quants_t out = { 0, 0.0f, 0 };
    int bits = 0;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int b = (int) (__float_as_uint(v[i]) & 0x7fffffffu);

        bits = b > bits ? b : bits;
    }

    bits = cuda_max8(bits);
    out.d = __uint_as_float((uint32_t) bits) / 127.0f;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int q = quantise_one(v[i], out.d, bits);

        out.sum += q;
        out.q |= (uint32_t) (q & 255) << 8 * i;
    }

    out.sum = cuda_sum8_int(out.sum);

    return out;
}


/* x less its quantised self. */
static __device__ __forceinline__ float
left_over(float x, const quants_t *q, int i)
{
    return x - q->d * (float) (int8_t) (q->q >> 8 * i);
}


__global__ void __launch_bounds__(THREADS)
quantise_rows(const cuda_act_t act, const float *x, int n_in)
{
    const int i = (blockIdx.y * THREADS + threadIdx.x) * 4;
    const int lane = threadIdx.x % 8;
    const int n = act.fine ? 2 : 1;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    /* n_in is a multiple of 32, so a block's lanes leave together; they meet
     * the others of their warp in quantise(), so none may leave before. */
    if (i < n_in) {
        v = *(const float4 *) (x + (size_t) blockIdx.x * n_in + i);
    }

    for (int f = 0; f < n; f++) {
        const size_t col = (size_t) blockIdx.x * n + f;
        const quants_t q = quantise(v);

        if (i < n_in) {
            *(uint32_t *) (act.q + col * n_in + i) = q.q;

            if (lane == 0) {
                act.ds[col * act.stride + i / 32] =
                    make_float2(q.d, q.d * (float) q.sum);
            }
        }

        v = make_float4(left_over(v.x, &q, 0), left_over(v.y, &q, 1),
                        left_over(v.z, &q, 2), left_over(v.w, &q, 3));
    }
}


extern "C" void
cuda_quantise_launch(const cuda_act_t *act, const float *x, int rows, int n_in,
                     cudaStream_t stream)
{
    const cuda_act_t to = *act;
    const int blocks = n_in / 32;
    const dim3 grid((unsigned) rows,
                    (unsigned) ((blocks + QUANT_BLOCKS - 1) / QUANT_BLOCKS));

    LAUNCH(quantise_rows, grid, THREADS, 0, stream, to, x, n_in);
}
