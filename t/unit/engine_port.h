/*
 * The engine's end of a real segment, with the worker's end in the hands of
 * the test.  Included by the two tests of the port.
 *
 * The descriptors are the launcher's: 3 segment, 4 doorbell, 5 lifeline, 6
 * channel, 7 … bells.
 */

#ifndef T_UNIT_ENGINE_PORT_H
#define T_UNIT_ENGINE_PORT_H

#include "t/unit/engine_tiny.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "engine/port.h"

enum { WORKERS = 2, SLOTS = 8, LOG_TOKENS = 64, OUT_BYTES = 16384 };

static const llm_geometry_t geo = { WORKERS, SLOTS, 1 << 20, OUT_BYTES,
                                    LOG_TOKENS };

static engine_t *engine;
static llm_shm_t shm; /* the workers' view */
static port_t port;
static int lifeline; /* nginx's end */
static int channel;
static uint32_t ticket;
static uint32_t rung[WORKERS][SLOTS]; /* ready notices per slot */
static reply_t reply;


/* Puts fd where the launcher would. */
static inline void
place(int fd, int where)
{
    assert_int_not_equal(fd, -1);
    assert_int_equal(dup2(fd, where), where);
    close(fd);
}


/* Out of the way of the launcher's numbers. */
static inline int
aside(int fd)
{
    const int far = fcntl(fd, F_DUPFD, 200);

    assert_int_not_equal(far, -1);
    close(fd);

    return far;
}


static inline void
make_descriptors(void)
{
    int pair[2];
    char err[256];

    for (int fd = PORT_FD_SEGMENT; fd < PORT_FD_BELLS + WORKERS; fd++) {
        close(fd);
        assert_int_equal(open("/dev/null", O_RDWR), fd);
    }

    if (llm_shm_create(&geo, &shm, err, sizeof(err)) != 0) {
        fail_msg("%s", err);
    }

    shm.fd = aside(shm.fd);
    assert_int_equal(dup2(shm.fd, PORT_FD_SEGMENT), PORT_FD_SEGMENT);
    place(aside(eventfd(0, EFD_NONBLOCK)), PORT_FD_DOORBELL);
    assert_int_equal(pipe(pair), 0);
    place(aside(pair[0]), PORT_FD_LIFELINE);
    lifeline = aside(pair[1]);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    place(aside(pair[0]), PORT_FD_CHANNEL);
    channel = aside(pair[1]);

    for (int w = 0; w < WORKERS; w++) {
        place(aside(eventfd(0, EFD_NONBLOCK)), PORT_FD_BELLS + w);
    }
}


static inline void
attach(void)
{
    llm_err_t err;

    if (port_attach(&port, WORKERS, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    port_ready(&port, engine);
}


static inline int
setup(void **state)
{
    (void) state;

    if (engine == NULL) {
        engine = tiny_engine(NULL);
    }

    make_descriptors();
    attach();

    for (int w = 0; w < WORKERS; w++) {
        assert_int_equal(llm_worker_claim(&shm, (int32_t) getpid()), w);
    }

    memset(rung, 0, sizeof(rung));
    reply_fini(&reply);

    return 0;
}


static inline int
teardown(void **state)
{
    const int fd = shm.fd;

    (void) state;

    while (!list_empty(&engine->requests)) {
        request_t *req = list_entry(engine->requests.next, request_t, link);

        emit_abort(engine, req);
        request_destroy(req);
    }

    assert_int_equal(pages_used(engine), 0);
    engine->stats = &engine->own_stats;
    engine->on_tokens = NULL;
    port_detach(&port);
    llm_shm_detach(&shm);
    close(fd);
    close(lifeline);
    close(channel);
    reply_fini(&reply);

    return 0;
}


/* --- the worker's side --- */

static inline llm_slot_t *
slot_at(uint32_t w, uint32_t s)
{
    return llm_shm_slot(&shm, w, s);
}


static inline void
push(uint32_t w, uint32_t op, uint32_t s)
{
    llm_worker_push(&shm, w, op, s);
}


/* Puts what `a` has written into the slot; its ticket. */
static inline uint32_t
fill(uint32_t w, uint32_t s, ask_t *a)
{
    const uint32_t len = llm_request_end(&a->w);
    llm_slot_t *slot = slot_at(w, s);

    assert_true(len > 0 && len <= geo.request_bytes);
    memcpy(llm_shm_request(&shm, w, s), tiny_area, len);
    atomic_store(&slot->out.tail, atomic_load(&slot->out.head));
    slot->epoch = atomic_load(&shm.header->epoch);
    slot->request_len = len;
    slot->submit_ns = 1;
    atomic_store(&slot->cancel, 0);
    atomic_exchange(&slot->want_space, 0);
    atomic_store(&slot->ticket, ++ticket);

    return ticket;
}


static inline uint32_t
submit_text(uint32_t w, uint32_t s, int max_tokens)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_IGNORE_EOS);

    a.params.max_tokens = max_tokens;
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    fill(w, s, &a);
    push(w, LLM_OP_SUBMIT, s);

    return ticket;
}


/* n ids whose text is 300 bytes each: more than the ring holds. */
static inline uint32_t
submit_detokenize(uint32_t w, uint32_t s, int n)
{
    ask_t a = ask(LLM_REQ_DETOKENIZE, 0);

    ask_begin(&a);
    llm_request_section(&a.w, LLM_SEC_PROMPT);

    for (int i = 0; i < n; i++) {
        const int32_t id = TOK_LONG + i % N_LONG;
        llm_request_add(&a.w, &id, sizeof(id));
    }

    fill(w, s, &a);
    push(w, LLM_OP_SUBMIT, s);

    return ticket;
}


static inline void
cancel(uint32_t w, uint32_t s, uint32_t t)
{
    atomic_store(&slot_at(w, s)->cancel, t);
    push(w, LLM_OP_CANCEL, s);
}


static inline void
drain_ready(uint32_t w)
{
    uint32_t s;
    uint64_t count;

    while (llm_worker_pop(&shm, w, &s) == LLM_RING_OK) {
        rung[w][s]++;
    }

    if (read((int) (PORT_FD_BELLS + w), &count, sizeof(count)) == -1) {
        assert_int_equal(errno, EAGAIN);
    }
}


/* Reads at most n records. */
static inline void
collect(uint32_t w, uint32_t s, int n)
{
    uint8_t payload[LLM_RECORD_MAX];
    uint32_t len;

    drain_ready(w);

    while (n-- > 0
           && llm_record_read(&slot_at(w, s)->out, llm_shm_out(&shm, w, s),
                              geo.out_bytes, payload, sizeof(payload), &len)
                  == LLM_RING_OK)
    {
        reply_record(&reply, payload, len);
    }

    llm_worker_made_room(&shm, w, s);
}


/* One turn of the loop that does not sleep. */
static inline bool
turn(void)
{
    port_intake(&port, engine);

    const bool busy = engine_step(engine);

    port_flush(&port, engine);
    port.checked_ns = 0;
    port_wait(&port, engine, true);
    sched_check(engine->sched);

    return busy;
}


static inline bool
done(uint32_t w, uint32_t s, uint32_t t)
{
    return atomic_load(&slot_at(w, s)->done) == t;
}


static inline void
run_until_done(uint32_t w, uint32_t s, uint32_t t)
{
    for (int i = 0; i < 1000 && !done(w, s, t); i++) {
        turn();
        collect(w, s, 1000);
    }

    assert_true(done(w, s, t));
    collect(w, s, 1000);
    assert_int_equal(reply.n_done + reply.n_fail, 1);
    assert_null(port.by_slot[w * SLOTS + s]);
}


/* A request from elsewhere shows that the engine still serves. */
static inline void
still_serves(uint32_t w, uint32_t s)
{
    reply_fini(&reply);
    run_until_done(w, s, submit_text(w, s, 5));
    assert_int_equal(reply.done.completion_tokens, 5);
    reply_fini(&reply);
}


static inline int
finish(void **state)
{
    (void) state;
    engine_close(engine);

    return 0;
}


#define port_test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

#endif /* T_UNIT_ENGINE_PORT_H */
