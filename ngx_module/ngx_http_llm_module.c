/*
 * The module: its directives, and where it hooks into nginx.  The checks of
 * the directives are in ngx_http_llm_block.c and ngx_http_llm_conf.c, requests
 * begin in ngx_http_llm_handler.c, the engine process in
 * ngx_http_llm_process.c.
 */

#include "ngx_module/ngx_http_llm_module.h"
#include "ngx_module/ngx_http_llm_block.h"
#include "ngx_module/ngx_http_llm_conf.h"
#include "ngx_module/ngx_http_llm_error.h"
#include "ngx_module/ngx_http_llm_process.h"
#include "ngx_module/ngx_http_llm_ring.h"
#include "ngx_module/ngx_http_llm_variables.h"


static void *ngx_http_llm_create_main_conf(ngx_conf_t *cf);
static void *ngx_http_llm_create_loc_conf(ngx_conf_t *cf);
static char *ngx_http_llm_merge_loc_conf(ngx_conf_t *cf, void *parent,
    void *child);
static char *ngx_http_llm_check_timeout(ngx_conf_t *cf, void *post,
    void *data);
static ngx_int_t ngx_http_llm_init_process(ngx_cycle_t *cycle);
static void ngx_http_llm_exit_process(ngx_cycle_t *cycle);


static ngx_conf_post_t  ngx_http_llm_timeout_post = {
    ngx_http_llm_check_timeout
};


static ngx_command_t  ngx_http_llm_commands[] = {

    { ngx_string("llm_engine"),
      NGX_HTTP_MAIN_CONF|NGX_CONF_BLOCK|NGX_CONF_TAKE1,
      ngx_http_llm_block,
      NGX_HTTP_MAIN_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_pass"),
      NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_llm_conf_pass,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_metrics"),
      NGX_HTTP_LOC_CONF|NGX_CONF_NOARGS,
      ngx_http_llm_conf_metrics,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_timeout"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_conf_set_msec_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_llm_loc_conf_t, timeout),
      &ngx_http_llm_timeout_post },

    { ngx_string("llm_keepalive"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_llm_conf_keepalive,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_strict_context"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_FLAG,
      ngx_conf_set_flag_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_llm_loc_conf_t, strict_context),
      NULL },

    { ngx_string("llm_cache_salt"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_set_complex_value_slot,
      NGX_HTTP_LOC_CONF_OFFSET,
      offsetof(ngx_http_llm_loc_conf_t, cache_salt),
      NULL },

    { ngx_string("llm_queue"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_llm_conf_queue,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_tenant"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE12,
      ngx_http_llm_conf_tenant,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

    { ngx_string("llm_priority"),
      NGX_HTTP_MAIN_CONF|NGX_HTTP_SRV_CONF|NGX_HTTP_LOC_CONF|NGX_CONF_TAKE1,
      ngx_http_llm_conf_priority,
      NGX_HTTP_LOC_CONF_OFFSET,
      0,
      NULL },

      ngx_null_command
};


static ngx_http_module_t  ngx_http_llm_module_ctx = {
    ngx_http_llm_variables_add,            /* preconfiguration */
    ngx_http_llm_error_filter_init,        /* postconfiguration */

    ngx_http_llm_create_main_conf,         /* create main configuration */
    NULL,                                  /* init main configuration */

    NULL,                                  /* create server configuration */
    NULL,                                  /* merge server configuration */

    ngx_http_llm_create_loc_conf,          /* create location configuration */
    ngx_http_llm_merge_loc_conf            /* merge location configuration */
};


ngx_module_t  ngx_http_llm_module = {
    NGX_MODULE_V1,
    &ngx_http_llm_module_ctx,              /* module context */
    ngx_http_llm_commands,                 /* module directives */
    NGX_HTTP_MODULE,                       /* module type */
    NULL,                                  /* init master */
    ngx_http_llm_process_init,             /* init module */
    ngx_http_llm_init_process,             /* init process */
    NULL,                                  /* init thread */
    NULL,                                  /* exit thread */
    ngx_http_llm_exit_process,             /* exit process */
    NULL,                                  /* exit master */
    NGX_MODULE_V1_PADDING
};


static void *
ngx_http_llm_create_main_conf(ngx_conf_t *cf)
{
    ngx_http_llm_main_conf_t  *lmcf;

    lmcf = ngx_pcalloc(cf->pool, sizeof(ngx_http_llm_main_conf_t));
    if (lmcf == NULL) {
        return NULL;
    }

    if (ngx_array_init(&lmcf->engines, cf->pool, 2,
                       sizeof(ngx_http_llm_engine_t *))
        != NGX_OK)
    {
        return NULL;
    }

    return lmcf;
}


static void *
ngx_http_llm_create_loc_conf(ngx_conf_t *cf)
{
    ngx_http_llm_loc_conf_t  *llcf;

    llcf = ngx_pcalloc(cf->pool, sizeof(ngx_http_llm_loc_conf_t));
    if (llcf == NULL) {
        return NULL;
    }

    /*
     * set by ngx_pcalloc():
     *
     *     llcf->engine_name = { 0, NULL };
     *     llcf->file = NULL;
     *     llcf->line = 0;
     *     llcf->engine = NULL;
     *     llcf->cache_salt = NULL;
     */

    llcf->timeout = NGX_CONF_UNSET_MSEC;
    llcf->keepalive = NGX_CONF_UNSET_MSEC;
    llcf->strict_context = NGX_CONF_UNSET;
    llcf->queue = NGX_CONF_UNSET_UINT;
    llcf->tenant = NGX_CONF_UNSET_PTR;
    llcf->priority = NGX_CONF_UNSET_PTR;

    return llcf;
}


static char *
ngx_http_llm_merge_loc_conf(ngx_conf_t *cf, void *parent, void *child)
{
    ngx_http_llm_loc_conf_t *prev = parent;
    ngx_http_llm_loc_conf_t *conf = child;

    ngx_conf_merge_msec_value(conf->timeout, prev->timeout, 600000);
    ngx_conf_merge_msec_value(conf->keepalive, prev->keepalive, 15000);
    ngx_conf_merge_value(conf->strict_context, prev->strict_context, 0);
    ngx_conf_merge_uint_value(conf->queue, prev->queue, 0);
    ngx_conf_merge_ptr_value(conf->tenant, prev->tenant, NULL);
    ngx_conf_merge_ptr_value(conf->priority, prev->priority, NULL);

    if (conf->cache_salt == NULL) {
        conf->cache_salt = prev->cache_salt;
    }

    return ngx_http_llm_conf_resolve(cf, prev, conf);
}


static char *
ngx_http_llm_check_timeout(ngx_conf_t *cf, void *post, void *data)
{
    ngx_msec_t *msec = data;

    if (*msec == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_timeout must be above 0: it is the longest "
                           "wait for a token");
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static ngx_int_t
ngx_http_llm_init_process(ngx_cycle_t *cycle)
{
    ngx_uint_t                 i;
    ngx_http_llm_engine_t    **engines;
    ngx_http_llm_main_conf_t  *lmcf;

    lmcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_llm_module);

    /* cache manager and loader come here, too */

    if (lmcf == NULL || lmcf->engines.nelts == 0
        || (ngx_process != NGX_PROCESS_WORKER
            && ngx_process != NGX_PROCESS_SINGLE))
    {
        return NGX_OK;
    }

    engines = lmcf->engines.elts;

    for (i = 0; i < lmcf->engines.nelts; i++) {

        if (engines[i]->previous) {
            engines[i]->old = ngx_http_llm_ring_open(cycle, engines[i],
                                                     engines[i]->previous);
            if (engines[i]->old == NULL) {
                return NGX_ERROR;
            }
        }

        if (engines[i]->gen) {
            engines[i]->ring = ngx_http_llm_ring_open(cycle, engines[i],
                                                      engines[i]->gen);
            if (engines[i]->ring == NULL) {
                return NGX_ERROR;
            }
        }
    }

    ngx_http_llm_process_kick(cycle);

    return NGX_OK;
}


static void
ngx_http_llm_exit_process(ngx_cycle_t *cycle)
{
    ngx_uint_t                 i;
    ngx_http_llm_engine_t    **engines;
    ngx_http_llm_main_conf_t  *lmcf;

    lmcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_llm_module);

    if (lmcf == NULL) {
        return;
    }

    engines = lmcf->engines.elts;

    for (i = 0; i < lmcf->engines.nelts; i++) {
        if (engines[i]->ring) {
            ngx_http_llm_ring_close(engines[i]->ring);
        }

        if (engines[i]->old) {
            ngx_http_llm_ring_close(engines[i]->old);
        }
    }
}
