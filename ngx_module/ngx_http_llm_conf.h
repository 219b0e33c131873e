/*
 * Directive setters and checks.  Each message names the directive, the value
 * at fault and what to write instead; nginx adds file and line.
 */

#ifndef NGX_HTTP_LLM_CONF_H
#define NGX_HTTP_LLM_CONF_H

#include "ngx_module/ngx_http_llm_module.h"


char *ngx_http_llm_conf_pass(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_llm_conf_metrics(ngx_conf_t *cf, ngx_command_t *cmd,
    void *conf);
char *ngx_http_llm_conf_keepalive(ngx_conf_t *cf, ngx_command_t *cmd,
    void *conf);
char *ngx_http_llm_conf_queue(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);
char *ngx_http_llm_conf_tenant(ngx_conf_t *cf, ngx_command_t *cmd,
    void *conf);
char *ngx_http_llm_conf_priority(ngx_conf_t *cf, ngx_command_t *cmd,
    void *conf);

/* The engine of that name, or NULL. */
ngx_http_llm_engine_t *ngx_http_llm_conf_find(ngx_http_llm_main_conf_t *lmcf,
    ngx_str_t *name);

/* Resolves llm_pass once all engines are known; NGX_CONF_ERROR is logged. */
char *ngx_http_llm_conf_resolve(ngx_conf_t *cf, ngx_http_llm_loc_conf_t *prev,
    ngx_http_llm_loc_conf_t *conf);

#endif /* NGX_HTTP_LLM_CONF_H */
