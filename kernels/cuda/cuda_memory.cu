/*
 * The device's errors and memory, for all files of the backend.
 *
 * A refusal for lack of memory is an answer like any other; every other error
 * is the end of the device (cuda.cu).
 */

#include "kernels/cuda/cuda_dev.h"

#include <stdarg.h>
#include <stdio.h>

/* The runtime loads a kernel when it is first launched; all of them have a few
 * megabytes, and local memory and tables of the driver come with them. */
enum { CODE_BYTES = 32 << 20 };


/* --- errors --- */

bool
cuda_ok(op_dev_t *dev, cudaError_t error, const char *what)
{
    if (error == cudaSuccess || dev->failed) {
        return !dev->failed;
    }

    cudaGetLastError(); /* it is told */
    dev->failed = true;
    snprintf(dev->error, sizeof(dev->error), "GPU %d: %s: %s (%s)", dev->id,
             what, cudaGetErrorString(error), cudaGetErrorName(error));

    return false;
}


bool
cuda_enter(op_dev_t *dev)
{
    return cuda_ok(dev, cudaSetDevice(dev->id), "turning to the GPU");
}


int
cuda_check(op_dev_t *dev, op_err_t *err)
{
    cuda_enter(dev);
    cuda_ok(dev, cudaGetLastError(), "an earlier call");

    if (!dev->failed) {
        return 0;
    }

    snprintf(err->text, sizeof(err->text), "%s", dev->error);

    return -1;
}


/* --- memory --- */

/* False: there is not as much, which is no failure of the device. */
static bool
reserved(op_dev_t *dev, cudaError_t error, const char *memory)
{
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        dev->lacking = memory;
        return false;
    }

    return cuda_ok(dev, error, "reserving memory");
}


void *
cuda_alloc(op_dev_t *dev, size_t bytes)
{
    const size_t n = bytes == 0 ? 1 : bytes;
    void *p = NULL;

    if (!cuda_enter(dev)
        || !reserved(dev, cudaMalloc(&p, n), "memory on the GPU")) {
        return NULL;
    }

    cuda_ok(dev, cudaMemsetAsync(p, 0, n, dev->stream), "clearing memory");

    return p;
}


void *
cuda_alloc_host(op_dev_t *dev, size_t bytes)
{
    void *p = NULL;

    if (!cuda_enter(dev)
        || !reserved(dev, cudaMallocHost(&p, bytes),
                     "pinned memory on the host"))
    {
        return NULL;
    }

    return p;
}


bool
cuda_event(op_dev_t *dev, cudaEvent_t *event)
{
    return cuda_ok(dev, cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                   "creating an event");
}


void
cuda_lacks(const op_dev_t *dev, op_err_t *err, const char *what, ...)
{
    const int n =
        dev->failed
            ? snprintf(err->text, sizeof(err->text), "%s", dev->error)
            : snprintf(err->text, sizeof(err->text), "no %s ", dev->lacking);
    va_list args;

    if (!dev->failed) {
        va_start(args, what);
        vsnprintf(err->text + n, sizeof(err->text) - (size_t) n, what, args);
        va_end(args);
    }
}


/* cudaFree() waits for the device, so nothing uses the memory any more. */
void
cuda_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) bytes;

    if (p != NULL) {
        cuda_enter(dev);
        cuda_graphs_drop(dev);
        cuda_ok(dev, cudaFree(p), "freeing memory");
    }
}


op_memory_t
cuda_memory(op_dev_t *dev)
{
    op_memory_t memory = { 0, 0, 0 };

    if (!cuda_enter(dev)
        || !cuda_ok(dev, cudaMemGetInfo(&memory.free, &memory.total),
                    "asking for memory"))
    {
        memory.free = 0;
    }

    memory.later = (dev->beside ? 0 : CODE_BYTES) + cuda_blas_later(dev)
                   + cuda_graphs_later(dev);

    return memory;
}


/* For the load, so it may wait: the source may go when it returns. */
void
cuda_put(op_dev_t *dev, void *to, const void *from, size_t bytes)
{
    if (bytes == 0 || !cuda_enter(dev)) {
        return;
    }

    cuda_ok(
        dev,
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, dev->stream),
        "copying to the device");
    cuda_ok(dev, cudaStreamSynchronize(dev->stream), "copying to the device");
}


void
cuda_get(op_dev_t *dev, void *to, const void *from, size_t bytes)
{
    if (bytes == 0 || !cuda_enter(dev)) {
        return;
    }

    cuda_ok(
        dev,
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, dev->stream),
        "copying to the host");
    cuda_ok(dev, cudaStreamSynchronize(dev->stream), "running a step");
}
