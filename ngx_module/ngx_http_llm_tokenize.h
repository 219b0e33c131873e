/*
 * Hooks of /tokenize and /detokenize, see ngx_http_llm_api.h.
 */

#ifndef NGX_HTTP_LLM_TOKENIZE_H
#define NGX_HTTP_LLM_TOKENIZE_H

#include "ngx_module/ngx_http_llm_api.h"


ngx_int_t ngx_http_llm_tokenize_parse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
ngx_int_t ngx_http_llm_detokenize_parse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
void ngx_http_llm_tokenize_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta);
void ngx_http_llm_tokenize_end(ngx_http_llm_ctx_t *ctx);
void ngx_http_llm_detokenize_end(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_TOKENIZE_H */
