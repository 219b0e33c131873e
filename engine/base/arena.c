/* Bump arena with cleanup handlers. */

#include "engine/base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct block_s block_t;
typedef struct handler_s handler_t;

struct block_s {
    block_t *next;
    size_t cap; /* usable bytes after the header */
    size_t used;
    size_t pad; /* keeps the data aligned to 16 bytes */
};

struct handler_s {
    handler_t *next;
    void (*call)(void *);
    void *data;
};

struct arena_s {
    block_t *blocks; /* newest first */
    handler_t *handlers;
    size_t block_bytes;
    size_t total;
};

static long fail_countdown;


void
arena_fail_after(long n)
{
    fail_countdown = n;
}


static void *
system_alloc(size_t bytes)
{
    if (fail_countdown > 0 && --fail_countdown == 0) {
        return NULL;
    }

    return malloc(bytes);
}


static block_t *
block_create(arena_t *arena, size_t cap)
{
    block_t *block = system_alloc(sizeof(block_t) + cap);

    if (block == NULL) {
        return NULL;
    }

    block->cap = cap;
    block->used = 0;
    block->next = arena->blocks;
    arena->blocks = block;
    arena->total += sizeof(block_t) + cap;

    return block;
}


arena_t *
arena_create(size_t block_bytes)
{
    arena_t *arena = system_alloc(sizeof(arena_t));

    if (arena == NULL) {
        return NULL;
    }

    *arena = (arena_t){ .block_bytes = block_bytes < 256 ? 256 : block_bytes,
                        .total = sizeof(arena_t) };
    return arena;
}


static void
run_handlers(arena_t *arena)
{
    while (arena->handlers != NULL) {
        handler_t *h = arena->handlers;
        arena->handlers = h->next;
        h->call(h->data);
    }
}


void
arena_destroy(arena_t *arena)
{
    if (arena == NULL) {
        return;
    }

    run_handlers(arena);

    for (block_t *b = arena->blocks, *next; b != NULL; b = next) {
        next = b->next;
        free(b);
    }

    free(arena);
}


void
arena_reset(arena_t *arena)
{
    run_handlers(arena);

    block_t *keep = arena->blocks;

    if (keep == NULL) {
        return;
    }

    while (keep->next != NULL) {
        block_t *next = keep->next;
        arena->total -= sizeof(block_t) + keep->cap;
        free(keep);
        keep = next;
    }

    keep->used = 0;
    arena->blocks = keep;
}


void *
arena_alloc(arena_t *arena, size_t bytes)
{
    block_t *block = arena->blocks;

    if (bytes > SIZE_MAX / 2) {
        return NULL;
    }

    const size_t need = (bytes + 15) & ~(size_t) 15;

    if (block == NULL || block->cap - block->used < need) {
        const size_t cap =
            need > arena->block_bytes ? need : arena->block_bytes;
        block = block_create(arena, cap);

        if (block == NULL) {
            return NULL;
        }
    }

    void *p = (char *) (block + 1) + block->used;
    block->used += need;

    return p;
}


void *
arena_calloc(arena_t *arena, size_t bytes)
{
    void *p = arena_alloc(arena, bytes);

    if (p != NULL) {
        memset(p, 0, bytes);
    }

    return p;
}


char *
arena_strndup(arena_t *arena, const char *text, size_t len)
{
    char *p = len == SIZE_MAX ? NULL : arena_alloc(arena, len + 1);

    if (p != NULL) {
        memcpy(p, text, len);
        p[len] = '\0';
    }

    return p;
}


bool
arena_on_destroy(arena_t *arena, void (*handler)(void *), void *data)
{
    handler_t *h = arena_alloc(arena, sizeof(handler_t));

    if (h == NULL) {
        return false;
    }

    *h = (handler_t){ arena->handlers, handler, data };
    arena->handlers = h;

    return true;
}


size_t
arena_bytes(const arena_t *arena)
{
    return arena->total;
}
