/* The invariants of scheduler.md, asserted by tests, and after every step in
 * debug builds.  O(pages). */

#include "engine/base/status.h"
#include "engine/sched/admit.h"
#include "engine/sched/state.h"


static void
check_running(const sched_t *sched, const seq_t *seq)
{
    const int room = admit_room(sched, seq, seq->computed + seq->ahead);

    llm_assert(seq->state == SEQ_RUNNING && seq->tenant != NULL);
    llm_assert(seq->tenant->n_seqs > 0);
    llm_assert(seq->computed >= 1 && seq->computed <= seq->n_tokens);
    llm_assert(seq->executed <= seq->computed && seq->forked == 0);
    llm_assert(
        seq->table.n == kv_pages_for(room)
        || (seq->n_draft > 0
            && seq->table.n == kv_pages_for(seq->executed + 1 + seq->n_draft)));
    llm_assert(seq->table.n_public <= seq->computed / KV_PAGE);
    (void) seq;
    (void) room;
}


/* The pages of the running sequences, against the pool's counts. */
static void
check_pages(const sched_t *sched)
{
    const list_t *head = &sched->running;
    int pages = 0;

    for (const list_t *l = head->next; l != head; l = l->next) {
        const kv_table_t *table = &sched_seq(l)->table;

        for (int i = 0; i < table->n; i++) {
            pages += sched->refs[table->pages[i]]++ == 0;
        }
    }

    llm_assert(pages
               <= kv_pool_pages(sched->pool) - kv_pool_free_pages(sched->pool));
    (void) pages;

    for (int i = 0; i < kv_pool_pages(sched->pool); i++) {
        llm_assert(sched->refs[i] <= kv_pool_refs(sched->pool, i));
        sched->refs[i] = 0;
    }
}


void
sched_check(const sched_t *sched)
{
    const list_t *head = &sched->running;
    const plan_t *plan = &sched->plan;
    int n = 0;

    for (const list_t *l = head->next; l != head; l = l->next) {
        llm_assert(l->next->prev == l);
        check_running(sched, sched_seq(l));
        n++;
    }

    llm_assert(n == sched->n_running && n <= sched->max_seqs);
    llm_assert(plan->n_rows <= sched->max_seqs);
    llm_assert(plan->n_copies <= sched->max_seqs + 1);
    llm_assert(plan->n_tokens >= plan->n_rows
               && plan->n_tokens <= sched->max_tokens);
    llm_assert(sched->estimate.ratio >= 0 && sched->estimate.ratio <= 1);

    for (int i = 0; i < kv_pool_pages(sched->pool); i++) {
        llm_assert(sched->refs[i] == 0);
    }

    check_pages(sched);
    fair_check(&sched->fair);
    kv_pool_check(sched->pool);

    if (sched->prefix != NULL) {
        kv_prefix_check(sched->prefix);
    }

    (void) n;
    (void) plan;
}
