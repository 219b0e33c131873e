/*
 * The memory budget of an engine: checked before the model is loaded, spent on
 * KV pages after.
 */

#ifndef ENGINE_BUDGET_H
#define ENGINE_BUDGET_H

#include "engine/engine.h"
#include "engine/model/gguf.h"
#include "engine/sizing.h"


/* Before anything big is taken: does what gpu_memory_utilization asks for
 * exist, and will weights and activations fit?  LLM_LIMIT with the remedy. */
int budget_check(engine_t *engine, const gguf_t *gguf,
                 const model_config_t *config, llm_err_t *err);

/* After the model is loaded: sizes and reserves the pages, and settles
 * engine->max_model_len. */
int budget_pages(engine_t *engine, llm_err_t *err);

/* Bytes that the engine keeps about each KV page, and for a step: batch,
 * plan, samplers, results. */
size_t budget_record_bytes(bool prefix_caching);
size_t budget_step_bytes(const sizing_step_t *step, int max_seqs, int n_vocab);

/* Bytes that the matrices and vectors of a file take when loaded. */
size_t budget_weight_bytes(const gguf_t *gguf);

#endif /* ENGINE_BUDGET_H */
