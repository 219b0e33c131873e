/*
 * Shared memory begins every block full of NaNs.  The dynamic part has its
 * exact size, so that ASan sees its end, and guard bytes behind it for builds
 * without ASan.  Where the static parts are is known to statics.cpp.
 */

#include "t/shim/exec.h"
#include "t/shim/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xff /* NaN in every format of floats */
#define GUARD 0xa5
#define ALIGNMENT 128 /* at least 16 for vector loads and copies */

#ifdef SHIM_ASAN
#define GUARD_BYTES 0
#else
#define GUARD_BYTES 128
#endif


void
shim_shared_reserve(block_t *block, size_t n_bytes)
{
    void *memory = NULL;

    if (block->shared_memory == NULL || n_bytes != block->shared_bytes) {
        free(block->shared_memory);

        if (n_bytes != 0
            && posix_memalign(&memory, ALIGNMENT, n_bytes + GUARD_BYTES) != 0)
        {
            abort();
        }

        block->shared_memory = (char *) memory;
        block->shared_bytes = n_bytes;
    }

    block->face.dynamic = block->shared_memory;
}


void
shim_shared_begin(block_t *block)
{
    if (block->shared_bytes != 0) {
        memset(block->shared_memory, POISON, block->shared_bytes);
    }

    for (int i = 0; block->shared_bytes != 0 && i < GUARD_BYTES; i++) {
        block->shared_memory[block->shared_bytes + i] = (char) GUARD;
    }

    shim_statics_poison(block->grid->kernel);
}


void
shim_shared_end(block_t *block)
{
    const unsigned char *behind = (const unsigned char *) block->shared_memory
                                  + block->shared_bytes;

    for (int i = 0; block->shared_bytes != 0 && i < GUARD_BYTES; i++) {
        if (behind[i] != GUARD) {
            shim_kernel_fault("written %d bytes behind %zu bytes of dynamic "
                              "shared memory", i, block->shared_bytes);
        }
    }
}
