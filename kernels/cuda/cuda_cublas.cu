/*
 * Products of float weights by cuBLAS, for those who gave up exactness
 * (deterministic off): it chooses algorithms by the number of rows, so a row's
 * bits depend on who else is in the step.
 *
 * The library is opened at run time, so that the engine starts without it: it
 * has half a gigabyte.  Inputs become what the weights are; f16 ones are
 * divided by 16, exactly, so that large ones do not overflow, and sums are f32.
 * Few rows are cuda_dense.cu's in any case: reading the weights takes as long,
 * and there is one launch less.
 *
 * Its functions are declared here, as numbers and pointers: a build needs no
 * headers of it.
 */

#include "kernels/cuda/cuda_dev.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    THREADS = 256,
    FEW_ROWS = 8, /* up to here it is not asked */

    /* what NVIDIA advises for the largest devices; given at the start, it is
     * not taken for each captured graph */
    WORKSPACE = 32 << 20,

    /* the library's kernels, loaded one by one as it chooses them */
    LATER = 128 << 20,

    /* of cublas_api.h */
    OP_N = 0,
    OP_T = 1,
    TYPE_F32 = 0,
    TYPE_F16 = 2,
    TYPE_BF16 = 14,
    COMPUTE_F32 = 68,
    ALGO_DEFAULT = -1
};

/* f16 inputs are divided by it, and end below the largest f16 */
#define F16_SCALE 16.0f
#define F16_MOST 65504.0f

typedef struct {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*version)(void *handle, int *version);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*set_workspace)(void *handle, void *workspace, size_t bytes);
    int (*gemm)(void *handle, int op_a, int op_b, int m, int n, int k,
                const void *alpha, const void *a, int type_a, int lda,
                const void *b, int type_b, int ldb, const void *beta, void *c,
                int type_c, int ldc, int compute, int algo);
} functions_t;

struct cuda_blas_s {
    void *library;
    void *handle;
    functions_t call;
    void *workspace;
    uint16_t *x; /* inputs as the weights are */
    size_t x_bytes;
};


/* --- opening --- */

/* Where the reason lies, for a sentence that goes on. */
static void
say(char *to, size_t cap, const char *what, const char *why)
{
    snprintf(to, cap, "%s%s%s", what, why != NULL ? ": " : "",
             why != NULL ? why : "");
}


static int
find_functions(cuda_blas_t *blas, char *why, size_t cap)
{
    const struct {
        const char *name;
        void *place;
    } rows[] = {
        { "cublasCreate_v2", &blas->call.create },
        { "cublasDestroy_v2", &blas->call.destroy },
        { "cublasGetVersion_v2", &blas->call.version },
        { "cublasSetStream_v2", &blas->call.set_stream },
        { "cublasSetWorkspace_v2", &blas->call.set_workspace },
        { "cublasGemmEx", &blas->call.gemm },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        void *function = dlsym(blas->library, rows[i].name);

        if (function == NULL) {
            say(why, cap, "it lacks a function", dlerror());
            return -1;
        }

        memcpy(rows[i].place, &function, sizeof(function));
    }

    return 0;
}


static int
open_library(cuda_blas_t *blas, char *why, size_t cap)
{
    static const char *const names[] = { "libcublas.so.13", "libcublas.so.12" };

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        blas->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);

        if (blas->library != NULL) {
            return find_functions(blas, why, cap);
        }
        if (i == 0) {
            say(why, cap, "it cannot be opened", dlerror());
        }
    }

    return -1;
}


/* Setting the stream takes the workspace away, so that comes last. */
static int
open_handle(op_dev_t *dev, cuda_blas_t *blas, char *why, size_t cap)
{
    int status = blas->call.create(&blas->handle);

    if (status == 0) {
        blas->workspace = cuda_alloc(dev, WORKSPACE);

        if (blas->workspace == NULL) {
            say(why, cap, "no memory for its workspace", NULL);
            return -1;
        }

        status = blas->call.set_stream(blas->handle, dev->stream);
    }

    if (status == 0) {
        status =
            blas->call.set_workspace(blas->handle, blas->workspace, WORKSPACE);
    }

    if (status != 0) {
        snprintf(why, cap, "it does not start, status %d", status);
        return -1;
    }

    return 0;
}


void
cuda_blas_close(op_dev_t *dev)
{
    cuda_blas_t *blas = dev->blas;

    if (blas == NULL) {
        return;
    }

    if (blas->handle != NULL) {
        blas->call.destroy(blas->handle);
    }

    cuda_free(dev, blas->workspace, WORKSPACE);
    cuda_free(dev, blas->x, blas->x_bytes);

    if (blas->library != NULL) {
        dlclose(blas->library);
    }

    free(blas);
    dev->blas = NULL;
}


/* With prepare(), not with the device: so it counts as the engine's memory. */
static void
open_blas(op_dev_t *dev)
{
    char why[160] = "no memory";
    const size_t len = strlen(dev->describe);
    char *to = dev->describe + len;
    const size_t cap = sizeof(dev->describe) - len;
    int version = 0;

    dev->blas = (cuda_blas_t *) calloc(1, sizeof(cuda_blas_t));

    if (dev->blas == NULL || open_library(dev->blas, why, sizeof(why)) != 0
        || open_handle(dev, dev->blas, why, sizeof(why)) != 0)
    {
        cuda_blas_close(dev);
        snprintf(to, cap, ", float weights without cuBLAS (%s)", why);
        return;
    }

    dev->blas->call.version(dev->blas->handle, &version);
    snprintf(to, cap, ", float weights by cuBLAS %d.%d", version / 10000,
             version / 100 % 100);
}


int
cuda_blas_prepare(op_dev_t *dev, const op_limits_t *limits)
{
    if (dev->loose) {
        dev->loose = false;
        open_blas(dev);
    }

    cuda_blas_t *blas = dev->blas;

    if (blas == NULL) {
        return 0;
    }

    cuda_free(dev, blas->x, blas->x_bytes);
    blas->x_bytes =
        (size_t) limits->max_rows * (size_t) limits->max_in * sizeof(uint16_t);
    blas->x = (uint16_t *) cuda_alloc(dev, blas->x_bytes);

    return blas->x != NULL ? 0 : -1;
}


size_t
cuda_blas_later(const op_dev_t *dev)
{
    return dev->blas != NULL ? LATER : 0;
}


/* --- products --- */

/* As the nearest f16 or bf16; what is finite stays so. */
template <int LAYOUT>
__global__ void
__launch_bounds__(THREADS) narrow(uint16_t *to, const float *x, size_t n)
{
    const size_t i = (size_t) blockIdx.x * THREADS + threadIdx.x;

    if (i >= n) {
        return;
    }

    if (LAYOUT == OP_LAY_F16) {
        const float v = x[i] / F16_SCALE;
        const float size = fabsf(v);

        to[i] = f32_to_f16(
            size > F16_MOST && !isinf(size) ? copysignf(F16_MOST, v) : v);
    } else {
        to[i] = f32_to_bf16(x[i]);
    }
}


static int
type_of(int layout)
{
    return layout == OP_LAY_F32   ? TYPE_F32
           : layout == OP_LAY_F16 ? TYPE_F16
                                  : TYPE_BF16;
}


bool
cuda_blas_fits(const op_dev_t *dev, const cuda_dot_t *dot)
{
    return dev->blas != NULL && dev->blas->x != NULL && dot->rows > FEW_ROWS;
}


void
cuda_blas_narrow(op_dev_t *dev, const cuda_dot_t *dot)
{
    const size_t n = (size_t) dot->rows * (size_t) dot->w.n_in;
    const unsigned blocks = (unsigned) ((n + THREADS - 1) / THREADS);

    if (dot->w.layout == OP_LAY_F16) {
        LAUNCH((narrow<OP_LAY_F16>), blocks, THREADS, 0, dev->stream,
               dev->blas->x, dot->in.x, n);
    } else if (dot->w.layout == OP_LAY_BF16) {
        LAUNCH((narrow<OP_LAY_BF16>), blocks, THREADS, 0, dev->stream,
               dev->blas->x, dot->in.x, n);
    }
}


/* cuBLAS counts columns first: y as its [n_out, rows], of wᵀ [n_in, n_out]
 * transposed, and x [n_in, rows]. */
void
cuda_blas_gemm(op_dev_t *dev, const cuda_dot_t *dot)
{
    const cuda_segment_t *w = &dot->w;
    const float alpha = w->layout == OP_LAY_F16 ? F16_SCALE : 1.0f;
    const float beta = dot->add ? 1.0f : 0.0f;
    const int type = type_of(w->layout);
    const void *x = type == TYPE_F32 ? (const void *) dot->in.x
                                     : (const void *) dev->blas->x;
    const int status = dev->blas->call.gemm(
        dev->blas->handle, OP_T, OP_N, w->n_out, dot->rows, w->n_in, &alpha,
        w->q, type, w->stride, x, type, w->n_in, &beta, dot->y, TYPE_F32,
        dot->ldy, COMPUTE_F32, ALGO_DEFAULT);

    if (status != 0 && !dev->failed) {
        dev->failed = true;
        snprintf(dev->error, sizeof(dev->error),
                 "GPU %d: linear: cuBLAS status %d", dev->id, status);
    }
}
