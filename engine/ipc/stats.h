/*
 * Counters and gauges of one engine, read by the module for /metrics and
 * /health.  One writer: the engine's loop thread.  Relaxed atomics: a reader
 * sees each number whole, not all numbers of one instant.
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

/* Prometheus histogram: n bounds, n + 1 buckets (the last is +Inf), not
 * cumulative here. */
enum { LLM_HIST_MAX = 24 };

typedef struct {
    _Atomic uint64_t bucket[LLM_HIST_MAX];
    _Atomic uint64_t count;
    _Atomic uint64_t sum_us; /* microseconds */
} llm_hist_t;

typedef struct {
    /* gauges */
    _Atomic uint64_t running;      /* sequences in the batch */
    _Atomic uint64_t waiting;      /* sequences queued */
    _Atomic uint64_t parked;       /* sequences waiting for a slow client */
    _Atomic uint64_t pages_total;  /* KV pages in the pool */
    _Atomic uint64_t pages_used;   /* KV pages with a reference */
    _Atomic uint64_t slots_used;   /* slots the engine still holds */
    _Atomic uint64_t pages_cached; /* KV pages that can be found, held or not */

    /* counters */
    _Atomic uint64_t steps;
    _Atomic uint64_t prompt_tokens;
    _Atomic uint64_t generation_tokens;
    _Atomic uint64_t preemptions;
    _Atomic uint64_t prefix_queries; /* tokens looked up in the prefix cache */
    _Atomic uint64_t prefix_hits;    /* and found there */
    _Atomic uint64_t again_queries;  /* the same after a preemption */
    _Atomic uint64_t again_hits;
    _Atomic uint64_t rejected; /* refused because the queue is full */
    _Atomic uint64_t finished[LLM_FINISH_MAX];

    llm_hist_t ttft;       /* time to first token */
    llm_hist_t inter;      /* between tokens of one sequence */
    llm_hist_t e2e;        /* submit to finish */
    llm_hist_t queue_time; /* submit to first scheduled */
} llm_stats_t;


/* Upper bounds in microseconds of a histogram family; *n of them.  The
 * families are vLLM's: time_to_first_token, inter_token_latency and
 * request_latency (for e2e and queue_time). */
const uint64_t *llm_stats_bounds_ttft(int *n);
const uint64_t *llm_stats_bounds_inter(int *n);
const uint64_t *llm_stats_bounds_latency(int *n);

void llm_stats_add(_Atomic uint64_t *counter, uint64_t n);
void llm_stats_set(_Atomic uint64_t *gauge, uint64_t n);
uint64_t llm_stats_get(const _Atomic uint64_t *value);
void llm_stats_observe(llm_hist_t *hist, const uint64_t *bounds, int n,
                       uint64_t us);

#endif /* ENGINE_IPC_STATS_H */
