/*
 * Sizes and reserves the KV memory at start-up.  Called by budget.c and, for
 * machines that are only imagined, by the plan command.
 *
 * The number that helps a person most when the memory is too small is the
 * longest context that would fit, so the error says it.
 */

#include "engine/kv/store.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/kv/table.h"

/* since Linux 5.14; older headers do not have it */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

_Static_assert((int) KV_PAGE == (int) OP_PAGE,
               "tables and kernels agree on the page");

/* Where a number of bytes comes from, in the words of the messages. */
typedef struct {
    size_t bytes;
    char what[96];
    const char *remedy;
} limit_t;


kv_amount_t
kv_amount(size_t bytes)
{
    kv_amount_t amount;
    const double mib = (double) bytes / 1048576.0;

    if (mib < 10000) {
        snprintf(amount.text, sizeof(amount.text), "%.1f MiB", mib);

    } else {
        snprintf(amount.text, sizeof(amount.text), "%.2f GiB", mib / 1024);
    }

    return amount;
}


static size_t
smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}


size_t
kv_store_requested(size_t total, double utilization)
{
    const double bytes = ceil((double) total * utilization);

    return bytes < (double) total ? (size_t) bytes : total;
}


int
kv_store_check(size_t total, size_t free, double utilization, llm_err_t *err)
{
    const size_t requested = kv_store_requested(total, utilization);

    if (requested <= free) {
        return LLM_OK;
    }

    return llm_err_set(err, LLM_LIMIT, NULL,
                       "gpu_memory_utilization %g asks for %s of the %s that "
                       "this process may use, but only %s are free: lower "
                       "gpu_memory_utilization, or end what else uses the "
                       "memory",
                       utilization, kv_amount(requested).text,
                       kv_amount(total).text, kv_amount(free).text);
}


/* What the utilization leaves for the cache. */
static size_t
left_for_cache(const kv_ask_t *ask, double utilization)
{
    const size_t requested = kv_store_requested(ask->total, utilization);

    return requested - smaller(requested, ask->held);
}


static int
nothing_left(const kv_ask_t *ask, double utilization, llm_err_t *err)
{
    const size_t requested = kv_store_requested(ask->total, utilization);

    return llm_err_set(err, LLM_LIMIT, NULL,
                       "no memory is left for the KV cache: "
                       "gpu_memory_utilization %g of %s allows %s, and "
                       "weights, activations and the process itself take %s: "
                       "raise gpu_memory_utilization, lower "
                       "max_num_batched_tokens or use a smaller model",
                       utilization, kv_amount(ask->total).text,
                       kv_amount(requested).text, kv_amount(ask->held).text);
}


/* What a page costs within a limit: kv_cache_memory is of the pages alone. */
static size_t
page_cost(const kv_ask_t *ask)
{
    return ask->page_bytes + (ask->kv_cache_memory > 0 ? 0 : ask->record_bytes);
}


/* What is taken in all when the limit is used whole. */
static size_t
taken_by(const kv_ask_t *ask, size_t limit)
{
    return ask->kv_cache_memory > 0
               ? limit + limit / ask->page_bytes * ask->record_bytes
               : limit;
}


/* The limits that a person has set. */
static int
explicit_limit(const kv_ask_t *ask, limit_t *limit, llm_err_t *err)
{
    if (ask->kv_cache_memory > 0) {
        limit->bytes = ask->kv_cache_memory;
        limit->remedy = "raise kv_cache_memory";
        snprintf(limit->what, sizeof(limit->what), "kv_cache_memory");

    } else {
        limit->bytes = left_for_cache(ask, ask->utilization);
        limit->remedy = "raise gpu_memory_utilization";
        snprintf(limit->what, sizeof(limit->what),
                 "gpu_memory_utilization %g, less weights, activations and "
                 "the process,",
                 ask->utilization);

        if (limit->bytes == 0) {
            return nothing_left(ask, ask->utilization, err);
        }
    }

    const size_t taken = taken_by(ask, limit->bytes);

    if (taken > ask->free) {
        return llm_err_set(err, LLM_LIMIT, NULL,
                           "%s allows a KV cache of %s, but only %s of memory "
                           "are free: lower %s, or end what else uses the "
                           "memory",
                           limit->what, kv_amount(taken).text,
                           kv_amount(ask->free).text,
                           ask->kv_cache_memory > 0 ? "kv_cache_memory"
                                                    : "gpu_memory_utilization");
    }

    return LLM_OK;
}


static int
modest_limit(const kv_ask_t *ask, limit_t *limit, llm_err_t *err)
{
    const size_t left = left_for_cache(ask, KV_UTILIZATION);
    const size_t free = ask->free - ask->free / 8;
    const char *what = "the default share, a quarter of the memory,";

    if (left == 0) {
        return nothing_left(ask, KV_UTILIZATION, err);
    }

    limit->bytes = ask->total / 4;
    limit->remedy = "set kv_cache_memory";

    if (left < limit->bytes) {
        limit->bytes = left;
        limit->remedy = "raise gpu_memory_utilization";
        what = "the default gpu_memory_utilization 0.9";
    }

    if (free < limit->bytes) {
        limit->bytes = free;
        limit->remedy = "free some memory";
        what = "the default share, 7/8 of the free memory,";
    }

    snprintf(limit->what, sizeof(limit->what), "%s", what);

    return LLM_OK;
}


int
kv_store_size(const kv_ask_t *ask, kv_size_t *size, llm_err_t *err)
{
    llm_assert(ask->page_bytes > 0 && ask->max_seqs >= 1 && ask->max_len >= 1);

    const bool modest = ask->kv_cache_memory == 0 && ask->utilization == 0;
    const size_t one = (size_t) kv_pages_for(ask->max_len);
    const size_t all = one * (size_t) ask->max_seqs;
    limit_t limit;

    const int rc = modest ? modest_limit(ask, &limit, err)
                          : explicit_limit(ask, &limit, err);

    if (rc != LLM_OK) {
        return rc;
    }

    size_t pages = limit.bytes / page_cost(ask);

    if (modest && pages > all) {
        pages = all;
    }

    /* pages are numbered, and positions in them counted, by int32_t */
    if (pages > INT32_MAX / KV_PAGE) {
        pages = INT32_MAX / KV_PAGE;
    }

    if (pages < one && (!ask->auto_len || pages == 0)) {
        return llm_err_set(err, LLM_LIMIT, NULL,
                           "one sequence of max_model_len %d tokens needs a KV "
                           "cache of %s, but %s allows %s; the longest context "
                           "that fits is %zu; %s or lower max_model_len",
                           ask->max_len, kv_amount(one * ask->page_bytes).text,
                           limit.what, kv_amount(limit.bytes).text,
                           pages * KV_PAGE, limit.remedy);
    }

    size->n_pages = (int) pages;
    size->max_len = pages < one ? (int) pages * KV_PAGE : ask->max_len;

    return LLM_OK;
}


static size_t
page_bytes(const op_table_t *ops, op_dev_t *dev, const op_kv_t *kv)
{
    return ops->kv_page_bytes(dev, (int) kv->dtype, kv->n_layers,
                              kv->n_kv_heads, kv->head_dim);
}


int
kv_store_create(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv,
                llm_err_t *err)
{
    const size_t page = page_bytes(ops, dev, kv);
    size_t bytes;

    llm_assert(kv->n_pages >= 1 && page > 0);

    kv->base = NULL;

    if (!__builtin_mul_overflow((size_t) kv->n_pages, page, &bytes)) {
        kv->base = ops->alloc(dev, bytes);
    }

    if (kv->base == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "no memory%s for a KV cache of %d pages of %zu "
                           "bytes; lower kv_cache_memory or "
                           "gpu_memory_utilization",
                           ops->host ? "" : " on the GPU", kv->n_pages, page);
    }

    return LLM_OK;
}


void
kv_store_destroy(const op_table_t *ops, op_dev_t *dev, op_kv_t *kv)
{
    if (kv->base == NULL) {
        return;
    }

    const size_t page = page_bytes(ops, dev, kv);

    ops->free(dev, kv->base, (size_t) kv->n_pages * page);
    kv->base = NULL;
}


int
kv_store_prefault(void *base, size_t bytes, llm_err_t *err)
{
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t) base + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t) base + bytes) / page * page;
    volatile char *const at = base;

    if (bytes == 0) {
        return LLM_OK;
    }

    /* the pages that base shares with others, and all of them where the
     * kernel is too old to do it in one call */
    at[0] = at[0];
    at[bytes - 1] = at[bytes - 1];

    if (first >= end
        || madvise((void *) first, end - first, MADV_POPULATE_WRITE) == 0)
    {
        return LLM_OK;
    }

    if (errno != EINVAL) {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "kv_cache_prefault: no memory for the %s of the KV "
                           "cache (%s); lower kv_cache_memory or "
                           "gpu_memory_utilization",
                           kv_amount(bytes).text, strerror(errno));
    }

    for (size_t i = 0; i < bytes; i += page) {
        at[i] = at[i];
    }

    return LLM_OK;
}
