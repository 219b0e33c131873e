/*
 * The families of metrics: name, type, help, and where in an engine's
 * statistics the numbers stand.
 */

#ifndef NGX_HTTP_LLM_FAMILIES_H
#define NGX_HTTP_LLM_FAMILIES_H

#include "ngx_module/ngx_http_llm_module.h"
#include "engine/ipc/stats.h"


/* what a number of the statistics counts, and a page shows */
enum {
    NGX_HTTP_LLM_PLAIN = 0,    /* things */
    NGX_HTTP_LLM_TOKENS,       /* tokens: bounds up to max_model_len */
    NGX_HTTP_LLM_MICROS,       /* microseconds, shown as seconds */
    NGX_HTTP_LLM_NANOS         /* nanoseconds, shown as seconds */
};


/* rows of one family follow each other */
typedef struct {
    const char       *name;
    const char       *type;
    const char       *label;   /* name="value", or NULL */
    const char       *help;
    size_t            offset;  /* of the counter in llm_stats_t */
    ngx_uint_t        unit;
} ngx_http_llm_value_t;


typedef struct {
    const char       *name;
    const char       *help;
    size_t            offset;  /* of the llm_hist_t */
    const uint64_t *(*bounds)(int *n);
    ngx_uint_t        unit;
} ngx_http_llm_histogram_t;


/* both end with a row without a name */
extern const ngx_http_llm_value_t      ngx_http_llm_values[];
extern const ngx_http_llm_histogram_t  ngx_http_llm_histograms[];

#endif /* NGX_HTTP_LLM_FAMILIES_H */
