/*
 * Errors, versions, and the end of everything.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <stdio.h>
#include <stdlib.h>

#define VERSION 13000

static cudaError_t last;
static cudaError_t sticky[SHIM_DEVICES];


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
    return sticky[shim_device()];
}


cudaError_t
shim_sticky_of(int device)
{
    return sticky[device];
}


void
shim_make_sticky(int device, cudaError_t error)
{
    sticky[device] = error;
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

    if (shim_sticky() != cudaSuccess) {
        return shim_error(shim_sticky());
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
    const cudaError_t error = shim_sticky() != cudaSuccess ? shim_sticky()
                                                           : last;

    last = cudaSuccess;

    return error;
}


cudaError_t
cudaPeekAtLastError(void)
{
    shim_entry_t entry;

    return shim_sticky() != cudaSuccess ? shim_sticky() : last;
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
    shim_make_sticky(shim_device(), cudaSuccess);
    last = cudaSuccess;
    shim_memory_unload();

    return absent();
}
