/*
 * What can be told without asking the engine: the model it serves, and
 * whether it is well.
 */

#include "ngx_module/ngx_http_llm_models.h"


/* one turn of the engine, a large prefill on a slow machine included, is
 * shorter than this (ns) */
#define NGX_HTTP_LLM_TURN_MAX  120000000000ULL


static void ngx_http_llm_models_card(ngx_http_llm_ctx_t *ctx);


ngx_int_t
ngx_http_llm_models_list(ngx_http_llm_ctx_t *ctx)
{
    ngx_http_llm_out_lit(&ctx->out, "{\"object\":\"list\",\"data\":[");
    ngx_http_llm_models_card(ctx);
    ngx_http_llm_out_lit(&ctx->out, "]}");

    return ngx_http_llm_out_respond(ctx->request, &ctx->out,
                                    "application/json");
}


ngx_int_t
ngx_http_llm_models_one(ngx_http_llm_ctx_t *ctx)
{
    if (ctx->name.len != ctx->model.len
        || ngx_memcmp(ctx->name.data, ctx->model.data, ctx->name.len) != 0)
    {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_NOT_FOUND, "model",
                               "The model `%V` does not exist.", &ctx->name);
        ctx->error.code = "model_not_found";

        return NGX_HTTP_NOT_FOUND;
    }

    ngx_http_llm_models_card(ctx);

    return ngx_http_llm_out_respond(ctx->request, &ctx->out,
                                    "application/json");
}


static void
ngx_http_llm_models_card(ngx_http_llm_ctx_t *ctx)
{
    llm_card_t          *card;
    ngx_http_llm_out_t  *out;

    out = &ctx->out;
    card = ctx->card;

    ngx_http_llm_out_lit(out, "{\"id\":");
    ngx_http_llm_json_string(out, card->alias, ngx_strlen(card->alias));
    ngx_http_llm_out_lit(out, ",\"object\":\"model\",\"created\":");
    ngx_http_llm_out_uint(out, card->created);
    ngx_http_llm_out_lit(out, ",\"owned_by\":\"nginx\",\"root\":");
    ngx_http_llm_json_string(out, card->root, ngx_strlen(card->root));
    ngx_http_llm_out_lit(out, ",\"parent\":null,\"max_model_len\":");
    ngx_http_llm_out_uint(out, card->max_model_len);
    ngx_http_llm_out_lit(out, ",\"permission\":[]}");
}


ngx_int_t
ngx_http_llm_models_health(ngx_http_llm_ctx_t *ctx)
{
    uint64_t          now, beat;
    llm_header_t     *header;
    struct timespec   ts;

    /* not READY was answered with 503 already */

    header = ctx->ring->shm->header;

    clock_gettime(CLOCK_MONOTONIC, &ts);

    now = (uint64_t) ts.tv_sec * 1000000000 + ts.tv_nsec;
    beat = atomic_load(&header->heartbeat_ns);

    /* an idle engine sleeps and has no beat */

    if (!atomic_load(&header->idle) && now > beat
        && now - beat > NGX_HTTP_LLM_TURN_MAX)
    {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_SERVICE_UNAVAILABLE, NULL,
                               "The engine has not moved for %uL seconds.",
                               (now - beat) / 1000000000);
        ctx->error.code = "engine_stalled";

        return NGX_HTTP_SERVICE_UNAVAILABLE;
    }

    ngx_http_llm_out_lit(&ctx->out, "{\"status\":\"ok\"}");

    return ngx_http_llm_out_respond(ctx->request, &ctx->out,
                                    "application/json");
}


ngx_int_t
ngx_http_llm_models_version(ngx_http_llm_ctx_t *ctx)
{
    ngx_http_llm_out_lit(&ctx->out, "{\"version\":\"" NGX_HTTP_LLM_VERSION
                                    "\"}");

    return ngx_http_llm_out_respond(ctx->request, &ctx->out,
                                    "application/json");
}
