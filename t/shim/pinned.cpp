/*
 * Memory of the host that all devices reach.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <map>
#include <stdlib.h>

#define POISON 0xff
#define PAGE 4096

static std::map<const char *, size_t> pinned;


bool
shim_is_pinned(const void *ptr, size_t n_bytes)
{
    auto next = pinned.upper_bound((const char *) ptr);

    if (next == pinned.begin()) {
        return false;
    }

    --next;

    return (const char *) ptr + n_bytes <= next->first + next->second;
}


cudaError_t
shim_host_alloc(void **ptr, size_t n_bytes, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    if (shim_fails(SHIM_FAIL_HOST)
        || posix_memalign(ptr, PAGE, n_bytes) != 0)
    {
        return shim_error(cudaErrorMemoryAllocation);
    }

    memset(*ptr, POISON, n_bytes);
    pinned[(const char *) *ptr] = n_bytes;
    shim_live.pinned++;

    return cudaSuccess;
}


cudaError_t
cudaFreeHost(void *ptr)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (ptr == NULL) {
        return error;
    }

    if (pinned.erase((const char *) ptr) == 0) {
        return shim_error(cudaErrorInvalidValue);
    }

    shim_run_all();
    free(ptr);
    shim_live.pinned--;

    return error;
}


cudaError_t
cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_is_pinned(ptr, 1)) {
        return shim_error(cudaErrorHostMemoryAlreadyRegistered);
    }

    pinned[(const char *) ptr] = n_bytes;

    return cudaSuccess;
}


cudaError_t
cudaHostUnregister(void *ptr)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    shim_run_all();

    if (pinned.erase((const char *) ptr) == 0) {
        return shim_error(cudaErrorHostMemoryNotRegistered);
    }

    return error;
}
