/*
 * Quantised products of few columns: dp4a over weights that are read once,
 * straight from memory.
 *
 * Half a warp has two outputs, and each of its 16 lanes one class of their
 * blocks (cuda_linear.h): a lane reads a whole block by one or two 128-bit
 * loads, neighbours read neighbouring blocks.  The activations are in shared
 * memory, where each thread block puts them itself, normed or gated and
 * quantised, which costs less than a launch of its own; so there are no more
 * thread blocks than the device runs at once, and each has many outputs.
 */

#include "kernels/cuda/cuda_dot.cuh"
#include "kernels/cuda/cuda_input.cuh"

enum {
    THREADS = CUDA_ROW_THREADS,
    LANE_OUTS = 2,                         /* outputs of a lane */
    BLOCK_OUTS = THREADS / 16 * LANE_OUTS, /* of a thread block, at a time */
    MAX_COLS = 8,
    PLAIN_SMEM = 48 * 1024 /* what a kernel may use unasked */
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
    b.part[1] = lay_t<LAYOUT>::bits == 8 ? load_v4_once(p + 16) : b.part[0];

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
add_blocks(const cuda_dot_t *job, const cuda_act_t *act, int out, int b,
           float acc[][COLS])
{
    const cuda_segment_t *seg = &job->w;
    block_t w[LANE_OUTS];
    cuda_scale_t scale[LANE_OUTS];

#pragma unroll
    for (int o = 0; o < LANE_OUTS; o++) {
        const size_t row = (size_t) (out + o);

        w[o] = load_block<LAYOUT>(
            seg->q + (row * seg->n_blocks + b) * lay_t<LAYOUT>::quant_bytes);
        scale[o] = cuda_scale_load<LAYOUT>(
            seg->scales + (row * seg->stride + b) * lay_t<LAYOUT>::scale_bytes);
    }

#pragma unroll
    for (int c = 0; c < COLS; c++) {
        const int col = c < act->n_cols ? c : 0;
        const uint4 *x = (const uint4 *) (act->q + col * seg->n_in + b * 32);
        const uint4 low = x[0], high = x[1];
        const float2 ds = act->ds[col * act->stride + b];

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


/* The columns, in shared memory. */
static __device__ __forceinline__ cuda_act_t
stage(const cuda_dot_t *job, uint8_t *smem, float *sums)
{
    cuda_act_t act = job->act;

    act.q = (int8_t *) smem;
    act.ds = (float2 *) (smem + (size_t) act.n_cols * job->w.n_in);

    for (int r = 0; r < job->rows; r++) {
        cuda_quantise_row(&job->in, r, &act, r, sums);
        __syncthreads();
    }

    return act;
}


/* Bounds of 1: rather more registers, and so more loads on their way, than
 * more threads. */
template <int LAYOUT, int COLS>
__global__ void
__launch_bounds__(THREADS, 1) gemv(const cuda_dot_t job)
{
    DYN_SMEM(uint8_t, smem);
    __shared__ float sums[CUDA_ROW_WARPS];
    const int lane = threadIdx.x % 16;
    const cuda_act_t act = stage(&job, smem, sums);
    const int step = gridDim.x * BLOCK_OUTS;

    for (int first = blockIdx.x * BLOCK_OUTS; first < job.w.n_out;
         first += step) {
        const int out = first + threadIdx.x / 16 * LANE_OUTS;
        float acc[LANE_OUTS][COLS] = { { 0.0f } };

#pragma unroll 2
        for (int b = lane; b < job.w.n_blocks; b += CUDA_CLASSES) {
            add_blocks<LAYOUT, COLS>(&job, &act, out, b, acc);
        }

#pragma unroll
        for (int o = 0; o < LANE_OUTS; o++) {
            half_sums<COLS>(acc[o]);

            if (lane == 0 && out + o < job.w.n_out) {
                store<COLS>(&job, out + o, acc[o]);
            }
        }
    }
}


/* of the activations, a multiple of 16 */
static size_t
smem_bytes(const cuda_dot_t *job)
{
    return (size_t) job->act.n_cols
           * ((size_t) job->w.n_in + (size_t) job->act.stride * sizeof(float2));
}


extern "C" bool
cuda_gemv_fits(const cuda_dot_t *dot)
{
    /* some shared memory is the kernel's own */
    return dot->act.n_cols <= MAX_COLS
           && smem_bytes(dot) + 1024 <= (size_t) dot->max_smem;
}


#define GEMV_COLS(layout, cols)                                               \
    do {                                                                      \
        if (smem > PLAIN_SMEM) {                                              \
            cudaFuncSetAttribute((const void *) gemv<layout, cols>,           \
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, \
                                 (int) smem);                                 \
        }                                                                     \
        LAUNCH((gemv<layout, cols>), grid, THREADS, smem, stream, job);       \
    } while (0)

#define GEMV(layout)                  \
    if (job.act.n_cols == 1) {        \
        GEMV_COLS(layout, 1);         \
    } else if (job.act.n_cols == 2) { \
        GEMV_COLS(layout, 2);         \
    } else if (job.act.n_cols <= 4) { \
        GEMV_COLS(layout, 4);         \
    } else {                          \
        GEMV_COLS(layout, 8);         \
    }


extern "C" void
cuda_gemv_launch(const cuda_dot_t *dot, cudaStream_t stream)
{
    const cuda_dot_t job = *dot;
    const size_t smem = smem_bytes(&job);
    const int tiles = (job.w.n_out + BLOCK_OUTS - 1) / BLOCK_OUTS;
    const unsigned grid =
        (unsigned) (tiles < job.max_blocks ? tiles : job.max_blocks);

    CUDA_BY_LAYOUT(job.w.layout, GEMV);
}
