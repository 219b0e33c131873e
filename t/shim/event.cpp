/*
 * Events: points of streams that others wait for.  One that was never recorded
 * is no reason to wait.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <time.h>


static double
now_ms(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);

    return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}


cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_fails(SHIM_FAIL_EVENT)) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    *event = new shim_event_s();
    (*event)->device = shim_device();
    shim_live.events++;
    (*event)->timing = (flags & cudaEventDisableTiming) == 0;

    return cudaSuccess;
}


cudaError_t
cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}


cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    shim_owned(event->device, "an event");

    /* its operation writes the time into it */
    if (event->point.stream != NULL) {
        shim_run_until(event->point.stream, event->point.number);
    }

    delete event;
    shim_live.events--;

    return error;
}


cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t handle)
{
    shim_entry_t entry;
    cudaError_t error = shim_call_begin();
    cudaStream_t stream = shim_stream(handle);

    if (error != cudaSuccess) {
        return error;
    }

    if (stream == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    shim_owned(event->device, "an event");
    event->capture = stream->capture;

    if (stream->capture != NULL) {
        event->point = { stream, 0 };
        event->n_captured = stream->n_captured;
        return cudaSuccess;
    }

    const auto run = [=] { event->time = now_ms(); };

    error = shim_enqueue(stream, { cudaGraphNodeTypeEmpty, run, {}, NULL });
    event->point = { stream, stream->n_issued };

    return error;
}


/* In a capture: the stream joins it, or its origin waits for another. */
static cudaError_t
wait_captured(cudaStream_t stream, cudaEvent_t event)
{
    if (stream->capture == NULL && event->capture != NULL) {
        stream->capture = event->capture;
        stream->n_captured = 0;
        stream->n_joined = 0;
    }

    if (stream->capture != event->capture) {
        stream->capture->broken = true;
        return shim_error(cudaErrorStreamCaptureIsolation);
    }

    event->point.stream->n_joined = event->n_captured;

    return cudaSuccess;
}


cudaError_t
cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();
    cudaStream_t stream = shim_stream(handle);

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    if (stream == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    shim_owned(event->device, "an event");

    if (stream->capture != NULL || event->capture != NULL) {
        return wait_captured(stream, event);
    }

    if (event->point.stream == NULL) {
        return cudaSuccess;
    }

    return shim_enqueue(
        stream, { cudaGraphNodeTypeEmpty, [] {}, { event->point }, NULL });
}


cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    shim_owned(event->device, "an event");

    if (event->capture != NULL) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    if (event->point.stream != NULL) {
        shim_run_until(event->point.stream, event->point.number);
    }

    return shim_error(shim_sticky());
}


cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();
    cudaStream_t stream = event->point.stream;

    shim_owned(event->device, "an event");

    if (error != cudaSuccess || stream == NULL
        || stream->n_done >= event->point.number)
    {
        return error;
    }

    shim_run_until(stream, stream->n_done + 1);

    return shim_sticky() != cudaSuccess ? shim_error(shim_sticky())
                                        : cudaErrorNotReady;
}


cudaError_t
cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (!from->timing || !to->timing || from->point.stream == NULL
        || to->point.stream == NULL)
    {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    if (from->point.stream->n_done < from->point.number
        || to->point.stream->n_done < to->point.number)
    {
        return cudaErrorNotReady;
    }

    *ms = to->time - from->time;

    return cudaSuccess;
}
