/*
 * Settings of the emulation, read once from the environment; tests change them
 * between launches.  And what has been done so far, for tests that count.
 */

#ifndef T_SHIM_OPTIONS_H
#define T_SHIM_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SHIM_DEVICES = 4 };

typedef struct {
    /* LLM_SHIM_SEED: 0 runs threads in order and streams as late as possible;
     * others give warps random priorities that change at random moments (PCT,
     * Burckhardt et al., ASPLOS 2010), and let streams run ahead at random */
    uint64_t seed;

    /* LLM_SHIM_WORKERS: OS threads that run blocks; one under sanitizers */
    int workers;

    /* LLM_SHIM_PROTECT: device memory may not be touched by host code */
    bool protect;

    /* LLM_SHIM_APART, for TSan: every block runs on an OS thread of its own,
     * and nothing orders blocks, so it sees when two touch the same memory;
     * slow */
    bool apart;

    /* LLM_SHIM_MEMORY: bytes of each device */
    size_t memory;

    /* of those, what others than this program have */
    size_t others[SHIM_DEVICES];

    /* LLM_SHIM_KERNEL_MEMORY: bytes of the device that a kernel takes when it
     * is launched for the first time */
    size_t kernel_memory;

    /* LLM_SHIM_NODE_MEMORY: the same of each kernel of a graph, for as long as
     * the graph is there */
    size_t node_memory;

    /* LLM_SHIM_DEVICE: "none", "old" (a driver older than the runtime), or the
     * compute capability of each device, as "80" or "80,90" */
    const char *device;

    /* LLM_SHIM_CUBLAS=none: there is no library */
    bool no_cublas;

    /* LLM_SHIM_TRACE: a file that gets the name of every kernel and cuBLAS
     * product that runs, a line each, those of graphs included */
    const char *trace;
} shim_options_t;

/* what can be made to fail */
typedef enum {
    SHIM_FAIL_MALLOC, /* cudaMalloc: out of memory */
    SHIM_FAIL_HOST,   /* cudaHostAlloc: out of memory */
    SHIM_FAIL_LAUNCH, /* a kernel is refused at once */
    SHIM_FAIL_ASYNC,  /* a kernel dies while it runs: the error stays */
    SHIM_FAIL_CUBLAS, /* a call of cuBLAS */
    SHIM_FAIL_CALL,   /* any call that returns an error */
    SHIM_FAIL_STREAM, /* the creation of a stream: out of memory */
    SHIM_FAIL_EVENT,  /* that of an event */
    SHIM_FAIL_GRAPH,  /* a graph that is made runnable */
    SHIM_FAIL_KINDS
} shim_fail_t;

typedef struct {
    uint64_t launches; /* kernels run, those of graphs included */
    uint64_t blocks;
    uint64_t threads;
    uint64_t switches;
    uint64_t copies;
    uint64_t pageable_copies; /* asynchronous ones that are not */
    uint64_t graph_launches; /* when they were asked for */
    uint64_t products;   /* of cuBLAS, when they were asked for */
    uint64_t workspaces; /* that it took for them because it was given none */
} shim_stats_t;

extern shim_stats_t shim_stats;

/* what is there now, of all devices, and nobody has given back */
typedef struct {
    int memory; /* allocations of the device */
    int pinned; /* of the host */
    int streams;
    int events;
    int graphs;
    int execs;
    int handles; /* of cuBLAS */
} shim_live_t;

extern shim_live_t shim_live;

shim_options_t *shim_options(void);

/* A kernel runs. */
void shim_trace(const char *name);

/* The nth (from 1) event of the kind from now on fails, once; 0: none.  Also
 * LLM_SHIM_FAIL=malloc:3,async:7. */
void shim_fail_at(shim_fail_t kind, uint64_t n);

/* Counts one event: whether it is to fail. */
bool shim_fails(shim_fail_t kind);

/* Whether one is still to fail. */
bool shim_will_fail(shim_fail_t kind);

#ifdef __cplusplus
}
#endif

#endif
