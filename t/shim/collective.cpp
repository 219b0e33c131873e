/*
 * What device.h and prim*.cuh need beside barriers: shuffles, and asynchronous
 * copies.  A copy poisons its destination when it is issued, which is when the
 * hardware may begin to overwrite it, and fills it when its group has been
 * waited for, which is when the hardware must have: whoever reads too early or
 * reuses a buffer too early finds NaNs.
 */

#include "t/shim/exec.h"
#include "t/shim/worker.h"

#include <stdlib.h>

#ifdef SHIM_TSAN
extern "C" void __tsan_write_range(void *at, unsigned long n_bytes);
extern "C" void __tsan_read_range(void *at, unsigned long n_bytes);
#else
#define __tsan_write_range(at, n_bytes)
#define __tsan_read_range(at, n_bytes)
#endif

#define POISON 0x7fc0dead /* a NaN, of f32, and each half of bf16 or f16 */
#define COPY_BYTES 16

/* what a lane brings to a shuffle */
typedef struct {
    uint32_t value[2];
    int32_t src;
    uint32_t mask;
} shuffle_t;


static void
shuffle(shim_slots_t *slots)
{
    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const shuffle_t *self = (const shuffle_t *) slots->in[lane];

        if ((slots->lanes >> lane & 1) == 0) {
            continue;
        }

        const int src = self->src & (SHIM_LANES - 1);

        if ((slots->lanes >> src & 1) == 0) {
            shim_kernel_fault("lane %d shuffles from lane %d, which is not "
                              "in the mask", lane, src);
        }

        shim_move(slots->out[lane], slots->in[src], sizeof(self->value));
    }
}


void
shim_shuffle(unsigned mask, const void *value, void *out, int bytes, int src,
             shim_site_t site)
{
    static const shim_collective_t collective = {
        sizeof(shuffle_t), 2 * sizeof(uint32_t), shuffle
    };
    shuffle_t in = { { 0, 0 }, src, mask };
    uint32_t got[2];

    shim_move(in.value, value, bytes);
    shim_collective(mask, &collective, &in, got, site);
    shim_move(out, got, bytes);
}


static void
ballot(shim_slots_t *slots)
{
    uint32_t votes = 0;

    for (int lane = 0; lane < SHIM_LANES; lane++) {
        if ((slots->lanes >> lane & 1) != 0
            && *(const shim_word_t *) slots->in[lane] != 0)
        {
            votes |= 1u << lane;
        }
    }

    for (int lane = 0; lane < SHIM_LANES; lane++) {
        if ((slots->lanes >> lane & 1) != 0) {
            *(shim_word_t *) slots->out[lane] = votes;
        }
    }
}


unsigned
shim_ballot(unsigned mask, int predicate, shim_site_t site)
{
    static const shim_collective_t collective = { sizeof(uint32_t),
                                                  sizeof(uint32_t), ballot };
    const uint32_t in = predicate != 0;
    uint32_t votes = 0;

    shim_collective(mask, &collective, &in, &votes, site);

    return votes;
}


void
shim_copy_async(void *dst, const void *src, int n_bytes, shim_site_t site)
{
    thread_t *self = (thread_t *) shim_worker->self;

    if ((uintptr_t) dst % COPY_BYTES != 0
        || (n_bytes != 0 && (uintptr_t) src % COPY_BYTES != 0))
    {
        shim_kernel_fault("%s at %s:%d: %p or %p is not aligned to 16",
                          site.what, site.file, site.line, dst, src);
    }

    if (self->pending == NULL) {
        self->pending = (pending_t *) calloc(MAX_PENDING, sizeof(pending_t));
    }

    if (self->n_pending == MAX_PENDING) {
        shim_kernel_fault("more than %d asynchronous copies of one thread",
                          MAX_PENDING);
    }

    pending_t *copy = &self->pending[self->n_pending++];

    copy->dst = dst;
    copy->src = src;
    copy->n_bytes = n_bytes;
    copy->group = self->n_groups;

    __tsan_write_range(dst, COPY_BYTES);

    shim_word_t *words = (shim_word_t *) dst;

    for (int i = 0; i < COPY_BYTES / 4; i++) {
        words[i] = POISON;
    }
}


void
shim_copy_commit(void)
{
    ((thread_t *) shim_worker->self)->n_groups++;
}


static void
finish(const pending_t *copy)
{
    const shim_word_t zeros[COPY_BYTES / 4] = { 0 };

    __tsan_write_range(copy->dst, COPY_BYTES);

    if (copy->n_bytes > 0) {
        __tsan_read_range((void *) copy->src, copy->n_bytes);
    }

    shim_move(copy->dst, copy->src, copy->n_bytes);
    shim_move((char *) copy->dst + copy->n_bytes, zeros,
              COPY_BYTES - copy->n_bytes);
}


void
shim_copy_wait(int n_groups)
{
    thread_t *self = (thread_t *) shim_worker->self;
    int n_left = 0;

    for (int i = 0; i < self->n_pending; i++) {
        const pending_t *copy = &self->pending[i];

        if (copy->group < self->n_groups - n_groups) {
            finish(copy);

        } else {
            self->pending[n_left++] = *copy;
        }
    }

    self->n_pending = n_left;
}
