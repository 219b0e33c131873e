/*
 * The memory behind the pool: K and V of all pages, on the device, and how
 * much of it there may be.
 */

#ifndef ENGINE_KV_STORE_H
#define ENGINE_KV_STORE_H

#include <stddef.h>

#include "engine/base/status.h"
#include "kernels/op/op.h"


/* Fills *kv with base memory for kv->n_pages pages (n_pages, n_layers,
 * n_kv_heads, head_dim and dtype set by the caller).  LLM_OK, or LLM_NOMEM
 * with the size in err and kv->base NULL. */
int kv_store_create(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv,
                    llm_err_t *err);
void kv_store_destroy(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv);

/* How many pages to reserve.  limit_bytes: the explicit kv_cache_memory, which
 * is used whole, or 0 for the default: what max_seqs sequences of max_len
 * tokens need, but at most a quarter of the memory the process may use (cgroup
 * v1/v2, RLIMIT_AS, physical).  LLM_LIMIT with the longest context that would
 * fit, and the remedy, when not even one sequence of max_len tokens does. */
int kv_store_pages(size_t page_bytes, size_t limit_bytes, int max_seqs,
                   int max_len, int *n_pages, llm_err_t *err);

/* Bytes the process may use: the smallest of its cgroup's limit, RLIMIT_AS and
 * the physical memory. */
size_t kv_store_memory(void);

/* The smallest memory limit on the path from the process's cgroup up to the
 * root (v2: memory.max, v1: memory.limit_in_bytes); SIZE_MAX when there is
 * none.  root: "" for the system's own /proc and /sys, or a directory that
 * holds the like of them. */
size_t kv_store_cgroup(const char *root);

#endif /* ENGINE_KV_STORE_H */
