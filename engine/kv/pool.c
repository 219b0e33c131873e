/*
 * The page pool: one record per page, free records linked both ways through
 * their own fields, with a sentinel behind the last page.  Indices instead of
 * pointers keep a record at 16 bytes.
 *
 * A free page has refs == 0 and is on the list; a held one has refs > 0 and is
 * not.  On the list plain pages stand before kept ones.  kv_pool_check()
 * verifies it.
 */

#include "engine/kv/pool.h"

#include <stdlib.h>

#include "engine/base/status.h"

typedef struct {
    int32_t prev;
    int32_t next;
    int32_t refs;
    bool kept;
} page_t;

struct kv_pool_s {
    int n_pages;
    int n_free;
    int n_shared; /* pages with more than one reference */
    uint64_t evictions;
    /* n_pages, then the sentinel of the free list; not a flexible array,
     * because GCC 12.2 at -O2 mixes up accesses to one made directly and
     * through a local pointer */
    page_t *pages;

    kv_pool_forget_t forget;
    void *data;
};


static void
free_list_insert(kv_pool_t *pool, int32_t after, int32_t page)
{
    page_t *p = pool->pages;

    p[page].prev = after;
    p[page].next = p[after].next;
    p[p[after].next].prev = page;
    p[after].next = page;
    pool->n_free++;
}


static void
free_list_remove(kv_pool_t *pool, int32_t page)
{
    page_t *p = pool->pages;

    p[p[page].prev].next = p[page].next;
    p[p[page].next].prev = p[page].prev;
    pool->n_free--;
}


kv_pool_t *
kv_pool_create(int n_pages)
{
    llm_assert(n_pages >= 1);

    kv_pool_t *pool = malloc(sizeof(kv_pool_t));

    if (pool == NULL) {
        return NULL;
    }

    pool->pages = malloc(((size_t) n_pages + 1) * sizeof(page_t));

    if (pool->pages == NULL) {
        free(pool);
        return NULL;
    }

    pool->n_pages = n_pages;
    pool->n_free = 0;
    pool->n_shared = 0;
    pool->evictions = 0;
    pool->forget = NULL;

    const int32_t sentinel = n_pages;
    pool->pages[sentinel] = (page_t){ sentinel, sentinel, 0, false };

    /* in the order of their numbers, so that a fresh pool hands out
     * neighbouring memory */
    for (int32_t i = 0; i < n_pages; i++) {
        pool->pages[i] = (page_t){ .refs = 0 };
        free_list_insert(pool, pool->pages[sentinel].prev, i);
    }

    return pool;
}


void
kv_pool_destroy(kv_pool_t *pool)
{
    if (pool != NULL) {
        free(pool->pages);
        free(pool);
    }
}


int
kv_pool_pages(const kv_pool_t *pool)
{
    return pool->n_pages;
}


int
kv_pool_free_pages(const kv_pool_t *pool)
{
    return pool->n_free;
}


int
kv_pool_shared_pages(const kv_pool_t *pool)
{
    return pool->n_shared;
}


uint64_t
kv_pool_evictions(const kv_pool_t *pool)
{
    return pool->evictions;
}


size_t
kv_pool_record_bytes(void)
{
    return sizeof(page_t);
}


int32_t
kv_pool_take(kv_pool_t *pool)
{
    const int32_t page = pool->pages[pool->n_pages].next;

    if (page == pool->n_pages) {
        return -1;
    }

    free_list_remove(pool, page);
    pool->pages[page].refs = 1;

    if (pool->pages[page].kept) {
        pool->pages[page].kept = false;
        pool->evictions++;

        if (pool->forget != NULL) {
            pool->forget(pool->data, page);
        }
    }

    return page;
}


void
kv_pool_ref(kv_pool_t *pool, int32_t page)
{
    llm_assert(page >= 0 && page < pool->n_pages);

    if (pool->pages[page].refs == 0) {
        llm_assert(pool->pages[page].kept);
        free_list_remove(pool, page);
    }

    pool->n_shared += ++pool->pages[page].refs == 2;
}


void
kv_pool_unref(kv_pool_t *pool, int32_t page)
{
    llm_assert(page >= 0 && page < pool->n_pages);
    llm_assert(pool->pages[page].refs > 0);

    pool->n_shared -= pool->pages[page].refs == 2;

    if (--pool->pages[page].refs == 0) {
        /* behind the sentinel is the front, before it the back */
        free_list_insert(pool,
                         pool->pages[page].kept
                             ? pool->pages[pool->n_pages].prev
                             : pool->n_pages,
                         page);
    }
}


int
kv_pool_refs(const kv_pool_t *pool, int32_t page)
{
    llm_assert(page >= 0 && page < pool->n_pages);

    return pool->pages[page].refs;
}


void
kv_pool_keep(kv_pool_t *pool, int32_t page)
{
    llm_assert(page >= 0 && page < pool->n_pages);
    llm_assert(pool->pages[page].refs > 0);

    pool->pages[page].kept = true;
}


bool
kv_pool_kept(const kv_pool_t *pool, int32_t page)
{
    llm_assert(page >= 0 && page < pool->n_pages);

    return pool->pages[page].kept;
}


void
kv_pool_watch(kv_pool_t *pool, kv_pool_forget_t forget, void *data)
{
    pool->forget = forget;
    pool->data = data;
}


void
kv_pool_check(const kv_pool_t *pool)
{
    const page_t *p = pool->pages;
    int listed = 0;
    int unheld = 0;
    int shared = 0;

    for (int32_t i = 0; i < pool->n_pages; i++) {
        llm_assert(p[i].refs >= 0);
        unheld += p[i].refs == 0;
        shared += p[i].refs > 1;
    }

    for (int32_t i = p[pool->n_pages].next; i != pool->n_pages; i = p[i].next) {
        llm_assert(i >= 0 && i < pool->n_pages && p[i].refs == 0);
        llm_assert(p[p[i].next].prev == i && p[p[i].prev].next == i);
        llm_assert(listed < pool->n_pages); /* no cycle */
        llm_assert(p[i].kept || p[i].prev == pool->n_pages
                   || !p[p[i].prev].kept); /* plain pages first */
        listed++;
    }

    llm_assert(listed == unheld && listed == pool->n_free);
    llm_assert(shared == pool->n_shared);

    /* with assertions compiled out nothing reads them */
    (void) listed;
    (void) unheld;
    (void) shared;
}
