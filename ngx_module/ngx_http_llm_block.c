/*
 * The llm_engine block: one table of its directives, and what must hold
 * of the whole.
 *
 * All checks are made while the configuration is read, so that `nginx -t`
 * finds them and a reload with a mistake changes nothing.  Nothing is started
 * or created here.
 */

#include "ngx_module/ngx_http_llm_block.h"
#include "ngx_module/ngx_http_llm_conf.h"
#include "ngx_module/ngx_http_llm_option.h"
#include "engine/ipc/stats.h"


#define NGX_HTTP_LLM_PROGRAM   "/usr/lib/nginx-llm/llm-engine"
#define NGX_HTTP_LLM_NAME_MAX  64


static char *ngx_http_llm_block_option(ngx_conf_t *cf, ngx_command_t *dummy,
    void *conf);
static char *ngx_http_llm_block_check(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);


#define llm_at(field)  offsetof(ngx_http_llm_engine_t, field)

static const ngx_http_llm_option_t  ngx_http_llm_options[] = {

    { ngx_string("model"), NGX_HTTP_LLM_MODEL,
      llm_at(model), 0, 0, { NULL, NULL } },

    { ngx_string("device"), NGX_HTTP_LLM_DEVICE,
      llm_at(device), 0, 63, { NULL, NULL } },

    { ngx_string("deterministic"), NGX_HTTP_LLM_WORD,
      llm_at(deterministic), 0, 0, { "on", "off" } },

    { ngx_string("block_size"), NGX_HTTP_LLM_NUMBER,
      llm_at(block_size), 16, 16, { NULL, NULL } },

    { ngx_string("max_model_len"), NGX_HTTP_LLM_AUTO_NUMBER,
      llm_at(max_model_len), 16, 1073741824, { NULL, NULL } },

    { ngx_string("max_num_seqs"), NGX_HTTP_LLM_NUMBER,
      llm_at(max_num_seqs), 1, 4096, { NULL, NULL } },

    { ngx_string("max_num_batched_tokens"), NGX_HTTP_LLM_NUMBER,
      llm_at(max_num_batched_tokens), 16, 1048576, { NULL, NULL } },

    { ngx_string("long_prefill_token_threshold"), NGX_HTTP_LLM_NUMBER,
      llm_at(long_prefill_token_threshold), 0, 131072, { NULL, NULL } },

    { ngx_string("inter_token_target"), NGX_HTTP_LLM_TIME,
      llm_at(inter_token_target), 0, 60000, { NULL, NULL } },

    { ngx_string("chunked_prefill"), NGX_HTTP_LLM_WORD,
      llm_at(chunked_prefill), 0, 0, { "on", "off" } },

    { ngx_string("prefix_caching"), NGX_HTTP_LLM_WORD,
      llm_at(prefix_caching), 0, 0, { "on", "off" } },

    { ngx_string("reservation"), NGX_HTTP_LLM_WORD,
      llm_at(reservation), 0, 0, { "on", "off" } },

    { ngx_string("gpu_memory_utilization"), NGX_HTTP_LLM_DECIMAL,
      llm_at(gpu_memory_utilization), 50000, 1000000, { NULL, NULL } },

    { ngx_string("kv_cache_prefault"), NGX_HTTP_LLM_WORD,
      llm_at(kv_cache_prefault), 0, 0, { "on", "off" } },

    { ngx_string("kv_cache_memory"), NGX_HTTP_LLM_SIZE,
      llm_at(kv_cache_memory), 1048576, 0, { NULL, NULL } },

    { ngx_string("kv_cache_dtype"), NGX_HTTP_LLM_WORD,
      llm_at(kv_cache_dtype), 0, 0, { "f16", "q8_0" } },

    { ngx_string("repack_cache"), NGX_HTTP_LLM_FOLDER,
      llm_at(repack_cache), 0, 0, { "on", "off" } },

    { ngx_string("speculative"), NGX_HTTP_LLM_SPECULATIVE,
      llm_at(speculative), 1, 64, { NULL, NULL } },

    { ngx_string("speculative_model"), NGX_HTTP_LLM_FILE,
      llm_at(speculative_model), 0, 0, { NULL, NULL } },

    { ngx_string("num_speculative_tokens"), NGX_HTTP_LLM_AUTO_NUMBER,
      llm_at(num_speculative_tokens), 1, LLM_SPEC_MAX, { NULL, NULL } },

    { ngx_string("threads"), NGX_HTTP_LLM_AUTO_NUMBER,
      llm_at(threads), 1, 1024, { NULL, NULL } },

    { ngx_string("reserved_cpus"), NGX_HTTP_LLM_NUMBER,
      llm_at(reserved_cpus), 0, 255, { NULL, NULL } },

    { ngx_string("cpu_affinity"), NGX_HTTP_LLM_WORD,
      llm_at(cpu_affinity), 0, 0, { "on", "off" } },

    { ngx_string("chat_template"), NGX_HTTP_LLM_FILE,
      llm_at(chat_template), 0, 0, { NULL, NULL } },

    { ngx_string("program"), NGX_HTTP_LLM_PATH,
      llm_at(program), 0, 0, { NULL, NULL } },

    { ngx_string("log"), NGX_HTTP_LLM_LOG,
      llm_at(log), 0, 0, { NULL, NULL } },

    { ngx_string("slots"), NGX_HTTP_LLM_POWER,
      llm_at(slots), 1, 4096, { NULL, NULL } },

    { ngx_null_string, 0, 0, 0, 0, { NULL, NULL } }
};

#undef llm_at


/* that a directive takes at most 1, 2, 3 */
static const char  *ngx_http_llm_counts[] = {
    "one", "one or two", "one to three"
};


static ngx_uint_t
ngx_http_llm_block_name_ok(ngx_str_t *name)
{
    u_char      c;
    ngx_uint_t  i;

    if (name->len == 0 || name->len > NGX_HTTP_LLM_NAME_MAX) {
        return 0;
    }

    for (i = 0; i < name->len; i++) {
        c = name->data[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')
              || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.'))
        {
            return 0;
        }
    }

    return 1;
}


char *
ngx_http_llm_block(ngx_conf_t *cf, ngx_command_t *cmd, void *conf)
{
    ngx_http_llm_main_conf_t *lmcf = conf;

    char                   *rv;
    ngx_str_t              *value;
    ngx_conf_t              save;
    ngx_http_llm_engine_t  *engine, *other, **place;

    value = cf->args->elts;

    if (!ngx_http_llm_block_name_ok(&value[1])) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_engine name \"%V\" is invalid: use up to %d "
                           "letters, digits and \"_-.\"", &value[1],
                           NGX_HTTP_LLM_NAME_MAX);
        return NGX_CONF_ERROR;
    }

    other = ngx_http_llm_conf_find(lmcf, &value[1]);

    if (other) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "duplicate llm_engine \"%V\": the first one is in "
                           "%s:%ui, give each its own name", &value[1],
                           other->file, other->line);
        return NGX_CONF_ERROR;
    }

    engine = ngx_pcalloc(cf->pool, sizeof(ngx_http_llm_engine_t));
    place = ngx_array_push(&lmcf->engines);

    if (engine == NULL || place == NULL) {
        return NGX_CONF_ERROR;
    }

    *place = engine;

    engine->name = value[1];
    engine->file = cf->conf_file->file.name.data;
    engine->line = cf->conf_file->line;

    ngx_str_set(&engine->program, NGX_HTTP_LLM_PROGRAM);
    ngx_str_set(&engine->device, "auto");
    ngx_str_set(&engine->kv_cache_dtype, "f16");
    engine->block_size = 16;
    engine->max_num_seqs = 128;
    engine->max_num_batched_tokens = 2048;
    engine->slots = 256;

    save = *cf;
    cf->handler = ngx_http_llm_block_option;
    cf->handler_conf = (void *) engine;

    rv = ngx_conf_parse(cf, NULL);

    *cf = save;

    if (rv != NGX_CONF_OK) {
        return rv;
    }

    return ngx_http_llm_block_check(cf, engine);
}


static char *
ngx_http_llm_block_option(ngx_conf_t *cf, ngx_command_t *dummy, void *conf)
{
    ngx_http_llm_engine_t        *engine;
    ngx_str_t                    *value;
    ngx_uint_t                    i, max, repeated;
    const ngx_http_llm_option_t  *option;

    engine = cf->handler_conf;
    value = cf->args->elts;

    for (i = 0; ngx_http_llm_options[i].name.len; i++) {
        option = &ngx_http_llm_options[i];

        if (value[0].len != option->name.len
            || ngx_strcmp(value[0].data, option->name.data) != 0)
        {
            continue;
        }

        repeated = (option->kind == NGX_HTTP_LLM_SPECULATIVE);
        max = repeated ? 3 : (option->kind >= NGX_HTTP_LLM_MODEL) ? 2 : 1;

        if (cf->args->nelts < 2 || cf->args->nelts - 1 > max) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "invalid number of arguments in \"%V\" of "
                               "llm_engine \"%V\": it takes %s", &value[0],
                               &engine->name, ngx_http_llm_counts[max - 1]);
            return NGX_CONF_ERROR;
        }

        if (!repeated && (engine->seen & ((ngx_uint_t) 1 << i))) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "duplicate \"%V\" in llm_engine \"%V\"",
                               &value[0], &engine->name);
            return NGX_CONF_ERROR;
        }

        engine->seen |= (ngx_uint_t) 1 << i;

        return ngx_http_llm_option_set(cf, engine, option);
    }

    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                       "unknown directive \"%V\" in llm_engine \"%V\"",
                       &value[0], &engine->name);

    return NGX_CONF_ERROR;
}


static char *
ngx_http_llm_block_program(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
{
    ngx_file_info_t  fi;

    if (ngx_file_info(engine->program.data, &fi) == NGX_FILE_ERROR
        || access((char *) engine->program.data, X_OK) == -1)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, ngx_errno,
                           "program \"%V\" of llm_engine \"%V\" cannot be "
                           "executed: install it there or set \"program\" to "
                           "the llm-engine binary", &engine->program,
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    if (!ngx_is_file(&fi)) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "program \"%V\" of llm_engine \"%V\" is not a "
                           "file: set \"program\" to the llm-engine binary",
                           &engine->program, &engine->name);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_block_check(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
{
    if (engine->model.len == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_engine \"%V\" has no model: add "
                           "\"model /path/to/file.gguf;\"", &engine->name);
        return NGX_CONF_ERROR;
    }

    if (engine->max_num_batched_tokens < engine->max_num_seqs) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "max_num_batched_tokens %ui of llm_engine \"%V\" "
                           "is below max_num_seqs %ui: each running sequence "
                           "needs a token in a step, raise it or lower "
                           "max_num_seqs", engine->max_num_batched_tokens,
                           &engine->name, engine->max_num_seqs);
        return NGX_CONF_ERROR;
    }

    if (engine->chunked_prefill.len == 3
        && engine->max_num_batched_tokens < engine->max_model_len)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "max_num_batched_tokens %ui of llm_engine \"%V\" "
                           "is below max_model_len %ui: with chunked_prefill "
                           "off a prompt must fit a step, raise the first, "
                           "lower the second or turn chunked_prefill on",
                           engine->max_num_batched_tokens, &engine->name,
                           engine->max_model_len);
        return NGX_CONF_ERROR;
    }

    /* drafters have longer names than "off" */

    if (engine->speculative_model.len && engine->speculative.len == 3) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "llm_engine \"%V\" has both \"speculative off\" and "
                           "a speculative_model: take one of them out",
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    return ngx_http_llm_block_program(cf, engine);
}
