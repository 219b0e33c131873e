/*
 * Output chains and server-sent events.
 *
 * A writer appends to buffers of one size.  What was sent waits in `busy`
 * until the client has taken it and then serves again, so that a stream needs
 * a handful of buffers however long it is.
 */

#include "ngx_module/ngx_http_llm_sse.h"

#include <math.h>


static ngx_int_t ngx_http_llm_out_buf(ngx_http_llm_out_t *out);


void
ngx_http_llm_out_init(ngx_http_llm_out_t *out, ngx_pool_t *pool, size_t chunk)
{
    ngx_memzero(out, sizeof(ngx_http_llm_out_t));

    out->pool = pool;
    out->chunk = chunk;
    out->tail = &out->head;
}


static ngx_int_t
ngx_http_llm_out_buf(ngx_http_llm_out_t *out)
{
    ngx_buf_t    *b;
    ngx_chain_t  *cl;

    cl = ngx_chain_get_free_buf(out->pool, &out->free);
    if (cl == NULL) {
        return NGX_ERROR;
    }

    b = cl->buf;

    if (b->start == NULL) {
        b->start = ngx_palloc(out->pool, out->chunk);
        if (b->start == NULL) {
            return NGX_ERROR;
        }

        b->end = b->start + out->chunk;
    }

    b->pos = b->start;
    b->last = b->start;
    b->temporary = 1;
    b->flush = 0;
    b->last_buf = 0;
    b->last_in_chain = 0;
    b->tag = (ngx_buf_tag_t) &ngx_http_llm_module;

    *out->tail = cl;
    out->tail = &cl->next;
    out->buf = b;

    return NGX_OK;
}


void
ngx_http_llm_out_write(ngx_http_llm_out_t *out, const void *data, size_t len)
{
    size_t         n;
    const u_char  *p;

    for (p = data; len; len -= n) {

        if (out->failed) {
            return;
        }

        if ((out->buf == NULL || out->buf->last == out->buf->end)
            && ngx_http_llm_out_buf(out) != NGX_OK)
        {
            out->failed = 1;
            return;
        }

        n = ngx_min(len, (size_t) (out->buf->end - out->buf->last));

        out->buf->last = ngx_cpymem(out->buf->last, p, n);
        out->size += n;
        p += n;
    }
}


void
ngx_http_llm_out_str(ngx_http_llm_out_t *out, const ngx_str_t *text)
{
    ngx_http_llm_out_write(out, text->data, text->len);
}


void
ngx_http_llm_out_uint(ngx_http_llm_out_t *out, uint64_t n)
{
    u_char  text[NGX_INT64_LEN + 1];

    ngx_http_llm_out_write(out, text, ngx_sprintf(text, "%uL", n) - text);
}


void
ngx_http_llm_out_int(ngx_http_llm_out_t *out, int64_t n)
{
    u_char  text[NGX_INT64_LEN + 1];

    ngx_http_llm_out_write(out, text, ngx_sprintf(text, "%L", n) - text);
}


void
ngx_http_llm_out_double(ngx_http_llm_out_t *out, double value)
{
    int   n;
    char  text[40];

    /* nine digits give a float back exactly */

    n = snprintf(text, sizeof(text), "%.9g", isfinite(value) ? value : 0.0);

    ngx_http_llm_out_write(out, text, n);
}


void
ngx_http_llm_out_splice(ngx_http_llm_out_t *out, ngx_http_llm_out_t *src)
{
    if (src->failed) {
        out->failed = 1;
    }

    if (src->head == NULL) {
        return;
    }

    *out->tail = src->head;
    out->tail = src->tail;
    out->size += src->size;

    /* the rest of src's last buffer is written on, if it has room */
    out->buf = src->buf;

    src->head = NULL;
    src->tail = &src->head;
    src->buf = NULL;
    src->size = 0;
}


void
ngx_http_llm_out_reset(ngx_http_llm_out_t *out)
{
    *out->tail = out->free;
    out->free = out->head;

    out->head = NULL;
    out->tail = &out->head;
    out->buf = NULL;
    out->size = 0;
}


ngx_int_t
ngx_http_llm_out_send(ngx_http_request_t *r, ngx_http_llm_out_t *out,
    ngx_uint_t last)
{
    ngx_int_t     rc;
    ngx_chain_t  *cl;

    if (out->failed) {
        return NGX_ERROR;
    }

    if (out->head == NULL) {

        if (!last) {
            return NGX_OK;
        }

        if (ngx_http_llm_out_buf(out) != NGX_OK) {
            return NGX_ERROR;
        }

        /* an empty buffer may carry flags only when it holds no memory */
        out->buf->temporary = 0;
    }

    *out->tail = NULL;

    out->buf->flush = 1;
    out->buf->last_buf = last ? 1 : 0;
    out->buf->last_in_chain = 1;

    cl = out->head;

    rc = ngx_http_output_filter(r, cl);

    ngx_chain_update_chains(r->pool, &out->free, &out->busy, &cl,
                            (ngx_buf_tag_t) &ngx_http_llm_module);

    out->head = NULL;
    out->tail = &out->head;
    out->buf = NULL;
    out->size = 0;

    return rc;
}


ngx_int_t
ngx_http_llm_header_add(ngx_http_request_t *r, const char *key,
    const char *value)
{
    ngx_table_elt_t  *h;

    h = ngx_list_push(&r->headers_out.headers);
    if (h == NULL) {
        return NGX_ERROR;
    }

    /* by name: newer versions have more members than older ones */

    ngx_memzero(h, sizeof(ngx_table_elt_t));

    h->hash = 1;
    h->key.len = ngx_strlen(key);
    h->key.data = (u_char *) key;
    h->value.len = ngx_strlen(value);
    h->value.data = (u_char *) value;

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_out_respond(ngx_http_request_t *r, ngx_http_llm_out_t *out,
    const char *content_type)
{
    ngx_int_t  rc;

    if (out->failed) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    r->headers_out.status = NGX_HTTP_OK;
    r->headers_out.content_length_n = out->size;
    r->headers_out.content_type.len = ngx_strlen(content_type);
    r->headers_out.content_type.data = (u_char *) content_type;
    r->headers_out.content_type_len = r->headers_out.content_type.len;

    rc = ngx_http_send_header(r);

    if (rc == NGX_ERROR || rc > NGX_OK || r->header_only) {
        return rc;
    }

    return ngx_http_llm_out_send(r, out, 1);
}


ngx_int_t
ngx_http_llm_sse_header(ngx_http_request_t *r)
{
    ngx_http_core_loc_conf_t  *clcf;

    /* small packets must not wait for the client's acknowledgement */

    clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    if (clcf->tcp_nodelay && ngx_tcp_nodelay(r->connection) != NGX_OK) {
        return NGX_ERROR;
    }

    r->headers_out.status = NGX_HTTP_OK;

    /* the length leaves the charset out: gzip_types and the like compare it */

    ngx_str_set(&r->headers_out.content_type,
                "text/event-stream; charset=utf-8");
    r->headers_out.content_type_len = sizeof("text/event-stream") - 1;

    ngx_http_clear_content_length(r);
    ngx_http_clear_accept_ranges(r);

    /* the second keeps another nginx in front from buffering */

    if (ngx_http_llm_header_add(r, "Cache-Control", "no-cache") != NGX_OK
        || ngx_http_llm_header_add(r, "X-Accel-Buffering", "no") != NGX_OK)
    {
        return NGX_ERROR;
    }

    return ngx_http_send_header(r);
}


void
ngx_http_llm_sse_begin(ngx_http_llm_out_t *out)
{
    ngx_http_llm_out_lit(out, "data: ");
}


void
ngx_http_llm_sse_end(ngx_http_llm_out_t *out)
{
    ngx_http_llm_out_lit(out, "\n\n");
}


void
ngx_http_llm_sse_comment(ngx_http_llm_out_t *out)
{
    ngx_http_llm_out_lit(out, ": keep-alive\n\n");
}


void
ngx_http_llm_sse_done(ngx_http_llm_out_t *out)
{
    ngx_http_llm_out_lit(out, "data: [DONE]\n\n");
}
