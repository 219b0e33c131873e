/*
 * Output: text is written into chained buffers, framed as server-sent events
 * or sent as one body, and the buffers are used again once the client has
 * taken them.  Nothing is allocated per token in the steady state.
 */

#ifndef NGX_HTTP_LLM_SSE_H
#define NGX_HTTP_LLM_SSE_H

#include "ngx_module/ngx_http_llm_module.h"


typedef struct {
    ngx_pool_t              *pool;
    size_t                   chunk;      /* bytes of a buffer */

    ngx_chain_t             *head;       /* written, not yet sent */
    ngx_chain_t            **tail;
    ngx_buf_t               *buf;        /* being written */
    off_t                    size;       /* of head */

    ngx_chain_t             *free;
    ngx_chain_t             *busy;
    unsigned                 failed:1;   /* out of memory */
} ngx_http_llm_out_t;


#define ngx_http_llm_out_lit(out, text)                                      \
    ngx_http_llm_out_write(out, text, sizeof(text) - 1)


void ngx_http_llm_out_init(ngx_http_llm_out_t *out, ngx_pool_t *pool,
    size_t chunk);
void ngx_http_llm_out_write(ngx_http_llm_out_t *out, const void *data,
    size_t len);
void ngx_http_llm_out_str(ngx_http_llm_out_t *out, const ngx_str_t *text);
void ngx_http_llm_out_uint(ngx_http_llm_out_t *out, uint64_t n);
void ngx_http_llm_out_int(ngx_http_llm_out_t *out, int64_t n);
void ngx_http_llm_out_double(ngx_http_llm_out_t *out, double value);

/* Moves everything written in src to the end of out. */
void ngx_http_llm_out_splice(ngx_http_llm_out_t *out,
    ngx_http_llm_out_t *src);

/* Forgets what was written and not sent. */
void ngx_http_llm_out_reset(ngx_http_llm_out_t *out);

/* Passes what was written to the output filters, as the end of the response
 * when last.  NGX_ERROR: finalize the request. */
ngx_int_t ngx_http_llm_out_send(ngx_http_request_t *r,
    ngx_http_llm_out_t *out, ngx_uint_t last);

/* Headers and whole body of a JSON (or other) response of known length;
 * returns what ngx_http_finalize_request takes. */
ngx_int_t ngx_http_llm_out_respond(ngx_http_request_t *r,
    ngx_http_llm_out_t *out, const char *content_type);

/* Response headers of an event stream. */
ngx_int_t ngx_http_llm_sse_header(ngx_http_request_t *r);

/* "data: " … "\n\n" around what is written between the two. */
void ngx_http_llm_sse_begin(ngx_http_llm_out_t *out);
void ngx_http_llm_sse_end(ngx_http_llm_out_t *out);
void ngx_http_llm_sse_comment(ngx_http_llm_out_t *out);
void ngx_http_llm_sse_done(ngx_http_llm_out_t *out);

/* Adds a response header; the strings must live as long as the request. */
ngx_int_t ngx_http_llm_header_add(ngx_http_request_t *r, const char *key,
    const char *value);

#endif /* NGX_HTTP_LLM_SSE_H */
