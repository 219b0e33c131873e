/*
 * The few functions of cuBLAS that the backend looks up at run time, for those
 * who declare nothing themselves.  The library is "opened" by shim_dlopen.
 *
 * As on a device, the order of the sums depends on the shape unless an
 * algorithm is named: here on the number of columns.  So nobody takes the
 * result of one row alone for that of the same row among others.
 */

#ifndef T_SHIM_CUBLAS_H
#define T_SHIM_CUBLAS_H

#include "t/shim/runtime.h"

typedef struct shim_cublas_s *cublasHandle_t;

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;

typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;

typedef enum {
    CUDA_R_32F = 0,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14
} cudaDataType_t;

typedef enum {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69
} cublasComputeType_t;

typedef enum {
    CUBLAS_GEMM_DEFAULT = -1,
    CUBLAS_GEMM_ALGO0 = 0,
    CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99
} cublasGemmAlgo_t;

typedef enum {
    CUBLAS_DEFAULT_MATH = 0,
    CUBLAS_PEDANTIC_MATH = 2,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
} cublasMath_t;

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t *handle);
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle);
cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version);
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace,
                                     size_t n_bytes);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);

/* c[m, n] = alpha · op(a)[m, k] · op(b)[k, n] + beta · c, columns contiguous */
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a,
                            cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a,
                            cudaDataType_t type_a, int lda, const void *b,
                            cudaDataType_t type_b, int ldb, const void *beta,
                            void *c, cudaDataType_t type_c, int ldc,
                            cublasComputeType_t compute,
                            cublasGemmAlgo_t algo);
}

#endif
