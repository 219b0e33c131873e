/*
 * The rate of the queue with a clock of our own: steady queues, idle stretches,
 * changes of pace, silence, and the bounds of what it says.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "engine/rate.h"

#define MS 1000000ull
#define SEC 1000000000ull


static void
nothing_known(void **state)
{
    rate_t rate = { 0 };

    (void) state;

    assert_int_equal(rate_wait_s(&rate, 0), 1);
    assert_int_equal(rate_wait_s(&rate, 1000), 1);

    /* an engine without a queue says nothing about one */
    for (uint64_t i = 1; i < 1000; i++) {
        rate_step(&rate, i * SEC, 5, 0);
        assert_int_equal(rate_wait_s(&rate, 1000), 1);
    }
}


/* One of the waiting is scheduled every `every` steps of `step` ns. */
static uint64_t
run(rate_t *rate, uint64_t now, uint64_t step, int every, int times)
{
    for (int i = 0; i < times * every; i++) {
        now += step;
        rate_step(rate, now, i % every == every - 1, 10);
    }

    return now;
}


static void
steady(void **state)
{
    rate_t rate = { 0 };

    (void) state;

    rate_step(&rate, SEC, 3, 10); /* these found no queue before them */
    assert_int_equal(rate_wait_s(&rate, 10), 1);

    /* 10 steps of 100 ms each: one a second */
    uint64_t now = run(&rate, SEC, 100 * MS, 10, 5);

    assert_int_equal(rate_wait_s(&rate, 1), 1);
    assert_in_range(rate_wait_s(&rate, 10), 10, 11);
    now = run(&rate, now, 100 * MS, 10, 100);
    assert_in_range(rate_wait_s(&rate, 10), 10, 11);
    assert_in_range(rate_wait_s(&rate, 100), 100, 101);
    assert_int_equal(rate_wait_s(&rate, 0), 1);

    /* four in one step count as four */
    for (int i = 0; i < 50; i++) {
        now += SEC;
        rate_step(&rate, now, 4, 10);
    }

    assert_in_range(rate_wait_s(&rate, 100), 25, 26);
}


static void
idle_between(void **state)
{
    rate_t rate = { 0 };

    (void) state;

    rate_step(&rate, SEC, 1, 10);
    uint64_t now = run(&rate, SEC, SEC, 2, 20); /* one in two seconds */

    assert_in_range(rate_wait_s(&rate, 10), 20, 21);

    /* an hour without a queue, in steps and in one sleep, changes nothing */
    rate_step(&rate, now + SEC, 0, 0);
    now += SEC;

    for (int i = 0; i < 100; i++) {
        now += 36 * SEC;
        rate_step(&rate, now, i % 2, 0);
    }

    assert_in_range(rate_wait_s(&rate, 10), 20, 21);
    now += 3600 * SEC;
    rate_step(&rate, now, 1, 5);
    assert_in_range(rate_wait_s(&rate, 10), 20, 21);
    run(&rate, now, SEC, 2, 20);
    assert_in_range(rate_wait_s(&rate, 10), 20, 21);
}


/* A new pace is found within some dozens, up and down, at any scale. */
static void
changes(void **state)
{
    static const uint64_t paces[] = { 10 * MS, 5 * SEC, 100 * MS, 50 * SEC,
                                      SEC };
    rate_t rate = { 0 };
    uint64_t now = SEC;

    (void) state;

    rate_step(&rate, now, 1, 10);

    for (size_t i = 0; i < sizeof(paces) / sizeof(paces[0]); i++) {
        now = run(&rate, now, paces[i], 1, 160);

        const double want = ceil((double) paces[i] * 10 / 1e9);

        assert_in_range(rate_wait_s(&rate, 10), (uint32_t) want,
                        (uint32_t) (want * 1.02) + 1);
    }
}


/* Nobody gets on: the wait grows, up to the bound, and falls again. */
static void
silence(void **state)
{
    rate_t rate = { 0 };
    uint32_t last = 1;

    (void) state;

    /* even before the first was scheduled */
    rate_step(&rate, SEC, 0, 3);
    rate_step(&rate, 11 * SEC, 0, 3);
    assert_int_equal(rate_wait_s(&rate, 3), 30);
    rate_step(&rate, 12 * SEC, 1, 3);
    assert_int_equal(rate_wait_s(&rate, 3), 33);

    uint64_t now = run(&rate, 12 * SEC, SEC, 1, 300);

    assert_in_range(rate_wait_s(&rate, 10), 10, 11);

    for (int i = 0; i < 2000; i++) {
        now += SEC;
        rate_step(&rate, now, 0, 10);
        assert_true(rate_wait_s(&rate, 10) >= last);
        last = rate_wait_s(&rate, 10);
    }

    assert_int_equal(last, RATE_WAIT_MAX_S);
    run(&rate, now, SEC, 1, 300);
    assert_in_range(rate_wait_s(&rate, 10), 10, 11);
}


static void
bounds(void **state)
{
    rate_t rate = { 0 };

    (void) state;

    rate_step(&rate, 0, 0, 1);
    rate_step(&rate, UINT64_MAX, 1, INT32_MAX);
    assert_int_equal(rate_wait_s(&rate, INT32_MAX), RATE_WAIT_MAX_S);

    /* a clock that stands still: all of them at once */
    rate = (rate_t){ 0 };

    for (int i = 0; i < 100; i++) {
        rate_step(&rate, SEC, INT32_MAX, 1);
    }

    assert_int_equal(rate_wait_s(&rate, INT32_MAX), 1);

    /* nor does one that goes back do harm */
    rate_step(&rate, 0, 1, 1);
    assert_int_equal(rate_wait_s(&rate, 1), 1);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_known), cmocka_unit_test(steady),
        cmocka_unit_test(idle_between),  cmocka_unit_test(changes),
        cmocka_unit_test(silence),       cmocka_unit_test(bounds),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
