/*
 * Who draws the tokens of a step: the backend, where it can, beside its
 * logits; or the host's samplers, shared by the backend's threads.  Either way
 * the bits are the same.
 */

#ifndef ENGINE_DRAW_H
#define ENGINE_DRAW_H

#include "engine/engine.h"


/* What the backend needs for it, from the device's memory; then the host's
 * part.  Both after the model was loaded. */
int draw_reserve(engine_t *engine, llm_err_t *err);
int draw_open(engine_t *engine, llm_err_t *err);
void draw_close(engine_t *engine);

/* True: tokens are drawn on the device, and model_logits_at() will do. */
bool draw_is_remote(const engine_t *engine);

/* True if the tokens before it must be known: draw_late() does it then. */
bool draw_waits(const batch_out_t *out);

/* outs[i]: row i of the logits, which are lost, as draw_is_remote() says.
 * Begins to draw all that do not wait: what the backend draws goes to its
 * places from `first` on. */
void draw_begin(engine_t *engine, batch_out_t *outs, float *logits, int n,
                int first);

/* Waits for them: the n results go to engine->results.  Of a device that fails
 * they mean nothing. */
void draw_end(engine_t *engine, const batch_out_t *outs, int n);

/* The same for one row. */
void draw_late(engine_t *engine, const batch_out_t *out, float *logits, int i);

/* A draw as the backend is told it, but for row and adjusts; list: room for
 * draw_adjusts().  And its result. */
int draw_adjusts(const samp_params_t *params, const samp_state_t *state,
                 int n_output);
/* Does the backend take it? */
bool draw_fits(const engine_t *engine, const samp_params_t *params,
               const samp_state_t *state, int n_output);
void draw_describe(const samp_params_t *params, const samp_state_t *state,
                   int n_output, uint64_t position, op_draw_t *draw,
                   op_adjust_t *list);
void draw_result(const op_drawn_t *drawn, samp_result_t *result);

#endif /* ENGINE_DRAW_H */
