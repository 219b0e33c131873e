/*
 * Sizes and reserves the KV memory at start-up.  Called by main.c.
 *
 * The number that helps a person most when the memory is too small is the
 * longest context that would fit, so the error says it.
 */

#include "engine/kv/store.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/kv/table.h"

enum { PATH_LEN = 4096, MIB_SHIFT = 20 };

_Static_assert((int) KV_PAGE == (int) OP_PAGE,
               "tables and kernels agree on the page");


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
                           "no memory for a KV cache of %d pages of %zu bytes; "
                           "lower kv_cache_memory",
                           kv->n_pages, page);
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
kv_store_pages(size_t page_bytes, size_t limit_bytes, int max_seqs, int max_len,
               int *n_pages, llm_err_t *err)
{
    llm_assert(page_bytes > 0 && max_seqs >= 1 && max_len >= 1);

    const bool by_default = limit_bytes == 0;
    const size_t limit = by_default ? kv_store_memory() / 4 : limit_bytes;
    const size_t one = (size_t) kv_pages_for(max_len);
    const size_t all = one * (size_t) max_seqs;
    size_t pages = limit / page_bytes;

    if (by_default && pages > all) {
        pages = all;
    }

    /* pages are numbered, and positions in them counted, by int32_t */
    if (pages > INT32_MAX / KV_PAGE) {
        pages = INT32_MAX / KV_PAGE;
    }

    if (pages < one) {
        const size_t mib = ((one * page_bytes - 1) >> MIB_SHIFT) + 1;

        return llm_err_set(err, LLM_LIMIT, NULL,
                           "the KV cache of %d tokens needs %zu MiB, "
                           "kv_cache_memory%s allows %zu MiB; the longest "
                           "context that fits is %zu; raise kv_cache_memory or "
                           "lower max_model_len",
                           max_len, mib,
                           by_default ? " (a quarter of the memory by default)"
                                      : "",
                           limit >> MIB_SHIFT, pages * KV_PAGE);
    }

    *n_pages = (int) pages;

    return LLM_OK;
}


static size_t
smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}


/* The number in a limit file; SIZE_MAX for "max", and for a file that does
 * not exist or holds something else. */
static size_t
read_limit(const char *path)
{
    FILE *file = fopen(path, "re");
    unsigned long long value;
    size_t limit = SIZE_MAX;

    if (file == NULL) {
        return SIZE_MAX;
    }

    if (fscanf(file, "%llu", &value) == 1 && value < SIZE_MAX) {
        limit = (size_t) value;
    }

    fclose(file);

    return limit;
}


/* The smallest limit in dir/group and the directories above it, dir included.
 * A container may see its group's path from the host's point of view while
 * its own group is mounted as dir: levels that do not exist are no limit. */
static size_t
limit_along(const char *dir, const char *group, const char *name)
{
    char path[PATH_LEN];
    char file[PATH_LEN + 64];
    size_t limit = SIZE_MAX;

    const int n = snprintf(path, sizeof(path), "%s%s", dir, group);

    if (n < 0 || (size_t) n >= sizeof(path)) {
        return SIZE_MAX;
    }

    const size_t floor = strlen(dir);

    for (;;) {
        snprintf(file, sizeof(file), "%s/%s", path, name);
        limit = smaller(limit, read_limit(file));

        char *slash = strrchr(path + floor, '/');

        if (slash == NULL) {
            return limit;
        }

        *slash = '\0';
    }
}


/* True if the comma-separated list of v1 controllers names memory. */
static bool
has_memory(const char *controllers)
{
    static const char name[] = "memory";
    const size_t len = sizeof(name) - 1;

    for (const char *p = controllers; *p != '\0';) {
        const size_t word = strcspn(p, ",");

        if (word == len && memcmp(p, name, len) == 0) {
            return true;
        }

        p += word;
        p += *p == ',';
    }

    return false;
}


/* One line of /proc/self/cgroup, "hierarchy:controllers:path": v2's has the
 * number 0 and no controllers. */
static size_t
line_limit(const char *root, char *line)
{
    char dir[PATH_LEN];
    char *controllers = strchr(line, ':');

    if (controllers == NULL) {
        return SIZE_MAX;
    }

    *controllers++ = '\0';

    char *group = strchr(controllers, ':');

    if (group == NULL) {
        return SIZE_MAX;
    }

    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';

    if (strcmp(line, "0") == 0 && *controllers == '\0') {
        snprintf(dir, sizeof(dir), "%s/sys/fs/cgroup", root);
        return limit_along(dir, group, "memory.max");
    }

    if (has_memory(controllers)) {
        snprintf(dir, sizeof(dir), "%s/sys/fs/cgroup/memory", root);
        return limit_along(dir, group, "memory.limit_in_bytes");
    }

    return SIZE_MAX;
}


size_t
kv_store_cgroup(const char *root)
{
    char path[PATH_LEN];
    char *line = NULL;
    size_t cap = 0;
    size_t limit = SIZE_MAX;

    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);

    FILE *file = fopen(path, "re");

    if (file == NULL) {
        return SIZE_MAX;
    }

    while (getline(&line, &cap, file) > 0) {
        limit = smaller(limit, line_limit(root, line));
    }

    free(line);
    fclose(file);

    return limit;
}


size_t
kv_store_memory(void)
{
    size_t limit = kv_store_cgroup("");
    struct rlimit space;
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long page = sysconf(_SC_PAGESIZE);

    if (pages > 0 && page > 0) {
        limit = smaller(limit, (size_t) pages * (size_t) page);
    }

    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        limit = smaller(limit, (size_t) space.rlim_cur);
    }

    return limit;
}
