/*
 * An architecture: the row that model.c picks by general.architecture, and
 * what the row's code works on.  Only engine/model includes this.
 */

#ifndef ENGINE_MODEL_ARCH_H
#define ENGINE_MODEL_ARCH_H

#include "engine/base/arena.h"
#include "engine/model/config.h"
#include "engine/model/model.h"
#include "engine/model/repack_cache.h"
#include "engine/model/weights.h"
#include "kernels/op/op.h"

typedef struct {
    float *attn_norm; /* [n_embd] */
    float *ffn_norm;
    op_weight_t *qkv;     /* q heads, k heads, v heads, along n_out */
    op_weight_t *attn_o;  /* n_heads * head_dim → n_embd */
    op_weight_t *gate_up; /* gate, then up: n_embd → 2 n_ff */
    op_weight_t *down;    /* n_ff → n_embd */
} model_layer_t;

typedef struct {
    float *data;
    size_t bytes; /* 0: a part of another's */
} model_buf_t;

typedef struct {
    const char *name; /* general.architecture */
    int rope_mode;

    /* Binds every weight of the file; err is in weights. */
    int (*bind)(model_t *model, weights_t *weights);
    void (*forward)(model_t *model, const op_batch_t *batch, const op_kv_t *kv);
} arch_t;

struct model_s {
    arena_t *arena;
    const arch_t *arch;
    model_config_t config;
    const op_table_t *ops;
    op_dev_t *dev;
    int max_rows;
    int max_out;
    int max_len;
    size_t weight_bytes;
    repack_cache_t cache;

    model_layer_t *layers;
    op_weight_t *embed;
    op_weight_t *head; /* the same as embed when the file ties them */
    float *out_norm;

    /* one for each pair of rotated values, or NULL: what Llama 3 divides the
     * frequencies by */
    const float *rope_factors;

    model_buf_t norms;   /* all norm vectors */
    model_buf_t cos_sin; /* [max_len][rot_dim / 2][2] */

    /* activations, a row a token; those behind `work` are in it: attention's
     * share their memory with the MLP's and with the logits, as none of them
     * outlives its part of the pass */
    model_buf_t x;   /* [max_rows][n_embd]: the residual stream */
    model_buf_t h;   /* [max_rows][n_embd]: normed */
    model_buf_t out; /* [max_rows][n_embd]: the rows that want logits */
    model_buf_t work;
    model_buf_t qkv;     /* [max_rows][(n_heads + 2 n_kv_heads) head_dim] */
    model_buf_t attn;    /* [max_rows][n_heads head_dim] */
    model_buf_t gate_up; /* [max_rows][2 n_ff] */
    model_buf_t act;     /* [max_rows][n_ff] */
    model_buf_t logits;  /* [max_out][n_vocab] */
    float *host_logits;  /* where the device's memory is not the host's */
};

extern const arch_t arch_llama;


/* NULL for an architecture this project does not know. */
const arch_t *arch_find(const char *name);

/* "llama, …", for messages. */
const char *arch_names(void);

#endif /* ENGINE_MODEL_ARCH_H */
