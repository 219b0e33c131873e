/*
 * What the kernels of quantised products share: a block's quants as words of
 * four signed bytes, its scales, and what a dot adds to a sum.  Included by
 * cuda_gemv.cu and cuda_gemm.cu; the order of additions is in cuda_linear.h.
 */

#ifndef KERNELS_CUDA_CUDA_DOT_CUH
#define KERNELS_CUDA_CUDA_DOT_CUH

#include "kernels/cuda/cuda_linear.h"

/* Layouts at compile time. */
template <int LAYOUT> struct lay_t {
    static constexpr int bits = LAYOUT == OP_LAY_Q4_D16
                                        || LAYOUT == OP_LAY_Q4_DM16
                                        || LAYOUT == OP_LAY_Q4_DM32
                                    ? 4
                                    : 8;
    static constexpr int quant_bytes = bits * 4;
    static constexpr bool has_min =
        LAYOUT == OP_LAY_Q4_DM16 || LAYOUT == OP_LAY_Q4_DM32
        || LAYOUT == OP_LAY_Q8_DM16 || LAYOUT == OP_LAY_Q8_DM32;
    static constexpr int halves = LAYOUT == OP_LAY_Q8_DD32 ? 2 : 1;
    static constexpr bool wide = LAYOUT == OP_LAY_Q4_DM32
                                 || LAYOUT == OP_LAY_Q8_DM32
                                 || LAYOUT == OP_LAY_Q8_DD32;
    static constexpr int scale_bytes = wide ? 8 : has_min ? 4 : 2;

    /* Nibbles in two's complement are read as the upper four bits of a byte:
     * 16 times their value, which a shift of the dot takes back. */
    static constexpr int shift = LAYOUT == OP_LAY_Q4_D16 ? 4 : 0;
};

/* d, and m or the second half's d. */
typedef struct {
    float d;
    float m;
} cuda_scale_t;


template <int LAYOUT>
static __device__ __forceinline__ cuda_scale_t
cuda_scale_load(const uint8_t *p)
{
    cuda_scale_t s = { 0.0f, 0.0f };

    if (lay_t<LAYOUT>::wide) {
        const float2 v = *(const float2 *) p;

        s.d = v.x;
        s.m = v.y;

    } else if (lay_t<LAYOUT>::has_min) {
        const uint32_t v = *(const uint32_t *) p;

        s.d = f16_to_f32((uint16_t) v);
        s.m = f16_to_f32((uint16_t) (v >> 16));

    } else {
        s.d = f16_to_f32(*(const uint16_t *) p);
    }

    return s;
}


/* Inputs 0-15 of a word of nibbles, and 16-31. */
template <int LAYOUT>
static __device__ __forceinline__ uint32_t
cuda_low(uint32_t word)
{
    return lay_t<LAYOUT>::shift ? word << 4 & 0xf0f0f0f0u : word & 0x0f0f0f0fu;
}


template <int LAYOUT>
static __device__ __forceinline__ uint32_t
cuda_high(uint32_t word)
{
    return lay_t<LAYOUT>::shift ? word & 0xf0f0f0f0u : word >> 4 & 0x0f0f0f0fu;
}


/* One block's dot (of its halves) onto an output's sum.  x: d and d * sum of
 * the activations. */
template <int LAYOUT>
static __device__ __forceinline__ float
cuda_add_block(float acc, const int *dot, cuda_scale_t w, float2 x)
{
    acc = fmaf((float) (dot[0] >> lay_t<LAYOUT>::shift), w.d * x.x, acc);

    if (lay_t<LAYOUT>::halves == 2) {
        acc = fmaf((float) dot[1], w.m * x.x, acc);
    }
    if (lay_t<LAYOUT>::has_min) {
        acc = fmaf(w.m, x.y, acc);
    }

    return acc;
}


/* Calls KERNEL<layout, …> for the layout of a segment. */
#define CUDA_BY_LAYOUT(layout, call) \
    switch (layout) {                \
    case OP_LAY_Q4_D16:              \
        call(OP_LAY_Q4_D16);         \
        break;                       \
    case OP_LAY_Q4_DM16:             \
        call(OP_LAY_Q4_DM16);        \
        break;                       \
    case OP_LAY_Q4_DM32:             \
        call(OP_LAY_Q4_DM32);        \
        break;                       \
    case OP_LAY_Q8_D16:              \
        call(OP_LAY_Q8_D16);         \
        break;                       \
    case OP_LAY_Q8_DM16:             \
        call(OP_LAY_Q8_DM16);        \
        break;                       \
    case OP_LAY_Q8_DM32:             \
        call(OP_LAY_Q8_DM32);        \
        break;                       \
    default:                         \
        call(OP_LAY_Q8_DD32);        \
        break;                       \
    }

#endif /* KERNELS_CUDA_CUDA_DOT_CUH */
