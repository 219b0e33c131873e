/* Reductions over a part of a warp: 16 lanes, or 8.  All 32 lanes take part,
 * and all of a part get its result. */

#ifndef KERNELS_CUDA_CUDA_LANES_CUH
#define KERNELS_CUDA_CUDA_LANES_CUH

#include "kernels/cuda/prim.cuh"


/* The tree of cuda_linear.h: lane j and j + 8, then + 4, + 2, + 1. */
static __device__ __forceinline__ float
cuda_sum16(float value)
{
#pragma unroll
    for (int i = 8; i != 0; i /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, i);
    }

    return value;
}


static __device__ __forceinline__ int
cuda_max8(int value)
{
#pragma unroll
    for (int i = 4; i != 0; i /= 2) {
        const int other = __shfl_xor_sync(FULL_MASK, value, i);

        value = other > value ? other : value;
    }

    return value;
}


static __device__ __forceinline__ int
cuda_sum8_int(int value)
{
#pragma unroll
    for (int i = 4; i != 0; i /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, i);
    }

    return value;
}

#endif /* KERNELS_CUDA_CUDA_LANES_CUH */
