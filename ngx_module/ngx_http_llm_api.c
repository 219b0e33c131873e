/*
 * The endpoint table, and what the endpoints' JSON has in common.
 *
 * An endpoint is named by the end of the URI, so that `location /v1/`,
 * `location /chat/v1/` and `location = /v1/completions` all work.
 */

#include "ngx_module/ngx_http_llm_api.h"
#include "ngx_module/ngx_http_llm_chat.h"
#include "ngx_module/ngx_http_llm_completion.h"
#include "ngx_module/ngx_http_llm_models.h"
#include "ngx_module/ngx_http_llm_tokenize.h"

#include <math.h>


#define NGX_HTTP_LLM_READ  (NGX_HTTP_GET|NGX_HTTP_HEAD)


static const ngx_http_llm_api_t  ngx_http_llm_apis[] = {

    { "/v1/chat/completions", NGX_HTTP_POST, "POST", 0, NULL,
      ngx_http_llm_chat_parse, ngx_http_llm_chat_delta,
      ngx_http_llm_chat_finish, ngx_http_llm_chat_end, "chatcmpl-", 0 },

    { "/v1/completions", NGX_HTTP_POST, "POST", 0, NULL,
      ngx_http_llm_completion_parse, ngx_http_llm_completion_delta,
      ngx_http_llm_completion_finish, ngx_http_llm_completion_end, "cmpl-", 0 },

    { "/v1/models", NGX_HTTP_LLM_READ, "GET, HEAD", 0,
      ngx_http_llm_models_list, NULL, NULL, NULL, NULL, NULL, 0 },

    { "/v1/models/", NGX_HTTP_LLM_READ, "GET, HEAD", 1,
      ngx_http_llm_models_one, NULL, NULL, NULL, NULL, NULL, 0 },

    { "/tokenize", NGX_HTTP_POST, "POST", 0, NULL,
      ngx_http_llm_tokenize_parse, ngx_http_llm_tokenize_delta,
      NULL, ngx_http_llm_tokenize_end, "tok-", 0 },

    { "/detokenize", NGX_HTTP_POST, "POST", 0, NULL,
      ngx_http_llm_detokenize_parse, ngx_http_llm_tokenize_delta,
      NULL, ngx_http_llm_detokenize_end, "detok-", 0 },

    { "/health", NGX_HTTP_LLM_READ, "GET, HEAD", 0,
      ngx_http_llm_models_health, NULL, NULL, NULL, NULL, NULL, 0 },

    { "/ready", NGX_HTTP_LLM_READ, "GET, HEAD", 0,
      ngx_http_llm_models_health, NULL, NULL, NULL, NULL, NULL, 0 },

    { "/version", NGX_HTTP_LLM_READ, "GET, HEAD", 0,
      ngx_http_llm_models_version, NULL, NULL, NULL, NULL, NULL, 1 },

    { NULL, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0 }
};


const ngx_http_llm_api_t *
ngx_http_llm_api_find(ngx_str_t *uri, ngx_str_t *name)
{
    size_t                     len;
    u_char                    *p;
    const ngx_http_llm_api_t  *api;

    for (api = ngx_http_llm_apis; api->path; api++) {

        len = ngx_strlen(api->path);

        if (uri->len < len) {
            continue;
        }

        if (api->below) {

            /* names may contain slashes, as "org/model" */

            p = ngx_strnstr(uri->data, (char *) api->path, uri->len);

            if (p && p + len < uri->data + uri->len) {
                name->data = p + len;
                name->len = uri->data + uri->len - name->data;
                return api;
            }

            continue;
        }

        if (ngx_memcmp(uri->data + uri->len - len, api->path, len) == 0) {
            return api;
        }
    }

    return NULL;
}


void
ngx_http_llm_api_head(ngx_http_llm_ctx_t *ctx, const char *object)
{
    ngx_http_llm_out_t  *out;

    out = &ctx->out;

    ngx_http_llm_out_lit(out, "{\"id\":");
    ngx_http_llm_json_string(out, ctx->id.data, ctx->id.len);
    ngx_http_llm_out_lit(out, ",\"object\":\"");
    ngx_http_llm_out_write(out, object, ngx_strlen(object));
    ngx_http_llm_out_lit(out, "\",\"created\":");
    ngx_http_llm_out_int(out, ctx->created);
    ngx_http_llm_out_lit(out, ",\"model\":");
    ngx_http_llm_json_string(out, ctx->model.data, ctx->model.len);
}


static void
ngx_http_llm_api_usage_write(ngx_http_llm_out_t *out, uint64_t prompt,
    uint64_t completion, uint64_t cached)
{
    ngx_http_llm_out_lit(out, "\"usage\":{\"prompt_tokens\":");
    ngx_http_llm_out_uint(out, prompt);
    ngx_http_llm_out_lit(out, ",\"completion_tokens\":");
    ngx_http_llm_out_uint(out, completion);
    ngx_http_llm_out_lit(out, ",\"total_tokens\":");
    ngx_http_llm_out_uint(out, prompt + completion);
    ngx_http_llm_out_lit(out, ",\"prompt_tokens_details\":"
                              "{\"cached_tokens\":");
    ngx_http_llm_out_uint(out, cached);
    ngx_http_llm_out_lit(out, "}}");
}


void
ngx_http_llm_api_usage(ngx_http_llm_ctx_t *ctx)
{
    uint64_t                prompt, completion, cached;
    ngx_uint_t              i;
    ngx_http_llm_choice_t  *choice;

    prompt = 0;
    completion = 0;
    cached = 0;

    for (i = 0; i < ctx->n_choices; i++) {
        choice = &ctx->choices[i];
        completion += choice->tokens;

        /* a prompt counts once, however many answers it gets */

        if (i % ctx->query.n == 0) {
            prompt += choice->prompt_tokens;
            cached += choice->cached_tokens;
        }
    }

    ngx_http_llm_api_usage_write(&ctx->out, prompt, completion, cached);
}


void
ngx_http_llm_api_usage_event(ngx_http_llm_ctx_t *ctx, const char *object)
{
    if (!ctx->query.include_usage) {
        return;
    }

    ngx_http_llm_sse_begin(&ctx->out);
    ngx_http_llm_api_head(ctx, object);
    ngx_http_llm_out_lit(&ctx->out, ",\"choices\":[],");
    ngx_http_llm_api_usage(ctx);
    ngx_http_llm_out_lit(&ctx->out, "}");
    ngx_http_llm_sse_end(&ctx->out);
}


void
ngx_http_llm_api_chunk(ngx_http_llm_choice_t *choice, const char *object,
    const char *member)
{
    ngx_http_llm_out_t  *out;

    out = &choice->ctx->out;

    ngx_http_llm_sse_begin(out);
    ngx_http_llm_api_head(choice->ctx, object);
    ngx_http_llm_out_lit(out, ",\"choices\":[{\"index\":");
    ngx_http_llm_out_uint(out, choice->index);
    ngx_http_llm_out_write(out, member, ngx_strlen(member));
}


void
ngx_http_llm_api_chunk_end(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_out_t    *out;
    ngx_http_llm_query_t  *query;

    out = &choice->ctx->out;
    query = &choice->ctx->query;

    ngx_http_llm_out_lit(out, "}]");

    if (query->continuous_usage) {
        ngx_http_llm_out_lit(out, ",");
        ngx_http_llm_api_usage_write(out, choice->prompt_tokens,
                                     choice->tokens, choice->cached_tokens);

    } else if (query->include_usage) {
        ngx_http_llm_out_lit(out, ",\"usage\":null");
    }

    ngx_http_llm_out_lit(out, "}");
    ngx_http_llm_sse_end(out);
}


void
ngx_http_llm_api_response(ngx_http_llm_ctx_t *ctx, const char *object,
    void (*body)(ngx_http_llm_choice_t *choice))
{
    ngx_uint_t           i;
    ngx_http_llm_out_t  *out;

    out = &ctx->out;

    ngx_http_llm_api_head(ctx, object);
    ngx_http_llm_out_lit(out, ",\"choices\":[");

    for (i = 0; i < ctx->n_choices; i++) {

        if (i) {
            ngx_http_llm_out_lit(out, ",");
        }

        ngx_http_llm_out_lit(out, "{\"index\":");
        ngx_http_llm_out_uint(out, i);
        body(&ctx->choices[i]);
        ngx_http_llm_out_lit(out, ",\"finish_reason\":");
        ngx_http_llm_api_finish(&ctx->choices[i]);
        ngx_http_llm_out_lit(out, "}");
    }

    ngx_http_llm_out_lit(out, "],");
    ngx_http_llm_api_usage(ctx);
}


void
ngx_http_llm_api_finish(ngx_http_llm_choice_t *choice)
{
    ngx_str_t             *stop;
    llm_done_t            *result;
    ngx_http_llm_out_t    *out;
    ngx_http_llm_query_t  *query;

    out = &choice->ctx->out;
    query = &choice->ctx->query;
    result = &choice->result;

    /* clients know these two; an abort is seen by nobody */

    if (result->finish == LLM_FINISH_LENGTH) {
        ngx_http_llm_out_lit(out, "\"length\"");

    } else {
        ngx_http_llm_out_lit(out, "\"stop\"");
    }

    ngx_http_llm_out_lit(out, ",\"stop_reason\":");

    if (result->stop_kind == LLM_STOP_STRING && result->stop_value >= 0
        && (ngx_uint_t) result->stop_value < query->n_stops)
    {
        stop = &query->stops[result->stop_value];
        ngx_http_llm_json_string(out, stop->data, stop->len);

    } else if (result->stop_kind == LLM_STOP_TOKEN) {
        ngx_http_llm_out_int(out, result->stop_value);

    } else {
        ngx_http_llm_out_lit(out, "null");
    }
}


void
ngx_http_llm_api_logprob(ngx_http_llm_out_t *out, float logprob)
{
    if (isnan(logprob)) {
        ngx_http_llm_out_lit(out, "null");
        return;
    }

    ngx_http_llm_out_double(out, ngx_max(logprob, -9999.0f));
}
