/*
 * The CPU backend's thread pool: one parallel-for at a time.
 *
 * The thread that calls cpu_pool_run() is thread 0 and works too.  The others
 * spin for a bounded time between two runs, because the ops of a step follow
 * each other within microseconds, and sleep in a futex when nothing comes.
 * How work is split never changes a result: every output has one owner and
 * one order of operations (op.h, Exactness).
 */

#ifndef KERNELS_CPU_CPU_POOL_H
#define KERNELS_CPU_CPU_POOL_H

#include <stdbool.h>

enum { CPU_POOL_MAX = 1024 }; /* threads */

typedef struct cpu_pool_s cpu_pool_t;

typedef void (*cpu_pool_fn)(void *arg, int thread, int n_threads);

/* CPUs this process may use: its affinity mask, cut by the cgroup quota
 * (rounded up, at least 1). */
int cpu_pool_online(void);

/* CPUs the cgroups named in a /proc/PID/cgroup file allow under the mount
 * `root`, versions 1 and 2, rounded up; 0: no limit.  For cpu_pool_online()
 * and its test. */
int cpu_pool_quota(const char *cgroup_file, const char *root);

/* A pool of `threads` threads, the caller included; 0: cpu_pool_online().
 * NULL: no memory or no threads. */
cpu_pool_t *cpu_pool_create(int threads);

/* Joins the threads.  No run may be in progress.  NULL is allowed. */
void cpu_pool_destroy(cpu_pool_t *pool);

int cpu_pool_threads(const cpu_pool_t *pool);

/* Gives each worker a CPU of its own, the last ones of the process's mask; the
 * caller, whose threads inherit its mask, keeps all of it.  Only when threads
 * and `reserved` CPUs together are as many as the mask has: with fewer threads
 * somebody else may count on the rest, and two such pools would meet on the
 * same CPUs.  False: nothing was done. */
bool cpu_pool_pin(cpu_pool_t *pool, int reserved);

/* Calls fn(arg, t, n_threads) once for each t in 0 … n_threads − 1 and returns
 * when all are done; what they wrote is then visible.  Usually each t is on a
 * thread of its own, but one thread may do several after one another, so fn
 * must not wait for another t.  One caller at a time, not from inside a run. */
void cpu_pool_run(cpu_pool_t *pool, cpu_pool_fn fn, void *arg);

/* The half-open share [*from, *to) of n units that thread t of n_threads
 * owns, in multiples of `grain` units. */
static inline void
cpu_pool_share(int n, int grain, int thread, int n_threads, int *from, int *to)
{
    const long units = ((long) n + grain - 1) / grain;
    const long hi = units * (thread + 1) / n_threads * grain;

    *from = (int) (units * thread / n_threads * grain);
    *to = hi < n ? (int) hi : n;
}

#endif /* KERNELS_CPU_CPU_POOL_H */
