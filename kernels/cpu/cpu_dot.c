/*
 * Inner products in portable C: for machines without the vector units, and
 * the plainest statement of the order that all the others keep.
 *
 * The loops run over 16 outputs side by side, so compilers can vectorise the
 * integer part; fmaf() is exact everywhere, if slow where it is a call.
 */

#include "kernels/cpu/cpu_dot.h"

#include <math.h>
#include <string.h>

#include "kernels/op/tensor.h"

typedef struct {
    int16_t q[32][OP_LANES];
    float d[2][OP_LANES];
    float m[OP_LANES];
} record_t;


static void
load_scales(const uint8_t *p, int wide, float *out)
{
    uint16_t h[OP_LANES];

    if (wide) {
        memcpy(out, p, OP_LANES * sizeof(float));
        return;
    }

    memcpy(h, p, sizeof(h));

    for (int c = 0; c < OP_LANES; c++) {
        out[c] = op_half_to_float(h[c]);
    }
}


static void
load_record(const op_record_t *rec, const uint8_t *p, record_t *out)
{
    for (int k = 0; k < 32; k++) {
        for (int c = 0; c < OP_LANES; c++) {
            if (rec->bits == 8) {
                out->q[k][c] = (int8_t) p[64 * (k / 4) + 4 * c + k % 4];

            } else {
                int byte = p[64 * (k % 16 / 4) + 4 * c + k % 4];
                int q = k < 16 ? byte & 15 : byte >> 4;

                out->q[k][c] = (int16_t) (q - rec->zero);
            }
        }
    }

    load_scales(p + rec->d_at, rec->wide, out->d[0]);

    if (rec->halves == 2) {
        load_scales(p + rec->d_at + 64, rec->wide, out->d[1]);
    }

    if (rec->has_min) {
        load_scales(p + rec->m_at, rec->wide, out->m);
    }
}


/* A product of two quants fits 16 bits: at most 128 * 127. */
static void
dot_inputs(const record_t *w, const int8_t *q, int from, int to, int32_t *dot)
{
    memset(dot, 0, OP_LANES * sizeof(int32_t));

    for (int k = from; k < to; k++) {
        int16_t x = q[k];

        for (int c = 0; c < OP_LANES; c++) {
            dot[c] += (int16_t) (w->q[k][c] * x);
        }
    }
}


static void
store(const cpu_dot_t *job, int row, int group, const float *v)
{
    int lanes = cpu_group_lanes(job->seg, group);
    float *y = job->y + (size_t) row * (size_t) job->ldy + group * OP_LANES;

    for (int c = 0; c < lanes; c++) {
        y[c] = job->add ? y[c] + v[c] : v[c];
    }
}


/* Up to 16 rows of one group. */
static void
dot_tile(const cpu_dot_t *job, int row, int n_rows, int group)
{
    const cpu_segment_t *seg = job->seg;
    const op_record_t *rec = op_layout_record(seg->layout);
    const cpu_act_t *act = job->act;
    const uint8_t *empty = cpu_act_empty(act, row);
    const uint8_t *w = seg->data + (size_t) group * seg->group_bytes;
    size_t at = cpu_act_at(act, row);
    float acc[CPU_TILE][OP_LANES] = { { 0.0f } };
    float low[CPU_TILE][OP_LANES] = { { 0.0f } };
    int32_t dot[OP_LANES];
    record_t r;

    for (int b = 0; b < act->n_blocks; b++, at += (size_t) act->tile) {
        load_record(rec, w, &r);
        w += rec->bytes;

        if (empty != NULL && empty[b]) {
            continue;
        }

        for (int i = 0; i < n_rows; i++) {
            size_t e = at + (size_t) i;

            for (int h = 0; h < rec->halves; h++) {
                int n = 32 / rec->halves;

                dot_inputs(&r, act->q + 32 * e, h * n, (h + 1) * n, dot);

                for (int c = 0; c < OP_LANES; c++) {
                    acc[i][c] =
                        fmaf((float) dot[c], r.d[h][c] * act->d[e], acc[i][c]);
                }
            }

            for (int c = 0; rec->has_min && c < OP_LANES; c++) {
                low[i][c] = fmaf(r.m[c], act->s[e], low[i][c]);
            }
        }
    }

    for (int i = 0; i < n_rows; i++) {
        for (int c = 0; rec->has_min && c < OP_LANES; c++) {
            acc[i][c] = acc[i][c] + low[i][c];
        }

        store(job, row + i, group, acc[i]);
    }
}


static void
dot_quantised(const cpu_dot_t *job, const cpu_range_t *range)
{
    for (int g = range->group; g < range->group_end; g++) {
        for (int row = range->row; row < range->row_end; row += CPU_TILE) {
            int left = range->row_end - row;

            dot_tile(job, row, left < CPU_TILE ? left : CPU_TILE, g);
        }
    }
}


static void
load_floats(op_layout_t layout, const uint8_t *p, float *out)
{
    uint16_t h[OP_LANES];

    if (layout == OP_LAY_BF16) {
        memcpy(h, p, sizeof(h));

        for (int c = 0; c < OP_LANES; c++) {
            uint32_t bits = (uint32_t) h[c] << 16;

            memcpy(&out[c], &bits, sizeof(bits));
        }

        return;
    }

    load_scales(p, layout == OP_LAY_F32, out);
}


static void
dot_float(const cpu_dot_t *job, const cpu_range_t *range)
{
    const cpu_segment_t *seg = job->seg;
    int bytes = op_layout_record(seg->layout)->bytes;
    float w[OP_LANES], acc[CPU_TILE][OP_LANES];

    for (int g = range->group; g < range->group_end; g++) {
        for (int row = range->row; row < range->row_end; row += CPU_TILE) {
            int left = range->row_end - row;
            int n_rows = left < CPU_TILE ? left : CPU_TILE;
            const uint8_t *p = seg->data + (size_t) g * seg->group_bytes;
            const float *x = job->x + (size_t) row * (size_t) seg->n_in;

            memset(acc, 0, sizeof(acc));

            for (int i = 0; i < seg->n_in; i++, p += bytes) {
                load_floats(seg->layout, p, w);

                for (int r = 0; r < n_rows; r++) {
                    float f = x[(size_t) r * (size_t) seg->n_in + (size_t) i];

                    for (int c = 0; c < OP_LANES; c++) {
                        acc[r][c] = fmaf(w[c], f, acc[r][c]);
                    }
                }
            }

            for (int r = 0; r < n_rows; r++) {
                store(job, row + r, g, acc[r]);
            }
        }
    }
}


static int32_t
magnitude_bits(float f)
{
    int32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    return bits & 0x7fffffff;
}


static void
quantise(const float *x, const cpu_act_t *act, int row)
{
    const float even = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    size_t at = cpu_act_at(act, row);

    for (int b = 0; b < act->n_blocks; b++, x += 32, at += (size_t) act->tile) {
        int8_t *q = act->q + 32 * at;
        int32_t bits = 0;
        int32_t sum = 0;
        float d;

        /* As integers magnitudes keep their order, and NaN is the largest. */
        for (int k = 0; k < 32; k++) {
            int32_t m = magnitude_bits(x[k]);

            bits = m > bits ? m : bits;
        }

        memcpy(&d, &bits, sizeof(d));
        d /= 127.0f;

        for (int k = 0; k < 32; k++) {
            float v = 0.0f;

            if (d > 0.0f && bits < 0x7f800000) {
                v = x[k] / d;
                v = v < 127.0f ? v : 127.0f;
                v = v > -127.0f ? v : -127.0f;
            }

            q[k] = (int8_t) ((v + even) - even);
            sum += q[k];

            if (k == 15) {
                act->half[at] = sum;
            }
        }

        act->sum[at] = sum;
        act->d[at] = d;
        act->s[at] = d * (float) sum;
    }
}


const cpu_dot_table_t *
cpu_dot_baseline(void)
{
    static const cpu_dot_table_t table = {
        .chunk_rows = CPU_TILE,
        .quantise = quantise,
        .dot = { [OP_LAY_F32] = dot_float,
                 [OP_LAY_F16] = dot_float,
                 [OP_LAY_BF16] = dot_float,
                 [OP_LAY_Q4_D16] = dot_quantised,
                 [OP_LAY_Q4_DM16] = dot_quantised,
                 [OP_LAY_Q4_DM32] = dot_quantised,
                 [OP_LAY_Q8_D16] = dot_quantised,
                 [OP_LAY_Q8_DM16] = dot_quantised,
                 [OP_LAY_Q8_DM32] = dot_quantised,
                 [OP_LAY_Q8_DD32] = dot_quantised },
    };

    return &table;
}
