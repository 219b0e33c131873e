/*
 * Hooks of /v1/chat/completions, see ngx_http_llm_api.h.
 */

#ifndef NGX_HTTP_LLM_CHAT_H
#define NGX_HTTP_LLM_CHAT_H

#include "ngx_module/ngx_http_llm_api.h"


ngx_int_t ngx_http_llm_chat_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root);
void ngx_http_llm_chat_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta);
void ngx_http_llm_chat_finish(ngx_http_llm_choice_t *choice);
void ngx_http_llm_chat_end(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_CHAT_H */
