/*
 * Weighted fair sharing between tenants: the virtual token counter of Sheng et
 * al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).
 *
 * Every tenant has a counter of what it was given, divided by its weight: a
 * prompt token that had to be computed counts FAIR_INPUT, when its sequence is
 * admitted for the first time (what a preemption makes necessary again is not
 * the tenant's fault); a generated token counts FAIR_OUTPUT, when it is there.
 * The next to be admitted is the first in line of the tenant with the smallest
 * counter.  Within a tenant the line is in the order (priority, arrival).
 *
 * A tenant that had nothing waiting and now has is lifted to the smallest
 * counter of those that wait (nobody waits: to that of the last who did): who
 * asked for little saves up nothing, or its next burst would shut out all
 * others.  The same goes for one whose waiting sequences are all parked.
 *
 * Tenants with sequences are never forgotten.  Of the others FAIR_IDLE are
 * remembered; those with the smallest counters are forgotten first, for they
 * would be lifted anyway.
 */

#ifndef ENGINE_SCHED_FAIR_H
#define ENGINE_SCHED_FAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/list.h"
#include "engine/sched/heap.h"
#include "engine/sched/seq.h"

enum { FAIR_INPUT = 1, FAIR_OUTPUT = 2, FAIR_IDLE = 4096 };

struct tenant_s {
    double counter;
    uint64_t since; /* when it began to wait: serial number */
    int at;         /* in one of the heaps; -1: in none */
    int n_seqs;     /* waiting or running */
    double weight;

    list_t waiting; /* sequences by (priority, arrival) */
    list_t *cursor; /* where this step's search is; if begun == fair's step */
    uint64_t begun;
    bool wants; /* one of them is not parked, as this step has seen */
    bool is_aside;
    list_t aside;

    tenant_t *next; /* in its bucket */
    uint64_t hash;
    size_t len;
    char name[]; /* len bytes; the nameless one has none */
};

typedef struct {
    tenant_t *nameless;
    tenant_t **buckets; /* of the named ones; a power of two */
    size_t n_buckets;
    uint64_t seed;
    int n_tenants; /* named ones */
    int cap;       /* tenants that either heap has room for */

    heap_t waiting;
    heap_t idle;
    list_t aside; /* of this step: nobody of theirs can be admitted */
    double left;  /* counter of the last that left the empty heap behind */
    tenant_t *last;
    uint64_t step;
    uint64_t serial;
    int n_waiting; /* sequences */
} fair_t;


/* LLM_OK or LLM_NOMEM (nothing to free then). */
int fair_init(fair_t *fair);

/* Nothing may wait or run. */
void fair_fini(fair_t *fair);

/* The tenant of that name, new or known, with its weight from now on (what is
 * not a positive number counts as 1).  No name, len 0: the nameless one.  NULL:
 * no memory.  An idle tenant may be gone after the next call. */
tenant_t *fair_tenant(fair_t *fair, const void *name, size_t len,
                      double weight);

/* A sequence of the tenant comes, goes. */
void fair_hold(fair_t *fair, tenant_t *tenant);
void fair_release(fair_t *fair, tenant_t *tenant);

/* Into the line of its tenant: a new sequence, searched from the back, and a
 * preempted one, searched from the front. */
void fair_push(fair_t *fair, seq_t *seq);
void fair_push_again(fair_t *fair, seq_t *seq);

/* Out of it. */
void fair_pull(fair_t *fair, seq_t *seq);

/* Charges the sequence's tenant for tokens that it has not yet paid. */
void fair_charge(fair_t *fair, seq_t *seq, int tokens, int price);

/* The tenant that is to be served next; NULL: nobody waits. */
const tenant_t *fair_first(const fair_t *fair);

/* The candidate of this step: the first that is neither parked nor skipped, of
 * the tenant with the smallest counter.  NULL: none. */
seq_t *fair_next(fair_t *fair);

/* It lets those behind it by for the rest of the step. */
void fair_skip(seq_t *seq);

/* The step has admitted whom it could. */
void fair_rewind(fair_t *fair);

/* Asserts the invariants (tests, debug builds). */
void fair_check(const fair_t *fair);

#endif /* ENGINE_SCHED_FAIR_H */
