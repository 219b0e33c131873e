/*
 * Admission, called by sched.c once per step.
 *
 * The candidate is the first in line of the tenant that was served least
 * (fair.h).  It needs a seat, a token of the budget, and pages: for all its
 * tokens, for what running prompts have yet to take, and for the output that
 * all of them are expected to generate (estimate.h).  Pages of parked
 * sequences count as free for what is only expected, because they can be taken
 * when it comes true.
 *
 * Strict order: a candidate that does not fit holds up those behind it, or
 * small ones would overtake it for ever.  Only who is parked, or waits for
 * pages that another one computes (share.h), lets others by.
 */

#include "engine/sched/admit.h"

#include "engine/base/status.h"
#include "engine/sched/share.h"
#include "engine/sched/state.h"
#include "engine/sched/victim.h"


static int
not_negative(int n)
{
    return n > 0 ? n : 0;
}


int
admit_room(const sched_t *sched, const seq_t *seq, int n_tokens)
{
    int most = kv_pool_pages(sched->pool);

    if (sched->reserve == 0) {
        return n_tokens;
    }

    most = most < seq->table.cap ? most : seq->table.cap;

    /* whole pages beyond the table do not exist */
    const int room =
        kv_pages_for(sched->reserve) < most ? sched->reserve : most * KV_PAGE;

    return room > n_tokens ? room : n_tokens;
}


/* Pages that the sequence has yet to take for the tokens there are. */
static int
pages_owed(const sched_t *sched, const seq_t *seq)
{
    const int n_tokens = admit_room(sched, seq, seq->n_tokens);

    return not_negative(kv_pages_for(n_tokens) - seq->table.n);
}


/* The same with the output that is expected of it. */
static int
pages_expected(const sched_t *sched, const seq_t *seq)
{
    if (sched->reserve > 0) {
        return pages_owed(sched, seq);
    }

    return not_negative(kv_pages_for(estimate_tokens(&sched->estimate, seq))
                        - seq->table.n);
}


/* Adds (sign 1) or takes off (−1) a running sequence's part of the sums. */
static void
sum_pages(sched_t *sched, const seq_t *seq, int sign)
{
    if (!seq->parked) {
        sched->owed += sign * pages_owed(sched, seq);
        sched->expected += sign * pages_expected(sched, seq);
    }
}


/* What a candidate would find if some of the running ones made way. */
typedef struct {
    int budget;
    int seats;
    int pages;
    int expected;
    int n_active; /* who stays and is not parked */
} room_t;


/* Parked ones make way, and with lower those that are less urgent. */
static bool
makes_way(const seq_t *other, const seq_t *seq, bool lower)
{
    return other->parked || (lower && victim_outranked(other, seq));
}


/* A page is free when all its holders are gone. */
static void
add_pages(const sched_t *sched, const seq_t *seq, bool lower, room_t *room)
{
    const list_t *head = &sched->running;

    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *other = sched_seq(l);

        for (int i = 0; i < other->table.n && makes_way(other, seq, lower); i++)
        {
            const int32_t page = other->table.pages[i];

            room->pages +=
                ++sched->refs[page] == kv_pool_refs(sched->pool, page);
        }
    }

    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *other = sched_seq(l);

        for (int i = 0; i < other->table.n && makes_way(other, seq, lower); i++)
        {
            sched->refs[other->table.pages[i]] = 0;
        }
    }
}


static room_t
room_for(const sched_t *sched, const seq_t *seq, bool lower)
{
    const list_t *head = &sched->running;

    room_t room = {
        .budget = sched->budget,
        .seats = sched->max_seqs - sched->n_running + sched->n_parked,
        .pages = kv_pool_free_pages(sched->pool),
        .expected = sched->expected,
        .n_active = sched->n_running - sched->n_parked,
    };

    for (const list_t *l = head->next; lower && l != head; l = l->next) {
        const seq_t *other = sched_seq(l);

        if (victim_outranked(other, seq)) {
            room.budget += other->count;
            room.seats++;
            room.expected -= pages_expected(sched, other);
            room.n_active--;
        }
    }

    if (lower || sched->n_parked > 0) {
        add_pages(sched, seq, lower, &room);
    }

    return room;
}


static bool
fits(const sched_t *sched, const seq_t *seq, bool lower)
{
    const room_t room = room_for(sched, seq, lower);

    /* alone it gets on in any case */
    const int need = room.n_active > 0
                         ? pages_expected(sched, seq) + room.expected
                         : pages_owed(sched, seq);

    return room.seats > 0 && room.budget > 0 && room.pages >= need;
}


/* A place for a waiting sequence that has its hits already: at the expense of
 * parked ones, and of less urgent ones of its tenant, if that helps. */
static bool
make_place(sched_t *sched, const seq_t *seq)
{
    if (sched->whole_prompts && seq->n_tokens - seq->computed > sched->budget) {
        return false;
    }

    if (!fits(sched, seq, false)) {
        if (victim_lower(sched, seq) == NULL || !fits(sched, seq, true)) {
            return false;
        }

        do {
            seq_t *victim = victim_lower(sched, seq);

            sum_pages(sched, victim, -1);
            victim_preempt(sched, victim);
        } while (!fits(sched, seq, false));
    }

    while (sched->n_running >= sched->max_seqs
           || kv_pool_free_pages(sched->pool)
                  < pages_owed(sched, seq) + sched->owed)
    {
        victim_preempt(sched, victim_parked(sched));
    }

    return true;
}


static void
count_hits(sched_t *sched, seq_t *seq)
{
    sched_hits_t *hits = &sched->hits;

    if (sched->prefix == NULL || seq->want_prompt) {
        return;
    }

    if (seq->admitted) {
        hits->again_queries += (uint64_t) seq->n_tokens;
        hits->again_hits += (uint64_t) seq->computed;
    } else {
        hits->queries += (uint64_t) seq->n_tokens;
        hits->hits += (uint64_t) seq->computed;
        seq->cached = seq->computed;
    }
}


/* The copy that the sequence begins with, now that it has a page for it.  The
 * source need not run any more: make_place may have preempted it, but copies
 * are made in this order and before anything else of the step, so whoever got
 * its page writes to it later.  It may have become this sequence's own. */
static void
plan_fork(sched_t *sched, seq_t *seq)
{
    plan_t *plan = &sched->plan;

    seq->executed = -1;

    if (seq->forked == 0) {
        return;
    }

    const int32_t to = seq->table.pages[(seq->computed - 1) / KV_PAGE];

    /* each admission but the last of a step adds one to those that run */
    llm_assert(plan->n_copies <= sched->max_seqs);

    if (to != seq->fork_page) {
        plan->copies[plan->n_copies++] = (plan_copy_t){ seq->fork_page, to };
    }

    seq->forked = 0;
    sched->hits.forks++;
}


/* The sequence has its hits and a place. */
static void
admit(sched_t *sched, seq_t *seq)
{
    int count = seq->n_tokens - seq->computed;

    count = count < sched->share ? count : sched->share;
    count = count < sched->budget ? count : sched->budget;

    const int n_tokens = admit_room(sched, seq, seq->computed + count);
    const int rc = kv_table_grow(&seq->table, sched->pool, n_tokens);

    llm_assert(rc == LLM_OK);
    (void) rc;

    count_hits(sched, seq);
    plan_fork(sched, seq);
    fair_pull(&sched->fair, seq);

    if (seq->admitted) {
        fair_charge(&sched->fair, seq, seq->n_tokens - seq->charged,
                    FAIR_OUTPUT);
    } else {
        fair_charge(&sched->fair, seq, seq->n_tokens - seq->computed,
                    FAIR_INPUT);
    }

    list_push_back(&sched->running, &seq->link);
    sched->n_running++;
    seq->state = SEQ_RUNNING;
    seq->admitted = true;
    seq->waits_for = 0;
    seq->count = count;
    sched->budget -= count;
    sum_pages(sched, seq, 1);
}


/* Attaches what is cached; false when it had better wait for more. */
static bool
take_hits(sched_t *sched, seq_t *seq)
{
    if (sched->prefix == NULL) {
        return true;
    }

    if (share_still_waits(seq, &sched->running)) {
        return false;
    }

    share_attach(sched->prefix, seq);
    share_fork(seq, &sched->running);

    if (share_begin_wait(seq, &sched->running)) {
        share_detach(sched->pool, seq);
        return false;
    }

    return true;
}


/* Cheap, before hashes are computed and pages looked up. */
static bool
may_fit(const sched_t *sched, const seq_t *seq)
{
    return (sched->budget > 0
            && sched->n_running - sched->n_parked < sched->max_seqs)
           || victim_lower(sched, seq) != NULL;
}


void
admit_waiting(sched_t *sched)
{
    const list_t *head = &sched->running;
    int looks = sched->max_seqs;
    seq_t *seq = fair_next(&sched->fair);

    sched->owed = 0;
    sched->expected = 0;

    for (const list_t *l = head->next; seq != NULL && l != head; l = l->next) {
        sum_pages(sched, sched_seq(l), 1);
    }

    while (seq != NULL && may_fit(sched, seq)) {
        const int n_active = sched->n_running - sched->n_parked;

        if (!take_hits(sched, seq)) {
            if (--looks == 0) {
                break;
            }

            fair_skip(seq);
            seq = fair_next(&sched->fair);
            continue;
        }

        if (!make_place(sched, seq)) {
            share_detach(sched->pool, seq);
            break;
        }

        admit(sched, seq);

        /* who just made way is not to come back at once */
        if (sched->n_running - sched->n_parked <= n_active) {
            break;
        }

        seq = fair_next(&sched->fair);
    }

    fair_rewind(&sched->fair);
}
