/*
 * One engine for all tests of a program, and requests that wait for tokens
 * which the test hands over (tokens 0 … 255 are the bytes).
 */

#ifndef T_UNIT_ENGINE_EMIT_H
#define T_UNIT_ENGINE_EMIT_H

#include "t/unit/engine_tiny.h"

static engine_t *engine;
static reply_t reply;


static inline int
setup(void **state)
{
    (void) state;

    if (engine == NULL) {
        engine = tiny_engine(NULL);
    }

    reply_fini(&reply);

    return 0;
}


/* Nothing may be left of the request. */
static inline void
end(request_t *req)
{
    reply_read(&reply, req);
    assert_true(req->finished);
    assert_int_equal(reply.n_done + reply.n_fail, 1);
    request_destroy(req);
    assert_int_equal(pages_used(engine), 0);
    assert_int_equal(sched_running(engine->sched), 0);
    assert_int_equal(sched_waiting(engine->sched), 0);
}


/* A request that waits for tokens. */
static inline request_t *
begin(ask_t *a, const char *const *stops)
{
    ask_begin(a);
    ask_section(a, LLM_SEC_PROMPT, "q", 1);

    if (stops != NULL) {
        ask_stop(a, stops);
    }

    request_t *req = ask_send(engine, a);

    assert_non_null(req);
    assert_false(req->finished);

    return req;
}


static inline int
finish(void **state)
{
    (void) state;
    reply_fini(&reply);
    engine_close(engine);

    return 0;
}

#endif /* T_UNIT_ENGINE_EMIT_H */
