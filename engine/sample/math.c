/*
 * exp, log and the scans.  Called by sampler.c.
 *
 * Each scan works on 16 lanes with inner loops of fixed length, which fit the
 * vectors of every instruction set.  Sums are exact, so neither the lanes nor
 * the width in use shows.  What takes exp of a whole row is compiled for
 * several widths: at temperature 1 it is nearly all of what sampling costs.
 */

#include "engine/sample/math.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, QUAD = 4 };

typedef float quad_t __attribute__((vector_size(16)));
typedef int32_t quad_mask_t __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

/* below, e^x is not a normal float any more */
static const float exp_floor = -87.0f;


/* x within exp_floor … 0 of a number.  What is none goes to the floor. */
INLINE float
clamp(float x)
{
    x = x > exp_floor ? x : exp_floor;

    return x < 0.0f ? x : 0.0f;
}


/* e^x = 2^k e^r with |r| ≤ ln(2)/2; e^r by its power series up to r^7 (the
 * rest is below 6e-9).  k is rounded by adding 1.5 * 2^23, which leaves it in
 * the low bits; ln 2 is split so that k times its first part is exact. */
INLINE float
exp_lane(float x)
{
    const float shift = 12582912.0f;
    const float biased = x * 1.44269504f + shift;
    const float k = biased - shift;
    const float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float y = 1.0f / 5040;
    uint32_t bits;
    float scale;

    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;

    memcpy(&bits, &biased, sizeof(bits));
    bits = (bits + 127) << 23;
    memcpy(&scale, &bits, sizeof(scale));

    return y * scale;
}


float
math_exp(float x)
{
    return clamp(x) > exp_floor ? exp_lane(clamp(x)) : 0.0f;
}


/* A weight in two parts: a multiple of 2^-22, and the rest rounded (to even)
 * to a multiple of 2^-34.  Both ways to round are additions of a number with
 * bits that go no further; differences and the sum of the parts are exact. */
typedef struct {
    float high;
    float low;
} weight_t;


INLINE weight_t
split(float weight)
{
    const float high = (weight + 3.0f) - 3.0f;
    const float low = weight - high;

    return (weight_t){ high, (low + 0x1.8p-11f) - 0x1.8p-11f };
}


/* e^−87 is rounded to no weight, too. */
INLINE weight_t
weight_of_depth(float x)
{
    return split(exp_lane(clamp(x)));
}


float
math_weight(float x)
{
    const weight_t weight = weight_of_depth(x);

    return weight.high + weight.low;
}


/* x = 2^k m, m in [√½, √2); log m = 2 artanh(s) with s = (m − 1)/(m + 1),
 * |s| < 0.172, by its power series. */
double
math_log(double x)
{
    uint64_t bits;
    double m;

    memcpy(&bits, &x, sizeof(bits));

    int k = (int) (bits >> 52) - 1023;

    bits = (bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL;
    memcpy(&m, &bits, sizeof(m));

    if (m > 1.4142135623730951) {
        m *= 0.5;
        k++;
    }

    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double sum = 0.0;

    for (int i = 23; i >= 1; i -= 2) {
        sum = sum * s2 + 1.0 / i;
    }

    return 2.0 * s * sum + k * 0.6931471805599453;
}


/* a > b ? a : b, so b where a is NaN.  As a loop over the four gcc 12 makes it
 * several times slower. */
INLINE quad_t
max_of_quads(quad_t a, quad_t b)
{
    const quad_mask_t more = a > b;

    return (quad_t) (((quad_mask_t) a & more) | ((quad_mask_t) b & ~more));
}


/* Four values whose largest is the largest of 64. */
INLINE quad_t
quad_of_block(const float *x)
{
    quad_t max[4], v;

    for (int i = 0; i < 4; i++) {
        max[i] = (quad_t){ -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    }

    for (int j = 0; j < MATH_BLOCK; j += 4 * QUAD) {
        for (int i = 0; i < 4; i++) {
            memcpy(&v, x + j + i * QUAD, sizeof(v));
            max[i] = max_of_quads(v, max[i]);
        }
    }

    return max_of_quads(max_of_quads(max[0], max[1]),
                        max_of_quads(max[2], max[3]));
}


/* The maxima of four blocks: their quads are transposed on the way, because a
 * reduction within one takes several times as long as the loads. */
INLINE quad_t
max_of_blocks(const float *x)
{
    const quad_t a = quad_of_block(x);
    const quad_t b = quad_of_block(x + MATH_BLOCK);
    const quad_t c = quad_of_block(x + 2 * MATH_BLOCK);
    const quad_t d = quad_of_block(x + 3 * MATH_BLOCK);
    const quad_t ab = max_of_quads(__builtin_shufflevector(a, b, 0, 4, 1, 5),
                                   __builtin_shufflevector(a, b, 2, 6, 3, 7));
    const quad_t cd = max_of_quads(__builtin_shufflevector(c, d, 0, 4, 1, 5),
                                   __builtin_shufflevector(c, d, 2, 6, 3, 7));

    return max_of_quads(__builtin_shufflevector(ab, cd, 0, 1, 4, 5),
                        __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
}


static float
max_of_block(const float *x)
{
    const quad_t quad = quad_of_block(x);
    float max = quad[0];

    for (int i = 1; i < QUAD; i++) {
        max = quad[i] > max ? quad[i] : max;
    }

    return max;
}


/* The rest of a row that is no whole block, filled up with −∞. */
static void
fill_block(float *block, const float *x, int n)
{
    for (int i = 0; i < MATH_BLOCK; i++) {
        block[i] = i < n ? x[i] : -INFINITY;
    }
}


float
math_block_max(const float *x, int n, float *block)
{
    float best = -INFINITY;
    int b = 0;

    for (; n >= 4 * MATH_BLOCK; n -= 4 * MATH_BLOCK, x += 4 * MATH_BLOCK) {
        const quad_t quad = max_of_blocks(x);

        memcpy(block + b, &quad, sizeof(quad));
        b += 4;
    }

    for (; n >= MATH_BLOCK; n -= MATH_BLOCK, x += MATH_BLOCK) {
        block[b++] = max_of_block(x);
    }

    if (n > 0) {
        float rest[MATH_BLOCK];

        fill_block(rest, x, n);
        block[b++] = max_of_block(rest);
    }

    for (int i = 0; i < b; i++) {
        best = block[i] > best ? block[i] : best;
    }

    return best;
}


/* What exp of a row takes.  Dividing by 1 changes nothing, but takes time. */
typedef struct {
    float max;
    float temperature;
} scale_t;


INLINE weight_t
weight_of(float x, const scale_t *scale, const bool divide)
{
    const float depth = x - scale->max;

    return weight_of_depth(divide ? depth / scale->temperature : depth);
}


/* A lane has four values: sums of four parts are exact as floats. */
INLINE void
add_block(double *total, const float *x, const scale_t *scale,
          const bool divide)
{
    float high[LANES] = { 0 }, low[LANES] = { 0 };

    for (int j = 0; j < MATH_BLOCK; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            const weight_t weight = weight_of(x[j + i], scale, divide);

            high[i] += weight.high;
            low[i] += weight.low;
        }
    }

    for (int i = 0; i < LANES; i++) {
        total[i] += (double) high[i] + low[i];
    }
}


/* Whole blocks; those without any weight above zero are passed over. */
INLINE void
add_blocks(double *total, const math_row_t *row, const scale_t *scale,
           const bool divide)
{
    for (int b = 0; b < row->n / MATH_BLOCK; b++) {
        if ((row->block[b] - scale->max) / scale->temperature
            > MATH_WEIGHT_FLOOR) {
            add_block(total, row->x + b * MATH_BLOCK, scale, divide);
        }
    }
}


INLINE void
sum_blocks(double *total, const math_row_t *row, const scale_t *scale)
{
    if (scale->temperature == 1.0f) {
        add_blocks(total, row, scale, false);
    } else {
        add_blocks(total, row, scale, true);
    }
}


INLINE void
fill_weights(float *weight, const float *x, int n, const scale_t *scale)
{
    if (scale->temperature == 1.0f) {
        for (int i = 0; i < n; i++) {
            const weight_t w = weight_of(x[i], scale, false);

            weight[i] = w.high + w.low;
        }
    } else {
        for (int i = 0; i < n; i++) {
            const weight_t w = weight_of(x[i], scale, true);

            weight[i] = w.high + w.low;
        }
    }
}


/* --- one version for each width --- */

#define VERSION(suffix, target)                                               \
    target static void sum_##suffix(double *total, const math_row_t *row,     \
                                    const scale_t *scale)                     \
    {                                                                         \
        sum_blocks(total, row, scale);                                        \
    }                                                                         \
                                                                              \
    target static void weights_##suffix(float *weight, const float *x, int n, \
                                        const scale_t *scale)                 \
    {                                                                         \
        fill_weights(weight, x, n, scale);                                    \
    }

VERSION(plain, )
#if defined(__x86_64__)
VERSION(avx2, __attribute__((target("avx2"))))
VERSION(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

typedef struct {
    void (*sum)(double *total, const math_row_t *row, const scale_t *scale);
    void (*weights)(float *weight, const float *x, int n, const scale_t *scale);
} version_t;

static const version_t versions[MATH_WIDTHS] = {
    [MATH_PLAIN] = { sum_plain, weights_plain },
#if defined(__x86_64__)
    [MATH_AVX2] = { sum_avx2, weights_avx2 },
    [MATH_AVX512] = { sum_avx512, weights_avx512 },
#endif
};

static math_width_t limit = MATH_AVX512;


math_width_t
math_limit(math_width_t most)
{
    limit = most;

    return math_width();
}


math_width_t
math_width(void)
{
    math_width_t width = MATH_PLAIN;

#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        width = MATH_AVX2;
    }

    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl"))
    {
        width = MATH_AVX512;
    }
#endif

    return width < limit ? width : limit;
}


double
math_sum_exp(const math_row_t *row, float max, float temperature)
{
    const scale_t scale = { max < FLT_MAX ? max : FLT_MAX, temperature };
    const int whole = row->n / MATH_BLOCK * MATH_BLOCK;
    double total[LANES] = { 0 };
    double sum = 0.0;

    versions[math_width()].sum(total, row, &scale);

    if (row->n > whole) {
        float rest[MATH_BLOCK];

        fill_block(rest, row->x + whole, row->n - whole);
        add_block(total, rest, &scale, true);
    }

    for (int i = 0; i < LANES; i++) {
        sum += total[i];
    }

    return sum;
}


void
math_weights(float *weight, const float *x, int n, float max, float temperature)
{
    const scale_t scale = { max, temperature };

    versions[math_width()].weights(weight, x, n, &scale);
}
