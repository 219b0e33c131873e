/*
 * Memory of the device, errors that pass and errors that stay, and devices that
 * are not there.
 */

#include "t/shim/host_test.h"


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

    shim_options()->device = "80,75,90";
    OK(cudaGetDeviceCount(&n));
    assert_int_equal(n, 3);
    OK(cudaGetDeviceProperties(&prop, 1));
    assert_int_equal(prop.minor, 5);
    assert_int_equal(cudaSetDevice(3), cudaErrorInvalidDevice);
    assert_int_equal(cudaSetDevice(-1), cudaErrorInvalidDevice);
    OK(cudaGetDevice(&n));
    assert_int_equal(n, 0);

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


/* Each has memory of its own, and errors; which one is current is the
 * thread's. */
static void
own_memory(void **state)
{
    shim_options_t *shim = shim_options();
    const shim_live_t before = shim_live;
    size_t free[2], left, total;
    float *d[2];

    (void) state;
    shim->device = "80,80";

    for (int i = 0; i < 2; i++) {
        OK(cudaSetDevice(i));
        OK(cudaMemGetInfo(&free[i], &total));
        d[i] = (float *) on_device(NULL, N * sizeof(float));
    }

    assert_int_equal(shim_live.memory, before.memory + 2);
    OK(cudaFree(d[1]));
    OK(cudaMemGetInfo(&left, &total));
    assert_int_equal(left, free[1]);

    shim->others[1] = total - 4096;
    OK(cudaMemGetInfo(&left, &total));
    assert_true(left <= 4096);
    assert_int_equal(cudaMalloc(&d[1], 8192), cudaErrorMemoryAllocation);
    shim->others[1] = 0;
    cudaGetLastError();

    OK(cudaSetDevice(0));
    OK(cudaMemGetInfo(&left, &total));
    assert_true(left < free[0]);
    shim_fail_at(SHIM_FAIL_ASYNC, 1);
    LAUNCH(add_to, 1, N, 0, NULL, d[0], 1.0f, N);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    OK(cudaSetDevice(1));
    OK(cudaDeviceSynchronize());
    assert_int_equal(cudaSetDevice(0), cudaErrorIllegalAddress);
    OK(cudaDeviceReset());
    OK(cudaFree(d[0]));
    assert_memory_equal(&shim_live, &before, sizeof(before));
    shim->device = "80";
}


/* The same with device memory out of the host's reach. */
static void
protected_runs(void **state)
{
    shim_options()->protect = true;
    memory(state);
    shim_options()->protect = false;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(memory),
        TEST(bad_copies),
        TEST(bad_launches),
        TEST(injected),
        TEST(sticky),
        TEST(devices),
        TEST(own_memory),
        TEST(protected_runs),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
