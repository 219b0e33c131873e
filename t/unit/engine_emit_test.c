/*
 * How requests end and what they say on the way: end tokens, lengths, echo,
 * preemption, aborts, statistics.
 */

#include "t/unit/engine_emit.h"


/* --- ends --- */

static void
test_end_tokens(void **state)
{
    static const struct {
        uint32_t flags;
        int32_t stop;  /* stop_token_ids, -1: none */
        int32_t token; /* behind "ab" */
        bool ends;
        const char *want; /* text, when it ends */
    } cases[] = {
        { 0, -1, MINI_IM_END, true, "ab" },
        { LLM_F_KEEP_SPECIAL, -1, MINI_IM_END, true, "ab" },
        /* special tokens are text only where they are asked for */
        { LLM_F_INCLUDE_STOP, -1, MINI_IM_END, true, "ab" },
        { LLM_F_INCLUDE_STOP | LLM_F_KEEP_SPECIAL, -1, MINI_IM_END, true,
          "ab<|im_end|>" },
        { LLM_F_IGNORE_EOS, -1, MINI_IM_END, false, "ab" },
        { LLM_F_IGNORE_EOS | LLM_F_KEEP_SPECIAL, -1, MINI_IM_END, false,
          "ab<|im_end|>" },
        { 0, -1, MINI_EOT_NAMED, true, "ab" },
        { 0, -1, MINI_A, false, "ab" },
        { LLM_F_KEEP_SPECIAL, -1, MINI_A, false, "ab<|a|>" },
        { 0, 'x', 'x', true, "ab" },
        { LLM_F_INCLUDE_STOP, 'x', 'x', true, "abx" },
        { LLM_F_IGNORE_EOS, 'x', 'x', true, "ab" },
        { LLM_F_IGNORE_EOS, MINI_IM_END, MINI_IM_END, true, "ab" },
        { 0, 'x', 'y', false, "aby" },
    };

    (void) state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ask_t a = ask(LLM_REQ_TEXT, cases[i].flags);

        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "q", 1);
        if (cases[i].stop >= 0) {
            ask_section(&a, LLM_SEC_STOP_TOKENS, &cases[i].stop, 4);
        }

        request_t *req = ask_send(engine, &a);

        emit_bytes(engine, req, "ab");
        emit_one(engine, req, cases[i].token);
        assert_int_equal(req->finished, cases[i].ends);

        if (cases[i].ends) {
            assert_int_equal(req->n_output, 3);
        }

        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        end(req);
        assert_text(&reply.content, cases[i].want);
        assert_int_equal(reply.done.finish,
                         cases[i].ends ? LLM_FINISH_STOP : LLM_FINISH_LENGTH);
        assert_int_equal(reply.done.stop_value,
                         cases[i].ends ? cases[i].token : 0);
        assert_int_equal(reply.done.completion_tokens, 3);
        reply_fini(&reply);
    }
}


/* The model wants one token and nothing else. */
static void
ask_bias(ask_t *a, int32_t token, int32_t second)
{
    const llm_bias_t bias[] = { { token, 10000 }, { second, 5000 } };

    ask_section(a, LLM_SEC_LOGIT_BIAS, bias, sizeof(bias));
}


static void
test_min_tokens(void **state)
{
    (void) state;

    for (int ignore = 0; ignore < 2; ignore++) {
        ask_t a = ask(LLM_REQ_TEXT, ignore ? LLM_F_IGNORE_EOS : 0);
        const int32_t stop = 'x';
        const int32_t first = ignore ? stop : MINI_IM_END;

        a.params.min_tokens = 5;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "q", 1);
        ask_section(&a, LLM_SEC_STOP_TOKENS, &stop, sizeof(stop));
        ask_bias(&a, first, 'y');
        request_t *req = ask_send(engine, &a);

        run_all(engine);
        end(req);
        assert_text(&reply.content, "yyyyy");
        assert_int_equal(reply.done.completion_tokens, 6);
        assert_int_equal(reply.done.stop_value, first);
        reply_fini(&reply);
    }
}


static void
test_length(void **state)
{
    static const struct {
        int max_tokens;
        int prompt;
        int want;
    } cases[] = {
        { 1, 1, 1 },
        { 16, 1, 16 },
        { -1, 1, TINY_CTX - 1 },
        { 1000000, 100, TINY_CTX - 100 },
        { INT32_MAX, TINY_CTX - 1, 1 },
        { 0, 5, 0 },
        { 0, TINY_CTX, 0 },
    };
    char prompt[TINY_CTX + 1];

    (void) state;
    /* no two of them merge */
    memset(prompt, 'q', sizeof(prompt));

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_IGNORE_EOS);

        a.params.max_tokens = cases[i].max_tokens;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, prompt, (size_t) cases[i].prompt);
        ask_bias(&a, 'y', 'z');
        request_t *req = ask_send(engine, &a);

        run_all(engine);
        end(req);
        assert_int_equal(reply.n_done, 1);
        assert_int_equal(reply.start.prompt_tokens, cases[i].prompt);
        assert_int_equal(reply.start.max_tokens, cases[i].want);
        assert_int_equal(reply.done.prompt_tokens, cases[i].prompt);
        assert_int_equal(reply.done.completion_tokens, cases[i].want);
        assert_int_equal(reply.n_tokens, cases[i].want);
        assert_int_equal(reply.content.len, cases[i].want);
        assert_int_equal(reply.done.finish, LLM_FINISH_LENGTH);
        assert_int_equal(reply.done.preemptions, 0);
        assert_true(reply.done.total_us >= reply.done.ttft_us);
        reply_fini(&reply);
    }
}


/* --- echo --- */

static void
test_echo(void **state)
{
    const char *prompt = "hello caf\xc3\xa9 <|a|>\xe2\x82\xac";

    (void) state;

    for (int how = 0; how < 8; how++) {
        const bool logprobs = how & 1, none = how & 2;
        ask_t a = ask(LLM_REQ_TEXT, LLM_F_ECHO | LLM_F_PARSE_SPECIAL
                                        | (logprobs ? LLM_F_LOGPROBS : 0)
                                        | (how & 4 ? LLM_F_STREAM : 0));

        a.params.max_tokens = none ? 0 : 3;
        a.params.top_logprobs = 2;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, prompt, strlen(prompt));
        ask_bias(&a, 'y', 'z');
        request_t *req = ask_send(engine, &a);

        run_all(engine);
        end(req);
        assert_text(&reply.prompt, prompt);
        assert_text(&reply.content, none ? "" : "yyy");
        assert_int_equal(reply.n_prompt_logprobs,
                         logprobs ? (int) reply.done.prompt_tokens : 0);
        assert_int_equal(reply.n_logprobs, logprobs && !none ? 3 : 0);
        assert_int_equal(reply.n_tokens, none ? 0 : 3);
        assert_int_equal(reply.done.finish, LLM_FINISH_LENGTH);
        reply_fini(&reply);
    }
}


/* A prompt of one token has no row to score. */
static void
test_echo_one(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_ECHO | LLM_F_LOGPROBS);

    (void) state;
    a.params.max_tokens = 0;
    request_t *req = ask_text(engine, &a, "q");

    run_all(engine);
    end(req);
    assert_text(&reply.prompt, "q");
    assert_int_equal(reply.n_prompt_logprobs, 1);
    assert_int_equal(reply.done.completion_tokens, 0);
}


/* Preempted sequences compute their prompts again, and say nothing twice. */
static void
test_echo_preempted(void **state)
{
    /* 8 pages of 4096 bytes: 128 tokens for three times 84 */
    static const char *const words[] = { "max_model_len=96",
                                         "kv_cache_memory=32k",
                                         "max_num_batched_tokens=24", NULL };
    engine_t *whole = engine;
    request_t *reqs[3];
    char prompt[65];

    (void) state;
    engine = tiny_engine(words);
    assert_int_equal(kv_pool_pages(engine->pool), 8);

    for (int i = 0; i < 64; i++) {
        prompt[i] = "qxz"[i % 3];
    }
    prompt[64] = '\0';

    for (int i = 0; i < 3; i++) {
        ask_t a = ask(LLM_REQ_TEXT, LLM_F_ECHO | LLM_F_STREAM | LLM_F_IGNORE_EOS
                                        | (i < 2 ? LLM_F_LOGPROBS : 0));
        a.params.max_tokens = 20;
        a.params.top_logprobs = 1;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, prompt, 60 + (size_t) i);
        ask_bias(&a, 'y', 'z');
        reqs[i] = ask_send(engine, &a);
    }

    run_all(engine);
    assert_true(sched_preemptions(engine->sched) > 0);

    uint32_t preemptions = 0;

    for (int i = 0; i < 3; i++) {
        reply_read(&reply, reqs[i]);
        assert_int_equal(reply.n_done, 1);
        assert_int_equal(reply.prompt.len, 60 + i);
        assert_memory_equal(reply.prompt.data, prompt, reply.prompt.len);
        assert_text(&reply.content, "yyyyyyyyyyyyyyyyyyyy");
        assert_int_equal(reply.n_prompt_logprobs, i < 2 ? 60 + i : 0);
        assert_int_equal(reply.n_logprobs, i < 2 ? 20 : 0);
        assert_int_equal(reply.done.completion_tokens, 20);
        preemptions += reply.done.preemptions;
        request_destroy(reqs[i]);
        reply_fini(&reply);
    }

    assert_int_equal(preemptions, sched_preemptions(engine->sched));
    assert_int_equal(pages_used(engine), 0);
    engine_close(engine);
    engine = whole;
}


/* --- aborts --- */

static void
test_abort(void **state)
{
    (void) state;

    for (int steps = 0; steps < 8; steps++) {
        ask_t a = ask(LLM_REQ_TEXT, LLM_F_ECHO | LLM_F_LOGPROBS | LLM_F_STREAM);
        char prompt[201];

        memset(prompt, 'q', 200);
        prompt[200] = '\0';
        request_t *req = ask_text(engine, &a, prompt);
        ask_t other = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);
        request_t *bystander = ask_text(engine, &other, "q");

        for (int i = 0; i < steps; i++) {
            engine_step(engine);
        }

        emit_abort(engine, req);
        sched_check(engine->sched);
        assert_true(req->finished);
        assert_int_equal(req->out.len, 0);

        /* everything after it is ignored */
        emit_one(engine, req, 'x');
        emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_NONE, 0);
        emit_fail(engine, req, LLM_FAIL_INTERNAL, NULL, "no");
        emit_prompt_score(engine, req, 1, &(samp_result_t){ .token = 'x' });
        emit_abort(engine, req);
        assert_int_equal(req->out.len, 0);
        request_destroy(req);

        run_all(engine);
        end(bystander);
        assert_int_equal(reply.done.completion_tokens, 16);
        reply_fini(&reply);
    }
}


static void
test_statistics(void **state)
{
    const llm_stats_t *s = engine->stats;
    const uint64_t tokens = llm_stats_get(&s->generation_tokens);
    const uint64_t ttft = llm_stats_get(&s->ttft.count);
    const uint64_t inter = llm_stats_get(&s->inter.count);
    const uint64_t e2e = llm_stats_get(&s->e2e.count);
    const uint64_t length = llm_stats_get(&s->finished[LLM_FINISH_LENGTH]);
    const uint64_t aborts = llm_stats_get(&s->finished[LLM_FINISH_ABORT]);
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);

    (void) state;
    request_t *req = ask_text(engine, &a, "q");
    engine_step(engine);
    assert_int_equal(llm_stats_get(&s->running), 1);
    assert_true(llm_stats_get(&s->pages_used) > 0);
    assert_int_equal(llm_stats_get(&s->kv_slots_held),
                     16 * llm_stats_get(&s->pages_used));
    /* "q" takes one slot: what was drawn is not computed yet */
    assert_int_equal(llm_stats_get(&s->kv_slots_used),
                     (uint64_t) req->seq.computed);
    assert_int_equal(llm_stats_get(&s->kv_slots_empty),
                     llm_stats_get(&s->kv_slots_held)
                         - (uint64_t) req->seq.computed);
    assert_int_equal(llm_stats_get(&s->pages_free)
                         + llm_stats_get(&s->pages_used),
                     (uint64_t) kv_pool_pages(engine->pool));
    run_all(engine);
    end(req);
    const uint64_t prompts = llm_stats_get(&s->prompt_tokens);
    const uint64_t queued = llm_stats_get(&s->queue_time.count);
    req = ask_text(engine, &a, "q");
    emit_abort(engine, req);
    request_destroy(req);
    engine_step(engine);

    assert_int_equal(llm_stats_get(&s->generation_tokens) - tokens, 16);
    assert_int_equal(llm_stats_get(&s->ttft.count) - ttft, 1);
    assert_int_equal(llm_stats_get(&s->inter.count) - inter, 15);
    assert_int_equal(llm_stats_get(&s->e2e.count) - e2e, 1);
    assert_int_equal(llm_stats_get(&s->finished[LLM_FINISH_LENGTH]) - length,
                     1);
    assert_int_equal(llm_stats_get(&s->finished[LLM_FINISH_ABORT]) - aborts, 1);
    assert_int_equal(llm_stats_get(&s->running), 0);
    assert_int_equal(llm_stats_get(&s->pages_used), 0);
    assert_int_equal(llm_stats_get(&s->kv_slots_empty), 0);

    /* what never ran is in no histogram, and its prompt was not computed */
    assert_int_equal(llm_stats_get(&s->prompt_tokens), prompts);
    assert_int_equal(llm_stats_get(&s->queue_time.count), queued);
}


/* Time passes in each phase of a step; the tokenizer's requests do not
 * count. */
static void
test_phases(void **state)
{
    const llm_stats_t *s = engine->stats;
    uint64_t before[LLM_PHASE_MAX];
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);
    ask_t t = ask(LLM_REQ_TOKENIZE, 0);

    (void) state;

    for (int i = 0; i < LLM_PHASE_MAX; i++) {
        before[i] = llm_stats_get(&s->phase_ns[i]);
    }

    const uint64_t stops = llm_stats_get(&s->finished[LLM_FINISH_STOP]);
    const uint64_t steps = llm_stats_get(&s->steps);
    const uint64_t tokens = llm_stats_get(&s->step_tokens.sum);
    request_t *req = ask_text(engine, &a, "q");

    run_all(engine);
    end(req);
    assert_int_equal(llm_stats_get(&s->steps) - steps, 16);
    assert_int_equal(llm_stats_get(&s->step_tokens.sum) - tokens,
                     reply.done.prompt_tokens + 15);

    for (int i = LLM_PHASE_SCHEDULE; i <= LLM_PHASE_EMIT; i++) {
        assert_true(llm_stats_get(&s->phase_ns[i]) > before[i]);
    }

    /* those of the loop, which is not running */
    assert_int_equal(llm_stats_get(&s->phase_ns[LLM_PHASE_INTAKE]), before[0]);

    reply_fini(&reply);
    req = ask_text(engine, &t, "some text");
    assert_true(req->finished);
    end(req);
    assert_int_equal(llm_stats_get(&s->finished[LLM_FINISH_STOP]), stops);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_end_tokens, setup),
        cmocka_unit_test_setup(test_min_tokens, setup),
        cmocka_unit_test_setup(test_length, setup),
        cmocka_unit_test_setup(test_echo, setup),
        cmocka_unit_test_setup(test_echo_one, setup),
        cmocka_unit_test_setup(test_echo_preempted, setup),
        cmocka_unit_test_setup(test_abort, setup),
        cmocka_unit_test_setup(test_statistics, setup),
        cmocka_unit_test_setup(test_phases, setup),
    };

    log_open(NULL, LOG_ERR);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
