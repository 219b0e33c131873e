/*
 * One directive of the llm_engine block: where its value goes and what it may
 * be.
 */

#ifndef NGX_HTTP_LLM_OPTION_H
#define NGX_HTTP_LLM_OPTION_H

#include "ngx_module/ngx_http_llm_module.h"


typedef enum {
    NGX_HTTP_LLM_NUMBER = 0,    /* ngx_uint_t, min to max */
    NGX_HTTP_LLM_AUTO_NUMBER,   /* the same, or "auto": 0 */
    NGX_HTTP_LLM_POWER,         /* the same, a power of two */
    NGX_HTTP_LLM_SIZE,          /* off_t, at least min */
    NGX_HTTP_LLM_DECIMAL,       /* the text of a number, in millionths */
    NGX_HTTP_LLM_TIME,          /* the text of a number, milliseconds */
    NGX_HTTP_LLM_WORD,          /* the text, one of two words */
    NGX_HTTP_LLM_DEVICE,        /* the text: auto, cpu, cuda or cuda:N */
    NGX_HTTP_LLM_PATH,          /* the text, made absolute */
    NGX_HTTP_LLM_FOLDER,        /* "on", "off" or the same of a folder */
    NGX_HTTP_LLM_FILE,          /* the same, and it can be read */
    NGX_HTTP_LLM_MODEL,         /* the same, and an alias */
    NGX_HTTP_LLM_LOG,           /* path and level */
    NGX_HTTP_LLM_SPECULATIVE    /* "off", or a drafter with its limits; may be
                                   repeated */
} ngx_http_llm_kind_e;


/* one directive of the block; value[0] is its name */
typedef struct {
    ngx_str_t               name;
    ngx_http_llm_kind_e     kind;
    size_t                  offset;      /* of its field in the engine */
    ngx_uint_t              min;         /* of a number */
    ngx_uint_t              max;
    const char             *words[2];
} ngx_http_llm_option_t;


/* Checks the arguments of the directive that is being read and stores them in
 * the engine; what is wrong is logged with the remedy. */
char *ngx_http_llm_option_set(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option);

#endif /* NGX_HTTP_LLM_OPTION_H */
