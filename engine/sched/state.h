/* The scheduler's own state, for the files of this folder. */

#ifndef ENGINE_SCHED_STATE_H
#define ENGINE_SCHED_STATE_H

#include "engine/sched/estimate.h"
#include "engine/sched/fair.h"
#include "engine/sched/sched.h"

/* What runs, at the beginning of a step. */
typedef struct {
    cost_step_t decode; /* the sequences that decode */
    int n_prefill;      /* the others */
    int context;        /* the longest of these so far */
} sched_load_t;

struct sched_s {
    kv_pool_t *pool;
    kv_prefix_t *prefix;
    int max_tokens;
    int max_seqs;
    bool whole_prompts;
    int long_prefill;
    const cost_t *cost;
    double inter_token_ns;
    int reserve;

    list_t running; /* in the order of admission */
    int n_running;
    fair_t fair; /* who waits */
    estimate_t estimate;
    uint64_t arrivals;
    uint64_t preemptions;
    sched_hits_t hits;

    /* the step in progress */
    sched_load_t load;
    int budget;   /* tokens left */
    int share;    /* most that one sequence gets before all have had some */
    int n_behind; /* running sequences that still have to get a token */
    int n_parked; /* parked among the running */
    int owed; /* pages that running ones have yet to take for their tokens, */
    int expected; /* and with their estimated output */

    int32_t *refs; /* [pages] scratch, zero between uses */
    plan_t plan;
};


static inline seq_t *
sched_seq(const list_t *link)
{
    return list_entry(link, seq_t, link);
}

#endif /* ENGINE_SCHED_STATE_H */
