/*
 * One table of request fields: name, type, range, where it goes.  null means
 * absent, unknown fields are ignored, and a field that cannot be honoured is
 * refused rather than ignored.
 */

#include "ngx_module/ngx_http_llm_params.h"
#include "ngx_module/ngx_http_llm_list.h"


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

    /* among the requests of one tenant, lower first */

    { "priority", NGX_HTTP_LLM_INT, NGX_HTTP_LLM_SAMPLED,
      llm_at(params.priority), -llm_max - 1.0, llm_max, 0, 0,
      "an integer of 32 bits" },

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


static ngx_int_t ngx_http_llm_params_field(ngx_http_llm_ctx_t *ctx,
    const ngx_http_llm_field_t *field, const cJSON *item);
static ngx_int_t ngx_http_llm_params_check(ngx_http_llm_ctx_t *ctx,
    const cJSON *root, ngx_uint_t which);


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


/* a number in its range; an absent one is the default */

static ngx_int_t
ngx_http_llm_params_number(const ngx_http_llm_field_t *field,
    const cJSON *item, double *value)
{
    int64_t  n;

    *value = field->init;

    if (item == NULL) {
        return NGX_OK;
    }

    if (!cJSON_IsNumber(item)) {
        return NGX_ERROR;
    }

    *value = item->valuedouble;

    if (*value < field->min || *value > field->max
        || (field->open && *value == field->min))
    {
        return NGX_ERROR;
    }

    /* a positive double may vanish in a float */

    if (field->open && (float) *value <= (float) field->min) {
        return NGX_ERROR;
    }

    if (field->type == NGX_HTTP_LLM_INT
        && ngx_http_llm_json_int(item, &n) != NGX_OK)
    {
        return NGX_ERROR;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_params_field(ngx_http_llm_ctx_t *ctx,
    const ngx_http_llm_field_t *field, const cJSON *item)
{
    char                  *base;
    double                 value;
    ngx_uint_t             on;
    ngx_http_llm_query_t  *query;

    query = &ctx->query;
    base = (char *) query;

    if (field->type == NGX_HTTP_LLM_FLAG
        || field->type == NGX_HTTP_LLM_NOT_FLAG)
    {
        if (item && !cJSON_IsBool(item)) {
            goto failed;
        }

        on = item ? cJSON_IsTrue(item) : (field->init != 0);

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

    if (ngx_http_llm_params_number(field, item, &value) != NGX_OK) {
        goto failed;
    }

    /* max_completion_tokens, when absent, must not undo max_tokens */

    if (item == NULL && field != ngx_http_llm_fields
        && field->where == (field - 1)->where
        && (field->which & (field - 1)->which))
    {
        return NGX_OK;
    }

    if (field->type == NGX_HTTP_LLM_INT) {
        *(int32_t *) (base + field->where) = (int32_t) value;

    } else {
        *(float *) (base + field->where) = (float) value;
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

    if (ngx_http_llm_list_refuse(ctx, root) != NGX_OK
        || ngx_http_llm_list_seed(ctx, root) != NGX_OK
        || ngx_http_llm_list_salt(ctx, root) != NGX_OK
        || ngx_http_llm_list_stop(ctx, root) != NGX_OK
        || ngx_http_llm_list_bias(ctx, root) != NGX_OK
        || ngx_http_llm_list_stream(ctx, root) != NGX_OK)
    {
        return NGX_ERROR;
    }

    return NGX_OK;
}
