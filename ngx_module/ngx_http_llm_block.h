/*
 * The llm_engine block.  Each message names the directive, the value at fault
 * and what to write instead; nginx adds file and line.
 */

#ifndef NGX_HTTP_LLM_BLOCK_H
#define NGX_HTTP_LLM_BLOCK_H

#include "ngx_module/ngx_http_llm_module.h"


char *ngx_http_llm_block(ngx_conf_t *cf, ngx_command_t *cmd, void *conf);

#endif /* NGX_HTTP_LLM_BLOCK_H */
