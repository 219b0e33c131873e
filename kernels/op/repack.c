/*
 * GGUF blocks → compute layouts, and back for one row.
 *
 * Called at load for every row of every weight, and by embed().  No value is
 * changed on the way: quants are integers, f16 scales stay as stored, and the
 * K formats' products of scale and sub-scale are exact in f32.
 */

#include "kernels/op/repack.h"

#include <stdio.h>
#include <string.h>

#include "kernels/op/quant.h"

static const op_record_t records[OP_LAY_COUNT] = {
    [OP_LAY_F32] = { .span = 1, .bytes = 64 },
    [OP_LAY_F16] = { .span = 1, .bytes = 32 },
    [OP_LAY_BF16] = { .span = 1, .bytes = 32 },
    [OP_LAY_Q4_D16] = { .span = 32,
                        .bits = 4,
                        .zero = 8,
                        .halves = 1,
                        .d_at = 256,
                        .bytes = 288 },
    [OP_LAY_Q4_DM16] = { .span = 32,
                         .bits = 4,
                         .has_min = 1,
                         .halves = 1,
                         .d_at = 256,
                         .m_at = 288,
                         .bytes = 320 },
    [OP_LAY_Q4_DM32] = { .span = 32,
                         .bits = 4,
                         .has_min = 1,
                         .halves = 1,
                         .wide = 1,
                         .d_at = 256,
                         .m_at = 320,
                         .bytes = 384 },
    [OP_LAY_Q8_D16] = { .span = 32,
                        .bits = 8,
                        .halves = 1,
                        .d_at = 512,
                        .bytes = 544 },
    [OP_LAY_Q8_DM16] = { .span = 32,
                         .bits = 8,
                         .has_min = 1,
                         .halves = 1,
                         .d_at = 512,
                         .m_at = 544,
                         .bytes = 576 },
    [OP_LAY_Q8_DM32] = { .span = 32,
                         .bits = 8,
                         .has_min = 1,
                         .halves = 1,
                         .wide = 1,
                         .d_at = 512,
                         .m_at = 576,
                         .bytes = 640 },
    [OP_LAY_Q8_DD32] = { .span = 32,
                         .bits = 8,
                         .halves = 2,
                         .wide = 1,
                         .d_at = 512,
                         .bytes = 640 },
};


int
op_layout_of(op_dtype_t dtype)
{
    switch (dtype) {
    case OP_F32:
        return OP_LAY_F32;
    case OP_F16:
        return OP_LAY_F16;
    case OP_BF16:
        return OP_LAY_BF16;
    case OP_Q4_0:
        return OP_LAY_Q4_D16;
    case OP_Q4_1:
        return OP_LAY_Q4_DM16;
    case OP_Q5_0:
    case OP_Q8_0:
        return OP_LAY_Q8_D16;
    case OP_Q5_1:
        return OP_LAY_Q8_DM16;
    case OP_Q4_K:
        return OP_LAY_Q4_DM32;
    case OP_Q5_K:
        return OP_LAY_Q8_DM32;
    case OP_Q6_K:
        return OP_LAY_Q8_DD32;
    }

    return -1;
}


const op_record_t *
op_layout_record(op_layout_t layout)
{
    return &records[layout];
}


size_t
op_layout_group_bytes(op_layout_t layout, int64_t n_in)
{
    const op_record_t *rec = &records[layout];

    return (size_t) (n_in / rec->span) * (size_t) rec->bytes;
}


static void
put_scale(uint8_t *p, int lane, int wide, float value)
{
    uint16_t half;

    if (wide) {
        memcpy(p + 4 * lane, &value, sizeof(value));

    } else {
        half = op_float_to_half(value);
        memcpy(p + 2 * lane, &half, sizeof(half));
    }
}


static float
get_scale(const uint8_t *p, int lane, int wide)
{
    uint16_t half;
    float value;

    if (wide) {
        memcpy(&value, p + 4 * lane, sizeof(value));
        return value;
    }

    memcpy(&half, p + 2 * lane, sizeof(half));
    return op_half_to_float(half);
}


/* 32 quants of one output. */
static void
put_quants(const op_record_t *rec, const int8_t *q, uint8_t *record, int lane)
{
    uint8_t *p = record + 4 * lane;

    if (rec->bits == 8) {
        for (int v = 0; v < 8; v++) {
            memcpy(p + 64 * v, q + 4 * v, 4);
        }

        return;
    }

    for (int v = 0; v < 4; v++) {
        for (int j = 0; j < 4; j++) {
            int low = q[4 * v + j] + rec->zero;
            int high = q[16 + 4 * v + j] + rec->zero;

            p[64 * v + j] = (uint8_t) (low | high << 4);
        }
    }
}


static void
repack_plain(op_dtype_t dtype, const uint8_t *row, int64_t n_in, uint8_t *group,
             int lane)
{
    size_t size = (size_t) op_dtype_bytes((int) dtype);

    for (int64_t i = 0; i < n_in; i++) {
        memcpy(group + ((size_t) i * OP_LANES + (size_t) lane) * size,
               row + (size_t) i * size, size);
    }
}


void
op_repack_row(op_dtype_t dtype, const void *row, int64_t n_in, uint8_t *group,
              int lane)
{
    const op_record_t *rec = &records[op_layout_of(dtype)];
    const uint8_t *p = row;
    int block = op_dtype_block((int) dtype);
    op_block_t b;

    if (rec->bits == 0) {
        repack_plain(dtype, row, n_in, group, lane);
        return;
    }

    for (int64_t i = 0; i < n_in; i += block) {
        op_block_unpack(dtype, p, &b);
        p += op_dtype_bytes((int) dtype);

        for (int k = 0; k < b.n; k += 32, group += rec->bytes) {
            const float *d = b.d + k / b.sub;
            uint8_t *d_at = group + rec->d_at;

            put_quants(rec, b.q + k, group, lane);
            put_scale(d_at, lane, rec->wide, d[0]);

            if (rec->halves == 2) {
                put_scale(d_at + 64, lane, rec->wide, d[1]);
            }

            if (rec->has_min) {
                put_scale(group + rec->m_at, lane, rec->wide, b.m[k / b.sub]);
            }
        }
    }
}


static void
unpack_plain(op_layout_t layout, const uint8_t *group, int lane, float *out,
             int64_t n_in)
{
    op_dtype_t dtype = layout == OP_LAY_F32   ? OP_F32
                       : layout == OP_LAY_F16 ? OP_F16
                                              : OP_BF16;
    size_t size = (size_t) op_dtype_bytes((int) dtype);
    const uint8_t *p = group + (size_t) lane * size;

    for (int64_t i = 0; i < n_in; i++, p += OP_LANES * size) {
        op_dequant_row(dtype, p, out + i, 1);
    }
}


void
op_unpack_row(op_layout_t layout, const uint8_t *group, int lane, float *out,
              int64_t n_in)
{
    const op_record_t *rec = &records[layout];

    if (rec->bits == 0) {
        unpack_plain(layout, group, lane, out, n_in);
        return;
    }

    for (int64_t i = 0; i < n_in; i += 32, group += rec->bytes) {
        const uint8_t *p = group + 4 * lane;
        float d = get_scale(group + rec->d_at, lane, rec->wide);
        float m = 0.0f;

        if (rec->has_min) {
            m = get_scale(group + rec->m_at, lane, rec->wide);
        }

        for (int k = 0; k < 32; k++) {
            int q;

            if (rec->bits == 8) {
                q = (int8_t) p[64 * (k / 4) + k % 4];

            } else {
                int byte = p[64 * (k % 16 / 4) + k % 4];

                q = (k < 16 ? byte & 15 : byte >> 4) - rec->zero;
            }

            if (k == 16 && rec->halves == 2) {
                d = get_scale(group + rec->d_at + 64, lane, rec->wide);
            }

            out[i + k] = rec->has_min ? d * (float) q + m : d * (float) q;
        }
    }
}


int
op_part_check(const op_tensor_t *part, int64_t n_in, op_err_t *err)
{
    int block = op_dtype_block((int) part->dtype);

    if (block == 0 || op_layout_of(part->dtype) < 0) {
        snprintf(err->text, sizeof(err->text), "unsupported type %d",
                 (int) part->dtype);
        return -1;
    }

    if (part->n_in != n_in || part->n_in <= 0 || part->n_out <= 0
        || part->n_in > OP_MAX_SIDE || part->n_out > OP_MAX_SIDE)
    {
        snprintf(err->text, sizeof(err->text),
                 "a weight of %lld rows of %lld values cannot be used",
                 (long long) part->n_out, (long long) part->n_in);
        return -1;
    }

    if (n_in % block != 0) {
        snprintf(err->text, sizeof(err->text),
                 "rows of %lld values are not whole blocks of %s",
                 (long long) n_in, op_dtype_name((int) part->dtype));
        return -1;
    }

    return 0;
}
