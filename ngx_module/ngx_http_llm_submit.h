/*
 * From a request's body to submitted slots.
 */

#ifndef NGX_HTTP_LLM_SUBMIT_H
#define NGX_HTTP_LLM_SUBMIT_H

#include "ngx_module/ngx_http_llm_api.h"


/* The engine is READY: then ctx->card and ctx->model are set.  NGX_ERROR with
 * ctx->error set. */
ngx_int_t ngx_http_llm_submit_engine(ngx_http_llm_ctx_t *ctx);

/* Parses the body that was read, makes the choices and submits them all.
 * NGX_OK, or NGX_ERROR with ctx->error set; seats that were taken stay with
 * their choices. */
ngx_int_t ngx_http_llm_submit(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_SUBMIT_H */
