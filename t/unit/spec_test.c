/*
 * Look-up of drafts, and how many are worth their rows.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/spec/choose.h"
#include "engine/spec/lookup.h"
#include "t/unit/random.h"

#define COUNT(array) ((int) (sizeof(array) / sizeof((array)[0])))


/* --- in the sequence itself --- */

static void
expect_lookup(const int32_t *tokens, int n_tokens, int min, int max,
              const int32_t *draft, int n, int matched)
{
    int32_t got[SPEC_MAX];
    int length;

    assert_int_equal(spec_lookup(tokens, n_tokens, min, max, n, got, &length),
                     matched > 0 ? n : 0);
    assert_int_equal(length, matched);

    if (matched > 0) {
        assert_memory_equal(got, draft, (size_t) n * sizeof(int32_t));
    }
}


static void
test_lookup(void **state)
{
    /* 1 2 3 twice before, followed by 4 and by 5 */
    static const int32_t tokens[] = { 1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3 };
    static const int32_t after_three[] = { 4, 9, 2 };
    static const int32_t after_two[] = { 5, 8, 1, 2 };
    static const int32_t loop[] = { 7, 7, 7 };
    static const int32_t sevens[] = { 7, 7, 7, 7, 7 };

    (void) state;

    /* the longest, though it is not the latest */
    expect_lookup(tokens, COUNT(tokens), 1, 5, after_three, 3, 3);
    expect_lookup(tokens, COUNT(tokens), 3, 3, after_three, 1, 3);

    /* the latest, when more is not looked at */
    expect_lookup(tokens, COUNT(tokens), 1, 2, after_two, 4, 2);
    expect_lookup(tokens, COUNT(tokens), 4, 5, NULL, 3, 0);
    expect_lookup(tokens, 4, 1, 5, NULL, 3, 0);
    expect_lookup(tokens, 1, 1, 5, NULL, 3, 0);

    /* what follows is what is being written */
    expect_lookup(loop, COUNT(loop), 1, 5, sevens, 5, 2);
}


/* As plainly as can be. */
static int
naive_lookup(const int32_t *tokens, int n_tokens, int min, int max, int n,
             int32_t *draft, int *matched)
{
    for (int length = max; length >= min; length--) {
        for (int at = n_tokens - 1; at >= length; at--) {
            if (length > n_tokens
                || memcmp(tokens + at - length, tokens + n_tokens - length,
                          (size_t) length * sizeof(int32_t))
                       != 0)
            {
                continue;
            }

            for (int i = 0; i < n; i++) {
                draft[i] = at + i < n_tokens ? tokens[at + i]
                                             : draft[at + i - n_tokens];
            }

            *matched = length;
            return n;
        }
    }

    *matched = 0;
    return 0;
}


static void
test_lookup_like_naive(void **state)
{
    random_t random = random_start("look-up");
    int found = 0;

    (void) state;

    for (int round = 0; round < 20000; round++) {
        int32_t tokens[40], a[SPEC_MAX] = { 0 }, b[SPEC_MAX] = { 0 };
        const int n_tokens = 1 + (int) random_below(&random, 40);
        const int min = 1 + (int) random_below(&random, 4);
        const int max = min + (int) random_below(&random, 6);
        const int n = 1 + (int) random_below(&random, SPEC_MAX);
        int m_a, m_b;

        for (int i = 0; i < n_tokens; i++) {
            tokens[i] = (int32_t) random_below(&random, 4);
        }

        assert_int_equal(spec_lookup(tokens, n_tokens, min, max, n, a, &m_a),
                         naive_lookup(tokens, n_tokens, min, max, n, b, &m_b));
        assert_int_equal(m_a, m_b);
        assert_memory_equal(a, b, sizeof(a));
        found += m_a > 0;
    }

    assert_true(found > 1000 && found < 20000);
}


/* --- in what was added --- */

static void
test_index(void **state)
{
    static const int32_t first[] = { 5, 1, 2, 3, 4, 6 };
    static const int32_t second[] = { 7, 1, 2, 3, 8 };
    static const int32_t like_first[] = { 9, 5, 1, 2, 3 };
    static const int32_t like_both[] = { 9, 9, 1, 2, 3 };
    static const int32_t end[] = { 3, 4, 6 };
    spec_index_t *index = spec_index_create(64);
    int32_t draft[SPEC_MAX];
    int matched;

    (void) state;
    assert_non_null(index);
    spec_index_add(index, 1, first, COUNT(first));
    spec_index_add(index, 1, second, COUNT(second));

    /* the longest match, to the end of its sequence */
    assert_int_equal(
        spec_index_lookup(index, 1, like_first, 5, 5, draft, &matched), 2);
    assert_int_equal(matched, 4);
    assert_int_equal(draft[0], 4);
    assert_int_equal(draft[1], 6);

    /* the latest of equal ones */
    assert_int_equal(
        spec_index_lookup(index, 1, like_both, 5, 5, draft, &matched), 1);
    assert_int_equal(matched, 3);
    assert_int_equal(draft[0], 8);

    /* nothing behind it; too short; somebody else's */
    assert_int_equal(spec_index_lookup(index, 1, end, 3, 5, draft, &matched),
                     0);
    assert_int_equal(spec_index_lookup(index, 1, end, 2, 5, draft, &matched),
                     0);
    assert_int_equal(
        spec_index_lookup(index, 2, like_first, 5, 5, draft, &matched), 0);

    spec_index_destroy(index);
}


/* Overwritten again and again, by sequences of all lengths: what it proposes
 * was added by the same owner, and follows a match. */
static void
test_index_wraps(void **state)
{
    enum { ADDED = 4000, LONGEST = 90 };
    static int32_t texts[ADDED][LONGEST];
    static int lengths[ADDED];
    random_t random = random_start("suffix index");
    spec_index_t *index = spec_index_create(256);
    int found = 0;

    (void) state;
    assert_non_null(index);

    for (int i = 0; i < ADDED; i++) {
        int32_t *text = texts[i];
        const uint64_t owner = (uint64_t) (i % 2);
        int32_t draft[SPEC_MAX];
        int matched;

        lengths[i] = (int) random_below(&random, LONGEST);
        if (random_below(&random, 50) == 0) {
            lengths[i] = LONGEST;
        }
        for (int k = 0; k < lengths[i]; k++) {
            text[k] = (int32_t) random_below(&random, 5) + 10 * (i % 2);
        }

        const int n = spec_index_lookup(index, owner, text, lengths[i], 5,
                                        draft, &matched);

        for (int k = 0; k < n; k++) {
            assert_int_equal(draft[k] / 10, i % 2);
        }
        if (n > 0) {
            assert_true(matched >= 3 && matched <= lengths[i]);
            found++;
        }

        spec_index_add(index, owner, text, lengths[i]);
    }

    assert_true(found > ADDED / 10);
    spec_index_destroy(index);
}


/* --- how many --- */

/* Steps that cost `flat` up to `rows` rows, then in proportion. */
static void
learn_cost(cost_t *cost, int rows, double flat, int most)
{
    memset(cost, 0, sizeof(*cost));

    for (int i = 0; i < 50; i++) {
        for (int n = 1; n <= most; n++) {
            cost_observe(cost, (cost_step_t){ .rows = n },
                         (uint64_t) (n <= rows ? flat : flat * n / rows));
        }
    }
}


static void
test_choose(void **state)
{
    spec_bid_t bids[4] = { { .right = 0.9, .most = 7 },
                           { .right = 0.5, .most = 15 },
                           { .right = 0.02, .most = 15 },
                           { .right = 0.9, .most = 1 } };
    cost_step_t step = { .rows = 4 };
    cost_t cost;

    (void) state;

    /* rows up to 32 cost nothing */
    learn_cost(&cost, 32, 1e6, 64);
    spec_choose(&cost, step, 100, bids, 4);
    assert_int_equal(bids[0].n, 7);
    assert_int_equal(bids[1].n, 4); /* 0.5^5 is not worth a row */
    assert_int_equal(bids[2].n, 0);
    assert_int_equal(bids[3].n, 1);

    /* the likeliest get what room there is */
    spec_choose(&cost, step, 3, bids, 4);
    assert_int_equal(bids[0].n, 2);
    assert_int_equal(bids[1].n, 0);
    assert_int_equal(bids[3].n, 1);

    /* bound by arithmetic: every row costs as much as a token */
    learn_cost(&cost, 1, 1e6, 64);
    spec_choose(&cost, step, 100, bids, 4);
    assert_int_equal(bids[0].n + bids[1].n + bids[2].n + bids[3].n, 0);

    /* drafts that cost more than they save */
    learn_cost(&cost, 32, 1e6, 64);
    for (int i = 0; i < 4; i++) {
        bids[i].ns = 1e6;
    }
    spec_choose(&cost, step, 100, bids, 4);
    assert_int_equal(bids[0].n + bids[1].n + bids[2].n + bids[3].n, 0);

    /* what was never tried is tried */
    learn_cost(&cost, 1, 1e6, 4);
    for (int i = 0; i < 4; i++) {
        bids[i].ns = 0;
    }
    spec_choose(&cost, step, 100, bids, 4);
    assert_true(bids[0].n == 7 && bids[3].n == 1);

    /* none before anything was measured */
    memset(&cost, 0, sizeof(cost));
    spec_choose(&cost, step, 6, bids, 4);
    assert_int_equal(bids[0].n + bids[1].n + bids[2].n + bids[3].n, 0);

    /* a gain that noise could be */
    learn_cost(&cost, 64, 1e6, 64);
    step.rows = 30;
    bids[0] = (spec_bid_t){ .right = 0.99, .most = 1 };
    spec_choose(&cost, step, 6, bids, 1);
    assert_int_equal(bids[0].n, 0);
}


static void
test_learning(void **state)
{
    spec_prior_t prior;
    spec_track_t good = { 0 }, bad = { 0 }, fresh = { 0 };

    (void) state;
    spec_prior_init(&prior);

    const double start = spec_right(&prior, &fresh);

    for (int i = 0; i < 30; i++) {
        spec_learn(&prior, &good, 3, 3);
    }
    assert_true(spec_right(&prior, &good) > 0.95);
    assert_true(spec_right(&prior, &fresh) > start);

    for (int i = 0; i < 60; i++) {
        spec_learn(&prior, &bad, 3, 0);
    }
    assert_true(spec_right(&prior, &bad) < 0.05);
    assert_true(spec_right(&prior, &fresh) < start);
    assert_true(spec_right(&prior, &good) > 0.95);

    /* the first wrong one says nothing about those behind it */
    spec_track_t half = { .right = 0.5 };
    spec_learn(&prior, &half, 15, 0);
    assert_true(spec_right(&prior, &half) > 0.4);

    /* another chance after a while */
    for (int i = 0; i < 40; i++) {
        spec_pass(&bad);
    }
    assert_true(spec_right(&prior, &bad) > 0.2);
    spec_learn(&prior, &bad, 1, 0);
    assert_true(spec_right(&prior, &bad) < 0.05);
}


/* Drafts that do not pay are given up and tried again; those that pay go on. */
static void
test_trial(void **state)
{
    spec_trial_t trial = { 0 };
    int n = 0;

    (void) state;

    while (!spec_allowed(&trial)) {
        spec_tried(&trial, 0, 100);
        n++;
    }
    assert_in_range(n, 4, 16);

    for (int i = 0; i < 1000; i++) {
        assert_true(spec_allowed(&trial));
        spec_tried(&trial, 1, 50);
    }

    for (n = 0; spec_allowed(&trial); n++) {
        spec_tried(&trial, 1, 101);
    }
    assert_in_range(n, 8, 40);

    for (n = 0; !spec_allowed(&trial); n++) {
        spec_tried(&trial, 0, 100);
    }
    assert_in_range(n, 100, 200);

    /* one slow step is nobody's fault */
    for (int i = 0; i < 100; i++) {
        assert_true(spec_allowed(&trial));
        spec_tried(&trial, 1, i == 50 ? 5000 : 50);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookup), cmocka_unit_test(test_lookup_like_naive),
        cmocka_unit_test(test_index),  cmocka_unit_test(test_index_wraps),
        cmocka_unit_test(test_choose), cmocka_unit_test(test_learning),
        cmocka_unit_test(test_trial),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
