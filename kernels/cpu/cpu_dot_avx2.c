/*
 * Inner products for AVX2: one register is 8 of the 16 outputs of a group,
 * called a column here.
 *
 * vpmaddubsw multiplies unsigned by signed bytes into 16-bit pairs.  For
 * 4-bit weights a whole block of them adds up in 16 bits (8 × 2 × 15 × 127 =
 * 30480); 8-bit ones give their sign to the input first, so that a pair is at
 * most 2 × 128 × 127 = 32512, and widen at once.
 */

#include "kernels/cpu/cpu_dot.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <string.h>

enum { AHEAD = 4096 }; /* bytes between a load of weights and its prefetch */

/* Makes the sum of a step final: GCC would gather the additions of all steps
 * at the end, and spill every product until then (half the speed). */
#define KEEP(v) __asm__("" : "+x"(v))

/* The entry of the first row, block by block. */
typedef struct {
    const int8_t *q;
    const float *d;
    const float *s;
    const int32_t *sum;
} cursor_t;


CPU_INLINE __m256i
four_inputs(const int8_t *q)
{
    int32_t v;

    memcpy(&v, q, sizeof(v));
    return _mm256_set1_epi32(v);
}


/* p: the scales of a whole group. */
CPU_INLINE __m256
scales(const uint8_t *p, const int half, const int layout)
{
    if (lay_is_wide(layout)) {
        return _mm256_loadu_ps((const float *) p + 8 * half);
    }

    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p + half));
}


CPU_INLINE void
dot_q4(const cursor_t *at, const uint8_t *w, __m256i *dot, const int n_r,
       const int layout)
{
    const __m256i low4 = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);

    UNROLL
    for (int v = 0; v < 4; v++) {
        __m256i q = _mm256_loadu_si256((const __m256i *) (w + 64 * v));
        __m256i lo = _mm256_and_si256(q, low4);
        __m256i hi = _mm256_and_si256(_mm256_srli_epi16(q, 4), low4);

        _mm_prefetch((const char *) w + 64 * v + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            const int8_t *x = at->q + 32 * r + 4 * v;
            __m256i a = _mm256_maddubs_epi16(lo, four_inputs(x));
            __m256i b = _mm256_maddubs_epi16(hi, four_inputs(x + 16));

            dot[r] = _mm256_add_epi16(dot[r], _mm256_add_epi16(a, b));
            KEEP(dot[r]);
        }
    }

    UNROLL
    for (int r = 0; r < n_r; r++) {
        dot[r] = _mm256_madd_epi16(ones, dot[r]);

        if (layout == OP_LAY_Q4_D16) {
            dot[r] =
                _mm256_sub_epi32(dot[r], _mm256_set1_epi32(8 * at->sum[r]));
        }
    }
}


CPU_INLINE void
dot_q8(const cursor_t *at, const uint8_t *w, __m256i *dot, const int n_r,
       const int layout, const int h)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int n = 8 / lay_halves(layout);

    UNROLL
    for (int v = h * n; v < (h + 1) * n; v++) {
        __m256i q = _mm256_loadu_si256((const __m256i *) (w + 64 * v));
        __m256i magnitude = _mm256_abs_epi8(q);

        _mm_prefetch((const char *) w + 64 * v + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            __m256i x = four_inputs(at->q + 32 * r + 4 * v);
            __m256i p = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, q));

            dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(ones, p));
            KEEP(dot[r]);
        }
    }
}


/* One record for n_r rows of one column; w is the record of the group, acc and
 * low have ld columns. */
CPU_INLINE void
block(const cursor_t *at, const uint8_t *w, __m256 *acc, __m256 *low,
      const int n_r, const int ld, const int side, const int layout)
{
    __m256i dot[4];

    UNROLL
    for (int h = 0; h < lay_halves(layout); h++) {
        UNROLL
        for (int r = 0; r < n_r; r++) {
            dot[r] = _mm256_setzero_si256();
        }

        if (lay_is_q4(layout)) {
            dot_q4(at, w + 32 * side, dot, n_r, layout);
        } else {
            dot_q8(at, w + 32 * side, dot, n_r, layout, h);
        }

        __m256 d = scales(w + lay_d_at(layout) + 64 * h, side, layout);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            acc[r * ld] = _mm256_fmadd_ps(
                _mm256_cvtepi32_ps(dot[r]),
                _mm256_mul_ps(d, _mm256_set1_ps(at->d[r])), acc[r * ld]);
        }
    }

    if (lay_has_min(layout)) {
        __m256 m = scales(w + lay_m_at(layout), side, layout);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            low[r * ld] =
                _mm256_fmadd_ps(m, _mm256_set1_ps(at->s[r]), low[r * ld]);
        }
    }
}


CPU_INLINE void
store(const cpu_dot_t *job, int row, int group, int side, __m256 v)
{
    int lanes = cpu_group_lanes(job->seg, group) - 8 * side;
    float *y =
        job->y + (size_t) row * (size_t) job->ldy + group * OP_LANES + 8 * side;
    float part[8];

    if (lanes >= 8) {
        v = job->add ? _mm256_add_ps(_mm256_loadu_ps(y), v) : v;
        _mm256_storeu_ps(y, v);
        return;
    }

    _mm256_storeu_ps(part, v);

    for (int c = 0; c < lanes; c++) {
        y[c] = job->add ? y[c] + part[c] : part[c];
    }
}


/* n_r rows of n_c columns of a group; `side` is the column if n_c is 1. */
CPU_INLINE void
quant_tile(const cpu_dot_t *job, int row, int group, const int n_r,
           const int n_c, const int side, const int layout)
{
    const cpu_act_t *act = job->act;
    const size_t entry = cpu_act_at(act, row);
    const uint8_t *empty = cpu_act_empty(act, row);
    const uint8_t *w = job->seg->data + (size_t) group * job->seg->group_bytes;
    cursor_t at = { act->q + 32 * entry, act->d + entry, act->s + entry,
                    act->sum + entry };
    __m256 acc[4 * 2], low[4 * 2];

    UNROLL
    for (int i = 0; i < n_r * n_c; i++) {
        acc[i] = _mm256_setzero_ps();
        low[i] = _mm256_setzero_ps();
    }

    for (int b = 0; b < act->n_blocks; b++, w += lay_bytes(layout)) {
        if (empty == NULL || !empty[b]) {
            UNROLL
            for (int c = 0; c < n_c; c++) {
                block(&at, w, acc + c, low + c, n_r, n_c, side + c, layout);
            }
        }

        at.q += 32 * act->tile;
        at.d += act->tile;
        at.s += act->tile;
        at.sum += act->tile;
    }

    UNROLL
    for (int r = 0; r < n_r; r++) {
        UNROLL
        for (int c = 0; c < n_c; c++) {
            __m256 v = acc[r * n_c + c];

            if (lay_has_min(layout)) {
                v = _mm256_add_ps(v, low[r * n_c + c]);
            }

            store(job, row + r, group, side + c, v);
        }
    }
}


/* Column `side` of the 16 values of a record. */
CPU_INLINE __m256
load_floats(const uint8_t *p, const int side, const int layout)
{
    __m128i h;

    if (layout == OP_LAY_F32) {
        return _mm256_loadu_ps((const float *) p + 8 * side);
    }

    h = _mm_loadu_si128((const __m128i *) p + side);

    if (layout == OP_LAY_F16) {
        return _mm256_cvtph_ps(h);
    }

    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}


CPU_INLINE void
float_tile(const cpu_dot_t *job, int row, int group, const int n_r,
           const int layout)
{
    const int bytes = layout == OP_LAY_F32 ? 64 : 32;
    const size_t n_in = (size_t) job->seg->n_in;
    const float *x = job->x + (size_t) row * n_in;
    const uint8_t *w = job->seg->data + (size_t) group * job->seg->group_bytes;
    __m256 acc[4][2];

    UNROLL
    for (int r = 0; r < n_r; r++) {
        acc[r][0] = _mm256_setzero_ps();
        acc[r][1] = _mm256_setzero_ps();
    }

    for (size_t i = 0; i < n_in; i++, w += bytes) {
        __m256 left = load_floats(w, 0, layout);
        __m256 right = load_floats(w, 1, layout);

        _mm_prefetch((const char *) w + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            __m256 f = _mm256_set1_ps(x[(size_t) r * n_in + i]);

            acc[r][0] = _mm256_fmadd_ps(left, f, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(right, f, acc[r][1]);
        }
    }

    UNROLL
    for (int r = 0; r < n_r; r++) {
        store(job, row + r, group, 0, acc[r][0]);
        store(job, row + r, group, 1, acc[r][1]);
    }
}


/* Three or four quantised rows fill the registers with one column. */
CPU_INLINE void
tile(const cpu_dot_t *job, int row, int group, const int n_r, const int layout)
{
    if (lay_is_float(layout)) {
        float_tile(job, row, group, n_r, layout);

    } else if (n_r > 2) {
        quant_tile(job, row, group, n_r, 1, 0, layout);
        quant_tile(job, row, group, n_r, 1, 1, layout);

    } else {
        quant_tile(job, row, group, n_r, 2, 0, layout);
    }
}


CPU_INLINE void
dot_all(const cpu_dot_t *job, const cpu_range_t *range, const int layout)
{
    for (int group = range->group; group < range->group_end; group++) {
        int row = range->row;

        for (; row + 4 <= range->row_end; row += 4) {
            tile(job, row, group, 4, layout);
        }

        switch (range->row_end - row) {
        case 1:
            tile(job, row, group, 1, layout);
            break;
        case 2:
            tile(job, row, group, 2, layout);
            break;
        case 3:
            tile(job, row, group, 3, layout);
            break;
        }
    }
}


#define DOT(name, layout)                                            \
    static void name(const cpu_dot_t *job, const cpu_range_t *range) \
    {                                                                \
        dot_all(job, range, layout);                                 \
    }

DOT(dot_f32, OP_LAY_F32)
DOT(dot_f16, OP_LAY_F16)
DOT(dot_bf16, OP_LAY_BF16)
DOT(dot_q4_d16, OP_LAY_Q4_D16)
DOT(dot_q4_dm16, OP_LAY_Q4_DM16)
DOT(dot_q4_dm32, OP_LAY_Q4_DM32)
DOT(dot_q8_d16, OP_LAY_Q8_D16)
DOT(dot_q8_dm16, OP_LAY_Q8_DM16)
DOT(dot_q8_dm32, OP_LAY_Q8_DM32)
DOT(dot_q8_dd32, OP_LAY_Q8_DD32)


CPU_INLINE int32_t
sum_lanes(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v),
                              _mm256_extracti128_si256(v, 1));

    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}


CPU_INLINE int32_t
max_lanes(__m256i v)
{
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v),
                              _mm256_extracti128_si256(v, 1));

    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}


/* 16 values → 16 int8 at q; their sum. */
CPU_INLINE int32_t
quantise_16(const float *x, __m256 d, int8_t *q)
{
    const __m256 top = _mm256_set1_ps(127.0f);
    const __m256 bottom = _mm256_set1_ps(-127.0f);
    __m256i i[2];

    UNROLL
    for (int k = 0; k < 2; k++) {
        __m256 v = _mm256_div_ps(_mm256_loadu_ps(x + 8 * k), d);

        i[k] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(v, top), bottom));
    }

    /* packs works within 128-bit lanes: a0 b0 | a1 b1 → a0 a1 b0 b1 */
    __m256i p = _mm256_permute4x64_epi64(_mm256_packs_epi32(i[0], i[1]), 0xd8);

    _mm_storeu_si128((__m128i *) q,
                     _mm_packs_epi16(_mm256_castsi256_si128(p),
                                     _mm256_extracti128_si256(p, 1)));
    return sum_lanes(_mm256_add_epi32(i[0], i[1]));
}


static void
quantise(const float *x, const cpu_act_t *act, int row)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    size_t at = cpu_act_at(act, row);

    for (int b = 0; b < act->n_blocks; b++, x += 32, at += (size_t) act->tile) {
        __m256i m = _mm256_setzero_si256();
        int32_t bits;
        float d;

        /* As integers magnitudes keep their order, and NaN is the largest. */
        UNROLL
        for (int k = 0; k < 4; k++) {
            __m256i v = _mm256_castps_si256(_mm256_loadu_ps(x + 8 * k));

            m = _mm256_max_epi32(m, _mm256_and_si256(v, magnitude));
        }

        bits = max_lanes(m);
        memcpy(&d, &bits, sizeof(d));
        d /= 127.0f;

        if (d > 0.0f && bits < 0x7f800000) {
            __m256 dv = _mm256_set1_ps(d);

            act->half[at] = quantise_16(x, dv, act->q + 32 * at);
            act->sum[at] =
                act->half[at] + quantise_16(x + 16, dv, act->q + 32 * at + 16);

        } else {
            memset(act->q + 32 * at, 0, 32);
            act->half[at] = 0;
            act->sum[at] = 0;
        }

        act->d[at] = d;
        act->s[at] = d * (float) act->sum[at];
    }
}


const cpu_dot_table_t *
cpu_dot_avx2(void)
{
    static const cpu_dot_table_t table = {
        .chunk_rows = CPU_TILE,
        .quantise = quantise,
        .dot = { [OP_LAY_F32] = dot_f32,
                 [OP_LAY_F16] = dot_f16,
                 [OP_LAY_BF16] = dot_bf16,
                 [OP_LAY_Q4_D16] = dot_q4_d16,
                 [OP_LAY_Q4_DM16] = dot_q4_dm16,
                 [OP_LAY_Q4_DM32] = dot_q4_dm32,
                 [OP_LAY_Q8_D16] = dot_q8_d16,
                 [OP_LAY_Q8_DM16] = dot_q8_dm16,
                 [OP_LAY_Q8_DM32] = dot_q8_dm32,
                 [OP_LAY_Q8_DD32] = dot_q8_dd32 },
    };

    return &table;
}

#else

const cpu_dot_table_t *
cpu_dot_avx2(void)
{
    return NULL;
}

#endif
