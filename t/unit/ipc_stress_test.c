/*
 * Cell ring and record ring at full speed between two processes, while their
 * indexes pass 2^32: every cell and byte arrives once, in order.
 */

#include <sched.h>
#include <string.h>

#include "t/unit/ipc_pair.h"

enum {
    CELLS = THREADS ? 300000 : 4000000,
    RECORDS = THREADS ? 100000 : 1000000,
};


/* --- cells --- */

static uint64_t
cell_of(uint64_t i)
{
    return i * 0x9e3779b97f4a7c15ull;
}


static const char *
cells_engine(pair_t *pair)
{
    llm_shm_t *shm = &pair->shm;
    llm_ring_t *ring = &llm_shm_worker(shm, 1)->submit;
    uint64_t cell;

    for (uint64_t i = 0; i < CELLS; i++) {
        int rc;

        while ((rc = llm_ring_pop(ring, llm_shm_submit_cells(shm, 1),
                                  llm_shm_submit_cap(shm), &cell))
               == LLM_RING_EMPTY)
        {
            sched_yield();
        }

        if (rc != LLM_RING_OK) {
            return "pop failed";
        }

        if (cell != cell_of(i)) {
            return "a cell was lost, repeated or torn";
        }
    }

    return NULL;
}


static const char *
cells_worker(pair_t *pair)
{
    llm_shm_t *shm = &pair->shm;
    llm_ring_t *ring = &llm_shm_worker(shm, 1)->submit;

    for (uint64_t i = 0; i < CELLS; i++) {
        int rc;

        while ((rc = llm_ring_push(ring, llm_shm_submit_cells(shm, 1),
                                   llm_shm_submit_cap(shm), cell_of(i)))
               == LLM_RING_FULL)
        {
            sched_yield();
        }

        if (rc != LLM_RING_OK) {
            return "push failed";
        }
    }

    return NULL;
}


static void
cells(void **state)
{
    pair_t *pair = *state;
    llm_ring_t *ring = &llm_shm_worker(&pair->shm, 1)->submit;

    /* the indexes pass 2^32 on the way */
    atomic_store(&ring->head, UINT32_MAX - 1000);
    atomic_store(&ring->tail, UINT32_MAX - 1000);

    run_pair(cells_engine, cells_worker, pair);
}


/* --- records --- */

static uint32_t
record_len(uint64_t *random)
{
    return random_below(random, random_below(random, 50) == 0 ? LONGEST : 80);
}


static const char *
records_engine(pair_t *pair)
{
    static uint8_t buf[LONGEST];
    llm_ring_t *ring = &llm_shm_slot(&pair->shm, 1, 3)->out;
    uint8_t *data = llm_shm_out(&pair->shm, 1, 3);
    uint64_t random = pair->seed;

    for (uint32_t i = 0; i < RECORDS; i++) {
        uint32_t len = record_len(&random);
        int rc;

        memset(buf, (int) (i % 251), len);

        while ((rc = llm_record_write(ring, data, 16384, buf, len))
               == LLM_RING_FULL) {
            sched_yield();
        }

        if (rc != LLM_RING_OK) {
            return "write failed";
        }
    }

    return NULL;
}


static const char *
records_worker(pair_t *pair)
{
    static uint8_t buf[LONGEST], want[LONGEST];
    llm_ring_t *ring = &llm_shm_slot(&pair->shm, 1, 3)->out;
    uint8_t *data = llm_shm_out(&pair->shm, 1, 3);
    uint64_t random = pair->seed;

    for (uint32_t i = 0; i < RECORDS; i++) {
        uint32_t len, want_len = record_len(&random);
        int rc;

        while ((rc = llm_record_read(ring, data, 16384, buf, LONGEST, &len))
               == LLM_RING_EMPTY)
        {
            sched_yield();
        }

        if (rc != LLM_RING_OK) {
            return "read failed";
        }

        memset(want, (int) (i % 251), want_len);

        if (len != want_len || memcmp(buf, want, len) != 0) {
            return "a record was lost, repeated or torn";
        }
    }

    return NULL;
}


static void
records(void **state)
{
    pair_t *pair = *state;
    llm_ring_t *ring = &llm_shm_slot(&pair->shm, 1, 3)->out;

    atomic_store(&ring->head, UINT32_MAX - 100000);
    atomic_store(&ring->tail, UINT32_MAX - 100000);

    run_pair(records_engine, records_worker, pair);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        pair_test(cells),
        pair_test(records),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
