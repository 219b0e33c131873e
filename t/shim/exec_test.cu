/*
 * The emulation computes what a device would: barriers, warp collectives,
 * shared memory, asynchronous copies and matrix instructions, on many
 * schedules.
 */

#include "kernels/cuda/prim.cuh"
#include "t/shim/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" {
#include <cmocka.h>
}

#define N_SEEDS 12


static void *
device(size_t n_bytes)
{
    void *ptr = NULL;

    assert_int_equal(cudaMalloc(&ptr, n_bytes), cudaSuccess);

    return ptr;
}


static void
to_device(void *dst, const void *src, size_t n_bytes)
{
    assert_int_equal(cudaMemcpy(dst, src, n_bytes, cudaMemcpyHostToDevice),
                     cudaSuccess);
}


static void
to_host(void *dst, const void *src, size_t n_bytes)
{
    assert_int_equal(cudaMemcpy(dst, src, n_bytes, cudaMemcpyDeviceToHost),
                     cudaSuccess);
}


/* --- a sum through shared memory and warps --- */

static __global__ void
block_sums(float *sums, const float *x, int n)
{
    __shared__ float parts[32];
    float sum = 0;

    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sum += x[blockIdx.x * n + i];
    }

    sum = warp_sum(sum);

    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = sum;
    }

    __syncthreads();

    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0;
        sum = warp_sum(sum);

        if (threadIdx.x == 0) {
            sums[blockIdx.x] = sum;
        }
    }
}


static void
sums_are_right(void **state)
{
    enum { BLOCKS = 7, N = 1000 };
    static float x[BLOCKS * N], sums[BLOCKS];
    float *dx = (float *) device(sizeof(x));
    float *dsums = (float *) device(sizeof(sums));

    (void) state;

    for (int i = 0; i < BLOCKS * N; i++) {
        x[i] = i % 17;
    }

    to_device(dx, x, sizeof(x));

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        assert_int_equal(cudaMemset(dsums, 0xff, sizeof(sums)), 0);
        LAUNCH(block_sums, BLOCKS, 256, 0, NULL, dsums, dx, N);
        assert_int_equal(cudaGetLastError(), cudaSuccess);
        to_host(sums, dsums, sizeof(sums));

        for (int b = 0; b < BLOCKS; b++) {
            float want = 0;

            for (int i = 0; i < N; i++) {
                want += x[b * N + i];
            }

            assert_true(sums[b] == want);
        }
    }

    cudaFree(dx);
    cudaFree(dsums);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_right),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
