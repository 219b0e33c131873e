/*
 * cuBLAS as far as the backend uses it, in plain loops: numbers become f32, and
 * products are summed in f32.
 */

#include "t/shim/cublas.h"
#include "t/shim/formats.h"
#include "t/shim/library.h"
#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <stdio.h>

#define VERSION 130000

/* from so many columns on, sums are made of two halves */
#define WIDE 32

/* stands for the library's kernels: one for each type */
static const char kernels[CUDA_R_16BF + 1] = "";

struct shim_cublas_s {
    cudaStream_t stream;
    bool workspace;
    int device;
};

typedef struct {
    const void *data;
    cudaDataType_t type;
    int ld;
    bool transposed;
} matrix_t;

typedef struct {
    matrix_t a, b;
    void *c;
    cudaDataType_t type_c;
    int ldc;
    int m, n, k;
    float alpha, beta;
    bool halves;
} gemm_t;


static float
load(const void *data, size_t i, cudaDataType_t type)
{
    switch (type) {
    case CUDA_R_16F:
        return shim_f16_to_f32(((const uint16_t *) data)[i]);
    case CUDA_R_16BF:
        return shim_bf16_to_f32(((const uint16_t *) data)[i]);
    default:
        return ((const float *) data)[i];
    }
}


static void
store(void *data, size_t i, cudaDataType_t type, float x)
{
    switch (type) {
    case CUDA_R_16F:
        ((uint16_t *) data)[i] = shim_f32_to_f16(x);
        break;
    case CUDA_R_16BF:
        ((uint16_t *) data)[i] = shim_f32_to_bf16(x);
        break;
    default:
        ((float *) data)[i] = x;
    }
}


static float
element(const matrix_t *matrix, int row, int column)
{
    const size_t i = matrix->transposed ? (size_t) row * matrix->ld + column
                                        : (size_t) column * matrix->ld + row;

    return load(matrix->data, i, matrix->type);
}


/* sum[0..m) += of k in a range */
static void
add_products(const gemm_t *gemm, const float *a, const float *b, int from,
             int to, float *sum)
{
    for (int l = from; l < to; l++) {
        for (int i = 0; i < gemm->m; i++) {
            sum[i] += a[(size_t) l * gemm->m + i] * b[l];
        }
    }
}


static void
multiply(const gemm_t *gemm)
{
    const int m = gemm->m, k = gemm->k;
    const int middle = gemm->halves ? k / 2 : k;
    std::vector<float> a((size_t) m * k), b(k), sum(m), rest(m);

    for (int l = 0; l < k; l++) {
        for (int i = 0; i < m; i++) {
            a[(size_t) l * m + i] = element(&gemm->a, i, l);
        }
    }

    for (int j = 0; j < gemm->n; j++) {
        for (int l = 0; l < k; l++) {
            b[l] = element(&gemm->b, l, j);
        }

        sum.assign(m, 0.0f);
        rest.assign(m, 0.0f);
        add_products(gemm, a.data(), b.data(), 0, middle, sum.data());
        add_products(gemm, a.data(), b.data(), middle, k, rest.data());

        for (int i = 0; i < m; i++) {
            const size_t at = (size_t) j * gemm->ldc + i;
            float x = gemm->alpha * (sum[i] + rest[i]);

            /* as BLAS says, c is not read if beta is 0 */
            if (gemm->beta != 0) {
                x += gemm->beta * load(gemm->c, at, gemm->type_c);
            }

            store(gemm->c, at, gemm->type_c, x);
        }
    }
}


static bool
is_there(const void *data, cudaDataType_t type, int ld, int rows, int columns)
{
    const size_t n = ((size_t) columns - 1) * ld + rows;

    return ld >= rows
           && shim_is_allocated(data, n * (type == CUDA_R_32F ? 4 : 2));
}


static cublasStatus_t
check(const gemm_t *gemm)
{
    const matrix_t *a = &gemm->a, *b = &gemm->b;
    const int m = gemm->m, n = gemm->n, k = gemm->k;

    if (m <= 0 || n <= 0 || k <= 0
        || !is_there(a->data, a->type, a->ld, a->transposed ? k : m,
                     a->transposed ? m : k)
        || !is_there(b->data, b->type, b->ld, b->transposed ? n : k,
                     b->transposed ? k : n)
        || !is_there(gemm->c, gemm->type_c, gemm->ldc, m, n))
    {
        return CUBLAS_STATUS_INVALID_VALUE;
    }

    return a->type != b->type ? CUBLAS_STATUS_NOT_SUPPORTED
                              : CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a,
             cublasOperation_t op_b, int m, int n, int k, const void *alpha,
             const void *a, cudaDataType_t type_a, int lda, const void *b,
             cudaDataType_t type_b, int ldb, const void *beta, void *c,
             cudaDataType_t type_c, int ldc, cublasComputeType_t compute,
             cublasGemmAlgo_t algo)
{
    shim_entry_t entry;
    gemm_t gemm;

    if (handle == NULL) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }

    shim_owned(handle->device, "a handle of cuBLAS");

    if (shim_call_begin() != cudaSuccess || shim_fails(SHIM_FAIL_CUBLAS)) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }

    if (compute != CUBLAS_COMPUTE_32F
        && compute != CUBLAS_COMPUTE_32F_PEDANTIC)
    {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }

    gemm.a = { a, type_a, lda, op_a == CUBLAS_OP_T };
    gemm.b = { b, type_b, ldb, op_b == CUBLAS_OP_T };
    gemm.c = c;
    gemm.type_c = type_c;
    gemm.ldc = ldc;
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.alpha = *(const float *) alpha;
    gemm.beta = *(const float *) beta;
    gemm.halves = n >= WIDE
                  && (algo == CUBLAS_GEMM_DEFAULT
                      || algo == CUBLAS_GEMM_DEFAULT_TENSOR_OP);

    const cublasStatus_t status = check(&gemm);

    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }

    if (!shim_memory_load(kernels + type_a)) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }

    const auto run = [gemm] {
        shim_trace("cublasGemmEx");
        multiply(&gemm);
    };

    shim_stats.products++;
    shim_stats.workspaces += !handle->workspace;

    return shim_enqueue(handle->stream,
                        { cudaGraphNodeTypeKernel, run, {}, NULL })
                   == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}


cublasStatus_t
cublasCreate_v2(cublasHandle_t *handle)
{
    shim_entry_t entry;

    if (shim_call_begin() != cudaSuccess) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }

    if (shim_fails(SHIM_FAIL_CUBLAS)) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }

    *handle = new shim_cublas_s();
    (*handle)->device = shim_device();
    shim_live.handles++;

    return CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasDestroy_v2(cublasHandle_t handle)
{
    shim_owned(handle->device, "a handle of cuBLAS");
    delete handle;
    shim_live.handles--;

    return CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
    (void) handle;
    *version = VERSION;

    return CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    if (handle == NULL) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }

    shim_owned(handle->device, "a handle of cuBLAS");
    handle->stream = stream;

    /* as the library's manual says */
    handle->workspace = false;

    return CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t n_bytes)
{
    if (handle == NULL) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }

    if (n_bytes != 0 && !shim_is_allocated(workspace, n_bytes)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }

    handle->workspace = true;

    return CUBLAS_STATUS_SUCCESS;
}


cublasStatus_t
cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    (void) mode;

    return handle == NULL ? CUBLAS_STATUS_NOT_INITIALIZED
                          : CUBLAS_STATUS_SUCCESS;
}


/* --- the library --- */

static const struct {
    const char *name;
    void *function;
} functions[] = {
    { "cublasCreate_v2", (void *) cublasCreate_v2 },
    { "cublasDestroy_v2", (void *) cublasDestroy_v2 },
    { "cublasGetVersion_v2", (void *) cublasGetVersion_v2 },
    { "cublasSetStream_v2", (void *) cublasSetStream_v2 },
    { "cublasSetWorkspace_v2", (void *) cublasSetWorkspace_v2 },
    { "cublasSetMathMode", (void *) cublasSetMathMode },
    { "cublasGemmEx", (void *) cublasGemmEx },
};

static const char *complaint;


void *
shim_dlopen(const char *name, int flags)
{
    (void) flags;

    if (shim_options()->no_cublas || strncmp(name, "libcublas.", 10) != 0) {
        complaint = "cannot open shared object file: No such file or "
                    "directory";
        return NULL;
    }

    return (void *) functions;
}


void *
shim_dlsym(void *library, const char *name)
{
    (void) library;

    for (const auto &row : functions) {
        if (strcmp(row.name, name) == 0) {
            return row.function;
        }
    }

    complaint = "undefined symbol";

    return NULL;
}


int
shim_dlclose(void *library)
{
    (void) library;

    return 0;
}


char *
shim_dlerror(void)
{
    char *text = (char *) complaint;

    complaint = NULL;

    return text;
}
