/*
 * Sizes of models and caches from their shapes.  Called by cli_plan.c and, for
 * the check before a model is loaded, by budget.c.
 *
 * Sources of the table: the config.json of each model; llama-1b is a shorter
 * name of llama-3.2-1b.
 */

#include "engine/sizing.h"

#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/table.h"
#include "kernels/op/op.h"
#include "kernels/op/repack.h"

static const sizing_shape_t shapes[] = {
    { "llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, 2048, false, false },
    { "llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, 2048, false, false },
    { "llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, false, false },
    { "llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192, false, false },
    { "llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, true, false },
    { "llama-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, true, false },
    { "mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768, false, false },
    { "smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, true, false },
    { "qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768, false, true },
};

enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

/* empty tokens of the last page, in the mean over all lengths */
static const double half_page = (KV_PAGE - 1) / 2.0;


const sizing_shape_t *
sizing_at(int i)
{
    return i >= 0 && i < N_SHAPES ? &shapes[i] : NULL;
}


const sizing_shape_t *
sizing_find(const char *name)
{
    for (int i = 0; i < N_SHAPES; i++) {
        if (strcmp(shapes[i].name, name) == 0) {
            return &shapes[i];
        }
    }

    return NULL;
}


sizing_shape_t
sizing_shape(const model_config_t *config, bool tied)
{
    return (sizing_shape_t){
        .name = config->name,
        .n_layers = config->n_layers,
        .n_embd = config->n_embd,
        .n_ff = config->n_ff,
        .n_heads = config->n_heads,
        .n_kv_heads = config->n_kv_heads,
        .head_dim = config->head_dim,
        .n_vocab = config->n_vocab,
        .n_ctx = config->n_ctx,
        .tied = tied,
    };
}


static int64_t
q_width(const sizing_shape_t *shape)
{
    return (int64_t) shape->n_heads * shape->head_dim;
}


static int64_t
qkv_width(const sizing_shape_t *shape)
{
    return q_width(shape) + (int64_t) 2 * shape->n_kv_heads * shape->head_dim;
}


/* Values in vectors: norms, biases. */
static int64_t
vector_values(const sizing_shape_t *shape)
{
    const int64_t bias = shape->bias ? qkv_width(shape) : 0;

    return shape->n_layers * ((int64_t) 2 * shape->n_embd + bias)
           + shape->n_embd;
}


int64_t
sizing_params(const sizing_shape_t *shape)
{
    const int64_t n_embd = shape->n_embd;
    const int64_t layer = n_embd * qkv_width(shape) + q_width(shape) * n_embd
                          + 3 * n_embd * shape->n_ff;

    return shape->n_layers * layer + vector_values(shape)
           + n_embd * shape->n_vocab * (shape->tied ? 1 : 2);
}


size_t
sizing_matrix_bytes(op_dtype_t dtype, int64_t n_in, int64_t n_out)
{
    const int layout = op_layout_of(dtype);

    llm_assert(layout >= 0);

    return op_layout_group_bytes((op_layout_t) layout, n_in)
           * (size_t) ((n_out + OP_LANES - 1) / OP_LANES);
}


size_t
sizing_step_bytes(const sizing_shape_t *shape, op_dtype_t dtype)
{
    const int64_t n_embd = shape->n_embd;
    const size_t layer =
        sizing_matrix_bytes(dtype, n_embd, qkv_width(shape))
        + sizing_matrix_bytes(dtype, q_width(shape), n_embd)
        + sizing_matrix_bytes(dtype, n_embd, (int64_t) 2 * shape->n_ff)
        + sizing_matrix_bytes(dtype, shape->n_ff, n_embd);

    return (size_t) shape->n_layers * layer
           + (size_t) vector_values(shape) * sizeof(float)
           + sizing_matrix_bytes(dtype, n_embd, shape->n_vocab);
}


size_t
sizing_weight_bytes(const sizing_shape_t *shape, op_dtype_t dtype)
{
    const size_t embed =
        sizing_matrix_bytes(dtype, shape->n_embd, shape->n_vocab);

    return sizing_step_bytes(shape, dtype) + (shape->tied ? 0 : embed);
}


/* f32 rows in whole cache lines. */
static size_t
line_bytes(size_t rows, size_t width)
{
    return (rows * width * sizeof(float) + 63) / 64 * 64;
}


size_t
sizing_activation_bytes(const sizing_shape_t *shape, const sizing_step_t *step)
{
    const size_t rows = (size_t) step->max_rows;
    const size_t attention = line_bytes(rows, (size_t) qkv_width(shape))
                             + line_bytes(rows, (size_t) q_width(shape));
    const size_t mlp = line_bytes(rows, 2 * (size_t) shape->n_ff)
                       + line_bytes(rows, (size_t) shape->n_ff);
    const size_t logits =
        line_bytes((size_t) step->max_out, (size_t) shape->n_vocab);
    size_t work = attention > mlp ? attention : mlp;

    work = work > logits ? work : logits;

    return work
           + sizeof(float)
                 * (rows * 3 * (size_t) shape->n_embd
                    + (size_t) step->max_len * (size_t) shape->head_dim);
}


size_t
sizing_kv_bytes(const sizing_shape_t *shape, op_dtype_t dtype)
{
    const size_t rows =
        (size_t) 2 * (size_t) shape->n_layers * (size_t) shape->n_kv_heads;
    const size_t dim = (size_t) shape->head_dim;

    if (dtype == OP_Q8_0) {
        const size_t scales = (dim + OP_KV_BLOCK - 1) / OP_KV_BLOCK;

        return rows * (dim + scales * sizeof(uint16_t));
    }

    return rows * dim * (size_t) op_dtype_bytes(dtype);
}


void
sizing_plan(const sizing_load_t *load, sizing_plan_t *plan)
{
    llm_assert(load->context >= 1 && load->mean >= 1 && load->max_seqs >= 1);

    const double kv = (double) load->kv_per_token;
    const double mean = load->mean;
    const double taken =
        mean + half_page < KV_PAGE ? KV_PAGE : mean + half_page;

    *plan = (sizing_plan_t){ .tokens = load->n_pages * KV_PAGE };

    plan->reserved = plan->tokens / load->context;
    plan->paged = (int64_t) ((double) plan->tokens / taken);
    plan->batch = plan->paged < load->max_seqs ? plan->paged : load->max_seqs;
    plan->reserved_waste = 1 - mean / load->context;
    plan->paged_waste = 1 - mean / taken;

    if (load->bytes_per_sec <= 0) {
        return;
    }

    const double weights = (double) load->step_weights;

    plan->single_per_sec = load->bytes_per_sec / (weights + mean * kv);

    if (plan->batch > 0) {
        const double batch = (double) plan->batch;

        plan->batch_step_secs =
            (weights + batch * mean * kv) / load->bytes_per_sec;
        plan->batch_per_sec = batch / plan->batch_step_secs;
    }
}
