/*
 * A model on a backend with a small KV pool, for tests and tools: load, and
 * run one sequence in chunks.  All functions are static inline, so that each
 * program takes what it needs.
 */

#ifndef T_TOOLS_MODEL_RUN_H
#define T_TOOLS_MODEL_RUN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/model.h"
#include "kernels/backend.h"

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    model_t *model;
    op_kv_t kv;
    size_t kv_bytes;
    int n_vocab;
} run_t;

typedef struct {
    const char *backend;
    op_open_t open;
    int max_rows;
    int max_seqs;
    int max_len;
    int n_pages;
    const char *repack_cache;
    const char *path;
} run_how_t;


static inline void
run_close(run_t *run)
{
    if (run->kv.base != NULL) {
        run->ops->free(run->dev, run->kv.base, run->kv_bytes);
    }
    model_free(run->model);
    if (run->dev != NULL) {
        run->ops->close(run->dev);
    }
    memset(run, 0, sizeof(*run));
}


static inline int
run_open(run_t *run, const gguf_t *gguf, const run_how_t *how, llm_err_t *err)
{
    op_err_t op_err = { "" };

    memset(run, 0, sizeof(*run));
    run->ops = backend_find(how->backend);
    if (run->ops == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL, "no backend \"%s\"",
                           how->backend);
    }

    run->dev = run->ops->open(&how->open, &op_err);
    if (run->dev == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL, "%s", op_err.text);
    }

    const model_load_t load = { .ops = run->ops,
                                .dev = run->dev,
                                .max_rows = how->max_rows,
                                .max_seqs = how->max_seqs,
                                .max_out = how->max_rows,
                                .max_len = how->max_len,
                                .repack_cache = how->repack_cache,
                                .path = how->path };
    const int rc = model_load(gguf, &load, &run->model, err);

    if (rc != LLM_OK) {
        run_close(run);
        return rc;
    }

    const model_config_t *c = model_config(run->model);

    run->n_vocab = c->n_vocab;
    run->kv_bytes =
        (size_t) how->n_pages * model_page_bytes(run->model, OP_F16);
    run->kv.base = run->ops->alloc(run->dev, run->kv_bytes);
    run->kv.n_pages = how->n_pages;
    run->kv.n_layers = c->n_layers;
    run->kv.n_kv_heads = c->n_kv_heads;
    run->kv.head_dim = c->head_dim;
    run->kv.dtype = OP_F16;

    if (run->kv.base == NULL) {
        run_close(run);
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for the KV pool");
    }

    return LLM_OK;
}


/* Runs tokens[0 … n − 1] as one sequence over `table`, at most chunk rows a
 * pass, and writes the logits of every row to out: [n][n_vocab]. */
static inline void
run_sequence(run_t *run, const int32_t *tokens, int n, int chunk,
             const int32_t *table, float *out)
{
    int32_t *pos = malloc((size_t) n * sizeof(*pos));

    for (int i = 0; i < n; i++) {
        pos[i] = i;
    }

    for (int at = 0; at < n; at += chunk) {
        const int rows = n - at < chunk ? n - at : chunk;
        const int32_t start[2] = { 0, rows };
        const int32_t *const tables[1] = { table };
        const op_batch_t batch = { .n_rows = rows,
                                   .n_seqs = 1,
                                   .tokens = tokens + at,
                                   .pos = pos + at,
                                   .row_start = start,
                                   .block_table = tables,
                                   .n_out = rows,
                                   .out_rows = pos };

        model_forward(run->model, &batch, &run->kv);
        memcpy(out + (size_t) at * (size_t) run->n_vocab,
               model_logits(run->model, 0, rows),
               (size_t) rows * (size_t) run->n_vocab * sizeof(float));
    }

    free(pos);
}


/* The pages 0, 1, 2 … in an order that is not theirs, to be freed. */
static inline int32_t *
run_table(int n_pages)
{
    int32_t *table = malloc((size_t) n_pages * sizeof(*table));

    for (int i = 0; i < n_pages; i++) {
        table[i] = n_pages - 1 - i;
    }

    return table;
}

#endif /* T_TOOLS_MODEL_RUN_H */
