/*
 * The rings by themselves (real values, wrap-around, hostile indexes, random
 * operations against a naive queue) and the statistics block.  See also
 * ipc_msg_test.c, ipc_shm_test.c and ipc_stress_test.c.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/ipc/ring.h"
#include "engine/ipc/stats.h"


static uint64_t random_state;


static uint32_t
random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407;
    return (uint32_t) (random_state >> 33) % n;
}


static void
set_indexes(llm_ring_t *ring, uint32_t head, uint32_t tail)
{
    atomic_store(&ring->head, head);
    atomic_store(&ring->tail, tail);
}


/* --- cell ring --- */

static void
cells_in_order(void **state)
{
    llm_ring_t ring = { 0 };
    uint64_t cells[4] = { 0 };
    uint64_t x = 99;

    (void) state;

    /* an index that passes 2^32 within the test */
    set_indexes(&ring, UINT32_MAX - 1, UINT32_MAX - 1);

    assert_int_equal(llm_ring_pop(&ring, cells, 4, &x), LLM_RING_EMPTY);
    assert_int_equal(x, 99);

    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(llm_ring_push(&ring, cells, 4, i << 40 | i),
                         LLM_RING_OK);
    }

    assert_int_equal(llm_ring_push(&ring, cells, 4, 7), LLM_RING_FULL);

    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(llm_ring_pop(&ring, cells, 4, &x), LLM_RING_OK);
        assert_int_equal(x, i << 40 | i);
    }

    assert_int_equal(llm_ring_pop(&ring, cells, 4, &x), LLM_RING_EMPTY);
    assert_int_equal(atomic_load(&ring.head), 2);
}


static void
cells_hostile(void **state)
{
    static const uint32_t bad[][2] = { { 5, 0 },          { 0, 1 },
                                       { 0x80000000, 0 }, { 0, UINT32_MAX - 8 },
                                       { UINT32_MAX, 0 }, { 100, 200 } };
    llm_ring_t ring = { 0 };
    uint64_t cells[6] = { 1, 2, 3, 4, 0xfefe, 0xfefe };
    uint64_t x = 99;

    (void) state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        set_indexes(&ring, bad[i][0], bad[i][1]);
        assert_int_equal(llm_ring_pop(&ring, cells, 4, &x), LLM_RING_CORRUPT);
        assert_int_equal(llm_ring_push(&ring, cells, 4, 5), LLM_RING_CORRUPT);
        assert_int_equal(atomic_load(&ring.head), bad[i][0]);
        assert_int_equal(atomic_load(&ring.tail), bad[i][1]);
    }

    assert_int_equal(x, 99);
    assert_int_equal(cells[0], 1);
    assert_int_equal(cells[4], 0xfefe);
}


/* --- record ring --- */

static void
records_real_values(void **state)
{
    llm_ring_t ring = { 0 };
    uint8_t data[64];
    uint8_t out[64];
    uint32_t len = 77;

    (void) state;

    assert_int_equal(llm_record_space(&ring, 64), 64);
    assert_int_equal(llm_record_read(&ring, data, 64, out, 64, &len),
                     LLM_RING_EMPTY);

    assert_int_equal(llm_record_write(&ring, data, 64, "hello", 5),
                     LLM_RING_OK);
    assert_int_equal(llm_record_write(&ring, data, 64, NULL, 0), LLM_RING_OK);
    assert_int_equal(llm_record_space(&ring, 64), 64 - 9 - 4);

    /* a buffer too small leaves the record where it is */
    assert_int_equal(llm_record_read(&ring, data, 64, out, 4, &len),
                     LLM_RING_TOOBIG);
    assert_int_equal(len, 77);

    assert_int_equal(llm_record_read(&ring, data, 64, out, 5, &len),
                     LLM_RING_OK);
    assert_int_equal(len, 5);
    assert_memory_equal(out, "hello", 5);

    assert_int_equal(llm_record_read(&ring, data, 64, NULL, 0, &len),
                     LLM_RING_OK);
    assert_int_equal(len, 0);
    assert_int_equal(llm_record_space(&ring, 64), 64);
}


static void
records_limits(void **state)
{
    llm_ring_t ring = { 0 };
    uint8_t data[64];
    uint8_t big[64];
    uint8_t out[64];
    uint32_t len;

    (void) state;

    memset(big, 'x', sizeof(big));

    assert_int_equal(llm_record_write(&ring, data, 64, big, 61),
                     LLM_RING_TOOBIG);
    assert_int_equal(llm_record_write(&ring, data, 64, big, UINT32_MAX),
                     LLM_RING_TOOBIG);
    assert_int_equal(llm_record_write(&ring, data, 64, big, UINT32_MAX - 3),
                     LLM_RING_TOOBIG);
    assert_int_equal(atomic_load(&ring.head), 0);

    /* exactly full, then one byte too much, then exactly room again */
    assert_int_equal(llm_record_write(&ring, data, 64, big, 60), LLM_RING_OK);
    assert_int_equal(llm_record_space(&ring, 64), 0);
    assert_int_equal(llm_record_write(&ring, data, 64, big, 0), LLM_RING_FULL);
    assert_int_equal(llm_record_read(&ring, data, 64, out, 60, &len),
                     LLM_RING_OK);
    assert_int_equal(len, 60);
    assert_memory_equal(out, big, 60);
    assert_int_equal(llm_record_write(&ring, data, 64, big, 10), LLM_RING_OK);
    assert_int_equal(llm_record_write(&ring, data, 64, big, 47), LLM_RING_FULL);
    assert_int_equal(llm_record_write(&ring, data, 64, big, 46), LLM_RING_OK);
}


/* Every position of the length word and payload around the end of the ring. */
static void
records_wrap(void **state)
{
    (void) state;

    for (uint32_t at = 0; at < 40; at++) {
        llm_ring_t ring = { 0 };
        uint8_t data[32];
        uint8_t out[32];
        uint32_t len = 0;

        memset(data, 0xee, sizeof(data));
        set_indexes(&ring, UINT32_MAX - 20 + at, UINT32_MAX - 20 + at);

        assert_int_equal(
            llm_record_write(&ring, data, 32, "0123456789abcdef", 16),
            LLM_RING_OK);
        assert_int_equal(llm_record_read(&ring, data, 32, out, 32, &len),
                         LLM_RING_OK);
        assert_int_equal(len, 16);
        assert_memory_equal(out, "0123456789abcdef", 16);
    }
}


static void
records_hostile(void **state)
{
    /* heap of exact size: a sanitizer sees any step outside */
    uint8_t *data = malloc(64);
    uint8_t *out = malloc(16);
    uint32_t len = 5;
    llm_ring_t ring = { 0 };

    (void) state;

    assert_non_null(data);
    assert_non_null(out);

    /* any index, any length: an answer, never a wild access */
    for (int i = 0; i < 200000; i++) {
        uint32_t head =
            random_below(2) ? random_below(200) : random_below(1u << 31) * 2;
        uint32_t tail =
            random_below(2) ? head - random_below(70) : random_below(200);

        for (int k = 0; k < 64; k++) {
            data[k] = (uint8_t) random_below(random_below(2) ? 256 : 3);
        }

        set_indexes(&ring, head, tail);

        int rc = llm_record_read(&ring, data, 64, out, 16, &len);

        if (head == tail) {
            assert_int_equal(rc, LLM_RING_EMPTY);
        } else if (head - tail > 64 || head - tail < 4) {
            assert_int_equal(rc, LLM_RING_CORRUPT);
            assert_int_equal(llm_record_write(&ring, data, 64, "a", 1),
                             head - tail > 64 ? LLM_RING_CORRUPT : LLM_RING_OK);
        }

        if (rc == LLM_RING_OK) {
            assert_true(len <= 16 && len + 4 <= head - tail);
            assert_int_equal(atomic_load(&ring.tail), tail + 4 + len);
        } else {
            assert_int_equal(atomic_load(&ring.tail), tail);
        }
    }

    set_indexes(&ring, 100, 0);
    assert_int_equal(llm_record_space(&ring, 64), 0);

    /* the length claims more than was published */
    memset(data, 0xff, 64);
    set_indexes(&ring, 40, 0);
    assert_int_equal(llm_record_read(&ring, data, 64, out, 16, &len),
                     LLM_RING_CORRUPT);
    memset(data, 0, 64);
    data[0] = 37;
    assert_int_equal(llm_record_read(&ring, data, 64, out, 16, &len),
                     LLM_RING_CORRUPT);
    data[0] = 36;
    assert_int_equal(llm_record_read(&ring, data, 64, out, 16, &len),
                     LLM_RING_TOOBIG);

    free(data);
    free(out);
}


/* Random writes and reads against a queue of copies. */
static void
records_against_model(void **state)
{
    enum { CAP = 256, QUEUE = 128 };
    static uint8_t queue[QUEUE][CAP];
    static uint32_t queue_len[QUEUE];
    uint32_t first = 0, n = 0, used = 0;
    llm_ring_t ring = { 0 };
    uint8_t data[CAP], payload[CAP], out[CAP];
    uint32_t len;

    (void) state;

    set_indexes(&ring, UINT32_MAX - 5000, UINT32_MAX - 5000);

    for (int i = 0; i < 300000; i++) {
        assert_int_equal(llm_record_space(&ring, CAP), CAP - used);

        if (random_below(2) && n < QUEUE) {
            len = random_below(random_below(4) ? 40 : CAP);
            for (uint32_t k = 0; k < len; k++) {
                payload[k] = (uint8_t) random_below(256);
            }

            int rc = llm_record_write(&ring, data, CAP, payload, len);
            int want = len + 4 > CAP          ? LLM_RING_TOOBIG
                       : used + len + 4 > CAP ? LLM_RING_FULL
                                              : LLM_RING_OK;

            assert_int_equal(rc, want);

            if (rc == LLM_RING_OK) {
                uint32_t q = (first + n++) % QUEUE;

                memcpy(queue[q], payload, len);
                queue_len[q] = len;
                used += len + 4;
            }

        } else {
            int rc = llm_record_read(&ring, data, CAP, out, CAP, &len);

            assert_int_equal(rc, n > 0 ? LLM_RING_OK : LLM_RING_EMPTY);

            if (rc == LLM_RING_OK) {
                assert_int_equal(len, queue_len[first]);
                assert_memory_equal(out, queue[first], len);
                used -= len + 4;
                first = (first + 1) % QUEUE;
                n--;
            }
        }
    }
}


/* --- statistics --- */

static void
stats_values(void **state)
{
    llm_stats_t *stats = calloc(1, sizeof(*stats));

    (void) state;

    assert_non_null(stats);

    llm_stats_add(&stats->steps, 3);
    llm_stats_add(&stats->steps, UINT32_MAX);
    assert_int_equal(llm_stats_get(&stats->steps), 3 + (uint64_t) UINT32_MAX);

    llm_stats_set(&stats->running, 7);
    llm_stats_set(&stats->running, 2);
    assert_int_equal(llm_stats_get(&stats->running), 2);
    assert_int_equal(llm_stats_get(&stats->waiting), 0);

    /* to the last number, and no further */
    memset(stats, 0xff, sizeof(*stats));
    llm_stats_reset(stats);

    for (size_t i = 0; i < sizeof(*stats); i++) {
        assert_int_equal(((uint8_t *) stats)[i], 0);
    }

    free(stats);
}


static void
stats_bounds(void **state)
{
    const uint64_t *(*families[])(
        int *) = { llm_stats_bounds_ttft,    llm_stats_bounds_inter,
                   llm_stats_bounds_latency, llm_stats_bounds_step,
                   llm_stats_bounds_tokens,  llm_stats_bounds_choices,
                   llm_stats_bounds_times };
    static const int counts[] = { 22, 19, 21, 13, 22, 5, 7 };
    static const uint64_t firsts[] = { 1000, 10000, 300000, 1, 1, 1, 1 };
    static const uint64_t lasts[] = { 2560000000, 80000000, 7680000000, 16384,
                                      10000000,   20,       20 };

    (void) state;

    for (int f = 0; f < 7; f++) {
        int n = 0;
        const uint64_t *bounds = families[f](&n);

        assert_int_equal(n, counts[f]);
        assert_true(n < LLM_HIST_MAX);
        assert_int_equal(bounds[0], firsts[f]);
        assert_int_equal(bounds[n - 1], lasts[f]);

        for (int i = 1; i < n; i++) {
            assert_true(bounds[i] > bounds[i - 1]);
        }
    }
}


static void
stats_observe(void **state)
{
    static const uint64_t bounds[] = { 10, 20, 50 };
    llm_hist_t hist = { 0 };

    (void) state;

    llm_stats_observe(&hist, bounds, 3, 0);
    llm_stats_observe(&hist, bounds, 3, 10); /* on the bound: inside */
    llm_stats_observe(&hist, bounds, 3, 11);
    llm_stats_observe(&hist, bounds, 3, 50);
    llm_stats_observe(&hist, bounds, 3, 51);
    llm_stats_observe(&hist, bounds, 3, 1000000);

    assert_int_equal(llm_stats_get(&hist.bucket[0]), 2);
    assert_int_equal(llm_stats_get(&hist.bucket[1]), 1);
    assert_int_equal(llm_stats_get(&hist.bucket[2]), 1);
    assert_int_equal(llm_stats_get(&hist.bucket[3]), 2);
    assert_int_equal(llm_stats_get(&hist.bucket[4]), 0);
    assert_int_equal(llm_stats_get(&hist.count), 6);
    assert_int_equal(llm_stats_get(&hist.sum), 1000122);
}


int
main(void)
{
    const char *seed = getenv("LLM_TEST_SEED");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cells_in_order),
        cmocka_unit_test(cells_hostile),
        cmocka_unit_test(records_real_values),
        cmocka_unit_test(records_limits),
        cmocka_unit_test(records_wrap),
        cmocka_unit_test(records_hostile),
        cmocka_unit_test(records_against_model),
        cmocka_unit_test(stats_values),
        cmocka_unit_test(stats_bounds),
        cmocka_unit_test(stats_observe),
    };

    random_state =
        seed != NULL ? strtoull(seed, NULL, 0) : (uint64_t) time(NULL);
    printf("# LLM_TEST_SEED=%llu\n", (unsigned long long) random_state);

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
