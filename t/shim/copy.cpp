/*
 * Copies and fills, checked against what is allocated.  A copy from memory of
 * the host that is not pinned takes its bytes at once, as CUDA does; one to
 * such memory is as late as any, though CUDA would wait: nothing may rely on
 * that.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <stdlib.h>


/* Whether a pointer is on the side that the kind of the copy says. */
static bool
fits(const void *ptr, size_t n_bytes, cudaMemcpyKind kind,
     cudaMemcpyKind device_1, cudaMemcpyKind device_2)
{
    if (shim_on_device(ptr)) {
        return shim_is_allocated(ptr, n_bytes)
               && (kind == device_1 || kind == device_2
                   || kind == cudaMemcpyDefault);
    }

    return kind != device_1 && kind != device_2;
}


static cudaError_t
check(void *dst, const void *src, size_t n_bytes, cudaMemcpyKind kind)
{
    if (n_bytes != 0
        && (!fits(dst, n_bytes, kind, cudaMemcpyHostToDevice,
                  cudaMemcpyDeviceToDevice)
            || !fits(src, n_bytes, kind, cudaMemcpyDeviceToHost,
                     cudaMemcpyDeviceToDevice)))
    {
        return shim_error(cudaErrorInvalidValue);
    }

    return cudaSuccess;
}


cudaError_t
cudaMemcpyAsync(void *dst, const void *src, size_t n_bytes,
                cudaMemcpyKind kind, cudaStream_t handle)
{
    shim_entry_t entry;
    cudaError_t error = shim_call_begin();
    cudaStream_t stream = shim_stream(handle);

    if (error != cudaSuccess) {
        return error;
    }

    error = check(dst, src, n_bytes, kind);

    if (error != cudaSuccess || n_bytes == 0) {
        return error;
    }

    const bool from_host = !shim_on_device(src);
    const bool pageable = (from_host && !shim_is_pinned(src, n_bytes))
                          || (!shim_on_device(dst)
                              && !shim_is_pinned(dst, n_bytes));

    shim_stats.copies++;
    shim_stats.pageable_copies += pageable;

    shim_op_s op = { cudaGraphNodeTypeMemcpy, {}, {}, NULL };

    if (from_host && pageable && stream != NULL && stream->capture == NULL) {
        std::shared_ptr<void> bytes(malloc(n_bytes), free);

        memcpy(bytes.get(), src, n_bytes);
        op.run = [=] { memcpy(dst, bytes.get(), n_bytes); };

    } else {
        op.run = [=] { memmove(dst, src, n_bytes); };
    }

    return shim_enqueue(handle, std::move(op));
}


cudaError_t
cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                  size_t src_pitch, size_t width, size_t height,
                  cudaMemcpyKind kind, cudaStream_t stream)
{
    shim_entry_t entry;

    if (width > dst_pitch || width > src_pitch) {
        return shim_error(cudaErrorInvalidValue);
    }

    for (size_t row = 0; row < height; row++) {
        const cudaError_t error = cudaMemcpyAsync(
            (char *) dst + row * dst_pitch,
            (const char *) src + row * src_pitch, width, kind, stream);

        if (error != cudaSuccess) {
            return error;
        }
    }

    return cudaSuccess;
}


cudaError_t
cudaMemcpy(void *dst, const void *src, size_t n_bytes, cudaMemcpyKind kind)
{
    shim_entry_t entry;
    cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureImplicit);
    }

    error = check(dst, src, n_bytes, kind);

    if (error != cudaSuccess) {
        return error;
    }

    const auto run = [=] { memmove(dst, src, n_bytes); };

    error = shim_enqueue(NULL, { cudaGraphNodeTypeMemcpy, run, {}, NULL });
    shim_stats.copies++;

    if (error != cudaSuccess) {
        return error;
    }

    cudaStream_t null = shim_stream(NULL);

    shim_run_until(null, null->n_issued);

    return shim_error(shim_sticky());
}


cudaError_t
cudaMemsetAsync(void *dst, int value, size_t n_bytes, cudaStream_t stream)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess || n_bytes == 0) {
        return error;
    }

    if (!shim_is_allocated(dst, n_bytes) && !shim_is_pinned(dst, n_bytes)) {
        return shim_error(cudaErrorInvalidValue);
    }

    const auto run = [=] { memset(dst, value, n_bytes); };

    return shim_enqueue(stream, { cudaGraphNodeTypeMemset, run, {}, NULL });
}


cudaError_t
cudaMemset(void *dst, int value, size_t n_bytes)
{
    return cudaMemsetAsync(dst, value, n_bytes, NULL);
}
