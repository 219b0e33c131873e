/*
 * The CPU thread pool: every share once, whatever the threads do; sleeping and
 * waking; and the CPU count from made-up cgroup trees.
 */

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_pool.h"
#include "kernels/op/op.h"

enum { MAX_THREADS = 8, SLOTS = 1024 };

/* Plain memory on purpose: a race on it is a finding of TSan. */
typedef struct {
    int value[SLOTS];
    int calls[MAX_THREADS];
    int n_threads;
    int delay_us; /* share t sleeps t times this */
} job_t;


static void
add_one(void *arg, int thread, int n_threads)
{
    job_t *job = arg;
    int from, to;

    if (job->delay_us > 0) {
        usleep((useconds_t) (job->delay_us * thread));
    }

    job->calls[thread]++;
    if (thread == 0) {
        job->n_threads = n_threads;
    }

    cpu_pool_share(SLOTS, 1, thread, n_threads, &from, &to);
    for (int i = from; i < to; i++) {
        job->value[i]++;
    }
}


static void
check_runs(cpu_pool_t *pool, job_t *job, int runs)
{
    const int threads = cpu_pool_threads(pool);
    const int before = job->value[0];

    for (int r = 0; r < runs; r++) {
        cpu_pool_run(pool, add_one, job);
        assert_int_equal(job->value[r % SLOTS], before + r + 1);
    }

    assert_int_equal(job->n_threads, threads);
    for (int i = 0; i < SLOTS; i++) {
        assert_int_equal(job->value[i], before + runs);
    }
    for (int t = 0; t < MAX_THREADS; t++) {
        assert_int_equal(job->calls[t], t < threads ? before + runs : 0);
    }
}


static void
test_every_share_once(void **unused)
{
    (void) unused;

    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        job_t job = { .delay_us = 0 };
        cpu_pool_t *pool = cpu_pool_create(threads);

        assert_non_null(pool);
        assert_int_equal(cpu_pool_threads(pool), threads);
        check_runs(pool, &job, threads <= 2 ? 20000 : 500);
        cpu_pool_destroy(pool);
    }
}


/* Pauses longer than the spin, so that workers sleep and are woken, and
 * pauses about as long as it, so that the two cross. */
static void
test_sleep_and_wake(void **unused)
{
    static const int pauses_us[] = { 0, 40, 55, 60, 65, 80, 3000 };
    job_t job = { .delay_us = 0 };
    cpu_pool_t *pool = cpu_pool_create(3);

    (void) unused;

    assert_non_null(pool);
    for (size_t i = 0; i < sizeof(pauses_us) / sizeof(pauses_us[0]); i++) {
        for (int r = 0; r < 60; r++) {
            usleep((useconds_t) pauses_us[i]);
            check_runs(pool, &job, 3);
        }
    }
    cpu_pool_destroy(pool);
}


/* The run returns only when a worker in the middle of its share is done. */
static void
test_slow_workers(void **unused)
{
    job_t job = { .delay_us = 2000 };
    cpu_pool_t *pool = cpu_pool_create(4);

    (void) unused;

    assert_non_null(pool);
    check_runs(pool, &job, 20);
    cpu_pool_destroy(pool);
}


static void
test_create_and_destroy(void **unused)
{
    (void) unused;

    for (int i = 0; i < 100; i++) {
        cpu_pool_t *pool = cpu_pool_create(1 + i % 5);

        assert_non_null(pool);
        if (i % 3 == 0) {
            job_t job = { .delay_us = 0 };

            check_runs(pool, &job, 2);
        }
        cpu_pool_destroy(pool);
    }

    cpu_pool_destroy(NULL);
    assert_null(cpu_pool_create(-1));
    assert_null(cpu_pool_create(CPU_POOL_MAX + 1));
}


static void
test_share(void **unused)
{
    (void) unused;

    for (int n = 0; n < 70; n++) {
        for (int grain = 1; grain < 20; grain += 3) {
            for (int threads = 1; threads < 9; threads++) {
                int next = 0;

                for (int t = 0; t < threads; t++) {
                    int from, to;

                    cpu_pool_share(n, grain, t, threads, &from, &to);
                    assert_true(from == to || from == next);
                    assert_true(from % grain == 0 && from <= to);
                    next = to > next ? to : next;
                }
                assert_int_equal(next, n);
            }
        }
    }
}


/* --- cgroups --- */

static char root[] = "/tmp/llm_pool_test_XXXXXX";


static void
write_file(const char *name, const char *text)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *p = path + strlen(root) + 1; *p != '\0'; p++) {
        if (*p == '/') {
            *p = '\0';
            mkdir(path, 0700);
            *p = '/';
        }
    }

    FILE *file = fopen(path, "w");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}


static int
quota(const char *cgroup)
{
    char path[512];

    write_file("cgroup", cgroup);
    snprintf(path, sizeof(path), "%s/cgroup", root);
    return cpu_pool_quota(path, root);
}


static void
test_quota(void **unused)
{
    (void) unused;

    assert_non_null(mkdtemp(root));

    /* version 2 */
    write_file("cpu.max", "max 100000\n");
    write_file("a/cpu.max", "250000 100000\n");
    write_file("a/b/cpu.max", "max 100000\n");
    write_file("a/c/cpu.max", "150000 100000\n");
    assert_int_equal(quota("0::/\n"), 0);
    assert_int_equal(quota("0::/a\n"), 3);
    assert_int_equal(quota("0::/a/b\n"), 3); /* the one around it */
    assert_int_equal(quota("0::/a/c\n"), 2); /* the tighter */
    assert_int_equal(quota("0::/gone/away\n"), 0);
    assert_int_equal(quota("0::/a/c/gone\n"), 2);

    /* version 1 */
    write_file("cpu/cpu.cfs_quota_us", "-1\n");
    write_file("cpu/cpu.cfs_period_us", "100000\n");
    write_file("cpu/x/cpu.cfs_quota_us", "50000\n");
    write_file("cpu/x/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota("4:memory:/x\n1:cpu:/\n"), 0);
    assert_int_equal(quota("4:memory:/a\n3:cpu,cpuacct:/x\n"), 1);
    assert_int_equal(quota("3:cpuacct,cpu:/x\n0::/a\n"), 1);
    assert_int_equal(quota("3:cpuset:/x\n"), 0);

    /* nonsense */
    assert_int_equal(quota(""), 0);
    assert_int_equal(quota("::\n:\nx\n"), 0);
    write_file("n/cpu.max", "-5 0\n");
    assert_int_equal(quota("0::/n\n"), 0);
    write_file("n/cpu.max", "\n");
    assert_int_equal(quota("0::/n\n"), 0);
    write_file("n/cpu.max", "999999999999 1\n");
    assert_int_equal(quota("0::/n\n"), CPU_POOL_MAX);
    assert_int_equal(cpu_pool_quota("/nonexistent", root), 0);

    char command[600];

    snprintf(command, sizeof(command), "rm -r %s", root);
    assert_int_equal(system(command), 0);
}


static void
test_online(void **unused)
{
    const int n = cpu_pool_online();
    cpu_pool_t *pool = cpu_pool_create(0);

    (void) unused;

    assert_true(n >= 1 && n <= sysconf(_SC_NPROCESSORS_CONF));
    assert_non_null(pool);
    assert_int_equal(cpu_pool_threads(pool), n);
    cpu_pool_destroy(pool);
}


/* --- pinning --- */

typedef struct {
    pthread_t caller;
    atomic_int seen; /* CPUs in the mask of a worker; 0: none came yet */
    atomic_int cpu;  /* the last of them */
} mask_job_t;


/* Shares of a worker that comes late are the caller's. */
static void
look_at_mask(void *arg, int thread, int n_threads)
{
    mask_job_t *job = arg;
    cpu_set_t set;

    (void) n_threads;

    if (pthread_equal(pthread_self(), job->caller)) {
        usleep(thread == 0 ? 1000 : 0);
        return;
    }

    assert_int_equal(sched_getaffinity(0, sizeof(set), &set), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &set)) {
            job->cpu = cpu;
        }
    }
    job->seen = CPU_COUNT(&set);
}


/* Workers' CPUs in a pool of n threads, asked to be pinned. */
static int
pinned_cpus(int n, int reserved, bool expected, int *cpu)
{
    mask_job_t job = { .caller = pthread_self() };
    cpu_pool_t *pool = cpu_pool_create(n);

    assert_non_null(pool);
    assert_int_equal(cpu_pool_pin(pool, reserved), expected);

    for (int i = 0; n > 1 && job.seen == 0; i++) {
        assert_true(i < 10000);
        cpu_pool_run(pool, look_at_mask, &job);
    }

    cpu_pool_destroy(pool);
    *cpu = job.cpu;

    return job.seen;
}


static void
test_pin(void **unused)
{
    cpu_set_t before, after, two;
    int cpu, n = 0, last = 0;

    (void) unused;

    assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);

    /* at most two of them, so that the last one is the only worker's */
    CPU_ZERO(&two);
    for (int i = 0; i < CPU_SETSIZE && n < 2; i++) {
        if (CPU_ISSET(i, &before)) {
            CPU_SET(i, &two);
            last = i;
            n++;
        }
    }
    assert_int_equal(sched_setaffinity(0, sizeof(two), &two), 0);

    if (n == 2) {
        assert_int_equal(pinned_cpus(2, 0, true, &cpu), 1);
        assert_int_equal(cpu, last);
        assert_int_equal(pinned_cpus(1, 1, true, &cpu), 0); /* no worker */
        assert_int_equal(pinned_cpus(2, 1, false, &cpu), 2);
    }

    /* not as many threads as CPUs */
    assert_int_equal(pinned_cpus(n + 1, 0, false, &cpu), n);
    assert_int_equal(pinned_cpus(1, n, false, &cpu), 0);

    /* the caller is left alone */
    assert_int_equal(sched_getaffinity(0, sizeof(after), &after), 0);
    assert_true(CPU_EQUAL(&two, &after));
    assert_int_equal(sched_setaffinity(0, sizeof(before), &before), 0);
}


static void
test_reserved(void **unused)
{
    const op_table_t *ops = backend_find("cpu");
    const int n = cpu_pool_online();
    op_err_t err;
    char count[32];

    (void) unused;

    for (int reserved = 0; reserved < n + 2; reserved++) {
        const op_open_t params = { .reserved = reserved };
        op_dev_t *dev = ops->open(&params, &err);
        const int left = n - reserved > 1 ? n - reserved : 1;

        assert_non_null(dev);
        snprintf(count, sizeof(count), ", %d thread%s", left,
                 left == 1 ? "" : "s");
        assert_string_equal(strchr(ops->describe(dev), ','), count);
        ops->close(dev);
    }

    /* a number of threads is meant as it is */
    const op_open_t both = { .threads = 3, .reserved = 1, .pinned = true };
    op_dev_t *dev = ops->open(&both, &err);

    assert_non_null(dev);
    assert_non_null(strstr(ops->describe(dev), ", 3 threads, "));
    ops->close(dev);

    const op_open_t bad = { .reserved = -1 };

    assert_null(ops->open(&bad, &err));
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_share_once),
        cmocka_unit_test(test_sleep_and_wake),
        cmocka_unit_test(test_slow_workers),
        cmocka_unit_test(test_create_and_destroy),
        cmocka_unit_test(test_share),
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_online),
        cmocka_unit_test(test_pin),
        cmocka_unit_test(test_reserved),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
