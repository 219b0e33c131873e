/*
 * The attention kernels in AVX-512: a page's 16 scores are one register, so
 * are 16 columns of V.  Blocks of up to 6 rows by 4 registers keep 24 sums in
 * flight; each sum is one lane and keeps the order of cpu_attn.h.
 */

#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/cpu/cpu_attn.h"
#include "kernels/cpu/cpu_math.h"

#define ALWAYS static inline __attribute__((always_inline))

enum { MAX_ROWS = 6, MAX_REGS = 4 };

/* How a kernel finds K and V: widened, f16 or q8_0. */
enum { FLOATS, HALVES, BYTES };

/* Up to MAX_REGS pages of K. */
typedef struct {
    const void *k[MAX_REGS];
    const uint16_t *scales[MAX_REGS]; /* of BYTES */
    const uint8_t *next[MAX_REGS];    /* what to prefetch; not of FLOATS */
    int head_dim;
} keys_t;


/* Rows of the next block: blocks of equal height, six at most. */
ALWAYS int
block_rows(int rows)
{
    const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;

    return (rows + blocks - 1) / blocks;
}


/* Registers of the next column block, when `regs` are left: never a single
 * one beside a full one, for its few sums would wait for each other. */
ALWAYS int
block_regs(int regs)
{
    if (regs == 5) {
        return 3;
    }

    return regs < MAX_REGS ? regs : MAX_REGS;
}


ALWAYS __m512
load_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
}


/* Shuffling biased bytes into the fractions of floats, and an fma, should take
 * fewer steps than extending and converting, and a product; it is slower. */
ALWAYS __m512
load_bytes(const int8_t *p)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)));
}


/* Scores of rows × pages from `first` on.  `fetch`: also the pages to come; a
 * line at a time does not disturb the stream. */
ALWAYS void
scores_block(float *s, const float *q, const keys_t *keys, int first, int fetch,
             const int rows, const int pages, const int type)
{
    const int head_dim = keys->head_dim;
    const int block = type == BYTES ? OP_KV_BLOCK : head_dim;
    const int fetch_every = type == BYTES ? 4 : 2;
    const int row_bytes = type == BYTES ? OP_PAGE : OP_PAGE * 2;
    const void *const *k = keys->k + first;
    const uint8_t *const *next = keys->next + first;
    __m512 acc[MAX_ROWS][MAX_REGS];
    __m512 scale[MAX_REGS];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int p = 0; p < pages; p++) {
            acc[r][p] = _mm512_setzero_ps();
        }
    }

    for (int from = 0; from < head_dim; from += block) {
        const int to = from + block < head_dim ? from + block : head_dim;

        if (type == BYTES) {
            UNROLL
            for (int p = 0; p < pages; p++) {
                scale[p] = load_half(keys->scales[first + p]
                                     + from / OP_KV_BLOCK * OP_PAGE);
            }
        }

        for (int d = from; d < to; d++) {
            __m512 key[MAX_REGS];

            if (type != FLOATS && fetch && d % fetch_every == 0) {
                UNROLL
                for (int p = 0; p < pages; p++) {
                    _mm_prefetch((const char *) (next[p] + d * row_bytes),
                                 _MM_HINT_T0);
                }
            }

            UNROLL
            for (int p = 0; p < pages; p++) {
                if (type == BYTES) {
                    key[p] = _mm512_mul_ps(
                        load_bytes((const int8_t *) k[p] + d * OP_PAGE),
                        scale[p]);
                } else if (type == HALVES) {
                    key[p] = load_half((const uint16_t *) k[p] + d * OP_PAGE);
                } else {
                    key[p] = _mm512_load_ps((const float *) k[p] + d * OP_PAGE);
                }
            }

            UNROLL
            for (int r = 0; r < rows; r++) {
                const __m512 x = _mm512_set1_ps(q[r * head_dim + d]);

                UNROLL
                for (int p = 0; p < pages; p++) {
                    acc[r][p] = _mm512_fmadd_ps(x, key[p], acc[r][p]);
                }
            }
        }
    }

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int p = 0; p < pages; p++) {
            _mm512_store_ps(s + r * OP_SPLIT + p * OP_PAGE, acc[r][p]);
        }
    }
}


#define SCORES_CASE(r)                                                        \
    case r:                                                                   \
        if (pages == MAX_REGS) {                                              \
            scores_block(s, q, keys, 0, fetch, r, MAX_REGS, type);            \
        } else {                                                              \
            for (int p = 0; p < pages; p++) {                                 \
                scores_block(s + p * OP_PAGE, q, keys, p, fetch, r, 1, type); \
            }                                                                 \
        }                                                                     \
        break


ALWAYS void
scores_rows(float *s, const float *q, int rows, const keys_t *keys, int pages,
            const int type)
{
    int fetch = 1;

    while (rows > 0) {
        const int n = block_rows(rows);

        switch (n) {
            SCORES_CASE(1);
            SCORES_CASE(2);
            SCORES_CASE(3);
            SCORES_CASE(4);
            SCORES_CASE(5);
            SCORES_CASE(6);
        }

        rows -= n;
        s += n * OP_SPLIT;
        q += n * keys->head_dim;
        fetch = 0;
    }
}


static void
avx512_scores(const cpu_attn_split_t *split, float *s, const float *q, int rows)
{
    const cpu_kv_layout_t *at = &split->layout;
    const int n_pages = split->n_pages;
    keys_t keys = { .head_dim = split->head_dim };

    for (int p = 0; p < n_pages; p += MAX_REGS) {
        const int n = n_pages - p < MAX_REGS ? n_pages - p : MAX_REGS;

        /* After the last K come the first pages of V. */
        for (int i = 0; i < n; i++) {
            const int ahead = p + MAX_REGS + i;

            keys.k[i] = split->page[p + i] + at->k;
            keys.scales[i] = cpu_attn_halves(split, p + i, at->k_scales);
            keys.next[i] = ahead < n_pages ? split->page[ahead] + at->k
                                           : split->page[i] + at->v;
        }

        if (at->dtype == OP_Q8_0) {
            scores_rows(s + p * OP_PAGE, q, rows, &keys, n, BYTES);
        } else {
            scores_rows(s + p * OP_PAGE, q, rows, &keys, n, HALVES);
        }
    }
}


static void
avx512_scores_wide(float *s, const float *q, int rows, const float *k,
                   int n_pages, int head_dim)
{
    keys_t keys = { .head_dim = head_dim };

    for (int p = 0; p < n_pages; p++) {
        keys.k[p] = k + (size_t) p * OP_PAGE * head_dim;
    }
    scores_rows(s, q, rows, &keys, n_pages, FLOATS);
}


/* cpu_exp_neg() in every lane. */
ALWAYS __m512
exp_neg(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(CPU_EXP_LOWEST));

    const __m512 round = _mm512_set1_ps(CPU_EXP_ROUND);
    const __m512 t =
        _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(CPU_EXP_LOG2E)), round);
    const __m512 n = _mm512_sub_ps(t, round);
    const __m512 r = _mm512_sub_ps(
        _mm512_sub_ps(x, _mm512_mul_ps(n, _mm512_set1_ps(CPU_EXP_LN2_HI))),
        _mm512_mul_ps(n, _mm512_set1_ps(CPU_EXP_LN2_LO)));
    __m512 p = _mm512_set1_ps(CPU_EXP_C6);

    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(CPU_EXP_C5));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(CPU_EXP_C4));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(CPU_EXP_C3));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0.5f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));

    return _mm512_castsi512_ps(_mm512_add_epi32(
        _mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}


ALWAYS float
tree_sum(__m512 v)
{
    const __m256 a =
        _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b =
        _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    b = _mm_add_ss(b, _mm_shuffle_ps(b, b, 1));
    return _mm_cvtss_f32(b);
}


static void
avx512_softmax(float *s, int n, float *ml)
{
    const int full = (n - 1) / OP_PAGE; /* pages before the last */
    const __mmask16 mask = (__mmask16) ((1u << (n - full * OP_PAGE)) - 1);
    float *last = s + full * OP_PAGE;
    __m512 sum = _mm512_setzero_ps();
    __m512 max = _mm512_mask_blend_ps(mask, _mm512_set1_ps(-__builtin_inff()),
                                      _mm512_load_ps(last));

    for (float *p = s; p < last; p += OP_PAGE) {
        max = _mm512_max_ps(max, _mm512_load_ps(p));
    }

    ml[0] = _mm512_reduce_max_ps(max);
    max = _mm512_set1_ps(ml[0]);

    for (float *p = s; p < last; p += OP_PAGE) {
        const __m512 e = exp_neg(_mm512_sub_ps(_mm512_load_ps(p), max));

        _mm512_store_ps(p, e);
        sum = _mm512_add_ps(sum, e);
    }

    const __m512 e = _mm512_maskz_mov_ps(
        mask, exp_neg(_mm512_sub_ps(_mm512_load_ps(last), max)));

    _mm512_store_ps(last, e);
    ml[1] = tree_sum(_mm512_add_ps(sum, e));
}


/* The scales of a page's V for a block of columns, a register of 16 columns
 * each: out[c][t]. */
ALWAYS void
value_scales(const cpu_attn_split_t *split, float out[MAX_REGS][OP_PAGE],
             int page, int column, const int regs)
{
    const uint16_t *scales =
        cpu_attn_halves(split, page, split->layout.v_scales);

    UNROLL
    for (int c = 0; c < regs; c++) {
        _mm512_storeu_ps(
            out[c],
            load_half(scales + (column + c * 16) / OP_KV_BLOCK * OP_PAGE));
    }
}


/* The weighted sum of V over a split's pages for rows × registers. */
ALWAYS void
values_block(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
             int n, int column, const int rows, const int regs, const int type)
{
    const int bytes = type == BYTES ? 1 : 2; /* of a value */
    const int dim = split->head_dim;
    const size_t offset = split->layout.v + (size_t) (column * bytes);
    __m512 acc[MAX_ROWS][MAX_REGS];
    float scale[MAX_REGS][OP_PAGE];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            acc[r][c] = _mm512_setzero_ps();
        }
    }

    for (int p = 0; p * OP_PAGE < n; p++) {
        const int tokens =
            n - p * OP_PAGE < OP_PAGE ? n - p * OP_PAGE : OP_PAGE;
        const int ahead = p + MAX_REGS < split->n_pages ? p + MAX_REGS : p;
        const uint8_t *v = split->page[p] + offset;
        const uint8_t *next = split->page[ahead] + offset;
        const float *weight = s + p * OP_PAGE;

        if (type == BYTES) {
            value_scales(split, scale, p, column, regs);
        }

        for (int t = 0; t < tokens; t++) {
            __m512 value[MAX_REGS];

            UNROLL
            for (int c = 0; c < regs * 16 * bytes; c += 64) {
                _mm_prefetch((const char *) (next + c), _MM_HINT_T0);
            }

            UNROLL
            for (int c = 0; c < regs; c++) {
                value[c] =
                    type == BYTES
                        ? _mm512_mul_ps(load_bytes((const int8_t *) v + c * 16),
                                        _mm512_set1_ps(scale[c][t]))
                        : load_half((const uint16_t *) (const void *) v
                                    + c * 16);
            }

            UNROLL
            for (int r = 0; r < rows; r++) {
                const __m512 x = _mm512_set1_ps(weight[r * OP_SPLIT + t]);

                UNROLL
                for (int c = 0; c < regs; c++) {
                    acc[r][c] = _mm512_fmadd_ps(x, value[c], acc[r][c]);
                }
            }

            v += dim * bytes;
            next += dim * bytes;
        }
    }

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            _mm512_store_ps(o + r * ldo + column + c * 16, acc[r][c]);
        }
    }
}


/* The same over n rows of f32 V, onto what o holds. */
ALWAYS void
values_wide_block(float *o, int ldo, const float *s, const float *v, int n,
                  int dim, const int rows, const int regs)
{
    __m512 acc[MAX_ROWS][MAX_REGS];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            acc[r][c] = _mm512_load_ps(o + r * ldo + c * 16);
        }
    }

    for (int t = 0; t < n; t++, v += dim) {
        __m512 value[MAX_REGS];

        UNROLL
        for (int c = 0; c < regs; c++) {
            value[c] = _mm512_load_ps(v + c * 16);
        }

        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 x = _mm512_set1_ps(s[r * OP_SPLIT + t]);

            UNROLL
            for (int c = 0; c < regs; c++) {
                acc[r][c] = _mm512_fmadd_ps(x, value[c], acc[r][c]);
            }
        }
    }

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            _mm512_store_ps(o + r * ldo + c * 16, acc[r][c]);
        }
    }
}


#define VALUES_CASE(r, c)                                      \
    case r * 8 + c:                                            \
        values_block(split, o, ldo, s, n, column, r, c, type); \
        break

#define VALUES_WIDE_CASE(r, c)                                           \
    case r * 8 + c:                                                      \
        values_wide_block(o + column, ldo, s, v + column, n, dim, r, c); \
        break

#define ALL_REGS(name, r) \
    name(r, 1);           \
    name(r, 2);           \
    name(r, 3);           \
    name(r, 4)

#define ALL_BLOCKS(name) \
    ALL_REGS(name, 1);   \
    ALL_REGS(name, 2);   \
    ALL_REGS(name, 3);   \
    ALL_REGS(name, 4);   \
    ALL_REGS(name, 5);   \
    ALL_REGS(name, 6)


ALWAYS void
values_rows(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
            int rows, int n, const int type)
{
    while (rows > 0) {
        const int height = block_rows(rows);
        int column = 0;

        for (int regs; column < split->head_dim; column += regs * 16) {
            regs = block_regs((split->head_dim - column) / 16);
            switch (height * 8 + regs) {
                ALL_BLOCKS(VALUES_CASE);
            }
        }

        rows -= height;
        o += height * ldo;
        s += height * OP_SPLIT;
    }
}


static void
avx512_values(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
              int rows, int n)
{
    if (split->layout.dtype == OP_Q8_0) {
        values_rows(split, o, ldo, s, rows, n, BYTES);
    } else {
        values_rows(split, o, ldo, s, rows, n, HALVES);
    }
}


static void
avx512_values_wide(float *o, int ldo, const float *s, int rows, const float *v,
                   int n, int dim)
{
    while (rows > 0) {
        const int height = block_rows(rows);
        int column = 0;

        for (int regs; column < dim; column += regs * 16) {
            regs = block_regs((dim - column) / 16);
            switch (height * 8 + regs) {
                ALL_BLOCKS(VALUES_WIDE_CASE);
            }
        }

        rows -= height;
        o += height * ldo;
        s += height * OP_SPLIT;
    }
}


static void
widen_halves(float *out, const uint16_t *in, int n)
{
    int i = 0;

    for (; i + 16 <= n; i += 16) {
        _mm512_storeu_ps(out + i, load_half(in + i));
    }
    if (i < n) {
        const __mmask16 mask = (__mmask16) ((1u << (n - i)) - 1);

        _mm512_mask_storeu_ps(
            out + i, mask,
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, in + i)));
    }
}


/* n ≤ 32 bytes under one scale. */
ALWAYS void
widen_block(float *out, const int8_t *in, int n, __m512 scale)
{
    for (int i = 0; i < n; i += 16) {
        const __mmask16 mask =
            n - i >= 16 ? 0xffff : (__mmask16) ((1u << (n - i)) - 1);
        const __m512i x =
            _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, in + i));

        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_mul_ps(_mm512_cvtepi32_ps(x), scale));
    }
}


static void
avx512_widen_keys(const cpu_attn_split_t *split, float *out, int page)
{
    const cpu_kv_layout_t *at = &split->layout;
    const int head_dim = split->head_dim;

    if (at->dtype == OP_F16) {
        widen_halves(out, cpu_attn_halves(split, page, at->k),
                     OP_PAGE * head_dim);
        return;
    }

    const int8_t *key = (const int8_t *) split->page[page] + at->k;
    const uint16_t *scales = cpu_attn_halves(split, page, at->k_scales);

    for (int d = 0; d < head_dim; d++) {
        const __m512 scale = load_half(scales + d / OP_KV_BLOCK * OP_PAGE);

        _mm512_storeu_ps(out + d * OP_PAGE,
                         _mm512_mul_ps(load_bytes(key + d * OP_PAGE), scale));
    }
}


static void
avx512_widen_values(const cpu_attn_split_t *split, float *out, int ld, int page,
                    int n)
{
    const cpu_kv_layout_t *at = &split->layout;
    const int dim = split->head_dim;

    for (int t = 0; t < n; t++, out += ld) {
        if (at->dtype == OP_F16) {
            widen_halves(out, cpu_attn_halves(split, page, at->v) + t * dim,
                         dim);
            continue;
        }

        const int8_t *value =
            (const int8_t *) split->page[page] + at->v + t * dim;
        const uint16_t *scale = cpu_attn_halves(split, page, at->v_scales) + t;

        for (int b = 0; b < dim; b += OP_KV_BLOCK, scale += OP_PAGE) {
            const int left = dim - b < OP_KV_BLOCK ? dim - b : OP_KV_BLOCK;

            widen_block(out + b, value + b, left,
                        _mm512_set1_ps(_cvtsh_ss(*scale)));
        }
    }
}


static void
avx512_combine(float *y, const float *parts, int n, size_t stride, int head_dim,
               float sum)
{
    const __m512 divisor = _mm512_set1_ps(sum);

    for (int d = 0; d < head_dim; d += 16) {
        const int left = head_dim - d;
        const __mmask16 mask =
            left >= 16 ? 0xffff : (__mmask16) ((1u << left) - 1);
        __m512 acc = _mm512_setzero_ps();

        for (int i = 0; i < n; i++) {
            const float *part = parts + i * stride;

            acc =
                _mm512_fmadd_ps(_mm512_set1_ps(part[2]),
                                _mm512_load_ps(part + CPU_ATTN_HEAD + d), acc);
        }
        _mm512_mask_storeu_ps(y + d, mask, _mm512_div_ps(acc, divisor));
    }
}


const cpu_attn_kernels_t cpu_attn_avx512 = {
    .scores = avx512_scores,
    .scores_wide = avx512_scores_wide,
    .softmax = avx512_softmax,
    .values = avx512_values,
    .values_wide = avx512_values_wide,
    .widen_keys = avx512_widen_keys,
    .widen_values = avx512_widen_values,
    .combine = avx512_combine,
    .direct_rows = 2 * MAX_ROWS,
};

#endif
