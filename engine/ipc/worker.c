/*
 * Worker indexes, the ends of their rings, and doorbells, see shm.h: what
 * workers and engine do with a segment once it is mapped.
 *
 * Two flags ring doorbells.  `idle` has one writer, the engine, and is
 * sequentially consistent together with the submit rings' heads: either the
 * worker sees the flag or the engine sees the cell.  `notified` and
 * `want_space` are written by both sides, and so always exchanged, never
 * stored: an exchange reads the other side's last write, and with it all that
 * was published before.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <signal.h>

#include "engine/ipc/shm.h"


/* --- worker side --- */

/*
 * The state decides who owns an index; the pid only says whose death to look
 * for, and is 0 whenever the index is not LIVE.  A claimer's pid follows its
 * CAS, so LIVE with pid 0 means "a moment, please" and is left alone.
 */
bool
llm_worker_reap(llm_shm_t *shm, uint32_t worker)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    uint32_t state = atomic_load(&w->state);
    int32_t pid = atomic_load(&w->pid);

    if (state != LLM_WORKER_LIVE) {
        return state == LLM_WORKER_DEAD;
    }

    /* EPERM would mean that it lives under another user */
    if (pid <= 0 || kill(pid, 0) == 0 || errno != ESRCH) {
        return false;
    }

    /* Of several finders one wins, and none can hit a later holder of the
     * same index, because that one has another pid. */
    if (!atomic_compare_exchange_strong(&w->pid, &pid, 0)) {
        return false;
    }

    atomic_store(&w->state, LLM_WORKER_DEAD);

    return true;
}


/* What a former holder left behind.  The index is ours and the engine has
 * dropped its sequences, so that nobody else writes here. */
static void
clear_index(llm_shm_t *shm, uint32_t worker)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);

    atomic_store(&w->ready.tail, atomic_load(&w->ready.head));
    atomic_store(&w->submit.tail, atomic_load(&w->submit.head));

    for (uint32_t i = 0; i < shm->geo.slots_per_worker; i++) {
        llm_slot_t *s = llm_shm_slot(shm, worker, i);

        atomic_store(&s->ticket, 0);
        atomic_store(&s->cancel, 0);
        atomic_store(&s->done, 0);
        atomic_store(&s->log_len, 0);
        atomic_store(&s->notified, 0);
        atomic_store(&s->want_space, 0);
        atomic_store(&s->out.tail, atomic_load(&s->out.head));
    }
}


int
llm_worker_claim(llm_shm_t *shm, int32_t pid)
{
    for (uint32_t i = 0; i < shm->geo.n_workers; i++) {
        llm_worker_t *w = llm_shm_worker(shm, i);
        uint32_t state = LLM_WORKER_FREE;

        if (atomic_compare_exchange_strong(&w->state, &state, LLM_WORKER_LIVE))
        {
            atomic_store(&w->pid, pid);
            return (int) i;
        }

        llm_worker_reap(shm, i);
    }

    return -1;
}


void
llm_worker_release(llm_shm_t *shm, uint32_t worker)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);

    atomic_store(&w->pid, 0);
    atomic_store(&w->state, LLM_WORKER_DEAD);
}


bool
llm_worker_push(llm_shm_t *shm, uint32_t worker, uint32_t op, uint32_t slot)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    uint64_t cell = (uint64_t) op << 32 | slot;

    /* Four operations for each slot fit, more are never under way.  Should
     * the engine have broken the ring, ringing is all that can be done. */
    if (llm_ring_push(&w->submit, llm_shm_submit_cells(shm, worker),
                      llm_shm_submit_cap(shm), cell)
        != LLM_RING_OK)
    {
        return true;
    }

    return atomic_load(&shm->header->idle) != 0;
}


int
llm_worker_pop(llm_shm_t *shm, uint32_t worker, uint32_t *slot)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    uint64_t cell;
    int rc = llm_ring_pop(&w->ready, llm_shm_ready_cells(shm, worker),
                          llm_shm_ready_cap(shm), &cell);

    if (rc != LLM_RING_OK) {
        return rc;
    }

    if (cell >= shm->geo.slots_per_worker) {
        return LLM_RING_CORRUPT;
    }

    *slot = (uint32_t) cell;
    atomic_exchange(&llm_shm_slot(shm, worker, *slot)->notified, 0);

    return LLM_RING_OK;
}


bool
llm_worker_made_room(llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    if (atomic_exchange(&llm_shm_slot(shm, worker, slot)->want_space, 0) == 0) {
        return false;
    }

    return llm_worker_push(shm, worker, LLM_OP_SPACE, slot);
}


/* --- engine side --- */

void
llm_worker_free(llm_shm_t *shm, uint32_t worker)
{
    clear_index(shm, worker);
    atomic_store(&llm_shm_worker(shm, worker)->state, LLM_WORKER_FREE);
}


int
llm_engine_pop(llm_shm_t *shm, uint32_t worker, uint32_t *op, uint32_t *slot)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    uint64_t cell;
    int rc = llm_ring_pop(&w->submit, llm_shm_submit_cells(shm, worker),
                          llm_shm_submit_cap(shm), &cell);

    if (rc != LLM_RING_OK) {
        return rc;
    }

    *op = (uint32_t) (cell >> 32);
    *slot = (uint32_t) cell;

    if (*op < LLM_OP_SUBMIT || *op > LLM_OP_SPACE
        || *slot >= shm->geo.slots_per_worker)
    {
        return LLM_RING_CORRUPT;
    }

    return LLM_RING_OK;
}


bool
llm_slot_notify(llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    llm_slot_t *s = llm_shm_slot(shm, worker, slot);

    if (atomic_exchange(&s->notified, 1) != 0) {
        return false;
    }

    /* Full only if the worker broke the ring: leave a trace that the next
     * notification tries again. */
    if (llm_ring_push(&w->ready, llm_shm_ready_cells(shm, worker),
                      llm_shm_ready_cap(shm), slot)
        != LLM_RING_OK)
    {
        atomic_exchange(&s->notified, 0);
    }

    return true;
}


bool
llm_slot_want_space(llm_shm_t *shm, uint32_t worker, uint32_t slot,
                    uint32_t bytes)
{
    llm_slot_t *s = llm_shm_slot(shm, worker, slot);

    atomic_exchange(&s->want_space, 1);

    /* the worker may have drained the ring just before */
    return llm_record_space(&s->out, shm->geo.out_bytes) < bytes;
}


bool
llm_engine_doze(llm_shm_t *shm)
{
    atomic_store(&shm->header->idle, 1);

    /* the re-check: whoever pushed before it saw the flag did not ring */
    for (uint32_t i = 0; i < shm->geo.n_workers; i++) {
        llm_ring_t *ring = &llm_shm_worker(shm, i)->submit;

        if (atomic_load(&ring->head) != atomic_load(&ring->tail)) {
            atomic_store(&shm->header->idle, 0);
            return false;
        }
    }

    return true;
}


void
llm_engine_wake(llm_shm_t *shm)
{
    atomic_store(&shm->header->idle, 0);
}


/*
 * The former engine may have died between raising `notified` and pushing the
 * cell, so the flag of every slot without a cell is lowered.  Slots that do
 * have a cell keep theirs: the worker lowers it when it pops, and a second
 * cell for the same slot could, crash after crash, fill the ready ring.
 */
static void
renew_index(llm_shm_t *shm, uint32_t worker)
{
    llm_worker_t *w = llm_shm_worker(shm, worker);
    const uint64_t *cells = llm_shm_ready_cells(shm, worker);
    uint32_t cap = llm_shm_ready_cap(shm);
    uint32_t head = atomic_load(&w->ready.head);
    uint32_t tail = atomic_load(&w->ready.tail);
    uint64_t queued[LLM_MAX_SLOTS / 64] = { 0 };

    if (head - tail > cap) {
        head = tail;
        atomic_store(&w->ready.head, head);
    }

    for (; tail != head; tail++) {
        uint64_t slot = cells[tail & (cap - 1)];

        if (slot < shm->geo.slots_per_worker) {
            queued[slot / 64] |= 1ull << (slot % 64);
        }
    }

    for (uint32_t i = 0; i < shm->geo.slots_per_worker; i++) {
        llm_slot_t *s = llm_shm_slot(shm, worker, i);

        if (!(queued[i / 64] >> (i % 64) & 1)) {
            atomic_exchange(&s->notified, 0);
        }

        atomic_exchange(&s->want_space, 0);
    }

    atomic_store(&w->submit.tail, atomic_load(&w->submit.head));
}


void
llm_shm_takeover(llm_shm_t *shm, int32_t pid)
{
    llm_header_t *h = shm->header;

    /* before the epoch: nobody may find a new epoch READY too early */
    atomic_store(&h->state, LLM_ENGINE_LOADING);
    atomic_store(&h->idle, 0);
    atomic_store(&h->retry_after, 0);

    for (uint32_t i = 0; i < shm->geo.n_workers; i++) {
        if (llm_worker_reap(shm, i)) {
            llm_worker_free(shm, i);

        } else if (atomic_load(&llm_shm_worker(shm, i)->state)
                   == LLM_WORKER_LIVE) {
            renew_index(shm, i);
        }
    }

    atomic_store(&h->pid, pid);
    atomic_fetch_add(&h->epoch, 1);
}
