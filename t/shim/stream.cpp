/*
 * Streams.  An operation runs when somebody waits for it, for
 * what comes behind it, or, with a seed, at a random call before that.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"
#include "t/shim/worker.h"

#include <pthread.h>

static pthread_mutex_t *
lock(void)
{
    static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

    return &mutex;
}


std::vector<cudaStream_t> &
shim_streams(void)
{
    static std::vector<cudaStream_t> *streams
        = new std::vector<cudaStream_t>;

    return *streams;
}


static cudaStream_t
null_of(int device)
{
    static cudaStream_t nulls[SHIM_DEVICES];

    if (nulls[device] == NULL) {
        nulls[device] = new shim_stream_s();
        nulls[device]->device = device;
        nulls[device]->blocking = true;
        shim_streams().push_back(nulls[device]);
    }

    return nulls[device];
}


cudaStream_t
shim_stream(cudaStream_t stream)
{
    if (stream == NULL) {
        return null_of(shim_device());
    }

    for (cudaStream_t one : shim_streams()) {
        if (one == stream) {
            shim_owned(one->device, "a stream");
            return one;
        }
    }

    return NULL;
}


static int running;


int
shim_running(void)
{
    return running;
}


static void
run_one(cudaStream_t stream)
{
    shim_op_s op = std::move(stream->queue.front());

    stream->queue.pop_front();

    for (const shim_point_t &point : op.after) {
        shim_run_until(point.stream, point.number);
    }

    /* after an error that stays, nothing runs */
    if (shim_sticky_of(stream->device) == cudaSuccess) {
        running = stream->device;
        op.run();
    }

    stream->n_done++;
}


void
shim_run_until(cudaStream_t stream, uint64_t number)
{
    if (stream->n_done >= number) {
        return;
    }

    shim_memory_open(stream->device);

    while (stream->n_done < number) {
        run_one(stream);
    }

    shim_memory_check(stream->device, "operations of a stream");
    shim_memory_close(stream->device);
}


void
shim_run_all(void)
{
    for (cudaStream_t stream : shim_streams()) {
        if (stream->device == shim_device()) {
            shim_run_until(stream, stream->n_issued);
        }
    }
}


/* Lets a random stream run a little. */
static void
run_ahead(void)
{
    static uint64_t state;
    static bool within;
    const uint64_t seed = shim_options()->seed;

    if (seed == 0 || within) {
        return;
    }

    null_of(0);

    const uint64_t draw = shim_random(&state) ^ seed * 0x9e3779b97f4a7c15ull;
    std::vector<cudaStream_t> &streams = shim_streams();
    cudaStream_t stream = streams[(draw >> 8) % streams.size()];

    within = true;

    for (uint64_t n = draw % 4; n > 1 && !stream->queue.empty(); n--) {
        shim_run_until(stream, stream->n_done + 1);
    }

    within = false;
}


shim_entry_t::shim_entry_t(void)
{
    pthread_mutex_lock(lock());
    run_ahead();
}


shim_entry_t::~shim_entry_t(void)
{
    pthread_mutex_unlock(lock());
}


cudaError_t
shim_enqueue(cudaStream_t handle, shim_op_s op)
{
    cudaStream_t stream = shim_stream(handle);

    if (stream == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    cudaStream_t null = null_of(stream->device);

    if (stream->capture != NULL) {
        stream->n_captured++;
        stream->capture->ops.push_back(
            std::make_shared<shim_op_s>(std::move(op)));

        return cudaSuccess;
    }

    if (stream == null) {
        if (shim_breaks_capture()) {
            return shim_error(cudaErrorStreamCaptureImplicit);
        }

        for (cudaStream_t other : shim_streams()) {
            if (other != null && other->blocking
                && other->device == null->device)
            {
                op.after.push_back({ other, other->n_issued });
            }
        }

    } else if (stream->blocking) {
        op.after.push_back({ null, null->n_issued });
    }

    stream->n_issued++;
    stream->queue.push_back(std::move(op));

    return cudaSuccess;
}


cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_fails(SHIM_FAIL_STREAM)) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    null_of(shim_device());
    *stream = new shim_stream_s();
    (*stream)->device = shim_device();
    shim_live.streams++;
    (*stream)->blocking = (flags & cudaStreamNonBlocking) == 0;
    shim_streams().push_back(*stream);

    return cudaSuccess;
}


cudaError_t
cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}


cudaError_t
cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags,
                             int priority)
{
    (void) priority;

    return cudaStreamCreateWithFlags(stream, flags);
}


cudaError_t
cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;

    return shim_call_begin();
}


cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    /* others may still name it as something to wait for */
    static std::vector<cudaStream_t> *ended = new std::vector<cudaStream_t>;

    if (stream == NULL || shim_stream(stream) == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    shim_run_until(stream, stream->n_issued);

    std::vector<cudaStream_t> &streams = shim_streams();

    for (size_t i = 0; i < streams.size(); i++) {
        if (streams[i] == stream) {
            streams.erase(streams.begin() + i);
            break;
        }
    }

    ended->push_back(stream);
    shim_live.streams--;

    return error;
}


/* The stream, if it may be waited for now. */
static cudaError_t
waitable(cudaStream_t handle, cudaStream_t *stream)
{
    const cudaError_t error = shim_call_begin();

    *stream = shim_stream(handle);

    if (error != cudaSuccess) {
        return error;
    }

    if (*stream == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    if ((*stream)->capture != NULL) {
        (*stream)->capture->broken = true;
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    return cudaSuccess;
}


cudaError_t
cudaStreamSynchronize(cudaStream_t handle)
{
    shim_entry_t entry;
    cudaStream_t stream;
    const cudaError_t error = waitable(handle, &stream);

    if (error != cudaSuccess) {
        return error;
    }

    shim_run_until(stream, stream->n_issued);

    return shim_error(shim_sticky());
}


cudaError_t
cudaStreamQuery(cudaStream_t handle)
{
    shim_entry_t entry;
    cudaStream_t stream;
    const cudaError_t error = waitable(handle, &stream);

    if (error != cudaSuccess) {
        return error;
    }

    if (stream->n_done == stream->n_issued) {
        return cudaSuccess;
    }

    /* whoever asks again and again gets there */
    shim_run_until(stream, stream->n_done + 1);

    return shim_sticky() != cudaSuccess ? shim_error(shim_sticky())
                                        : cudaErrorNotReady;
}


cudaError_t
cudaDeviceSynchronize(void)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    shim_run_all();

    return shim_error(shim_sticky());
}


cudaError_t
cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    const auto run = [=] {
        const int device = running;

        shim_memory_close(device);
        fn(data);
        shim_memory_open(device);
    };

    return shim_enqueue(stream, { cudaGraphNodeTypeHost, run, {}, NULL });
}
