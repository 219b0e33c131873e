/*
 * Setters of the llm_engine block's directives, one for each kind of value.
 * Called by ngx_http_llm_block.c with the row of its table.
 */

#include "ngx_module/ngx_http_llm_option.h"


static char *ngx_http_llm_option_number(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static ngx_uint_t ngx_http_llm_option_device_ok(ngx_str_t *value,
    ngx_uint_t max);
static char *ngx_http_llm_option_time(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_option_path(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_option_folder(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_option_alias(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);
static char *ngx_http_llm_option_level(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine);
static char *ngx_http_llm_option_speculative(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option);
static char *ngx_http_llm_option_ngram(ngx_conf_t *cf,
    ngx_http_llm_engine_t *engine, const ngx_http_llm_option_t *option,
    ngx_str_t *drafter);


static const char  *ngx_http_llm_log_levels[] = {
    "emerg", "alert", "crit", "error", "warn", "notice", "info", "debug", NULL
};


static char *
ngx_http_llm_option_invalid(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const char *must)
{
    ngx_str_t  *value;

    value = cf->args->elts;

    ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                       "%V \"%V\" of llm_engine \"%V\" is invalid: %s",
                       &value[0], &value[1], &engine->name, must);

    return NGX_CONF_ERROR;
}


char *
ngx_http_llm_option_set(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
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
            return ngx_http_llm_option_invalid(cf, engine, "use a size of at "
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
            return ngx_http_llm_option_invalid(cf, engine, must);
        }

        break;

    case NGX_HTTP_LLM_TIME:
        return ngx_http_llm_option_time(cf, engine, option);

    case NGX_HTTP_LLM_WORD:

        if (ngx_strcmp(value[1].data, option->words[0]) != 0
            && ngx_strcmp(value[1].data, option->words[1]) != 0)
        {
            ngx_sprintf((u_char *) must, "use \"%s\" or \"%s\"%Z",
                        option->words[0], option->words[1]);
            return ngx_http_llm_option_invalid(cf, engine, must);
        }

        break;

    case NGX_HTTP_LLM_DEVICE:

        if (!ngx_http_llm_option_device_ok(&value[1], option->max)) {
            ngx_sprintf((u_char *) must,
                        "use \"auto\", \"cpu\", \"cuda\" or \"cuda:N\" with "
                        "N from 0 to %ui%Z", option->max);
            return ngx_http_llm_option_invalid(cf, engine, must);
        }

        break;

    case NGX_HTTP_LLM_FOLDER:
        return ngx_http_llm_option_folder(cf, engine, option);

    case NGX_HTTP_LLM_PATH:
    case NGX_HTTP_LLM_FILE:
    case NGX_HTTP_LLM_MODEL:
    case NGX_HTTP_LLM_LOG:
        *(ngx_str_t *) field = value[1];

        return ngx_http_llm_option_path(cf, engine, option);

    case NGX_HTTP_LLM_SPECULATIVE:
        return ngx_http_llm_option_speculative(cf, engine, option);

    default:
        return ngx_http_llm_option_number(cf, engine, option);
    }

    /* the engine gets the text */

    *(ngx_str_t *) field = value[1];

    return NGX_CONF_OK;
}


/* whether there is such a GPU shows when the engine starts */

static ngx_uint_t
ngx_http_llm_option_device_ok(ngx_str_t *value, ngx_uint_t max)
{
    ngx_int_t  n;

    if (ngx_strcmp(value->data, "auto") == 0
        || ngx_strcmp(value->data, "cpu") == 0
        || ngx_strcmp(value->data, "cuda") == 0)
    {
        return 1;
    }

    if (value->len < sizeof("cuda:0") - 1
        || ngx_strncmp(value->data, "cuda:", sizeof("cuda:") - 1) != 0)
    {
        return 0;
    }

    n = ngx_atoi(value->data + sizeof("cuda:") - 1,
                 value->len - (sizeof("cuda:") - 1));

    return n != NGX_ERROR && (ngx_uint_t) n <= max;
}


/* the engine gets milliseconds */

static char *
ngx_http_llm_option_time(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    ngx_int_t   ms;
    ngx_str_t  *value, *field;

    value = cf->args->elts;
    field = (ngx_str_t *) ((char *) engine + option->offset);

    ms = ngx_parse_time(&value[1], 0);

    if (ms == NGX_ERROR || (ngx_uint_t) ms > option->max) {
        return ngx_http_llm_option_invalid(cf, engine, "use a time of at most "
                                           "60s, such as 50ms");
    }

    field->data = ngx_pnalloc(cf->pool, NGX_INT_T_LEN);
    if (field->data == NULL) {
        return NGX_CONF_ERROR;
    }

    field->len = ngx_sprintf(field->data, "%i", ms) - field->data;

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_option_number(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
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

        return ngx_http_llm_option_invalid(cf, engine, must);
    }

    if (option->kind == NGX_HTTP_LLM_POWER && (n & (n - 1))) {
        return ngx_http_llm_option_invalid(cf, engine, "use a power of two");
    }

    *field = n;

    return NGX_CONF_OK;
}


/* makes the path absolute; what is read must be there */

static char *
ngx_http_llm_option_path(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
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
             ? ngx_http_llm_option_level(cf, engine)
             : ngx_http_llm_option_alias(cf, engine);
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
ngx_http_llm_option_folder(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
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
        return ngx_http_llm_option_invalid(cf, engine, "use \"on\", \"off\" or "
                                           "a folder that exists");
    }

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_option_alias(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
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
ngx_http_llm_option_level(ngx_conf_t *cf, ngx_http_llm_engine_t *engine)
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


/* the engine gets all drafters in one word, divided by commas */

static char *
ngx_http_llm_option_speculative(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option)
{
    u_char      *p, *last;
    ngx_str_t   *value, *field, drafter;
    ngx_uint_t   off;

    value = cf->args->elts;
    field = (ngx_str_t *) ((char *) engine + option->offset);

    drafter = value[1];
    off = (ngx_strcmp(drafter.data, "off") == 0);

    if (ngx_strcmp(drafter.data, "ngram") == 0) {

        if (ngx_http_llm_option_ngram(cf, engine, option, &drafter)
            != NGX_CONF_OK)
        {
            return NGX_CONF_ERROR;
        }

    } else if (!off && ngx_strcmp(drafter.data, "suffix") != 0) {
        return ngx_http_llm_option_invalid(cf, engine, "use \"off\", \"ngram "
                                           "[min=N] [max=N]\" or \"suffix\"");

    } else if (cf->args->nelts > 2) {
        return ngx_http_llm_option_invalid(cf, engine,
                                           "only ngram takes parameters");
    }

    if (field->len == 0) {
        *field = drafter;
        return NGX_CONF_OK;
    }

    if (off || ngx_strcmp(field->data, "off") == 0) {
        return ngx_http_llm_option_invalid(cf, engine,
                                           "\"off\" must be alone");
    }

    if (ngx_strstr(field->data, (char *) value[1].data)) {
        return ngx_http_llm_option_invalid(cf, engine, "it is a duplicate");
    }

    p = ngx_pnalloc(cf->pool, field->len + 1 + drafter.len + 1);
    if (p == NULL) {
        return NGX_CONF_ERROR;
    }

    last = ngx_sprintf(p, "%V,%V%Z", field, &drafter);

    field->data = p;
    field->len = last - p - 1;

    return NGX_CONF_OK;
}


static char *
ngx_http_llm_option_ngram(ngx_conf_t *cf, ngx_http_llm_engine_t *engine,
    const ngx_http_llm_option_t *option, ngx_str_t *drafter)
{
    ngx_int_t    n, min, max, *place;
    ngx_str_t   *value;
    ngx_uint_t   i, seen, bit;

    value = cf->args->elts;

    min = 2;
    max = 5;
    seen = 0;

    for (i = 2; i < cf->args->nelts; i++) {

        bit = (ngx_strncmp(value[i].data, "min=", 4) == 0) ? 1 : 2;
        place = (bit == 1) ? &min : &max;
        n = NGX_ERROR;

        if (bit == 1 || ngx_strncmp(value[i].data, "max=", 4) == 0) {
            n = ngx_atoi(value[i].data + 4, value[i].len - 4);
        }

        if (n == NGX_ERROR || (seen & bit)) {
            ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                               "invalid parameter \"%V\" of speculative in "
                               "llm_engine \"%V\": use \"min=N\" and "
                               "\"max=N\", each once", &value[i],
                               &engine->name);
            return NGX_CONF_ERROR;
        }

        *place = n;
        seen |= bit;
    }

    if (min < (ngx_int_t) option->min || max < min
        || max > (ngx_int_t) option->max)
    {
        ngx_conf_log_error(NGX_LOG_EMERG, cf, 0,
                           "min=%i max=%i of speculative in llm_engine \"%V\" "
                           "are invalid: use %ui <= min <= max <= %ui", min,
                           max, &engine->name, option->min, option->max);
        return NGX_CONF_ERROR;
    }

    drafter->data = ngx_pnalloc(cf->pool, sizeof("ngram:64:64"));
    if (drafter->data == NULL) {
        return NGX_CONF_ERROR;
    }

    drafter->len = ngx_sprintf(drafter->data, "ngram:%i:%i%Z", min, max)
                   - drafter->data - 1;

    return NGX_CONF_OK;
}
