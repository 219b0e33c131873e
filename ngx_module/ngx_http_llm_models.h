/*
 * /v1/models, /health and /version: answered from the segment, without the
 * engine's help.
 */

#ifndef NGX_HTTP_LLM_MODELS_H
#define NGX_HTTP_LLM_MODELS_H

#include "ngx_module/ngx_http_llm_api.h"


ngx_int_t ngx_http_llm_models_list(ngx_http_llm_ctx_t *ctx);
ngx_int_t ngx_http_llm_models_one(ngx_http_llm_ctx_t *ctx);
ngx_int_t ngx_http_llm_models_health(ngx_http_llm_ctx_t *ctx);
ngx_int_t ngx_http_llm_models_version(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_MODELS_H */
