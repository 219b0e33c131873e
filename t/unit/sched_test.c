/*
 * The scheduler's rules one by one, each plan written out by hand.  The storms
 * are in sched_storm_test.c.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/unit/sched_rig.h"


static void
test_chunks_behind_decodes(void **state)
{
    rig_t rig = rig_create(100, 20, 8);
    seq_t a, b;

    (void) state;
    rig_step(&rig, 0);

    rig_add(&rig, &a, 5, 100);
    rig_add(&rig, &b, 50, 100);
    assert_int_equal(sched_waiting(rig.sched), 2);

    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 0, 5);
    expect_row(&rig, 1, &b, 0, 15);
    assert_int_equal(rig.plan->n_tokens, 20);
    assert_int_equal(sched_running(rig.sched), 2);
    assert_int_equal(a.table.n, 1);
    assert_int_equal(b.table.n, 1); /* for the chunk, not for the prompt */

    a.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 5, 1);
    expect_row(&rig, 1, &b, 15, 19);

    a.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 6, 1);
    expect_row(&rig, 1, &b, 34, 16);
    assert_true(rig.plan->rows[1].last);

    /* nothing appended: nothing to do */
    rig_step(&rig, 0);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    sched_remove(rig.sched, &b); /* once more does nothing */
    rig_destroy(&rig);
}


/* A long chunk in front leaves a token for each sequence behind it. */
static void
test_chunk_before_decode(void **state)
{
    rig_t rig = rig_create(100, 8, 8);
    seq_t a, b;

    (void) state;
    rig_add(&rig, &a, 40, 100);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 0, 8);

    a.parked = true;
    rig_add(&rig, &b, 3, 100);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &b, 0, 3);

    a.parked = false;
    b.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 8, 7);
    expect_row(&rig, 1, &b, 3, 1);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_destroy(&rig);
}


/* The whole of the prompt must fit, and nobody overtakes. */
static void
test_admission_in_order(void **state)
{
    rig_t rig = rig_create(10, 64, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 5 * 16, 160);
    rig_add(&rig, &b, 6 * 16, 160);
    rig_add(&rig, &c, 1, 160);

    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 0, 64);
    rig_step(&rig, 1); /* budget for 48, pages for 80 tokens: b needs 96 */
    expect_row(&rig, 0, &a, 64, 16);

    rig_drop(&rig, &a);
    rig_step(&rig, 2); /* b leaves c its token */
    expect_row(&rig, 0, &b, 0, 63);
    expect_row(&rig, 1, &c, 0, 1);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &b, 63, 33);

    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* Of two of equal cost the newer one gives way, and comes back before younger
 * ones. */
static void
test_preemption(void **state)
{
    rig_t rig = rig_create(4, 64, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 32, 64);
    rig_add(&rig, &b, 32, 64);
    rig_step(&rig, 2);
    rig_add(&rig, &c, 1, 64);

    a.n_tokens++;
    b.n_tokens++;
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 32, 1);
    assert_int_equal(b.state, SEQ_WAITING);
    assert_int_equal(b.computed, 0);
    assert_int_equal(b.table.n, 0);
    assert_int_equal(b.preemptions, 1);
    assert_int_equal(sched_preemptions(rig.sched), 1);
    assert_int_equal(sched_waiting(rig.sched), 2);

    /* one page is free: enough for c, but b is first */
    rig_step(&rig, 0);
    rig_drop(&rig, &a);
    rig_step(&rig, 2);
    expect_row(&rig, 0, &b, 0, 33); /* with the token it had generated */
    expect_row(&rig, 1, &c, 0, 1);

    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* Nothing is admitted in a step that preempted, though it would fit. */
static void
test_no_admission_after_preemption(void **state)
{
    rig_t rig = rig_create(4, 64, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 16, 64);
    rig_add(&rig, &b, 48, 64);
    rig_step(&rig, 2);
    a.n_tokens++;
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 16, 1);
    assert_int_equal(b.state, SEQ_WAITING);
    rig_add(&rig, &c, 1, 64);
    assert_int_equal(kv_pool_free_pages(rig.pool), 2);

    /* b needs three pages and keeps c out, too */
    a.n_tokens++;
    rig_step(&rig, 1);
    rig_drop(&rig, &b);
    a.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 1, &c, 0, 1);

    rig_drop(&rig, &a);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* Parked sequences are the first to give their pages. */
static void
test_parked_give_pages(void **state)
{
    rig_t rig = rig_create(6, 96, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 32, 96);
    rig_add(&rig, &b, 32, 96);
    rig_add(&rig, &c, 32, 96);
    rig_step(&rig, 3);

    a.parked = true;
    a.n_tokens++;
    rig_step(&rig, 0); /* nothing to do, but it keeps its pages */
    assert_int_equal(a.table.n, 2);

    b.n_tokens++;
    c.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 0, &b, 32, 1);
    expect_row(&rig, 1, &c, 32, 1);
    assert_int_equal(a.state, SEQ_WAITING);
    assert_int_equal(a.table.n, 0);

    /* still parked: left out, even when there is room */
    rig_drop(&rig, &b);
    rig_step(&rig, 0);
    a.parked = false;
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 0, 33);

    rig_drop(&rig, &a);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* A waiting sequence does not wait for slow clients: neither for their pages
 * nor for their seats.  But they are not disturbed where it does not help. */
static void
test_parked_give_way(void **state)
{
    rig_t rig = rig_create(6, 96, 2);
    seq_t a, b, c, d;

    (void) state;
    rig_add(&rig, &a, 32, 96);
    rig_add(&rig, &b, 32, 96);
    rig_step(&rig, 2);
    a.parked = true;
    rig_add(&rig, &c, 5 * 16, 96);
    rig_step(&rig, 0);
    assert_int_equal(a.state, SEQ_RUNNING); /* 2 free + 2 parked < 5 */

    b.parked = true;
    rig_step(&rig, 1); /* both have to go: a seat and three pages */
    expect_row(&rig, 0, &c, 0, 80);
    assert_int_equal(a.state, SEQ_WAITING);
    assert_int_equal(b.state, SEQ_WAITING);

    /* a seat alone: c keeps its pages, nobody has to go for the free one */
    rig_add(&rig, &d, 1, 96);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &d, 0, 1);
    assert_int_equal(c.state, SEQ_RUNNING);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_drop(&rig, &d);
    rig_destroy(&rig);
}


/* Victims of both kinds stand in the queue by age. */
static void
test_victims_in_order(void **state)
{
    rig_t rig = rig_create(6, 96, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 32, 96);
    rig_add(&rig, &b, 32, 96);
    rig_add(&rig, &c, 32, 96);
    rig_step(&rig, 3);

    b.parked = true;
    a.n_tokens += 33; /* three more pages */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 32, 33);
    assert_int_equal(sched_preemptions(rig.sched), 2);

    b.parked = false;
    rig_drop(&rig, &a);
    rig_step(&rig, 2);
    expect_row(&rig, 0, &b, 0, 32);
    expect_row(&rig, 1, &c, 0, 32);

    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* A long prompt does not shut out short ones behind it, and what they leave is
 * its own. */
static void
test_long_prompt_shares(void **state)
{
    rig_t rig = rig_create(1000, 100, 8);
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 1000, 2000);
    rig_step(&rig, 1); /* alone: all of it */
    expect_row(&rig, 0, &a, 0, 100);

    rig_add(&rig, &b, 30, 100);
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 100, 70);
    expect_row(&rig, 1, &b, 0, 30);

    /* decodes ask for one token and count for nothing */
    b.n_tokens++;
    rig_add(&rig, &c, 300, 1000);
    rig_step(&rig, 3);
    expect_row(&rig, 0, &a, 170, 50);
    expect_row(&rig, 1, &b, 30, 1);
    expect_row(&rig, 2, &c, 0, 49);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* With many at once a share is not cut below a quarter, nor below the
 * threshold. */
static void
test_share_of_many(void **state)
{
    static const int first[3] = { 25, 60, 100 };
    static const int thresholds[3] = { 0, 60, 1000 };

    (void) state;

    for (int k = 0; k < 3; k++) {
        rig_t rig = { .pool = kv_pool_create(1000) };
        seq_t s[10];

        rig.sched =
            sched_create(&(sched_conf_t){ .max_tokens = 100,
                                          .max_seqs = 20,
                                          .long_prefill = thresholds[k] },
                         rig.pool);
        assert_non_null(rig.sched);

        for (int i = 0; i < 10; i++) {
            rig_add(&rig, &s[i], 200, 300);
        }

        rig_step(&rig, (99 + first[k]) / first[k]);
        expect_row(&rig, 0, &s[0], 0, first[k]);

        for (int i = 0; i < 10; i++) {
            rig_drop(&rig, &s[i]);
        }

        rig_destroy(&rig);
    }
}


/* Without chunks a prompt waits until the step has room for all of it. */
static void
test_whole_prompts(void **state)
{
    rig_t rig = { .pool = kv_pool_create(100) };
    seq_t a, b, c;

    (void) state;
    rig.sched = sched_create(&(sched_conf_t){ .max_tokens = 100,
                                              .max_seqs = 8,
                                              .whole_prompts = true },
                             rig.pool);
    assert_non_null(rig.sched);
    rig_add(&rig, &a, 60, 200);
    rig_add(&rig, &b, 99, 200);
    rig_add(&rig, &c, 20, 200);

    rig_step(&rig, 1); /* b does not fit beside a, and c may not overtake */
    expect_row(&rig, 0, &a, 0, 60);

    a.n_tokens++;
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 60, 1);
    expect_row(&rig, 1, &b, 0, 99);

    a.n_tokens++;
    b.n_tokens++;
    rig_step(&rig, 3);
    expect_row(&rig, 2, &c, 0, 20);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* More seats than tokens would let a decode go without. */
static void
test_seats_within_budget(void **state)
{
    rig_t rig = rig_create(10, 2, 50);
    seq_t s[3];

    (void) state;

    for (int i = 0; i < 3; i++) {
        rig_add(&rig, &s[i], 1, 16);
    }

    rig_step(&rig, 2);
    assert_int_equal(sched_running(rig.sched), 2);
    assert_int_equal(sched_waiting(rig.sched), 1);

    for (int i = 0; i < 3; i++) {
        rig_drop(&rig, &s[i]);
    }

    rig_destroy(&rig);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks_behind_decodes),
        cmocka_unit_test(test_chunk_before_decode),
        cmocka_unit_test(test_admission_in_order),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_no_admission_after_preemption),
        cmocka_unit_test(test_parked_give_pages),
        cmocka_unit_test(test_parked_give_way),
        cmocka_unit_test(test_victims_in_order),
        cmocka_unit_test(test_long_prompt_shares),
        cmocka_unit_test(test_share_of_many),
        cmocka_unit_test(test_whole_prompts),
        cmocka_unit_test(test_seats_within_budget),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
