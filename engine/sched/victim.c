/* Preemption by recompute, for sched.c and admit.c.  The order is that of
 * sched.h; each choice is one walk over the running queue. */

#include "engine/sched/victim.h"

#include "engine/base/status.h"
#include "engine/sched/state.h"


/* What a preemption wastes; who was hit already is dearer, or the same ones
 * would be hit again and again. */
static int64_t
cost_of(const seq_t *seq)
{
    return (int64_t) seq->computed * (1 + seq->preemptions);
}


/* Is a the better victim?  A total order. */
static bool
better(const seq_t *a, const seq_t *b)
{
    if (a->tenant != b->tenant) {
        return heap_before(b->tenant, a->tenant);
    }

    if (a->priority != b->priority) {
        return a->priority > b->priority;
    }

    if (cost_of(a) != cost_of(b)) {
        return cost_of(a) < cost_of(b);
    }

    return a->arrival > b->arrival;
}


seq_t *
victim_parked(const sched_t *sched)
{
    const list_t *l = sched->running.prev;

    while (!sched_seq(l)->parked) {
        l = l->prev;
        llm_assert(l != &sched->running);
    }

    return sched_seq(l);
}


seq_t *
victim_cheapest(const sched_t *sched)
{
    const list_t *head = &sched->running;
    const list_t *l = head->next;
    seq_t *victim = NULL;

    while (l != head && sched_seq(l)->parked) {
        l = l->next;
    }

    for (l = l->next; l != head; l = l->next) {
        seq_t *seq = sched_seq(l);

        if (!seq->parked && (victim == NULL || better(seq, victim))) {
            victim = seq;
        }
    }

    return victim;
}


bool
victim_outranked(const seq_t *other, const seq_t *seq)
{
    return !other->parked && other->tenant == seq->tenant
           && other->priority > seq->priority;
}


seq_t *
victim_lower(const sched_t *sched, const seq_t *seq)
{
    const list_t *head = &sched->running;
    seq_t *victim = NULL;

    for (const list_t *l = head->next; l != head; l = l->next) {
        seq_t *other = sched_seq(l);

        if (victim_outranked(other, seq)
            && (victim == NULL || better(other, victim))) {
            victim = other;
        }
    }

    return victim;
}


void
victim_preempt(sched_t *sched, seq_t *seq)
{
    list_remove(&seq->link);
    sched->n_running--;
    sched->n_parked -= seq->parked;
    sched->budget += seq->count;
    seq->count = 0;

    kv_table_truncate(&seq->table, sched->pool, 0);
    seq->computed = 0;
    seq->ahead = false;
    seq->preemptions++;
    sched->preemptions++;
    seq->state = SEQ_WAITING;
    fair_push_again(&sched->fair, seq);
}
