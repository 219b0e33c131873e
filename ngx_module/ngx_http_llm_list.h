/*
 * Request fields with rules of their own, see ngx_http_llm_params.h for the
 * plain ones.  Each reads its member of root into ctx->query; NGX_ERROR with
 * ctx->error set.
 */

#ifndef NGX_HTTP_LLM_LIST_H
#define NGX_HTTP_LLM_LIST_H

#include "ngx_module/ngx_http_llm_api.h"


/* "seed"; one is drawn when there is none. */
ngx_int_t ngx_http_llm_list_seed(ngx_http_llm_ctx_t *ctx, const cJSON *root);

/* "cache_salt" */
ngx_int_t ngx_http_llm_list_salt(ngx_http_llm_ctx_t *ctx, const cJSON *root);

/* "stop" and "stop_token_ids" */
ngx_int_t ngx_http_llm_list_stop(ngx_http_llm_ctx_t *ctx, const cJSON *root);

/* "logit_bias" */
ngx_int_t ngx_http_llm_list_bias(ngx_http_llm_ctx_t *ctx, const cJSON *root);

/* "stream_options" */
ngx_int_t ngx_http_llm_list_stream(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);

/* Array of whole numbers in [0, vocabulary) → int32 ids in the pool. */
ngx_int_t ngx_http_llm_list_tokens(ngx_http_llm_ctx_t *ctx,
    const cJSON *array, const char *param, ngx_str_t *ids);

/* Refuses, with 400, fields whose effect would silently be missing. */
ngx_int_t ngx_http_llm_list_refuse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);

#endif /* NGX_HTTP_LLM_LIST_H */
