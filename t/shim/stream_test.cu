/*
 * Streams that are late, or run ahead; events and the null stream between them.
 */

#include "t/shim/host_test.h"


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


/* The same with device memory out of the host's reach. */
static void
protected_runs(void **state)
{
    shim_options()->protect = true;
    late(state);
    order(state);
    host_functions(state);
    shim_options()->protect = false;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(late),
        TEST(queries),
        TEST(order),
        TEST(independent),
        TEST(host_functions),
        TEST(protected_runs),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
