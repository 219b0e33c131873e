/*
 * $llm_model, $llm_prompt_tokens, … for log_format and other modules.
 */

#ifndef NGX_HTTP_LLM_VARIABLES_H
#define NGX_HTTP_LLM_VARIABLES_H

#include "ngx_module/ngx_http_llm_module.h"


/* preconfiguration */
ngx_int_t ngx_http_llm_variables_add(ngx_conf_t *cf);

#endif /* NGX_HTTP_LLM_VARIABLES_H */
