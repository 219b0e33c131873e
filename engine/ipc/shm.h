/*
 * The shared segment: one memfd per engine generation, created and mapped by
 * nginx's master before it forks workers and engine.
 *
 *   header | statistics | workers[W] | per worker: submit and ready cells |
 *   slots[W * S] | per slot: request area, output ring, token log
 *
 * The memory is sparse: what nobody touched costs nothing, so the areas may
 * be generous.  Every field has one writer, named beside it.  Geometry is read
 * once, at attach, checked, and kept in the process-private llm_shm_t; sizes
 * in the segment are not looked at again.
 *
 * Life of a slot:
 *   worker  takes it from its own free list, writes the request area, sets
 *           epoch and ticket (a number that never repeats in this index),
 *           pushes LLM_OP_SUBMIT
 *   engine  writes deltas to the output ring, token ids to the log, and marks
 *           the slot ready; at the end writes a DONE or ERROR record, then
 *           sets done = ticket (release) and marks it ready once more
 *   worker  frees the slot after it saw done == ticket; a canceled request
 *           keeps its slot until then
 * An engine that starts discards submissions of an older epoch; a worker that
 * sees a new epoch, or the engine gone, fails its requests of the old epoch
 * and frees their slots at once.
 *
 * libc only.
 */

#ifndef ENGINE_IPC_SHM_H
#define ENGINE_IPC_SHM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/ipc/ring.h"
#include "engine/ipc/stats.h"

enum {
    LLM_SHM_ABI = 4, /* changes with every change of this layout */
    LLM_MAX_WORKERS = 256,
    LLM_MAX_SLOTS = 4096, /* per worker */
};

/* Engine states.  writer: the engine (and the launcher before exec). */
enum {
    LLM_ENGINE_ABSENT = 0,
    LLM_ENGINE_LOADING,
    LLM_ENGINE_READY,
    LLM_ENGINE_FAILED, /* did not start: header->reason says why */
};

/* Worker index states: FREE → LIVE by CAS of the worker; LIVE → DEAD by the
 * worker when it exits, or by anyone who finds its pid gone; DEAD → FREE by
 * the engine only, after it dropped that index's sequences (it calls
 * llm_worker_reap to find them and llm_worker_free to clear them). */
enum { LLM_WORKER_FREE = 0, LLM_WORKER_LIVE, LLM_WORKER_DEAD };

/* Operations in the submit ring: op << 32 | slot number within the worker. */
enum {
    LLM_OP_SUBMIT = 1,
    LLM_OP_CANCEL, /* slot->cancel was set */
    LLM_OP_SPACE,  /* the output ring has room again */
};

typedef struct {
    uint32_t n_workers;        /* indexes, ≥ 4 × worker_processes */
    uint32_t slots_per_worker; /* a power of two */
    uint32_t request_bytes;    /* request area of a slot */
    uint32_t out_bytes;        /* output ring of a slot, a power of two */
    uint32_t log_tokens;       /* token log of a slot */
} llm_geometry_t;

/* What /v1/models and request checks need.  writer: the engine, before
 * READY. */
typedef struct {
    char alias[128];  /* the name clients use */
    char root[256];   /* general.name of the file */
    uint64_t created; /* Unix seconds */
    uint32_t max_model_len;
    uint32_t n_vocab;
    uint32_t has_chat_template;
    uint32_t max_num_seqs;
} llm_card_t;

typedef struct {
    uint64_t magic;     /* creator */
    uint32_t abi;       /* creator */
    uint32_t geo_bytes; /* creator: sizeof(llm_geometry_t), a cheap check */
    llm_geometry_t geo; /* creator */
    uint32_t layout;    /* creator: mixed from geo and the structs' sizes */

    _Alignas(64) _Atomic uint32_t state; /* engine */
    _Atomic uint32_t epoch;        /* engine: +1 at each start, before READY */
    _Atomic int32_t pid;           /* engine */
    _Atomic uint32_t crashes;      /* launcher: starts that followed a death */
    _Atomic uint64_t heartbeat_ns; /* engine: monotonic time of its last turn */
    _Atomic uint32_t retry_after;  /* engine: seconds until those that wait now
                                      would run; 0: no turn yet */
    char reason[512];              /* engine: why it did not start */
    llm_card_t card;               /* engine */

    /* engine: set before it sleeps on its doorbell, cleared when it wakes;
     * a worker rings only when it is set */
    _Alignas(64) _Atomic uint32_t idle;
} llm_header_t;

typedef struct {
    _Alignas(64) _Atomic uint32_t state; /* see above */
    _Atomic int32_t pid;                 /* the worker that holds it; 0
                                            unless LIVE */
    llm_ring_t submit;                   /* worker → engine */
    llm_ring_t ready; /* engine → worker: slot numbers within the worker */
} llm_worker_t;

typedef struct {
    /* worker */
    _Alignas(64) uint32_t epoch; /* of the engine it was submitted to */
    _Atomic uint32_t ticket;     /* names the request; never 0 */
    _Atomic uint32_t cancel;     /* == ticket: the client has gone */
    uint32_t request_len;        /* bytes used of the request area */
    uint64_t submit_ns;          /* monotonic */

    /* engine */
    _Alignas(64) _Atomic uint32_t done; /* == ticket: the slot is the
                                           worker's again */
    _Atomic uint32_t log_len;           /* tokens in the log */

    /* both: engine exchanges it to 1 when it puts the slot into the ready
     * ring, the worker exchanges it to 0 before it drains (llm_worker_pop
     * does): at most one entry each, so the ready ring cannot overflow */
    _Alignas(64) _Atomic uint32_t notified;

    /* both: engine exchanges it to 1 when it found the output ring too full,
     * and then looks again (llm_slot_want_space); the worker exchanges it to
     * 0 after it made room, and if it was 1 pushes LLM_OP_SPACE
     * (llm_worker_made_room) */
    _Atomic uint32_t want_space;

    llm_ring_t out; /* engine → worker, records (msg.h) */
} llm_slot_t;

/* One process's view of a segment. */
typedef struct {
    int fd;
    void *base;
    size_t size;
    llm_geometry_t geo; /* checked copy */
    llm_header_t *header;
    llm_stats_t *stats;
    size_t off_workers;
    size_t off_cells;
    size_t off_slots;
    size_t off_areas;
} llm_shm_t;


/* 0, or -1 with a sentence in err. */
int llm_shm_create(const llm_geometry_t *geo, llm_shm_t *shm, char *err,
                   size_t err_len);

/* Maps a segment made by llm_shm_create from its descriptor (which stays the
 * caller's) and checks magic, ABI, sizes. */
int llm_shm_attach(int fd, llm_shm_t *shm, char *err, size_t err_len);

/* Unmaps; does not close fd. */
void llm_shm_detach(llm_shm_t *shm);

/* worker < n_workers, slot < slots_per_worker: the caller checks. */
llm_worker_t *llm_shm_worker(const llm_shm_t *shm, uint32_t worker);
uint64_t *llm_shm_submit_cells(const llm_shm_t *shm, uint32_t worker);
uint32_t llm_shm_submit_cap(const llm_shm_t *shm); /* 4 × slots_per_worker */
uint64_t *llm_shm_ready_cells(const llm_shm_t *shm, uint32_t worker);
uint32_t llm_shm_ready_cap(const llm_shm_t *shm); /* 2 × slots_per_worker */
llm_slot_t *llm_shm_slot(const llm_shm_t *shm, uint32_t worker, uint32_t slot);
uint8_t *llm_shm_request(const llm_shm_t *shm, uint32_t worker, uint32_t slot);
uint8_t *llm_shm_out(const llm_shm_t *shm, uint32_t worker, uint32_t slot);
int32_t *llm_shm_log(const llm_shm_t *shm, uint32_t worker, uint32_t slot);

/* --- worker side --- */

/* Claims a free index for pid; -1 when there is none.  Marks indexes of dead
 * processes DEAD on the way. */
int llm_worker_claim(llm_shm_t *shm, int32_t pid);

/* Leaves the index to the engine to clear. */
void llm_worker_release(llm_shm_t *shm, uint32_t worker);

/* Pushes op; true when the engine's doorbell must be rung. */
bool llm_worker_push(llm_shm_t *shm, uint32_t worker, uint32_t op,
                     uint32_t slot);

/* Takes the next slot from the ready ring and lowers its `notified`; the
 * caller then reads the slot's output ring until it is empty, or stops early
 * and comes back by itself.  LLM_RING_OK, LLM_RING_EMPTY, LLM_RING_CORRUPT
 * (the engine wrote nonsense). */
int llm_worker_pop(llm_shm_t *shm, uint32_t worker, uint32_t *slot);

/* After records were read: if the engine waits for room in this slot, pushes
 * LLM_OP_SPACE.  True when the engine's doorbell must be rung. */
bool llm_worker_made_room(llm_shm_t *shm, uint32_t worker, uint32_t slot);

/* Gives pages of a slot's request area beyond `keep` bytes back to the
 * system; for slots that held a large request. */
void llm_slot_trim(llm_shm_t *shm, uint32_t worker, uint32_t slot,
                   uint32_t keep);

/* --- engine side --- */

/* Puts the slot into its worker's ready ring unless it is there already.
 * True when the worker's eventfd must be rung (once per step is enough). */
bool llm_slot_notify(llm_shm_t *shm, uint32_t worker, uint32_t slot);

/* The next operation of a worker, checked.  LLM_RING_OK, LLM_RING_EMPTY,
 * LLM_RING_CORRUPT (bad index, operation or slot). */
int llm_engine_pop(llm_shm_t *shm, uint32_t worker, uint32_t *op,
                   uint32_t *slot);

/* Asks for LLM_OP_SPACE, and looks again.  True: there are less than `bytes`
 * (framing included), park the sequence; false: there is room after all.  A
 * LLM_OP_SPACE may follow in both cases. */
bool llm_slot_want_space(llm_shm_t *shm, uint32_t worker, uint32_t slot,
                         uint32_t bytes);

/* Before sleeping: sets `idle` and looks at all submit rings once more.  True:
 * sleep on the doorbell; false: there is work, and `idle` is cleared. */
bool llm_engine_doze(llm_shm_t *shm);

/* After sleeping: clears `idle`. */
void llm_engine_wake(llm_shm_t *shm);

/* True when the index is DEAD: its worker released it, or is LIVE with a pid
 * that is gone (then it is marked DEAD here).  One system call for a LIVE
 * index.  Drop its sequences, then llm_worker_free. */
bool llm_worker_reap(llm_shm_t *shm, uint32_t worker);

/* DEAD → FREE: clears rings and slots of the index. */
void llm_worker_free(llm_shm_t *shm, uint32_t worker);

/* A starting engine: state LOADING; empties the submit rings, clears
 * want_space of all slots and notified of those that are not in the ready
 * ring, DEAD → FREE; then the pid and epoch + 1.  The caller sets READY when
 * the card is filled. */
void llm_shm_takeover(llm_shm_t *shm, int32_t pid);

#endif /* ENGINE_IPC_SHM_H */
