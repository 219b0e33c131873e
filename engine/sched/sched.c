/*
 * The decision of one step.  Called by loop.c, once per turn.
 *
 * Four rules make it fair and free of deadlock:
 *   - every running sequence that has something to compute gets at least one
 *     token in every step: a chunk leaves one for each sequence behind it;
 *   - a victim stands behind the sequence that needs its pages, so the first
 *     running sequence always gets on and ends some day;
 *   - a parked sequence keeps its pages and its seat only until another
 *     sequence needs them: nobody waits for a slow client;
 *   - a sequence that waits for another's pages does so only while that one
 *     runs, and the others behind it are not held up.
 *
 * The cost is O(running + admitted) a step, plus the parked sequences that
 * stand in the waiting queue before the last one admitted, plus O(running) for
 * each of at most max_seqs that wait for pages.
 */

#include "engine/sched/sched.h"

#include <limits.h>
#include <stdlib.h>

#include "engine/base/status.h"
#include "engine/sched/share.h"

enum { SHARES_MAX = 4 }; /* a share of the step is not cut smaller */

struct sched_s {
    kv_pool_t *pool;
    kv_prefix_t *prefix;
    int max_tokens;
    int max_seqs;
    bool whole_prompts;
    int long_prefill;
    int reserve;

    list_t running; /* in the order of admission */
    list_t waiting; /* in the order of arrival */
    int n_running;
    int n_waiting;
    uint64_t arrivals;
    uint64_t preemptions;
    sched_hits_t hits;

    /* the step in progress */
    int budget;   /* tokens left */
    int share;    /* most that one sequence gets before all have had some */
    int n_behind; /* running sequences that still have to get a token */
    int n_parked; /* parked among the running */
    int promised; /* pages that running prompts have yet to take */
    list_t *scan; /* no parked sequence is behind this one */

    int32_t *count; /* [pages] scratch, zero between uses */
    plan_t plan;
};


static seq_t *
seq_of(const list_t *link)
{
    return list_entry(link, seq_t, link);
}


static int
todo(const seq_t *seq)
{
    return seq->parked ? 0 : seq->n_tokens - seq->computed;
}


/* Tokens that a running sequence has pages for once n_tokens are computed. */
static int
room_for(const sched_t *sched, int n_tokens)
{
    return n_tokens > sched->reserve ? n_tokens : sched->reserve;
}


sched_t *
sched_create(const sched_conf_t *conf, kv_pool_t *pool)
{
    llm_assert(conf->max_tokens >= 1 && conf->max_seqs >= 1);
    llm_assert(conf->reserve == 0 || conf->prefix == NULL);

    sched_t *sched = calloc(1, sizeof(sched_t));

    if (sched == NULL) {
        return NULL;
    }

    /* more sequences than tokens could not all get on in one step */
    const int seqs =
        conf->max_seqs < conf->max_tokens ? conf->max_seqs : conf->max_tokens;

    sched->pool = pool;
    sched->prefix = conf->prefix;
    sched->max_tokens = conf->max_tokens;
    sched->max_seqs = seqs;
    sched->whole_prompts = conf->whole_prompts;
    sched->long_prefill = conf->long_prefill;
    sched->reserve = conf->reserve;
    list_init(&sched->running);
    list_init(&sched->waiting);

    sched->plan.rows = calloc((size_t) seqs, sizeof(plan_row_t));
    sched->count = calloc((size_t) kv_pool_pages(pool), sizeof(int32_t));

    if (sched->plan.rows == NULL || sched->count == NULL) {
        free(sched->plan.rows);
        free(sched->count);
        free(sched);
        return NULL;
    }

    return sched;
}


void
sched_destroy(sched_t *sched)
{
    if (sched == NULL) {
        return;
    }

    llm_assert(list_empty(&sched->running) && list_empty(&sched->waiting));

    free(sched->plan.rows);
    free(sched->count);
    free(sched);
}


void
sched_add(sched_t *sched, seq_t *seq)
{
    llm_assert(seq->state == SEQ_NEW);
    llm_assert(seq->n_tokens >= 1 && seq->computed == 0 && seq->table.n == 0);
    llm_assert(kv_pages_for(seq->n_tokens) <= kv_pool_pages(sched->pool));

    seq->state = SEQ_WAITING;
    seq->arrival = sched->arrivals++;
    list_push_back(&sched->waiting, &seq->link);
    sched->n_waiting++;
}


void
sched_remove(sched_t *sched, seq_t *seq)
{
    if (seq->state == SEQ_RUNNING) {
        sched->n_running--;

        /* the last token may just have been drawn, its page is not certain */
        if (sched->prefix != NULL) {
            share_publish(sched->prefix, seq, seq->n_tokens - 1);
        }

    } else if (seq->state == SEQ_WAITING) {
        sched->n_waiting--;

    } else {
        return;
    }

    list_remove(&seq->link);
    kv_table_truncate(&seq->table, sched->pool, 0);
    seq->computed = 0;
    seq->state = SEQ_FINISHED;
}


/* Back to its place in the order of arrival, which is the front but for other
 * victims that are older. */
static void
preempt(sched_t *sched, seq_t *seq)
{
    list_t *place = &sched->waiting;

    list_remove(&seq->link);
    sched->n_running--;
    kv_table_truncate(&seq->table, sched->pool, 0);
    seq->computed = 0;
    seq->preemptions++;
    sched->preemptions++;

    while (place->next != &sched->waiting
           && seq_of(place->next)->arrival < seq->arrival)
    {
        place = place->next;
    }

    list_insert(place, &seq->link);
    sched->n_waiting++;
    seq->state = SEQ_WAITING;
}


/* Preempts the parked sequence that was admitted last.  Nobody parks or
 * unparks within a step, so one walk over the running queue serves all calls
 * of a step. */
static void
preempt_parked(sched_t *sched)
{
    while (!seq_of(sched->scan)->parked) {
        sched->scan = sched->scan->prev;
    }

    seq_t *seq = seq_of(sched->scan);

    sched->scan = sched->scan->prev;
    sched->n_parked--;
    preempt(sched, seq);
}


static void
plan_add(sched_t *sched, seq_t *seq, int count)
{
    plan_t *plan = &sched->plan;

    plan->rows[plan->n_rows++] = (plan_row_t){
        .seq = seq,
        .first = seq->computed,
        .count = count,
        .last = seq->computed + count == seq->n_tokens,
    };
    plan->n_tokens += count;
    sched->budget -= count;
    seq->computed += count;
}


/* Pages for a running sequence up to n_tokens, whatever it takes.  False: it
 * was itself the victim, and so the last one running. */
static bool
make_room(sched_t *sched, seq_t *seq, int n_tokens)
{
    while (kv_table_grow(&seq->table, sched->pool, n_tokens) != LLM_OK) {
        if (sched->n_parked > 0) {
            preempt_parked(sched);
            continue;
        }

        /* alone it fits: who is too long for the pool was refused */
        llm_assert(sched->n_running > 1);

        seq_t *victim = seq_of(sched->running.prev);
        preempt(sched, victim);

        if (victim == seq) {
            return false;
        }
    }

    return true;
}


static void
plan_running(sched_t *sched)
{
    list_t *link = sched->running.next;

    while (link != &sched->running) {
        seq_t *seq = seq_of(link);
        int count = todo(seq);

        if (count > 0) {
            sched->n_behind--;

            if (count > sched->share) {
                count = sched->share;
            }

            if (count > sched->budget - sched->n_behind) {
                count = sched->budget - sched->n_behind;
            }

            if (!make_room(sched, seq, seq->computed + count)) {
                return;
            }

            plan_add(sched, seq, count);
        }

        link = link->next;
    }
}


/* Pages that only parked sequences hold. */
static int
parked_pages(sched_t *sched)
{
    const list_t *head = &sched->running;
    int n = 0;

    if (sched->n_parked == 0) {
        return 0;
    }

    for (const list_t *l = head->next; l != head; l = l->next) {
        const kv_table_t *table = &seq_of(l)->table;

        for (int i = 0; seq_of(l)->parked && i < table->n; i++) {
            const int32_t page = table->pages[i];

            n += ++sched->count[page] == kv_pool_refs(sched->pool, page);
        }
    }

    for (const list_t *l = head->next; l != head; l = l->next) {
        const kv_table_t *table = &seq_of(l)->table;

        for (int i = 0; seq_of(l)->parked && i < table->n; i++) {
            sched->count[table->pages[i]] = 0;
        }
    }

    return n;
}


/* Pages that the sequence has yet to take for the tokens there are. */
static int
pages_to_come(const sched_t *sched, const seq_t *seq)
{
    return seq->parked
               ? 0
               : kv_pages_for(room_for(sched, seq->n_tokens)) - seq->table.n;
}


/* A seat and pages for the whole of a waiting sequence that has its hits
 * already, at the expense of parked ones if that helps.  The pages are taken
 * chunk by chunk, so those of earlier prompts are still to be left. */
static bool
make_place(sched_t *sched, const seq_t *seq)
{
    const int need = pages_to_come(sched, seq) + sched->promised;

    if (sched->whole_prompts && seq->n_tokens - seq->computed > sched->budget) {
        return false;
    }

    if (kv_pool_free_pages(sched->pool) < need
        && kv_pool_free_pages(sched->pool) + parked_pages(sched) < need)
    {
        return false;
    }

    while (sched->n_running >= sched->max_seqs
           || kv_pool_free_pages(sched->pool) < need)
    {
        preempt_parked(sched);
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


/* The sequence has its hits and a place. */
static void
admit(sched_t *sched, seq_t *seq)
{
    int count = seq->n_tokens - seq->computed;

    count = count < sched->share ? count : sched->share;
    count = count < sched->budget ? count : sched->budget;

    const int rc = kv_table_grow(&seq->table, sched->pool,
                                 room_for(sched, seq->computed + count));

    llm_assert(rc == LLM_OK);
    (void) rc;

    count_hits(sched, seq);
    list_remove(&seq->link);
    list_push_back(&sched->running, &seq->link);
    sched->n_waiting--;
    sched->n_running++;
    seq->state = SEQ_RUNNING;
    seq->admitted = true;
    seq->waits_for = 0;
    sched->promised += pages_to_come(sched, seq);
    plan_add(sched, seq, count);
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

    if (share_begin_wait(seq, &sched->running)) {
        share_detach(sched->pool, seq);
        return false;
    }

    return true;
}


/* In strict order: a sequence that does not fit holds up those behind it, or
 * short ones would overtake it for ever.  Only who waits for pages that are
 * being computed lets others by, and not too many of these are looked at. */
static void
admit_waiting(sched_t *sched)
{
    list_t *link = sched->waiting.next;
    int looks = sched->max_seqs;

    sched->promised = 0;

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        sched->promised += pages_to_come(sched, seq_of(l));
    }

    while (link != &sched->waiting && sched->budget > 0
           && sched->n_running - sched->n_parked < sched->max_seqs)
    {
        seq_t *seq = seq_of(link);

        if (seq->parked) {
            link = link->next;
            continue;
        }

        if (!take_hits(sched, seq)) {
            if (--looks == 0) {
                return;
            }

            link = link->next;
            continue;
        }

        if (!make_place(sched, seq)) {
            share_detach(sched->pool, seq);
            return;
        }

        /* only now: make_place may have put victims behind it */
        link = link->next;
        admit(sched, seq);
    }
}


/* What nobody took goes to those that could have more, oldest first. */
static void
top_up(sched_t *sched)
{
    for (int i = 0; i < sched->plan.n_rows && sched->budget > 0; i++) {
        plan_row_t *row = &sched->plan.rows[i];
        seq_t *seq = row->seq;
        int more = seq->n_tokens - seq->computed;

        more = more < sched->budget ? more : sched->budget;

        if (more == 0) {
            continue;
        }

        if (kv_table_grow(&seq->table, sched->pool, seq->computed + more)
            != LLM_OK) {
            return;
        }

        row->count += more;
        sched->plan.n_tokens += more;
        sched->budget -= more;
        seq->computed += more;
        row->last = seq->computed == seq->n_tokens;
    }
}


/* The most that one of n sequences gets at first. */
static int
share_of(const sched_t *sched, int n)
{
    if (sched->whole_prompts || n <= 1) {
        return INT_MAX;
    }

    const int share = sched->max_tokens / (n < SHARES_MAX ? n : SHARES_MAX);

    if (share < sched->long_prefill) {
        return sched->long_prefill;
    }

    return share > 0 ? share : 1;
}


/* The last plan is computed: its pages are public, counters start anew. */
static void
begin_step(sched_t *sched)
{
    int n_prefill = 0;

    sched->plan.n_rows = 0;
    sched->plan.n_tokens = 0;
    sched->budget = sched->max_tokens;
    sched->scan = sched->running.prev;
    sched->n_behind = 0;
    sched->n_parked = 0;

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        seq_t *seq = seq_of(l);

        if (sched->prefix != NULL) {
            share_publish(sched->prefix, seq, seq->n_tokens);
        }

        sched->n_behind += todo(seq) > 0;
        sched->n_parked += seq->parked;
        n_prefill += todo(seq) > 1;
    }

    sched->share = share_of(sched, n_prefill + sched->n_waiting);
}


const plan_t *
sched_step(sched_t *sched)
{
    const uint64_t before = sched->preemptions;

    begin_step(sched);
    plan_running(sched);

    /* after a preemption the pages are too few already */
    if (sched->preemptions == before) {
        admit_waiting(sched);
    }

    top_up(sched);

    return &sched->plan;
}


int
sched_running(const sched_t *sched)
{
    return sched->n_running;
}


int
sched_waiting(const sched_t *sched)
{
    return sched->n_waiting;
}


uint64_t
sched_preemptions(const sched_t *sched)
{
    return sched->preemptions;
}


const sched_hits_t *
sched_hits(const sched_t *sched)
{
    return &sched->hits;
}


static void
check_waiting(const sched_t *sched)
{
    const list_t *head = &sched->waiting;
    int n = 0;

    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *seq = seq_of(l);

        llm_assert(l->next->prev == l && seq->state == SEQ_WAITING);
        llm_assert(seq->computed == 0 && seq->table.n == 0);
        llm_assert(l->prev == head || seq_of(l->prev)->arrival < seq->arrival);
        (void) seq;
        n++;
    }

    llm_assert(n == sched->n_waiting);
    (void) n;
}


void
sched_check(const sched_t *sched)
{
    const list_t *head = &sched->running;
    const plan_t *plan = &sched->plan;
    int n = 0;
    int pages = 0;

    int32_t *refs =
        calloc((size_t) kv_pool_pages(sched->pool), sizeof(int32_t));

    llm_assert(refs != NULL);

    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *seq = seq_of(l);

        llm_assert(l->next->prev == l && seq->state == SEQ_RUNNING);
        llm_assert(seq->computed >= 1 && seq->computed <= seq->n_tokens);
        llm_assert(seq->table.n
                   == kv_pages_for(room_for(sched, seq->computed)));
        llm_assert(seq->table.n_public <= seq->computed / KV_PAGE);
        n++;

        for (int i = 0; i < seq->table.n; i++) {
            pages += refs[seq->table.pages[i]]++ == 0;
        }
    }

    llm_assert(n == sched->n_running && n <= sched->max_seqs);
    llm_assert(pages
               <= kv_pool_pages(sched->pool) - kv_pool_free_pages(sched->pool));
    llm_assert(plan->n_rows <= sched->max_seqs);
    llm_assert(plan->n_tokens >= plan->n_rows
               && plan->n_tokens <= sched->max_tokens);

    for (int i = 0; i < kv_pool_pages(sched->pool); i++) {
        llm_assert(refs[i] <= kv_pool_refs(sched->pool, i));
        llm_assert(sched->count[i] == 0);
    }

    free(refs);
    check_waiting(sched);
    kv_pool_check(sched->pool);

    if (sched->prefix != NULL) {
        kv_prefix_check(sched->prefix);
    }

    (void) n;
    (void) pages;
    (void) plan;
}
