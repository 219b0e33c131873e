/*
 * How the emulation runs a kernel: a worker (one OS thread) runs one block at a
 * time, every thread of the block is a fiber.  A fiber runs until it waits, at
 * a barrier of the block or at a collective of its warp; who goes on then is
 * decided by the seed.  device.h builds the CUDA intrinsics from these calls.
 */

#ifndef T_SHIM_EXEC_H
#define T_SHIM_EXEC_H

#include <stddef.h>
#include <stdint.h>

enum {
    SHIM_LANES = 32,
    SHIM_MAX_THREADS = 1024,
    SHIM_SLOT_BYTES = 64 /* what one lane brings to a collective, at most */
};

typedef struct {
    unsigned x, y, z;
} uint3;

/* a place in a kernel */
typedef struct {
    const char *what; /* name of the primitive */
    const char *file;
    int line;
} shim_site_t;

typedef struct {
    uint3 index; /* threadIdx */
    int id;      /* threadIdx as one number */
} shim_thread_t;

/* the part of a worker that kernels look at */
typedef struct {
    shim_thread_t *self; /* the thread that runs now */
    uint3 block_index, block_dim, grid_dim;
    void *dynamic; /* dynamic shared memory */
} shim_worker_t;

extern __thread shim_worker_t *shim_worker;

/* lanes that are there, and what each of them brought and takes away */
typedef struct {
    uint32_t lanes;
    alignas(16) unsigned char in[SHIM_LANES][SHIM_SLOT_BYTES];
    alignas(16) unsigned char out[SHIM_LANES][SHIM_SLOT_BYTES];
} shim_slots_t;

/* Of one collective: sizes of what a lane brings and takes, and what happens
 * between, done once for the whole warp by the lane that arrives last. */
typedef struct {
    size_t in_bytes;
    size_t out_bytes;
    void (*compute)(shim_slots_t *slots);
} shim_collective_t;

/* All threads of the block, from the same line of the source. */
void shim_barrier(shim_site_t site);

/* As shim_barrier, and returns for how many threads predicate was true. */
int shim_barrier_count(int predicate, shim_site_t site);

/* All lanes of mask, from the same line of the source.  Orders no memory. */
void shim_collective(unsigned mask, const shim_collective_t *collective,
                     const void *in, void *out, shim_site_t site);

/* __syncwarp: orders memory. */
void shim_warp_barrier(unsigned mask, shim_site_t site);

/* a shuffle: value and out have bytes (4 or 8), src is the lane to read */
void shim_shuffle(unsigned mask, const void *value, void *out, int bytes,
                  int src, shim_site_t site);

/* the lanes whose predicate is true */
unsigned shim_ballot(unsigned mask, int predicate, shim_site_t site);

/* cp.async: dst is poisoned now and gets its bytes only when waited for; the
 * first n_bytes of 16 come from src, the rest are zero. */
void shim_copy_async(void *dst, const void *src, int n_bytes,
                     shim_site_t site);
void shim_copy_commit(void);
void shim_copy_wait(int n_groups);

/* Says what is wrong with the kernel, where its threads are, and aborts. */
[[noreturn]] void shim_kernel_fault(const char *fmt, ...)
    __attribute__((format(printf, 1, 2)));

/* one launch */
typedef struct {
    const char *name;
    const void *kernel;
    void (*call)(const void *arguments); /* runs one thread */
    const void *arguments;
    uint3 grid, block;
    size_t shared_bytes;
} shim_grid_t;

/* Runs all blocks of a launch. */
void shim_grid_run(const shim_grid_t *grid);

#endif
