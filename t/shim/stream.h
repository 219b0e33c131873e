/*
 * Streams inside the emulation.  Each operation knows which operations of other
 * streams must have run before it (events, the null stream), and running it
 * runs those first.  One lock protects all of it: memory.cpp, stream.cpp,
 * graph.cpp, runtime.cpp.
 */

#ifndef T_SHIM_STREAM_H
#define T_SHIM_STREAM_H

#include "t/shim/runtime.h"

#include <deque>
#include <functional>
#include <vector>

/* all before the operation with this number has run, and itself */
typedef struct {
    cudaStream_t stream;
    uint64_t number;
} shim_point_t;

struct shim_op_s {
    cudaGraphNodeType type;
    std::function<void()> run;
    std::vector<shim_point_t> after;
    const void *kernel; /* of a launch */
};

struct shim_stream_s {
    int device;
    std::deque<shim_op_s> queue;
    uint64_t n_issued;
    uint64_t n_done;
    bool blocking; /* takes turns with the null stream */
    bool alive;
    cudaGraph_t capture;  /* what is captured here, or NULL */
    uint64_t n_captured;  /* operations of it that came by this stream */
    uint64_t n_joined;    /* of those, the ones its origin has waited for */
};

struct shim_event_s {
    int device;
    shim_point_t point; /* stream NULL: never recorded */
    cudaGraph_t capture;
    uint64_t n_captured; /* of the stream it was recorded in */
    double time;
    bool timing;
};

struct shim_graph_s {
    std::vector<std::shared_ptr<shim_op_s>> ops;
    cudaStream_t origin;
    bool broken; /* something that cannot be captured was tried */
};

struct shim_exec_s {
    std::vector<std::shared_ptr<shim_op_s>> ops;
    size_t n_bytes; /* of the device */
    int device;
};

/* Holds the lock, lets streams run ahead if the seed says so. */
struct shim_entry_t {
    shim_entry_t(void);
    ~shim_entry_t(void);
};

/* --- devices (devices.cpp) --- */

/* The calling thread's current one, and its compute capability. */
int shim_device(void);
int shim_capability(void);

/* Aborts if what belongs to a device is used while another is current. */
void shim_owned(int owner, const char *what);

/* --- errors (runtime.cpp) --- */

/* The state that errors leave: pending is told once, sticky for ever, of the
 * current device or of one. */
cudaError_t shim_error(cudaError_t error);
cudaError_t shim_sticky(void);
cudaError_t shim_sticky_of(int device);
void shim_make_sticky(int device, cudaError_t error);

/* What a call returns before it does anything: sticky or injected error. */
cudaError_t shim_call_begin(void);

/* NULL is the current device's null stream; what no stream is gives NULL. */
cudaStream_t shim_stream(cudaStream_t stream);
std::vector<cudaStream_t> &shim_streams(void);

/* Queues an operation, or adds it to what the stream captures. */
cudaError_t shim_enqueue(cudaStream_t stream, shim_op_s op);

/* Runs a stream up to an operation; everything of the current device. */
void shim_run_until(cudaStream_t stream, uint64_t number);
void shim_run_all(void);

/* The device whose operation runs. */
int shim_running(void);

/* What may not be called while a stream is captured; true: it was, and the
 * capture is lost. */
bool shim_breaks_capture(void);

/* --- memory (memory.cpp) --- */

/* While operations run, their device's memory may be touched (nests). */
void shim_memory_open(int device);
void shim_memory_close(int device);

/* A kernel is about to be launched: takes what the option kernel_memory says
 * of the first time.  False: there is not as much. */
bool shim_memory_load(const void *kernel);
void shim_memory_unload(void);

/* For a graph, without an address.  False: there is not as much. */
bool shim_memory_take(size_t n_bytes);
void shim_memory_give(int device, size_t n_bytes);

/* Of a device's memory: which of them must be the current one. */
bool shim_on_device(const void *ptr);
bool shim_is_pinned(const void *ptr, size_t n_bytes);

/* Whether the bytes are within one allocation. */
bool shim_is_allocated(const void *ptr, size_t n_bytes);

/* Finds what was written between allocations, and aborts. */
void shim_memory_check(int device, const char *after);

#endif
