/*
 * Draws against the definition in double precision: for every draw the very
 * token that inverse CDF over a sorted list of probabilities gives, then
 * frequencies, independence, and logits and parameters that make no sense.
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


/* --- the definition --- */

typedef struct {
    double x;
    int token;
} model_cand_t;

typedef struct {
    model_cand_t cand[N_VOCAB]; /* descending, ties by id */
    double weight[N_VOCAB];
    int n;
} model_t;


static int
model_compare(const void *a, const void *b)
{
    const model_cand_t *x = a, *y = b;

    if (x->x != y->x) {
        return x->x < y->x ? 1 : -1;
    }

    return x->token - y->token;
}


static void
model_fill(model_t *m, const float *x, int n, double temperature)
{
    m->n = n;

    for (int i = 0; i < n; i++) {
        m->cand[i] = (model_cand_t){ x[i], i };
    }

    qsort(m->cand, (size_t) n, sizeof(model_cand_t), model_compare);

    for (int i = 0; i < n; i++) {
        m->weight[i] = exp((m->cand[i].x - m->cand[0].x) / temperature);
    }
}


/* The definition, word for word: min_p, top_k, top_p over what is left, one
 * draw.  *kept: how many candidates were left. */
static int
model_draw(const model_t *m, const samp_params_t *p, double min_p, double top_p,
           double u)
{
    double total = 0, cum = 0;
    int n = 0;

    while (n < m->n && m->weight[n] >= min_p && (p->top_k <= 0 || n < p->top_k))
    {
        total += m->weight[n++];
    }

    if (p->top_p < 1) {
        int i = 0;

        for (; i < n - 1 && cum + m->weight[i] < top_p * total; i++) {
            cum += m->weight[i];
        }

        total = cum + m->weight[i];
        n = i + 1;
    }

    cum = 0;

    for (int i = 0; i < n - 1; i++) {
        cum += m->weight[i];

        if (cum > u * total) {
            return m->cand[i].token;
        }
    }

    return m->cand[n - 1].token;
}


/* Whether token is what the model draws; where a boundary is nearer than
 * rounding, either side is right. */
static bool
model_agrees(const model_t *m, const samp_params_t *p, double u, int token,
             int *exact)
{
    const double e = 1e-6;

    if (model_draw(m, p, p->min_p, p->top_p, u) == token) {
        (*exact)++;
        return true;
    }

    for (int i = 0; i < 8; i++) {
        const double min_p = p->min_p * (i & 1 ? 1 - e : 1 + e);
        const double top_p = p->top_p * (i & 2 ? 1 - e : 1 + e);

        if (model_draw(m, p, min_p, top_p, u + (i & 4 ? -e : e)) == token) {
            return true;
        }
    }

    return false;
}


static void
random_row(random_t *random, float *x, int n)
{
    const int kind = random_below(random, 5);
    const float spread = (float) (0.1 + 5 * random_unit(random));

    for (int i = 0; i < n; i++) {
        x[i] = spread * random_normal(random);

        if (kind == 1) {
            x[i] = rintf(x[i]); /* ties, and zeros of both signs */
        } else if (kind == 2) {
            x[i] = x[i] > 0 ? x[i] : -INFINITY; /* as a grammar would */
        } else if (kind == 3) {
            x[i] = 1.5f; /* flat */
        }
    }

    if (kind == 4) {
        x[random_below(random, n)] = 60; /* certain */
    }

    x[0] = x[0] > -INFINITY ? x[0] : 0;
}


static samp_params_t
random_params(random_t *random, int n)
{
    samp_params_t p = greedy;

    p.temperature = (float) (0.05 + 2 * random_unit(random));
    p.seed = random_next(random);

    if (random_below(random, 2)) {
        p.top_k = random_below(random, 3) ? 1 + random_below(random, 60)
                                          : random_below(random, n + 2);
    }

    if (random_below(random, 2)) {
        p.top_p = (float) (1 - random_unit(random));
    }

    if (random_below(random, 3) == 0) {
        p.min_p = (float) pow(random_unit(random), 4);
    }

    return p;
}


/* --- tests --- */


static void
test_draws(void **state)
{
    static const int sizes[] = { 1, 2, 10, 63, 64, 65, 300, 1000, 5000 };
    static float x[N_VOCAB];
    static model_t m;
    random_t random = random_start("draws");
    int exact = 0, draws = 0;

    (void) state;

    for (int round = 0; round < 700; round++) {
        const int n =
            round % 70 == 0 ? N_VOCAB : sizes[random_below(&random, 9)];
        const samp_params_t p = random_params(&random, n);
        samp_t *samp = samp_create(n);

        random_row(&random, x, n);
        model_fill(&m, x, n, p.temperature);

        for (int i = 0; i < 60; i++, draws++) {
            const uint64_t position = random_next(&random);
            const samp_result_t r = sample(samp, &p, x, n, position);
            const double u = rng_uniform(p.seed, position);

            assert_in_range(r.token, 0, n - 1);

            if (!model_agrees(&m, &p, u, r.token, &exact)) {
                fail_msg("round %d: n %d, temperature %g, top_k %d, top_p %g, "
                         "min_p %g, u %.9g: token %d",
                         round, n, p.temperature, p.top_k, p.top_p, p.min_p, u,
                         (int) r.token);
            }
        }

        samp_destroy(samp);
    }

    printf("# %d of %d draws exact, the rest within rounding\n", exact, draws);
    assert_true(exact > draws - draws / 500);
}


/* Where sums are exact, so are the boundaries: top_p 0.5 of four equal tokens
 * is two of them, a draw of exactly i/256 of 256 equal ones is token i, and
 * top_k takes the lowest ids of a tie. */
static void
test_boundaries(void **state)
{
    static float x[256];
    samp_params_t p = greedy;
    int hits = 0, seen = 0;

    (void) state;
    p.temperature = 1;
    p.top_p = 0.5f;

    samp_t *samp = samp_create(4);

    for (uint64_t i = 0; i < 1000; i++) {
        const int32_t token = sample(samp, &p, x, 4, i).token;

        assert_in_range(token, 0, 1);
        seen |= 1 << token;
    }

    assert_int_equal(seen, 3);
    samp_destroy(samp);
    samp = samp_create(256);
    p.top_p = 1;

    for (uint64_t i = 0; hits < 5; i++) {
        const float at = rng_uniform(p.seed, i) * 256;

        if (at == rintf(at) && at > 0) {
            assert_int_equal(sample(samp, &p, x, 256, i).token, (int) at);
            hits++;
        }
    }

    p.top_k = 100;

    for (uint64_t i = 0; i < 1000; i++) {
        const float u = rng_uniform(p.seed, i);

        assert_int_equal(sample(samp, &p, x, 256, i).token, (int) (u * 100));
    }

    samp_destroy(samp);
}


/* 100 000 positions: every candidate comes as often as it should, and nothing
 * else comes at all. */
static void
test_frequencies(void **state)
{
    enum { N = 40, DRAWS = 100000 };
    float x[N];
    static model_t m;
    int count[N] = { 0 };
    double total = 0, chi2 = 0;
    samp_params_t p = greedy;
    samp_t *samp = samp_create(N);
    random_t random = { 3 };

    (void) state;
    p.temperature = 0.8f;
    p.top_k = 25;
    p.top_p = 0.9f;
    p.seed = 12345;

    for (int i = 0; i < N; i++) {
        x[i] = random_normal(&random);
    }

    for (int i = 0; i < DRAWS; i++) {
        count[sample(samp, &p, x, N, (uint64_t) i).token]++;
    }

    model_fill(&m, x, N, p.temperature);

    for (int i = 0; i < p.top_k; i++) {
        total += m.weight[i];
    }

    double kept = 0;
    int n = 0;

    while (kept < 0.9 * total) {
        kept += m.weight[n++];
    }

    assert_in_range(n, 10, 24); /* both cuts are at work */

    for (int i = 0; i < N; i++) {
        const double want = DRAWS * m.weight[i] / kept;
        const int got = count[m.cand[i].token];

        if (i >= n) {
            assert_int_equal(got, 0);
            continue;
        }

        assert_true(fabs(got - want) < 5 * sqrt(want));
        chi2 += (got - want) * (got - want) / want;
    }

    /* n − 1 degrees of freedom, five standard deviations */
    assert_true(chi2 < n - 1 + 5 * sqrt(2.0 * (n - 1)));
    samp_destroy(samp);
}


/* A draw depends on seed, position and logits, and on nothing else. */
static void
test_independence(void **state)
{
    static float x[N_VOCAB], other[N_VOCAB];
    samp_t *a = samp_create(N_VOCAB);
    samp_t *b = samp_create(N_VOCAB);
    random_t random = { 9 };
    samp_params_t p = greedy;
    int by_seed = 0, by_position = 0;

    (void) state;
    p.temperature = 1.3f;
    p.top_p = 0.97f;

    for (int i = 0; i < N_VOCAB; i++) {
        x[i] = 2 * random_normal(&random);
        other[i] = 2 * random_normal(&random);
    }

    for (int i = 0; i < 30; i++) {
        samp_params_t q = p;
        const uint64_t position = random_next(&random);

        q.seed = random_next(&random);

        const int32_t token = sample(a, &q, x, N_VOCAB, position).token;

        for (int j = 0; j < i % 4; j++) {
            const samp_params_t noise = random_params(&random, N_VOCAB);

            sample(b, &noise, other, N_VOCAB, (uint64_t) j);
        }

        assert_int_equal(sample(b, &q, x, N_VOCAB, position).token, token);

        q.top_logprobs = 5;
        assert_int_equal(sample(b, &q, x, N_VOCAB, position).token, token);

        by_position += sample(a, &q, x, N_VOCAB, position + 1).token != token;
        q.seed++;
        by_seed += sample(a, &q, x, N_VOCAB, position).token != token;
    }

    assert_true(by_seed > 20 && by_position > 20);
    samp_destroy(a);
    samp_destroy(b);
}


/* --- bad logits --- */


static float
strange(random_t *random)
{
    static const float values[] = { NAN,     -NAN,     INFINITY, -INFINITY,
                                    FLT_MAX, -FLT_MAX, FLT_MIN,  -0.0f,
                                    1e-45f,  1e30f,    -1e30f,   0.0f };

    return values[random_below(random, 12)];
}


static void
test_strange_logits(void **state)
{
    static float x[1000];
    random_t random = random_start("strange logits");

    (void) state;

    for (int round = 0; round < 20000; round++) {
        const int n = 1 + random_below(&random, round % 10 ? 70 : 1000);
        const int odd = 1 + random_below(&random, 100);
        samp_params_t p = random_params(&random, n);
        samp_t *samp = samp_create(n);
        bool any = false;

        for (int i = 0; i < n; i++) {
            x[i] = random_below(&random, 100) < odd ? strange(&random)
                                                    : random_normal(&random);
            any |= x[i] > -INFINITY;
        }

        if (round % 7 == 0) {
            static const float odd_params[] = { NAN,  0,     -1,   1e-45f,
                                                2e9f, 1e30f, 1.0f, INFINITY };

            p.temperature = odd_params[random_below(&random, 8)];
            p.top_p = odd_params[random_below(&random, 8)];
            p.min_p = odd_params[random_below(&random, 8)];
            p.top_k = random_below(&random, 3) - 1;
        }

        p.top_logprobs = random_below(&random, 22) - 1;

        const samp_result_t r = sample(samp, &p, x, n, (uint64_t) round);

        assert_in_range(r.token, 0, n - 1);
        assert_true(!any || x[r.token] > -INFINITY); /* and no NaN */
        assert_true(p.top_logprobs < 0 || !isnan(r.logprob));
        assert_in_range(r.n_top, 0, 20);

        for (int i = 0; i < r.n_top; i++) {
            assert_true(isfinite(r.top[i].logprob));
            assert_true(x[r.top[i].token] > -INFINITY);
            assert_true(i == 0 || x[r.top[i].token] <= x[r.top[i - 1].token]);
        }

        samp_destroy(samp);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draws),
        cmocka_unit_test(test_boundaries),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_independence),
        cmocka_unit_test(test_strange_logits),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
