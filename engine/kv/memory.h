/*
 * What memory there is, as the kernel tells it: the base of every sizing
 * decision on the CPU.
 *
 * All numbers are bytes.  They are read from files below root, so that tests
 * can put a tree of their own in place: "" is the system itself.
 */

#ifndef ENGINE_KV_MEMORY_H
#define ENGINE_KV_MEMORY_H

#include <stddef.h>

typedef struct {
    /* what the process may use: the smallest of its cgroup's limit (v1, v2),
     * the physical memory, and what RLIMIT_AS leaves for private memory beside
     * the process's other mappings */
    size_t total;

    /* what can still be had of it without swapping: MemAvailable, or the room
     * below a cgroup's limit when that is less; page cache counts as free */
    size_t free;

    size_t space;  /* address space left below RLIMIT_AS; SIZE_MAX: no limit */
    size_t own;    /* anonymous memory of the process that is resident */
    size_t mapped; /* its private writable memory, touched or not */
} kv_memory_t;


void kv_memory_read(const char *root, kv_memory_t *memory);

/* The smallest memory limit on the path from the process's cgroup up to the
 * root (v2: memory.max, v1: memory.limit_in_bytes); SIZE_MAX when there is
 * none.  *room: the least that is left below any of them, SIZE_MAX likewise;
 * may be NULL. */
size_t kv_memory_cgroup(const char *root, size_t *room);

#endif /* ENGINE_KV_MEMORY_H */
