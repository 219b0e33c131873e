/*
 * The pool of KV pages: who holds which, by reference count.  Counts only, no
 * tensors.
 *
 * Free pages form a list through the page records; a page is taken from its
 * front.  Pages without a hash go back to the front (reused first, still warm
 * in the CPU's caches); the back is for hashed pages that stay findable until
 * they are reused (prefix caching).
 */

#ifndef ENGINE_KV_POOL_H
#define ENGINE_KV_POOL_H

#include <stdint.h>

typedef struct kv_pool_s kv_pool_t;


/* n_pages ≥ 1.  NULL: no memory. */
kv_pool_t *kv_pool_create(int n_pages);
void kv_pool_destroy(kv_pool_t *pool);

int kv_pool_pages(const kv_pool_t *pool);
int kv_pool_free_pages(const kv_pool_t *pool);

/* A page with one reference, or -1 when none is free. */
int32_t kv_pool_take(kv_pool_t *pool);

void kv_pool_ref(kv_pool_t *pool, int32_t page);

/* Drops one reference; the last one puts the page onto the free list. */
void kv_pool_unref(kv_pool_t *pool, int32_t page);

int kv_pool_refs(const kv_pool_t *pool, int32_t page);

/* Walks everything and asserts that counts and list agree (tests). */
void kv_pool_check(const kv_pool_t *pool);

#endif /* ENGINE_KV_POOL_H */
