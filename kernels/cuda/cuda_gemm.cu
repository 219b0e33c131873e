/*
 * Quantised products of any number of columns: int8 tensor cores over tiles of
 * 32 outputs and 8 to 32 columns.
 *
 * The weights are the tall side of mma m16n8k32, and one mma is one block of
 * 32 inputs, whose exact integer dots are scaled and added in f32.  A thread
 * block walks over the inputs in runs of 16 blocks, one of each class
 * (cuda_linear.h): warp w has classes w and w + 8 of the whole tile.  So a sum
 * stays in the registers of one thread until the tree at the end, and no
 * output depends on what else is in the tile.  Tiles come by asynchronous
 * copies, one run ahead.
 */

#include "kernels/cuda/cuda_dot.cuh"
#include "kernels/cuda/prim_mma.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    OUT_TILES = CUDA_OUTS / 16, /* mma tiles along the outputs */
    PAD = 16,                   /* bytes behind a row: no bank conflicts */
    X_ROW = CUDA_CLASSES * 32 + PAD,
    DS_ROW = CUDA_CLASSES * 8 + PAD,
    PLAIN_SMEM = 48 * 1024 /* what a kernel may use unasked */
};

/* Where the parts of a stage lie in shared memory.  COL_TILES: mma tiles along
 * the columns. */
template <int LAYOUT, int COL_TILES> struct stage_t {
    static constexpr int cols = 8 * COL_TILES;
    static constexpr int q_row =
        CUDA_CLASSES * lay_t<LAYOUT>::quant_bytes + PAD;
    static constexpr int scale_row =
        CUDA_CLASSES * lay_t<LAYOUT>::scale_bytes + PAD;
    static constexpr int scales_at = CUDA_OUTS * q_row;
    static constexpr int x_at = scales_at + CUDA_OUTS * scale_row;
    static constexpr int ds_at = x_at + cols * X_ROW;
    static constexpr int bytes = ds_at + cols * DS_ROW;

    /* what the tree at the end needs of the same memory */
    static constexpr int tree_bytes = WARPS * CUDA_OUTS * cols * 4;
    static constexpr int all = 2 * bytes > tree_bytes ? 2 * bytes : tree_bytes;
};


/* Rows of a tile, `pieces` times 16 bytes each, by all threads.  Pieces from
 * `valid` on do not exist. */
static __device__ __forceinline__ void
copy_rows(uint8_t *to, int to_row, const uint8_t *from, size_t from_row,
          int4 shape)
{
    const int rows = shape.x, pieces = shape.y, valid = shape.z;

    for (int i = threadIdx.x; i < rows * pieces; i += THREADS) {
        const int row = i / pieces, piece = i % pieces;

        if (piece < valid) {
            cp_async16(to + row * to_row + piece * 16,
                       from + (size_t) row * from_row + piece * 16);
        }
    }
}


/* Columns behind the last one are read as the last one. */
static __device__ __forceinline__ void
copy_cols(uint8_t *to, int to_row, const uint8_t *from, size_t from_row,
          int4 shape)
{
    const int cols = shape.x, pieces = shape.y, valid = shape.z;
    const int last = shape.w;

    for (int i = threadIdx.x; i < cols * pieces; i += THREADS) {
        const int col = i / pieces, piece = i % pieces;

        if (piece < valid) {
            cp_async16(to + col * to_row + piece * 16,
                       from + (size_t) (col < last ? col : last) * from_row
                           + piece * 16);
        }
    }
}


/* Blocks first … first + 15 of the tile's outputs and columns. */
template <int LAYOUT, int COL_TILES>
static __device__ __forceinline__ void
fetch(const cuda_dot_t *job, uint8_t *stage, int first)
{
    typedef stage_t<LAYOUT, COL_TILES> at_t;
    typedef lay_t<LAYOUT> lay;
    const cuda_segment_t *seg = &job->w;
    const size_t out = (size_t) blockIdx.y * CUDA_OUTS;
    const size_t col = (size_t) blockIdx.x * at_t::cols;
    const int left = seg->n_blocks - first;
    const int n = left < CUDA_CLASSES ? left : CUDA_CLASSES;
    const int last = job->act.n_cols - 1 - (int) col;
    const size_t q_row = (size_t) seg->n_blocks * lay::quant_bytes;
    const size_t scale_row = (size_t) seg->stride * lay::scale_bytes;

    copy_rows(
        stage, at_t::q_row,
        seg->q + out * q_row + (size_t) first * lay::quant_bytes, q_row,
        make_int4(CUDA_OUTS, lay::quant_bytes, n * lay::quant_bytes / 16, 0));
    copy_rows(stage + at_t::scales_at, at_t::scale_row,
              seg->scales + out * scale_row + (size_t) first * lay::scale_bytes,
              scale_row,
              make_int4(CUDA_OUTS, lay::scale_bytes, lay::scale_bytes, 0));
    copy_cols(stage + at_t::x_at, X_ROW,
              (const uint8_t *) job->act.q + col * seg->n_in
                  + (size_t) first * 32,
              (size_t) seg->n_in, make_int4(at_t::cols, 32, 2 * n, last));
    copy_cols(stage + at_t::ds_at, DS_ROW,
              (const uint8_t *) (job->act.ds + col * job->act.stride + first),
              (size_t) job->act.stride * sizeof(float2),
              make_int4(at_t::cols, 8, 8, last));
    cp_async_commit();
}


static __device__ __forceinline__ uint32_t
word_at(const uint8_t *p)
{
    return *(const uint32_t *) p;
}


/* The weights of one mma tile: rows g and g + 8 of 16, inputs 4 t … 4 t + 3
 * and 16 + 4 t … of block b. */
template <int LAYOUT>
static __device__ __forceinline__ void
load_weights(const uint8_t *row, int row_bytes, int b, uint32_t *a)
{
    const int t = threadIdx.x % 4;
    const uint8_t *p = row + b * lay_t<LAYOUT>::quant_bytes + 4 * t;

    if (lay_t<LAYOUT>::bits == 4) {
        const uint32_t upper = word_at(p), lower = word_at(p + 8 * row_bytes);

        a[0] = cuda_low<LAYOUT>(upper);
        a[1] = cuda_low<LAYOUT>(lower);
        a[2] = cuda_high<LAYOUT>(upper);
        a[3] = cuda_high<LAYOUT>(lower);

    } else {
        a[0] = word_at(p);
        a[1] = word_at(p + 8 * row_bytes);
        a[2] = word_at(p + 16);
        a[3] = word_at(p + 8 * row_bytes + 16);
    }
}


/* One block of one mma tile: the four dots of a thread onto its sums. */
template <int LAYOUT>
static __device__ __forceinline__ void
add_tile(float *acc, const uint32_t *a, const uint32_t *x,
         const cuda_scale_t *scale, const float2 *ds)
{
    int first[4] = { 0, 0, 0, 0 };
    int second[4] = { 0, 0, 0, 0 };

    if (lay_t<LAYOUT>::halves == 2) {
        const uint32_t low[4] = { a[0], a[1], 0, 0 };
        const uint32_t high[4] = { 0, 0, a[2], a[3] };

        mma_s8_16832(first, low, x);
        mma_s8_16832(second, high, x);
    } else {
        mma_s8_16832(first, a, x);
    }

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int dot[2] = { first[i], second[i] };

        acc[i] = cuda_add_block<LAYOUT>(acc[i], dot, scale[i / 2], ds[i % 2]);
    }
}


/* Block b of a stage times all of the tile's columns. */
template <int LAYOUT, int COL_TILES>
static __device__ __forceinline__ void
add_block(const uint8_t *stage, int b, float acc[][COL_TILES][4])
{
    typedef stage_t<LAYOUT, COL_TILES> at_t;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t a[OUT_TILES][4];
    cuda_scale_t scale[OUT_TILES][2];

#pragma unroll
    for (int o = 0; o < OUT_TILES; o++) {
        load_weights<LAYOUT>(stage + (o * 16 + g) * at_t::q_row, at_t::q_row, b,
                             a[o]);

#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[o][i] = cuda_scale_load<LAYOUT>(
                stage + at_t::scales_at + (o * 16 + i * 8 + g) * at_t::scale_row
                + b * lay_t<LAYOUT>::scale_bytes);
        }
    }

#pragma unroll
    for (int c = 0; c < COL_TILES; c++) {
        const uint8_t *p =
            stage + at_t::x_at + (c * 8 + g) * X_ROW + b * 32 + 4 * t;
        const uint8_t *p_ds =
            stage + at_t::ds_at + (c * 8 + 2 * t) * DS_ROW + b * 8;
        const uint32_t x[2] = { word_at(p), word_at(p + 16) };
        const float2 ds[2] = { *(const float2 *) p_ds,
                               *(const float2 *) (p_ds + DS_ROW) };

#pragma unroll
        for (int o = 0; o < OUT_TILES; o++) {
            add_tile<LAYOUT>(acc[o][c], a[o], x, scale[o], ds);
        }
    }
}


/* Eight sums, n floats apart. */
static __device__ __forceinline__ float
tree(const float *s, int n)
{
    return ((s[0] + s[4 * n]) + (s[2 * n] + s[6 * n]))
           + ((s[n] + s[5 * n]) + (s[3 * n] + s[7 * n]));
}


/* The tile's sums of all classes → the tree → y. */
template <int COL_TILES>
static __device__ __forceinline__ void
finish(const cuda_dot_t *job, float *sums,
       float acc[2][OUT_TILES][COL_TILES][4])
{
    const int cols = 8 * COL_TILES;
    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int step = job->act.fine ? 2 : 1;

#pragma unroll
    for (int o = 0; o < OUT_TILES; o++) {
#pragma unroll
        for (int c = 0; c < COL_TILES; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int out = o * 16 + i / 2 * 8 + g;
                const int col = c * 8 + 2 * t + i % 2;

                sums[(warp * cols + col) * CUDA_OUTS + out] =
                    acc[0][o][c][i] + acc[1][o][c][i];
            }
        }
    }

    __syncthreads();

    for (int i = threadIdx.x; i < CUDA_OUTS * cols / step; i += THREADS) {
        const int out = i % CUDA_OUTS, col = i / CUDA_OUTS * step;
        const int row = ((int) blockIdx.x * cols + col) / step;
        const int to = (int) blockIdx.y * CUDA_OUTS + out;

        if (row < job->rows && to < job->w.n_out) {
            const float *s = sums + col * CUDA_OUTS + out;
            float *y = job->y + (size_t) row * job->ldy + to;
            float value = tree(s, cols * CUDA_OUTS);

            value = job->add ? *y + value : value;

            if (step == 2) {
                value += tree(s + CUDA_OUTS, cols * CUDA_OUTS);
            }

            *y = value;
        }
    }
}


template <int LAYOUT, int COL_TILES>
__global__ void
__launch_bounds__(THREADS) gemm(const cuda_dot_t job)
{
    typedef stage_t<LAYOUT, COL_TILES> at_t;
    DYN_SMEM(uint8_t, smem);
    const int warp = threadIdx.x / 32;
    const int runs = (job.w.n_blocks + CUDA_CLASSES - 1) / CUDA_CLASSES;
    float acc[2][OUT_TILES][COL_TILES][4] = { { { { 0.0f } } } };

    fetch<LAYOUT, COL_TILES>(&job, smem, 0);

    for (int run = 0; run < runs; run++) {
        const uint8_t *stage = smem + run % 2 * at_t::bytes;
        const int left = job.w.n_blocks - run * CUDA_CLASSES;

        if (run + 1 < runs) {
            fetch<LAYOUT, COL_TILES>(&job, smem + (run + 1) % 2 * at_t::bytes,
                                     (run + 1) * CUDA_CLASSES);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }

        __syncthreads();

#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (warp + i * WARPS < left) {
                add_block<LAYOUT, COL_TILES>(stage, warp + i * WARPS, acc[i]);
            }
        }

        __syncthreads();
    }

    finish<COL_TILES>(&job, (float *) smem, acc);
}


#define GEMM_TILES(layout, tiles)                                             \
    do {                                                                      \
        const unsigned smem = stage_t<layout, tiles>::all;                    \
        const dim3 grid(                                                      \
            (unsigned) ((job.act.n_cols + 8 * tiles - 1) / (8 * tiles)),      \
            (unsigned) ((job.w.n_out + CUDA_OUTS - 1) / CUDA_OUTS));          \
                                                                              \
        if (smem > PLAIN_SMEM) {                                              \
            cudaFuncSetAttribute((const void *) gemm<layout, tiles>,          \
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, \
                                 (int) smem);                                 \
        }                                                                     \
        LAUNCH((gemm<layout, tiles>), grid, THREADS, smem, stream, job);      \
    } while (0)

#define GEMM(layout)                                                     \
    if (job.act.n_cols <= 8 || stage_t<layout, 4>::all > job.max_smem) { \
        GEMM_TILES(layout, 1);                                           \
    } else {                                                             \
        GEMM_TILES(layout, 4);                                           \
    }


extern "C" void
cuda_gemm_launch(const cuda_dot_t *dot, cudaStream_t stream)
{
    const cuda_dot_t job = *dot;

    CUDA_BY_LAYOUT(job.w.layout, GEMM);
}
