/*
 * The worker's end of the shared segment: a claimed index, a seat per slot,
 * the wake-up event, the engine's pidfd.
 *
 * A seat is taken, filled through the request area, submitted, then read until
 * its DONE or ERROR record.  Its owner (a choice of a request) lets go with
 * ngx_http_llm_ring_drop at any time; the seat becomes free again when the
 * engine has acknowledged, or is gone.
 */

#ifndef NGX_HTTP_LLM_RING_H
#define NGX_HTTP_LLM_RING_H

#include "ngx_module/ngx_http_llm_module.h"
#include "engine/ipc/msg.h"
#include "engine/ipc/shm.h"


typedef struct {
    void                    *owner;      /* ngx_http_llm_choice_t, or NULL */
    uint32_t                 ticket;
    uint32_t                 epoch;      /* of the engine it was given to */
    unsigned                 busy:1;     /* not in the free list */
    unsigned                 submitted:1;
    unsigned                 finished:1; /* its last record was read */
    unsigned                 large:1;    /* touched much of its area */
} ngx_http_llm_seat_t;


struct ngx_http_llm_ring_s {
    ngx_http_llm_engine_t   *engine;
    ngx_http_llm_gen_t      *gen;
    llm_shm_t               *shm;
    ngx_int_t                index;      /* claimed, or -1 */

    uint32_t                 epoch;      /* of the engine in use; 0: none */
    uint32_t                 dead;       /* epoch whose process has gone */
    uint32_t                 ticket;

    ngx_connection_t        *wake;
    ngx_connection_t        *pidfd;
    ngx_uint_t               wakes;      /* since the eventfd was read */

    ngx_http_llm_seat_t     *seats;      /* [slots_per_worker] */
    uint32_t                *free;
    ngx_uint_t               n_free;

    ngx_event_t              leave;      /* posted to close it */
    unsigned                 leaving:1;  /* no more requests */
};


/* LLM_ENGINE_…: the state of the engine for this worker, after looking whether
 * it changed. */
ngx_uint_t ngx_http_llm_ring_state(ngx_http_llm_ring_t *ring);

/* A copy of the engine's card, every string terminated. */
void ngx_http_llm_ring_card(ngx_http_llm_ring_t *ring, llm_card_t *card);

/* The ring for a new request: the engine's, or its predecessor's while the
 * engine is not READY. */
ngx_http_llm_ring_t *ngx_http_llm_ring_pick(ngx_http_llm_engine_t *engine);

/* init_process, exit_process.  NULL: out of memory. */
ngx_http_llm_ring_t *ngx_http_llm_ring_open(ngx_cycle_t *cycle,
    ngx_http_llm_engine_t *engine, ngx_http_llm_gen_t *gen);
void ngx_http_llm_ring_close(ngx_http_llm_ring_t *ring);

/* Seconds after which the engine expects to take more, at least 1. */
ngx_uint_t ngx_http_llm_ring_retry(ngx_http_llm_ring_t *ring);

/* A seat number, or -1 when all are taken. */
ngx_int_t ngx_http_llm_ring_take(ngx_http_llm_ring_t *ring, void *owner);
uint8_t *ngx_http_llm_ring_area(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    uint32_t *cap);

/* Submits len bytes of the area.  NGX_OK, or NGX_ERROR: the engine went away
 * meanwhile. */
ngx_int_t ngx_http_llm_ring_submit(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    uint32_t len);

/* The next record.  NGX_OK, NGX_AGAIN: none now, NGX_ERROR: nonsense.
 * The record points into a buffer that the next call overwrites. */
ngx_int_t ngx_http_llm_ring_read(ngx_http_llm_ring_t *ring, ngx_uint_t seat,
    llm_record_t *record);

/* After reading: tells a waiting engine that there is room. */
void ngx_http_llm_ring_space(ngx_http_llm_ring_t *ring, ngx_uint_t seat);

/* The slot's token log; *n tokens. */
const int32_t *ngx_http_llm_ring_log(ngx_http_llm_ring_t *ring,
    ngx_uint_t seat, uint32_t *n);

/* Back to the free list: the engine has acknowledged, or is gone. */
void ngx_http_llm_ring_give(ngx_http_llm_ring_t *ring, ngx_uint_t seat);

/* No more requests; closed when the last seat is free. */
void ngx_http_llm_ring_leave(ngx_http_llm_ring_t *ring);

/* The owner lets go; what still runs is canceled. */
void ngx_http_llm_ring_drop(ngx_http_llm_ring_t *ring, ngx_uint_t seat);

#endif /* NGX_HTTP_LLM_RING_H */
