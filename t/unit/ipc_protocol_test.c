/*
 * The whole protocol between two processes that sleep on doorbells: submit,
 * records, parking for want of space, ready ring, done.
 *
 * How often a side waits is for the clock to decide, so the worker holds back
 * now and then until the engine has found nothing to do and slept: it parks
 * every stream that has more to say, whoever is faster.
 *
 * A side that waits longer than PATIENCE_MS for its doorbell has lost a
 * wake-up: that is a failure, not a delay.
 */

#include <poll.h>
#include <string.h>

#include "t/unit/ipc_pair.h"

enum {
    REQUESTS = THREADS ? 2000 : 20000,
    PER_REQUEST = 20, /* records of one request */
    HOLD_EVERY = REQUESTS / 50,
    PATIENCE_MS = 20000,
};

/* What a record begins with. */
typedef struct {
    uint32_t ticket;
    uint32_t number;
    uint32_t len;
} mark_t;


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

    int rc =
        llm_record_write(&s->out, llm_shm_out(shm, 0, slot), 16384, buf, len);

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
    uint32_t holds;
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

    while ((rc = llm_record_read(&s->out, llm_shm_out(shm, 0, slot), 16384, buf,
                                 sizeof(buf), &len))
           == LLM_RING_OK)
    {
        mark_t mark;
        uint32_t number = client->numbers[slot]++;

        memcpy(&mark, buf, sizeof(mark));

        if (mark.ticket != ticket || mark.number != number
            || len != sizeof(mark) + mark.len
            || (mark.len > 0 && buf[len - 1] != (uint8_t) (number ^ ticket)))
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


/*
 * Reads nothing until the engine has slept once more than at the last hold;
 * between two holds it was woken, as requests that were submitted after the
 * first of them have finished.  False when it does not sleep.
 */
static bool
client_hold(client_t *client)
{
    llm_stats_t *stats = client->pair->shm.stats;

    client->holds++;

    for (uint32_t ms = 0; ms < PATIENCE_MS; ms++) {
        if (llm_stats_get(&stats->steps) >= client->holds) {
            return true;
        }
        usleep(1000);
    }

    return false;
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

        if (client.next < REQUESTS
            && client.finished >= (client.holds + 1) * HOLD_EVERY
            && !client_hold(&client))
        {
            return "the engine works on where nobody reads";
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


int
main(void)
{
    const struct CMUnitTest tests[] = {
        pair_test(protocol),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
