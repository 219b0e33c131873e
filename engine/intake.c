/*
 * Request bytes → tokens → queue.
 *
 * A request is copied out of the shared segment first and looked at only in
 * the copy.  Everything that can be wrong with it is found here, before it
 * costs a page or a step.
 */

#include "engine/intake.h"

#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "engine/base/clock.h"
#include "engine/emit.h"

enum {
    ARENA_BYTES = 4096,
    TOKENIZE_MAX = 1 << 18,
    FAIL_BYTES = 1024, /* an ERROR record always has room */
};

_Static_assert(FAIL_BYTES >= sizeof(llm_fail_t) + 64, "any ERROR record");


static const void *
section(const request_t *req, int sec, uint32_t *len)
{
    const llm_section_t *s = &req->msg->section[sec];

    *len = s->len;

    return (const uint8_t *) req->msg + s->off;
}


/* A JSON section, or NULL when it is absent or null; LLM_BADREQ when it is
 * broken or of another type. */
static int
json_section(const request_t *req, int sec, const char *param, cJSON **json,
             llm_err_t *err)
{
    uint32_t len;
    const char *text = section(req, sec, &len);
    const bool object = sec == LLM_SEC_KWARGS;

    *json = len > 0 ? cJSON_ParseWithLength(text, len) : NULL;

    if (len > 0 && *json == NULL) {
        return llm_err_set(err, LLM_BADREQ, param, "%s is not valid JSON.",
                           param);
    }

    if (cJSON_IsNull(*json)) {
        cJSON_Delete(*json);
        *json = NULL;
    }

    if (*json != NULL
        && (object ? !cJSON_IsObject(*json) : !cJSON_IsArray(*json))) {
        return llm_err_set(err, LLM_BADREQ, param, "%s must be %s.", param,
                           object ? "an object" : "an array");
    }

    return LLM_OK;
}


/* OpenAI carries the arguments of a tool call as a JSON string; templates want
 * the object. */
static void
parse_arguments(cJSON *messages)
{
    cJSON *message, *call;

    cJSON_ArrayForEach(message, messages)
    {
        cJSON *calls = cJSON_GetObjectItemCaseSensitive(message, "tool_calls");

        cJSON_ArrayForEach(call, calls)
        {
            cJSON *function =
                cJSON_GetObjectItemCaseSensitive(call, "function");
            cJSON *text =
                cJSON_GetObjectItemCaseSensitive(function, "arguments");
            cJSON *object =
                cJSON_IsString(text) ? cJSON_Parse(text->valuestring) : NULL;

            if (!cJSON_IsObject(object)
                || !cJSON_ReplaceItemInObjectCaseSensitive(function,
                                                           "arguments", object))
            {
                cJSON_Delete(object);
            }
        }
    }
}


/* Chat: messages → text with trust marks, in engine->prompt. */
static int
render_chat(engine_t *engine, const request_t *req, llm_err_t *err)
{
    cJSON *messages = NULL, *tools = NULL, *kwargs = NULL;
    const uint32_t flags = req->msg->flags;

    int rc = json_section(req, LLM_SEC_MESSAGES, "messages", &messages, err);

    if (rc == LLM_OK) {
        rc = json_section(req, LLM_SEC_TOOLS, "tools", &tools, err);
    }

    if (rc == LLM_OK) {
        rc = json_section(req, LLM_SEC_KWARGS, "chat_template_kwargs", &kwargs,
                          err);
    }

    if (rc == LLM_OK && cJSON_GetArraySize(messages) == 0) {
        rc = llm_err_set(err, LLM_BADREQ, "messages",
                         "messages must hold at least one message.");
    }

    if (rc == LLM_OK) {
        parse_arguments(messages);

        const chat_input_t in = {
            .messages = messages,
            .tools = tools,
            .kwargs = kwargs,
            .add_generation_prompt = (flags & LLM_F_GENERATION_PROMPT) != 0,
            .continue_final = (flags & LLM_F_CONTINUE_FINAL) != 0,
            .bos_token = engine->bos_text,
            .eos_token = engine->eos_text,
        };

        buf_clear(&engine->prompt.text);
        buf_clear(&engine->prompt.trusted);
        rc = chat_template_render(engine->tmpl, &in, &engine->prompt, err);
    }

    cJSON_Delete(messages);
    cJSON_Delete(tools);
    cJSON_Delete(kwargs);

    return rc;
}


static int
encode(engine_t *engine, const request_t *req, int max_ids, llm_err_t *err)
{
    const uint32_t flags = req->msg->flags;
    const bool chat = req->msg->kind == LLM_REQ_CHAT
                      || req->msg->kind == LLM_REQ_TOKENIZE_CHAT;
    const uint8_t *trusted = NULL;
    const char *text;
    uint32_t n;
    size_t len;
    int rc;

    int how = (flags & LLM_F_ADD_SPECIAL) ? TOK_ADD_SPECIAL : 0;

    if (chat) {
        rc = render_chat(engine, req, err);

        if (rc != LLM_OK) {
            return rc;
        }

        text = engine->prompt.text.data;
        len = engine->prompt.text.len;
        trusted = (const uint8_t *) engine->prompt.trusted.data;
        how |= TOK_PARSE_SPECIAL;
    } else {
        text = section(req, LLM_SEC_PROMPT, &n);
        len = n;
        how |= (flags & LLM_F_PARSE_SPECIAL) ? TOK_PARSE_SPECIAL : 0;
    }

    return tok_encode(engine->tok, len > 0 ? text : "", len, trusted, how,
                      max_ids, &engine->ids, err);
}


/* Token ids given by the client. */
static int
copy_ids(engine_t *engine, const request_t *req, int max_ids, llm_err_t *err)
{
    uint32_t len;
    const int32_t *ids = section(req, LLM_SEC_PROMPT, &len);
    const int n = (int) (len / sizeof(int32_t));
    const int n_vocab = tok_n_vocab(engine->tok);
    tok_ids_t *out = &engine->ids;

    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return llm_err_set(err, LLM_BADREQ, "prompt",
                               "Token id %d is out of vocabulary: it has "
                               "%d tokens.",
                               (int) ids[i], n_vocab);
        }
    }

    if (n > out->cap) {
        int32_t *grown = realloc(out->ids, (size_t) n * sizeof(int32_t));

        if (grown == NULL) {
            return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
        }

        out->ids = grown;
        out->cap = n;
    }

    if (n > 0) {
        memcpy(out->ids, ids, (size_t) n * sizeof(int32_t));
    }

    out->n = n;

    return n > max_ids ? LLM_LIMIT : LLM_OK;
}


static int
set_stops(engine_t *engine, request_t *req, llm_err_t *err)
{
    uint32_t len, n, pos = 0;
    const char *text;
    const uint8_t *stops = section(req, LLM_SEC_STOP, &len);
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

    req->stop_tokens = section(req, LLM_SEC_STOP_TOKENS, &len);
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
    const llm_bias_t *bias = section(req, LLM_SEC_LOGIT_BIAS, &len);
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

    seq->tokens = arena_alloc(req->arena, (size_t) cap * sizeof(int32_t));

    if (seq->tokens == NULL || kv_table_init(&seq->table, most) != LLM_OK) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    memcpy(seq->tokens, engine->ids.ids, (size_t) n * sizeof(int32_t));
    seq->n_tokens = n;
    seq->n_prompt = n;
    seq->cap_tokens = cap;
    seq->owner = req;

    if (engine->prefix != NULL) {
        uint32_t len;
        const void *salt = section(req, LLM_SEC_SALT, &len);

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


static int
intake_prompt(engine_t *engine, request_t *req, llm_err_t *err)
{
    const int max_ids = engine->max_model_len;
    const bool given = req->msg->kind == LLM_REQ_TOKENS;

    const int rc = given ? copy_ids(engine, req, max_ids, err)
                         : encode(engine, req, max_ids, err);

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

    llm_stats_add(&engine->stats->prompt_tokens, (uint64_t) engine->ids.n);

    if (req->max_tokens == 0 && !req->seq.want_prompt) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return LLM_OK;
    }

    sched_add(engine->sched, &req->seq);
    req->queued = true;

    return LLM_OK;
}


/* /tokenize: the ids go into the slot's token log. */
static int
intake_tokenize(engine_t *engine, request_t *req, llm_err_t *err)
{
    int rc = encode(engine, req, TOKENIZE_MAX, err);

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
    int rc = copy_ids(engine, req, INT32_MAX, err);

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
