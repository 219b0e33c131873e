/*
 * The bodies of the row kernels of cpu_point.h, included by one source file
 * per instruction set, which defines CPU_POINT_TABLE as the table's name.
 * The loops are for the compiler to vectorise; it may not reorder a float
 * sum, which is why rmsnorm writes its 16 lanes out.
 */

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_math.h"
#include "kernels/cpu/cpu_point.h"
#include "kernels/op/op.h"
#include "kernels/op/tensor.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

enum { LANES = 16 };
enum { HALF_INFINITY = 0x7c00, HALF_NAN = 0x7e00 };


static void
point_rmsnorm(float *y, const float *x, const float *w, int dim, float eps)
{
    float lane[LANES] = { 0.0f };
    int i = 0;

    for (; i + LANES <= dim; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            lane[j] += x[i + j] * x[i + j];
        }
    }
    for (int j = 0; i + j < dim; j++) {
        lane[j] += x[i + j] * x[i + j];
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) {
            lane[j] += lane[j + half];
        }
    }

    const float factor = 1.0f / sqrtf(lane[0] / (float) dim + eps);

    for (i = 0; i < dim; i++) {
        y[i] = x[i] * factor * w[i];
    }
}


static void
point_silu_mul(float *restrict y, const float *restrict gate,
               const float *restrict up, int n)
{
    for (int i = 0; i < n; i++) {
        y[i] = gate[i] / (1.0f + cpu_exp(-gate[i])) * up[i];
    }
}


/* x[j] = x[j] * c[j] + x[its partner] * s[j], the sign being in s.  Written as
 * a difference beside a sum, gcc 12 makes it vfmaddsub, fused in spite of
 * -ffp-contract=off. */
static void
rope_pairs(float *restrict x, const float *restrict c, const float *restrict s,
           int pairs)
{
    for (int i = 0; i < pairs; i++) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];

        x[2 * i] = a * c[2 * i] + b * s[2 * i];
        x[2 * i + 1] = b * c[2 * i + 1] + a * s[2 * i + 1];
    }
}


static void
rope_halves(float *restrict low, float *restrict high, const float *restrict c,
            const float *restrict s, int pairs)
{
    for (int i = 0; i < pairs; i++) {
        const float a = low[i];
        const float b = high[i];

        low[i] = a * c[i] + b * s[i];
        high[i] = b * c[i + pairs] + a * s[i + pairs];
    }
}


static void
point_rope(float *x, int n_heads, int head_dim, const float *cos_sin, int rot,
           int mode)
{
    const int pairs = rot / 2;
    const int step = mode == OP_ROPE_PAIRS ? 2 : 1;
    const int partner = mode == OP_ROPE_PAIRS ? 1 : pairs;
    float c[CPU_MAX_HEAD_DIM];
    float s[CPU_MAX_HEAD_DIM];

    for (int i = 0; i < pairs; i++) {
        c[step * i] = cos_sin[2 * i];
        c[step * i + partner] = cos_sin[2 * i];
        s[step * i] = -cos_sin[2 * i + 1];
        s[step * i + partner] = cos_sin[2 * i + 1];
    }

    for (int h = 0; h < n_heads; h++, x += head_dim) {
        if (mode == OP_ROPE_PAIRS) {
            rope_pairs(x, c, s, pairs);
        } else {
            rope_halves(x, x + pairs, c, s, pairs);
        }
    }
}


static void
point_narrow(uint16_t *out, const float *in, int n)
{
    int i = 0;

#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i *) (out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i),
                                         _MM_FROUND_TO_NEAREST_INT));
    }
#endif

    for (; i < n; i++) {
        out[i] = op_float_to_half(in[i]);
    }
}


/* As integers the bits of magnitudes are in order, with NaN above Inf: one
 * maximum finds both. */
static uint16_t
point_quantise(int8_t *restrict out, const float *restrict in, int n)
{
    int32_t top = 0;

    for (int i = 0; i < n; i++) {
        const int32_t bits = cpu_float_bits(in[i]) & INT32_MAX;

        top = bits > top ? bits : top;
    }

    const uint16_t scale = op_float_to_half(cpu_bits_float(top) / 127.0f);
    const float d = op_half_to_float(scale);

    if (scale == 0 || scale >= HALF_INFINITY) {
        memset(out, 0, n);
        return scale == 0 ? 0 : HALF_NAN;
    }

    for (int i = 0; i < n; i++) {
        float q = in[i] / d;

        q = q < 127.0f ? q : 127.0f;
        q = q > -127.0f ? q : -127.0f;
        out[i] =
            (int8_t) (cpu_float_bits(q + CPU_EXP_ROUND) - CPU_EXP_ROUND_BITS);
    }

    return scale;
}


const cpu_point_kernels_t CPU_POINT_TABLE = {
    .rmsnorm = point_rmsnorm,
    .silu_mul = point_silu_mul,
    .rope = point_rope,
    .narrow = point_narrow,
    .quantise = point_quantise,
};
