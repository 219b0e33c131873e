/*
 * The prefix cache: full pages found again by what they hold.
 *
 * A page's hash is chained: H(hash of the page before, its 16 tokens), and the
 * chain begins with a root made of the salt.  So equal hashes mean an equal
 * prefix under an equal salt; a hit is confirmed by comparing the tokens and
 * the hash before, and the function is seeded by chance in each process.
 *
 * Only computed, full pages are public; nothing writes to them any more.  They
 * are shared by reference count, and stay findable when nobody holds them,
 * until the pool gives them away.
 */

#ifndef ENGINE_KV_PREFIX_H
#define ENGINE_KV_PREFIX_H

#include <stddef.h>
#include <stdint.h>

#include "engine/kv/pool.h"
#include "engine/kv/table.h"

typedef struct kv_prefix_s kv_prefix_t;


/* Borrows pool, and is destroyed before it.  NULL: no memory. */
kv_prefix_t *kv_prefix_create(kv_pool_t *pool);
void kv_prefix_destroy(kv_prefix_t *prefix);

/* Memory that it takes for each page of the pool, at most. */
size_t kv_prefix_record_bytes(void);

/* The root of a chain. */
kv_hash_t kv_prefix_root(const kv_prefix_t *prefix, const void *salt,
                         size_t len);

/* Computes the hashes of the full pages of n_tokens that table has not yet.
 * Tokens once hashed must not change. */
void kv_prefix_hash(const kv_prefix_t *prefix, kv_table_t *table,
                    const kv_hash_t *root, const int32_t *tokens, int n_tokens);

/* Fills an empty table with the longest run of cached pages that hold the
 * beginning of tokens, at most max_pages (hashed before), and takes a
 * reference to each.  How many. */
int kv_prefix_attach(kv_prefix_t *prefix, kv_table_t *table,
                     const kv_hash_t *root, const int32_t *tokens,
                     int max_pages);

/* Makes the full pages of the first n_tokens public; all of them must be
 * computed.  A page whose content is public already is given back and the
 * other one takes its place: the bits are the same. */
void kv_prefix_publish(kv_prefix_t *prefix, kv_table_t *table,
                       const kv_hash_t *root, const int32_t *tokens,
                       int n_tokens);

/* Pages that can be found, held or free. */
int kv_prefix_pages(const kv_prefix_t *prefix);

/* Asserts that index and pool agree (tests). */
void kv_prefix_check(const kv_prefix_t *prefix);

#endif /* ENGINE_KV_PREFIX_H */
