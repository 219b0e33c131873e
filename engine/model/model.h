/*
 * A loaded model: weights on a backend, and the forward pass over a batch.
 *
 * The architecture's code (arch_*.c) is written over kernels/op only.  All
 * activations are reserved at load; a forward pass allocates nothing.
 */

#ifndef ENGINE_MODEL_MODEL_H
#define ENGINE_MODEL_MODEL_H

#include "engine/base/status.h"
#include "engine/model/config.h"
#include "engine/model/gguf.h"
#include "kernels/op/op.h"

typedef struct model_s model_t;

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    int max_rows; /* tokens in one step */
    int max_seqs;
    int max_out; /* rows of logits computed at once */
    int max_len; /* longest sequence; sizes the RoPE table */

    /* where repacked weights are kept (repack_cache.h), NULL: nowhere; and the
     * path of the model */
    const char *repack_cache;
    const char *path;
} model_load_t;


/* Binds and repacks the weights of gguf (it and the paths are needed only
 * during the call) and
 * calls ops->prepare().  err names a missing or misshapen tensor. */
int model_load(const gguf_t *gguf, const model_load_t *how, model_t **model,
               llm_err_t *err);
void model_free(model_t *model);

const model_config_t *model_config(const model_t *model);
size_t model_weight_bytes(const model_t *model);
size_t model_activation_bytes(const model_t *model);

/* Bytes of weights that are mapped from a repack cache, which no other account
 * of memory shows; and how many weights came from it. */
size_t model_mapped_bytes(const model_t *model);
int model_cached_weights(const model_t *model);

/* Bytes of one KV page over all layers, K and V as dtype (OP_F16, OP_Q8_0);
 * 0: the backend has no such pool. */
size_t model_page_bytes(const model_t *model, int dtype);

/* One pass over the batch: writes K and V of every row to kv, and keeps the
 * final normed hidden state of the out_rows.  Bounds are the caller's: rows,
 * tokens, positions, pages in range. */
void model_forward(model_t *model, const op_batch_t *batch, const op_kv_t *kv);

/* Logits of out rows first … first + n − 1 of the last pass, n ≤ max_out:
 * [n][n_vocab] f32, valid until the next call. */
float *model_logits(model_t *model, int first, int n);

/* The same in the backend's memory; waits for nothing. */
float *model_logits_at(model_t *model, int first, int n);

#endif /* ENGINE_MODEL_MODEL_H */
