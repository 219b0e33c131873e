/*
 * A binary heap of tenants: the one with the smallest counter is on top, and
 * among equals the one that has waited longest.  A tenant is in one heap at
 * most and knows its place, so it can be moved and taken out in O(log n).
 */

#ifndef ENGINE_SCHED_HEAP_H
#define ENGINE_SCHED_HEAP_H

#include <stdbool.h>

typedef struct tenant_s tenant_t;

typedef struct {
    tenant_t **items; /* the owner's, large enough */
    int n;
} heap_t;


/* Does a come before b? */
bool heap_before(const tenant_t *a, const tenant_t *b);

void heap_push(heap_t *heap, tenant_t *tenant);
void heap_remove(heap_t *heap, tenant_t *tenant);

/* The tenant's counter has grown. */
void heap_grown(heap_t *heap, tenant_t *tenant);

/* Asserts the order (tests). */
void heap_check(const heap_t *heap);

#endif /* ENGINE_SCHED_HEAP_H */
