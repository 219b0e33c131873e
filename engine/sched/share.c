/*
 * Hits on admission, forks, and the wait for a leader.  Called by sched.c.
 *
 * A leader is a running sequence whose tokens begin like those of the waiting
 * one, and which has yet to compute some that this one lacks.  It runs, so it
 * gets tokens in every step and is there in a bounded number of them.  Pages
 * evicted between could make a sequence wait again and again; after WAITS_MAX
 * times it goes by itself.
 *
 * With the whole prompt in common (n > 1) nearly any wait pays: the leader
 * needs no more steps than the follower would, and then there is one token to
 * compute instead of a prompt.  That once; the leader may have ended at once,
 * its last page with it, and its followers should not go one by one.  With
 * less in common, the wait must save some pages.
 */

#include "engine/sched/share.h"

#include "engine/base/status.h"

/* A wait must save GAIN_WHOLE tokens if they are the whole prompt but its last
 * one, the first time; else GAIN_PART; and 1/GAIN_FRACTION of what is to do. */
enum {
    WAITS_MAX = 8,
    GAIN_WHOLE = 7,
    GAIN_PART = 2 * KV_PAGE,
    GAIN_FRACTION = 8
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


static bool
hash_equal(const kv_hash_t *a, const kv_hash_t *b)
{
    return a->low == b->low && a->high == b->high;
}


/* Do both have the same tokens, under the same salt, in their first n pages?
 * By hash: enough for a wait, where a mistake costs time alone. */
static bool
same_pages(const seq_t *a, const seq_t *b, int n)
{
    if (n == 0) {
        return hash_equal(&a->root, &b->root);
    }

    return n <= a->table.n_hashes && n <= b->table.n_hashes
           && hash_equal(&a->table.hashes[n - 1], &b->table.hashes[n - 1]);
}


/* Position of the first difference of their tokens from `at` on, or end. */
static int
same_until(const seq_t *a, const seq_t *b, int at, int end)
{
    while (at < end && a->tokens[at] == b->tokens[at]) {
        at++;
    }

    return at;
}


/* Are the first n tokens of both the same? */
static bool
same_tokens(const seq_t *a, const seq_t *b, int n)
{
    return n <= a->n_tokens && n <= b->n_tokens && same_pages(a, b, n / KV_PAGE)
           && same_until(a, b, n / KV_PAGE * KV_PAGE, n) == n;
}


/* How many first tokens are the same, at most limit, when have pages are. */
static int
common_tokens(const seq_t *a, const seq_t *b, int have, int limit)
{
    int same = have;
    int differ = 1 + limit / KV_PAGE;

    limit = limit < a->n_tokens ? limit : a->n_tokens;

    /* hashes are chained: where they differ first, by bisection */
    while (differ - same > 1) {
        const int middle = same + (differ - same) / 2;

        if (same_pages(a, b, middle)) {
            same = middle;
        } else {
            differ = middle;
        }
    }

    return same_until(a, b, same * KV_PAGE, limit);
}


void
share_fork(seq_t *seq, const list_t *running)
{
    const kv_table_t *table = &seq->table;
    const int have = table->n;
    const int first = have * KV_PAGE;
    int limit = first + KV_PAGE;

    if (seq->want_prompt) {
        return;
    }

    limit = limit < seq->n_tokens ? limit : seq->n_tokens - 1;

    /* One token is enough: to copy a page is to move what 16 tokens wrote,
     * which is nothing beside one more row of the forward pass (measured with
     * 135M parameters on two threads: 0.04 ms against more than 1 ms). */
    for (const list_t *l = running->next; l != running; l = l->next) {
        const seq_t *other = list_entry(l, const seq_t, link);

        if (other->executed <= first) {
            continue;
        }

        /* that all before is the same was confirmed when the shared page was
         * found and published; a hash alone would not do */
        if (have == 0 ? !hash_equal(&other->root, &seq->root)
                      : other->table.pages[have - 1] != table->pages[have - 1])
        {
            continue;
        }

        const int end = other->executed < limit ? other->executed : limit;
        const int same = same_until(other, seq, first, end);

        if (same > seq->computed) {
            seq->computed = same;
            seq->forked = same - first;
            seq->fork_page = other->table.pages[have];
        }
    }
}


void
share_detach(kv_pool_t *pool, seq_t *seq)
{
    kv_table_truncate(&seq->table, pool, 0);
    seq->computed = 0;
    seq->forked = 0;
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


bool
share_begin_wait(seq_t *seq, const list_t *running)
{
    const int have = seq->table.n;
    const int limit = seq->n_tokens - 1;
    int best = 0;

    if (seq->want_prompt || seq->waits >= WAITS_MAX
        || limit - seq->computed < GAIN_WHOLE)
    {
        return false;
    }

    for (const list_t *l = running->next; l != running; l = l->next) {
        const seq_t *leader = list_entry(l, const seq_t, link);

        if (leader->parked || leader->executed == leader->n_tokens
            || !same_pages(leader, seq, have))
        {
            continue;
        }

        const int same = common_tokens(leader, seq, have, limit);

        if (same > leader->executed && same > best) {
            best = same;
        }
    }

    const int gain = best - seq->computed;
    const int least = best == limit && seq->waits == 0 ? GAIN_WHOLE : GAIN_PART;

    if (gain < least || gain * GAIN_FRACTION < seq->n_tokens - seq->computed) {
        return false;
    }

    seq->waits_for = best;
    seq->waits++;

    return true;
}


bool
share_still_waits(seq_t *seq, const list_t *running)
{
    const int want = seq->waits_for;
    bool waits = false;

    if (want == 0) {
        return false;
    }

    /* who was admitted a moment ago is not who was waited for */
    for (const list_t *l = running->next; l != running; l = l->next) {
        const seq_t *leader = list_entry(l, const seq_t, link);

        if (leader->executed < 0 || !same_tokens(leader, seq, want)) {
            continue;
        }

        if (leader->executed >= want) {
            waits = false;
            break;
        }

        waits |= !leader->parked;
    }

    if (!waits) {
        seq->waits_for = 0;
    }

    return waits;
}
