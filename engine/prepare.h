/* A request's private copy → tokens, stops, sampling parameters, sequence. */

#ifndef ENGINE_PREPARE_H
#define ENGINE_PREPARE_H

#include "engine/engine.h"


/* Renders, tokenizes and checks an accepted request: sets seq, max_tokens,
 * samp, samp_state, stops, stop_tokens, salt_hash and text of it, and what is
 * wrong into err (code LLM_OK: nothing).  Nothing else of it or of the engine
 * is written or read that may change meanwhile, so it may run beside the loop;
 * prompt is scratch.  Takes milliseconds for a long prompt. */
void prepare_request(const engine_t *engine, prompt_t *prompt, request_t *req);

#endif /* ENGINE_PREPARE_H */
