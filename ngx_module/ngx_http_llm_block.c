/*
 * The llm_engine block: one table of its directives, their setters and checks.
 *
 * All checks are made while the configuration is read, so that `nginx -t`
 * finds them and a reload with a mistake changes nothing.  Nothing is started
 * or created here.
 */

#include "ngx_module/ngx_http_llm_block.h"
#include "ngx_module/ngx_http_llm_conf.h"


#define NGX_HTTP_LLM_PROGRAM   "/usr/lib/nginx-llm/llm-engine"
#define NGX_HTTP_LLM_NAME_MAX  64


typedef struct ngx_http_llm_option_s  ngx_http_llm_option_t;

/* one directive of the block; value[0] is its name */
struct ngx_http_llm_option_s {
    ngx_str_t               name;
    ngx_uint_t              max_args;    /* values after the name */
    char                 *(*set)(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
                                 const ngx_http_llm_option_t *option);
    size_t                  offset;
    ngx_uint_t              min;         /* of a number */
    ngx_uint_t              max;
    ngx_uint_t              automatic;   /* "auto" is a value */
};


static char *ngx_http_llm_block_option(ngx_conf_t *cf, ngx_command_t *dummy,
    void *conf);
static char *ngx_http_llm_block_check(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);
static char *ngx_http_llm_set_model(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_device(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_number(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_size(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_share(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_flag(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_dtype(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_slots(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_file(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_program(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_log(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);


#define llm_at(field)  offsetof(ngx_http_llm_engine_t, field)

static const ngx_http_llm_option_t  ngx_http_llm_options[] = {

    { ngx_string("model"), 2, ngx_http_llm_set_model,
      llm_at(model), 0, 0, 0 },

    { ngx_string("device"), 1, ngx_http_llm_set_device,
      llm_at(device), 0, 0, 0 },

    { ngx_string("block_size"), 1, ngx_http_llm_set_number,
      llm_at(block_size), 16, 16, 0 },

    { ngx_string("max_model_len"), 1, ngx_http_llm_set_number,
      llm_at(max_model_len), 16, 1073741824, 1 },

    { ngx_string("max_num_seqs"), 1, ngx_http_llm_set_number,
      llm_at(max_num_seqs), 1, 4096, 0 },

    { ngx_string("max_num_batched_tokens"), 1, ngx_http_llm_set_number,
      llm_at(max_num_batched_tokens), 16, 1048576, 0 },

    { ngx_string("long_prefill_token_threshold"), 1, ngx_http_llm_set_number,
      llm_at(long_prefill_token_threshold), 0, 131072, 0 },

    { ngx_string("chunked_prefill"), 1, ngx_http_llm_set_flag,
      llm_at(chunked_prefill), 0, 0, 0 },

    { ngx_string("prefix_caching"), 1, ngx_http_llm_set_flag,
      llm_at(prefix_caching), 0, 0, 0 },

    { ngx_string("reservation"), 1, ngx_http_llm_set_flag,
      llm_at(reservation), 0, 0, 0 },

    { ngx_string("gpu_memory_utilization"), 1, ngx_http_llm_set_share,
      llm_at(gpu_memory_utilization), 50000, 1000000, 0 },

    { ngx_string("kv_cache_prefault"), 1, ngx_http_llm_set_flag,
      llm_at(kv_cache_prefault), 0, 0, 0 },

    { ngx_string("kv_cache_memory"), 1, ngx_http_llm_set_size,
      llm_at(kv_cache_memory), 0, 0, 0 },

    { ngx_string("kv_cache_dtype"), 1, ngx_http_llm_set_dtype,
      llm_at(kv_cache_dtype), 0, 0, 0 },

    { ngx_string("threads"), 1, ngx_http_llm_set_number,
      llm_at(threads), 1, 1024, 1 },

    { ngx_string("chat_template"), 1, ngx_http_llm_set_file,
      llm_at(chat_template), 0, 0, 0 },

    { ngx_string("program"), 1, ngx_http_llm_set_program,
      llm_at(program), 0, 0, 0 },

    { ngx_string("log"), 2, ngx_http_llm_set_log,
      llm_at(log), 0, 0, 0 },

    { ngx_string("slots"), 1, ngx_http_llm_set_slots,
      llm_at(slots), 1, 4096, 0 },

    { ngx_null_string, 0, NULL, 0, 0, 0, 0 }
};

#undef llm_at


static const char  *ngx_http_llm_log_levels[] = {
    "emerg", "alert", "crit", "error", "warn", "notice", "info", "debug", NULL
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
    ngx_uint_t                    i;
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

        if (cf->args->nelts < 2 || cf->args->nelts - 1 > option->max_args) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "invalid number of arguments in \"%V\" of "
                               "llm_engine \"%V\": it takes %s", &value[0],
                               &engine->name,
                               option->max_args == 1 ? "one" : "one or two");
            return NGX_CONF_ERROR;
        }

        if (engine->seen & ((ngx_uint_t) 1 << i)) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "duplicate \"%V\" in llm_engine \"%V\"",
                               &value[0], &engine->name);
            return NGX_CONF_ERROR;
        }

        engine->seen |= (ngx_uint_t) 1 << i;

        return option->set(cf, engine, option);
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

    return ngx_http_llm_block_program(cf, engine);
}


/* makes the path absolute and looks whether the file can be read */

static char *
ngx_http_llm_block_file(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    ngx_str_t *directive, ngx_str_t *path)
{
    int          fd, err;
    struct stat  st;

    if (path->len == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V of llm_engine \"%V\" is empty: give a path",
                           directive, &engine->name);
        return NGX_CONF_ERROR;
    }

    if (ngx_conf_full_name(cf->cycle, path, 1) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    fd = open((char *) path->data, O_RDONLY|O_NONBLOCK|O_CLOEXEC);

    if (fd == -1) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, ngx_errno,
                           "%V \"%V\" of llm_engine \"%V\" cannot be read: "
                           "check path and permissions", directive, path,
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    err = fstat(fd, &st);
    (void) close(fd);

    if (err == -1 || !S_ISREG(st.st_mode) || st.st_size == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is not a file or "
                           "empty: give the path of a file", directive, path,
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_model(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value;

    value = cf->args->elts;
    engine->model = value[1];

    if (cf->args->nelts == 3) {

        if (value[2].len <= 6 || value[2].len > 6 + 127
            || ngx_strncmp(value[2].data, "alias=", 6) != 0)
        {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "invalid parameter \"%V\" of model in "
                               "llm_engine \"%V\": only \"alias=NAME\" with "
                               "up to 127 characters may follow the path",
                               &value[2], &engine->name);
            return NGX_CONF_ERROR;
        }

        engine->alias.data = value[2].data + 6;
        engine->alias.len = value[2].len - 6;
    }

    return ngx_http_llm_block_file(cf, engine, &value[0], &engine->model);
}


static char *
ngx_http_llm_set_device(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value;

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "auto") != 0
        && ngx_strcmp(value[1].data, "cpu") != 0)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "device \"%V\" of llm_engine \"%V\" is invalid: "
                           "use \"auto\" or \"cpu\"", &value[1],
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    engine->device = value[1];

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_number(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_int_t    n;
    ngx_str_t   *value;
    ngx_uint_t  *field;

    value = cf->args->elts;
    field = (ngx_uint_t *) ((char *) engine + option->offset);

    if (option->automatic && ngx_strcmp(value[1].data, "auto") == 0) {
        *field = 0;
        return NGX_CONF_OK;
    }

    n = ngx_atoi(value[1].data, value[1].len);

    if (n == NGX_ERROR || (ngx_uint_t) n < option->min
        || (ngx_uint_t) n > option->max)
    {
        if (option->min == option->max) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "%V \"%V\" of llm_engine \"%V\" is invalid: "
                               "only %ui is supported", &value[0], &value[1],
                               &engine->name, option->min);
            return NGX_CONF_ERROR;
        }

        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is invalid: use %sa "
                           "number from %ui to %ui", &value[0], &value[1],
                           &engine->name,
                           option->automatic ? "\"auto\" or " : "",
                           option->min, option->max);
        return NGX_CONF_ERROR;
    }

    *field = n;

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_size(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    off_t       size;
    ngx_str_t  *value;

    value = cf->args->elts;

    size = ngx_parse_offset(&value[1]);

    if (size == (off_t) NGX_ERROR || size < 1048576) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is invalid: use a "
                           "size of at least 1m, such as 512m or 8g",
                           &value[0], &value[1], &engine->name);
        return NGX_CONF_ERROR;
    }

    *(off_t *) ((char *) engine + option->offset) = size;

    return NGX_CONF_OK;
}


/* a fraction of one, its range in millionths; the engine gets the text */

static char *
ngx_http_llm_set_share(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_int_t   n;
    ngx_str_t  *value;

    value = cf->args->elts;

    n = ngx_atofp(value[1].data, value[1].len, 6);

    if (n == NGX_ERROR || (ngx_uint_t) n < option->min
        || (ngx_uint_t) n > option->max)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is invalid: use a "
                           "number from 0.05 to 1, such as 0.90", &value[0],
                           &value[1], &engine->name);
        return NGX_CONF_ERROR;
    }

    *(ngx_str_t *) ((char *) engine + option->offset) = value[1];

    return NGX_CONF_OK;
}


/* on or off; the engine gets the text */

static char *
ngx_http_llm_set_flag(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value;

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "on") != 0
        && ngx_strcmp(value[1].data, "off") != 0)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is invalid: use "
                           "\"on\" or \"off\"", &value[0], &value[1],
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    *(ngx_str_t *) ((char *) engine + option->offset) = value[1];

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_dtype(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value;

    value = cf->args->elts;

    if (ngx_strcmp(value[1].data, "f16") != 0
        && ngx_strcmp(value[1].data, "q8_0") != 0)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is invalid: use "
                           "\"f16\" or \"q8_0\"", &value[0], &value[1],
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    *(ngx_str_t *) ((char *) engine + option->offset) = value[1];

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_slots(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    char       *rv;
    ngx_str_t  *value;

    value = cf->args->elts;

    rv = ngx_http_llm_set_number(cf, engine, option);

    if (rv != NGX_CONF_OK) {
        return rv;
    }

    if (engine->slots & (engine->slots - 1)) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "slots \"%V\" of llm_engine \"%V\" is invalid: "
                           "use a power of two", &value[1], &engine->name);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_file(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value, *field;

    value = cf->args->elts;
    field = (ngx_str_t *) ((char *) engine + option->offset);

    *field = value[1];

    return ngx_http_llm_block_file(cf, engine, &value[0], field);
}


static char *
ngx_http_llm_set_program(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t  *value;

    value = cf->args->elts;
    engine->program = value[1];

    if (ngx_conf_full_name(cf->cycle, &engine->program, 1) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_log(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t   *value;
    ngx_uint_t   i;

    value = cf->args->elts;
    engine->log = value[1];

    /* relative to the prefix, as error_log is */

    if (engine->log.len == 0
        || ngx_conf_full_name(cf->cycle, &engine->log, 0) != NGX_OK)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "log of llm_engine \"%V\" is empty: give a path",
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    if (cf->args->nelts == 2) {
        return NGX_CONF_OK;
    }

    for (i = 0; ngx_http_llm_log_levels[i]; i++) {
        if (ngx_strcmp(value[2].data, ngx_http_llm_log_levels[i]) == 0) {
            engine->log_level = value[2];
            return NGX_CONF_OK;
        }
    }

    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                       "log level \"%V\" of llm_engine \"%V\" is invalid: use "
                       "emerg, alert, crit, error, warn, notice, info or debug",
                       &value[2], &engine->name);

    return NGX_CONF_ERROR;
}
