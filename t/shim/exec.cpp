/*
 * Workers, blocks, and who of a block's threads runs next.
 *
 * Threads that can run are kept as one bit mask a warp.  Without a seed the
 * lowest warp and lane goes on; with one, warps have random priorities that
 * are obeyed strictly and change rarely, which finds races that a uniform
 * choice does not, because one warp gets far ahead of another.
 */

#include "t/shim/exec.h"
#include "t/shim/fiber.h"
#include "t/shim/options.h"
#include "t/shim/worker.h"

#include <stdlib.h>
#include <string.h>

/* one change of priorities in so many decisions */
#define CHANGE_PERIOD 512

__thread shim_worker_t *shim_worker;


block_t *
shim_block(void)
{
    return (block_t *) shim_worker;
}


uint64_t
shim_random(uint64_t *state)
{
    /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;

    return z ^ (z >> 31);
}


static thread_t *
thread_self(const block_t *block)
{
    return (thread_t *) block->face.self;
}


static void
make_ready(block_t *block, int warp, uint32_t lanes)
{
    block->ready[warp] |= lanes;

    if (lanes != 0) {
        block->ready_warps |= 1u << warp;
    }
}


static int
best_warp(block_t *block)
{
    int best = -1;

    for (uint32_t left = block->ready_warps; left != 0; left &= left - 1) {
        const int warp = __builtin_ctz(left);

        if (best < 0 || block->priority[warp] > block->priority[best]) {
            best = warp;
        }
    }

    return best;
}


/* Takes the thread that is to run next; NULL: all wait. */
static thread_t *
take_next(block_t *block)
{
    int warp, lane;

    if (block->ready_warps == 0) {
        return NULL;
    }

    if (block->seed == 0) {
        warp = __builtin_ctz(block->ready_warps);
        lane = __builtin_ctz(block->ready[warp]);

    } else {
        const uint64_t draw = shim_random(&block->random);

        warp = best_warp(block);

        if (draw % CHANGE_PERIOD == 0) {
            block->priority[warp] = --block->lowest;
            warp = best_warp(block);
        }

        /* the first lane from a random one on */
        const uint32_t ready = block->ready[warp];
        const int from = (draw >> 32) % SHIM_LANES;
        const uint32_t above = ready & (0xffffffffu << from);

        lane = __builtin_ctz(above != 0 ? above : ready);
    }

    block->ready[warp] &= ~(1u << lane);

    if (block->ready[warp] == 0) {
        block->ready_warps &= ~(1u << warp);
    }

    return block->threads[warp * SHIM_LANES + lane];
}


static void
switch_to(block_t *block, shim_fiber_t *from, thread_t *to)
{
    block->n_switches++;
    block->face.self = &to->face;
    shim_fiber_switch(from, &to->fiber);
}


/* The running thread waits, or lets others go first. */
static void
yield(block_t *block)
{
    thread_t *self = thread_self(block);
    thread_t *next = take_next(block);

    if (next == NULL) {
        shim_kernel_fault("all threads wait: not all come to a barrier, or "
                          "not all lanes to a collective");
    }

    if (next != self) {
        switch_to(block, &self->fiber, next);
    }

    self->state = THREAD_READY;
}


static void
wait_as(block_t *block, thread_state_t state, const shim_site_t *site)
{
    thread_t *self = thread_self(block);

    self->state = state;
    self->site = *site;
    yield(block);
}


static bool
same_site(const shim_site_t *a, const shim_site_t *b)
{
    return a->line == b->line
           && (a->file == b->file || strcmp(a->file, b->file) == 0);
}


static void
check_barrier(block_t *block, const shim_site_t *site)
{
    if (block->n_live != block->n_threads) {
        shim_kernel_fault("barrier at %s:%d after %d threads have left",
                          site->file, site->line,
                          block->n_threads - block->n_live);
    }

    if (block->n_waiting == 0) {
        block->barrier_site = *site;

    } else if (!same_site(site, &block->barrier_site)) {
        shim_kernel_fault("divergent barrier: %s:%d while others wait at "
                          "%s:%d", site->file, site->line,
                          block->barrier_site.file, block->barrier_site.line);
    }
}


int
shim_barrier_count(int predicate, shim_site_t site)
{
    block_t *block = shim_block();
    thread_t *self = thread_self(block);
    /* two tokens in turn: one for all would also order what follows a
     * barrier before what precedes the next */
    const unsigned turn = block->barrier_turn & 1;
    char *token = &block->barrier_token[turn];

    check_barrier(block, &site);
    shim_release(token);

    if (block->n_waiting == 0) {
        block->barrier_count[turn] = 0;
    }

    block->barrier_count[turn] += predicate != 0;

    if (++block->n_waiting < block->n_live) {
        wait_as(block, THREAD_BARRIER, &site);

    } else {
        block->n_waiting = 0;
        block->barrier_turn++;

        for (int i = 0; i * SHIM_LANES < block->n_threads; i++) {
            make_ready(block, i, block->present[i]);
        }

        const int warp = self->face.id / SHIM_LANES;

        if (block->seed == 0) {
            block->ready[warp] &= ~(1u << self->face.id % SHIM_LANES);

            if (block->ready[warp] == 0) {
                block->ready_warps &= ~(1u << warp);
            }

        } else {
            yield(block);
        }
    }

    shim_acquire(token);

    return block->barrier_count[turn];
}


void
shim_barrier(shim_site_t site)
{
    shim_barrier_count(0, site);
}


/* The meeting of a warp's lanes under one mask. */
static meeting_t *
find_meeting(block_t *block, int warp, uint32_t mask)
{
    meeting_t *meetings = block->meetings[warp];

    for (int i = 0; i < N_MEETINGS; i++) {
        if (meetings[i].mask == mask) {
            return &meetings[i];
        }
    }

    for (int i = 0; i < N_MEETINGS; i++) {
        if (meetings[i].arrived == 0) {
            meetings[i].mask = mask;
            return &meetings[i];
        }
    }

    shim_kernel_fault("more than %d groups of lanes in one warp", N_MEETINGS);
}


static meeting_t *
enter_meeting(block_t *block, uint32_t mask, const shim_site_t *site)
{
    const int id = block->face.self->id;
    const int warp = id / SHIM_LANES;
    const uint32_t bit = 1u << id % SHIM_LANES;

    if ((mask & bit) == 0) {
        shim_kernel_fault("%s at %s:%d: the mask %08x does not name the lane "
                          "itself", site->what, site->file, site->line, mask);
    }

    if ((mask & block->gone[warp]) != 0) {
        shim_kernel_fault("%s at %s:%d: lanes %08x of the mask have left",
                          site->what, site->file, site->line,
                          mask & block->gone[warp]);
    }

    meeting_t *meeting = find_meeting(block, warp, mask);

    if (meeting->arrived == 0) {
        meeting->site = *site;
        block->n_meeting[warp]++;

    } else if (!same_site(site, &meeting->site)) {
        shim_kernel_fault("divergent warp: %s at %s:%d while other lanes are "
                          "in %s at %s:%d", site->what, site->file, site->line,
                          meeting->site.what, meeting->site.file,
                          meeting->site.line);
    }

    meeting->arrived |= bit;

    return meeting;
}


/* Waits for the others; the last to come does what is to be done for all. */
static void
meet(block_t *block, meeting_t *meeting, const shim_collective_t *collective)
{
    const int id = block->face.self->id;
    const int warp = id / SHIM_LANES;
    const uint32_t bit = 1u << id % SHIM_LANES;
    const uint32_t lanes = meeting->mask & block->present[warp];

    if (meeting->arrived != lanes) {
        wait_as(block, THREAD_COLLECTIVE, &meeting->site);
        return;
    }

    if (collective != NULL) {
        meeting->slots.lanes = lanes;
        collective->compute(&meeting->slots);
    }

    meeting->arrived = 0;
    meeting->turn++;
    block->n_meeting[warp]--;
    make_ready(block, warp, lanes & ~bit);

    if (block->seed != 0) {
        make_ready(block, warp, bit);
        yield(block);
    }
}


void
shim_collective(unsigned mask, const shim_collective_t *collective,
                const void *in, void *out, shim_site_t site)
{
    block_t *block = shim_block();
    meeting_t *meeting = enter_meeting(block, mask, &site);
    const int lane = block->face.self->id % SHIM_LANES;

    /* A lane that is early at the next meeting may bring something while
     * others still have to fetch, but nothing is computed before all came. */
    shim_move(meeting->slots.in[lane], in, collective->in_bytes);
    meet(block, meeting, collective);
    shim_move(out, meeting->slots.out[lane], collective->out_bytes);
}


void
shim_warp_barrier(unsigned mask, shim_site_t site)
{
    block_t *block = shim_block();
    meeting_t *meeting = enter_meeting(block, mask, &site);
    char *token = &meeting->token[meeting->turn & 1];

    shim_release(token);

    meet(block, meeting, NULL);
    shim_acquire(token);
}


/* A thread has come to its end. */
static void
leave(block_t *block)
{
    thread_t *self = thread_self(block);
    const int warp = self->face.id / SHIM_LANES;
    const uint32_t bit = 1u << self->face.id % SHIM_LANES;

    self->state = THREAD_GONE;
    self->n_pending = 0;
    self->n_groups = 0;
    block->gone[warp] |= bit;
    block->n_live--;

    if (block->n_waiting != 0) {
        shim_kernel_fault("divergent barrier: a thread has left while %d wait "
                          "at %s:%d", block->n_waiting,
                          block->barrier_site.file, block->barrier_site.line);
    }

    for (int i = 0; i < N_MEETINGS && block->n_meeting[warp] != 0; i++) {
        const meeting_t *meeting = &block->meetings[warp][i];

        if (meeting->arrived != 0 && (meeting->mask & bit) != 0) {
            shim_kernel_fault("a lane has left while others wait for it: %s "
                              "at %s:%d", meeting->site.what,
                              meeting->site.file, meeting->site.line);
        }
    }
}


/* Whether a thread, which is the next, can run on the stack of one that has
 * left: it has not begun on its own.  TSan has to see two. */
static bool
may_follow(const thread_t *next)
{
#ifdef SHIM_TSAN
    (void) next;

    return false;
#else
    return !next->begun;
#endif
}


/* What every fiber runs: threads of one block after the other. */
static void
thread_main(void)
{
    shim_fiber_enter();

    for (;;) {
        block_t *block = shim_block();
        thread_t *self = thread_self(block);

        shim_acquire(&block->begin_token);
        self->begun = true;
        block->grid->call(block->grid->arguments);
        shim_release(&block->end_token);

        leave(block);

        thread_t *next = take_next(block);

        if (next != NULL && may_follow(next)) {
            const shim_fiber_t fiber = next->fiber;

            next->fiber = self->fiber;
            self->fiber = fiber;
            block->face.self = &next->face;

        } else if (next != NULL) {
            switch_to(block, &self->fiber, next);

        } else if (block->n_live != 0) {
            shim_kernel_fault("all threads that are left wait");

        } else {
            block->face.self = NULL;
            shim_fiber_switch(&self->fiber, &block->main);
        }
    }
}


static thread_t *
thread_create(int id)
{
    thread_t *thread = (thread_t *) calloc(1, sizeof(thread_t));

    thread->face.id = id;
    shim_fiber_init(&thread->fiber, thread_main);

    return thread;
}


/* Begins with all threads ready and memory full of NaNs. */
static void
block_reset(block_t *block)
{
    const uint3 dim = block->face.block_dim;

    memset(block->ready, 0, sizeof(block->ready));
    memset(block->gone, 0, sizeof(block->gone));
    block->ready_warps = 0;
    block->n_live = block->n_threads;
    block->n_waiting = 0;

    for (int i = 0; i < block->n_threads; i++) {
        thread_t *thread = block->threads[i];

        thread->state = THREAD_READY;
        thread->begun = false;
        thread->face.index.x = i % dim.x;
        thread->face.index.y = i / dim.x % dim.y;
        thread->face.index.z = i / (dim.x * dim.y);
    }

    for (int warp = 0; warp * SHIM_LANES < block->n_threads; warp++) {
        /* nobody is in a meeting: the block before came to its end */
        make_ready(block, warp, block->present[warp]);
        block->priority[warp] = (shim_random(&block->random) >> 8) + (1 << 20);
    }

    block->lowest = 1 << 20;
}


void
shim_block_run(block_t *block, uint64_t number, uint64_t launch)
{
    const uint3 grid = block->grid->grid;

    block->face.block_index.x = number % grid.x;
    block->face.block_index.y = number / grid.x % grid.y;
    block->face.block_index.z = number / ((uint64_t) grid.x * grid.y);

    block->seed = shim_options()->seed;
    block->random = block->seed ^ launch * 0x2545f4914f6cdd1dull
                    ^ number * 0x9e3779b97f4a7c15ull;

    while (block->n_made < block->n_threads) {
        block->threads[block->n_made] = thread_create(block->n_made);
        block->n_made++;
    }

    block_reset(block);
    shim_shared_begin(block);

    shim_release(&block->begin_token);

    thread_t *first = take_next(block);

    block->face.self = &first->face;
    block->n_switches++;
    shim_fiber_switch(&block->main, &first->fiber);

    shim_acquire(&block->end_token);
    shim_shared_end(block);
}
