/*
 * Weights of the CUDA backend: GGUF blocks → the layout of cuda_linear.h, on
 * the host, then into device memory.  Called while a model is loaded.
 *
 * No value is changed on the way: quants are integers (4-bit ones with an
 * offset are kept as two's complement), f16 scales stay as stored, and the
 * K formats' products of scale and sub-scale are exact in f32.
 */

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cuda_dev.h"
#include "kernels/cuda/cuda_linear.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "kernels/op/quant.h"
}

enum { MAX_PARTS = 16 };

struct op_weight_s {
    int n_in;
    int n_out;
    size_t bytes;
    uint8_t *data; /* device memory of all segments */
    int n_segments;
    cuda_segment_t segments[MAX_PARTS];
};


static size_t
round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}


static size_t
segment_rows(const cuda_segment_t *seg)
{
    return round_up((size_t) seg->n_out, CUDA_OUTS);
}


/* Both arrays start at a multiple of 256 bytes. */
static size_t
quants_bytes(const cuda_segment_t *seg)
{
    const size_t row =
        seg->n_blocks > 0
            ? (size_t) seg->n_blocks * (size_t) cuda_quant_bytes(seg->layout)
            : (size_t) seg->stride * (size_t) cuda_float_bytes(seg->layout);

    return round_up(segment_rows(seg) * row, 256);
}


static size_t
scales_bytes(const cuda_segment_t *seg)
{
    if (seg->n_blocks == 0) {
        return 0;
    }

    return round_up(segment_rows(seg) * (size_t) seg->stride
                        * (size_t) cuda_scale_bytes(seg->layout),
                    256);
}


/* A segment is a run of parts of one type. */
static void
plan_segments(op_weight_t *w, const op_tensor_t *parts, int n_parts)
{
    cuda_segment_t *seg = NULL;

    w->n_in = (int) parts[0].n_in;

    for (int i = 0; i < n_parts; i++) {
        if (i == 0 || parts[i].dtype != parts[i - 1].dtype) {
            seg = &w->segments[w->n_segments++];
            seg->layout = (op_layout_t) op_layout_of(parts[i].dtype);
            seg->n_in = w->n_in;
            seg->first_out = w->n_out;

            if (op_layout_record(seg->layout)->bits == 0) {
                seg->stride = (int) round_up((size_t) w->n_in, CUDA_CHUNK);
            } else {
                seg->n_blocks = w->n_in / 32;
                seg->stride =
                    (int) round_up((size_t) seg->n_blocks, CUDA_CLASSES);
            }
        }

        seg->n_out += (int) parts[i].n_out;
        w->n_out += (int) parts[i].n_out;
    }

    for (int i = 0; i < w->n_segments; i++) {
        w->bytes += quants_bytes(&w->segments[i]);
        w->bytes += scales_bytes(&w->segments[i]);
    }
}


/* --- repacking, on the host --- */

static void
put_scales(uint8_t *at, int layout, float first, float second)
{
    const float wide[2] = { first, second };
    const uint16_t narrow[2] = { op_float_to_half(first),
                                 op_float_to_half(second) };
    const int bytes = cuda_scale_bytes(layout);

    memcpy(at, bytes == 8 ? (const void *) wide : (const void *) narrow,
           (size_t) bytes);
}


/* 32 quants: bytes as they are; nibbles as input i low and i + 16 high. */
static void
put_quants(uint8_t *at, int layout, const int8_t *q)
{
    if (cuda_quant_bytes(layout) == 32) {
        memcpy(at, q, 32);
        return;
    }

    for (int i = 0; i < 16; i++) {
        at[i] = (uint8_t) ((q[i] & 15) | (q[i + 16] & 15) << 4);
    }
}


static void
repack_quantised(const cuda_segment_t *seg, op_dtype_t dtype,
                 const uint8_t *row, uint8_t *q, uint8_t *scales)
{
    const op_record_t *rec = op_layout_record(seg->layout);
    const int quant_bytes = cuda_quant_bytes(seg->layout);
    const int scale_bytes = cuda_scale_bytes(seg->layout);
    op_block_t b;

    for (int i = 0; i < seg->n_in; i += b.n) {
        op_block_unpack(dtype, row, &b);
        row += op_dtype_bytes((int) dtype);

        for (int k = 0; k < b.n; k += 32) {
            const float *d = b.d + k / b.sub;
            const float second = rec->halves == 2 ? d[1]
                                 : rec->has_min   ? b.m[k / b.sub]
                                                  : 0.0f;

            put_quants(q, seg->layout, b.q + k);
            put_scales(scales, seg->layout, d[0], second);
            q += quant_bytes;
            scales += scale_bytes;
        }
    }
}


/* The rows of one part, as rows `first` … of the segment's arrays. */
static void
repack_part(const cuda_segment_t *seg, const op_tensor_t *part, int64_t first,
            uint8_t *data)
{
    const size_t row_bytes = op_row_bytes((int) part->dtype, part->n_in);
    const size_t q_row =
        (size_t) seg->n_blocks * (size_t) cuda_quant_bytes(seg->layout);
    const size_t scale_row =
        (size_t) seg->stride * (size_t) cuda_scale_bytes(seg->layout);
    uint8_t *scales = data + quants_bytes(seg);

    for (int64_t o = 0; o < part->n_out; o++) {
        const uint8_t *row =
            (const uint8_t *) part->data + (size_t) o * row_bytes;
        const size_t at = (size_t) (first + o);

        if (seg->n_blocks == 0) {
            memcpy(data
                       + at * (size_t) seg->stride
                             * (size_t) cuda_float_bytes(seg->layout),
                   row, row_bytes);
        } else {
            repack_quantised(seg, part->dtype, row, data + at * q_row,
                             scales + at * scale_row);
        }
    }
}


/* Segment after segment through one host buffer. */
static int
fill_segments(op_dev_t *dev, op_weight_t *w, const op_tensor_t *parts)
{
    uint8_t *at = w->data;

    for (int i = 0; i < w->n_segments; i++) {
        cuda_segment_t *seg = &w->segments[i];
        const size_t bytes = quants_bytes(seg) + scales_bytes(seg);
        uint8_t *host = (uint8_t *) calloc(1, bytes);
        int64_t first = 0;

        if (host == NULL) {
            dev->lacking = "memory on the host";
            return -1;
        }

        while (first < seg->n_out) {
            repack_part(seg, parts, first, host);
            first += parts->n_out;
            parts++;
        }

        seg->q = at;
        seg->scales = at + quants_bytes(seg);
        cuda_put(dev, at, host, bytes);
        at += bytes;
        free(host);
    }

    return dev->failed ? -1 : 0;
}


op_weight_t *
cuda_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts, op_err_t *err)
{
    int64_t n_out = 0;

    if (n_parts < 1 || n_parts > MAX_PARTS) {
        snprintf(err->text, sizeof(err->text), "a weight of %d parts", n_parts);
        return NULL;
    }

    for (int i = 0; i < n_parts; i++) {
        if (op_part_check(&parts[i], parts[0].n_in, err) != 0) {
            return NULL;
        }

        n_out += parts[i].n_out;
    }

    if (n_out > OP_MAX_SIDE) {
        snprintf(err->text, sizeof(err->text), "a weight of %lld rows",
                 (long long) n_out);
        return NULL;
    }

    op_weight_t *w = (op_weight_t *) calloc(1, sizeof(op_weight_t));

    if (w != NULL) {
        plan_segments(w, parts, n_parts);
        dev->n_segments += w->n_segments;
        w->data = (uint8_t *) cuda_alloc(dev, w->bytes);
    } else {
        dev->lacking = "memory on the host";
    }

    if (w == NULL || w->data == NULL || fill_segments(dev, w, parts) != 0) {
        cuda_lacks(dev, err, "for a weight of %lld rows", (long long) n_out);
        cuda_weight_free(dev, w);
        return NULL;
    }

    return w;
}


void
cuda_weight_free(op_dev_t *dev, op_weight_t *weight)
{
    if (weight == NULL) {
        return;
    }

    dev->n_segments -= weight->n_segments;
    cuda_free(dev, weight->data, weight->bytes);
    free(weight);
}


size_t
cuda_weight_bytes(const op_weight_t *weight)
{
    return weight->bytes;
}


const cuda_segment_t *
cuda_weight_segments(const op_weight_t *weight, int *n)
{
    *n = weight->n_segments;

    return weight->segments;
}
