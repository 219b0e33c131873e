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

enum {
    ATTN_ROWS = 16,   /* of a warp */
    ATTN_TOKENS = 64, /* of a block */
    ATTN_PAGES = ATTN_TOKENS / OP_PAGE,
    ATTN_TILES = ATTN_TOKENS / 8, /* of 8 tokens, n of mma.sync */
    ATTN_FRAGMENT = 8             /* words of a lane: rounded, left over */
};

#define ATTN_WEIGHT 16384.0f /* what the largest weight of a block is */

typedef struct {
    const uint8_t *page[ATTN_PAGES]; /* records of the KV head */
    const uint8_t *pages;            /* of the layer, at the KV head */
    size_t page_bytes;
    const int32_t *table; /* of the block's pages */
    int n_pages;
    int first;    /* position of the first token */
    int end;      /* no row sees this position */
    int window;   /* positions that a row sees, itself among them; 0: all */
    float softcap; /* 0: none */
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

    return x == x ? __int_as_float((int) ((unsigned) __float_as_int(p)
                                          + ((unsigned) __float_as_int(t)
                                             << 23)))
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
        uint16_t *to = fragments
                       + ((at.step * 32 + lane) * ATTN_FRAGMENT + r / 8
                          + 2 * at.word)
                             * 2
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
    const uint4 *from = (const uint4 *) (fragments
                                         + (step * 32 + lane_id())
                                               * ATTN_FRAGMENT);
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
attn_mma(float d[8][4], const uint32_t a[ATTN_FRAGMENT],
         const uint32_t b[8][2], int n)
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


/* --- scores --- */

/* Bytes i and i + 1 of a word, ints of −127 … 127, as two bf16: exact. */
static __device__ __forceinline__ uint32_t
bf16_of_bytes(uint32_t a, uint32_t b)
{
    const float low = __int_as_float((int) (0x4B000000u | (a ^ 0x80u)));
    const float high = __int_as_float((int) (0x4B000000u | (b ^ 0x80u)));

    /* 2^23 + 128 less */
    return (uint32_t) __float_as_int(low - 8388736.0f) >> 16
           | ((uint32_t) __float_as_int(high - 8388736.0f) & 0xffff0000u);
}


static __device__ __forceinline__ uint32_t
byte_of(uint32_t word, int i)
{
    return word >> (8 * i) & 0xffu;
}


template <int D>
static __device__ __forceinline__ void
scores_f16(float s[ATTN_TILES][4], const uint32_t *fragments,
           const attn_block_t *block)
{
    const int n = block->n_pages * 2;
    const int at = lane_id() / 4 * D + lane_id() % 4 * 8;
    uint32_t a[ATTN_FRAGMENT], b[2][ATTN_TILES][2];

#pragma unroll(D > 128 ? 1 : 4)
    for (int c = 0; c + 32 <= D; c += 32) {
#pragma unroll
        for (int j = 0; j < ATTN_TILES; j++) {
            if (j < n) {
                const uint4 k = load_v4(block->page[j / 2]
                                        + (j % 2 * 8 * D + at + c) * 2);

                b[0][j][0] = k.x;
                b[0][j][1] = k.y;
                b[1][j][0] = k.z;
                b[1][j][1] = k.w;
            }
        }

#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_fragment(a, fragments, c / 16 + i);
            attn_mma<OP_F16>(s, a, b[i], n);
        }
    }

    if (D % 32 != 0) {
#pragma unroll
        for (int j = 0; j < ATTN_TILES; j++) {
            if (j < n) {
                const uint2 k = *(const uint2 *) (block->page[j / 2]
                                                  + ((j % 2 * 8 + lane_id() / 4)
                                                         * D
                                                     + D - 16
                                                     + lane_id() % 4 * 4)
                                                        * 2);

                b[0][j][0] = k.x;
                b[0][j][1] = k.y;
            }
        }

        load_fragment(a, fragments, D / 16 - 1);
        attn_mma<OP_F16>(s, a, b[0], n);
    }
}


/* K of four tiles, two pages, times one block of 32 values under one scale;
 * half a block if n_steps is 1. */
static __device__ __forceinline__ void
scores_q8_block(float s[4][4], const uint32_t *fragments, const uint2 k[4],
                const attn_block_t *block, int page, int scale_at, int n_steps)
{
    const int n = (block->n_pages - page) * 2;
    uint32_t a[ATTN_FRAGMENT], b[8][2];
    float sum[8][4];

    clear_values(sum);

#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i >= n_steps) {
            break;
        }

#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t word = i == 0 ? k[j].x : k[j].y;

            b[j][0] = bf16_of_bytes(byte_of(word, 0), byte_of(word, 1));
            b[j][1] = bf16_of_bytes(byte_of(word, 2), byte_of(word, 3));
        }
        load_fragment(a, fragments, i);
        attn_mma<OP_Q8_0>(sum, a, b, n < 4 ? n : 4);
    }

#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j >= n) {
            break;
        }

        const uint32_t d =
            *(const uint32_t *) (block->page[page + j / 2] + scale_at
                                 + (j % 2 * 8 + lane_id() % 4 * 2) * 2);

#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] = fmaf(f16_to_f32(i % 2 == 0 ? low_half(d) : high_half(d)),
                           sum[j][i], s[j][i]);
        }
    }
}


/* n bytes, 16, 8 or 4, of a row of K: two blocks of 32, one, or half of one. */
static __device__ __forceinline__ uint4
load_key_bytes(const uint8_t *from, int n)
{
    if (n == 16) {
        return load_v4(from);
    }
    if (n == 8) {
        const uint2 some = *(const uint2 *) from;

        return make_uint4(some.x, some.y, 0, 0);
    }
    return make_uint4(*(const uint32_t *) from, 0, 0, 0);
}


template <int D>
static __device__ __forceinline__ void
scores_q8(float s[ATTN_TILES][4], const uint32_t *fragments,
          const attn_block_t *block)
{
    const int n = block->n_pages * 2;

#pragma unroll(D > 128 ? 1 : 4)
    for (int c = 0; c < D; c += 64) {
        const int left = D % 64 == 0 || D - c >= 64 ? 64 : D - c;

#pragma unroll
        for (int page = 0; page < ATTN_PAGES; page += 2) {
            uint2 k[2][4];

#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (2 * page + j >= n) {
                    break;
                }

                const uint4 all = load_key_bytes(
                    block->page[page + j / 2] + key_offset<D, OP_Q8_0>()
                        + (j % 2 * 8 + lane_id() / 4) * D + c
                        + lane_id() % 4 * (left / 4),
                    left / 4);

                k[0][j] = make_uint2(all.x, all.y);
                k[1][j] = make_uint2(all.z, all.w);
            }

#pragma unroll
            for (int b = 0; b < (left + 31) / 32; b++) {
                if (page < block->n_pages) {
                    scores_q8_block(s + 2 * page,
                                    fragments
                                        + (c / 16 + 2 * b) * 32 * ATTN_FRAGMENT,
                                    k[b], block, page,
                                    (c / 32 + b) * OP_PAGE * 2,
                                    left - 32 * b >= 32 ? 2 : 1);
                }
            }
        }
    }
}


/* Scores to weights, at most ATTN_WEIGHT, 0 where a row does not see. */
static __device__ __forceinline__ void
attn_softmax(float s[ATTN_TILES][4], const attn_block_t *block,
             const attn_rows_t *rows, attn_state_t *state)
{
    const int token = block->first + lane_id() % 4 * 2;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int pos = rows->pos[r];
        const int from = block->window > 0 ? pos - block->window : -1;
        float top = -INFINITY;
        float sum = 0.0f;

#pragma unroll
        for (int i = 0; i < ATTN_TILES * 2; i++) {
            const int at = token + i / 2 * 8 + i % 2;
            float *x = &s[i / 2][2 * r + i % 2];

            *x *= rows->unit[r];
            if (block->softcap > 0.0f) {
                *x = attn_softcap(*x, block->softcap);
            }
            if (at <= pos && at > from) {
                top = fmaxf(top, *x);
            }
        }

        top = quad_max(top);

#pragma unroll
        for (int i = 0; i < ATTN_TILES * 2; i++) {
            const int at = token + i / 2 * 8 + i % 2;
            float *x = &s[i / 2][2 * r + i % 2];

            *x = at <= pos && at > from ? attn_exp(*x - top) * ATTN_WEIGHT
                                        : 0.0f;
            sum += *x;
        }

        state->max[r] = top;
        state->sum[r] = quad_sum(sum);
    }
}


/* --- values --- */

/* A of one page from weights, rounded and left over. */
template <int TYPE>
static __device__ __forceinline__ void
weight_fragment(uint32_t a[ATTN_FRAGMENT], const float p[2][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = p[i / 2][i % 2 * 2], y = p[i / 2][i % 2 * 2 + 1];

        if (TYPE == OP_F16) {
            a[i] = pack_halves(f32_to_f16(x), f32_to_f16(y));
            a[i + 4] =
                pack_halves(f32_to_f16(x - f16_to_f32(low_half(a[i]))),
                            f32_to_f16(y - f16_to_f32(high_half(a[i]))));
        } else {
            a[i] = pack_halves(f32_to_bf16(x), f32_to_bf16(y));
            a[i + 4] =
                pack_halves(f32_to_bf16(x - bf16_to_f32(low_half(a[i]))),
                            f32_to_bf16(y - bf16_to_f32(high_half(a[i]))));
        }
    }
}


/* Halves that are Inf or NaN become 0. */
static __device__ __forceinline__ uint32_t
finite_halves(uint32_t v)
{
    const uint32_t bad = ((v & 0x7c007c00u) + 0x04000400u) & 0x80008000u;

    return v & ~((bad >> 15) * 0xffffu);
}


/* 2 n bytes, n = 2, 4, 8, that a lane has of one row of V. */
static __device__ __forceinline__ void
load_words(uint32_t *v, const uint8_t *from, int n_bytes)
{
    if (n_bytes == 16) {
        const uint4 some = *(const uint4 *) from;

        v[0] = some.x;
        v[1] = some.y;
        v[2] = some.z;
        v[3] = some.w;
    } else if (n_bytes == 8) {
        const uint2 some = *(const uint2 *) from;

        v[0] = some.x;
        v[1] = some.y;
    } else if (n_bytes == 4) {
        v[0] = *(const uint32_t *) from;
    } else {
        v[0] = *(const uint16_t *) from;
    }
}


/* The token of a page that row i = 0 … 3 of a lane's B is. */
static __device__ __forceinline__ int
token_of(int i)
{
    return i / 2 * 8 + lane_id() % 4 * 2 + i % 2;
}


/* o[j] = weights times the n values from `at` of each head row that column
 * lane / 4 stands for.  clean: what is not finite counts as 0. */
template <int D>
static __device__ __forceinline__ void
values_f16(float o[8][4], const uint32_t p[ATTN_PAGES][ATTN_FRAGMENT],
           const attn_block_t *block, int at, int n, bool clean)
{
#pragma unroll
    for (int page = 0; page < ATTN_PAGES; page++) {
        uint32_t v[4][4];

        if (page >= block->n_pages) {
            break;
        }

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = token_of(i);

            v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
            if (block->first + page * OP_PAGE + token < block->end) {
                load_words(v[i],
                           block->page[page] + value_offset<D, OP_F16>()
                               + (token * D + at + lane_id() / 4 * n) * 2,
                           2 * n);
            }
        }
        if (clean) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                v[i / 4][i % 4] = finite_halves(v[i / 4][i % 4]);
            }
        }

        uint32_t b[8][2];

#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int j = i / 2;
            const uint32_t x = v[i % 2 * 2][j / 2], y = v[i % 2 * 2 + 1][j / 2];

            b[j][i % 2] = j % 2 == 0
                              ? pack_halves(low_half(x), low_half(y))
                              : pack_halves(high_half(x), high_half(y));
        }
        attn_mma<OP_F16>(o, p[page], b, n);
    }
}


/* V that is Inf or NaN joins the rows that see it, and no other. */
template <int D>
static __device__ __forceinline__ void
values_not_finite(float o[8][4], const attn_block_t *block, const attn_rows_t *rows,
                  int at, int n)
{
    const int column = lane_id() % 4 * 2;

    for (int i = 0; i < block->n_pages * OP_PAGE; i++) {
        const int token = block->first + i;

        if (token >= block->end) {
            break;
        }

        /* page[] is in registers, which cannot be counted through */
        const uint8_t *record =
            block->pages + block->table[i / OP_PAGE] * block->page_bytes;
        const uint16_t *v =
            (const uint16_t *) (record + value_offset<D, OP_F16>())
            + i % OP_PAGE * D + at;
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const int pos = rows->pos[k % 4 / 2];

            if (k / 4 >= n) {
                break;
            }

            const uint16_t x = v[(column + k % 2) * n + k / 4];

            if ((x & 0x7c00) == 0x7c00 && token <= pos
                && (block->window == 0 || token > pos - block->window))
            {
                o[k / 4][k % 4] += f16_to_f32(x);
            }
        }
    }
}


/* The weights of one page times the scales of block b, as A. */
template <int D>
static __device__ __forceinline__ void
scaled_fragment(uint32_t a[ATTN_FRAGMENT], const float p[2][4],
                const uint8_t *record, int b)
{
    const uint8_t *scales = record + key_offset<D, OP_Q8_0>() / 2
                            + (b * OP_PAGE + lane_id() % 4 * 2) * 2;
    float x[2][4];

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t d = *(const uint32_t *) (scales + 16 * i);

#pragma unroll
        for (int k = 0; k < 4; k++) {
            /* what is not seen may have any scale */
            x[i][k] = p[i][k] == 0.0f
                          ? 0.0f
                          : p[i][k]
                                * f16_to_f32((uint16_t) (d >> k % 2 * 16));
        }
    }
    weight_fragment<OP_Q8_0>(a, x);
}


/* The same for bytes: n is 8 for two blocks of 32 values, 4 for one, 2 for
 * half a block. */
template <int D>
static __device__ __forceinline__ void
values_q8(float o[8][4], const float p[ATTN_TILES][4],
          const attn_block_t *block, int at, int n)
{
#pragma unroll
    for (int page = 0; page < ATTN_PAGES; page++) {
        uint32_t v[4][4], a[ATTN_FRAGMENT];

        if (page >= block->n_pages) {
            break;
        }

#pragma unroll
        for (int i = 0; i < 4; i++) {
            load_words(v[i],
                       block->page[page] + value_offset<D, OP_Q8_0>()
                           + token_of(i) * D + at + lane_id() / 4 * n,
                       n);
        }

#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t b[8][2];

            if (4 * half >= n) {
                break;
            }

#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int k = i % 2 * 2;

                b[i / 2][i % 2] = bf16_of_bytes(byte_of(v[k][half], i / 2),
                                                byte_of(v[k + 1][half], i / 2));
            }
            scaled_fragment<D>(a, p + 2 * page, block->page[page],
                               at / 32 + half);
            attn_mma<OP_Q8_0>(o + 4 * half, a, b, n < 4 ? n : 4);
        }
    }
}


/* --- a block --- */

/* How a block's o joins the state's, for the lane's rows; rows that see
 * nothing of the block stay as they are. */
typedef struct {
    float keep[2];
    float take[2];
    bool seen[2];
} attn_merge_t;


static __device__ __forceinline__ attn_merge_t
merge_states(attn_state_t *state, const attn_state_t *later)
{
    attn_merge_t merge;

#pragma unroll
    for (int r = 0; r < 2; r++) {
        merge.keep[r] = 1.0f;
        merge.take[r] = 0.0f;
        merge.seen[r] = later->sum[r] != 0.0f;
        if (merge.seen[r]) {
            attn_factors(&state->max[r], &state->sum[r], later->max[r],
                         later->sum[r], &merge.keep[r], &merge.take[r]);
        }
    }
    return merge;
}


static __device__ __forceinline__ float
merge_value(const attn_merge_t *merge, int row, float before, float later)
{
    return merge->seen[row]
               ? fmaf(before, merge->keep[row], later * merge->take[row])
               : before;
}


/* o of one tile of 8 values joins a lane's own place of shared memory. */
static __device__ __forceinline__ void
merge_place(float4 *place, const attn_merge_t *merge, const float later[4])
{
    float4 o = *place;

    o.x = merge_value(merge, 0, o.x, later[0]);
    o.y = merge_value(merge, 0, o.y, later[1]);
    o.z = merge_value(merge, 1, o.z, later[2]);
    o.w = merge_value(merge, 1, o.w, later[3]);
    *place = o;
}


/* o of n values from `at` of a block. */
template <int D>
static __device__ __forceinline__ void
attend_values(float o[8][4], const uint32_t weights[ATTN_PAGES][ATTN_FRAGMENT],
              const attn_block_t *block, const attn_rows_t *rows, int at, int n)
{
    float odd = 0.0f;

    clear_values(o);
    values_f16<D>(o, weights, block, at, n, false);

#pragma unroll
    for (int i = 0; i < 32; i++) {
        odd = fmaf(o[i / 4][i % 4], 0.0f, odd);
    }

    /* 0 times Inf is not 0: do it again, without them */
    if (warp_any(odd != 0.0f)) {
        clear_values(o);
        values_f16<D>(o, weights, block, at, n, true);
        values_not_finite<D>(o, block, rows, at, n);
    }
}


/* The warp's rows attend one block, which joins their state and o: registers,
 * or the lanes' places in shared memory if o is NULL. */
template <int D, int TYPE>
static __device__ __forceinline__ void
attend_block(float (*o)[4], float4 *places, attn_state_t *state,
             const uint32_t *fragments, const attn_block_t *block,
             const attn_rows_t *rows)
{
    float s[ATTN_TILES][4];
    uint32_t weights[ATTN_PAGES][ATTN_FRAGMENT];
    attn_state_t here;

    clear_values(s);
    if (TYPE == OP_F16) {
        scores_f16<D>(s, fragments, block);
    } else {
        scores_q8<D>(s, fragments, block);
    }
    attn_softmax(s, block, rows, &here);

    if (TYPE == OP_F16) {
#pragma unroll
        for (int i = 0; i < ATTN_PAGES; i++) {
            weight_fragment<OP_F16>(weights[i], s + 2 * i);
        }
    }

    const attn_merge_t merge = merge_states(state, &here);

#pragma unroll
    for (int at = 0; at < D; at += 64) {
        const int n = D - at >= 64 ? 8 : D - at >= 32 ? 4 : 2;
        float some[8][4];

        if (TYPE == OP_F16) {
            attend_values<D>(some, weights, block, rows, at, n);
        } else {
            clear_values(some);
            values_q8<D>(some, s, block, at, n);
        }

#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i >= n) {
                break;
            }
            if (o == NULL) {
                merge_place(places + (at / 8 + i) * WARP_SIZE + lane_id(),
                            &merge, some[i]);
                continue;
            }

#pragma unroll
            for (int k = 0; k < 4; k++) {
                float *x = &o[at / 8 + i][k];

                *x = merge_value(&merge, k / 2, *x, some[i][k]);
            }
        }
    }
}


#endif /* KERNELS_CUDA_CUDA_ATTN_CUH */
