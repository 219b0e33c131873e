/*
 * Fair sharing: tenants and their counters alone, then the promises of the
 * paper (arXiv 2401.00588) in a simulated server: shares by weight, a bound on
 * the difference between tenants that both have enough to do, and a quiet
 * tenant beside a noisy one.  Linked with --wrap for calloc and realloc.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/unit/sched_sim.h"

void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);

static int countdown; /* the allocation that fails; 0: none */


void *
__wrap_calloc(size_t n, size_t bytes)
{
    return countdown > 0 && --countdown == 0 ? NULL : __real_calloc(n, bytes);
}


void *
__wrap_realloc(void *p, size_t bytes)
{
    return countdown > 0 && --countdown == 0 ? NULL : __real_realloc(p, bytes);
}


/* --- tenants and counters --- */

static void
queue(fair_t *fair, tenant_t *tenant, seq_t *seq, int priority)
{
    static uint64_t arrivals;

    *seq = (seq_t){ .state = SEQ_WAITING,
                    .tenant = tenant,
                    .n_tokens = 10,
                    .priority = priority,
                    .arrival = arrivals++ };
    fair_hold(fair, tenant);
    fair_push(fair, seq);
}


/* Admits it: out of the line, its prompt paid. */
static void
admit(fair_t *fair, seq_t *seq)
{
    assert_ptr_equal(fair_next(fair), seq);
    fair_pull(fair, seq);
    fair_charge(fair, seq, seq->n_tokens, FAIR_INPUT);
    seq->state = SEQ_RUNNING;
    fair_rewind(fair);
    fair_check(fair);
}


static void
generate(fair_t *fair, seq_t *seq, int n)
{
    seq->n_tokens += n;
    fair_charge(fair, seq, n, FAIR_OUTPUT);
    assert_int_equal(seq->charged, seq->n_tokens);
    fair_check(fair);
}


static void
finish(fair_t *fair, seq_t *seq)
{
    if (seq->state == SEQ_WAITING) {
        fair_pull(fair, seq);
    }

    fair_release(fair, seq->tenant);
    fair_check(fair);
}


static void
test_charges(void **state)
{
    fair_t fair;
    seq_t s[3];

    (void) state;
    assert_int_equal(fair_init(&fair), LLM_OK);

    tenant_t *a = fair_tenant(&fair, "a", 1, 1);
    tenant_t *b = fair_tenant(&fair, "b", 1, 4);

    queue(&fair, a, &s[0], 0);
    queue(&fair, b, &s[1], 0);
    queue(&fair, a, &s[2], 0);

    admit(&fair, &s[0]); /* a began to wait first */
    assert_true(a->counter == 10);
    generate(&fair, &s[0], 3);
    assert_true(a->counter == 16);
    admit(&fair, &s[1]);
    assert_true(b->counter == 2.5);
    generate(&fair, &s[1], 2);
    assert_true(b->counter == 3.5);
    admit(&fair, &s[2]);
    assert_null(fair_next(&fair));

    for (int i = 0; i < 3; i++) {
        finish(&fair, &s[i]);
    }

    fair_fini(&fair);
}


static void
test_line(void **state)
{
    static const int priorities[] = { 3, 0, 3, -5, 0, 7 };
    static const int order[] = { 3, 1, 4, 0, 2, 5 };
    fair_t fair;
    seq_t s[6];

    (void) state;
    assert_int_equal(fair_init(&fair), LLM_OK);

    for (int i = 0; i < 6; i++) {
        queue(&fair, fair.nameless, &s[i], priorities[i]);
    }

    /* who was preempted has its place again */
    assert_ptr_equal(fair_next(&fair), &s[3]);
    fair_pull(&fair, &s[1]);
    fair_pull(&fair, &s[0]);
    fair_push_again(&fair, &s[0]);
    fair_push_again(&fair, &s[1]);
    fair_rewind(&fair);
    fair_check(&fair);

    /* skipped and parked ones let others by, in this step */
    s[1].parked = true;
    assert_ptr_equal(fair_next(&fair), &s[3]);
    fair_skip(&s[3]);
    assert_ptr_equal(fair_next(&fair), &s[4]);
    assert_ptr_equal(fair_next(&fair), &s[4]);
    fair_rewind(&fair);
    s[1].parked = false;

    for (int i = 0; i < 6; i++) {
        admit(&fair, &s[order[i]]);
        finish(&fair, &s[order[i]]);
    }

    fair_fini(&fair);
}


/* Nothing is saved up while one has nothing to ask for. */
static void
test_lift(void **state)
{
    fair_t fair;
    seq_t s[6];

    (void) state;
    assert_int_equal(fair_init(&fair), LLM_OK);

    tenant_t *a = fair_tenant(&fair, "a", 1, 1);
    tenant_t *b = fair_tenant(&fair, "b", 1, 1);
    tenant_t *c = fair_tenant(&fair, "c", 1, 1);

    /* a alone; then b, when nobody waits: as a, who did last */
    queue(&fair, a, &s[0], 0);
    admit(&fair, &s[0]);
    generate(&fair, &s[0], 100);
    queue(&fair, b, &s[1], 0);
    assert_true(a->counter == 210 && b->counter == 210);

    /* c comes: as the smallest that waits; its own counter if it is larger */
    generate(&fair, &s[0], 100);
    queue(&fair, c, &s[2], 0);
    assert_true(c->counter == 210);
    queue(&fair, a, &s[3], 0);
    assert_true(a->counter == 410);

    /* b runs and has nothing waiting: it, too, is lifted when it asks again */
    admit(&fair, &s[1]);
    generate(&fair, &s[2], 500);
    assert_true(b->counter == 220 && c->counter == 1210);
    queue(&fair, b, &s[4], 0);
    assert_true(b->counter == 410);

    /* all of b are parked: lifted when it is its turn */
    s[4].parked = true;
    generate(&fair, &s[0], 50);
    assert_true(a->counter == 510 && b->counter == 410);
    assert_ptr_equal(fair_next(&fair), &s[3]);
    queue(&fair, fair.nameless, &s[5], 0); /* does not see b's counter */
    assert_true(fair.nameless->counter == 510);
    fair_rewind(&fair);
    assert_true(b->counter == 510);
    fair_check(&fair);

    for (int i = 0; i < 6; i++) {
        finish(&fair, &s[i]);
    }

    fair_fini(&fair);
}


static void
test_names(void **state)
{
    static const double odd[] = { 0, -1, NAN, INFINITY };
    fair_t fair;

    (void) state;
    assert_int_equal(fair_init(&fair), LLM_OK);

    tenant_t *a = fair_tenant(&fair, "a", 1, 2);

    assert_ptr_equal(fair_tenant(&fair, "a", 1, 3), a);
    assert_true(a->weight == 3);
    assert_ptr_not_equal(fair_tenant(&fair, "a", 2, 1), a); /* a, zero */
    assert_ptr_not_equal(fair_tenant(&fair, "A", 1, 1), a);
    assert_ptr_equal(fair_tenant(&fair, NULL, 0, 5), fair.nameless);
    assert_ptr_equal(fair_tenant(&fair, "x", 0, 5), fair.nameless);
    assert_true(fair.nameless->weight == 5);

    for (int i = 0; i < 4; i++) {
        assert_true(fair_tenant(&fair, "a", 1, odd[i])->weight == 1);
    }

    assert_true(fair_tenant(&fair, "a", 1, 1e-3)->weight == 1e-3);
    fair_fini(&fair);
}


/* Many come once: memory stays bounded, who was served most is remembered, and
 * nobody who has a sequence is forgotten. */
static void
test_forgetting(void **state)
{
    enum { BUSY = 6000, PASSING = 30000 };
    static seq_t busy[BUSY];
    fair_t fair;
    seq_t s;
    char name[16];

    (void) state;
    assert_int_equal(fair_init(&fair), LLM_OK);

    for (int i = 0; i < BUSY; i++) {
        const int len = snprintf(name, sizeof(name), "busy%d", i);
        tenant_t *t = fair_tenant(&fair, name, (size_t) len, 1);

        assert_non_null(t);
        busy[i] = (seq_t){ .tenant = t, .n_tokens = 1 };
        fair_hold(&fair, t);
        fair_charge(&fair, &busy[i], 1000 + i, FAIR_INPUT);
    }

    for (int i = 0; i < PASSING; i++) {
        const int len = snprintf(name, sizeof(name), "%d", i);
        tenant_t *t = fair_tenant(&fair, name, (size_t) len, 1);

        assert_non_null(t);
        s = (seq_t){ .tenant = t, .n_tokens = 1 };
        fair_hold(&fair, t);
        fair_charge(&fair, &s, i % 500, FAIR_INPUT);
        fair_release(&fair, t);
        assert_true(fair.idle.n <= FAIR_IDLE);
    }

    fair_check(&fair);
    assert_int_equal(fair.n_tenants, BUSY + FAIR_IDLE);

    for (int i = 0; i < BUSY; i++) {
        const int len = snprintf(name, sizeof(name), "busy%d", i);

        assert_ptr_equal(fair_tenant(&fair, name, (size_t) len, 1),
                         busy[i].tenant);
        assert_true(busy[i].tenant->counter == 1000 + i);
    }

    for (int i = 0; i < BUSY; i++) {
        fair_release(&fair, busy[i].tenant);
    }

    /* the memory shrinks again as others come */
    for (int i = 0; i < 2 * BUSY; i++) {
        const int len = snprintf(name, sizeof(name), "late%d", i);

        assert_non_null(fair_tenant(&fair, name, (size_t) len, 1));
    }

    assert_int_equal(fair.idle.n, FAIR_IDLE);
    assert_true(fair_tenant(&fair, "busy5999", 8, 1)->counter == 6999);
    fair_check(&fair);
    fair_fini(&fair);
}


static void
test_heap(void **state)
{
    enum { N = 300 };
    static tenant_t tenants[N];
    tenant_t *items[N];
    heap_t heap = { .items = items };
    random_t random = random_start("heap");

    (void) state;

    for (int i = 0; i < N; i++) {
        tenants[i].at = -1;
        tenants[i].since = (uint64_t) i;
    }

    for (int step = 0; step < 30000; step++) {
        tenant_t *t = &tenants[random_below(&random, N)];
        const tenant_t *first = NULL;

        if (t->at < 0) {
            t->counter = random_below(&random, 50);
            heap_push(&heap, t);
        } else if (random_below(&random, 2) == 0) {
            heap_remove(&heap, t);
        } else {
            t->counter += random_below(&random, 9);
            heap_grown(&heap, t);
        }

        for (int i = 0; i < N; i++) {
            if (tenants[i].at >= 0
                && (first == NULL || heap_before(&tenants[i], first))) {
                first = &tenants[i];
            }
        }

        assert_ptr_equal(heap.n > 0 ? heap.items[0] : NULL, first);
        heap_check(&heap);
    }
}


/* Each allocation fails once: no tenant then, and all others stay. */
static void
test_no_memory(void **state)
{
    enum { N = 300 };
    kv_pool_t *pool = kv_pool_create(4);
    tenant_t *known[N];
    fair_t fair;
    int failures = 0;
    char name[16];

    (void) state;

    for (int k = 1; k <= 7; k++) {
        countdown = k;
        sched_t *sched = sched_create(
            &(sched_conf_t){ .max_tokens = 1, .max_seqs = 1 }, pool);

        assert_int_equal(sched == NULL, countdown == 0);
        failures += countdown == 0;
        countdown = 0;
        sched_destroy(sched);
    }

    assert_int_equal(failures, 7);
    kv_pool_destroy(pool);
    assert_int_equal(fair_init(&fair), LLM_OK);

    for (int i = 0; i < N; i++) {
        const int len = snprintf(name, sizeof(name), "%d", i);
        tenant_t *t = NULL;

        for (int k = 1; t == NULL || countdown == 0; k++) {
            countdown = k;
            t = fair_tenant(&fair, name, (size_t) len, 1);
            failures += t == NULL;

            /* without memory for buckets it is made all the same */
            if (t != NULL && countdown == 0) {
                failures++;
                break;
            }
        }

        countdown = 0;
        known[i] = t;
        fair_check(&fair);
    }

    for (int i = 0; i < N; i++) {
        const int len = snprintf(name, sizeof(name), "%d", i);

        assert_ptr_equal(fair_tenant(&fair, name, (size_t) len, 1), known[i]);
    }

    /* the record of each; now and then the heaps and the buckets */
    assert_true(failures > 7 + N);
    assert_int_equal(fair.n_tenants, N);
    fair_fini(&fair);
}


/* --- in a server --- */

static void
open_server(sim_t *sim, int max_seqs, int pages, int n)
{
    sim_open(sim, &(sched_conf_t){ .max_tokens = 256, .max_seqs = max_seqs },
             pages, n);
    sim->check_every = 7;
}


/* Who has enough to do gets by its weight; who has little does not lose. */
static void
test_weights(void **state)
{
    enum { EACH = 3000 };
    random_t random = random_start("weights");
    sim_t sim;

    (void) state;
    open_server(&sim, 48, 600, 3 * EACH + 200);

    for (int t = 0; t < 3; t++) {
        sim.tenant[t].weight = 1 << t;

        for (int i = 0; i < EACH; i++) {
            sim_request(&sim, t, 0, 1 + random_below(&random, 100 << t),
                        1 + random_below(&random, 160 >> t));
        }
    }

    /* one asks for little */
    sim.tenant[3].weight = 1;

    for (int i = 0; i < 200; i++) {
        sim_request(&sim, 3, i, 20, 20);
    }

    sim_run(&sim, 60);

    const double all =
        sim.tenant[0].service + sim.tenant[1].service + sim.tenant[2].service;

    for (int t = 0; t < 3; t++) {
        const double share = sim.tenant[t].service / all;

        printf("# weight %d: %.2f %% of the service, %d left\n", 1 << t,
               100 * share, sim.tenant[t].open);
        assert_true(fabs(share * 7 / (1 << t) - 1) < 0.03);
        assert_true(sim.tenant[t].open > 0); /* none had run dry */
    }

    assert_true(sim.tenant[3].finished >= 58);
    sim_run(&sim, INFINITY);
    sim_close(&sim);
}


/* Theorem 4.4 of the paper: two tenants that wait all the time differ in any
 * span of time by at most 2 · max(w_p · L_input, w_q · M), M: tokens in the
 * pages of a batch.  One asks for long prompts, the other for long answers. */
static void
test_bound(void **state)
{
    enum { EACH = 3000, PAGES = 256, L_INPUT = 400 };
    random_t random = random_start("bound");
    double low = 0, high = 0;
    sim_t sim;

    (void) state;
    open_server(&sim, 64, PAGES, 2 * EACH);
    sim.tenant[0].weight = 1;
    sim.tenant[1].weight = 1;

    for (int i = 0; i < EACH; i++) {
        sim_request(&sim, 0, 0, 1 + random_below(&random, L_INPUT), 5);
        sim_request(&sim, 1, 0, 5, 1 + random_below(&random, 300));
    }

    while (sim.tenant[0].open + sim.tenant[1].open == 0
           || (sim.tenant[0].open > 64 && sim.tenant[1].open > 64))
    {
        sim_run(&sim, sim.now + 0.001);

        const double d = sim.tenant[0].service - sim.tenant[1].service;

        low = fmin(low, d);
        high = fmax(high, d);
    }

    const double bound =
        2 * fmax(FAIR_INPUT * L_INPUT, FAIR_OUTPUT * PAGES * 16);

    printf("# they differ by %.0f in %.0f each, the bound is %.0f\n",
           high - low, sim.tenant[0].service, bound);
    assert_true(sim.tenant[0].service > 20 * bound / 2);
    assert_true(high - low <= bound);
    sim_run(&sim, INFINITY);
    sim_close(&sim);
}


/* Five hundred requests are there; another client sends one, reads the answer,
 * and sends the next.  It waits for a seat, not for the five hundred. */
static void
test_noisy(void **state)
{
    enum { NOISE = 500, QUIET = 40 };
    random_t random = random_start("noise");
    double worst[2], mean[2];

    (void) state;

    for (int k = 0; k < 2; k++) {
        random_t same = random;
        sim_t sim;
        int n = 0;

        open_server(&sim, 16, 400, NOISE + QUIET);
        sim.tenant[0].weight = 1;
        sim.tenant[1].weight = 1;
        worst[k] = mean[k] = 0;

        for (int i = 0; i < NOISE; i++) {
            sim_request(&sim, 0, 0, 1 + random_below(&same, 500),
                        1 + random_below(&same, 200));
        }

        sim_run(&sim, 1);

        /* as the same tenant, for comparison, or as another */
        while (n < QUIET && sim.tenant[0].open > 0) {
            const sim_request_t *r = sim_request(&sim, k, sim.now, 30, 20);

            while (sim.n_finished < sim.n_requests && r->end == 0) {
                sim_run(&sim, sim.now + 0.001);
            }

            worst[k] = fmax(worst[k], r->first - r->arrival);
            mean[k] += r->first - r->arrival;
            n++;
        }

        mean[k] /= n;
        sim_run(&sim, INFINITY);
        sim_close(&sim);
    }

    printf("# first token after %.2f s, at most %.2f s; as the same tenant "
           "%.2f s, %.2f s\n",
           mean[1], worst[1], mean[0], worst[0]);

    /* 16 seats, answers of 100 tokens: one comes free every 6 steps of 15 ms;
     * the longest can take 200 steps, if all are new */
    assert_true(mean[1] < 0.5 && worst[1] < 3);
    assert_true(worst[0] > 10 * worst[1]);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_charges),    cmocka_unit_test(test_line),
        cmocka_unit_test(test_lift),       cmocka_unit_test(test_names),
        cmocka_unit_test(test_forgetting), cmocka_unit_test(test_heap),
        cmocka_unit_test(test_no_memory),  cmocka_unit_test(test_weights),
        cmocka_unit_test(test_bound),      cmocka_unit_test(test_noisy),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
