/*
 * What streams capture, and graphs made of it.
 */

#include "t/shim/host_test.h"


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


/* The same with device memory out of the host's reach. */
static void
protected_runs(void **state)
{
    shim_options()->protect = true;
    graphs(state);
    forks(state);
    shim_options()->protect = false;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(graphs),
        TEST(forks),
        TEST(broken_captures),
        TEST(updates),
        TEST(protected_runs),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
