/*
 * What compares kernels' results: it finds one bit, and takes nothing that is
 * not finite, wherever it stands and whoever has it.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "t/ops/lib/attn_world.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/linear.h"

enum { N = 7 };

static const float odd[] = { NAN, -NAN, INFINITY, -INFINITY };

static float want[N], got[N];


static void
start(void)
{
    for (int i = 0; i < N; i++) {
        want[i] = got[i] = (float) i - 2.5f;
    }
}


static void
test_equal(void **state)
{
    (void) state;
    start();
    assert_int_equal(compare_bits(want, got, N), N);
    assert_int_equal(compare_near(want, got, N, 0.0), N);
    assert_true(compare_most(want, got, N) == 0.0);
    assert_true(compare_rms(want, got, N) == 0.0);

    assert_int_equal(compare_bits(want, got, 0), 0);
    assert_true(compare_most(want, got, 0) == 0.0);
    /* nothing to be relative to */
    memset(want, 0, sizeof(want));
    assert_true(compare_rms(want, want, N) == INFINITY);
}


static void
test_differences(void **state)
{
    (void) state;

    for (int i = 0; i < N; i++) {
        start();
        got[i] = nextafterf(got[i], 100.0f);
        assert_int_equal(compare_bits(want, got, N), i);
        assert_int_equal(compare_near(want, got, N, 0.0), i);
        assert_int_equal(compare_near(want, got, N, 1e-6), N);
        assert_true(compare_most(want, got, N) > 0.0);
        assert_true(compare_rms(want, got, N) > 0.0);
        got[i] = want[i] + 1.0f;
        assert_int_equal(compare_near(want, got, N, 1e-2), i);
        assert_true(compare_most(want, got, N) == 1.0);
    }

    start();
    want[3] = 0.0f;
    got[3] = -0.0f;
    assert_int_equal(compare_bits(want, got, N), 3);
    assert_int_equal(compare_near(want, got, N, 0.0), N);
}


/* who 1: the oracle has it; 2: the kernel; 3: both, the same bits. */
static void
spoil(int at, int who, float value)
{
    start();

    if (who & 1) {
        want[at] = value;
    }
    if (who & 2) {
        got[at] = value;
    }
}


static void
use_check_same(void **state)
{
    (void) state;
    check_same(want, got, N, "test", OP_F32);
}


static void
use_same_floats(void **state)
{
    (void) state;
    assert_same_floats(want, got, N, "test");
}


static void
use_near_floats(void **state)
{
    (void) state;
    assert_near_floats(want, got, N, 1e30);
}


static void
use_worlds(void **state)
{
    const world_t a = { .width = 1, .len = { N }, .out = { want } };
    const world_t b = { .width = 1, .len = { N }, .out = { got } };

    (void) state;
    world_assert_same(&a, &b, 1, "test");
}


/* Does the test fail?  In a process of its own, which says nothing. */
static int
fails(CMUnitTestFunction test)
{
    const pid_t pid = fork();
    int status;

    assert_true(pid >= 0);

    if (pid == 0) {
        const struct CMUnitTest tests[] = { cmocka_unit_test(test) };

        if (freopen("/dev/null", "w", stdout) == NULL
            || freopen("/dev/null", "w", stderr) == NULL)
        {
            _exit(9);
        }
        _exit(cmocka_run_group_tests(tests, NULL, NULL));
    }

    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) <= 1);

    return WEXITSTATUS(status);
}


static void
test_not_finite(void **state)
{
    (void) state;

    for (int i = 0; i < N * 3 * 4; i++) {
        const int at = i % N, who = i / N % 3 + 1;

        spoil(at, who, odd[i / N / 3]);
        assert_int_equal(compare_bits(want, got, N), at);
        assert_int_equal(compare_near(want, got, N, 1e30), at);
        assert_true(compare_most(want, got, N) == INFINITY);
        assert_true(compare_rms(want, got, N) == INFINITY);
    }
}


static void
test_asserts(void **state)
{
    static const CMUnitTestFunction uses[] = { use_check_same, use_same_floats,
                                               use_near_floats, use_worlds };

    (void) state;

    for (int k = 0; k < 4; k++) {
        start();
        assert_int_equal(fails(uses[k]), 0);

        for (int i = 0; i < 3 * 4; i++) {
            spoil(i % N, i % 3 + 1, odd[i / 3]);
            assert_int_equal(fails(uses[k]), 1);
        }
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal),
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_asserts),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
