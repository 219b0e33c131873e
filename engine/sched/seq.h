/*
 * One sequence: its tokens, how many of them are computed, its pages.
 *
 * There is no prefill phase and no decode phase: in each step a sequence
 * catches up from `computed` towards `n_tokens` (scheduler.md C1).  When the
 * step computed its last token, that row is sampled and the token appended.
 */

#ifndef ENGINE_SCHED_SEQ_H
#define ENGINE_SCHED_SEQ_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/list.h"
#include "engine/kv/table.h"

typedef enum {
    SEQ_NEW = 0,
    SEQ_WAITING,
    SEQ_RUNNING,
    SEQ_FINISHED
} seq_state_t;

typedef struct seq_s seq_t;

struct seq_s {
    list_t link; /* in the waiting or the running queue */
    seq_state_t state;

    int32_t *tokens; /* prompt, then what was generated; the owner's */
    int n_tokens;
    int n_prompt;
    int cap_tokens;

    int computed; /* tokens whose K and V are in the pages; advanced by the
                     scheduler when it plans them */
    int executed; /* of a running one: those of earlier steps; −1: it was
                     admitted in this one */
    kv_table_t table;

    /* prefix caching */
    kv_hash_t root; /* of its hashes; set by the owner */
    int cached;     /* tokens that were there at the first admission, and so
                       were not computed for it: in shared pages, and those
                       copied with a last page */
    bool admitted;  /* at least once */
    int waits_for;  /* tokens that it waits for; 0: does not */
    int waits;      /* how often it began to wait */
    int forked;     /* tokens to be copied with page fork_page; 0: none */
    int32_t fork_page;

    bool parked;      /* the client is slow: left out of steps */
    bool want_prompt; /* logits of prompt rows too (echo with logprobs): all
                         of it is computed, whatever is cached */

    /* who goes first */
    int priority;            /* among those of its tenant: lower first */
    struct tenant_s *tenant; /* fair.h; set by the owner, or NULL: sched_add
                                puts the nameless one; NULL after the end */
    uint64_t arrival;        /* order of submission, set by sched_add */
    int charged;             /* tokens that its tenant has been charged for */
    int preemptions;

    int count;  /* tokens to compute in the step that is being planned */
    bool ahead; /* set by the owner between two steps: the row at `computed` is
                   being computed, so its page stays; false again when the next
                   step leaves it out or takes its pages */

    /* Guesses at the tokens that follow, to be verified in one step: borrowed
     * from the owner until it is over.  The owner sets n_draft before the
     * step; the scheduler lowers it to what it could plan. */
    const int32_t *draft;
    int n_draft;

    void *owner; /* the request */
};

#endif /* ENGINE_SCHED_SEQ_H */
