/*
 * Towards the client: headers, what was written, the end in all its forms.
 */

#include "ngx_module/ngx_http_llm_client.h"
#include "ngx_module/ngx_http_llm_metrics.h"


static void ngx_http_llm_client_release(ngx_http_llm_ctx_t *ctx);


ngx_int_t
ngx_http_llm_client_header(ngx_http_llm_ctx_t *ctx)
{
    ngx_int_t  rc;

    if (!ctx->query.stream || ctx->request->header_sent) {
        return NGX_OK;
    }

    ctx->answers = 1;

    rc = ngx_http_llm_sse_header(ctx->request);

    return (rc == NGX_ERROR || rc > NGX_OK) ? NGX_ERROR : NGX_OK;
}


/* sends what was written; NGX_ERROR: the client is gone */

ngx_int_t
ngx_http_llm_client_flush(ngx_http_llm_ctx_t *ctx)
{
    ngx_connection_t          *c;
    ngx_http_request_t        *r;
    ngx_http_core_loc_conf_t  *clcf;

    r = ctx->request;
    c = r->connection;

    if (ctx->out.head) {

        if (ngx_http_llm_out_send(r, &ctx->out, 0) == NGX_ERROR || c->error) {
            return NGX_ERROR;
        }

        ctx->last_sent = ngx_current_msec;
    }

    ctx->blocked = (c->buffered || r->buffered) ? 1 : 0;

    if (!ctx->blocked) {

        if (c->write->timer_set && !c->write->delayed) {
            ngx_del_timer(c->write);
        }

        return NGX_OK;
    }

    clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    /* not prolonged while the client takes nothing */

    if (!c->write->delayed && !c->write->timer_set) {
        ngx_add_timer(c->write, clcf->send_timeout);
    }

    return ngx_handle_write_event(c->write, clcf->send_lowat);
}


void
ngx_http_llm_client_complete(ngx_http_llm_ctx_t *ctx)
{
    ngx_int_t            rc;
    ngx_http_request_t  *r;

    r = ctx->request;

    if (ctx->api->finish) {
        ngx_http_llm_metrics_request(ctx);
    }

    ctx->api->end(ctx);

    if (ctx->query.stream) {
        ngx_http_llm_sse_done(&ctx->out);
        rc = ngx_http_llm_out_send(r, &ctx->out, 1);

    } else {
        ctx->answers = 1;
        rc = ngx_http_llm_out_respond(r, &ctx->out, "application/json");
    }

    ngx_http_llm_client_finalize(ctx, rc);
}


/* ctx->error says why */

void
ngx_http_llm_client_fail(ngx_http_llm_ctx_t *ctx)
{
    ngx_http_request_t  *r;

    r = ctx->request;

    ngx_http_llm_error_set(&ctx->error, r->pool,
                           NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                           "The server could not answer the request.");

    if (ctx->error.status >= 500) {
        ngx_log_error(NGX_LOG_ERR, r->connection->log, 0, "llm: %V",
                      &ctx->error.message);

    } else {

        /* its message may quote the client: not above debug, and newlines in
         * it must not look like lines of the log */

        ngx_log_error(NGX_LOG_INFO, r->connection->log, 0,
                      "llm: request refused, status %ui, param \"%V\"",
                      ctx->error.status, &ctx->error.param);
    }

    if (!r->header_sent) {
        ngx_http_llm_client_finalize(ctx, ctx->error.status);
        return;
    }

    ngx_http_llm_sse_begin(&ctx->out);
    ngx_http_llm_error_write(&ctx->out, &ctx->error);
    ngx_http_llm_sse_end(&ctx->out);
    ngx_http_llm_sse_done(&ctx->out);

    ngx_http_llm_client_finalize(ctx, ngx_http_llm_out_send(r, &ctx->out, 1));
}


void
ngx_http_llm_client_finalize(ngx_http_llm_ctx_t *ctx, ngx_int_t rc)
{
    ngx_http_request_t  *r;

    r = ctx->request;

    ngx_http_llm_client_release(ctx);

    /* error_page may send the request on to another handler */

    r->read_event_handler = ngx_http_block_reading;

    ngx_http_finalize_request(r, rc);
}


/* lets go of all seats and timers, once */

static void
ngx_http_llm_client_release(ngx_http_llm_ctx_t *ctx)
{
    ngx_uint_t              i;
    ngx_connection_t       *c;
    ngx_http_llm_choice_t  *choice;

    if (ctx->released) {
        return;
    }

    ctx->released = 1;

    for (i = 0; i < ctx->n_choices; i++) {
        choice = &ctx->choices[i];

        if (choice->seat != -1) {
            ngx_http_llm_ring_drop(ctx->ring, choice->seat);
            choice->seat = -1;
        }
    }

    if (ctx->ping.timer_set) {
        ngx_del_timer(&ctx->ping);
    }

    c = ctx->request->connection;

    if (c->read->timer_set) {
        ngx_del_timer(c->read);
    }

    if (c->write->timer_set && !c->write->delayed) {
        ngx_del_timer(c->write);
    }
}


void
ngx_http_llm_client_cleanup(void *data)
{
    ngx_http_llm_client_release(data);
}
