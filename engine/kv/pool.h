/*
 * The pool of KV pages: who holds which, by reference count.  Counts only, no
 * tensors.
 *
 * Free pages form a list through the page records; a page is taken from its
 * front.  Plain pages go back to the front (reused first, still warm in the
 * CPU's caches), kept ones to the back: their content can still be wanted
 * (prefix.h), so the one that has been free longest goes first.
 */

#ifndef ENGINE_KV_POOL_H
#define ENGINE_KV_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kv_pool_s kv_pool_t;

/* A kept page is taken for something else: its content is gone. */
typedef void (*kv_pool_forget_t)(void *data, int32_t page);


/* n_pages ≥ 1.  NULL: no memory. */
kv_pool_t *kv_pool_create(int n_pages);
void kv_pool_destroy(kv_pool_t *pool);

int kv_pool_pages(const kv_pool_t *pool);
int kv_pool_free_pages(const kv_pool_t *pool);

/* Pages with more than one reference. */
int kv_pool_shared_pages(const kv_pool_t *pool);

/* Kept pages given away since the start. */
uint64_t kv_pool_evictions(const kv_pool_t *pool);

/* Memory of the record of a page. */
size_t kv_pool_record_bytes(void);

/* A page with one reference, or -1 when none is free. */
int32_t kv_pool_take(kv_pool_t *pool);

/* One more reference to a page that is held, or to a free one that is kept. */
void kv_pool_ref(kv_pool_t *pool, int32_t page);

/* Drops one reference; the last one puts the page onto the free list. */
void kv_pool_unref(kv_pool_t *pool, int32_t page);

int kv_pool_refs(const kv_pool_t *pool, int32_t page);

/* Keeps the content of a page that is held, until kv_pool_take has to give it
 * away and calls forget. */
void kv_pool_keep(kv_pool_t *pool, int32_t page);
bool kv_pool_kept(const kv_pool_t *pool, int32_t page);

/* Who is told; NULL: nobody. */
void kv_pool_watch(kv_pool_t *pool, kv_pool_forget_t forget, void *data);

/* Walks everything and asserts that counts and list agree (tests). */
void kv_pool_check(const kv_pool_t *pool);

#endif /* ENGINE_KV_POOL_H */
