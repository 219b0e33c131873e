/*
 * Prefix caching with a real model, rule by rule: several answers to one
 * prompt, the next turn of a conversation, salts, an echo, leaders that leave.
 * That nothing of it changes an answer is the matter of engine_matrix_test.c.
 *
 * Needs LLM_TEST_MODEL.
 */

#include "t/unit/engine_answers.h"

enum { MAX_LEN = 512 };

static const setup_t plain = {
    .chunked = true, .budget = 512, .max_len = MAX_LEN, .dtype = OP_F16
};
static const setup_t cached = { .caching = true,
                                .chunked = true,
                                .budget = 512,
                                .max_len = MAX_LEN,
                                .dtype = OP_F16 };


/* Token ids, sampled without frills. */
static request_t *
submit_ids(engine_t *engine, const int32_t *ids, int n, int max_tokens,
           uint64_t seed)
{
    const float temperature = seed == 0 ? 0.0f : 1.0f;

    return submit(engine, &(order_t){ .kind = LLM_REQ_TOKENS,
                                      .flags = LLM_F_IGNORE_EOS,
                                      .prompt = ids,
                                      .len = (size_t) n * sizeof(int32_t),
                                      .params = { .temperature = temperature,
                                                  .top_p = 1,
                                                  .repetition_penalty = 1,
                                                  .max_tokens = max_tokens,
                                                  .top_logprobs = TOP,
                                                  .seed = seed } });
}


/* n answers to a prompt of n_ids tokens that arrive together, on an engine of
 * each type and with whole prompts, too: after the step that computes the
 * prompt there is one token each, and all is as when they come one by one. */
static void
check_choices(const setup_t *setup, int n, int n_ids)
{
    setup_t off = *setup;

    off.caching = false;

    engine_t *engine = open_engine(setup);
    engine_t *other = open_engine(&off);
    request_t *reqs[8];
    int32_t ids[MAX_LEN];
    int tokens = 0;

    for (int i = 0; i < n_ids; i++) {
        ids[i] = 1000 + i * 7;
    }

    for (int i = 0; i < n; i++) {
        reqs[i] = submit_ids(engine, ids, n_ids, 3, 1 + (uint64_t) i);
    }

    for (int step = 0; engine_step(engine); step++) {
        sched_check(engine->sched);
        tokens += engine->batch.op.n_rows;
        assert_int_equal(engine->batch.op.n_rows, step == 0   ? n_ids
                                                  : step == 3 ? n - 1
                                                              : n);
    }

    /* the last token of each is not computed */
    assert_int_equal(tokens, n_ids - 1 + n + 2 * n);

    for (int i = 0; i < n; i++) {
        answer_t answer, alone;

        take_answer(reqs[i], &answer);
        finish(other, submit_ids(other, ids, n_ids, 3, 1 + (uint64_t) i),
               &alone);
        same_answer(&alone, &answer, i, setup);
        assert_int_equal(answer.cached, i == 0 ? 0 : n_ids - 1);
        assert_int_equal(answer.n, 3);
    }

    assert_int_equal(llm_stats_get(&engine->stats->prefix_hits),
                     (n - 1) * (n_ids - 1));
    assert_int_equal(llm_stats_get(&engine->stats->prefix_queries), n * n_ids);
    close_idle(engine);
    close_idle(other);
}


static void
test_choices(void **state)
{
    setup_t setup = cached;

    (void) state;
    check_choices(&setup, 8, 100);
    check_choices(&setup, 4, 9);
    setup.dtype = OP_Q8_0;
    check_choices(&setup, 8, 63);
    setup.chunked = false;
    check_choices(&setup, 4, 200);
}


/* The next turn of a conversation finds its history, answers included. */
static void
test_next_turn(void **state)
{
    engine_t *engines[2] = { open_engine(&plain), open_engine(&cached) };
    answer_t answers[2];

    (void) state;

    for (int e = 0; e < 2; e++) {
        int32_t ids[200];
        int n = 40;

        for (int i = 0; i < n; i++) {
            ids[i] = 500 + i;
        }

        for (int turn = 0; turn < 2; turn++) {
            finish(engines[e], submit_ids(engines[e], ids, n, N_TOKENS, 0),
                   &answers[e]);
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
    static const char prompt[] = "You are a helpful assistant. Answer briefly. "
                                 "Where is the station of Bergen?";
    engine_t *engine = open_engine(&cached);
    answer_t answers[8];

    (void) state;

    for (int i = 0; i < 8; i++) {
        const order_t order = { .kind = LLM_REQ_TEXT,
                                .prompt = prompt,
                                .len = strlen(prompt),
                                .salt = salts[i],
                                .params = { .temperature = 1,
                                            .top_p = 1,
                                            .repetition_penalty = 1,
                                            .max_tokens = 12,
                                            .top_logprobs = TOP,
                                            .seed = 5 } };

        finish(engine, submit(engine, &order), &answers[i]);
        same_answer(&answers[0], &answers[i], i, &cached);
        assert_int_equal(answers[i].cached, i >= 4 ? 16 : 0);
    }

    /* nor does a fork reach across, while all of them run */
    request_t *reqs[8];

    for (int i = 0; i < 8; i++) {
        const int32_t ids[12] = { 7, 8, 9 };

        reqs[i] =
            submit(engine, &(order_t){ .kind = LLM_REQ_TOKENS,
                                       .prompt = ids,
                                       .len = sizeof(ids),
                                       .salt = salts[i],
                                       .params = { .top_p = 1,
                                                   .repetition_penalty = 1,
                                                   .max_tokens = 4,
                                                   .top_logprobs = TOP } });
    }

    run(engine);

    for (int i = 0; i < 8; i++) {
        take_answer(reqs[i], &answers[i]);
        same_answer(&answers[0], &answers[i], i, &cached);
        assert_int_equal(answers[i].cached, i >= 4 ? 11 : 0);
    }

    close_idle(engine);
}


/* An echo with log-probabilities computes its whole prompt, but others may
 * use its pages. */
static void
test_echo(void **state)
{
    engine_t *engine = open_engine(&cached);
    int32_t ids[60];

    (void) state;

    for (int i = 0; i < 60; i++) {
        ids[i] = 2000 + i;
    }

    for (int k = 0; k < 3; k++) {
        const order_t order = { .kind = LLM_REQ_TOKENS,
                                .flags = k < 2 ? LLM_F_ECHO : 0,
                                .prompt = ids,
                                .len = sizeof(ids),
                                .params = { .top_p = 1,
                                            .repetition_penalty = 1,
                                            .max_tokens = 2,
                                            .top_logprobs = TOP } };
        request_t *req = submit(engine, &order);
        answer_t answer;

        assert_int_equal(req->seq.want_prompt, k < 2);
        run(engine);
        assert_int_equal(req->n_scored, k < 2 ? 60 : 0);
        take_answer(req, &answer);
        assert_int_equal(answer.cached, k < 2 ? 0 : 48);
    }

    close_idle(engine);
}


/* Who waits for pages goes on by itself when their maker leaves. */
static void
test_leader_leaves(void **state)
{
    static const setup_t slow = { .caching = true,
                                  .chunked = true,
                                  .budget = 64,
                                  .max_len = MAX_LEN,
                                  .dtype = OP_F16 };
    engine_t *engine = open_engine(&slow);
    int32_t ids[300];
    request_t *reqs[4];

    (void) state;

    for (int i = 0; i < 300; i++) {
        ids[i] = 3000 + i;
    }

    for (int i = 0; i < 4; i++) {
        reqs[i] = submit_ids(engine, ids, 300, 2, 0);
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

    answer_t answer, other;

    take_answer(reqs[1], &answer);

    for (int i = 2; i < 4; i++) {
        take_answer(reqs[i], &other);
        same_answer(&answer, &other, i, &slow);
        assert_int_equal(other.cached, i == 2 ? 128 : 299);
    }

    close_idle(engine);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices),       cmocka_unit_test(test_next_turn),
        cmocka_unit_test(test_salts),         cmocka_unit_test(test_echo),
        cmocka_unit_test(test_leader_leaves),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
