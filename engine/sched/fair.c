/*
 * Tenants, their counters and lines.  Called by sched.c and admit.c.
 *
 * Two heaps hold tenants: those with waiting sequences, where the next one to
 * serve is on top, and idle ones, where the next one to forget is.  A tenant
 * all of whose sequences run is in neither.  The heaps' arrays grow when a
 * tenant is made, so that a step allocates nothing.
 */

#include "engine/sched/fair.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "engine/base/status.h"

enum { BUCKETS_MIN = 64 };


static seq_t *
seq_of(const list_t *link)
{
    return list_entry(link, seq_t, link);
}


static tenant_t *
tenant_create(const void *name, size_t len)
{
    tenant_t *tenant = calloc(1, sizeof(tenant_t) + len);

    if (tenant == NULL) {
        return NULL;
    }

    if (len > 0) {
        memcpy(tenant->name, name, len);
    }

    tenant->len = len;
    tenant->weight = 1;
    tenant->at = -1;
    list_init(&tenant->waiting);

    return tenant;
}


int
fair_init(fair_t *fair)
{
    *fair = (fair_t){ .n_buckets = BUCKETS_MIN, .cap = BUCKETS_MIN, .step = 1 };
    list_init(&fair->aside);

    fair->nameless = tenant_create(NULL, 0);
    fair->buckets = calloc(BUCKETS_MIN, sizeof(tenant_t *));
    fair->waiting.items = calloc(BUCKETS_MIN, sizeof(tenant_t *));
    fair->idle.items = calloc(BUCKETS_MIN, sizeof(tenant_t *));

    if (fair->nameless == NULL || fair->buckets == NULL
        || fair->waiting.items == NULL || fair->idle.items == NULL)
    {
        fair_fini(fair);
        return LLM_NOMEM;
    }

    /* without a seed from the kernel collisions are merely easier to look
     * for, and cost time only */
    if (getrandom(&fair->seed, sizeof(fair->seed), GRND_NONBLOCK)
        != sizeof(fair->seed))
    {
        fair->seed = (uint64_t) (uintptr_t) fair;
    }

    return LLM_OK;
}


void
fair_fini(fair_t *fair)
{
    llm_assert(fair->n_waiting == 0 && fair->n_tenants == fair->idle.n);

    for (int i = 0; i < fair->idle.n; i++) {
        free(fair->idle.items[i]);
    }

    free(fair->nameless);
    free(fair->buckets);
    free(fair->waiting.items);
    free(fair->idle.items);
    *fair = (fair_t){ 0 };
}


static tenant_t **
bucket_of(const fair_t *fair, uint64_t hash)
{
    return &fair->buckets[hash & (fair->n_buckets - 1)];
}


/* Room in both heaps for one tenant more, and the nameless one. */
static int
reserve_heaps(fair_t *fair)
{
    if (fair->n_tenants + 2 <= fair->cap) {
        return LLM_OK;
    }

    heap_t *heaps[2] = { &fair->waiting, &fair->idle };
    const int cap = 2 * fair->cap;

    for (int i = 0; i < 2; i++) {
        tenant_t **items =
            realloc(heaps[i]->items, (size_t) cap * sizeof(tenant_t *));

        if (items == NULL) {
            return LLM_NOMEM;
        }

        heaps[i]->items = items;
    }

    fair->cap = cap;

    return LLM_OK;
}


/* As many buckets as tenants; without memory the lists just get longer. */
static void
grow_buckets(fair_t *fair)
{
    tenant_t **old = fair->buckets;
    const size_t n = fair->n_buckets;

    if ((size_t) fair->n_tenants < n) {
        return;
    }

    tenant_t **buckets = calloc(2 * n, sizeof(tenant_t *));

    if (buckets == NULL) {
        return;
    }

    fair->buckets = buckets;
    fair->n_buckets = 2 * n;

    for (size_t i = 0; i < n; i++) {
        for (tenant_t *t = old[i], *next; t != NULL; t = next) {
            tenant_t **bucket = bucket_of(fair, t->hash);

            next = t->next;
            t->next = *bucket;
            *bucket = t;
        }
    }

    free(old);
}


static void
forget(fair_t *fair, tenant_t *tenant)
{
    tenant_t **place = bucket_of(fair, tenant->hash);

    while (*place != tenant) {
        place = &(*place)->next;
    }

    *place = tenant->next;
    heap_remove(&fair->idle, tenant);
    fair->n_tenants--;

    if (fair->last == tenant) {
        fair->left = tenant->counter;
        fair->last = NULL;
    }

    free(tenant);
}


static void
set_weight(tenant_t *tenant, double weight)
{
    tenant->weight = weight > 0 && isfinite(weight) ? weight : 1;
}


tenant_t *
fair_tenant(fair_t *fair, const void *name, size_t len, double weight)
{
    if (len == 0) {
        set_weight(fair->nameless, weight);
        return fair->nameless;
    }

    const uint64_t hash = XXH3_64bits_withSeed(name, len, fair->seed);
    tenant_t *tenant = *bucket_of(fair, hash);

    while (tenant != NULL
           && (tenant->hash != hash || tenant->len != len
               || memcmp(tenant->name, name, len) != 0))
    {
        tenant = tenant->next;
    }

    if (tenant != NULL) {
        set_weight(tenant, weight);
        return tenant;
    }

    /* two, so that the memory shrinks again after a time of many tenants */
    for (int i = 0; i < 2 && fair->idle.n >= FAIR_IDLE; i++) {
        forget(fair, fair->idle.items[0]);
    }

    if (reserve_heaps(fair) != LLM_OK) {
        return NULL;
    }

    tenant = tenant_create(name, len);

    if (tenant == NULL) {
        return NULL;
    }

    grow_buckets(fair);
    tenant->hash = hash;
    tenant->next = *bucket_of(fair, hash);
    *bucket_of(fair, hash) = tenant;
    fair->n_tenants++;
    set_weight(tenant, weight);
    heap_push(&fair->idle, tenant);

    return tenant;
}


void
fair_hold(fair_t *fair, tenant_t *tenant)
{
    if (tenant->n_seqs++ == 0 && tenant != fair->nameless) {
        heap_remove(&fair->idle, tenant);
    }
}


void
fair_release(fair_t *fair, tenant_t *tenant)
{
    if (--tenant->n_seqs == 0 && tenant != fair->nameless) {
        heap_push(&fair->idle, tenant);
    }
}


const tenant_t *
fair_first(const fair_t *fair)
{
    return fair->waiting.n > 0 ? fair->waiting.items[0] : NULL;
}


/* The counter below which nobody begins to wait. */
static double
floor_of(const fair_t *fair)
{
    const tenant_t *first = fair_first(fair);
    double least = first != NULL ? first->counter : (double) INFINITY;

    for (const list_t *l = fair->aside.next; l != &fair->aside; l = l->next) {
        const tenant_t *tenant = list_entry(l, const tenant_t, aside);

        least =
            tenant->wants && tenant->counter < least ? tenant->counter : least;
    }

    if (isfinite(least)) {
        return least;
    }

    return fair->last != NULL ? fair->last->counter : fair->left;
}


static void
lift(const fair_t *fair, tenant_t *tenant)
{
    const double least = floor_of(fair);

    if (tenant->counter < least) {
        tenant->counter = least;
    }
}


static bool
seq_before(const seq_t *a, const seq_t *b)
{
    return a->priority < b->priority
           || (a->priority == b->priority && a->arrival < b->arrival);
}


/* The line has one more; its tenant waits, if it did not. */
static void
pushed(fair_t *fair, tenant_t *tenant)
{
    fair->n_waiting++;

    if (tenant->at < 0 && !tenant->is_aside) {
        lift(fair, tenant);
        tenant->since = fair->serial++;
        heap_push(&fair->waiting, tenant);
    }
}


void
fair_push(fair_t *fair, seq_t *seq)
{
    list_t *head = &seq->tenant->waiting;
    list_t *place = head->prev;

    while (place != head && seq_before(seq, seq_of(place))) {
        place = place->prev;
    }

    list_insert(place, &seq->link);
    pushed(fair, seq->tenant);
}


void
fair_push_again(fair_t *fair, seq_t *seq)
{
    list_t *head = &seq->tenant->waiting;
    list_t *place = head;

    while (place->next != head && seq_before(seq_of(place->next), seq)) {
        place = place->next;
    }

    list_insert(place, &seq->link);
    pushed(fair, seq->tenant);
}


void
fair_pull(fair_t *fair, seq_t *seq)
{
    tenant_t *tenant = seq->tenant;

    fair_skip(seq);
    list_remove(&seq->link);
    fair->n_waiting--;

    if (!list_empty(&tenant->waiting) || tenant->is_aside) {
        return;
    }

    heap_remove(&fair->waiting, tenant);

    if (fair->waiting.n == 0 && list_empty(&fair->aside)) {
        fair->last = tenant;
    }
}


void
fair_charge(fair_t *fair, seq_t *seq, int tokens, int price)
{
    tenant_t *tenant = seq->tenant;

    seq->charged = seq->n_tokens;

    if (tokens > 0) {
        tenant->counter += (double) tokens * price / tenant->weight;

        if (tenant->at >= 0) {
            heap_grown(&fair->waiting, tenant);
        }
    }
}


seq_t *
fair_next(fair_t *fair)
{
    while (fair->waiting.n > 0) {
        tenant_t *tenant = fair->waiting.items[0];
        const list_t *head = &tenant->waiting;

        if (tenant->begun != fair->step) {
            tenant->begun = fair->step;
            tenant->cursor = head->next;
            tenant->wants = false;
        }

        while (tenant->cursor != head && seq_of(tenant->cursor)->parked) {
            tenant->cursor = tenant->cursor->next;
        }

        if (tenant->cursor != head) {
            tenant->wants = true;
            return seq_of(tenant->cursor);
        }

        heap_remove(&fair->waiting, tenant);
        list_push_back(&fair->aside, &tenant->aside);
        tenant->is_aside = true;
    }

    return NULL;
}


void
fair_skip(seq_t *seq)
{
    if (seq->tenant->cursor == &seq->link) {
        seq->tenant->cursor = seq->link.next;
    }
}


static void
back_from_aside(fair_t *fair, tenant_t *tenant)
{
    list_remove(&tenant->aside);
    tenant->is_aside = false;
    heap_push(&fair->waiting, tenant);
}


void
fair_rewind(fair_t *fair)
{
    for (list_t *l = fair->aside.next, *next; l != &fair->aside; l = next) {
        tenant_t *tenant = list_entry(l, tenant_t, aside);

        next = l->next;

        if (tenant->wants) {
            back_from_aside(fair, tenant);
        }
    }

    /* the smallest counter is now one that counts */
    while (!list_empty(&fair->aside)) {
        tenant_t *tenant = list_entry(fair->aside.next, tenant_t, aside);

        lift(fair, tenant);
        back_from_aside(fair, tenant);
    }

    fair->step++;
}


static int
check_line(const tenant_t *tenant)
{
    const list_t *head = &tenant->waiting;
    int n = 0;

    for (const list_t *l = head->next; l != head; l = l->next) {
        const seq_t *seq = seq_of(l);

        llm_assert(l->next->prev == l && seq->state == SEQ_WAITING);
        llm_assert(seq->tenant == tenant);
        llm_assert(seq->computed == 0 && seq->table.n == 0);
        llm_assert(l->prev == head || seq_before(seq_of(l->prev), seq));
        (void) seq;
        n++;
    }

    llm_assert(n >= 1 && n <= tenant->n_seqs);

    return n;
}


void
fair_check(const fair_t *fair)
{
    int n = 0;

    llm_assert(list_empty(&fair->aside));
    llm_assert(fair->idle.n <= fair->n_tenants);
    heap_check(&fair->waiting);
    heap_check(&fair->idle);

    for (int i = 0; i < fair->waiting.n; i++) {
        n += check_line(fair->waiting.items[i]);
    }

    for (int i = 0; i < fair->idle.n; i++) {
        llm_assert(fair->idle.items[i]->n_seqs == 0);
        llm_assert(list_empty(&fair->idle.items[i]->waiting));
    }

    llm_assert(n == fair->n_waiting);
    (void) n;
}
