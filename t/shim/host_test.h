/*
 * Two kernels and what goes before each test of the host's side.
 */

#ifndef T_SHIM_HOST_TEST_H
#define T_SHIM_HOST_TEST_H

#include "t/shim/test.h"

#define N_SEEDS 12

enum { N = 64 };

/* each begins with a fresh device */
#define TEST(name) cmocka_unit_test_setup(name, reset)


static __global__ void
add_to(float *x, float y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n) {
        x[i] += y;
    }
}


static __global__ void
scale(float *x, float y)
{
    x[threadIdx.x] *= y;
}


static inline int
reset(void **state)
{
    (void) state;
    cudaDeviceReset();
    shim_options()->seed = 0;
    shim_options()->device = "80";

    for (int i = 0; i < SHIM_FAIL_KINDS; i++) {
        shim_fail_at((shim_fail_t) i, 0);
    }

    return 0;
}


static inline float *
pinned(float value)
{
    float *x = NULL;

    OK(cudaMallocHost(&x, N * sizeof(float)));

    for (int i = 0; i < N; i++) {
        x[i] = value;
    }

    return x;
}

#endif
