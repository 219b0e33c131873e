/*
 * llm_metrics: the counters of every engine as Prometheus text.
 */

#ifndef NGX_HTTP_LLM_METRICS_H
#define NGX_HTTP_LLM_METRICS_H

#include "ngx_module/ngx_http_llm_api.h"


ngx_int_t ngx_http_llm_metrics_handler(ngx_http_request_t *r);

/* All answers of a request are there: counts what only the module knows, which
 * of them belong together. */
void ngx_http_llm_metrics_request(ngx_http_llm_ctx_t *ctx);

#endif /* NGX_HTTP_LLM_METRICS_H */
