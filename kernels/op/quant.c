/*
 * GGUF block formats: where each bit of a block is, and the plain way to make
 * one from floats.  Called by the repacking, the oracle and the tests.
 *
 * The layouts are the GGML ones: a scale in half precision first (last in
 * Q6_K), then packed quants.  The K formats hold 256 values with integer
 * sub-scales, whose products with the scale are exact in binary32.
 */

#include "kernels/op/quant.h"

#include <math.h>
#include <string.h>


/* 1 / d, and 0 where that would not be finite: such a d is 0 in half precision
 * too, so the block is all zero. */
static float
inverse_of(float d)
{
    return fabsf(d) >= 0x1p-126f ? 1.0f / d : 0.0f;
}


static float
half_at(const uint8_t *p)
{
    return op_half_to_float((uint16_t) (p[0] | p[1] << 8));
}


static void
put_half(uint8_t *p, float f)
{
    uint16_t h = op_float_to_half(f);

    p[0] = (uint8_t) h;
    p[1] = (uint8_t) (h >> 8);
}


/* Q4_0, Q4_1, Q5_0, Q5_1: nibbles j and j + 16 share byte j; the fifth bits,
 * if any, are one 32-bit word before them. */
static void
unpack_legacy(const uint8_t *p, int five, int has_min, op_block_t *out)
{
    uint32_t high = 0;
    int offset = has_min ? 0 : (five ? 16 : 8);

    out->n = 32;
    out->sub = 32;
    out->bits = five ? 8 : 4;
    out->has_min = has_min;
    out->d[0] = half_at(p);
    p += 2;

    if (has_min) {
        out->m[0] = half_at(p);
        p += 2;
    }

    if (five) {
        high = (uint32_t) p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16
               | (uint32_t) p[3] << 24;
        p += 4;
    }

    for (int i = 0; i < 16; i++) {
        int low_bit = (int) (high >> i & 1) << 4;
        int high_bit = (int) (high >> (i + 16) & 1) << 4;

        out->q[i] = (int8_t) (((p[i] & 15) | low_bit) - offset);
        out->q[i + 16] = (int8_t) (((p[i] >> 4) | high_bit) - offset);
    }
}


static void
unpack_q8_0(const uint8_t *p, op_block_t *out)
{
    out->n = 32;
    out->sub = 32;
    out->bits = 8;
    out->has_min = 0;
    out->d[0] = half_at(p);
    memcpy(out->q, p + 2, 32);
}


/* Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes.  The first four
 * of each are the low bits of bytes 0-3 and 4-7, whose high bits complete the
 * nibbles of bytes 8-11. */
static void
unpack_scales(const uint8_t *p, op_block_t *out)
{
    float d = half_at(p);
    float d_min = half_at(p + 2);
    const uint8_t *s = p + 4;

    for (int i = 0; i < 4; i++) {
        int low = (s[8 + i] & 15) | (s[i] >> 6) << 4;
        int high = (s[8 + i] >> 4) | (s[4 + i] >> 6) << 4;

        out->d[i] = d * (float) (s[i] & 63);
        out->m[i] = -(d_min * (float) (s[4 + i] & 63));
        out->d[4 + i] = d * (float) low;
        out->m[4 + i] = -(d_min * (float) high);
    }
}


static void
unpack_q45_k(const uint8_t *p, int five, op_block_t *out)
{
    const uint8_t *high = p + 16;
    const uint8_t *low = five ? p + 48 : p + 16;

    out->n = 256;
    out->sub = 32;
    out->bits = five ? 8 : 4;
    out->has_min = 1;
    unpack_scales(p, out);

    for (int i = 0; i < 256; i++) {
        int pair = i / 64;
        int upper = i / 32 % 2;
        int byte = low[pair * 32 + i % 32];
        int q = upper ? byte >> 4 : byte & 15;

        if (five) {
            q |= (high[i % 32] >> (2 * pair + upper) & 1) << 4;
        }

        out->q[i] = (int8_t) q;
    }
}


/* Q6_K: in each half of 128, quarter t has its low nibbles in 32 bytes
 * (t & 1) and its upper two bits at shift 2 t of 32 shared bytes. */
static void
unpack_q6_k(const uint8_t *p, op_block_t *out)
{
    const uint8_t *low = p;
    const uint8_t *high = p + 128;
    const int8_t *scales = (const int8_t *) p + 192;
    float d = half_at(p + 208);

    out->n = 256;
    out->sub = 16;
    out->bits = 8;
    out->has_min = 0;

    for (int i = 0; i < 256; i++) {
        int half = i / 128;
        int quarter = i / 32 % 4;
        int byte = low[half * 64 + (quarter & 1) * 32 + i % 32];
        int q = quarter < 2 ? byte & 15 : byte >> 4;

        q |= (high[half * 32 + i % 32] >> (2 * quarter) & 3) << 4;
        out->q[i] = (int8_t) (q - 32);
    }

    for (int i = 0; i < 16; i++) {
        out->d[i] = d * (float) scales[i];
    }
}


void
op_block_unpack(op_dtype_t dtype, const void *block, op_block_t *out)
{
    switch (dtype) {
    case OP_Q4_0:
        unpack_legacy(block, 0, 0, out);
        break;
    case OP_Q4_1:
        unpack_legacy(block, 0, 1, out);
        break;
    case OP_Q5_0:
        unpack_legacy(block, 1, 0, out);
        break;
    case OP_Q5_1:
        unpack_legacy(block, 1, 1, out);
        break;
    case OP_Q8_0:
        unpack_q8_0(block, out);
        break;
    case OP_Q4_K:
        unpack_q45_k(block, 0, out);
        break;
    case OP_Q5_K:
        unpack_q45_k(block, 1, out);
        break;
    case OP_Q6_K:
        unpack_q6_k(block, out);
        break;
    default:
        out->n = 0;
        break;
    }
}


static void
dequant_plain(op_dtype_t dtype, const uint8_t *p, float *out, int64_t n)
{
    uint16_t h;
    uint32_t bits;

    if (dtype == OP_F32) {
        memcpy(out, p, (size_t) n * sizeof(float));
        return;
    }

    for (int64_t i = 0; i < n; i++) {
        memcpy(&h, p + 2 * i, sizeof(h));

        if (dtype == OP_F16) {
            out[i] = op_half_to_float(h);

        } else {
            bits = (uint32_t) h << 16;
            memcpy(&out[i], &bits, sizeof(bits));
        }
    }
}


void
op_dequant_row(op_dtype_t dtype, const void *row, float *out, int64_t n)
{
    const uint8_t *p = row;
    int block = op_dtype_block((int) dtype);
    int bytes = op_dtype_bytes((int) dtype);
    op_block_t b;

    if (block <= 1) {
        dequant_plain(dtype, p, out, n);
        return;
    }

    for (int64_t i = 0; i + block <= n; i += block, p += bytes) {
        op_block_unpack(dtype, p, &b);

        for (int k = 0; k < block; k++) {
            float v = b.d[k / b.sub] * (float) b.q[k];

            out[i + k] = b.has_min ? v + b.m[k / b.sub] : v;
        }
    }
}


/* Packs 32 quants of 4 or 5 bits, unsigned. */
static void
pack_legacy(uint8_t *p, const int *q, int five)
{
    uint32_t high = 0;

    for (int i = 0; i < 32; i++) {
        high |= (uint32_t) (q[i] >> 4 & 1) << i;
    }

    if (five) {
        for (int i = 0; i < 4; i++) {
            p[i] = (uint8_t) (high >> 8 * i);
        }

        p += 4;
    }

    for (int i = 0; i < 16; i++) {
        p[i] = (uint8_t) ((q[i] & 15) | (q[i + 16] & 15) << 4);
    }
}


/* The value of largest magnitude becomes the lowest code, −2^(bits − 1). */
static void
quant_signed(const float *x, uint8_t *p, int five)
{
    int levels = five ? 32 : 16;
    int q[32];
    float extreme = 0.0f;
    float d, inverse;

    for (int i = 0; i < 32; i++) {
        if (fabsf(x[i]) > fabsf(extreme)) {
            extreme = x[i];
        }
    }

    d = extreme / (float) (-levels / 2);
    inverse = inverse_of(d);

    /* In double: the compilers of the original rule fuse this product. */
    for (int i = 0; i < 32; i++) {
        int v = (int) ((double) x[i] * inverse + levels / 2 + 0.5);

        q[i] = v < levels - 1 ? v : levels - 1;
    }

    put_half(p, d);
    pack_legacy(p + 2, q, five);
}


static void
quant_minimum(const float *x, uint8_t *p, int five)
{
    int top = five ? 31 : 15;
    int q[32];
    float low = x[0];
    float high = x[0];
    float d, inverse;

    for (int i = 1; i < 32; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }

    d = (high - low) / (float) top;
    inverse = inverse_of(d);

    for (int i = 0; i < 32; i++) {
        int v = (int) ((x[i] - low) * inverse + 0.5f);

        q[i] = v < top ? v : top;
    }

    put_half(p, d);
    put_half(p + 2, low);
    pack_legacy(p + 4, q, five);
}


static void
quant_q8_0(const float *x, uint8_t *p)
{
    float amax = 0.0f;
    float d, inverse;

    for (int i = 0; i < 32; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }

    d = amax / 127.0f;
    inverse = inverse_of(d);
    put_half(p, d);

    for (int i = 0; i < 32; i++) {
        p[2 + i] = (uint8_t) (int8_t) roundf(x[i] * inverse);
    }
}


static void
quant_plain(op_dtype_t dtype, const float *x, uint8_t *p, int64_t n)
{
    uint16_t h;
    uint32_t bits;

    for (int64_t i = 0; i < n; i++) {
        if (dtype == OP_F16) {
            h = op_float_to_half(x[i]);

        } else {
            memcpy(&bits, &x[i], sizeof(bits));

            if ((bits & 0x7fffffff) > 0x7f800000) {
                h = (uint16_t) (bits >> 16 | 0x40);

            } else {
                h = (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
        }

        memcpy(p + 2 * i, &h, sizeof(h));
    }
}


int
op_quant_row(op_dtype_t dtype, const float *x, void *row, int64_t n)
{
    uint8_t *p = row;
    int bytes = op_dtype_bytes((int) dtype);

    if (dtype == OP_F16 || dtype == OP_BF16) {
        quant_plain(dtype, x, p, n);
        return 0;
    }

    for (int64_t i = 0; i < n; i += 32, p += bytes) {
        switch (dtype) {
        case OP_Q4_0:
        case OP_Q5_0:
            quant_signed(x + i, p, dtype == OP_Q5_0);
            break;
        case OP_Q4_1:
        case OP_Q5_1:
            quant_minimum(x + i, p, dtype == OP_Q5_1);
            break;
        case OP_Q8_0:
            quant_q8_0(x + i, p);
            break;
        default:
            return -1;
        }
    }

    return 0;
}
