/*
 * A launch: its blocks, in an order that the seed permutes, on one worker or
 * several.  Each OS thread has a worker of its own, which keeps its fibers from
 * launch to launch.
 */

#include "t/shim/exec.h"
#include "t/shim/options.h"
#include "t/shim/worker.h"

#include <atomic>
#include <pthread.h>
#include <stdlib.h>

#define MAX_WORKERS 64

typedef struct {
    const shim_grid_t *grid;
    uint64_t n_blocks;
    uint64_t start, step; /* order of blocks */
    uint64_t launch;
} job_t;

/* helpers sleep until a job has a number that they have not seen */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t begin, end;
    const job_t *job;
    uint64_t number;
    int n_helpers;
    int n_busy;
    std::atomic<uint64_t> next;
} crew = { PTHREAD_MUTEX_INITIALIZER,
           PTHREAD_COND_INITIALIZER,
           PTHREAD_COND_INITIALIZER,
           NULL,
           0,
           0,
           0,
           { 0 } };


static block_t *
worker(void)
{
    /* a sanitizer that looks for leaks finds them here */
    static block_t *all[MAX_WORKERS] __attribute__((used));
    static std::atomic<int> n_all;

    if (shim_worker == NULL) {
        block_t *block = (block_t *) calloc(1, sizeof(block_t));

        all[n_all++ % MAX_WORKERS] = block;
        shim_worker = &block->face;
    }

    return shim_block();
}


void
shim_block_prepare(block_t *block, const shim_grid_t *grid)
{
    block->grid = grid;
    block->face.block_dim = grid->block;
    block->face.grid_dim = grid->grid;
    block->n_threads = grid->block.x * grid->block.y * grid->block.z;
    block->n_switches = 0;

    for (int warp = 0; warp < MAX_WARPS; warp++) {
        const int n = block->n_threads - warp * SHIM_LANES;

        block->present[warp] = n >= SHIM_LANES ? 0xffffffffu
                               : n > 0         ? (1u << n) - 1
                                               : 0;
    }

    shim_fiber_main(&block->main);
    shim_shared_reserve(block, grid->shared_bytes);
}


/* Runs blocks until there are none left. */
static void
work(const job_t *job)
{
    block_t *block = worker();
    uint64_t i;

    shim_block_prepare(block, job->grid);

    while ((i = crew.next.fetch_add(1)) < job->n_blocks) {
        const uint64_t number = (job->start + i * job->step) % job->n_blocks;

        shim_block_run(block, number, job->launch);
    }

    block->grid = NULL;
    __atomic_fetch_add(&shim_stats.switches, block->n_switches,
                       __ATOMIC_RELAXED);
}


static void *
helper(void *unused)
{
    uint64_t seen = 0;

    (void) unused;
    pthread_mutex_lock(&crew.mutex);

    for (;;) {
        while (crew.number == seen) {
            pthread_cond_wait(&crew.begin, &crew.mutex);
        }

        seen = crew.number;
        pthread_mutex_unlock(&crew.mutex);

        work(crew.job);

        pthread_mutex_lock(&crew.mutex);

        if (--crew.n_busy == 0) {
            pthread_cond_signal(&crew.end);
        }
    }

    return NULL;
}


static void
hire(int n_helpers)
{
    while (crew.n_helpers < n_helpers) {
        pthread_t thread;

        if (pthread_create(&thread, NULL, helper, NULL) != 0) {
            abort();
        }

        pthread_detach(thread);
        crew.n_helpers++;
    }
}


static uint64_t
common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        const uint64_t rest = a % b;

        a = b;
        b = rest;
    }

    return a;
}


/* Any permutation of the form start + i * step finds what depends on order. */
static void
permute(job_t *job)
{
    uint64_t state = shim_options()->seed + job->launch;

    job->start = 0;
    job->step = 1;

    if (shim_options()->seed == 0 || job->n_blocks < 2) {
        return;
    }

    job->start = shim_random(&state) % job->n_blocks;
    job->step = 1 + shim_random(&state) % (job->n_blocks - 1);

    while (common_divisor(job->step, job->n_blocks) != 1) {
        job->step = job->step % job->n_blocks + 1;
    }
}


static int
count_workers(const job_t *job)
{
#if defined(SHIM_ASAN) || defined(SHIM_TSAN)
    /* ASan: static shared memory is one for all workers; TSan: blocks are in
     * an order, so that they may use the same shared memory */
    (void) job;

    return 1;
#else
    int n = shim_options()->workers;

    n = n > MAX_WORKERS ? MAX_WORKERS : n;

    return (uint64_t) n > job->n_blocks ? (int) job->n_blocks : n;
#endif
}


void
shim_grid_run(const shim_grid_t *grid)
{
    job_t job;

    job.grid = grid;
    job.n_blocks = (uint64_t) grid->grid.x * grid->grid.y * grid->grid.z;
    job.launch = ++shim_stats.launches;
    permute(&job);

    shim_stats.blocks += job.n_blocks;
    shim_stats.threads += job.n_blocks * grid->block.x * grid->block.y
                          * grid->block.z;
    crew.next = 0;

#ifdef SHIM_TSAN
    if (shim_options()->apart) {
        shim_run_apart(grid, job.launch);
        return;
    }
#endif

    if (count_workers(&job) < 2) {
        work(&job);
        return;
    }

    pthread_mutex_lock(&crew.mutex);
    hire(count_workers(&job) - 1);
    crew.job = &job;
    crew.number++;
    crew.n_busy = crew.n_helpers;
    pthread_cond_broadcast(&crew.begin);
    pthread_mutex_unlock(&crew.mutex);

    work(&job);

    pthread_mutex_lock(&crew.mutex);

    while (crew.n_busy != 0) {
        pthread_cond_wait(&crew.end, &crew.mutex);
    }

    pthread_mutex_unlock(&crew.mutex);
}
