/*
 * The two lock-free queues of the shared segment.  Each has exactly one
 * producer and one consumer, in different processes.
 *
 *   cell ring   fixed cells of 64 bits (submit: worker → engine, ready:
 *               engine → worker)
 *   record ring bytes, framed as records {u32 length, payload} (a slot's
 *               output: engine → worker)
 *
 * Indexes run freely and wrap at 2^32; capacities are powers of two.  The
 * side that reads an index written by the other process checks it and never
 * trusts it: a nonsense index yields LLM_RING_CORRUPT, not a wild access.
 *
 * Memory order: the producer writes the data, then publishes the head with
 * release; the consumer reads the head with acquire, copies, then publishes
 * the tail with release; the producer reads the tail with acquire before it
 * overwrites.  The head of a cell ring is sequentially consistent instead,
 * because the doorbell (idle flag, then a second look at the head) needs it.
 *
 * libc only: this file is compiled into nginx's module and into the engine.
 */

#ifndef ENGINE_IPC_RING_H
#define ENGINE_IPC_RING_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    LLM_RING_OK = 0,
    LLM_RING_EMPTY = -2,   /* nothing to take */
    LLM_RING_FULL = -2,    /* no room now */
    LLM_RING_CORRUPT = -1, /* the other side wrote nonsense */
    LLM_RING_TOOBIG = -3,  /* the record can never fit / the buffer is small */
};

typedef struct {
    _Alignas(64) _Atomic uint32_t head; /* writer: the producer */
    _Alignas(64) _Atomic uint32_t tail; /* writer: the consumer */
} llm_ring_t;


/* Cell ring.  cells: [cap] in the segment; cap: a power of two. */
int llm_ring_push(llm_ring_t *ring, uint64_t *cells, uint32_t cap,
                  uint64_t cell);
int llm_ring_pop(llm_ring_t *ring, const uint64_t *cells, uint32_t cap,
                 uint64_t *cell);

/* Record ring.  data: [cap] bytes in the segment.  A record is written whole
 * or not at all; LLM_RING_TOOBIG when len + 4 > cap. */
int llm_record_write(llm_ring_t *ring, uint8_t *data, uint32_t cap,
                     const void *payload, uint32_t len);

/* Copies the next record into out and sets *len.  LLM_RING_EMPTY,
 * LLM_RING_CORRUPT (bad index or length), LLM_RING_TOOBIG (longer than
 * out_cap; the record stays). */
int llm_record_read(llm_ring_t *ring, const uint8_t *data, uint32_t cap,
                    void *out, uint32_t out_cap, uint32_t *len);

/* Bytes a producer may still write, framing included (0 when corrupt). */
uint32_t llm_record_space(llm_ring_t *ring, uint32_t cap);

#endif /* ENGINE_IPC_RING_H */
