/*
 * Seats of a ring: taken for a choice, submitted, read, let go of.  The wake-up
 * that leads here is in ngx_http_llm_ring.c.
 */

#include "ngx_module/ngx_http_llm_ring.h"
#include "ngx_module/ngx_http_llm_gen.h"
#include "ngx_module/ngx_http_llm_process.h"


/* what a slot's request area may keep between requests */
#define NGX_HTTP_LLM_KEEP_BYTES  (64 * 1024)


ngx_int_t
ngx_http_llm_ring_take(ngx_http_llm_ring_t *ring, void *owner)
{
    uint32_t              seat;
    llm_slot_t           *slot;
    ngx_http_llm_seat_t  *st;

    if (ring->n_free == 0) {
        return -1;
    }

    seat = ring->free[--ring->n_free];

    st = &ring->seats[seat];
    st->owner = owner;
    st->epoch = 0;
    st->busy = 1;
    st->submitted = 0;
    st->finished = 0;
    st->large = 0;

    /* what an earlier request left unread */

    slot = llm_shm_slot(ring->shm, ring->index, seat);
    atomic_store(&slot->out.tail, atomic_load(&slot->out.head));

    return seat;
}


void
ngx_http_llm_ring_give(ngx_http_llm_ring_t *ring, ngx_uint_t seat)
{
    ngx_http_llm_seat_t  *st;

    st = &ring->seats[seat];

    if (st->large) {
        llm_slot_trim(ring->shm, ring->index, seat, NGX_HTTP_LLM_KEEP_BYTES);
    }

    st->owner = NULL;
    st->busy = 0;

    ring->free[ring->n_free++] = seat;

    if (ring->leaving) {
        ngx_http_llm_ring_leave(ring);
    }
}


uint8_t *
ngx_http_llm_ring_area(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    uint32_t *cap)
{
    *cap = ring->shm->geo.request_bytes;

    return llm_shm_request(ring->shm, ring->index, seat);
}


ngx_int_t
ngx_http_llm_ring_submit(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    uint32_t len)
{
    llm_slot_t           *slot;
    struct timespec       ts;
    ngx_http_llm_seat_t  *st;

    if (ring->epoch == 0) {
        return NGX_ERROR;
    }

    st = &ring->seats[seat];
    st->large = (len > NGX_HTTP_LLM_KEEP_BYTES);

    /* 0 names no request */

    if (++ring->ticket == 0) {
        ring->ticket = 1;
    }

    st->ticket = ring->ticket;
    st->epoch = ring->epoch;
    st->submitted = 1;

    clock_gettime(CLOCK_MONOTONIC, &ts);

    slot = llm_shm_slot(ring->shm, ring->index, seat);

    slot->epoch = ring->epoch;
    slot->request_len = len;
    slot->submit_ns = (uint64_t) ts.tv_sec * 1000000000 + ts.tv_nsec;

    atomic_store(&slot->cancel, 0);
    atomic_exchange(&slot->want_space, 0);
    atomic_store(&slot->ticket, st->ticket);

    if (llm_worker_push(ring->shm, ring->index, LLM_OP_SUBMIT, seat)) {
        ngx_http_llm_process_ring(ring->gen->doorbell);
    }

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_ring_read(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    llm_record_t *record)
{
    int             rc;
    uint32_t        len;
    llm_slot_t     *slot;
    static uint8_t  payload[LLM_RECORD_MAX];

    slot = llm_shm_slot(ring->shm, ring->index, seat);

    rc = llm_record_read(&slot->out,
                         llm_shm_out(ring->shm, ring->index, seat),
                         ring->shm->geo.out_bytes, payload, sizeof(payload),
                         &len);

    if (rc == LLM_RING_EMPTY) {
        return NGX_AGAIN;
    }

    if (rc != LLM_RING_OK || llm_record_decode(payload, len, record) != 0) {
        ngx_log_error(NGX_LOG_ALERT, ngx_cycle->log, 0,
                      "llm: engine \"%V\" wrote a malformed record",
                      &ring->engine->name);
        return NGX_ERROR;
    }

    if (record->type == LLM_REC_DONE || record->type == LLM_REC_ERROR) {
        ring->seats[seat].finished = 1;
    }

    return NGX_OK;
}


void
ngx_http_llm_ring_space(ngx_http_llm_ring_t *ring, ngx_uint_t seat)
{
    if (llm_worker_made_room(ring->shm, ring->index, seat)) {
        ngx_http_llm_process_ring(ring->gen->doorbell);
    }
}


const int32_t *
ngx_http_llm_ring_log(ngx_http_llm_ring_t *ring, ngx_uint_t seat, uint32_t *n)
{
    llm_slot_t  *slot;

    slot = llm_shm_slot(ring->shm, ring->index, seat);

    *n = ngx_min(atomic_load(&slot->log_len), ring->shm->geo.log_tokens);

    return llm_shm_log(ring->shm, ring->index, seat);
}


void
ngx_http_llm_ring_drop(ngx_http_llm_ring_t *ring, ngx_uint_t seat)
{
    llm_slot_t           *slot;
    ngx_http_llm_seat_t  *st;

    st = &ring->seats[seat];
    st->owner = NULL;

    slot = llm_shm_slot(ring->shm, ring->index, seat);

    /* epoch 0: the engine it was given to is gone */

    if (!st->submitted || ring->epoch == 0
        || st->epoch != ring->epoch
        || atomic_load(&slot->done) == st->ticket)
    {
        ngx_http_llm_ring_give(ring, seat);
        return;
    }

    if (st->finished) {
        return;
    }

    atomic_store(&slot->cancel, st->ticket);

    if (llm_worker_push(ring->shm, ring->index, LLM_OP_CANCEL, seat)) {
        ngx_http_llm_process_ring(ring->gen->doorbell);
    }
}
