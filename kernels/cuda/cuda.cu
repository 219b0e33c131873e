/*
 * The CUDA backend's op table: scratch, and each op's launch.
 *
 * Ops are asynchronous, in order, on the device's one stream.  An error may
 * show in any later call and nothing can be saved then, so the first one is
 * kept, ops do nothing from there on, and check() tells: the process ends and
 * another one starts.
 */

#include "kernels/cuda/cuda_dev.h"
#include "kernels/cuda/cuda_point.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

extern "C" {
#include "kernels/cuda/cuda_ops.h"
}

/* What the segments of one product share. */
typedef struct {
    bool plain;     /* floats are in `input` */
    int narrow;     /* the type that cuBLAS's inputs have, or -1 */
    bool quantised; /* the device's activations are the product's */
    cuda_input_t input;
} cuda_ready_t;


/* After a launch: was it accepted? */
static void
launched(op_dev_t *dev, const char *what)
{
    cuda_ok(dev, cudaGetLastError(), what);
}


/* --- scratch --- */

static size_t
round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}


void
cuda_unprepare(op_dev_t *dev)
{
    cuda_graphs_drop(dev);
    cuda_stage_destroy(dev, &dev->step_stage);
    cuda_stage_destroy(dev, &dev->index_stage);
    cuda_free(dev, dev->act.q, dev->act_q_bytes);
    cuda_free(dev, dev->act.ds, dev->act_ds_bytes);
    cuda_free(dev, dev->attn_scratch, dev->attn_bytes);
    cuda_free(dev, dev->attn_arrived, dev->attn_arrived_bytes);
    memset(&dev->act, 0, sizeof(dev->act));
    dev->attn_scratch = NULL;
    dev->attn_arrived = NULL;
    dev->host_tokens = NULL;
    dev->host_out_rows = NULL;
}


static int
check_limits(const op_limits_t *limits, op_err_t *err)
{
    if (limits->max_rows < 1 || limits->max_seqs < 1 || limits->max_len < 1
        || limits->max_in < 1 || limits->n_kv_heads < 1 || limits->n_heads < 1)
    {
        snprintf(err->text, sizeof(err->text), "a limit is not positive");
        return -1;
    }

    if (limits->n_heads % limits->n_kv_heads != 0) {
        snprintf(err->text, sizeof(err->text),
                 "%d heads are not a multiple of %d KV heads", limits->n_heads,
                 limits->n_kv_heads);
        return -1;
    }

    return cuda_attn_check(limits, err);
}


static int
cuda_prepare(op_dev_t *dev, const op_limits_t *limits, op_err_t *err)
{
    const size_t blocks = round_up((size_t) limits->max_in, 32) / 32;
    const size_t cols = 2 * (size_t) limits->max_rows; /* OP_FINE */

    if (check_limits(limits, err) != 0) {
        return -1;
    }

    cuda_enter(dev);
    cuda_unprepare(dev);
    dev->act_q_bytes = cols * blocks * 32;
    dev->act_ds_bytes = cols * round_up(blocks, CUDA_CLASSES) * sizeof(float2);
    dev->attn_bytes = cuda_attn_scratch_bytes(limits);
    dev->attn_arrived_bytes = cuda_attn_arrived_bytes(limits);
    dev->act.q = (int8_t *) cuda_alloc(dev, dev->act_q_bytes);
    dev->act.ds = (float2 *) cuda_alloc(dev, dev->act_ds_bytes);
    dev->attn_scratch = cuda_alloc(dev, dev->attn_bytes);
    dev->attn_arrived = (unsigned *) cuda_alloc(dev, dev->attn_arrived_bytes);

    if (dev->act.q == NULL || dev->act.ds == NULL || dev->attn_scratch == NULL
        || dev->attn_arrived == NULL || cuda_blas_prepare(dev, limits) != 0
        || cuda_stage_create(dev, &dev->step_stage, cuda_step_bytes(limits),
                             CUDA_TURNS)
               != 0
        || cuda_stage_create(dev, &dev->index_stage, cuda_index_bytes(limits),
                             CUDA_TURNS)
               != 0)
    {
        cuda_unprepare(dev);
        cuda_lacks(dev, err,
                   "for steps of %d tokens and sequences of %d: lower "
                   "max_num_batched_tokens or max_model_len",
                   limits->max_rows, limits->max_len);
        return -1;
    }

    dev->limits = *limits;

    return 0;
}


/* --- ops --- */

static void
cuda_embed(op_dev_t *dev, float *x, const op_weight_t *w, const int32_t *tokens,
           int rows)
{
    int n;
    const cuda_segment_t *seg = cuda_weight_segments(w, &n);
    const int32_t *at = rows > 0 ? cuda_indices(dev, tokens, rows) : NULL;
    const cuda_ids_t ids = { at, dev->draw.drawn, rows };

    for (int i = 0; i < n && at != NULL; i++) {
        cuda_embed_launch(&seg[i], x, &ids, dev->stream);
        launched(dev, "embed");
    }
}


static void
cuda_rmsnorm(op_dev_t *dev, float *y, const float *x, const float *w, int rows,
             int dim, float eps)
{
    const cuda_rows_t job = { y, x, w, rows, dim };

    if (!dev->failed && rows > 0) {
        cuda_rmsnorm_launch(&job, eps, dev->stream);
        launched(dev, "rmsnorm");
    }
}


static void
cuda_silu_mul(op_dev_t *dev, float *y, const float *gate_up, int rows, int dim)
{
    const cuda_rows_t job = { y, gate_up, NULL, rows, dim };

    if (!dev->failed && rows > 0) {
        cuda_silu_mul_launch(&job, dev->stream);
        launched(dev, "silu_mul");
    }
}


/* op_input_t for kernels of a quantised layout. */
static cuda_input_t
input_of(const op_input_t *in)
{
    const cuda_input_t input = { in->kind, in->dim, in->x, in->norm, in->eps };

    return input;
}


/* Norms or gates into the scratch, for products that read floats. */
static cuda_input_t
plain_input(op_dev_t *dev, const op_input_t *in, int rows)
{
    cuda_input_t input = input_of(in);

    if (in->kind == OP_NORMED) {
        cuda_rmsnorm(dev, in->scratch, in->x, in->norm, rows, in->dim, in->eps);
    } else if (in->kind == OP_GATED) {
        cuda_silu_mul(dev, in->scratch, in->x, rows, in->dim);
    }

    input.kind = OP_PLAIN;
    input.x = in->kind == OP_PLAIN ? in->x : in->scratch;

    return input;
}


/* One segment of floats. */
static void
linear_float(op_dev_t *dev, cuda_dot_t *dot, const op_input_t *in,
             cuda_ready_t *ready)
{
    const bool fused = cuda_dense_fits(dot) && cuda_dense_reads(dot)
                       && !cuda_blas_fits(dev, dot);

    if (!fused && !ready->plain) {
        ready->input = plain_input(dev, in, dot->rows);
        ready->plain = true;
    }

    dot->in = fused ? input_of(in) : ready->input;

    if (cuda_blas_fits(dev, dot)) {
        if (ready->narrow != (int) dot->w.layout) {
            cuda_blas_narrow(dev, dot);
            launched(dev, "inputs of cuBLAS");
            ready->narrow = (int) dot->w.layout;
        }

        cuda_blas_gemm(dev, dot);

    } else if (cuda_dense_fits(dot)) {
        cuda_dense_launch(dot, dev->stream);

    } else {
        cuda_float_launch(dot, dev->stream);
    }

    launched(dev, "linear");
}


/* One segment; what is done once for all of a weight's is noted in `ready`. */
static void
linear_segment(op_dev_t *dev, cuda_dot_t *dot, const op_input_t *in,
               cuda_ready_t *ready)
{
    if (dot->w.n_blocks == 0) {
        linear_float(dev, dot, in, ready);
        return;
    }

    assert(dot->rows <= dev->limits.max_rows
           && dot->w.n_in <= dev->limits.max_in);
    dot->in = input_of(in);

    if (cuda_gemv_fits(dot)) {
        cuda_gemv_launch(dot, dev->stream);
        launched(dev, "linear");
        return;
    }

    if (!ready->quantised) {
        cuda_quantise_launch(&dot->act, &dot->in, dot->rows, dev->stream);
        launched(dev, "quantising");
        ready->quantised = true;
    }

    cuda_gemm_launch(dot, dev->stream);
    launched(dev, "linear");
}


static void
cuda_linear_of(op_dev_t *dev, float *y, int ldy, const op_input_t *in, int rows,
               const op_weight_t *w, int mode)
{
    int n;
    const cuda_segment_t *seg = cuda_weight_segments(w, &n);
    cuda_ready_t ready;

    memset(&ready, 0, sizeof(ready));
    ready.narrow = -1;

    for (int i = 0; i < n && rows > 0 && !dev->failed; i++) {
        cuda_dot_t dot;

        memset(&dot, 0, sizeof(dot));
        dot.w = seg[i];
        dot.act = dev->act;
        dot.act.stride = seg[i].stride;
        dot.act.fine = (mode & OP_FINE) != 0;
        dot.act.n_cols = dot.act.fine ? 2 * rows : rows;
        dot.y = y + seg[i].first_out;
        dot.ldy = ldy;
        dot.rows = rows;
        dot.add = mode & OP_ADD;
        dot.max_smem = dev->max_smem;
        dot.max_blocks = dev->max_blocks;
        dot.tensor_floats = dev->tensor_floats;
        linear_segment(dev, &dot, in, &ready);
    }
}


static void
cuda_linear(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
            const op_weight_t *w, int mode)
{
    int n;
    op_input_t in;

    memset(&in, 0, sizeof(in));
    in.dim = cuda_weight_segments(w, &n)->n_in;
    in.x = x;
    cuda_linear_of(dev, y, ldy, &in, rows, w, mode);
}


static void
cuda_gather(op_dev_t *dev, float *y, const float *x, const int32_t *idx, int n,
            int dim)
{
    const cuda_rows_t job = { y, x, NULL, n, dim };
    const int32_t *at = n > 0 ? cuda_indices(dev, idx, n) : NULL;

    if (at != NULL) {
        cuda_gather_launch(&job, at, dev->stream);
        launched(dev, "gather");
    }
}


static cuda_attn_call_t
attn_call(op_dev_t *dev, const op_attn_t *attn, const op_kv_t *kv, int layer)
{
    cuda_attn_call_t call;

    memset(&call, 0, sizeof(call));
    call.batch = &dev->batch;
    call.attn = attn;
    call.kv = kv;
    call.layer = layer;
    call.scratch = dev->attn_scratch;
    call.scratch_bytes = dev->attn_bytes;
    call.arrived = dev->attn_arrived;
    call.stream = dev->stream;

    return call;
}


static void
cuda_rope_kv(op_dev_t *dev, float *qkv, const op_batch_t *batch,
             const op_attn_t *attn, const float *cos_sin, int rot, int mode,
             const op_kv_t *kv, int layer)
{
    const cuda_attn_call_t call = attn_call(dev, attn, kv, layer);

    if (!dev->failed && batch->n_rows > 0) {
        cuda_rope_kv_launch(&call, qkv, cos_sin, rot, mode);
        launched(dev, "rope_kv");
    }
}


static void
cuda_attention(op_dev_t *dev, float *out, const float *q,
               const op_batch_t *batch, const op_attn_t *attn,
               const op_kv_t *kv, int layer)
{
    const cuda_attn_call_t call = attn_call(dev, attn, kv, layer);

    if (!dev->failed && batch->n_rows > 0) {
        cuda_attention_launch(&call, out, q);
        launched(dev, "attention");
    }
}


static size_t
cuda_kv_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                   int head_dim)
{
    (void) dev;

    return cuda_kv_bytes(dtype, n_layers, n_kv_heads, head_dim);
}


static void
cuda_kv_copy(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies, int n)
{
    const int32_t *at = n > 0 && cuda_enter(dev)
                            ? cuda_indices(dev, (const int32_t *) copies, 2 * n)
                            : NULL;

    if (at != NULL) {
        cuda_kv_copy_launch(kv, (const op_copy_t *) at, n, dev->stream);
        launched(dev, "kv_copy");
    }
}


static const char *
cuda_describe(op_dev_t *dev)
{
    const cuda_graphs_t *graphs = &dev->graphs;

    snprintf(dev->told, sizeof(dev->told), "%s", dev->describe);

    if (graphs->n_replays > 0) {
        const size_t at = strlen(dev->told);

        snprintf(dev->told + at, sizeof(dev->told) - at,
                 ", %llu graphs recorded, %llu passes run by them in place of "
                 "%llu launches",
                 (unsigned long long) graphs->n_recorded,
                 (unsigned long long) graphs->n_replays,
                 (unsigned long long) graphs->n_saved);
    }

    return dev->told;
}


const op_table_t cuda_ops = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .describe = cuda_describe,
    .prepare = cuda_prepare,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .threads = NULL,
    .parallel = NULL,
    .host = false,
    .memory = cuda_memory,
    .put = cuda_put,
    .get = cuda_get,
    .step = cuda_step,
    .pass = cuda_pass,
    .check = cuda_check,
    .weight = cuda_weight,
    .weight_free = cuda_weight_free,
    .weight_bytes = cuda_weight_bytes,
    .weight_form = NULL,
    .weight_data = NULL,
    .weight_over = NULL,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .linear = cuda_linear,
    .linear_of = cuda_linear_of,
    .gather = cuda_gather,
    .silu_mul = cuda_silu_mul,
    .rope_kv = cuda_rope_kv,
    .attention = cuda_attention,
    .kv_page_bytes = cuda_kv_page_bytes,
    .kv_copy = cuda_kv_copy,
    .draw_prepare = cuda_draw_prepare,
    .draw = cuda_draw,
    .drawn = cuda_drawn,
};
