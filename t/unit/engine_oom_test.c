/*
 * No memory, at every place of a request's life: the n-th allocation fails, or
 * all from the n-th on, for each n.  Either the answer is whole or there is one
 * ERROR record; never a crash, a leak or an answer with a hole.
 *
 * Linked with --wrap for malloc, calloc and realloc; cJSON is a library of its
 * own and gets the same malloc by its hooks.
 */

#include "t/unit/engine_tiny.h"

#include <limits.h>

#include <cjson/cJSON.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);

static engine_t *engine;
static bool armed;
static bool for_good; /* all from then on */
static long countdown;
static bool failed;


static bool
fails(void)
{
    if (!armed) {
        return false;
    }

    countdown--;

    if (countdown == 0 || (for_good && countdown < 0)) {
        failed = true;
        return true;
    }

    return false;
}


void *
__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}


void *
__wrap_calloc(size_t n, size_t bytes)
{
    return fails() ? NULL : __real_calloc(n, bytes);
}


void *
__wrap_realloc(void *p, size_t bytes)
{
    return fails() ? NULL : __real_realloc(p, bytes);
}


#define CHAT                                                              \
    "[{\"role\":\"user\",\"content\":\"hello\"},{\"role\":\"assistant\"," \
    "\"tool_calls\":[{\"function\":{\"arguments\":\"{\\\"a\\\":1}\"}}]}]"

typedef struct {
    uint32_t kind;
    uint32_t flags;
    int max_tokens;
    int32_t token; /* that the model wants */
    bool penalties;
    const char *prompt;
} life_t;

static const life_t lives[] = {
    { LLM_REQ_TEXT, 0, 20, TOK_LONG, false, "hello world" },
    { LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_ECHO, 5, 'y', true, "hello world" },
    { LLM_REQ_TEXT, LLM_F_ECHO | LLM_F_LOGPROBS, 12, TOK_LONG, false, "hello" },
    { LLM_REQ_TOKENS, LLM_F_LOGPROBS | LLM_F_STREAM, 12, TOK_LONG, true,
      "abcdabcd" },
    { LLM_REQ_CHAT, LLM_F_ECHO, 2, 'y', false, CHAT },
    { LLM_REQ_TOKENIZE, 0, 0, 'y', false, "hello world" },
    { LLM_REQ_TOKENIZE_CHAT, 0, 0, 'y', false, CHAT },
    { LLM_REQ_DETOKENIZE, 0, 0, 'y', false, "abcdabcd" },
};


static request_t *
send(const life_t *life)
{
    const bool chat =
        life->kind == LLM_REQ_CHAT || life->kind == LLM_REQ_TOKENIZE_CHAT;
    const llm_bias_t bias = { life->token, 10000 };
    static const char *const stops[] = { "zz", "\xe2\x82\xac", NULL };
    const int32_t stop = 'w';
    char prompt[256];
    size_t len = strlen(life->prompt);
    ask_t a = ask(life->kind, life->flags);

    strcpy(prompt, life->prompt);
    a.params.max_tokens = life->max_tokens;
    a.params.min_tokens = 1;
    a.params.top_logprobs = 8;
    a.params.presence_penalty = life->penalties ? 1 : 0;

    if (life->kind == LLM_REQ_TOKENS || life->kind == LLM_REQ_DETOKENIZE) {
        for (size_t i = 0; i < len; i += 4) {
            const int32_t id = life->prompt[i];
            memcpy(prompt + i, &id, sizeof(id));
        }
    }

    ask_begin(&a);
    ask_section(&a, chat ? LLM_SEC_MESSAGES : LLM_SEC_PROMPT, prompt, len);
    ask_section(&a, LLM_SEC_LOGIT_BIAS, &bias, sizeof(bias));
    ask_section(&a, LLM_SEC_TENANT, "acme", 4);
    ask_section(&a, LLM_SEC_STOP_TOKENS, &stop, sizeof(stop));
    ask_stop(&a, stops);

    armed = true;
    return ask_send(engine, &a);
}


/* Lives it with the n-th allocation failing; n 0: none.  The records are
 * consumed step by step, or at the end. */
static void
live(const life_t *life, long n, bool drain, reply_t *reply)
{
    countdown = n > 0 ? n : LONG_MAX;
    failed = false;

    /* scratch that lasts begins anew, so that it allocates too */
    tok_ids_fini(&engine->prompt.ids);
    buf_fini(&engine->prompt.text.text);
    buf_fini(&engine->prompt.text.trusted);

    request_t *req = send(life);

    while (req != NULL && !req->finished) {
        const bool busy = engine_step(engine);

        armed = false;
        assert_true(busy || req->finished);
        if (drain) {
            reply_read(reply, req);
        }
        armed = true;
    }

    armed = false;

    if (req == NULL) {
        assert_true(failed);
        reply->n_fail = 1;
    } else {
        reply_read(reply, req);
        request_destroy(req);
    }

    assert_true(list_empty(&engine->requests));
    assert_int_equal(pages_used(engine), 0);
    sched_check(engine->sched);
}


static void
one_life(const life_t *life, bool drain)
{
    reply_t whole = { 0 };
    long n = 1;

    live(life, 0, drain, &whole);
    assert_int_equal(whole.n_done, 1);

    for (;; n++) {
        reply_t reply = { 0 };

        live(life, n, drain, &reply);
        assert_int_equal(reply.n_done + reply.n_fail, 1);

        if (reply.n_done == 1) {
            assert_int_equal(reply.content.len, whole.content.len);
            assert_int_equal(reply.prompt.len, whole.prompt.len);
            assert_int_equal(reply.n_tokens, whole.n_tokens);
            assert_int_equal(reply.n_logprobs, whole.n_logprobs);
            assert_int_equal(reply.n_prompt_logprobs, whole.n_prompt_logprobs);
            assert_int_equal(reply.done.completion_tokens,
                             whole.done.completion_tokens);
        }

        reply_fini(&reply);

        if (!failed) {
            break;
        }
    }

    print_message("# kind %u: %ld allocations\n", life->kind, n - 1);
    assert_true(n > 5);
    reply_fini(&whole);
}


static void
test_lives(void **state)
{
    cJSON_Hooks hooks = { __wrap_malloc, free };

    (void) state;
    cJSON_InitHooks(&hooks);

    for (size_t i = 0; i < sizeof(lives) / sizeof(lives[0]); i++) {
        for (int how = 0; how < 4; how++) {
            for_good = how & 1;
            one_life(&lives[i], how & 2);
        }
    }
}


/* The same by the arena's own way, which the request's private copy uses. */
static void
test_arena(void **state)
{
    (void) state;

    for (size_t i = 0; i < sizeof(lives) / sizeof(lives[0]); i++) {
        for (long n = 1; n < 12; n++) {
            reply_t reply = { 0 };

            countdown = LONG_MAX;
            arena_fail_after(n);
            request_t *req = send(&lives[i]);
            armed = false;
            run_all(engine);
            arena_fail_after(0);

            if (req != NULL) {
                reply_read(&reply, req);
                assert_int_equal(reply.n_done + reply.n_fail, 1);
                request_destroy(req);
            } else {
                assert_true(n <= 3);
            }

            reply_fini(&reply);
            assert_int_equal(pages_used(engine), 0);
        }
    }
}


/* Starting up without memory: a sentence, and nothing left behind. */
static void
test_open(void **state)
{
    char path[64];
    engine_conf_t conf;
    long n = 1;

    (void) state;
    tiny_file(path);
    engine_conf_init(&conf);
    conf.model = path;
    conf.threads = 1;
    conf.max_num_seqs = 8;
    conf.max_num_batched_tokens = 64;

    for (int again = 0; again < 2; again++) {
        for_good = again;

        for (n = 1;; n++) {
            llm_err_t err = { .text = "" };
            engine_t *other = NULL;

            countdown = n;
            failed = false;
            armed = true;
            const int rc = engine_open(&conf, &other, &err);
            armed = false;

            if (rc == LLM_OK) {
                engine_close(other);
            } else {
                assert_true(failed);
                assert_true(err.text[0] != '\0');
            }

            if (!failed) {
                assert_int_equal(rc, LLM_OK);
                break;
            }
        }
    }

    print_message("# opening: %ld allocations\n", n - 1);
    assert_true(n > 30);
    unlink(path);
}


static int
finish(void **state)
{
    (void) state;
    engine_close(engine);

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lives),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_open),
    };

    log_open(NULL, LOG_ERR);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    engine = tiny_engine(NULL);

    return cmocka_run_group_tests(tests, NULL, finish);
}
