/*
 * Half-precision, bfloat16 and TF32 numbers as bits, rounded to nearest, as the
 * conversion instructions of a device do it.  In integer arithmetic: compilers
 * differ in whether they know a type for these numbers.
 */

#ifndef T_SHIM_FORMATS_H
#define T_SHIM_FORMATS_H

#include <stdint.h>
#include <string.h>


static inline uint32_t
shim_bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));

    return bits;
}


static inline float
shim_float_of(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));

    return x;
}


static inline float
shim_f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t) (bits & 0x8000) << 16;
    const uint32_t rest = (uint32_t) (bits & 0x7fff) << 13;

    if ((bits & 0x7c00) == 0x7c00) {
        /* infinite, or NaN, which is quiet then */
        const uint32_t quiet = (bits & 0x3ff) != 0 ? 0x400000 : 0;

        return shim_float_of(sign | 0x7f800000 | rest | quiet);
    }

    /* the exponent counts from 127 instead of 15; exact, and also right for
     * numbers below the normal ones */
    return shim_float_of(shim_bits_of(shim_float_of(rest) * 0x1p112f) | sign);
}


static inline uint16_t
shim_f32_to_f16(float x)
{
    const uint32_t bits = shim_bits_of(x);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;

    if (rest > 0x7f800000) {
        return 0x7fff;
    }

    if (rest >= 0x47800000) {
        /* 65536 and above */
        return sign | 0x7c00;
    }

    if (rest < 0x38800000) {
        /* below the normal ones: the addition rounds */
        return sign | (shim_bits_of(shim_float_of(rest) + 0.5f) - 0x3f000000);
    }

    const uint32_t odd = rest >> 13 & 1;

    return sign | ((rest - 0x38000000 + 0xfff + odd) >> 13);
}


static inline float
shim_bf16_to_f32(uint16_t bits)
{
    return shim_float_of((uint32_t) bits << 16);
}


static inline uint16_t
shim_f32_to_bf16(float x)
{
    const uint32_t bits = shim_bits_of(x);

    if ((bits & 0x7fffffff) > 0x7f800000) {
        return 0x7fff;
    }

    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}


/* An f32 whose low 13 bits are 0; of two as near, the one away from zero. */
static inline uint32_t
shim_f32_to_tf32(float x)
{
    const uint32_t bits = shim_bits_of(x);

    if ((bits & 0x7fffffff) > 0x7f800000) {
        return 0x7fffffff;
    }

    return (bits + 0x1000) & 0xffffe000;
}

#endif
