/*
 * An engine with F16 or BF16 weights on the emulated GPU: its answers do not
 * depend on who else asks, nor on whether cuBLAS is there; with deterministic
 * off they do, and are near the others.  And the memory that an engine takes
 * at its start is all it needs, at any utilization.
 */

#include <math.h>

#include "t/unit/engine_tiny.h"

#include "t/shim/options.h"

/* of the runtime: kernels that are loaded go with it */
int cudaDeviceReset(void);

enum { N_ASKED = 5, N_WANTED = 12, MAX_SCORES = 256 };

/* Tokens and log-probabilities of the prompt and of the answer. */
typedef struct {
    int n;
    int32_t token[MAX_SCORES];
    float logprob[MAX_SCORES];
} answer_t;

/* one of more than the 32 rows from which the emulated cuBLAS adds up in
 * another way */
static const char *const texts[N_ASKED] = {
    "a b c d",
    "the cat sat on the mat and then it went to where the other cats had been "
    "sitting since the early morning",
    "zz", "one two three four five six seven eight nine ten eleven twelve",
    "the cat sat on the mat and left"
};

static const char *const exact[] = { "device=cuda", "kv_cache_memory=1m",
                                     NULL };
static const char *const loose[] = { "device=cuda", "kv_cache_memory=1m",
                                     "deterministic=off", NULL };


static request_t *
submit(engine_t *engine, int i)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_LOGPROBS | LLM_F_STREAM | LLM_F_ECHO);

    a.params.temperature = i % 2 == 0 ? 0.0f : 1.0f;
    a.params.seed = 10 + (uint64_t) i;
    a.params.max_tokens = N_WANTED;
    a.params.min_tokens = N_WANTED;

    return ask_text(engine, &a, texts[i]);
}


static void
read_answer(const request_t *req, answer_t *answer)
{
    memset(answer, 0, sizeof(*answer));
    assert_true(req->finished);

    llm_record_t record;

    for (size_t pos = 0; next_record(req, &pos, &record);) {
        llm_logprob_t entry;
        uint32_t at = 0;

        while (record.type == LLM_REC_DELTA
               && llm_logprob_next(&record.u.delta, &at, &entry))
        {
            assert_true(answer->n < MAX_SCORES);
            answer->token[answer->n] = entry.chosen.token;
            answer->logprob[answer->n++] = entry.chosen.logprob;
        }
    }

    assert_true(answer->n > N_WANTED);
}


static void
run_alone(const char *const *words, int i, answer_t *answer)
{
    engine_t *engine = tiny_engine(words);
    request_t *req = submit(engine, i);

    run_all(engine);
    read_answer(req, answer);
    request_destroy(req);
    engine_close(engine);
}


/* All at once, each a step later than the one before. */
static void
run_together(const char *const *words, answer_t *answers)
{
    engine_t *engine = tiny_engine(words);
    request_t *reqs[N_ASKED];

    for (int i = 0; i < N_ASKED; i++) {
        reqs[i] = submit(engine, i);
        engine_step(engine);
    }

    run_all(engine);

    for (int i = 0; i < N_ASKED; i++) {
        read_answer(reqs[i], &answers[i]);
        request_destroy(reqs[i]);
    }

    engine_close(engine);
}


static void
test_exact(void **unused)
{
    static const op_dtype_t types[] = { OP_F16, OP_BF16, OP_F32 };
    static answer_t together[N_ASKED], alone, other;

    (void) unused;

    for (int k = 0; k < 3; k++) {
        const uint64_t products = shim_stats.products;

        tiny_dtype = types[k];
        run_together(exact, together);

        for (int i = 0; i < N_ASKED; i++) {
            run_alone(exact, i, &alone);
            assert_memory_equal(&alone, &together[i], sizeof(alone));
        }

        assert_int_equal(shim_stats.products, products);

        /* off, but there is no library */
        shim_options()->no_cublas = true;
        run_alone(loose, 1, &other);
        shim_options()->no_cublas = false;
        assert_memory_equal(&other, &together[1], sizeof(other));
        assert_int_equal(shim_stats.products, products);
    }

    tiny_dtype = OP_Q8_0;
}


/* Of the prompt of text 1, in several chunks and in one. */
static void
test_loose(void **unused)
{
    static const char *const chunks[] = { "device=cuda", "kv_cache_memory=1m",
                                          "deterministic=off",
                                          "max_num_batched_tokens=16", NULL };
    static const op_dtype_t types[] = { OP_F16, OP_BF16 };
    static answer_t want, got, other;

    (void) unused;

    for (int k = 0; k < 2; k++) {
        const uint64_t products = shim_stats.products;

        tiny_dtype = types[k];
        run_alone(exact, 1, &want);
        run_alone(loose, 1, &got);
        run_alone(chunks, 1, &other);
        assert_true(shim_stats.products > products);
        assert_int_equal(got.n, want.n);

        double most = 0.0;
        int n_different = 0;

        /* the first one has none */
        assert_true(isnan(got.logprob[0]) && isnan(want.logprob[0]));

        for (int i = 1; i < want.n - N_WANTED; i++) {
            assert_true(isfinite(got.logprob[i]) && isfinite(want.logprob[i]));
            most = fmax(most, fabs(got.logprob[i] - want.logprob[i]));
            n_different += got.logprob[i] != other.logprob[i];
        }

        print_message("# log-probabilities differ by %.4f at most, and in %d "
                      "of %d places with other chunks\n",
                      most, n_different, want.n - N_WANTED - 1);
        assert_true(most > 0.0 && most < 0.05);
        assert_true(n_different > 0);
    }

    tiny_dtype = OP_Q8_0;
}


/* As many launches as with quantised weights: norms and gates go with the
 * products of a row. */
static void
test_launches(void **unused)
{
    (void) unused;
    tiny_dtype = OP_BF16;

    engine_t *engine = tiny_engine(exact);
    request_t *req = submit(engine, 0);

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
    tiny_dtype = OP_Q8_0;
}


/* Quantised weights have nothing to be loose about. */
static void
test_quantised(void **unused)
{
    static answer_t want, got;
    const uint64_t products = shim_stats.products;

    (void) unused;
    run_alone(exact, 1, &want);
    run_alone(loose, 1, &got);
    assert_memory_equal(&want, &got, sizeof(want));
    assert_int_equal(shim_stats.products, products);

    /* nor has the CPU */
    static const char *const words[] = { "device=cpu", "kv_cache_memory=1m",
                                         "deterministic=off", NULL };
    static const char *const on[] = { "device=cpu", "kv_cache_memory=1m",
                                      NULL };

    tiny_dtype = OP_F16;
    run_alone(on, 1, &want);
    run_alone(words, 1, &got);
    tiny_dtype = OP_Q8_0;
    assert_memory_equal(&want, &got, sizeof(want));
}


/* Memory of the device that was free before and is not now. */
static size_t
taken(engine_t *engine, size_t before)
{
    return before - engine->ops->memory(engine->dev).free;
}


/* At a utilization of 1, too, kernels that are loaded when they are first
 * launched find room, and graphs when they are recorded; and nothing is asked
 * for after the start. */
static void
test_memory(void **unused)
{
    static const char *const shares[] = { "gpu_memory_utilization=0.95",
                                          "gpu_memory_utilization=1" };
    static const char *const modes[] = { "deterministic=on",
                                         "deterministic=off" };
    const size_t memory = shim_options()->memory;
    const size_t kernel = 512 << 10;

    (void) unused;
    tiny_dtype = OP_F16;
    shim_options()->memory = (size_t) 400 << 20;

    for (int i = 0; i < 4; i++) {
        const char *const words[] = { "device=cuda", shares[i / 2],
                                      modes[i % 2], NULL };
        request_t *reqs[N_ASKED];
        engine_t *engine = tiny_engine(words);
        const size_t before = engine->ops->memory(engine->dev).free;

        assert_true(before < memory / 10 * (i / 2 == 0 ? 6 : 5));
        const uint64_t graphs = shim_stats.graph_launches;

        shim_options()->kernel_memory = kernel;
        shim_options()->node_memory = kernel / 32;

        for (int k = 0; k < N_ASKED; k++) {
            reqs[k] = submit(engine, k);
            assert_true(engine_step(engine));
        }

        run_all(engine);
        shim_options()->kernel_memory = shim_options()->node_memory = 0;
        assert_false(engine->failed);
        print_message("# %d KiB free after the start, %d KiB taken since\n",
                      (int) (before >> 10),
                      (int) (taken(engine, before) >> 10));
        assert_int_equal(taken(engine, before) % (kernel / 32), 0);
        assert_true(shim_stats.graph_launches > graphs);

        for (int k = 0; k < N_ASKED; k++) {
            assert_true(reqs[k]->finished);
            request_destroy(reqs[k]);
        }

        engine_close(engine);
        cudaDeviceReset();
    }

    shim_options()->memory = memory;
    tiny_dtype = OP_Q8_0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),    cmocka_unit_test(test_exact),
        cmocka_unit_test(test_loose),     cmocka_unit_test(test_launches),
        cmocka_unit_test(test_quantised),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
