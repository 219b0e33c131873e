/*
 * Quantised products of up to four columns: dp4a over weights that are read
 * once, straight from memory.
 *
 * Half a warp has two outputs, and each of its 16 lanes one class of their
 * blocks (cuda_linear.h): a lane reads a whole block by one or two 128-bit
 * loads, neighbours read neighbouring blocks.  Two outputs a lane share the
 * activations, which come from the first level cache.
 */

#include "kernels/cuda/cuda_dot.cuh"

enum {
    THREADS = 128,
    LANE_OUTS = 2,                       /* outputs of a lane */
    BLOCK_OUTS = THREADS / 16 * LANE_OUTS /* of a thread block */
};

/* One block of a row: eight words of four quants, or four of eight. */
typedef struct {
    uint4 part[2];
} block_t;


template <int LAYOUT>
static __device__ __forceinline__ block_t
load_block(const uint8_t *p)
{
    block_t b;

    b.part[0] = load_v4_once(p);
    b.part[1] =
        lay_t<LAYOUT>::bits == 8 ? load_v4_once(p + 16) : b.part[0];

    return b;
}


/* The first or the second 16 inputs. */
template <int LAYOUT>
static __device__ __forceinline__ int
dot_half(const block_t *w, uint4 x, int half, int acc)
{
    uint4 q = w->part[half];

    if (lay_t<LAYOUT>::bits == 4) {
        q.x = half ? cuda_high<LAYOUT>(q.x) : cuda_low<LAYOUT>(q.x);
        q.y = half ? cuda_high<LAYOUT>(q.y) : cuda_low<LAYOUT>(q.y);
        q.z = half ? cuda_high<LAYOUT>(q.z) : cuda_low<LAYOUT>(q.z);
        q.w = half ? cuda_high<LAYOUT>(q.w) : cuda_low<LAYOUT>(q.w);
    }

    acc = dp4a((int) q.x, (int) x.x, acc);
    acc = dp4a((int) q.y, (int) x.y, acc);
    acc = dp4a((int) q.z, (int) x.z, acc);

    return dp4a((int) q.w, (int) x.w, acc);
}


/* Block b of two outputs times all columns. */
template <int LAYOUT, int COLS>
static __device__ __forceinline__ void
add_blocks(const cuda_dot_t *job, int out, int b, float acc[][COLS])
{
    const cuda_segment_t *seg = &job->w;
    block_t w[LANE_OUTS];
    cuda_scale_t scale[LANE_OUTS];

#pragma unroll
    for (int o = 0; o < LANE_OUTS; o++) {
        const size_t row = (size_t) (out + o);

        w[o] = load_block<LAYOUT>(seg->q
                                  + (row * seg->n_blocks + b)
                                        * lay_t<LAYOUT>::quant_bytes);
        scale[o] = cuda_scale_load<LAYOUT>(
            seg->scales
            + (row * seg->stride + b) * lay_t<LAYOUT>::scale_bytes);
    }

#pragma unroll
    for (int c = 0; c < COLS; c++) {
        const int col = c < job->act.n_cols ? c : 0;
        const uint4 *x = (const uint4 *) (job->act.q + (size_t) col * seg->n_in
                                          + (size_t) b * 32);
        const uint4 low = x[0], high = x[1];
        const float2 ds = job->act.ds[(size_t) col * job->act.stride + b];

#pragma unroll
        for (int o = 0; o < LANE_OUTS; o++) {
            int dot[2];

            dot[0] = dot_half<LAYOUT>(&w[o], low, 0, 0);

            if (lay_t<LAYOUT>::halves == 2) {
                dot[1] = dot_half<LAYOUT>(&w[o], high, 1, 0);
            } else {
                dot[0] = dot_half<LAYOUT>(&w[o], high, 1, dot[0]);
            }

            acc[o][c] = cuda_add_block<LAYOUT>(acc[o][c], dot, scale[o], ds);
        }
    }
}


template <int COLS>
static __device__ __forceinline__ void
store(const cuda_dot_t *job, int out, const float *sum)
{
    const int step = job->act.fine ? 2 : 1;

#pragma unroll
    for (int c = 0; c < COLS; c++) {
        if (c % step == 0 && c < job->act.n_cols) {
            float *y = job->y + (size_t) (c / step) * job->ldy + out;
            float value = job->add ? *y + sum[c] : sum[c];

            if (step == 2) {
                value += sum[(c + 1) % COLS];
            }

            *y = value;
        }
    }
}


template <int LAYOUT, int COLS>
__global__ void __launch_bounds__(THREADS)
gemv(const cuda_dot_t job)
{
    const int lane = threadIdx.x % 32;
    const int out = blockIdx.x * BLOCK_OUTS + threadIdx.x / 16 * LANE_OUTS;
    float acc[LANE_OUTS][COLS];

#pragma unroll
    for (int o = 0; o < LANE_OUTS; o++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            acc[o][c] = 0.0f;
        }
    }

#pragma unroll 2
    for (int b = lane % 16; b < job.w.n_blocks; b += CUDA_CLASSES) {
        add_blocks<LAYOUT, COLS>(&job, out, b, acc);
    }

    half_sums<LANE_OUTS * COLS>(&acc[0][0]);

#pragma unroll
    for (int o = 0; o < LANE_OUTS; o++) {
        if (lane % 16 == 0 && out + o < job.w.n_out) {
            store<COLS>(&job, out + o, acc[o]);
        }
    }
}


#define GEMV(layout)                                                           \
    if (job.act.n_cols == 1) {                                                \
        LAUNCH((gemv<layout, 1>), grid, THREADS, 0, stream, job);             \
    } else if (job.act.n_cols == 2) {                                         \
        LAUNCH((gemv<layout, 2>), grid, THREADS, 0, stream, job);             \
    } else {                                                                   \
        LAUNCH((gemv<layout, 4>), grid, THREADS, 0, stream, job);             \
    }


extern "C" void
cuda_gemv_launch(const cuda_dot_t *dot, cudaStream_t stream)
{
    const cuda_dot_t job = *dot;
    const unsigned grid =
        (unsigned) ((job.w.n_out + BLOCK_OUTS - 1) / BLOCK_OUTS);

    CUDA_BY_LAYOUT(job.w.layout, GEMV);
}
