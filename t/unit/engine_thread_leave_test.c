/*
 * The intake thread: whoever leaves at any point of it leaves nothing behind;
 * no memory; a storm of all that.
 */

#include "t/unit/engine_gate.h"

#include "t/unit/random.h"

enum { STORM = 800 }; /* requests */


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

    /* it comes back, is queued, and then canceled */
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

    /* it may be collected before the bell is rung */
    intake_thread_stop(engine);
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


void __real_intake_thread_stop(engine_t *e);
void __wrap_intake_thread_stop(engine_t *e);

static bool opens_later; /* the gate, when the thread is to stop */


static void *
open_later(void *data)
{
    (void) data;
    usleep(50000);
    gate(false);

    return NULL;
}


/* Before that, whoever closes has let go of all that wait. */
void
__wrap_intake_thread_stop(engine_t *e)
{
    const bool later = opens_later;
    pthread_t id;

    opens_later = false;

    if (later) {
        assert_int_equal(pthread_create(&id, NULL, open_later, NULL), 0);
    }

    __real_intake_thread_stop(e);

    if (later) {
        pthread_join(id, NULL);
    }
}


/* Closed with one prepared, one at it, and one that waits. */
static void
test_close(void **state)
{
    static char salt[PAD];
    const request_origin_t from = { .submit_ns = 1 };
    engine_t *other = tiny_engine(NULL);
    llm_err_t err;

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
    opens_later = true;
    engine_close(other);
    assert_false(opens_later);
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
    /* a machine may have other things to do */
    const uint64_t end = clock_now_ns() + 10 * LONG_MS * 1000000ull;
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
    print_message("# %d at once, %d on the thread\n", at_once(), seen(&n_gate));
    assert_true(at_once() >= STORM / 8 && seen(&n_gate) >= STORM);

    /* behind what the thread has not yet let go of, perhaps */
    turn_until_done(0, 0, submit_text(0, 0, 5));
    assert_int_equal(reply.done.completion_tokens, 5);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        thread_test(test_cancel),      thread_test(test_late),
        thread_test(test_dead_worker), thread_test(test_quit),
        thread_test(test_close),       thread_test(test_no_memory),
        thread_test(test_storm),
    };

    log_open(NULL, LOG_CRIT);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
