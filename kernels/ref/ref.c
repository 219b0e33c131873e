/*
 * The oracle backend: what each op means, as plainly as it can be written.
 *
 * Weights are kept in the file's own blocks and dequantised row by row; sums
 * are in double; activations are never quantised.  Only the KV cache is
 * rounded (to its type), because that is part of the op.  Tests compare the
 * product backends with it; it is never optimised.
 */

#include "kernels/ref/ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op/quant.h"

struct op_dev_s {
    op_limits_t limits;
};

typedef struct {
    op_dtype_t dtype;
    int64_t n_out;
    uint8_t *rows;
} ref_part_t;

struct op_weight_s {
    int64_t n_in;
    int64_t n_out;
    size_t bytes;
    int n_parts;
    ref_part_t *parts;
    float *row; /* [n_in] one dequantised row */
};

/* K or V of one position and head in the page pool. */
enum { REF_K = 0, REF_V = 1 };


static op_dev_t *
ref_open(const op_open_t *params, op_err_t *err)
{
    op_dev_t *dev = calloc(1, sizeof(op_dev_t));

    (void) params;

    if (dev == NULL) {
        snprintf(err->text, sizeof(err->text), "no memory for the device");
    }

    return dev;
}


static void
ref_close(op_dev_t *dev)
{
    free(dev);
}


static const char *
ref_describe(op_dev_t *dev)
{
    (void) dev;

    return "reference, 1 thread";
}


static int
ref_prepare(op_dev_t *dev, const op_limits_t *limits, op_err_t *err)
{
    if (limits->n_kv_heads <= 0 || limits->n_heads % limits->n_kv_heads != 0) {
        snprintf(err->text, sizeof(err->text),
                 "%d heads cannot share %d KV heads", limits->n_heads,
                 limits->n_kv_heads);
        return -1;
    }

    dev->limits = *limits;

    return 0;
}


static void *
ref_alloc(op_dev_t *dev, size_t bytes)
{
    size_t size = (bytes + 63) / 64 * 64;
    void *p;

    (void) dev;

    if (size < bytes) {
        return NULL;
    }

    p = aligned_alloc(64, size != 0 ? size : 64);

    if (p != NULL) {
        memset(p, 0, size);
    }

    return p;
}


static void
ref_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) dev;
    (void) bytes;
    free(p);
}


static op_memory_t
ref_memory(op_dev_t *dev)
{
    (void) dev;

    return (op_memory_t){ 0 };
}


static void
ref_move(op_dev_t *dev, void *to, const void *from, size_t bytes)
{
    (void) dev;
    memmove(to, from, bytes);
}


static void
ref_step(op_dev_t *dev, const op_batch_t *batch)
{
    (void) dev;
    (void) batch;
}


static int
ref_check(op_dev_t *dev, op_err_t *err)
{
    (void) dev;
    (void) err;

    return 0;
}


static void
ref_weight_free(op_dev_t *dev, op_weight_t *weight)
{
    (void) dev;

    if (weight == NULL) {
        return;
    }

    for (int i = 0; weight->parts != NULL && i < weight->n_parts; i++) {
        free(weight->parts[i].rows);
    }

    free(weight->parts);
    free(weight->row);
    free(weight);
}


static int
ref_part_check(const op_tensor_t *part, int64_t n_in, op_err_t *err)
{
    int block = op_dtype_block((int) part->dtype);

    if (block == 0) {
        snprintf(err->text, sizeof(err->text), "unsupported type %d",
                 (int) part->dtype);
        return -1;
    }

    if (part->n_in != n_in || n_in <= 0 || n_in % block != 0
        || part->n_out <= 0) {
        snprintf(err->text, sizeof(err->text),
                 "bad shape %lld x %lld for type %s", (long long) part->n_out,
                 (long long) part->n_in, op_dtype_name((int) part->dtype));
        return -1;
    }

    return 0;
}


static int
ref_part_copy(op_weight_t *w, ref_part_t *to, const op_tensor_t *from)
{
    size_t bytes =
        op_row_bytes((int) from->dtype, from->n_in) * (size_t) from->n_out;

    to->dtype = from->dtype;
    to->n_out = from->n_out;
    to->rows = malloc(bytes);

    if (to->rows == NULL) {
        return -1;
    }

    memcpy(to->rows, from->data, bytes);
    w->n_out += from->n_out;
    w->bytes += bytes;

    return 0;
}


static op_weight_t *
ref_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts, op_err_t *err)
{
    op_weight_t *w;

    for (int i = 0; i < n_parts; i++) {
        if (ref_part_check(&parts[i], parts[0].n_in, err) != 0) {
            return NULL;
        }
    }

    w = calloc(1, sizeof(op_weight_t));

    if (w == NULL) {
        goto failed;
    }

    w->n_in = parts[0].n_in;
    w->n_parts = n_parts;
    w->parts = calloc((size_t) n_parts, sizeof(ref_part_t));
    w->row = malloc((size_t) w->n_in * sizeof(float));

    if (w->parts == NULL || w->row == NULL) {
        goto failed;
    }

    for (int i = 0; i < n_parts; i++) {
        if (ref_part_copy(w, &w->parts[i], &parts[i]) != 0) {
            goto failed;
        }
    }

    return w;

failed:

    snprintf(err->text, sizeof(err->text), "no memory for a weight");
    ref_weight_free(dev, w);

    return NULL;
}


static size_t
ref_weight_bytes(const op_weight_t *weight)
{
    return weight->bytes;
}


/* Row `o` of all parts together, dequantised. */
static void
ref_row(const op_weight_t *w, int64_t o, float *out)
{
    for (int i = 0; i < w->n_parts; i++) {
        const ref_part_t *part = &w->parts[i];

        if (o < part->n_out) {
            op_dequant_row(part->dtype,
                           part->rows
                               + (size_t) o
                                     * op_row_bytes((int) part->dtype, w->n_in),
                           out, w->n_in);
            return;
        }

        o -= part->n_out;
    }
}


static void
ref_embed(op_dev_t *dev, float *x, const op_weight_t *w, const int32_t *tokens,
          int rows)
{
    (void) dev;

    for (int r = 0; r < rows; r++) {
        ref_row(w, tokens[r], x + (size_t) r * (size_t) w->n_in);
    }
}


static void
ref_rmsnorm(op_dev_t *dev, float *y, const float *x, const float *w, int rows,
            int dim, float eps)
{
    (void) dev;

    for (int r = 0; r < rows; r++, x += dim, y += dim) {
        double sum = 0.0;
        double scale;

        for (int i = 0; i < dim; i++) {
            sum += (double) x[i] * x[i];
        }

        scale = 1.0 / sqrt(sum / dim + eps);

        for (int i = 0; i < dim; i++) {
            y[i] = (float) (x[i] * scale * w[i]);
        }
    }
}


static void
ref_linear(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
           const op_weight_t *w, int mode)
{
    (void) dev;

    for (int64_t o = 0; o < w->n_out; o++) {
        ref_row(w, o, w->row);

        for (int r = 0; r < rows; r++) {
            const float *xr = x + (size_t) r * (size_t) w->n_in;
            float *to = y + (size_t) r * (size_t) ldy + o;
            double sum = 0.0;

            for (int64_t i = 0; i < w->n_in; i++) {
                sum += (double) w->row[i] * xr[i];
            }

            *to = (mode & OP_ADD) ? *to + (float) sum : (float) sum;
        }
    }
}


static void
ref_gather(op_dev_t *dev, float *y, const float *x, const int32_t *idx, int n,
           int dim)
{
    (void) dev;

    for (int i = 0; i < n; i++) {
        memcpy(y + (size_t) i * (size_t) dim,
               x + (size_t) idx[i] * (size_t) dim,
               (size_t) dim * sizeof(float));
    }
}


static void
ref_silu_mul(op_dev_t *dev, float *y, const float *gate_up, int rows, int dim)
{
    (void) dev;

    for (int r = 0; r < rows; r++, gate_up += 2 * dim, y += dim) {
        for (int i = 0; i < dim; i++) {
            double g = gate_up[i];

            y[i] = (float) (g / (1.0 + exp(-g)) * gate_up[dim + i]);
        }
    }
}


static void
ref_linear_of(op_dev_t *dev, float *y, int ldy, const op_input_t *in, int rows,
              const op_weight_t *w, int mode)
{
    const float *x = in->kind == OP_PLAIN ? in->x : in->scratch;

    if (in->kind == OP_NORMED) {
        ref_rmsnorm(dev, in->scratch, in->x, in->norm, rows, in->dim, in->eps);
    } else if (in->kind == OP_GATED) {
        ref_silu_mul(dev, in->scratch, in->x, rows, in->dim);
    }

    ref_linear(dev, y, ldy, x, rows, w, mode);
}


/* Bytes of K or V of one position and head: halves; or bytes, and behind them
 * the scales as halves. */
static size_t
ref_kv_row_bytes(int dtype, int head_dim)
{
    if (dtype == OP_Q8_0) {
        return (size_t) head_dim
               + (size_t) (head_dim + OP_KV_BLOCK - 1) / OP_KV_BLOCK
                     * sizeof(uint16_t);
    }

    return dtype == OP_F16 ? (size_t) head_dim * sizeof(uint16_t) : 0;
}


static size_t
ref_kv_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                  int head_dim)
{
    (void) dev;

    return (size_t) n_layers * 2 * (size_t) n_kv_heads * OP_PAGE
           * ref_kv_row_bytes(dtype, head_dim);
}


static void
ref_kv_copy(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies, int n)
{
    uint8_t *base = kv->base;
    size_t bytes = ref_kv_page_bytes(dev, (int) kv->dtype, kv->n_layers,
                                     kv->n_kv_heads, kv->head_dim);

    for (int i = 0; i < n; i++) {
        memmove(base + (size_t) copies[i].to * bytes,
                base + (size_t) copies[i].from * bytes, bytes);
    }
}


/* K or V of position pos of sequence seq.  A page is
 * [layer][K, V][kv head][position] of rows. */
static uint8_t *
ref_kv_at(const op_batch_t *batch, const op_kv_t *kv, int layer, int seq,
          int pos, int head, int which)
{
    size_t page = (size_t) batch->block_table[seq][pos / OP_PAGE];
    size_t at = page * (size_t) kv->n_layers + (size_t) layer;

    at = at * 2 + (size_t) which;
    at = at * (size_t) kv->n_kv_heads + (size_t) head;
    at = at * OP_PAGE + (size_t) (pos % OP_PAGE);

    return (uint8_t *) kv->base
           + at * ref_kv_row_bytes((int) kv->dtype, kv->head_dim);
}


/* One block under its scale. */
static void
ref_quantise(const float *x, int n, int8_t *q, uint16_t *scale)
{
    float top = 0.0f;
    float d;
    int bad = 0;

    for (int i = 0; i < n; i++) {
        bad |= !isfinite(x[i]);
        top = fmaxf(top, fabsf(x[i]));
    }

    *scale = op_float_to_half(top / 127.0f);
    d = op_half_to_float(*scale);

    if (bad || isinf(d)) {
        *scale = 0x7e00; /* NaN */
        d = 0.0f;
    }

    for (int i = 0; i < n; i++) {
        double r = d == 0.0f ? 0.0 : nearbyint(x[i] / d);

        q[i] = (int8_t) fmax(-127.0, fmin(127.0, r));
    }
}


static void
ref_kv_write(const op_kv_t *kv, uint8_t *row, const float *x)
{
    int dim = kv->head_dim;

    if (kv->dtype != OP_Q8_0) {
        for (int d = 0; d < dim; d++) {
            uint16_t half = op_float_to_half(x[d]);

            memcpy(row + 2 * d, &half, sizeof(half));
        }
        return;
    }

    for (int d = 0; d < dim; d += OP_KV_BLOCK) {
        int n = dim - d < OP_KV_BLOCK ? dim - d : OP_KV_BLOCK;
        uint16_t scale;

        ref_quantise(x + d, n, (int8_t *) row + d, &scale);
        memcpy(row + dim + 2 * (d / OP_KV_BLOCK), &scale, sizeof(scale));
    }
}


static double
ref_kv_read(const op_kv_t *kv, const uint8_t *row, int d)
{
    uint16_t half;

    if (kv->dtype != OP_Q8_0) {
        memcpy(&half, row + 2 * d, sizeof(half));
        return op_half_to_float(half);
    }

    memcpy(&half, row + kv->head_dim + 2 * (d / OP_KV_BLOCK), sizeof(half));

    return (double) (int8_t) row[d] * op_half_to_float(half);
}


static void
ref_rotate(float *head, const float *cos_sin, int rot, int mode)
{
    for (int i = 0; i < rot / 2; i++) {
        int a = mode == OP_ROPE_PAIRS ? 2 * i : i;
        int b = mode == OP_ROPE_PAIRS ? 2 * i + 1 : i + rot / 2;
        double c = cos_sin[2 * i];
        double s = cos_sin[2 * i + 1];
        double u = head[a];
        double v = head[b];

        head[a] = (float) (u * c - v * s);
        head[b] = (float) (u * s + v * c);
    }
}


static void
ref_rope_kv(op_dev_t *dev, float *qkv, const op_batch_t *batch,
            const op_attn_t *attn, const float *cos_sin, int rot, int mode,
            const op_kv_t *kv, int layer)
{
    int dim = attn->head_dim;
    int stride = (attn->n_heads + 2 * attn->n_kv_heads) * dim;

    (void) dev;

    for (int s = 0; s < batch->n_seqs; s++) {
        for (int r = batch->row_start[s]; r < batch->row_start[s + 1]; r++) {
            float *row = qkv + (size_t) r * (size_t) stride;
            const float *k = row + attn->n_heads * dim;
            const float *v = k + attn->n_kv_heads * dim;
            int pos = batch->pos[r];

            for (int h = 0; h < attn->n_heads + attn->n_kv_heads; h++) {
                ref_rotate(row + h * dim, cos_sin + (size_t) pos * (size_t) rot,
                           rot, mode);
            }

            for (int h = 0; h < attn->n_kv_heads; h++) {
                ref_kv_write(kv, ref_kv_at(batch, kv, layer, s, pos, h, REF_K),
                             k + h * dim);
                ref_kv_write(kv, ref_kv_at(batch, kv, layer, s, pos, h, REF_V),
                             v + h * dim);
            }
        }
    }
}


typedef struct {
    const op_batch_t *batch;
    const op_kv_t *kv;
    int layer;
    int seq;
    int kv_head;
} ref_view_t;


static double
ref_score(const ref_view_t *view, const float *q, int pos, double scale)
{
    const uint8_t *k = ref_kv_at(view->batch, view->kv, view->layer, view->seq,
                                 pos, view->kv_head, REF_K);
    double sum = 0.0;

    for (int d = 0; d < view->kv->head_dim; d++) {
        sum += (double) q[d] * ref_kv_read(view->kv, k, d);
    }

    return sum * scale;
}


/* One head of one row.  Scores are computed twice, so that no length has to
 * be reserved. */
static void
ref_attend(const ref_view_t *view, const float *q, int last, double scale,
           float *out)
{
    int dim = view->kv->head_dim;
    double top = -HUGE_VAL;
    double total = 0.0;
    double *sum = calloc((size_t) dim, sizeof(double));

    if (sum == NULL) {
        abort(); /* a test tool; there is nobody to tell */
    }

    for (int t = 0; t <= last; t++) {
        top = fmax(top, ref_score(view, q, t, scale));
    }

    for (int t = 0; t <= last; t++) {
        double p = exp(ref_score(view, q, t, scale) - top);
        const uint8_t *v = ref_kv_at(view->batch, view->kv, view->layer,
                                     view->seq, t, view->kv_head, REF_V);

        total += p;

        for (int d = 0; d < dim; d++) {
            sum[d] += p * ref_kv_read(view->kv, v, d);
        }
    }

    for (int d = 0; d < dim; d++) {
        out[d] = (float) (sum[d] / total);
    }

    free(sum);
}


static void
ref_attention(op_dev_t *dev, float *out, const float *q,
              const op_batch_t *batch, const op_attn_t *attn, const op_kv_t *kv,
              int layer)
{
    int dim = attn->head_dim;
    int group = attn->n_heads / attn->n_kv_heads;
    size_t stride =
        (size_t) (attn->n_heads + 2 * attn->n_kv_heads) * (size_t) dim;
    ref_view_t view = { batch, kv, layer, 0, 0 };

    (void) dev;

    for (int s = 0; s < batch->n_seqs; s++) {
        view.seq = s;

        for (int r = batch->row_start[s]; r < batch->row_start[s + 1]; r++) {
            for (int h = 0; h < attn->n_heads; h++) {
                view.kv_head = h / group;
                ref_attend(
                    &view, q + (size_t) r * stride + h * dim, batch->pos[r],
                    attn->scale,
                    out
                        + ((size_t) r * (size_t) attn->n_heads + (size_t) h)
                              * (size_t) dim);
            }
        }
    }
}


const op_table_t ref_ops = {
    .name = "ref",
    .open = ref_open,
    .close = ref_close,
    .describe = ref_describe,
    .prepare = ref_prepare,
    .alloc = ref_alloc,
    .free = ref_free,
    .host = true,
    .memory = ref_memory,
    .put = ref_move,
    .get = ref_move,
    .step = ref_step,
    .check = ref_check,
    .weight = ref_weight,
    .weight_free = ref_weight_free,
    .weight_bytes = ref_weight_bytes,
    .embed = ref_embed,
    .rmsnorm = ref_rmsnorm,
    .linear = ref_linear,
    .linear_of = ref_linear_of,
    .gather = ref_gather,
    .silu_mul = ref_silu_mul,
    .rope_kv = ref_rope_kv,
    .attention = ref_attention,
    .kv_page_bytes = ref_kv_page_bytes,
    .kv_copy = ref_kv_copy,
};
