/*
 * Worker indexes (claim, release, death), the submit and ready rings over a
 * real segment, doorbells, and what a starting engine takes over.
 */

#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/ipc/shm.h"

static llm_shm_t shm;


static int
setup(void **state)
{
    const llm_geometry_t geo = { 4, 8, 4096, 16384, 64 };
    char err[256];

    (void) state;

    return llm_shm_create(&geo, &shm, err, sizeof(err));
}


static int
teardown(void **state)
{
    int fd = shm.fd;

    (void) state;

    llm_shm_detach(&shm);

    return close(fd);
}


static uint32_t
state_of(uint32_t worker)
{
    return atomic_load(&llm_shm_worker(&shm, worker)->state);
}


/* The pid of a process that has ended. */
static pid_t
dead_pid(void)
{
    pid_t pid = fork();

    if (pid == 0) {
        _exit(0);
    }

    assert_int_equal(waitpid(pid, NULL, 0), pid);

    return pid;
}


/* --- indexes --- */

static void
claim_until_none_is_left(void **state)
{
    int32_t me = getpid();

    (void) state;

    for (int i = 0; i < 4; i++) {
        assert_int_equal(llm_worker_claim(&shm, me), i);
        assert_int_equal(state_of((uint32_t) i), LLM_WORKER_LIVE);
        assert_int_equal(atomic_load(&llm_shm_worker(&shm, 0)->pid), me);
    }

    assert_int_equal(llm_worker_claim(&shm, me), -1);
    assert_false(llm_worker_reap(&shm, 2));

    /* released: only the engine makes it free again */
    llm_worker_release(&shm, 2);
    assert_int_equal(state_of(2), LLM_WORKER_DEAD);
    assert_int_equal(llm_worker_claim(&shm, me), -1);
    assert_true(llm_worker_reap(&shm, 2));
    llm_worker_free(&shm, 2);
    assert_false(llm_worker_reap(&shm, 2));
    assert_int_equal(llm_worker_claim(&shm, me), 2);
}


static void
a_dead_holder_is_found(void **state)
{
    pid_t pid = fork();
    int status;

    (void) state;

    if (pid == 0) {
        llm_worker_claim(&shm, getpid());
        llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 3);
        pause();
    }

    while (atomic_load(&llm_shm_worker(&shm, 0)->pid) == 0) {
        usleep(1000);
    }

    assert_false(llm_worker_reap(&shm, 0));
    assert_int_equal(llm_worker_claim(&shm, getpid()), 1);
    assert_int_equal(state_of(0), LLM_WORKER_LIVE);

    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);

    /* a claimer marks it on the way, but does not take it */
    assert_int_equal(llm_worker_claim(&shm, getpid()), 2);
    assert_int_equal(state_of(0), LLM_WORKER_DEAD);
    assert_true(llm_worker_reap(&shm, 0));

    llm_worker_free(&shm, 0);
    assert_int_equal(llm_worker_claim(&shm, getpid()), 0);
}


static void
a_claim_under_way_is_left_alone(void **state)
{
    llm_worker_t *w = llm_shm_worker(&shm, 0);

    (void) state;

    atomic_store(&w->state, LLM_WORKER_LIVE); /* and the pid not yet */
    assert_false(llm_worker_reap(&shm, 0));
    assert_int_equal(llm_worker_claim(&shm, getpid()), 1);
    assert_int_equal(state_of(0), LLM_WORKER_LIVE);

    atomic_store(&w->pid, -5); /* nonsense: kill(-5) would be a group */
    assert_false(llm_worker_reap(&shm, 0));
    atomic_store(&w->pid, 1); /* alive, perhaps of another user */
    assert_false(llm_worker_reap(&shm, 0));
}


/* Processes that claim, work for an instant and go, beside an engine that
 * frees: never two holders of one index. */
static void
claims_race(void **state)
{
    enum { PROCESSES = 6, ROUNDS = 200 };
    pid_t pids[PROCESSES];
    int running = PROCESSES;

    (void) state;

    for (int p = 0; p < PROCESSES; p++) {
        pids[p] = fork();

        if (pids[p] != 0) {
            continue;
        }

        int32_t me = getpid();
        int done = 0;

        while (done < ROUNDS) {
            int i = llm_worker_claim(&shm, me);

            if (i < 0) {
                sched_yield();
                continue;
            }

            /* the slot's epoch as a lock: a second holder would see it */
            llm_slot_t *s = llm_shm_slot(&shm, (uint32_t) i, 0);

            if (s->epoch != 0) {
                _exit(1);
            }
            s->epoch = 1;
            if (atomic_load(&llm_shm_worker(&shm, (uint32_t) i)->pid) != me) {
                _exit(2);
            }
            s->epoch = 0;
            llm_worker_release(&shm, (uint32_t) i);
            done++;
        }

        /* and dies with an index in its hands */
        while (llm_worker_claim(&shm, me) < 0) {
            sched_yield();
        }

        _exit(0);
    }

    while (running > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);

        if (pid > 0) {
            assert_true(WIFEXITED(status));
            assert_int_equal(WEXITSTATUS(status), 0);
            running--;
        }

        for (uint32_t i = 0; i < 4; i++) {
            if (llm_worker_reap(&shm, i)) {
                llm_worker_free(&shm, i);
            }
        }

        sched_yield();
    }

    for (uint32_t i = 0; i < 4; i++) {
        if (llm_worker_reap(&shm, i)) {
            llm_worker_free(&shm, i);
        }
        assert_int_equal(state_of(i), LLM_WORKER_FREE);
    }
}


static void
free_leaves_nothing_behind(void **state)
{
    llm_slot_t *s = llm_shm_slot(&shm, 0, 5);
    uint32_t op, slot;

    (void) state;

    llm_worker_claim(&shm, dead_pid());
    llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 5);
    atomic_store(&s->ticket, 9);
    atomic_store(&s->cancel, 9);
    atomic_store(&s->done, 9);
    atomic_store(&s->log_len, 30);
    llm_record_write(&s->out, llm_shm_out(&shm, 0, 5), 16384, "abc", 3);
    assert_true(llm_slot_notify(&shm, 0, 5));
    assert_true(llm_slot_want_space(&shm, 0, 5, 16384));

    assert_true(llm_worker_reap(&shm, 0));
    llm_worker_free(&shm, 0);
    assert_int_equal(llm_worker_claim(&shm, getpid()), 0);

    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_EMPTY);
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);
    assert_int_equal(atomic_load(&s->ticket), 0);
    assert_int_equal(atomic_load(&s->cancel), 0);
    assert_int_equal(atomic_load(&s->done), 0);
    assert_int_equal(atomic_load(&s->log_len), 0);
    assert_int_equal(llm_record_space(&s->out, 16384), 16384);
    assert_false(llm_worker_made_room(&shm, 0, 5));
    assert_true(llm_slot_notify(&shm, 0, 5));
}


/* --- rings and doorbells --- */

static void
submit_and_doorbell(void **state)
{
    uint32_t op = 0, slot = 0;

    (void) state;

    /* awake: no bell */
    assert_false(llm_worker_push(&shm, 1, LLM_OP_SUBMIT, 7));
    assert_false(llm_worker_push(&shm, 1, LLM_OP_CANCEL, 2));

    /* work is left: no sleep */
    assert_false(llm_engine_doze(&shm));
    assert_int_equal(atomic_load(&shm.header->idle), 0);

    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);
    assert_int_equal(llm_engine_pop(&shm, 1, &op, &slot), LLM_RING_OK);
    assert_int_equal(op, LLM_OP_SUBMIT);
    assert_int_equal(slot, 7);
    assert_int_equal(llm_engine_pop(&shm, 1, &op, &slot), LLM_RING_OK);
    assert_int_equal(op, LLM_OP_CANCEL);
    assert_int_equal(slot, 2);

    assert_true(llm_engine_doze(&shm));
    assert_true(llm_worker_push(&shm, 3, LLM_OP_SPACE, 0));
    llm_engine_wake(&shm);
    assert_false(llm_worker_push(&shm, 3, LLM_OP_SPACE, 1));
    assert_false(llm_engine_doze(&shm));
}


static void
submit_hostile(void **state)
{
    static const uint64_t bad[] = {
        0, /* no operation */
        1ull << 32 | 8,
        1ull << 32 | UINT32_MAX,
        4ull << 32,
        UINT64_MAX,
    };
    llm_ring_t *ring = &llm_shm_worker(&shm, 0)->submit;
    uint32_t op, slot;

    (void) state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        llm_ring_push(ring, llm_shm_submit_cells(&shm, 0), 32, bad[i]);
        assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_CORRUPT);
    }

    /* the bad ones were consumed, a good one follows */
    llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 1);
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_OK);
    assert_int_equal(slot, 1);

    atomic_store(&ring->head, 12345);
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_CORRUPT);
    assert_true(llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 1));

    /* as many operations as can be under way fit */
    for (uint32_t i = 0; i < 32; i++) {
        llm_worker_push(&shm, 1, LLM_OP_SPACE, i / 4);
    }
    for (uint32_t i = 0; i < 32; i++) {
        assert_int_equal(llm_engine_pop(&shm, 1, &op, &slot), LLM_RING_OK);
        assert_int_equal(slot, i / 4);
    }
}


static void
ready_coalesces(void **state)
{
    uint32_t slot = 99;

    (void) state;

    for (int round = 0; round < 50; round++) {
        assert_true(llm_slot_notify(&shm, 2, 6));
        assert_false(llm_slot_notify(&shm, 2, 6));
        assert_true(llm_slot_notify(&shm, 2, 1));
        assert_false(llm_slot_notify(&shm, 2, 6));

        assert_int_equal(llm_worker_pop(&shm, 2, &slot), LLM_RING_OK);
        assert_int_equal(slot, 6);
        /* popped and perhaps not drained: news make a new cell */
        assert_true(llm_slot_notify(&shm, 2, 6));
        assert_int_equal(llm_worker_pop(&shm, 2, &slot), LLM_RING_OK);
        assert_int_equal(slot, 1);
        assert_int_equal(llm_worker_pop(&shm, 2, &slot), LLM_RING_OK);
        assert_int_equal(slot, 6);
        assert_int_equal(llm_worker_pop(&shm, 2, &slot), LLM_RING_EMPTY);
    }

    assert_int_equal(llm_worker_pop(&shm, 1, &slot), LLM_RING_EMPTY);
}


static void
ready_hostile(void **state)
{
    llm_ring_t *ring = &llm_shm_worker(&shm, 0)->ready;
    uint32_t slot;

    (void) state;

    llm_ring_push(ring, llm_shm_ready_cells(&shm, 0), 16, 8);
    llm_ring_push(ring, llm_shm_ready_cells(&shm, 0), 16, 1ull << 32);
    llm_ring_push(ring, llm_shm_ready_cells(&shm, 0), 16, 7);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_CORRUPT);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_CORRUPT);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_OK);
    assert_int_equal(slot, 7);

    /* a worker that broke its ready ring is still rung, and asked again */
    atomic_store(&ring->tail, 999);
    assert_true(llm_slot_notify(&shm, 0, 7));
    assert_int_equal(atomic_load(&llm_shm_slot(&shm, 0, 7)->notified), 0);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_CORRUPT);
}


static void
space_is_asked_for(void **state)
{
    llm_slot_t *s = llm_shm_slot(&shm, 0, 4);
    uint8_t *out = llm_shm_out(&shm, 0, 4);
    static uint8_t buf[16384];
    uint32_t op, slot, len;

    (void) state;

    /* nobody asked */
    assert_false(llm_worker_made_room(&shm, 0, 4));
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);

    assert_int_equal(llm_record_write(&s->out, out, 16384, buf, 10000),
                     LLM_RING_OK);
    assert_int_equal(llm_record_write(&s->out, out, 16384, buf, 10000),
                     LLM_RING_FULL);
    assert_true(llm_slot_want_space(&shm, 0, 4, 10004));
    assert_false(llm_slot_want_space(&shm, 0, 4, 6380));
    assert_true(llm_slot_want_space(&shm, 0, 4, 6381));

    assert_true(llm_engine_doze(&shm));
    assert_int_equal(llm_record_read(&s->out, out, 16384, buf, 16384, &len),
                     LLM_RING_OK);
    assert_true(llm_worker_made_room(&shm, 0, 4));
    assert_false(llm_worker_made_room(&shm, 0, 4));
    llm_engine_wake(&shm);

    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_OK);
    assert_int_equal(op, LLM_OP_SPACE);
    assert_int_equal(slot, 4);
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);
    assert_false(llm_slot_want_space(&shm, 0, 4, 10004));
}


/* --- a starting engine --- */

static void
takeover_clears(void **state)
{
    uint32_t op, slot;

    (void) state;

    atomic_store(&shm.header->state, LLM_ENGINE_READY);
    atomic_store(&shm.header->idle, 1);
    assert_int_equal(llm_worker_claim(&shm, getpid()), 0);
    assert_int_equal(llm_worker_claim(&shm, getpid()), 1);
    assert_int_equal(llm_worker_claim(&shm, getpid()), 2);
    llm_worker_release(&shm, 1);
    atomic_store(&llm_shm_worker(&shm, 2)->pid, dead_pid());

    llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 1);
    llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 2);
    assert_true(llm_slot_notify(&shm, 0, 3));             /* has a cell */
    atomic_store(&llm_shm_slot(&shm, 0, 4)->notified, 1); /* died before */
    atomic_store(&llm_shm_slot(&shm, 0, 5)->want_space, 1);

    llm_shm_takeover(&shm, 4321);

    assert_int_equal(atomic_load(&shm.header->epoch), 1);
    assert_int_equal(atomic_load(&shm.header->pid), 4321);
    assert_int_equal(atomic_load(&shm.header->state), LLM_ENGINE_LOADING);
    assert_int_equal(atomic_load(&shm.header->idle), 0);
    assert_int_equal(state_of(0), LLM_WORKER_LIVE);
    assert_int_equal(state_of(1), LLM_WORKER_FREE);
    assert_int_equal(state_of(2), LLM_WORKER_FREE);
    assert_int_equal(state_of(3), LLM_WORKER_FREE);

    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);
    assert_false(llm_worker_made_room(&shm, 0, 5));

    /* slot 4 can be notified again; slot 3 still is, in the same cell */
    assert_true(llm_slot_notify(&shm, 0, 4));
    assert_false(llm_slot_notify(&shm, 0, 3));
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_OK);
    assert_int_equal(slot, 3);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_OK);
    assert_int_equal(slot, 4);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_EMPTY);

    llm_shm_takeover(&shm, 4322);
    assert_int_equal(atomic_load(&shm.header->epoch), 2);
}


/* A worker that stands still while engines come and go. */
static void
takeovers_do_not_fill_the_ready_ring(void **state)
{
    bool seen[8] = { false };
    uint32_t slot;

    (void) state;

    llm_worker_claim(&shm, getpid());

    for (int i = 0; i < 20; i++) {
        llm_shm_takeover(&shm, 100 + i);

        for (uint32_t s = 0; s < 8; s++) {
            llm_slot_notify(&shm, 0, s);
        }
    }

    for (int i = 0; i < 8; i++) {
        assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_OK);
        assert_false(seen[slot]);
        seen[slot] = true;
    }

    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_EMPTY);
}


static void
takeover_mends_broken_rings(void **state)
{
    llm_worker_t *w = llm_shm_worker(&shm, 0);
    uint32_t op, slot;

    (void) state;

    llm_worker_claim(&shm, getpid());
    atomic_store(&w->submit.head, 777);
    atomic_store(&w->ready.head, 55);
    llm_shm_ready_cells(&shm, 0)[0] = UINT64_MAX;

    llm_shm_takeover(&shm, 1);

    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_EMPTY);
    assert_int_equal(llm_worker_pop(&shm, 0, &slot), LLM_RING_EMPTY);
    assert_false(llm_worker_push(&shm, 0, LLM_OP_SUBMIT, 6));
    assert_int_equal(llm_engine_pop(&shm, 0, &op, &slot), LLM_RING_OK);
    assert_int_equal(slot, 6);
}


#define ipc_test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int
main(void)
{
    const struct CMUnitTest tests[] = {
        ipc_test(claim_until_none_is_left),
        ipc_test(a_dead_holder_is_found),
        ipc_test(a_claim_under_way_is_left_alone),
        ipc_test(claims_race),
        ipc_test(free_leaves_nothing_behind),
        ipc_test(submit_and_doorbell),
        ipc_test(submit_hostile),
        ipc_test(ready_coalesces),
        ipc_test(ready_hostile),
        ipc_test(space_is_asked_for),
        ipc_test(takeover_clears),
        ipc_test(takeovers_do_not_fill_the_ready_ring),
        ipc_test(takeover_mends_broken_rings),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
