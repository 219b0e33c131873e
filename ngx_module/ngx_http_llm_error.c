/*
 * The OpenAI error object, and the filters that put it where nginx would send
 * an HTML page.
 */

#include "ngx_module/ngx_http_llm_error.h"
#include "ngx_module/ngx_http_llm_handler.h"


#define NGX_HTTP_LLM_MESSAGE_MAX  1024


typedef struct {
    ngx_uint_t   status;
    const char  *type;
    const char  *code;
    const char  *message;
} ngx_http_llm_status_t;


static const ngx_http_llm_status_t *ngx_http_llm_error_status(
    ngx_uint_t status);
static ngx_int_t ngx_http_llm_error_header_filter(ngx_http_request_t *r);
static ngx_int_t ngx_http_llm_error_body_filter(ngx_http_request_t *r,
    ngx_chain_t *in);


static ngx_http_output_header_filter_pt  ngx_http_llm_next_header_filter;
static ngx_http_output_body_filter_pt    ngx_http_llm_next_body_filter;


/* what is said when nobody recorded more, the last row for all others */

static const ngx_http_llm_status_t  ngx_http_llm_statuses[] = {

    { 400, "invalid_request_error", NULL,
      "The request could not be understood." },

    { 401, "invalid_request_error", "invalid_api_key",
      "Authentication failed or is missing." },

    { 403, "invalid_request_error", "permission_denied",
      "Access to this resource is not allowed." },

    { 404, "invalid_request_error", "not_found",
      "There is no such endpoint." },

    { 405, "invalid_request_error", "method_not_allowed",
      "The method is not allowed for this endpoint." },

    { 408, "invalid_request_error", "request_timeout",
      "The request was not received in time." },

    { 413, "invalid_request_error", "request_too_large",
      "The request body is too large." },

    { 429, "rate_limit_error", "rate_limit_exceeded",
      "Too many requests, try again later." },

    { 503, "server_error", "service_unavailable",
      "The service is not available now, try again later." },

    { 504, "server_error", "timeout",
      "The engine did not answer in time." },

    { 0, "server_error", NULL,
      "The server could not answer the request." }
};


static const ngx_http_llm_status_t *
ngx_http_llm_error_status(ngx_uint_t status)
{
    const ngx_http_llm_status_t  *row;

    for (row = ngx_http_llm_statuses; row->status; row++) {
        if (row->status == status) {
            return row;
        }
    }

    return (status < 500) ? ngx_http_llm_statuses : row;
}


void
ngx_http_llm_error_set(ngx_http_llm_error_t *error, ngx_pool_t *pool,
    ngx_uint_t status, const char *param, const char *fmt, ...)
{
    u_char   *p, *last;
    va_list   args;

    if (error->status) {
        return;
    }

    error->status = status;

    if (param) {
        error->param.data = (u_char *) param;
        error->param.len = ngx_strlen(param);
    }

    p = ngx_pnalloc(pool, NGX_HTTP_LLM_MESSAGE_MAX);
    if (p == NULL) {
        return;
    }

    va_start(args, fmt);
    last = ngx_vslprintf(p, p + NGX_HTTP_LLM_MESSAGE_MAX, fmt, args);
    va_end(args);

    error->message.data = p;
    error->message.len = last - p;
}


void
ngx_http_llm_error_fail(ngx_http_llm_error_t *error, ngx_pool_t *pool,
    const llm_fail_t *fail)
{
    size_t        len;
    u_char       *param;
    ngx_str_t     text;

    if (error->status) {
        return;
    }

    text.data = (u_char *) fail->text;
    text.len = strnlen(fail->text, sizeof(fail->text));

    param = NULL;
    len = strnlen(fail->param, sizeof(fail->param));

    if (len) {
        param = ngx_pnalloc(pool, len + 1);
        if (param) {
            *ngx_cpymem(param, fail->param, len) = '\0';
        }
    }

    switch (fail->fail) {

    case LLM_FAIL_BADREQ:
        ngx_http_llm_error_set(error, pool, NGX_HTTP_BAD_REQUEST,
                               (char *) param, "%V", &text);
        break;

    case LLM_FAIL_CONTEXT:
        ngx_http_llm_error_set(error, pool, NGX_HTTP_BAD_REQUEST,
                               (char *) param, "%V", &text);
        error->code = "context_length_exceeded";
        break;

    case LLM_FAIL_BUSY:
        ngx_http_llm_error_set(error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               (char *) param, "%V", &text);
        error->code = "engine_busy";
        error->retry_after = ngx_max(fail->retry_after, 1);
        break;

    case LLM_FAIL_DRAINING:
        ngx_http_llm_error_set(error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               (char *) param, "%V", &text);
        error->code = "engine_unavailable";
        error->retry_after = 1;
        break;

    default:

        /* it would fail in the same way again */

        ngx_http_llm_error_set(error, pool, NGX_HTTP_INTERNAL_SERVER_ERROR,
                               (char *) param, "%V", &text);
        error->no_retry = 1;
    }
}


void
ngx_http_llm_error_write(ngx_http_llm_out_t *out,
    const ngx_http_llm_error_t *error)
{
    const char                   *type, *code;
    const ngx_http_llm_status_t  *row;

    row = ngx_http_llm_error_status(error->status);

    type = error->type ? error->type : row->type;
    code = error->code;

    if (code == NULL && error->message.len == 0) {
        code = row->code;
    }

    ngx_http_llm_out_lit(out, "{\"error\":{\"message\":");

    if (error->message.len) {
        ngx_http_llm_json_string(out, error->message.data, error->message.len);

    } else {
        ngx_http_llm_json_string(out, row->message, ngx_strlen(row->message));
    }

    ngx_http_llm_out_lit(out, ",\"type\":");
    ngx_http_llm_json_string(out, type, ngx_strlen(type));

    ngx_http_llm_out_lit(out, ",\"param\":");

    if (error->param.len) {
        ngx_http_llm_json_string(out, error->param.data, error->param.len);

    } else {
        ngx_http_llm_out_lit(out, "null");
    }

    ngx_http_llm_out_lit(out, ",\"code\":");

    if (code) {
        ngx_http_llm_json_string(out, code, ngx_strlen(code));

    } else {
        ngx_http_llm_out_lit(out, "null");
    }

    ngx_http_llm_out_lit(out, "}}");
}


/* --- in the place of nginx's error pages --- */


static ngx_int_t
ngx_http_llm_error_headers(ngx_http_request_t *r, ngx_http_llm_error_t *error)
{
    u_char  *p;

    if (error->retry_after) {

        p = ngx_pnalloc(r->pool, NGX_INT_T_LEN + 1);
        if (p == NULL) {
            return NGX_ERROR;
        }

        *ngx_sprintf(p, "%ui", error->retry_after) = '\0';

        if (ngx_http_llm_header_add(r, "Retry-After", (char *) p) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    if (error->no_retry
        && ngx_http_llm_header_add(r, "x-should-retry", "false") != NGX_OK)
    {
        return NGX_ERROR;
    }

    if (error->allow
        && ngx_http_llm_header_add(r, "Allow", error->allow) != NGX_OK)
    {
        return NGX_ERROR;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_error_header_filter(ngx_http_request_t *r)
{
    ngx_http_llm_ctx_t       *ctx;
    ngx_http_llm_error_t     *error;
    ngx_http_llm_loc_conf_t  *llcf;

    llcf = ngx_http_get_module_loc_conf(r, ngx_http_llm_module);

    /* err_status is set when nginx is about to send an error page of its own;
     * `return 403 "text"` and the like do not set it */

    if (llcf->engine == NULL || r != r->main
        || r->err_status < NGX_HTTP_BAD_REQUEST)
    {
        return ngx_http_llm_next_header_filter(r);
    }

    ctx = ngx_http_llm_handler_ctx(r);
    if (ctx == NULL) {
        return NGX_ERROR;
    }

    /* `error_page 503 @other` without "=": an answer under that status */

    if (ctx->answers) {
        return ngx_http_llm_next_header_filter(r);
    }

    error = &ctx->error;

    if (error->status != r->err_status) {

        /* not ours: another module's limit or check */

        ngx_memzero(error, sizeof(ngx_http_llm_error_t));
        error->status = r->err_status;

    } else if (ctx->keepalive) {

        /* nginx closes after 400 or 500; here the body has been read and the
         * connection is in order */

        r->keepalive = 1;
    }

    if (ngx_http_llm_error_headers(r, error) != NGX_OK) {
        return NGX_ERROR;
    }

    ngx_http_llm_out_reset(&ctx->out);
    ngx_http_llm_error_write(&ctx->out, error);

    ctx->replace = 1;

    ngx_str_set(&r->headers_out.content_type, "application/json");
    r->headers_out.content_type_len = r->headers_out.content_type.len;
    r->headers_out.content_type_lowcase = NULL;
    ngx_str_null(&r->headers_out.charset);

    ngx_http_clear_content_length(r);
    r->headers_out.content_length_n = ctx->out.size;

    return ngx_http_llm_next_header_filter(r);
}


static ngx_int_t
ngx_http_llm_error_body_filter(ngx_http_request_t *r, ngx_chain_t *in)
{
    ngx_chain_t         *cl;
    ngx_http_llm_ctx_t  *ctx;

    ctx = ngx_http_get_module_ctx(r, ngx_http_llm_module);

    if (ctx == NULL || !ctx->replace || r != r->main) {
        return ngx_http_llm_next_body_filter(r, in);
    }

    /* the page itself is dropped */

    for (cl = in; cl; cl = cl->next) {
        cl->buf->pos = cl->buf->last;
        cl->buf->file_pos = cl->buf->file_last;
    }

    if (ctx->replaced) {
        return ngx_http_llm_next_body_filter(r, NULL);
    }

    if (in == NULL) {
        return ngx_http_llm_next_body_filter(r, in);
    }

    ctx->replaced = 1;

    if (ctx->out.failed || ctx->out.head == NULL) {
        return NGX_ERROR;
    }

    ctx->out.buf->last_buf = 1;
    ctx->out.buf->last_in_chain = 1;

    return ngx_http_llm_next_body_filter(r, ctx->out.head);
}


ngx_int_t
ngx_http_llm_error_filter_init(ngx_conf_t *cf)
{
    ngx_http_llm_next_header_filter = ngx_http_top_header_filter;
    ngx_http_top_header_filter = ngx_http_llm_error_header_filter;

    ngx_http_llm_next_body_filter = ngx_http_top_body_filter;
    ngx_http_top_body_filter = ngx_http_llm_error_body_filter;

    return NGX_OK;
}
