/*
 * Sharing of prefixes between sequences: what a waiting one takes over when it
 * is admitted, and when it had better wait a little.
 *
 * Full pages are shared.  Of the page behind them, which is not full yet or
 * whose last token is this sequence's last one, it gets a copy made of the
 * running sequence that agrees with it longest: a fork, copied before it is
 * written to.  K and V of a position depend on the tokens up to it and on
 * nothing else, so the copied rows are the ones it would have computed; those
 * behind them are overwritten before they are read.
 *
 * Requests with the same cold beginning often arrive together (n > 1, one
 * system prompt).  The first is admitted and computes it; the others wait for
 * its rows, as long as it runs.  Nothing is stored about who waits for whom:
 * each step looks anew, so nobody waits for a sequence that has gone.
 */

#ifndef ENGINE_SCHED_SHARE_H
#define ENGINE_SCHED_SHARE_H

#include <stdbool.h>

#include "engine/kv/prefix.h"
#include "engine/sched/seq.h"


/* Fills the empty table of a waiting sequence with cached pages and sets
 * computed, so that at least one token is left.  Tokens found. */
int share_attach(kv_prefix_t *prefix, seq_t *seq);

/* Behind them: looks among the running sequences for the page that begins with
 * the most tokens of seq's next one, all computed by earlier steps; sets
 * fork_page and forked and adds it to computed.  At least one token is left. */
void share_fork(seq_t *seq, const list_t *running);

/* Undoes both. */
void share_detach(kv_pool_t *pool, seq_t *seq);

/* Makes public what a running sequence has computed of its first n_tokens. */
void share_publish(kv_prefix_t *prefix, seq_t *seq, int n_tokens);

/* Is some sequence of the running queue about to compute tokens that seq (with
 * its hits attached) lacks, so many that waiting pays? */
bool share_begin_wait(seq_t *seq, const list_t *running);

/* Are the tokens that seq waits for still being computed? */
bool share_still_waits(seq_t *seq, const list_t *running);

#endif /* ENGINE_SCHED_SHARE_H */
