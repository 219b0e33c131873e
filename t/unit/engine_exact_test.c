/*
 * Exactness: 32 different requests, each run alone, then all at once with
 * staggered starts, at token budgets 32, 256 and 2048, with 1 and 2 threads, on
 * each instruction set, and with so few pages that sequences are preempted.
 * Tokens and log-probabilities must be the same bit for bit, with a KV cache of
 * either type.
 *
 * Needs LLM_TEST_MODEL.  LLM_TEST_LONG runs the whole matrix; without it, the
 * corners.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "engine/emit.h"
#include "engine/engine.h"
#include "engine/intake.h"
#include "kernels/backend.h"

enum { N_REQUESTS = 32, N_TOKENS = 20, TOP = 3 };

/* what one request produced */
typedef struct {
    int n;
    int32_t token[N_TOKENS];
    float logprob[N_TOKENS];
    float top[N_TOKENS][TOP];
    uint32_t finish;
    char text[1024];
    size_t text_len;
} answer_t;

typedef struct {
    const char *isa;
    int threads;
    int budget;
    int max_seqs;
    const char *kv_memory; /* NULL: ample */
    int n_requests;
    bool skip_long;       /* leave the prompts of hundreds of tokens out */
    const char *kv_dtype; /* NULL: the default */
} setup_t;

static const char *const topics[] = {
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The three laws of motion are",
    "1 + 1 =",
    "Water boils at",
    "To make bread you need",
    "In 1969,",
    "The opposite of hot is",
    "A haiku about the sea:",
    "SELECT name FROM",
    "Dear Sir or Madam,",
    "List of primes: 2, 3, 5,",
    "The cat sat on",
    "Newton discovered",
    "Once there was a king who",
};

static uint8_t area[65536];


static bool
is_long(int i)
{
    return i % 8 == 5;
}


static bool
is_left_out(const setup_t *setup, int i)
{
    return i >= setup->n_requests || (setup->skip_long && is_long(i));
}


/* Request i: prompts of 3 … ~700 tokens, greedy and sampled, with and without
 * penalties and stop strings. */
static uint32_t
write_request(int i)
{
    static char prompt[16384];
    llm_request_writer_t w;
    uint32_t flags = LLM_F_LOGPROBS | LLM_F_STREAM | LLM_F_ADD_SPECIAL;

    llm_params_t params = {
        .temperature = i % 3 == 0 ? 0.0f : 0.7f + 0.02f * (float) i,
        .top_p = i % 4 == 1 ? 0.9f : 1.0f,
        .min_p = i % 5 == 2 ? 0.05f : 0.0f,
        .top_k = i % 4 == 2 ? 40 : 0,
        .repetition_penalty = i % 6 == 3 ? 1.2f : 1.0f,
        .presence_penalty = i % 7 == 4 ? 0.5f : 0.0f,
        .frequency_penalty = i % 7 == 5 ? 0.3f : 0.0f,
        .max_tokens = 4 + i * 7 % (N_TOKENS - 3),
        .min_tokens = i % 8 == 7 ? 4 : 0,
        .top_logprobs = TOP,
        .seed = 1000 + (uint64_t) i,
    };

    const char *topic = topics[i % 16];
    size_t n = 0;

    /* some long prompts, so that chunks and pages matter */
    const int repeat = is_long(i) ? 60 : i % 4 == 3 ? 11 : 1;

    for (int k = 0; k < repeat; k++) {
        n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s %d. ",
                               topics[(i + k) % 16], k);
    }

    n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s", topic);

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, flags, &params);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, prompt, n);

    if (i % 9 == 8) {
        const uint32_t len = 2;
        llm_request_section(&w, LLM_SEC_STOP);
        llm_request_add(&w, &len, sizeof(len));
        llm_request_add(&w, ". ", 2);
    }

    return llm_request_end(&w);
}


static void
read_answer(request_t *req, answer_t *answer)
{
    memset(answer, 0, sizeof(*answer));

    for (size_t pos = 0; pos < req->out.len;) {
        llm_record_t record;
        llm_logprob_t entry;
        uint32_t len, at = 0;

        memcpy(&len, req->out.data + pos, sizeof(len));
        assert_int_equal(
            llm_record_decode((uint8_t *) req->out.data + pos + sizeof(len),
                              len, &record),
            0);
        pos += sizeof(len) + len;

        if (record.type == LLM_REC_DONE) {
            answer->finish = record.u.done.finish;
        }

        assert_int_not_equal(record.type, LLM_REC_ERROR);

        if (record.type != LLM_REC_DELTA) {
            continue;
        }

        const llm_delta_t *d = &record.u.delta;

        assert_true(answer->text_len + d->text_len < sizeof(answer->text));
        memcpy(answer->text + answer->text_len, d->text, d->text_len);
        answer->text_len += d->text_len;

        while (llm_logprob_next(d, &at, &entry)) {
            assert_true(answer->n < N_TOKENS);
            answer->token[answer->n] = entry.chosen.token;
            answer->logprob[answer->n] = entry.chosen.logprob;
            assert_int_equal(entry.n_top, TOP);

            for (int t = 0; t < TOP; t++) {
                answer->top[answer->n][t] = entry.top[t].logprob;
            }

            answer->n++;
        }
    }
}


static engine_t *
open_engine(const setup_t *setup)
{
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;
    char memory[64];

    engine_conf_init(&conf);
    conf.model = getenv("LLM_TEST_MODEL");
    conf.isa = setup->isa;
    conf.threads = setup->threads;
    conf.max_num_batched_tokens = setup->budget;
    conf.max_num_seqs = setup->max_seqs;
    conf.max_model_len = setup->skip_long ? 128 : 1024;
    conf.log_level = LOG_WARN;

    if (setup->kv_memory != NULL) {
        conf.output_ratio = -1; /* or few would be preempted */
        snprintf(memory, sizeof(memory), "kv_cache_memory=%s",
                 setup->kv_memory);
        assert_int_equal(engine_conf_set(&conf, memory, &err), LLM_OK);
    }

    if (setup->kv_dtype != NULL) {
        snprintf(memory, sizeof(memory), "kv_cache_dtype=%s", setup->kv_dtype);
        assert_int_equal(engine_conf_set(&conf, memory, &err), LLM_OK);
    }

    if (engine_open(&conf, &engine, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return engine;
}


static request_t *
submit(engine_t *engine, int i)
{
    const request_origin_t from = { .submit_ns = 1 };
    request_t *req = intake_request(engine, area, write_request(i), &from);

    assert_non_null(req);
    return req;
}


/* No sequence holds more pages than its tokens need. */
static void
check_pages(engine_t *engine)
{
    for (list_t *l = engine->requests.next; l != &engine->requests; l = l->next)
    {
        const request_t *req = list_entry(l, request_t, link);

        assert_true(req->seq.table.n
                    <= (req->seq.n_tokens + KV_PAGE - 1) / KV_PAGE);
    }

    sched_check(engine->sched);
}


static void
run_alone(const setup_t *setup, answer_t *answers)
{
    engine_t *engine = open_engine(setup);

    for (int i = 0; i < N_REQUESTS; i++) {
        if (is_left_out(setup, i)) {
            continue;
        }

        request_t *req = submit(engine, i);

        while (!req->finished) {
            assert_true(engine_step(engine));
        }

        read_answer(req, &answers[i]);
        request_destroy(req);
        assert_int_equal(kv_pool_free_pages(engine->pool),
                         kv_pool_pages(engine->pool));
    }

    engine_close(engine);
}


/* All at once; request i enters after i % 5 more steps. */
static uint64_t
run_storm(const setup_t *setup, answer_t *answers)
{
    engine_t *engine = open_engine(setup);
    request_t *reqs[N_REQUESTS];

    for (int i = 0; i < N_REQUESTS; i++) {
        if (is_left_out(setup, i)) {
            continue;
        }

        reqs[i] = submit(engine, i);

        for (int k = 0; k < i % 5; k++) {
            engine_step(engine);
            check_pages(engine);
        }
    }

    while (engine_step(engine)) {
        check_pages(engine);
    }

    for (int i = 0; i < N_REQUESTS; i++) {
        if (is_left_out(setup, i)) {
            continue;
        }

        assert_true(reqs[i]->finished);
        read_answer(reqs[i], &answers[i]);
        request_destroy(reqs[i]);
    }

    const uint64_t preemptions = sched_preemptions(engine->sched);

    assert_int_equal(kv_pool_free_pages(engine->pool),
                     kv_pool_pages(engine->pool));
    engine_close(engine);

    return preemptions;
}


static void
compare(const setup_t *setup, const answer_t *a, const answer_t *b)
{
    for (int i = 0; i < N_REQUESTS; i++) {
        if (!is_left_out(setup, i)
            && memcmp(&a[i], &b[i], sizeof(answer_t)) != 0) {
            fail_msg("request %d differs: isa %s, threads %d, budget %d, kv "
                     "%s %s: \"%.*s\" and \"%.*s\"",
                     i, setup->isa, setup->threads, setup->budget,
                     setup->kv_memory ? setup->kv_memory : "ample",
                     setup->kv_dtype ? setup->kv_dtype : "f16",
                     (int) a[i].text_len, a[i].text, (int) b[i].text_len,
                     b[i].text);
        }
    }
}


static answer_t alone[N_REQUESTS], other[N_REQUESTS], alone_q8_0[N_REQUESTS];
static bool have_alone;
static bool whole_matrix;

static setup_t base_setup = {
    NULL, 2, 2048, 64, NULL, N_REQUESTS, false, NULL
};


static void
alone_once(void)
{
    if (!have_alone) {
        run_alone(&base_setup, alone);
        have_alone = true;

        for (int i = 0; i < N_REQUESTS; i++) {
            assert_true(is_left_out(&base_setup, i)
                        || (alone[i].n > 0
                            && (alone[i].finish == LLM_FINISH_STOP
                                || alone[i].finish == LLM_FINISH_LENGTH)));
        }
    }
}


static void
test_storms(void **state)
{
    static const int budgets[] = { 2048, 256, 64 };

    (void) state;
    alone_once();

    for (int b = 0; b < 3; b++) {
        for (int threads = 1; threads <= 2; threads++) {
            setup_t setup = base_setup;

            if (!whole_matrix && (b + threads) % 2 == 0) {
                continue;
            }

            setup.threads = threads;
            setup.budget = budgets[b];
            run_storm(&setup, other);
            compare(&setup, alone, other);
        }
    }
}


/* Budget 32 with 32 running sequences: prefill gets nothing until some end. */
static void
test_small_budget(void **state)
{
    setup_t setup = base_setup;

    (void) state;
    alone_once();
    setup.budget = 32;
    setup.max_seqs = 32;

    for (int threads = whole_matrix ? 1 : 2; threads <= 2; threads++) {
        setup.threads = threads;
        run_storm(&setup, other);
        compare(&setup, alone, other);
    }
}


static void
test_preemption(void **state)
{
    setup_t setup = base_setup;

    (void) state;
    alone_once();
    setup.kv_memory = "3000k"; /* 8 pages: 128 tokens for all */
    setup.skip_long = true;
    setup.budget = 256;

    const uint64_t preemptions = run_storm(&setup, other);

    print_message("# %u preemptions\n", (unsigned) preemptions);
    assert_true(preemptions > 0);
    compare(&setup, alone, other);
}


static void
test_instruction_sets(void **state)
{
    static const char *const isas[] = { "amx", "avx512", "avx2", "baseline" };

    (void) state;
    alone_once();

    for (int i = 0; i < 4; i++) {
        setup_t setup = base_setup;
        op_err_t op_err;
        const op_open_t how = { .threads = 1, .isa = isas[i] };
        const op_table_t *ops = backend_find("cpu");
        op_dev_t *dev = ops->open(&how, &op_err);

        if (dev == NULL) {
            print_message("# %s: %s\n", isas[i], op_err.text);
            continue;
        }

        ops->close(dev);
        setup.isa = isas[i];
        setup.budget = 256;

        /* the portable path is slow: fewer requests unless asked for all */
        if (i == 3 && !whole_matrix) {
            setup.n_requests = 5;
        }

        run_storm(&setup, other);
        compare(&setup, alone, other);
    }
}


/* of the requests that this run has */
static int
at_most(int n)
{
    return n < base_setup.n_requests ? n : base_setup.n_requests;
}


/* With a cache of q8_0 the answers are others, but as exact: a smaller matrix
 * of budgets, threads, instruction sets and preemption. */
static void
test_q8_0(void **state)
{
    static const struct {
        const char *isa;
        int threads;
        int budget;
        int max_seqs;
        const char *memory;
        int n_requests;
    } rows[] = {
        { NULL, 2, 256, 64, NULL, 20 },    { NULL, 1, 32, 32, NULL, 20 },
        { NULL, 2, 256, 64, "1550k", 20 }, /* 8 pages: 128 tokens for all */
        { "avx2", 1, 256, 64, NULL, 20 },  { "baseline", 2, 256, 64, NULL, 4 },
    };
    setup_t setup = base_setup;
    int same = 0;

    (void) state;
    alone_once();
    setup.kv_dtype = "q8_0";
    setup.n_requests = at_most(20);
    setup.skip_long = !whole_matrix;
    run_alone(&setup, alone_q8_0);

    for (int i = 0; i < setup.n_requests; i++) {
        same += !is_left_out(&setup, i)
                && memcmp(&alone[i], &alone_q8_0[i], sizeof(answer_t)) == 0;
    }
    assert_int_equal(same, 0); /* it is not f16 */

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        op_err_t op_err;
        const op_open_t how = { .threads = 1, .isa = rows[i].isa };
        op_dev_t *dev = backend_find("cpu")->open(&how, &op_err);

        if (dev == NULL) {
            print_message("# %s: %s\n", rows[i].isa, op_err.text);
            continue;
        }

        backend_find("cpu")->close(dev);
        setup.isa = rows[i].isa;
        setup.threads = rows[i].threads;
        setup.budget = rows[i].budget;
        setup.max_seqs = rows[i].max_seqs;
        setup.kv_memory = rows[i].memory;
        setup.n_requests = at_most(rows[i].n_requests);
        setup.skip_long = !whole_matrix || rows[i].memory != NULL;

        const uint64_t preemptions = run_storm(&setup, other);

        assert_true((preemptions > 0) == (rows[i].memory != NULL));
        compare(&setup, alone_q8_0, other);
    }
}


/* The same memory holds nearly twice the tokens. */
static void
test_q8_0_pages(void **state)
{
    setup_t setup = base_setup;
    int n_pages[2];

    (void) state;
    setup.kv_memory = "64m";

    for (int i = 0; i < 2; i++) {
        setup.kv_dtype = i == 0 ? "f16" : "q8_0";

        engine_t *engine = open_engine(&setup);

        n_pages[i] = kv_pool_pages(engine->pool);
        engine_close(engine);
    }

    /* 64 bytes of 32 values, or 34; 30 layers of 3 KV heads of 64 */
    assert_int_equal(n_pages[0], (64 << 20) / (30 * 3 * 16 * 2 * 64 / 32 * 64));
    assert_int_equal(n_pages[1], (64 << 20) / (30 * 3 * 16 * 2 * 64 / 32 * 34));
    assert_true(n_pages[1] > 1.87 * n_pages[0]);
}


static void
test_dtype_words(void **state)
{
    static const char *const bad[] = { "q4_0", "", "F16", "q8_0 ", "1" };
    engine_conf_t conf;
    llm_err_t err;
    char word[64];

    (void) state;
    engine_conf_init(&conf);
    assert_int_equal(conf.kv_cache_dtype, OP_F16);
    assert_int_equal(engine_conf_set(&conf, "kv_cache_dtype=q8_0", &err),
                     LLM_OK);
    assert_int_equal(conf.kv_cache_dtype, OP_Q8_0);

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(word, sizeof(word), "kv_cache_dtype=%s", bad[i]);
        assert_int_equal(engine_conf_set(&conf, word, &err), LLM_BADREQ);
        assert_non_null(strstr(err.text, word));
        assert_non_null(strstr(err.text, "use f16 or q8_0"));
        assert_int_equal(conf.kv_cache_dtype, OP_Q8_0);
    }

    assert_int_equal(engine_conf_set(&conf, "kv_cache_dtype=f16", &err),
                     LLM_OK);
    assert_int_equal(conf.kv_cache_dtype, OP_F16);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_storms),
        cmocka_unit_test(test_small_budget),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_instruction_sets),
        cmocka_unit_test(test_q8_0),
        cmocka_unit_test(test_q8_0_pages),
        cmocka_unit_test(test_dtype_words),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    whole_matrix = getenv("LLM_TEST_LONG") != NULL;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    /* twenty times slower: fewer requests, the same paths */
    whole_matrix = false;
    base_setup.n_requests = 8;
    base_setup.skip_long = true;
#endif

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
