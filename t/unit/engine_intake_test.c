/*
 * Requests of every kind through intake_request: what is wrong with one is
 * said in its ERROR record; tokenize, detokenize and chat do what they say.
 */

#include "t/unit/engine_tiny.h"
#include "t/unit/random.h"

enum { LOG_CAP = 300000 };

static engine_t *engine;
static reply_t reply;
static int32_t token_log[LOG_CAP];
static int n_log;


static void
on_tokens(engine_t *e, request_t *req, const int32_t *tokens, int n)
{
    (void) e;
    (void) req;
    assert_true(n <= LOG_CAP - n_log);

    for (int i = 0; i < n; i++) {
        token_log[n_log++] = tokens[i];
    }
}


static int
setup(void **state)
{
    (void) state;

    if (engine == NULL) {
        engine = tiny_engine(NULL);
        engine->on_tokens = on_tokens;
    }

    reply_fini(&reply);
    n_log = 0;

    return 0;
}


static void
end(request_t *req)
{
    assert_non_null(req);
    run_all(engine);
    reply_read(&reply, req);
    assert_true(req->finished);
    assert_int_equal(reply.n_done + reply.n_fail, 1);
    request_destroy(req);
    assert_int_equal(pages_used(engine), 0);
    assert_true(list_empty(&engine->requests));
}


/* The request must have failed so. */
static void
end_failed(request_t *req, uint32_t fail, const char *param, const char *says)
{
    end(req);

    if (reply.n_fail != 1 || reply.fail.fail != fail
        || strcmp(reply.fail.param, param) != 0
        || strstr(reply.fail.text, says) == NULL)
    {
        fail_msg("%d fail %u \"%s\": \"%s\" instead of %u \"%s\": \"%s\"",
                 reply.n_fail, reply.fail.fail, reply.fail.param,
                 reply.fail.text, fail, param, says);
    }

    assert_int_equal(reply.n_start + reply.n_delta, 0);
    reply_fini(&reply);
}


/* --- prompts --- */

static void
test_prompt_errors(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, 0);
    char prompt[TINY_CTX + 2];

    (void) state;
    end_failed(ask_text(engine, &a, ""), LLM_FAIL_BADREQ, "prompt",
               "The prompt is empty");
    end_failed(ask_text(engine, &a, "a\xff"), LLM_FAIL_BADREQ, "",
               "not valid UTF-8");

    memset(prompt, 'q', sizeof(prompt));
    prompt[TINY_CTX] = '\0';
    end_failed(ask_text(engine, &a, prompt), LLM_FAIL_CONTEXT, "prompt",
               "context length is 256 tokens. However, your prompt contains "
               "256 input tokens");

    a.params.max_tokens = 0;
    end(ask_text(engine, &a, prompt));
    assert_int_equal(reply.done.prompt_tokens, TINY_CTX);
    reply_fini(&reply);

    prompt[TINY_CTX] = 'q';
    prompt[TINY_CTX + 1] = '\0';
    end_failed(ask_text(engine, &a, prompt), LLM_FAIL_CONTEXT, "prompt",
               "at least 257 input tokens");

    /* no section at all */
    ask_begin(&a);
    end_failed(ask_send(engine, &a), LLM_FAIL_BADREQ, "prompt", "is empty");
}


static request_t *
ask_ids(ask_t *a, const int32_t *ids, int n)
{
    ask_begin(a);
    ask_section(a, LLM_SEC_PROMPT, ids, (size_t) n * sizeof(int32_t));

    return ask_send(engine, a);
}


static void
test_ids(void **state)
{
    static int32_t ids[100000];
    ask_t a = ask(LLM_REQ_TOKENS, LLM_F_ECHO);

    (void) state;

    for (int i = 0; i < 100000; i++) {
        ids[i] = 'a' + i % 26;
    }

    a.params.max_tokens = 0;
    end(ask_ids(&a, ids, 26));
    assert_text(&reply.prompt, "abcdefghijklmnopqrstuvwxyz");
    reply_fini(&reply);

    a.params.max_tokens = 4;
    end_failed(ask_ids(&a, ids, 0), LLM_FAIL_BADREQ, "prompt", "is empty");
    end_failed(ask_ids(&a, ids, 257), LLM_FAIL_CONTEXT, "prompt",
               "contains 257 input tokens");
    end_failed(ask_ids(&a, ids, 100000), LLM_FAIL_CONTEXT, "prompt",
               "contains 100000 input tokens");

    static const int32_t bad[] = { -1, TINY_VOCAB, INT32_MIN, INT32_MAX };

    for (int i = 0; i < 4; i++) {
        char says[64];

        ids[3] = bad[i];
        snprintf(says, sizeof(says), "Token id %d is out of vocabulary",
                 (int) bad[i]);
        end_failed(ask_ids(&a, ids, 5), LLM_FAIL_BADREQ, "prompt", says);
        a.kind = LLM_REQ_DETOKENIZE;
        end_failed(ask_ids(&a, ids, 5), LLM_FAIL_BADREQ, "tokens", says);
        a.kind = LLM_REQ_TOKENS;
    }
}


static void
test_parameter_errors(void **state)
{
    static const int32_t stop_ids[] = { 5, TINY_VOCAB };
    static const int32_t negative = -1;
    static const llm_bias_t bias[] = { { 5, 1 }, { TINY_VOCAB, 1 } };
    static const llm_bias_t minus = { -7, 1 };
    static const struct {
        uint32_t sec;
        const void *bytes;
        size_t len;
        const char *param;
        const char *says;
    } cases[] = {
        { LLM_SEC_STOP_TOKENS, stop_ids, 8, "stop_token_ids",
          "out of vocabulary" },
        { LLM_SEC_STOP_TOKENS, &negative, 4, "stop_token_ids", "Token id -1" },
        { LLM_SEC_STOP_TOKENS, stop_ids, 7, "", "not whole" },
        { LLM_SEC_LOGIT_BIAS, bias, 16, "logit_bias", "out of vocabulary" },
        { LLM_SEC_LOGIT_BIAS, &minus, 8, "logit_bias", "token -7" },
        { LLM_SEC_LOGIT_BIAS, bias, 15, "", "not whole" },
        { LLM_SEC_STOP, "\1\0\0", 3, "", "do not parse" },
        { LLM_SEC_STOP, "\0\0\0\0", 4, "", "is empty" },
        { LLM_SEC_STOP, "\5\0\0\0abc", 7, "", "do not parse" },
    };

    (void) state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ask_t a = ask(LLM_REQ_TEXT, 0);

        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "q", 1);
        ask_section(&a, cases[i].sec, cases[i].bytes, cases[i].len);
        end_failed(ask_send(engine, &a), LLM_FAIL_BADREQ, cases[i].param,
                   cases[i].says);
    }

    ask_t a = ask(LLM_REQ_TEXT, 0);

    a.params.top_p = 0;
    end_failed(ask_text(engine, &a, "q"), LLM_FAIL_BADREQ, "", "top_p");
    a = ask(99, 0);
    end_failed(ask_text(engine, &a, "q"), LLM_FAIL_BADREQ, "", "kind");
}


/* Penalties have a state of their own; it must not disturb a plain run. */
static void
test_penalties(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);
    const llm_bias_t bias = { 'y', 30 };

    (void) state;
    a.params.frequency_penalty = 2;
    a.params.repetition_penalty = 1.5f;
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    ask_section(&a, LLM_SEC_LOGIT_BIAS, &bias, sizeof(bias));
    request_t *req = ask_send(engine, &a);

    assert_non_null(req->samp_state);
    end(req);
    assert_int_equal(reply.done.completion_tokens, 16);
    assert_true(reply.content.len > 0 && reply.content.data[0] == 'y');
}


/* --- tokenize and detokenize --- */

static void
test_tokenize(void **state)
{
    ask_t a = ask(LLM_REQ_TOKENIZE, 0);
    static char text[(1 << 18) + 1];

    (void) state;
    end(ask_text(engine, &a, "hello q"));
    assert_int_equal(reply.done.finish, LLM_FINISH_STOP);
    assert_int_equal(reply.done.completion_tokens, n_log);
    assert_int_equal(n_log, 3);
    reply_fini(&reply);

    /* nothing is nothing, not an error */
    n_log = 0;
    end(ask_text(engine, &a, ""));
    assert_int_equal(reply.done.completion_tokens, 0);
    assert_int_equal(n_log, 0);
    reply_fini(&reply);

    /* as many as the limit allows, beyond the context; and one more */
    for (size_t i = 0; i < sizeof(text); i++) {
        text[i] = "qz\n"[i % 3];
    }

    text[1 << 18] = '\0';
    end(ask_text(engine, &a, text));
    assert_int_equal(reply.done.completion_tokens, 1 << 18);
    assert_int_equal(n_log, 1 << 18);
    reply_fini(&reply);

    n_log = 0;
    ask_begin(&a);
    text[1 << 18] = 'q';
    ask_section(&a, LLM_SEC_PROMPT, text, sizeof(text));
    end_failed(ask_send(engine, &a), LLM_FAIL_BADREQ, "prompt",
               "more than 262144 tokens");
    assert_int_equal(n_log, 0);

    end_failed(ask_text(engine, &a, "\xff"), LLM_FAIL_BADREQ, "", "UTF-8");
}


/* Llama 3 files leave add_bos_token out and mean true. */
static void
test_default_bos(void **state)
{
    static const char *const pres[] = { "gpt-2", "llama-bpe" };
    engine_t *usual = engine;

    (void) state;

    for (int i = 0; i < 2; i++) {
        ask_t a = ask(LLM_REQ_TOKENIZE, LLM_F_ADD_SPECIAL);

        tiny_pre = pres[i];
        engine = tiny_engine(NULL);
        engine->on_tokens = on_tokens;
        n_log = 0;
        end(ask_text(engine, &a, "q"));
        assert_int_equal(n_log, 1 + i);
        assert_int_equal(token_log[0], i == 0 ? 'q' : MINI_BOS);
        reply_fini(&reply);
        engine_close(engine);
    }

    tiny_pre = pres[0];
    engine = usual;
}


static void
test_detokenize(void **state)
{
    static int32_t ids[40000];
    ask_t a = ask(LLM_REQ_DETOKENIZE, 0);

    (void) state;
    ids[0] = 'h';
    ids[1] = MINI_IM_END;
    ids[2] = 0xe2;
    end(ask_ids(&a, ids, 3));
    assert_text(&reply.content, "h<|im_end|>\xef\xbf\xbd");
    assert_int_equal(reply.n_start, 1);
    assert_int_equal(reply.n_tokens, 0);
    reply_fini(&reply);

    end(ask_ids(&a, ids, 0));
    assert_text(&reply.content, "");
    reply_fini(&reply);

    /* far beyond the context and the size of a record */
    for (int i = 0; i < 40000; i++) {
        ids[i] = i % 2 ? TOK_LONG : 0xe2;
    }

    end(ask_ids(&a, ids, 40000));
    assert_int_equal(reply.content.len, 20000 * (LONG_BYTES + 3));
    assert_true(reply.largest <= LLM_RECORD_MAX);
}


/* --- chat --- */

typedef struct {
    const char *messages;
    const char *tools;
    const char *kwargs;
    uint32_t flags;
    const char *want;  /* the rendered prompt, or NULL: an error */
    const char *param; /* of the error */
    const char *says;
} chat_case_t;

#define HELLO "[{\"role\":\"user\",\"content\":\"hello\"}]"

static const chat_case_t chat_cases[] = {
    { HELLO, NULL, NULL, 0, "<|im_end|>user:hello", NULL, NULL },
    { HELLO, NULL, NULL, LLM_F_GENERATION_PROMPT, "<|im_end|>user:hello>", NULL,
      NULL },
    { HELLO, "[{},{}]", NULL, 0, "<|im_end|>user:hello2", NULL, NULL },
    { HELLO, "[]", NULL, 0, "<|im_end|>user:hello", NULL, NULL },
    { HELLO, "null", "null", 0, "<|im_end|>user:hello", NULL, NULL },
    { HELLO, NULL, "{\"shout\":\"hey\"}", 0, "<|im_end|>user:hellohey", NULL,
      NULL },
    { HELLO, NULL, "{\"messages\":[],\"bos_token\":\"x\"}", 0,
      "<|im_end|>user:hello", NULL, NULL },
    { "[{\"role\":\"user\",\"content\":\"he\"}]", NULL, NULL,
      LLM_F_CONTINUE_FINAL, "<|im_end|>user:he", NULL, NULL },

    /* arguments: a string that holds an object becomes one */
    { "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
      "\"arguments\":\"{\\\"a\\\":1,\\\"b\\\":\\\"x\\\"}\"}},"
      "{\"function\":{\"arguments\":{\"c\":2}}}]}]",
      NULL, NULL, 0, "<|im_end|>assistant:a=1;b=x;c=2;", NULL, NULL },
    { "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
      "\"arguments\":\"{}\"}}]}]",
      NULL, NULL, 0, "<|im_end|>assistant:", NULL, NULL },

    /* shapes that nobody should send */
    { "[{\"role\":\"x\",\"tool_calls\":[]}]", NULL, NULL, 0,
      "<|im_end|>x:", NULL, NULL },
    { "[]", NULL, NULL, 0, NULL, "messages", "at least one" },
    { "{\"a\":1}", NULL, NULL, 0, NULL, "messages", "an array" },
    { "\"x\"", NULL, NULL, 0, NULL, "messages", "an array" },
    { "7", NULL, NULL, 0, NULL, "messages", "an array" },
    { "[{\"role\":", NULL, NULL, 0, NULL, "messages", "not valid JSON" },
    { HELLO, "[", NULL, 0, NULL, "tools", "not valid JSON" },
    { HELLO, "{\"a\":1}", NULL, 0, NULL, "tools", "an array" },
    { HELLO, NULL, "{", 0, NULL, "chat_template_kwargs", "not valid JSON" },
    { HELLO, NULL, "[1]", 0, NULL, "chat_template_kwargs", "an object" },
    { "[{\"role\":\"user\",\"content\":\"\"}]", NULL, NULL,
      LLM_F_CONTINUE_FINAL, NULL, "messages", "" },
};


static request_t *
ask_chat(ask_t *a, const chat_case_t *c)
{
    a->flags = c->flags | LLM_F_ECHO;
    ask_begin(a);
    ask_section(a, LLM_SEC_MESSAGES, c->messages, strlen(c->messages));

    if (c->tools != NULL) {
        ask_section(a, LLM_SEC_TOOLS, c->tools, strlen(c->tools));
    }

    if (c->kwargs != NULL) {
        ask_section(a, LLM_SEC_KWARGS, c->kwargs, strlen(c->kwargs));
    }

    return ask_send(engine, a);
}


static void
test_chat(void **state)
{
    (void) state;

    for (size_t i = 0; i < sizeof(chat_cases) / sizeof(chat_cases[0]); i++) {
        const chat_case_t *c = &chat_cases[i];
        ask_t a = ask(LLM_REQ_CHAT, 0);

        a.params.max_tokens = 0;
        request_t *req = ask_chat(&a, c);

        if (c->want == NULL) {
            end_failed(req, LLM_FAIL_BADREQ, c->param, c->says);
            continue;
        }

        end(req);
        if (reply.n_fail > 0) {
            fail_msg("%s: %s", c->messages, reply.fail.text);
        }
        assert_text(&reply.prompt, c->want);
        const uint32_t n = reply.done.prompt_tokens;
        reply_fini(&reply);

        /* the same tokens by /tokenize */
        n_log = 0;
        a.kind = LLM_REQ_TOKENIZE_CHAT;
        end(ask_chat(&a, c));
        assert_int_equal(n_log, n);
        reply_fini(&reply);
    }
}


/* arguments that are no string, no JSON or no object: as they are, and no
 * crash.  The template may refuse them. */
static void
test_chat_arguments(void **state)
{
    static const char *const arguments[] = {
        "\"\"",
        "\"{\"",
        "\"[1]\"",
        "\"1\"",
        "\"null\"",
        "null",
        "1",
        "[1,2]",
        "{}",
        "true",
        "\"{\\\"a\\\":{}}\"",
        "\"{\\\"a\\\":1} trailing\"",
    };
    static const char *const shapes[] = {
        "[{\"role\":\"a\",\"tool_calls\":[{\"function\":{\"arguments\":%s}}]}]",
        "[{\"role\":\"a\",\"tool_calls\":{\"function\":%s}}]",
        "[{\"role\":\"a\",\"tool_calls\":[{\"function\":%s}]}]",
        "[{\"role\":\"a\",\"tool_calls\":[%s]}]",
        "[{\"role\":\"a\",\"tool_calls\":%s}]",
        "[%s]",
        "[[%s]]",
    };
    char text[512];

    (void) state;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        for (size_t i = 0; i < sizeof(arguments) / sizeof(arguments[0]); i++) {
            const chat_case_t c = { .messages = text };
            ask_t a = ask(LLM_REQ_CHAT, 0);

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
            snprintf(text, sizeof(text), shapes[s], arguments[i]);
#pragma GCC diagnostic pop
            end(ask_chat(&a, &c));
            assert_true(reply.n_done == 1
                        || reply.fail.fail == LLM_FAIL_BADREQ);
            reply_fini(&reply);
        }
    }
}


static void
test_chat_too_long(void **state)
{
    static char text[2000];
    const chat_case_t c = { .messages = text };
    ask_t a = ask(LLM_REQ_CHAT, 0);

    (void) state;
    strcpy(text, "[{\"role\":\"user\",\"content\":\"");
    memset(text + strlen(text), 'q', 1000);
    strcat(text, "\"}]");
    end_failed(ask_chat(&a, &c), LLM_FAIL_CONTEXT, "messages",
               "at least 257 input tokens");
}


/* --- bytes that are no request --- */

static void
test_garbage(void **state)
{
    random_t random = random_start("garbage");
    const request_origin_t from = { .submit_ns = 1 };

    (void) state;

    for (int round = 0; round < 20000; round++) {
        ask_t a = ask(1 + (uint32_t) random_below(&random, 6),
                      (uint32_t) random_next(&random) & 0x3ff);

        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "hello world!", 12);
        ask_section(&a, LLM_SEC_MESSAGES, HELLO, strlen(HELLO));
        ask_section(&a, LLM_SEC_STOP_TOKENS, "\1\0\0", 4);
        a.params.max_tokens = 2;
        uint32_t len = llm_request_end(&a.w);

        for (int i = random_below(&random, 4); i > 0; i--) {
            tiny_area[random_below(&random, (int) len)] ^=
                (uint8_t) (1 << random_below(&random, 8));
        }

        if (random_below(&random, 8) == 0) {
            len = (uint32_t) random_below(&random, (int) len + 1);
        }

        n_log = 0;
        request_t *req = intake_request(engine, tiny_area, len, &from);

        assert_non_null(req);
        engine_step(engine);
        reply_read(&reply, req);
        emit_abort(engine, req);
        request_destroy(req);
        reply_fini(&reply);
        assert_int_equal(pages_used(engine), 0);
    }
}


static int
finish(void **state)
{
    (void) state;
    reply_fini(&reply);
    engine_close(engine);

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_prompt_errors, setup),
        cmocka_unit_test_setup(test_ids, setup),
        cmocka_unit_test_setup(test_parameter_errors, setup),
        cmocka_unit_test_setup(test_penalties, setup),
        cmocka_unit_test_setup(test_tokenize, setup),
        cmocka_unit_test_setup(test_default_bos, setup),
        cmocka_unit_test_setup(test_detokenize, setup),
        cmocka_unit_test_setup(test_chat, setup),
        cmocka_unit_test_setup(test_chat_arguments, setup),
        cmocka_unit_test_setup(test_chat_too_long, setup),
        cmocka_unit_test_setup(test_garbage, setup),
    };

    log_open(NULL, LOG_ERR);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
