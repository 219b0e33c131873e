/*
 * Prefix caching against no caching: requests with overlapping beginnings,
 * sampled in many ways, each run alone without a cache; then all together with
 * the cache on and off, prompts in chunks and whole, at several budgets, with
 * ample pages and with so few that sequences are preempted.  Tokens and
 * log-probabilities must be the same bit for bit, and hits must happen.
 *
 * Needs LLM_TEST_MODEL.  LLM_TEST_LONG runs the whole matrix.
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

enum { N_REQUESTS = 18, N_TOKENS = 48, TOP = 2, MAX_LEN = 320, FEW_LEN = 192 };

typedef struct {
    int n;
    int32_t token[N_TOKENS];
    float logprob[N_TOKENS];
    float top[N_TOKENS][TOP];
    uint32_t finish;
    uint32_t cached; /* not compared */
} answer_t;

typedef struct {
    bool caching;
    bool chunked;
    int budget;
    const char *kv_memory; /* NULL: ample */
} setup_t;

/* a page of SmolLM2-135M takes 360 KiB: 17 pages, the longest needs 12 */
static const char few_pages[] = "6m";

static const setup_t plain = { false, true, 512, NULL };
static const setup_t cached = { true, true, 512, NULL };

static uint8_t area[65536];
static bool whole_matrix;


static engine_t *
open_engine(const setup_t *setup)
{
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;
    char word[64];

    engine_conf_init(&conf);
    conf.model = getenv("LLM_TEST_MODEL");
    conf.threads = 2;
    conf.max_num_batched_tokens = setup->budget;
    conf.max_num_seqs = 24;
    conf.max_model_len = setup->kv_memory != NULL ? FEW_LEN : MAX_LEN;
    conf.log_level = LOG_WARN;

    snprintf(word, sizeof(word), "prefix_caching=%s",
             setup->caching ? "on" : "off");
    assert_int_equal(engine_conf_set(&conf, word, &err), LLM_OK);
    snprintf(word, sizeof(word), "chunked_prefill=%s",
             setup->chunked ? "on" : "off");
    assert_int_equal(engine_conf_set(&conf, word, &err), LLM_OK);

    if (setup->kv_memory != NULL) {
        snprintf(word, sizeof(word), "kv_cache_memory=%s", setup->kv_memory);
        assert_int_equal(engine_conf_set(&conf, word, &err), LLM_OK);
    }

    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);

    if (engine_open(&conf, &engine, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return engine;
}


static request_t *
submit_with(engine_t *engine, const void *bytes, size_t len, uint32_t kind,
            uint32_t flags, const llm_params_t *params, const char *salt)
{
    const request_origin_t from = { .submit_ns = 1 };
    llm_request_writer_t w;

    llm_request_begin(&w, area, sizeof(area), kind, LLM_F_LOGPROBS | flags,
                      params);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, bytes, len);

    if (salt != NULL) {
        llm_request_section(&w, LLM_SEC_SALT);
        llm_request_add(&w, salt, strlen(salt));
    }

    request_t *req = intake_request(engine, area, llm_request_end(&w), &from);

    assert_non_null(req);
    return req;
}


/* Request i: one of three beginnings of which each continues the one before,
 * then a question that some share. */
static request_t *
submit(engine_t *engine, int i, const char *salt)
{
    static const char *const parts[] = {
        "You are a helpful assistant. Answer briefly and politely, and say so "
        "when you do not know. Never invent facts. ",
        "The user lives in Oslo and is interested in mountains, trains, old "
        "maps and the history of science. He speaks English and Norwegian. "
        "Dates are written day first, numbers with a comma. ",
        "Today the museum is closed, the library opens at nine, and the train "
        "to Bergen leaves at half past ten from platform four. Tickets are "
        "sold until five minutes before departure. The restaurant car is "
        "closed, coffee is served at the seats. ",
    };
    static const char *const questions[] = {
        "Question: where is the station?",
        "Question: what is a fjord?",
        "Question: who was Newton? Please begin with the year of his birth.",
        "1 + 1 =",
    };
    char prompt[4096];
    size_t n = 0;

    const llm_params_t params = {
        .temperature = i % 3 == 0 ? 0.0f : 0.6f + 0.03f * (float) i,
        .top_p = i % 4 == 1 ? 0.9f : 1.0f,
        .top_k = i % 4 == 2 ? 40 : 0,
        .repetition_penalty = i % 5 == 3 ? 1.2f : 1.0f,
        .presence_penalty = i % 7 == 4 ? 0.5f : 0.0f,
        .max_tokens = 4 + i * 7 % (N_TOKENS - 3),
        .top_logprobs = TOP,
        .seed = 77 + (uint64_t) i,
    };

    for (int k = 0; k <= i % 3; k++) {
        n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s", parts[k]);
    }

    n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s",
                           questions[i / 3 % 4]);

    return submit_with(engine, prompt, n, LLM_REQ_TEXT, 0, &params, salt);
}


static void
read_delta(const llm_delta_t *d, answer_t *answer)
{
    llm_logprob_t entry;
    uint32_t at = 0;

    while (llm_logprob_next(d, &at, &entry)) {
        assert_true(answer->n < N_TOKENS);
        assert_int_equal(entry.n_top, TOP);
        answer->token[answer->n] = entry.chosen.token;
        answer->logprob[answer->n] = entry.chosen.logprob;

        for (int t = 0; t < TOP; t++) {
            answer->top[answer->n][t] = entry.top[t].logprob;
        }

        answer->n++;
    }
}


/* Reads what a finished request wrote, and destroys it. */
static answer_t
take_answer(request_t *req)
{
    answer_t answer;
    uint32_t started = 0;

    memset(&answer, 0, sizeof(answer));
    assert_true(req->finished);

    for (size_t pos = 0; pos < req->out.len;) {
        llm_record_t record;
        uint32_t len;

        memcpy(&len, req->out.data + pos, sizeof(len));
        assert_int_equal(
            llm_record_decode((uint8_t *) req->out.data + pos + sizeof(len),
                              len, &record),
            0);
        pos += sizeof(len) + len;
        assert_int_not_equal(record.type, LLM_REC_ERROR);

        if (record.type == LLM_REC_START) {
            started = record.u.start.cached_tokens;
        } else if (record.type == LLM_REC_DONE) {
            answer.finish = record.u.done.finish;
            answer.cached = record.u.done.cached_tokens;
            assert_true(answer.cached < record.u.done.prompt_tokens);
        } else if (record.u.delta.kind == LLM_DELTA_CONTENT) {
            read_delta(&record.u.delta, &answer);
        }
    }

    assert_int_equal(started, answer.cached);
    request_destroy(req);

    return answer;
}


static void
run(engine_t *engine)
{
    while (engine_step(engine)) {
        sched_check(engine->sched);
    }
}


static answer_t
finish(engine_t *engine, request_t *req)
{
    run(engine);
    return take_answer(req);
}


static void
same_answer(const answer_t *a, const answer_t *b, int i, const setup_t *setup)
{
    if (memcmp(a, b, offsetof(answer_t, cached)) != 0) {
        fail_msg("request %d differs: caching %d, chunked %d, budget %d, kv "
                 "%s",
                 i, setup->caching, setup->chunked, setup->budget,
                 setup->kv_memory ? setup->kv_memory : "ample");
    }
}


/* Nobody holds a page any more, though content stays. */
static void
close_idle(engine_t *engine)
{
    assert_true(list_empty(&engine->requests));
    engine_step(engine);
    assert_int_equal(llm_stats_get(&engine->stats->pages_used), 0);
    assert_int_equal(kv_pool_free_pages(engine->pool),
                     kv_pool_pages(engine->pool));
    engine_close(engine);
}


static answer_t alone[N_REQUESTS];


static void
run_alone(void)
{
    for (int i = 0; i < N_REQUESTS; i++) {
        static engine_t *engine;

        if (i == 0) {
            engine = open_engine(&plain);
        }

        alone[i] = finish(engine, submit(engine, i, NULL));
        assert_int_equal(alone[i].cached, 0);
        assert_true(alone[i].n > 0);

        if (i == N_REQUESTS - 1) {
            assert_int_equal(llm_stats_get(&engine->stats->prefix_hits), 0);
            close_idle(engine);
        }
    }
}


/* All requests, entering over some steps, twice. */
static void
run_storm(const setup_t *setup)
{
    engine_t *engine = open_engine(setup);
    request_t *reqs[N_REQUESTS];
    answer_t answer;

    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N_REQUESTS; i++) {
            reqs[i] = submit(engine, i, NULL);

            for (int k = 0; k < i % 4 - 1; k++) {
                engine_step(engine);
                sched_check(engine->sched);
            }
        }

        run(engine);

        for (int i = 0; i < N_REQUESTS; i++) {
            answer = take_answer(reqs[i]);
            same_answer(&alone[i], &answer, i, setup);
        }
    }

    const uint64_t queries = llm_stats_get(&engine->stats->prefix_queries);
    const uint64_t hits = llm_stats_get(&engine->stats->prefix_hits);
    const uint64_t again = llm_stats_get(&engine->stats->again_queries);
    const uint64_t preemptions = sched_preemptions(engine->sched);

    printf("# caching %d chunked %d budget %d kv %s: %u of %u tokens hit, %u "
           "preemptions\n",
           setup->caching, setup->chunked, setup->budget,
           setup->kv_memory ? setup->kv_memory : "ample", (unsigned) hits,
           (unsigned) queries, (unsigned) preemptions);

    if (setup->caching) {
        assert_true(hits * 2 > queries);
        assert_int_equal(again > 0, preemptions > 0);
        assert_true(llm_stats_get(&engine->stats->pages_cached) > 0);
    } else {
        assert_int_equal(queries, 0);
    }

    if (setup->kv_memory != NULL && !setup->caching) {
        assert_true(preemptions > 0);
    }

    close_idle(engine);
}


static void
test_matrix(void **state)
{
    static const int budgets[] = { 64, 512, 2048 };
    int n = 0;

    (void) state;
    run_alone();

    for (int few = 0; few < 2; few++) {
        for (int caching = 0; caching < 2; caching++) {
            for (int chunked = 0; chunked < 2; chunked++) {
                for (int b = 0; b < 3; b++) {
                    const setup_t setup = { caching, chunked, budgets[b],
                                            few ? few_pages : NULL };

                    if (!chunked && setup.budget < MAX_LEN) {
                        continue; /* refused */
                    }

                    /* the everyday test takes every other, and the cache
                     * rather than its absence */
                    n++;

                    if (whole_matrix || (caching && n % 2 == 0)
                        || (few && chunked && b == 1)) {
                        run_storm(&setup);
                    }
                }
            }
        }
    }
}


/* Equal prompts that arrive together compute the prompt once. */
static void
test_choices(void **state)
{
    engine_t *engine = open_engine(&cached);
    llm_params_t params = { .temperature = 1,
                            .top_p = 1,
                            .repetition_penalty = 1,
                            .max_tokens = 3,
                            .top_logprobs = TOP };
    int32_t ids[100];
    request_t *reqs[8];

    (void) state;

    for (int i = 0; i < 100; i++) {
        ids[i] = 1000 + i * 7;
    }

    for (int i = 0; i < 8; i++) {
        params.seed = (uint64_t) i;
        reqs[i] = submit_with(engine, ids, sizeof(ids), LLM_REQ_TOKENS, 0,
                              &params, NULL);
    }

    /* the first computes everything, the others the last page of it */
    assert_true(engine_step(engine));
    assert_int_equal(engine->batch.op.n_rows, 100);
    assert_true(engine_step(engine));
    assert_int_equal(engine->batch.op.n_rows, 1 + 7 * 4);
    run(engine);

    for (int i = 0; i < 8; i++) {
        const answer_t answer = take_answer(reqs[i]);

        assert_int_equal(answer.cached, i == 0 ? 0 : 96);
        assert_int_equal(answer.n, 3);
    }

    assert_int_equal(llm_stats_get(&engine->stats->prefix_hits), 7 * 96);
    assert_int_equal(llm_stats_get(&engine->stats->prefix_queries), 8 * 100);
    close_idle(engine);
}


/* The next turn of a conversation finds its history, answers included. */
static void
test_next_turn(void **state)
{
    engine_t *engines[2] = { open_engine(&plain), open_engine(&cached) };
    answer_t answers[2];
    const llm_params_t params = { .top_p = 1,
                                  .repetition_penalty = 1,
                                  .max_tokens = N_TOKENS,
                                  .top_logprobs = TOP };

    (void) state;

    for (int e = 0; e < 2; e++) {
        int32_t ids[200];
        int n = 40;

        for (int i = 0; i < n; i++) {
            ids[i] = 500 + i;
        }

        for (int turn = 0; turn < 2; turn++) {
            answers[e] = finish(
                engines[e],
                submit_with(engines[e], ids, (size_t) n * sizeof(int32_t),
                            LLM_REQ_TOKENS, LLM_F_IGNORE_EOS, &params, NULL));
            assert_int_equal(answers[e].n, N_TOKENS);
            assert_int_equal(answers[e].cached, e == 1 && turn == 1 ? 80 : 0);

            memcpy(ids + n, answers[e].token, sizeof(answers[e].token));
            n += N_TOKENS;
            ids[n++] = 11;
        }

        close_idle(engines[e]);
    }

    same_answer(&answers[0], &answers[1], 0, &cached);
}


/* Other salts, other pages; and a salt is exact. */
static void
test_salts(void **state)
{
    static const char *const salts[] = { NULL, "a", "b", "aa",
                                         NULL, "a", "b", "aa" };
    engine_t *engine = open_engine(&cached);

    (void) state;

    for (int i = 0; i < 8; i++) {
        const answer_t answer = finish(engine, submit(engine, 5, salts[i]));

        same_answer(&alone[5], &answer, 5, &cached);
        assert_int_equal(answer.cached > 0, i >= 4);
    }

    close_idle(engine);
}


/* An echo with log-probabilities computes its whole prompt, but others may
 * use its pages. */
static void
test_echo(void **state)
{
    engine_t *engine = open_engine(&cached);
    const llm_params_t params = { .top_p = 1,
                                  .repetition_penalty = 1,
                                  .max_tokens = 2,
                                  .top_logprobs = TOP };
    int32_t ids[60];

    (void) state;

    for (int i = 0; i < 60; i++) {
        ids[i] = 2000 + i;
    }

    for (int k = 0; k < 3; k++) {
        request_t *req = submit_with(engine, ids, sizeof(ids), LLM_REQ_TOKENS,
                                     k < 2 ? LLM_F_ECHO : 0, &params, NULL);

        assert_int_equal(req->seq.want_prompt, k < 2);
        run(engine);
        assert_int_equal(req->n_scored, k < 2 ? 60 : 0);
        assert_int_equal(take_answer(req).cached, k < 2 ? 0 : 48);
    }

    close_idle(engine);
}


/* Who waits for pages goes on by itself when their maker leaves. */
static void
test_leader_leaves(void **state)
{
    static const setup_t slow = { true, true, 64, NULL };
    engine_t *engine = open_engine(&slow);
    const llm_params_t params = { .top_p = 1,
                                  .repetition_penalty = 1,
                                  .max_tokens = 2,
                                  .top_logprobs = TOP };
    int32_t ids[300];
    request_t *reqs[4];

    (void) state;

    for (int i = 0; i < 300; i++) {
        ids[i] = 3000 + i;
    }

    for (int i = 0; i < 4; i++) {
        reqs[i] = submit_with(engine, ids, sizeof(ids), LLM_REQ_TOKENS, 0,
                              &params, NULL);
    }

    engine_step(engine);
    assert_int_equal(sched_running(engine->sched), 1);

    /* one is aborted, the next is parked: the third computes the rest */
    emit_abort(engine, reqs[0]);
    request_destroy(reqs[0]);
    engine_step(engine);
    assert_int_equal(sched_running(engine->sched), 1);
    assert_int_equal(reqs[1]->seq.cached, 64);
    reqs[1]->seq.parked = true;
    engine_step(engine);
    assert_int_equal(sched_running(engine->sched), 2);
    assert_int_equal(reqs[2]->seq.cached, 128);
    run(engine);
    reqs[1]->seq.parked = false;
    run(engine);

    const answer_t answer = take_answer(reqs[1]);

    for (int i = 2; i < 4; i++) {
        const answer_t other = take_answer(reqs[i]);
        same_answer(&answer, &other, i, &slow);
        assert_int_equal(other.cached, i == 2 ? 128 : 288);
    }

    close_idle(engine);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrix),    cmocka_unit_test(test_choices),
        cmocka_unit_test(test_next_turn), cmocka_unit_test(test_salts),
        cmocka_unit_test(test_echo),      cmocka_unit_test(test_leader_leaves),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* with sanitizers, twenty times slower, the corners only */
    whole_matrix = getenv("LLM_TEST_LONG") != NULL;
#endif

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
