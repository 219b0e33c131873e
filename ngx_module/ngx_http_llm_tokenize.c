/*
 * /tokenize and /detokenize: the engine's tokenizer by itself, in the shapes
 * of vLLM.
 */

#include "ngx_module/ngx_http_llm_tokenize.h"
#include "ngx_module/ngx_http_llm_messages.h"
#include "ngx_module/ngx_http_llm_list.h"
#include "ngx_module/ngx_http_llm_params.h"


static ngx_int_t ngx_http_llm_tokenize_prompt(ngx_http_llm_ctx_t *ctx,
    ngx_http_llm_prompt_t **prompt);


ngx_int_t
ngx_http_llm_tokenize_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    ngx_uint_t              which;
    const cJSON            *text;
    ngx_http_llm_prompt_t  *prompt;

    text = ngx_http_llm_json_get(root, "prompt");

    which = text ? NGX_HTTP_LLM_FOR_TOKENIZE : NGX_HTTP_LLM_FOR_TEMPLATE;

    if (ngx_http_llm_params_parse(ctx, root, which) != NGX_OK) {
        return NGX_ERROR;
    }

    if (text == NULL) {

        if (ngx_http_llm_json_get(root, "messages") == NULL) {
            return ngx_http_llm_bad(ctx, "prompt", "prompt or messages is "
                                    "missing.");
        }

        ctx->query.kind = LLM_REQ_TOKENIZE_CHAT;
        ctx->query.flags |= LLM_F_PARSE_SPECIAL;

        return ngx_http_llm_messages_parse(ctx, root);
    }

    if (!cJSON_IsString(text)) {
        return ngx_http_llm_bad(ctx, "prompt", "prompt must be a string.");
    }

    if (ngx_http_llm_tokenize_prompt(ctx, &prompt) != NGX_OK) {
        return NGX_ERROR;
    }

    prompt->kind = LLM_REQ_TOKENIZE;
    prompt->data.data = (u_char *) text->valuestring;
    prompt->data.len = ngx_strlen(text->valuestring);

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_detokenize_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    const cJSON            *tokens;
    ngx_http_llm_prompt_t  *prompt;

    if (ngx_http_llm_params_parse(ctx, root, NGX_HTTP_LLM_FOR_DETOKENIZE)
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    tokens = ngx_http_llm_json_get(root, "tokens");

    if (tokens == NULL) {
        return ngx_http_llm_bad(ctx, "tokens", "tokens is missing.");
    }

    if (ngx_http_llm_tokenize_prompt(ctx, &prompt) != NGX_OK) {
        return NGX_ERROR;
    }

    prompt->kind = LLM_REQ_DETOKENIZE;

    /* nothing is cut out of what the client wrote itself */
    ctx->query.flags |= LLM_F_KEEP_SPECIAL;

    return ngx_http_llm_list_tokens(ctx, tokens, "tokens", &prompt->data);
}


static ngx_int_t
ngx_http_llm_tokenize_prompt(ngx_http_llm_ctx_t *ctx,
    ngx_http_llm_prompt_t **prompt)
{
    if (ngx_array_init(&ctx->query.prompts, ctx->request->pool, 1,
                       sizeof(ngx_http_llm_prompt_t))
        != NGX_OK)
    {
        return NGX_ERROR;
    }

    *prompt = ngx_array_push(&ctx->query.prompts);

    return *prompt ? NGX_OK : NGX_ERROR;
}


void
ngx_http_llm_tokenize_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta)
{
    ngx_http_llm_json_escape(&choice->text, delta->text, delta->text_len);
}


void
ngx_http_llm_tokenize_end(ngx_http_llm_ctx_t *ctx)
{
    uint32_t                i, n;
    const int32_t          *tokens;
    ngx_http_llm_out_t     *out;
    ngx_http_llm_choice_t  *choice;

    out = &ctx->out;
    choice = &ctx->choices[0];

    tokens = ngx_http_llm_ring_log(ctx->ring, choice->seat, &n);

    ngx_http_llm_out_lit(out, "{\"count\":");
    ngx_http_llm_out_uint(out, n);
    ngx_http_llm_out_lit(out, ",\"max_model_len\":");
    ngx_http_llm_out_uint(out, ctx->card->max_model_len);
    ngx_http_llm_out_lit(out, ",\"tokens\":[");

    for (i = 0; i < n; i++) {
        if (i) {
            ngx_http_llm_out_lit(out, ",");
        }

        ngx_http_llm_out_int(out, tokens[i]);
    }

    ngx_http_llm_out_lit(out, "],\"token_strs\":null}");
}


void
ngx_http_llm_detokenize_end(ngx_http_llm_ctx_t *ctx)
{
    ngx_http_llm_out_lit(&ctx->out, "{\"prompt\":\"");
    ngx_http_llm_out_splice(&ctx->out, &ctx->choices[0].text);
    ngx_http_llm_out_lit(&ctx->out, "\"}");
}
