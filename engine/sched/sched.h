/*
 * Who runs in this step (scheduler.md C1): running sequences first, in the
 * order of their admission, so that decodes are never delayed; then waiting
 * ones, prefill chunks in what is left of the token budget.  It sees counts
 * and pages, no tensors, and is tested without weights.
 *
 * Admission.  The next one in is the first of the tenant with the smallest
 * virtual counter (fair.h); within a tenant lower priority values go first,
 * and among equals the older one.  It gets in when there is a seat, and pages
 * for all its tokens, for what running prompts have yet to take, and for what
 * all are expected to generate (estimate.h); when nobody runs, it always does.
 * If it does not fit, nobody overtakes it.  But it may take the place of
 * running sequences of its own tenant with a greater priority value: those of
 * the greatest value first, then the cheapest.
 *
 * Preemption.  When pages run out, sequences are preempted before anything is
 * planned: their pages are freed, computed = 0, and they go back to their place
 * in the line; later they recompute the same tokens (the same bits, so nobody
 * notices).  In this order:
 *   1. parked ones, the last admitted first;
 *   2. those of the tenant with the largest counter (of equal ones, the tenant
 *      that began to wait last);
 *   3. among them, those of the greatest priority value;
 *   4. among them, the cheapest: tokens to recompute × (1 + preemptions so
 *      far), so that not always the same ones are hit;
 *   5. of equal ones the newest.
 * The first running sequence that is not parked is spared: it gets on, whatever
 * happens, and ends some day.  Nobody is admitted in a step that preempted for
 * want of pages, and the estimate rises, so that the next ones come in later.
 *
 * With a prefix cache a sequence is admitted with the pages that others have
 * computed, and what it computes is public from the next step on.  A waiting
 * sequence whose beginning is being computed by a running one lets others go
 * first and takes those pages when they are there; of a page that is not full
 * or cannot be taken whole it gets a copy (share.h).  Without a prefix cache
 * nothing is shared nor copied: every sequence computes all of its tokens.
 *
 * A long prompt gets at most its share of what decodes leave of a step while
 * others want some of it too: max(long_prefill, rest / how many, rest / 4).  It
 * gets a single token while another tenant waits that was served no more than
 * its own, or a more urgent sequence of its own: first these must have had
 * their chance.  What nobody else took goes to it in the end.
 *
 * Prefill beside decodes is cut so that the step takes no longer than
 * inter_token_ns, or twice as long as the decodes alone if that is more, by
 * what steps were measured to cost (cost.h); a few rows are always allowed.
 * Where nobody decodes, that long is also what a prompt in progress may make
 * of a step in which another one ends, or may begin (limit.h).
 *
 * Drafts of a sequence that decodes are verified in the same step, as more
 * rows of it, if budget and free pages are left when all others have theirs:
 * they preempt nobody and delay nobody.  `computed` counts none of them; the
 * owner adds those that proved right, and what the others' pages were is
 * given back in the next step.
 *
 * A parked sequence is left out of steps.  It keeps its pages and counts among
 * the running ones until another sequence needs a page or a seat: then parked
 * sequences are preempted before anyone else.
 */

#ifndef ENGINE_SCHED_SCHED_H
#define ENGINE_SCHED_SCHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/sched/cost.h"
#include "engine/sched/plan.h"

typedef struct tenant_s tenant_t;

typedef struct {
    int max_tokens; /* token budget of a step: max_num_batched_tokens */
    int max_seqs;   /* sequences in a step: max_num_seqs; at most max_tokens
                            are used */
    kv_prefix_t *prefix;   /* borrowed; NULL: nothing is shared */
    bool whole_prompts;    /* a prompt is prefilled in one step: max_tokens must
                            be enough for the longest sequence */
    int long_prefill;      /* long_prefill_token_threshold */
    const cost_t *cost;    /* borrowed: what steps take; NULL: not known */
    double inter_token_ns; /* inter_token_target; 0: no limit */
    int reserve; /* 0, or: every sequence takes pages for so many tokens when
                    it is admitted (as many as its table and the pool have);
                    prefix must be NULL then */
    double output_ratio; /* of the estimate at the start, 0 … 1; 0: the usual
                            one; < 0: no output is ever expected */
} sched_conf_t;

/* Tokens looked up in the prefix cache, and found there or copied, since the
 * start; those of preempted sequences apart, so that thrashing does not look
 * like a good hit rate. */
typedef struct {
    uint64_t queries;
    uint64_t hits;
    uint64_t again_queries;
    uint64_t again_hits;
    uint64_t forks; /* sequences, first or again, that began with a copy */
} sched_hits_t;

typedef struct sched_s sched_t;
typedef struct tenant_s tenant_t;


/* Borrows pool.  NULL: no memory. */
sched_t *sched_create(const sched_conf_t *conf, kv_pool_t *pool);

/* Both queues must be empty. */
void sched_destroy(sched_t *sched);

/* The tenant of that name, made if it is new, with its weight from now on
 * (what is not a positive number counts as 1); len 0: the nameless one.  It
 * stays as long as a sequence of it is queued, and else until the next call.
 * NULL: no memory. */
tenant_t *sched_tenant(sched_t *sched, const void *name, size_t len,
                       double weight);

/* Queues a new sequence (SEQ_NEW, at least one token, some of them perhaps
 * generated by an earlier engine), behind those of its tenant that are as
 * urgent, and sets arrival.  A sequence that could never fit the pool must be
 * refused before (kv_pages_for(max length) > pages). */
void sched_add(sched_t *sched, seq_t *seq);

/* Takes a sequence out, wherever it is, and frees its pages; SEQ_FINISHED.
 * What the plan told to compute must be computed.  Nothing happens when it is
 * in no queue.  A row of the last plan may still name it. */
void sched_remove(sched_t *sched, seq_t *seq);

/* Decides the next step and advances computed of what it plans.  The plan is
 * valid until the next call; n_rows is 0 when nothing can run (all parked, or
 * none). */
const plan_t *sched_step(sched_t *sched);

int sched_running(const sched_t *sched);
int sched_waiting(const sched_t *sched);

/* Token slots without a token in the pages that sequences hold; one in a page
 * that k of them share counts as 1/k for each.  O(running). */
int sched_unused_slots(const sched_t *sched);

/* Preemptions since the start. */
uint64_t sched_preemptions(const sched_t *sched);

/* The part of the possible output that is expected now, 0 … 1. */
double sched_output_ratio(const sched_t *sched);

const sched_hits_t *sched_hits(const sched_t *sched);

/* Asserts the invariants of scheduler.md (tests, debug builds). */
void sched_check(const sched_t *sched);

#endif /* ENGINE_SCHED_SCHED_H */
