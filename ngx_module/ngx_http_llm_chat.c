/*
 * /v1/chat/completions: messages in, an assistant's message out, whole or in
 * chunks.
 */

#include "ngx_module/ngx_http_llm_chat.h"
#include "ngx_module/ngx_http_llm_messages.h"
#include "ngx_module/ngx_http_llm_params.h"


static void ngx_http_llm_chat_open(ngx_http_llm_choice_t *choice);
static void ngx_http_llm_chat_begin(ngx_http_llm_choice_t *choice);
static void ngx_http_llm_chat_choice(ngx_http_llm_choice_t *choice);
static void ngx_http_llm_chat_logprobs(ngx_http_llm_out_t *out,
    const llm_delta_t *delta);
static void ngx_http_llm_chat_logprob(ngx_http_llm_out_t *out,
    const llm_token_logprob_t *token);


ngx_int_t
ngx_http_llm_chat_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    ngx_http_llm_query_t  *query;
    const cJSON           *echo;

    query = &ctx->query;

    if (ngx_http_llm_params_parse(ctx, root, NGX_HTTP_LLM_FOR_CHAT
                                             |NGX_HTTP_LLM_FOR_TEMPLATE)
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    echo = ngx_http_llm_json_get(root, "echo");

    if (echo && !cJSON_IsFalse(echo)) {
        return ngx_http_llm_bad(ctx, "echo", "echo is not supported for "
                                "chat.");
    }

    query->kind = LLM_REQ_CHAT;

    /* the template's own text holds special tokens */
    query->flags |= LLM_F_PARSE_SPECIAL;

    return ngx_http_llm_messages_parse(ctx, root);
}


void
ngx_http_llm_chat_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta)
{
    ngx_http_llm_out_t    *out;
    ngx_http_llm_query_t  *query;

    query = &choice->ctx->query;

    if (!query->stream) {
        ngx_http_llm_json_escape(&choice->text, delta->text, delta->text_len);

        if (delta->n_logprobs) {
            if (choice->array[0].size) {
                ngx_http_llm_out_lit(&choice->array[0], ",");
            }

            ngx_http_llm_chat_logprobs(&choice->array[0], delta);
        }

        return;
    }

    ngx_http_llm_chat_open(choice);

    if (delta->text_len == 0 && delta->n_logprobs == 0
        && !query->continuous_usage)
    {
        return;
    }

    out = &choice->ctx->out;

    ngx_http_llm_chat_begin(choice);

    ngx_http_llm_out_lit(out, "{\"content\":");
    ngx_http_llm_json_string(out, delta->text, delta->text_len);
    ngx_http_llm_out_lit(out, "},\"logprobs\":");

    if (delta->n_logprobs) {
        ngx_http_llm_out_lit(out, "{\"content\":[");
        ngx_http_llm_chat_logprobs(out, delta);
        ngx_http_llm_out_lit(out, "],\"refusal\":null}");

    } else {
        ngx_http_llm_out_lit(out, "null");
    }

    ngx_http_llm_out_lit(out, ",\"finish_reason\":null");

    ngx_http_llm_api_chunk_end(choice);
}


void
ngx_http_llm_chat_finish(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_out_t  *out;

    out = &choice->ctx->out;

    ngx_http_llm_chat_open(choice);
    ngx_http_llm_chat_begin(choice);

    ngx_http_llm_out_lit(out, "{},\"logprobs\":null,\"finish_reason\":");
    ngx_http_llm_api_finish(choice);

    ngx_http_llm_api_chunk_end(choice);
}


/* the first chunk of a choice says who speaks */

static void
ngx_http_llm_chat_open(ngx_http_llm_choice_t *choice)
{
    if (choice->opened) {
        return;
    }

    choice->opened = 1;

    ngx_http_llm_chat_begin(choice);

    ngx_http_llm_out_lit(&choice->ctx->out,
                         "{\"role\":\"assistant\",\"content\":\"\"},"
                         "\"logprobs\":null,\"finish_reason\":null");

    ngx_http_llm_api_chunk_end(choice);
}


static void
ngx_http_llm_chat_begin(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_api_chunk(choice, "chat.completion.chunk", ",\"delta\":");
}


void
ngx_http_llm_chat_end(ngx_http_llm_ctx_t *ctx)
{
    if (ctx->query.stream) {
        ngx_http_llm_api_usage_event(ctx, "chat.completion.chunk");
        return;
    }

    ngx_http_llm_api_response(ctx, "chat.completion",
                              ngx_http_llm_chat_choice);

    ngx_http_llm_out_lit(&ctx->out, ",\"system_fingerprint\":null,"
                                    "\"service_tier\":null}");
}


static void
ngx_http_llm_chat_choice(ngx_http_llm_choice_t *choice)
{
    ngx_http_llm_out_t  *out;

    out = &choice->ctx->out;

    ngx_http_llm_out_lit(out, ",\"message\":{\"role\":\"assistant\","
                              "\"content\":\"");
    ngx_http_llm_out_splice(out, &choice->text);
    ngx_http_llm_out_lit(out, "\",\"refusal\":null},\"logprobs\":");

    if (choice->ctx->query.logprobs) {
        ngx_http_llm_out_lit(out, "{\"content\":[");
        ngx_http_llm_out_splice(out, &choice->array[0]);
        ngx_http_llm_out_lit(out, "],\"refusal\":null}");

    } else {
        ngx_http_llm_out_lit(out, "null");
    }
}


static void
ngx_http_llm_chat_logprobs(ngx_http_llm_out_t *out, const llm_delta_t *delta)
{
    uint32_t       pos, i;
    ngx_uint_t     n;
    llm_logprob_t  entry;

    pos = 0;

    for (n = 0; llm_logprob_next(delta, &pos, &entry); n++) {

        if (n) {
            ngx_http_llm_out_lit(out, ",");
        }

        ngx_http_llm_chat_logprob(out, &entry.chosen);
        ngx_http_llm_out_lit(out, ",\"top_logprobs\":[");

        for (i = 0; i < entry.n_top; i++) {
            if (i) {
                ngx_http_llm_out_lit(out, ",");
            }

            ngx_http_llm_chat_logprob(out, &entry.top[i]);
            ngx_http_llm_out_lit(out, "}");
        }

        ngx_http_llm_out_lit(out, "]}");
    }
}


/* an object that the caller closes */

static void
ngx_http_llm_chat_logprob(ngx_http_llm_out_t *out,
    const llm_token_logprob_t *token)
{
    uint32_t  i;

    ngx_http_llm_out_lit(out, "{\"token\":");
    ngx_http_llm_json_string(out, token->bytes, token->len);
    ngx_http_llm_out_lit(out, ",\"logprob\":");
    ngx_http_llm_api_logprob(out, token->logprob);

    /* the token may be part of a character: these are its true bytes */

    ngx_http_llm_out_lit(out, ",\"bytes\":[");

    for (i = 0; i < token->len; i++) {
        if (i) {
            ngx_http_llm_out_lit(out, ",");
        }

        ngx_http_llm_out_uint(out, token->bytes[i]);
    }

    ngx_http_llm_out_lit(out, "]");
}
