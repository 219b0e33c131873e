/*
 * Every block on an OS thread of its own, one after another, but so that TSan
 * does not know: the launch waits for a block by a system call that TSan does
 * not follow, and joins the threads only when all have run.  Their shared
 * memory is their own, so only what they do to global memory can collide.
 */

#ifdef SHIM_TSAN

#include "t/shim/options.h"
#include "t/shim/worker.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* threads that are not joined; TSan has room for some thousand */
#define BATCH 256

typedef struct {
    const shim_grid_t *grid;
    uint64_t number, launch;
    int done;
    pthread_t thread;
} run_t;


static void
free_block(block_t *block)
{
    for (int i = 0; i < block->n_made; i++) {
        shim_fiber_fini(&block->threads[i]->fiber);
        free(block->threads[i]->pending);
        free(block->threads[i]);
    }

    free(block->main.context);
    free(block->shared_memory);
    free(block);
}


static void *
run_one(void *data)
{
    run_t *run = (run_t *) data;
    block_t *block = (block_t *) calloc(1, sizeof(block_t));

    shim_worker = &block->face;
    shim_block_prepare(block, run->grid);
    shim_block_run(block, run->number, run->launch);
    shim_worker = NULL;
    free_block(block);

    __atomic_store_n(&run->done, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &run->done, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);

    return NULL;
}


static void
begin(run_t *run)
{
    if (pthread_create(&run->thread, NULL, run_one, run) != 0) {
        abort();
    }

    while (__atomic_load_n(&run->done, __ATOMIC_ACQUIRE) == 0) {
        syscall(SYS_futex, &run->done, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    }
}


void
shim_run_apart(const shim_grid_t *grid, uint64_t launch)
{
    const uint64_t n_blocks = (uint64_t) grid->grid.x * grid->grid.y
                              * grid->grid.z;
    run_t *runs = (run_t *) calloc(BATCH, sizeof(run_t));

    for (uint64_t first = 0; first < n_blocks; first += BATCH) {
        const uint64_t n = n_blocks - first < BATCH ? n_blocks - first : BATCH;

        for (uint64_t i = 0; i < n; i++) {
            runs[i] = { grid, first + i, launch, 0, 0 };
            begin(&runs[i]);
        }

        for (uint64_t i = 0; i < n; i++) {
            pthread_join(runs[i].thread, NULL);
        }
    }

    free(runs);
}

#endif
