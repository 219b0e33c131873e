/*
 * The engine's end of a segment, with an intake thread whose preparing takes
 * exactly as long as a test wants: there is a gate before it.  Included by the
 * two tests of the thread, which are linked with --wrap for prepare_request.
 */

#ifndef T_UNIT_ENGINE_GATE_H
#define T_UNIT_ENGINE_GATE_H

#include "t/unit/engine_port.h"

#include <pthread.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/intake_thread.h"
#include "engine/prepare.h"

enum {
    PAD = 10000, /* bytes that make a request a long one */
    LONG_MS = 20000,
};

void __real_prepare_request(const engine_t *e, prompt_t *prompt,
                            request_t *req);
void __wrap_prepare_request(const engine_t *e, prompt_t *prompt,
                            request_t *req);

static pthread_t loop;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool closed;
static int n_gate;    /* have come to the gate */
static int n_at_once; /* prepared on the loop thread */
static int n_woken;


void
__wrap_prepare_request(const engine_t *e, prompt_t *prompt, request_t *req)
{
    pthread_mutex_lock(&mutex);

    if (pthread_equal(pthread_self(), loop)) {
        n_at_once++;

    } else {
        n_gate++;
        pthread_cond_broadcast(&changed);

        while (closed) {
            pthread_cond_wait(&changed, &mutex);
        }
    }

    pthread_mutex_unlock(&mutex);
    __real_prepare_request(e, prompt, req);
}


static inline void
woken(void)
{
    pthread_mutex_lock(&mutex);
    n_woken++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    port_fd_wake();
}


static inline void
gate(bool close_it)
{
    pthread_mutex_lock(&mutex);
    closed = close_it;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}


/* Until n of them have come to the gate, or are prepared. */
static inline void
await(const int *count, int n)
{
    struct timespec end;
    int rc = 0;

    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += LONG_MS / 1000;
    pthread_mutex_lock(&mutex);

    while (*count < n && rc == 0) {
        rc = pthread_cond_timedwait(&changed, &mutex, &end);
    }

    pthread_mutex_unlock(&mutex);
    assert_int_equal(rc, 0);
}


static inline int
seen(const int *count)
{
    pthread_mutex_lock(&mutex);
    const int n = *count;
    pthread_mutex_unlock(&mutex);

    return n;
}


static inline int
at_once(void)
{
    return seen(&n_at_once);
}


static inline int
setup_thread(void **state)
{
    llm_err_t err;

    setup(state);
    loop = pthread_self();
    closed = false;
    n_gate = n_at_once = n_woken = 0;
    assert_int_equal(intake_thread_start(engine, woken, &err), LLM_OK);

    return 0;
}


static inline int
teardown_thread(void **state)
{
    gate(false);

    while (!list_empty(&engine->requests)) {
        request_t *req = list_entry(engine->requests.next, request_t, link);

        emit_abort(engine, req);
        request_destroy(req);
    }

    intake_thread_stop(engine);
    assert_null(engine->intake);
    assert_int_equal(engine->n_fresh, 0);
    assert_int_equal(engine->n_preparing, 0);

    return teardown(state);
}


/* A stream; pad: bytes of salt, which make it long but not slow. */
static inline uint32_t
submit_padded(uint32_t w, uint32_t s, const llm_turn_t *turn_of, int pad,
              int max_tokens)
{
    static char salt[PAD];
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_IGNORE_EOS);

    a.params.max_tokens = max_tokens;
    ask_begin(&a);

    if (turn_of != NULL) {
        llm_request_turn(&a.w, turn_of);
    }

    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    ask_section(&a, LLM_SEC_SALT, salt, (size_t) pad);
    fill(w, s, &a);
    push(w, LLM_OP_SUBMIT, s);

    return ticket;
}


static inline uint32_t
submit_long(uint32_t w, uint32_t s, int max_tokens)
{
    return submit_padded(w, s, NULL, PAD, max_tokens);
}


static inline request_t *
request_at(uint32_t w, uint32_t s)
{
    return port.by_slot[w * SLOTS + s];
}


/* Turns until the slot is done; the thread may take its time. */
static inline void
turn_until_done(uint32_t w, uint32_t s, uint32_t t)
{
    const uint64_t end = clock_now_ns() + LONG_MS * 1000000ull;

    while (!done(w, s, t) && clock_now_ns() < end) {
        if (!turn()) {
            usleep(100);
        }

        collect(w, s, 1000);
    }

    assert_true(done(w, s, t));
    collect(w, s, 1000);
    assert_int_equal(reply.n_done + reply.n_fail, 1);
    assert_null(request_at(w, s));
}


static inline void
assert_gauges(int running, int waiting, int slots)
{
    assert_int_equal(llm_stats_get(&shm.stats->running), running);
    assert_int_equal(llm_stats_get(&shm.stats->waiting), waiting);
    assert_int_equal(llm_stats_get(&shm.stats->waiting_capacity)
                         + llm_stats_get(&shm.stats->waiting_deferred),
                     waiting);
    assert_int_equal(llm_stats_get(&shm.stats->slots_used), slots);
}


#define thread_test(f) \
    cmocka_unit_test_setup_teardown(f, setup_thread, teardown_thread)

#endif /* T_UNIT_ENGINE_GATE_H */
