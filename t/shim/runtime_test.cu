/*
 * The host's side of the emulation: streams that are late, events, graphs,
 * memory, errors that pass and errors that stay, and cuBLAS.
 */

#include "t/shim/cublas.h"
#include "t/shim/formats.h"
#include "t/shim/test.h"

#define N_SEEDS 12

enum { N = 64 };


static __global__ void
add_to(float *x, float y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n) {
        x[i] += y;
    }
}


static __global__ void
scale(float *x, float y)
{
    x[threadIdx.x] *= y;
}


static int
reset(void **state)
{
    (void) state;
    cudaDeviceReset();
    shim_options()->seed = 0;
    shim_options()->device = "80";

    for (int i = 0; i < SHIM_FAIL_KINDS; i++) {
        shim_fail_at((shim_fail_t) i, 0);
    }

    return 0;
}


static float *
pinned(float value)
{
    float *x = NULL;

    OK(cudaMallocHost(&x, N * sizeof(float)));

    for (int i = 0; i < N; i++) {
        x[i] = value;
    }

    return x;
}


/* --- streams --- */

static void
late(void **state)
{
    float *x = pinned(1), *y = pinned(0);
    float *d = (float *) on_device(NULL, N * sizeof(float));
    cudaStream_t stream;

    (void) state;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMemcpyAsync(d, x, N * sizeof(float), cudaMemcpyHostToDevice,
                       stream));
    LAUNCH(add_to, 1, N, 0, stream, d, 2.0f, N);
    OK(cudaMemcpyAsync(y, d, N * sizeof(float), cudaMemcpyDeviceToHost,
                       stream));

    /* nothing has run: what is written now is copied */
    assert_true(y[5] == 0);
    x[5] = 10;
    OK(cudaStreamSynchronize(stream));
    assert_true(y[5] == 12);
    assert_true(y[6] == 3);

    /* memory that is not pinned is copied when the call is made */
    float z[N] = { 7 };
    const uint64_t before = shim_stats.pageable_copies;

    OK(cudaMemcpyAsync(d, z, sizeof(z), cudaMemcpyHostToDevice, stream));
    z[0] = 8;
    OK(cudaMemcpyAsync(y, d, sizeof(z), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    assert_true(y[0] == 7);
    assert_int_equal(shim_stats.pageable_copies, before + 1);

    /* arguments are those of the call */
    float value = 3;

    LAUNCH(scale, 1, N, 0, stream, d, value);
    value = 4;
    OK(cudaMemcpyAsync(y, d, sizeof(z), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    assert_true(y[0] == 21);

    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(x));
    OK(cudaFreeHost(y));
    OK(cudaFree(d));
}


/* Whoever asks often enough gets there. */
static void
queries(void **state)
{
    float *d = (float *) on_device(NULL, N * sizeof(float));
    cudaStream_t stream;
    cudaEvent_t event;
    int n = 0;

    (void) state;
    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaEventQuery(event));

    for (int i = 0; i < 5; i++) {
        OK(cudaMemsetAsync(d, 0, N * sizeof(float), stream));
    }

    OK(cudaEventRecord(event, stream));
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);

    while (cudaEventQuery(event) == cudaErrorNotReady) {
        n++;
    }

    assert_in_range(n, 2, 6);
    OK(cudaStreamQuery(stream));
    OK(cudaGetLastError());

    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(d));
}


/* Two streams, tied by an event; and the null stream between them. */
static void
order(void **state)
{
    float zeros[N] = { 0 };
    float *y = pinned(0);
    float *d = (float *) on_device(zeros, sizeof(zeros));
    cudaStream_t one, two;
    cudaEvent_t event;

    (void) state;

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        OK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
        OK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
        OK(cudaEventCreate(&event));
        OK(cudaMemsetAsync(d, 0, sizeof(zeros), one));
        LAUNCH(add_to, 1, N, 0, one, d, 3.0f, N);
        OK(cudaEventRecord(event, one));
        OK(cudaStreamWaitEvent(two, event));
        LAUNCH(scale, 1, N, 0, two, d, 2.0f);
        OK(cudaMemcpyAsync(y, d, sizeof(zeros), cudaMemcpyDeviceToHost, two));
        OK(cudaStreamSynchronize(two));
        assert_true(y[N - 1] == 6);
        OK(cudaEventDestroy(event));
        OK(cudaStreamDestroy(one));
        OK(cudaStreamDestroy(two));

        /* streams that block take turns with the null stream */
        OK(cudaStreamCreate(&one));
        OK(cudaStreamCreate(&two));
        LAUNCH(add_to, 1, N, 0, one, d, 1.0f, N);
        LAUNCH(scale, 1, N, 0, NULL, d, 10.0f);
        LAUNCH(add_to, 1, N, 0, two, d, 5.0f, N);
        OK(cudaMemcpyAsync(y, d, sizeof(zeros), cudaMemcpyDeviceToHost, two));
        OK(cudaStreamSynchronize(two));
        assert_true(y[0] == 75);
        OK(cudaStreamDestroy(one));
        OK(cudaStreamDestroy(two));
    }

    OK(cudaFreeHost(y));
    OK(cudaFree(d));
}


/* Streams that nothing ties do not wait for each other, with some seed. */
static void
independent(void **state)
{
    float *d = (float *) on_device(NULL, N * sizeof(float));
    cudaStream_t one, two;
    int n_first = 0;

    (void) state;
    OK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));

    for (int seed = 1; seed <= 40; seed++) {
        float got[N];

        shim_options()->seed = seed;
        OK(cudaMemsetAsync(d, 0, sizeof(got), one));
        OK(cudaStreamSynchronize(one));
        LAUNCH(add_to, 1, N, 0, one, d, 1.0f, N);
        LAUNCH(scale, 1, N, 0, two, d, 2.0f);
        OK(cudaDeviceSynchronize());
        from_device(got, d, sizeof(got));
        assert_true(got[0] == 1 || got[0] == 2);
        n_first += got[0] == 1;
    }

    assert_in_range(n_first, 1, 39);

    OK(cudaStreamDestroy(one));
    OK(cudaStreamDestroy(two));
    OK(cudaFree(d));
}


static void
count_call(void *data)
{
    ++*(int *) data;
}


static void
host_functions(void **state)
{
    cudaStream_t stream;
    cudaEvent_t from, to;
    float ms = -1;
    int n = 0;

    (void) state;
    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    OK(cudaEventRecord(from, stream));
    OK(cudaLaunchHostFunc(stream, count_call, &n));
    OK(cudaEventRecord(to, stream));
    assert_int_equal(n, 0);
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    OK(cudaEventSynchronize(to));
    assert_int_equal(n, 1);
    OK(cudaEventElapsedTime(&ms, from, to));
    assert_true(ms >= 0 && ms < 60000);

    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
    OK(cudaStreamDestroy(stream));
}


/* --- graphs --- */

static void
graphs(void **state)
{
    float zeros[N] = { 0 };
    float *x = pinned(1), *y = pinned(0);
    float *d = (float *) on_device(zeros, sizeof(zeros));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t nodes[8];
    size_t n = 8;
    int n_kernels = 0;

    (void) state;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    OK(cudaMemcpyAsync(d, x, sizeof(zeros), cudaMemcpyHostToDevice, stream));
    LAUNCH(add_to, 1, N, 0, stream, d, 2.0f, N);
    LAUNCH(scale, 1, N, 0, stream, d, 10.0f);
    OK(cudaMemcpyAsync(y, d, sizeof(zeros), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaStreamSynchronize(stream));
    assert_true(y[0] == 0);

    OK(cudaGraphGetNodes(graph, NULL, &n));
    assert_int_equal(n, 4);
    OK(cudaGraphGetNodes(graph, nodes, &n));

    for (size_t i = 0; i < n; i++) {
        cudaGraphNodeType type;

        OK(cudaGraphNodeGetType(nodes[i], &type));
        n_kernels += type == cudaGraphNodeTypeKernel;
    }

    assert_int_equal(n_kernels, 2);
    OK(cudaGraphInstantiate(&exec, graph));
    OK(cudaGraphDestroy(graph));

    for (int i = 1; i < 4; i++) {
        /* what the host wrote by the time it runs */
        x[0] = i;
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaStreamSynchronize(stream));
        assert_true(y[0] == (i + 2) * 10);
    }

    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(x));
    OK(cudaFreeHost(y));
    OK(cudaFree(d));
}


/* A second stream forks off and joins; one that does not join is an error. */
static void
forks(void **state)
{
    float zeros[N] = { 0 }, got[N];
    float *d = (float *) on_device(zeros, sizeof(zeros));
    cudaStream_t one, two;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    (void) state;
    OK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&join));

    for (int joined = 0; joined < 2; joined++) {
        OK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
        LAUNCH(add_to, 1, N, 0, one, d, 2.0f, N);
        OK(cudaEventRecord(fork, one));
        OK(cudaStreamWaitEvent(two, fork));
        LAUNCH(scale, 1, N, 0, two, d, 3.0f);
        OK(cudaEventRecord(join, two));

        if (joined) {
            OK(cudaStreamWaitEvent(one, join));
            OK(cudaStreamEndCapture(one, &graph));

        } else {
            assert_int_equal(cudaStreamEndCapture(one, &graph),
                             cudaErrorStreamCaptureUnjoined);
            assert_null(graph);
        }
    }

    OK(cudaGraphInstantiate(&exec, graph));
    OK(cudaGraphLaunch(exec, one));
    OK(cudaStreamSynchronize(one));
    from_device(got, d, sizeof(got));
    assert_true(got[1] == 6);

    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    OK(cudaStreamDestroy(one));
    OK(cudaStreamDestroy(two));
    OK(cudaFree(d));
}


/* What may not happen while a stream is captured. */
static void
broken_captures(void **state)
{
    float *d = (float *) on_device(NULL, N * sizeof(float));
    float host[N];
    void *more;
    cudaStream_t stream;
    cudaGraph_t graph;

    (void) state;
    OK(cudaStreamCreate(&stream));

    for (int i = 0; i < 5; i++) {
        cudaStreamCaptureStatus status;

        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        LAUNCH(scale, 1, N, 0, stream, d, 3.0f);

        switch (i) {
        case 0:
            assert_int_equal(cudaMalloc(&more, 100),
                             cudaErrorStreamCaptureUnsupported);
            break;
        case 1:
            assert_int_equal(cudaStreamSynchronize(stream),
                             cudaErrorStreamCaptureUnsupported);
            break;
        case 2:
            assert_int_equal(cudaMemcpy(host, d, sizeof(host),
                                        cudaMemcpyDeviceToHost),
                             cudaErrorStreamCaptureImplicit);
            break;
        case 3:
            LAUNCH(scale, 1, N, 0, NULL, d, 3.0f);
            assert_int_equal(cudaGetLastError(),
                             cudaErrorStreamCaptureImplicit);
            break;
        case 4:
            assert_int_equal(cudaDeviceSynchronize(),
                             cudaErrorStreamCaptureUnsupported);
            break;
        }

        OK(cudaStreamIsCapturing(stream, &status));
        assert_int_equal(status, cudaStreamCaptureStatusInvalidated);
        assert_int_equal(cudaStreamEndCapture(stream, &graph),
                         cudaErrorStreamCaptureInvalidated);
        assert_int_equal(cudaGetLastError(),
                         cudaErrorStreamCaptureInvalidated);
    }

    assert_int_equal(cudaStreamEndCapture(stream, &graph),
                     cudaErrorStreamCaptureUnmatched);
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(d));
}


/* A graph takes the arguments of another of the same form. */
static void
updates(void **state)
{
    float ones[N], got[N];
    cudaStream_t stream;
    cudaGraph_t graphs_of[3];
    cudaGraphExec_t exec;
    cudaGraphExecUpdateResultInfo info;

    (void) state;

    for (int i = 0; i < N; i++) {
        ones[i] = 1;
    }

    float *d = (float *) on_device(ones, sizeof(ones));

    OK(cudaStreamCreate(&stream));

    for (int i = 0; i < 3; i++) {
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        LAUNCH(scale, 1, N, 0, stream, d, i + 2.0f);

        if (i == 2) {
            OK(cudaMemsetAsync(d, 0, sizeof(ones), stream));
        }

        OK(cudaStreamEndCapture(stream, &graphs_of[i]));
    }

    OK(cudaGraphInstantiate(&exec, graphs_of[0], 0));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaGraphExecUpdate(exec, graphs_of[1], &info));
    OK(cudaGraphLaunch(exec, stream));
    assert_int_equal(cudaGraphExecUpdate(exec, graphs_of[2], &info),
                     cudaErrorGraphExecUpdateFailure);
    OK(cudaStreamSynchronize(stream));
    from_device(got, d, sizeof(got));
    assert_true(got[0] == 6);

    for (int i = 0; i < 3; i++) {
        OK(cudaGraphDestroy(graphs_of[i]));
    }

    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(d));
}


/* --- memory --- */

static void
memory(void **state)
{
    const size_t all = shim_options()->memory;
    size_t n_free, total;
    void *big, *rest;
    uint32_t words[16];

    (void) state;
    OK(cudaMemGetInfo(&n_free, &total));
    assert_int_equal(n_free, all);
    assert_int_equal(total, all);

    /* most of the device costs nothing until it is written */
    OK(cudaMalloc(&big, all - 1000));
    assert_int_equal((uintptr_t) big % 256, 0);
    assert_int_equal(cudaMalloc(&rest, 2000), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    OK(cudaGetLastError());
    from_device(words, (char *) big + all / 2, sizeof(words));

    for (int i = 0; i < 16; i++) {
        assert_int_equal(words[i], 0xffffffff);
    }

    OK(cudaMemset((char *) big + all / 2 + 100, 0, 20000));
    OK(cudaFree(big));
    OK(cudaMemGetInfo(&n_free, &total));
    assert_int_equal(n_free, all);

    /* a few times round the arena: what comes again is poisoned again */
    for (int i = 0; i < 12; i++) {
        OK(cudaMalloc(&big, all - 1000));
        from_device(words, (char *) big + all / 2 + 64, sizeof(words));
        assert_int_equal(words[9], 0xffffffff);
        assert_int_equal(words[15], 0xffffffff);
        OK(cudaMemset((char *) big + all / 2 + 100, 0, 20000));
        OK(cudaFree(big));
    }

    OK(cudaFree(NULL));
    assert_int_equal(cudaFree(words), cudaErrorInvalidValue);
    OK(cudaMalloc(&big, 0));
    assert_null(big);
    cudaGetLastError();
}


/* Copies are checked against what is allocated, and against their kind. */
static void
bad_copies(void **state)
{
    float host[N] = { 0 };
    float *d = (float *) on_device(host, sizeof(host));

    (void) state;
    assert_int_equal(cudaMemcpy(d + 1, host, sizeof(host),
                                cudaMemcpyHostToDevice),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(d, host, sizeof(host),
                                cudaMemcpyDeviceToHost),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(host, host, sizeof(host),
                                cudaMemcpyDeviceToDevice),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(d, 0, sizeof(host) + 1),
                     cudaErrorInvalidValue);
    OK(cudaMemcpy(d, host, sizeof(host), cudaMemcpyDefault));
    assert_int_equal(cudaMemcpyAsync(d, host, 4, cudaMemcpyHostToDevice,
                                     (cudaStream_t) host),
                     cudaErrorInvalidResourceHandle);
    OK(cudaFree(d));
    assert_int_equal(cudaFree(d), cudaErrorInvalidValue);
    cudaGetLastError();
}


/* --- errors --- */

static void
bad_launches(void **state)
{
    float *d = (float *) on_device(NULL, N * sizeof(float));
    static const struct {
        dim3 grid, block;
        size_t shared;
        cudaError_t error;
    } rows[] = {
        { 0, 32, 0, cudaErrorInvalidConfiguration },
        { 1, 1025, 0, cudaErrorInvalidConfiguration },
        { 1, 0, 0, cudaErrorInvalidConfiguration },
        { dim3(1, 65536), 1, 0, cudaErrorInvalidConfiguration },
        { 1, 32, (48 << 10) + 1, cudaErrorInvalidValue },
        { 1, 32, 48 << 10, cudaSuccess },
    };

    (void) state;

    for (size_t i = 0; i < N_OF(rows); i++) {
        LAUNCH(scale, rows[i].grid, rows[i].block, rows[i].shared, NULL, d,
               1.0f);
        assert_int_equal(cudaPeekAtLastError(), rows[i].error);
        assert_int_equal(cudaGetLastError(), rows[i].error);
        OK(cudaGetLastError());
    }

    /* a kernel may ask for more, but not for any amount */
    OK(cudaFuncSetAttribute(scale,
                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                            100 << 10));
    LAUNCH(scale, 1, 32, 100 << 10, NULL, d, 1.0f);
    OK(cudaGetLastError());
    assert_int_equal(
        cudaFuncSetAttribute(scale,
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             300 << 10),
        cudaErrorInvalidValue);

    OK(cudaDeviceSynchronize());
    OK(cudaFree(d));
}


static void
injected(void **state)
{
    void *d = NULL, *h = NULL;

    (void) state;

    shim_fail_at(SHIM_FAIL_MALLOC, 2);
    OK(cudaMalloc(&d, 100));
    OK(cudaFree(d));
    assert_int_equal(cudaMalloc(&d, 100), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&d, 100));

    shim_fail_at(SHIM_FAIL_HOST, 1);
    assert_int_equal(cudaMallocHost(&h, 100), cudaErrorMemoryAllocation);
    OK(cudaMallocHost(&h, 100));
    OK(cudaFreeHost(h));
    cudaGetLastError();

    shim_fail_at(SHIM_FAIL_LAUNCH, 1);
    LAUNCH(scale, 1, 1, 0, NULL, (float *) d, 1.0f);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchOutOfResources);
    OK(cudaDeviceSynchronize());

    shim_fail_at(SHIM_FAIL_CALL, 3);
    OK(cudaSetDevice(0));
    OK(cudaDeviceSynchronize());
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorUnknown);
    cudaGetLastError();
    OK(cudaFree(d));
}


/* An error of a kernel shows later, and then everywhere. */
static void
sticky(void **state)
{
    float zeros[N] = { 0 };
    float *d = (float *) on_device(zeros, sizeof(zeros));
    float *y = pinned(5);
    cudaStream_t stream;
    void *more;

    (void) state;
    OK(cudaStreamCreate(&stream));
    shim_fail_at(SHIM_FAIL_ASYNC, 2);
    LAUNCH(add_to, 1, N, 0, stream, d, 1.0f, N);
    LAUNCH(add_to, 1, N, 0, stream, d, 1.0f, N);
    OK(cudaGetLastError());
    OK(cudaMemcpyAsync(y, d, sizeof(zeros), cudaMemcpyDeviceToHost, stream));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    assert_true(y[0] == 5);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaMalloc(&more, 10), cudaErrorIllegalAddress);
    assert_int_equal(cudaMemcpy(y, d, 4, cudaMemcpyDeviceToHost),
                     cudaErrorIllegalAddress);
    assert_string_equal(cudaGetErrorString(cudaErrorIllegalAddress),
                        "an illegal memory access was encountered");
    assert_string_equal(cudaGetErrorName(cudaErrorIllegalAddress),
                        "cudaErrorIllegalAddress");
    cudaDeviceReset();
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(y));
    OK(cudaFree(d));
}


static void
devices(void **state)
{
    cudaDeviceProp prop;
    int n, version, value;

    (void) state;
    OK(cudaGetDeviceCount(&n));
    assert_int_equal(n, 1);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    shim_options()->device = "90";
    OK(cudaGetDeviceProperties(&prop, 0));
    assert_int_equal(prop.major, 9);
    assert_int_equal(prop.minor, 0);
    assert_int_equal(prop.sharedMemPerBlockOptin, 227 << 10);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    assert_int_equal(value, 9);

    shim_options()->device = "none";
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    assert_int_equal(n, 0);
    OK(cudaDriverGetVersion(&version));
    assert_int_equal(version, 0);

    shim_options()->device = "old";
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
    OK(cudaDriverGetVersion(&version));
    assert_in_range(version, 1000, 12000);
    shim_options()->device = "80";
    cudaGetLastError();
}


/* --- cuBLAS --- */

typedef struct {
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    decltype(&cublasGemmEx) gemm;
} library_t;


static library_t
open_library(void)
{
    void *handle = dlopen("libcublas.so.13", RTLD_NOW);
    library_t lib;

    assert_non_null(handle);
    assert_null(dlsym(handle, "cublasSomethingElse"));
    assert_non_null(dlerror());
    lib.create = (decltype(lib.create)) dlsym(handle, "cublasCreate_v2");
    lib.destroy = (decltype(lib.destroy)) dlsym(handle, "cublasDestroy_v2");
    lib.set_stream
        = (decltype(lib.set_stream)) dlsym(handle, "cublasSetStream_v2");
    lib.gemm = (decltype(lib.gemm)) dlsym(handle, "cublasGemmEx");

    return lib;
}


static void
cublas(void **state)
{
    enum { ROWS = 5, COLUMNS = 40, K = 33 };
    const library_t lib = open_library();
    const float one = 1, zero = 0;
    uint16_t w[ROWS * K], x[COLUMNS * K];
    float y[COLUMNS * ROWS], alone[ROWS];
    cublasHandle_t handle;
    cudaStream_t stream;
    uint32_t seed = 9;
    int n_different = 0;

    (void) state;

    for (int i = 0; i < ROWS * K; i++) {
        w[i] = shim_f32_to_bf16(test_number(&seed));
    }

    for (int i = 0; i < COLUMNS * K; i++) {
        x[i] = shim_f32_to_bf16(test_number(&seed));
    }

    void *dw = on_device(w, sizeof(w)), *dx = on_device(x, sizeof(x));
    void *dy = on_device(NULL, sizeof(y));

    assert_int_equal(lib.create(&handle), CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamCreate(&stream));
    assert_int_equal(lib.set_stream(handle, stream), 0);

    /* y[COLUMNS, ROWS] = x · wᵀ, rows contiguous */
    assert_int_equal(lib.gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, ROWS, COLUMNS,
                              K, &one, dw, CUDA_R_16BF, K, dx, CUDA_R_16BF, K,
                              &zero, dy, CUDA_R_32F, ROWS, CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamSynchronize(stream));
    from_device(y, dy, sizeof(y));

    for (int i = 0; i < COLUMNS * ROWS; i++) {
        double want = 0;

        for (int k = 0; k < K; k++) {
            want += (double) shim_bf16_to_f32(x[i / ROWS * K + k])
                    * shim_bf16_to_f32(w[i % ROWS * K + k]);
        }

        assert_true(fabs(y[i] - want) < 1e-5);
    }

    /* one at a time it is not the same to the last bit */
    for (int i = 0; i < COLUMNS; i++) {
        assert_int_equal(lib.gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, ROWS, 1, K,
                                  &one, dw, CUDA_R_16BF, K,
                                  (uint16_t *) dx + i * K, CUDA_R_16BF, K,
                                  &zero, dy, CUDA_R_32F, ROWS,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                         CUBLAS_STATUS_SUCCESS);
        OK(cudaStreamSynchronize(stream));
        from_device(alone, dy, sizeof(alone));
        n_different += memcmp(alone, y + i * ROWS, sizeof(alone)) != 0;
    }

    assert_true(n_different > 0);

    /* a matrix that is not there; a failure; no library */
    assert_int_equal(lib.gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, ROWS,
                              COLUMNS + 1, K, &one, dw, CUDA_R_16BF, K, dx,
                              CUDA_R_16BF, K, &zero, dy, CUDA_R_32F, ROWS,
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_INVALID_VALUE);
    shim_fail_at(SHIM_FAIL_CUBLAS, 1);
    assert_int_equal(lib.gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, ROWS, COLUMNS,
                              K, &one, dw, CUDA_R_16BF, K, dx, CUDA_R_16BF, K,
                              &zero, dy, CUDA_R_32F, ROWS, CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_EXECUTION_FAILED);
    shim_options()->no_cublas = true;
    assert_null(dlopen("libcublas.so.13", RTLD_NOW));
    shim_options()->no_cublas = false;
    assert_null(dlopen("libcudnn.so.9", RTLD_NOW));

    assert_int_equal(lib.destroy(handle), 0);
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(dw));
    OK(cudaFree(dx));
    OK(cudaFree(dy));
}


/* --- the same with device memory out of reach of the host --- */

static void
protected_runs(void **state)
{
    shim_options()->protect = true;
    late(state);
    order(state);
    graphs(state);
    host_functions(state);
    memory(state);
    cublas(state);
    shim_options()->protect = false;
}


int
main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, reset)
    const struct CMUnitTest tests[] = {
        TEST(late),
        TEST(queries),
        TEST(order),
        TEST(independent),
        TEST(host_functions),
        TEST(graphs),
        TEST(forks),
        TEST(broken_captures),
        TEST(updates),
        TEST(memory),
        TEST(bad_copies),
        TEST(bad_launches),
        TEST(injected),
        TEST(sticky),
        TEST(devices),
        TEST(cublas),
        TEST(protected_runs),
    };
#undef TEST

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
