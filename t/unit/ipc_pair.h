/*
 * Two sides over one real segment, for the stress tests: the parent is the
 * worker, a forked child the engine.  Under ThreadSanitizer, which sees one
 * process only, the engine is a thread and the counts are smaller.
 *
 * Included by one file of a test program; the functions are static for that.
 */

#ifndef T_UNIT_IPC_PAIR_H
#define T_UNIT_IPC_PAIR_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/ipc/shm.h"

#if defined(__SANITIZE_THREAD__)
#define THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS 1
#endif
#endif

#ifndef THREADS
#define THREADS 0
#endif

enum {
    SLOTS = 8,
    LONGEST = 6000, /* bytes of a record */
};

typedef struct {
    llm_shm_t shm;
    int engine_bell;
    int worker_bell;
    uint64_t seed;
} pair_t;


static uint32_t
random_below(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407;
    return (uint32_t) (*state >> 33) % n;
}


/* --- the two sides run --- */

typedef struct {
    pair_t *pair;
    const char *(*engine)(pair_t *);
    const char *wrong;
} engine_run_t;


static void *
engine_thread(void *arg)
{
    engine_run_t *run = arg;

    run->wrong = run->engine(run->pair);

    return NULL;
}


/* Runs both sides to their end; each returns what went wrong, or NULL. */
static void
run_pair(const char *(*engine)(pair_t *), const char *(*worker)(pair_t *),
         pair_t *pair)
{
    engine_run_t run = { pair, engine, NULL };
    const char *wrong;

    if (THREADS) {
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, engine_thread, &run), 0);
        wrong = worker(pair);
        pthread_join(thread, NULL);

    } else {
        pid_t pid = fork();
        int status;

        assert_int_not_equal(pid, -1);

        if (pid == 0) {
            engine_thread(&run);
            if (run.wrong != NULL) {
                printf("# engine: %s\n", run.wrong);
                fflush(stdout);
            }
            _exit(run.wrong != NULL);
        }

        wrong = worker(pair);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }

    if (wrong != NULL) {
        fail_msg("worker: %s", wrong);
    }

    if (run.wrong != NULL) {
        fail_msg("engine: %s", run.wrong);
    }
}


static int
setup(void **state)
{
    static pair_t pair;
    static uint64_t seed;
    const llm_geometry_t geo = { 2, SLOTS, 4096, 16384, 64 };
    const char *given = getenv("LLM_TEST_SEED");
    char err[256];

    if (seed == 0) {
        seed = given != NULL ? strtoull(given, NULL, 0) : (uint64_t) time(NULL);
        printf("# LLM_TEST_SEED=%llu\n", (unsigned long long) seed);
        fflush(stdout);
    }

    pair.seed = seed;
    pair.engine_bell = eventfd(0, EFD_CLOEXEC);
    pair.worker_bell = eventfd(0, EFD_CLOEXEC);
    *state = &pair;

    return llm_shm_create(&geo, &pair.shm, err, sizeof(err));
}


static int
teardown(void **state)
{
    pair_t *pair = *state;
    int fd = pair->shm.fd;

    llm_shm_detach(&pair->shm);
    close(pair->engine_bell);
    close(pair->worker_bell);

    return close(fd);
}


#define pair_test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

#endif /* T_UNIT_IPC_PAIR_H */
