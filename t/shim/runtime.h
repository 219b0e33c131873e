/*
 * The host side of CUDA's runtime as the emulation offers it: the calls that
 * kernels/cuda uses, with the meaning of the CUDA Runtime API reference.
 * Streams are queues that nothing runs before somebody waits for it, so a
 * missing wait shows.  Included through cuda_shim.h.
 */

#ifndef T_SHIM_RUNTIME_H
#define T_SHIM_RUNTIME_H

#include "t/shim/device.h"

#include <memory>
#include <tuple>
#include <type_traits>

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorGraphExecUpdateFailure = 910,
    cudaErrorUnknown = 999
} cudaError_t;

typedef enum {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
} cudaMemcpyKind;

typedef enum {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
} cudaStreamCaptureMode;

typedef enum {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
} cudaStreamCaptureStatus;

typedef enum {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
} cudaFuncAttribute;

typedef enum {
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
} cudaDeviceAttr;

typedef enum {
    cudaGraphNodeTypeKernel = 0,
    cudaGraphNodeTypeMemcpy = 1,
    cudaGraphNodeTypeMemset = 2,
    cudaGraphNodeTypeHost = 3,
    cudaGraphNodeTypeEmpty = 5
} cudaGraphNodeType;

enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4,
    cudaHostRegisterDefault = 0,
    cudaHostRegisterReadOnly = 8
};

typedef struct shim_stream_s *cudaStream_t;
typedef struct shim_event_s *cudaEvent_t;
typedef struct shim_graph_s *cudaGraph_t;
typedef struct shim_exec_s *cudaGraphExec_t;
typedef struct shim_op_s *cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void *data);

typedef struct {
    char name[256];
    size_t totalGlobalMem;
    size_t sharedMemPerBlock;
    size_t sharedMemPerBlockOptin;
    size_t sharedMemPerMultiprocessor;
    int regsPerBlock;
    int warpSize;
    int maxThreadsPerBlock;
    int maxThreadsPerMultiProcessor;
    int maxGridSize[3];
    int major;
    int minor;
    int multiProcessorCount;
    int l2CacheSize;
    int memoryBusWidth;
    int pciBusID;
    int pciDeviceID;
    int pciDomainID;
    int concurrentKernels;
    int asyncEngineCount;
} cudaDeviceProp;

typedef struct {
    int result;
} cudaGraphExecUpdateResultInfo;

extern "C" {

/* errors, device */
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr,
                                   int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceReset(void);

/* memory */
cudaError_t cudaFree(void *ptr);
cudaError_t cudaFreeHost(void *ptr);
cudaError_t cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *ptr);
cudaError_t cudaMemGetInfo(size_t *n_free, size_t *total);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n_bytes,
                       cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n_bytes,
                            cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemset(void *dst, int value, size_t n_bytes);
cudaError_t cudaMemsetAsync(void *dst, int value, size_t n_bytes,
                            cudaStream_t stream);

/* streams, events */
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags,
                                         int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn,
                               void *data);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

/* graphs */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                   cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus *status);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo *info);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes,
                              size_t *n_nodes);
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node,
                                 cudaGraphNodeType *type);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

cudaError_t shim_malloc(void **ptr, size_t n_bytes);
cudaError_t shim_host_alloc(void **ptr, size_t n_bytes, unsigned flags);
}

/* these have default arguments in CUDA */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = NULL);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags = 0);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);


template <typename T>
static inline cudaError_t
cudaMalloc(T **ptr, size_t n_bytes)
{
    return shim_malloc((void **) ptr, n_bytes);
}


template <typename T>
static inline cudaError_t
cudaHostAlloc(T **ptr, size_t n_bytes, unsigned flags)
{
    return shim_host_alloc((void **) ptr, n_bytes, flags);
}


template <typename T>
static inline cudaError_t
cudaMallocHost(T **ptr, size_t n_bytes, unsigned flags = 0)
{
    return shim_host_alloc((void **) ptr, n_bytes, flags);
}


/* --- launches --- */

cudaError_t shim_func_attribute(const void *kernel, cudaFuncAttribute attr,
                                int value);


template <typename T>
static inline cudaError_t
cudaFuncSetAttribute(T *kernel, cudaFuncAttribute attr, int value)
{
    return shim_func_attribute((const void *) kernel, attr, value);
}


/* A pointer that a kernel gets: the device must be able to follow it. */
void shim_check_pointer(const void *ptr, const char *kernel, int position);

/* Queues a launch; arguments live until it has run, and as long as a graph
 * keeps it. */
void shim_launch(const shim_grid_t *grid, cudaStream_t stream,
                 std::shared_ptr<void> arguments);


template <typename T>
static inline void
shim_check_argument(const T &value, const char *kernel, int position)
{
    if constexpr (std::is_pointer<T>::value) {
        shim_check_pointer((const void *) value, kernel, position);
    }
}


/* As an argument is converted in a call; NULL is a number to C++. */
template <typename P, typename A>
static inline P
shim_pass(A value)
{
    if constexpr (std::is_pointer<P>::value && std::is_integral<A>::value) {
        return (P) (uintptr_t) value;

    } else {
        return value;
    }
}


/* Arguments are taken by value now, in the kernel's own types, as CUDA does. */
template <typename... P>
struct shim_call_t {
    void (*kernel)(P...);
    std::tuple<P...> arguments;


    static void
    run(const void *data)
    {
        const shim_call_t *call = (const shim_call_t *) data;

        std::apply(call->kernel, call->arguments);
    }
};


template <typename... P, typename... A>
static inline void
shim_launch_kernel(const char *name, void (*kernel)(P...), dim3 grid,
                   dim3 block, size_t shared_bytes, cudaStream_t stream,
                   A... arguments)
{
    static_assert(sizeof...(P) == sizeof...(A), "arguments of the kernel");

    typedef shim_call_t<P...> call_t;

    std::shared_ptr<call_t> call(
        new call_t{ kernel, std::tuple<P...>(shim_pass<P>(arguments)...) });
    shim_grid_t launch;
    int position = 0;

    std::apply(
        [&](const auto &...value) {
            (shim_check_argument(value, name, ++position), ...);
        },
        call->arguments);

    launch.name = name;
    launch.kernel = (const void *) kernel;
    launch.call = call_t::run;
    launch.arguments = call.get();
    launch.grid = { grid.x, grid.y, grid.z };
    launch.block = { block.x, block.y, block.z };
    launch.shared_bytes = shared_bytes;

    shim_launch(&launch, stream, call);
}

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                 \
    shim_launch_kernel(#kernel, kernel, grid, block, shared_bytes, stream,     \
                       ##__VA_ARGS__)

#define DYN_SMEM(type, name) type *name = (type *) shim_worker->dynamic

#endif
