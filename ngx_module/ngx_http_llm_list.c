/*
 * Fields of a request that are not a plain number or flag: the seed, stop
 * strings and tokens, biases, stream options, and those that are refused.
 */

#include "ngx_module/ngx_http_llm_list.h"
#include "ngx_module/ngx_http_llm_params.h"

#include <sys/random.h>


#define NGX_HTTP_LLM_MAX_IDS   1024
#define NGX_HTTP_LLM_MAX_SALT  128


/* without them the answer would not be what was asked for */

static const char  *ngx_http_llm_refused[] = {
    "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "use_beam_search", "suffix", "prompt_logprobs",
    "prompt_embeds", "allowed_token_ids", "bad_words", "logits_processors",
    "chat_template", "documents", NULL
};


ngx_int_t
ngx_http_llm_list_seed(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    char         *end, text[32];
    int64_t       n;
    ngx_str_t    *raw;
    const cJSON  *item;

    item = ngx_http_llm_json_get(root, "seed");

    if (item == NULL) {

        if (getrandom(&ctx->query.params.seed, sizeof(uint64_t), 0)
            != sizeof(uint64_t))
        {
            ctx->query.params.seed = ((uint64_t) ngx_random() << 32)
                                     ^ ngx_random();
        }

        return NGX_OK;
    }

    if (!cJSON_IsNumber(item)) {
        goto failed;
    }

    /* 64 bits do not survive in a double: read the digits themselves */

    raw = &ctx->json.seed;

    if (raw->data == NULL) {

        /* the key is written with escapes */

        if (ngx_http_llm_json_int(item, &n) != NGX_OK) {
            goto failed;
        }

        ctx->query.params.seed = (uint64_t) n;

        return NGX_OK;
    }

    ngx_cpystrn((u_char *) text, raw->data, ngx_min(raw->len + 1,
                                                    sizeof(text)));
    errno = 0;
    n = strtoll(text, &end, 10);

    if (errno || end == text) {
        goto failed;
    }

    if (*end == '.' || *end == 'e' || *end == 'E') {

        if (ngx_http_llm_json_int(item, &n) != NGX_OK) {
            goto failed;
        }
    }

    ctx->query.params.seed = (uint64_t) n;

    return NGX_OK;

failed:

    return ngx_http_llm_bad(ctx, "seed", "seed must be a 64-bit integer.");
}


/* bytes that only requests with equal ones share cached pages with; the value
 * of llm_cache_salt stands before them */

ngx_int_t
ngx_http_llm_list_salt(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    size_t        len;
    ngx_str_t    *salt;
    const cJSON  *item;

    item = ngx_http_llm_json_get(root, "cache_salt");

    if (item == NULL) {
        return NGX_OK;
    }

    len = cJSON_IsString(item) ? ngx_strlen(item->valuestring) : 0;

    if (len == 0
        || ngx_utf8_length((u_char *) item->valuestring, len)
           > NGX_HTTP_LLM_MAX_SALT)
    {
        return ngx_http_llm_bad(ctx, "cache_salt", "cache_salt must be a "
                                "string of 1 to %d characters.",
                                NGX_HTTP_LLM_MAX_SALT);
    }

    salt = &ctx->query.salt;

    salt->data = ngx_pnalloc(ctx->request->pool, len);

    if (salt->data == NULL) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    salt->len = len;
    ngx_memcpy(salt->data, item->valuestring, len);

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_list_stop(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    ngx_str_t             *stop;
    const cJSON           *item, *array;
    ngx_http_llm_query_t  *query;

    query = &ctx->query;

    array = ngx_http_llm_json_get(root, "stop");

    if (array && !cJSON_IsString(array) && !cJSON_IsArray(array)) {
        return ngx_http_llm_bad(ctx, "stop", "stop must be a string or an "
                                "array of strings.");
    }

    item = cJSON_IsArray(array) ? array->child : array;

    for ( /* void */ ; item; item = item->next) {

        if (!cJSON_IsString(item)) {
            return ngx_http_llm_bad(ctx, "stop", "stop must be a string or an "
                                    "array of strings.");
        }

        if (query->n_stops == NGX_HTTP_LLM_MAX_STOPS) {
            return ngx_http_llm_bad(ctx, "stop", "stop takes at most %d "
                                    "strings.", NGX_HTTP_LLM_MAX_STOPS);
        }

        /* kept: the response names the one that matched */

        stop = &query->stops[query->n_stops++];
        stop->len = ngx_strlen(item->valuestring);
        stop->data = ngx_pnalloc(ctx->request->pool, stop->len + 1);

        if (stop->len == 0) {
            return ngx_http_llm_bad(ctx, "stop", "stop must not contain an "
                                    "empty string.");
        }

        if (stop->data == NULL) {
            ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                                   NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                                   "out of memory");
            return NGX_ERROR;
        }

        ngx_memcpy(stop->data, item->valuestring, stop->len + 1);

        /* an array's elements are siblings, a lone string has the next
         * member of the object as its sibling */

        if (item == array) {
            break;
        }
    }

    array = ngx_http_llm_json_get(root, "stop_token_ids");

    if (array == NULL) {
        return NGX_OK;
    }

    if (cJSON_GetArraySize(array) > NGX_HTTP_LLM_MAX_IDS) {
        return ngx_http_llm_bad(ctx, "stop_token_ids", "stop_token_ids takes "
                                "at most %d ids.", NGX_HTTP_LLM_MAX_IDS);
    }

    return ngx_http_llm_list_tokens(ctx, array, "stop_token_ids",
                                      &query->stop_tokens);
}


ngx_int_t
ngx_http_llm_list_tokens(ngx_http_llm_ctx_t *ctx, const cJSON *array,
    const char *param, ngx_str_t *ids)
{
    int32_t      *p;
    int64_t       n;
    const cJSON  *item;

    if (!cJSON_IsArray(array)) {
        return ngx_http_llm_bad(ctx, param, "%s must be an array of token "
                                "ids.", param);
    }

    ids->len = cJSON_GetArraySize(array) * sizeof(int32_t);
    ids->data = ngx_palloc(ctx->request->pool, ids->len + 1);

    if (ids->data == NULL) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    p = (int32_t *) ids->data;

    cJSON_ArrayForEach(item, array) {

        if (ngx_http_llm_json_int(item, &n) != NGX_OK) {
            return ngx_http_llm_bad(ctx, param, "%s must be an array of token "
                                    "ids.", param);
        }

        if (n < 0 || n >= (int64_t) ctx->card->n_vocab) {
            return ngx_http_llm_bad(ctx, param, "Token id %L is out of "
                                    "vocabulary: it must be between 0 and "
                                    "%uD.", n, ctx->card->n_vocab - 1);
        }

        *p++ = (int32_t) n;
    }

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_list_bias(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    char          *end;
    long           id;
    llm_bias_t    *bias;
    ngx_str_t     *list;
    const cJSON   *item, *object;

    object = ngx_http_llm_json_get(root, "logit_bias");

    if (object == NULL) {
        return NGX_OK;
    }

    if (!cJSON_IsObject(object)) {
        return ngx_http_llm_bad(ctx, "logit_bias", "logit_bias must be an "
                                "object of token ids and numbers.");
    }

    list = &ctx->query.bias;
    list->len = cJSON_GetArraySize(object) * sizeof(llm_bias_t);

    if (list->len > NGX_HTTP_LLM_MAX_IDS * sizeof(llm_bias_t)) {
        return ngx_http_llm_bad(ctx, "logit_bias", "logit_bias takes at most "
                                "%d tokens.", NGX_HTTP_LLM_MAX_IDS);
    }

    list->data = ngx_palloc(ctx->request->pool, list->len + 1);

    if (list->data == NULL) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    bias = (llm_bias_t *) list->data;

    cJSON_ArrayForEach(item, object) {

        errno = 0;
        id = strtol(item->string, &end, 10);

        if (errno || end == item->string || *end != '\0' || id < 0
            || id >= (long) ctx->card->n_vocab)
        {
            return ngx_http_llm_bad(ctx, "logit_bias", "logit_bias key "
                                    "\"%s\" is not a token id below %uD.",
                                    item->string, ctx->card->n_vocab);
        }

        if (!cJSON_IsNumber(item)) {
            return ngx_http_llm_bad(ctx, "logit_bias", "logit_bias values "
                                    "must be numbers.");
        }

        bias->token = (int32_t) id;
        bias->bias = (float) ngx_max(-100, ngx_min(100, item->valuedouble));
        bias++;
    }

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_list_stream(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    const cJSON           *options, *item;
    ngx_http_llm_query_t  *query;

    query = &ctx->query;

    options = ngx_http_llm_json_get(root, "stream_options");

    if (options == NULL) {
        return NGX_OK;
    }

    if (!query->stream) {
        return ngx_http_llm_bad(ctx, "stream_options",
                                "stream_options needs stream to be true.");
    }

    if (!cJSON_IsObject(options)) {
        return ngx_http_llm_bad(ctx, "stream_options",
                                "stream_options must be an object.");
    }

    item = ngx_http_llm_json_get(options, "include_usage");

    if (item && !cJSON_IsBool(item)) {
        return ngx_http_llm_bad(ctx, "stream_options",
                                "include_usage must be true or false.");
    }

    query->include_usage = cJSON_IsTrue(item) ? 1 : 0;

    item = ngx_http_llm_json_get(options, "continuous_usage_stats");

    if (item && !cJSON_IsBool(item)) {
        return ngx_http_llm_bad(ctx, "stream_options",
                                "continuous_usage_stats must be true or "
                                "false.");
    }

    query->continuous_usage = cJSON_IsTrue(item) ? 1 : 0;

    return NGX_OK;
}


/* a value that asks for nothing */

static ngx_uint_t
ngx_http_llm_list_idle(const cJSON *item)
{
    return cJSON_IsFalse(item)
           || (cJSON_IsNumber(item) && item->valuedouble == 0)
           || (cJSON_IsString(item) && item->valuestring[0] == '\0')
           || ((cJSON_IsArray(item) || cJSON_IsObject(item))
               && item->child == NULL);
}


ngx_int_t
ngx_http_llm_list_refuse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    int64_t       n;
    ngx_uint_t    i;
    const char   *name;
    const cJSON  *item, *type;

    for (i = 0; ngx_http_llm_refused[i]; i++) {
        name = ngx_http_llm_refused[i];
        item = ngx_http_llm_json_get(root, name);

        if (item && !ngx_http_llm_list_idle(item)) {
            return ngx_http_llm_bad(ctx, name, "%s is not supported by this "
                                    "server.", name);
        }
    }

    item = ngx_http_llm_json_get(root, "best_of");

    if (item && (ngx_http_llm_json_int(item, &n) != NGX_OK
                 || n != (int64_t) ctx->query.n))
    {
        return ngx_http_llm_bad(ctx, "best_of", "best_of is not supported "
                                "unless it equals n.");
    }

    item = ngx_http_llm_json_get(root, "response_format");

    if (item == NULL) {
        return NGX_OK;
    }

    type = ngx_http_llm_json_get(item, "type");

    if (!cJSON_IsString(type)) {
        return ngx_http_llm_bad(ctx, "response_format", "response_format must "
                                "be an object with a type.");
    }

    if (ngx_strcmp(type->valuestring, "text") != 0) {
        return ngx_http_llm_bad(ctx, "response_format", "response_format of "
                                "type \"%s\" is not supported by this server.",
                                type->valuestring);
    }

    return NGX_OK;
}
