/*
 * The next step's decodes, on the device before this step's tokens are on the
 * host.
 *
 * A row's result does not depend on who else is in its step, so a sequence
 * that decodes can have its next row computed before anybody knows the next
 * step: the token that it begins with is on the device, where it was drawn.
 * When the next step is planned, rows that have been computed so are taken
 * from here, and the rest of the plan is computed.  So the device has work
 * while the host writes what was drawn, takes in requests and plans.
 *
 * What proves to be in vain, because its sequence has ended, was cancelled or
 * lost its pages, is dropped: whatever it wrote lies in a page that somebody
 * else can only write later.
 */

#ifndef ENGINE_AHEAD_H
#define ENGINE_AHEAD_H

#include "engine/engine.h"


/* Nothing is computed ahead unless the backend draws.  Memory as in
 * ahead_bytes(). */
int ahead_open(engine_t *engine, llm_err_t *err);
void ahead_close(engine_t *engine);
size_t ahead_bytes(int max_seqs);

/* Places of drawn tokens that are this file's, behind max_out others. */
int ahead_places(const engine_conf_t *conf);

/* Rows of the plan that have been computed go to *taken, n of them; rest is
 * the plan without them, valid until the next call. */
int ahead_take(engine_t *engine, const plan_t *plan, plan_t *rest,
               const batch_out_t **taken);

/* Rows have been given places: of those that sample, it is where the next row
 * of their sequence finds its token. */
void ahead_note(const batch_out_t *outs, int n);

/* Computes the rows that follow those of the plan, all that it planned being
 * on its way, or nothing if that is not possible for all or not worth it.
 * Waits for nothing. */
void ahead_launch(engine_t *engine, const plan_t *plan);

#endif /* ENGINE_AHEAD_H */
