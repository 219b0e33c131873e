/*
 * The scheduler in random storms: tenants of several weights, priorities,
 * clients that stall, are late or go away.  Every plan is compared with that of
 * a naive twin (sched_twin.h), and the promises of the scheduler are checked
 * beside it: the budget, a token for every running sequence, order, progress,
 * all pages back at the end.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <malloc.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/sched/sched.h"
#include "t/unit/random.h"
#include "t/unit/sched_twin.h"


typedef struct {
    bool live;
    bool owed; /* the step reached its end: a token is to be appended */
    int target;
    seq_t seq;
    twin_seq_t twin;
} actor_t;

typedef struct {
    kv_pool_t *pool;
    sched_t *sched;
    const plan_t *plan;
    twin_t twin;
    actor_t actor[MAX_LIVE];
    random_t *random;
    int max_len;
    int n_tenants;
    int n_priorities;
    int next_id;
    int finished;
    uint64_t rows; /* digest of all plans */
} storm_t;


/* One of n_tenants, of which the first has no name; its weight may change. */
static void
storm_tenant(storm_t *s, actor_t *a)
{
    static const double weights[] = { 1, 1, 2, 3, 0.1 };
    const int i = random_below(s->random, s->n_tenants);
    const double weight = weights[random_below(s->random, 5)];
    const char name[2] = { (char) ('a' + i), '\0' };

    a->twin.tenant = i;
    s->twin.tenant[i].weight = weight;
    a->seq.tenant = sched_tenant(s->sched, name,
                                 i == 0   ? 0
                                 : i == 1 ? 2
                                          : 1,
                                 weight);
    assert_non_null(a->seq.tenant);
}


static void
storm_add(storm_t *s)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (a->live) {
            continue;
        }

        const int prompt = 1 + random_below(s->random, s->max_len - 1);
        const int more = random_below(s->random, s->max_len - prompt + 1);

        *a = (actor_t){ .live = true, .target = prompt + more };
        a->seq =
            (seq_t){ .n_tokens = prompt,
                     .n_prompt = prompt,
                     .cap_tokens =
                         a->target
                         + random_below(s->random, s->max_len - a->target + 1),
                     .priority = random_below(s->random, s->n_priorities),
                     .owner = a };
        assert_int_equal(kv_table_init(&a->seq.table, s->max_len), LLM_OK);
        storm_tenant(s, a);

        if (more > 0 && random_below(s->random, 4) == 0) {
            a->seq.n_tokens += random_below(s->random, more); /* recovered */
        }

        sched_add(s->sched, &a->seq);
        a->twin.id = s->next_id++;
        a->twin.n_tokens = a->seq.n_tokens;
        a->twin.cap = a->seq.cap_tokens;
        a->twin.priority = a->seq.priority;
        twin_push(&s->twin, &a->twin);
        return;
    }
}


static void
storm_drop(storm_t *s, actor_t *a)
{
    twin_remove(&s->twin, &a->twin);
    sched_remove(s->sched, &a->seq);
    assert_int_equal(a->seq.state, SEQ_FINISHED);
    kv_table_fini(&a->seq.table);
    a->live = false;
}


/* In the line of its tenant. */
static int64_t
place_of(const actor_t *a)
{
    return (int64_t) a->seq.priority * INT32_MAX + a->twin.id;
}


/* What must hold whatever the twin says. */
static void
storm_promises(const storm_t *s, const bool *could, const int *computed)
{
    const plan_t *plan = s->plan;
    bool planned[MAX_LIVE] = { 0 };
    int64_t first_left[MAX_TENANTS];
    int64_t last_taken[MAX_TENANTS];
    bool runnable = false;

    assert_true(plan->n_tokens <= s->twin.max_tokens);

    for (int i = 0; i < MAX_TENANTS; i++) {
        first_left[i] = INT64_MAX;
        last_taken[i] = -1;
    }

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        const actor_t *a = row->seq->owner;

        assert_false(row->seq->parked);
        assert_true(row->count >= 1);
        assert_int_equal(row->seq->computed, row->first + row->count);
        assert_false(planned[a - s->actor]); /* once a step */
        planned[a - s->actor] = true;

        if (row->first == 0 && row->count == row->seq->computed
            && computed[a - s->actor] == 0
            && place_of(a) > last_taken[a->twin.tenant])
        {
            last_taken[a->twin.tenant] = place_of(a);
        }
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        if (!a->live) {
            continue;
        }

        assert_true(a->seq.table.n <= twin_pages(&s->twin, a->seq.n_tokens));

        /* who ran and could go on got a token, or was preempted */
        if (could[i]) {
            assert_true(planned[i] || a->seq.state == SEQ_WAITING);
        }

        if (a->seq.state == SEQ_WAITING && !a->seq.parked
            && place_of(a) < first_left[a->twin.tenant])
        {
            first_left[a->twin.tenant] = place_of(a);
        }

        runnable |= !a->seq.parked
                    && (a->seq.state == SEQ_WAITING || planned[i]
                        || a->seq.computed < a->seq.n_tokens);
    }

    for (int i = 0; i < MAX_TENANTS; i++) {
        assert_true(last_taken[i] < first_left[i]); /* no overtaking */
    }

    if (runnable && s->twin.n_running == 0) {
        fail_msg("nothing runs though something could");
    }
}


static void
storm_step(storm_t *s)
{
    const plan_t *plan;
    bool could[MAX_LIVE];
    int computed[MAX_LIVE];
    const size_t heap = mallinfo2().uordblks;

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        computed[i] = a->seq.computed;
        could[i] = a->live && a->seq.state == SEQ_RUNNING && !a->seq.parked
                   && a->seq.computed < a->seq.n_tokens;
    }

    plan = s->plan = sched_step(s->sched);
    assert_int_equal(mallinfo2().uordblks, heap); /* no allocation */
    sched_check(s->sched);

    twin_step(&s->twin);
    assert_int_equal(plan->n_rows, s->twin.n_rows);

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        const twin_row_t *want = &s->twin.rows[i];
        actor_t *a = row->seq->owner;

        assert_int_equal(a->twin.id, want->id);
        assert_int_equal(row->first, want->first);
        assert_int_equal(row->count, want->count);
        assert_int_equal(row->last, want->last);
        a->owed |= row->last;

        s->rows =
            (s->rows * 31 + (uint64_t) want->id) * 31 + (uint64_t) want->count;
    }

    storm_promises(s, could, computed);
    assert_int_equal(kv_pool_free_pages(s->pool), twin_free(&s->twin));
    assert_int_equal(sched_running(s->sched), s->twin.n_running);
    assert_int_equal(sched_waiting(s->sched), s->twin.n_waiting);
    assert_true(fabs(sched_output_ratio(s->sched) - s->twin.ratio) < 1e-9);
}


/* The owner's part: append what was sampled (now and then a step late), end
 * what reached its target. */
static void
storm_append(storm_t *s, bool late)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (!a->live || !a->owed || (late && random_below(s->random, 10) == 0))
        {
            continue;
        }

        a->owed = false;

        if (a->seq.n_tokens >= a->target) {
            storm_drop(s, a);
            s->finished++;
            continue;
        }

        a->seq.n_tokens++;
        a->twin.n_tokens++;
    }
}


static void
storm_park(actor_t *a, bool parked)
{
    a->seq.parked = parked;
    a->twin.parked = parked;
}


static void
storm_chaos(storm_t *s)
{
    for (int n = random_below(s->random, 3); n > 0; n--) {
        storm_add(s);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (!a->live) {
            continue;
        }

        if (random_below(s->random, 30) == 0) {
            storm_park(a, !a->seq.parked);
        }

        if (random_below(s->random, 300) == 0) {
            storm_drop(s, a);
        }
    }
}


static uint64_t
storm_run(random_t *random, int n_steps, uint64_t *preemptions)
{
    static storm_t s;
    int steps = 0;

    s = (storm_t){ .random = random };

    const int pages = 2 + random_below(random, 40);
    const bool whole = random_below(random, 4) == 0;
    const int threshold = random_below(random, 3) * random_below(random, 60);
    const int max_tokens =
        1 + random_below(random, 100) + (whole ? pages * 16 : 0);
    const int max_seqs = 1 + random_below(random, 24);
    const double ratio = random_below(random, 3) * 0.4 - 0.4;
    const bool reserve = random_below(random, 6) == 0;

    s.n_tenants = 1 + random_below(random, MAX_TENANTS);
    s.n_priorities = 1 + random_below(random, 3);
    s.max_len = 2 + random_below(random, pages * 16 - 1);
    s.pool = kv_pool_create(pages);
    s.sched = sched_create(&(sched_conf_t){ .max_tokens = max_tokens,
                                            .max_seqs = max_seqs,
                                            .whole_prompts = whole,
                                            .long_prefill = threshold,
                                            .reserve = reserve ? 1000 : 0,
                                            .output_ratio = ratio },
                           s.pool);
    assert_non_null(s.sched);
    s.twin =
        (twin_t){ .pages = pages,
                  .max_tokens = max_tokens,
                  .max_seqs = max_seqs < max_tokens ? max_seqs : max_tokens,
                  .threshold = threshold,
                  .reserve = reserve ? pages_of(s.max_len) * 16 : 0,
                  .ratio = ratio < 0   ? 0
                           : ratio > 0 ? ratio
                                       : 0.1,
                  .adapts = ratio >= 0,
                  .last_left = -1,
                  .whole = whole };

    for (int i = 0; i < n_steps; i++) {
        storm_chaos(&s);
        storm_step(&s);
        storm_append(&s, true);
    }

    /* no more arrivals, all clients read: everyone comes to an end */
    for (int i = 0; i < MAX_LIVE; i++) {
        storm_park(&s.actor[i], false);
    }

    while (sched_running(s.sched) + sched_waiting(s.sched) > 0) {
        storm_step(&s);
        storm_append(&s, false);
        assert_true(steps++ < 200000);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        assert_false(s.actor[i].live);
    }

    *preemptions += sched_preemptions(s.sched);
    assert_int_equal(kv_pool_free_pages(s.pool), pages);
    sched_destroy(s.sched);
    kv_pool_destroy(s.pool);

    return s.rows;
}


static void
test_storms(void **state)
{
    random_t random = random_start("scheduler storms");
    uint64_t preemptions = 0;

    (void) state;

    for (int i = 0; i < 150; i++) {
        storm_run(&random, 300, &preemptions);
    }

    printf("# %llu preemptions\n", (unsigned long long) preemptions);
    assert_true(preemptions > 1000); /* or the storms were too mild */
}


/* The same requests, the same plans. */
static void
test_deterministic(void **state)
{
    uint64_t preemptions[2] = { 0 };
    uint64_t digest[2];

    (void) state;

    for (int i = 0; i < 2; i++) {
        random_t random = { 20 };

        digest[i] = storm_run(&random, 2000, &preemptions[i]);
    }

    assert_int_equal(digest[0], digest[1]);
    assert_int_equal(preemptions[0], preemptions[1]);
    assert_true(digest[0] != 0);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_storms),
        cmocka_unit_test(test_deterministic),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
