/*
 * Bump arena: everything one request (or one load) needs, freed at once.
 *
 * Nothing is freed singly.  All memory is aligned to 16 bytes.  A failing
 * allocation returns NULL and leaves the arena usable.
 */

#ifndef ENGINE_BASE_ARENA_H
#define ENGINE_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena_s arena_t;


/* block_bytes: the size of the blocks it grows by.  NULL: no memory. */
arena_t *arena_create(size_t block_bytes);

/* Runs the cleanup handlers, last added first, and frees everything. */
void arena_destroy(arena_t *arena);

/* Runs the handlers and forgets all content, keeping the first block. */
void arena_reset(arena_t *arena);

void *arena_alloc(arena_t *arena, size_t bytes);
void *arena_calloc(arena_t *arena, size_t bytes);

/* A copy of len bytes with a terminating zero. */
char *arena_strndup(arena_t *arena, const char *text, size_t len);

/* Calls handler(data) when the arena is reset or destroyed.  False: no
 * memory, and the handler will not run. */
bool arena_on_destroy(arena_t *arena, void (*handler)(void *), void *data);

/* Bytes taken from the system. */
size_t arena_bytes(const arena_t *arena);

/* Tests only: let the n-th system allocation from now on fail (0: none). */
void arena_fail_after(long n);

#endif /* ENGINE_BASE_ARENA_H */
