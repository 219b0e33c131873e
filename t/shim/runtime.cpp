/*
 * Errors, and what the device says of itself.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <stdio.h>
#include <stdlib.h>

#define VERSION 13000

static cudaError_t last;
static cudaError_t sticky;


cudaError_t
shim_error(cudaError_t error)
{
    if (error != cudaSuccess) {
        last = error;
    }

    return error;
}


cudaError_t
shim_sticky(void)
{
    return sticky;
}


void
shim_make_sticky(cudaError_t error)
{
    sticky = error;
}


/* Why there is no device to talk to. */
static cudaError_t
absent(void)
{
    const char *device = shim_options()->device;

    return strcmp(device, "none") == 0  ? cudaErrorNoDevice
           : strcmp(device, "old") == 0 ? cudaErrorInsufficientDriver
                                        : cudaSuccess;
}


cudaError_t
shim_call_begin(void)
{
    if (absent() != cudaSuccess) {
        return shim_error(absent());
    }

    if (sticky != cudaSuccess) {
        return shim_error(sticky);
    }

    if (shim_fails(SHIM_FAIL_CALL)) {
        return shim_error(cudaErrorUnknown);
    }

    return cudaSuccess;
}


cudaError_t
cudaGetLastError(void)
{
    shim_entry_t entry;
    const cudaError_t error = sticky != cudaSuccess ? sticky : last;

    last = cudaSuccess;

    return error;
}


cudaError_t
cudaPeekAtLastError(void)
{
    shim_entry_t entry;

    return sticky != cudaSuccess ? sticky : last;
}


static const struct {
    cudaError_t error;
    const char *name;
    const char *text;
} texts[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation",
      "out of memory" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
      "invalid configuration argument" },
    { cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
      "CUDA driver version is insufficient for CUDA runtime version" },
    { cudaErrorNoDevice, "cudaErrorNoDevice",
      "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice",
      "invalid device ordinal" },
    { cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
      "no kernel image is available for execution on the device" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
      "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
      "an illegal memory access was encountered" },
    { cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
      "too many resources requested for launch" },
    { cudaErrorLaunchFailure, "cudaErrorLaunchFailure",
      "unspecified launch failure" },
    { cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
      "operation not permitted when stream is capturing" },
    { cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
      "operation failed due to a previous error during capture" },
    { cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
      "capturing stream has unjoined work" },
    { cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
      "dependency created on uncaptured work in another stream" },
    { cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
      "operation would make the legacy stream depend on a capturing blocking "
      "stream" },
};


const char *
cudaGetErrorName(cudaError_t error)
{
    for (const auto &row : texts) {
        if (row.error == error) {
            return row.name;
        }
    }

    return "cudaErrorUnknown";
}


const char *
cudaGetErrorString(cudaError_t error)
{
    for (const auto &row : texts) {
        if (row.error == error) {
            return row.text;
        }
    }

    return "unknown error";
}


/* --- the device --- */

cudaError_t
cudaGetDeviceCount(int *n)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    *n = error == cudaSuccess;

    return error;
}


static cudaError_t
check_device(int device)
{
    const cudaError_t error = shim_call_begin();

    if (error == cudaSuccess && device != 0) {
        return shim_error(cudaErrorInvalidDevice);
    }

    return error;
}


cudaError_t
cudaSetDevice(int device)
{
    shim_entry_t entry;

    return check_device(device);
}


cudaError_t
cudaGetDevice(int *device)
{
    shim_entry_t entry;

    *device = 0;

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

    const int arch = atoi(shim_options()->device);

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


cudaError_t
cudaDriverGetVersion(int *version)
{
    const char *device = shim_options()->device;

    *version = strcmp(device, "none") == 0 ? 0
               : strcmp(device, "old") == 0 ? 11000
                                            : VERSION;

    return cudaSuccess;
}


cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = VERSION;

    return cudaSuccess;
}


cudaError_t
cudaDeviceReset(void)
{
    shim_entry_t entry;

    shim_run_all();
    sticky = cudaSuccess;
    last = cudaSuccess;
    shim_memory_unload();

    return absent();
}
