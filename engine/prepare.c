/*
 * Request bytes → everything the scheduler needs to know.
 *
 * Called by intake.c, or by the thread of intake_thread.c while the loop goes
 * on.  So it reads what never changes once an engine is open, and writes to
 * the scratch and to the request, there only what prepare.h names.
 */

#include "engine/prepare.h"

#include <string.h>
#include <xxhash.h>

#include "engine/prompt.h"

enum { TOKENIZE_MAX = 1 << 18 };


static int
set_stops(const engine_t *engine, request_t *req, llm_err_t *err)
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
set_masked(const engine_t *engine, request_t *req, llm_err_t *err)
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
set_sampling(const engine_t *engine, request_t *req, llm_err_t *err)
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
set_penalties(const engine_t *engine, request_t *req, llm_err_t *err)
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
set_sequence(const engine_t *engine, const prompt_t *prompt, request_t *req,
             llm_err_t *err)
{
    const int n = prompt->ids.n;
    const int room = engine->max_model_len - n;
    const int asked = req->msg->params.max_tokens;

    req->max_tokens = asked < 0 || asked > room ? room : asked;

    const int cap = n + req->max_tokens;
    const int most = engine->conf.reservation ? engine->max_model_len : cap;
    uint32_t len;
    const void *salt = request_section(req, LLM_SEC_SALT, &len);
    seq_t *seq = &req->seq;

    /* the pool holds one sequence of max_model_len, or there is no engine */
    llm_assert(kv_pages_for(cap) <= kv_pool_pages(engine->pool));

    seq->tokens = arena_alloc(req->arena, (size_t) cap * sizeof(int32_t));

    if (seq->tokens == NULL || kv_table_init(&seq->table, most) != LLM_OK) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    memcpy(seq->tokens, prompt->ids.ids, (size_t) n * sizeof(int32_t));
    seq->n_tokens = n;
    seq->n_prompt = n;
    seq->cap_tokens = cap;
    seq->priority = req->msg->params.priority;
    seq->owner = req;
    req->salt_hash = XXH3_64bits(salt, len);

    if (engine->prefix != NULL) {
        seq->root = kv_prefix_root(engine->prefix, salt, len);

        /* so that the first search for hits need not */
        kv_prefix_hash(engine->prefix, &seq->table, &seq->root, seq->tokens, n);
    }

    seq->want_prompt =
        (req->msg->flags & LLM_F_ECHO) && (req->msg->flags & LLM_F_LOGPROBS);

    return set_penalties(engine, req, err);
}


/* more: the tokenizer stopped at the limit. */
static int
too_long(const engine_t *engine, const request_t *req, int n, bool more,
         llm_err_t *err)
{
    return llm_err_set(
        err, LLM_LIMIT, req->msg->kind == LLM_REQ_CHAT ? "messages" : "prompt",
        "This model's maximum context length is %d tokens. However, your "
        "prompt contains %s%d input tokens, which leaves no room for an "
        "answer. Please reduce the length of the input prompt.",
        engine->max_model_len, more ? "at least " : "",
        more ? engine->max_model_len + 1 : n);
}


static int
set_prompt(const engine_t *engine, prompt_t *prompt, const request_t *req,
           llm_err_t *err)
{
    const int max_ids = engine->max_model_len;
    const bool given = req->msg->kind == LLM_REQ_TOKENS;

    const int rc = given ? prompt_copy(engine, prompt, req, max_ids, err)
                         : prompt_encode(engine, prompt, req, max_ids, err);

    if (rc == LLM_LIMIT
        || (rc == LLM_OK && prompt->ids.n >= max_ids
            && req->msg->params.max_tokens != 0))
    {
        return too_long(engine, req, prompt->ids.n, rc == LLM_LIMIT && !given,
                        err);
    }

    if (rc == LLM_OK && prompt->ids.n == 0) {
        return llm_err_set(err, LLM_BADREQ, "prompt",
                           "The prompt is empty: it has no tokens.");
    }

    return rc;
}


static int
prepare_generate(const engine_t *engine, prompt_t *prompt, request_t *req,
                 llm_err_t *err)
{
    int rc = set_prompt(engine, prompt, req, err);

    if (rc == LLM_OK) {
        rc = set_stops(engine, req, err);
    }

    if (rc == LLM_OK) {
        rc = set_sampling(engine, req, err);
    }

    if (rc == LLM_OK) {
        rc = set_sequence(engine, prompt, req, err);
    }

    return rc;
}


static int
prepare_tokenize(const engine_t *engine, prompt_t *prompt, request_t *req,
                 llm_err_t *err)
{
    const int rc = prompt_encode(engine, prompt, req, TOKENIZE_MAX, err);

    if (rc == LLM_LIMIT) {
        return llm_err_set(err, LLM_BADREQ, "prompt",
                           "The text has more than %d tokens.", TOKENIZE_MAX);
    }

    if (rc != LLM_OK || prompt->ids.n == 0) {
        return rc;
    }

    const size_t bytes = (size_t) prompt->ids.n * sizeof(int32_t);

    req->seq.tokens = arena_alloc(req->arena, bytes);

    if (req->seq.tokens == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    memcpy(req->seq.tokens, prompt->ids.ids, bytes);
    req->seq.n_tokens = prompt->ids.n;

    return LLM_OK;
}


static int
prepare_detokenize(const engine_t *engine, prompt_t *prompt, request_t *req,
                   llm_err_t *err)
{
    int rc = prompt_copy(engine, prompt, req, INT32_MAX, err);

    if (rc != LLM_OK) {
        strcpy(err->param, "tokens");
        return rc;
    }

    rc = tok_decode(engine->tok, prompt->ids.ids, prompt->ids.n, true,
                    &req->text);

    return rc == LLM_OK ? rc : llm_err_set(err, rc, NULL, "no memory");
}


void
prepare_request(const engine_t *engine, prompt_t *prompt, request_t *req)
{
    llm_err_t *err = &req->err;

    prompt->ids.n = 0;

    switch (req->msg->kind) {
    case LLM_REQ_TOKENIZE:
    case LLM_REQ_TOKENIZE_CHAT:
        err->code = prepare_tokenize(engine, prompt, req, err);
        break;

    case LLM_REQ_DETOKENIZE:
        err->code = prepare_detokenize(engine, prompt, req, err);
        break;

    default:
        err->code = prepare_generate(engine, prompt, req, err);
    }
}
