/*
 * The place of a request in the engine's line.  The queue's limit, the tenant
 * and its weight are the operator's alone; the priority is the client's unless
 * llm_priority says otherwise.
 *
 * A variable may hold anything, often because the client sent it, so nothing
 * it holds is an error: what is not a number counts as the default, and the
 * log says so once a worker.
 */

#include "ngx_module/ngx_http_llm_turn.h"

#include <ngx_sha1.h>


#define NGX_HTTP_LLM_SHA1  20


static ngx_int_t ngx_http_llm_turn_tenant(ngx_http_llm_ctx_t *ctx,
    ngx_http_llm_tenant_t *tenant);
static ngx_int_t ngx_http_llm_turn_priority(ngx_http_llm_ctx_t *ctx,
    ngx_http_llm_priority_t *priority);


ngx_int_t
ngx_http_llm_turn(ngx_http_llm_ctx_t *ctx)
{
    llm_turn_t               *turn;
    ngx_http_llm_loc_conf_t  *llcf;

    llcf = ctx->conf;
    turn = &ctx->query.turn;

    turn->max_queue = llcf->queue;
    turn->weight = 1;

    if (llcf->tenant && ngx_http_llm_turn_tenant(ctx, llcf->tenant) != NGX_OK)
    {
        return NGX_ERROR;
    }

    if (llcf->priority) {
        return ngx_http_llm_turn_priority(ctx, llcf->priority);
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_turn_tenant(ngx_http_llm_ctx_t *ctx, ngx_http_llm_tenant_t *tenant)
{
    u_char              *hash;
    ngx_str_t           *name, text;
    ngx_sha1_t           sha1;
    ngx_http_request_t  *r;

    r = ctx->request;
    name = &ctx->query.tenant;

    if (ngx_http_complex_value(r, &tenant->name, name) != NGX_OK) {
        return NGX_ERROR;
    }

    /* cut, two long names could become one tenant */

    if (name->len > LLM_TENANT_MAX) {

        hash = ngx_pnalloc(r->pool, NGX_HTTP_LLM_SHA1);
        if (hash == NULL) {
            return NGX_ERROR;
        }

        ngx_sha1_init(&sha1);
        ngx_sha1_update(&sha1, name->data, name->len);
        ngx_sha1_final(hash, &sha1);

        name->data = hash;
        name->len = NGX_HTTP_LLM_SHA1;
    }

    ctx->query.turn.weight = tenant->number;

    if (tenant->weight == NULL) {
        return NGX_OK;
    }

    if (ngx_http_complex_value(r, tenant->weight, &text) != NGX_OK) {
        return NGX_ERROR;
    }

    if (ngx_http_llm_turn_weight(&text, &ctx->query.turn.weight) != NGX_OK
        && !tenant->warned)
    {
        tenant->warned = 1;

        ngx_log_error(NGX_LOG_WARN, r->connection->log, 0,
                      "llm_tenant: weight \"%V\" is not a number from 0.01 "
                      "to 1000, it counts as 1 (said once)", &text);
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_turn_priority(ngx_http_llm_ctx_t *ctx,
    ngx_http_llm_priority_t *priority)
{
    int32_t             *number;
    ngx_str_t            text;
    ngx_http_request_t  *r;

    r = ctx->request;
    number = &ctx->query.params.priority;

    if (ngx_http_complex_value(r, &priority->value, &text) != NGX_OK) {
        return NGX_ERROR;
    }

    /* whatever the body says */

    *number = 0;

    if (ngx_http_llm_turn_number(&text, number) != NGX_OK
        && text.len && !priority->warned)
    {
        priority->warned = 1;

        ngx_log_error(NGX_LOG_WARN, r->connection->log, 0,
                      "llm_priority: \"%V\" is not an integer of 32 bits, it "
                      "counts as 0 (said once)", &text);
    }

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_turn_weight(ngx_str_t *text, double *weight)
{
    double     w;
    ngx_int_t  n;

    n = ngx_atofp(text->data, text->len, 6);

    if (n == NGX_ERROR) {
        return NGX_ERROR;
    }

    w = n / 1e6;

    if (w < LLM_WEIGHT_MIN || w > LLM_WEIGHT_MAX) {
        return NGX_ERROR;
    }

    *weight = w;

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_turn_number(ngx_str_t *text, int32_t *number)
{
    ngx_int_t   n;
    ngx_uint_t  minus;

    minus = (text->len && text->data[0] == '-') ? 1 : 0;

    n = ngx_atoi(text->data + minus, text->len - minus);

    if (n == NGX_ERROR) {
        return NGX_ERROR;
    }

    if (minus) {
        n = -n;
    }

    if (n < INT32_MIN || n > INT32_MAX) {
        return NGX_ERROR;
    }

    *number = (int32_t) n;

    return NGX_OK;
}
