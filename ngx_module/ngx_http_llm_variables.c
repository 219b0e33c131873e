/*
 * Variables.  They are read when the request is logged, after its seats have
 * been given up, so they come from the request's context and not from the
 * segment.  Without a value (no request to an engine, or it has not come that
 * far) they are not found, and logged as "-".
 */

#include "ngx_module/ngx_http_llm_variables.h"
#include "ngx_module/ngx_http_llm_handler.h"


enum {
    NGX_HTTP_LLM_MODEL = 0,
    NGX_HTTP_LLM_PROMPT,
    NGX_HTTP_LLM_COMPLETION,
    NGX_HTTP_LLM_CACHED,
    NGX_HTTP_LLM_TTFT,
    NGX_HTTP_LLM_QUEUE,
    NGX_HTTP_LLM_ACCEPT_RATE,
    NGX_HTTP_LLM_FINISH
};


static ngx_int_t ngx_http_llm_variable(ngx_http_request_t *r,
    ngx_http_variable_value_t *v, uintptr_t data);


static ngx_http_variable_t  ngx_http_llm_vars[] = {

    { ngx_string("llm_model"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_MODEL, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_prompt_tokens"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_PROMPT, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_completion_tokens"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_COMPLETION, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_cached_tokens"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_CACHED, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_ttft"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_TTFT, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_queue_time"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_QUEUE, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_accept_rate"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_ACCEPT_RATE, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    { ngx_string("llm_finish_reason"), NULL, ngx_http_llm_variable,
      NGX_HTTP_LLM_FINISH, NGX_HTTP_VAR_NOCACHEABLE, 0 },

    ngx_http_null_variable
};


ngx_int_t
ngx_http_llm_variables_add(ngx_conf_t *cf)
{
    ngx_http_variable_t  *var, *v;

    for (v = ngx_http_llm_vars; v->name.len; v++) {

        var = ngx_http_add_variable(cf, &v->name, v->flags);
        if (var == NULL) {
            return NGX_ERROR;
        }

        var->get_handler = v->get_handler;
        var->data = v->data;
    }

    return NGX_OK;
}


static uint64_t
ngx_http_llm_variable_count(ngx_http_llm_ctx_t *ctx, uintptr_t data)
{
    uint64_t                n;
    ngx_uint_t              i;
    ngx_http_llm_choice_t  *choice;

    n = 0;

    for (i = 0; i < ctx->n_choices; i++) {
        choice = &ctx->choices[i];

        if (data == NGX_HTTP_LLM_COMPLETION) {
            n += choice->tokens;

        } else if (i % ctx->query.n == 0) {
            n += (data == NGX_HTTP_LLM_PROMPT) ? choice->prompt_tokens
                                               : choice->cached_tokens;
        }
    }

    return n;
}


/* thousandths; NGX_ERROR: no drafts */

static ngx_int_t
ngx_http_llm_variable_accepted(ngx_http_llm_ctx_t *ctx)
{
    uint64_t                drafted, accepted;
    ngx_uint_t              i;
    ngx_http_llm_choice_t  *choice;

    drafted = 0;
    accepted = 0;

    for (i = 0; i < ctx->n_choices; i++) {
        choice = &ctx->choices[i];

        if (choice->done) {
            drafted += choice->result.drafted_tokens;
            accepted += choice->result.accepted_tokens;
        }
    }

    return drafted ? (ngx_int_t) ((accepted * 1000 + drafted / 2) / drafted)
                   : NGX_ERROR;
}


static const char *
ngx_http_llm_variable_finish(ngx_http_llm_choice_t *choice)
{
    if (!choice->done) {
        return choice->ctx->error.status ? "error" : "abort";
    }

    return (choice->result.finish == LLM_FINISH_LENGTH) ? "length" : "stop";
}


static ngx_int_t
ngx_http_llm_variable(ngx_http_request_t *r, ngx_http_variable_value_t *v,
    uintptr_t data)
{
    u_char                 *p;
    uint64_t                n;
    ngx_int_t               rate;
    const char             *text;
    ngx_http_llm_ctx_t     *ctx;
    ngx_http_llm_choice_t  *choice;

    ctx = ngx_http_get_module_ctx(r->main, ngx_http_llm_module);

    v->not_found = 1;

    if (ctx == NULL || ctx->n_choices == 0) {
        return NGX_OK;
    }

    choice = &ctx->choices[0];

    p = ngx_pnalloc(r->pool, NGX_INT64_LEN + 4);
    if (p == NULL) {
        return NGX_ERROR;
    }

    v->data = p;

    switch (data) {

    case NGX_HTTP_LLM_MODEL:
        v->data = ctx->model.data;
        v->len = ctx->model.len;
        break;

    case NGX_HTTP_LLM_FINISH:
        text = ngx_http_llm_variable_finish(choice);
        v->data = (u_char *) text;
        v->len = ngx_strlen(text);
        break;

    case NGX_HTTP_LLM_TTFT:
    case NGX_HTTP_LLM_QUEUE:

        if (!choice->done) {
            return NGX_OK;
        }

        /* seconds with milliseconds, as $request_time */

        n = (data == NGX_HTTP_LLM_TTFT) ? choice->result.ttft_us
                                        : choice->result.queue_us;
        n = (n + 500) / 1000;

        v->len = ngx_sprintf(p, "%uL.%03uL", n / 1000, n % 1000) - p;
        break;

    case NGX_HTTP_LLM_ACCEPT_RATE:
        rate = ngx_http_llm_variable_accepted(ctx);

        if (rate == NGX_ERROR) {
            return NGX_OK;
        }

        v->len = ngx_sprintf(p, "%i.%03i", rate / 1000, rate % 1000) - p;
        break;

    default:
        n = ngx_http_llm_variable_count(ctx, data);
        v->len = ngx_sprintf(p, "%uL", n) - p;
    }

    v->valid = 1;
    v->no_cacheable = 0;
    v->not_found = 0;

    return NGX_OK;
}
