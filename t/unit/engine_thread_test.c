/*
 * The intake thread: others decode while a prompt is prepared, the order of
 * arrival and the queue's limit hold, all kinds of requests go through it.
 */

#include "t/unit/engine_gate.h"

#include "t/unit/engine_poll.h"


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


/* A sleeping engine is woken by the thread, however long that takes: to sleep
 * until the time is up is not to be woken. */
static void
test_wakes(void **state)
{
    (void) state;
    gate(true);
    const uint32_t t = submit_long(0, 0, 5);

    assert_false(turn());
    assert_gauges(0, 1, 1);
    await(&n_gate, 1);

    const uint64_t end = clock_now_ns() + LONG_MS * 1000000ull;

    gate(false);

    do {
        port_wait(&port, engine, false);
    } while (poll_found == 0 && clock_now_ns() < end);

    assert_int_equal(poll_found, 1);
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
    ask_t a = ask(LLM_REQ_TEXT, 0);
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
    request_t *req = ask_text(engine, &a, "hello");

    assert_non_null(req->preparer);
    emit_abort(engine, req);
    request_destroy(req);
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


int
main(void)
{
    const struct CMUnitTest tests[] = {
        thread_test(test_decode_goes_on), thread_test(test_wakes),
        thread_test(test_order),          thread_test(test_queue),
        thread_test(test_textual),        thread_test(test_mistakes),
    };

    log_open(NULL, LOG_CRIT);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
