/*
 * How long a step may be: what keeps prompts that are being computed from
 * holding up those who get a token from the step.  Called by sched.c.
 */

#ifndef ENGINE_SCHED_LIMIT_H
#define ENGINE_SCHED_LIMIT_H

#include "engine/sched/state.h"


/* The tokens of this step: all there may be, or fewer, so that prefill does not
 * hold up the streams that decode.  A prompt that is being computed gets one
 * at least. */
int limit_step(const sched_t *sched);

/* The most that one sequence gets at first of what decodes leave. */
int limit_share(const sched_t *sched);

/* The most that a prompt in progress gets before those that wait have had
 * theirs. */
int limit_part(const sched_t *sched);

/* Before what is left is handed out: nobody decodes, but somebody's prompt may
 * end in this step; then the rest is not for others to make him wait. */
void limit_rest(sched_t *sched);

#endif /* ENGINE_SCHED_LIMIT_H */
