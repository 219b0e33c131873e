/*
 * llm_metrics: the counters of every engine as Prometheus text.
 */

#ifndef NGX_HTTP_LLM_METRICS_H
#define NGX_HTTP_LLM_METRICS_H

#include "ngx_module/ngx_http_llm_module.h"


ngx_int_t ngx_http_llm_metrics_handler(ngx_http_request_t *r);

#endif /* NGX_HTTP_LLM_METRICS_H */
