/*
 * Request bytes → queue: the loop's part.
 *
 * A request is copied out of the shared segment first and looked at only in
 * the copy.  Everything that can be wrong with it is found before it costs a
 * page or a step: what is quickly seen at once, the rest by prepare.c, on the
 * intake thread where there is one.
 */

#include "engine/intake.h"

#include <string.h>

#include "engine/emit.h"
#include "engine/intake_thread.h"
#include "engine/prepare.h"

enum {
    ARENA_BYTES = 4096,
    FAIL_BYTES = 1024, /* an ERROR record always has room */
};

_Static_assert(FAIL_BYTES >= sizeof(llm_fail_t) + 64, "any ERROR record");


/* Nobody's requests belong to the nameless tenant. */
static int
set_tenant(engine_t *engine, request_t *req, llm_err_t *err)
{
    uint32_t len;
    const void *name = request_section(req, LLM_SEC_TENANT, &len);

    if (len == 0) {
        return LLM_OK;
    }

    req->seq.tenant =
        sched_tenant(engine->sched, name, len, req->msg->turn.weight);

    return req->seq.tenant != NULL
               ? LLM_OK
               : llm_err_set(err, LLM_NOMEM, NULL, "no memory");
}


/* Is there a place in the queue?  All slots of a client's request fare alike:
 * the first decides for those that its worker submits behind it.  With nobody
 * waiting even more answers than the queue has places may come in, or such a
 * request never could. */
static bool
intake_admits(engine_t *engine, const request_t *req)
{
    const llm_turn_t *turn = &req->msg->turn;
    const uint64_t waiting = (uint64_t) engine->n_fresh;
    bool *refused = &engine->refused[req->from.worker];

    if (turn->n_choices > 0) {
        *refused = turn->max_queue > 0 && waiting > 0
                   && waiting + turn->n_choices > turn->max_queue;

        if (*refused) {
            llm_stats_add(&engine->stats->rejected, 1);
        }
    }

    return !*refused;
}


static uint32_t
fail_class(int code)
{
    switch (code) {
    case LLM_BADREQ:
        return LLM_FAIL_BADREQ;
    case LLM_LIMIT:
        return LLM_FAIL_CONTEXT;
    case LLM_NOMEM:
    case LLM_AGAIN:
        return LLM_FAIL_BUSY;
    default:
        return LLM_FAIL_INTERNAL;
    }
}


static void
fail(engine_t *engine, request_t *req)
{
    const llm_err_t *err = &req->err;

    emit_fail(engine, req, fail_class(err->code), err->param,
              err->code == LLM_NOMEM ? "The server has no memory for this "
                                       "request."
                                     : err->text);
}


/* Is it a request at all, and is there a place for it? */
static int
check(engine_t *engine, request_t *req, uint32_t len)
{
    const char *why;
    const llm_request_t *checked;

    if (llm_request_decode((const uint8_t *) req->msg, len, &checked, &why)
        != 0) {
        return llm_err_set(&req->err, LLM_BADREQ, NULL, "%s", why);
    }

    req->textual = req->msg->kind == LLM_REQ_TOKENIZE
                   || req->msg->kind == LLM_REQ_TOKENIZE_CHAT
                   || req->msg->kind == LLM_REQ_DETOKENIZE;

    if (req->textual) {
        return LLM_OK;
    }

    if (!intake_admits(engine, req)) {
        return llm_err_set(&req->err, LLM_AGAIN, NULL,
                           "The engine has %d requests waiting and takes no "
                           "more at present, try again later.",
                           engine->n_fresh);
    }

    req->fresh = true;
    engine->n_fresh++;

    return LLM_OK;
}


/* A request with a private copy of its bytes, linked; NULL: no memory. */
static request_t *
request_create(engine_t *engine, const uint8_t *area, uint32_t len,
               const request_origin_t *from)
{
    arena_t *arena = arena_create(len + ARENA_BYTES);
    request_t *req = arena ? arena_calloc(arena, sizeof(request_t)) : NULL;
    llm_request_t *msg = req ? arena_alloc(arena, len + sizeof(*msg)) : NULL;

    if (msg == NULL || buf_room(&req->out, FAIL_BYTES) == NULL) {
        arena_destroy(arena);
        return NULL;
    }

    llm_assert(from->worker < LLM_MAX_WORKERS);
    memcpy(msg, area, len);

    req->arena = arena;
    req->msg = msg;
    req->from = *from;
    list_push_back(&engine->requests, &req->link);

    return req;
}


/* What prepare.c made of it: an answer at once, or a place in the queue. */
static int
enter(engine_t *engine, request_t *req)
{
    if (req->textual) {
        /* tokenize: the ids go into the slot's token log, detokenize: the
         * text goes out behind START */
        if (engine->on_tokens != NULL) {
            engine->on_tokens(engine, req, req->seq.tokens, req->seq.n_tokens);
        }

        req->n_output = req->seq.n_tokens;
        emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_NONE, 0);
        return LLM_OK;
    }

    if (req->max_tokens == 0 && !req->seq.want_prompt) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return LLM_OK;
    }

    const int rc = set_tenant(engine, req, &req->err);

    if (rc == LLM_OK) {
        sched_add(engine->sched, &req->seq);
        req->queued = true;
    }

    return rc;
}


static void
enter_or_fail(engine_t *engine, request_t *req)
{
    if (req->err.code == LLM_OK) {
        req->err.code = enter(engine, req);
    }

    if (req->err.code != LLM_OK) {
        fail(engine, req);
    }
}


request_t *
intake_request(engine_t *engine, const uint8_t *area, uint32_t len,
               const request_origin_t *from)
{
    request_t *req = request_create(engine, area, len, from);

    if (req == NULL) {
        return NULL;
    }

    if (check(engine, req, len) != LLM_OK) {
        fail(engine, req);
        return req;
    }

    if (intake_thread_wants(engine->intake, len)) {
        engine->n_preparing += !req->textual;
        intake_thread_give(engine->intake, req);
        return req;
    }

    prepare_request(engine, &engine->prompt, req);
    enter_or_fail(engine, req);

    return req;
}


void
intake_collect(engine_t *engine)
{
    request_t *req;

    while ((req = intake_thread_take(engine->intake)) != NULL) {
        /* one that has ended meanwhile only waits for its end to be sent */
        if (!req->finished) {
            engine->n_preparing -= !req->textual;
            enter_or_fail(engine, req);
        }
    }
}


void
request_free(request_t *req)
{
    kv_table_fini(&req->seq.table);
    buf_fini(&req->text);
    buf_fini(&req->logprobs);
    buf_fini(&req->out);
    arena_destroy(req->arena);
}


void
request_destroy(request_t *req)
{
    list_remove(&req->link);

    if (req->preparer == NULL || intake_thread_drop(req->preparer, req)) {
        request_free(req);
    }
}
