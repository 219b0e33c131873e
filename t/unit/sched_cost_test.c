/*
 * The learned cost of a step: what it says before it knows anything, between
 * and beyond its points, what is certain of it, under noise; and the loop it is
 * made for, in which a simulated machine is kept below a multiple of its decode
 * step.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/cost.h"

/* Reading the weights takes 3 ms or more, a row 0.6 ms, and each token attended
 * to half a microsecond. */
static double
machine_ns(cost_step_t step)
{
    const double ns = 0.6e6 * step.rows;

    return (ns > 3e6 ? ns : 3e6) + 500 * step.attended;
}


static cost_step_t
rows(int n)
{
    return (cost_step_t){ .rows = n };
}


/* One that has its first step behind it, of which nothing may be seen. */
static cost_t
warm(void)
{
    cost_t cost = { 0 };

    cost_observe(&cost, (cost_step_t){ 3, 1e6 }, 77777);

    return cost;
}


static uint32_t
random_next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;

    return *state >> 8;
}


static void
expect_nothing(const cost_t *cost)
{
    for (int n = 1; n < 9000; n += 1 + n / 3) {
        assert_true(cost_ns(cost, rows(n)) == 0);
        assert_true(cost_least_ns(cost, rows(n)) == 0);
    }

    assert_true(cost_ns(cost, (cost_step_t){ 4096, 1e6 }) == 0);
    assert_true(cost_least_ns(cost, (cost_step_t){ 4096, 1e6 }) == 0);
    assert_int_equal(cost_extra(cost, rows(1), 100, 1e6, 500), 500);
    assert_int_equal(cost_extra(cost, rows(1), 100, 1e6, 0), 0);
}


static void
test_knows_nothing(void **state)
{
    const cost_t cost = { 0 };

    (void) state;
    expect_nothing(&cost);
}


/* It touches memory for the first time, and would be taken for the rule: the
 * next one counts, and it alone. */
static void
test_first_step(void **state)
{
    cost_t cost = { 0 };

    (void) state;
    cost_observe(&cost, (cost_step_t){ 4, 5000 }, 1000000);
    expect_nothing(&cost);

    cost_observe(&cost, rows(4), 1000);
    assert_true(cost_ns(&cost, rows(4)) == 1000);
    assert_true(cost_ns(&cost, (cost_step_t){ 4, 5000 }) == 1000);
}


static void
test_between_and_beyond(void **state)
{
    cost_t cost = warm();

    (void) state;
    cost_observe(&cost, rows(4), 4000);
    cost_observe(&cost, rows(100), 100000);

    assert_true(cost_ns(&cost, rows(1)) == 4000);
    assert_true(cost_ns(&cost, rows(4)) == 4000);
    assert_true(cost_ns(&cost, rows(52)) == 52000);
    assert_true(cost_ns(&cost, rows(100)) == 100000);
    assert_true(cost_ns(&cost, rows(300)) == 300000);

    /* 16 rows take 16000 */
    assert_int_equal(cost_extra(&cost, rows(8), 0, 16000, 1000), 8);
    assert_int_equal(cost_extra(&cost, rows(8), 0, 16000, 5), 5);
    assert_int_equal(cost_extra(&cost, rows(8), 0, 8000, 1000), 0);

    /* and what no row more than there are leaves, */
    assert_int_equal(cost_extra(&cost, rows(8), 0, 100, 1000), 0);

    /* beyond the last point too: 150 rows and 150 more */
    assert_int_equal(cost_extra(&cost, rows(150), 0, 300000, 1000), 150);
}


/* Every number of rows has a point, however large. */
static void
test_every_row_count(void **state)
{
    (void) state;

    for (int n = 1; n <= 1 << 20; n += 1 + n / 7) {
        cost_t cost = warm();

        cost_observe(&cost, rows(n), 1234);
        assert_true(cost_ns(&cost, rows(n)) == 1234);
        assert_true(cost_least_ns(&cost, rows(n)) == 1234);
    }
}


/* What is certain: rows that were never tried come for nothing. */
static void
test_least(void **state)
{
    cost_t cost = warm();

    (void) state;
    cost_observe(&cost, rows(4), 4000);
    cost_observe(&cost, rows(6), 6000);
    cost_observe(&cost, rows(100), 100000);

    /* where it was measured */
    assert_true(cost_least_ns(&cost, rows(4)) == 4000);
    assert_true(cost_least_ns(&cost, rows(6)) == 6000);
    assert_true(cost_least_ns(&cost, rows(100)) == 100000);

    /* beyond the last */
    assert_true(cost_least_ns(&cost, rows(101)) == 100000);
    assert_true(cost_least_ns(&cost, rows(1000)) == 100000);

    /* one row more, but not two */
    assert_true(cost_least_ns(&cost, rows(5)) == 4000);
    assert_true(cost_least_ns(&cost, rows(7)) == 6000);
    assert_true(cost_least_ns(&cost, rows(8)) == cost_ns(&cost, rows(8)));
    assert_true(cost_least_ns(&cost, rows(53)) == cost_ns(&cost, rows(53)));
    assert_true(cost_ns(&cost, rows(5)) == 5000);
    assert_true(cost_ns(&cost, rows(53)) == 53000);

    /* a row more that was measured takes what it took */
    cost_observe(&cost, rows(5), 5500);
    assert_true(cost_least_ns(&cost, rows(5)) == 5500);

    /* below the first */
    assert_true(cost_least_ns(&cost, rows(3)) == 0);
    assert_true(cost_ns(&cost, rows(3)) == 4000);
}


/* A point of several numbers of rows is theirs, however they were mixed. */
static void
test_least_of_a_cell(void **state)
{
    cost_t cost = warm();

    (void) state;
    cost_observe(&cost, rows(30), 1000);
    cost_observe(&cost, rows(32), 1000);

    for (int n = 28; n <= 40; n++) {
        assert_true(cost_least_ns(&cost, rows(n)) == 1000);
    }

    assert_true(cost_least_ns(&cost, rows(26)) == 0);
}


/* The long steps of prompts do not keep short ones from being tried. */
static void
test_least_after_prompts(void **state)
{
    cost_t cost = warm();

    (void) state;

    for (int i = 0; i < 20; i++) {
        cost_observe(&cost, rows(200), 1000000);
        cost_observe(&cost, rows(256), 1200000);
    }

    assert_true(cost_least_ns(&cost, rows(1)) == 0);
    cost_observe(&cost, rows(1), 9000);
    assert_true(cost_least_ns(&cost, rows(1)) == 9000);
    assert_true(cost_least_ns(&cost, rows(2)) == 9000);
    assert_true(cost_least_ns(&cost, rows(3)) > 9000);
}


/* A step that was held up once must not look like the rule; a machine that
 * became slower must be noticed. */
static void
test_noise(void **state)
{
    cost_t cost = warm();

    (void) state;

    for (int i = 0; i < 20; i++) {
        cost_observe(&cost, rows(8), 1000);
    }

    cost_observe(&cost, rows(8), 1000000);
    assert_true(cost_ns(&cost, rows(8)) < 1200);

    for (int i = 0; i < 60; i++) {
        cost_observe(&cost, rows(8), 3000);
    }

    assert_true(cost_ns(&cost, rows(8)) > 2900);
    assert_true(cost_ns(&cost, rows(8)) < 3001);
}


/* Rows and context are told apart when both vary. */
static void
test_slope(void **state)
{
    uint32_t random = 3;
    cost_t cost = { 0 };

    (void) state;

    for (int i = 0; i < 4000; i++) {
        const cost_step_t step = {
            .rows = 1 + (int) (random_next(&random) % 16),
            .attended = random_next(&random) % 20000,
        };

        cost_observe(&cost, step, (uint64_t) machine_ns(step));
    }

    assert_true(cost.slope > 490 && cost.slope < 510);

    for (int n = 1; n <= 16; n++) {
        const cost_step_t step = { n, 30000 };
        const double ratio = cost_ns(&cost, step) / machine_ns(step);

        assert_true(ratio > 0.95 && ratio < 1.05);
    }
}


/* A step of decodes, and one with a chunk of prefill beside them; the next one
 * for the model to learn from. */
static double
step_ns(cost_t *cost, cost_step_t step, uint32_t *random)
{
    const double ns =
        machine_ns(step) * (1 + (double) (random_next(random) % 100) / 1000);

    cost_observe(cost, step, (uint64_t) ns);

    return ns;
}


/* Decodes run; again and again a prompt of 4000 tokens comes and is cut by what
 * was learned.  From the second one on nearly all steps must stay below the
 * limit, though on average not far below. */
static void
keep_below(int decodes, uint32_t seed)
{
    uint32_t random = seed;
    cost_t cost = { 0 };

    for (int round = 0; round < 4; round++) {
        cost_step_t decode = { decodes, 100.0 * decodes };
        int done = 0, steps = 0, over = 0;
        double sum = 0;

        for (int i = 0; i < 100; i++) {
            step_ns(&cost, decode, &random);
            decode.attended += decodes;
        }

        while (done < 4000) {
            const int fit = cost_extra(&cost, decode, done,
                                       2 * cost_ns(&cost, decode), 2048);
            const int more = fit < 1             ? 1
                             : fit > 4000 - done ? 4000 - done
                                                 : fit;
            const cost_step_t with = {
                .rows = decodes + more,
                .attended = decode.attended + more * (done + more / 2.0),
            };
            const double ratio =
                step_ns(&cost, with, &random) / machine_ns(decode);

            over += ratio > 2.5;
            sum += ratio;
            steps++;
            done += more;
            decode.attended += decodes;
        }

        if (round > 0) {
            assert_true(over < steps / 20);
            assert_true(sum / steps > 1.5 && sum / steps < 2.2);
        }
    }
}


static void
test_loop(void **state)
{
    (void) state;

    for (uint32_t seed = 1; seed <= 20; seed++) {
        keep_below(8, seed);
        keep_below(64, seed);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_knows_nothing),
        cmocka_unit_test(test_first_step),
        cmocka_unit_test(test_between_and_beyond),
        cmocka_unit_test(test_every_row_count),
        cmocka_unit_test(test_least),
        cmocka_unit_test(test_least_of_a_cell),
        cmocka_unit_test(test_least_after_prompts),
        cmocka_unit_test(test_noise),
        cmocka_unit_test(test_slope),
        cmocka_unit_test(test_loop),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests_name("sched cost", tests, NULL, NULL);
}
