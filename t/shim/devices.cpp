/*
 * The devices of the emulation: how many there are, which of them a thread
 * speaks to, and whose something is.  CUDA lets some calls reach another device
 * than the current one and refuses others, not always where the mistake is;
 * here nobody may use what another device has.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <stdio.h>
#include <stdlib.h>

static __thread int current;


int
shim_device(void)
{
    return current;
}


/* Of a device in the list of capabilities; 0: there is no such. */
static int
capability(int device)
{
    const char *text = shim_options()->device;

    if (device < 0 || device >= SHIM_DEVICES) {
        return 0;
    }

    for (; device > 0; device--) {
        text = strchr(text, ',');

        if (text == NULL) {
            return 0;
        }

        text++;
    }

    return atoi(text);
}


int
shim_capability(void)
{
    return capability(current);
}


void
shim_owned(int owner, const char *what)
{
    if (owner != current) {
        fprintf(stderr, "cuda-shim: %s of device %d is used while device %d is "
                "the current one\n", what, owner, current);
        fflush(stderr);
        abort();
    }
}


cudaError_t
cudaGetDeviceCount(int *n)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    *n = 0;

    while (error == cudaSuccess && capability(*n) != 0) {
        ++*n;
    }

    return error;
}


static cudaError_t
check_device(int device)
{
    const cudaError_t error = shim_call_begin();

    if (error == cudaSuccess && capability(device) == 0) {
        return shim_error(cudaErrorInvalidDevice);
    }

    return error;
}


/* One whose error stays becomes the current one, too: it may be reset. */
cudaError_t
cudaSetDevice(int device)
{
    shim_entry_t entry;
    const int before = current;

    if (capability(device) != 0) {
        current = device;
    }

    const cudaError_t error = check_device(device);

    if (error != cudaSuccess && shim_sticky() == cudaSuccess) {
        current = before;
    }

    return error;
}


cudaError_t
cudaGetDevice(int *device)
{
    shim_entry_t entry;

    *device = current;

    return shim_call_begin();
}


cudaError_t
cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    shim_entry_t entry;
    const cudaError_t error = check_device(device);

    if (error != cudaSuccess) {
        return error;
    }

    const int arch = capability(device);

    memset(prop, 0, sizeof(*prop));
    snprintf(prop->name, sizeof(prop->name), "CPU emulation of sm_%d", arch);
    prop->totalGlobalMem = shim_options()->memory;
    prop->major = arch / 10;
    prop->minor = arch % 10;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = (arch == 90 ? 227 : 163) << 10;
    prop->sharedMemPerMultiprocessor = prop->sharedMemPerBlockOptin + 1024;
    prop->regsPerBlock = 65536;
    prop->warpSize = SHIM_LANES;
    prop->maxThreadsPerBlock = SHIM_MAX_THREADS;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxGridSize[0] = INT32_MAX;
    prop->maxGridSize[1] = 65535;
    prop->maxGridSize[2] = 65535;
    prop->multiProcessorCount = 8;
    prop->l2CacheSize = 4 << 20;
    prop->concurrentKernels = 1;
    prop->asyncEngineCount = 1;

    return cudaSuccess;
}


cudaError_t
cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device)
{
    cudaDeviceProp prop;
    const cudaError_t error = cudaGetDeviceProperties(&prop, device);

    if (error != cudaSuccess) {
        return error;
    }

    switch (attr) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = prop.sharedMemPerBlock;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = prop.sharedMemPerBlockOptin;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = prop.multiProcessorCount;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = prop.major;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = prop.minor;
        return cudaSuccess;
    default:
        return shim_error(cudaErrorInvalidValue);
    }
}
