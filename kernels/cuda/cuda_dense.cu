/*
 * Products of F16 and BF16 weights on tensor cores, for any number of rows.
 *
 * Weights of both types are TF32 numbers as they are.  An input is split into
 * two, its nearest TF32 number and what that left over, so that 22 of its 24
 * bits count; sums are f32.  The weights are the tall side of mma m16n8k8.
 *
 * Order: blocks of 16 inputs are dealt to four classes, block b to class
 * b % 4, and each class is one warp's: it adds its blocks ascending, of a block
 * inputs 0, 1, 4, 5 … 13 first, then the others, of both the nearest numbers
 * before what they left over; the classes are added as (0 + 2) + (1 + 3).
 * Tiles are larger where there are more rows, but no output's sum depends on
 * the tile: the number of rows may choose.  How a tensor core adds up eight
 * products is its own business, and the same for all of them.
 *
 * Tiles come by asynchronous copies, one run of inputs ahead.  Where there are
 * few rows, norms and gates are done on the way to the tensor cores: each lane
 * does those of its own inputs, and there is a launch less.
 */

#include "kernels/cuda/cuda_input.cuh"
#include "kernels/cuda/cuda_linear.h"
#include "kernels/cuda/prim_mma.cuh"

enum {
    BLOCK = 16,            /* inputs */
    CLASSES = 4,           /* warps along the inputs */
    PLAIN_SMEM = 48 * 1024 /* what a kernel may use unasked */
};

/* A tile by its size; 0, 1, 2: of up to 8, up to 32, or more rows of x, 8, 32
 * and 64 of them, and 32, 32 and 64 outputs; and by what it reads (OP_PLAIN,
 * …).  What pads a row in shared memory avoids bank conflicts: four rows of
 * weights, two of x in a phase. */
template <int SIZE, int KIND> struct tile_t {
    static constexpr int out_tiles = SIZE == 2 ? 4 : 2; /* of 16 outputs */
    static constexpr int col_tiles =
        SIZE == 0 ? 1 : 4; /* of 8 rows, a warp's */
    static constexpr int col_warps = SIZE == 2 ? 2 : 1; /* side by side */
    static constexpr int run = SIZE == 0 ? 256 : SIZE == 1 ? 128 : 64;

    static constexpr int outs = 16 * out_tiles;
    static constexpr int cols = 8 * col_tiles * col_warps;
    static constexpr int threads = 32 * CLASSES * col_warps;
    static constexpr int w_row = run * 2 + 32;
    static constexpr int x_row = run * 4 + 64;
    static constexpr int x_at = outs * w_row;
    static constexpr int up_at = x_at + cols * x_row; /* behind the gates */
    static constexpr int norm_at =
        KIND == OP_GATED ? up_at + cols * x_row : up_at;
    static constexpr int bytes = norm_at + (KIND == OP_NORMED ? run * 4 : 0);

    /* what the sums need of the same memory at the end */
    static constexpr int sum_bytes = CLASSES * outs * cols * 4;
    static constexpr int all = 2 * bytes > sum_bytes ? 2 * bytes : sum_bytes;
};


/* Inputs first … first + run − 1 of the tile; what lies behind the last one is
 * 0.  Outputs behind the last one are read as the last one. */
template <int SIZE, int KIND>
static __device__ __forceinline__ void
fetch(const cuda_dot_t *job, uint8_t *stage, int first)
{
    typedef tile_t<SIZE, KIND> tile;
    const int n_in = job->w.n_in;
    const size_t row = (size_t) n_in * (KIND == OP_GATED ? 2 : 1);
    const int last = job->w.n_out - 1 - (int) blockIdx.y * tile::outs;
    const int col = (int) blockIdx.x * tile::cols;
    const int left = job->rows - col;
    const int n_cols = left < tile::cols ? left : tile::cols;
    const uint16_t *w = (const uint16_t *) job->w.q
                        + (size_t) blockIdx.y * tile::outs * job->w.stride;

    for (int i = threadIdx.x; i < tile::outs * tile::run / 8;
         i += tile::threads) {
        const int out = i / (tile::run / 8), at = i % (tile::run / 8) * 8;
        const int from = out < last ? out : last;

        cp_async16_if(stage + out * tile::w_row + at * 2,
                      w + (size_t) from * job->w.stride + first + at,
                      first + at < n_in);
    }

    for (int i = threadIdx.x; i < n_cols * tile::run / 4; i += tile::threads) {
        const int c = i / (tile::run / 4), at = i % (tile::run / 4) * 4;
        const bool valid = first + at < n_in;
        const float *x = job->in.x + (size_t) (col + c) * row + first + at;
        uint8_t *to = stage + c * tile::x_row + at * 4;

        cp_async16_if(to + tile::x_at, x, valid);

        if (KIND == OP_GATED) {
            cp_async16_if(to + tile::up_at, x + n_in, valid);
        }
    }

    if (KIND == OP_NORMED) {
        for (int i = threadIdx.x; i < tile::run / 4; i += tile::threads) {
            cp_async16_if(stage + tile::norm_at + i * 16,
                          job->in.norm + first + i * 4, first + i * 4 < n_in);
        }
    }

    cp_async_commit();
}


/* Two weights of a word as TF32. */
template <int LAYOUT>
static __device__ __forceinline__ void
widen(uint32_t word, uint32_t *to)
{
    if (LAYOUT == OP_LAY_F16) {
        to[0] = __float_as_uint(f16_to_f32(low_half(word)));
        to[1] = __float_as_uint(f16_to_f32(high_half(word)));
    } else {
        to[0] = word << 16;
        to[1] = word & 0xffff0000u;
    }
}


/* Inputs 4 t … 4 t + 3 of a block, of rows g and g + 8 of an mma tile: a of
 * the block's two halves. */
template <int LAYOUT>
static __device__ __forceinline__ void
load_weights(const uint8_t *p, int row_bytes, uint32_t a[2][4])
{
    const uint2 upper = *(const uint2 *) p;
    const uint2 lower = *(const uint2 *) (p + 8 * row_bytes);
    uint32_t u[4], l[4];

    widen<LAYOUT>(upper.x, u);
    widen<LAYOUT>(upper.y, u + 2);
    widen<LAYOUT>(lower.x, l);
    widen<LAYOUT>(lower.y, l + 2);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        a[half][0] = u[2 * half];
        a[half][1] = l[2 * half];
        a[half][2] = u[2 * half + 1];
        a[half][3] = l[2 * half + 1];
    }
}


/* The same inputs of one row of x, at p in a stage. */
template <int SIZE, int KIND>
static __device__ __forceinline__ float4
read_inputs(const uint8_t *p, const uint8_t *norm, float factor)
{
    typedef tile_t<SIZE, KIND> tile;
    const float4 v = *(const float4 *) p;

    if (KIND == OP_NORMED) {
        return cuda_norm4(v, *(const float4 *) norm, factor);
    }

    if (KIND == OP_GATED) {
        const float4 u = *(const float4 *) (p + (tile::up_at - tile::x_at));

        return make_float4(cuda_gated(v.x, u.x), cuda_gated(v.y, u.y),
                           cuda_gated(v.z, u.z), cuda_gated(v.w, u.w));
    }

    return v;
}


/* Four inputs as b of the two halves, the nearest numbers and the rest. */
static __device__ __forceinline__ void
split_inputs(float4 v, uint32_t b[2][2][2])
{
    const float x[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t near = f32_to_tf32(x[i]);

        b[i / 2][0][i % 2] = near;
        b[i / 2][1][i % 2] = f32_to_tf32(x[i] - __uint_as_float(near));
    }
}


/* Block b of a stage: all of the warp's tiles onto its sums.  x_at: where in a
 * stage its rows' first four inputs are; factor: of their norm. */
template <int LAYOUT, int SIZE, int KIND>
static __device__ __forceinline__ void
add_block(
    const uint8_t *stage, int b, const int *x_at, float factor,
    float acc[tile_t<SIZE, KIND>::out_tiles][tile_t<SIZE, KIND>::col_tiles][4])
{
    typedef tile_t<SIZE, KIND> tile;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t *w = stage + g * tile::w_row + b * BLOCK * 2 + t * 8;
    uint32_t a[tile::out_tiles][2][4];

#pragma unroll
    for (int o = 0; o < tile::out_tiles; o++) {
        load_weights<LAYOUT>(w + o * 16 * tile::w_row, tile::w_row, a[o]);
    }

#pragma unroll
    for (int c = 0; c < tile::col_tiles; c++) {
        uint32_t x[2][2][2];

        split_inputs(read_inputs<SIZE, KIND>(stage + x_at[c] + b * BLOCK * 4,
                                             stage + tile::norm_at
                                                 + b * BLOCK * 4 + t * 16,
                                             factor),
                     x);

#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int o = 0; o < tile::out_tiles; o++) {
                mma_tf32_1688(acc[o][c], a[o][i / 2], x[i / 2][i % 2]);
            }
        }
    }
}


/* The sums of the classes → y. */
template <int SIZE, int KIND>
static __device__ __forceinline__ void
finish(
    const cuda_dot_t *job, float *sums,
    float acc[tile_t<SIZE, KIND>::out_tiles][tile_t<SIZE, KIND>::col_tiles][4])
{
    typedef tile_t<SIZE, KIND> tile;
    const int n = tile::outs * tile::cols;
    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float *mine = sums + warp % CLASSES * n
                  + (warp / CLASSES * tile::col_tiles * 8 + 2 * t) * tile::outs
                  + g;

#pragma unroll
    for (int o = 0; o < tile::out_tiles; o++) {
#pragma unroll
        for (int c = 0; c < tile::col_tiles; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mine[(c * 8 + i % 2) * tile::outs + o * 16 + i / 2 * 8] =
                    acc[o][c][i];
            }
        }
    }

    __syncthreads();

    for (int i = threadIdx.x; i < n; i += tile::threads) {
        const int row = (int) blockIdx.x * tile::cols + i / tile::outs;
        const int out = (int) blockIdx.y * tile::outs + i % tile::outs;

        if (row < job->rows && out < job->w.n_out) {
            const float *s = sums + i;
            const float value = (s[0] + s[2 * n]) + (s[n] + s[3 * n]);
            float *y = job->y + (size_t) row * job->ldy + out;

            *y = job->add ? *y + value : value;
        }
    }
}


/* Of the row that this lane reads; one tile has all rows then. */
template <int SIZE, int KIND>
static __device__ __forceinline__ float
norm_factor(const cuda_dot_t *job)
{
    typedef tile_t<SIZE, KIND> tile;
    __shared__ float sums[tile::cols][CUDA_ROW_WARPS];
    const int n_in = job->w.n_in;
    const int row = threadIdx.x % 32 / 4;

    for (int r = 0; r < job->rows; r++) {
        cuda_norm_sums<tile::threads>(job->in.x + (size_t) r * n_in, n_in,
                                      sums[r]);
    }

    __syncthreads();

    return cuda_norm_of(sums[row < job->rows ? row : job->rows - 1], n_in,
                        job->in.eps);
}


template <int LAYOUT, int SIZE, int KIND>
__global__ void
__launch_bounds__(tile_t<SIZE, KIND>::threads) dense(const cuda_dot_t job)
{
    typedef tile_t<SIZE, KIND> tile;
    DYN_SMEM(uint8_t, smem);
    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int last = job.rows - 1 - (int) blockIdx.x * tile::cols;
    const int runs = (job.w.n_in + tile::run - 1) / tile::run;
    int x_at[tile::col_tiles];
    float acc[tile_t<SIZE, KIND>::out_tiles][tile_t<SIZE, KIND>::col_tiles]
             [4] = { { { 0.0f } } };

    /* columns behind the last one were not fetched */
#pragma unroll
    for (int c = 0; c < tile::col_tiles; c++) {
        const int col = (warp / CLASSES * tile::col_tiles + c) * 8 + g;

        x_at[c] = tile::x_at + (col < last ? col : last) * tile::x_row + t * 16;
    }

    fetch<SIZE, KIND>(&job, smem, 0);

    const float factor =
        KIND == OP_NORMED ? norm_factor<SIZE, KIND>(&job) : 1.0f;

    for (int run = 0; run < runs; run++) {
        const uint8_t *stage = smem + run % 2 * tile::bytes;

        if (run + 1 < runs) {
            fetch<SIZE, KIND>(&job, smem + (run + 1) % 2 * tile::bytes,
                              (run + 1) * tile::run);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }

        __syncthreads();

        for (int b = warp % CLASSES; b < tile::run / BLOCK; b += CLASSES) {
            add_block<LAYOUT, SIZE, KIND>(stage, b, x_at, factor, acc);
        }

        __syncthreads();
    }

    finish<SIZE, KIND>(&job, (float *) smem, acc);
}


bool
cuda_dense_fits(const cuda_dot_t *dot)
{
    return dot->tensor_floats && dot->w.layout != OP_LAY_F32
           && dot->w.n_in % 8 == 0
           && tile_t<0, OP_GATED>::all + 1024 <= dot->max_smem;
}


bool
cuda_dense_reads(const cuda_dot_t *dot)
{
    return dot->rows <= tile_t<0, OP_PLAIN>::cols;
}


#define DENSE_TILE(layout, size, kind)                                        \
    do {                                                                      \
        typedef tile_t<size, kind> tile;                                      \
        const dim3 grid(                                                      \
            (unsigned) ((job.rows + tile::cols - 1) / tile::cols),            \
            (unsigned) ((job.w.n_out + tile::outs - 1) / tile::outs));        \
                                                                              \
        if (tile::all > PLAIN_SMEM) {                                         \
            cudaFuncSetAttribute((const void *) dense<layout, size, kind>,    \
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, \
                                 tile::all);                                  \
        }                                                                     \
        LAUNCH((dense<layout, size, kind>), grid, tile::threads, tile::all,   \
               stream, job);                                                  \
    } while (0)

#define DENSE(layout)                     \
    if (job.in.kind == OP_NORMED) {       \
        DENSE_TILE(layout, 0, OP_NORMED); \
    } else if (job.in.kind == OP_GATED) { \
        DENSE_TILE(layout, 0, OP_GATED);  \
    } else if (job.rows <= 8) {           \
        DENSE_TILE(layout, 0, OP_PLAIN);  \
    } else if (job.rows <= 32) {          \
        DENSE_TILE(layout, 1, OP_PLAIN);  \
    } else {                              \
        DENSE_TILE(layout, 2, OP_PLAIN);  \
    }


extern "C" void
cuda_dense_launch(const cuda_dot_t *dot, cudaStream_t stream)
{
    const cuda_dot_t job = *dot;

    if (job.w.layout == OP_LAY_F16) {
        DENSE(OP_LAY_F16);
    } else {
        DENSE(OP_LAY_BF16);
    }
}
