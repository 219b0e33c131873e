/*
 * The engine's end of the shared segment.
 *
 * What workers wrote is checked before use: slot numbers against the geometry,
 * lengths against the area, tickets against the request in hand.
 */

#include "engine/port.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/emit.h"
#include "engine/intake.h"

enum {
    IDLE_MS = 1000,    /* heartbeat and worker check while idle */
    QUIT_MS = 50,      /* the same while draining */
    BUSY_CHECK_MS = 5, /* descriptors are looked at this often */
};


static int
slot_index(const port_t *port, uint32_t worker, uint32_t slot)
{
    return (int) (worker * port->shm.geo.slots_per_worker + slot);
}


static llm_slot_t *
slot_of(const port_t *port, const request_t *req)
{
    return llm_shm_slot(&port->shm, req->from.worker, req->from.slot);
}


int
port_attach(port_t *port, int n_workers, llm_err_t *err)
{
    char why[256];

    *port = (port_t){ .n_workers = n_workers, .live = 1 };

    const int rc = port_fd_open(&port->fds, n_workers, err);

    if (rc != LLM_OK) {
        return rc;
    }

    if (llm_shm_attach(PORT_FD_SEGMENT, &port->shm, why, sizeof(why)) != 0) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "no shared segment: %s (llm-engine serve is "
                           "started by nginx)",
                           why);
    }

    if (port->shm.geo.n_workers != (uint32_t) n_workers) {
        llm_err_set(err, LLM_ERROR, NULL, "workers=%d, but the segment has %u",
                    n_workers, port->shm.geo.n_workers);
        llm_shm_detach(&port->shm);
        return LLM_ERROR;
    }

    const size_t slots = (size_t) n_workers * port->shm.geo.slots_per_worker;

    port->dirty = calloc((size_t) n_workers, sizeof(bool));
    port->by_slot = calloc(slots, sizeof(request_t *));

    if (port->dirty == NULL || port->by_slot == NULL) {
        free(port->dirty);
        free(port->by_slot);
        llm_shm_detach(&port->shm);
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    llm_stats_reset(port->shm.stats);
    llm_shm_takeover(&port->shm, (int32_t) getpid());
    atomic_store(&port->shm.header->heartbeat_ns, clock_now_ns());
    port_fd_ring_all(port->n_workers);

    return LLM_OK;
}


void
port_detach(port_t *port)
{
    if (atomic_load(&port->shm.header->state) != LLM_ENGINE_FAILED) {
        atomic_store(&port->shm.header->state, LLM_ENGINE_ABSENT);
    }

    port_fd_ring_all(port->n_workers);
    llm_shm_detach(&port->shm);
    free(port->dirty);
    free(port->by_slot);
}


void
port_failed(port_t *port, const char *reason)
{
    llm_header_t *header = port->shm.header;

    snprintf(header->reason, sizeof(header->reason), "%s", reason);
    atomic_store(&header->state, LLM_ENGINE_FAILED);
    port_fd_ring_all(port->n_workers);
}


static void
log_tokens(engine_t *engine, request_t *req, const int32_t *tokens, int n)
{
    const port_t *port = engine->port;
    llm_slot_t *slot = slot_of(port, req);
    int32_t *ids = llm_shm_log(&port->shm, req->from.worker, req->from.slot);
    const uint32_t have =
        atomic_load_explicit(&slot->log_len, memory_order_relaxed);
    const uint32_t cap = port->shm.geo.log_tokens;
    const uint32_t room = have < cap ? cap - have : 0;
    const uint32_t more = (uint32_t) n < room ? (uint32_t) n : room;

    if (more > 0) {
        memcpy(ids + have, tokens, more * sizeof(int32_t));
        atomic_store_explicit(&slot->log_len, have + more,
                              memory_order_release);
    }
}


void
port_ready(port_t *port, engine_t *engine)
{
    llm_header_t *header = port->shm.header;
    llm_card_t *card = &header->card;
    const char *alias = engine->conf.alias;

    if (alias == NULL) {
        const char *slash = strrchr(engine->conf.model, '/');
        alias = slash != NULL ? slash + 1 : engine->conf.model;
    }

    snprintf(card->alias, sizeof(card->alias), "%s", alias);
    snprintf(card->root, sizeof(card->root), "%s", engine->model_name);
    card->created = (uint64_t) time(NULL);
    card->max_model_len = (uint32_t) engine->max_model_len;
    card->n_vocab = (uint32_t) tok_n_vocab(engine->tok);
    card->has_chat_template = engine->own_template;
    card->max_num_seqs = (uint32_t) engine->conf.max_num_seqs;

    engine->port = port;
    engine->on_tokens = log_tokens;
    llm_stats_set(&port->shm.stats->pages_total, (uint64_t) engine->kv.n_pages);
    engine->stats = port->shm.stats;

    atomic_store(&header->state, LLM_ENGINE_READY);
    port_fd_ring_all(port->n_workers);
}


/* Hands the slot back: the last thing that happens to a request. */
static void
slot_close(port_t *port, uint32_t worker, uint32_t slot, uint32_t ticket)
{
    llm_slot_t *s = llm_shm_slot(&port->shm, worker, slot);

    port->by_slot[slot_index(port, worker, slot)] = NULL;
    atomic_store_explicit(&s->done, ticket, memory_order_release);
    port->dirty[worker] |= llm_slot_notify(&port->shm, worker, slot);
}


/* There is no memory for a request, not even to say so in its own buffer: the
 * client must hear of it all the same. */
static void
slot_refuse(port_t *port, uint32_t worker, uint32_t slot, uint32_t ticket)
{
    const llm_fail_t fail = {
        .fail = LLM_FAIL_BUSY,
        .retry_after = atomic_load_explicit(&port->shm.header->retry_after,
                                            memory_order_relaxed),
        .text = "The server has no memory for this request.",
    };
    llm_slot_t *s = llm_shm_slot(&port->shm, worker, slot);
    uint8_t payload[LLM_RECORD_MAX];

    const uint32_t len = llm_encode_fail(payload, sizeof(payload), &fail);

    if (llm_record_write(&s->out, llm_shm_out(&port->shm, worker, slot),
                         port->shm.geo.out_bytes, payload, len)
        != LLM_RING_OK)
    {
        log_write(LOG_ERR, "port: worker %u, slot %u: no room for an error",
                  worker, slot);
    }

    slot_close(port, worker, slot, ticket);
}


static void
slot_submit(port_t *port, engine_t *engine, uint32_t worker, uint32_t slot)
{
    llm_slot_t *s = llm_shm_slot(&port->shm, worker, slot);
    const uint32_t ticket =
        atomic_load_explicit(&s->ticket, memory_order_acquire);

    /* each field is read once: what is checked is what is used */
    const volatile llm_slot_t *shared = s;
    const uint32_t epoch = shared->epoch;
    const uint32_t len = shared->request_len;
    const uint64_t sent_ns = shared->submit_ns;
    const uint64_t now = clock_now_ns();

    if (epoch != atomic_load(&port->shm.header->epoch)) {
        return; /* meant for an engine that has died */
    }

    if (port->by_slot[slot_index(port, worker, slot)] != NULL
        || len > port->shm.geo.request_bytes || ticket == 0)
    {
        log_write(LOG_ERR, "port: worker %u submitted slot %u wrongly", worker,
                  slot);
        return;
    }

    /* canceled before it was seen: it need not be tokenized */
    if (atomic_load(&s->cancel) == ticket) {
        llm_stats_add(&engine->stats->finished[LLM_FINISH_ABORT], 1);
        slot_close(port, worker, slot, ticket);
        return;
    }

    atomic_store(&s->log_len, 0);
    atomic_store(&s->want_space, 0);

    /* the request's slot is known before intake: tokenize writes the log */
    const request_origin_t origin = { worker, slot, ticket,
                                      sent_ns < now ? sent_ns : now };
    request_t *req = intake_request(
        engine, llm_shm_request(&port->shm, worker, slot), len, &origin);

    if (req == NULL) {
        slot_refuse(port, worker, slot, ticket);
        return;
    }

    port->by_slot[slot_index(port, worker, slot)] = req;
}


/* Writes what fits, and parks the sequence if something is left.  False when
 * the slot's ring is corrupt. */
static bool
write_records(port_t *port, request_t *req)
{
    llm_slot_t *slot = slot_of(port, req);
    uint8_t *data = llm_shm_out(&port->shm, req->from.worker, req->from.slot);
    bool wrote = false;
    uint32_t len;

    while (req->out_pos < req->out.len) {
        const char *record = req->out.data + req->out_pos;
        memcpy(&len, record, sizeof(len));

        const int rc =
            llm_record_write(&slot->out, data, port->shm.geo.out_bytes,
                             record + sizeof(len), len);

        if (rc == LLM_RING_OK) {
            req->out_pos += sizeof(len) + len;
            wrote = true;
            continue;
        }

        if (rc != LLM_RING_FULL) {
            return false;
        }

        if (llm_slot_want_space(&port->shm, req->from.worker, req->from.slot,
                                (uint32_t) sizeof(len) + len))
        {
            break;
        }
    }

    buf_consume(&req->out, req->out_pos);
    req->out_pos = 0;
    req->seq.parked = req->out.len > 0;

    if (wrote) {
        port->dirty[req->from.worker] |=
            llm_slot_notify(&port->shm, req->from.worker, req->from.slot);
    }

    return true;
}


static void
request_flush(port_t *port, engine_t *engine, request_t *req)
{
    if (!write_records(port, req)) {
        log_write(LOG_ERR, "port: worker %u, slot %u: output ring is corrupt",
                  req->from.worker, req->from.slot);
        emit_abort(engine, req);
    }
}


static void
port_operation(port_t *port, engine_t *engine, uint32_t worker, uint32_t op,
               uint32_t slot)
{
    request_t *req = port->by_slot[slot_index(port, worker, slot)];

    switch (op) {
    case LLM_OP_SUBMIT:
        slot_submit(port, engine, worker, slot);
        break;

    case LLM_OP_CANCEL:
        if (req != NULL
            && atomic_load(&slot_of(port, req)->cancel) == req->from.ticket) {
            emit_abort(engine, req);
        }
        break;

    case LLM_OP_SPACE:
        /* before the step: it goes on only when all records have left */
        if (req != NULL) {
            request_flush(port, engine, req);
        }
        break;
    }
}


/* A head out of bounds would keep the ring from ever being empty, and the
 * engine from sleeping. */
static void
ring_restore(port_t *port, uint32_t worker)
{
    llm_ring_t *ring = &llm_shm_worker(&port->shm, worker)->submit;
    const uint32_t head = atomic_load(&ring->head);

    if (head - atomic_load(&ring->tail) > llm_shm_submit_cap(&port->shm)) {
        atomic_store(&ring->tail, head);
    }
}


void
port_intake(port_t *port, engine_t *engine)
{
    uint32_t op, slot;

    /* they came before what is in the rings */
    intake_collect(engine);

    for (uint32_t w = 0; w < (uint32_t) port->n_workers; w++) {
        int rc = LLM_RING_OK;

        /* one lap at most, so that one worker cannot hold the loop */
        for (uint32_t i = 0; i < llm_shm_submit_cap(&port->shm); i++) {
            rc = llm_engine_pop(&port->shm, w, &op, &slot);

            if (rc != LLM_RING_OK) {
                break;
            }

            port_operation(port, engine, w, op, slot);
        }

        if (rc == LLM_RING_CORRUPT) {
            log_write(LOG_ERR, "port: worker %u: nonsense in its submit ring",
                      w);
            ring_restore(port, w);
        }
    }
}


void
port_flush(port_t *port, engine_t *engine)
{
    uint64_t parked = 0, used = 0, capacity = 0, deferred = 0;

    for (list_t *l = engine->requests.next, *next; l != &engine->requests;
         l = next) {
        request_t *req = list_entry(l, request_t, link);
        next = l->next;

        if (req->out.len > 0 && !req->seq.parked) {
            request_flush(port, engine, req);
        }

        if (req->finished && req->out.len == 0) {
            slot_close(port, req->from.worker, req->from.slot,
                       req->from.ticket);
            request_destroy(req);
            continue;
        }

        used++;
        parked += req->seq.parked;

        if (req->preparer != NULL && !req->textual) {
            deferred++;

        } else if (req->queued && req->seq.state == SEQ_WAITING) {
            const bool defers = req->seq.parked || req->seq.waits_for > 0;

            capacity += !defers;
            deferred += defers;
        }
    }

    atomic_store_explicit(&port->shm.header->retry_after,
                          rate_wait_s(&engine->rate, engine->n_fresh),
                          memory_order_relaxed);

    /* before the bells: who hears of an end finds it counted */
    llm_stats_set(&engine->stats->parked, parked);
    llm_stats_set(&engine->stats->slots_used, used);
    llm_stats_set(&engine->stats->waiting_capacity, capacity);
    llm_stats_set(&engine->stats->waiting_deferred, deferred);

    for (int w = 0; w < port->n_workers; w++) {
        if (port->dirty[w]) {
            port->dirty[w] = false;
            port_fd_ring(w);
        }
    }
}


/* The worker is gone: so are its clients. */
static void
worker_clear(port_t *port, engine_t *engine, uint32_t w)
{
    int dropped = 0;

    for (uint32_t s = 0; s < port->shm.geo.slots_per_worker; s++) {
        request_t *req = port->by_slot[slot_index(port, w, s)];

        if (req != NULL) {
            emit_abort(engine, req);
            slot_close(port, w, s, req->from.ticket);
            request_destroy(req);
            dropped++;
        }
    }

    llm_worker_free(&port->shm, w);
    port->dirty[w] = false;

    if (dropped > 0) {
        log_write(LOG_NOTICE,
                  "port: worker index %u has gone, %d requests "
                  "dropped",
                  w, dropped);
    }
}


/* How many workers live; clears those that do not. */
static int
check_workers(port_t *port, engine_t *engine)
{
    int live = 0;

    for (uint32_t w = 0; w < (uint32_t) port->n_workers; w++) {
        if (llm_worker_reap(&port->shm, w)) {
            worker_clear(port, engine, w);
        }

        live += atomic_load(&llm_shm_worker(&port->shm, w)->state)
                == LLM_WORKER_LIVE;
    }

    return live;
}


static bool
rings_empty(const port_t *port)
{
    for (int w = 0; w < port->n_workers; w++) {
        llm_ring_t *ring = &llm_shm_worker(&port->shm, (uint32_t) w)->submit;

        if (atomic_load(&ring->head) != atomic_load(&ring->tail)) {
            return false;
        }
    }

    return true;
}


void
port_wait(port_t *port, engine_t *engine, bool busy)
{
    llm_header_t *header = port->shm.header;
    const uint64_t now = clock_now_ns();

    atomic_store(&header->heartbeat_ns, now);

    if (busy) {
        if (now - port->checked_ns < BUSY_CHECK_MS * 1000000ull) {
            return;
        }

        port_fd_poll(&port->fds, 0);

    } else if (llm_engine_doze(&port->shm)) {
        port_fd_poll(&port->fds, port->fds.quit ? QUIT_MS : IDLE_MS);
        llm_engine_wake(&port->shm);

    } else {
        port_fd_poll(&port->fds, 0);
    }

    port->live = check_workers(port, engine);
    port->checked_ns = clock_now_ns();
}


bool
port_done(const port_t *port, const engine_t *engine)
{
    return port->fds.terminate || !port->fds.lifeline
           || (port->fds.quit && port->live == 0
               && list_empty(&engine->requests) && rings_empty(port));
}
