/*
 * Planted bugs inside of kernels.
 */

#ifndef T_SHIM_BUGS_KERNEL_CUH
#define T_SHIM_BUGS_KERNEL_CUH

#include "t/shim/bugs.h"
#include "t/shim/gemm.cuh"


/* --- barriers --- */

static __global__ void
exchange(float *x, int bits, bool fixed)
{
    __shared__ float all[N];
    const int i = threadIdx.x;

    all[i] = x[i];

    if (fixed) {
        __syncthreads();
    }

    x[i] = all[i ^ bits];
}


static bool
missing_barrier(bool fixed)
{
    float *d = numbers();

    LAUNCH(exchange, 1, N, 0, NULL, d, 96, fixed);

    return are_exchanged(d, 96);
}


static __global__ void
exchange_in_warp(float *x, bool fixed)
{
    __shared__ float all[N];
    const int i = threadIdx.x;

    all[i] = x[i];

    if (fixed) {
        __syncwarp();
    }

    x[i] = all[i ^ 1];
}


static bool
missing_warp_barrier(bool fixed)
{
    float *d = numbers();

    LAUNCH(exchange_in_warp, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 1);
}


static __global__ void
barrier_in_branch(float *x, bool fixed)
{
    if (fixed || threadIdx.x < 32) {
        __syncthreads();
    }

    x[threadIdx.x] = threadIdx.x;
}


static bool
divergent_barrier(bool fixed)
{
    float *d = numbers();

    LAUNCH(barrier_in_branch, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}


static __global__ void
two_barriers(float *x, bool fixed)
{
    if (fixed || threadIdx.x < 64) {
        __syncthreads();
        x[threadIdx.x] = threadIdx.x;

    } else {
        x[threadIdx.x] = threadIdx.x;
        __syncthreads();
    }
}


static bool
different_barriers(bool fixed)
{
    float *d = numbers();

    LAUNCH(two_barriers, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}


static __global__ void
shuffle_in_branch(float *x, bool fixed)
{
    float v = x[threadIdx.x];

    if (fixed || threadIdx.x % 32 < 20) {
        v = __shfl_xor_sync(FULL_MASK, v, 1);
    }

    x[threadIdx.x] = v;
}


static bool
divergent_shuffle(bool fixed)
{
    float *d = numbers();

    LAUNCH(shuffle_in_branch, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 1);
}


/* --- asynchronous copies --- */

/* Ones times ones: every element is K, whatever the tile. */
static bool
reuse_race(bool fixed)
{
    enum { SIZE = GEMM_TILE, K = 256 };
    static uint16_t ones[SIZE * K];
    static float c[SIZE * SIZE];
    uint16_t *a = NULL;
    float *dc = NULL;
    bool right = true;

    for (int i = 0; i < SIZE * K; i++) {
        ones[i] = 0x3c00;
    }

    check(cudaMalloc(&a, sizeof(ones)));
    check(cudaMalloc(&dc, sizeof(c)));
    check(cudaMemcpy(a, ones, sizeof(ones), cudaMemcpyHostToDevice));

    if (fixed) {
        LAUNCH((gemm<false>), 1, 128, GEMM_SHARED, NULL, dc, a, a, SIZE, K);

    } else {
        LAUNCH((gemm<true>), 1, 128, GEMM_SHARED, NULL, dc, a, a, SIZE, K);
    }

    check(cudaMemcpy(c, dc, sizeof(c), cudaMemcpyDeviceToHost));
    check(cudaFree(a));
    check(cudaFree(dc));

    for (int i = 0; i < SIZE * SIZE; i++) {
        right = right && c[i] == K;
    }

    return right;
}


static __global__ void
copy_by_shared(float *x, bool fixed)
{
    __shared__ __align__(16) float all[N];
    const int i = threadIdx.x;

    if (i < N / 4) {
        cp_async16(&all[i * 4], &x[i * 4]);
        cp_async_commit();

        if (fixed) {
            cp_async_wait<0>();
        }
    }

    __syncthreads();
    x[i] = all[i ^ 2];
}


static bool
missing_copy_wait(bool fixed)
{
    float *d = numbers();

    LAUNCH(copy_by_shared, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 2);
}


/* --- bounds --- */

static __global__ void
shift_static(float *x, int by)
{
    __shared__ float all[N];
    const int i = threadIdx.x;

    all[i] = x[i];
    __syncthreads();

    /* x[i] = i + by; the last would be behind the end */
    x[i] = all[i + by] - by;
}


static bool
static_shared_bounds(bool fixed)
{
    float *d = numbers();

    LAUNCH(shift_static, 1, N, 0, NULL, d, fixed ? 0 : 1);

    return are_exchanged(d, 0);
}


static __global__ void
write_dynamic(float *x, int n)
{
    DYN_SMEM(float, all);

    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        all[i] = x[i % N];
    }

    __syncthreads();
    x[threadIdx.x] = all[threadIdx.x];
}


static bool
dynamic_shared_bounds(bool fixed)
{
    float *d = numbers();

    LAUNCH(write_dynamic, 1, N, N_BYTES, NULL, d, fixed ? N : N + 1);

    return are_exchanged(d, 0);
}


static __global__ void
write_all(float *x, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n) {
        x[i] = i;
    }
}


static bool
global_write_bounds(bool fixed)
{
    float *d = numbers();

    LAUNCH(write_all, 2, N, 0, NULL, d, fixed ? N : N + 1);

    return are_exchanged(d, 0);
}


static __global__ void
sum_of_two(float *x, const float *y, int by)
{
    x[threadIdx.x] += y[threadIdx.x + by] - y[threadIdx.x + by];
}


static bool
global_read_bounds(bool fixed)
{
    float *d = numbers(), *y = numbers();

    LAUNCH(sum_of_two, 1, N, 0, NULL, d, y, fixed ? 0 : 1);
    check(cudaDeviceSynchronize());
    check(cudaFree(y));

    return are_exchanged(d, 0);
}


static bool
use_after_free(bool fixed)
{
    float *d = numbers(), *y = numbers();

    if (!fixed) {
        check(cudaFree(y));
    }

    LAUNCH(sum_of_two, 1, N, 0, NULL, d, y, 0);
    check(cudaDeviceSynchronize());

    if (fixed) {
        check(cudaFree(y));
    }

    return are_exchanged(d, 0);
}


/* --- alignment --- */

static __global__ void
copy_by_four(float *x, const float *y)
{
    const int i = threadIdx.x * 4;

    if (i + 8 <= N) {
        *(uint4 *) &x[i] = load_v4(&y[i]);
    }
}


static __global__ void
copy_by_four_plainly(float *x, const float *y)
{
    const int i = threadIdx.x * 4;

    if (i + 8 <= N) {
        *(float4 *) &x[i] = *(const float4 *) &y[i];
    }
}


static bool
misaligned(bool fixed)
{
    float *d = numbers(), *y = numbers();

    LAUNCH(copy_by_four, 1, N / 4, 0, NULL, d, fixed ? y : y + 1);
    check(cudaDeviceSynchronize());
    check(cudaFree(y));

    return fixed ? are_exchanged(d, 0) : (check(cudaFree(d)), true);
}


static bool
misaligned_plainly(bool fixed)
{
    float *d = numbers(), *y = numbers();

    LAUNCH(copy_by_four_plainly, 1, N / 4, 0, NULL, d, fixed ? y : y + 1);
    check(cudaDeviceSynchronize());
    check(cudaFree(y));

    return fixed ? are_exchanged(d, 0) : (check(cudaFree(d)), true);
}


/* --- memory that nobody wrote --- */

static bool
uninitialised(bool fixed)
{
    float *d = numbers(), *y = NULL;

    check(cudaMalloc(&y, N_BYTES));

    if (fixed) {
        check(cudaMemset(y, 0, N_BYTES));
    }

    LAUNCH(sum_of_two, 1, N, 0, NULL, d, y, 0);
    check(cudaDeviceSynchronize());
    check(cudaFree(y));

    return are_exchanged(d, 0);
}


static __global__ void
read_static(float *x, bool fixed)
{
    __shared__ float all[N];
    const int i = threadIdx.x;

    if (fixed || i != 5) {
        all[i] = 0;
    }

    x[i] += all[i];
}


static bool
uninitialised_static(bool fixed)
{
    float *d = numbers();

    LAUNCH(read_static, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}


/* the same in a function that the kernel calls */
static __device__ float
read_inside(bool fixed)
{
    __shared__ float all[N];
    const int i = threadIdx.x;

    if (fixed || i != 5) {
        all[i] = 0;
    }

    return all[i];
}


static __global__ void
read_called(float *x, bool fixed)
{
    x[threadIdx.x] += read_inside(fixed);
}


static bool
uninitialised_called(bool fixed)
{
    float *d = numbers();

    LAUNCH(read_called, 1, N, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}


static __global__ void
read_dynamic(float *x, bool fixed)
{
    DYN_SMEM(float, all);
    const int i = threadIdx.x;

    if (fixed || i != 5) {
        all[i] = 0;
    }

    x[i] += all[i];
}


static bool
uninitialised_dynamic(bool fixed)
{
    float *d = numbers();

    LAUNCH(read_dynamic, 1, N, N_BYTES, NULL, d, fixed);

    return are_exchanged(d, 0);
}


/* --- blocks --- */

/* Each block writes what another writes, too: the same, as it happens. */
static __global__ void
write_in_blocks(float *x, bool fixed)
{
    if (fixed && blockIdx.x != threadIdx.x / 64) {
        return;
    }

    x[threadIdx.x] = threadIdx.x;
}


static bool
two_writers(bool fixed)
{
    float *d = numbers();

    LAUNCH(write_in_blocks, 2, N, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}

#endif
