/*
 * An engine on a tiny model for the engine tests: random weights, a byte-level
 * vocabulary with a few merges, control tokens and tokens of 300 bytes.  A
 * step takes well under a millisecond; what it says is noise, so tests choose
 * the tokens by logit_bias or hand them to emit_token themselves.
 */

#ifndef T_UNIT_ENGINE_TINY_H
#define T_UNIT_ENGINE_TINY_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "engine/emit.h"
#include "engine/engine.h"
#include "engine/intake.h"
#include "t/unit/gguf_build.h"
#include "t/unit/mini_vocab.h"

enum {
    N_LONG = 24,
    LONG_BYTES = 300, /* above LLM_TOKEN_BYTES_MAX */
    TOK_LONG = MINI_N,
    TINY_VOCAB = MINI_N + N_LONG,
    TINY_CTX = 256,
    AREA_BYTES = 1 << 22,
};

/* Everything one request wrote. */
typedef struct {
    int n_start;
    int n_done;
    int n_fail;
    int n_delta;
    llm_start_t start;
    llm_done_t done;
    llm_fail_t fail;
    buf_t prompt;  /* text of LLM_DELTA_PROMPT */
    buf_t content; /* text of LLM_DELTA_CONTENT */
    int n_tokens;
    int n_logprobs;
    int n_prompt_logprobs;
    int32_t last_chosen;
    uint32_t largest; /* record */
} reply_t;

typedef struct {
    llm_request_writer_t w;
    llm_params_t params;
    uint32_t kind;
    uint32_t flags;
} ask_t;

static _Alignas(16) uint8_t tiny_area[AREA_BYTES];
static const char *tiny_pre = "gpt-2"; /* tokenizer.ggml.pre */
static op_dtype_t tiny_dtype = OP_Q8_0;
static int tiny_head_dim = 16;
static int tiny_ahead_after;     /* conf.ahead_after, */
static double tiny_output_ratio; /* conf.output_ratio */

#define TINY_TEMPLATE                                                       \
    "{% for m in messages %}{{ '<|im_end|>' + m['role'] + ':' }}"           \
    "{% if m.content %}{{ m.content }}{% endif %}"                          \
    "{% for c in m.tool_calls or [] %}{% for k, v in "                      \
    "c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"           \
    "{% endfor %}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}" \
    "{% if shout %}{{ shout }}{% endif %}"                                  \
    "{% if add_generation_prompt %}>{% endif %}"


/* Writes the model to a file of its own; path: [64]. */
static inline void
tiny_file(char *path)
{
    static mini_vocab_t vocab;
    const tiny_t t = { .n_layers = 2,
                       .n_embd = 64,
                       .n_ff = 96,
                       .n_heads = 4,
                       .n_kv_heads = 2,
                       .head_dim = tiny_head_dim,
                       .n_vocab = TINY_VOCAB,
                       .dtype = tiny_dtype,
                       .seed = 7,
                       .skip = "tokenizer.ggml.tokens" };
    char text[LONG_BYTES + 1];
    build_t b = { 0 };

    mini_init(&vocab);
    tiny_build(&b, &t);

    build_kv_array(&b, "tokenizer.ggml.tokens", 8, TINY_VOCAB);
    for (int i = 0; i < MINI_N; i++) {
        build_str(&b.kvs, vocab.tokens[i].text);
    }
    for (int i = 0; i < N_LONG; i++) {
        memset(text, 'a' + i, LONG_BYTES);
        text[LONG_BYTES] = '\0';
        build_str(&b.kvs, text);
    }

    build_kv_array(&b, "tokenizer.ggml.token_type", 5, TINY_VOCAB);
    for (int i = 0; i < TINY_VOCAB; i++) {
        build_u32(&b.kvs,
                  i < MINI_N ? (uint32_t) vocab.tokens[i].type : TOK_NORMAL);
    }

    build_kv_array(&b, "tokenizer.ggml.merges", 8, MINI_N_MERGES);
    for (int i = 0; i < MINI_N_MERGES; i++) {
        build_str(&b.kvs, mini_merges[i]);
    }

    build_kv_str(&b, "tokenizer.ggml.model", "gpt2");
    build_kv_str(&b, "tokenizer.ggml.pre", tiny_pre);
    build_kv_u32(&b, "tokenizer.ggml.bos_token_id", MINI_BOS);
    build_kv_u32(&b, "tokenizer.ggml.eos_token_id", MINI_IM_END);
    build_kv_str(&b, "tokenizer.chat_template", TINY_TEMPLATE);

    buf_t file = build_finish(&b);

    assert_false(file.failed);
    strcpy(path, "/tmp/engine-tiny-XXXXXX");

    const int fd = mkstemp(path);

    assert_int_not_equal(fd, -1);
    assert_int_equal(write(fd, file.data, file.len), (ssize_t) file.len);
    close(fd);
    buf_fini(&file);
}


/* words: settings behind the defaults, NULL at the end. */
static inline engine_t *
tiny_engine(const char *const *words)
{
    char path[64];
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;

    tiny_file(path);
    engine_conf_init(&conf);
    conf.model = path;
    conf.threads = 1;
    conf.max_model_len = TINY_CTX;
    conf.max_num_seqs = 8;
    conf.max_num_batched_tokens = 64;
    conf.ahead_after = tiny_ahead_after;
    conf.output_ratio = tiny_output_ratio;

    for (; words != NULL && *words != NULL; words++) {
        assert_int_equal(engine_conf_set(&conf, *words, &err), LLM_OK);
    }

    if (engine_open(&conf, &engine, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    engine->conf.model = "/tmp/engine-tiny.gguf"; /* path is ours */
    unlink(path);

    return engine;
}


/* --- asking --- */

static inline ask_t
ask(uint32_t kind, uint32_t flags)
{
    return (ask_t){ .kind = kind,
                    .flags = flags,
                    .params = { .top_p = 1,
                                .repetition_penalty = 1,
                                .max_tokens = 16,
                                .seed = 1 } };
}


/* Begins the request with its parameters as they are now. */
static inline void
ask_begin(ask_t *a)
{
    llm_request_begin(&a->w, tiny_area, AREA_BYTES, a->kind, a->flags,
                      &a->params);
}


static inline void
ask_section(ask_t *a, uint32_t sec, const void *bytes, size_t len)
{
    llm_request_section(&a->w, sec);
    llm_request_add(&a->w, bytes, len);
}


static inline void
ask_stop(ask_t *a, const char *const *stops)
{
    llm_request_section(&a->w, LLM_SEC_STOP);

    for (; *stops != NULL; stops++) {
        const uint32_t n = (uint32_t) strlen(*stops);
        llm_request_add(&a->w, &n, sizeof(n));
        llm_request_add(&a->w, *stops, n);
    }
}


static inline request_t *
ask_send(engine_t *engine, ask_t *a)
{
    const request_origin_t from = { .submit_ns = 1 };
    const uint32_t len = llm_request_end(&a->w);

    assert_true(len > 0);

    return intake_request(engine, tiny_area, len, &from);
}


/* The usual one: a text prompt. */
static inline request_t *
ask_text(engine_t *engine, ask_t *a, const char *prompt)
{
    ask_begin(a);
    ask_section(a, LLM_SEC_PROMPT, prompt, strlen(prompt));

    return ask_send(engine, a);
}


/* --- reading --- */

static inline void
reply_delta(reply_t *reply, const llm_delta_t *d)
{
    llm_logprob_t entry;
    uint32_t at = 0;

    /* the header's promise: whole characters in every record */
    assert_true(utf8_valid(d->text, d->text_len));
    reply->n_delta++;
    reply->n_tokens += (int) d->n_tokens;
    buf_add(d->kind == LLM_DELTA_PROMPT ? &reply->prompt : &reply->content,
            d->text, d->text_len);

    while (llm_logprob_next(d, &at, &entry)) {
        reply->last_chosen = entry.chosen.token;
        if (d->kind == LLM_DELTA_PROMPT) {
            reply->n_prompt_logprobs++;
        } else {
            reply->n_logprobs++;
        }
    }
}


/* One payload: checks that it may come where it comes. */
static inline void
reply_record(reply_t *reply, const uint8_t *payload, uint32_t len)
{
    llm_record_t record;

    assert_int_equal(llm_record_decode(payload, len, &record), 0);
    assert_int_equal(reply->n_done + reply->n_fail, 0);
    reply->largest = len > reply->largest ? len : reply->largest;

    switch (record.type) {
    case LLM_REC_START:
        assert_int_equal(reply->n_start + reply->n_delta, 0);
        reply->n_start++;
        reply->start = record.u.start;
        break;
    case LLM_REC_DELTA:
        assert_int_equal(reply->n_start, 1);
        reply_delta(reply, &record.u.delta);
        break;
    case LLM_REC_DONE:
        assert_int_equal(reply->n_start, 1);
        reply->n_done++;
        reply->done = record.u.done;
        break;
    default:
        reply->n_fail++;
        reply->fail = record.u.fail;
    }
}


/* The bytes of the record at *pos, which moves on; NULL: there are no more. */
static inline uint8_t *
next_bytes(const request_t *req, size_t *pos, uint32_t *len)
{
    if (*pos == req->out.len) {
        return NULL;
    }

    assert_true(req->out.len - *pos >= sizeof(*len));
    memcpy(len, req->out.data + *pos, sizeof(*len));
    *pos += sizeof(*len);
    assert_true(*len <= req->out.len - *pos);
    *pos += *len;

    return (uint8_t *) req->out.data + *pos - *len;
}


/* The same, decoded.  False: there are no more. */
static inline bool
next_record(const request_t *req, size_t *pos, llm_record_t *record)
{
    uint32_t len;
    uint8_t *bytes = next_bytes(req, pos, &len);

    if (bytes == NULL) {
        return false;
    }

    assert_int_equal(llm_record_decode(bytes, len, record), 0);

    return true;
}


/* The request's tokens, then all that its records say of tokens, bit by bit;
 * they are not consumed. */
static inline void
tokens_of(const request_t *req, buf_t *out)
{
    llm_record_t record;

    assert_true(req->finished);
    buf_add(out, req->seq.tokens,
            (size_t) req->seq.n_tokens * sizeof(req->seq.tokens[0]));

    for (size_t pos = 0; next_record(req, &pos, &record);) {
        llm_logprob_t entry;
        uint32_t at = 0;

        assert_int_not_equal(record.type, LLM_REC_ERROR);

        while (record.type == LLM_REC_DELTA
               && llm_logprob_next(&record.u.delta, &at, &entry))
        {
            buf_add(out, &entry.chosen.token, sizeof(entry.chosen.token));
            buf_add(out, &entry.chosen.logprob, sizeof(entry.chosen.logprob));

            for (uint32_t t = 0; t < entry.n_top; t++) {
                buf_add(out, &entry.top[t].token, sizeof(entry.top[t].token));
                buf_add(out, &entry.top[t].logprob,
                        sizeof(entry.top[t].logprob));
            }
        }
    }
}


/* Reads and consumes what the request has written so far. */
static inline void
reply_read(reply_t *reply, request_t *req)
{
    size_t pos = 0;
    uint32_t len;
    uint8_t *bytes;

    while ((bytes = next_bytes(req, &pos, &len)) != NULL) {
        reply_record(reply, bytes, len);
    }

    buf_consume(&req->out, req->out.len);
}


static inline void
reply_fini(reply_t *reply)
{
    buf_fini(&reply->prompt);
    buf_fini(&reply->content);
    *reply = (reply_t){ 0 };
}


static inline void
assert_text(const buf_t *buf, const char *want)
{
    if (buf->len != strlen(want)
        || (buf->len > 0 && memcmp(buf->data, want, buf->len) != 0))
    {
        fail_msg("\"%.*s\" instead of \"%s\"", (int) buf->len,
                 buf->data != NULL ? buf->data : "", want);
    }
}


static inline int
pages_used(const engine_t *engine)
{
    return kv_pool_pages(engine->pool) - kv_pool_free_pages(engine->pool);
}


/* Steps until nothing runs. */
static inline void
run_all(engine_t *engine)
{
    while (engine_step(engine)) {
        sched_check(engine->sched);
    }
}


static inline void
emit_one(engine_t *engine, request_t *req, int32_t token)
{
    emit_token(engine, req, &(samp_result_t){ .token = token, .logprob = -1 });
}


/* Hands over text byte by byte: the tokens 0 … 255 are the bytes. */
static inline void
emit_bytes(engine_t *engine, request_t *req, const char *text)
{
    for (; *text != '\0'; text++) {
        emit_one(engine, req, (uint8_t) *text);
    }
}

#endif /* T_UNIT_ENGINE_TINY_H */
