/*
 * Planted bugs, one a run: `bugs NAME` makes the mistake, `bugs NAME fixed`
 * does not.  shim.t runs both and says which build has to notice, and how.
 * Exit status 3: a wrong result was seen, on one of the seeds; 0: none.
 */

#include "t/shim/gemm.cuh"
#include "t/shim/options.h"

#include <stdio.h>
#include <stdlib.h>

#define N_SEEDS 24

enum { N = 128, N_BYTES = N * sizeof(float) };


static void
check(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        exit(4);
    }
}


/* N floats of the device, from i = 0 */
static float *
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
static bool
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


/* --- host and device --- */

static bool
missing_sync(bool fixed)
{
    float *d = numbers(), *x = NULL;
    cudaStream_t stream;
    bool right = true;

    check(cudaMallocHost(&x, N_BYTES));
    check(cudaStreamCreate(&stream));
    check(cudaMemcpyAsync(x, d, N_BYTES, cudaMemcpyDeviceToHost, stream));

    if (fixed) {
        check(cudaStreamSynchronize(stream));
    }

    for (int i = 0; i < N; i++) {
        right = right && x[i] == i;
    }

    check(cudaStreamDestroy(stream));
    check(cudaFreeHost(x));
    check(cudaFree(d));

    return right;
}


/* The host prepares the next step where the copy of this one still reads. */
static bool
staging_reuse(bool fixed)
{
    float *d = numbers(), *x = NULL;
    cudaStream_t stream;

    check(cudaMallocHost(&x, N_BYTES));
    check(cudaStreamCreate(&stream));

    for (int i = 0; i < N; i++) {
        x[i] = i ^ 1;
    }

    check(cudaMemcpyAsync(d, x, N_BYTES, cudaMemcpyHostToDevice, stream));

    if (fixed) {
        check(cudaStreamSynchronize(stream));
    }

    memset(x, 0, N_BYTES);
    check(cudaStreamSynchronize(stream));
    check(cudaStreamDestroy(stream));
    check(cudaFreeHost(x));

    return are_exchanged(d, 1);
}


/* One stream uses what another makes, without an event between. */
static bool
missing_event(bool fixed)
{
    float *d = numbers(), *y = NULL;
    cudaStream_t one, two;
    cudaEvent_t event;

    check(cudaMalloc(&y, N_BYTES));
    check(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    check(cudaEventCreate(&event));
    check(cudaMemsetAsync(y, 0, N_BYTES, one));
    check(cudaEventRecord(event, one));

    if (fixed) {
        check(cudaStreamWaitEvent(two, event));
    }

    LAUNCH(sum_of_two, 1, N, 0, two, d, y, 0);
    check(cudaStreamSynchronize(two));
    check(cudaDeviceSynchronize());
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(one));
    check(cudaStreamDestroy(two));
    check(cudaFree(y));

    return are_exchanged(d, 0);
}


static bool
host_follows(bool fixed)
{
    float *d = numbers();

    shim_options()->protect = true;

    /* the first operation closes the memory */
    check(cudaMemset(d, 0, sizeof(float)));
    check(cudaDeviceSynchronize());

    if (!fixed) {
        printf("%g\n", d[3]);
    }

    return are_exchanged(d, 0);
}


static bool
device_follows(bool fixed)
{
    float *d = numbers();
    float y[N] = { 0 };
    float *dy = numbers();

    LAUNCH(sum_of_two, 1, N, 0, NULL, d, fixed ? dy : y, 0);
    check(cudaDeviceSynchronize());
    check(cudaFree(dy));

    return are_exchanged(d, 0);
}


/* --- results that depend on the schedule --- */

static __global__ void
add_in_any_order(float *sum, const float *x)
{
    atomicAdd(sum, 1.0f / (1.0f + x[threadIdx.x]));
}


static __global__ void
add_in_one_order(float *sum, const float *x)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < N; i++) {
            *sum += 1.0f / (1.0f + x[i]);
        }
    }
}


static bool
float_atomics(bool fixed)
{
    static float first = -1;
    float *d = numbers(), *sum = NULL;
    float got;

    check(cudaMalloc(&sum, sizeof(float)));
    check(cudaMemset(sum, 0, sizeof(float)));

    if (fixed) {
        LAUNCH(add_in_one_order, 1, N, 0, NULL, sum, d);

    } else {
        LAUNCH(add_in_any_order, 1, N, 0, NULL, sum, d);
    }

    check(cudaMemcpy(&got, sum, sizeof(got), cudaMemcpyDeviceToHost));
    check(cudaFree(sum));
    check(cudaFree(d));
    first = first < 0 ? got : first;

    return got == first;
}


/* Blocks run in any order: one may not read what another writes. */
static __global__ void
pass_on(float *x, bool fixed)
{
    const int i = blockIdx.x;

    if (fixed) {
        x[i] = i;

    } else {
        x[i] = i == 0 ? 0 : x[i - 1] + 1;
    }
}


static bool
block_order(bool fixed)
{
    float *d = NULL;

    check(cudaMalloc(&d, N_BYTES));
    LAUNCH(pass_on, N, 1, 0, NULL, d, fixed);

    return are_exchanged(d, 0);
}


static const struct {
    const char *name;
    bool (*run)(bool fixed);
} bugs[] = {
#define BUG(name) { #name, name }
    BUG(missing_barrier),
    BUG(missing_warp_barrier),
    BUG(divergent_barrier),
    BUG(different_barriers),
    BUG(divergent_shuffle),
    BUG(reuse_race),
    BUG(missing_copy_wait),
    BUG(static_shared_bounds),
    BUG(dynamic_shared_bounds),
    BUG(global_write_bounds),
    BUG(global_read_bounds),
    BUG(use_after_free),
    BUG(misaligned),
    BUG(misaligned_plainly),
    BUG(uninitialised),
    BUG(uninitialised_static),
    BUG(uninitialised_called),
    BUG(uninitialised_dynamic),
    BUG(missing_sync),
    BUG(staging_reuse),
    BUG(missing_event),
    BUG(host_follows),
    BUG(device_follows),
    BUG(float_atomics),
    BUG(block_order),
#undef BUG
};


/* Seeds from LLM_SHIM_SEED on, or the first alone with a second argument. */
static int
run(bool (*bug)(bool), bool fixed)
{
    const uint64_t first = shim_options()->seed;

    for (uint64_t seed = first; seed < first + N_SEEDS; seed++) {
        shim_options()->seed = seed;

        if (!bug(fixed)) {
            printf("wrong with seed %d\n", (int) seed);
            return 3;
        }
    }

    printf("right with %d seeds\n", N_SEEDS);

    return 0;
}


int
main(int argc, char **argv)
{
    const bool fixed = argc > 2 && strcmp(argv[2], "fixed") == 0;

    for (const auto &bug : bugs) {
        if (argc < 2) {
            puts(bug.name);

        } else if (strcmp(bug.name, argv[1]) == 0) {
            return run(bug.run, fixed);
        }
    }

    return argc < 2 ? 0 : 2;
}
