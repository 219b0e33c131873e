/*
 * Block tables.  A table only ever holds the pages its tokens need, so the
 * waste of a sequence is what its last page leaves unused: 15 tokens at most.
 * Called by the scheduler.
 */

#include "engine/kv/table.h"

#include <stdlib.h>

#include "engine/base/status.h"


int
kv_table_init(kv_table_t *table, int max_tokens)
{
    llm_assert(max_tokens >= 1);

    const int cap = kv_pages_for(max_tokens);

    *table = (kv_table_t){ .cap = cap };
    table->hashes =
        malloc((size_t) cap * (sizeof(kv_hash_t) + sizeof(int32_t)));

    if (table->hashes == NULL) {
        table->cap = 0;
        return LLM_NOMEM;
    }

    table->pages = (int32_t *) (void *) (table->hashes + cap);

    return LLM_OK;
}


void
kv_table_fini(kv_table_t *table)
{
    llm_assert(table->n == 0);

    free(table->hashes);
    *table = (kv_table_t){ 0 };
}


int
kv_pages_for(int n_tokens)
{
    llm_assert(n_tokens >= 0);

    return n_tokens / KV_PAGE + (n_tokens % KV_PAGE != 0);
}


int
kv_table_grow(kv_table_t *table, kv_pool_t *pool, int n_tokens)
{
    const int want = kv_pages_for(n_tokens);

    llm_assert(want <= table->cap);

    if (want - table->n > kv_pool_free_pages(pool)) {
        return LLM_AGAIN;
    }

    while (table->n < want) {
        table->pages[table->n++] = kv_pool_take(pool);
    }

    return LLM_OK;
}


void
kv_table_truncate(kv_table_t *table, kv_pool_t *pool, int n_tokens)
{
    const int keep = kv_pages_for(n_tokens);

    while (table->n > keep) {
        kv_pool_unref(pool, table->pages[--table->n]);
    }

    if (table->n_public > table->n) {
        table->n_public = table->n;
    }
}
