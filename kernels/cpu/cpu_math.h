/*
 * The exponential that softmax and SiLU use, in the plain operations that
 * every instruction set has: multiply, add, integer add and shift, none of
 * them fused.  So the scalar and the vector forms give the same bits, which
 * libm does not promise.  exp(x) = 2^n * e^r, n = x / ln 2 rounded to even,
 * e^r by its series to degree 6; relative error below 3e-7.
 *
 * The vector kernels repeat these operations in the same order.
 */

#ifndef KERNELS_CPU_CPU_MATH_H
#define KERNELS_CPU_CPU_MATH_H

#include <stdint.h>
#include <string.h>

#define CPU_EXP_LOWEST (-87.0f) /* e^x is still normal here */
#define CPU_EXP_LOG2E 1.44269504f
#define CPU_EXP_ROUND 12582912.0f   /* 1.5 * 2^23: adding it rounds to even */
#define CPU_EXP_LN2_HI 0.693145752f /* 15 bits, so n * this is exact */
#define CPU_EXP_LN2_LO 1.42860677e-6f
#define CPU_EXP_C6 1.3888889e-3f
#define CPU_EXP_C5 8.3333333e-3f
#define CPU_EXP_C4 4.1666667e-2f
#define CPU_EXP_C3 1.6666667e-1f

enum { CPU_EXP_ROUND_BITS = 0x4B400000 };


static inline int32_t
cpu_float_bits(float f)
{
    int32_t i;

    memcpy(&i, &f, sizeof(i));
    return i;
}


static inline float
cpu_bits_float(int32_t i)
{
    float f;

    memcpy(&f, &i, sizeof(f));
    return f;
}


/* e^r for x = n ln 2 + r; n + CPU_EXP_ROUND goes to *shifted. */
static inline float
cpu_exp_parts(float x, float *shifted)
{
    const float t = x * CPU_EXP_LOG2E + CPU_EXP_ROUND;
    const float n = t - CPU_EXP_ROUND;
    const float r = (x - n * CPU_EXP_LN2_HI) - n * CPU_EXP_LN2_LO;
    float p = CPU_EXP_C6 * r + CPU_EXP_C5;

    p = p * r + CPU_EXP_C4;
    p = p * r + CPU_EXP_C3;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    *shifted = t;
    return p * r + 1.0f;
}


/* For x ≤ 0, as in softmax; below −87 as at −87, about 1.6e-38. */
static inline float
cpu_exp_neg(float x)
{
    float t;
    const float p = cpu_exp_parts(x > CPU_EXP_LOWEST ? x : CPU_EXP_LOWEST, &t);

    return cpu_bits_float((int32_t) ((uint32_t) cpu_float_bits(p)
                                     + ((uint32_t) cpu_float_bits(t) << 23)));
}


/* For every x: 0 and +Inf where the result leaves the range.  Two factors,
 * because 2^n alone does not reach subnormals and 2^128. */
static inline float
cpu_exp(float x)
{
    float t;

    x = x > -104.0f ? x : -104.0f;
    x = x < 89.0f ? x : 89.0f;

    const float p = cpu_exp_parts(x, &t);
    const int32_t n = cpu_float_bits(t) - CPU_EXP_ROUND_BITS;
    const int32_t half = n >> 1;

    return p * cpu_bits_float((half + 127) * (1 << 23))
           * cpu_bits_float((n - half + 127) * (1 << 23));
}

#endif /* KERNELS_CPU_CPU_MATH_H */
