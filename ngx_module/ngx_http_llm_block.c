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


typedef enum {
    NGX_HTTP_LLM_NUMBER = 0,    /* ngx_uint_t, min to max */
    NGX_HTTP_LLM_AUTO_NUMBER,   /* the same, or "auto": 0 */
    NGX_HTTP_LLM_POWER,         /* the same, a power of two */
    NGX_HTTP_LLM_SIZE,          /* off_t, at least min */
    NGX_HTTP_LLM_DECIMAL,       /* the text of a number, in millionths */
    NGX_HTTP_LLM_TIME,          /* the text of a number, milliseconds */
    NGX_HTTP_LLM_WORD,          /* the text, one of two words */
    NGX_HTTP_LLM_PATH,          /* the text, made absolute */
    NGX_HTTP_LLM_FOLDER,        /* "on", "off" or the same of a folder */
    NGX_HTTP_LLM_FILE,          /* the same, and it can be read */
    NGX_HTTP_LLM_MODEL,         /* the same, and an alias */
    NGX_HTTP_LLM_LOG            /* path and level */
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


static char *ngx_http_llm_block_option(ngx_conf_t *cf, ngx_command_t *dummy,
    void *conf);
static char *ngx_http_llm_block_check(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);
static char *ngx_http_llm_block_set(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_number(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_path(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_folder(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_set_alias(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);
static char *ngx_http_llm_set_level(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);


#define llm_at(field)  offsetof(ngx_http_llm_engine_t, field)

static const ngx_http_llm_option_t  ngx_http_llm_options[] = {

    { ngx_string("model"), NGX_HTTP_LLM_MODEL,
      llm_at(model), 0, 0, { NULL, NULL } },

    { ngx_string("device"), NGX_HTTP_LLM_WORD,
      llm_at(device), 0, 0, { "auto", "cpu" } },

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

    { ngx_string("threads"), NGX_HTTP_LLM_AUTO_NUMBER,
      llm_at(threads), 1, 1024, { NULL, NULL } },

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
    ngx_uint_t                    i, max;
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

        max = (option->kind >= NGX_HTTP_LLM_MODEL) ? 2 : 1;

        if (cf->args->nelts < 2 || cf->args->nelts - 1 > max) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "invalid number of arguments in \"%V\" of "
                               "llm_engine \"%V\": it takes %s", &value[0],
                               &engine->name,
                               max == 1 ? "one" : "one or two");
            return NGX_CONF_ERROR;
        }

        if (engine->seen & ((ngx_uint_t) 1 << i)) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "duplicate \"%V\" in llm_engine \"%V\"",
                               &value[0], &engine->name);
            return NGX_CONF_ERROR;
        }

        engine->seen |= (ngx_uint_t) 1 << i;

        return ngx_http_llm_block_set(cf, engine, option);
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


/* --- setters --- */


static char *
ngx_http_llm_block_invalid(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const char *must)
{
    ngx_str_t  *value;

    value = cf->args->elts;

    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                       "%V \"%V\" of llm_engine \"%V\" is invalid: %s",
                       &value[0], &value[1], &engine->name, must);

    return NGX_CONF_ERROR;
}


static char *
ngx_http_llm_block_set(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    char        must[128];
    off_t       size;
    void       *field;
    ngx_int_t   n;
    ngx_str_t  *value;

    value = cf->args->elts;
    field = (char *) engine + option->offset;

    switch (option->kind) {

    case NGX_HTTP_LLM_SIZE:
        size = ngx_parse_offset(&value[1]);

        if (size == (off_t) NGX_ERROR || size < (off_t) option->min) {
            return ngx_http_llm_block_invalid(cf, engine, "use a size of at "
                                              "least 1m, such as 512m or 8g");
        }

        *(off_t *) field = size;

        return NGX_CONF_OK;

    case NGX_HTTP_LLM_DECIMAL:
        n = ngx_atofp(value[1].data, value[1].len, 6);

        if (n == NGX_ERROR || (ngx_uint_t) n < option->min
            || (ngx_uint_t) n > option->max)
        {
            (void) snprintf(must, sizeof(must), "use a number from %g to %g",
                            (double) option->min / 1e6,
                            (double) option->max / 1e6);
            return ngx_http_llm_block_invalid(cf, engine, must);
        }

        break;

    case NGX_HTTP_LLM_TIME:
        n = ngx_parse_time(&value[1], 0);

        if (n == NGX_ERROR || (ngx_uint_t) n > option->max) {
            return ngx_http_llm_block_invalid(cf, engine, "use a time of at "
                                              "most 60s, such as 50ms");
        }

        value[1].data = ngx_pnalloc(cf->pool, NGX_INT_T_LEN);
        if (value[1].data == NULL) {
            return NGX_CONF_ERROR;
        }

        value[1].len = ngx_sprintf(value[1].data, "%i", n) - value[1].data;

        break;

    case NGX_HTTP_LLM_WORD:

        if (ngx_strcmp(value[1].data, option->words[0]) != 0
            && ngx_strcmp(value[1].data, option->words[1]) != 0)
        {
            ngx_sprintf((u_char *) must, "use \"%s\" or \"%s\"%Z",
                        option->words[0], option->words[1]);
            return ngx_http_llm_block_invalid(cf, engine, must);
        }

        break;

    case NGX_HTTP_LLM_FOLDER:
        return ngx_http_llm_set_folder(cf, engine, option);

    case NGX_HTTP_LLM_PATH:
    case NGX_HTTP_LLM_FILE:
    case NGX_HTTP_LLM_MODEL:
    case NGX_HTTP_LLM_LOG:
        *(ngx_str_t *) field = value[1];

        return ngx_http_llm_set_path(cf, engine, option);

    default:
        return ngx_http_llm_set_number(cf, engine, option);
    }

    /* the engine gets the text */

    *(ngx_str_t *) field = value[1];

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_number(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    char         must[128];
    ngx_int_t    n;
    ngx_str_t   *value;
    ngx_uint_t  *field, automatic;

    value = cf->args->elts;
    field = (ngx_uint_t *) ((char *) engine + option->offset);
    automatic = (option->kind == NGX_HTTP_LLM_AUTO_NUMBER);

    if (automatic && ngx_strcmp(value[1].data, "auto") == 0) {
        *field = 0;
        return NGX_CONF_OK;
    }

    n = ngx_atoi(value[1].data, value[1].len);

    if (n == NGX_ERROR || (ngx_uint_t) n < option->min
        || (ngx_uint_t) n > option->max)
    {
        if (option->min == option->max) {
            ngx_sprintf((u_char *) must, "only %ui is supported%Z",
                        option->min);
        } else {
            ngx_sprintf((u_char *) must, "use %sa number from %ui to %ui%Z",
                        automatic ? "\"auto\" or " : "", option->min,
                        option->max);
        }

        return ngx_http_llm_block_invalid(cf, engine, must);
    }

    if (option->kind == NGX_HTTP_LLM_POWER && (n & (n - 1))) {
        return ngx_http_llm_block_invalid(cf, engine, "use a power of two");
    }

    *field = n;

    return NGX_CONF_OK;
}


/* makes the path absolute; what is read must be there */

static char *
ngx_http_llm_set_path(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    int          fd, err;
    char        *rv;
    ngx_str_t   *path, *value;
    ngx_uint_t   conf_prefix;
    struct stat  st;

    value = cf->args->elts;
    path = (ngx_str_t *) ((char *) engine + option->offset);

    if (path->len == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V of llm_engine \"%V\" is empty: give a path",
                           &value[0], &engine->name);
        return NGX_CONF_ERROR;
    }

    /* a log is relative to the prefix, as error_log is */

    conf_prefix = (option->kind != NGX_HTTP_LLM_LOG);

    if (ngx_conf_full_name(cf->cycle, path, conf_prefix) != NGX_OK) {
        return NGX_CONF_ERROR;
    }

    rv = NGX_CONF_OK;

    if (cf->args->nelts == 3) {
        rv = (option->kind == NGX_HTTP_LLM_LOG)
             ? ngx_http_llm_set_level(cf, engine)
             : ngx_http_llm_set_alias(cf, engine);
    }

    if (rv != NGX_CONF_OK || option->kind == NGX_HTTP_LLM_LOG
        || option->kind == NGX_HTTP_LLM_PATH)
    {
        return rv;
    }

    fd = open((char *) path->data, O_RDONLY|O_NONBLOCK|O_CLOEXEC);

    if (fd == -1) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, ngx_errno,
                           "%V \"%V\" of llm_engine \"%V\" cannot be read: "
                           "check path and permissions", &value[0], path,
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    err = fstat(fd, &st);
    (void) close(fd);

    if (err == -1 || !S_ISREG(st.st_mode) || st.st_size == 0) {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "%V \"%V\" of llm_engine \"%V\" is not a file or "
                           "empty: give the path of a file", &value[0], path,
                           &engine->name);
        return NGX_CONF_ERROR;
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_folder(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_str_t        *path, *value;
    ngx_file_info_t   fi;

    value = cf->args->elts;
    path = (ngx_str_t *) ((char *) engine + option->offset);
    *path = value[1];

    if (ngx_strcmp(path->data, option->words[0]) == 0
        || ngx_strcmp(path->data, option->words[1]) == 0)
    {
        return NGX_CONF_OK;
    }

    if (path->len == 0
        || ngx_conf_full_name(cf->cycle, path, 1) != NGX_OK
        || ngx_file_info(path->data, &fi) == NGX_FILE_ERROR
        || !ngx_is_dir(&fi))
    {
        return ngx_http_llm_block_invalid(cf, engine, "use \"on\", \"off\" or "
                                          "a folder that exists");
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_alias(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
{
    ngx_str_t  *value;

    value = cf->args->elts;

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

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_set_level(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
{
    ngx_str_t   *value;
    ngx_uint_t   i;

    value = cf->args->elts;

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
