/*
 * An engine on the emulated GPU when things go wrong: no GPU that works, one
 * with too little memory, one that dies at work, one that two engines share;
 * and that a tiny model's answers do not depend on who else asks, nor on the
 * order of the GPU's threads.
 */

#include "t/unit/cuda_ask.h"

#include "t/shim/options.h"

/* of the runtime: errors that stay go with it */
int cudaDeviceReset(void);


static void
test_fallback(void **unused)
{
    static const char *const words[] = { "device=auto", "kv_cache_memory=1m",
                                         NULL };
    engine_t *engine = tiny_engine(words);

    (void) unused;
    assert_string_equal(engine->ops->name, "cuda");
    engine_close(engine);

    shim_options()->device = "none";
    engine = tiny_engine(words);
    shim_options()->device = "80";
    assert_string_equal(engine->ops->name, "cpu");
    engine_close(engine);
}


static void
refuse(const char *device, const char *memory, const char *says)
{
    llm_err_t err;

    refused(device, memory, &err);

    if (strstr(err.text, says) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, says);
    }
}


static void
test_refusals(void **unused)
{
    const size_t memory = shim_options()->memory;

    (void) unused;
    refuse("cuda:9", NULL, "no GPU 9");
    refuse("cuda:", NULL, "is no number of a GPU");
    refuse("tpu", NULL, "is not known");
    refuse("cuda", "kv_cache_memory=60g", "memory");

    shim_options()->device = "old";
    refuse("cuda", NULL, "update the driver");
    shim_options()->device = "80";

    shim_options()->memory = 1 << 20;
    refuse("cuda", NULL, "memory");
    shim_options()->memory = memory;
}


/* Nobody gets what a broken device computed, and the engine says so. */
static void
test_failure(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };

    (void) unused;

    for (uint64_t at = 1; at <= 200; at += 33) {
        engine_t *engine = tiny_engine(words);
        request_t *req = submit(engine, 1);
        int steps = 0;

        shim_fail_at(SHIM_FAIL_ASYNC, at);

        while (engine_step(engine)) {
            assert_true(++steps < 100);
        }

        shim_fail_at(SHIM_FAIL_ASYNC, 0);
        assert_true(engine->failed);
        assert_false(req->finished);
        assert_true(req->seq.n_tokens
                    <= req->seq.n_prompt + steps); /* not of the last step */
        engine_close(engine);
        cudaDeviceReset();
    }
}


static void
run_alone(int i, int budget, buf_t *out)
{
    char word[40];
    const char *const words[] = { "device=cuda", "kv_cache_memory=1m", word,
                                  NULL };

    snprintf(word, sizeof(word), "max_num_batched_tokens=%d", budget);

    engine_t *engine = tiny_engine(words);
    request_t *req = submit(engine, i);

    run_all(engine);
    answer_of(req, out);
    request_destroy(req);
    engine_close(engine);
}


/* All at once; each must answer as it did alone. */
static void
ask_together(const buf_t *want)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         "max_num_batched_tokens=24", NULL };
    engine_t *engine = tiny_engine(words);
    request_t *reqs[N_ASKED];

    for (int i = 0; i < N_ASKED; i++) {
        reqs[i] = submit(engine, i);
        engine_step(engine);
    }

    run_all(engine);

    for (int i = 0; i < N_ASKED; i++) {
        assert_answer(reqs[i], &want[i]);
    }

    engine_close(engine);
}


static void
test_exact(void **unused)
{
    shim_options_t *shim = shim_options();
    buf_t want[N_ASKED] = { { 0 } };

    (void) unused;

    for (int i = 0; i < N_ASKED; i++) {
        buf_t other = { 0 };

        run_alone(i, 64, &want[i]);
        run_alone(i, 16, &other);
        assert_memory_equal(other.data, want[i].data, N_WANTED * 8);
        buf_fini(&other);
    }

    /* threads and streams in any order, two workers, and device memory that
     * the host cannot touch */
    for (int seed = 0; seed <= 3; seed++) {
        shim->seed = (uint64_t) seed;
        shim->workers = 1 + seed % 2;
        shim->protect = seed == 2;
        ask_together(want);
    }

    shim->seed = 0;
    shim->workers = 1;
    shim->protect = false;

    for (int i = 0; i < N_ASKED; i++) {
        buf_fini(&want[i]);
    }
}


/* Two engines on one GPU: neither notices the other, and when one has gone the
 * GPU has its memory back. */
static void
test_two_engines(void **unused)
{
    static const char *const words[] = { "device=cuda:0", "kv_cache_memory=1m",
                                         NULL };
    buf_t want = { 0 };
    engine_t *engines[2];
    request_t *reqs[2];

    (void) unused;
    run_alone(1, 64, &want);
    engines[0] = tiny_engine(words);

    const op_table_t *ops = engines[0]->ops;
    const size_t before = ops->memory(engines[0]->dev).free;

    engines[1] = tiny_engine(words);
    assert_true(ops->memory(engines[0]->dev).free < before);

    for (int i = 0; i < 2; i++) {
        reqs[i] = submit(engines[i], 1);
    }

    for (bool busy = true; busy;) {
        busy = engine_step(engines[0]);
        busy |= engine_step(engines[1]);
    }

    for (int i = 0; i < 2; i++) {
        assert_answer(reqs[i], &want);
    }

    engine_close(engines[1]);
    assert_int_equal(ops->memory(engines[0]->dev).free, before);
    engine_close(engines[0]);
    buf_fini(&want);
}


/* Launches of a step of one row: embedding; for each layer products with what
 * they read (4), RoPE with the KV write, attention; picking rows (2), the last
 * norm, the logits, the draw. */
static void
test_launches(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };
    engine_t *engine = tiny_engine(words);
    request_t *req = submit(engine, 0);

    (void) unused;
    engine_step(engine);
    engine_step(engine);

    const uint64_t before = shim_stats.launches;
    const int n_layers = model_config(engine->model)->n_layers;

    engine_step(engine);
    print_message("# %d launches in a step of %d layers\n",
                  (int) (shim_stats.launches - before), n_layers);
    assert_true(shim_stats.launches - before <= 6 + 6 * (uint64_t) n_layers);
    run_all(engine);
    request_destroy(req);
    engine_close(engine);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fallback), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_exact),    cmocka_unit_test(test_two_engines),
        cmocka_unit_test(test_launches), cmocka_unit_test(test_failure),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
