/*
 * The scans over a row, at every width of vectors this machine has, against
 * what they are documented to do written plainly: equal to the last bit, sums
 * in any order.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/sample/cand.h"
#include "engine/sample/math.h"
#include "engine/sample/sampler.h"
#include "t/unit/random.h"

enum { N_MAX = 1500 };

static const float temperatures[] = { 1.0f, 0.7f, 0.05f, 2.5f, 1e-20f, 1e20f };


/* Logits of all sorts: sizes that matter, far below, and no numbers. */
static void
fill_row(random_t *random, float *x, int n)
{
    static const float odd[] = { NAN,   INFINITY, -INFINITY, FLT_MAX, -FLT_MAX,
                                 -0.0f, 0.0f,     FLT_MIN,   1e-45f };
    const int kind = random_below(random, 4);
    const int far = random_below(random, n);

    for (int i = 0; i < n; i++) {
        const double u = random_unit(random);

        x[i] = (float) (12 * u - 6 - (i > far ? 100 : 0));

        if (kind == 1 && random_below(random, 50) == 0) {
            x[i] = odd[random_below(random, sizeof(odd) / sizeof(odd[0]))];
        }

        if (kind == 2 && random_below(random, 3) == 0) {
            x[i] = odd[random_below(random, 3) == 0 ? 0 : 2];
        }
    }
}


/* In an order of its own each time: any order gives the same bits. */
static double
plain_sum(random_t *random, const math_row_t *row, float max, float temperature)
{
    static float weight[N_MAX];
    double sum = 0;

    for (int i = 0; i < row->n; i++) {
        const int j = random_below(random, i + 1);

        weight[i] = weight[j];
        weight[j] = math_weight((row->x[i] - max) / temperature);
    }

    for (int i = 0; i < row->n; i++) {
        sum += weight[i];
    }

    return sum;
}


static float
plain_max(const float *x, int from, int to)
{
    float max = -INFINITY;

    for (int i = from; i < to; i++) {
        max = x[i] > max ? x[i] : max;
    }

    return max;
}


static void
check_row(random_t *random, const float *x, int n, float temperature)
{
    float block[N_MAX / MATH_BLOCK + 2], weight[N_MAX + 1];
    const int n_blocks = (n + MATH_BLOCK - 1) / MATH_BLOCK;
    float max;

    block[n_blocks] = weight[n] = 7;
    max = math_block_max(x, n, block);
    assert_true(max == plain_max(x, 0, n));
    assert_true(block[n_blocks] == 7);

    for (int b = 0; b < n_blocks; b++) {
        const int end = (b + 1) * MATH_BLOCK;

        assert_true(block[b]
                    == plain_max(x, b * MATH_BLOCK, end < n ? end : n));
    }

    /* as the sampler does */
    max = max > -FLT_MAX ? max : -FLT_MAX;
    max = max < FLT_MAX ? max : FLT_MAX;

    const math_row_t row = { .x = x, .n = n, .block = block };
    const double sum = math_sum_exp(&row, max, temperature);
    const double want = plain_sum(random, &row, max, temperature);

    assert_memory_equal(&sum, &want, sizeof(sum));
    math_weights(weight, x, n, max, temperature);
    assert_true(weight[n] == 7);

    for (int i = 0; i < n; i++) {
        const float w = math_weight((x[i] - max) / temperature);

        assert_memory_equal(&weight[i], &w, sizeof(w));
    }
}


static void
test_widths(void **state)
{
    static float x[N_MAX];
    random_t random = random_start("widths");

    (void) state;

    for (int width = MATH_PLAIN; width < MATH_WIDTHS; width++) {
        if ((int) math_limit((math_width_t) width) != width) {
            continue; /* not this machine */
        }

        for (int round = 0; round < 600; round++) {
            const int n = 1 + random_below(&random, N_MAX);

            fill_row(&random, x, n);

            for (size_t t = 0; t < sizeof(temperatures) / sizeof(float); t++) {
                check_row(&random, x, n, temperatures[t]);
            }
        }
    }

    assert_int_equal(math_limit(MATH_PLAIN), MATH_PLAIN);

    const math_width_t best = math_limit(MATH_AVX512);

    assert_int_equal(math_width(), best);
}


static void
expect_weight(float x)
{
    /* the definition: to the grid, ties to even */
    const double want = nearbyint((double) math_exp(x) * 0x1p34) * 0x1p-34;

    assert_true((double) math_weight(x) == want);
}


/* Weights are on the grid, and none is lost above the floor of depths. */
static void
test_weights(void **state)
{
    random_t random = random_start("weights");

    (void) state;

    for (int i = 0; i < 2000000; i++) {
        expect_weight((float) (-26 * random_unit(&random)));
    }

    for (int i = 0; i < 1000; i++) {
        expect_weight((float) (-1e-6 * random_unit(&random)));
        expect_weight((float) (-100 * random_unit(&random)));
    }

    assert_true(math_weight(0.0f) == 1.0f);
    assert_true(math_weight(INFINITY) == 1.0f);
    assert_true(math_weight(NAN) == 0.0f);
    assert_true(math_weight(-INFINITY) == 0.0f);
    assert_true(math_weight(MATH_WEIGHT_FLOOR) == 0.0f);
    assert_true(math_weight(-24.2f) == 0x1p-34f);
    assert_true((double) MATH_WEIGHTS_MAX * 0x1p34 == 0x1p53);
}


/* The very row again with its tokens elsewhere, and so other blocks, lanes,
 * buckets: the same token is drawn, and the same log-probabilities. */
static void
test_shuffled(void **state)
{
    static float x[N_MAX], y[N_MAX];
    static int at[N_MAX];
    random_t random = random_start("shuffled");
    samp_t *samp = samp_create(N_MAX);

    (void) state;
    assert_non_null(samp);

    for (int round = 0; round < 3000; round++) {
        const samp_params_t params = {
            .temperature = temperatures[random_below(&random, 4)],
            .top_p = round % 3 == 0 ? 0.9f : 1.0f,
            .top_k = round % 5 == 0 ? 1 + random_below(&random, 200) : 0,
            .min_p = round % 7 == 0 ? 0.02f : 0.0f,
            .repetition_penalty = 1.0f,
            .top_logprobs = 5,
            .seed = (uint64_t) round,
        };
        samp_result_t want, got;

        for (int i = 0; i < N_MAX; i++) {
            const int j = random_below(&random, i + 1);

            at[i] = at[j];
            at[j] = i;
            /* no ties: their order is that of the ids */
            x[i] = (float) (0.01 * i - (i % 3 == 0 ? 12 : 0));
        }

        for (int i = 0; i < N_MAX; i++) {
            y[at[i]] = x[i];
        }

        samp_sample(samp, &params, NULL, x, 0, 9, &want);
        samp_sample(samp, &params, NULL, y, 0, 9, &got);
        assert_int_equal(got.token, at[want.token]);
        assert_memory_equal(&got.logprob, &want.logprob, sizeof(float));

        for (int i = 0; i < want.n_top; i++) {
            assert_int_equal(got.top[i].token, at[want.top[i].token]);
            assert_memory_equal(&got.top[i].logprob, &want.top[i].logprob,
                                sizeof(float));
        }
    }

    samp_destroy(samp);
}


/* Tokens and log-probabilities at every width. */
static void
test_samples(void **state)
{
    static float x[N_MAX], row[N_MAX];
    random_t random = random_start("samples");
    samp_t *samp = samp_create(N_MAX);

    (void) state;
    assert_non_null(samp);

    for (int round = 0; round < 2000; round++) {
        samp_params_t params = {
            .temperature = temperatures[random_below(&random, 4)],
            .top_p = round % 3 == 0 ? 0.9f : 1.0f,
            .top_k = round % 5 == 0 ? 1 + random_below(&random, 200) : 0,
            .min_p = round % 7 == 0 ? 0.02f : 0.0f,
            .repetition_penalty = 1.0f,
            .top_logprobs = round % 4 == 0 ? 5 : -1,
            .seed = (uint64_t) round,
        };
        samp_result_t want, got;

        fill_row(&random, x, N_MAX);

        for (int width = MATH_PLAIN; width < MATH_WIDTHS; width++) {
            memset(&got, 0, sizeof(got));
            math_limit((math_width_t) width);
            memcpy(row, x, sizeof(x));
            samp_sample(samp, &params, NULL, row, 0, 9, &got);
            want = width == MATH_PLAIN ? got : want;
            assert_memory_equal(&got, &want, sizeof(got));
        }
    }

    samp_destroy(samp);
}


/* The k-th largest block maximum, for every k. */
static void
test_bound(void **state)
{
    enum { BLOCKS = 40 };
    random_t random = random_start("bound");
    cand_set_t set;

    (void) state;
    assert_true(cand_init(&set, BLOCKS * MATH_BLOCK));

    for (int round = 0; round < 500; round++) {
        for (int b = 0; b < BLOCKS; b++) {
            const int pick = random_below(&random, 40);
            const double u = 40 * random_unit(&random) - 20;

            set.block[b] = pick == 0   ? -INFINITY
                           : pick == 1 ? FLT_MAX
                           : pick < 10 ? (float) (int) u
                                       : (float) u;
        }

        for (int k = 1; k <= BLOCKS; k++) {
            const float bound = cand_bound(&set, k);
            int above = 0, reach = 0;

            for (int b = 0; b < BLOCKS; b++) {
                above += set.block[b] > bound;
                reach += set.block[b] >= bound;
            }

            assert_true(above < k && reach >= k);
        }

        assert_true(cand_bound(&set, BLOCKS + 1) == -INFINITY);
    }

    cand_fini(&set);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights),  cmocka_unit_test(test_widths),
        cmocka_unit_test(test_shuffled), cmocka_unit_test(test_samples),
        cmocka_unit_test(test_bound),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
