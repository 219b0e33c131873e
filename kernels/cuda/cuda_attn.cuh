/*
 * The arithmetic of paged attention on the GPU: one warp, 16 rows (a row is a
 * query head of a token) and a block of 64 tokens in four pages.
 *
 * Scores and sums of V are products of tensor cores, m16n8k16 with sums in
 * f32.  K and V go in exactly: as f16 they are; a q8_0's bytes go as bf16, its
 * scales are applied to the scores, and to the weights of V.  What comes from
 * f32, queries and weights, goes in twice, rounded and what rounding left
 * over, so that next to nothing is lost; as f16 it is scaled into range by a
 * power of two, a row's queries by their own.
 *
 * A row's order is fixed: blocks begin at multiples of 64, each has a maximum,
 * a sum and an o of its own; these are merged, ascending, to those of a split
 * of 256 tokens, and splits, ascending, to those of the row (merge_states()).
 * Elements of a product do not depend on other rows, tokens that a row does
 * not see weigh exactly 0, and what is not finite is kept out of products.  So
 * it does not matter which rows share a tile, or what computes the splits.
 *
 * A dot product has no order of its own: a lane loads what lies side by side
 * in memory, 16 bytes at once, and the k and n of mma.sync are counted so that
 * this is the lane's part (key_dim(), value_dim()).  So nothing of K and V
 * passes through shared memory.
 */

#ifndef KERNELS_CUDA_CUDA_ATTN_CUH
#define KERNELS_CUDA_CUDA_ATTN_CUH

#include "kernels/cuda/cuda_kv.h"
#include "kernels/cuda/prim_mma.cuh"

enum {
    ATTN_ROWS = 16,   /* of a warp */
    ATTN_TOKENS = 64, /* of a block */
    ATTN_PAGES = ATTN_TOKENS / OP_PAGE,
    ATTN_TILES = ATTN_TOKENS / 8, /* of 8 tokens, n of mma.sync */
    ATTN_FRAGMENT = 8             /* words of a lane: rounded, left over */
};

#define ATTN_WEIGHT 16384.0f /* what the largest weight of a block is */

typedef struct {
    float *out;
    const float *q;
    float *parts;      /* [seq][row][head][split][PART_HEAD + dim] */
    unsigned *arrived; /* [tile][block of it]: splits that are done; all 0
                          between two launches */
    const int32_t *pos;
    const int32_t *row_start;
    const int32_t *tables;
    const uint8_t *pages; /* of the layer */
    size_t page_bytes;
    size_t head_bytes;
    int n_seqs;
    int table_width;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int group;    /* query heads of a KV head */
    int few;      /* sequences of at most so many rows are of few rows */
    int single;   /* all sequences have one row */
    int n_splits; /* of the longest sequence */
    int window;   /* positions that a row sees, itself among them; 0: all */
    float scale;
    float softcap; /* 0: none */
} attn_args_t;

/* Rows of one sequence, at consecutive positions. */
typedef struct {
    int seq;
    int index; /* of the first among the sequence's rows */
    int row;   /* its number in the batch */
    int n;
    int pos; /* of the first */
} tile_t;

/* The part of a tile that a warp has: 16 of its rows times heads. */
typedef struct {
    const tile_t *tile;
    int kv_head;
    int first; /* number of the first */
} share_t;

/* 64 tokens. */
typedef struct {
    const uint8_t *page[ATTN_PAGES]; /* records of the KV head */
    int n_pages;
    int first; /* position of the first token */
    int end;   /* no row sees this position */
    const attn_args_t *args;
    const share_t *share;
} attn_block_t;

/* Of the lane's rows, lane / 4 and lane / 4 + 8. */
typedef struct {
    int pos[2];    /* −1: no such row */
    float unit[2]; /* what a score is to be multiplied with */
} attn_rows_t;

/* A maximum, a sum of weights, and [..][row, column] of o elsewhere.  sum is 0
 * if nothing was seen. */
typedef struct {
    float max[2];
    float sum[2];
} attn_state_t;


/* The record of the KV head in page i of the sequence. */
static __device__ __forceinline__ const uint8_t *
record_of(const attn_args_t *args, const share_t *share, int i)
{
    const int32_t *table =
        args->tables + (size_t) share->tile->seq * args->table_width;

    return args->pages + (size_t) share->kv_head * args->head_bytes
           + table[i] * args->page_bytes;
}


/* For x ≤ 0; below −87 as at −87, about 1.6e-38; NaN stays. */
static __device__ __forceinline__ float
attn_exp(float x)
{
    const float at = x < -87.0f ? -87.0f : x;
    const float t = fmaf(at, 1.44269504f, 12582912.0f);
    const float n = t - 12582912.0f;
    const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, at));
    float p = fmaf(1.3888889e-3f, r, 8.3333333e-3f);

    p = fmaf(p, r, 4.1666667e-2f);
    p = fmaf(p, r, 1.6666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);

    return x == x
               ? __int_as_float((int) ((unsigned) __float_as_int(p)
                                       + ((unsigned) __float_as_int(t) << 23)))
               : x;
}


/* cap * tanh(x / cap) */
static __device__ __forceinline__ float
attn_softcap(float x, float cap)
{
    const float e = attn_exp(-2.0f * fabsf(x / cap));
    const float y = cap * ((1.0f - e) / (1.0f + e));

    return x < 0.0f ? -y : y;
}


/* How what came later joins what came before; then o = o * keep + later o *
 * take. */
static __device__ __forceinline__ void
attn_factors(float *max, float *sum, float later_max, float later_sum,
             float *keep, float *take)
{
    const float top = fmaxf(*max, later_max);

    *keep = attn_exp(*max - top);
    *take = attn_exp(later_max - top);
    *sum = fmaf(*sum, *keep, later_sum * *take);
    *max = top;
}


/* --- where values are --- */

template <int D, int TYPE>
static constexpr __host__ __device__ int
key_offset(void)
{
    return TYPE == OP_Q8_0 ? (D + OP_KV_BLOCK - 1) / OP_KV_BLOCK * 64 : 0;
}


template <int D, int TYPE>
static constexpr __host__ __device__ int
value_offset(void)
{
    return key_offset<D, TYPE>() + OP_PAGE * D * (TYPE == OP_Q8_0 ? 1 : 2);
}


/* Which k of which step value d of a head is: step, the four lanes' number,
 * and which of its words and halves. */
typedef struct {
    int step;
    int lane;
    int word; /* 0: k = 2 lane, …; 1: k = 2 lane + 8, … */
    int half;
} attn_place_t;


template <int D>
static __device__ __forceinline__ attn_place_t
key_place(int d)
{
    const int first = d / 32 * 32;
    attn_place_t place;

    if (first + 32 <= D) {
        place.step = first / 16 + d % 8 / 4;
        place.lane = d % 32 / 8;
    } else {
        place.step = first / 16;
        place.lane = d % 16 / 4;
    }
    place.word = d % 4 / 2;
    place.half = d % 2;
    return place;
}


/* Which value of a head column c of tile n of o is.  A lane has 8 values side
 * by side of each 64, of q8_0 4 of each 32; of what is left, 4 of 32, 2 of 16.
 */
template <int D, int TYPE>
static __device__ __forceinline__ int
value_dim(int n, int c)
{
    const int whole = D / 64 * 64;
    int first, each;

    if (n * 8 < whole) {
        each = TYPE == OP_Q8_0 ? 4 : 8;
        first = n / each * each * 8;
    } else {
        each = D - whole >= 32 && n * 8 < whole + 32 ? 4 : 2;
        first = each == 2 && D - whole >= 32 ? whole + 32 : whole;
    }
    return first + each * c + n - first / 8;
}


/* --- queries --- */

/* Row r of the fragments from d = lane, lane + 32, …: x, already scaled.  The
 * row's unit is returned. */
template <int D, int TYPE>
static __device__ __forceinline__ float
attn_put_query(uint16_t *fragments, int r, const float *x)
{
    float factor = 1.0f, unit = 1.0f;

    if (TYPE == OP_F16) {
        float top = 0.0f;

#pragma unroll
        for (int i = 0; i < (D + 31) / 32; i++) {
            top = fmaxf(top, fabsf(x[i]));
        }

        /* the largest becomes 2^13 … 2^14 */
        int e = (__float_as_int(warp_max(top)) >> 23) - 127;

        e = e < -100 ? -100 : e;
        if (e < 128) {
            factor = __int_as_float((127 + 13 - e) << 23);
            unit = __int_as_float((127 - 13 + e) << 23);
        }
    }

#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++) {
        const int d = lane_id() + 32 * i;
        const attn_place_t at = key_place<D>(d);
        const int lane = r % 8 * 4 + at.lane;
        uint16_t *to =
            fragments
            + ((at.step * 32 + lane) * ATTN_FRAGMENT + r / 8 + 2 * at.word) * 2
            + at.half;
        const float y = x[i] * factor;

        if (d >= D) {
            break;
        }
        if (TYPE == OP_F16) {
            const uint16_t high = f32_to_f16(y);

            to[0] = high;
            to[ATTN_FRAGMENT] = f32_to_f16(y - f16_to_f32(high));
        } else {
            const uint16_t high = f32_to_bf16(y);

            to[0] = high;
            to[ATTN_FRAGMENT] = f32_to_bf16(y - bf16_to_f32(high));
        }
    }
    return unit;
}


/* A lane's A of one step: 4 words rounded, 4 words left over. */
static __device__ __forceinline__ void
load_fragment(uint32_t a[ATTN_FRAGMENT], const uint32_t *fragments, int step)
{
    const uint4 *from =
        (const uint4 *) (fragments + (step * 32 + lane_id()) * ATTN_FRAGMENT);
    const uint4 high = from[0], low = from[1];

    a[0] = high.x;
    a[1] = high.y;
    a[2] = high.z;
    a[3] = high.w;
    a[4] = low.x;
    a[5] = low.y;
    a[6] = low.z;
    a[7] = low.w;
}


/* The products of n tiles with one A, first as it is rounded, then what is left
 * over: neighbours do not wait for one another. */
template <int TYPE>
static __device__ __forceinline__ void
attn_mma(float d[8][4], const uint32_t a[ATTN_FRAGMENT], const uint32_t b[8][2],
         int n)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t *part = a + i / 8 * 4;

        if (i % 8 >= n) {
            continue;
        }
        if (TYPE == OP_F16) {
            mma_f16_16816(d[i % 8], part, b[i % 8]);
        } else {
            mma_bf16_16816(d[i % 8], part, b[i % 8]);
        }
    }
}


static __device__ __forceinline__ void
clear_values(float o[8][4])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        o[i / 4][i % 4] = 0.0f;
    }
}

#endif /* KERNELS_CUDA_CUDA_ATTN_CUH */
