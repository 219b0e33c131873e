/*
 * The exponential of SiLU and softmax, in multiplications and additions that
 * are never fused, so that it has the same bits on every device, under
 * emulation, and in the CPU backend, whose constants these are: exp(x) =
 * 2^n * e^r, n = x / ln 2 rounded to even, e^r by its series to degree 6;
 * relative error below 3e-7.
 */

#ifndef KERNELS_CUDA_CUDA_MATH_CUH
#define KERNELS_CUDA_CUDA_MATH_CUH

#include "kernels/cuda/prim.cuh"

#define CUDA_EXP_LOG2E 1.44269504f
#define CUDA_EXP_ROUND 12582912.0f   /* 1.5 * 2^23: adding it rounds to even */
#define CUDA_EXP_LN2_HI 0.693145752f /* 15 bits, so n * this is exact */
#define CUDA_EXP_LN2_LO 1.42860677e-6f
#define CUDA_EXP_C6 1.3888889e-3f
#define CUDA_EXP_C5 8.3333333e-3f
#define CUDA_EXP_C4 4.1666667e-2f
#define CUDA_EXP_C3 1.6666667e-1f
#define CUDA_EXP_ROUND_BITS 0x4b400000


/* e^r for x = n ln 2 + r; n + CUDA_EXP_ROUND goes to *shifted. */
static __device__ __forceinline__ float
cuda_exp_parts(float x, float *shifted)
{
    const float t = x * CUDA_EXP_LOG2E + CUDA_EXP_ROUND;
    const float n = t - CUDA_EXP_ROUND;
    const float r = (x - n * CUDA_EXP_LN2_HI) - n * CUDA_EXP_LN2_LO;
    float p = CUDA_EXP_C6 * r + CUDA_EXP_C5;

    p = p * r + CUDA_EXP_C4;
    p = p * r + CUDA_EXP_C3;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    *shifted = t;

    return p * r + 1.0f;
}


/* For x ≤ 0, as in softmax; below −87 as at −87, about 1.6e-38. */
static __device__ __forceinline__ float
cuda_exp_neg(float x)
{
    float t;
    const float p = cuda_exp_parts(x > -87.0f ? x : -87.0f, &t);

    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
}


/* For every x: 0 and +Inf where the result leaves the range.  Two factors,
 * because 2^n alone does not reach subnormals and 2^128. */
static __device__ __forceinline__ float
cuda_exp(float x)
{
    float t;

    x = x > -104.0f ? x : -104.0f;
    x = x < 89.0f ? x : 89.0f;

    const float p = cuda_exp_parts(x, &t);
    const int n = (int) __float_as_uint(t) - CUDA_EXP_ROUND_BITS;
    const int half = n >> 1;

    return p * __uint_as_float((uint32_t) (half + 127) << 23)
           * __uint_as_float((uint32_t) (n - half + 127) << 23);
}

#endif /* KERNELS_CUDA_CUDA_MATH_CUH */
