/*
 * Hooks of /v1/completions, see ngx_http_llm_api.h.
 */

#ifndef NGX_HTTP_LLM_COMPLETION_H
#define NGX_HTTP_LLM_COMPLETION_H

#include "ngx_module/ngx_http_llm_api.h"


ngx_int_t ngx_http_llm_completion_parse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
void ngx_http_llm_completion_delta(ngx_http_llm_choice_t *choice,
    const llm_delta_t *delta);
void ngx_http_llm_completion_finish(ngx_http_llm_choice_t *choice);
void ngx_http_llm_completion_end(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_COMPLETION_H */
