/*
 * Requests: what is written is what is read, and whatever is not well-formed
 * or out of range is refused.  Buffers lie on the heap in their exact size, so
 * that a sanitizer sees any read past the end.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/ipc/msg.h"

static const llm_params_t defaults = {
    .temperature = 0.7f,
    .top_p = 0.9f,
    .min_p = 0.05f,
    .repetition_penalty = 1.1f,
    .presence_penalty = -2,
    .frequency_penalty = 2,
    .top_k = 40,
    .max_tokens = 100,
    .min_tokens = 3,
    .top_logprobs = 20,
    .seed = 0x0123456789abcdefull,
};


/* Decodes a copy of exact size; *req stays valid until the next call. */
static int
decode(const void *area, uint32_t len, const llm_request_t **req,
       const char **why)
{
    static uint8_t *copy;

    free(copy);
    copy = malloc(len > 0 ? len : 1);
    assert_non_null(copy);
    memcpy(copy, area, len);
    *why = NULL;

    return llm_request_decode(copy, len, req, why);
}


static void
add_stop(llm_request_writer_t *w, const char *text)
{
    uint32_t len = (uint32_t) strlen(text);

    llm_request_add(w, &len, sizeof(len));
    llm_request_add(w, text, len);
}


static void
request_round_trip(void **state)
{
    static const int32_t stops[] = { 2, 151645, -1 };
    static const llm_bias_t bias[] = { { 5, -100 }, { 70000, 1.5f } };
    _Alignas(8) uint8_t area[1024];
    llm_request_writer_t w;
    const llm_request_t *req = NULL;
    const char *why;

    (void) state;

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_CHAT,
                      LLM_F_STREAM | LLM_F_LOGPROBS, &defaults);
    llm_request_section(&w, LLM_SEC_MESSAGES);
    llm_request_add(&w, "[{\"role\":", 9);
    llm_request_add(&w, "\"user\"}]", 8);
    llm_request_section(&w, LLM_SEC_STOP);
    add_stop(&w, "\n\n");
    add_stop(&w, "END");
    llm_request_section(&w, LLM_SEC_STOP_TOKENS);
    llm_request_add(&w, stops, sizeof(stops));
    llm_request_section(&w, LLM_SEC_LOGIT_BIAS);
    llm_request_add(&w, bias, sizeof(bias));
    llm_request_section(&w, LLM_SEC_TOOLS); /* present and empty */

    uint32_t len = llm_request_end(&w);

    assert_true(len > sizeof(llm_request_t));
    assert_int_equal(decode(area, len, &req, &why), 0);

    assert_int_equal(req->kind, LLM_REQ_CHAT);
    assert_int_equal(req->flags, LLM_F_STREAM | LLM_F_LOGPROBS);
    assert_memory_equal(&req->params, &defaults, sizeof(defaults));
    assert_int_equal(req->turn.max_queue, 0);
    assert_int_equal(req->turn.n_choices, 1);
    assert_true(req->turn.weight == 1);

    const uint8_t *base = (const uint8_t *) req;
    const llm_section_t *s = req->section;

    assert_int_equal(s[LLM_SEC_MESSAGES].len, 17);
    assert_memory_equal(base + s[LLM_SEC_MESSAGES].off, "[{\"role\":\"user\"}]",
                        17);
    assert_int_equal(s[LLM_SEC_STOP_TOKENS].len, sizeof(stops));
    assert_memory_equal(base + s[LLM_SEC_STOP_TOKENS].off, stops,
                        sizeof(stops));
    assert_memory_equal(base + s[LLM_SEC_LOGIT_BIAS].off, bias, sizeof(bias));
    assert_int_equal(s[LLM_SEC_TOOLS].len, 0);
    assert_int_not_equal(s[LLM_SEC_TOOLS].off, 0);
    assert_int_equal(s[LLM_SEC_PROMPT].off, 0);

    uint32_t pos = 0, n;
    const char *text;
    const uint8_t *stop = base + s[LLM_SEC_STOP].off;

    assert_true(llm_stop_next(stop, s[LLM_SEC_STOP].len, &pos, &text, &n));
    assert_int_equal(n, 2);
    assert_memory_equal(text, "\n\n", 2);
    assert_true(llm_stop_next(stop, s[LLM_SEC_STOP].len, &pos, &text, &n));
    assert_int_equal(n, 3);
    assert_memory_equal(text, "END", 3);
    assert_false(llm_stop_next(stop, s[LLM_SEC_STOP].len, &pos, &text, &n));
}


/* The turn goes where it belongs, before and after sections; into nothing when
 * the area is too small. */
static void
request_turn(void **state)
{
    const llm_turn_t turn = { .max_queue = UINT32_MAX,
                              .n_choices = 64,
                              .weight = 0.25 };
    _Alignas(8) uint8_t area[1024];
    llm_request_writer_t w;
    const llm_request_t *req = NULL;
    const char *why;

    (void) state;

    for (int late = 0; late < 2; late++) {
        llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);

        if (!late) {
            llm_request_turn(&w, &turn);
        }

        llm_request_section(&w, LLM_SEC_TENANT);
        llm_request_add(&w, "ten\0ant", 7);
        llm_request_section(&w, LLM_SEC_PROMPT);
        llm_request_add(&w, "Hi", 2);

        if (late) {
            llm_request_turn(&w, &turn);
        }

        const uint32_t len = llm_request_end(&w);

        assert_int_equal(decode(area, len, &req, &why), 0);
        assert_memory_equal(&req->turn, &turn, sizeof(turn));
        assert_memory_equal(&req->params, &defaults, sizeof(defaults));

        const llm_section_t *s = &req->section[LLM_SEC_TENANT];

        assert_int_equal(s->len, 7);
        assert_memory_equal((const uint8_t *) req + s->off, "ten\0ant", 7);
    }

    memset(area, 0x5a, sizeof(area));
    llm_request_begin(&w, area, sizeof(llm_request_t) - 1, LLM_REQ_TEXT, 0,
                      &defaults);
    llm_request_turn(&w, &turn);
    assert_int_equal(llm_request_end(&w), 0);

    for (size_t i = 0; i < sizeof(area); i++) {
        assert_int_equal(area[i], 0x5a);
    }
}


/* Each capacity up to the need: 0 and no byte outside, then the same bytes. */
static void
request_overflow(void **state)
{
    _Alignas(8) uint8_t want[512];
    llm_request_writer_t w;
    uint32_t need = 0;

    (void) state;

    for (uint32_t cap = 512; cap > 0; cap--) {
        uint8_t *area = malloc(cap);

        assert_non_null(area);
        llm_request_begin(&w, area, cap, LLM_REQ_TEXT, 0, &defaults);
        llm_request_section(&w, LLM_SEC_PROMPT);
        llm_request_add(&w, "hello", 5);
        llm_request_section(&w, LLM_SEC_STOP);
        add_stop(&w, "abc");

        uint32_t len = llm_request_end(&w);

        if (cap == 512) {
            need = len;
            memcpy(want, area, len);
            assert_int_equal(len, sizeof(llm_request_t) + 8 + 7);
        } else if (cap >= need) {
            assert_int_equal(len, need);
            assert_memory_equal(area, want, need);
        } else {
            assert_int_equal(len, 0);
            assert_true(w.overflow);
        }

        free(area);
    }
}


static void
request_writer_misuse(void **state)
{
    _Alignas(8) uint8_t area[512];
    llm_request_writer_t w;

    (void) state;

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);
    llm_request_add(&w, "x", 1); /* no section yet */
    assert_int_equal(llm_request_end(&w), 0);

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_section(&w, LLM_SEC_PROMPT); /* twice */
    assert_int_equal(llm_request_end(&w), 0);

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);
    llm_request_section(&w, LLM_SEC_MAX);
    assert_int_equal(llm_request_end(&w), 0);

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, "x", SIZE_MAX);
    assert_int_equal(llm_request_end(&w), 0);
}


/* A request of one prompt section of 16 zero bytes, to be spoiled. */
typedef struct {
    llm_request_t req;
    _Alignas(8) uint8_t bytes[32];
} spoil_t;


static spoil_t
good(void)
{
    spoil_t s;

    memset(&s, 0, sizeof(s));
    s.req.kind = LLM_REQ_TEXT;
    s.req.turn.weight = 1;
    s.req.params = defaults;
    s.req.section[LLM_SEC_PROMPT].off = sizeof(llm_request_t);
    s.req.section[LLM_SEC_PROMPT].len = 16;

    return s;
}


static bool
accepted(const spoil_t *s)
{
    const llm_request_t *req;
    const char *why;
    int rc = decode(s, sizeof(*s), &req, &why);

    assert_true(rc == 0 ? why == NULL : why != NULL && why[0] != '\0');

    return rc == 0;
}


static void
request_tenant(void **state)
{
    static const struct {
        double weight;
        bool ok;
    } rows[] = {
        { 1, true },         { LLM_WEIGHT_MIN, true },
        { 1000, true },      { 0, false },
        { -1, false },       { 0.0099999, false },
        { 1000.001, false }, { 1e300, false },
        { INFINITY, false }, { -INFINITY, false },
        { NAN, false },      { -NAN, false },
        { 4.9e-324, false },
    };
    _Alignas(8) uint8_t area[sizeof(llm_request_t) + 512];
    llm_request_writer_t w;
    const llm_request_t *req;
    const char *why;
    const uint8_t name[LLM_TENANT_MAX + 1] = { 0 };

    (void) state;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        spoil_t s = good();

        s.req.turn.weight = rows[i].weight;
        assert_int_equal(accepted(&s), rows[i].ok);
    }

    for (size_t len = LLM_TENANT_MAX - 1; len <= sizeof(name); len++) {
        llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, 0, &defaults);
        llm_request_section(&w, LLM_SEC_TENANT);
        llm_request_add(&w, name, len);
        assert_int_equal(decode(area, llm_request_end(&w), &req, &why),
                         len <= LLM_TENANT_MAX ? 0 : -1);
    }

    /* the queue's numbers may be any */
    spoil_t s = good();

    s.req.turn.max_queue = UINT32_MAX;
    s.req.turn.n_choices = UINT32_MAX;
    assert_true(accepted(&s));
}


static void
request_floats(void **state)
{
    static const struct {
        size_t off;
        float least, most;
        bool open; /* least itself is refused */
    } rows[] = {
        { offsetof(llm_params_t, temperature), 0, 3e38f, false },
        { offsetof(llm_params_t, top_p), 0, 1, true },
        { offsetof(llm_params_t, min_p), 0, 1, false },
        { offsetof(llm_params_t, repetition_penalty), 0, 3e38f, true },
        { offsetof(llm_params_t, presence_penalty), -2, 2, false },
        { offsetof(llm_params_t, frequency_penalty), -2, 2, false },
    };

    (void) state;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const float bad[] = { NAN,
                              -NAN,
                              INFINITY,
                              -INFINITY,
                              nextafterf(rows[i].least, -9),
                              nextafterf(rows[i].most, INFINITY) };
        spoil_t s = good();
        float *x = (float *) ((char *) &s.req.params + rows[i].off);

        for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++) {
            *x = bad[k];
            assert_false(accepted(&s));
        }

        *x = rows[i].most;
        assert_true(accepted(&s));
        *x = nextafterf(rows[i].least, 9);
        assert_true(accepted(&s));
        *x = rows[i].least;
        assert_int_equal(accepted(&s), !rows[i].open);
    }
}


static void
request_integers(void **state)
{
    static const struct {
        size_t off;
        int32_t value;
        bool ok;
    } rows[] = {
        { offsetof(llm_params_t, top_k), -1, false },
        { offsetof(llm_params_t, top_k), 0, true },
        { offsetof(llm_params_t, top_k), INT32_MAX, true },
        { offsetof(llm_params_t, max_tokens), -2, false },
        { offsetof(llm_params_t, max_tokens), INT32_MIN, false },
        { offsetof(llm_params_t, max_tokens), -1, true },
        { offsetof(llm_params_t, max_tokens), 0, true },
        { offsetof(llm_params_t, min_tokens), -1, false },
        { offsetof(llm_params_t, min_tokens), 0, true },
        { offsetof(llm_params_t, top_logprobs), -1, false },
        { offsetof(llm_params_t, top_logprobs), 0, true },
        { offsetof(llm_params_t, top_logprobs), 20, true },
        { offsetof(llm_params_t, top_logprobs), 21, false },
        { offsetof(llm_params_t, priority), INT32_MIN, true },
        { offsetof(llm_params_t, priority), INT32_MAX, true },
    };

    (void) state;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        spoil_t s = good();

        memcpy((char *) &s.req.params + rows[i].off, &rows[i].value, 4);
        assert_int_equal(accepted(&s), rows[i].ok);
    }

    for (uint32_t kind = 0; kind < 10; kind++) {
        spoil_t s = good();

        s.req.kind = kind;
        s.req.section[LLM_SEC_MESSAGES] = s.req.section[LLM_SEC_PROMPT];
        assert_int_equal(accepted(&s), kind >= 1 && kind <= 6);
    }

    for (int bit = 0; bit < 32; bit++) {
        spoil_t s = good();

        s.req.flags = 1u << bit;
        assert_int_equal(accepted(&s), bit < 10);
    }
}


static void
request_sections(void **state)
{
    const uint32_t head = sizeof(llm_request_t);
    const uint32_t end = sizeof(spoil_t);
    const struct {
        uint32_t off, len;
        bool ok;
    } rows[] = {
        { head, 32, true },
        { head, 33, false },
        { head, UINT32_MAX, false },
        { head, UINT32_MAX - head + 1, false }, /* wraps to 0 */
        { head + 8, 24, true },
        { head + 4, 4, false }, /* not aligned */
        { head + 1, 0, false },
        { end, 0, true },
        { end + 8, 0, false },
        { UINT32_MAX - 7, 8, false },
        { 0, 0, true }, /* absent */
        { 0, 8, false },
        { head - 8, 8, false }, /* inside the struct */
        { 8, 0, false },
    };

    (void) state;

    for (int sec = 0; sec < LLM_SEC_MAX; sec++) {
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            spoil_t s = good();

            /* zero bytes parse as token ids and biases; as stop strings they
             * are empty ones, which are refused for themselves */
            s.req.section[sec].off = rows[i].off;
            s.req.section[sec].len = rows[i].len;
            assert_int_equal(accepted(&s),
                             rows[i].ok
                                 && !(sec == LLM_SEC_STOP && rows[i].len > 0));
        }
    }
}


static void
request_contents(void **state)
{
    (void) state;

    for (uint32_t len = 0; len <= 16; len++) {
        spoil_t s = good();

        s.req.section[LLM_SEC_PROMPT].len = len;
        assert_true(accepted(&s));
        s.req.kind = LLM_REQ_TOKENS;
        assert_int_equal(accepted(&s), len % 4 == 0);
        s.req.kind = LLM_REQ_DETOKENIZE;
        assert_int_equal(accepted(&s), len % 4 == 0);

        s = good();
        s.req.section[LLM_SEC_STOP_TOKENS].off = sizeof(llm_request_t);
        s.req.section[LLM_SEC_STOP_TOKENS].len = len;
        assert_int_equal(accepted(&s), len % 4 == 0);

        s = good();
        s.req.section[LLM_SEC_LOGIT_BIAS].off = sizeof(llm_request_t);
        s.req.section[LLM_SEC_LOGIT_BIAS].len = len;
        assert_int_equal(accepted(&s), len % 8 == 0);
    }

    spoil_t s = good();
    const llm_bias_t bias[] = { { 1, 5 }, { 2, NAN } };

    memcpy(s.bytes, bias, sizeof(bias));
    s.req.section[LLM_SEC_LOGIT_BIAS].off = sizeof(llm_request_t);
    s.req.section[LLM_SEC_LOGIT_BIAS].len = 8;
    assert_true(accepted(&s));
    s.req.section[LLM_SEC_LOGIT_BIAS].len = 16;
    assert_false(accepted(&s));

    /* chat needs messages */
    s = good();
    s.req.kind = LLM_REQ_CHAT;
    assert_false(accepted(&s));
    s.req.kind = LLM_REQ_TOKENIZE_CHAT;
    assert_false(accepted(&s));

    /* stop strings: whole, not empty, nothing after the last */
    s = good();
    memcpy(s.bytes, "\3\0\0\0abc\1\0\0\0x\0", 13);
    s.req.section[LLM_SEC_STOP].off = sizeof(llm_request_t);

    for (uint32_t len = 1; len <= 13; len++) {
        s.req.section[LLM_SEC_STOP].len = len;
        assert_int_equal(accepted(&s), len == 7 || len == 12);
    }

    memcpy(s.bytes, "\xff\xff\xff\xff", 4);
    s.req.section[LLM_SEC_STOP].len = 12;
    assert_false(accepted(&s));
}


static void
request_short_or_misaligned(void **state)
{
    spoil_t s = good();
    uint8_t *copy = malloc(sizeof(s) + 8);
    const llm_request_t *req;
    const char *why;

    (void) state;

    for (uint32_t len = 0; len < sizeof(llm_request_t) + 16; len++) {
        assert_int_equal(decode(&s, len, &req, &why), -1);
    }

    assert_int_equal(decode(&s, sizeof(llm_request_t) + 16, &req, &why), 0);

    assert_non_null(copy);
    memcpy(copy + 4, &s, sizeof(s));
    assert_int_equal(llm_request_decode(copy + 4, sizeof(s), &req, &why), -1);
    free(copy);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(request_round_trip),
        cmocka_unit_test(request_turn),
        cmocka_unit_test(request_tenant),
        cmocka_unit_test(request_overflow),
        cmocka_unit_test(request_writer_misuse),
        cmocka_unit_test(request_floats),
        cmocka_unit_test(request_integers),
        cmocka_unit_test(request_sections),
        cmocka_unit_test(request_contents),
        cmocka_unit_test(request_short_or_misaligned),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
