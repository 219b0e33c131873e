/*
 * The worker's end of the shared segment.
 *
 * One eventfd per worker index wakes the event loop; each wake first looks
 * whether the engine is still the one we talked to, then drains the ready
 * ring.  The engine's pidfd tells of its death even when the master is
 * stopped, dead, or did not fork it.
 */

#include "ngx_module/ngx_http_llm_ring.h"
#include "ngx_module/ngx_http_llm_handler.h"
#include "ngx_module/ngx_http_llm_process.h"
#include "ngx_module/ngx_http_llm_gen.h"

#include <sys/syscall.h>


/* an edge-triggered eventfd need not be read at each wake, only before its
 * counter is full */
#define NGX_HTTP_LLM_READ_EVERY  0x7fffffff

static ngx_connection_t *ngx_http_llm_ring_event(ngx_cycle_t *cycle, int fd,
    ngx_http_llm_ring_t *ring, ngx_event_handler_pt handler);
static ngx_int_t ngx_http_llm_ring_claim(ngx_http_llm_ring_t *ring);
static void ngx_http_llm_ring_wake_handler(ngx_event_t *ev);
static void ngx_http_llm_ring_pidfd_handler(ngx_event_t *ev);
static void ngx_http_llm_ring_check(ngx_http_llm_ring_t *ring);
static void ngx_http_llm_ring_watch(ngx_http_llm_ring_t *ring);
static void ngx_http_llm_ring_fail(ngx_http_llm_ring_t *ring);
static void ngx_http_llm_ring_leave_handler(ngx_event_t *ev);


ngx_http_llm_ring_t *
ngx_http_llm_ring_open(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine,
    ngx_http_llm_gen_t *gen)
{
    ngx_uint_t            i, n;
    ngx_http_llm_ring_t  *ring;

    ring = ngx_pcalloc(cycle->pool, sizeof(ngx_http_llm_ring_t));
    if (ring == NULL) {
        return NULL;
    }

    ring->engine = engine;
    ring->gen = gen;
    ring->shm = &gen->shm;
    ring->index = -1;

    n = ring->shm->geo.slots_per_worker;

    ring->seats = ngx_pcalloc(cycle->pool, n * sizeof(ngx_http_llm_seat_t));
    ring->free = ngx_palloc(cycle->pool, n * sizeof(uint32_t));

    if (ring->seats == NULL || ring->free == NULL) {
        return NULL;
    }

    for (i = 0; i < n; i++) {
        ring->free[i] = n - 1 - i;
    }

    ring->n_free = n;

    ring->leave.handler = ngx_http_llm_ring_leave_handler;
    ring->leave.data = ring;
    ring->leave.log = cycle->log;

    if (ngx_http_llm_ring_claim(ring) == NGX_OK) {
        ngx_http_llm_ring_check(ring);
    }

    return ring;
}


void
ngx_http_llm_ring_close(ngx_http_llm_ring_t *ring)
{
    if (ring->leave.posted) {
        ngx_delete_posted_event(&ring->leave);
    }

    if (ring->pidfd) {
        ngx_close_connection(ring->pidfd);
        ring->pidfd = NULL;
    }

    if (ring->wake) {
        ngx_close_connection(ring->wake);
        ring->wake = NULL;
    }

    if (ring->index != -1) {
        llm_worker_release(ring->shm, ring->index);
        ring->index = -1;

        /* the engine drops this worker's sequences, and may be waiting for
         * the last worker to leave */
        ngx_http_llm_process_ring(ring->gen->doorbell);
    }
}


static ngx_int_t
ngx_http_llm_ring_claim(ngx_http_llm_ring_t *ring)
{
    int  fd;

    if (ring->index == -1) {
        ring->index = llm_worker_claim(ring->shm, ngx_pid);

        if (ring->index == -1) {
            ngx_log_error(NGX_LOG_ERR, ngx_cycle->log, 0,
                          "llm: all worker places of engine \"%V\" are taken",
                          &ring->engine->name);

            /* places of dead workers were marked on the way */
            ngx_http_llm_process_ring(ring->gen->doorbell);

            return NGX_ERROR;
        }
    }

    if (ring->wake == NULL) {

        /* closing the connection must not close the generation's descriptor:
         * the next worker with this index inherits it from the master */

        fd = fcntl(ring->gen->wake[ring->index], F_DUPFD_CLOEXEC, 0);
        if (fd == -1) {
            return NGX_ERROR;
        }

        ring->wake = ngx_http_llm_ring_event((ngx_cycle_t *) ngx_cycle, fd,
                                             ring,
                                             ngx_http_llm_ring_wake_handler);
        if (ring->wake == NULL) {
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}


static ngx_connection_t *
ngx_http_llm_ring_event(ngx_cycle_t *cycle, int fd, ngx_http_llm_ring_t *ring,
    ngx_event_handler_pt handler)
{
    ngx_uint_t         flags;
    ngx_connection_t  *c;

    flags = (ngx_event_flags & NGX_USE_CLEAR_EVENT) ? NGX_CLEAR_EVENT
                                                    : NGX_LEVEL_EVENT;

    c = ngx_get_connection(fd, cycle->log);
    if (c == NULL) {
        (void) close(fd);
        return NULL;
    }

    c->data = ring;
    c->read->handler = handler;
    c->read->log = cycle->log;
    c->write->log = cycle->log;

    /* exempt from worker_shutdown_timeout and from the check for open sockets
     * at exit, as nginx's own channel is */
    c->read->channel = 1;
    c->write->channel = 1;

    if (ngx_add_event(c->read, NGX_READ_EVENT, flags) != NGX_OK) {
        ngx_close_connection(c);
        return NULL;
    }

    return c;
}


/* --- is it still the same engine? --- */


ngx_http_llm_ring_t *
ngx_http_llm_ring_pick(ngx_http_llm_engine_t *engine)
{
    if (engine->old && !engine->old->leaving
        && ngx_http_llm_ring_state(engine->ring) != LLM_ENGINE_READY
        && ngx_http_llm_ring_state(engine->old) == LLM_ENGINE_READY)
    {
        return engine->old;
    }

    return engine->ring;
}


/* the successor is READY: when the last request is done, the engine behind
 * this ring may go */

void
ngx_http_llm_ring_leave(ngx_http_llm_ring_t *ring)
{
    ring->leaving = 1;

    if (ring->n_free == ring->shm->geo.slots_per_worker) {
        ngx_post_event(&ring->leave, &ngx_posted_events);
    }
}


static void
ngx_http_llm_ring_leave_handler(ngx_event_t *ev)
{
    ngx_http_llm_ring_close(ev->data);
}


ngx_uint_t
ngx_http_llm_ring_state(ngx_http_llm_ring_t *ring)
{
    uint32_t  state;

    if (ring->leaving
        || (ring->wake == NULL && ngx_http_llm_ring_claim(ring) != NGX_OK))
    {
        return LLM_ENGINE_ABSENT;
    }

    ngx_http_llm_ring_check(ring);

    state = atomic_load(&ring->shm->header->state);

    if (state == LLM_ENGINE_READY && ring->epoch == 0) {
        return LLM_ENGINE_ABSENT;
    }

    /* it may have died before it could write anything */

    if (state == LLM_ENGINE_LOADING
        && kill(atomic_load(&ring->gen->launch->pid), 0) == -1
        && ngx_errno == NGX_ESRCH)
    {
        return LLM_ENGINE_ABSENT;
    }

    return state;
}


/*
 * ring->epoch is the engine that our requests were given to, 0 for none.
 * When that engine is gone, they fail.
 */

static void
ngx_http_llm_ring_check(ngx_http_llm_ring_t *ring)
{
    uint32_t       epoch, state;
    llm_header_t  *header;

    header = ring->shm->header;

    state = atomic_load(&header->state);
    epoch = atomic_load(&header->epoch);

    if (ring->epoch != 0
        && (state != LLM_ENGINE_READY || epoch != ring->epoch))
    {
        ngx_http_llm_ring_fail(ring);
    }

    if (state == LLM_ENGINE_READY && ring->epoch == 0 && epoch != ring->dead) {
        ring->epoch = epoch;
        ngx_http_llm_ring_watch(ring);

        if (ring->engine->old && ring->engine->old != ring) {
            ngx_http_llm_ring_leave(ring->engine->old);
        }
    }
}


static void
ngx_http_llm_ring_watch(ngx_http_llm_ring_t *ring)
{
    int  fd;

    fd = syscall(SYS_pidfd_open, atomic_load(&ring->shm->header->pid), 0);

    if (fd == -1) {

        if (ngx_errno == NGX_ESRCH) {
            ring->dead = ring->epoch;
            ring->epoch = 0;
            return;
        }

        /* no pidfd: deaths are noticed when the next engine starts */

        ngx_log_error(NGX_LOG_WARN, ngx_cycle->log, ngx_errno,
                      "llm: pidfd_open() failed");
        return;
    }

    ring->pidfd = ngx_http_llm_ring_event((ngx_cycle_t *) ngx_cycle, fd, ring,
                                          ngx_http_llm_ring_pidfd_handler);
}


static void
ngx_http_llm_ring_pidfd_handler(ngx_event_t *ev)
{
    ngx_connection_t     *c;
    ngx_http_llm_ring_t  *ring;

    c = ev->data;
    ring = c->data;

    ngx_log_error(NGX_LOG_ERR, ev->log, 0, "llm: engine \"%V\" has gone",
                  &ring->engine->name);

    ngx_http_llm_ring_fail(ring);
}


static void
ngx_http_llm_ring_fail(ngx_http_llm_ring_t *ring)
{
    void        *owner;
    ngx_uint_t   i;

    ring->dead = ring->epoch;
    ring->epoch = 0;

    if (ring->pidfd) {
        ngx_close_connection(ring->pidfd);
        ring->pidfd = NULL;
    }

    for (i = 0; i < ring->shm->geo.slots_per_worker; i++) {

        /* a request that a fallback has given to the next engine meanwhile
         * stays */

        if (!ring->seats[i].busy
            || ring->seats[i].epoch != ring->dead)
        {
            continue;
        }

        owner = ring->seats[i].owner;

        if (owner == NULL) {
            ngx_http_llm_ring_give(ring, i);
            continue;
        }

        /* lets go of this seat and all others of the same request */
        ngx_http_llm_handler_lost(owner);
    }
}


/* --- waking up --- */


static void
ngx_http_llm_ring_wake_handler(ngx_event_t *ev)
{
    int                   rc;
    uint32_t              seat;
    uint64_t              count;
    ngx_uint_t            n;
    ngx_connection_t     *c;
    ngx_http_llm_seat_t  *st;
    ngx_http_llm_ring_t  *ring;

    c = ev->data;
    ring = c->data;

    if (++ring->wakes == NGX_HTTP_LLM_READ_EVERY
        || !(ngx_event_flags & NGX_USE_CLEAR_EVENT))
    {
        ring->wakes = 0;

        if (read(c->fd, &count, sizeof(count)) == -1) {
            ngx_log_error(NGX_LOG_ALERT, ev->log, ngx_errno,
                          "llm: read() from eventfd failed");
        }
    }

    ngx_http_llm_ring_check(ring);

    /* more than a full ring cannot be waiting; what comes in meanwhile has
     * its own wake */

    for (n = llm_shm_ready_cap(ring->shm); n; n--) {

        rc = llm_worker_pop(ring->shm, ring->index, &seat);

        if (rc == LLM_RING_EMPTY) {
            return;
        }

        if (rc != LLM_RING_OK) {
            ngx_log_error(NGX_LOG_ALERT, ev->log, 0,
                          "llm: engine \"%V\" wrote nonsense into the ready "
                          "ring", &ring->engine->name);
            ngx_http_llm_ring_fail(ring);
            return;
        }

        st = &ring->seats[seat];

        if (!st->busy) {
            continue;
        }

        if (st->owner) {
            ngx_http_llm_handler_ready(st->owner);
            continue;
        }

        if (atomic_load(&llm_shm_slot(ring->shm, ring->index, seat)->done)
            == st->ticket)
        {
            ngx_http_llm_ring_give(ring, seat);
        }
    }

    ngx_post_event(ev, &ngx_posted_events);
}


void
ngx_http_llm_ring_card(ngx_http_llm_ring_t *ring, llm_card_t *card)
{
    *card = ring->shm->header->card;

    card->alias[sizeof(card->alias) - 1] = '\0';
    card->root[sizeof(card->root) - 1] = '\0';
}


ngx_uint_t
ngx_http_llm_ring_retry(ngx_http_llm_ring_t *ring)
{
    uint32_t  seconds;

    seconds = atomic_load_explicit(&ring->shm->header->retry_after,
                                   memory_order_relaxed);

    return ngx_max(seconds, 1);
}
