/*
 * Inner products for AVX-512 with VNNI: one register is the 16 outputs of a
 * group.
 *
 * Up to 8 rows of one group stay in registers (two accumulators and an int32
 * dot each), so that rows share the unpacking of weights.  Groups follow each
 * other in memory, so even one row reads a single stream with a prefetch that
 * runs across groups; on Zen 4 that was twice as fast as four groups at once,
 * and 8 rows by 1 group faster than 4 by 2, 2 by 4 or 4 by 4.
 */

#include "kernels/cpu/cpu_dot.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

#include <string.h>

#include "kernels/cpu/cpu_dot_zmm.h"

enum { AHEAD = 4096 }; /* bytes between a load of weights and its prefetch */

/* The activations' entry of the first row, block by block. */
typedef struct {
    const int8_t *q;
    const float *d;
    const float *s;
    const int32_t *sum;
    const int32_t *half;
} cursor_t;


CPU_INLINE __m512i
four_inputs(const int8_t *q)
{
    int32_t v;

    memcpy(&v, q, sizeof(v));
    return _mm512_set1_epi32(v);
}


/* vpdpbusd takes unsigned weights: 8-bit ones are offset by 128, Q4_0's by 8,
 * and the dot starts from minus the offset times the sum of the inputs. */
CPU_INLINE __m512i
dot_start(const cursor_t *at, int r, const int layout, const int h)
{
    if (lay_halves(layout) == 2) {
        return _mm512_set1_epi32(
            -128 * (h == 0 ? at->half[r] : at->sum[r] - at->half[r]));
    }

    if (!lay_is_q4(layout)) {
        return _mm512_set1_epi32(-128 * at->sum[r]);
    }

    if (layout == OP_LAY_Q4_D16) {
        return _mm512_set1_epi32(-8 * at->sum[r]);
    }

    return _mm512_setzero_si512();
}


CPU_INLINE void
dot_q4(const cursor_t *at, const uint8_t *w, __m512i *dot, const int n_r)
{
    const __m512i low4 = _mm512_set1_epi8(15);

    UNROLL
    for (int v = 0; v < 4; v++) {
        __m512i q = _mm512_loadu_si512(w + 64 * v);
        __m512i lo = _mm512_and_si512(q, low4);
        __m512i hi = _mm512_and_si512(_mm512_srli_epi16(q, 4), low4);

        _mm_prefetch((const char *) w + 64 * v + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            const int8_t *x = at->q + 32 * r + 4 * v;
            __m512i s = dot[r];

            s = _mm512_dpbusd_epi32(s, lo, four_inputs(x));
            dot[r] = _mm512_dpbusd_epi32(s, hi, four_inputs(x + 16));
        }
    }
}


/* Of a layout with two scales, the inputs of half h. */
CPU_INLINE void
dot_q8(const cursor_t *at, const uint8_t *w, __m512i *dot, const int n_r,
       const int layout, const int h)
{
    const __m512i flip = _mm512_set1_epi8((char) 0x80);
    const int n = 8 / lay_halves(layout);

    UNROLL
    for (int v = h * n; v < (h + 1) * n; v++) {
        __m512i q = _mm512_loadu_si512(w + 64 * v);

        q = _mm512_xor_si512(q, flip);
        _mm_prefetch((const char *) w + 64 * v + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            dot[r] = _mm512_dpbusd_epi32(dot[r], q,
                                         four_inputs(at->q + 32 * r + 4 * v));
        }
    }
}


/* One record of one group for n_r rows. */
CPU_INLINE void
block(const cursor_t *at, const uint8_t *w, __m512 *acc, __m512 *low,
      const int n_r, const int layout)
{
    __m512i dot[8];

    UNROLL
    for (int h = 0; h < lay_halves(layout); h++) {
        UNROLL
        for (int r = 0; r < n_r; r++) {
            dot[r] = dot_start(at, r, layout, h);
        }

        if (lay_is_q4(layout)) {
            dot_q4(at, w, dot, n_r);
        } else {
            dot_q8(at, w, dot, n_r, layout, h);
        }

        __m512 d = zmm_scales(w + lay_d_at(layout) + 64 * h, layout);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]),
                                     _mm512_mul_ps(d, _mm512_set1_ps(at->d[r])),
                                     acc[r]);
        }
    }

    if (lay_has_min(layout)) {
        __m512 m = zmm_scales(w + lay_m_at(layout), layout);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            low[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(at->s[r]), low[r]);
        }
    }
}


CPU_INLINE void
quant_tile(const cpu_dot_t *job, int row, int group, const int n_r,
           const int layout)
{
    const cpu_act_t *act = job->act;
    const size_t first = cpu_act_at(act, row);
    const uint8_t *empty = cpu_act_empty(act, row);
    const uint8_t *w = job->seg->data + (size_t) group * job->seg->group_bytes;
    cursor_t at = { .q = act->q + 32 * first,
                    .d = act->d + first,
                    .s = act->s + first,
                    .sum = act->sum + first,
                    .half = act->half + first };
    __m512 acc[8], low[8];

    UNROLL
    for (int r = 0; r < n_r; r++) {
        acc[r] = _mm512_setzero_ps();
        low[r] = _mm512_setzero_ps();
    }

    for (int b = 0; b < act->n_blocks; b++, w += lay_bytes(layout)) {
        if (empty == NULL || !empty[b]) {
            block(&at, w, acc, low, n_r, layout);
        }

        at.q += 32 * act->tile;
        at.d += act->tile;
        at.s += act->tile;
        at.sum += act->tile;
        at.half += act->tile;
    }

    UNROLL
    for (int r = 0; r < n_r; r++) {
        if (lay_has_min(layout)) {
            acc[r] = _mm512_add_ps(acc[r], low[r]);
        }

        zmm_store(job, row + r, group, acc[r]);
    }
}


/* The 16 values of a record. */
CPU_INLINE __m512
load_floats(const uint8_t *p, const int layout)
{
    __m256i h;

    if (layout == OP_LAY_F32) {
        return _mm512_loadu_ps(p);
    }

    h = _mm256_loadu_si256((const __m256i *) p);

    if (layout == OP_LAY_F16) {
        return _mm512_cvtph_ps(h);
    }

    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}


CPU_INLINE void
float_tile(const cpu_dot_t *job, int row, int group, const int n_r,
           const int layout)
{
    const int bytes = layout == OP_LAY_F32 ? 64 : 32;
    const size_t n_in = (size_t) job->seg->n_in;
    const float *x = job->x + (size_t) row * n_in;
    const uint8_t *w = job->seg->data + (size_t) group * job->seg->group_bytes;
    __m512 acc[8];

    UNROLL
    for (int r = 0; r < n_r; r++) {
        acc[r] = _mm512_setzero_ps();
    }

    for (size_t i = 0; i < n_in; i++, w += bytes) {
        __m512 v = load_floats(w, layout);

        _mm_prefetch((const char *) w + AHEAD, _MM_HINT_T0);

        UNROLL
        for (int r = 0; r < n_r; r++) {
            acc[r] = _mm512_fmadd_ps(
                v, _mm512_set1_ps(x[(size_t) r * n_in + i]), acc[r]);
        }
    }

    UNROLL
    for (int r = 0; r < n_r; r++) {
        zmm_store(job, row + r, group, acc[r]);
    }
}


CPU_INLINE void
tile(const cpu_dot_t *job, int row, int group, const int n_r, const int layout)
{
    if (lay_is_float(layout)) {
        float_tile(job, row, group, n_r, layout);
    } else {
        quant_tile(job, row, group, n_r, layout);
    }
}


/* The rows left after tiles of 8: one tile, so that a step of few sequences
 * passes over the weights once. */
CPU_INLINE void
last_tile(const cpu_dot_t *job, int row, int group, int n_rows,
          const int layout)
{
    switch (n_rows) {
    case 1:
        tile(job, row, group, 1, layout);
        break;
    case 2:
        tile(job, row, group, 2, layout);
        break;
    case 3:
        tile(job, row, group, 3, layout);
        break;
    case 4:
        tile(job, row, group, 4, layout);
        break;
    case 5:
        tile(job, row, group, 5, layout);
        break;
    case 6:
        tile(job, row, group, 6, layout);
        break;
    case 7:
        tile(job, row, group, 7, layout);
        break;
    }
}


/* A tile of rows never crosses 16 rows of activations. */
CPU_INLINE void
dot_all(const cpu_dot_t *job, const cpu_range_t *range, const int layout)
{
    for (int group = range->group; group < range->group_end; group++) {
        int row = range->row;

        for (; row + 8 <= range->row_end; row += 8) {
            tile(job, row, group, 8, layout);
        }

        last_tile(job, row, group, range->row_end - row, layout);
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


static void
quantise(const float *x, const cpu_act_t *act, int row)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 top = _mm512_set1_ps(127.0f);
    const __m512 bottom = _mm512_set1_ps(-127.0f);
    size_t at = cpu_act_at(act, row);

    for (int b = 0; b < act->n_blocks; b++, x += 32, at += (size_t) act->tile) {
        __m512 u = _mm512_loadu_ps(x);
        __m512 v = _mm512_loadu_ps(x + 16);

        /* As integers magnitudes keep their order, and NaN is the largest. */
        __m512i m = _mm512_max_epi32(
            _mm512_and_si512(_mm512_castps_si512(u), magnitude),
            _mm512_and_si512(_mm512_castps_si512(v), magnitude));
        int32_t bits = _mm512_reduce_max_epi32(m);
        float d;
        __m512i i = _mm512_setzero_si512();
        __m512i j = i;

        memcpy(&d, &bits, sizeof(d));
        d /= 127.0f;

        if (d > 0.0f && bits < 0x7f800000) {
            __m512 dv = _mm512_set1_ps(d);

            u = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(u, dv), top), bottom);
            v = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(v, dv), top), bottom);
            i = _mm512_cvtps_epi32(u);
            j = _mm512_cvtps_epi32(v);
        }

        _mm_storeu_si128((__m128i *) (act->q + 32 * at),
                         _mm512_cvtepi32_epi8(i));
        _mm_storeu_si128((__m128i *) (act->q + 32 * at + 16),
                         _mm512_cvtepi32_epi8(j));
        act->half[at] = _mm512_reduce_add_epi32(i);
        act->sum[at] = _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
        act->d[at] = d;
        act->s[at] = d * (float) act->sum[at];
    }
}


const cpu_dot_table_t *
cpu_dot_avx512(void)
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
cpu_dot_avx512(void)
{
    return NULL;
}

#endif
