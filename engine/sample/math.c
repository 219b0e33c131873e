/*
 * exp, log and the scans.  Called by sampler.c.
 *
 * Each scan works on 16 lanes with inner loops of fixed length, which fit the
 * vectors of every instruction set; a lane is reduced in ascending order, the
 * 16 lanes at the end likewise, so the width in use does not show.
 */

#include "engine/sample/math.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

/* below, e^x is not a normal float any more */
static const float exp_floor = -87.0f;


/* e^x = 2^k e^r with |r| ≤ ln(2)/2; e^r by its power series up to r^7 (the
 * rest is below 6e-9).  k is rounded by adding 1.5 * 2^23, which leaves it in
 * the low bits; ln 2 is split so that k times its first part is exact. */
static inline float
exp_lane(float x)
{
    const float shift = 12582912.0f;
    x = x > exp_floor ? x : exp_floor;
    x = x < 0.0f ? x : 0.0f;

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

    return x > exp_floor ? y * scale : 0.0f;
}


float
math_exp(float x)
{
    return exp_lane(x);
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


static inline float
max_of_block(const float *x)
{
    float lane[LANES];

    for (int i = 0; i < LANES; i++) {
        lane[i] = -INFINITY;
    }

    for (int j = 0; j < MATH_BLOCK; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            lane[i] = x[j + i] > lane[i] ? x[j + i] : lane[i];
        }
    }

    for (int half = LANES / 2; half >= 1; half /= 2) {
        for (int i = 0; i < half; i++) {
            lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
        }
    }

    return lane[0];
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

    for (; n >= MATH_BLOCK; n -= MATH_BLOCK, x += MATH_BLOCK, b++) {
        block[b] = max_of_block(x);
        best = block[b] > best ? block[b] : best;
    }

    if (n > 0) {
        float rest[MATH_BLOCK];

        fill_block(rest, x, n);
        block[b] = max_of_block(rest);
        best = block[b] > best ? block[b] : best;
    }

    return best;
}


/* Four values a lane are summed as float, which costs 1e-7, the lanes'
 * totals as double. */
static inline void
add_block(double *total, const float *x, float max, float temperature)
{
    float lane[LANES] = { 0 };

    for (int j = 0; j < MATH_BLOCK; j += LANES) {
        for (int i = 0; i < LANES; i++) {
            lane[i] += exp_lane((x[j + i] - max) / temperature);
        }
    }

    for (int i = 0; i < LANES; i++) {
        total[i] += lane[i];
    }
}


double
math_sum_exp(const float *x, int n, float max, float temperature)
{
    double total[LANES] = { 0 };
    double sum = 0.0;

    max = max < FLT_MAX ? max : FLT_MAX;

    for (; n >= MATH_BLOCK; n -= MATH_BLOCK, x += MATH_BLOCK) {
        add_block(total, x, max, temperature);
    }

    if (n > 0) {
        float rest[MATH_BLOCK];

        fill_block(rest, x, n);
        add_block(total, rest, max, temperature);
    }

    for (int i = 0; i < LANES; i++) {
        sum += total[i];
    }

    return sum;
}


void
math_weights(float *weight, const float *x, int n, float max, float temperature)
{
    for (int i = 0; i < n; i++) {
        weight[i] = exp_lane((x[i] - max) / temperature);
    }
}
