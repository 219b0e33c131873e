/* The heap of tenants, used by fair.c.  items[0] is the top. */

#include "engine/sched/heap.h"

#include "engine/base/status.h"
#include "engine/sched/fair.h"


bool
heap_before(const tenant_t *a, const tenant_t *b)
{
    return a->counter < b->counter
           || (a->counter == b->counter && a->since < b->since);
}


static void
put(heap_t *heap, int at, tenant_t *tenant)
{
    heap->items[at] = tenant;
    tenant->at = at;
}


static void
up(heap_t *heap, int at, tenant_t *tenant)
{
    while (at > 0 && heap_before(tenant, heap->items[(at - 1) / 2])) {
        put(heap, at, heap->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }

    put(heap, at, tenant);
}


static void
down(heap_t *heap, int at, tenant_t *tenant)
{
    for (int child = 2 * at + 1; child < heap->n; child = 2 * at + 1) {
        if (child + 1 < heap->n
            && heap_before(heap->items[child + 1], heap->items[child]))
        {
            child++;
        }

        if (!heap_before(heap->items[child], tenant)) {
            break;
        }

        put(heap, at, heap->items[child]);
        at = child;
    }

    put(heap, at, tenant);
}


void
heap_push(heap_t *heap, tenant_t *tenant)
{
    up(heap, heap->n++, tenant);
}


void
heap_remove(heap_t *heap, tenant_t *tenant)
{
    const int at = tenant->at;
    tenant_t *last = heap->items[--heap->n];

    tenant->at = -1;

    if (last != tenant) {
        down(heap, at, last);
        up(heap, last->at, last);
    }
}


void
heap_grown(heap_t *heap, tenant_t *tenant)
{
    down(heap, tenant->at, tenant);
}


void
heap_check(const heap_t *heap)
{
    for (int i = 0; i < heap->n; i++) {
        llm_assert(heap->items[i]->at == i);
        llm_assert(i == 0
                   || !heap_before(heap->items[i], heap->items[(i - 1) / 2]));
    }
}
