/*
 * Errors in OpenAI's shape.  A failing request records what went wrong in its
 * context and is finalized with the plain HTTP status, so that error_page and
 * everything else of nginx works; when nginx is about to send its own HTML
 * page for a location with llm_pass, a filter puts the JSON in its place.  So
 * 413, 401 or 429 made by other modules have the same shape.
 */

#ifndef NGX_HTTP_LLM_ERROR_H
#define NGX_HTTP_LLM_ERROR_H

#include "ngx_module/ngx_http_llm_module.h"
#include "ngx_module/ngx_http_llm_sse.h"
#include "engine/ipc/msg.h"


typedef struct {
    ngx_uint_t               status;       /* 0: none recorded */
    const char              *type;         /* NULL: by the status */
    const char              *code;         /* NULL: null */
    ngx_str_t                param;        /* empty: null */
    ngx_str_t                message;
    ngx_uint_t               retry_after;  /* seconds, 0: no header */
    const char              *allow;        /* for 405 */
    unsigned                 no_retry:1;   /* x-should-retry: false */
} ngx_http_llm_error_t;


/* Fills error with a formatted message (ngx_sprintf's conversions); keeps the
 * first one recorded. */
void ngx_http_llm_error_set(ngx_http_llm_error_t *error, ngx_pool_t *pool,
    ngx_uint_t status, const char *param, const char *fmt, ...);

/* From an ERROR record of the engine. */
void ngx_http_llm_error_fail(ngx_http_llm_error_t *error, ngx_pool_t *pool,
    const llm_fail_t *fail);

/* Writes {"error":{…}}. */
void ngx_http_llm_error_write(ngx_http_llm_out_t *out,
    const ngx_http_llm_error_t *error);

/* Puts the filters in place (postconfiguration). */
ngx_int_t ngx_http_llm_error_filter_init(ngx_conf_t *cf);

#endif /* NGX_HTTP_LLM_ERROR_H */
