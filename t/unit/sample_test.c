/*
 * Sampling against plain double-precision formulas: generator, exp and log,
 * greedy choice, the penalties, log-probabilities.  Draws are tested in
 * sample_draw_test.c.  With --bench: times per row.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/sample/logits.h"
#include "engine/sample/math.h"
#include "engine/sample/rng.h"
#include "engine/sample/sampler.h"
#include "t/unit/random.h"

enum { N_VOCAB = 49152 };

static const samp_params_t greedy = {
    .temperature = 0, .top_p = 1, .repetition_penalty = 1, .top_logprobs = -1
};


static float
random_normal(random_t *random)
{
    const double r = sqrt(-2 * log(1 - random_unit(random)));

    return (float) (r * cos(6.283185307179586 * random_unit(random)));
}


/* Samples from a copy, so that the caller's logits stay. */
static samp_result_t
sample(samp_t *samp, const samp_params_t *params, const float *logits, int n,
       uint64_t position)
{
    static float row[N_VOCAB];
    samp_result_t result;

    memcpy(row, logits, (size_t) n * sizeof(float));
    samp_sample(samp, params, NULL, row, 0, position, &result);

    return result;
}


/* --- numbers --- */


static void
philox(uint32_t counter, uint32_t key, const uint32_t want[4])
{
    const uint32_t c[4] = { counter, counter, counter, counter };
    const uint32_t k[2] = { key, key };
    uint32_t out[4];

    rng_philox(c, k, out);
    assert_memory_equal(out, want, sizeof(out));
}


/* Known answers published with Random123. */
static void
test_philox(void **state)
{
    const uint32_t zeros[4] = { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c,
                                0x9b00dbd8 };
    const uint32_t ones[4] = { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd };
    const uint32_t pi[4] = { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 };
    const uint32_t c[4] = { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 };
    const uint32_t k[2] = { 0xa4093822, 0x299f31d0 };
    uint32_t out[4];

    (void) state;
    philox(0, 0, zeros);
    philox(0xffffffff, 0xffffffff, ones);
    rng_philox(c, k, out);
    assert_memory_equal(out, pi, sizeof(out));
}


static void
test_uniform(void **state)
{
    double sum = 0, sum2 = 0;

    (void) state;
    assert_true(rng_uniform(0, 0) == (float) 0x6627e8 / 16777216.0f);

    for (int i = 0; i < 100000; i++) {
        const float u = rng_uniform(42, (uint64_t) i);

        assert_true(u >= 0 && u < 1);
        sum += u;
        sum2 += (double) u * u;
    }

    /* five standard deviations of the means of u and u² */
    assert_true(fabs(sum / 1e5 - 1.0 / 2) < 5 * 0.2887 / 316.2);
    assert_true(fabs(sum2 / 1e5 - 1.0 / 3) < 5 * 0.2981 / 316.2);

    /* all 64 bits of both arguments count */
    assert_true(rng_uniform(1, 0) != rng_uniform(0, 1));
    assert_true(rng_uniform(1ULL << 32, 0) != rng_uniform(0, 0));
    assert_true(rng_uniform(0, 1ULL << 32) != rng_uniform(0, 0));
}


static void
test_exp_log(void **state)
{
    (void) state;

    for (float x = -86.9f; x < 0; x += 0.00037f) {
        const double want = exp((double) x);

        assert_true(fabs(math_exp(x) - want) <= 1.2e-7 * want);
    }

    assert_true(math_exp(0.0f) == 1.0f);
    assert_true(math_exp(-0.0f) == 1.0f);
    assert_true(math_exp(5.0f) == 1.0f);
    assert_true(math_exp(INFINITY) == 1.0f);
    assert_true(math_exp(-88.0f) == 0.0f);
    assert_true(math_exp(-INFINITY) == 0.0f);
    assert_true(math_exp(NAN) == 0.0f);

    for (double x = 1e-300; x < 1e300; x *= 1.0371) {
        const double want = log(x);

        assert_true(fabs(math_log(x) - want) <= 1e-15 * (1 + fabs(want)));
    }

    assert_true(math_log(1.0) == 0.0);
}


/* --- greedy --- */


static void
test_greedy(void **state)
{
    static float x[N_VOCAB];
    samp_t *samp = samp_create(N_VOCAB);
    random_t random = random_start("greedy");

    (void) state;
    assert_non_null(samp);

    for (int round = 0; round < 300; round++) {
        int want = 0;

        /* few different values, so that ties are the rule */
        for (int i = 0; i < N_VOCAB; i++) {
            x[i] = (float) random_below(&random, 2000) - 1000;
            want = x[i] > x[want] ? i : want;
        }

        const samp_result_t r = sample(samp, &greedy, x, N_VOCAB, 7);

        assert_int_equal(r.token, want);
        assert_int_equal(r.n_top, 0);
        assert_true(isnan(r.logprob));
    }

    samp_destroy(samp);
    samp_destroy(NULL);

    /* all sizes around the blocks; the largest in every place */
    for (int n = 1; n <= 130; n++) {
        samp = samp_create(n);

        for (int at = 0; at < n; at++) {
            for (int i = 0; i < n; i++) {
                x[i] = i == at ? -1.0f : -2.0f;
            }

            assert_int_equal(sample(samp, &greedy, x, n, 0).token, at);
        }

        samp_destroy(samp);
    }
}


/* --- adjustments --- */


static void
test_bias_and_mask(void **state)
{
    const samp_bias_t bias[] = {
        { 1, 5 }, { 3, -100 }, { 3, 1 }, { -1, 9 }, { 4, 9 }
    };
    const int32_t masked[] = { 2, 900, -5 };
    samp_params_t p = greedy;
    float x[4] = { 1, 2, 6.5f, 4 };

    (void) state;
    p.bias = bias;
    p.n_bias = 5;
    p.masked = masked;
    p.n_masked = 3;
    p.min_tokens = 2;

    logits_adjust(&p, NULL, x, 4, 2);
    assert_true(x[0] == 1 && x[1] == 7 && x[2] == 6.5f && x[3] == -95);
    logits_adjust(&p, NULL, x, 4, 1);
    assert_true(x[2] == -INFINITY && x[1] == 12);

    /* through the front door, with 0, 1 and 2 tokens put out */
    samp_t *samp = samp_create(4);
    samp_result_t r;

    p.n_bias = 0;

    for (int n = 0; n <= 2; n++) {
        float row[4] = { 1, 2, 6.5f, 4 };

        samp_sample(samp, &p, NULL, row, n, 0, &r);
        assert_int_equal(r.token, n < 2 ? 3 : 2);
    }

    samp_destroy(samp);
}


static void
test_penalties(void **state)
{
    arena_t *arena = arena_create(4096);
    samp_params_t p = greedy;
    float x[8] = { 3, -3, 3, -3, 0, 2, -2, 1 };

    (void) state;
    assert_false(samp_needs_state(&p));
    p.repetition_penalty = 1.25f;
    assert_true(samp_needs_state(&p));
    p.presence_penalty = 0.5f;
    p.frequency_penalty = 0.75f;

    samp_state_t *s = samp_state_create(arena, &p, 8);

    samp_state_add(s, 0, false);
    samp_state_add(s, 1, false);
    samp_state_add(s, 1, false);
    samp_state_add(s, 2, true);
    samp_state_add(s, 3, true);
    samp_state_add(s, 3, true);
    samp_state_add(s, 3, false);
    samp_state_add(s, 4, true);
    samp_state_add(s, 8, true);
    samp_state_add(s, -1, true);

    logits_adjust(&p, s, x, 8, 3);
    assert_true(x[0] == 3 / 1.25f);         /* prompt: repetition only */
    assert_true(x[1] == -3 * 1.25f);        /* twice in the prompt, once */
    assert_true(x[2] == 3 / 1.25f - 1.25f); /* output: all three */
    assert_true(x[3] == -3 * 1.25f - 2.0f); /* frequency by count */
    assert_true(x[4] == -1.25f);            /* zero stays zero */
    assert_true(x[5] == 2 && x[6] == -2 && x[7] == 1); /* not seen */

    /* presence without repetition looks at the output only */
    p = greedy;
    p.presence_penalty = -2;
    s = samp_state_create(arena, &p, 8);
    samp_state_add(s, 5, false);
    assert_false(logits_adjusts(&p, s, 0));
    samp_state_add(s, 6, true);
    assert_true(logits_adjusts(&p, s, 0));
    logits_adjust(&p, s, x, 8, 1);
    assert_true(x[5] == 2 && x[6] == 0);

    /* a model with fewer logits than the tokenizer has ids */
    logits_adjust(&p, s, x, 4, 1);
    assert_true(x[6] == 0);

    arena_destroy(arena);
}


static void
test_state_no_memory(void **state)
{
    arena_t *arena = arena_create(256);
    samp_params_t p = greedy;
    int failed = 0;

    (void) state;
    p.frequency_penalty = 1;

    for (int n = 1;; n++) {
        arena_fail_after(n);
        samp_state_t *s = samp_state_create(arena, &p, N_VOCAB);
        arena_fail_after(0);

        if (s != NULL) {
            samp_state_add(s, N_VOCAB - 1, true);
            break;
        }

        failed++;
        assert_true(n < 10);
    }

    assert_true(failed >= 2);
    arena_destroy(arena);
}


/* --- log-probabilities --- */


/* Compares with log-softmax in double and with a naive search of the top. */
static void
expect_logprobs(const samp_result_t *r, const float *x, int n, int n_top)
{
    static bool used[N_VOCAB];
    double sum = 0, max = -INFINITY;
    int n_real = 0;

    for (int i = 0; i < n; i++) {
        max = x[i] > max ? x[i] : max;
        n_real += x[i] > -INFINITY;
    }

    for (int i = 0; i < n; i++) {
        sum += x[i] > -INFINITY ? exp(x[i] - max) : 0;
    }

    assert_true(fabs(r->logprob - (x[r->token] - max - log(sum))) < 1e-5);
    assert_int_equal(r->n_top, n_top < n_real ? n_top : n_real);
    memset(used, 0, (size_t) n);

    for (int t = 0; t < r->n_top; t++) {
        int best = -1;

        for (int i = 0; i < n; i++) {
            if (!used[i] && x[i] > -INFINITY && (best < 0 || x[i] > x[best])) {
                best = i;
            }
        }

        used[best] = true;
        assert_int_equal(r->top[t].token, best);
        assert_true(fabs(r->top[t].logprob - (x[best] - max - log(sum)))
                    < 1e-5);
    }
}


static void
test_logprobs(void **state)
{
    static const int sizes[] = { 1, 3, 20, 64, 65, 1000, N_VOCAB };
    static float x[N_VOCAB];
    random_t random = random_start("logprobs");

    (void) state;

    for (int k = 0; k < 7; k++) {
        const int n = sizes[k];
        samp_t *samp = samp_create(n);

        for (int round = 0; round < 12; round++) {
            samp_params_t p = greedy;
            samp_result_t r;

            for (int i = 0; i < n; i++) {
                x[i] = 6 * random_normal(&random);
                x[i] = round % 3 == 1 ? rintf(x[i]) : x[i]; /* ties */
                x[i] = round % 3 == 2 && i % 3 ? -INFINITY : x[i];
            }

            p.top_logprobs = random_below(&random, 21);
            r = sample(samp, &p, x, n, 0);
            assert_true(r.n_top == 0 || r.top[0].token == r.token);
            expect_logprobs(&r, x, n, p.top_logprobs);

            samp_score(samp, x, 0, 20, &r);
            assert_int_equal(r.token, 0);
            expect_logprobs(&r, x, n, 20);
        }

        samp_destroy(samp);
    }
}


/* They are the model's, whatever was done to the logits afterwards. */
static void
test_logprobs_are_raw(void **state)
{
    const samp_bias_t bias[] = { { 0, 100 } };
    const float x[3] = { -4, 1, 2 };
    samp_params_t p = greedy;
    samp_t *samp = samp_create(3);

    (void) state;
    p.bias = bias;
    p.n_bias = 1;
    p.temperature = 0.5f;
    p.top_logprobs = 2;

    const samp_result_t r = sample(samp, &p, x, 3, 0);

    assert_int_equal(r.token, 0);
    expect_logprobs(&r, x, 3, 2);
    samp_destroy(samp);
}


static void
test_logprobs_extremes(void **state)
{
    float x[4] = { 0, -INFINITY, NAN, -20000 };
    samp_result_t r;
    samp_t *samp = samp_create(4);

    (void) state;
    samp_score(samp, x, 1, 4, &r);
    assert_true(r.logprob == -9999.0f);
    assert_int_equal(r.n_top, 2);
    assert_true(r.top[1].token == 3 && r.top[1].logprob == -9999.0f);
    samp_score(samp, x, 2, 0, &r);
    assert_true(r.logprob == -9999.0f && r.n_top == 0);
    samp_score(samp, x, 4, 0, &r);
    assert_true(isnan(r.logprob));
    samp_score(samp, x, -1, 99, &r);
    assert_true(isnan(r.logprob) && r.n_top == 2);

    x[1] = INFINITY;
    samp_score(samp, x, 1, 4, &r);
    assert_true(r.logprob == 0 && r.top[0].token == 1);

    for (int i = 0; i < 4; i++) {
        x[i] = NAN;
    }

    samp_score(samp, x, 1, 4, &r);
    assert_true(r.logprob == -9999.0f && r.n_top == 0);
    samp_destroy(samp);
}


/* --- times --- */


static void
bench_row(const char *name, const samp_params_t *p, float spread)
{
    static float x[N_VOCAB], row[N_VOCAB];
    samp_t *samp = samp_create(N_VOCAB);
    random_t random = { 1 };
    uint64_t best = UINT64_MAX, all = 0;

    for (int i = 0; i < N_VOCAB; i++) {
        x[i] = spread * random_normal(&random);
    }

    for (int i = 0; i < 500; i++) {
        samp_result_t r;

        memcpy(row, x, sizeof(x));

        const uint64_t start = clock_now_ns();

        samp_sample(samp, p, NULL, row, 0, (uint64_t) i, &r);

        const uint64_t ns = clock_now_ns() - start;

        best = ns < best ? ns : best;
        all += ns;
    }

    printf("# %-28s best %6.1f us, mean %6.1f us\n", name, (double) best / 1e3,
           (double) all / 500e3);
    samp_destroy(samp);
}


static void
bench(void)
{
    samp_params_t p = greedy;

    printf("# %d logits, standard deviation 3 (flat: 0.5)\n", N_VOCAB);
    bench_row("greedy", &p, 3);
    p.top_logprobs = 20;
    bench_row("greedy, 20 logprobs", &p, 3);
    p.top_logprobs = -1;
    p.temperature = 1;
    bench_row("temperature 1", &p, 3);
    bench_row("temperature 1, flat", &p, 0.5f);
    p.top_p = 0.95f;
    bench_row("top_p 0.95", &p, 3);
    bench_row("top_p 0.95, flat", &p, 0.5f);
    p.top_k = 40;
    bench_row("top_k 40, top_p 0.95", &p, 3);
    p.top_k = 0;
    p.min_p = 0.05f;
    bench_row("min_p 0.05, top_p 0.95", &p, 3);
}


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_exp_log),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_bias_and_mask),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_state_no_memory),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_logprobs_are_raw),
        cmocka_unit_test(test_logprobs_extremes),
    };

    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench();
        return 0;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
