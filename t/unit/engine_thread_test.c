/*
 * The intake thread: others decode while a prompt is prepared, order and queue
 * limit hold, and whoever leaves at any point of it leaves nothing behind.
 *
 * Linked with --wrap for prepare_request, before which there is a gate, so
 * that preparing takes exactly as long as a test wants.
 */

#include "t/unit/engine_port.h"

#include <pthread.h>

#include "engine/base/clock.h"
#include "engine/intake_thread.h"
#include "engine/prepare.h"
#include "t/unit/random.h"

enum {
    PAD = 10000, /* bytes that make a request a long one */
    LONG_MS = 20000,
    STORM = 800, /* requests */
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


static void
woken(void)
{
    pthread_mutex_lock(&mutex);
    n_woken++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    port_fd_wake();
}


static void
gate(bool close_it)
{
    pthread_mutex_lock(&mutex);
    closed = close_it;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}


/* Until n of them have come to the gate, or are prepared. */
static void
await(const int *count, int n)
{
    pthread_mutex_lock(&mutex);

    while (*count < n) {
        pthread_cond_wait(&changed, &mutex);
    }

    pthread_mutex_unlock(&mutex);
}


static int
seen(const int *count)
{
    pthread_mutex_lock(&mutex);
    const int n = *count;
    pthread_mutex_unlock(&mutex);

    return n;
}


static int
at_once(void)
{
    return seen(&n_at_once);
}


static int
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


static int
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
static uint32_t
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


static uint32_t
submit_long(uint32_t w, uint32_t s, int max_tokens)
{
    return submit_padded(w, s, NULL, PAD, max_tokens);
}


static request_t *
request_at(uint32_t w, uint32_t s)
{
    return port.by_slot[w * SLOTS + s];
}


/* Turns until the slot is done; the thread may take its time. */
static void
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


static void
assert_gauges(int running, int waiting, int slots)
{
    assert_int_equal(llm_stats_get(&shm.stats->running), running);
    assert_int_equal(llm_stats_get(&shm.stats->waiting), waiting);
    assert_int_equal(llm_stats_get(&shm.stats->waiting_capacity)
                         + llm_stats_get(&shm.stats->waiting_deferred),
                     waiting);
    assert_int_equal(llm_stats_get(&shm.stats->slots_used), slots);
}


/* --- what it is for --- */

static void
test_decode_goes_on(void **state)
{
    buf_t alone = { 0 };

    (void) state;

    /* what it says without anybody else, prepared at once */
    run_until_done(0, 0, submit_text(0, 0, 30));
    assert_int_equal(at_once(), 1);
    buf_add(&alone, reply.content.data, reply.content.len);
    reply_fini(&reply);

    const uint32_t stream = submit_text(0, 0, 200);

    turn();
    gate(true);
    const uint32_t slow = submit_long(0, 1, 30);

    turn();
    await(&n_gate, 1);
    assert_int_equal(request_at(0, 0)->n_output, 2);

    for (int i = 3; i <= 100; i++) {
        assert_true(turn());
        assert_int_equal(request_at(0, 0)->n_output, i);
    }

    /* it waits, has written nothing, and was not looked at on this thread */
    assert_gauges(1, 1, 2);
    assert_int_equal(llm_stats_get(&shm.stats->waiting_deferred), 1);
    assert_int_equal(engine->n_fresh, 1);
    assert_int_equal(rung[0][1], 0);
    assert_int_equal(at_once(), 2);

    gate(false);
    reply_fini(&reply);
    turn_until_done(0, 1, slow);
    assert_int_equal(reply.n_done, 1);
    assert_int_equal(reply.content.len, alone.len);
    assert_memory_equal(reply.content.data, alone.data, alone.len);
    reply_fini(&reply);
    turn_until_done(0, 0, stream);
    assert_int_equal(reply.done.completion_tokens, 200);
    assert_gauges(0, 0, 0);
    buf_fini(&alone);
}


/* A sleeping engine is woken by the thread. */
static void
test_wakes(void **state)
{
    (void) state;
    gate(true);
    const uint32_t t = submit_long(0, 0, 5);

    assert_false(turn());
    assert_gauges(0, 1, 1);
    await(&n_gate, 1);

    const uint64_t start = clock_now_ns();

    gate(false);
    port_wait(&port, engine, false);
    assert_true(clock_now_ns() - start < 500000000ull);
    assert_int_equal(atomic_load(&shm.header->idle), 0);
    await(&n_woken, 1);
    assert_true(turn());
    assert_gauges(1, 0, 1);
    turn_until_done(0, 0, t);
}


/* Short ones wait behind long ones, and only then. */
static void
test_order(void **state)
{
    const seq_t *seqs[4];

    (void) state;
    gate(true);
    submit_long(0, 0, 50);
    turn();
    submit_text(1, 0, 50);
    turn();
    submit_long(1, 1, 50);
    turn();
    submit_text(0, 1, 50);
    turn();
    assert_gauges(0, 4, 4);
    assert_int_equal(at_once(), 0);

    seqs[0] = &request_at(0, 0)->seq;
    seqs[1] = &request_at(1, 0)->seq;
    seqs[2] = &request_at(1, 1)->seq;
    seqs[3] = &request_at(0, 1)->seq;
    gate(false);
    await(&n_woken, 4);
    turn();
    assert_gauges(4, 0, 4);

    for (int i = 1; i < 4; i++) {
        assert_true(seqs[i - 1]->arrival < seqs[i]->arrival);
    }

    /* nobody is there any more */
    submit_text(0, 2, 50);
    turn();
    assert_int_equal(at_once(), 1);
    submit_long(0, 3, 50);
    turn();
    await(&n_woken, 5);

    /* prepared, but not yet queued: still behind it */
    submit_text(0, 4, 50);
    port_intake(&port, engine);
    assert_int_equal(at_once(), 2);
    assert_true(request_at(0, 3)->seq.arrival < request_at(0, 4)->seq.arrival);
}


/* Those that are being prepared count, and one that is refused is not. */
static void
test_queue(void **state)
{
    const llm_turn_t two = { .max_queue = 2, .n_choices = 1, .weight = 1 };

    (void) state;
    gate(true);
    const uint32_t first = submit_padded(0, 0, &two, PAD, 5);
    const uint32_t second = submit_padded(0, 1, &two, PAD, 5);
    const uint32_t third = submit_padded(1, 0, &two, PAD, 5);
    const uint32_t fourth = submit_padded(1, 1, &two, 0, 5);

    turn();
    assert_int_equal(engine->n_fresh, 2);
    assert_gauges(0, 2, 2);
    assert_true(done(1, 0, third) && done(1, 1, fourth));
    assert_int_equal(llm_stats_get(&shm.stats->rejected), 2);
    collect(1, 0, 1000);
    assert_int_equal(reply.n_fail, 1);
    assert_int_equal(reply.fail.fail, LLM_FAIL_BUSY);
    reply_fini(&reply);

    /* one leaves: there is a place at once, although the thread has it yet */
    await(&n_gate, 1);
    cancel(0, 0, first);
    turn();
    assert_int_equal(engine->n_fresh, 1);
    const uint32_t fifth = submit_padded(1, 0, &two, PAD, 5);

    turn();
    assert_int_equal(engine->n_fresh, 2);
    gate(false);
    turn_until_done(0, 1, second);
    reply_fini(&reply);
    turn_until_done(1, 0, fifth);
    assert_int_equal(reply.done.completion_tokens, 5);
    assert_int_equal(n_gate, 3);
}


/* --- kinds --- */

static void
test_textual(void **state)
{
    static char text[PAD];
    ask_t a = ask(LLM_REQ_TOKENIZE, 0);

    (void) state;
    memset(text, 'q', sizeof(text));
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, text, sizeof(text));
    uint32_t t = fill(0, 0, &a);

    gate(true);
    push(0, LLM_OP_SUBMIT, 0);
    turn();
    await(&n_gate, 1);

    /* nobody generates it, so it does not wait to be */
    assert_gauges(0, 0, 1);
    assert_int_equal(atomic_load(&slot_at(0, 0)->log_len), 0);
    gate(false);
    turn_until_done(0, 0, t);
    assert_int_equal(reply.done.completion_tokens, PAD);
    assert_int_equal(atomic_load(&slot_at(0, 0)->log_len), LOG_TOKENS);
    assert_int_equal(llm_shm_log(&shm, 0, 0)[LOG_TOKENS - 1], 'q');
    reply_fini(&reply);

    t = submit_detokenize(0, 0, PAD / 4);
    turn_until_done(0, 0, t);
    assert_int_equal(reply.content.len, PAD / 4 * LONG_BYTES);
    assert_int_equal(n_gate, 2);
}


/* What is wrong is said by whoever finds it. */
static void
test_mistakes(void **state)
{
    static char text[PAD];
    ask_t a = ask(LLM_REQ_TEXT, 0);

    (void) state;
    memset(text, 'q', sizeof(text));

    for (int i = 0; i < 2; i++) {
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, text, sizeof(text));
        const uint32_t t = fill(0, 0, &a);

        push(0, LLM_OP_SUBMIT, 0);
        turn_until_done(0, 0, t);
        assert_int_equal(reply.n_fail, 1);
        assert_int_equal(reply.fail.fail,
                         i == 0 ? LLM_FAIL_CONTEXT : LLM_FAIL_BADREQ);
        assert_string_equal(reply.fail.param, i == 0 ? "prompt" : "");
        reply_fini(&reply);
        text[PAD - 1] = '\xff';
    }

    /* no request at all: the thread need not see it */
    memset(llm_shm_request(&shm, 0, 0), 0xff, PAD);
    slot_at(0, 0)->epoch = atomic_load(&shm.header->epoch);
    slot_at(0, 0)->request_len = PAD;
    atomic_store(&slot_at(0, 0)->ticket, ++ticket);
    push(0, LLM_OP_SUBMIT, 0);
    turn();
    assert_true(done(0, 0, ticket));
    assert_int_equal(n_gate, 2);
    still_serves(0, 0);
}


/* --- leaving --- */

/* Being prepared, waiting for it, prepared. */
static void
test_cancel(void **state)
{
    const uint64_t aborts =
        llm_stats_get(&shm.stats->finished[LLM_FINISH_ABORT]);

    (void) state;
    const uint32_t ready = submit_long(0, 0, 5);

    turn();
    await(&n_woken, 1);
    gate(true);
    cancel(0, 0, ready);

    /* the cell of the cancellation is behind its return: it runs */
    turn();
    assert_true(done(0, 0, ready));
    assert_null(request_at(0, 0));

    const uint32_t current = submit_long(0, 0, 5);
    const uint32_t waits = submit_long(0, 1, 5);

    turn();
    await(&n_gate, 2);
    cancel(0, 0, current);
    cancel(0, 1, waits);
    turn();
    assert_true(done(0, 0, current) && done(0, 1, waits));
    assert_gauges(0, 0, 0);
    assert_int_equal(engine->n_fresh, 0);
    assert_int_equal(
        llm_stats_get(&shm.stats->finished[LLM_FINISH_ABORT]) - aborts, 3);

    /* the slot carries another one while the thread has the first */
    const uint32_t next = submit_text(0, 0, 5);

    turn();
    assert_non_null(request_at(0, 0));
    assert_int_equal(rung[0][0], 0);

    /* neither an old ticket nor room does anything to it */
    cancel(0, 0, current);
    push(0, LLM_OP_SPACE, 0);
    turn();
    assert_false(done(0, 0, next));
    assert_gauges(0, 1, 1);
    gate(false);
    turn_until_done(0, 0, next);
    assert_int_equal(reply.done.completion_tokens, 5);
    assert_int_equal(n_gate, 3);
    assert_int_equal(n_woken, 2);
}


/* Ended and given back in one turn: it is entered nowhere. */
static void
test_late(void **state)
{
    (void) state;
    gate(true);
    const uint32_t t = submit_long(0, 0, 5);

    turn();
    await(&n_gate, 1);
    request_t *req = request_at(0, 0);

    emit_abort(engine, req);
    gate(false);
    await(&n_woken, 1);
    intake_collect(engine);
    assert_null(req->preparer);
    assert_false(req->queued);
    turn();
    assert_true(done(0, 0, t));
    assert_gauges(0, 0, 0);
}


static void
test_dead_worker(void **state)
{
    (void) state;
    gate(true);
    submit_long(0, 0, 5);
    submit_long(0, 1, 5);
    const uint32_t mine = submit_long(1, 0, 5);

    turn();
    await(&n_gate, 1);
    assert_gauges(0, 3, 3);
    llm_worker_release(&shm, 0);
    turn();
    turn();
    assert_int_equal(atomic_load(&llm_shm_worker(&shm, 0)->state),
                     LLM_WORKER_FREE);
    assert_gauges(0, 1, 1);
    assert_int_equal(engine->n_fresh, 1);

    /* the next holder of the index, in the same slots */
    assert_int_equal(llm_worker_claim(&shm, (int32_t) getpid()), 0);
    const uint32_t next = submit_long(0, 0, 7);

    turn();
    gate(false);
    turn_until_done(1, 0, mine);
    reply_fini(&reply);
    turn_until_done(0, 0, next);
    assert_int_equal(reply.done.completion_tokens, 7);
}


/* An engine that is told to quit finishes what it has taken. */
static void
test_quit(void **state)
{
    (void) state;
    gate(true);
    const uint32_t t = submit_long(0, 0, 5);

    turn();
    port.fds.quit = true;
    port.live = 0; /* as if nobody else held it */
    assert_false(port_done(&port, engine));
    port.live = 2;
    gate(false);
    turn_until_done(0, 0, t);
    assert_int_equal(reply.done.completion_tokens, 5);
    port.live = 0;
    assert_true(port_done(&port, engine));
}


static void *
open_later(void *data)
{
    (void) data;
    usleep(50000);
    gate(false);

    return NULL;
}


/* Closed with one prepared, one at it, and one that waits. */
static void
test_close(void **state)
{
    static char salt[PAD];
    const request_origin_t from = { .submit_ns = 1 };
    engine_t *other = tiny_engine(NULL);
    llm_err_t err;
    pthread_t id;

    (void) state;
    assert_int_equal(intake_thread_start(other, woken, &err), LLM_OK);

    for (int i = 0; i < 3; i++) {
        ask_t a = ask(LLM_REQ_TEXT, 0);

        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
        ask_section(&a, LLM_SEC_SALT, salt, sizeof(salt));
        const request_t *req =
            intake_request(other, tiny_area, llm_request_end(&a.w), &from);

        assert_non_null(req->preparer);

        if (i == 0) {
            await(&n_woken, 1);
            gate(true);
        }
    }

    await(&n_gate, 2);
    assert_int_equal(other->n_fresh, 3);
    assert_int_equal(pthread_create(&id, NULL, open_later, NULL), 0);
    engine_close(other);
    pthread_join(id, NULL);
    assert_int_equal(n_gate, 2);

    /* one that nobody asked anything */
    other = tiny_engine(NULL);
    assert_int_equal(intake_thread_start(other, NULL, &err), LLM_OK);
    engine_close(other);
}


/* --- no memory --- */

/* Stop strings and penalties, for which memory is wanted. */
static uint32_t
submit_greedy(uint32_t w, uint32_t s)
{
    const char *stops[PAD / 8 + 1];
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);

    for (int i = 0; i < PAD / 8; i++) {
        stops[i] = "~~~~~~~~";
    }

    stops[PAD / 8] = NULL;
    a.params.max_tokens = 3;
    a.params.presence_penalty = 1;
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    ask_stop(&a, stops);
    fill(w, s, &a);
    push(w, LLM_OP_SUBMIT, s);

    return ticket;
}


static void
test_no_memory(void **state)
{
    int n = 1, failures = 0;

    (void) state;

    for (;; n++) {
        gate(true);
        const uint32_t t = submit_greedy(0, 0);

        port_intake(&port, engine);
        await(&n_gate, n);
        arena_fail_after(n);
        gate(false);
        await(&n_woken, n);
        arena_fail_after(0);
        turn_until_done(0, 0, t);

        if (reply.n_fail == 0) {
            break;
        }

        assert_int_equal(reply.fail.fail, LLM_FAIL_BUSY);
        assert_int_equal(engine->n_fresh, 0);
        failures++;
        reply_fini(&reply);
    }

    assert_int_equal(reply.done.completion_tokens, 3);
    print_message("# %d places without memory\n", failures);
    assert_true(failures >= 2);
}


/* --- all of it --- */

/* Reads what is there, whatever it is. */
static void
discard(uint32_t w, uint32_t s)
{
    uint8_t payload[LLM_RECORD_MAX];
    uint32_t len;

    drain_ready(w);

    while (llm_record_read(&slot_at(w, s)->out, llm_shm_out(&shm, w, s),
                           geo.out_bytes, payload, sizeof(payload), &len)
           == LLM_RING_OK)
    {
    }

    llm_worker_made_room(&shm, w, s);
}


static void
act(random_t *random, uint32_t *tickets)
{
    const uint32_t w = (uint32_t) random_below(random, WORKERS);
    const uint32_t s = (uint32_t) random_below(random, SLOTS);
    uint32_t *t = &tickets[w * SLOTS + s];
    const int what = random_below(random, 8);

    if (*t != 0 && done(w, s, *t)) {
        *t = 0;
    }

    if (*t == 0) {
        if (what == 0) {
            *t = submit_detokenize(w, s, 1 + random_below(random, 3000));
        } else {
            *t = submit_padded(w, s, NULL, what < 4 ? PAD : 0,
                               1 + random_below(random, 20));
        }

    } else if (what < 2) {
        cancel(w, s, *t);

    } else if (what == 2 && random_below(random, 30) == 0) {
        llm_worker_release(&shm, w);
        turn();
        turn();
        assert_int_equal(llm_worker_claim(&shm, (int32_t) getpid()), w);
        memset(tickets + w * SLOTS, 0, SLOTS * sizeof(*tickets));

    } else {
        discard(w, s);
    }
}


static void
test_storm(void **state)
{
    random_t random = random_start("intake thread");
    const uint64_t end = clock_now_ns() + LONG_MS * 1000000ull;
    uint32_t tickets[WORKERS * SLOTS] = { 0 };

    (void) state;

    /* until enough have gone both ways */
    while ((at_once() < STORM / 8 || seen(&n_gate) < STORM)
           && clock_now_ns() < end) {
        const int n = random_below(&random, 8);

        for (int a = 0; a < n; a++) {
            act(&random, tickets);
        }

        if (!turn()) {
            usleep(50);
        }
    }

    for (uint32_t i = 0; i < WORKERS * SLOTS; i++) {
        if (tickets[i] != 0 && !done(i / SLOTS, i % SLOTS, tickets[i])) {
            cancel(i / SLOTS, i % SLOTS, tickets[i]);
        }
    }

    turn();
    assert_true(list_empty(&engine->requests));
    turn();
    assert_gauges(0, 0, 0);
    assert_int_equal(engine->n_fresh, 0);
    assert_int_equal(pages_used(engine), 0);
    print_message("# %d at once, %d on the thread\n", at_once(), n_gate);
    assert_true(at_once() >= STORM / 8 && n_gate >= STORM);
    still_serves(0, 0);
}


int
main(void)
{
#define thread_test(f) \
    cmocka_unit_test_setup_teardown(f, setup_thread, teardown_thread)
    const struct CMUnitTest tests[] = {
        thread_test(test_decode_goes_on), thread_test(test_wakes),
        thread_test(test_order),          thread_test(test_queue),
        thread_test(test_textual),        thread_test(test_mistakes),
        thread_test(test_cancel),         thread_test(test_late),
        thread_test(test_dead_worker),    thread_test(test_quit),
        thread_test(test_close),          thread_test(test_no_memory),
        thread_test(test_storm),
    };

    log_open(NULL, LOG_CRIT);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
