/*
 * Directives of locations, as far as no stock setter fits.  The llm_engine
 * block is in ngx_http_llm_block.c.
 */

#include "ngx_module/ngx_http_llm_conf.h"
#include "ngx_module/ngx_http_llm_handler.h"
#include "ngx_module/ngx_http_llm_metrics.h"


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
