/* Launchers of the ops that look at one row at a time, but for embed and the
 * quantising of products (cuda_linear.h).  All pointers are device memory. */

#ifndef KERNELS_CUDA_CUDA_POINT_H
#define KERNELS_CUDA_CUDA_POINT_H

#include <stdint.h>

#include "kernels/cuda/prim.cuh"

extern "C" {

typedef struct {
    float *y;
    const float *x;
    const float *w; /* of rmsnorm */
    int rows;       /* of y */
    int dim;        /* of a row of y */
} cuda_rows_t;


/* op.h: rmsnorm(), silu_mul(), gather(). */
void cuda_rmsnorm_launch(const cuda_rows_t *job, float eps,
                         cudaStream_t stream);
void cuda_silu_mul_launch(const cuda_rows_t *job, cudaStream_t stream);
void cuda_gather_launch(const cuda_rows_t *job, const int32_t *idx,
                        cudaStream_t stream);

} /* extern "C" */

#endif /* KERNELS_CUDA_CUDA_POINT_H */
