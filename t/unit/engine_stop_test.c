/*
 * From tokens to text: stop strings, whole characters, records of every size.
 */

#include "t/unit/engine_emit.h"
#include "t/unit/random.h"


/* --- stop strings --- */

typedef struct {
    const char *text;     /* what the model says */
    const char *stops[4]; /* NULL behind the last */
    const char *want;
    int stop; /* index, -1: none */
} stop_case_t;

static const stop_case_t stop_cases[] = {
    { "hello world", { "world" }, "hello ", 0 },
    { "hello", { "o" }, "hell", 0 },
    { "hello", { "hello" }, "", 0 },
    { "hello", { "hellos" }, "hello", -1 },
    /* a candidate fails and the next one began inside it */
    { "aaab", { "aab" }, "a", 0 },
    { "abababc", { "ababc" }, "ab", 0 },
    { "ababac", { "ababc" }, "ababac", -1 },
    /* several: the earliest wins, not the first of the list */
    { "one two three", { "three", "two" }, "one ", 1 },
    { "abcd", { "bcd", "abcd" }, "", 1 },
    { "abcdx", { "cdx", "abcde", "d" }, "abc", 2 },
    { "xxSTOP", { "STOP", "STO" }, "xx", 1 },
    /* whole characters, and stops that share their bytes */
    { "caf\xc3\xa9!", { "\xc3\xa9" }, "caf", 0 },
    { "\xc3\xa8\xc3\xa9", { "\xc3\xa9" }, "\xc3\xa8", 0 },
    { "\xe2\x82\xac\xe2\x82\xad", { "\xe2\x82\xad" }, "\xe2\x82\xac", 0 },
    { "\xf0\x9f\x98\x80x", { "x" }, "\xf0\x9f\x98\x80", 0 },
    /* a zero is a byte like others; bytes that are no text */
    { "\xff\xfe"
      "end",
      { "end" },
      "\xef\xbf\xbd\xef\xbf\xbd",
      0 },
    { "\xe2\x82"
      "end",
      { "end" },
      "\xef\xbf\xbd",
      0 },
};


/* How the text is cut into records must not show in it. */
static void
test_stop_strings(void **state)
{
    (void) state;

    for (size_t i = 0; i < sizeof(stop_cases) / sizeof(stop_cases[0]); i++) {
        const stop_case_t *c = &stop_cases[i];

        for (int how = 0; how < 4; how++) {
            const bool include = how & 1;
            ask_t a = ask(LLM_REQ_TEXT, (include ? LLM_F_INCLUDE_STOP : 0)
                                            | (how & 2 ? LLM_F_STREAM : 0));
            char want[256];

            a.params.max_tokens = (int) strlen(c->text);
            snprintf(want, sizeof(want), "%s%s", c->want,
                     include && c->stop >= 0 ? c->stops[c->stop] : "");

            request_t *req = begin(&a, c->stops);

            emit_bytes(engine, req, c->text);
            end(req);
            assert_text(&reply.content, want);
            assert_int_equal(reply.done.finish, c->stop >= 0
                                                    ? LLM_FINISH_STOP
                                                    : LLM_FINISH_LENGTH);
            assert_int_equal(reply.done.stop_kind,
                             c->stop >= 0 ? LLM_STOP_STRING : LLM_STOP_NONE);
            assert_int_equal(reply.done.stop_value, c->stop >= 0 ? c->stop : 0);
            reply_fini(&reply);
        }
    }
}


/* Against the obvious way: collect, search, cut.  Tokens of several bytes. */
static void
test_stop_storm(void **state)
{
    static const char *const pool[] = { "a",         "b",        "aa",
                                        "ab",        "ba",       "aba",
                                        "abab",      "\xc3\xa9", "a\xc3\xa9",
                                        "bb\xc3\xa9" };
    /* a, b, "aa", "ab", the two bytes of é, and é */
    static const char *const said[] = { "a", "b", "aa", "ab", "\xc3\xa9" };
    random_t random = random_start("stop strings");
    int32_t ids[5] = { 'a', 'b', 0, 0, 0 };

    (void) state;

    for (int i = 2; i < 5; i++) {
        engine->prompt.ids.n = 0;
        assert_int_equal(tok_encode(engine->tok, said[i], strlen(said[i]), NULL,
                                    0, 8, &engine->prompt.ids, NULL),
                         LLM_OK);
        assert_int_equal(engine->prompt.ids.n, 1);
        ids[i] = engine->prompt.ids.ids[0];
    }

    for (int round = 0; round < 3000; round++) {
        const char *stops[4] = { NULL };
        const int n_stops = random_below(&random, 4);
        char all[256] = "", want[256];
        ask_t a =
            ask(LLM_REQ_TEXT, random_below(&random, 2) ? LLM_F_STREAM : 0);

        for (int i = 0; i < n_stops; i++) {
            stops[i] = pool[random_below(&random, 10)];
        }

        request_t *req = begin(&a, stops);
        int found = -1;

        for (int t = 0; t < a.params.max_tokens && found == -1; t++) {
            const int k = random_below(&random, 5);
            const char *best = NULL;

            strcat(all, said[k]);
            emit_one(engine, req, ids[k]);

            for (int i = 0; i < n_stops; i++) {
                const char *hit = strstr(all, stops[i]);

                if (hit != NULL && (best == NULL || hit < best)) {
                    best = hit;
                    found = i;
                }
            }

            snprintf(want, sizeof(want), "%.*s",
                     best != NULL ? (int) (best - all) : 255, all);
            assert_int_equal(req->finished,
                             found >= 0 || t == a.params.max_tokens - 1);
        }

        end(req);
        assert_text(&reply.content, want);
        assert_int_equal(reply.done.stop_value, found >= 0 ? found : 0);
        reply_fini(&reply);
    }
}


/* Text that may begin a stop string waits; no other text does. */
static void
test_held_back(void **state)
{
    static const char *const stops[] = { "STOP", NULL };
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM);
    request_t *req = begin(&a, stops);

    (void) state;
    emit_bytes(engine, req, "ab");
    reply_read(&reply, req);
    assert_text(&reply.content, "ab");

    emit_bytes(engine, req, "STO");
    reply_read(&reply, req);
    assert_text(&reply.content, "ab");

    emit_bytes(engine, req, "S");
    reply_read(&reply, req);
    assert_text(&reply.content, "abSTO");

    emit_bytes(engine, req, "TO");
    emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
    end(req);
    assert_text(&reply.content, "abSTOSTO");
    assert_int_equal(reply.n_tokens, 8);
    assert_int_equal(reply.done.completion_tokens, 8);
}


/* What came before min_tokens is no stop string, held back or not. */
static void
test_min_tokens_stop(void **state)
{
    static const char *const stops[] = { "ab", NULL };

    (void) state;

    for (int stream = 0; stream < 2; stream++) {
        ask_t a = ask(LLM_REQ_TEXT, stream ? LLM_F_STREAM : 0);

        a.params.min_tokens = 4;
        request_t *req = begin(&a, stops);

        emit_bytes(engine, req, "abcxyab");
        end(req);
        assert_text(&reply.content, "abcxy");
        assert_int_equal(reply.done.completion_tokens, 7);
        reply_fini(&reply);
    }
}


/* --- characters --- */

static void
test_characters(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM);
    request_t *req = begin(&a, NULL);

    (void) state;
    emit_bytes(engine, req, "\xf0\x9f\x98");
    reply_read(&reply, req);
    assert_text(&reply.content, "");
    emit_bytes(engine, req, "\x80");
    reply_read(&reply, req);
    assert_text(&reply.content, "\xf0\x9f\x98\x80");

    /* a character that never ends, one that is none, one cut off */
    emit_bytes(engine, req, "\xe2\x82x\x80\xc3");
    emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
    end(req);
    assert_text(&reply.content, "\xf0\x9f\x98\x80\xef\xbf\xbdx\xef\xbf\xbd"
                                "\xef\xbf\xbd");
    assert_int_equal(reply.n_tokens, 9);
}


/* Records of a long answer: all below the limit, none inside a character. */
static void
test_long_records(void **state)
{
    (void) state;

    for (int logprobs = 0; logprobs < 2; logprobs++) {
        /* a stop string that holds everything back until the end */
        static char stop[6000];
        const char *stops[] = { stop, NULL };
        ask_t a = ask(LLM_REQ_TEXT, logprobs ? LLM_F_LOGPROBS : 0);
        const int n = 240;
        size_t bytes = 0;

        for (size_t i = 0; i < sizeof(stop) - 1; i++) {
            stop[i] = "\xe2\x82\xac"[i % 3];
        }

        a.params.max_tokens = n;
        request_t *req = begin(&a, logprobs ? NULL : stops);

        for (int t = 0; t < n; t++) {
            /* 300 bytes each, and single bytes of a character between */
            const int32_t token = logprobs
                                      ? (t % 2 ? TOK_LONG + t % N_LONG : 'x')
                                      : (uint8_t) "\xe2\x82\xac"[t % 3];
            emit_one(engine, req, token);
            bytes += token >= TOK_LONG ? LONG_BYTES : 1;
            reply_read(&reply, req);
        }

        end(req);
        assert_int_equal(reply.n_tokens, n);
        assert_int_equal(reply.content.len, bytes);
        assert_int_equal(reply.n_logprobs, logprobs ? n : 0);
        assert_true(reply.largest <= LLM_RECORD_MAX);
        reply_fini(&reply);
    }
}


/* Twenty alternatives of the longest tokens, with and without streaming, and
 * when the last one ends the request. */
static void
test_logprob_records(void **state)
{
    samp_result_t result = { .token = TOK_LONG, .logprob = -0.5f, .n_top = 20 };

    (void) state;

    for (int i = 0; i < 20; i++) {
        result.top[i] = (samp_logprob_t){ TOK_LONG + i, -(float) i };
    }

    for (int stream = 0; stream < 2; stream++) {
        ask_t a = ask(LLM_REQ_TEXT, LLM_F_LOGPROBS | LLM_F_INCLUDE_STOP
                                        | (stream ? LLM_F_STREAM : 0));
        const int32_t stop = TOK_LONG + 3;

        a.params.top_logprobs = 20;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "q", 1);
        ask_section(&a, LLM_SEC_STOP_TOKENS, &stop, sizeof(stop));
        request_t *req = ask_send(engine, &a);

        /* small entries that just do not force a record, then a large one */
        for (int i = 0; i < 7; i++) {
            emit_one(engine, req, TOK_LONG + 1);
        }

        for (int i = 0; i < 3; i++) {
            result.token = TOK_LONG + 1 + i;
            emit_token(engine, req, &result);
        }

        end(req);
        assert_int_equal(reply.n_logprobs, 10);
        assert_int_equal(reply.last_chosen, TOK_LONG + 3);
        assert_int_equal(reply.content.len, 10 * LONG_BYTES);
        assert_int_equal(reply.done.stop_kind, LLM_STOP_TOKEN);
        assert_int_equal(reply.done.stop_value, stop);
        assert_true(reply.largest > 5600 && reply.largest <= LLM_RECORD_MAX);
        reply_fini(&reply);
    }
}


/* Without streaming few records leave, with it one a token. */
static void
test_holding(void **state)
{
    (void) state;

    for (int stream = 0; stream < 2; stream++) {
        ask_t a = ask(LLM_REQ_TEXT, stream ? LLM_F_STREAM : 0);

        a.params.max_tokens = 200;
        request_t *req = begin(&a, NULL);

        for (int i = 0; i < 200; i++) {
            emit_one(engine, req, 'a' + i % 26);
            reply_read(&reply, req);
            assert_int_equal(reply.n_delta, stream ? i + 1 : i == 199);
        }

        end(req);
        assert_int_equal(reply.n_tokens, 200);
        assert_int_equal(reply.content.len, 200);
        reply_fini(&reply);
    }

    /* 300 bytes a token: a record whenever 2048 bytes wait */
    ask_t a = ask(LLM_REQ_TEXT, 0);
    request_t *req = begin(&a, NULL);

    for (int i = 0; i < 16; i++) {
        emit_one(engine, req, TOK_LONG);
        reply_read(&reply, req);
        assert_int_equal(reply.n_delta, (i + 1) / 7 + (i == 15));
    }

    end(req);
    assert_int_equal(reply.content.len, 16 * LONG_BYTES);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_stop_strings, setup),
        cmocka_unit_test_setup(test_stop_storm, setup),
        cmocka_unit_test_setup(test_held_back, setup),
        cmocka_unit_test_setup(test_min_tokens_stop, setup),
        cmocka_unit_test_setup(test_characters, setup),
        cmocka_unit_test_setup(test_long_records, setup),
        cmocka_unit_test_setup(test_logprob_records, setup),
        cmocka_unit_test_setup(test_holding, setup),
    };

    log_open(NULL, LOG_ERR);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
