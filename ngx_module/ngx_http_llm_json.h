/*
 * JSON in and out.  In: one strict entry over cJSON, then typed getters that
 * treat null as absent.  Out: an escape writer.
 */

#ifndef NGX_HTTP_LLM_JSON_H
#define NGX_HTTP_LLM_JSON_H

#include <cjson/cJSON.h>

#include "ngx_module/ngx_http_llm_module.h"
#include "ngx_module/ngx_http_llm_sse.h"


typedef struct {
    cJSON                   *root;       /* freed with the pool, or earlier */
    ngx_str_t                seed;       /* raw text of the top-level "seed" */
} ngx_http_llm_json_t;


/* Parses a whole text: valid UTF-8, no NUL, no raw control characters, nothing
 * after the value, depth at most 128, every number finite.  NGX_OK, or
 * NGX_ERROR with a sentence in *why. */
ngx_int_t ngx_http_llm_json_parse(ngx_pool_t *pool, ngx_str_t *text,
    ngx_http_llm_json_t *json, const char **why);
void ngx_http_llm_json_free(ngx_http_llm_json_t *json);

/* A member that is there and not null, or NULL. */
cJSON *ngx_http_llm_json_get(const cJSON *object, const char *key);

/* Whole number in a double?  Then *n. */
ngx_int_t ngx_http_llm_json_int(const cJSON *item, int64_t *n);

/* Text of a value, copied to the pool; empty when out of memory. */
ngx_str_t ngx_http_llm_json_print(ngx_pool_t *pool, const cJSON *item);

/* A quoted string; bytes that are no UTF-8 become U+FFFD. */
void ngx_http_llm_json_string(ngx_http_llm_out_t *out, const void *data,
    size_t len);
/* The same without quotes. */
void ngx_http_llm_json_escape(ngx_http_llm_out_t *out, const void *data,
    size_t len);

/* Characters in the text, each ill-formed byte counted as one. */
size_t ngx_http_llm_json_chars(const void *data, size_t len);

#endif /* NGX_HTTP_LLM_JSON_H */
