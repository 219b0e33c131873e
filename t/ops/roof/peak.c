/*
 * Reads and products that do nothing else.  Called by roofline.
 *
 * The test programs are compiled for any x86-64; what needs more is said at
 * the function.  A read uses the registers that the kernels use, because the
 * second level cache gives a narrow load half the bytes a cycle.
 */

#include "t/ops/roof/peak.h"

#include <stdatomic.h>

#include "kernels/cpu/cpu_dot.h"

enum {
    STEP = 256, /* bytes that a stream advances at a time */
    DOT_LOOPS = 100000,
    DOT_CHAINS = 10 /* latency × throughput of any unit so far */
};

const read_way_t read_ways[READ_WAYS] = {
    { 1, 0 }, { 1, 2048 }, { 1, 4096 }, { 2, 0 }, { 2, 2048 }, { 2, 4096 },
    { 4, 0 }, { 4, 2048 }, { 4, 4096 }, { 8, 0 }, { 8, 2048 }, { 8, 4096 },
};

typedef uint64_t narrow_t __attribute__((vector_size(32)));
typedef uint64_t wide_t __attribute__((vector_size(64)));

typedef struct {
    const extent_t *extents;
    int n;
    const read_way_t *way;
    int wide;
    atomic_size_t bytes;
} read_job_t;

static _Atomic uint64_t sink;


/* One function for each width: 4 lines of each stream in turn. */
#define READ(name, vector, isa)                                               \
    isa static void name(const uint8_t *p, size_t len, const read_way_t *way) \
    {                                                                         \
        vector sum[4] = { { 0 } };                                            \
                                                                              \
        for (size_t at = 0; at < len; at += STEP) {                           \
            for (int s = 0; s < way->streams; s++) {                          \
                const uint8_t *q = p + (size_t) s * len + at;                 \
                                                                              \
                if (way->ahead > 0) {                                         \
                    for (int k = 0; k < STEP; k += 64) {                      \
                        __builtin_prefetch(q + way->ahead + k);               \
                    }                                                         \
                }                                                             \
                                                                              \
                UNROLL                                                        \
                for (int k = 0; k < STEP / (int) sizeof(vector); k++) {       \
                    sum[k % 4] ^= ((const vector *) q)[k];                    \
                }                                                             \
            }                                                                 \
        }                                                                     \
                                                                              \
        sum[0] ^= sum[1] ^ sum[2] ^ sum[3];                                   \
        sink = sum[0][0] ^ sum[0][sizeof(vector) / 8 - 1];                    \
    }

#if defined(__x86_64__)
READ(read_wide, wide_t, __attribute__((target("avx512f"))))
READ(read_narrow, narrow_t, __attribute__((target("avx2"))))
#else
#define read_wide read_plain
#define read_narrow read_plain
#endif
READ(read_plain, narrow_t, )


static void
read_run(void *arg, int thread, int n_threads)
{
    read_job_t *job = arg;
    const size_t streams = (size_t) job->way->streams;
    size_t bytes = 0;

    for (int i = 0; i < job->n; i++) {
        const extent_t *e = &job->extents[i];
        const size_t share = e->bytes / (size_t) n_threads / 64 * 64;
        const size_t len = share / streams / STEP * STEP;
        const uint8_t *p = e->data + (size_t) thread * share;

        if (job->wide >= CPU_ISA_AVX512) {
            read_wide(p, len, job->way);
        } else if (job->wide == CPU_ISA_AVX2) {
            read_narrow(p, len, job->way);
        } else {
            read_plain(p, len, job->way);
        }

        bytes += len * streams;
    }

    atomic_fetch_add(&job->bytes, bytes);
}


size_t
peak_read(op_dev_t *dev, const extent_t *extents, int n, const read_way_t *way)
{
    read_job_t job = {
        .extents = extents, .n = n, .way = way, .wide = dev->isa
    };

    cpu_pool_run(dev->pool, read_run, &job);

    return job.bytes;
}


#if defined(__x86_64__)

/* 16 × 4 products and as many additions in one instruction. */
__attribute__((target("avx512f"))) static void
dots_wide(void *arg, int thread, int n_threads)
{
    wide_t acc[DOT_CHAINS] = { { 0 } };
    wide_t x = { 0 };

    (void) arg;
    (void) thread;
    (void) n_threads;

    for (int i = 0; i < DOT_LOOPS; i++) {
        UNROLL
        for (int k = 0; k < DOT_CHAINS; k++) {
            __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(acc[k]) : "v"(x));
        }
    }

    UNROLL
    for (int k = 1; k < DOT_CHAINS; k++) {
        acc[0] ^= acc[k];
    }

    sink = acc[0][0];
}


/* The 8 × 4 products of AVX2 take three instructions. */
__attribute__((target("avx2"))) static void
dots_narrow(void *arg, int thread, int n_threads)
{
    narrow_t acc[DOT_CHAINS] = { { 0 } };
    narrow_t x = { 0 }, t;

    (void) arg;
    (void) thread;
    (void) n_threads;

    for (int i = 0; i < DOT_LOOPS; i++) {
        UNROLL
        for (int k = 0; k < DOT_CHAINS; k++) {
            __asm__ volatile("vpmaddubsw %2, %2, %1\n\t"
                             "vpmaddwd %2, %1, %1\n\t"
                             "vpaddd %1, %0, %0"
                             : "+x"(acc[k]), "=&x"(t)
                             : "x"(x));
        }
    }

    UNROLL
    for (int k = 1; k < DOT_CHAINS; k++) {
        acc[0] ^= acc[k];
    }

    sink = acc[0][0];
}

#endif


double
peak_dots(op_dev_t *dev)
{
    const double calls =
        (double) cpu_pool_threads(dev->pool) * DOT_LOOPS * DOT_CHAINS;

#if defined(__x86_64__)
    if (dev->isa >= CPU_ISA_AVX512) {
        cpu_pool_run(dev->pool, dots_wide, NULL);
        return calls * 128;
    }

    if (dev->isa == CPU_ISA_AVX2) {
        cpu_pool_run(dev->pool, dots_narrow, NULL);
        return calls * 64;
    }
#endif

    return 0 * calls;
}
