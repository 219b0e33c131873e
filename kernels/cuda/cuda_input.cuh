/*
 * What a quantised product reads: a row, a row normed, or a gated activation,
 * quantised on the way.  One thread block takes a row; the same code fills the
 * shared memory of a product that does it for itself and the device memory of
 * one that does not, so both have the same bits.
 */

#ifndef KERNELS_CUDA_CUDA_INPUT_CUH
#define KERNELS_CUDA_CUDA_INPUT_CUH

#include "kernels/cuda/cuda_lanes.cuh"
#include "kernels/cuda/cuda_linear.h"
#include "kernels/cuda/cuda_math.cuh"

enum {
    CUDA_ROW_THREADS = 256, /* of a block that takes a row */
    CUDA_ROW_WARPS = CUDA_ROW_THREADS / 32
};

typedef struct {
    uint32_t q; /* four of a lane */
    float d;
    int sum; /* of the block's 32 */
} cuda_quants_t;


/* Four values of a row, those behind its end 0; by one load where rows begin
 * at a multiple of 16 bytes. */
static __device__ __forceinline__ float4
cuda_load4(const float *row, int i, int dim)
{
    if (dim % 4 == 0) {
        return *(const float4 *) (row + i);
    }

    return make_float4(row[i], i + 1 < dim ? row[i + 1] : 0.0f,
                       i + 2 < dim ? row[i + 2] : 0.0f,
                       i + 3 < dim ? row[i + 3] : 0.0f);
}


/* The sum of row^2 in CUDA_ROW_WARPS parts, by all threads of the block; one of
 * fewer threads than CUDA_ROW_THREADS does the work of as many.  sums: shared;
 * it is there behind the next barrier. */
template <int BLOCK_THREADS>
static __device__ __forceinline__ void
cuda_norm_sums(const float *row, int dim, float *sums)
{
#pragma unroll
    for (int t = threadIdx.x; t < CUDA_ROW_THREADS; t += BLOCK_THREADS) {
        float sum = 0.0f;

        for (int i = t * 4; i < dim; i += CUDA_ROW_THREADS * 4) {
            const float4 v = cuda_load4(row, i, dim);

            sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }

        sum = warp_sum(sum);

        if (threadIdx.x % 32 == 0) {
            sums[t / 32] = sum;
        }
    }
}


/* 1 / sqrt(mean(row^2) + eps) of these sums. */
static __device__ __forceinline__ float
cuda_norm_of(const float *sums, int dim, float eps)
{
    float sum = sums[0];

#pragma unroll
    for (int i = 1; i < CUDA_ROW_WARPS; i++) {
        sum += sums[i];
    }

    return 1.0f / sqrtf(sum / (float) dim + eps);
}


/* The same by all threads of the block, for all of them.  sums: shared,
 * [CUDA_ROW_WARPS]; free again behind the next barrier. */
static __device__ __forceinline__ float
cuda_norm_factor(const float *row, int dim, float eps, float *sums)
{
    cuda_norm_sums<CUDA_ROW_THREADS>(row, dim, sums);
    __syncthreads();

    return cuda_norm_of(sums, dim, eps);
}


static __device__ __forceinline__ float4
cuda_norm4(float4 v, float4 w, float factor)
{
    return make_float4(v.x * factor * w.x, v.y * factor * w.y,
                       v.z * factor * w.z, v.w * factor * w.w);
}


static __device__ __forceinline__ float
cuda_gated(float gate, float up)
{
    return gate / (1.0f + cuda_exp(-gate)) * up;
}


/* Inputs i … i + 3 of a row. */
static __device__ __forceinline__ float4
cuda_input4(const cuda_input_t *in, int row, int i, float factor)
{
    if (in->kind == OP_GATED) {
        const float *gate = in->x + (size_t) row * 2 * in->n_in;
        const float4 g = *(const float4 *) (gate + i);
        const float4 u = *(const float4 *) (gate + in->n_in + i);

        return make_float4(cuda_gated(g.x, u.x), cuda_gated(g.y, u.y),
                           cuda_gated(g.z, u.z), cuda_gated(g.w, u.w));
    }

    const float4 v = *(const float4 *) (in->x + (size_t) row * in->n_in + i);

    return in->kind == OP_NORMED
               ? cuda_norm4(v, *(const float4 *) (in->norm + i), factor)
               : v;
}


static __device__ __forceinline__ int
cuda_quantise_one(float x, float d, int bits)
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
static __device__ __forceinline__ cuda_quants_t
cuda_quantise4(float4 x)
{
    const float v[4] = { x.x, x.y, x.z, x.w };
    cuda_quants_t out = { 0, 0.0f, 0 };
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
        const int q = cuda_quantise_one(v[i], out.d, bits);

        out.sum += q;
        out.q |= (uint32_t) (q & 255) << 8 * i;
    }

    out.sum = cuda_sum8_int(out.sum);

    return out;
}


/* x less its quantised self. */
static __device__ __forceinline__ float
cuda_left_over(float x, const cuda_quants_t *q, int i)
{
    return x - q->d * (float) (int8_t) (q->q >> 8 * i);
}


/* The largest scale of a row's blocks, by all threads of the block, for all of
 * them.  sums as above. */
static __device__ __forceinline__ float
cuda_largest_scale(const cuda_input_t *in, int row, float factor, float *sums)
{
    float most = 0.0f;

    for (int i = threadIdx.x * 4; i < in->n_in; i += CUDA_ROW_THREADS * 4) {
        const float4 v = cuda_input4(in, row, i, factor);

        most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)),
                                 fmaxf(fabsf(v.z), fabsf(v.w))));
    }

    most = warp_max(most);
    __syncthreads();

    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = most;
    }

    __syncthreads();
    most = sums[0];

#pragma unroll
    for (int i = 1; i < CUDA_ROW_WARPS; i++) {
        most = fmaxf(most, sums[i]);
    }

    return most / 127.0f;
}


/* One row by all threads of the block, to act's column of that number, or its
 * two columns.  n_in is a multiple of 32; lanes behind its end take part in
 * what a warp does together. */
static __device__ __forceinline__ void
cuda_quantise_row(const cuda_input_t *in, int row, const cuda_act_t *act,
                  int to, float *sums)
{
    const int n = act->fine ? 2 : 1;
    const float factor = in->kind == OP_NORMED
                             ? cuda_norm_factor(in->x + (size_t) row * in->n_in,
                                                in->n_in, in->eps, sums)
                             : 1.0f;
    const float coarse =
        act->fine ? OP_FINE_SCALE * cuda_largest_scale(in, row, factor, sums)
                  : 0.0f;

    for (int first = 0; first < in->n_in; first += CUDA_ROW_THREADS * 4) {
        const int i = first + threadIdx.x * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (i < in->n_in) {
            v = cuda_input4(in, row, i, factor);
        }

        for (int f = 0; f < n; f++) {
            const size_t col = (size_t) to * n + f;
            const cuda_quants_t q = cuda_quantise4(v);

            if (i < in->n_in) {
                *(uint32_t *) (act->q + col * in->n_in + i) = q.q;

                if (threadIdx.x % 8 == 0) {
                    act->ds[col * act->stride + i / 32] =
                        make_float2(q.d, q.d * (float) q.sum);
                }
            }

            v = q.d < coarse ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                             : make_float4(cuda_left_over(v.x, &q, 0),
                                           cuda_left_over(v.y, &q, 1),
                                           cuda_left_over(v.z, &q, 2),
                                           cuda_left_over(v.w, &q, 3));
        }
    }
}

#endif /* KERNELS_CUDA_CUDA_INPUT_CUH */
