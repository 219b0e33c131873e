/*
 * Fields of a request that more than one endpoint takes: one table of types,
 * ranges and defaults.
 */

#ifndef NGX_HTTP_LLM_PARAMS_H
#define NGX_HTTP_LLM_PARAMS_H

#include "ngx_module/ngx_http_llm_api.h"


/* Fields of the table that an endpoint takes. */
#define NGX_HTTP_LLM_FOR_CHAT        0x01
#define NGX_HTTP_LLM_FOR_COMPLETION  0x02
#define NGX_HTTP_LLM_FOR_TEMPLATE    0x04  /* whatever takes messages */
#define NGX_HTTP_LLM_FOR_TOKENIZE    0x08
#define NGX_HTTP_LLM_FOR_DETOKENIZE  0x10


/* Sets ctx->query to the defaults of an endpoint, then reads the fields that
 * it takes.  NGX_ERROR with ctx->error set. */
ngx_int_t ngx_http_llm_params_parse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root, ngx_uint_t which);

/* Records a 400 that names the field. */
#define ngx_http_llm_bad(ctx, param, ...)                                    \
    (ngx_http_llm_error_set(&(ctx)->error, (ctx)->request->pool,             \
                            NGX_HTTP_BAD_REQUEST, param, __VA_ARGS__),       \
     NGX_ERROR)

#endif /* NGX_HTTP_LLM_PARAMS_H */
