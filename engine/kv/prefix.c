/*
 * Hash → page, in chains through the page records: one bucket a page, no
 * allocation after creation, everything O(1).  The pool tells when it gives a
 * public page away.
 *
 * Of pages with equal content one is public.  Should two different contents
 * have one hash, the first stays and the other is simply not found.
 */

#include "engine/kv/prefix.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "engine/base/status.h"

/* What a hash is made of; no padding. */
typedef struct {
    kv_hash_t parent;
    int32_t tokens[KV_PAGE];
} link_t;

typedef struct {
    link_t link;
    kv_hash_t hash;
    int32_t next; /* in its bucket; −1: the last */
} entry_t;

struct kv_prefix_s {
    kv_pool_t *pool;
    uint64_t seed;
    uint32_t mask;
    int n_public;
    int32_t *buckets; /* [mask + 1]; −1: empty */
    entry_t *entries; /* [pages]; of public ones */
};

_Static_assert(sizeof(link_t) == sizeof(kv_hash_t) + 4 * KV_PAGE,
               "hashed as bytes");


static bool
hash_equal(const kv_hash_t *a, const kv_hash_t *b)
{
    return a->low == b->low && a->high == b->high;
}


static kv_hash_t
hash_bytes(const kv_prefix_t *prefix, const void *bytes, size_t len)
{
    const XXH128_hash_t h = XXH3_128bits_withSeed(bytes, len, prefix->seed);

    return (kv_hash_t){ h.low64, h.high64 };
}


static int32_t *
bucket_of(const kv_prefix_t *prefix, const kv_hash_t *hash)
{
    return &prefix->buckets[hash->low & prefix->mask];
}


/* The pool gave the page away. */
static void
forget(void *data, int32_t page)
{
    kv_prefix_t *prefix = data;
    entry_t *entries = prefix->entries;
    int32_t *place = bucket_of(prefix, &entries[page].hash);

    while (*place != page) {
        llm_assert(*place >= 0);
        place = &entries[*place].next;
    }

    *place = entries[page].next;
    prefix->n_public--;
}


size_t
kv_prefix_record_bytes(void)
{
    return sizeof(entry_t) + 2 * sizeof(int32_t);
}


kv_prefix_t *
kv_prefix_create(kv_pool_t *pool)
{
    const size_t n = (size_t) kv_pool_pages(pool);
    kv_prefix_t *prefix = calloc(1, sizeof(kv_prefix_t));
    size_t buckets = 1;

    if (prefix == NULL) {
        return NULL;
    }

    while (buckets < n) {
        buckets *= 2;
    }

    prefix->pool = pool;
    prefix->mask = (uint32_t) (buckets - 1);
    prefix->buckets = malloc(buckets * sizeof(int32_t));
    prefix->entries = malloc(n * sizeof(entry_t));

    if (prefix->buckets == NULL || prefix->entries == NULL) {
        kv_prefix_destroy(prefix);
        return NULL;
    }

    for (size_t i = 0; i < buckets; i++) {
        prefix->buckets[i] = -1;
    }

    /* without a seed from the kernel collisions are merely easier to look
     * for: a hit is confirmed anyway */
    if (getrandom(&prefix->seed, sizeof(prefix->seed), GRND_NONBLOCK)
        != sizeof(prefix->seed))
    {
        prefix->seed = (uint64_t) (uintptr_t) prefix;
    }

    kv_pool_watch(pool, forget, prefix);

    return prefix;
}


void
kv_prefix_destroy(kv_prefix_t *prefix)
{
    if (prefix == NULL) {
        return;
    }

    kv_pool_watch(prefix->pool, NULL, NULL);
    free(prefix->buckets);
    free(prefix->entries);
    free(prefix);
}


kv_hash_t
kv_prefix_root(const kv_prefix_t *prefix, const void *salt, size_t len)
{
    return hash_bytes(prefix, salt, len);
}


static link_t
link_of(const kv_table_t *table, const kv_hash_t *root, const int32_t *tokens,
        int i)
{
    link_t link = { .parent = i == 0 ? *root : table->hashes[i - 1] };

    memcpy(link.tokens, tokens + (size_t) i * KV_PAGE, sizeof(link.tokens));

    return link;
}


void
kv_prefix_hash(const kv_prefix_t *prefix, kv_table_t *table,
               const kv_hash_t *root, const int32_t *tokens, int n_tokens)
{
    llm_assert(n_tokens / KV_PAGE <= table->cap);

    while (table->n_hashes < n_tokens / KV_PAGE) {
        const link_t link = link_of(table, root, tokens, table->n_hashes);

        table->hashes[table->n_hashes++] =
            hash_bytes(prefix, &link, sizeof(link));
    }
}


/* The public page with this hash and content, or −1.  *taken: the hash is
 * there, whatever the content. */
static int32_t
find(const kv_prefix_t *prefix, const kv_hash_t *hash, const link_t *link,
     bool *taken)
{
    const entry_t *entries = prefix->entries;
    int32_t page = *bucket_of(prefix, hash);

    while (page >= 0 && !hash_equal(&entries[page].hash, hash)) {
        page = entries[page].next;
    }

    *taken = page >= 0;

    return page >= 0 && memcmp(&entries[page].link, link, sizeof(*link)) == 0
               ? page
               : -1;
}


int
kv_prefix_attach(kv_prefix_t *prefix, kv_table_t *table, const kv_hash_t *root,
                 const int32_t *tokens, int max_pages)
{
    bool taken;

    llm_assert(table->n == 0 && max_pages <= table->n_hashes);

    while (table->n < max_pages) {
        const link_t link = link_of(table, root, tokens, table->n);
        const int32_t page =
            find(prefix, &table->hashes[table->n], &link, &taken);

        if (page < 0) {
            break;
        }

        kv_pool_ref(prefix->pool, page);
        table->pages[table->n++] = page;
    }

    table->n_public = table->n;

    return table->n;
}


static void
publish_page(kv_prefix_t *prefix, kv_table_t *table, const link_t *link, int i)
{
    const kv_hash_t *hash = &table->hashes[i];
    const int32_t page = table->pages[i];
    bool taken;

    const int32_t other = find(prefix, hash, link, &taken);

    if (other >= 0) {
        kv_pool_ref(prefix->pool, other);
        kv_pool_unref(prefix->pool, page);
        table->pages[i] = other;
        return;
    }

    if (taken) {
        return;
    }

    int32_t *bucket = bucket_of(prefix, hash);

    prefix->entries[page] =
        (entry_t){ .link = *link, .hash = *hash, .next = *bucket };
    *bucket = page;
    prefix->n_public++;
    kv_pool_keep(prefix->pool, page);
}


void
kv_prefix_publish(kv_prefix_t *prefix, kv_table_t *table, const kv_hash_t *root,
                  const int32_t *tokens, int n_tokens)
{
    llm_assert(n_tokens / KV_PAGE <= table->n);

    kv_prefix_hash(prefix, table, root, tokens, n_tokens);

    while (table->n_public < n_tokens / KV_PAGE) {
        const link_t link = link_of(table, root, tokens, table->n_public);

        publish_page(prefix, table, &link, table->n_public);
        table->n_public++;
    }
}


int
kv_prefix_pages(const kv_prefix_t *prefix)
{
    return prefix->n_public;
}


void
kv_prefix_check(const kv_prefix_t *prefix)
{
    int found = 0;
    int kept = 0;

    for (uint32_t b = 0; b <= prefix->mask; b++) {
        for (int32_t p = prefix->buckets[b]; p >= 0;
             p = prefix->entries[p].next) {
            const entry_t *e = &prefix->entries[p];
            const kv_hash_t hash =
                hash_bytes(prefix, &e->link, sizeof(e->link));

            llm_assert(hash_equal(&hash, &e->hash));
            llm_assert((e->hash.low & prefix->mask) == b);
            llm_assert(kv_pool_kept(prefix->pool, p));
            llm_assert(found < kv_pool_pages(prefix->pool));
            (void) hash;
            found++;
        }
    }

    for (int32_t p = 0; p < kv_pool_pages(prefix->pool); p++) {
        kept += kv_pool_kept(prefix->pool, p);
    }

    llm_assert(found == kept && found == prefix->n_public);
    (void) kept;
}
