/* Who is preempted, and how. */

#ifndef ENGINE_SCHED_VICTIM_H
#define ENGINE_SCHED_VICTIM_H

#include "engine/sched/sched.h"


/* The parked sequence that was admitted last; there must be one. */
seq_t *victim_parked(const sched_t *sched);

/* When pages lack: the best victim but for the first running one.  NULL: that
 * one is alone (parked ones apart). */
seq_t *victim_cheapest(const sched_t *sched);

/* Of those that are less urgent than seq: its tenant's, of a greater priority
 * value, not parked.  NULL: none. */
seq_t *victim_lower(const sched_t *sched, const seq_t *seq);

/* May seq take the place of other? */
bool victim_outranked(const seq_t *other, const seq_t *seq);

/* Back into the line of its tenant, to its place.  Its pages and its part of
 * the step's budget are free. */
void victim_preempt(sched_t *sched, seq_t *seq);

#endif /* ENGINE_SCHED_VICTIM_H */
