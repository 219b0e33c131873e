/*
 * What is wrong with a kernel, said once and for all: the cause, the block, and
 * where its threads are.
 */

#include "t/shim/exec.h"
#include "t/shim/options.h"
#include "t/shim/worker.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>


/* A thread that was woken keeps its state until it runs. */
static thread_state_t
state_of(const block_t *block, const thread_t *thread)
{
    const int id = thread->face.id;

    return (block->ready[id / SHIM_LANES] >> id % SHIM_LANES & 1) != 0
               ? THREAD_READY
               : thread->state;
}


static void
describe(const thread_t *thread, thread_state_t state)
{
    static const char *const states[] = { "can run", "at a barrier",
                                          "in a collective", "has left" };

    fprintf(stderr, "    thread %d (warp %d, lane %d) %s", thread->face.id,
            thread->face.id / SHIM_LANES, thread->face.id % SHIM_LANES,
            states[state]);

    if (state == THREAD_BARRIER || state == THREAD_COLLECTIVE) {
        fprintf(stderr, ": %s, %s:%d", thread->site.what, thread->site.file,
                thread->site.line);
    }

    fputc('\n', stderr);
}


/* The first thread of each state, and how many there are. */
static void
describe_all(const block_t *block)
{
    int counts[THREAD_STATES] = { 0 };

    for (int i = 0; i < block->n_threads; i++) {
        const thread_state_t state = state_of(block, block->threads[i]);

        if (counts[state]++ < 2) {
            describe(block->threads[i], state);
        }
    }

    fprintf(stderr, "    %d can run, %d at a barrier, %d in a collective, "
            "%d have left\n", counts[0], counts[1], counts[2], counts[3]);
}


void
shim_kernel_fault(const char *fmt, ...)
{
    const block_t *block = shim_block();
    va_list args;

    fputs("cuda-shim: ", stderr);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);

    if (block != NULL && block->grid != NULL) {
        const uint3 *at = &block->face.block_index;

        fprintf(stderr, "\n    kernel %s, block (%u, %u, %u)",
                block->grid->name, at->x, at->y, at->z);

        if (block->face.self != NULL) {
            fprintf(stderr, ", thread %d", block->face.self->id);
        }

        fprintf(stderr, ", seed %llu\n",
                (unsigned long long) shim_options()->seed);
        describe_all(block);

    } else {
        fputc('\n', stderr);
    }

    fflush(stderr);
    abort();
}
