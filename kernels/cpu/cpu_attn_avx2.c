/*
 * The attention kernels in AVX2 with FMA and F16C: a page is two registers of
 * 8 tokens.  Blocks of 3 rows by 4 registers fill the 16 that there are; each
 * sum is one lane and keeps the order of cpu_attn.h.
 */

#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/cpu/cpu_attn.h"
#include "kernels/cpu/cpu_math.h"

#define ALWAYS static inline __attribute__((always_inline))

enum { MAX_ROWS = 3, MAX_REGS = 4 };

/* How a kernel finds K and V: widened, f16 or q8_0. */
enum { FLOATS, HALVES, BYTES };

/* Pages of K. */
typedef struct {
    const void *k[CPU_ATTN_PAGES];
    const uint16_t *scales[CPU_ATTN_PAGES]; /* of BYTES */
    int head_dim;
} keys_t;


ALWAYS __m256
load_half(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p));
}


ALWAYS __m256
load_bytes(const int8_t *p)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)));
}


ALWAYS int
block_rows(int rows)
{
    return rows == 4 ? 2 : rows < MAX_ROWS ? rows : MAX_ROWS;
}


/* Scores of rows × 1 or 2 pages from `first` on. */
ALWAYS void
scores_block(float *s, const float *q, const keys_t *keys, int first,
             const int rows, const int pages, const int type)
{
    const int head_dim = keys->head_dim;
    const int block = type == BYTES ? OP_KV_BLOCK : head_dim;
    const void *const *k = keys->k + first;
    __m256 acc[MAX_ROWS][MAX_REGS];
    __m256 scale[MAX_REGS];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < 2 * pages; i++) {
            acc[r][i] = _mm256_setzero_ps();
        }
    }

    for (int from = 0; from < head_dim; from += block) {
        const int to = from + block < head_dim ? from + block : head_dim;

        if (type == BYTES) {
            UNROLL
            for (int i = 0; i < 2 * pages; i++) {
                scale[i] =
                    load_half(keys->scales[first + i / 2]
                              + from / OP_KV_BLOCK * OP_PAGE + i % 2 * 8);
            }
        }

        for (int d = from; d < to; d++) {
            UNROLL
            for (int i = 0; i < 2 * pages; i++) {
                const int at = d * OP_PAGE + i % 2 * 8;
                const __m256 key =
                    type == BYTES ? _mm256_mul_ps(
                        load_bytes((const int8_t *) k[i / 2] + at), scale[i])
                    : type == HALVES
                        ? load_half((const uint16_t *) k[i / 2] + at)
                        : _mm256_load_ps((const float *) k[i / 2] + at);

                UNROLL
                for (int r = 0; r < rows; r++) {
                    acc[r][i] = _mm256_fmadd_ps(
                        _mm256_broadcast_ss(q + r * head_dim + d), key,
                        acc[r][i]);
                }
            }
        }
    }

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < 2 * pages; i++) {
            _mm256_store_ps(s + r * OP_SPLIT + i * 8, acc[r][i]);
        }
    }
}


#define SCORES_CASE(r)                                             \
    case r:                                                        \
        if (n == 2) {                                              \
            scores_block(s + p * OP_PAGE, q, keys, p, r, 2, type); \
        } else {                                                   \
            scores_block(s + p * OP_PAGE, q, keys, p, r, 1, type); \
        }                                                          \
        break


ALWAYS void
scores_rows(float *s, const float *q, int rows, const keys_t *keys, int pages,
            const int type)
{
    while (rows > 0) {
        const int height = block_rows(rows);

        for (int p = 0; p < pages; p += 2) {
            const int n = pages - p < 2 ? 1 : 2;

            switch (height) {
                SCORES_CASE(1);
                SCORES_CASE(2);
                SCORES_CASE(3);
            }
        }

        rows -= height;
        s += height * OP_SPLIT;
        q += height * keys->head_dim;
    }
}


static void
avx2_scores(const cpu_attn_split_t *split, float *s, const float *q, int rows)
{
    const cpu_kv_layout_t *at = &split->layout;
    keys_t keys = { .head_dim = split->head_dim };

    for (int p = 0; p < split->n_pages; p++) {
        keys.k[p] = split->page[p] + at->k;
        keys.scales[p] = cpu_attn_halves(split, p, at->k_scales);
    }

    if (at->dtype == OP_Q8_0) {
        scores_rows(s, q, rows, &keys, split->n_pages, BYTES);
    } else {
        scores_rows(s, q, rows, &keys, split->n_pages, HALVES);
    }
}


static void
avx2_scores_wide(float *s, const float *q, int rows, const float *k,
                 int n_pages, int head_dim)
{
    keys_t keys = { .head_dim = head_dim };

    for (int p = 0; p < n_pages; p++) {
        keys.k[p] = k + (size_t) p * OP_PAGE * head_dim;
    }
    scores_rows(s, q, rows, &keys, n_pages, FLOATS);
}


/* cpu_exp_neg() in every lane. */
ALWAYS __m256
exp_neg(__m256 x)
{
    x = _mm256_max_ps(x, _mm256_set1_ps(CPU_EXP_LOWEST));

    const __m256 round = _mm256_set1_ps(CPU_EXP_ROUND);
    const __m256 t =
        _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(CPU_EXP_LOG2E)), round);
    const __m256 n = _mm256_sub_ps(t, round);
    const __m256 r = _mm256_sub_ps(
        _mm256_sub_ps(x, _mm256_mul_ps(n, _mm256_set1_ps(CPU_EXP_LN2_HI))),
        _mm256_mul_ps(n, _mm256_set1_ps(CPU_EXP_LN2_LO)));
    __m256 p = _mm256_set1_ps(CPU_EXP_C6);

    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(CPU_EXP_C5));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(CPU_EXP_C4));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(CPU_EXP_C3));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(0.5f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f));

    return _mm256_castsi256_ps(_mm256_add_epi32(
        _mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}


/* All ones in the lanes 8 h + i < n of half h. */
ALWAYS __m256
lane_mask(int n, int h)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8 * h), lane));
}


ALWAYS float
max_lane(__m256 v)
{
    __m128 m =
        _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}


ALWAYS float
tree_sum(__m256 low, __m256 high)
{
    const __m256 a = _mm256_add_ps(low, high);
    __m128 b =
        _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    b = _mm_add_ss(b, _mm_shuffle_ps(b, b, 1));
    return _mm_cvtss_f32(b);
}


static void
avx2_softmax(float *s, int n, float *ml)
{
    const int full = (n - 1) / OP_PAGE; /* pages before the last */
    const int valid = n - full * OP_PAGE;
    const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
    float *last = s + full * OP_PAGE;
    __m256 max = lowest;
    __m256 sum[2];

    for (float *p = s; p < last; p += 8) {
        max = _mm256_max_ps(max, _mm256_load_ps(p));
    }
    for (int h = 0; h < 2; h++) {
        max = _mm256_max_ps(max, _mm256_blendv_ps(lowest,
                                                  _mm256_load_ps(last + 8 * h),
                                                  lane_mask(valid, h)));
    }

    ml[0] = max_lane(max);
    max = _mm256_set1_ps(ml[0]);

    for (int h = 0; h < 2; h++) {
        float *p = s + 8 * h;

        sum[h] = _mm256_setzero_ps();
        for (; p < last; p += OP_PAGE) {
            const __m256 e = exp_neg(_mm256_sub_ps(_mm256_load_ps(p), max));

            _mm256_store_ps(p, e);
            sum[h] = _mm256_add_ps(sum[h], e);
        }

        const __m256 e =
            _mm256_and_ps(lane_mask(valid, h),
                          exp_neg(_mm256_sub_ps(_mm256_load_ps(p), max)));

        _mm256_store_ps(p, e);
        sum[h] = _mm256_add_ps(sum[h], e);
    }

    ml[1] = tree_sum(sum[0], sum[1]);
}


/* rows × regs sums of weight times V over n tokens, rows of V `dim` apart,
 * onto acc.  scale: of BYTES, [register][token]. */
ALWAYS void
values_run(__m256 acc[MAX_ROWS][MAX_REGS], const float *s, const void *v,
           float scale[MAX_REGS][OP_PAGE], int n, int dim, const int rows,
           const int regs, const int type)
{
    for (int t = 0; t < n; t++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            const int at = t * dim + c * 8;
            const __m256 value =
                type == BYTES
                    ? _mm256_mul_ps(load_bytes((const int8_t *) v + at),
                                    _mm256_broadcast_ss(&scale[c][t]))
                : type == HALVES ? load_half((const uint16_t *) v + at)
                                 : _mm256_load_ps((const float *) v + at);

            UNROLL
            for (int r = 0; r < rows; r++) {
                acc[r][c] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(s + r * OP_SPLIT + t),
                                    value, acc[r][c]);
            }
        }
    }
}


ALWAYS void
values_store(float *o, int ldo, __m256 acc[MAX_ROWS][MAX_REGS], const int rows,
             const int regs)
{
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            _mm256_store_ps(o + r * ldo + c * 8, acc[r][c]);
        }
    }
}


/* The scales of a page's V for a block of columns, a register of 8 columns
 * each: out[c][t]. */
ALWAYS void
value_scales(const cpu_attn_split_t *split, float out[MAX_REGS][OP_PAGE],
             int page, int column, const int regs)
{
    const uint16_t *scales =
        cpu_attn_halves(split, page, split->layout.v_scales);

    UNROLL
    for (int c = 0; c < regs; c++) {
        const uint16_t *from =
            scales + (column + c * 8) / OP_KV_BLOCK * OP_PAGE;

        _mm256_storeu_ps(out[c], load_half(from));
        _mm256_storeu_ps(out[c] + 8, load_half(from + 8));
    }
}


ALWAYS void
values_block(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
             int n, int column, const int rows, const int regs, const int type)
{
    const int dim = split->head_dim;
    const size_t offset =
        split->layout.v + (size_t) (column * (type == BYTES ? 1 : 2));
    __m256 acc[MAX_ROWS][MAX_REGS];
    float scale[MAX_REGS][OP_PAGE];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            acc[r][c] = _mm256_setzero_ps();
        }
    }

    for (int t = 0; t < n; t += OP_PAGE) {
        if (type == BYTES) {
            value_scales(split, scale, t / OP_PAGE, column, regs);
        }
        values_run(acc, s + t, split->page[t / OP_PAGE] + offset, scale,
                   n - t < OP_PAGE ? n - t : OP_PAGE, dim, rows, regs, type);
    }

    values_store(o + column, ldo, acc, rows, regs);
}


ALWAYS void
values_wide_block(float *o, int ldo, const float *s, const float *v, int n,
                  int dim, const int rows, const int regs)
{
    __m256 acc[MAX_ROWS][MAX_REGS];

    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < regs; c++) {
            acc[r][c] = _mm256_load_ps(o + r * ldo + c * 8);
        }
    }

    values_run(acc, s, v, NULL, n, dim, rows, regs, FLOATS);
    values_store(o, ldo, acc, rows, regs);
}


/* Columns come in 16s, so a block is 4 registers or the last 2. */
#define VALUES_CASE(r)                                                    \
    case r:                                                               \
        if (regs == MAX_REGS) {                                           \
            values_block(split, o, ldo, s, n, column, r, MAX_REGS, type); \
        } else {                                                          \
            values_block(split, o, ldo, s, n, column, r, 2, type);        \
        }                                                                 \
        break

#define VALUES_WIDE_CASE(r)                                                  \
    case r:                                                                  \
        if (regs == MAX_REGS) {                                              \
            values_wide_block(o + column, ldo, s, v + column, n, dim, r,     \
                              MAX_REGS);                                     \
        } else {                                                             \
            values_wide_block(o + column, ldo, s, v + column, n, dim, r, 2); \
        }                                                                    \
        break


ALWAYS void
values_rows(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
            int rows, int n, const int type)
{
    while (rows > 0) {
        const int height = block_rows(rows);
        int column = 0;

        for (int regs; column < split->head_dim; column += regs * 8) {
            regs = split->head_dim - column >= MAX_REGS * 8 ? MAX_REGS : 2;
            switch (height) {
                VALUES_CASE(1);
                VALUES_CASE(2);
                VALUES_CASE(3);
            }
        }

        rows -= height;
        o += height * ldo;
        s += height * OP_SPLIT;
    }
}


static void
avx2_values(const cpu_attn_split_t *split, float *o, int ldo, const float *s,
            int rows, int n)
{
    if (split->layout.dtype == OP_Q8_0) {
        values_rows(split, o, ldo, s, rows, n, BYTES);
    } else {
        values_rows(split, o, ldo, s, rows, n, HALVES);
    }
}


static void
avx2_values_wide(float *o, int ldo, const float *s, int rows, const float *v,
                 int n, int dim)
{
    while (rows > 0) {
        const int height = block_rows(rows);
        int column = 0;

        for (int regs; column < dim; column += regs * 8) {
            regs = dim - column >= MAX_REGS * 8 ? MAX_REGS : 2;
            switch (height) {
                VALUES_WIDE_CASE(1);
                VALUES_WIDE_CASE(2);
                VALUES_WIDE_CASE(3);
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

    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(out + i, load_half(in + i));
    }
    for (; i < n; i++) {
        out[i] = _cvtsh_ss(in[i]);
    }
}


static void
avx2_widen_keys(const cpu_attn_split_t *split, float *out, int page)
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

    for (int i = 0; i < OP_PAGE * head_dim; i += 8) {
        const uint16_t *scale =
            scales + i / (OP_PAGE * OP_KV_BLOCK) * OP_PAGE + i % OP_PAGE;

        _mm256_storeu_ps(out + i,
                         _mm256_mul_ps(load_bytes(key + i), load_half(scale)));
    }
}


static void
avx2_widen_values(const cpu_attn_split_t *split, float *out, int ld, int page,
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
        const uint16_t *scales = cpu_attn_halves(split, page, at->v_scales) + t;
        int i = 0;

        for (; i + 8 <= dim; i += 8) {
            const float d = _cvtsh_ss(scales[i / OP_KV_BLOCK * OP_PAGE]);

            _mm256_storeu_ps(out + i, _mm256_mul_ps(load_bytes(value + i),
                                                    _mm256_set1_ps(d)));
        }
        for (; i < dim; i++) {
            out[i] =
                (float) value[i] * _cvtsh_ss(scales[i / OP_KV_BLOCK * OP_PAGE]);
        }
    }
}


static void
avx2_combine(float *y, const float *parts, int n, size_t stride, int head_dim,
             float sum)
{
    for (int d = 0; d < head_dim; d += 8) {
        const int left = head_dim - d < 8 ? head_dim - d : 8;
        __m256 acc = _mm256_setzero_ps();

        for (int i = 0; i < n; i++) {
            const float *part = parts + i * stride;

            acc =
                _mm256_fmadd_ps(_mm256_broadcast_ss(part + 2),
                                _mm256_load_ps(part + CPU_ATTN_HEAD + d), acc);
        }
        _mm256_maskstore_ps(y + d, _mm256_castps_si256(lane_mask(left, 0)),
                            _mm256_div_ps(acc, _mm256_set1_ps(sum)));
    }
}


const cpu_attn_kernels_t cpu_attn_avx2 = {
    .scores = avx2_scores,
    .scores_wide = avx2_scores_wide,
    .softmax = avx2_softmax,
    .values = avx2_values,
    .values_wide = avx2_values_wide,
    .widen_keys = avx2_widen_keys,
    .widen_values = avx2_widen_values,
    .combine = avx2_combine,
    .direct_rows = 2 * MAX_ROWS,
};

#endif
