/*
 * The decision of one step.  Called by engine.c, once per turn.
 *
 * It goes in this order: how many tokens each running sequence is to have; the
 * pages for them, at the expense of victims; who comes in (admit.c); what is
 * left of the budget; only then are the rows written, so that nobody who is in
 * the plan can be a victim any more.
 *
 * Four rules make it fair and free of deadlock:
 *   - every running sequence that has something to compute gets at least one
 *     token in every step: a chunk leaves one for each sequence behind it;
 *   - the first running sequence is nobody's victim, but for more urgent ones
 *     of its tenant, so it always gets on and ends some day;
 *   - a parked sequence keeps its pages and its seat only until another
 *     sequence needs them: nobody waits for a slow client;
 *   - a sequence that waits for another's pages does so only while that one
 *     runs, and the others behind it are not held up.
 *
 * The cost of a step is O(running + admitted × log(tenants that wait)), plus
 * O(running) for each victim, plus the parked sequences in line before those
 * that were looked at, plus O(running) for each of at most max_seqs that wait
 * for pages.
 */

#include "engine/sched/sched.h"

#include <limits.h>
#include <stdlib.h>

#include "engine/base/status.h"
#include "engine/sched/admit.h"
#include "engine/sched/limit.h"
#include "engine/sched/share.h"
#include "engine/sched/state.h"
#include "engine/sched/victim.h"

static int
todo(const seq_t *seq)
{
    return seq->parked ? 0 : seq->n_tokens - seq->computed;
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

    if (fair_init(&sched->fair) != LLM_OK) {
        free(sched);
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
    sched->cost = conf->cost;
    sched->inter_token_ns = conf->inter_token_ns;
    sched->reserve = conf->reserve;
    list_init(&sched->running);
    estimate_init(&sched->estimate, conf->output_ratio);

    sched->plan.rows = calloc((size_t) seqs, sizeof(plan_row_t));
    sched->plan.copies = calloc((size_t) seqs + 1, sizeof(plan_copy_t));
    sched->refs = calloc((size_t) kv_pool_pages(pool), sizeof(int32_t));

    if (sched->plan.rows == NULL || sched->plan.copies == NULL
        || sched->refs == NULL)
    {
        sched_destroy(sched);
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

    llm_assert(list_empty(&sched->running));

    fair_fini(&sched->fair);
    free(sched->plan.rows);
    free(sched->plan.copies);
    free(sched->refs);
    free(sched);
}


tenant_t *
sched_tenant(sched_t *sched, const void *name, size_t len, double weight)
{
    return fair_tenant(&sched->fair, name, len, weight);
}


void
sched_add(sched_t *sched, seq_t *seq)
{
    llm_assert(seq->state == SEQ_NEW);
    llm_assert(seq->n_tokens >= 1 && seq->computed == 0 && seq->table.n == 0);
    llm_assert(kv_pages_for(seq->n_tokens) <= kv_pool_pages(sched->pool));

    if (seq->tenant == NULL) {
        seq->tenant = sched->fair.nameless;
    }

    seq->state = SEQ_WAITING;
    seq->arrival = sched->arrivals++;
    fair_hold(&sched->fair, seq->tenant);
    fair_push(&sched->fair, seq);
}


/* Tokens generated since the last time. */
static int
charge_output(sched_t *sched, seq_t *seq)
{
    const int n = seq->n_tokens - seq->charged;

    if (n > 0) {
        fair_charge(&sched->fair, seq, n, FAIR_OUTPUT);
    }

    return n;
}


void
sched_remove(sched_t *sched, seq_t *seq)
{
    if (seq->state == SEQ_RUNNING) {
        list_remove(&seq->link);
        sched->n_running--;

        /* the last token may just have been drawn, its page is not certain */
        if (sched->prefix != NULL) {
            share_publish(sched->prefix, seq, seq->n_tokens - 1);
        }

    } else if (seq->state == SEQ_WAITING) {
        fair_pull(&sched->fair, seq);

    } else {
        return;
    }

    if (seq->admitted) {
        charge_output(sched, seq);
    }

    kv_table_truncate(&seq->table, sched->pool, 0);
    seq->computed = 0;
    seq->ahead = false;
    seq->state = SEQ_FINISHED;
    fair_release(&sched->fair, seq->tenant);
    seq->tenant = NULL;
}


static void
load_add(sched_load_t *load, const seq_t *seq)
{
    if (todo(seq) == 1) {
        load->decode.rows++;
        load->decode.attended += seq->n_tokens;
        return;
    }

    load->n_prefill++;

    if (seq->computed > load->context) {
        load->context = seq->computed;
    }
}


/* The last plan is computed: its pages are public, its tokens are paid for,
 * counters start anew. */
static void
begin_step(sched_t *sched)
{
    sched_load_t *load = &sched->load;
    int generated = 0;

    *load = (sched_load_t){ 0 };
    sched->plan.n_rows = 0;
    sched->plan.n_tokens = 0;
    sched->plan.n_copies = 0;
    sched->n_behind = 0;
    sched->n_parked = 0;

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        seq_t *seq = sched_seq(l);

        if (sched->prefix != NULL) {
            share_publish(sched->prefix, seq, seq->n_tokens);
        }

        if (sched->reserve == 0) {
            kv_table_truncate(&seq->table, sched->pool,
                              seq->computed + seq->ahead);
        }

        seq->executed = seq->computed;
        generated += charge_output(sched, seq);
        sched->n_parked += seq->parked;

        if (todo(seq) > 0) {
            sched->n_behind++;
            load_add(load, seq);
        }
    }

    if (generated > 0) {
        estimate_sink(&sched->estimate);
    }

    sched->budget = limit_step(sched);
    sched->share = limit_share(sched);
}


/* Does somebody wait who is to have his chance before this prompt goes on? */
static bool
stands_back(const sched_t *sched, const seq_t *seq)
{
    const list_t *line = &seq->tenant->waiting;
    const tenant_t *first = fair_first(&sched->fair);

    return (first != NULL && first != seq->tenant
            && first->counter <= seq->tenant->counter)
           || (!list_empty(line)
               && sched_seq(line->next)->priority < seq->priority);
}


static void
count_running(sched_t *sched)
{
    const int longest = limit_part(sched);

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        seq_t *seq = sched_seq(l);
        int most = sched->share < longest ? sched->share : longest;
        int count = todo(seq);

        seq->count = 0;

        if (count == 0) {
            continue;
        }

        sched->n_behind--;

        if (count > 1 && !sched->whole_prompts && stands_back(sched, seq)) {
            most = 1;
        }

        if (most > sched->budget - sched->n_behind) {
            most = sched->budget - sched->n_behind;
        }

        seq->count = count < most ? count : most;
        sched->budget -= seq->count;
    }
}


/* Pages that a running sequence lacks for its part of the step. */
static int
pages_lacking(const seq_t *seq)
{
    const int n = kv_pages_for(seq->computed + seq->count) - seq->table.n;

    return n > 0 ? n : 0;
}


/* Pages for what has been counted, whatever it takes. */
static void
make_room(sched_t *sched)
{
    const list_t *head = &sched->running;
    int need = 0;
    bool short_of_pages = false;

    for (const list_t *l = head->next; l != head; l = l->next) {
        need += pages_lacking(sched_seq(l));
    }

    while (need > kv_pool_free_pages(sched->pool)) {
        const bool parked = sched->n_parked > 0;
        seq_t *victim = parked ? victim_parked(sched) : victim_cheapest(sched);

        /* alone it fits: who is too long for the pool was refused */
        llm_assert(victim != NULL);
        short_of_pages |= !parked;
        need -= pages_lacking(victim);
        victim_preempt(sched, victim);
    }

    for (const list_t *l = head->next; l != head; l = l->next) {
        seq_t *seq = sched_seq(l);
        const int rc =
            kv_table_grow(&seq->table, sched->pool, seq->computed + seq->count);

        llm_assert(rc == LLM_OK);
        (void) rc;
    }

    if (short_of_pages) {
        estimate_rise(&sched->estimate);
    }
}


/* What nobody took goes to those that could have more, oldest first, none more
 * than `most` in all. */
static void
top_up(sched_t *sched, int most)
{
    list_t *l = sched->running.next;

    for (; l != &sched->running && sched->budget > 0; l = l->next) {
        seq_t *seq = sched_seq(l);
        int count = todo(seq);

        count = count < most ? count : most;
        count = count < seq->count + sched->budget ? count
                                                   : seq->count + sched->budget;

        if (seq->count == 0 || count <= seq->count) {
            continue;
        }

        if (kv_table_grow(&seq->table, sched->pool, seq->computed + count)
            != LLM_OK) {
            return;
        }

        sched->budget -= count - seq->count;
        seq->count = count;
    }
}


/* Rows for drafts, in what is left of budget and pages. */
static void
add_drafts(sched_t *sched)
{
    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        seq_t *seq = sched_seq(l);
        const int end = seq->computed + seq->count;
        int n = seq->n_draft < sched->budget ? seq->n_draft : sched->budget;

        /* not for one that lost its pages in this step and is back */
        if (seq->count != 1 || end != seq->n_tokens || seq->executed < 0) {
            n = 0;
        }

        if (n > 0 && kv_table_grow(&seq->table, sched->pool, end + n) != LLM_OK)
        {
            const int room = seq->table.n * KV_PAGE - end;

            n = n < room ? n : room;
        }

        seq->n_draft = n;
        seq->count += n;
        sched->budget -= n;
    }
}


static void
write_rows(sched_t *sched)
{
    plan_t *plan = &sched->plan;

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        seq_t *seq = sched_seq(l);

        if (seq->count > 0) {
            plan->rows[plan->n_rows++] = (plan_row_t){
                .seq = seq,
                .first = seq->computed,
                .count = seq->count,
                .n_draft = seq->n_draft,
                .last =
                    seq->computed + seq->count - seq->n_draft == seq->n_tokens,
            };
            plan->n_tokens += seq->count;
            seq->computed += seq->count - seq->n_draft;

        } else if (seq->ahead) {
            seq->ahead = false;

            if (sched->reserve == 0) {
                kv_table_truncate(&seq->table, sched->pool, seq->computed);
            }
        }
    }
}


const plan_t *
sched_step(sched_t *sched)
{
    const uint64_t before = sched->preemptions;

    begin_step(sched);
    count_running(sched);
    make_room(sched);

    /* after a preemption the pages are too few already */
    if (sched->preemptions == before) {
        admit_waiting(sched);
    }

    limit_rest(sched);
    top_up(sched, sched->share);
    top_up(sched, INT_MAX);
    add_drafts(sched);
    write_rows(sched);

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
    return sched->fair.n_waiting;
}


int
sched_unused_slots(const sched_t *sched)
{
    const list_t *head = &sched->running;
    int unused = 0;

    /* only full pages are shared, so none counts twice */
    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *seq = sched_seq(l);

        unused += seq->table.n * KV_PAGE - seq->computed;
    }

    return unused;
}


uint64_t
sched_preemptions(const sched_t *sched)
{
    return sched->preemptions;
}


double
sched_output_ratio(const sched_t *sched)
{
    return sched->estimate.ratio;
}


const sched_hits_t *
sched_hits(const sched_t *sched)
{
    return &sched->hits;
}
