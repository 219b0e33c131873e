/*
 * Products of F32 weights, and of F16 and BF16 ones where cuda_dense.cu cannot
 * do them, in f32 fused multiply-adds.
 *
 * Half a warp has one output, and each lane every 16th run of eight inputs
 * (cuda_linear.h): the runs of a row are read by 128-bit loads side by side.
 * Up to eight rows of x share what is read; more rows read it again.
 */

#include "kernels/cuda/cuda_linear.h"

enum {
    THREADS = 128,
    BLOCK_OUTS = THREADS / 16,
    MAX_ROWS = 8 /* of x, in one pass */
};


/* Eight values of a row of w. */
template <int LAYOUT>
static __device__ __forceinline__ void
load_weights(const uint8_t *p, float *w)
{
    if (LAYOUT == OP_LAY_F32) {
        const float4 a = *(const float4 *) p;
        const float4 b = *(const float4 *) (p + 16);

        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
        w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
        return;
    }

    const uint4 v = *(const uint4 *) p;
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (LAYOUT == OP_LAY_F16) {
            w[2 * i] = f16_to_f32((uint16_t) words[i]);
            w[2 * i + 1] = f16_to_f32((uint16_t) (words[i] >> 16));
        } else {
            w[2 * i] = __uint_as_float(words[i] << 16);
            w[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}


/* Inputs i … i + 7 of a row of x; what lies behind its end is 0, as in w. */
static __device__ __forceinline__ void
load_inputs(const float *x, int i, int n_in, float *to)
{
    if (n_in % 4 == 0 && i + CUDA_CHUNK <= n_in) {
        const float4 a = *(const float4 *) (x + i);
        const float4 b = *(const float4 *) (x + i + 4);

        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
        return;
    }

#pragma unroll
    for (int k = 0; k < CUDA_CHUNK; k++) {
        to[k] = i + k < n_in ? x[i + k] : 0.0f;
    }
}


template <int LAYOUT, int ROWS>
__global__ void
__launch_bounds__(THREADS) dot_float(const cuda_dot_t job)
{
    const int lane = threadIdx.x % 16;
    const int out = blockIdx.x * BLOCK_OUTS + threadIdx.x / 16;
    const int first = blockIdx.y * ROWS;
    const int bytes = LAYOUT == OP_LAY_F32 ? 4 : 2;
    const int n_in = job.w.n_in;
    const uint8_t *row = job.w.q + (size_t) out * job.w.stride * bytes;
    float acc[ROWS];

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        acc[r] = 0.0f;
    }

    for (int i = lane * CUDA_CHUNK; i < n_in; i += CUDA_CLASSES * CUDA_CHUNK) {
        const int n = n_in - i < CUDA_CHUNK ? n_in - i : CUDA_CHUNK;
        float w[CUDA_CHUNK], x[CUDA_CHUNK];

        load_weights<LAYOUT>(row + (size_t) i * bytes, w);

#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int from = first + r < job.rows ? first + r : job.rows - 1;

            load_inputs(job.in.x + (size_t) from * n_in, i, n_in, x);

#pragma unroll
            for (int k = 0; k < CUDA_CHUNK; k++) {
                acc[r] = k < n ? fmaf(w[k], x[k], acc[r]) : acc[r];
            }
        }
    }

    half_sums<ROWS>(acc);

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (lane == 0 && out < job.w.n_out && first + r < job.rows) {
            float *y = job.y + (size_t) (first + r) * job.ldy + out;

            *y = job.add ? *y + acc[r] : acc[r];
        }
    }
}


#define FLOAT(layout)                                                         \
    if (job.rows == 1) {                                                      \
        LAUNCH((dot_float<layout, 1>), grid, THREADS, 0, stream, job);        \
    } else {                                                                  \
        LAUNCH((dot_float<layout, MAX_ROWS>), grid, THREADS, 0, stream, job); \
    }


extern "C" void
cuda_float_launch(const cuda_dot_t *dot, cudaStream_t stream)
{
    const cuda_dot_t job = *dot;
    const int passes = job.rows == 1 ? 1 : (job.rows + MAX_ROWS - 1) / MAX_ROWS;
    const dim3 grid((unsigned) ((job.w.n_out + BLOCK_OUTS - 1) / BLOCK_OUTS),
                    (unsigned) passes);

    if (job.w.layout == OP_LAY_F32) {
        FLOAT(OP_LAY_F32);
    } else if (job.w.layout == OP_LAY_F16) {
        FLOAT(OP_LAY_F16);
    } else {
        FLOAT(OP_LAY_BF16);
    }
}
