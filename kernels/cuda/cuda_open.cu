/*
 * Finding and opening a GPU, and saying why not.
 *
 * Everything that is wrong with a machine shows here, at start-up: no driver,
 * one that is too old, no GPU, one that this build has no code for.
 */

#include "kernels/cuda/cuda_dev.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LEAST_CAPABILITY = 75,
    BLOCKS_EACH = 2 /* thread blocks of 256 that a processor runs at once */
};


/* --- what may be wrong --- */

static int
version_major(int version)
{
    return version / 1000;
}


static int
version_minor(int version)
{
    return version % 1000 / 10;
}


/* Why no device can be counted.  A driver that is not there has version 0. */
static void
say_no_device(cudaError_t error, op_err_t *err)
{
    int driver = 0, runtime = 0;

    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);

    if (driver == 0) {
        snprintf(err->text, sizeof(err->text),
                 "no NVIDIA driver is loaded; install one for CUDA %d.%d or "
                 "newer, or use device cpu",
                 version_major(runtime), version_minor(runtime));

    } else if (error == cudaErrorInsufficientDriver) {
        snprintf(err->text, sizeof(err->text),
                 "the NVIDIA driver is for CUDA %d.%d, but %d.%d is needed; "
                 "update the driver, or use device cpu",
                 version_major(driver), version_minor(driver),
                 version_major(runtime), version_minor(runtime));

    } else if (error == cudaErrorNoDevice || error == cudaSuccess) {
        snprintf(err->text, sizeof(err->text),
                 "no GPU is visible to this process (CUDA_VISIBLE_DEVICES, or "
                 "/dev/nvidia*)");

    } else {
        snprintf(err->text, sizeof(err->text), "GPUs cannot be listed: %s",
                 cudaGetErrorString(error));
    }
}


/* The device with most free memory, the first one of equals; -1: none, and
 * what the last one says. */
static int
roomiest(int n, op_err_t *err)
{
    size_t most = 0;
    int best = -1;

    for (int i = 0; i < n; i++) {
        size_t room = 0, total = 0;
        cudaError_t error = cudaSetDevice(i);

        if (error == cudaSuccess) {
            error = cudaMemGetInfo(&room, &total);
        }
        if (error == cudaSuccess && room > most) {
            most = room;
            best = i;
        }

        snprintf(err->text, sizeof(err->text),
                 "none of the %d GPUs can be used; of the last one: %s", n,
                 error == cudaSuccess ? "it has no memory left"
                                      : cudaGetErrorString(error));
    }

    cudaGetLastError();

    return best;
}


static int
choose(int wanted, op_err_t *err)
{
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);

    if (error != cudaSuccess || n == 0) {
        cudaGetLastError();
        say_no_device(error, err);
        return -1;
    }

    if (wanted < 0) {
        return roomiest(n, err);
    }

    if (wanted >= n) {
        snprintf(err->text, sizeof(err->text),
                 "there is no GPU %d: this process sees %d, counted from 0",
                 wanted, n);
        wanted = -1;
    }

    return wanted;
}


/* --- opening --- */

__global__ void
probe(int *to)
{
    *to = 1;
}


/* Runs something: whether the build has code for this GPU shows only here. */
static int
try_kernel(op_dev_t *dev, const cudaDeviceProp *prop, op_err_t *err)
{
    int *flag = NULL;
    int value = 0;
    cudaError_t error = cudaMalloc((void **) &flag, sizeof(int));

    if (error == cudaSuccess) {
        LAUNCH(probe, 1, 1, 0, dev->stream, flag);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess) {
        error = cudaMemcpyAsync(&value, flag, sizeof(value),
                                cudaMemcpyDeviceToHost, dev->stream);
    }
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(dev->stream);
    }
    if (flag != NULL) {
        cudaFree(flag);
    }

    if (error == cudaSuccess && value == 1) {
        return 0;
    }

    cudaGetLastError();

    if (error == cudaErrorNoKernelImageForDevice) {
        snprintf(err->text, sizeof(err->text),
                 "this build has no code for %.60s (compute capability %d.%d)",
                 prop->name, prop->major, prop->minor);
    } else if (error == cudaErrorMemoryAllocation) {
        snprintf(err->text, sizeof(err->text),
                 "GPU %d (%.60s) has no memory left", dev->id, prop->name);
    } else {
        snprintf(err->text, sizeof(err->text),
                 "GPU %d (%.60s) does not run: %s", dev->id, prop->name,
                 cudaGetErrorString(error));
    }

    return -1;
}


static int
open_device(op_dev_t *dev, op_err_t *err)
{
    cudaDeviceProp prop;
    cudaError_t error = cudaSetDevice(dev->id);

    if (error == cudaSuccess) {
        error = cudaGetDeviceProperties(&prop, dev->id);
    }

    if (error == cudaSuccess && prop.major * 10 + prop.minor < LEAST_CAPABILITY)
    {
        snprintf(err->text, sizeof(err->text),
                 "GPU %d (%.60s) has compute capability %d.%d, but %d.%d is "
                 "needed",
                 dev->id, prop.name, prop.major, prop.minor,
                 LEAST_CAPABILITY / 10, LEAST_CAPABILITY % 10);
        return -1;
    }

    if (error == cudaSuccess) {
        error = cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking);
    }

    if (error != cudaSuccess) {
        cudaGetLastError();
        snprintf(err->text, sizeof(err->text), "GPU %d cannot be opened: %s",
                 dev->id, cudaGetErrorString(error));
        return -1;
    }

    dev->max_smem = (int) prop.sharedMemPerBlockOptin;
    dev->max_blocks = BLOCKS_EACH * prop.multiProcessorCount;
    dev->tensor_floats = prop.major >= 8;
    snprintf(dev->describe, sizeof(dev->describe),
             "GPU %d, %s, compute capability %d.%d", dev->id, prop.name,
             prop.major, prop.minor);

    return try_kernel(dev, &prop, err);
}


op_dev_t *
cuda_open(const op_open_t *params, op_err_t *err)
{
    const int id = params->beside != NULL ? params->beside->id
                                          : choose(params->device, err);
    op_dev_t *dev;

    if (id < 0) {
        return NULL;
    }

    dev = (op_dev_t *) calloc(1, sizeof(op_dev_t));

    if (dev == NULL) {
        snprintf(err->text, sizeof(err->text), "no memory for the device");
        return NULL;
    }

    dev->id = id;
    dev->lacking = "memory";
    dev->beside = params->beside != NULL;
    dev->loose = params->loose;
    dev->graphs.off = params->no_graphs;

    if (open_device(dev, err) != 0) {
        cuda_close(dev);
        return NULL;
    }

    return dev;
}


void
cuda_close(op_dev_t *dev)
{
    if (dev == NULL) {
        return;
    }

    cuda_enter(dev);

    if (dev->stream != NULL) {
        cudaStreamSynchronize(dev->stream);
    }

    cuda_unprepare(dev);
    cuda_draw_free(dev);
    cuda_blas_close(dev);

    if (dev->stream != NULL) {
        cudaStreamDestroy(dev->stream);
    }

    cudaGetLastError();
    free(dev);
}
