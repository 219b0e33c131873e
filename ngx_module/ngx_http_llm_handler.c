/*
 * The life of a request.
 *
 *   handler   endpoint, method, body
 *   submit    ngx_http_llm_submit.c
 *   pump      records of a choice → endpoint hooks → output
 *   complete / fail / client gone → release: every seat is let go
 *
 * Headers are withheld until the first delta, or a keep-alive comment, so that
 * a failure before it still has a status of its own.  A client that does not
 * read stops the pump; the engine then parks its sequence.
 */

#include "ngx_module/ngx_http_llm_handler.h"
#include "ngx_module/ngx_http_llm_client.h"
#include "ngx_module/ngx_http_llm_submit.h"


/* written at most before it is sent */
#define NGX_HTTP_LLM_BURST  65536


static void ngx_http_llm_body_handler(ngx_http_request_t *r);
static void ngx_http_llm_wait(ngx_http_llm_ctx_t *ctx);
static ngx_int_t ngx_http_llm_pump(ngx_http_llm_choice_t *choice);
static ngx_int_t ngx_http_llm_records(ngx_http_llm_choice_t *choice);
static ngx_int_t ngx_http_llm_record(ngx_http_llm_choice_t *choice,
    llm_record_t *record);
static ngx_int_t ngx_http_llm_start(ngx_http_llm_choice_t *choice,
    llm_start_t *start);
static void ngx_http_llm_read_handler(ngx_http_request_t *r);
static void ngx_http_llm_write_handler(ngx_http_request_t *r);
static void ngx_http_llm_ping_handler(ngx_event_t *ev);


ngx_int_t
ngx_http_llm_handler(ngx_http_request_t *r)
{
    ngx_int_t                  rc;
    ngx_http_llm_ctx_t        *ctx;
    ngx_http_llm_loc_conf_t   *llcf;
    const ngx_http_llm_api_t  *api;

    /* events and timers of a subrequest's connection belong to the main one */

    if (r != r->main) {
        return NGX_DECLINED;
    }

    ctx = ngx_http_llm_handler_ctx(r);
    if (ctx == NULL) {
        return NGX_HTTP_INTERNAL_SERVER_ERROR;
    }

    llcf = ngx_http_get_module_loc_conf(r, ngx_http_llm_module);

    ctx->conf = llcf;
    ctx->ring = ngx_http_llm_ring_pick(llcf->engine);

    api = ngx_http_llm_api_find(&r->uri, &ctx->name);

    if (api == NULL) {
        ngx_http_llm_error_set(&ctx->error, r->pool, NGX_HTTP_NOT_FOUND, NULL,
                               "There is no endpoint %V.", &r->uri);
        ctx->error.code = "not_found";
        return NGX_HTTP_NOT_FOUND;
    }

    if (!(r->method & api->methods)) {
        ngx_http_llm_error_set(&ctx->error, r->pool, NGX_HTTP_NOT_ALLOWED,
                               NULL, "The method %V is not allowed for %V.",
                               &r->method_name, &r->uri);
        ctx->error.code = "method_not_allowed";
        ctx->error.allow = api->allow;
        return NGX_HTTP_NOT_ALLOWED;
    }

    ctx->api = api;

    /* without an engine the body need not be read at all */

    if (!api->offline && ngx_http_llm_submit_engine(ctx) != NGX_OK) {
        return ctx->error.status;
    }

    if (api->answer) {
        rc = ngx_http_discard_request_body(r);

        return (rc == NGX_OK) ? api->answer(ctx) : rc;
    }

    r->request_body_in_single_buf = 1;

    rc = ngx_http_read_client_request_body(r, ngx_http_llm_body_handler);

    return (rc >= NGX_HTTP_SPECIAL_RESPONSE) ? rc : NGX_DONE;
}


ngx_http_llm_ctx_t *
ngx_http_llm_handler_ctx(ngx_http_request_t *r)
{
    ngx_http_llm_ctx_t  *ctx;

    ctx = ngx_http_get_module_ctx(r, ngx_http_llm_module);

    if (ctx) {
        return ctx;
    }

    ctx = ngx_pcalloc(r->pool, sizeof(ngx_http_llm_ctx_t));
    if (ctx == NULL) {
        return NULL;
    }

    ctx->request = r;
    ctx->query.n = 1;

    ngx_http_llm_out_init(&ctx->out, r->pool, 4096);

    ngx_http_set_ctx(r, ctx, ngx_http_llm_module);

    return ctx;
}


static void
ngx_http_llm_body_handler(ngx_http_request_t *r)
{
    ngx_uint_t           i;
    ngx_http_cleanup_t  *cln;
    ngx_http_llm_ctx_t  *ctx;

    ctx = ngx_http_get_module_ctx(r, ngx_http_llm_module);

    ctx->keepalive = r->keepalive;

    /* reading may have taken long */
    ctx->ring = ngx_http_llm_ring_pick(ctx->conf->engine);

    cln = ngx_http_cleanup_add(r, 0);
    if (cln == NULL) {
        ngx_http_finalize_request(r, NGX_HTTP_INTERNAL_SERVER_ERROR);
        return;
    }

    cln->handler = ngx_http_llm_client_cleanup;
    cln->data = ctx;

    if (ngx_http_llm_submit(ctx) != NGX_OK) {
        ngx_http_llm_client_fail(ctx);
        return;
    }

    for (i = 0; i < ctx->n_choices; i++) {

        if (ngx_http_llm_ring_submit(ctx->ring, ctx->choices[i].seat,
                                     ctx->choices[i].request_len)
            != NGX_OK)
        {
            ngx_http_llm_error_set(&ctx->error, r->pool,
                                   NGX_HTTP_SERVICE_UNAVAILABLE, NULL,
                                   "The engine is not running.");
            ctx->error.code = "engine_unavailable";
            ctx->error.retry_after = 1;
            ngx_http_llm_client_fail(ctx);
            return;
        }
    }

    ngx_http_llm_wait(ctx);
}


static void
ngx_http_llm_wait(ngx_http_llm_ctx_t *ctx)
{
    ngx_connection_t    *c;
    ngx_http_request_t  *r;

    r = ctx->request;
    c = r->connection;

    r->read_event_handler = ngx_http_llm_read_handler;
    r->write_event_handler = ngx_http_llm_write_handler;

    /* always one timer that a graceful exit waits for */

    ngx_add_timer(c->read, ctx->conf->timeout);

    if (ctx->query.stream && ctx->conf->keepalive) {
        ctx->last_sent = ngx_current_msec;
        ctx->ping.handler = ngx_http_llm_ping_handler;
        ctx->ping.data = ctx;
        ctx->ping.log = c->log;

        ngx_add_timer(&ctx->ping, ctx->conf->keepalive);
    }

    /* a client that closed while the body was read causes no new event */

    if (c->read->pending_eof) {
        ngx_post_event(c->read, &ngx_posted_events);
    }
}


/* --- from the ring --- */


void
ngx_http_llm_handler_ready(ngx_http_llm_choice_t *choice)
{
    ngx_connection_t    *c;
    ngx_http_request_t  *r;

    r = choice->ctx->request;
    c = r->connection;

    if (choice->ctx->blocked) {
        choice->pending = 1;
        return;
    }

    ngx_http_set_log_request(c->log, r);

    (void) ngx_http_llm_pump(choice);

    ngx_http_run_posted_requests(c);
}


void
ngx_http_llm_handler_lost(ngx_http_llm_choice_t *choice)
{
    ngx_connection_t    *c;
    ngx_http_request_t  *r;
    ngx_http_llm_ctx_t  *ctx;

    ctx = choice->ctx;
    r = ctx->request;
    c = r->connection;

    ngx_http_set_log_request(c->log, r);

    ngx_http_llm_error_set(&ctx->error, r->pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                           NULL, "The engine stopped while it worked on this "
                           "request.");
    ctx->error.code = "engine_unavailable";
    ctx->error.retry_after = 1;

    ngx_http_llm_client_fail(ctx);

    ngx_http_run_posted_requests(c);
}


/* reads and sends until there is nothing more, or the client is slow; NGX_DONE
 * when the request was finalized and must not be touched */

static ngx_int_t
ngx_http_llm_pump(ngx_http_llm_choice_t *choice)
{
    ngx_int_t            rc;
    ngx_http_llm_ctx_t  *ctx;

    ctx = choice->ctx;

    do {
        choice->pending = 0;

        rc = ngx_http_llm_records(choice);

        if (rc != NGX_OK) {
            ngx_http_llm_client_fail(ctx);
            return NGX_DONE;
        }

        if (ctx->n_done == ctx->n_choices) {
            ngx_http_llm_client_complete(ctx);
            return NGX_DONE;
        }

        if (ngx_http_llm_client_flush(ctx) != NGX_OK) {
            ngx_http_llm_client_finalize(ctx, NGX_ERROR);
            return NGX_DONE;
        }

        ngx_add_timer(ctx->request->connection->read, ctx->conf->timeout);

    } while (choice->pending && !ctx->blocked);

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_records(ngx_http_llm_choice_t *choice)
{
    ngx_int_t            rc;
    llm_record_t         record;
    ngx_http_llm_ctx_t  *ctx;

    ctx = choice->ctx;

    while (!choice->done) {

        if (ctx->out.size > NGX_HTTP_LLM_BURST) {
            choice->pending = 1;
            break;
        }

        rc = ngx_http_llm_ring_read(ctx->ring, choice->seat, &record);

        if (rc == NGX_AGAIN) {
            break;
        }

        if (rc == NGX_OK) {
            rc = ngx_http_llm_record(choice, &record);
        }

        if (rc != NGX_OK) {
            return NGX_ERROR;
        }
    }

    if (choice->seat != -1) {
        ngx_http_llm_ring_space(ctx->ring, choice->seat);
    }

    return ctx->out.failed ? NGX_ERROR : NGX_OK;
}


static ngx_int_t
ngx_http_llm_record(ngx_http_llm_choice_t *choice, llm_record_t *record)
{
    ngx_http_llm_ctx_t  *ctx;

    ctx = choice->ctx;

    switch (record->type) {

    case LLM_REC_START:
        return ngx_http_llm_start(choice, &record->u.start);

    case LLM_REC_DELTA:

        if (ngx_http_llm_client_header(ctx) != NGX_OK) {
            return NGX_ERROR;
        }

        choice->tokens += record->u.delta.n_tokens;
        ctx->api->delta(choice, &record->u.delta);

        return NGX_OK;

    case LLM_REC_DONE:

        if (ngx_http_llm_client_header(ctx) != NGX_OK) {
            return NGX_ERROR;
        }

        choice->done = 1;
        choice->result = record->u.done;
        choice->prompt_tokens = record->u.done.prompt_tokens;
        choice->cached_tokens = record->u.done.cached_tokens;
        choice->tokens = record->u.done.completion_tokens;
        ctx->n_done++;

        if (ctx->query.stream) {
            ctx->api->finish(choice);
        }

        /* /tokenize reads the slot's log at the end, and has one slot */

        if (ctx->api->finish) {
            ngx_http_llm_ring_drop(ctx->ring, choice->seat);
            choice->seat = -1;
        }

        return NGX_OK;

    default: /* LLM_REC_ERROR */

        ngx_http_llm_error_fail(&ctx->error, ctx->request->pool,
                                &record->u.fail);
        return NGX_ERROR;
    }
}


static ngx_int_t
ngx_http_llm_start(ngx_http_llm_choice_t *choice, llm_start_t *start)
{
    int32_t              wanted;
    ngx_http_llm_ctx_t  *ctx;

    ctx = choice->ctx;

    choice->prompt_tokens = start->prompt_tokens;
    choice->cached_tokens = start->cached_tokens;

    wanted = ctx->query.params.max_tokens;

    if (!ctx->conf->strict_context || wanted <= 0
        || start->max_tokens >= (uint32_t) wanted)
    {
        return NGX_OK;
    }

    ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                           NGX_HTTP_BAD_REQUEST, "max_tokens",
                           "This model's maximum context length is %uD "
                           "tokens. However, you requested %uL tokens (%uD in "
                           "the prompt, %D in the completion). Please reduce "
                           "the length of the prompt or of the completion.",
                           ctx->card->max_model_len,
                           (uint64_t) start->prompt_tokens + wanted,
                           start->prompt_tokens, wanted);
    ctx->error.code = "context_length_exceeded";

    return NGX_ERROR;
}


/* --- events of the connection --- */


static void
ngx_http_llm_read_handler(ngx_http_request_t *r)
{
    ngx_connection_t    *c;
    ngx_http_llm_ctx_t  *ctx;

    c = r->connection;
    ctx = ngx_http_get_module_ctx(r, ngx_http_llm_module);

    if (!c->read->timedout) {
        ngx_http_test_reading(r);
        return;
    }

    c->read->timedout = 0;

    if (ctx->blocked) {

        /* not the engine is slow; send_timeout watches the client */

        ngx_add_timer(c->read, ctx->conf->timeout);
        return;
    }

    ngx_http_llm_error_set(&ctx->error, r->pool, NGX_HTTP_GATEWAY_TIME_OUT,
                           NULL, "The engine did not answer in time.");
    ctx->error.code = "timeout";

    ngx_http_llm_client_fail(ctx);
}


static void
ngx_http_llm_write_handler(ngx_http_request_t *r)
{
    ngx_uint_t                 i;
    ngx_event_t               *wev;
    ngx_http_llm_ctx_t        *ctx;
    ngx_http_core_loc_conf_t  *clcf;

    wev = r->connection->write;
    ctx = ngx_http_get_module_ctx(r, ngx_http_llm_module);

    if (wev->timedout) {
        ngx_log_error(NGX_LOG_INFO, r->connection->log, NGX_ETIMEDOUT,
                      "client timed out");
        r->connection->timedout = 1;

        ngx_http_llm_client_finalize(ctx, NGX_HTTP_REQUEST_TIME_OUT);
        return;
    }

    if (!ctx->blocked) {
        return;
    }

    clcf = ngx_http_get_module_loc_conf(r, ngx_http_core_module);

    if (wev->delayed) {
        if (ngx_handle_write_event(wev, clcf->send_lowat) != NGX_OK) {
            ngx_http_llm_client_finalize(ctx, NGX_ERROR);
        }

        return;
    }

    if (ngx_http_output_filter(r, NULL) == NGX_ERROR) {
        ngx_http_llm_client_finalize(ctx, NGX_ERROR);
        return;
    }

    /* some of it was taken: a new term begins */

    if (wev->timer_set && !wev->delayed) {
        ngx_del_timer(wev);
    }

    if (ngx_http_llm_client_flush(ctx) != NGX_OK) {
        ngx_http_llm_client_finalize(ctx, NGX_ERROR);
        return;
    }

    for (i = 0; i < ctx->n_choices && !ctx->blocked; i++) {

        if (ctx->choices[i].pending
            && ngx_http_llm_pump(&ctx->choices[i]) == NGX_DONE)
        {
            return;
        }
    }
}


static void
ngx_http_llm_ping_handler(ngx_event_t *ev)
{
    ngx_msec_t           quiet, term;
    ngx_connection_t    *c;
    ngx_http_request_t  *r;
    ngx_http_llm_ctx_t  *ctx;

    ctx = ev->data;
    r = ctx->request;
    c = r->connection;
    term = ctx->conf->keepalive;

    ngx_http_set_log_request(c->log, r);

    quiet = ngx_current_msec - ctx->last_sent;

    if (ctx->blocked || quiet < term) {
        ngx_add_timer(ev, ctx->blocked ? term : term - quiet);
        return;
    }

    if (ngx_http_llm_client_header(ctx) != NGX_OK) {
        ngx_http_llm_client_finalize(ctx, NGX_ERROR);
        ngx_http_run_posted_requests(c);
        return;
    }

    ngx_http_llm_sse_comment(&ctx->out);

    if (ngx_http_llm_client_flush(ctx) != NGX_OK) {
        ngx_http_llm_client_finalize(ctx, NGX_ERROR);

    } else {
        ngx_add_timer(ev, term);
    }

    ngx_http_run_posted_requests(c);
}
