/*
 * The second half of cuda_attn.cuh's arithmetic: sums of V by weights, and how
 * what a block gives joins what came before it.
 */

#ifndef KERNELS_CUDA_CUDA_ATTN_VALUES_CUH
#define KERNELS_CUDA_CUDA_ATTN_VALUES_CUH

#include "kernels/cuda/cuda_attn_scores.cuh"


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
            a[i + 4] = pack_halves(f32_to_f16(x - f16_to_f32(low_half(a[i]))),
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

            b[j][i % 2] = j % 2 == 0 ? pack_halves(low_half(x), low_half(y))
                                     : pack_halves(high_half(x), high_half(y));
        }
        attn_mma<OP_F16>(o, p[page], b, n);
    }
}


/* V that is Inf or NaN joins the rows that see it, and no other. */
template <int D>
static __device__ __forceinline__ void
values_not_finite(float o[8][4], const attn_block_t *block,
                  const attn_rows_t *rows, int at, int n)
{
    const int column = lane_id() % 4 * 2;

    for (int i = 0; i < block->n_pages * OP_PAGE; i++) {
        const int token = block->first + i;

        if (token >= block->end) {
            break;
        }

        /* page[] is in registers, which cannot be counted through */
        const uint8_t *record =
            record_of(block->args, block->share, token / OP_PAGE);
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
                && (block->args->window == 0
                    || token > pos - block->args->window))
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
                          : p[i][k] * f16_to_f32((uint16_t) (d >> k % 2 * 16));
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

#endif /* KERNELS_CUDA_CUDA_ATTN_VALUES_CUH */
