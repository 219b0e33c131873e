/*
 * The first half of cuda_attn.cuh's arithmetic: scores of 16 rows and the 64
 * tokens of a block, and weights from them.
 */

#ifndef KERNELS_CUDA_CUDA_ATTN_SCORES_CUH
#define KERNELS_CUDA_CUDA_ATTN_SCORES_CUH

#include "kernels/cuda/cuda_attn.cuh"


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
                const uint4 k =
                    load_v4(block->page[j / 2] + (j % 2 * 8 * D + at + c) * 2);

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
                const uint2 k =
                    *(const uint2 *) (block->page[j / 2]
                                      + ((j % 2 * 8 + lane_id() / 4) * D + D
                                         - 16 + lane_id() % 4 * 4)
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
                    scores_q8_block(
                        s + 2 * page,
                        fragments + (c / 16 + 2 * b) * 32 * ATTN_FRAGMENT, k[b],
                        block, page, (c / 32 + b) * OP_PAGE * 2,
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
        const int from =
            block->args->window > 0 ? pos - block->args->window : -1;
        float top = -INFINITY;
        float sum = 0.0f;

#pragma unroll
        for (int i = 0; i < ATTN_TILES * 2; i++) {
            const int at = token + i / 2 * 8 + i % 2;
            float *x = &s[i / 2][2 * r + i % 2];

            *x *= rows->unit[r];
            if (block->args->softcap > 0.0f) {
                *x = attn_softcap(*x, block->args->softcap);
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

#endif /* KERNELS_CUDA_CUDA_ATTN_SCORES_CUH */
