/*
 * Two sides at full speed over a real segment: the parent is the worker, a
 * forked child the engine.  Under ThreadSanitizer, which sees one process
 * only, the engine is a thread and the counts are smaller.
 *
 * A side that waits longer than PATIENCE_MS for its doorbell has lost a
 * wake-up: that is a failure, not a delay.
 */

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/ipc/shm.h"

#if defined(__SANITIZE_THREAD__)
#define THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS 1
#endif
#endif

#ifndef THREADS
#define THREADS 0
#endif

enum {
    CELLS = THREADS ? 300000 : 4000000,
    RECORDS = THREADS ? 100000 : 1000000,
    REQUESTS = THREADS ? 2000 : 20000,
    PER_REQUEST = 20, /* records of one request */
    SLOTS = 8,
    LONGEST = 6000, /* bytes of a record */
    PATIENCE_MS = 20000,
};

typedef struct {
    llm_shm_t shm;
    int engine_bell;
    int worker_bell;
    uint64_t seed;
} pair_t;

/* What a record of the protocol test begins with. */
typedef struct {
    uint32_t ticket;
    uint32_t number;
    uint32_t len;
} mark_t;


static uint32_t
random_below(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407;
    return (uint32_t) (*state >> 33) % n;
}


static void
ring_bell(int fd)
{
    uint64_t one = 1;

    if (write(fd, &one, sizeof(one)) != (ssize_t) sizeof(one)) {
        abort();
    }
}


/* False when the bell stayed silent. */
static bool
wait_bell(int fd)
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    uint64_t count;

    if (poll(&p, 1, PATIENCE_MS) != 1) {
        return false;
    }

    return read(fd, &count, sizeof(count)) == (ssize_t) sizeof(count);
}


/* --- the two sides run --- */

typedef struct {
    pair_t *pair;
    const char *(*engine)(pair_t *);
    const char *wrong;
} engine_run_t;


static void *
engine_thread(void *arg)
{
    engine_run_t *run = arg;

    run->wrong = run->engine(run->pair);

    return NULL;
}


/* Runs both sides to their end; each returns what went wrong, or NULL. */
static void
run_pair(const char *(*engine)(pair_t *), const char *(*worker)(pair_t *),
         pair_t *pair)
{
    engine_run_t run = { pair, engine, NULL };
    const char *wrong;

    if (THREADS) {
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, engine_thread, &run),
                         0);
        wrong = worker(pair);
        pthread_join(thread, NULL);

    } else {
        pid_t pid = fork();
        int status;

        assert_int_not_equal(pid, -1);

        if (pid == 0) {
            engine_thread(&run);
            if (run.wrong != NULL) {
                printf("# engine: %s\n", run.wrong);
                fflush(stdout);
            }
            _exit(run.wrong != NULL);
        }

        wrong = worker(pair);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }

    if (wrong != NULL || run.wrong != NULL) {
        fail_msg("worker: %s, engine: %s", wrong, run.wrong);
    }
}


static int
setup(void **state)
{
    static pair_t pair;
    static uint64_t seed;
    const llm_geometry_t geo = { 2, SLOTS, 4096, 16384, 64 };
    const char *given = getenv("LLM_TEST_SEED");
    char err[256];

    if (seed == 0) {
        seed = given != NULL ? strtoull(given, NULL, 0)
                             : (uint64_t) time(NULL);
        printf("# LLM_TEST_SEED=%llu\n", (unsigned long long) seed);
        fflush(stdout);
    }

    pair.seed = seed;
    pair.engine_bell = eventfd(0, EFD_CLOEXEC);
    pair.worker_bell = eventfd(0, EFD_CLOEXEC);
    *state = &pair;

    return llm_shm_create(&geo, &pair.shm, err, sizeof(err));
}


static int
teardown(void **state)
{
    pair_t *pair = *state;
    int fd = pair->shm.fd;

    llm_shm_detach(&pair->shm);
    close(pair->engine_bell);
    close(pair->worker_bell);

    return close(fd);
}


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
               == LLM_RING_FULL)
        {
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


/* --- the whole protocol, with sleeping on doorbells --- */

typedef struct {
    uint32_t ticket; /* 0: idle */
    uint32_t number; /* next record */
    bool parked;
} stream_t;

typedef struct {
    pair_t *pair;
    stream_t streams[SLOTS];
    uint64_t random;
    uint32_t finished;
    const char *wrong;
} sim_t;


static void
sim_intake(sim_t *sim)
{
    llm_shm_t *shm = &sim->pair->shm;
    uint32_t op, slot;
    int rc;

    while ((rc = llm_engine_pop(shm, 0, &op, &slot)) == LLM_RING_OK) {
        stream_t *stream = &sim->streams[slot];
        llm_slot_t *s = llm_shm_slot(shm, 0, slot);

        if (op == LLM_OP_SPACE) {
            stream->parked = false;
            continue;
        }

        if (stream->ticket != 0) {
            sim->wrong = "a slot was submitted twice";
        }

        stream->ticket = atomic_load(&s->ticket);
        stream->number = 0;
        stream->parked = false;

        if (s->request_len != stream->ticket % 1000
            || llm_shm_request(shm, 0, slot)[0] != (uint8_t) stream->ticket)
        {
            sim->wrong = "the request is not the one submitted";
        }
    }

    if (rc == LLM_RING_CORRUPT) {
        sim->wrong = "a corrupt operation";
    }
}


/* Writes a record of the stream in slot, or parks it. */
static void
sim_emit(sim_t *sim, uint32_t slot)
{
    static uint8_t buf[LONGEST + sizeof(mark_t)];
    llm_shm_t *shm = &sim->pair->shm;
    llm_slot_t *s = llm_shm_slot(shm, 0, slot);
    stream_t *stream = &sim->streams[slot];
    mark_t mark = { stream->ticket, stream->number,
                    random_below(&sim->random, LONGEST) };
    uint32_t len = sizeof(mark) + mark.len;

    memcpy(buf, &mark, sizeof(mark));
    memset(buf + sizeof(mark), (int) (mark.number ^ mark.ticket) & 0xff,
           mark.len);

    int rc = llm_record_write(&s->out, llm_shm_out(shm, 0, slot), 16384, buf,
                              len);

    if (rc == LLM_RING_FULL) {
        stream->parked = llm_slot_want_space(shm, 0, slot, len + 4);
        llm_stats_add(&shm->stats->parked, stream->parked);
        return;
    }

    if (rc != LLM_RING_OK) {
        sim->wrong = "a record was refused";
        return;
    }

    llm_shm_log(shm, 0, slot)[stream->number] = (int32_t) mark.len;
    atomic_store_explicit(&s->log_len, ++stream->number, memory_order_release);

    if (stream->number == PER_REQUEST) {
        atomic_store_explicit(&s->done, stream->ticket, memory_order_release);
        stream->ticket = 0;
        sim->finished++;
    }

    if (llm_slot_notify(shm, 0, slot)) {
        ring_bell(sim->pair->worker_bell);
    }
}


static const char *
protocol_engine(pair_t *pair)
{
    sim_t sim = { .pair = pair, .random = pair->seed };
    llm_shm_t *shm = &pair->shm;

    while (sim.finished < REQUESTS && sim.wrong == NULL) {
        bool busy = false;

        sim_intake(&sim);

        for (uint32_t i = 0; i < SLOTS; i++) {
            if (sim.streams[i].ticket != 0 && !sim.streams[i].parked) {
                sim_emit(&sim, i);
                busy = true;
            }
        }

        if (!busy && llm_engine_doze(shm)) {
            llm_stats_add(&shm->stats->steps, 1);
            if (!wait_bell(pair->engine_bell)) {
                return "no doorbell: a wake-up was lost";
            }
            llm_engine_wake(shm);
        }
    }

    return sim.wrong;
}


typedef struct {
    pair_t *pair;
    uint32_t tickets[SLOTS];
    uint32_t numbers[SLOTS];
    uint32_t next; /* ticket */
    uint32_t finished;
    const char *wrong;
} client_t;


static void
client_submit(client_t *client, uint32_t slot)
{
    llm_shm_t *shm = &client->pair->shm;
    llm_slot_t *s = llm_shm_slot(shm, 0, slot);
    uint32_t ticket = ++client->next;

    client->tickets[slot] = ticket;
    client->numbers[slot] = 0;
    llm_shm_request(shm, 0, slot)[0] = (uint8_t) ticket;
    s->request_len = ticket % 1000;
    atomic_store(&s->ticket, ticket);

    if (llm_worker_push(shm, 0, LLM_OP_SUBMIT, slot)) {
        ring_bell(client->pair->engine_bell);
    }
}


/* Reads all records of slot, checks them, frees the slot after the last. */
static void
client_drain(client_t *client, uint32_t slot)
{
    static uint8_t buf[LONGEST + sizeof(mark_t)];
    llm_shm_t *shm = &client->pair->shm;
    llm_slot_t *s = llm_shm_slot(shm, 0, slot);
    uint32_t ticket = client->tickets[slot];
    uint32_t len;
    int rc;

    /* before the records: what was published before `done` is then seen */
    bool done = atomic_load_explicit(&s->done, memory_order_acquire) == ticket;

    while ((rc = llm_record_read(&s->out, llm_shm_out(shm, 0, slot), 16384,
                                 buf, sizeof(buf), &len))
           == LLM_RING_OK)
    {
        mark_t mark;
        uint32_t number = client->numbers[slot]++;

        memcpy(&mark, buf, sizeof(mark));

        if (mark.ticket != ticket || mark.number != number
            || len != sizeof(mark) + mark.len
            || (mark.len > 0
                && buf[len - 1] != (uint8_t) (number ^ ticket)))
        {
            client->wrong = "a record was lost, repeated or torn";
        }

        if (atomic_load_explicit(&s->log_len, memory_order_acquire) > number
            && number + 1 < PER_REQUEST
            && llm_shm_log(shm, 0, slot)[number] != (int32_t) mark.len)
        {
            client->wrong = "the log differs from the record";
        }
    }

    if (rc != LLM_RING_EMPTY) {
        client->wrong = "an output ring is corrupt";
    }

    if (llm_worker_made_room(shm, 0, slot)) {
        ring_bell(client->pair->engine_bell);
    }

    if (done && client->numbers[slot] != PER_REQUEST) {
        client->wrong = "done before the last record";

    } else if (done) {
        client->finished++;
        if (client->next < REQUESTS) {
            client_submit(client, slot);
        }
    }
}


static const char *
protocol_worker(pair_t *pair)
{
    client_t client = { .pair = pair };
    uint32_t slot;
    int rc;

    for (uint32_t i = 0; i < SLOTS; i++) {
        client_submit(&client, i);
    }

    while (client.finished < REQUESTS && client.wrong == NULL) {
        if (!wait_bell(pair->worker_bell)) {
            return "no doorbell: a wake-up was lost";
        }

        while ((rc = llm_worker_pop(&pair->shm, 0, &slot)) == LLM_RING_OK) {
            client_drain(&client, slot);
        }

        if (rc != LLM_RING_EMPTY) {
            return "the ready ring is corrupt";
        }
    }

    return client.wrong;
}


static void
protocol(void **state)
{
    pair_t *pair = *state;
    llm_stats_t *stats = pair->shm.stats;

    run_pair(protocol_engine, protocol_worker, pair);

    /* both kinds of waiting took place, or nothing was tried */
    printf("# parked %llu times, slept %llu times\n",
           (unsigned long long) llm_stats_get(&stats->parked),
           (unsigned long long) llm_stats_get(&stats->steps));
    fflush(stdout);
    assert_true(llm_stats_get(&stats->parked) > 100);
    assert_true(llm_stats_get(&stats->steps) > 10);
}


#define stress_test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int
main(void)
{
    const struct CMUnitTest tests[] = {
        stress_test(cells),
        stress_test(records),
        stress_test(protocol),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
