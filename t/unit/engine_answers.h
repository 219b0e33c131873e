/*
 * Real engines with a prefix cache or without, requests for them, and what the
 * requests answered, to be compared bit for bit.
 */

#ifndef T_UNIT_ENGINE_ANSWERS_H
#define T_UNIT_ENGINE_ANSWERS_H

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

enum { N_TOKENS = 48, TOP = 2 };

typedef struct {
    int n;
    int32_t token[N_TOKENS];
    float logprob[N_TOKENS];
    float top[N_TOKENS][TOP];
    uint32_t finish;
    uint32_t text_len;
    char text[8192];
    uint32_t cached; /* this and what follows is not compared */
    uint32_t prompt;
} answer_t;

/* The model that is asked, and where it runs. */
typedef struct {
    const char *model;  /* NULL: LLM_TEST_MODEL */
    const char *draft;  /* a model that drafts for it; NULL: itself */
    const char *device; /* NULL: the default */
    int seqs;           /* max_num_seqs */
    int n_vocab;
    int kv_values; /* of a token, K and V of all layers */
} subject_t;

/* SmolLM2-135M: 30 layers of 3 KV heads of 64 */
static subject_t subject = { .seqs = 24,
                             .n_vocab = 49152,
                             .kv_values = 30 * 3 * 2 * 64 };

typedef struct {
    bool caching;
    bool chunked;
    int budget;
    int max_len;
    int pages; /* of the KV cache; 0: ample */
    op_dtype_t dtype;

    /* speculative decoding */
    const char *speculative; /* NULL: off */
    const char *draft_model; /* NULL: none */
    const char *k;           /* num_speculative_tokens; NULL: auto */
    int (*drafter)(const int32_t *tokens, int n_tokens, int n, int32_t *draft);
} setup_t;


static inline void
set_word(engine_conf_t *conf, char *word, const char *key, const char *value)
{
    llm_err_t err;

    sprintf(word, "%s=%s", key, value);
    assert_int_equal(engine_conf_set(conf, word, &err), LLM_OK);
}


static inline engine_t *
open_engine(const setup_t *setup)
{
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;
    char word[64], value[32];

    engine_conf_init(&conf);
    conf.model =
        subject.model != NULL ? subject.model : getenv("LLM_TEST_MODEL");
    conf.device = subject.device != NULL ? subject.device : conf.device;
    conf.threads = 2;
    conf.max_num_batched_tokens = setup->budget;
    conf.max_num_seqs = subject.seqs;
    conf.max_model_len = setup->max_len;
    conf.kv_cache_dtype = (int) setup->dtype;
    conf.log_level = LOG_WARN;

    set_word(&conf, word, "prefix_caching", setup->caching ? "on" : "off");
    set_word(&conf, word, "chunked_prefill", setup->chunked ? "on" : "off");

    if (setup->speculative != NULL) {
        set_word(&conf, word, "speculative", setup->speculative);
    }

    if (setup->k != NULL) {
        set_word(&conf, word, "num_speculative_tokens", setup->k);
    }

    conf.speculative_model = setup->draft_model;
    conf.test_drafter = setup->drafter;

    if (setup->pages > 0) {
        /* 32 values take 64 bytes or 34 */
        const int block = setup->dtype == OP_F16 ? 64 : 34;

        /* the draft model has the same shape */
        const int n = setup->pages * (setup->draft_model != NULL ? 2 : 1);

        sprintf(value, "%d", n * 16 * subject.kv_values / 32 * block);
        set_word(&conf, word, "kv_cache_memory", value);
    }

    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);

    if (engine_open(&conf, &engine, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    assert_true(setup->pages == 0
                || kv_pool_pages(engine->pool) == setup->pages);

    return engine;
}


/* What a request is made of. */
typedef struct {
    uint32_t kind;
    uint32_t flags; /* beside log-probabilities, which all have */
    const void *prompt;
    size_t len;
    const char *salt; /* or NULL */
    const char *stop; /* or NULL */
    llm_params_t params;
} order_t;


static inline request_t *
submit(engine_t *engine, const order_t *order)
{
    static uint8_t area[65536];
    const request_origin_t from = { .submit_ns = 1 };
    llm_request_writer_t w;

    llm_request_begin(&w, area, sizeof(area), order->kind,
                      LLM_F_LOGPROBS | order->flags, &order->params);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, order->prompt, order->len);

    if (order->stop != NULL) {
        const uint32_t len = (uint32_t) strlen(order->stop);

        llm_request_section(&w, LLM_SEC_STOP);
        llm_request_add(&w, &len, sizeof(len));
        llm_request_add(&w, order->stop, len);
    }

    if (order->salt != NULL) {
        llm_request_section(&w, LLM_SEC_SALT);
        llm_request_add(&w, order->salt, strlen(order->salt));
    }

    request_t *req = intake_request(engine, area, llm_request_end(&w), &from);

    assert_non_null(req);
    return req;
}


static inline void
read_delta(const llm_delta_t *d, answer_t *answer)
{
    llm_logprob_t entry;
    uint32_t at = 0;

    assert_true(answer->text_len + d->text_len <= sizeof(answer->text));
    memcpy(answer->text + answer->text_len, d->text, d->text_len);
    answer->text_len += d->text_len;

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
static inline void
take_answer(request_t *req, answer_t *answer)
{
    uint32_t started = 0;

    memset(answer, 0, sizeof(*answer));
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
            answer->finish = record.u.done.finish;
            answer->cached = record.u.done.cached_tokens;
            answer->prompt = record.u.done.prompt_tokens;
            assert_true(answer->cached < answer->prompt);
        } else if (record.u.delta.kind == LLM_DELTA_CONTENT) {
            read_delta(&record.u.delta, answer);
        }
    }

    assert_int_equal(started, answer->cached);
    request_destroy(req);
}


static inline void
run(engine_t *engine)
{
    while (engine_step(engine)) {
        sched_check(engine->sched);
    }
}


static inline void
finish(engine_t *engine, request_t *req, answer_t *answer)
{
    run(engine);
    take_answer(req, answer);
}


/* i: of the request, to name it. */
static inline void
same_answer(const answer_t *a, const answer_t *b, int i, const setup_t *setup)
{
    if (memcmp(a, b, offsetof(answer_t, cached)) != 0) {
        fail_msg("request %d differs: caching %d, chunked %d, budget %d, %d "
                 "pages, type %d: \"%.*s\" and \"%.*s\"",
                 i, setup->caching, setup->chunked, setup->budget, setup->pages,
                 (int) setup->dtype, (int) a->text_len, a->text,
                 (int) b->text_len, b->text);
    }
}


/* Nobody holds a page any more, though content stays. */
static inline void
close_idle(engine_t *engine)
{
    assert_true(list_empty(&engine->requests));
    engine_step(engine);
    assert_int_equal(llm_stats_get(&engine->stats->pages_used), 0);
    assert_int_equal(kv_pool_free_pages(engine->pool),
                     kv_pool_pages(engine->pool));
    engine_close(engine);
}

#endif /* T_UNIT_ENGINE_ANSWERS_H */
