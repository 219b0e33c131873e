/* Who comes in. */

#ifndef ENGINE_SCHED_ADMIT_H
#define ENGINE_SCHED_ADMIT_H

#include "engine/sched/sched.h"


/* Admits waiting sequences to the step that is being planned: each gets its
 * count.  The running ones have theirs, and their pages. */
void admit_waiting(sched_t *sched);

/* Tokens that a sequence has pages for: its first n_tokens, or more when they
 * are reserved. */
int admit_room(const sched_t *sched, const seq_t *seq, int n_tokens);

#endif /* ENGINE_SCHED_ADMIT_H */
