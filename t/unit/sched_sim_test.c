/*
 * A hundred thousand requests against a simulated clock: tenants of different
 * weights and rates, bursts, lengths as in logs of chats, a pool that is too
 * small for all who come.  Everybody finishes, nobody starves, the pages are
 * used and preemptions are rare.  Then what the output estimate is good for,
 * with clients that ask for more or less than they need.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/unit/sched_sim.h"

enum { PAGES = 1600, MAX_LEN = 2048, N_REQUESTS = 100000, N_TENANTS = 8 };

/* max_tokens: some round number, what is needed, or all that is possible */
typedef enum { ASK_ROUND, ASK_EXACT, ASK_ALL, N_ASKS } ask_t;

static const double weights[N_TENANTS] = { 1, 1, 2, 4, 1, 0.5, 1, 2 };

/* requests of each in a thousand: the first one is noisy */
static const int rates[N_TENANTS] = { 500, 120, 120, 120, 80, 40, 15, 5 };


static int
draw_tenant(random_t *random)
{
    int n = random_below(random, 1000);
    int tenant = 0;

    while (n >= rates[tenant]) {
        n -= rates[tenant++];
    }

    return tenant;
}


/* Poisson arrivals whose rate changes every minute: quiet, busy, too much.  A
 * prompt, an answer, and the most that the client asked for. */
static void
draw_requests(sim_t *sim, random_t *random, int n, ask_t ask)
{
    static const double per_second[] = { 10, 35, 60, 100, 0.5, 50 };
    static const int round[] = { 256, 512, 1024, 1024 };
    double now = 0;

    for (int i = 0; i < n; i++) {
        const int most = round[random_below(random, 4)];
        const int prompt =
            sim_clamp(sim_lognormal(random, 70, 1.1), 4, MAX_LEN - most);
        const int output = sim_clamp(sim_lognormal(random, 110, 0.9), 1, most);

        now += sim_exponential(random, 1 / per_second[(int) (now / 60) % 6]);

        sim_request_t *r =
            sim_request(sim, draw_tenant(random), now, prompt, output);

        if (ask != ASK_EXACT) {
            r->seq.cap_tokens = ask == ASK_ALL ? MAX_LEN : prompt + most;
        }
    }
}


static void
open_server(sim_t *sim, random_t *random, int n, ask_t ask, double ratio)
{
    sim_open(sim,
             &(sched_conf_t){
                 .max_tokens = 512, .max_seqs = 256, .output_ratio = ratio },
             PAGES, n);

    for (int i = 0; i < N_TENANTS; i++) {
        sim->tenant[i].weight = weights[i];
    }

    draw_requests(sim, random, n, ask);
}


/* --- who gets how much, in windows of time --- */

static void
window_open(sim_t *sim)
{
    for (int i = 0; i < sim->n_tenants; i++) {
        sim->tenant[i].backlog = true;
        sim->tenant[i].mark = sim->tenant[i].service;
    }
}


/* Who has nothing waiting now has no claim in this window. */
static void
window_look(sim_t *sim)
{
    for (int i = 0; i < sim->n_tenants; i++) {
        const char name = (char) ('A' + i);
        const tenant_t *t =
            sched_tenant(sim->sched, &name, 1, sim->tenant[i].weight);

        assert_non_null(t);
        sim->tenant[i].backlog &= !list_empty(&t->waiting);
    }
}


/* The smallest part of its fair share that a tenant got which always had
 * somebody waiting; infinity: there was none.  The fair share is by the weights
 * of those that got anything. */
static double
window_close(const sim_t *sim)
{
    double least = INFINITY;
    double weight = 0;
    double all = 0;

    for (int i = 0; i < sim->n_tenants; i++) {
        const sim_tenant_t *t = &sim->tenant[i];

        weight += t->weight * (t->backlog || t->service > t->mark);
        all += t->service - t->mark;
    }

    for (int i = 0; i < sim->n_tenants; i++) {
        const sim_tenant_t *t = &sim->tenant[i];

        if (t->backlog) {
            least = fmin(least,
                         (t->service - t->mark) / (all * t->weight / weight));
        }
    }

    return least;
}


static double
pages_used(const sim_t *sim)
{
    return (double) sim->used_sum / (double) sim->used_steps / PAGES;
}


static double
preemptions(const sim_t *sim)
{
    return (double) sched_preemptions(sim->sched) / sim->n_requests;
}


/* Seconds to the first token: mean and most, of one tenant. */
static void
waits_of(const sim_t *sim, int tenant, double *mean, double *most)
{
    double sum = 0;

    *most = 0;

    for (int i = 0; i < sim->n_requests; i++) {
        const sim_request_t *r = &sim->requests[i];

        if (r->tenant == tenant) {
            sum += r->first - r->arrival;
            *most = fmax(*most, r->first - r->arrival);
        }
    }

    *mean = sum / sim->tenant[tenant].finished;
}


static void
test_hundred_thousand(void **state)
{
    const double window = 30;
    random_t random = random_start("scheduler simulation");
    sim_t sim;
    double least = INFINITY;
    int windows = 0;

    (void) state;
    open_server(&sim, &random, N_REQUESTS, ASK_ROUND, 0);
    sim.check_every = 97;

    while (sim.n_finished < N_REQUESTS) {
        const double end = sim.now + window;

        window_open(&sim);

        while (sim.n_finished < N_REQUESTS && sim.now < end) {
            sim_run(&sim, sim.now + 0.25);
            window_look(&sim);
        }

        const double got = window_close(&sim);

        windows += isfinite(got);
        least = fmin(least, got);
    }

    printf("# %.0f s, %lld steps, %.0f tok/s; %d windows with a backlog, the "
           "least share %.2f\n",
           sim.now, (long long) sim.steps, (double) sim.generated / sim.now,
           windows, least);
    printf("# under backlog: %.1f %% of the pages, %.1f running; %.4f "
           "preemptions a request\n",
           100 * pages_used(&sim), (double) sim.seqs_sum / sim.used_steps,
           preemptions(&sim));

    for (int i = 0; i < N_TENANTS; i++) {
        double mean, most;

        waits_of(&sim, i, &mean, &most);
        printf("# tenant %c: weight %.1f, %d requests, first token after "
               "%.1f s, at most %.1f s\n",
               'A' + i, weights[i], sim.tenant[i].finished, mean, most);

        /* who asks for less than his share hardly notices the others: a step
         * is 35 ms at most, and a seat or pages come free all the time */
        assert_true(i < 6 || (mean < 1 && most < 10));
    }

    /* half of the fair share is what is promised to the slowest; a window is
     * a thousand steps, so single requests hardly count */
    assert_true(windows > 20 && least > 0.5);

    /* a shortage raises the ratio by half, and it takes 135 steps to sink by
     * that again: one in a hundred steps at most is one of shortage, and most
     * need one victim.  There are 1.8 steps for each request. */
    assert_true(preemptions(&sim) < 0.05);
    assert_true(pages_used(&sim) > 0.85);
    sim_close(&sim);
}


/* The same load with and without an estimate: without it the pool thrashes,
 * whatever clients ask for; with it pages are used nearly as well. */
static void
test_estimate(void **state)
{
    static const char *const asks[] = { "round", "exact", "all" };
    random_t random = random_start("estimates");

    (void) state;

    for (int ask = 0; ask < N_ASKS; ask++) {
        double rate[2], used[2], speed[2];

        for (int k = 0; k < 2; k++) {
            random_t same = random;
            sim_t sim;

            open_server(&sim, &same, 20000, (ask_t) ask, k == 0 ? -1 : 0);
            sim_run(&sim, INFINITY);
            rate[k] = preemptions(&sim);
            used[k] = pages_used(&sim);
            speed[k] = (double) sim.generated / sim.now;
            sim_close(&sim);
        }

        printf("# asking for %s: %.3f preemptions a request and %.0f tok/s "
               "without an estimate, %.3f and %.0f with it; pages %.1f %%, "
               "%.1f %%\n",
               asks[ask], rate[0], speed[0], rate[1], speed[1], 100 * used[0],
               100 * used[1]);
        assert_true(rate[0] > 0.3 && rate[1] * 8 < rate[0]);
        assert_true(used[1] > 0.85);
        assert_true(speed[1] > speed[0]);
    }
}


/* A load that changes: after a time of short answers come long ones, when the
 * ratio is at its least.  It must not thrash until they are gone. */
static void
test_change(void **state)
{
    random_t random = random_start("change of load");
    double rate[2];

    (void) state;

    for (int k = 0; k < 2; k++) {
        random_t same = random;
        sim_t sim;
        double now = 0;

        sim_open(&sim,
                 &(sched_conf_t){ .max_tokens = 512,
                                  .max_seqs = 256,
                                  .output_ratio = k == 0 ? -1 : 0 },
                 PAGES, 6000);
        sim.tenant[0].weight = 1;
        sim.check_every = 13;

        for (int i = 0; i < 6000; i++) {
            const bool is_long = i >= 3000;

            now += sim_exponential(&same, 0.02);
            sim_request(&sim, 0, now, 20 + random_below(&same, 60),
                        is_long ? 700 + random_below(&same, 300) : 20)
                ->seq.cap_tokens = 1100;
        }

        sim_run(&sim, INFINITY);
        rate[k] = (double) sched_preemptions(sim.sched) / 3000;
        printf("# %s: %.3f preemptions a long request, %.0f tok/s\n",
               k == 0 ? "no estimate" : "estimate", rate[k],
               (double) sim.generated / sim.now);
        sim_close(&sim);
    }

    assert_true(rate[0] > 1 && rate[1] * 4 < rate[0]);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hundred_thousand),
        cmocka_unit_test(test_estimate),
        cmocka_unit_test(test_change),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
