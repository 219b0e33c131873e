/*
 * Engines on several emulated GPUs, which nobody may mix up: the emulation ends
 * the process when memory, a stream, an event or a graph of one is used while
 * another is the thread's current one.  Two engines step in turn on one thread,
 * one is opened, stepped and closed by different threads, one dies and the
 * other does not notice; and the GPU that is meant is the one that is named.
 */

#include <pthread.h>

#include "t/unit/cuda_ask.h"

#include "t/shim/options.h"

enum { N_GPUS = 2, N_OF_EACH = 2 };

/* of the runtime */
int cudaSetDevice(int device);
int cudaDeviceReset(void);

static buf_t want[N_ASKED];


static int
two(void **unused)
{
    (void) unused;
    shim_options()->device = "80,90";

    return 0;
}


static int
one(void **unused)
{
    shim_options_t *shim = shim_options();

    (void) unused;
    shim->device = "80";
    shim->seed = 0;
    shim->workers = 1;
    shim->protect = false;
    memset(shim->others, 0, sizeof(shim->others));

    return 0;
}


static engine_t *
open_on(const char *device)
{
    char word[40];
    const char *const words[] = { word, "kv_cache_memory=1m",
                                  "max_num_batched_tokens=24", NULL };

    snprintf(word, sizeof(word), "device=%s", device);

    return tiny_engine(words);
}


static void
assert_on(engine_t *engine, const char *gpu)
{
    const char *described = engine->ops->describe(engine->dev);

    assert_int_equal(strcspn(described, ","), strlen(gpu));
    assert_memory_equal(described, gpu, strlen(gpu));
}


/* What each request answers alone, of the first GPU: the other's compute
 * capability makes no difference. */
static int
ask_alone(void **unused)
{
    (void) unused;
    log_open(NULL, LOG_WARN);

    for (int i = 0; i < N_GPUS * N_OF_EACH; i++) {
        engine_t *engine = open_on("cuda:0");
        request_t *req = submit(engine, i);

        run_all(engine);
        answer_of(req, &want[i]);
        request_destroy(req);
        engine_close(engine);
    }

    return 0;
}


static int
forget(void **unused)
{
    (void) unused;

    for (int i = 0; i < N_ASKED; i++) {
        buf_fini(&want[i]);
    }

    return 0;
}


static void
step_in_turn(void)
{
    static const char *const names[N_GPUS] = { "cuda:0", "cuda:1" };
    static const char *const gpus[N_GPUS] = { "GPU 0", "GPU 1" };
    engine_t *engines[N_GPUS];
    request_t *reqs[N_GPUS][N_OF_EACH];

    for (int e = 0; e < N_GPUS; e++) {
        engines[e] = open_on(names[e]);
        assert_on(engines[e], gpus[e]);
    }

    for (int i = 0; i < N_OF_EACH; i++) {
        for (int e = 0; e < N_GPUS; e++) {
            reqs[e][i] = submit(engines[e], N_OF_EACH * e + i);
            engine_step(engines[e]);
        }
    }

    for (bool busy = true; busy;) {
        busy = engine_step(engines[0]);
        busy |= engine_step(engines[1]);
    }

    for (int e = 0; e < N_GPUS; e++) {
        for (int i = 0; i < N_OF_EACH; i++) {
            assert_answer(reqs[e][i], &want[N_OF_EACH * e + i]);
        }
    }

    engine_close(engines[0]);
    engine_close(engines[1]);
}


/* Whatever the order of threads and streams, and with memory that only kernels
 * of its own GPU can reach. */
static void
test_in_turn(void **unused)
{
    shim_options_t *shim = shim_options();

    (void) unused;

    for (int seed = 0; seed <= 2; seed++) {
        shim->seed = (uint64_t) seed;
        shim->workers = 1 + seed % 2;
        shim->protect = seed == 2;
        step_in_turn();
    }
}


typedef struct {
    engine_t *engine;
    request_t *req;
} work_t;


static void *
step_all(void *data)
{
    work_t *work = data;

    while (engine_step(work->engine)) {
    }

    return NULL;
}


static void *
close_it(void *data)
{
    work_t *work = data;

    engine_close(work->engine);

    return NULL;
}


static void
on_a_thread(void *(*run)(void *), work_t *work)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, run, work), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
}


/* A thread begins at GPU 0. */
static void
test_threads(void **unused)
{
    work_t work = { .engine = open_on("cuda:1") };

    (void) unused;
    work.req = submit(work.engine, 1);
    on_a_thread(step_all, &work);
    assert_answer(work.req, &want[1]);

    work.req = submit(work.engine, 3);
    cudaSetDevice(0);
    step_all(&work);
    assert_answer(work.req, &want[3]);
    on_a_thread(close_it, &work);
    assert_int_equal(shim_live.memory, 0);
    assert_int_equal(shim_live.streams, 0);
}


/* The same of a device that nothing was reserved on. */
static void
test_bare(void **unused)
{
    engine_t *engine = open_on("cuda:0");
    const op_open_t second = { .device = 1 };
    op_err_t err = { "" };
    op_dev_t *dev = engine->ops->open(&second, &err);

    (void) unused;
    assert_non_null(dev);
    cudaSetDevice(0);
    assert_int_equal(engine->ops->check(dev, &err), 0);
    cudaSetDevice(0);
    engine->ops->close(dev);
    engine_close(engine);
}


static void
test_one_dies(void **unused)
{
    engine_t *dies = open_on("cuda:0"), *lives = open_on("cuda:1");
    request_t *lost = submit(dies, 0), *req = submit(lives, 1);

    (void) unused;
    shim_fail_at(SHIM_FAIL_ASYNC, 1);

    while (engine_step(dies)) {
    }

    assert_true(dies->failed);
    assert_false(lost->finished);
    run_all(lives);
    assert_false(lives->failed);
    assert_answer(req, &want[1]);
    engine_close(dies);

    /* while the other one is still dead */
    req = submit(lives, 3);
    run_all(lives);
    assert_answer(req, &want[3]);
    engine_close(lives);

    cudaSetDevice(0);
    cudaDeviceReset();
    step_in_turn();
}


/* An engine's memory is that of its GPU, whichever is the thread's now. */
static void
test_memory(void **unused)
{
    shim_options_t *shim = shim_options();
    engine_t *engines[2] = { open_on("cuda:0"), open_on("cuda:1") };
    size_t room[2];

    (void) unused;
    shim->others[0] = shim->memory / 2;

    for (int i = 0; i < 2; i++) {
        room[i] = engines[i]->ops->memory(engines[i]->dev).free;
    }

    assert_true(room[0] < shim->memory / 2 && room[1] > shim->memory / 2);

    /* what they have is as much, and given back to where it is from */
    assert_int_equal(room[1] - room[0], shim->memory / 2);
    engine_close(engines[0]);
    assert_int_equal(engines[1]->ops->memory(engines[1]->dev).free, room[1]);
    engine_close(engines[1]);
}


static void
assert_taken(const char *device, const char *gpu)
{
    engine_t *engine = open_on(device);

    assert_on(engine, gpu);
    engine_close(engine);
}


/* Without a number it is the one with most free memory, of equals the first. */
static void
test_roomiest(void **unused)
{
    shim_options_t *shim = shim_options();

    (void) unused;
    assert_taken("cuda", "GPU 0");
    shim->others[0] = shim->memory / 2;
    assert_taken("cuda", "GPU 1");
    assert_taken("auto", "GPU 1");
    assert_taken("cuda:0", "GPU 0");
    shim->others[0] = shim->memory;
    assert_taken("cuda", "GPU 1");
    shim->others[1] = shim->memory / 2;
    shim->others[0] = shim->memory / 4;
    assert_taken("auto", "GPU 0");
}


static void
refuse(const char *device, const char *begins, const char *says)
{
    llm_err_t err;

    refused(device, NULL, &err);

    if (strncmp(err.text, begins, strlen(begins)) != 0
        || strstr(err.text, says) == NULL)
    {
        fail_msg("\"%s\" does not say \"%s … %s\"", err.text, begins, says);
    }

    assert_int_equal(shim_live.memory, 0);
    assert_int_equal(shim_live.streams, 0);
}


static void
test_refusals(void **unused)
{
    shim_options_t *shim = shim_options();

    (void) unused;
    refuse("cuda:2", "device cuda:2: there is no GPU 2",
           "this process sees 2, counted from 0");

    shim->others[1] = shim->memory - (1 << 20);
    refuse("cuda:1", "device cuda:1 (GPU 1): ", "only 1.0 MiB are free");
    shim->others[1] = shim->memory;
    refuse("cuda:1", "device cuda:1: GPU 1 ", "has no memory left");
    assert_taken("cuda:0", "GPU 0");
    shim->others[0] = shim->memory;
    refuse("cuda", "device cuda: none of the 2 GPUs can be used",
           "no memory left");
    memset(shim->others, 0, sizeof(shim->others));

    shim->device = "80,70";
    refuse("cuda:1", "device cuda:1: GPU 1 (",
           "has compute capability 7.0, but 7.5 is needed");
    assert_taken("cuda:0", "GPU 0");
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_in_turn, two, one),
        cmocka_unit_test_setup_teardown(test_threads, two, one),
        cmocka_unit_test_setup_teardown(test_bare, two, one),
        cmocka_unit_test_setup_teardown(test_one_dies, two, one),
        cmocka_unit_test_setup_teardown(test_memory, two, one),
        cmocka_unit_test_setup_teardown(test_roomiest, two, one),
        cmocka_unit_test_setup_teardown(test_refusals, two, one),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, ask_alone, forget);
}
