/*
 * Loading a model and running it: picks the architecture's row, reserves all
 * memory, and forwards to the row's code.
 *
 * Called by the engine at start-up, then once a step.  After model_load()
 * nothing here allocates.
 */

#include "engine/model/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/arch.h"

static const arch_t *const archs[] = { &arch_llama };

enum { N_ARCHS = sizeof(archs) / sizeof(archs[0]) };

/* Sanity of the caller's numbers; keeps products of sizes in 64 bits. */
enum { MAX_ROWS = 1 << 20, MAX_LEN = 1 << 24 };


const arch_t *
arch_find(const char *name)
{
    for (int i = 0; i < N_ARCHS; i++) {
        if (strcmp(archs[i]->name, name) == 0) {
            return archs[i];
        }
    }

    return NULL;
}


const char *
arch_names(void)
{
    return "llama";
}


/* --- memory --- */

static bool
reserve(model_t *model, model_buf_t *buf, size_t rows, size_t width)
{
    buf->bytes = rows * width * sizeof(float);
    buf->data = model->ops->alloc(model->dev, buf->bytes);

    return buf->data != NULL;
}


static void
release(model_t *model, model_buf_t *buf)
{
    if (buf->data != NULL) {
        model->ops->free(model->dev, buf->data, buf->bytes);
        buf->data = NULL;
    }
}


/* Bytes of rows, in whole cache lines. */
static size_t
work_bytes(size_t rows, size_t width)
{
    return (rows * width * sizeof(float) + 63) / 64 * 64;
}


static size_t
larger(size_t a, size_t b)
{
    return a > b ? a : b;
}


/* Attention's buffers, the MLP's and the logits, over one another. */
static bool
reserve_work(model_t *model, size_t n_q, size_t n_kv)
{
    const size_t rows = (size_t) model->max_rows;
    const size_t n_ff = (size_t) model->config.n_ff;
    const size_t qkv = work_bytes(rows, n_q + 2 * n_kv);
    const size_t gate_up = work_bytes(rows, 2 * n_ff);
    const size_t logits =
        work_bytes((size_t) model->max_out, (size_t) model->config.n_vocab);

    model->work.bytes = larger(
        larger(qkv + work_bytes(rows, n_q), gate_up + work_bytes(rows, n_ff)),
        logits);
    model->work.data = model->ops->alloc(model->dev, model->work.bytes);

    if (model->work.data == NULL) {
        return false;
    }

    model->qkv.data = model->work.data;
    model->attn.data = model->work.data + qkv / sizeof(float);
    model->gate_up.data = model->work.data;
    model->act.data = model->work.data + gate_up / sizeof(float);
    model->logits.data = model->work.data;

    if (!model->ops->host) {
        model->host_logits = malloc(logits);
        return model->host_logits != NULL;
    }

    return true;
}


static bool
reserve_all(model_t *model)
{
    const model_config_t *c = &model->config;
    const size_t rows = (size_t) model->max_rows;
    const size_t n_embd = (size_t) c->n_embd;
    const size_t n_q = (size_t) c->n_heads * (size_t) c->head_dim;
    const size_t n_kv = (size_t) c->n_kv_heads * (size_t) c->head_dim;

    return reserve(model, &model->norms, 2 * (size_t) c->n_layers + 1, n_embd)
           && reserve(model, &model->cos_sin, (size_t) model->max_len,
                      (size_t) c->rot_dim)
           && reserve(model, &model->x, rows, n_embd)
           && reserve(model, &model->h, rows, n_embd)
           && reserve(model, &model->out, rows, n_embd)
           && reserve_work(model, n_q, n_kv);
}


static void
weight_free(model_t *model, op_weight_t *weight)
{
    if (weight != NULL) {
        model->ops->weight_free(model->dev, weight);
    }
}


void
model_free(model_t *model)
{
    if (model == NULL) {
        return;
    }

    for (int l = 0; l < model->config.n_layers && model->layers != NULL; l++) {
        weight_free(model, model->layers[l].qkv);
        weight_free(model, model->layers[l].attn_o);
        weight_free(model, model->layers[l].gate_up);
        weight_free(model, model->layers[l].down);
    }

    if (model->head != model->embed) {
        weight_free(model, model->head);
    }
    weight_free(model, model->embed);
    repack_cache_close(&model->cache);

    release(model, &model->norms);
    release(model, &model->cos_sin);
    release(model, &model->x);
    release(model, &model->h);
    release(model, &model->out);
    release(model, &model->work);
    free(model->host_logits);

    arena_destroy(model->arena);
}


/* --- loading --- */

/* Angles in double: position 8191 times a frequency near 1 has only 11 bits of
 * fraction left in a float. */
static void
fill_cos_sin(const model_t *model, float *out)
{
    const model_config_t *c = &model->config;
    const int half = c->rot_dim / 2;

    for (int i = 0; i < half; i++) {
        double freq = pow((double) c->rope_base, -2.0 * i / c->rot_dim)
                      * (double) c->rope_scale;

        if (model->rope_factors != NULL) {
            freq /= (double) model->rope_factors[i];
        }

        for (int pos = 0; pos < model->max_len; pos++) {
            float *pair = out + ((size_t) pos * (size_t) half + (size_t) i) * 2;

            pair[0] = (float) cos(pos * freq);
            pair[1] = (float) sin(pos * freq);
        }
    }
}


static int
make_cos_sin(model_t *model, llm_err_t *err)
{
    const model_buf_t *buf = &model->cos_sin;

    if (model->ops->host) {
        fill_cos_sin(model, buf->data);
        return LLM_OK;
    }

    float *table = malloc(buf->bytes);

    if (table == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory to load a model");
    }

    fill_cos_sin(model, table);
    model->ops->put(model->dev, buf->data, table, buf->bytes);
    free(table);

    return LLM_OK;
}


/* A device may have failed while weights were on their way; whatever else
 * seems to be wrong comes of it. */
static int
check(const model_t *model, llm_err_t *err)
{
    op_err_t op_err = { "" };

    if (model->ops->check(model->dev, &op_err) != 0) {
        return llm_err_set(err, LLM_ERROR, NULL, "device \"%s\": %s",
                           model->ops->name, op_err.text);
    }

    return LLM_OK;
}


static int
prepare(model_t *model, const model_load_t *how, llm_err_t *err)
{
    const model_config_t *c = &model->config;
    const int n_q = c->n_heads * c->head_dim;
    op_err_t op_err = { "" };
    op_limits_t limits = {
        .max_rows = how->max_rows,
        .max_seqs = how->max_seqs,
        .max_len = how->max_len,
        .max_in = c->n_embd,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
    };

    limits.max_in = limits.max_in < c->n_ff ? c->n_ff : limits.max_in;
    limits.max_in = limits.max_in < n_q ? n_q : limits.max_in;

    if (how->ops->prepare(how->dev, &limits, &op_err) != 0) {
        return llm_err_set(err, LLM_ERROR, NULL, "cannot prepare \"%s\": %s",
                           how->ops->name, op_err.text);
    }

    return LLM_OK;
}


static int
load(model_t *model, const gguf_t *gguf, const model_load_t *how,
     llm_err_t *err)
{
    weights_t weights = { .gguf = gguf,
                          .ops = how->ops,
                          .dev = how->dev,
                          .err = err,
                          .cache = &model->cache };

    repack_cache_open(&model->cache, how->repack_cache, gguf, how->ops,
                      how->dev);

    model->layers = arena_calloc(model->arena, (size_t) model->config.n_layers
                                                   * sizeof(model_layer_t));

    if (model->layers == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory to load a model");
    }

    if (!reserve_all(model)) {
        return llm_err_set(
            err, LLM_NOMEM, NULL,
            "no memory%s for activations of %d rows: lower "
            "max_num_batched_tokens or max_model_len",
            model->ops->host || model->work.data != NULL ? "" : " on the GPU",
            model->max_rows);
    }

    int rc = weights_init(&weights, model->arena);

    if (rc == LLM_OK) {
        rc = model->arch->bind(model, &weights);
    }
    if (rc == LLM_OK) {
        rc = weights_finish(&weights);
    }
    if (rc == LLM_OK) {
        rc = prepare(model, how, err);
    }
    if (rc == LLM_OK) {
        rc = make_cos_sin(model, err);
    }
    if (rc == LLM_OK) {
        rc = check(model, err);
    }
    if (rc == LLM_OK) {
        repack_cache_save(&model->cache, how->path);
        model->weight_bytes = weights.bytes + model->norms.bytes;
    }

    return rc;
}


int
model_load(const gguf_t *gguf, const model_load_t *how, model_t **out,
           llm_err_t *err)
{
    model_config_t config;
    int rc = model_config_read(gguf, &config, err);

    *out = NULL;
    if (rc != LLM_OK) {
        return rc;
    }

    llm_assert(how->max_rows > 0 && how->max_rows <= MAX_ROWS);
    llm_assert(how->max_len > 0 && how->max_len <= MAX_LEN);
    llm_assert(how->max_seqs > 0 && how->max_out > 0);

    arena_t *arena = arena_create(16 * 1024);
    model_t *model = arena == NULL ? NULL : arena_calloc(arena, sizeof(*model));

    if (model == NULL) {
        if (arena != NULL) {
            arena_destroy(arena);
        }
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory to load a model");
    }

    model->arena = arena;
    model->arch = arch_find(config.arch);
    model->config = config;
    model->ops = how->ops;
    model->dev = how->dev;
    model->max_rows = how->max_rows;
    model->max_out =
        how->max_out < how->max_rows ? how->max_out : how->max_rows;
    model->max_len = how->max_len;

    rc = load(model, gguf, how, err);
    if (rc != LLM_OK) {
        check(model, err);
        model_free(model);
        return rc;
    }

    *out = model;

    return LLM_OK;
}


/* --- running --- */

void
model_forward(model_t *model, const op_batch_t *batch, const op_kv_t *kv)
{
    llm_dassert(batch->n_rows > 0 && batch->n_rows <= model->max_rows);
    llm_dassert(batch->n_out >= 0 && batch->n_out <= batch->n_rows);

    if (model->ops->pass == NULL) {
        model->ops->step(model->dev, batch);
        model->arch->forward(model, batch, kv);
        return;
    }

    op_pass_t pass = { .model = model, .kv = kv, .batch = batch };

    while (model->ops->pass(model->dev, &pass)) {
        model->arch->forward(model, &pass.given, kv);
    }
}


float *
model_logits_at(model_t *model, int first, int n)
{
    const model_config_t *c = &model->config;

    llm_assert(first >= 0 && n > 0 && n <= model->max_out
               && first + n <= model->max_rows);

    model->ops->linear(model->dev, model->logits.data, c->n_vocab,
                       model->out.data + (size_t) first * (size_t) c->n_embd, n,
                       model->head, OP_SET);

    return model->logits.data;
}


float *
model_logits(model_t *model, int first, int n)
{
    float *logits = model_logits_at(model, first, n);

    if (model->ops->host) {
        return logits;
    }

    model->ops->get(model->dev, model->host_logits, logits,
                    (size_t) n * (size_t) model->config.n_vocab
                        * sizeof(float));

    return model->host_logits;
}


const model_config_t *
model_config(const model_t *model)
{
    return &model->config;
}


size_t
model_weight_bytes(const model_t *model)
{
    return model->weight_bytes;
}


size_t
model_activation_bytes(const model_t *model)
{
    return model->cos_sin.bytes + model->x.bytes + model->h.bytes
           + model->out.bytes + model->work.bytes;
}


size_t
model_mapped_bytes(const model_t *model)
{
    return model->cache.copied ? 0 : model->cache.data_bytes;
}


int
model_cached_weights(const model_t *model)
{
    return model->cache.n_taken;
}


size_t
model_page_bytes(const model_t *model, int dtype)
{
    const model_config_t *c = &model->config;

    return model->ops->kv_page_bytes(model->dev, dtype, c->n_layers,
                                     c->n_kv_heads, c->head_dim);
}
