/*
 * Hits on admission, and the wait for a leader.  Called by sched.c.
 *
 * A leader is a running sequence whose tokens begin like those of the waiting
 * one, and which has not yet published the next page that this one lacks.  It
 * runs, so it gets tokens in every step and publishes the page in a bounded
 * number of them.  Pages evicted between could make a sequence wait again and
 * again; after WAITS_MAX times it goes by itself.
 */

#include "engine/sched/share.h"

#include "engine/base/status.h"

enum {
    WAITS_MAX = 8,
    GAIN_PAGES = 2,   /* fewer pages are not worth a wait, */
    GAIN_FRACTION = 8 /* nor is less than this part of what is to do */
};


/* Pages that may be taken over: the last token is always computed, because
 * its logits are wanted. */
static int
pages_limit(const seq_t *seq)
{
    return (seq->n_tokens - 1) / KV_PAGE;
}


int
share_attach(kv_prefix_t *prefix, seq_t *seq)
{
    kv_prefix_hash(prefix, &seq->table, &seq->root, seq->tokens, seq->n_tokens);

    if (!seq->want_prompt) {
        seq->computed = KV_PAGE
                        * kv_prefix_attach(prefix, &seq->table, &seq->root,
                                           seq->tokens, pages_limit(seq));
    }

    return seq->computed;
}


void
share_detach(kv_pool_t *pool, seq_t *seq)
{
    kv_table_truncate(&seq->table, pool, 0);
    seq->computed = 0;
}


void
share_publish(kv_prefix_t *prefix, seq_t *seq, int n_tokens)
{
    if (n_tokens > seq->computed) {
        n_tokens = seq->computed;
    }

    if (n_tokens / KV_PAGE > seq->table.n_public) {
        kv_prefix_publish(prefix, &seq->table, &seq->root, seq->tokens,
                          n_tokens);
    }
}


/* Will leader publish page i, which seq has too? */
static bool
leads(const seq_t *leader, const seq_t *seq, int i)
{
    const kv_table_t *a = &leader->table;
    const kv_table_t *b = &seq->table;

    return !leader->parked && i >= a->n_public && i < a->n_hashes
           && a->hashes[i].low == b->hashes[i].low
           && a->hashes[i].high == b->hashes[i].high;
}


bool
share_begin_wait(seq_t *seq, const list_t *running)
{
    const int have = seq->table.n;
    const int limit = pages_limit(seq);
    int best = have;

    if (seq->want_prompt || seq->waits >= WAITS_MAX
        || limit - have < GAIN_PAGES) {
        return false;
    }

    for (const list_t *l = running->next; l != running; l = l->next) {
        const seq_t *leader = list_entry(l, const seq_t, link);

        if (!leads(leader, seq, have)) {
            continue;
        }

        /* hashes are chained: where they differ first, by bisection */
        int same = have + 1;
        int differ =
            1
            + (limit < leader->table.n_hashes ? limit : leader->table.n_hashes);

        while (differ - same > 1) {
            const int middle = same + (differ - same) / 2;

            if (leads(leader, seq, middle - 1)) {
                same = middle;
            } else {
                differ = middle;
            }
        }

        best = same > best ? same : best;
    }

    if (best - have < GAIN_PAGES
        || (best - have) * KV_PAGE * GAIN_FRACTION
               < seq->n_tokens - seq->computed)
    {
        return false;
    }

    seq->waits_for = best;
    seq->waits++;

    return true;
}


bool
share_still_waits(seq_t *seq, const list_t *running)
{
    if (seq->waits_for == 0) {
        return false;
    }

    for (const list_t *l = running->next; l != running; l = l->next) {
        if (leads(list_entry(l, const seq_t, link), seq, seq->waits_for - 1)) {
            return true;
        }
    }

    seq->waits_for = 0;

    return false;
}
