/*
 * Launches, and graphs of them: what a stream captures is kept as the same
 * operations that it would have queued, in the order in which they were given,
 * and a launch of the graph runs them one after another.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <map>

#define MAX_SHARED ((size_t) 227 << 10) /* of sm_90; sm_80 has 163 KiB */
#define MAX_SHARED_80 ((size_t) 163 << 10)
#define FREE_SHARED ((size_t) 48 << 10) /* without asking */

/* how much a kernel has asked for, on the current device */
static std::map<const void *, size_t> *
limits(void)
{
    static std::map<const void *, size_t> *maps
        = new std::map<const void *, size_t>[SHIM_DEVICES];

    return &maps[shim_device()];
}


static size_t
max_shared(void)
{
    return shim_capability() == 90 ? MAX_SHARED : MAX_SHARED_80;
}


cudaError_t
shim_func_attribute(const void *kernel, cudaFuncAttribute attr, int value)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (attr == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || (size_t) value > max_shared()) {
            return shim_error(cudaErrorInvalidValue);
        }

        (*limits())[kernel] = value;
    }

    return cudaSuccess;
}


void
shim_check_pointer(const void *ptr, const char *kernel, int position)
{
    shim_entry_t entry;

    if (ptr != NULL && !shim_on_device(ptr) && !shim_is_pinned(ptr, 1)) {
        shim_kernel_fault("argument %d of kernel %s, %p, is a pointer of the "
                          "host", position, kernel, ptr);
    }
}


static cudaError_t
check_shape(const shim_grid_t *grid)
{
    const uint3 g = grid->grid, b = grid->block;
    const uint64_t threads = (uint64_t) b.x * b.y * b.z;
    const auto asked = limits()->find(grid->kernel);
    const size_t allowed = asked == limits()->end()
                               ? FREE_SHARED
                               : asked->second > FREE_SHARED ? asked->second
                                                             : FREE_SHARED;

    if (threads == 0 || threads > SHIM_MAX_THREADS || b.z > 64 || g.x == 0
        || g.y == 0 || g.z == 0 || g.x > INT32_MAX || g.y > 65535
        || g.z > 65535)
    {
        return cudaErrorInvalidConfiguration;
    }

    return grid->shared_bytes > allowed ? cudaErrorInvalidValue : cudaSuccess;
}


void
shim_launch(const shim_grid_t *launch, cudaStream_t stream,
            std::shared_ptr<void> arguments)
{
    shim_entry_t entry;
    const shim_grid_t grid = *launch;
    cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return;
    }

    error = check_shape(&grid);

    if (error == cudaSuccess && shim_fails(SHIM_FAIL_LAUNCH)) {
        error = cudaErrorLaunchOutOfResources;
    }

    if (error == cudaSuccess && !shim_memory_load(grid.kernel)) {
        error = cudaErrorMemoryAllocation;
    }

    if (error != cudaSuccess) {
        shim_error(error);
        return;
    }

    const auto run = [grid, arguments] {
        if (shim_fails(SHIM_FAIL_ASYNC)) {
            shim_make_sticky(shim_running(), cudaErrorIllegalAddress);
            return;
        }

        shim_trace(grid.name);
        shim_grid_run(&grid);
    };

    shim_enqueue(stream,
                 { cudaGraphNodeTypeKernel, run, {}, launch->kernel });
}


/* --- capture --- */

bool
shim_breaks_capture(void)
{
    bool any = false;

    for (cudaStream_t stream : shim_streams()) {
        if (stream->capture != NULL) {
            stream->capture->broken = true;
            any = true;
        }
    }

    return any;
}


cudaError_t
cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();
    cudaStream_t stream = handle == NULL ? NULL : shim_stream(handle);

    (void) mode;

    if (error != cudaSuccess) {
        return error;
    }

    if (stream == NULL || stream->capture != NULL) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    stream->capture = new shim_graph_s();
    shim_live.graphs++;
    stream->capture->origin = stream;

    return cudaSuccess;
}


/* Takes all streams out of the capture; false: one was never waited for. */
static bool
release(cudaGraph_t graph)
{
    bool joined = true;

    for (cudaStream_t stream : shim_streams()) {
        if (stream->capture != graph) {
            continue;
        }

        if (stream != graph->origin && stream->n_joined != stream->n_captured)
        {
            joined = false;
        }

        stream->capture = NULL;
    }

    return joined;
}


cudaError_t
cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    shim_entry_t entry;
    cudaError_t error = shim_call_begin();
    cudaStream_t stream = handle == NULL ? NULL : shim_stream(handle);

    *graph = NULL;

    if (stream == NULL || stream->capture == NULL
        || stream->capture->origin != stream)
    {
        return shim_error(cudaErrorStreamCaptureUnmatched);
    }

    cudaGraph_t captured = stream->capture;
    const bool joined = release(captured);

    if (error == cudaSuccess && captured->broken) {
        error = shim_error(cudaErrorStreamCaptureInvalidated);

    } else if (error == cudaSuccess && !joined) {
        error = shim_error(cudaErrorStreamCaptureUnjoined);
    }

    if (error != cudaSuccess) {
        delete captured;
        shim_live.graphs--;
        return error;
    }

    *graph = captured;

    return cudaSuccess;
}


cudaError_t
cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status)
{
    shim_entry_t entry;
    cudaStream_t stream = shim_stream(handle);

    if (stream == NULL) {
        return shim_error(cudaErrorInvalidResourceHandle);
    }

    *status = stream->capture == NULL    ? cudaStreamCaptureStatusNone
              : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;

    return shim_call_begin();
}


/* --- graphs --- */

cudaError_t
cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                     unsigned long long flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    size_t n_bytes = 0;

    for (const std::shared_ptr<shim_op_s> &op : graph->ops) {
        n_bytes += op->type == cudaGraphNodeTypeKernel
                       ? shim_options()->node_memory
                       : 0;
    }

    if (shim_fails(SHIM_FAIL_GRAPH) || !shim_memory_take(n_bytes)) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    shim_owned(graph->origin->device, "a graph");
    *exec = new shim_exec_s{ graph->ops, n_bytes, shim_device() };
    shim_live.execs++;

    return cudaSuccess;
}


cudaError_t
cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                    cudaGraphExecUpdateResultInfo *info)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();
    bool same = exec->ops.size() == graph->ops.size();

    if (error != cudaSuccess) {
        return error;
    }

    for (size_t i = 0; same && i < exec->ops.size(); i++) {
        same = exec->ops[i]->type == graph->ops[i]->type;
    }

    shim_owned(exec->device, "a graph");
    info->result = !same;

    if (!same) {
        return shim_error(cudaErrorGraphExecUpdateFailure);
    }

    exec->ops = graph->ops;

    return cudaSuccess;
}


cudaError_t
cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    const std::vector<std::shared_ptr<shim_op_s>> ops = exec->ops;
    const auto run = [ops] {
        for (const std::shared_ptr<shim_op_s> &op : ops) {
            if (shim_sticky_of(shim_running()) == cudaSuccess) {
                op->run();
            }
        }
    };

    shim_owned(exec->device, "a graph");
    shim_stats.graph_launches++;

    return shim_enqueue(stream, { cudaGraphNodeTypeEmpty, run, {}, NULL });
}


cudaError_t
cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    (void) exec;
    (void) stream;

    return shim_call_begin();
}


cudaError_t
cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n_nodes)
{
    shim_entry_t entry;

    if (nodes != NULL) {
        for (size_t i = 0; i < *n_nodes && i < graph->ops.size(); i++) {
            nodes[i] = graph->ops[i].get();
        }
    }

    *n_nodes = graph->ops.size();

    return shim_call_begin();
}


cudaError_t
cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type)
{
    *type = node->type;

    return shim_call_begin();
}


cudaError_t
cudaGraphDestroy(cudaGraph_t graph)
{
    shim_entry_t entry;

    delete graph;
    shim_live.graphs--;

    return shim_call_begin();
}


cudaError_t
cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    shim_entry_t entry;

    shim_owned(exec->device, "a graph");
    shim_memory_give(exec->device, exec->n_bytes);
    delete exec;
    shim_live.execs--;

    return shim_call_begin();
}
