/*
 * From a request's body to submitted slots: the body becomes JSON, the JSON a
 * query, the query one request area for each prompt and answer.
 */

#include "ngx_module/ngx_http_llm_submit.h"
#include "ngx_module/ngx_http_llm_turn.h"

#include <sys/random.h>


static ngx_int_t ngx_http_llm_submit_body(ngx_http_llm_ctx_t *ctx,
    ngx_str_t *body);
static ngx_int_t ngx_http_llm_submit_parse(ngx_http_llm_ctx_t *ctx,
    ngx_str_t *body);
static ngx_int_t ngx_http_llm_submit_model(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_submit_id(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_submit_choices(ngx_http_llm_ctx_t *ctx);
static ngx_int_t ngx_http_llm_submit_build(ngx_http_llm_choice_t *choice);


static ngx_int_t
ngx_http_llm_submit_nomem(ngx_http_llm_ctx_t *ctx)
{
    ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                           NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                           "out of memory");
    return NGX_ERROR;
}


ngx_int_t
ngx_http_llm_submit_engine(ngx_http_llm_ctx_t *ctx)
{
    char         reason[512];
    ngx_uint_t   state;
    ngx_pool_t  *pool;

    pool = ctx->request->pool;

    state = ctx->ring ? ngx_http_llm_ring_state(ctx->ring)
                      : LLM_ENGINE_ABSENT;

    switch (state) {

    case LLM_ENGINE_READY:
        break;

    case LLM_ENGINE_LOADING:
        ngx_http_llm_error_set(&ctx->error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               NULL, "The model is still being loaded.");
        ctx->error.code = "engine_loading";
        ctx->error.retry_after = 5;
        return NGX_ERROR;

    case LLM_ENGINE_FAILED:
        ngx_cpystrn((u_char *) reason,
                    (u_char *) ctx->ring->shm->header->reason,
                    sizeof(reason));

        /* it will not come up before somebody changes something */

        ngx_http_llm_error_set(&ctx->error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               NULL, "The engine could not start: %s", reason);
        ctx->error.code = "engine_failed";
        ctx->error.no_retry = 1;
        return NGX_ERROR;

    default:
        ngx_http_llm_error_set(&ctx->error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               NULL, "The engine is not running.");
        ctx->error.code = "engine_unavailable";
        ctx->error.retry_after = 1;
        return NGX_ERROR;
    }

    if (ctx->card == NULL) {
        ctx->card = ngx_palloc(pool, sizeof(llm_card_t));
        if (ctx->card == NULL) {
            return ngx_http_llm_submit_nomem(ctx);
        }
    }

    ngx_http_llm_ring_card(ctx->ring, ctx->card);

    ctx->model.data = (u_char *) ctx->card->alias;
    ctx->model.len = ngx_strlen(ctx->card->alias);

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_submit(ngx_http_llm_ctx_t *ctx)
{
    ngx_int_t  rc;
    ngx_str_t  body;

    if (ngx_http_llm_submit_engine(ctx) != NGX_OK
        || ngx_http_llm_submit_body(ctx, &body) != NGX_OK)
    {
        return NGX_ERROR;
    }

    if (ctx->conf->cache_salt
        && ngx_http_complex_value(ctx->request, ctx->conf->cache_salt,
                                  &ctx->query.partition)
           != NGX_OK)
    {
        return ngx_http_llm_submit_nomem(ctx);
    }

    rc = ngx_http_llm_submit_parse(ctx, &body);

    if (rc == NGX_OK && ngx_http_llm_turn(ctx) != NGX_OK) {
        rc = ngx_http_llm_submit_nomem(ctx);
    }

    if (rc == NGX_OK) {
        rc = ngx_http_llm_submit_choices(ctx);
    }

    ngx_http_llm_json_free(&ctx->json);

    return rc;
}


static ngx_int_t
ngx_http_llm_submit_body(ngx_http_llm_ctx_t *ctx, ngx_str_t *body)
{
    off_t                size;
    size_t               len;
    u_char              *p;
    ssize_t              n;
    ngx_buf_t           *b;
    ngx_chain_t         *cl;
    ngx_http_request_t  *r;

    r = ctx->request;

    ngx_str_null(body);

    if (r->request_body == NULL || r->request_body->bufs == NULL) {
        return NGX_OK;
    }

    cl = r->request_body->bufs;

    if (cl->next == NULL && ngx_buf_in_memory(cl->buf)) {
        body->data = cl->buf->pos;
        body->len = cl->buf->last - cl->buf->pos;
        return NGX_OK;
    }

    size = 0;

    for ( /* void */ ; cl; cl = cl->next) {
        size += ngx_buf_size(cl->buf);
    }

    p = ngx_pnalloc(r->pool, size + 1);
    if (p == NULL) {
        return ngx_http_llm_submit_nomem(ctx);
    }

    body->data = p;

    for (cl = r->request_body->bufs; cl; cl = cl->next) {
        b = cl->buf;

        if (ngx_buf_in_memory(b)) {
            p = ngx_cpymem(p, b->pos, b->last - b->pos);
            continue;
        }

        if (!b->in_file) {
            continue;
        }

        len = b->file_last - b->file_pos;

        n = ngx_read_file(b->file, p, len, b->file_pos);

        if (n != (ssize_t) len) {
            ngx_http_llm_error_set(&ctx->error, r->pool,
                                   NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                                   "The request body could not be read.");
            return NGX_ERROR;
        }

        p += len;
    }

    body->len = p - body->data;

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_submit_parse(ngx_http_llm_ctx_t *ctx, ngx_str_t *body)
{
    const char  *why;
    cJSON       *root;

    if (ngx_http_llm_json_parse(ctx->request->pool, body, &ctx->json, &why)
        != NGX_OK)
    {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_BAD_REQUEST, NULL,
                               "We could not parse the JSON body of your "
                               "request: %s.", why);
        return NGX_ERROR;
    }

    root = ctx->json.root;

    if (!cJSON_IsObject(root)) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_BAD_REQUEST, NULL,
                               "The body must be a JSON object.");
        return NGX_ERROR;
    }

    if (ngx_http_llm_submit_model(ctx, root) != NGX_OK
        || ngx_http_llm_submit_id(ctx, root) != NGX_OK
        || ctx->api->parse(ctx, root) != NGX_OK)
    {
        /* without an error recorded memory ran out */
        return ngx_http_llm_submit_nomem(ctx);
    }

    return NGX_OK;
}


/* a missing or empty name means the model there is */

static ngx_int_t
ngx_http_llm_submit_model(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    const cJSON  *model;

    model = ngx_http_llm_json_get(root, "model");

    if (model == NULL) {
        return NGX_OK;
    }

    if (!cJSON_IsString(model)) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_BAD_REQUEST, "model",
                               "model must be a string.");
        return NGX_ERROR;
    }

    if (model->valuestring[0] == '\0'
        || ngx_strcmp(model->valuestring, ctx->card->alias) == 0)
    {
        return NGX_OK;
    }

    ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                           NGX_HTTP_NOT_FOUND, "model",
                           "The model `%s` does not exist.",
                           model->valuestring);
    ctx->error.code = "model_not_found";

    return NGX_ERROR;
}


static ngx_int_t
ngx_http_llm_submit_id(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    size_t        prefix, len;
    u_char       *p, bytes[16];
    ngx_uint_t    i;
    const char   *given;
    const cJSON  *item;

    ctx->created = ngx_time();

    item = ngx_http_llm_json_get(root, "request_id");
    given = cJSON_IsString(item) ? item->valuestring : "";

    len = ngx_strlen(given);

    if (len == 0 || len > 128) {
        given = NULL;
        len = 2 * sizeof(bytes);
    }

    prefix = ngx_strlen(ctx->api->id_prefix);

    p = ngx_pnalloc(ctx->request->pool, prefix + len);
    if (p == NULL) {
        return ngx_http_llm_submit_nomem(ctx);
    }

    ctx->id.data = p;
    ctx->id.len = prefix + len;

    p = ngx_cpymem(p, ctx->api->id_prefix, prefix);

    if (given) {
        ngx_memcpy(p, given, len);
        return NGX_OK;
    }

    if (getrandom(bytes, sizeof(bytes), GRND_NONBLOCK) != sizeof(bytes)) {
        for (i = 0; i < sizeof(bytes); i++) {
            bytes[i] = (u_char) ngx_random();
        }
    }

    ngx_hex_dump(p, bytes, sizeof(bytes));

    return NGX_OK;
}


/* --- choices --- */


static ngx_int_t
ngx_http_llm_submit_choices(ngx_http_llm_ctx_t *ctx)
{
    ngx_uint_t              i, k, n;
    ngx_pool_t             *pool;
    ngx_http_llm_query_t   *query;
    ngx_http_llm_choice_t  *choice;

    pool = ctx->request->pool;
    query = &ctx->query;

    n = ngx_max(query->prompts.nelts, 1) * query->n;

    if (n > NGX_HTTP_LLM_MAX_CHOICES) {
        ngx_http_llm_error_set(&ctx->error, pool, NGX_HTTP_BAD_REQUEST, "n",
                               "prompts times n must not be more than %d.",
                               NGX_HTTP_LLM_MAX_CHOICES);
        return NGX_ERROR;
    }

    if (n > ctx->ring->shm->geo.slots_per_worker) {

        /* however long the client waits */

        ngx_http_llm_error_set(&ctx->error, pool, NGX_HTTP_SERVICE_UNAVAILABLE,
                               "n", "prompts times n are %ui, more than the "
                               "%uD slots of this server.", n,
                               ctx->ring->shm->geo.slots_per_worker);
        ctx->error.code = "engine_busy";
        ctx->error.no_retry = 1;
        return NGX_ERROR;
    }

    ctx->choices = ngx_pcalloc(pool, n * sizeof(ngx_http_llm_choice_t));
    if (ctx->choices == NULL) {
        return ngx_http_llm_submit_nomem(ctx);
    }

    for (i = 0; i < n; i++) {
        choice = &ctx->choices[i];
        choice->ctx = ctx;
        choice->index = i;
        choice->seat = -1;

        ngx_http_llm_out_init(&choice->text, pool, 2048);

        for (k = 0; k < NGX_HTTP_LLM_ARRAYS; k++) {
            ngx_http_llm_out_init(&choice->array[k], pool, 2048);
        }
    }

    ctx->n_choices = n;

    for (i = 0; i < n; i++) {

        ctx->choices[i].seat = ngx_http_llm_ring_take(ctx->ring,
                                                      &ctx->choices[i]);

        if (ctx->choices[i].seat == -1) {
            ngx_http_llm_error_set(&ctx->error, pool,
                                   NGX_HTTP_SERVICE_UNAVAILABLE, NULL,
                                   "The engine is currently busy and cannot "
                                   "accept new requests, try again later.");
            ctx->error.code = "engine_busy";
            ctx->error.retry_after = ngx_http_llm_ring_retry(ctx->ring);
            return NGX_ERROR;
        }

        if (ngx_http_llm_submit_build(&ctx->choices[i]) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}


static void
ngx_http_llm_submit_section(llm_request_writer_t *w, uint32_t section,
    ngx_str_t *data)
{
    if (data->len) {
        llm_request_section(w, section);
        llm_request_add(w, data->data, data->len);
    }
}


/* the length keeps the two apart: a body cannot name another partition */

static void
ngx_http_llm_submit_salt(llm_request_writer_t *w, ngx_http_llm_query_t *query)
{
    uint32_t  len;

    if (query->partition.len == 0 && query->salt.len == 0) {
        return;
    }

    len = query->partition.len;

    llm_request_section(w, LLM_SEC_SALT);
    llm_request_add(w, &len, sizeof(len));
    llm_request_add(w, query->partition.data, query->partition.len);
    llm_request_add(w, query->salt.data, query->salt.len);
}


static ngx_int_t
ngx_http_llm_submit_build(ngx_http_llm_choice_t *choice)
{
    uint8_t                *area;
    uint32_t                cap, len, kind;
    ngx_uint_t              i;
    llm_turn_t              turn;
    llm_params_t            params;
    ngx_http_llm_ctx_t     *ctx;
    llm_request_writer_t    w;
    ngx_http_llm_query_t   *query;
    ngx_http_llm_prompt_t  *prompt;

    ctx = choice->ctx;
    query = &ctx->query;
    kind = query->kind;
    prompt = NULL;

    if (query->prompts.nelts) {
        prompt = query->prompts.elts;
        prompt += choice->index / query->n;
        kind = prompt->kind;
    }

    /* several answers to one prompt differ by their seeds */

    params = query->params;
    params.seed += choice->index % query->n;

    area = ngx_http_llm_ring_area(ctx->ring, choice->seat, &cap);

    llm_request_begin(&w, area, cap, kind, query->flags, &params);

    /* they are submitted in a row: the first one speaks for all */

    turn = query->turn;
    turn.n_choices = (choice->index == 0) ? ctx->n_choices : 0;

    llm_request_turn(&w, &turn);

    if (prompt) {
        llm_request_section(&w, LLM_SEC_PROMPT);
        llm_request_add(&w, prompt->data.data, prompt->data.len);
    }

    ngx_http_llm_submit_section(&w, LLM_SEC_MESSAGES, &query->messages);
    ngx_http_llm_submit_section(&w, LLM_SEC_TOOLS, &query->tools);
    ngx_http_llm_submit_section(&w, LLM_SEC_KWARGS, &query->kwargs);

    if (query->n_stops) {
        llm_request_section(&w, LLM_SEC_STOP);

        for (i = 0; i < query->n_stops; i++) {
            len = query->stops[i].len;
            llm_request_add(&w, &len, sizeof(len));
            llm_request_add(&w, query->stops[i].data, len);
        }
    }

    ngx_http_llm_submit_section(&w, LLM_SEC_STOP_TOKENS, &query->stop_tokens);
    ngx_http_llm_submit_section(&w, LLM_SEC_LOGIT_BIAS, &query->bias);
    ngx_http_llm_submit_salt(&w, query);
    ngx_http_llm_submit_section(&w, LLM_SEC_TENANT, &query->tenant);

    choice->request_len = llm_request_end(&w);

    if (choice->request_len == 0) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_REQUEST_ENTITY_TOO_LARGE, NULL,
                               "The request is too large: a prompt with its "
                               "parameters may have %uD bytes.", cap);
        ctx->error.code = "request_too_large";
        return NGX_ERROR;
    }

    return NGX_OK;
}
