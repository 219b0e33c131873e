/*
 * The statistics block, see stats.h: the engine's loop thread counts, the
 * module's /metrics reads.  Everything is relaxed: a number is whole, but two
 * numbers need not be of the same instant.
 *
 * The bounds are those of vLLM's metrics, so that the same dashboards fit.
 */

#include "engine/ipc/stats.h"

#include <stddef.h>

#define MS(x) ((x) *1000ull)
#define SEC(x) ((x) *1000000ull)
#define COUNT(a) ((int) (sizeof(a) / sizeof((a)[0])))

static const uint64_t bounds_ttft[] = {
    MS(1),   MS(5),   MS(10),  MS(20),   MS(40),   MS(60),    MS(80),   MS(100),
    MS(250), MS(500), MS(750), SEC(1),   MS(2500), SEC(5),    MS(7500), SEC(10),
    SEC(20), SEC(40), SEC(80), SEC(160), SEC(640), SEC(2560),
};

static const uint64_t bounds_inter[] = {
    MS(10),   MS(25),  MS(50),  MS(75),  MS(100), MS(150),  MS(200),
    MS(300),  MS(400), MS(500), MS(750), SEC(1),  MS(2500), SEC(5),
    MS(7500), SEC(10), SEC(20), SEC(40), SEC(80),
};

static const uint64_t bounds_latency[] = {
    MS(300), MS(500),  MS(800),  SEC(1),   MS(1500), SEC(2),    MS(2500),
    SEC(5),  SEC(10),  SEC(15),  SEC(20),  SEC(30),  SEC(40),   SEC(50),
    SEC(60), SEC(120), SEC(240), SEC(480), SEC(960), SEC(1920), SEC(7680),
};

static const uint64_t bounds_step[] = {
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
};

/* the 1-2-5 series: beyond what any context has */
static const uint64_t bounds_tokens[] = {
    1,      2,      5,       10,      20,      50,       100,   200,
    500,    1000,   2000,    5000,    10000,   20000,    50000, 100000,
    200000, 500000, 1000000, 2000000, 5000000, 10000000,
};

static const uint64_t bounds_choices[] = { 1, 2, 5, 10, 20 };

static const uint64_t bounds_times[] = { 1, 2, 3, 4, 5, 10, 20 };

/* the last bucket is +Inf */
_Static_assert(COUNT(bounds_ttft) < LLM_HIST_MAX, "ttft buckets");
_Static_assert(COUNT(bounds_inter) < LLM_HIST_MAX, "inter buckets");
_Static_assert(COUNT(bounds_latency) < LLM_HIST_MAX, "latency buckets");
_Static_assert(sizeof(llm_stats_t) % sizeof(uint64_t) == 0, "numbers only");
_Static_assert(COUNT(bounds_step) < LLM_HIST_MAX, "step buckets");
_Static_assert(COUNT(bounds_tokens) < LLM_HIST_MAX, "token buckets");


const uint64_t *
llm_stats_bounds_ttft(int *n)
{
    *n = COUNT(bounds_ttft);
    return bounds_ttft;
}


const uint64_t *
llm_stats_bounds_inter(int *n)
{
    *n = COUNT(bounds_inter);
    return bounds_inter;
}


const uint64_t *
llm_stats_bounds_latency(int *n)
{
    *n = COUNT(bounds_latency);
    return bounds_latency;
}


const uint64_t *
llm_stats_bounds_step(int *n)
{
    *n = COUNT(bounds_step);
    return bounds_step;
}


const uint64_t *
llm_stats_bounds_tokens(int *n)
{
    *n = COUNT(bounds_tokens);
    return bounds_tokens;
}


const uint64_t *
llm_stats_bounds_choices(int *n)
{
    *n = COUNT(bounds_choices);
    return bounds_choices;
}


const uint64_t *
llm_stats_bounds_times(int *n)
{
    *n = COUNT(bounds_times);
    return bounds_times;
}


void
llm_stats_add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}


void
llm_stats_set(_Atomic uint64_t *gauge, uint64_t n)
{
    atomic_store_explicit(gauge, n, memory_order_relaxed);
}


uint64_t
llm_stats_get(const _Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}


void
llm_stats_observe(llm_hist_t *hist, const uint64_t *bounds, int n,
                  uint64_t value)
{
    int i = 0;

    /* a bound belongs to its bucket: Prometheus says "le" */
    while (i < n && value > bounds[i]) {
        i++;
    }

    llm_stats_add(&hist->bucket[i], 1);
    llm_stats_add(&hist->count, 1);
    llm_stats_add(&hist->sum, value);
}


void
llm_stats_reset(llm_stats_t *stats)
{
    _Atomic uint64_t *value = (_Atomic uint64_t *) (void *) stats;

    for (size_t i = 0; i < sizeof(*stats) / sizeof(*value); i++) {
        llm_stats_set(&value[i], 0);
    }
}
