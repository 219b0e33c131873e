/* Plan → forward pass → sampled tokens.  The only caller of the model. */

#ifndef ENGINE_RUNNER_H
#define ENGINE_RUNNER_H

#include "engine/engine.h"


/* Runs one step and hands each result to emit.c.  How long the plan took, ns;
 * 0: nobody knows, because of what was computed in vain. */
uint64_t runner_step(engine_t *engine, const plan_t *plan);

#endif /* ENGINE_RUNNER_H */
