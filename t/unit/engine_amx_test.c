/*
 * A real engine with the matrix unit answers as one with AVX-512 does, bit for
 * bit: requests alone and all at once, prompts longer than a tile, in chunks
 * and whole.  On machines without the unit the twin of t/ops/twin is linked in
 * its place; without that, too, there is nothing to test.
 *
 * Needs LLM_TEST_MODEL.
 */

#include "t/unit/engine_answers.h"

#include "kernels/backend.h"

enum { N_REQUESTS = 6, MAX_LEN = 256 };

/* the twin's instructions so far, where it is linked */
__attribute__((weak)) uint64_t twin_products(void);

static const int lengths[N_REQUESTS] = { 3, 31, 32, 50, 70, 113 };


static request_t *
submit_one(engine_t *engine, int i)
{
    int32_t ids[MAX_LEN];

    for (int k = 0; k < lengths[i]; k++) {
        ids[k] = 1000 + i * 100 + k * 7;
    }

    return submit(engine,
                  &(order_t){ .kind = LLM_REQ_TOKENS,
                              .flags = LLM_F_IGNORE_EOS,
                              .prompt = ids,
                              .len = (size_t) lengths[i] * sizeof(int32_t),
                              .params = { .temperature = i % 2 ? 0.9f : 0.0f,
                                          .top_p = 1,
                                          .repetition_penalty = 1,
                                          .max_tokens = 8,
                                          .top_logprobs = TOP,
                                          .seed = 40 + (uint64_t) i } });
}


static void
run_all(const char *isa, const setup_t *setup, bool together, answer_t *answers)
{
    request_t *reqs[N_REQUESTS];

    setenv("LLM_ISA", isa, 1);

    engine_t *engine = open_engine(setup);

    for (int i = 0; i < N_REQUESTS; i++) {
        reqs[i] = submit_one(engine, i);

        if (!together) {
            finish(engine, reqs[i], &answers[i]);
        }
    }

    run(engine);

    for (int i = 0; i < N_REQUESTS && together; i++) {
        take_answer(reqs[i], &answers[i]);
    }

    close_idle(engine);
}


static void
test_same_answers(void **state)
{
    static answer_t want[N_REQUESTS], got[N_REQUESTS];
    static const int budgets[] = { 512, 48 };
    setup_t setup = {
        .chunked = true, .budget = 512, .max_len = MAX_LEN, .dtype = OP_F16
    };

    (void) state;
    run_all("avx512", &setup, false, want);

    for (int i = 0; i < N_REQUESTS; i++) {
        assert_int_equal(want[i].n, 8);
    }

    for (int b = 0; b < 2; b++) {
        const uint64_t before = twin_products != NULL ? twin_products() : 0;

        setup.budget = budgets[b];
        run_all("amx", &setup, b > 0, got);
        assert_true(twin_products == NULL || twin_products() > before);

        for (int i = 0; i < N_REQUESTS; i++) {
            same_answer(&want[i], &got[i], i, &setup);
        }
    }
}


static bool
can_open(const char *isa, op_err_t *err)
{
    const op_open_t how = { .threads = 1, .isa = isa };
    const op_table_t *cpu = backend_find("cpu");
    op_dev_t *dev = cpu->open(&how, err);

    cpu->close(dev);

    return dev != NULL;
}


int
main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_same_answers) };
    op_err_t err;

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    if (!can_open("amx", &err)) {
        printf("1..0 # SKIP %s\n", err.text);

        /* the twin needs no more than AVX-512 */
        return twin_products != NULL && can_open("avx512", &err);
    }

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
