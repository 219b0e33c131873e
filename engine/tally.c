/*
 * The engine's books.  Called by loop.c, engine.c, runner.c, and, for single
 * requests, by emit.c.
 *
 * Histograms over requests are vLLM's (v1/metrics/stats.py): all of a request
 * is observed when it ends, so a request in progress is in none of them.
 */

#include "engine/tally.h"

#include "engine/base/clock.h"

typedef const uint64_t *(*bounds_t)(int *n);


static void
observe(llm_hist_t *hist, bounds_t family, uint64_t value)
{
    int n;
    const uint64_t *bounds = family(&n);

    llm_stats_observe(hist, bounds, n, value);
}


static uint64_t
micros(uint64_t from, uint64_t to)
{
    return to > from ? (to - from) / 1000 : 0;
}


void
tally_phase(engine_t *engine, int phase, uint64_t *since)
{
    const uint64_t now = clock_now_ns();

    llm_stats_add(&engine->stats->phase_ns[phase], now - *since);
    *since = now;
}


/* Pages and the slots in them. */
static void
tally_pages(engine_t *engine)
{
    llm_stats_t *stats = engine->stats;
    const int free = kv_pool_free_pages(engine->pool);
    const uint64_t used = (uint64_t) (kv_pool_pages(engine->pool) - free);
    const uint64_t held = used * KV_PAGE;
    const uint64_t empty = (uint64_t) sched_unused_slots(engine->sched);

    llm_stats_set(&stats->pages_free, (uint64_t) free);
    llm_stats_set(&stats->pages_used, used);
    llm_stats_set(&stats->pages_shared,
                  (uint64_t) kv_pool_shared_pages(engine->pool));
    llm_stats_set(&stats->kv_slots_held, held);
    llm_stats_set(&stats->kv_slots_empty, empty);
    llm_stats_set(&stats->kv_slots_used, held - empty);
    llm_stats_set(&stats->evictions, kv_pool_evictions(engine->pool));

    if (engine->prefix != NULL) {
        llm_stats_set(&stats->pages_cached,
                      (uint64_t) kv_prefix_pages(engine->prefix));
    }
}


void
tally_step(engine_t *engine, const plan_t *plan)
{
    llm_stats_t *stats = engine->stats;
    const sched_hits_t *hits = sched_hits(engine->sched);

    if (plan->n_rows > 0) {
        llm_stats_add(&stats->steps, 1);
        observe(&stats->step_tokens, llm_stats_bounds_step,
                (uint64_t) plan->n_tokens);
    }

    llm_stats_set(&stats->running, (uint64_t) sched_running(engine->sched));
    llm_stats_set(&stats->waiting, (uint64_t) (sched_waiting(engine->sched)
                                               + engine->n_preparing));
    llm_stats_set(&stats->preemptions, sched_preemptions(engine->sched));
    llm_stats_set(&stats->prefix_queries, hits->queries);
    llm_stats_set(&stats->prefix_hits, hits->hits);
    llm_stats_set(&stats->again_queries, hits->again_queries);
    llm_stats_set(&stats->again_hits, hits->again_hits);
    tally_pages(engine);
}


void
tally_prompt(engine_t *engine, const request_t *req)
{
    llm_stats_t *stats = engine->stats;
    const uint64_t n = (uint64_t) req->seq.n_prompt;
    const uint64_t cached = (uint64_t) req->seq.cached;

    llm_stats_add(&stats->prompt_tokens, n);
    llm_stats_add(&stats->prompt_cached, cached);
    llm_stats_add(&stats->prompt_computed, n - cached);
}


void
tally_token(engine_t *engine, request_t *req)
{
    const uint64_t now = clock_now_ns();
    llm_stats_t *stats = engine->stats;

    if (req->first_ns == 0) {
        req->first_ns = now;
        observe(&stats->ttft, llm_stats_bounds_ttft,
                micros(req->from.submit_ns, now));
    } else {
        observe(&stats->inter, llm_stats_bounds_inter,
                micros(req->last_ns, now));
    }

    req->last_ns = now;
    llm_stats_add(&stats->generation_tokens, 1);
}


/* Where the time of a sequence went. */
static void
tally_times(llm_stats_t *stats, const request_t *req, uint64_t now)
{
    const bounds_t latency = llm_stats_bounds_latency;
    const uint64_t begun = req->scheduled_ns;

    observe(&stats->e2e, latency, micros(req->from.submit_ns, now));
    observe(&stats->queue_time, latency, micros(req->from.submit_ns, begun));
    observe(&stats->inference_time, latency,
            micros(begun, req->n_output > 0 ? req->last_ns : now));

    if (req->n_output == 0) {
        return;
    }

    const uint64_t decode = micros(req->first_ns, req->last_ns);

    observe(&stats->prefill_time, latency, micros(begun, req->first_ns));
    observe(&stats->decode_time, latency, decode);

    if (req->n_output > 1) {
        observe(&stats->per_token, llm_stats_bounds_inter,
                decode / (uint64_t) (req->n_output - 1));
    }
}


void
tally_end(engine_t *engine, const request_t *req, uint32_t finish)
{
    llm_stats_t *stats = engine->stats;
    const bounds_t tokens = llm_stats_bounds_tokens;
    const seq_t *seq = &req->seq;

    if (req->textual) {
        return;
    }

    llm_stats_add(&stats->finished[finish], 1);

    if (req->scheduled_ns == 0) {
        return;
    }

    tally_times(stats, req, clock_now_ns());
    observe(&stats->prompt_len, tokens, (uint64_t) seq->n_prompt);
    observe(&stats->prefill_len, tokens,
            (uint64_t) (seq->n_prompt - seq->cached));
    observe(&stats->output_len, tokens, (uint64_t) req->n_output);
    observe(&stats->max_tokens, tokens, (uint64_t) req->max_tokens);
    observe(&stats->preempted_times, llm_stats_bounds_times,
            (uint64_t) seq->preemptions);
}
