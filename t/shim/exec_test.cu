/*
 * The emulation computes what a device would: indices, barriers, warp
 * collectives, shared memory; and the same on every schedule, though schedules
 * differ.
 */

#include "t/shim/test.h"

#define N_SEEDS 12


/* --- sums through static shared memory and warps --- */

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
sums(void **state)
{
    enum { BLOCKS = 7, N = 1000 };
    static float x[BLOCKS * N], got[BLOCKS];

    (void) state;

    for (int i = 0; i < BLOCKS * N; i++) {
        x[i] = i % 17;
    }

    float *dx = (float *) on_device(x, sizeof(x));
    float *dsums = (float *) on_device(NULL, sizeof(got));

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        OK(cudaMemset(dsums, 0xff, sizeof(got)));
        LAUNCH(block_sums, BLOCKS, 256, 0, NULL, dsums, dx, N);
        OK(cudaGetLastError());
        from_device(got, dsums, sizeof(got));

        for (int b = 0; b < BLOCKS; b++) {
            float want = 0;

            for (int i = 0; i < N; i++) {
                want += x[b * N + i];
            }

            assert_true(got[b] == want);
        }
    }

    OK(cudaFree(dx));
    OK(cudaFree(dsums));
}


/* --- indices: every thread is there once --- */

static __global__ void
count_threads(unsigned *counts)
{
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x
                           + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y)
                                * blockDim.x
                            + threadIdx.x;

    atomicAdd(&counts[block * blockDim.x * blockDim.y * blockDim.z + thread],
              1u);
}


static void
indices(void **state)
{
    enum { N = 3 * 4 * 5 * 7 * 3 * 2 };
    unsigned got[N] = { 0 };
    unsigned *counts = (unsigned *) on_device(got, sizeof(got));

    (void) state;

    for (int seed = 0; seed < 4; seed++) {
        shim_options()->seed = seed;
        LAUNCH(count_threads, dim3(3, 4, 5), dim3(7, 3, 2), 0, NULL, counts);
    }

    from_device(got, counts, sizeof(got));

    for (int i = 0; i < N; i++) {
        assert_int_equal(got[i], 4);
    }

    OK(cudaFree(counts));
}


/* --- dynamic shared memory; a warp that is not whole --- */

static __global__ void
reverse(int *x)
{
    DYN_SMEM(int, all);
    const int i = threadIdx.x;

    all[i] = x[i];
    __syncthreads();
    x[i] = all[blockDim.x - 1 - i];
}


static void
dynamic_shared(void **state)
{
    enum { N = 75 };
    int x[N];

    (void) state;

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;

        for (int i = 0; i < N; i++) {
            x[i] = i;
        }

        int *dx = (int *) on_device(x, sizeof(x));

        LAUNCH(reverse, 1, N, sizeof(x), NULL, dx);
        from_device(x, dx, sizeof(x));
        OK(cudaFree(dx));

        for (int i = 0; i < N; i++) {
            assert_int_equal(x[i], N - 1 - i);
        }
    }
}


/* --- shuffles and votes --- */

enum { N_RESULTS = 12 };


static __global__ void
shuffle_all(int *out)
{
    const int lane = threadIdx.x, x = lane * lane;
    int *r = out + lane * N_RESULTS;
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;

    r[0] = __shfl_sync(FULL_MASK, x, 5);
    r[1] = __shfl_xor_sync(FULL_MASK, x, 3);
    r[2] = __shfl_down_sync(FULL_MASK, x, 4);
    r[3] = __shfl_up_sync(FULL_MASK, x, 4);
    r[4] = __shfl_sync(FULL_MASK, x, 2, 8);
    r[5] = __shfl_down_sync(FULL_MASK, x, 3, 8);
    r[6] = __shfl_up_sync(FULL_MASK, x, 3, 8);
    r[7] = __shfl_xor_sync(half, x, 15);
    r[8] = __ballot_sync(FULL_MASK, lane % 3 == 0);
    r[9] = __any_sync(half, lane == 20);
    r[10] = __all_sync(FULL_MASK, lane < 32);

    /* half of the lanes go through something of their own between */
    if (lane < 16) {
        r[11] = __shfl_xor_sync(half, x, 1);

    } else {
        r[11] = (int) __shfl_xor_sync(half, (double) x, 2);
    }

    __syncwarp();
}


static void
shuffles(void **state)
{
    int got[32][N_RESULTS];
    int *out = (int *) on_device(NULL, sizeof(got));
    unsigned thirds = 0;

    (void) state;

    for (int lane = 0; lane < 32; lane += 3) {
        thirds |= 1u << lane;
    }

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        OK(cudaMemset(out, 0xff, sizeof(got)));
        LAUNCH(shuffle_all, 1, 32, 0, NULL, out);
        from_device(got, out, sizeof(got));

        for (int i = 0; i < 32; i++) {
            const int from[] = {
                5,
                i ^ 3,
                i + 4 < 32 ? i + 4 : i,
                i >= 4 ? i - 4 : i,
                i / 8 * 8 + 2,
                i % 8 + 3 < 8 ? i + 3 : i,
                i % 8 >= 3 ? i - 3 : i,
                i ^ 15,
            };

            for (size_t j = 0; j < N_OF(from); j++) {
                assert_int_equal(got[i][j], from[j] * from[j]);
            }

            const int other = i ^ (i < 16 ? 1 : 2);

            assert_int_equal((unsigned) got[i][8], thirds);
            assert_int_equal(got[i][9], i >= 16);
            assert_int_equal(got[i][10], 1);
            assert_int_equal(got[i][11], other * other);
        }
    }

    OK(cudaFree(out));
}


/* --- reductions: the bits of the shuffles that a device takes --- */

static __global__ void
reduce_all(float *out, const float *x)
{
    const int lane = threadIdx.x;
    const float v = x[lane];
    float *r = out + lane * 8;
    float sum = v, max = v, quad = v;

    for (int i = 16; i != 0; i /= 2) {
        sum += __shfl_xor_sync(FULL_MASK, sum, i);
        max = fmaxf(max, __shfl_xor_sync(FULL_MASK, max, i));
    }

    quad += __shfl_xor_sync(FULL_MASK, quad, 1);
    quad += __shfl_xor_sync(FULL_MASK, quad, 2);

    r[0] = sum;
    r[1] = warp_sum(v);
    r[2] = max;
    r[3] = warp_max(v);
    r[4] = quad;
    r[5] = quad_sum(v);
    r[6] = fmaxf(fmaxf(__shfl_sync(FULL_MASK, v, 0, 4),
                       __shfl_sync(FULL_MASK, v, 1, 4)),
                 fmaxf(__shfl_sync(FULL_MASK, v, 2, 4),
                       __shfl_sync(FULL_MASK, v, 3, 4)));
    r[7] = quad_max(v);
}


static void
reductions(void **state)
{
    float x[32], got[32][8];
    uint32_t seed = 3;

    (void) state;

    for (int i = 0; i < 32; i++) {
        x[i] = test_number(&seed);
    }

    float *dx = (float *) on_device(x, sizeof(x));
    float *out = (float *) on_device(NULL, sizeof(got));

    LAUNCH(reduce_all, 1, 32, 0, NULL, out, dx);
    from_device(got, out, sizeof(got));

    for (int i = 0; i < 32; i++) {
        for (int j = 0; j < 8; j += 2) {
            assert_memory_equal(&got[i][j], &got[i][j + 1], sizeof(float));
        }
    }

    OK(cudaFree(dx));
    OK(cudaFree(out));
}


/* --- counting barriers and integer sums --- */

static __global__ void
count_all(int *out)
{
    const int i = threadIdx.x;

    for (int round = 0; round < 5; round++) {
        const int n = __syncthreads_count(i % (round + 2) == 0);
        const int any = __syncthreads_or(i == 70 + round);
        const int all = __syncthreads_and(i < 100);

        if (n != (99 + round + 2) / (round + 2) || !any || !all) {
            out[i] = 1;
        }
    }

    if (i < 96 && warp_sum_int(i) != i / 32 * 1024 + 496) {
        out[i] = 2;
    }
}


static void
counting(void **state)
{
    int got[100] = { 0 };
    int *out = (int *) on_device(got, sizeof(got));

    (void) state;

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        LAUNCH(count_all, 1, 100, 0, NULL, out);
    }

    from_device(got, out, sizeof(got));

    for (int i = 0; i < 100; i++) {
        assert_int_equal(got[i], 0);
    }

    OK(cudaFree(out));
}


/* --- a warp writes for itself, and reads after __syncwarp --- */

static __global__ void
neighbours(int *out)
{
    __shared__ int all[64];
    const int i = threadIdx.x;

    for (int round = 0; round < 4; round++) {
        all[i] = i * round;
        __syncwarp();
        out[blockIdx.x * blockDim.x + i] += all[i ^ 1];
        __syncwarp();
    }
}


static void
warp_barriers(void **state)
{
    int got[2 * 64] = { 0 };
    int *out = (int *) on_device(got, sizeof(got));

    (void) state;

    for (int seed = 0; seed < N_SEEDS; seed++) {
        shim_options()->seed = seed;
        OK(cudaMemset(out, 0, sizeof(got)));
        LAUNCH(neighbours, 2, 64, 0, NULL, out);
        from_device(got, out, sizeof(got));

        for (int i = 0; i < 2 * 64; i++) {
            assert_int_equal(got[i], (i % 64 ^ 1) * (1 + 2 + 3));
        }
    }

    OK(cudaFree(out));
}


/* --- schedules --- */

static __global__ void
first_come(int *order, int *n)
{
    order[atomicAdd(n, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}


static void
schedules(void **state)
{
    enum { N = 3 * 96 };
    int before[N], got[N], again[N], zero = 0;
    int *order = (int *) on_device(NULL, sizeof(got));
    int *n = (int *) on_device(&zero, sizeof(zero));
    int n_different = 0;

    (void) state;
    memset(before, 0, sizeof(before));

    for (int seed = 0; seed < N_SEEDS; seed++) {
        int seen[N] = { 0 };

        shim_options()->seed = seed;
        OK(cudaMemset(n, 0, sizeof(zero)));
        LAUNCH(first_come, 3, 96, 0, NULL, order, n);
        from_device(got, order, sizeof(got));

        for (int i = 0; i < N; i++) {
            seen[got[i]]++;
        }

        for (int i = 0; i < N; i++) {
            assert_int_equal(seen[i], 1);

            if (seed == 0) {
                assert_int_equal(got[i], i);
            }
        }

        n_different += memcmp(got, before, sizeof(got)) != 0;
        memcpy(before, got, sizeof(got));
    }

    assert_int_equal(n_different, N_SEEDS);

    /* a number that counts launches is in it: begin twice with the same */
    shim_options()->seed = 7;

    for (int i = 0; i < 2; i++) {
        shim_stats.launches = 0;
        OK(cudaMemset(n, 0, sizeof(zero)));
        LAUNCH(first_come, 3, 96, 0, NULL, order, n);
        from_device(i == 0 ? got : again, order, sizeof(got));
    }

    assert_memory_equal(got, again, sizeof(got));

    OK(cudaFree(order));
    OK(cudaFree(n));
}


static void
workers(void **state)
{
    (void) state;

    shim_options()->workers = 3;

    for (int i = 0; i < 20; i++) {
        sums(NULL);
        dynamic_shared(NULL);
    }

    shim_options()->workers = 1;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums),
        cmocka_unit_test(indices),
        cmocka_unit_test(dynamic_shared),
        cmocka_unit_test(shuffles),
        cmocka_unit_test(reductions),
        cmocka_unit_test(counting),
        cmocka_unit_test(warp_barriers),
        cmocka_unit_test(schedules),
        cmocka_unit_test(workers),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
