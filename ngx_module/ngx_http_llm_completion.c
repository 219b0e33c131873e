/*
 * /v1/completions: text or token ids in, their continuation out.
 */

#include "ngx_module/ngx_http_llm_completion.h"
#include "ngx_module/ngx_http_llm_list.h"
#include "ngx_module/ngx_http_llm_params.h"


/* the parallel arrays of "logprobs" */

enum {
    NGX_HTTP_LLM_TOKENS = 0,
    NGX_HTTP_LLM_LOGPROBS,
    NGX_HTTP_LLM_TOP,
    NGX_HTTP_LLM_OFFSETS
};


static ngx_int_t ngx_http_llm_completion_prompts(ngx_http_llm_ctx_t *ctx,
    const cJSON *prompt);
static ngx_int_t ngx_http_llm_completion_prompt(ngx_http_llm_ctx_t *ctx,
    const cJSON *item);
static void ngx_http_llm_completion_begin(ngx_http_llm_choice_t *choice);
static void ngx_http_llm_completion_choice(ngx_http_llm_choice_t *choice);
static void ngx_http_llm_completion_array(ngx_http_llm_choice_t *choice,
    ngx_http_llm_out_t *out, const llm_delta_t *delta, ngx_uint_t which);
static void ngx_http_llm_completion_top(ngx_http_llm_out_t *out,
    const llm_logprob_t *entry);


static const char  *ngx_http_llm_arrays[NGX_HTTP_LLM_ARRAYS] = {
    "{\"tokens\":[", "],\"token_logprobs\":[", "],\"top_logprobs\":[",
    "],\"text_offset\":["
};


ngx_int_t
ngx_http_llm_completion_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    if (ngx_http_llm_params_parse(ctx, root, NGX_HTTP_LLM_FOR_COMPLETION)
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    return ngx_http_llm_completion_prompts(ctx,
                                       ngx_http_llm_json_get(root, "prompt"));
}


static ngx_int_t
ngx_http_llm_completion_prompts(ngx_http_llm_ctx_t *ctx, const cJSON *prompt)
{
    const cJSON  *item;

    if (prompt == NULL) {
        return ngx_http_llm_bad(ctx, "prompt", "prompt is missing.");
    }

    if (ngx_array_init(&ctx->query.prompts, ctx->request->pool, 1,
                       sizeof(ngx_http_llm_prompt_t))
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    /* a string, or one prompt in token ids */

    if (cJSON_IsString(prompt)
        || (cJSON_IsArray(prompt) && cJSON_IsNumber(prompt->child)))
    {
        return ngx_http_llm_completion_prompt(ctx, prompt);
    }

    if (!cJSON_IsArray(prompt) || prompt->child == NULL) {
        return ngx_http_llm_bad(ctx, "prompt", "prompt must be a string, an "
                                "array of strings, or arrays of token ids, "
                                "and not empty.");
    }

    cJSON_ArrayForEach(item, prompt) {

        if (ctx->query.prompts.nelts == NGX_HTTP_LLM_MAX_CHOICES) {
            return ngx_http_llm_bad(ctx, "prompt", "prompt takes at most %d "
                                    "prompts.", NGX_HTTP_LLM_MAX_CHOICES);
        }

        if (ngx_http_llm_completion_prompt(ctx, item) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_completion_prompt(ngx_http_llm_ctx_t *ctx, const cJSON *item)
{
    ngx_http_llm_prompt_t  *prompt;

    prompt = ngx_array_push(&ctx->query.prompts);
    if (prompt == NULL) {
        return NGX_ERROR;
    }

    if (cJSON_IsString(item)) {

        /* valid until the JSON is freed, after the submit */

        prompt->kind = LLM_REQ_TEXT;
        prompt->data.data = (u_char *) item->valuestring;
        prompt->data.len = ngx_strlen(item->valuestring);

        return NGX_OK;
    }

    if (!cJSON_IsArray(item) || item->child == NULL) {
        return ngx_http_llm_bad(ctx, "prompt", "prompt must be a string, an "
                                "array of strings, or arrays of token ids, "
                                "and not empty.");
    }

    prompt->kind = LLM_REQ_TOKENS;

    return ngx_http_llm_list_tokens(ctx, item, "prompt", &prompt->data);
}


void
ngx_http_llm_completion_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta)
{
    ngx_uint_t             i;
    ngx_http_llm_out_t    *out;
    ngx_http_llm_query_t  *query;

    query = &choice->ctx->query;

    if (!query->stream) {
        ngx_http_llm_json_escape(&choice->text, delta->text, delta->text_len);

        for (i = 0; i < NGX_HTTP_LLM_ARRAYS && delta->n_logprobs; i++) {
            if (choice->array[i].size) {
                ngx_http_llm_out_lit(&choice->array[i], ",");
            }

            ngx_http_llm_completion_array(choice, &choice->array[i], delta, i);
        }

        return;
    }

    if (delta->text_len == 0 && delta->n_logprobs == 0
        && !query->continuous_usage)
    {
        return;
    }

    out = &choice->ctx->out;

    ngx_http_llm_completion_begin(choice);

    ngx_http_llm_json_string(out, delta->text, delta->text_len);
    ngx_http_llm_out_lit(out, ",\"logprobs\":");

    if (delta->n_logprobs) {

        for (i = 0; i < NGX_HTTP_LLM_ARRAYS; i++) {
            ngx_http_llm_out_write(out, ngx_http_llm_arrays[i],
                                   ngx_strlen(ngx_http_llm_arrays[i]));
            ngx_http_llm_completion_array(choice, out, delta, i);
        }

        ngx_http_llm_out_lit(out, "]}");

    } else {
        ngx_http_llm_out_lit(out, "null");
    }

    ngx_http_llm_out_lit(out, ",\"finish_reason\":null");

    ngx_http_llm_api_chunk_end(choice);
}


void
ngx_http_llm_completion_finish(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_out_t  *out;

    out = &choice->ctx->out;

    ngx_http_llm_completion_begin(choice);

    ngx_http_llm_out_lit(out, "\"\",\"logprobs\":null,\"finish_reason\":");
    ngx_http_llm_api_finish(choice);

    ngx_http_llm_api_chunk_end(choice);
}


static void
ngx_http_llm_completion_begin(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_api_chunk(choice, "text_completion", ",\"text\":");
}


void
ngx_http_llm_completion_end(ngx_http_llm_ctx_t *ctx)
{
    if (ctx->query.stream) {
        ngx_http_llm_api_usage_event(ctx, "text_completion");
        return;
    }

    ngx_http_llm_api_response(ctx, "text_completion",
                              ngx_http_llm_completion_choice);

    ngx_http_llm_out_lit(&ctx->out, ",\"system_fingerprint\":null}");
}


static void
ngx_http_llm_completion_choice(ngx_http_llm_choice_t *choice)
{
    ngx_uint_t           k;
    ngx_http_llm_out_t  *out;

    out = &choice->ctx->out;

    ngx_http_llm_out_lit(out, ",\"text\":\"");
    ngx_http_llm_out_splice(out, &choice->text);
    ngx_http_llm_out_lit(out, "\",\"logprobs\":");

    if (!choice->ctx->query.logprobs) {
        ngx_http_llm_out_lit(out, "null");
        return;
    }

    for (k = 0; k < NGX_HTTP_LLM_ARRAYS; k++) {
        ngx_http_llm_out_write(out, ngx_http_llm_arrays[k],
                               ngx_strlen(ngx_http_llm_arrays[k]));
        ngx_http_llm_out_splice(out, &choice->array[k]);
    }

    ngx_http_llm_out_lit(out, "]}");
}


/* --- log-probabilities, one array at a time --- */


static void
ngx_http_llm_completion_array(ngx_http_llm_choice_t *choice,
    ngx_http_llm_out_t *out, const llm_delta_t *delta, ngx_uint_t which)
{
    size_t         offset;
    uint32_t       pos;
    ngx_uint_t     n;
    llm_logprob_t  entry;

    pos = 0;
    offset = choice->text_chars;

    for (n = 0; llm_logprob_next(delta, &pos, &entry); n++) {

        if (n) {
            ngx_http_llm_out_lit(out, ",");
        }

        switch (which) {

        case NGX_HTTP_LLM_TOKENS:
            ngx_http_llm_json_string(out, entry.chosen.bytes,
                                     entry.chosen.len);
            break;

        case NGX_HTTP_LLM_LOGPROBS:
            ngx_http_llm_api_logprob(out, entry.chosen.logprob);
            break;

        case NGX_HTTP_LLM_TOP:
            ngx_http_llm_completion_top(out, &entry);
            break;

        default:
            ngx_http_llm_out_uint(out, offset);
            offset += ngx_http_llm_json_chars(entry.chosen.bytes,
                                              entry.chosen.len);
        }
    }

    /* the last array: the next delta goes on from here */

    choice->text_chars = offset;
}


static ngx_uint_t
ngx_http_llm_completion_same(const llm_token_logprob_t *a,
    const llm_token_logprob_t *b)
{
    return a->len == b->len && ngx_memcmp(a->bytes, b->bytes, a->len) == 0;
}


/* an object of the best tokens and the chosen one, each text once */

static void
ngx_http_llm_completion_top(ngx_http_llm_out_t *out,
    const llm_logprob_t *entry)
{
    uint32_t                    i, k;
    const llm_token_logprob_t  *token;

    if (entry->chosen.logprob != entry->chosen.logprob) {

        /* not a number: the first token of a prompt has none */

        ngx_http_llm_out_lit(out, "null");
        return;
    }

    ngx_http_llm_out_lit(out, "{");

    for (i = 0; i <= entry->n_top; i++) {

        token = (i < entry->n_top) ? &entry->top[i] : &entry->chosen;

        for (k = 0; k < i; k++) {
            if (ngx_http_llm_completion_same(&entry->top[k], token)) {
                break;
            }
        }

        if (k < i) {
            continue;
        }

        if (i) {
            ngx_http_llm_out_lit(out, ",");
        }

        ngx_http_llm_json_string(out, token->bytes, token->len);
        ngx_http_llm_out_lit(out, ":");
        ngx_http_llm_api_logprob(out, token->logprob);
    }

    ngx_http_llm_out_lit(out, "}");
}
