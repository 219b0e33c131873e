/*
 * /metrics in Prometheus' text format.  The names are those of vLLM, so that
 * its dashboards and the gateways that read it work; what vLLM has no name for
 * begins with llm_.
 *
 * The format wants all samples of a family together, so the outer loop is over
 * families and the inner one over engines.
 */

#include "ngx_module/ngx_http_llm_metrics.h"
#include "ngx_module/ngx_http_llm_api.h"


#define NGX_HTTP_LLM_TEXT  "text/plain; version=0.0.4; charset=utf-8"


typedef struct {
    const char   *name;
    const char   *type;
    const char   *help;
    size_t        offset;      /* of the counter in llm_stats_t */
} ngx_http_llm_value_t;


typedef struct {
    const char       *name;
    const char       *help;
    size_t            offset;  /* of the llm_hist_t */
    const uint64_t *(*bounds)(int *n);
} ngx_http_llm_histogram_t;


typedef struct {
    ngx_http_llm_out_t     out;
    ngx_http_llm_engine_t  **engines;
    ngx_uint_t             n;
    ngx_str_t             *labels;     /* engine="…",model_name="…" of each */
} ngx_http_llm_page_t;


static ngx_int_t ngx_http_llm_metrics_labels(ngx_http_request_t *r,
    ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_family(ngx_http_llm_page_t *page,
    const char *name, const char *type, const char *help);
static void ngx_http_llm_metrics_sample(ngx_http_llm_page_t *page,
    ngx_uint_t i, const char *name, const char *more, uint64_t value);
static void ngx_http_llm_metrics_values(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_usage(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_finished(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_rejected(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_histograms(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_info(ngx_http_llm_page_t *page);


#define llm_at(field)  offsetof(llm_stats_t, field)

static const ngx_http_llm_value_t  ngx_http_llm_values[] = {

    { "vllm:num_requests_running", "gauge",
      "Requests in the running batch.", llm_at(running) },

    { "vllm:num_requests_waiting", "gauge",
      "Requests waiting to be scheduled.", llm_at(waiting) },

    { "vllm:prompt_tokens_total", "counter",
      "Prompt tokens processed.", llm_at(prompt_tokens) },

    { "vllm:generation_tokens_total", "counter",
      "Tokens generated.", llm_at(generation_tokens) },

    { "vllm:num_preemptions_total", "counter",
      "Sequences preempted for lack of KV cache pages.",
      llm_at(preemptions) },

    { "vllm:prefix_cache_queries_total", "counter",
      "Prompt tokens looked up in the prefix cache.",
      llm_at(prefix_queries) },

    { "vllm:prefix_cache_hits_total", "counter",
      "Prompt tokens found in the prefix cache.", llm_at(prefix_hits) },

    { "llm_preempted_queries_total", "counter",
      "Tokens of preempted sequences looked up in the prefix cache.",
      llm_at(again_queries) },

    { "llm_preempted_hits_total", "counter",
      "Tokens of preempted sequences found in the prefix cache.",
      llm_at(again_hits) },

    { "llm_requests_parked", "gauge",
      "Sequences that wait for a slow client.", llm_at(parked) },

    { "llm_kv_pages_total", "gauge",
      "KV cache pages in the pool.", llm_at(pages_total) },

    { "llm_kv_pages_used", "gauge",
      "KV cache pages held by sequences.", llm_at(pages_used) },

    { "llm_kv_pages_cached", "gauge",
      "KV cache pages that can be found again, held or free.",
      llm_at(pages_cached) },

    { "llm_slots_used", "gauge",
      "Request slots the engine holds.", llm_at(slots_used) },

    { "llm_steps_total", "counter",
      "Steps of the engine.", llm_at(steps) },

    { NULL, NULL, NULL, 0 }
};


static const ngx_http_llm_histogram_t  ngx_http_llm_histograms[] = {

    { "vllm:time_to_first_token_seconds",
      "Time from the request to its first token.",
      llm_at(ttft), llm_stats_bounds_ttft },

    { "vllm:inter_token_latency_seconds",
      "Time between two tokens of a sequence.",
      llm_at(inter), llm_stats_bounds_inter },

    { "vllm:e2e_request_latency_seconds",
      "Time from the request to its end.",
      llm_at(e2e), llm_stats_bounds_latency },

    { "vllm:request_queue_time_seconds",
      "Time from the request to its first scheduling.",
      llm_at(queue_time), llm_stats_bounds_latency },

    { NULL, NULL, 0, NULL }
};

#undef llm_at


static const char  *ngx_http_llm_finishes[LLM_FINISH_MAX] = {
    NULL, "finished_reason=\"stop\"", "finished_reason=\"length\"",
    "finished_reason=\"abort\"", "finished_reason=\"error\""
};


ngx_int_t
ngx_http_llm_metrics_handler(ngx_http_request_t *r)
{
    ngx_int_t                  rc;
    ngx_http_llm_page_t        page;
    ngx_http_llm_main_conf_t  *lmcf;

    if (!(r->method & (NGX_HTTP_GET|NGX_HTTP_HEAD))) {
        return NGX_HTTP_NOT_ALLOWED;
    }

    rc = ngx_http_discard_request_body(r);

    if (rc != NGX_OK) {
        return rc;
    }

    lmcf = ngx_http_get_module_main_conf(r, ngx_http_llm_module);

    ngx_http_llm_out_init(&page.out, r->pool, 8192);

    page.engines = lmcf->engines.elts;
    page.n = lmcf->engines.nelts;

    if (ngx_http_llm_metrics_labels(r, &page) != NGX_OK) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    ngx_http_llm_metrics_values(&page);
    ngx_http_llm_metrics_usage(&page);
    ngx_http_llm_metrics_finished(&page);
    ngx_http_llm_metrics_rejected(&page);
    ngx_http_llm_metrics_histograms(&page);
    ngx_http_llm_metrics_info(&page);

    return ngx_http_llm_out_respond(r, &page.out, NGX_HTTP_LLM_TEXT);
}


/*
 * model_name: the name clients use, or the engine's while it is not known;
 * engine tells two blocks with one model apart.
 */

static ngx_int_t
ngx_http_llm_metrics_labels(ngx_http_request_t *r, ngx_http_llm_page_t *page)
{
    u_char                 *p;
    ngx_str_t               name;
    llm_card_t              card;
    ngx_uint_t              i, k;
    ngx_http_llm_engine_t  *engine;

    page->labels = ngx_pcalloc(r->pool, (page->n + 1) * sizeof(ngx_str_t));
    if (page->labels == NULL) {
        return NGX_ERROR;
    }

    for (i = 0; i < page->n; i++) {
        engine = page->engines[i];
        name = engine->alias.len ? engine->alias : engine->name;

        if (engine->ring
            && ngx_http_llm_ring_state(engine->ring) == LLM_ENGINE_READY)
        {
            ngx_http_llm_ring_card(engine->ring, &card);
            name.data = (u_char *) card.alias;
            name.len = ngx_strlen(card.alias);
        }

        p = ngx_pnalloc(r->pool, sizeof("engine=\"\",model_name=\"\"")
                                 + engine->name.len + 2 * name.len);
        if (p == NULL) {
            return NGX_ERROR;
        }

        page->labels[i].data = p;

        /* an engine's name needs no escaping */

        p = ngx_sprintf(p, "engine=\"%V\",model_name=\"", &engine->name);

        for (k = 0; k < name.len; k++) {

            if (name.data[k] == '"' || name.data[k] == '\\') {
                *p++ = '\\';
            }

            *p++ = (name.data[k] < 0x20) ? ' ' : name.data[k];
        }

        *p++ = '"';

        page->labels[i].len = p - page->labels[i].data;
    }

    return NGX_OK;
}


static void
ngx_http_llm_metrics_text(ngx_http_llm_page_t *page, const char *text)
{
    ngx_http_llm_out_write(&page->out, text, ngx_strlen(text));
}


static void
ngx_http_llm_metrics_family(ngx_http_llm_page_t *page, const char *name,
    const char *type, const char *help)
{
    ngx_http_llm_out_lit(&page->out, "# HELP ");
    ngx_http_llm_metrics_text(page, name);
    ngx_http_llm_out_lit(&page->out, " ");
    ngx_http_llm_metrics_text(page, help);
    ngx_http_llm_out_lit(&page->out, "\n# TYPE ");
    ngx_http_llm_metrics_text(page, name);
    ngx_http_llm_out_lit(&page->out, " ");
    ngx_http_llm_metrics_text(page, type);
    ngx_http_llm_out_lit(&page->out, "\n");
}


/* name{labels,more}, without its value */

static void
ngx_http_llm_metrics_name(ngx_http_llm_page_t *page, ngx_uint_t i,
    const char *name, const char *suffix, const char *more)
{
    ngx_http_llm_metrics_text(page, name);
    ngx_http_llm_metrics_text(page, suffix);
    ngx_http_llm_out_lit(&page->out, "{");
    ngx_http_llm_out_str(&page->out, &page->labels[i]);

    if (more) {
        ngx_http_llm_out_lit(&page->out, ",");
        ngx_http_llm_metrics_text(page, more);
    }

    ngx_http_llm_out_lit(&page->out, "} ");
}


static void
ngx_http_llm_metrics_sample(ngx_http_llm_page_t *page, ngx_uint_t i,
    const char *name, const char *more, uint64_t value)
{
    ngx_http_llm_metrics_name(page, i, name, "", more);
    ngx_http_llm_out_uint(&page->out, value);
    ngx_http_llm_out_lit(&page->out, "\n");
}


static llm_stats_t *
ngx_http_llm_metrics_stats(ngx_http_llm_page_t *page, ngx_uint_t i)
{
    ngx_http_llm_ring_t  *ring;

    ring = page->engines[i]->ring;

    return ring ? ring->shm->stats : NULL;
}


static void
ngx_http_llm_metrics_values(ngx_http_llm_page_t *page)
{
    ngx_uint_t                   i;
    llm_stats_t                 *stats;
    llm_header_t                *header;
    ngx_http_llm_ring_t         *ring;
    const ngx_http_llm_value_t  *value;

    ngx_http_llm_metrics_family(page, "llm_engine_up", "gauge",
                                "1 when the engine serves requests.");

    for (i = 0; i < page->n; i++) {
        ring = page->engines[i]->ring;

        ngx_http_llm_metrics_sample(page, i, "llm_engine_up", NULL,
                                    ring && ngx_http_llm_ring_state(ring)
                                            == LLM_ENGINE_READY);
    }

    ngx_http_llm_metrics_family(page, "llm_engine_epoch", "gauge",
                                "Starts of the engine since its "
                                "configuration changed.");

    for (i = 0; i < page->n; i++) {
        ring = page->engines[i]->ring;

        if (ring) {
            header = ring->shm->header;
            ngx_http_llm_metrics_sample(page, i, "llm_engine_epoch", NULL,
                                        atomic_load(&header->epoch));
        }
    }

    for (value = ngx_http_llm_values; value->name; value++) {

        ngx_http_llm_metrics_family(page, value->name, value->type,
                                    value->help);

        for (i = 0; i < page->n; i++) {
            stats = ngx_http_llm_metrics_stats(page, i);

            if (stats) {
                ngx_http_llm_metrics_sample(page, i, value->name, NULL,
                    llm_stats_get((_Atomic uint64_t *)
                                  ((char *) stats + value->offset)));
            }
        }
    }
}


static void
ngx_http_llm_metrics_usage(ngx_http_llm_page_t *page)
{
    double        used, total;
    ngx_uint_t    i;
    llm_stats_t  *stats;

    ngx_http_llm_metrics_family(page, "vllm:kv_cache_usage_perc", "gauge",
                                "Part of the KV cache in use, 1 is all.");

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        if (stats == NULL) {
            continue;
        }

        used = (double) llm_stats_get(&stats->pages_used);
        total = (double) llm_stats_get(&stats->pages_total);

        ngx_http_llm_metrics_name(page, i, "vllm:kv_cache_usage_perc", "",
                                  NULL);
        ngx_http_llm_out_double(&page->out, total > 0 ? used / total : 0);
        ngx_http_llm_out_lit(&page->out, "\n");
    }
}


static void
ngx_http_llm_metrics_finished(ngx_http_llm_page_t *page)
{
    ngx_uint_t    i, k;
    llm_stats_t  *stats;

    ngx_http_llm_metrics_family(page, "vllm:request_success_total", "counter",
                                "Requests by how they finished.");

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        for (k = LLM_FINISH_STOP; stats && k < LLM_FINISH_MAX; k++) {
            ngx_http_llm_metrics_sample(page, i, "vllm:request_success_total",
                                        ngx_http_llm_finishes[k],
                                        llm_stats_get(&stats->finished[k]));
        }
    }
}


static void
ngx_http_llm_metrics_rejected(ngx_http_llm_page_t *page)
{
    ngx_uint_t    i;
    llm_stats_t  *stats;

    ngx_http_llm_metrics_family(page, "vllm:admission_rejections_total",
                                "counter", "Requests refused at once.");

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        if (stats) {
            ngx_http_llm_metrics_sample(page, i,
                                        "vllm:admission_rejections_total",
                                        "reason=\"queue_full\"",
                                        llm_stats_get(&stats->rejected));
        }
    }
}


static void
ngx_http_llm_metrics_histogram(ngx_http_llm_page_t *page, ngx_uint_t i,
    const ngx_http_llm_histogram_t *family, llm_hist_t *hist)
{
    int              k, n;
    char             more[48];
    uint64_t         count;
    const uint64_t  *bounds;

    bounds = family->bounds(&n);
    count = 0;

    for (k = 0; k <= n; k++) {
        count += llm_stats_get(&hist->bucket[k]);

        if (k < n) {
            (void) snprintf(more, sizeof(more), "le=\"%g\"",
                            (double) bounds[k] / 1e6);

        } else {
            ngx_memcpy(more, "le=\"+Inf\"", sizeof("le=\"+Inf\""));
        }

        ngx_http_llm_metrics_name(page, i, family->name, "_bucket", more);
        ngx_http_llm_out_uint(&page->out, count);
        ngx_http_llm_out_lit(&page->out, "\n");
    }

    ngx_http_llm_metrics_name(page, i, family->name, "_sum", NULL);
    ngx_http_llm_out_double(&page->out,
                            (double) llm_stats_get(&hist->sum_us) / 1e6);
    ngx_http_llm_out_lit(&page->out, "\n");

    /* the sum of the buckets, so that it agrees with +Inf */

    ngx_http_llm_metrics_name(page, i, family->name, "_count", NULL);
    ngx_http_llm_out_uint(&page->out, count);
    ngx_http_llm_out_lit(&page->out, "\n");
}


static void
ngx_http_llm_metrics_histograms(ngx_http_llm_page_t *page)
{
    ngx_uint_t                       i;
    llm_stats_t                     *stats;
    const ngx_http_llm_histogram_t  *family;

    for (family = ngx_http_llm_histograms; family->name; family++) {

        ngx_http_llm_metrics_family(page, family->name, "histogram",
                                    family->help);

        for (i = 0; i < page->n; i++) {
            stats = ngx_http_llm_metrics_stats(page, i);

            if (stats) {
                ngx_http_llm_metrics_histogram(page, i, family,
                    (llm_hist_t *) ((char *) stats + family->offset));
            }
        }
    }
}


static void
ngx_http_llm_metrics_info(ngx_http_llm_page_t *page)
{
    char          more[128];
    ngx_uint_t    i;
    llm_stats_t  *stats;

    ngx_http_llm_metrics_family(page, "vllm:cache_config_info", "gauge",
                                "Configuration of the KV cache.");

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        if (stats == NULL) {
            continue;
        }

        (void) snprintf(more, sizeof(more),
                        "block_size=\"%lu\",num_gpu_blocks=\"%llu\"",
                        (unsigned long) page->engines[i]->block_size,
                        (unsigned long long)
                        llm_stats_get(&stats->pages_total));

        ngx_http_llm_metrics_sample(page, i, "vllm:cache_config_info", more,
                                    1);
    }
}
