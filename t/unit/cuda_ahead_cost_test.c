/*
 * How long steps take where some of their rows are computed ahead: what is
 * counted is at least what the device took, no time is counted for two steps,
 * and a step whose rows ahead were in vain counts as nothing.  And that nothing
 * is computed ahead of steps that will have drafts.
 */

#include "t/unit/engine_tiny.h"

#include "engine/base/clock.h"
#include "engine/runner.h"

enum {
    DEVICE_NS = 150000000,
    HOST_US = 120000,
    N_STEPS = 6,
    N_TOKENS = 60,
    N_PLACES = 64
};

/* A device that needs DEVICE_NS for what comes before a draw, and goes on while
 * the host does something else. */
static struct {
    op_table_t ops;
    const op_table_t *real;
    uint64_t free_at;            /* clock_now_ns() */
    uint64_t there_at[N_PLACES]; /* results that begin at this place */
} slow;


static void
slow_draw(op_dev_t *dev, const op_draw_job_t *job)
{
    const uint64_t now = clock_now_ns();

    slow.free_at = (slow.free_at > now ? slow.free_at : now) + DEVICE_NS;
    assert_in_range(job->first, 0, N_PLACES - 1);
    slow.there_at[job->first] = slow.free_at;
    slow.real->draw(dev, job);
}


static void
slow_drawn(op_dev_t *dev, op_drawn_t *results, int first, int n)
{
    while (clock_now_ns() < slow.there_at[first]) {
        usleep(100);
    }

    slow.real->drawn(dev, results, first, n);
}


static void
slow_down(engine_t *engine)
{
    memset(&slow, 0, sizeof(slow));
    slow.real = engine->ops;
    slow.ops = *engine->ops;
    slow.ops.draw = slow_draw;
    slow.ops.drawn = slow_drawn;
    engine->ops = &slow.ops;
}


static request_t *
submit(engine_t *engine, const char *text, int max_tokens)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_IGNORE_EOS);

    a.params.max_tokens = max_tokens;
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, text, strlen(text));

    request_t *req = ask_send(engine, &a);

    assert_non_null(req);

    return req;
}


/* What engine_step() learns of a step; the host has to do something first. */
static uint64_t
step_ns(engine_t *engine)
{
    usleep(HOST_US);

    const plan_t *plan = sched_step(engine->sched);

    assert_true(plan->n_rows > 0);

    return runner_step(engine, plan);
}


static void
test_times(void **no_ahead)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };

    tiny_ahead_after = *no_ahead != NULL ? -1 : 0;

    engine_t *engine = tiny_engine(words);
    request_t *reqs[] = { submit(engine, "the cat sat", 2 * N_STEPS),
                          submit(engine, "on the mat", 2 * N_STEPS) };
    const uint64_t start = clock_now_ns();
    uint64_t sum = 0;

    tiny_ahead_after = 0;
    slow_down(engine);

    for (int i = 0; i < N_STEPS; i++) {
        sum += step_ns(engine);
    }

    assert_in_range(sum, (uint64_t) N_STEPS * DEVICE_NS,
                    clock_now_ns() - start);
    assert_int_equal(llm_stats_get(&engine->stats->rows_ahead) == 0,
                     *no_ahead != NULL);

    /* all that decode go away, and a prompt comes: nobody knows how long it
     * waited for rows that nobody wants */
    for (int i = 0; i < 2; i++) {
        emit_abort(engine, reqs[i]);
        request_destroy(reqs[i]);
    }

    reqs[0] = submit(engine, "and then it left", 3);

    const uint64_t vain = step_ns(engine);

    assert_true(*no_ahead != NULL ? vain >= DEVICE_NS : vain == 0);
    assert_true(step_ns(engine) >= DEVICE_NS);

    engine->ops = slow.real;
    run_all(engine);
    request_destroy(reqs[0]);
    engine_close(engine);
}


/* A chunk of a prompt, of which nothing is drawn, takes its time, too. */
static void
test_chunk(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         "max_num_batched_tokens=8", NULL };
    engine_t *engine = tiny_engine(words);
    request_t *req =
        submit(engine, "the cat sat on the mat and then it left", 2);
    const uint64_t start = clock_now_ns();

    (void) unused;

    const uint64_t ns = step_ns(engine);

    assert_int_equal(engine->batch.op.n_out, 0);
    assert_true(ns > 0 && ns <= clock_now_ns() - start);
    run_all(engine);
    request_destroy(req);
    engine_close(engine);
}


/* --- drafts --- */

static int draft_every, n_asked;


static int
draft_sometimes(const int32_t *tokens, int n_tokens, int n, int32_t *draft)
{
    (void) n_tokens;
    n_asked++;

    if (n == 0 || draft_every == 0 || n_asked % draft_every != 0) {
        return 0;
    }

    draft[0] = tokens[0];

    return 1;
}


static int
rows_ahead(int every, int *in_vain)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         "speculative=ngram:9:9",
                                         "num_speculative_tokens=1", NULL };
    engine_t *engine = tiny_engine(words);
    request_t *req = submit(engine, "the cat sat", N_TOKENS);

    draft_every = every;
    n_asked = 0;
    engine->conf.test_drafter = draft_sometimes;
    engine->conf.n_drafters = 0; /* nobody else */
    run_all(engine);
    assert_int_equal(req->n_output, N_TOKENS);
    assert_int_equal(llm_stats_get(&engine->stats->spec_draft_tokens) == 0,
                     every == 0);

    const int n = (int) llm_stats_get(&engine->stats->rows_ahead);

    *in_vain = n - (int) llm_stats_get(&engine->stats->rows_ahead_used);
    request_destroy(req);
    engine_close(engine);

    return n;
}


/* Drafts come in runs: 16 steps without come first, so what they make vain is
 * one step in 17 at most. */
static void
test_drafts(void **unused)
{
    int in_vain;

    (void) unused;

    assert_int_equal(rows_ahead(0, &in_vain), N_TOKENS - 16);
    assert_int_equal(in_vain, 0);
    assert_int_equal(rows_ahead(5, &in_vain), 0);
    assert_true(rows_ahead(20, &in_vain) > 0);
    assert_in_range(in_vain, 1, N_TOKENS / 17);
}


int
main(void)
{
    static int no_ahead;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times),
        { "test_times without", test_times, NULL, NULL, &no_ahead },
        cmocka_unit_test(test_chunk),
        cmocka_unit_test(test_drafts),
    };

    log_open(NULL, LOG_EMERG);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
