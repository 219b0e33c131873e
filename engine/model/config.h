/* Hyperparameters of a model, read from GGUF metadata and checked. */

#ifndef ENGINE_MODEL_CONFIG_H
#define ENGINE_MODEL_CONFIG_H

#include "engine/base/status.h"
#include "engine/model/gguf.h"

typedef struct {
    char arch[32];
    char name[256];
    int n_layers;
    int n_embd;
    int n_ff;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int rot_dim;
    int n_vocab;
    int n_ctx; /* the length it was trained for */
    float rms_eps;
    float rope_base;
    float rope_scale; /* positions are multiplied by it, 1: no scaling */
} model_config_t;


/* LLM_BADREQ-class problems are LLM_ERROR here: a file that cannot be served
 * is a start-up error; err names the key. */
int model_config_read(const gguf_t *gguf, model_config_t *config,
                      llm_err_t *err);

#endif /* ENGINE_MODEL_CONFIG_H */
