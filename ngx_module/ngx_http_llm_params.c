/*
 * One table of request fields: name, type, range, where it goes.  null means
 * absent, unknown fields are ignored, and a field that cannot be honoured is
 * refused rather than ignored.
 */

#include "ngx_module/ngx_http_llm_params.h"

#include <math.h>
#include <sys/random.h>


#define NGX_HTTP_LLM_MAX_IDS   1024

#define NGX_HTTP_LLM_SAMPLED                                                 \
    (NGX_HTTP_LLM_FOR_CHAT|NGX_HTTP_LLM_FOR_COMPLETION)


typedef enum {
    NGX_HTTP_LLM_FLOAT = 0,
    NGX_HTTP_LLM_INT,
    NGX_HTTP_LLM_FLAG,          /* true sets the bits of `where` in flags */
    NGX_HTTP_LLM_NOT_FLAG       /* true clears them */
} ngx_http_llm_type_e;


typedef struct {
    const char           *name;
    ngx_http_llm_type_e   type;
    ngx_uint_t            which;     /* endpoints that take it */
    size_t                where;     /* offset in the query, or flag */
    double                min;       /* range; a float may not equal min */
    double                max;       /* when `open` is set */
    ngx_uint_t            open;
    double                init;      /* default */
    const char           *must;      /* "… must be" what */
} ngx_http_llm_field_t;


#define llm_at(field)  offsetof(ngx_http_llm_query_t, field)
#define llm_max        2147483647

static const ngx_http_llm_field_t  ngx_http_llm_fields[] = {

    { "temperature", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.temperature), 0, 2, 0, 1,
      "a number between 0 and 2" },

    { "top_p", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.top_p), 0, 1, 1, 1,
      "a number above 0 and at most 1" },

    { "top_k", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.top_k), -1, llm_max, 0, 0,
      "an integer of at least 1, or 0 or -1 to switch it off" },

    { "min_p", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.min_p), 0, 1, 0, 0,
      "a number between 0 and 1" },

    { "presence_penalty", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.presence_penalty), -2, 2, 0, 0,
      "a number between -2 and 2" },

    { "frequency_penalty", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.frequency_penalty), -2, 2, 0, 0,
      "a number between -2 and 2" },

    { "repetition_penalty", NGX_HTTP_LLM_FLOAT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.repetition_penalty), 0, 1e6, 1, 1,
      "a number above 0" },

    { "n", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_SAMPLED,
      llm_at(n), 1, NGX_HTTP_LLM_MAX_CHOICES, 0, 1,
      "an integer between 1 and 64" },

    { "max_tokens", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_FOR_CHAT,
      llm_at(params.max_tokens), 1, llm_max, 0, -1,
      "an integer of at least 1" },

    /* after max_tokens, so that it wins */

    { "max_completion_tokens", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_FOR_CHAT,
      llm_at(params.max_tokens), 1, llm_max, 0, -1,
      "an integer of at least 1" },

    { "max_tokens", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_FOR_COMPLETION,
      llm_at(params.max_tokens), 0, llm_max, 0, 16,
      "an integer of at least 1" },

    { "min_tokens", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.min_tokens), 0, llm_max, 0, 0,
      "an integer of at least 0" },

    { "top_logprobs", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_FOR_CHAT,
      llm_at(params.top_logprobs), 0, LLM_TOP_MAX, 0, 0,
      "an integer between 0 and 20" },

    { "logprobs", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_FOR_CHAT,
      LLM_F_LOGPROBS, 0, 0, 0, 0, "true or false" },

    /* set to -1 when absent: 0 asks for the chosen token's alone */

    { "logprobs", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_FOR_COMPLETION,
      llm_at(params.top_logprobs), 0, LLM_TOP_MAX, 0, -1,
      "an integer between 0 and 20" },

    { "stream", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_SAMPLED,
      LLM_F_STREAM, 0, 0, 0, 0, "true or false" },

    { "echo", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_FOR_COMPLETION,
      LLM_F_ECHO, 0, 0, 0, 0, "true or false" },

    { "ignore_eos", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_SAMPLED,
      LLM_F_IGNORE_EOS, 0, 0, 0, 0, "true or false" },

    { "include_stop_str_in_output", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_SAMPLED,
      LLM_F_INCLUDE_STOP, 0, 0, 0, 0, "true or false" },

    { "skip_special_tokens", NGX_HTTP_LLM_NOT_FLAG, NGX_HTTP_LLM_SAMPLED,
      LLM_F_KEEP_SPECIAL, 0, 0, 0, 1, "true or false" },

    /* a template writes the model's first token itself */

    { "add_special_tokens", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_FOR_TEMPLATE,
      LLM_F_ADD_SPECIAL, 0, 0, 0, 0, "true or false" },

    { "add_special_tokens", NGX_HTTP_LLM_FLAG,
      NGX_HTTP_LLM_FOR_COMPLETION|NGX_HTTP_LLM_FOR_TOKENIZE,
      LLM_F_ADD_SPECIAL, 0, 0, 0, 1, "true or false" },

    { "parse_special", NGX_HTTP_LLM_FLAG,
      NGX_HTTP_LLM_FOR_COMPLETION|NGX_HTTP_LLM_FOR_TOKENIZE,
      LLM_F_PARSE_SPECIAL, 0, 0, 0, 1, "true or false" },

    { "add_generation_prompt", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_FOR_TEMPLATE,
      LLM_F_GENERATION_PROMPT, 0, 0, 0, 1, "true or false" },

    { "continue_final_message", NGX_HTTP_LLM_FLAG, NGX_HTTP_LLM_FOR_TEMPLATE,
      LLM_F_CONTINUE_FINAL, 0, 0, 0, 0, "true or false" },

    { NULL, 0, 0, 0, 0, 0, 0, 0, NULL }
};

#undef llm_at
#undef llm_max


/* without them the answer would not be what was asked for */

static const char  *ngx_http_llm_refused[] = {
    "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "use_beam_search", "suffix", "prompt_logprobs",
    "prompt_embeds", "allowed_token_ids", "bad_words", "logits_processors",
    "chat_template", "cache_salt", "priority", "documents", NULL
};


static ngx_int_t ngx_http_llm_params_field(ngx_http_llm_ctx_t *ctx,
    const ngx_http_llm_field_t *field, const cJSON *item);
static ngx_int_t ngx_http_llm_params_check(ngx_http_llm_ctx_t *ctx,
    const cJSON *root, ngx_uint_t which);
static ngx_int_t ngx_http_llm_params_seed(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_params_stop(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_params_bias(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_params_stream(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);


ngx_int_t
ngx_http_llm_params_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root,
    ngx_uint_t which)
{
    llm_params_t                *params;
    const cJSON                 *item;
    ngx_http_llm_query_t        *query;
    const ngx_http_llm_field_t  *field;

    query = &ctx->query;
    params = &query->params;

    /* what is not in the endpoint's rows must still be in range */

    query->n = 1;
    params->temperature = 1;
    params->top_p = 1;
    params->repetition_penalty = 1;
    params->max_tokens = -1;

    for (field = ngx_http_llm_fields; field->name; field++) {

        if (!(field->which & which)) {
            continue;
        }

        item = ngx_http_llm_json_get(root, field->name);

        if (ngx_http_llm_params_field(ctx, field, item) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    query->stream = (query->flags & LLM_F_STREAM) ? 1 : 0;
    query->echo = (query->flags & LLM_F_ECHO) ? 1 : 0;

    if (params->top_k < 0) {
        params->top_k = 0;
    }

    if (which & NGX_HTTP_LLM_FOR_COMPLETION) {

        if (params->top_logprobs >= 0) {
            query->flags |= LLM_F_LOGPROBS;

        } else {
            params->top_logprobs = 0;
        }
    }

    query->logprobs = (query->flags & LLM_F_LOGPROBS) ? 1 : 0;

    return ngx_http_llm_params_check(ctx, root, which);
}


static ngx_int_t
ngx_http_llm_params_field(ngx_http_llm_ctx_t *ctx,
    const ngx_http_llm_field_t *field, const cJSON *item)
{
    char                  *base;
    double                 value;
    int64_t                n;
    ngx_uint_t             on;
    ngx_http_llm_query_t  *query;

    query = &ctx->query;
    base = (char *) query;
    value = field->init;

    if (field->type == NGX_HTTP_LLM_FLAG
        || field->type == NGX_HTTP_LLM_NOT_FLAG)
    {
        if (item && !cJSON_IsBool(item)) {
            goto failed;
        }

        on = item ? cJSON_IsTrue(item) : (value != 0);

        if (field->type == NGX_HTTP_LLM_NOT_FLAG) {
            on = !on;
        }

        if (on) {
            query->flags |= field->where;

        } else {
            query->flags &= ~field->where;
        }

        return NGX_OK;
    }

    if (item == NULL) {

        /* max_completion_tokens must not undo max_tokens */

        if (field != ngx_http_llm_fields
            && field->where == (field - 1)->where
            && (field->which & (field - 1)->which))
        {
            return NGX_OK;
        }

    } else {

        if (!cJSON_IsNumber(item)) {
            goto failed;
        }

        value = item->valuedouble;

        if (value < field->min || value > field->max
            || (field->open && value == field->min))
        {
            goto failed;
        }

        if (field->type == NGX_HTTP_LLM_INT
            && ngx_http_llm_json_int(item, &n) != NGX_OK)
        {
            goto failed;
        }
    }

    if (field->type == NGX_HTTP_LLM_INT) {
        *(int32_t *) (base + field->where) = (int32_t) value;

    } else {
        *(float *) (base + field->where) = (float) value;

        /* a positive double may vanish in a float */

        if (field->open && (float) value <= (float) field->min) {
            goto failed;
        }
    }

    return NGX_OK;

failed:

    return ngx_http_llm_bad(ctx, field->name, "%s must be %s.", field->name,
                            field->must);
}


/* rules that involve more than one field */

static ngx_int_t
ngx_http_llm_params_check(ngx_http_llm_ctx_t *ctx, const cJSON *root,
    ngx_uint_t which)
{
    llm_params_t          *params;
    ngx_http_llm_query_t  *query;

    query = &ctx->query;
    params = &query->params;

    if (params->max_tokens == 0 && !query->echo) {
        return ngx_http_llm_bad(ctx, "max_tokens",
                                "max_tokens must be an integer of at least 1 "
                                "(0 is for echo alone).");
    }

    if (params->max_tokens > 0
        && (uint32_t) params->max_tokens > ctx->card->max_model_len)
    {
        return ngx_http_llm_bad(ctx, "max_tokens",
                                "max_tokens=%D cannot be greater than "
                                "max_model_len=%uD. Please request fewer "
                                "output tokens.", params->max_tokens,
                                ctx->card->max_model_len);
    }

    if (params->max_tokens >= 0 && params->min_tokens > params->max_tokens) {
        return ngx_http_llm_bad(ctx, "min_tokens",
                                "min_tokens=%D must not be greater than "
                                "max_tokens=%D.", params->min_tokens,
                                params->max_tokens);
    }

    if ((which & NGX_HTTP_LLM_FOR_CHAT)
        && ngx_http_llm_json_get(root, "top_logprobs") && !query->logprobs)
    {
        return ngx_http_llm_bad(ctx, "top_logprobs",
                                "top_logprobs needs logprobs to be true.");
    }

    if ((query->flags & LLM_F_CONTINUE_FINAL)
        && (query->flags & LLM_F_GENERATION_PROMPT))
    {
        if (ngx_http_llm_json_get(root, "add_generation_prompt")) {
            return ngx_http_llm_bad(ctx, "continue_final_message",
                                    "continue_final_message and "
                                    "add_generation_prompt exclude each "
                                    "other.");
        }

        query->flags &= ~LLM_F_GENERATION_PROMPT;
    }

    if (!(which & NGX_HTTP_LLM_SAMPLED)) {
        return NGX_OK;
    }

    if (ngx_http_llm_params_refuse(ctx, root) != NGX_OK
        || ngx_http_llm_params_seed(ctx, root) != NGX_OK
        || ngx_http_llm_params_stop(ctx, root) != NGX_OK
        || ngx_http_llm_params_bias(ctx, root) != NGX_OK
        || ngx_http_llm_params_stream(ctx, root) != NGX_OK)
    {
        return NGX_ERROR;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_params_seed(ngx_http_llm_ctx_t *ctx, const cJSON *root)
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


static ngx_int_t
ngx_http_llm_params_stop(ngx_http_llm_ctx_t *ctx, const cJSON *root)
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

    return ngx_http_llm_params_tokens(ctx, array, "stop_token_ids",
                                      &query->stop_tokens);
}


ngx_int_t
ngx_http_llm_params_tokens(ngx_http_llm_ctx_t *ctx, const cJSON *array,
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


static ngx_int_t
ngx_http_llm_params_bias(ngx_http_llm_ctx_t *ctx, const cJSON *root)
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


static ngx_int_t
ngx_http_llm_params_stream(ngx_http_llm_ctx_t *ctx, const cJSON *root)
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
ngx_http_llm_params_idle(const cJSON *item)
{
    return cJSON_IsFalse(item)
           || (cJSON_IsNumber(item) && item->valuedouble == 0)
           || (cJSON_IsString(item) && item->valuestring[0] == '\0')
           || ((cJSON_IsArray(item) || cJSON_IsObject(item))
               && item->child == NULL);
}


ngx_int_t
ngx_http_llm_params_refuse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    int64_t       n;
    ngx_uint_t    i;
    const char   *name;
    const cJSON  *item, *type;

    for (i = 0; ngx_http_llm_refused[i]; i++) {
        name = ngx_http_llm_refused[i];
        item = ngx_http_llm_json_get(root, name);

        if (item && !ngx_http_llm_params_idle(item)) {
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
