/*
 * The engine's end of the segment when things are wrong: hostile and dead
 * workers, no memory, an engine that follows one that crashed, descriptors
 * that are not what they should be.
 */

#include "t/unit/engine_port.h"
#include "t/unit/random.h"


/* --- hostile --- */

static void
test_bad_cells(void **state)
{
    llm_ring_t *ring = &llm_shm_worker(&shm, 0)->submit;
    uint64_t *cells = llm_shm_submit_cells(&shm, 0);
    static const uint64_t bad[] = {
        0,
        (uint64_t) LLM_OP_SUBMIT << 32 | SLOTS,
        (uint64_t) LLM_OP_SPACE << 32 | UINT32_MAX,
        4ull << 32,
        UINT64_MAX,
        (uint64_t) LLM_OP_CANCEL << 32 | 3, /* of nothing */
        (uint64_t) LLM_OP_SPACE << 32 | 3,
    };

    (void) state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        llm_ring_push(ring, cells, llm_shm_submit_cap(&shm), bad[i]);
        /* what stands behind it is served */
        run_until_done(0, 2, submit_text(0, 2, 5));
        assert_int_equal(reply.done.completion_tokens, 5);
        reply_fini(&reply);
    }

    /* an index out of bounds: the engine must find its sleep again */
    atomic_store(&ring->head, atomic_load(&ring->head) + 1000000);
    turn();
    turn();
    assert_true(llm_engine_doze(&port.shm));
    llm_engine_wake(&port.shm);
    still_serves(0, 2);
    still_serves(1, 2);
}


static void
test_bad_submits(void **state)
{
    llm_slot_t *slot = slot_at(0, 5);

    (void) state;

    /* longer than the area */
    submit_text(0, 5, 5);
    slot->request_len = geo.request_bytes + 1;
    turn();
    assert_null(port.by_slot[5]);
    slot->request_len = UINT32_MAX;
    push(0, LLM_OP_SUBMIT, 5);
    turn();
    assert_null(port.by_slot[5]);

    /* no ticket */
    submit_text(0, 5, 5);
    atomic_store(&slot->ticket, 0);
    turn();
    assert_null(port.by_slot[5]);

    /* another engine's */
    for (int by = -1; by <= 1; by += 2) {
        submit_text(0, 5, 5);
        slot->epoch += (uint32_t) by;
        turn();
        assert_null(port.by_slot[5]);
        assert_false(done(0, 5, ticket));
    }

    /* twice: the first is served, with its own ticket */
    const uint32_t t = submit_text(0, 5, 9);

    push(0, LLM_OP_SUBMIT, 5);
    turn();
    atomic_store(&slot->ticket, t + 1);
    push(0, LLM_OP_SUBMIT, 5);
    run_until_done(0, 5, t);
    assert_int_equal(reply.done.completion_tokens, 9);
    reply_fini(&reply);

    /* a time in the future */
    ticket = t + 1;
    submit_text(0, 5, 3);
    slot->submit_ns = UINT64_MAX;
    run_until_done(0, 5, ticket);
    assert_true(reply.done.total_us < 60000000);
    assert_true(llm_stats_get(&shm.stats->ttft.sum) < UINT64_MAX / 2);
    reply_fini(&reply);

    /* an output ring with nonsense in it ends that request alone */
    const uint32_t other = submit_text(0, 6, 20);
    const uint32_t broken = submit_text(0, 5, 20);

    turn();
    atomic_store(&slot->out.tail, atomic_load(&slot->out.head) + 77);
    turn();
    turn();
    assert_true(done(0, 5, broken));
    run_until_done(0, 6, other);
    assert_int_equal(reply.done.completion_tokens, 20);
}


/* Garbage in the request area: an ERROR record, and the slot comes back. */
static void
test_garbage(void **state)
{
    random_t random = random_start("garbage");

    (void) state;

    for (int round = 0; round < 2000; round++) {
        ask_t a = ask(1 + (uint32_t) random_below(&random, 6), LLM_F_STREAM);

        a.params.max_tokens = 2;
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, "hello world", 8);
        const uint32_t t = fill(0, 0, &a);
        uint8_t *bytes = llm_shm_request(&shm, 0, 0);

        if (round % 10 == 0) {
            slot_at(0, 0)->request_len = (uint32_t) random_below(&random, 5000);
        }

        for (int i = random_below(&random, 30); i > 0; i--) {
            bytes[random_below(&random, 200)] = (uint8_t) random_next(&random);
        }

        push(0, LLM_OP_SUBMIT, 0);
        turn();

        if (!done(0, 0, t)) {
            cancel(0, 0, t);
            turn();
        }

        assert_true(done(0, 0, t));
        collect(0, 0, 1000);
        reply_fini(&reply);
    }

    still_serves(0, 0);
}


/* No memory for a request: its client hears of it. */
static void
test_no_memory(void **state)
{
    (void) state;

    for (long n = 1; n <= 2; n++) {
        const uint32_t t = submit_text(0, 0, 5);

        arena_fail_after(n);
        turn();
        arena_fail_after(0);
        assert_true(done(0, 0, t));
        collect(0, 0, 10);
        assert_int_equal(reply.n_fail, 1);
        assert_int_equal(reply.fail.fail, LLM_FAIL_BUSY);
        assert_true(rung[0][0] > 0);
        reply_fini(&reply);
    }

    still_serves(0, 0);
}


/* Everything at once, at random, and a worker that scribbles. */
static void
test_storm(void **state)
{
    random_t random = random_start("storm");
    uint32_t given[SLOTS] = { 0 };

    (void) state;

    for (int round = 0; round < 20000; round++) {
        const uint32_t s = (uint32_t) random_below(&random, SLOTS);
        llm_slot_t *slot = slot_at(0, s);

        switch (random_below(&random, 12)) {
        case 0:
        case 1:
            if (port.by_slot[s] == NULL) {
                given[s] = random_below(&random, 3)
                               ? submit_text(0, s, random_below(&random, 40))
                               : submit_detokenize(0, s, 200);
            }
            break;
        case 2:
            cancel(0, s, given[s]);
            break;
        case 3:
            push(0, 1 + (uint32_t) random_below(&random, 3), s);
            break;
        case 4:
            atomic_store(&slot->out.tail, (uint32_t) random_next(&random));
            break;
        case 5:
            atomic_store(&slot->ticket, (uint32_t) random_below(&random, 3));
            break;
        case 6:
            atomic_store(&slot->want_space,
                         (uint32_t) random_below(&random, 2));
            atomic_store(&slot->notified, (uint32_t) random_next(&random));
            atomic_store(&slot->log_len, (uint32_t) random_next(&random));
            break;
        case 7:
            if (random_below(&random, 50) == 0) {
                llm_ring_t *ring = random_below(&random, 2)
                                       ? &llm_shm_worker(&shm, 0)->submit
                                       : &llm_shm_worker(&shm, 0)->ready;
                atomic_store(&ring->head, (uint32_t) random_next(&random));
            }
            break;
        case 8:
            atomic_store(&slot->out.tail, atomic_load(&slot->out.head));
            llm_worker_made_room(&shm, 0, s);
            break;
        default:
            turn();
        }
    }

    /* and the other worker has not noticed */
    still_serves(1, 0);
}


/* --- dead workers --- */

static void
test_dead_worker(void **state)
{
    const uint32_t mine = submit_text(1, 0, 30);
    int status;

    (void) state;

    /* index 0 changes hands: to a child that submits, lingers and dies */
    llm_worker_release(&shm, 0);
    turn();
    assert_int_equal(atomic_load(&llm_shm_worker(&shm, 0)->state),
                     LLM_WORKER_FREE);

    llm_ring_t *ring = &llm_shm_worker(&shm, 0)->submit;
    const uint32_t head = atomic_load(&ring->head);
    const pid_t pid = fork();

    if (pid == 0) {
        if (llm_worker_claim(&shm, (int32_t) getpid()) != 0) {
            _exit(1);
        }

        submit_text(0, 0, 200);
        submit_text(0, 1, 200);
        submit_detokenize(0, 2, 400);
        pause();
        _exit(0);
    }

    while (atomic_load(&ring->head) - head < 3) {
        usleep(1000);
    }

    turn();
    turn();
    assert_int_equal(port.live, 2);
    assert_non_null(port.by_slot[0]);
    assert_non_null(port.by_slot[1]);
    assert_non_null(port.by_slot[2]);

    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    turn();

    for (int s = 0; s < 3; s++) {
        assert_null(port.by_slot[s]);
    }

    assert_int_equal(port.live, 1);
    assert_int_equal(atomic_load(&llm_shm_worker(&shm, 0)->state),
                     LLM_WORKER_FREE);
    assert_int_equal(sched_running(engine->sched), 1);
    run_until_done(1, 0, mine);
    assert_int_equal(reply.done.completion_tokens, 30);

    /* the next holder begins with nothing of the old */
    assert_int_equal(llm_worker_claim(&shm, (int32_t) getpid()), 0);
    still_serves(0, 0);
}


/* --- an engine after a crash --- */

static void
test_takeover(void **state)
{
    (void) state;
    submit_text(0, 0, 100);
    const uint32_t parked = submit_detokenize(0, 1, 400);

    turn();
    turn();
    /* submitted, and never seen by the first engine */
    submit_text(0, 2, 5);

    /* it dies: its requests with it */
    for (list_t *l = engine->requests.next; l != &engine->requests;) {
        request_t *req = list_entry(l, request_t, link);

        l = l->next;
        emit_abort(engine, req);
        request_destroy(req);
    }

    llm_shm_detach(&port.shm);
    free(port.dirty);
    free(port.by_slot);
    attach();
    assert_int_equal(atomic_load(&shm.header->epoch), 2);

    /* a worker that has not looked up yet */
    const uint32_t stale = submit_text(0, 3, 5);

    slot_at(0, 3)->epoch = 1;
    cancel(0, 1, parked);
    turn();
    turn();

    for (int s = 0; s < SLOTS; s++) {
        assert_null(port.by_slot[s]);
    }

    assert_false(done(0, 3, stale));

    /* the same slots again, for the new epoch */
    for (uint32_t s = 0; s < 4; s++) {
        still_serves(0, s);
    }
}


static void
test_attach_errors(void **state)
{
    port_t p;
    llm_err_t err;

    (void) state;

    /* more workers than the segment has; there is no such bell either, unless
     * whoever started this has left something there */
    close(PORT_FD_BELLS + WORKERS);
    assert_int_equal(port_attach(&p, WORKERS + 1, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, "descriptor 9 is not open"));
    assert_int_equal(dup2(PORT_FD_BELLS, 9), 9);
    assert_int_equal(port_attach(&p, WORKERS + 1, &err), LLM_ERROR);
    assert_string_equal(err.text, "workers=3, but the segment has 2");
    close(9);

    const int segment = aside(dup(PORT_FD_SEGMENT));

    close(PORT_FD_SEGMENT);
    assert_int_equal(port_attach(&p, WORKERS, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, "descriptor 3 is not open"));
    assert_int_equal(open("/dev/null", O_RDONLY), PORT_FD_SEGMENT);
    assert_int_equal(port_attach(&p, WORKERS, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, "no shared segment"));
    place(segment, PORT_FD_SEGMENT);

    /* none of this has touched the segment */
    assert_int_equal(atomic_load(&shm.header->epoch), 1);

    /* a start that fails says why, and stays FAILED */
    assert_int_equal(port_attach(&p, WORKERS, &err), LLM_OK);
    assert_int_equal(atomic_load(&shm.header->state), LLM_ENGINE_LOADING);
    port_failed(&p, "no such model");
    port_detach(&p);
    assert_int_equal(atomic_load(&shm.header->state), LLM_ENGINE_FAILED);
    assert_string_equal(shm.header->reason, "no such model");
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        port_test(test_bad_cells), port_test(test_bad_submits),
        port_test(test_garbage),   port_test(test_no_memory),
        port_test(test_storm),     port_test(test_dead_worker),
        port_test(test_takeover),  port_test(test_attach_errors),
    };

    log_open(NULL, LOG_CRIT);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
