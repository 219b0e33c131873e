/*
 * Host memory in front of a device's; see hosted.h.
 */

#include "t/ops/lib/hosted.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"

struct op_dev_s {
    op_dev_t *inner;
};

struct op_weight_s {
    op_weight_t *inner;
    int n_in;
    int n_out;
};

/* Something of the host's and its copy on the device. */
typedef struct {
    void *host;
    void *device;
    size_t bytes;
} copy_t;

static const op_table_t *const ops = &cuda_ops;


static void *
must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }

    return p;
}


static copy_t
up(op_dev_t *dev, const void *host, size_t bytes)
{
    copy_t copy = { (void *) (uintptr_t) host,
                    must(ops->alloc(dev->inner, bytes)), bytes };

    ops->put(dev->inner, copy.device, host, bytes);

    return copy;
}


static void
drop(op_dev_t *dev, const copy_t *copy)
{
    ops->free(dev->inner, copy->device, copy->bytes);
}


/* What the device wrote, back to the host. */
static void
down(op_dev_t *dev, const copy_t *copy)
{
    op_err_t err;

    ops->get(dev->inner, copy->host, copy->device, copy->bytes);

    if (ops->check(dev->inner, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }

    drop(dev, copy);
}


static size_t
floats(size_t rows, size_t width)
{
    return rows * width * sizeof(float);
}


op_dev_t *
hosted_inner(op_dev_t *dev)
{
    return dev->inner;
}


static op_dev_t *
hosted_open(const op_open_t *params, op_err_t *err)
{
    static const op_limits_t small = { .max_rows = 256,
                                       .max_seqs = 16,
                                       .max_len = 2048,
                                       .max_in = 2048,
                                       .n_heads = 4,
                                       .n_kv_heads = 4,
                                       .head_dim = 64 };
    op_dev_t *inner = ops->open(params, err);

    if (inner == NULL) {
        return NULL;
    }

    if (ops->prepare(inner, &small, err) != 0) {
        ops->close(inner);
        return NULL;
    }

    op_dev_t *dev = must(calloc(1, sizeof(op_dev_t)));

    dev->inner = inner;

    return dev;
}


static void
hosted_close(op_dev_t *dev)
{
    if (dev != NULL) {
        ops->close(dev->inner);
        free(dev);
    }
}


static const char *
hosted_describe(op_dev_t *dev)
{
    return ops->describe(dev->inner);
}


static int
hosted_prepare(op_dev_t *dev, const op_limits_t *limits, op_err_t *err)
{
    return ops->prepare(dev->inner, limits, err);
}


static void *
hosted_alloc(op_dev_t *dev, size_t bytes)
{
    const size_t size = (bytes / 64 + 1) * 64;
    void *p = size < bytes ? NULL : aligned_alloc(64, size);

    (void) dev;

    return p == NULL ? NULL : memset(p, 0, size);
}


static void
hosted_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) dev;
    (void) bytes;
    free(p);
}


static op_memory_t
hosted_memory(op_dev_t *dev)
{
    return ops->memory(dev->inner);
}


static void
hosted_move(op_dev_t *dev, void *to, const void *from, size_t bytes)
{
    (void) dev;
    memmove(to, from, bytes);
}


static void
hosted_step(op_dev_t *dev, const op_batch_t *batch)
{
    (void) dev;
    (void) batch;
}


static int
hosted_check(op_dev_t *dev, op_err_t *err)
{
    return ops->check(dev->inner, err);
}


static op_weight_t *
hosted_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts,
              op_err_t *err)
{
    op_weight_t *inner = ops->weight(dev->inner, parts, n_parts, err);
    op_weight_t *w;

    if (inner == NULL) {
        return NULL;
    }

    w = must(calloc(1, sizeof(op_weight_t)));
    w->inner = inner;
    w->n_in = (int) parts[0].n_in;

    for (int i = 0; i < n_parts; i++) {
        w->n_out += (int) parts[i].n_out;
    }

    return w;
}


static void
hosted_weight_free(op_dev_t *dev, op_weight_t *weight)
{
    if (weight != NULL) {
        ops->weight_free(dev->inner, weight->inner);
        free(weight);
    }
}


static size_t
hosted_weight_bytes(const op_weight_t *weight)
{
    return ops->weight_bytes(weight->inner);
}


static void
hosted_embed(op_dev_t *dev, float *x, const op_weight_t *w,
             const int32_t *tokens, int rows)
{
    const copy_t out = up(dev, x, floats((size_t) rows, (size_t) w->n_in));

    ops->embed(dev->inner, out.device, w->inner, tokens, rows);
    down(dev, &out);
}


static void
hosted_rmsnorm(op_dev_t *dev, float *y, const float *x, const float *w,
               int rows, int dim, float eps)
{
    const copy_t in = up(dev, x, floats((size_t) rows, (size_t) dim));
    const copy_t gain = up(dev, w, floats(1, (size_t) dim));
    copy_t out = up(dev, y, floats((size_t) rows, (size_t) dim));

    if (x == y) { /* in place */
        drop(dev, &out);
        out = in;
    }

    ops->rmsnorm(dev->inner, out.device, in.device, gain.device, rows, dim,
                 eps);
    drop(dev, &gain);

    if (x != y) {
        drop(dev, &in);
    }

    down(dev, &out);
}


static void
hosted_linear(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
              const op_weight_t *w, int mode)
{
    const size_t all = (size_t) (rows - 1) * (size_t) ldy + (size_t) w->n_out;
    const copy_t in = up(dev, x, floats((size_t) rows, (size_t) w->n_in));
    const copy_t out = up(dev, y, floats(1, all));

    ops->linear(dev->inner, out.device, ldy, in.device, rows, w->inner, mode);
    drop(dev, &in);
    down(dev, &out);
}


static void
hosted_linear_of(op_dev_t *dev, float *y, int ldy, const op_input_t *in,
                 int rows, const op_weight_t *w, int mode)
{
    const size_t width = (size_t) in->dim * (in->kind == OP_GATED ? 2 : 1);
    const size_t all = (size_t) (rows - 1) * (size_t) ldy + (size_t) w->n_out;
    const copy_t x = up(dev, in->x, floats((size_t) rows, width));
    const copy_t norm = up(dev, in->norm != NULL ? in->norm : in->x,
                           floats(1, (size_t) in->dim));
    const copy_t scratch = up(dev, in->x, floats((size_t) rows, width));
    const copy_t out = up(dev, y, floats(1, all));
    op_input_t there = *in;

    there.x = x.device;
    there.norm = norm.device;
    there.scratch = scratch.device;
    ops->linear_of(dev->inner, out.device, ldy, &there, rows, w->inner, mode);
    drop(dev, &x);
    drop(dev, &norm);
    drop(dev, &scratch);
    down(dev, &out);
}


static void
hosted_gather(op_dev_t *dev, float *y, const float *x, const int32_t *idx,
              int n, int dim)
{
    int rows = 0;

    for (int i = 0; i < n; i++) {
        rows = idx[i] >= rows ? idx[i] + 1 : rows;
    }

    const copy_t in = up(dev, x, floats((size_t) rows, (size_t) dim));
    const copy_t out = up(dev, y, floats((size_t) n, (size_t) dim));

    ops->gather(dev->inner, out.device, in.device, idx, n, dim);
    drop(dev, &in);
    down(dev, &out);
}


static void
hosted_silu_mul(op_dev_t *dev, float *y, const float *gate_up, int rows,
                int dim)
{
    const copy_t in = up(dev, gate_up, floats((size_t) rows, 2 * (size_t) dim));
    const copy_t out = up(dev, y, floats((size_t) rows, (size_t) dim));

    ops->silu_mul(dev->inner, out.device, in.device, rows, dim);
    drop(dev, &in);
    down(dev, &out);
}


/* --- the pool --- */

static copy_t
up_pool(op_dev_t *dev, const op_kv_t *kv, op_kv_t *there)
{
    const size_t page =
        ops->kv_page_bytes(dev->inner, (int) kv->dtype, kv->n_layers,
                           kv->n_kv_heads, kv->head_dim);
    const copy_t pool = up(dev, kv->base, (size_t) kv->n_pages * page);

    *there = *kv;
    there->base = pool.device;

    return pool;
}


static size_t
qkv_bytes(const op_batch_t *batch, const op_attn_t *attn)
{
    const int width = (attn->n_heads + 2 * attn->n_kv_heads) * attn->head_dim;

    return floats((size_t) batch->n_rows, (size_t) width);
}


static void
hosted_rope_kv(op_dev_t *dev, float *qkv, const op_batch_t *batch,
               const op_attn_t *attn, const float *cos_sin, int rot, int mode,
               const op_kv_t *kv, int layer)
{
    op_kv_t there;
    int len = 1;

    for (int r = 0; r < batch->n_rows; r++) {
        len = batch->pos[r] >= len ? batch->pos[r] + 1 : len;
    }

    const copy_t rows = up(dev, qkv, qkv_bytes(batch, attn));
    const copy_t table = up(dev, cos_sin, floats((size_t) len, (size_t) rot));
    const copy_t pool = up_pool(dev, kv, &there);

    ops->step(dev->inner, batch);
    ops->rope_kv(dev->inner, rows.device, batch, attn, table.device, rot, mode,
                 &there, layer);
    drop(dev, &table);
    down(dev, &rows);
    down(dev, &pool);
}


static void
hosted_attention(op_dev_t *dev, float *out, const float *q,
                 const op_batch_t *batch, const op_attn_t *attn,
                 const op_kv_t *kv, int layer)
{
    const size_t width = (size_t) attn->n_heads * (size_t) attn->head_dim;
    const copy_t rows = up(dev, q, qkv_bytes(batch, attn));
    const copy_t to = up(dev, out, floats((size_t) batch->n_rows, width));
    op_kv_t there;
    const copy_t pool = up_pool(dev, kv, &there);

    ops->step(dev->inner, batch);
    ops->attention(dev->inner, to.device, rows.device, batch, attn, &there,
                   layer);
    drop(dev, &rows);
    down(dev, &to);
    drop(dev, &pool);
}


static size_t
hosted_kv_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                     int head_dim)
{
    return ops->kv_page_bytes(dev->inner, dtype, n_layers, n_kv_heads,
                              head_dim);
}


static void
hosted_kv_copy(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies, int n)
{
    op_kv_t there;
    const copy_t pool = up_pool(dev, kv, &there);

    ops->kv_copy(dev->inner, &there, copies, n);
    down(dev, &pool);
}


const op_table_t hosted_cuda = {
    .name = "cuda",
    .open = hosted_open,
    .close = hosted_close,
    .describe = hosted_describe,
    .prepare = hosted_prepare,
    .alloc = hosted_alloc,
    .free = hosted_free,
    .host = true,
    .memory = hosted_memory,
    .put = hosted_move,
    .get = hosted_move,
    .step = hosted_step,
    .check = hosted_check,
    .weight = hosted_weight,
    .weight_free = hosted_weight_free,
    .weight_bytes = hosted_weight_bytes,
    .embed = hosted_embed,
    .rmsnorm = hosted_rmsnorm,
    .linear = hosted_linear,
    .linear_of = hosted_linear_of,
    .gather = hosted_gather,
    .silu_mul = hosted_silu_mul,
    .rope_kv = hosted_rope_kv,
    .attention = hosted_attention,
    .kv_page_bytes = hosted_kv_page_bytes,
    .kv_copy = hosted_kv_copy,
};
