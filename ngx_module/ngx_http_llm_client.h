/*
 * Sending to the client, and the ends of a request.  After complete, fail and
 * finalize the request must not be touched.
 */

#ifndef NGX_HTTP_LLM_CLIENT_H
#define NGX_HTTP_LLM_CLIENT_H

#include "ngx_module/ngx_http_llm_api.h"


/* Headers of a stream, once.  NGX_ERROR: they could not be sent. */
ngx_int_t ngx_http_llm_client_header(ngx_http_llm_ctx_t *ctx);

/* Sends what was written and sets ctx->blocked.  NGX_ERROR: the client is
 * gone. */
ngx_int_t ngx_http_llm_client_flush(ngx_http_llm_ctx_t *ctx);

/* All choices are done: the end of the stream, or the response. */
void ngx_http_llm_client_complete(ngx_http_llm_ctx_t *ctx);

/* ctx->error says why: a status of its own before the headers, an event of
 * the stream after them. */
void ngx_http_llm_client_fail(ngx_http_llm_ctx_t *ctx);

/* Lets go of seats and timers, then finalizes. */
void ngx_http_llm_client_finalize(ngx_http_llm_ctx_t *ctx, ngx_int_t rc);

/* The request is going away, for whatever reason; data: its context. */
void ngx_http_llm_client_cleanup(void *data);

#endif /* NGX_HTTP_LLM_CLIENT_H */
