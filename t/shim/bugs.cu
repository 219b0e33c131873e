/*
 * Planted bugs, one a run: `bugs NAME` makes the mistake, `bugs NAME fixed`
 * does not.  shim.t runs both and says which build has to notice, and how.
 * Exit status 3: a wrong result was seen, on one of the seeds; 0: none.
 */

#include "t/shim/bugs.h"
#include "t/shim/bugs_kernel.cuh"

#define N_SEEDS 24


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


/* --- two devices --- */

static __global__ void
exchange_alone(float *x)
{
    for (int i = 0; i < N; i++) {
        x[i] = i ^ 1;
    }
}


/* The thread's current device is another than the one that has the memory. */
static bool
other_memory(bool fixed)
{
    shim_options()->device = "80,80";

    float *d = numbers();

    check(cudaSetDevice(fixed ? 0 : 1));
    LAUNCH(exchange_alone, 1, 1, 0, NULL, d);
    check(cudaSetDevice(0));

    return are_exchanged(d, 1);
}


static bool
other_stream(bool fixed)
{
    cudaStream_t stream;
    float *d;

    shim_options()->device = "80,80";
    check(cudaSetDevice(1));
    check(cudaStreamCreate(&stream));
    check(cudaSetDevice(fixed ? 1 : 0));
    d = numbers();
    LAUNCH(exchange_alone, 1, 1, 0, stream, d);
    check(cudaStreamSynchronize(stream));
    check(cudaStreamDestroy(stream));

    return are_exchanged(d, 1);
}


typedef struct {
    float *at;
} inside_t;


static __global__ void
exchange_inside(inside_t inside)
{
    for (int i = 0; i < N; i++) {
        inside.at[i] = i ^ 1;
    }
}


/* A kernel finds the other device's memory where nobody looks. */
static bool
other_reach(bool fixed)
{
    shim_options()->device = "80,80";
    shim_options()->protect = true;

    const inside_t inside = { numbers() };

    check(cudaSetDevice(fixed ? 0 : 1));
    check(cudaFree(numbers()));
    LAUNCH(exchange_inside, 1, 1, 0, NULL, inside);
    check(cudaDeviceSynchronize());
    check(cudaSetDevice(0));

    return are_exchanged(inside.at, 1);
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
    BUG(two_writers),
    BUG(other_memory),
    BUG(other_stream),
    BUG(other_reach),
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
