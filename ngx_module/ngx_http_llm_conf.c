/*
 * Directives of locations, as far as no stock setter fits.  The llm_engine
 * block is in ngx_http_llm_block.c.
 */

#include "ngx_module/ngx_http_llm_conf.h"
#include "ngx_module/ngx_http_llm_handler.h"
#include "ngx_module/ngx_http_llm_metrics.h"
#include "ngx_module/ngx_http_llm_turn.h"


#define NGX_HTTP_LLM_QUEUE_MAX  1000000


static ngx_int_t ngx_http_llm_conf_complex(ngx_conf_t *cf, ngx_str_t *text,
    ngx_http_complex_value_t *cv);


ngx_http_llm_engine_t *
ngx_http_llm_conf_find(ngx_http_llm_main_conf_t *lmcf, ngx_str_t *name)
{
    ngx_uint_t               i;
    ngx_http_llm_engine_t  **engines;

    engines = lmcf->engines.elts;

    for (i = 0; i < lmcf->engines.nelts; i++) {
        if (engines[i]->name.len == name->len
            && ngx_strncmp(engines[i]->name.data, name->data, name->len) == 0)
        {
            return engines[i];
        }
    }

    return NULL;
}


char *
ngx_http_llm_conf_pass(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_loc_conf_t *llcf = conf;

    ngx_str_t                 *value;
    ngx_http_core_loc_conf_t  *clcf;

    if (llcf->engine_name.data) {
        return "is duplicate";
    }

    value = cf->args->elts;

    llcf->engine_name = value[1];
    llcf->file = cf->conf_file->file.name.data;
    llcf->line = cf->conf_file->line;

    clcf = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);
    clcf->handler = ngx_http_llm_handler;

    return NGX_CONF_OK;
}


char *
ngx_http_llm_conf_metrics(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_core_loc_conf_t  *clcf;

    clcf = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);
    clcf->handler = ngx_http_llm_metrics_handler;

    return NGX_CONF_OK;
}


char *
ngx_http_llm_conf_keepalive(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_loc_conf_t *llcf = conf;

    ngx_str_t  *value;

    if (llcf->keepalive != NGX_CONF_UNSET_MSEC) {
        return "is duplicate";
    }

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "off") == 0) {
        llcf->keepalive = 0;
        return NGX_CONF_OK;
    }

    llcf->keepalive = ngx_parse_time(&value[1], 0);

    if (llcf->keepalive == (ngx_msec_t) NGX_ERROR) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_keepalive \"%V\" is invalid: use a time such "
                           "as 15s, or off", &value[1]);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


char *
ngx_http_llm_conf_queue(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_loc_conf_t *llcf = conf;

    ngx_int_t   n;
    ngx_str_t  *value;

    if (llcf->queue != NGX_CONF_UNSET_UINT) {
        return "is duplicate";
    }

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "off") == 0) {
        llcf->queue = 0;
        return NGX_CONF_OK;
    }

    n = ngx_atoi(value[1].data, value[1].len);

    if (n == NGX_ERROR || n < 1 || n > NGX_HTTP_LLM_QUEUE_MAX) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_queue \"%V\" is invalid: use a number from 1 "
                           "to %d, or off", &value[1],
                           NGX_HTTP_LLM_QUEUE_MAX);
        return NGX_CONF_ERROR;
    }

    llcf->queue = n;

    return NGX_CONF_OK;
}


char *
ngx_http_llm_conf_tenant(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_loc_conf_t *llcf = conf;

    ngx_str_t               text, *value;
    ngx_http_llm_tenant_t  *tenant;

    if (llcf->tenant != NGX_CONF_UNSET_PTR) {
        return "is duplicate";
    }

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "off") == 0) {
        llcf->tenant = NULL;
        return (cf->args->nelts == 2) ? NGX_CONF_OK : "off takes no weight";
    }

    tenant = ngx_pcalloc(cf->pool, sizeof(ngx_http_llm_tenant_t));
    if (tenant == NULL) {
        return NGX_CONF_ERROR;
    }

    llcf->tenant = tenant;
    tenant->number = 1;

    if (ngx_http_llm_conf_complex(cf, &value[1], &tenant->name) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    if (cf->args->nelts == 2) {
        return NGX_CONF_OK;
    }

    if (ngx_strncmp(value[2].data, "weight=", 7) != 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "invalid parameter \"%V\" of llm_tenant: only "
                           "\"weight=NUMBER\" or \"weight=$VARIABLE\" may "
                           "follow the tenant", &value[2]);
        return NGX_CONF_ERROR;
    }

    text.data = value[2].data + 7;
    text.len = value[2].len - 7;

    if (ngx_http_script_variables_count(&text)) {

        tenant->weight = ngx_palloc(cf->pool,
                                    sizeof(ngx_http_complex_value_t));
        if (tenant->weight == NULL
            || ngx_http_llm_conf_complex(cf, &text, tenant->weight) != NGX_OK)
        {
            return NGX_CONF_ERROR;
        }

        return NGX_CONF_OK;
    }

    if (ngx_http_llm_turn_weight(&text, &tenant->number) != NGX_OK) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "weight \"%V\" of llm_tenant is invalid: use a "
                           "number from 0.01 to 1000, or a variable", &text);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


char *
ngx_http_llm_conf_priority(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_loc_conf_t *llcf = conf;

    int32_t     n;
    ngx_str_t  *value;

    if (llcf->priority != NGX_CONF_UNSET_PTR) {
        return "is duplicate";
    }

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "off") == 0) {
        llcf->priority = NULL;
        return NGX_CONF_OK;
    }

    if (ngx_http_script_variables_count(&value[1]) == 0
        && ngx_http_llm_turn_number(&value[1], &n) != NGX_OK)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_priority \"%V\" is invalid: use an integer "
                           "of 32 bits, a variable, or off", &value[1]);
        return NGX_CONF_ERROR;
    }

    llcf->priority = ngx_pcalloc(cf->pool, sizeof(ngx_http_llm_priority_t));
    if (llcf->priority == NULL) {
        return NGX_CONF_ERROR;
    }

    if (ngx_http_llm_conf_complex(cf, &value[1], &llcf->priority->value)
        != NGX_OK)
    {
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static ngx_int_t
ngx_http_llm_conf_complex(ngx_conf_t *cf, ngx_str_t *text,
    ngx_http_complex_value_t *cv)
{
    ngx_http_compile_complex_value_t  ccv;

    ngx_memzero(&ccv, sizeof(ngx_http_compile_complex_value_t));

    ccv.cf = cf;
    ccv.value = text;
    ccv.complex_value = cv;

    return ngx_http_compile_complex_value(&ccv);
}


char *
ngx_http_llm_conf_resolve(ngx_conf_t *cf, ngx_http_llm_loc_conf_t *prev,
    ngx_http_llm_loc_conf_t *conf)
{
    ngx_http_core_loc_conf_t  *clcf;
    ngx_http_llm_main_conf_t  *lmcf;

    clcf = ngx_http_conf_get_module_loc_conf(cf, ngx_http_core_module);

    if (conf->engine_name.data == NULL) {

        /* "if" and limit_except inside a location belong to it */

        if ((clcf->noname || clcf->lmt_excpt) && clcf->handler == NULL) {
            conf->engine = prev->engine;

            if (clcf->lmt_excpt && prev->engine) {
                clcf->handler = ngx_http_llm_handler;
            }
        }

        return NGX_CONF_OK;
    }

    lmcf = ngx_http_conf_get_module_main_conf(cf, ngx_http_llm_module);

    conf->engine = ngx_http_llm_conf_find(lmcf, &conf->engine_name);

    if (conf->engine == NULL) {

        /* the position in cf is by now the end of the http block */

        ngx_log_error(NGX_LOG_EMERG, cf->log, 0,
                      "llm_pass names the unknown engine \"%V\": define it "
                      "with \"llm_engine %V { … }\" in the http block in "
                      "%s:%ui", &conf->engine_name, &conf->engine_name,
                      conf->file, conf->line);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}
