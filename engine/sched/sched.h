/*
 * Who runs in this step (scheduler.md C1): running sequences first, in order,
 * so that decodes are never delayed; then waiting ones, prefill chunks in what
 * is left of the token budget.  It sees counts and pages, no tensors, and is
 * tested without weights.
 *
 * When pages run out, the newest running sequence is preempted: its pages are
 * freed, computed = 0, and it goes to the front of the waiting queue; later it
 * recomputes the same tokens (the same bits, so nobody notices).
 */

#ifndef ENGINE_SCHED_SCHED_H
#define ENGINE_SCHED_SCHED_H

#include "engine/kv/pool.h"
#include "engine/sched/plan.h"

typedef struct {
    int max_tokens; /* token budget of a step: max_num_batched_tokens */
    int max_seqs;   /* sequences in a step: max_num_seqs */
} sched_conf_t;

typedef struct sched_s sched_t;


/* Borrows pool.  NULL: no memory. */
sched_t *sched_create(const sched_conf_t *conf, kv_pool_t *pool);
void sched_destroy(sched_t *sched);

/* Queues a new sequence, at the back.  A sequence whose n_tokens could never
 * fit the pool must be refused before (kv_pages_for(max length) > pages). */
void sched_add(sched_t *sched, seq_t *seq);

/* Takes a sequence out, wherever it is, and frees its pages. */
void sched_remove(sched_t *sched, seq_t *seq);

/* Decides the next step and advances computed of what it plans.  The plan is
 * valid until the next call; n_rows is 0 when nothing can run (all parked, or
 * none). */
const plan_t *sched_step(sched_t *sched);

int sched_running(const sched_t *sched);
int sched_waiting(const sched_t *sched);

/* Preemptions since the start. */
uint64_t sched_preemptions(const sched_t *sched);

/* Asserts the invariants of scheduler.md (tests, debug builds). */
void sched_check(const sched_t *sched);

#endif /* ENGINE_SCHED_SCHED_H */
