/*
 * The life of a request: from the content handler to the last byte.
 */

#ifndef NGX_HTTP_LLM_HANDLER_H
#define NGX_HTTP_LLM_HANDLER_H

#include "ngx_module/ngx_http_llm_api.h"


/* Content handler of a location with llm_pass. */
ngx_int_t ngx_http_llm_handler(ngx_http_request_t *r);

/* The ring: a choice has records, or its engine is gone. */
void ngx_http_llm_handler_ready(ngx_http_llm_choice_t *choice);
void ngx_http_llm_handler_lost(ngx_http_llm_choice_t *choice);

/* The context of a request, made when there is none; NULL: out of memory. */
ngx_http_llm_ctx_t *ngx_http_llm_handler_ctx(ngx_http_request_t *r);

#endif /* NGX_HTTP_LLM_HANDLER_H */
