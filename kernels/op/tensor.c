/*
 * Names and sizes of the stored types, and half precision in portable C.
 *
 * The conversions work on bits alone, so they give the same result on every
 * machine; the vector units' own conversions agree with them.
 */

#include "kernels/op/tensor.h"

#include <string.h>

typedef struct {
    int dtype;
    const char *name;
    int block; /* values */
    int bytes; /* of a block */
} dtype_row_t;

static const dtype_row_t dtypes[] = {
    { OP_F32, "F32", 1, 4 },       { OP_F16, "F16", 1, 2 },
    { OP_Q4_0, "Q4_0", 32, 18 },   { OP_Q4_1, "Q4_1", 32, 20 },
    { OP_Q5_0, "Q5_0", 32, 22 },   { OP_Q5_1, "Q5_1", 32, 24 },
    { OP_Q8_0, "Q8_0", 32, 34 },   { OP_Q4_K, "Q4_K", 256, 144 },
    { OP_Q5_K, "Q5_K", 256, 176 }, { OP_Q6_K, "Q6_K", 256, 210 },
    { OP_BF16, "BF16", 1, 2 },
};


static const dtype_row_t *
dtype_find(int dtype)
{
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        if (dtypes[i].dtype == dtype) {
            return &dtypes[i];
        }
    }

    return NULL;
}


const char *
op_dtype_name(int dtype)
{
    const dtype_row_t *row = dtype_find(dtype);

    return row != NULL ? row->name : NULL;
}


int
op_dtype_block(int dtype)
{
    const dtype_row_t *row = dtype_find(dtype);

    return row != NULL ? row->block : 0;
}


int
op_dtype_bytes(int dtype)
{
    const dtype_row_t *row = dtype_find(dtype);

    return row != NULL ? row->bytes : 0;
}


size_t
op_row_bytes(int dtype, int64_t n_in)
{
    const dtype_row_t *row = dtype_find(dtype);

    if (row == NULL) {
        return 0;
    }

    return (size_t) (n_in / row->block) * (size_t) row->bytes;
}


float
op_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t) (h & 0x8000) << 16;
    uint32_t exponent = (h >> 10) & 31;
    uint32_t fraction = h & 0x3ff;
    uint32_t bits;
    float f;

    if (exponent == 31) {
        /* Infinity; a NaN keeps its payload and becomes quiet, as vcvtph2ps
         * does. */
        bits = 0x7f800000 | fraction << 13 | (fraction != 0 ? 0x400000 : 0);

    } else if (exponent != 0) {
        bits = (exponent + 112) << 23 | fraction << 13;

    } else {
        /* Zero or subnormal: fraction * 2^-24, exact in binary32. */
        f = (float) fraction * 0x1p-24f;
        memcpy(&bits, &f, sizeof(bits));
    }

    bits |= sign;
    memcpy(&f, &bits, sizeof(f));

    return f;
}


uint16_t
op_float_to_half(float f)
{
    uint32_t bits, sign, shift, half, rest, middle;

    memcpy(&bits, &f, sizeof(bits));
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;

    if (bits > 0x7f800000) {
        return (uint16_t) (sign | 0x7e00 | (bits >> 13 & 0x3ff));
    }

    /* 65520 is half way between the largest half and the next power. */
    if (bits >= 0x477ff000) {
        return (uint16_t) (sign | 0x7c00);
    }

    if (bits < 0x33000000) {
        return (uint16_t) sign; /* below 2^-25: zero */
    }

    if (bits < 0x38800000) {
        /* Subnormal: shift the whole significand to units of 2^-24. */
        shift = 126 - (bits >> 23);
        bits = (bits & 0x7fffff) | 0x800000;

    } else {
        shift = 13;
        bits -= 112u << 23;
    }

    half = bits >> shift;
    rest = bits & ((1u << shift) - 1);
    middle = 1u << (shift - 1);

    /* A carry out of the fraction is the next exponent, which is right. */
    if (rest > middle || (rest == middle && (half & 1) != 0)) {
        half++;
    }

    return (uint16_t) (sign | half);
}
