/*
 * Tokens and log-probabilities drawn on the device (emulated, or with
 * TEST_CUDA=gpu a GPU's) against the host's sampler: the same bits, for rows
 * and parameters of all sorts, whatever the order in which threads run.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/draw.h"
#include "engine/sample/sampler.h"
#include "kernels/cuda/cuda_ops.h"
#include "t/shim/options.h"
#include "t/unit/random.h"

enum { ROWS = 5, FIRST = 3, N_MAX = 49152, ADJUSTS = 4096, LIST = 40 };

/* not there with TEST_CUDA=gpu */
#pragma weak shim_options
#pragma weak shim_fail_at

/* One row, as both sides are told it. */
typedef struct {
    float x[N_MAX];
    bool score;
    int32_t token;
    samp_params_t params;
    samp_bias_t bias[LIST];
    int32_t masked[LIST];
    samp_state_t *state;
    int n_output;
    uint64_t position;
} row_t;

static op_dev_t *dev;
static row_t rows[ROWS];
static random_t dice;


/* --- rows --- */

static float
strange(void)
{
    static const float values[] = { NAN,     -NAN,     INFINITY, -INFINITY,
                                    FLT_MAX, -FLT_MAX, FLT_MIN,  -0.0f,
                                    1e-45f,  1e30f,    -1e30f,   0.0f };

    return values[random_below(&dice, 12)];
}


static void
fill_logits(float *x, int n)
{
    const int kind = random_below(&dice, 9);
    const double spread = 0.1 + 10 * random_unit(&dice);

    for (int i = 0; i < n; i++) {
        double u =
            random_unit(&dice) + random_unit(&dice) + random_unit(&dice) - 1.5;

        x[i] = (float) (spread * u);

        if (kind == 1) {
            x[i] = rintf(x[i]); /* ties, zeros of both signs */
        } else if (kind == 2) {
            x[i] = x[i] > 0 ? x[i] : -INFINITY;
        } else if (kind == 3) {
            x[i] = 1.5f; /* flat */
        } else if (kind == 4) {
            x[i] = random_below(&dice, 3) == 0 ? strange() : x[i];
        } else if (kind == 5) {
            x[i] = random_below(&dice, 2) == 0 ? NAN : -INFINITY;
        } else if (kind == 6) {
            x[i] = (float) (u * 2e38); /* the whole range */
        } else if (kind == 7) {
            x[i] = random_below(&dice, 9) == 0 ? 3.0f : x[i] - 90;
        }
    }

    if (kind == 8) {
        x[random_below(&dice, n)] = 60; /* certain */
    }
}


static float
one_of(const float *values, int n)
{
    return values[random_below(&dice, n)];
}


static void
fill_params(samp_params_t *p, int n)
{
    static const float temperatures[] = { 1, 1, 0.7f, 0, 0.05f, 2.5f };
    static const float odd[] = { NAN, 0,     -1,   1e-45f,  1e-20f,
                                 2e9, 1e30f, 1.0f, INFINITY };

    *p = (samp_params_t){ .temperature = one_of(temperatures, 6),
                          .top_p = 1,
                          .repetition_penalty = 1,
                          .top_logprobs = random_below(&dice, 23) - 1,
                          .seed = random_next(&dice) };

    if (random_below(&dice, 2) == 0) {
        p->top_logprobs = -1;
    }
    if (random_below(&dice, 2) == 0) {
        p->top_k = random_below(&dice, 3) == 0 ? random_below(&dice, n + 2) - 1
                                               : random_below(&dice, 60);
    }
    if (random_below(&dice, 2) == 0) {
        p->top_p = (float) (1 - random_unit(&dice));
    }
    if (random_below(&dice, 3) == 0) {
        p->min_p = (float) pow(random_unit(&dice), 4);
    }
    if (random_below(&dice, 8) == 0) {
        p->temperature = one_of(odd, 9);
    }
    if (random_below(&dice, 12) == 0) {
        p->top_p = one_of(odd, 9);
        p->min_p = one_of(odd, 9);
    }
}


static int32_t
some_token(int n)
{
    return random_below(&dice, 9) == 0 ? random_below(&dice, 2 * n + 3) - 2
                                       : random_below(&dice, n);
}


/* Bias, some of it twice and of tokens that are not there; masks; penalties. */
static void
fill_adjusts(row_t *row, arena_t *arena, int n)
{
    samp_params_t *p = &row->params;
    static const float odd[] = { NAN, INFINITY, -INFINITY, 0, -100, 100 };

    row->n_output = random_below(&dice, 4);
    row->state = NULL;

    if (random_below(&dice, 2) == 0) {
        p->n_bias = random_below(&dice, LIST);
        p->bias = row->bias;
    }
    if (random_below(&dice, 2) == 0) {
        p->min_tokens = 2;
        p->n_masked = random_below(&dice, LIST);
        p->masked = row->masked;
    }

    for (int i = 0; i < LIST; i++) {
        row->masked[i] = some_token(n);
        row->bias[i] = (samp_bias_t){ some_token(n < 9 ? n : 9),
                                      (float) (random_unit(&dice) * 9 - 4) };

        if (random_below(&dice, 20) == 0) {
            row->bias[i].bias = one_of(odd, 6);
        }
    }

    if (random_below(&dice, 2) == 0) {
        return;
    }

    p->presence_penalty = (float) (random_unit(&dice) * 4 - 2);
    p->frequency_penalty = (float) (random_unit(&dice) * 4 - 2);
    p->repetition_penalty = random_below(&dice, 9) == 0
                                ? one_of(odd, 6)
                                : (float) (0.5 + 2 * random_unit(&dice));

    /* a tokenizer may know more than the model */
    row->state = samp_state_create(arena, p, n + random_below(&dice, 3));
    assert_non_null(row->state);

    for (int i = random_below(&dice, 200); i > 0; i--) {
        samp_state_add(row->state, some_token(n), random_below(&dice, 2) == 0);
    }
}


/* --- both sides --- */

static void
draw_rows(int n, op_draw_t *draws, op_drawn_t *drawn)
{
    static op_adjust_t adjusts[ADJUSTS];
    float *x = cuda_ops.alloc(dev, (size_t) ROWS * (size_t) n * sizeof(float));
    const size_t row_bytes = (size_t) n * sizeof(float);
    int at = 0;
    op_err_t err;

    assert_non_null(x);

    for (int i = 0; i < ROWS; i++) {
        const row_t *row = &rows[i];
        const samp_params_t *p = &row->params;

        /* rows of logits in another order than the draws */
        const int where = ROWS - 1 - i;

        cuda_ops.put(dev, x + (size_t) where * (size_t) n, row->x, row_bytes);

        if (row->score) {
            draws[i] = (op_draw_t){ .kind = OP_SCORE,
                                    .token = row->token,
                                    .n_top = p->top_logprobs };
        } else {
            const int more = draw_adjusts(p, row->state, row->n_output);

            assert_true(at + more <= ADJUSTS);
            draw_describe(p, row->state, row->n_output, row->position,
                          &draws[i], adjusts + at);
            draws[i].adjusts = at;
            at += more;
        }

        draws[i].row = where;
    }

    cuda_ops.draw(dev, &(op_draw_job_t){ .logits = x,
                                         .draws = draws,
                                         .n = ROWS,
                                         .adjusts = adjusts,
                                         .n_adjusts = at,
                                         .first = FIRST });
    cuda_ops.drawn(dev, drawn, FIRST, ROWS);

    if (cuda_ops.check(dev, &err) != 0) {
        fail_msg("%s", err.text);
    }

    cuda_ops.free(dev, x, (size_t) ROWS * (size_t) n * sizeof(float));
}


static void
same_bits(float got, float want)
{
    if (isnan(want)) {
        assert_true(isnan(got));
        return;
    }

    assert_memory_equal(&got, &want, sizeof(got));
}


static void
check_row(samp_t *samp, row_t *row, const op_drawn_t *drawn)
{
    samp_result_t want, got;

    draw_result(drawn, &got);

    if (row->score) {
        samp_score(samp, row->x, row->token, row->params.top_logprobs, &want);
    } else {
        samp_sample(samp, &row->params, row->state, row->x, row->n_output,
                    row->position, &want);
    }

    assert_int_equal(got.token, want.token);
    same_bits(got.logprob, want.logprob);
    assert_int_equal(got.n_top, want.n_top);

    for (int i = 0; i < want.n_top; i++) {
        assert_int_equal(got.top[i].token, want.top[i].token);
        same_bits(got.top[i].logprob, want.top[i].logprob);
    }
}


static void
run_round(int n, bool adjusted)
{
    op_draw_t draws[ROWS];
    op_drawn_t drawn[ROWS];
    const op_draw_limits_t limits = { .n_vocab = n,
                                      .max_rows = ROWS,
                                      .max_places = FIRST + ROWS,
                                      .max_adjusts = ADJUSTS };
    arena_t *arena = arena_create(1 << 16);
    samp_t *samp = samp_create(n);
    op_err_t err;

    assert_true(arena != NULL && samp != NULL);
    assert_int_equal(cuda_ops.draw_prepare(dev, &limits, &err), 0);
    memset(drawn, 0x55, sizeof(drawn));

    for (int i = 0; i < ROWS; i++) {
        row_t *row = &rows[i];

        fill_logits(row->x, n);
        fill_params(&row->params, n);
        row->score = random_below(&dice, 4) == 0;
        row->token = some_token(n);
        row->position = random_next(&dice);
        row->state = NULL;
        row->n_output = 0;

        if (adjusted) {
            fill_adjusts(row, arena, n);
        }
    }

    draw_rows(n, draws, drawn);

    for (int i = 0; i < ROWS; i++) {
        check_row(samp, &rows[i], &drawn[i]);
    }

    samp_destroy(samp);
    arena_destroy(arena);
}


/* --- tests --- */

/* Sizes about the block's threads and the list's length among them. */
static void
run_rounds(bool adjusted)
{
    static const int sizes[] = {
        1,   2,    3,    10,   63,   64,   300,  512,
        513, 1000, 1023, 1024, 1025, 2500, 5000, 9000
    };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    enum { ROUNDS = 40 };
#else
    enum { ROUNDS = 400 };
#endif

    for (int round = 0; round < ROUNDS; round++) {
        if (shim_options != NULL) {
            shim_options()->seed = (uint64_t) (round % 5);
        }

        run_round(round % 100 == 99 ? N_MAX : sizes[random_below(&dice, 16)],
                  adjusted);
    }
}


static void
test_draws(void **state)
{
    (void) state;
    dice = random_start("draws");
    run_rounds(false);
}


static void
test_adjusted(void **state)
{
    (void) state;
    dice = random_start("adjusted");
    run_rounds(true);
}


/* All goals of a flat row, where no bin fits the list: u and top_p walk through
 * the tokens in the order of their ids. */
static void
test_flat(void **state)
{
    enum { N = 4096 };
    const op_draw_limits_t limits = { .n_vocab = N,
                                      .max_rows = ROWS,
                                      .max_places = ROWS };
    float *x = cuda_ops.alloc(dev, N * sizeof(float));
    op_err_t err;

    (void) state;
    assert_non_null(x);
    assert_int_equal(cuda_ops.draw_prepare(dev, &limits, &err), 0);

    for (int i = 0; i < 64; i++) {
        const float share = (float) i / 64;
        const op_draw_t draw = { .kind = OP_DRAW,
                                 .n_top = -1,
                                 .top_k = N / 2,
                                 .top_p = 1,
                                 .temperature = 0.5f,
                                 .depth = -25,
                                 .u = share };
        op_drawn_t drawn;

        cuda_ops.draw(
            dev, &(op_draw_job_t){
                     .logits = x, .draws = &draw, .n = 1, .first = i % ROWS });
        cuda_ops.drawn(dev, &drawn, i % ROWS, 1);
        assert_int_equal(drawn.token, (int) (share * N / 2));
    }

    cuda_ops.free(dev, x, N * sizeof(float));
}


/* Tokens that are drawn, read by embed() from their places before the host has
 * seen them; and the draws' results, later. */
static void
test_places(void **state)
{
    enum { N = 64, N_IN = 32, PLACES = 12 };
    static float table[N * N_IN], got[PLACES * N_IN];
    static int32_t tokens[PLACES];
    const op_draw_limits_t limits = { .n_vocab = N,
                                      .max_rows = ROWS,
                                      .max_places = PLACES };
    const op_limits_t step = { .max_rows = PLACES,
                               .max_seqs = 1,
                               .max_len = PLACES,
                               .max_in = N_IN,
                               .n_heads = 1,
                               .n_kv_heads = 1,
                               .head_dim = 64 };
    const op_tensor_t part = { table, OP_F32, N_IN, N };
    op_err_t err;

    (void) state;
    assert_int_equal(cuda_ops.prepare(dev, &step, &err), 0);
    assert_int_equal(cuda_ops.draw_prepare(dev, &limits, &err), 0);

    float *x = cuda_ops.alloc(dev, N * sizeof(float)); /* all the same */
    float *y = cuda_ops.alloc(dev, sizeof(got));

    for (int i = 0; i < N * N_IN; i++) {
        table[i] = (float) i;
    }

    op_weight_t *w = cuda_ops.weight(dev, &part, 1, &err);

    assert_true(x != NULL && y != NULL && w != NULL);

    for (int i = 0; i < PLACES; i++) {
        const int place = i * 5 % PLACES;
        const op_draw_t draw = { .kind = OP_DRAW,
                                 .n_top = -1,
                                 .top_p = 1,
                                 .temperature = 1,
                                 .depth = -25,
                                 .u = (float) (i + 1) / (PLACES + 1) };

        cuda_ops.draw(
            dev, &(op_draw_job_t){
                     .logits = x, .draws = &draw, .n = 1, .first = place });
        tokens[i] = -1 - place;
    }

    tokens[3] = 7;
    cuda_ops.embed(dev, y, w, tokens, PLACES);
    cuda_ops.get(dev, got, y, sizeof(got));

    for (int i = 0; i < PLACES; i++) {
        op_drawn_t drawn;

        cuda_ops.drawn(dev, &drawn, i * 5 % PLACES, 1);
        assert_int_equal(drawn.token, (i + 1) * N / (PLACES + 1));

        const int32_t token = i == 3 ? 7 : drawn.token;

        assert_memory_equal(got + i * N_IN, table + token * N_IN,
                            N_IN * sizeof(float));
    }

    cuda_ops.weight_free(dev, w);
    cuda_ops.free(dev, x, N * sizeof(float));
    cuda_ops.free(dev, y, sizeof(got));
}


/* What is reserved is missing from the device's memory, where the engine looks
 * before it takes the rest for pages; and comes back. */
static void
test_memory(void **state)
{
    enum { MANY = 1 << 20 };
    const op_draw_limits_t small = { .n_vocab = 100,
                                     .max_rows = 1,
                                     .max_places = 1 };
    const op_draw_limits_t large = {
        .n_vocab = 100, .max_rows = 1, .max_places = 1, .max_adjusts = MANY
    };
    op_err_t err;

    (void) state;
    assert_int_equal(cuda_ops.draw_prepare(dev, &small, &err), 0);

    const size_t before = cuda_ops.memory(dev).free;

    assert_int_equal(cuda_ops.draw_prepare(dev, &large, &err), 0);
    assert_true(before - cuda_ops.memory(dev).free
                >= (MANY - 1000) * (sizeof(op_adjust_t) + sizeof(float)));
    assert_int_equal(cuda_ops.draw_prepare(dev, &small, &err), 0);
    assert_true(cuda_ops.memory(dev).free >= before);
}


/* No memory, one allocation after the other: it says so, and later it works. */
static void
test_no_memory(void **state)
{
    const op_draw_limits_t limits = {
        .n_vocab = 100, .max_rows = ROWS, .max_places = ROWS, .max_adjusts = 10
    };
    int failed = 0;

    (void) state;

    if (shim_options == NULL) {
        return;
    }

    for (int kind = SHIM_FAIL_MALLOC; kind <= SHIM_FAIL_HOST; kind++) {
        for (int n = 1;; n++) {
            op_err_t err = { .text = "" };

            shim_fail_at((shim_fail_t) kind, (uint64_t) n);

            const int rc = cuda_ops.draw_prepare(dev, &limits, &err);

            shim_fail_at((shim_fail_t) kind, 0);

            if (rc == 0) {
                break;
            }

            failed++;
            assert_true(n < 10);
            assert_non_null(
                strstr(err.text, kind == SHIM_FAIL_MALLOC
                                     ? "no memory on the GPU to draw"
                                     : "no pinned memory on the host to draw"));
        }
    }

    assert_int_equal(failed, 5);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_draws),
        cmocka_unit_test(test_adjusted), cmocka_unit_test(test_flat),
        cmocka_unit_test(test_places),   cmocka_unit_test(test_no_memory),
    };
    op_err_t err;

    dev = cuda_ops.open(&(op_open_t){ .device = 0 }, &err);

    if (dev == NULL) {
        printf("Bail out! %s\n", err.text);
        return 1;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    const int failed = cmocka_run_group_tests(tests, NULL, NULL);

    cuda_ops.close(dev);

    return failed;
}
