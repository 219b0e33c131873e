/*
 * The two queues of the shared segment, see ring.h.  Called by both processes:
 * each function belongs to one side, producer or consumer.
 *
 * Every position is masked by the capacity, so that even a nonsense index
 * cannot lead outside the ring; the difference of the two indexes is checked
 * besides, so that nonsense is reported and not obeyed.  A length that the
 * other process wrote is copied once and then checked: never read twice.
 */

#include <string.h>

#include "engine/ipc/ring.h"

enum { FRAME_BYTES = 4 }; /* the length before each record */


/*
 * The order of head is sequentially consistent in the cell ring: the producer
 * stores head and then loads the idle flag, the consumer stores the idle flag
 * and then loads head.  With release and acquire alone both loads could see
 * the old values, and the cell would wait for a doorbell that nobody rings.
 */
int
llm_ring_push(llm_ring_t *ring, uint64_t *cells, uint32_t cap, uint64_t cell)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    /* acquire: the consumer has finished with the cell we overwrite */
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint32_t used = head - tail;

    if (used > cap) {
        return LLM_RING_CORRUPT;
    }

    if (used == cap) {
        return LLM_RING_FULL;
    }

    cells[head & (cap - 1)] = cell;

    atomic_store_explicit(&ring->head, head + 1, memory_order_seq_cst);

    return LLM_RING_OK;
}


int
llm_ring_pop(llm_ring_t *ring, const uint64_t *cells, uint32_t cap,
             uint64_t *cell)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_seq_cst);
    uint32_t used = head - tail;

    if (used > cap) {
        return LLM_RING_CORRUPT;
    }

    if (used == 0) {
        return LLM_RING_EMPTY;
    }

    *cell = cells[tail & (cap - 1)];

    /* release: our read of the cell is over before the producer reuses it */
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);

    return LLM_RING_OK;
}


/* Copies len bytes into the ring at index pos, around its end if need be. */
static void
copy_in(uint8_t *data, uint32_t cap, uint32_t pos, const void *from,
        uint32_t len)
{
    uint32_t at = pos & (cap - 1);
    uint32_t first = cap - at;

    if (first > len) {
        first = len;
    }

    memcpy(data + at, from, first);
    memcpy(data, (const uint8_t *) from + first, len - first);
}


static void
copy_out(const uint8_t *data, uint32_t cap, uint32_t pos, void *to,
         uint32_t len)
{
    uint32_t at = pos & (cap - 1);
    uint32_t first = cap - at;

    if (first > len) {
        first = len;
    }

    memcpy(to, data + at, first);
    memcpy((uint8_t *) to + first, data, len - first);
}


int
llm_record_write(llm_ring_t *ring, uint8_t *data, uint32_t cap,
                 const void *payload, uint32_t len)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint32_t used = head - tail;

    if (cap < FRAME_BYTES || len > cap - FRAME_BYTES) {
        return LLM_RING_TOOBIG;
    }

    if (used > cap) {
        return LLM_RING_CORRUPT;
    }

    if (cap - used < FRAME_BYTES + len) {
        return LLM_RING_FULL;
    }

    copy_in(data, cap, head, &len, FRAME_BYTES);

    if (len > 0) {
        copy_in(data, cap, head + FRAME_BYTES, payload, len);
    }

    atomic_store_explicit(&ring->head, head + FRAME_BYTES + len,
                          memory_order_release);

    return LLM_RING_OK;
}


int
llm_record_read(llm_ring_t *ring, const uint8_t *data, uint32_t cap, void *out,
                uint32_t out_cap, uint32_t *len)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    uint32_t used = head - tail;
    uint32_t n;

    if (used == 0) {
        return LLM_RING_EMPTY;
    }

    if (used > cap || used < FRAME_BYTES) {
        return LLM_RING_CORRUPT;
    }

    copy_out(data, cap, tail, &n, FRAME_BYTES);

    if (n > used - FRAME_BYTES) {
        return LLM_RING_CORRUPT;
    }

    if (n > out_cap) {
        return LLM_RING_TOOBIG;
    }

    if (n > 0) {
        copy_out(data, cap, tail + FRAME_BYTES, out, n);
    }

    *len = n;

    atomic_store_explicit(&ring->tail, tail + FRAME_BYTES + n,
                          memory_order_release);

    return LLM_RING_OK;
}


uint32_t
llm_record_space(llm_ring_t *ring, uint32_t cap)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint32_t used = head - tail;

    return used > cap ? 0 : cap - used;
}
