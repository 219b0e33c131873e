/*
 * /metrics in Prometheus' text format.  The names are those of vLLM, so that
 * its dashboards and the gateways that read it work; what vLLM has no name for
 * begins with llm_.
 *
 * The format wants all samples of a family together, so the outer loop is over
 * families and the inner one over engines.
 */

#include "ngx_module/ngx_http_llm_metrics.h"
#include "ngx_module/ngx_http_llm_families.h"


#define NGX_HTTP_LLM_TEXT  "text/plain; version=0.0.4; charset=utf-8"


typedef struct {
    ngx_http_llm_out_t     out;
    ngx_http_llm_engine_t  **engines;
    ngx_uint_t             n;
    ngx_str_t             *labels;     /* engine="…",model_name="…" of each */
} ngx_http_llm_page_t;


static ngx_int_t ngx_http_llm_metrics_labels(ngx_http_request_t *r,
    ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_engines(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_values(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_ratio(ngx_http_llm_page_t *page,
    const char *name, const char *help, size_t part, size_t whole);
static void ngx_http_llm_metrics_histograms(ngx_http_llm_page_t *page);
static void ngx_http_llm_metrics_info(ngx_http_llm_page_t *page);


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

    ngx_http_llm_metrics_engines(&page);
    ngx_http_llm_metrics_values(&page);
    ngx_http_llm_metrics_ratio(&page, "vllm:kv_cache_usage_perc",
                               "Part of the KV cache in use, 1 is all.",
                               offsetof(llm_stats_t, pages_used),
                               offsetof(llm_stats_t, pages_total));
    ngx_http_llm_metrics_ratio(&page, "llm_kv_waste_ratio",
                               "Part of the token slots of the held pages "
                               "that holds no token.",
                               offsetof(llm_stats_t, kv_slots_empty),
                               offsetof(llm_stats_t, kv_slots_held));
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


static llm_stats_t *
ngx_http_llm_metrics_stats(ngx_http_llm_page_t *page, ngx_uint_t i)
{
    ngx_http_llm_ring_t  *ring;

    ring = page->engines[i]->ring;

    return ring ? ring->shm->stats : NULL;
}


static uint64_t
ngx_http_llm_metrics_get(llm_stats_t *stats, size_t offset)
{
    return llm_stats_get((_Atomic uint64_t *) ((char *) stats + offset));
}


/* all digits of a long sum: a double would be rounded by its text */

static void
ngx_http_llm_metrics_number(ngx_http_llm_page_t *page, uint64_t value,
    ngx_uint_t unit)
{
    int   n;
    char  text[48];

    if (unit == NGX_HTTP_LLM_NANOS) {
        value /= 1000;
    }

    if (unit == NGX_HTTP_LLM_NANOS || unit == NGX_HTTP_LLM_MICROS) {
        n = snprintf(text, sizeof(text), "%llu.%06llu",
                     (unsigned long long) value / 1000000,
                     (unsigned long long) value % 1000000);
        ngx_http_llm_out_write(&page->out, text, n);

    } else {
        ngx_http_llm_out_uint(&page->out, value);
    }

    ngx_http_llm_out_lit(&page->out, "\n");
}


static void
ngx_http_llm_metrics_sample(ngx_http_llm_page_t *page, ngx_uint_t i,
    const char *name, const char *more, uint64_t value)
{
    ngx_http_llm_metrics_name(page, i, name, "", more);
    ngx_http_llm_metrics_number(page, value, NGX_HTTP_LLM_PLAIN);
}


/* what is known of engines that never ran, too */

static void
ngx_http_llm_metrics_engines(ngx_http_llm_page_t *page)
{
    ngx_uint_t            i;
    llm_header_t         *header;
    ngx_http_llm_ring_t  *ring;

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
}


static void
ngx_http_llm_metrics_values(ngx_http_llm_page_t *page)
{
    ngx_uint_t                   i;
    llm_stats_t                 *stats;
    const ngx_http_llm_value_t  *first, *value, *end;

    for (first = ngx_http_llm_values; first->name; first = end) {

        ngx_http_llm_metrics_family(page, first->name, first->type,
                                    first->help);

        for (end = first;
             end->name && ngx_strcmp(end->name, first->name) == 0;
             end++)
        {
            /* the rows of the family */
        }

        for (i = 0; i < page->n; i++) {
            stats = ngx_http_llm_metrics_stats(page, i);

            for (value = first; stats && value < end; value++) {
                ngx_http_llm_metrics_name(page, i, value->name, "",
                                          value->label);
                ngx_http_llm_metrics_number(page,
                    ngx_http_llm_metrics_get(stats, value->offset),
                    value->unit);
            }
        }
    }
}


static void
ngx_http_llm_metrics_ratio(ngx_http_llm_page_t *page, const char *name,
    const char *help, size_t part, size_t whole)
{
    double        all;
    ngx_uint_t    i;
    llm_stats_t  *stats;

    ngx_http_llm_metrics_family(page, name, "gauge", help);

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        if (stats == NULL) {
            continue;
        }

        all = (double) ngx_http_llm_metrics_get(stats, whole);

        ngx_http_llm_metrics_name(page, i, name, "", NULL);
        ngx_http_llm_out_double(&page->out, all > 0
            ? (double) ngx_http_llm_metrics_get(stats, part) / all : 0);
        ngx_http_llm_out_lit(&page->out, "\n");
    }
}


/* the longest context, beyond which there are no tokens to count */

static uint64_t
ngx_http_llm_metrics_limit(ngx_http_llm_page_t *page, ngx_uint_t i)
{
    llm_card_t            card;
    ngx_http_llm_ring_t  *ring;

    ring = page->engines[i]->ring;

    if (ngx_http_llm_ring_state(ring) != LLM_ENGINE_READY) {
        return UINT64_MAX;
    }

    ngx_http_llm_ring_card(ring, &card);

    return card.max_model_len;
}


static void
ngx_http_llm_metrics_histogram(ngx_http_llm_page_t *page, ngx_uint_t i,
    const ngx_http_llm_histogram_t *family, llm_hist_t *hist)
{
    int              k, n;
    char             more[48];
    double           scale;
    uint64_t         count, limit;
    const uint64_t  *bounds;

    bounds = family->bounds(&n);
    count = 0;

    scale = (family->unit == NGX_HTTP_LLM_MICROS) ? 1e6 : 1;
    limit = (family->unit == NGX_HTTP_LLM_TOKENS)
            ? ngx_http_llm_metrics_limit(page, i) : UINT64_MAX;

    for (k = 0; k <= n; k++) {
        count += llm_stats_get(&hist->bucket[k]);

        if (k < n && bounds[k] > limit) {
            continue;
        }

        if (k < n) {
            (void) snprintf(more, sizeof(more), "le=\"%g\"",
                            (double) bounds[k] / scale);

        } else {
            ngx_memcpy(more, "le=\"+Inf\"", sizeof("le=\"+Inf\""));
        }

        ngx_http_llm_metrics_name(page, i, family->name, "_bucket", more);
        ngx_http_llm_out_uint(&page->out, count);
        ngx_http_llm_out_lit(&page->out, "\n");
    }

    ngx_http_llm_metrics_name(page, i, family->name, "_sum", NULL);
    ngx_http_llm_metrics_number(page, llm_stats_get(&hist->sum),
                                family->unit);

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
    char                    more[256];
    ngx_str_t               share;
    ngx_uint_t              i;
    llm_stats_t            *stats;
    ngx_http_llm_engine_t  *engine;

    ngx_http_llm_metrics_family(page, "vllm:cache_config_info", "gauge",
                                "Configuration of the KV cache.");

    for (i = 0; i < page->n; i++) {
        stats = ngx_http_llm_metrics_stats(page, i);

        if (stats == NULL) {
            continue;
        }

        engine = page->engines[i];
        share = engine->gpu_memory_utilization;

        if (share.len == 0) {
            ngx_str_set(&share, "0.9");
        }

        (void) snprintf(more, sizeof(more),
                        "block_size=\"%lu\",cache_dtype=\"%.*s\","
                        "enable_prefix_caching=\"%s\","
                        "gpu_memory_utilization=\"%.*s\","
                        "num_gpu_blocks=\"%llu\"",
                        (unsigned long) engine->block_size,
                        (int) engine->kv_cache_dtype.len,
                        engine->kv_cache_dtype.data,
                        (engine->prefix_caching.len == 3) ? "False" : "True",
                        (int) share.len, share.data,
                        (unsigned long long)
                        llm_stats_get(&stats->pages_total));

        ngx_http_llm_metrics_sample(page, i, "vllm:cache_config_info", more,
                                    1);
    }
}


void
ngx_http_llm_metrics_request(ngx_http_llm_ctx_t *ctx)
{
    int              n_bounds;
    uint32_t         k, longest;
    ngx_uint_t       i;
    llm_stats_t     *stats;
    const uint64_t  *bounds;

    stats = ctx->ring->shm->stats;

    for (i = 0; i < ctx->n_choices; i += ctx->query.n) {

        longest = 0;

        for (k = 0; k < ctx->query.n; k++) {
            longest = ngx_max(longest, ctx->choices[i + k].tokens);
        }

        bounds = llm_stats_bounds_tokens(&n_bounds);
        llm_stats_observe(&stats->max_output, bounds, n_bounds, longest);

        bounds = llm_stats_bounds_choices(&n_bounds);
        llm_stats_observe(&stats->params_n, bounds, n_bounds, ctx->query.n);
    }
}
