/*
 * The engine process as nginx's master sees it: its place in the process
 * table, over boot, reload, crash and exit.
 */

#ifndef NGX_HTTP_LLM_PROCESS_H
#define NGX_HTTP_LLM_PROCESS_H

#include "ngx_module/ngx_http_llm_module.h"


/* init_module: adopts, starts and retires generations. */
ngx_int_t ngx_http_llm_process_init(ngx_cycle_t *cycle);

/* init_process of a worker: wakes the master so that it forks what is armed;
 * without a master starts the engines itself and watches them. */
void ngx_http_llm_process_kick(ngx_cycle_t *cycle);

/* In the forked child: becomes the engine.  Does not return. */
void ngx_http_llm_launch(ngx_cycle_t *cycle, void *data);

/* Writes 1 to an eventfd. */
void ngx_http_llm_process_ring(int fd);

#endif /* NGX_HTTP_LLM_PROCESS_H */
