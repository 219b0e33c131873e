/*
 * A simulated server for the scheduler's tests: requests of several tenants
 * arrive by a simulated clock, a step takes a + b · tokens, every sequence
 * generates a length that was drawn before, and nobody computes anything.
 */

#ifndef T_UNIT_SCHED_SIM_H
#define T_UNIT_SCHED_SIM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/sched/fair.h"
#include "engine/sched/sched.h"
#include "t/unit/random.h"

enum { SIM_TENANTS = 16 };

typedef struct {
    double arrival; /* seconds */
    double first;   /* first token; < 0: not yet */
    double end;
    int tenant;
    int target;  /* tokens in the end */
    bool served; /* its prompt has been counted */
    seq_t seq;
} sim_request_t;

typedef struct {
    double weight;
    int open; /* requests waiting or running */
    int finished;
    double service; /* prompt tokens + 2 · generated ones, so far */
    bool backlog;   /* always had one waiting, in this window */
    double mark;    /* service at the window's start */
} sim_tenant_t;

typedef struct {
    kv_pool_t *pool;
    sched_t *sched;
    double fixed_s, token_s; /* a, b */

    sim_request_t *requests; /* by arrival */
    int n_requests;
    int n_arrived;
    int n_finished;

    sim_tenant_t tenant[SIM_TENANTS];
    int n_tenants;

    double now;
    int64_t steps;
    int64_t planned; /* tokens computed */
    int64_t generated;
    int64_t used_sum; /* pages in use, over the steps with some waiting */
    int64_t used_steps;
    int64_t seqs_sum; /* running, likewise */
    int check_every;
} sim_t;


static inline double
sim_exponential(random_t *random, double mean)
{
    return -mean * log(1 - random_unit(random));
}


/* Box and Muller */
static inline double
sim_lognormal(random_t *random, double median, double sigma)
{
    const double u = 1 - random_unit(random);
    const double angle = 6.283185307179586 * random_unit(random);

    return median * exp(sigma * sqrt(-2 * log(u)) * cos(angle));
}


static inline int
sim_clamp(double x, int low, int high)
{
    return x < low ? low : x > high ? high : (int) x;
}


static int
sim_by_arrival(const void *a, const void *b)
{
    const double d = ((const sim_request_t *) a)->arrival
                     - ((const sim_request_t *) b)->arrival;

    return d < 0 ? -1 : d > 0;
}


static inline void
sim_open(sim_t *sim, const sched_conf_t *conf, int pages, int n_requests)
{
    *sim = (sim_t){ .pool = kv_pool_create(pages),
                    .fixed_s = 0.010,
                    .token_s = 0.00005,
                    .requests =
                        calloc((size_t) n_requests, sizeof(sim_request_t)) };
    assert_non_null(sim->requests);
    sim->sched = sched_create(conf, sim->pool);
    assert_non_null(sim->sched);
}


static inline void
sim_close(sim_t *sim)
{
    assert_int_equal(sched_running(sim->sched) + sched_waiting(sim->sched), 0);
    assert_int_equal(kv_pool_free_pages(sim->pool), kv_pool_pages(sim->pool));
    sched_destroy(sim->sched);
    kv_pool_destroy(sim->pool);
    free(sim->requests);
}


/* Requests are appended in any order, and sorted by sim_run. */
static inline sim_request_t *
sim_request(sim_t *sim, int tenant, double arrival, int prompt, int output)
{
    sim_request_t *r = &sim->requests[sim->n_requests++];

    r->arrival = arrival;
    r->tenant = tenant;
    r->first = -1;
    r->target = prompt + output;
    r->seq = (seq_t){ .n_tokens = prompt,
                      .n_prompt = prompt,
                      .cap_tokens = prompt + output };

    if (tenant >= sim->n_tenants) {
        sim->n_tenants = tenant + 1;
    }

    return r;
}


static inline void
sim_arrive(sim_t *sim)
{
    for (; sim->n_arrived < sim->n_requests; sim->n_arrived++) {
        sim_request_t *r = &sim->requests[sim->n_arrived];
        sim_tenant_t *tenant = &sim->tenant[r->tenant];
        const char name = (char) ('A' + r->tenant);

        if (r->arrival > sim->now) {
            return;
        }

        assert_int_equal(kv_table_init(&r->seq.table, r->seq.cap_tokens),
                         LLM_OK);
        r->seq.owner = r;
        r->seq.tenant = sched_tenant(sim->sched, &name, 1, tenant->weight);
        assert_non_null(r->seq.tenant);
        sched_add(sim->sched, &r->seq);
        tenant->open++;
    }
}


static inline void
sim_finish(sim_t *sim, sim_request_t *r)
{
    r->end = sim->now;
    sched_remove(sim->sched, &r->seq);
    kv_table_fini(&r->seq.table);
    sim->tenant[r->tenant].open--;
    sim->tenant[r->tenant].finished++;
    sim->n_finished++;
}


/* One step, and what follows from it. */
static inline void
sim_step(sim_t *sim)
{
    const plan_t *plan = sched_step(sim->sched);

    if (sim->check_every > 0 && sim->steps % sim->check_every == 0) {
        sched_check(sim->sched);
    }

    sim->now += sim->fixed_s + sim->token_s * plan->n_tokens;
    sim->steps++;
    sim->planned += plan->n_tokens;
    assert_true(plan->n_rows > 0);

    if (sched_waiting(sim->sched) > 0) {
        sim->used_sum +=
            kv_pool_pages(sim->pool) - kv_pool_free_pages(sim->pool);
        sim->seqs_sum += sched_running(sim->sched);
        sim->used_steps++;
    }

    for (int i = 0; i < plan->n_rows; i++) {
        sim_request_t *r = plan->rows[i].seq->owner;
        sim_tenant_t *tenant = &sim->tenant[r->tenant];

        if (!r->served) {
            r->served = true;
            tenant->service += r->seq.n_prompt;
        }

        if (!plan->rows[i].last) {
            continue;
        }

        if (r->first < 0) {
            r->first = sim->now;
        }

        r->seq.n_tokens++;
        tenant->service += 2;
        sim->generated++;

        if (r->seq.n_tokens == r->target) {
            sim_finish(sim, r);
        }
    }
}


/* Runs until the clock says so, or all have finished. */
static inline void
sim_run(sim_t *sim, double until)
{
    if (sim->n_arrived == 0) {
        qsort(sim->requests, (size_t) sim->n_requests, sizeof(sim_request_t),
              sim_by_arrival);
    }

    while (sim->n_finished < sim->n_requests && sim->now < until) {
        if (sim->n_finished == sim->n_arrived) {
            const double next = sim->requests[sim->n_arrived].arrival;

            sim->now = next > sim->now ? next : sim->now;
        }

        sim_arrive(sim);
        sim_step(sim);
    }
}

#endif /* T_UNIT_SCHED_SIM_H */
