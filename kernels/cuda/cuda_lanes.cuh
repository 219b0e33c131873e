/* Reductions over eight lanes.  All 32 take part, and all of an eighth get its
 * result. */

#ifndef KERNELS_CUDA_CUDA_LANES_CUH
#define KERNELS_CUDA_CUDA_LANES_CUH

#include "kernels/cuda/prim.cuh"


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
