/*
 * How a request stands in the engine's line: llm_queue, llm_tenant and its
 * weight, llm_priority.
 */

#ifndef NGX_HTTP_LLM_TURN_H
#define NGX_HTTP_LLM_TURN_H

#include "ngx_module/ngx_http_llm_api.h"


/* Fills turn, tenant and priority of ctx->query from the location; after the
 * body was parsed.  NGX_ERROR: out of memory. */
ngx_int_t ngx_http_llm_turn(ngx_http_llm_ctx_t *ctx);

/* Text → number; NGX_ERROR leaves it as it was. */
ngx_int_t ngx_http_llm_turn_weight(ngx_str_t *text, double *weight);
ngx_int_t ngx_http_llm_turn_number(ngx_str_t *text, int32_t *number);

#endif /* NGX_HTTP_LLM_TURN_H */
