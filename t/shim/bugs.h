/*
 * What the planted bugs share: N numbers of the device, and whether they are
 * what they should be afterwards.
 */

#ifndef T_SHIM_BUGS_H
#define T_SHIM_BUGS_H

#include "kernels/cuda/prim.cuh"
#include "t/shim/options.h"

#include <stdio.h>
#include <stdlib.h>

enum { N = 128, N_BYTES = N * sizeof(float) };


static inline void
check(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        exit(4);
    }
}


/* N floats of the device, from i = 0 */
static inline float *
numbers(void)
{
    float x[N], *d = NULL;

    for (int i = 0; i < N; i++) {
        x[i] = i;
    }

    check(cudaMalloc(&d, N_BYTES));
    check(cudaMemcpy(d, x, N_BYTES, cudaMemcpyHostToDevice));

    return d;
}


/* Whether each is the number of another: x[i] = i ^ bits; frees. */
static inline bool
are_exchanged(float *d, int bits)
{
    float x[N];
    bool right = true;

    check(cudaMemcpy(x, d, N_BYTES, cudaMemcpyDeviceToHost));
    check(cudaFree(d));

    for (int i = 0; i < N; i++) {
        right = right && x[i] == (i ^ bits);
    }

    return right;
}

#endif
