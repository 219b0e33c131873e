/*
 * The inside of a worker, for the files of the emulation that need more than
 * kernels do: exec.cpp, grid.cpp, apart.cpp, shared.cpp, collective.cpp.
 */

#ifndef T_SHIM_WORKER_H
#define T_SHIM_WORKER_H

#include "t/shim/exec.h"
#include "t/shim/fiber.h"

enum {
    MAX_WARPS = SHIM_MAX_THREADS / SHIM_LANES,
    N_MEETINGS = 8, /* groups of lanes of one warp that meet at one time */
    MAX_PENDING = 256 /* asynchronous copies of one thread */
};

typedef enum {
    THREAD_READY,
    THREAD_BARRIER,
    THREAD_COLLECTIVE,
    THREAD_GONE,
    THREAD_STATES
} thread_state_t;

/* an asynchronous copy into shared memory */
typedef struct {
    void *dst;
    const void *src;
    int n_bytes; /* the rest of 16 is zero */
    int group;
} pending_t;

typedef struct {
    shim_thread_t face; /* first: what kernels see */
    shim_fiber_t fiber;
    thread_state_t state;
    bool begun;
    shim_site_t site; /* where it waits */
    int n_pending;
    int n_groups; /* committed */
    pending_t *pending;
} thread_t;

typedef struct {
    uint32_t mask;
    uint32_t arrived;
    shim_site_t site;
    unsigned turn;
    char token[2];
    shim_slots_t slots;
} meeting_t;

typedef struct {
    shim_worker_t face; /* first: what kernels see */
    const shim_grid_t *grid;
    shim_fiber_t main;

    thread_t *threads[SHIM_MAX_THREADS];
    int n_made;
    int n_threads;
    int n_live;

    uint64_t seed;
    uint64_t random;
    uint64_t priority[MAX_WARPS];
    uint64_t lowest;
    uint32_t present[MAX_WARPS]; /* lanes that the warp has */
    uint32_t ready[MAX_WARPS];
    uint32_t gone[MAX_WARPS];
    uint32_t ready_warps;

    int n_waiting; /* at the barrier */
    shim_site_t barrier_site;
    unsigned barrier_turn;
    int barrier_count[2];

    size_t shared_bytes;
    char *shared_memory; /* with room for what guards its end */

    char begin_token, end_token, barrier_token[2];
    uint64_t n_switches;

    int n_meeting[MAX_WARPS]; /* meetings that some lanes have come to */
    meeting_t meetings[MAX_WARPS][N_MEETINGS];
} block_t;

block_t *shim_block(void);

uint64_t shim_random(uint64_t *state);

/* Makes a worker ready for a launch. */
void shim_block_prepare(block_t *block, const shim_grid_t *grid);

void shim_block_run(block_t *block, uint64_t number, uint64_t launch);

/* The blocks of a launch on threads of their own (apart.cpp). */
void shim_run_apart(const shim_grid_t *grid, uint64_t launch);

/* Shared memory of a launch, of each block, and what is written behind it. */
void shim_shared_reserve(block_t *block, size_t n_bytes);
void shim_shared_begin(block_t *block);
void shim_shared_end(block_t *block);

/* Fills the static shared memory of a kernel with NaNs. */
void shim_statics_poison(const void *kernel);

typedef uint32_t __attribute__((may_alias)) shim_word_t;

/* memcpy of whole words that no sanitizer looks at */
static inline void
shim_move(void *dst, const void *src, size_t n_bytes)
{
    shim_word_t *to = (shim_word_t *) dst;
    const shim_word_t *from = (const shim_word_t *) src;

    for (size_t i = 0; i < n_bytes / sizeof(shim_word_t); i++) {
        to[i] = from[i];
    }
}

#endif
