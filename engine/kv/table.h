/*
 * A sequence's block table: logical page i → physical page.  Grows a page at a
 * time as the sequence grows; gives everything back at the end.
 *
 * Beside it stand the hashes of the sequence's full pages (prefix.h): they
 * depend on tokens alone and so outlive the pages.
 */

#ifndef ENGINE_KV_TABLE_H
#define ENGINE_KV_TABLE_H

#include <stdint.h>

#include "engine/kv/pool.h"

enum { KV_PAGE = 16 }; /* tokens in a page */

/* Of the tokens of a page and of all pages before it. */
typedef struct {
    uint64_t low;
    uint64_t high;
} kv_hash_t;

typedef struct {
    int32_t *pages;
    int n;
    int cap;
    kv_hash_t *hashes; /* [cap]; n_hashes are computed */
    int n_hashes;
    int n_public; /* leading pages that others may have found */
} kv_table_t;


/* Room for max_tokens positions.  LLM_OK or LLM_NOMEM. */
int kv_table_init(kv_table_t *table, int max_tokens);

/* The table must be empty. */
void kv_table_fini(kv_table_t *table);

/* Pages needed to hold n_tokens. */
int kv_pages_for(int n_tokens);

/* Takes pages until n_tokens fit.  LLM_OK, or LLM_AGAIN when the pool has too
 * few (nothing is taken then). */
int kv_table_grow(kv_table_t *table, kv_pool_t *pool, int n_tokens);

/* Gives back pages beyond those that n_tokens need; 0 empties the table.  The
 * tail goes first.  What is kept of a public page must not change: n_tokens
 * may cut a page only behind the public ones. */
void kv_table_truncate(kv_table_t *table, kv_pool_t *pool, int n_tokens);

#endif /* ENGINE_KV_TABLE_H */
