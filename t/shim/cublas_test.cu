/*
 * The cuBLAS that a program opens at run time: results, sums in another order
 * for other shapes, failures, and a machine without it.
 */

#include "t/shim/cublas.h"
#include "t/shim/host_test.h"

enum { ROWS = 5, COLUMNS = 40, K = 33 };

typedef struct {
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    decltype(&cublasGemmEx) gemm;
    cublasHandle_t handle;
    cudaStream_t stream;
    void *w, *x, *y;
} setting_t;

static uint16_t w[ROWS * K], x[COLUMNS * K];


static setting_t
begin(void)
{
    void *lib = dlopen("libcublas.so.13", RTLD_NOW);
    setting_t set;
    uint32_t seed = 9;

    assert_non_null(lib);
    assert_null(dlsym(lib, "cublasSomethingElse"));
    assert_non_null(dlerror());
    set.create = (decltype(set.create)) dlsym(lib, "cublasCreate_v2");
    set.destroy = (decltype(set.destroy)) dlsym(lib, "cublasDestroy_v2");
    set.set_stream
        = (decltype(set.set_stream)) dlsym(lib, "cublasSetStream_v2");
    set.gemm = (decltype(set.gemm)) dlsym(lib, "cublasGemmEx");

    for (int i = 0; i < ROWS * K; i++) {
        w[i] = shim_f32_to_bf16(test_number(&seed));
    }

    for (int i = 0; i < COLUMNS * K; i++) {
        x[i] = shim_f32_to_bf16(test_number(&seed));
    }

    set.w = on_device(w, sizeof(w));
    set.x = on_device(x, sizeof(x));
    set.y = on_device(NULL, COLUMNS * ROWS * sizeof(float));
    assert_int_equal(set.create(&set.handle), CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamCreate(&set.stream));
    assert_int_equal(set.set_stream(set.handle, set.stream), 0);

    return set;
}


static void
end(setting_t *set)
{
    assert_int_equal(set->destroy(set->handle), 0);
    OK(cudaStreamDestroy(set->stream));
    OK(cudaFree(set->w));
    OK(cudaFree(set->x));
    OK(cudaFree(set->y));
}


/* y[n, ROWS] = rows of x, from the first on, · wᵀ; rows contiguous */
static cublasStatus_t
product(const setting_t *set, int first, int n, cublasGemmAlgo_t algo)
{
    const float one = 1, zero = 0;

    return set->gemm(set->handle, CUBLAS_OP_T, CUBLAS_OP_N, ROWS, n, K, &one,
                     set->w, CUDA_R_16BF, K, (uint16_t *) set->x + first * K,
                     CUDA_R_16BF, K, &zero, set->y, CUDA_R_32F, ROWS,
                     CUBLAS_COMPUTE_32F, algo);
}


static void
results(void **state)
{
    setting_t set = begin();
    float y[COLUMNS * ROWS];

    (void) state;
    assert_int_equal(product(&set, 0, COLUMNS, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamSynchronize(set.stream));
    from_device(y, set.y, sizeof(y));

    for (int i = 0; i < COLUMNS * ROWS; i++) {
        double want = 0;

        for (int k = 0; k < K; k++) {
            want += (double) shim_bf16_to_f32(x[i / ROWS * K + k])
                    * shim_bf16_to_f32(w[i % ROWS * K + k]);
        }

        assert_true(fabs(y[i] - want) < 1e-5);
    }

    end(&set);
}


/* How many rows differ in a bit from the same row computed alone. */
static int
count_different(cublasGemmAlgo_t algo)
{
    setting_t set = begin();
    float y[COLUMNS * ROWS], alone[ROWS];
    int n = 0;

    assert_int_equal(product(&set, 0, COLUMNS, algo), CUBLAS_STATUS_SUCCESS);
    OK(cudaStreamSynchronize(set.stream));
    from_device(y, set.y, sizeof(y));

    for (int i = 0; i < COLUMNS; i++) {
        assert_int_equal(product(&set, i, 1, algo), CUBLAS_STATUS_SUCCESS);
        OK(cudaStreamSynchronize(set.stream));
        from_device(alone, set.y, sizeof(alone));
        n += memcmp(alone, y + i * ROWS, sizeof(alone)) != 0;
    }

    end(&set);

    return n;
}


static void
order_of_sums(void **state)
{
    (void) state;
    assert_true(count_different(CUBLAS_GEMM_DEFAULT) > 0);
    assert_int_equal(count_different(CUBLAS_GEMM_ALGO0), 0);
}


static void
captured(void **state)
{
    setting_t set = begin();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float y[ROWS], again[ROWS];

    (void) state;
    assert_int_equal(product(&set, 0, 1, CUBLAS_GEMM_DEFAULT), 0);
    OK(cudaStreamSynchronize(set.stream));
    from_device(y, set.y, sizeof(y));
    OK(cudaMemset(set.y, 0, sizeof(y)));
    OK(cudaStreamBeginCapture(set.stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(product(&set, 0, 1, CUBLAS_GEMM_DEFAULT), 0);
    OK(cudaStreamEndCapture(set.stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph));
    OK(cudaGraphLaunch(exec, set.stream));
    OK(cudaStreamSynchronize(set.stream));
    from_device(again, set.y, sizeof(again));
    assert_memory_equal(y, again, sizeof(y));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    end(&set);
}


static void
failures(void **state)
{
    setting_t set = begin();

    (void) state;

    /* a column behind the end */
    assert_int_equal(product(&set, 1, COLUMNS, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_INVALID_VALUE);
    shim_fail_at(SHIM_FAIL_CUBLAS, 1);
    assert_int_equal(product(&set, 0, COLUMNS, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_EXECUTION_FAILED);
    assert_int_equal(product(&set, 0, COLUMNS, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    end(&set);

    shim_options()->no_cublas = true;
    assert_null(dlopen("libcublas.so.13", RTLD_NOW));
    shim_options()->no_cublas = false;
    assert_null(dlopen("libcudnn.so.9", RTLD_NOW));
    assert_non_null(dlerror());
}


/* A workspace is given, and lost when the stream is set again. */
static void
workspaces(void **state)
{
    setting_t set = begin();
    void *lib = dlopen("libcublas.so.13", RTLD_NOW);
    const auto give = (decltype(&cublasSetWorkspace_v2)) dlsym(
        lib, "cublasSetWorkspace_v2");
    void *space = on_device(NULL, 1000);
    const uint64_t before = shim_stats.workspaces;

    (void) state;
    assert_int_equal(give(set.handle, space, 1001),
                     CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(product(&set, 0, 1, CUBLAS_GEMM_DEFAULT), 0);
    assert_int_equal(shim_stats.workspaces, before + 1);
    assert_int_equal(give(set.handle, space, 1000), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(product(&set, 0, 1, CUBLAS_GEMM_DEFAULT), 0);
    assert_int_equal(shim_stats.workspaces, before + 1);
    assert_int_equal(set.set_stream(set.handle, set.stream), 0);
    assert_int_equal(product(&set, 0, 1, CUBLAS_GEMM_DEFAULT), 0);
    assert_int_equal(shim_stats.workspaces, before + 2);
    OK(cudaStreamSynchronize(set.stream));
    OK(cudaFree(space));
    end(&set);
}


/* The same with device memory out of the host's reach. */
static void
protected_runs(void **state)
{
    shim_options()->protect = true;
    results(state);
    captured(state);
    shim_options()->protect = false;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(results),  TEST(order_of_sums),  TEST(captured),
        TEST(failures), TEST(workspaces), TEST(protected_runs),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
