/*
 * Forks: of the page behind the shared ones a new sequence gets a copy, when a
 * running one has computed some of the same tokens in it.  By hand; the storms
 * of sched_prefix_test.c have the rest.
 */

#include "t/unit/sched_shared.h"


/* n > 1: one prefill, then one token each; the last page is copied. */
static void
test_choices(void **state)
{
    static const int lengths[] = { 100, 97, 96, 20, 16, 8 };

    (void) state;

    for (int k = 0; k < 6; k++) {
        const int n = lengths[k];
        rig_t rig;

        rig_create(&rig, 100, 200);

        for (int i = 0; i < 8; i++) {
            rig_add(&rig, i, n, n);
        }

        rig_step(&rig, 1);
        expect_row(&rig, 0, 0, 0, n);
        rig_step(&rig, 7);

        for (int i = 1; i < 8; i++) {
            expect_row(&rig, i - 1, i, n - 1, 1);
            assert_int_equal(rig.seq[i].cached, n - 1);

            if (n != 97) {
                expect_copy(&rig, i - 1, 0, i, (n - 1) / 16);
            }
        }

        assert_int_equal(rig.plan->n_copies, n == 97 ? 0 : 7);
        assert_int_equal(sched_hits(rig.sched)->hits, 7 * (n - 1));
        assert_int_equal(sched_hits(rig.sched)->forks, n == 97 ? 0 : 7);
        assert_int_equal(kv_pool_free_pages(rig.pool), 100 - (n - 1) / 16 - 8);
        rig_destroy(&rig, 8);
    }
}


/* A few tokens are computed sooner than waited for. */
static void
test_short_choices(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 100, 200);

    for (int i = 0; i < 8; i++) {
        rig_add(&rig, i, 7, 7);
    }

    rig_step(&rig, 8);
    assert_int_equal(rig.plan->n_copies, 0);
    rig_destroy(&rig, 8);
}


/* The leader ended with its first token, and its last page went with it: its
 * followers do not wait for one another. */
static void
test_leader_ends(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 100, 200);

    for (int i = 0; i < 8; i++) {
        rig_add(&rig, i, 110, 110);
    }

    rig_step(&rig, 1);
    rig_drop(&rig, 0);
    rig_step(&rig, 7);

    for (int i = 1; i < 8; i++) {
        expect_row(&rig, i - 1, i, 96, 14);
        rig_drop(&rig, i);
    }

    rig_destroy(&rig, 0);
}


/* Only rows of earlier steps are copied, from where most are the same, and
 * only within one salt. */
static void
test_fork_source(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 100, 24);
    rig_add(&rig, 0, 60, 32);
    rig_step(&rig, 1); /* 24 of 60 */
    rig_add(&rig, 1, 31, 29);

    /* 24 are there, 24 more in this step: not worth a wait */
    rig_step(&rig, 2);
    expect_row(&rig, 0, 0, 24, 17);
    expect_row(&rig, 1, 1, 24, 7);
    expect_copy(&rig, 0, 0, 1, 1);
    assert_int_equal(rig.seq[1].cached, 24);

    /* sequence 1 has more of its own text than 0 */
    rig_add(&rig, 2, 40, 29);
    memcpy(rig.tokens[2], rig.tokens[1], 31 * sizeof(int32_t));
    rig_step(&rig, 2);
    expect_row(&rig, 1, 2, 31, 9);
    expect_copy(&rig, 0, 1, 2, 1);

    /* other salts share nothing, nor does an echo take anything */
    rig_add(&rig, 3, 12, 12);
    rig.seq[3].root.low = 1;
    rig_add(&rig, 4, 12, 12);
    rig.seq[4].want_prompt = true;
    rig_step(&rig, 3);
    expect_row(&rig, 1, 3, 0, 12);
    expect_row(&rig, 2, 4, 0, 8);
    assert_int_equal(rig.plan->n_copies, 0);
    rig_destroy(&rig, 5);
}


/* The source is parked and loses its page to the very sequence that wanted a
 * copy of it: the rows are in place. */
static void
test_fork_in_place(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 5, 200);
    rig_add(&rig, 0, 28, 28);
    rig_add(&rig, 1, 40, 0);
    rig_step(&rig, 2);
    assert_int_equal(kv_pool_free_pages(rig.pool), 0);

    const int32_t page = rig.seq[0].table.pages[1];

    rig.seq[0].parked = true;
    rig_add(&rig, 2, 30, 28);
    rig_step(&rig, 1);
    assert_int_equal(rig.seq[0].state, SEQ_WAITING);
    expect_row(&rig, 0, 2, 28, 2);
    assert_int_equal(rig.seq[2].table.pages[1], page);
    assert_int_equal(rig.plan->n_copies, 0);
    assert_int_equal(sched_hits(rig.sched)->forks, 1);
    rig_destroy(&rig, 3);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_short_choices),
        cmocka_unit_test(test_leader_ends),
        cmocka_unit_test(test_fork_source),
        cmocka_unit_test(test_fork_in_place),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
