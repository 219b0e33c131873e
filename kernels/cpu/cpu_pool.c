/*
 * The CPU backend's thread pool, and how many CPUs it may use.
 *
 * A run bumps the generation `go`; each worker waits for a new generation,
 * claims its share, calls the function and counts `pending` down.  The caller
 * takes the shares of workers that have not begun when its own is done: on a
 * busy machine, or after a sleep, a worker can be milliseconds late, and a run
 * must only ever wait for work in progress.  Waiting spins first, because
 * the products of a step are microseconds apart and a futex wake costs tens of
 * them, then sleeps, because the CPUs belong to nginx too.  Workers are not
 * pinned unless asked: an engine that drains beside its successor, or a busy
 * nginx worker, would otherwise be stuck behind a spinning thread on one CPU
 * while another is free.  They inherit the caller's affinity mask.
 */

#include "kernels/cpu/cpu_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_NS = 60 * 1000,  /* a worker, for the next run */
    YIELD_NS = 20 * 1000, /* the caller, for the last worker */
    SPIN_BURST = 64       /* pauses between two looks at the clock */
};

struct cpu_pool_s {
    /* Written by the caller, read by the workers. */
    _Alignas(64) atomic_uint go;
    cpu_pool_fn fn;
    void *arg;
    int n_threads;
    atomic_bool quit;

    _Alignas(64) atomic_int pending; /* workers still in this run */
    _Alignas(64) atomic_int asleep;  /* workers in, or about to enter, futex */

    /* [n_threads] the last run in which share t was taken */
    atomic_uint *claimed;

    pthread_t *threads;
    int n_started;
};

typedef struct {
    cpu_pool_t *pool;
    int index;
} worker_t;


static inline void
cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}


static long
now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * 1000000000L + ts.tv_nsec;
}


static unsigned
wait_for_run(cpu_pool_t *pool, unsigned seen)
{
    unsigned go;
    long until = 0;

    for (;;) {
        for (int i = 0; i < SPIN_BURST; i++) {
            go = atomic_load_explicit(&pool->go, memory_order_acquire);
            if (go != seen) {
                return go;
            }
            cpu_relax();
        }

        const long now = now_ns();
        if (until == 0) {
            until = now + SPIN_NS;
        } else if (now >= until) {
            break;
        }
    }

    /* Sequentially consistent on both sides: either the caller sees us in
     * `asleep` after its store to `go`, or the kernel sees the new `go`. */
    atomic_fetch_add(&pool->asleep, 1);
    while ((go = atomic_load(&pool->go)) == seen) {
        syscall(SYS_futex, &pool->go, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&pool->asleep, 1);

    return go;
}


/* Whether the caller gets share `index` of this run.  Every run takes every
 * share once, so a thread that comes late finds its share ahead of it. */
static bool
claim(cpu_pool_t *pool, int index, unsigned run)
{
    unsigned before = run - 1;

    return atomic_load_explicit(&pool->claimed[index], memory_order_relaxed)
               == before
           && atomic_compare_exchange_strong_explicit(
               &pool->claimed[index], &before, run, memory_order_acq_rel,
               memory_order_relaxed);
}


static void *
worker_main(void *data)
{
    const worker_t self = *(worker_t *) data;
    cpu_pool_t *pool = self.pool;
    unsigned seen = 0;

    free(data);

    for (;;) {
        seen = wait_for_run(pool, seen);

        if (atomic_load_explicit(&pool->quit, memory_order_relaxed)) {
            return NULL;
        }

        if (claim(pool, self.index, seen)) {
            pool->fn(pool->arg, self.index, pool->n_threads);
            atomic_fetch_sub_explicit(&pool->pending, 1, memory_order_release);
        }
    }
}


static unsigned
start_run(cpu_pool_t *pool)
{
    const unsigned run = atomic_fetch_add(&pool->go, 1) + 1;

    if (atomic_load(&pool->asleep) > 0) {
        syscall(SYS_futex, &pool->go, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL,
                0);
    }

    return run;
}


static int
start_worker(cpu_pool_t *pool, int index)
{
    char name[24]; /* the kernel takes 15; CPU_POOL_MAX fits */
    worker_t *worker = malloc(sizeof(worker_t));

    if (worker == NULL) {
        return -1;
    }

    worker->pool = pool;
    worker->index = index;

    if (pthread_create(&pool->threads[index - 1], NULL, worker_main, worker)
        != 0) {
        free(worker);
        return -1;
    }

    snprintf(name, sizeof(name), "llm-cpu-%d", index);
    pthread_setname_np(pool->threads[index - 1], name);
    pool->n_started++;
    return 0;
}


cpu_pool_t *
cpu_pool_create(int threads)
{
    cpu_pool_t *pool;
    sigset_t all, old;
    int rc = 0;

    if (threads == 0) {
        threads = cpu_pool_online();
    }
    if (threads < 1 || threads > CPU_POOL_MAX) {
        return NULL;
    }

    pool = aligned_alloc(64, sizeof(cpu_pool_t));
    if (pool == NULL) {
        return NULL;
    }
    memset(pool, 0, sizeof(cpu_pool_t));
    pool->n_threads = threads;
    pool->threads = calloc((size_t) threads, sizeof(pthread_t));
    pool->claimed = calloc((size_t) threads, sizeof(atomic_uint));
    if (pool->threads == NULL || pool->claimed == NULL) {
        cpu_pool_destroy(pool);
        return NULL;
    }

    /* Signals are the business of the thread that made the pool. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 1; i < threads && rc == 0; i++) {
        rc = start_worker(pool, i);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);

    if (rc != 0) {
        cpu_pool_destroy(pool);
        return NULL;
    }

    return pool;
}


void
cpu_pool_destroy(cpu_pool_t *pool)
{
    if (pool == NULL) {
        return;
    }

    atomic_store(&pool->quit, true);
    start_run(pool);
    for (int i = 0; i < pool->n_started; i++) {
        pthread_join(pool->threads[i], NULL);
    }

    free(pool->claimed);
    free(pool->threads);
    free(pool);
}


int
cpu_pool_threads(const cpu_pool_t *pool)
{
    return pool->n_threads;
}


static void
wait_for_workers(cpu_pool_t *pool)
{
    long until = 0;
    int i = 0;

    while (atomic_load_explicit(&pool->pending, memory_order_acquire) > 0) {
        cpu_relax();
        if (++i % SPIN_BURST != 0) {
            continue;
        }

        /* A worker without a CPU may be waiting for this very one. */
        const long now = now_ns();
        if (until == 0) {
            until = now + YIELD_NS;
        } else if (now >= until) {
            sched_yield();
        }
    }
}


void
cpu_pool_run(cpu_pool_t *pool, cpu_pool_fn fn, void *arg)
{
    const int n = pool->n_threads;
    int helped = 0;

    if (n == 1) {
        fn(arg, 0, 1);
        return;
    }

    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->pending, n - 1, memory_order_relaxed);

    const unsigned run = start_run(pool);
    fn(arg, 0, n);

    for (int i = n - 1; i > 0; i--) {
        if (claim(pool, i, run)) {
            fn(arg, i, n);
            helped++;
        }
    }

    atomic_fetch_sub_explicit(&pool->pending, helped, memory_order_relaxed);
    wait_for_workers(pool);
}


/* --- how many CPUs --- */

static long
read_long(const char *path, long *second)
{
    char text[64];
    long first = -1;
    FILE *file = fopen(path, "re");

    if (file == NULL) {
        return -1;
    }

    /* "max 100000" leaves first at -1: no limit. */
    if (fgets(text, sizeof(text), file) != NULL) {
        char *end;
        const long value = strtol(text, &end, 10);

        if (end != text) {
            first = value;
            if (second != NULL) {
                *second = strtol(end, NULL, 10);
            }
        }
    }

    fclose(file);
    return first;
}


static int
quota_of(const char *dir, int v2)
{
    char path[2 * PATH_MAX];
    long quota, period = 0;

    if (v2) {
        snprintf(path, sizeof(path), "%s/cpu.max", dir);
        quota = read_long(path, &period);
    } else {
        snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
        quota = read_long(path, NULL);
        snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
        period = read_long(path, NULL);
    }

    if (quota <= 0 || period <= 0) {
        return 0;
    }

    const long cpus = (quota + period - 1) / period;
    return cpus > CPU_POOL_MAX ? CPU_POOL_MAX : (int) cpus;
}


/* The tightest quota of a group and of all groups around it.  `path` is cut. */
static int
quota_up(const char *root, char *path, int v2)
{
    char dir[PATH_MAX + 64];
    int best = 0;

    for (;;) {
        char *slash;

        snprintf(dir, sizeof(dir), "%s%s", root, path);
        const int cpus = quota_of(dir, v2);
        if (cpus > 0 && (best == 0 || cpus < best)) {
            best = cpus;
        }

        slash = strrchr(path, '/');
        if (slash == NULL) {
            return best;
        }
        *slash = '\0';
    }
}


int
cpu_pool_quota(const char *cgroup_file, const char *root)
{
    char line[PATH_MAX], mount[PATH_MAX];
    int best = 0;
    FILE *file = fopen(cgroup_file, "re");

    if (file == NULL) {
        return 0;
    }

    /* Lines are "id:controllers:path"; version 2 has id 0 and no names. */
    while (fgets(line, sizeof(line), file) != NULL) {
        char *names = strchr(line, ':');
        char *path = names == NULL ? NULL : strchr(names + 1, ':');
        int cpus = 0;

        if (path == NULL) {
            continue;
        }
        *path++ = '\0';
        names++;
        path[strcspn(path, "\n")] = '\0';

        if (*names == '\0') {
            cpus = quota_up(root, path, 1);
        } else if (strcmp(names, "cpu") == 0
                   || strcmp(names, "cpu,cpuacct") == 0
                   || strcmp(names, "cpuacct,cpu") == 0)
        {
            snprintf(mount, sizeof(mount), "%s/cpu", root);
            cpus = quota_up(mount, path, 0);
        }

        if (cpus > 0 && (best == 0 || cpus < best)) {
            best = cpus;
        }
    }

    fclose(file);
    return best;
}


/* The caller's affinity mask, to be freed by CPU_FREE; NULL: unknown. */
static cpu_set_t *
read_mask(size_t *size)
{
    /* The kernel's mask may be wider than cpu_set_t. */
    for (int cpus = 1024; cpus <= 64 * 1024; cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(cpus);

        if (set == NULL) {
            return NULL;
        }

        *size = CPU_ALLOC_SIZE(cpus);
        CPU_ZERO_S(*size, set);

        if (sched_getaffinity(0, *size, set) == 0) {
            return set;
        }

        CPU_FREE(set);
    }

    return NULL;
}


int
cpu_pool_online(void)
{
    size_t size;
    cpu_set_t *set = read_mask(&size);
    int n = 1;

    if (set != NULL) {
        n = CPU_COUNT_S(size, set);
        CPU_FREE(set);
    }

    const int quota = cpu_pool_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    if (quota > 0 && quota < n) {
        n = quota;
    }
    if (n > CPU_POOL_MAX) {
        n = CPU_POOL_MAX;
    }

    return n < 1 ? 1 : n;
}


/* One CPU each, in the mask's order, behind those reserved and one for the
 * caller. */
static bool
pin_workers(const cpu_pool_t *pool, const cpu_set_t *mask, size_t size,
            int reserved)
{
    cpu_set_t *one = CPU_ALLOC(size * 8);
    int worker = -1 - reserved;
    int rc = one == NULL ? -1 : 0;

    for (size_t cpu = 0; rc == 0 && cpu < size * 8; cpu++) {
        if (!CPU_ISSET_S(cpu, size, mask)) {
            continue;
        }

        if (worker >= 0) {
            CPU_ZERO_S(size, one);
            CPU_SET_S(cpu, size, one);
            rc = pthread_setaffinity_np(pool->threads[worker], size, one);
        }

        worker++;
    }

    CPU_FREE(one);

    return rc == 0;
}


bool
cpu_pool_pin(cpu_pool_t *pool, int reserved)
{
    size_t size;
    cpu_set_t *mask = read_mask(&size);
    bool pinned = false;

    if (mask != NULL && CPU_COUNT_S(size, mask) == pool->n_threads + reserved) {
        pinned = pin_workers(pool, mask, size, reserved);
    }

    for (int i = 0; mask != NULL && !pinned && i < pool->n_started; i++) {
        pthread_setaffinity_np(pool->threads[i], size, mask);
    }

    CPU_FREE(mask);

    return pinned;
}
