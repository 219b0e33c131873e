/*
 * Open-addressing hash maps.
 *
 * Used by the tokenizer: pairs of symbols → merge, bytes → token.  The u64
 * hash is the finalizer of splitmix64; bytes are taken eight at a time through
 * the same mix.
 */

#include "engine/base/map.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"


static uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;

    return x ^ x >> 31;
}


static uint32_t
hash_bytes(const uint8_t *p, size_t len)
{
    uint64_t h = mix(len + 0x9e3779b97f4a7c15u);

    for (; len >= 8; p += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = mix(h ^ word);
    }

    uint64_t word = 0;
    for (size_t i = 0; i < len; i++) {
        word |= (uint64_t) p[i] << 8 * i;
    }

    return (uint32_t) mix(h ^ word);
}


/* The capacity for n entries at half load; 0 when it cannot be counted. */
static size_t
capacity(size_t n)
{
    size_t cap = 16;

    if (n > SIZE_MAX / 256) {
        return 0;
    }

    while (cap < n * 2) {
        cap *= 2;
    }

    return cap;
}


/* The slot that holds key, or the free one where it belongs. */
static map_slot_t *
find(const map_t *map, uint64_t key)
{
    const size_t mask = map->cap - 1;
    size_t i = (size_t) mix(key) & mask;

    while (map->slots[i].used && map->slots[i].key != key) {
        i = (i + 1) & mask;
    }

    return &map->slots[i];
}


int
map_reserve(map_t *map, size_t n)
{
    if (map->cap > 0 && n <= map->cap / 2) {
        return LLM_OK;
    }

    map_t grown = { .n = map->n, .cap = capacity(n) };
    if (grown.cap == 0) {
        return LLM_NOMEM;
    }

    grown.slots = calloc(grown.cap, sizeof(map_slot_t));
    if (grown.slots == NULL) {
        return LLM_NOMEM;
    }

    for (size_t i = 0; i < map->cap; i++) {
        if (map->slots[i].used) {
            *find(&grown, map->slots[i].key) = map->slots[i];
        }
    }

    free(map->slots);
    *map = grown;

    return LLM_OK;
}


int
map_put(map_t *map, uint64_t key, uint32_t value)
{
    const int rc = map_reserve(map, map->n + 1);
    if (rc != LLM_OK) {
        return rc;
    }

    map_slot_t *slot = find(map, key);

    map->n += slot->used ? 0 : 1;
    *slot = (map_slot_t){ .key = key, .value = value, .used = 1 };

    return LLM_OK;
}


bool
map_get(const map_t *map, uint64_t key, uint32_t *value)
{
    if (map->cap == 0) {
        return false;
    }

    const map_slot_t *slot = find(map, key);

    if (!slot->used) {
        return false;
    }

    *value = slot->value;
    return true;
}


void
map_fini(map_t *map)
{
    free(map->slots);
    *map = (map_t){ 0 };
}


static map_bytes_slot_t *
find_bytes(const map_bytes_t *map, const void *key, size_t len, uint32_t hash)
{
    const size_t mask = map->cap - 1;
    size_t i = hash & mask;

    for (;; i = (i + 1) & mask) {
        map_bytes_slot_t *slot = &map->slots[i];

        if (slot->key == NULL) {
            return slot;
        }

        if (slot->hash == hash && slot->len == len
            && memcmp(slot->key, key, len) == 0) {
            return slot;
        }
    }
}


int
map_bytes_reserve(map_bytes_t *map, size_t n)
{
    if (map->cap > 0 && n <= map->cap / 2) {
        return LLM_OK;
    }

    map_bytes_t grown = { .n = map->n, .cap = capacity(n) };
    if (grown.cap == 0) {
        return LLM_NOMEM;
    }

    grown.slots = calloc(grown.cap, sizeof(map_bytes_slot_t));
    if (grown.slots == NULL) {
        return LLM_NOMEM;
    }

    for (size_t i = 0; i < map->cap; i++) {
        const map_bytes_slot_t *slot = &map->slots[i];

        if (slot->key != NULL) {
            *find_bytes(&grown, slot->key, slot->len, slot->hash) = *slot;
        }
    }

    free(map->slots);
    *map = grown;

    return LLM_OK;
}


int
map_bytes_put(map_bytes_t *map, const void *key, size_t len, uint32_t value)
{
    const int rc = map_bytes_reserve(map, map->n + 1);
    if (rc != LLM_OK) {
        return rc;
    }

    const uint32_t hash = hash_bytes(key, len);
    map_bytes_slot_t *slot = find_bytes(map, key, len, hash);

    if (slot->key == NULL) {
        *slot = (map_bytes_slot_t){ .key = key, .len = len, .hash = hash };
        map->n++;
    }

    slot->value = value;

    return LLM_OK;
}


bool
map_bytes_get(const map_bytes_t *map, const void *key, size_t len,
              uint32_t *value)
{
    if (map->cap == 0) {
        return false;
    }

    const map_bytes_slot_t *slot =
        find_bytes(map, key, len, hash_bytes(key, len));

    if (slot->key == NULL) {
        return false;
    }

    *value = slot->value;
    return true;
}


void
map_bytes_fini(map_bytes_t *map)
{
    free(map->slots);
    *map = (map_bytes_t){ 0 };
}
