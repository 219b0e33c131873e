/*
 * Request bytes → tokens → queue.
 *
 * A request is copied out of the shared segment first and looked at only in
 * the copy.  Everything that can be wrong with it is found here, before it
 * costs a page or a step.
 */

#include "engine/intake.h"

#include <string.h>

#include "engine/base/clock.h"
#include "engine/emit.h"
#include "engine/prompt.h"

enum {
    ARENA_BYTES = 4096,
    TOKENIZE_MAX = 1 << 18,
    FAIL_BYTES = 1024, /* an ERROR record always has room */
};

_Static_assert(FAIL_BYTES >= sizeof(llm_fail_t) + 64, "any ERROR record");


static int
set_stops(engine_t *engine, request_t *req, llm_err_t *err)
{
    uint32_t len, n, pos = 0;
    const char *text;
    const uint8_t *stops = request_section(req, LLM_SEC_STOP, &len);
    int count = 0;

    while (llm_stop_next(stops, len, &pos, &text, &n)) {
        count++;
    }

    req->stops =
        arena_calloc(req->arena, (size_t) count * sizeof(stop_string_t) + 1);

    if (req->stops == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    for (pos = 0; llm_stop_next(stops, len, &pos, &text, &n);) {
        if (n > 0) {
            req->stops[req->n_stops++] = (stop_string_t){ text, n };
        }
    }

    req->stop_tokens = request_section(req, LLM_SEC_STOP_TOKENS, &len);
    req->n_stop_tokens = (int) (len / sizeof(int32_t));

    for (int i = 0; i < req->n_stop_tokens; i++) {
        if (req->stop_tokens[i] < 0
            || req->stop_tokens[i] >= tok_n_vocab(engine->tok)) {
            return llm_err_set(err, LLM_BADREQ, "stop_token_ids",
                               "Token id %d is out of vocabulary.",
                               (int) req->stop_tokens[i]);
        }
    }

    return LLM_OK;
}


/* Tokens that may not appear before min_tokens. */
static int
set_masked(engine_t *engine, request_t *req, llm_err_t *err)
{
    int n_eog = 0;
    const int32_t *eog = tok_eog(engine->tok, &n_eog);

    if (req->samp.min_tokens == 0) {
        return LLM_OK;
    }

    if (req->msg->flags & LLM_F_IGNORE_EOS) {
        n_eog = 0;
    }

    int32_t *masked = arena_alloc(
        req->arena, (size_t) (n_eog + req->n_stop_tokens) * sizeof(int32_t));

    if (masked == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    for (int i = 0; i < n_eog; i++) {
        masked[i] = eog[i];
    }

    for (int i = 0; i < req->n_stop_tokens; i++) {
        masked[n_eog + i] = req->stop_tokens[i];
    }

    req->samp.masked = masked;
    req->samp.n_masked = n_eog + req->n_stop_tokens;

    return LLM_OK;
}


static int
set_sampling(engine_t *engine, request_t *req, llm_err_t *err)
{
    const llm_params_t *p = &req->msg->params;
    uint32_t len;
    const llm_bias_t *bias = request_section(req, LLM_SEC_LOGIT_BIAS, &len);
    const int n_bias = (int) (len / sizeof(llm_bias_t));
    samp_bias_t *copy =
        arena_alloc(req->arena, (size_t) n_bias * sizeof(samp_bias_t));

    if (copy == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    for (int i = 0; i < n_bias; i++) {
        if (bias[i].token < 0 || bias[i].token >= tok_n_vocab(engine->tok)) {
            return llm_err_set(err, LLM_BADREQ, "logit_bias",
                               "logit_bias names token %d, which is out of "
                               "vocabulary.",
                               (int) bias[i].token);
        }

        copy[i] = (samp_bias_t){ bias[i].token, bias[i].bias };
    }

    req->samp = (samp_params_t){
        .temperature = p->temperature,
        .top_p = p->top_p,
        .min_p = p->min_p,
        .repetition_penalty = p->repetition_penalty,
        .presence_penalty = p->presence_penalty,
        .frequency_penalty = p->frequency_penalty,
        .top_k = p->top_k,
        .min_tokens = p->min_tokens,
        .seed = p->seed,
        .top_logprobs =
            (req->msg->flags & LLM_F_LOGPROBS) ? p->top_logprobs : -1,
        .bias = copy,
        .n_bias = n_bias,
    };

    return set_masked(engine, req, err);
}


static int
set_penalties(engine_t *engine, request_t *req, llm_err_t *err)
{
    const samp_params_t *p = &req->samp;

    if (p->repetition_penalty == 1.0f && p->presence_penalty == 0.0f
        && p->frequency_penalty == 0.0f)
    {
        return LLM_OK;
    }

    req->samp_state =
        samp_state_create(req->arena, p, tok_n_vocab(engine->tok));

    if (req->samp_state == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    for (int i = 0; i < req->seq.n_prompt; i++) {
        samp_state_add(req->samp_state, req->seq.tokens[i], false);
    }

    return LLM_OK;
}


/* The sequence: room for everything it may become. */
static int
set_sequence(engine_t *engine, request_t *req, llm_err_t *err)
{
    const int n = engine->ids.n;
    const int room = engine->max_model_len - n;
    const int asked = req->msg->params.max_tokens;

    req->max_tokens = asked < 0 || asked > room ? room : asked;

    const int cap = n + req->max_tokens;
    const int most = engine->conf.reservation ? engine->max_model_len : cap;
    seq_t *seq = &req->seq;

    /* the pool holds one sequence of max_model_len, or there is no engine */
    llm_assert(kv_pages_for(cap) <= kv_pool_pages(engine->pool));

    seq->tokens = arena_alloc(req->arena, (size_t) cap * sizeof(int32_t));

    if (seq->tokens == NULL || kv_table_init(&seq->table, most) != LLM_OK) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    memcpy(seq->tokens, engine->ids.ids, (size_t) n * sizeof(int32_t));
    seq->n_tokens = n;
    seq->n_prompt = n;
    seq->cap_tokens = cap;
    seq->priority = req->msg->params.priority;
    seq->owner = req;

    if (engine->prefix != NULL) {
        uint32_t len;
        const void *salt = request_section(req, LLM_SEC_SALT, &len);

        seq->root = kv_prefix_root(engine->prefix, salt, len);
    }

    seq->want_prompt =
        (req->msg->flags & LLM_F_ECHO) && (req->msg->flags & LLM_F_LOGPROBS);

    return set_penalties(engine, req, err);
}


/* more: the tokenizer stopped at the limit. */
static int
too_long(const engine_t *engine, const request_t *req, bool more,
         llm_err_t *err)
{
    return llm_err_set(
        err, LLM_LIMIT, req->msg->kind == LLM_REQ_CHAT ? "messages" : "prompt",
        "This model's maximum context length is %d tokens. However, your "
        "prompt contains %s%d input tokens, which leaves no room for an "
        "answer. Please reduce the length of the input prompt.",
        engine->max_model_len, more ? "at least " : "",
        more ? engine->max_model_len + 1 : engine->ids.n);
}


/* Nobody's requests belong to the nameless tenant. */
static int
set_tenant(engine_t *engine, request_t *req, llm_err_t *err)
{
    uint32_t len;
    const void *name = request_section(req, LLM_SEC_TENANT, &len);

    if (len == 0) {
        return LLM_OK;
    }

    req->seq.tenant =
        sched_tenant(engine->sched, name, len, req->msg->turn.weight);

    return req->seq.tenant != NULL
               ? LLM_OK
               : llm_err_set(err, LLM_NOMEM, NULL, "no memory");
}


/* Is there a place in the queue?  All slots of a client's request fare alike:
 * the first decides for those that its worker submits behind it.  With nobody
 * waiting even more answers than the queue has places may come in, or such a
 * request never could. */
static bool
intake_admits(engine_t *engine, const request_t *req)
{
    const llm_turn_t *turn = &req->msg->turn;
    const uint64_t waiting = (uint64_t) engine->n_fresh;
    bool *refused = &engine->refused[req->from.worker];

    if (turn->n_choices > 0) {
        *refused = turn->max_queue > 0 && waiting > 0
                   && waiting + turn->n_choices > turn->max_queue;

        if (*refused) {
            llm_stats_add(&engine->stats->rejected, 1);
        }
    }

    return !*refused;
}


static int
intake_prompt(engine_t *engine, request_t *req, llm_err_t *err)
{
    const int max_ids = engine->max_model_len;
    const bool given = req->msg->kind == LLM_REQ_TOKENS;

    const int rc = given ? prompt_copy(engine, req, max_ids, err)
                         : prompt_encode(engine, req, max_ids, err);

    if (rc == LLM_LIMIT
        || (rc == LLM_OK && engine->ids.n >= max_ids
            && req->msg->params.max_tokens != 0))
    {
        return too_long(engine, req, rc == LLM_LIMIT && !given, err);
    }

    if (rc == LLM_OK && engine->ids.n == 0) {
        return llm_err_set(err, LLM_BADREQ, "prompt",
                           "The prompt is empty: it has no tokens.");
    }

    return rc;
}


static int
intake_generate(engine_t *engine, request_t *req, llm_err_t *err)
{
    if (!intake_admits(engine, req)) {
        return llm_err_set(err, LLM_AGAIN, NULL,
                           "The engine has %d requests waiting and takes no "
                           "more at present, try again later.",
                           engine->n_fresh);
    }

    int rc = intake_prompt(engine, req, err);

    if (rc == LLM_OK) {
        rc = set_stops(engine, req, err);
    }

    if (rc == LLM_OK) {
        rc = set_sampling(engine, req, err);
    }

    if (rc == LLM_OK) {
        rc = set_sequence(engine, req, err);
    }

    if (rc != LLM_OK) {
        return rc;
    }

    if (req->max_tokens == 0 && !req->seq.want_prompt) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return LLM_OK;
    }

    rc = set_tenant(engine, req, err);

    if (rc != LLM_OK) {
        return rc;
    }

    sched_add(engine->sched, &req->seq);
    req->queued = true;
    engine->n_fresh++;

    return LLM_OK;
}


/* /tokenize: the ids go into the slot's token log. */
static int
intake_tokenize(engine_t *engine, request_t *req, llm_err_t *err)
{
    int rc = prompt_encode(engine, req, TOKENIZE_MAX, err);

    if (rc == LLM_LIMIT) {
        return llm_err_set(err, LLM_BADREQ, "prompt",
                           "The text has more than %d tokens.", TOKENIZE_MAX);
    }

    if (rc != LLM_OK) {
        return rc;
    }

    for (int i = 0; i < engine->ids.n && engine->on_token != NULL; i++) {
        engine->on_token(engine, req, engine->ids.ids[i]);
    }

    req->n_output = engine->ids.n;
    emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_NONE, 0);

    return LLM_OK;
}


static int
intake_detokenize(engine_t *engine, request_t *req, llm_err_t *err)
{
    int rc = prompt_copy(engine, req, INT32_MAX, err);

    if (rc != LLM_OK) {
        strcpy(err->param, "tokens");
        return rc;
    }

    rc = tok_decode(engine->tok, engine->ids.ids, engine->ids.n, true,
                    &req->text);

    if (rc != LLM_OK) {
        return llm_err_set(err, rc, NULL, "no memory");
    }

    /* sends the text, behind START */
    emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_NONE, 0);

    return LLM_OK;
}


static int
intake_any(engine_t *engine, request_t *req, uint32_t len, llm_err_t *err)
{
    const char *why;
    const llm_request_t *checked;

    if (llm_request_decode((const uint8_t *) req->msg, len, &checked, &why)
        != 0) {
        return llm_err_set(err, LLM_BADREQ, NULL, "%s", why);
    }

    engine->ids.n = 0;
    req->textual = req->msg->kind == LLM_REQ_TOKENIZE
                   || req->msg->kind == LLM_REQ_TOKENIZE_CHAT
                   || req->msg->kind == LLM_REQ_DETOKENIZE;

    switch (req->msg->kind) {
    case LLM_REQ_TOKENIZE:
    case LLM_REQ_TOKENIZE_CHAT:
        return intake_tokenize(engine, req, err);

    case LLM_REQ_DETOKENIZE:
        return intake_detokenize(engine, req, err);

    default:
        return intake_generate(engine, req, err);
    }
}


static uint32_t
fail_class(int code)
{
    switch (code) {
    case LLM_BADREQ:
        return LLM_FAIL_BADREQ;
    case LLM_LIMIT:
        return LLM_FAIL_CONTEXT;
    case LLM_NOMEM:
    case LLM_AGAIN:
        return LLM_FAIL_BUSY;
    default:
        return LLM_FAIL_INTERNAL;
    }
}


request_t *
intake_request(engine_t *engine, const uint8_t *area, uint32_t len,
               const request_origin_t *from)
{
    llm_err_t err = { .code = LLM_OK };
    arena_t *arena = arena_create(len + ARENA_BYTES);
    request_t *req = arena ? arena_calloc(arena, sizeof(request_t)) : NULL;
    llm_request_t *msg = req ? arena_alloc(arena, len + sizeof(*msg)) : NULL;

    if (msg == NULL) {
        arena_destroy(arena);
        return NULL;
    }

    if (buf_room(&req->out, FAIL_BYTES) == NULL) {
        arena_destroy(arena);
        return NULL;
    }

    llm_assert(from->worker < LLM_MAX_WORKERS);
    memcpy(msg, area, len);

    req->arena = arena;
    req->msg = msg;
    req->from = *from;
    list_push_back(&engine->requests, &req->link);

    const int rc = intake_any(engine, req, len, &err);

    if (rc != LLM_OK) {
        emit_fail(engine, req, fail_class(rc), err.param,
                  rc == LLM_NOMEM ? "The server has no memory for this "
                                    "request."
                                  : err.text);
    }

    return req;
}


void
request_destroy(request_t *req)
{
    list_remove(&req->link);
    kv_table_fini(&req->seq.table);
    buf_fini(&req->text);
    buf_fini(&req->logprobs);
    buf_fini(&req->out);
    arena_destroy(req->arena);
}
