/*
 * Open-addressing hash maps: u64 → u32, and bytes → u32.
 *
 * One flat table each, no node per entry, linear probing, at most half full;
 * growing rehashes.  Nothing is ever removed.  Reading is safe from any number
 * of threads once the last put is done.
 */

#ifndef ENGINE_BASE_MAP_H
#define ENGINE_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t key;
    uint32_t value;
    uint32_t used;
} map_slot_t;

/* A zeroed map is empty and owns nothing. */
typedef struct {
    map_slot_t *slots;
    size_t n;
    size_t cap; /* zero or a power of two */
} map_t;

typedef struct {
    const void *key; /* NULL: free */
    size_t len;
    uint32_t hash;
    uint32_t value;
} map_bytes_slot_t;

/* The keys' bytes are borrowed: they must outlive the map. */
typedef struct {
    map_bytes_slot_t *slots;
    size_t n;
    size_t cap;
} map_bytes_t;


/* Room for n entries in all.  LLM_NOMEM leaves the map as it was. */
int map_reserve(map_t *map, size_t n);

/* Adds or replaces. */
int map_put(map_t *map, uint64_t key, uint32_t value);

bool map_get(const map_t *map, uint64_t key, uint32_t *value);
void map_fini(map_t *map);


int map_bytes_reserve(map_bytes_t *map, size_t n);

/* Adds or replaces; a replaced entry keeps its first key pointer.  key is not
 * NULL, even where len is 0. */
int map_bytes_put(map_bytes_t *map, const void *key, size_t len,
                  uint32_t value);

bool map_bytes_get(const map_bytes_t *map, const void *key, size_t len,
                   uint32_t *value);
void map_bytes_fini(map_bytes_t *map);

#endif /* ENGINE_BASE_MAP_H */
