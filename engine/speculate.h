/*
 * Speculative decoding: guesses at the next tokens of sequences that decode,
 * which the model verifies as more rows of the step it takes anyway.
 *
 * A draft never changes an answer.  The token of a position is drawn from the
 * model's logits with the noise of (seed, position) as ever (runner.c); a draft
 * that is the same token has saved a step, any other has cost a row.
 */

#ifndef ENGINE_SPECULATE_H
#define ENGINE_SPECULATE_H

#include "engine/engine.h"


/* engine->spec as the settings say; NULL when they say off.  gguf: of the
 * model, which is loaded. */
int speculate_open(engine_t *engine, const gguf_t *gguf, llm_err_t *err);

/* The draft model's part of a page, of the weights and activations, and of what
 * the device takes for itself; its K and V, when the pages are counted. */
size_t speculate_page_bytes(const engine_t *engine);
size_t speculate_model_bytes(const engine_t *engine);
size_t speculate_later_bytes(const engine_t *engine);
int speculate_reserve(engine_t *engine, llm_err_t *err);
void speculate_close(engine_t *engine);

/* Before a step is planned: who may have how many drafts. */
void speculate_propose(engine_t *engine);

/* When it is planned: the draft model makes those that are its own. */
void speculate_draft(engine_t *engine, const plan_t *plan);

/* After it has run: what became of them. */
void speculate_learn(engine_t *engine, const plan_t *plan);

/* A request ends; its tokens are still there. */
void speculate_end(engine_t *engine, const request_t *req);

#endif /* ENGINE_SPECULATE_H */
