/*
 * The memory behind the pool: K and V of all pages, on the device, and how
 * much of it there may be.
 */

#ifndef ENGINE_KV_STORE_H
#define ENGINE_KV_STORE_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/status.h"
#include "kernels/op/op.h"

/* gpu_memory_utilization, unless told otherwise */
#define KV_UTILIZATION 0.90

/* What the number of pages follows from.  Bytes. */
typedef struct {
    size_t page_bytes;
    size_t record_bytes;    /* what is kept about a page, outside of it */
    size_t total;           /* memory of the device (kv_memory_t) */
    size_t held;            /* taken by weights, activations and the rest */
    size_t free;            /* what can still be had */
    size_t kv_cache_memory; /* explicit size of the cache; 0: not given */
    double utilization;     /* gpu_memory_utilization; 0: not given */
    int max_seqs;
    int max_len;   /* of a sequence, tokens */
    bool auto_len; /* a shorter one will do */
} kv_ask_t;

typedef struct {
    int n_pages;
    int max_len; /* max_len of the request, or what fits */
} kv_size_t;

/* An amount of memory for a message: "26.03 GiB", "100.0 MiB". */
typedef struct {
    char text[24];
} kv_amount_t;


kv_amount_t kv_amount(size_t bytes);

/* ceil(total × utilization), as vLLM counts it. */
size_t kv_store_requested(size_t total, double utilization);

/* LLM_LIMIT when less than the share of total that utilization asks for is
 * free.  free: with what the process holds already. */
int kv_store_check(size_t total, size_t free, double utilization,
                   llm_err_t *err);

/* How many pages to reserve, in this order:
 * kv_cache_memory, when given, is used whole for pages, their records beside;
 * utilization, when given: requested − held, used whole;
 * else a modest share: what max_seqs sequences of max_len tokens need, but at
 * most a quarter of the memory, nor more than the default utilization leaves,
 * nor more than 7/8 of what is free.
 * LLM_LIMIT with the remedy when nothing is left, when what was asked for is
 * not free, and when not even one sequence of max_len tokens fits: then with
 * the longest that would. */
int kv_store_size(const kv_ask_t *ask, kv_size_t *size, llm_err_t *err);

/* Fills *kv with base memory for kv->n_pages pages (n_pages, n_layers,
 * n_kv_heads, head_dim and dtype set by the caller).  LLM_OK, or LLM_NOMEM
 * with the size in err and kv->base NULL. */
int kv_store_create(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv,
                    llm_err_t *err);
void kv_store_destroy(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv);

/* Makes every page of a store in the process's own memory resident, so that
 * no page fault falls into a step.  LLM_NOMEM when the kernel refuses. */
int kv_store_prefault(void *base, size_t bytes, llm_err_t *err);

#endif /* ENGINE_KV_STORE_H */
