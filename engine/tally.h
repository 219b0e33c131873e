/*
 * What the engine counts for /metrics: into engine->stats, at the places where
 * things happen.  Only clocks at phase borders, only O(running) a step.
 */

#ifndef ENGINE_TALLY_H
#define ENGINE_TALLY_H

#include "engine/engine.h"


/* Adds the time since *since to a phase (LLM_PHASE_…); *since becomes now. */
void tally_phase(engine_t *engine, int phase, uint64_t *since);

/* A step with this plan is over: gauges, and what others have counted. */
void tally_step(engine_t *engine, const plan_t *plan);

/* The prompt of a sequence has been computed, its first token follows. */
void tally_prompt(engine_t *engine, const request_t *req);

/* A token was drawn; req->n_output counts it. */
void tally_token(engine_t *engine, request_t *req);

/* The end of a request, however it ends (LLM_FINISH_…).  Requests for the
 * tokenizer alone do not count. */
void tally_end(engine_t *engine, const request_t *req, uint32_t finish);

#endif /* ENGINE_TALLY_H */
