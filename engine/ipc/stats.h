/*
 * Counters and gauges of one engine, read by the module for /metrics and
 * /health.  Written by the engine's loop thread, but for what says otherwise.
 * Relaxed atomics: a reader sees each number whole, not all numbers of one
 * instant.
 */

#ifndef ENGINE_IPC_STATS_H
#define ENGINE_IPC_STATS_H

#include <stdatomic.h>
#include <stdint.h>

/* finish reasons, also the index of `finished` below */
enum {
    LLM_FINISH_NONE = 0,
    LLM_FINISH_STOP,   /* end-of-sequence, stop string or stop token */
    LLM_FINISH_LENGTH, /* max_tokens or the context is full */
    LLM_FINISH_ABORT,  /* canceled by the client */
    LLM_FINISH_ERROR,
    LLM_FINISH_MAX
};

/* Where the time of the engine's loop goes, also the index of `phase_ns`. */
enum {
    LLM_PHASE_INTAKE = 0, /* requests taken: template, tokens, checks */
    LLM_PHASE_SCHEDULE,   /* the plan of a step, and its batch */
    LLM_PHASE_FORWARD,    /* the model, logits included */
    LLM_PHASE_SAMPLE,
    LLM_PHASE_EMIT,  /* text, log-probabilities, records */
    LLM_PHASE_FLUSH, /* records into the slots, bells */
    LLM_PHASE_MAX
};

/* Prometheus histogram: n bounds, n + 1 buckets (the last is +Inf), not
 * cumulative here. */
enum { LLM_HIST_MAX = 24 };

typedef struct {
    _Atomic uint64_t bucket[LLM_HIST_MAX];
    _Atomic uint64_t count;
    _Atomic uint64_t sum; /* microseconds, tokens, … as the bounds */
} llm_hist_t;

enum { LLM_SPEC_MAX = 15 }; /* drafts of a sequence in one step */

/* 64-bit numbers only: llm_stats_reset() goes by that. */
typedef struct {
    /* gauges */
    _Atomic uint64_t running;          /* sequences in the batch */
    _Atomic uint64_t waiting;          /* sequences queued */
    _Atomic uint64_t waiting_capacity; /* of these, for a place and pages */
    _Atomic uint64_t waiting_deferred; /* for what another one computes, or
                                          for a slow client */
    _Atomic uint64_t parked;           /* sequences waiting for a slow client */
    _Atomic uint64_t slots_used;     /* request slots the engine still holds */
    _Atomic uint64_t pages_total;    /* KV pages in the pool */
    _Atomic uint64_t pages_free;     /* KV pages without a reference */
    _Atomic uint64_t pages_used;     /* KV pages with a reference */
    _Atomic uint64_t pages_shared;   /* KV pages with more than one */
    _Atomic uint64_t pages_cached;   /* KV pages to be found, held or not */
    _Atomic uint64_t kv_slots_held;  /* token slots of the pages used */
    _Atomic uint64_t kv_slots_used;  /* of these, with a token */
    _Atomic uint64_t kv_slots_empty; /* and without */

    /* counters */
    _Atomic uint64_t steps;
    _Atomic uint64_t phase_ns[LLM_PHASE_MAX];
    _Atomic uint64_t prompt_tokens; /* of prompts whose first token is there */
    _Atomic uint64_t prompt_cached; /* of these, not computed */
    _Atomic uint64_t prompt_computed; /* and computed */
    _Atomic uint64_t generation_tokens;
    _Atomic uint64_t preemptions;
    _Atomic uint64_t evictions;      /* findable pages given away */
    _Atomic uint64_t prefix_queries; /* tokens looked up in the prefix cache */
    _Atomic uint64_t prefix_hits;    /* and found there */
    _Atomic uint64_t again_queries;  /* the same after a preemption */
    _Atomic uint64_t again_hits;
    _Atomic uint64_t spec_drafts;       /* sequences × steps with drafts */
    _Atomic uint64_t spec_draft_tokens; /* drafts verified */
    _Atomic uint64_t spec_accepted;     /* of these, right */
    _Atomic uint64_t spec_accepted_at[LLM_SPEC_MAX]; /* by their place */
    _Atomic uint64_t rows_ahead; /* computed before their step was planned */
    _Atomic uint64_t rows_ahead_used; /* of these, by that step */
    _Atomic uint64_t rejected;        /* refused because the queue is full */
    _Atomic uint64_t finished[LLM_FINISH_MAX];

    /* of tokens and steps */
    llm_hist_t ttft;        /* time to first token */
    llm_hist_t inter;       /* between tokens of one sequence */
    llm_hist_t step_tokens; /* tokens computed in a step */

    /* of sequences that ran, at their end */
    llm_hist_t e2e;             /* submit to finish */
    llm_hist_t queue_time;      /* submit to first scheduled */
    llm_hist_t inference_time;  /* first scheduled to last token */
    llm_hist_t prefill_time;    /* first scheduled to first token */
    llm_hist_t decode_time;     /* first token to last */
    llm_hist_t per_token;       /* decode time / (tokens - 1) */
    llm_hist_t prompt_len;      /* tokens */
    llm_hist_t output_len;      /* tokens */
    llm_hist_t max_tokens;      /* that were allowed */
    llm_hist_t prefill_len;     /* prompt tokens computed */
    llm_hist_t preempted_times; /* preemptions of a sequence */

    /* of prompts with all their answers; written by the workers, for the
     * engine does not know which sequences belong together */
    llm_hist_t params_n;   /* answers asked for */
    llm_hist_t max_output; /* tokens of the longest */
} llm_stats_t;


/* Upper bounds of a histogram family, *n of them; microseconds, but tokens,
 * answers and times of those below.  The families are vLLM's:
 * time_to_first_token, inter_token_latency, request_latency, iteration_tokens,
 * request_tokens, request_params_n, request_num_preemptions.  Of
 * request_tokens a page shows those up to max_model_len. */
const uint64_t *llm_stats_bounds_ttft(int *n);
const uint64_t *llm_stats_bounds_inter(int *n);
const uint64_t *llm_stats_bounds_latency(int *n);
const uint64_t *llm_stats_bounds_step(int *n);
const uint64_t *llm_stats_bounds_tokens(int *n);
const uint64_t *llm_stats_bounds_choices(int *n);
const uint64_t *llm_stats_bounds_times(int *n);

void llm_stats_add(_Atomic uint64_t *counter, uint64_t n);
void llm_stats_set(_Atomic uint64_t *gauge, uint64_t n);
uint64_t llm_stats_get(const _Atomic uint64_t *value);

/* value and bounds in the unit of the family. */
void llm_stats_observe(llm_hist_t *hist, const uint64_t *bounds, int n,
                       uint64_t value);

/* All numbers to zero: a new engine counts anew. */
void llm_stats_reset(llm_stats_t *stats);

#endif /* ENGINE_IPC_STATS_H */
