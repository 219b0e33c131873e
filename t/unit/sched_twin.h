/*
 * The scheduler's rules once more, written as plainly as possible: arrays,
 * everything recomputed, no heap, no cursors, no page ids.  The storms compare
 * every plan of the scheduler with the twin's.
 */

#ifndef T_UNIT_SCHED_TWIN_H
#define T_UNIT_SCHED_TWIN_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MAX_LIVE = 64, MAX_TENANTS = 5 };

typedef struct {
    double counter, weight;
    int since, n_waiting, aside; /* aside: 0, or its order */
    bool wants;
} twin_tenant_t;

typedef struct {
    int id, n_tokens, cap, computed, charged;
    int count; /* in this step */
    int tenant, priority, preemptions;
    bool parked, running, admitted;
} twin_seq_t;

typedef struct {
    int id, first, count, last;
} twin_row_t;

typedef struct {
    int pages, max_tokens, max_seqs, threshold, reserve;
    bool whole, adapts;
    double ratio;
    int share;                     /* of one sequence, in this step */
    twin_seq_t *running[MAX_LIVE]; /* by admission */
    int n_running;
    twin_seq_t *waiting[MAX_LIVE]; /* in no order */
    int n_waiting;
    twin_tenant_t tenant[MAX_TENANTS];
    int last_left; /* tenant that left the empty line behind; -1: nobody yet */
    int serial, asides;
    twin_row_t rows[MAX_LIVE];
    int n_rows, preempted; /* in this step */
} twin_t;


static int
pages_of(int n)
{
    return (n + 15) / 16;
}


/* Pages of a sequence that has n tokens in them. */
static int
twin_pages(const twin_t *t, int n)
{
    return pages_of(n > t->reserve ? n : t->reserve);
}


static int
twin_free(const twin_t *t)
{
    int n = t->pages;

    for (int i = 0; i < t->n_running; i++) {
        const twin_seq_t *s = t->running[i];

        n -= twin_pages(t, s->computed + s->count);
    }

    return n;
}


static int
twin_budget(const twin_t *t)
{
    int n = t->max_tokens;

    for (int i = 0; i < t->n_running; i++) {
        n -= t->running[i]->count;
    }

    return n;
}


static int
twin_todo(const twin_seq_t *s)
{
    return s->parked ? 0 : s->n_tokens - s->computed;
}


static void
twin_take(twin_seq_t **list, int *n, const twin_seq_t *s)
{
    int i = 0;

    while (list[i] != s) {
        i++;
    }

    (*n)--;
    memmove(list + i, list + i + 1, (size_t) (*n - i) * sizeof(*list));
}


static double
twin_floor(const twin_t *t)
{
    double least = INFINITY;

    for (int i = 0; i < MAX_TENANTS; i++) {
        const twin_tenant_t *tenant = &t->tenant[i];

        if (tenant->n_waiting > 0 && (tenant->aside == 0 || tenant->wants)) {
            least = fmin(least, tenant->counter);
        }
    }

    if (isfinite(least)) {
        return least;
    }

    return t->last_left >= 0 ? t->tenant[t->last_left].counter : 0;
}


static void
twin_push(twin_t *t, twin_seq_t *s)
{
    twin_tenant_t *tenant = &t->tenant[s->tenant];

    if (tenant->n_waiting == 0) {
        tenant->counter = fmax(tenant->counter, twin_floor(t));
        tenant->since = t->serial++;
    }

    tenant->n_waiting++;
    t->waiting[t->n_waiting++] = s;
}


static void
twin_pull(twin_t *t, twin_seq_t *s)
{
    twin_take(t->waiting, &t->n_waiting, s);

    if (--t->tenant[s->tenant].n_waiting == 0 && t->n_waiting == 0) {
        t->last_left = s->tenant;
    }
}


static void
twin_charge(twin_t *t, twin_seq_t *s, int tokens, int price)
{
    s->charged = s->n_tokens;

    if (tokens > 0) {
        t->tenant[s->tenant].counter +=
            (double) tokens * price / t->tenant[s->tenant].weight;
    }
}


static void
twin_remove(twin_t *t, twin_seq_t *s)
{
    if (s->running) {
        twin_take(t->running, &t->n_running, s);
    } else {
        twin_pull(t, s);
    }

    if (s->admitted) {
        twin_charge(t, s, s->n_tokens - s->charged, 2);
    }
}


static void
twin_preempt(twin_t *t, twin_seq_t *s)
{
    twin_take(t->running, &t->n_running, s);
    s->computed = 0;
    s->count = 0;
    s->running = false;
    s->preemptions++;
    t->preempted++;
    twin_push(t, s);
}


static twin_seq_t *
twin_parked(const twin_t *t)
{
    for (int i = t->n_running - 1; i >= 0; i--) {
        if (t->running[i]->parked) {
            return t->running[i];
        }
    }

    return NULL;
}


/* < 0: a is preempted before b */
static int
twin_compare(const twin_t *t, const twin_seq_t *a, const twin_seq_t *b)
{
    const twin_tenant_t *ta = &t->tenant[a->tenant];
    const twin_tenant_t *tb = &t->tenant[b->tenant];
    const int64_t ca = (int64_t) a->computed * (a->preemptions + 1);
    const int64_t cb = (int64_t) b->computed * (b->preemptions + 1);

    if (ta->counter != tb->counter) {
        return ta->counter > tb->counter ? -1 : 1;
    }

    if (ta != tb) {
        return tb->since - ta->since;
    }

    if (a->priority != b->priority) {
        return b->priority - a->priority;
    }

    return ca != cb ? (ca < cb ? -1 : 1) : b->id - a->id;
}


/* Above: among those of its tenant with a greater priority value; NULL: among
 * all but the first. */
static twin_seq_t *
twin_victim(const twin_t *t, const twin_seq_t *above)
{
    twin_seq_t *victim = NULL;
    bool first = above == NULL;

    for (int i = 0; i < t->n_running; i++) {
        twin_seq_t *s = t->running[i];

        if (s->parked
            || (above != NULL
                && (s->tenant != above->tenant
                    || s->priority <= above->priority)))
        {
            continue;
        }

        if (!first && (victim == NULL || twin_compare(t, s, victim) < 0)) {
            victim = s;
        }

        first = false;
    }

    return victim;
}


/* Who is to be served next; NULL: nobody waits. */
static twin_tenant_t *
twin_first(twin_t *t)
{
    twin_tenant_t *tenant = NULL;

    for (int i = 0; i < MAX_TENANTS; i++) {
        twin_tenant_t *other = &t->tenant[i];

        if (other->n_waiting > 0 && other->aside == 0
            && (tenant == NULL || other->counter < tenant->counter
                || (other->counter == tenant->counter
                    && other->since < tenant->since)))
        {
            tenant = other;
        }
    }

    return tenant;
}


/* Does somebody wait who is to have his chance before it? */
static bool
twin_stands_back(twin_t *t, const twin_seq_t *s)
{
    const twin_tenant_t *own = &t->tenant[s->tenant];
    const twin_tenant_t *first = twin_first(t);

    if (first != NULL && first != own && first->counter <= own->counter) {
        return true;
    }

    for (int i = 0; i < t->n_waiting; i++) {
        if (t->waiting[i]->tenant == s->tenant
            && t->waiting[i]->priority < s->priority) {
            return true;
        }
    }

    return false;
}


static void
twin_running(twin_t *t)
{
    bool rise = false;
    int behind = 0;

    for (int i = 0; i < t->n_running; i++) {
        behind += twin_todo(t->running[i]) > 0;
    }

    for (int i = 0; i < t->n_running; i++) {
        twin_seq_t *s = t->running[i];
        const int most = twin_budget(t) - (behind - 1);
        int count = twin_todo(s);

        if (count == 0) {
            continue;
        }

        behind--;
        count = count < t->share ? count : t->share;
        count = count > 1 && !t->whole && twin_stands_back(t, s) ? 1 : count;
        s->count = count < most ? count : most;
    }

    while (twin_free(t) < 0) {
        twin_seq_t *parked = twin_parked(t);

        rise |= parked == NULL;
        twin_preempt(t, parked != NULL ? parked : twin_victim(t, NULL));
    }

    if (rise && t->adapts) {
        t->ratio = fmin(t->ratio * 1.5 + 0.01, 1);
    }
}


static int
twin_expected(const twin_t *t, const twin_seq_t *s)
{
    const int more = (int) ceil(t->ratio * (s->cap - s->n_tokens));

    return twin_pages(t, s->n_tokens + (t->reserve > 0 ? 0 : more));
}


/* Does it fit when all parked ones go, and with lower the less urgent ones? */
static bool
twin_fits(const twin_t *t, const twin_seq_t *s, bool lower)
{
    int seats = t->max_seqs;
    int budget = t->max_tokens;
    int pages = t->pages - twin_expected(t, s);
    bool alone = true;

    for (int i = 0; i < t->n_running; i++) {
        const twin_seq_t *r = t->running[i];
        const bool goes =
            lower && r->tenant == s->tenant && r->priority > s->priority;

        if (!r->parked && !goes) {
            const int has = twin_pages(t, r->computed + r->count);
            const int wants = twin_expected(t, r);

            pages -= wants > has ? wants : has;
            seats--;
            budget -= r->count;
            alone = false;
        }
    }

    return seats > 0 && budget > 0 && (pages >= 0 || alone);
}


/* The next of those that wait, and is not parked. */
static twin_seq_t *
twin_candidate(twin_t *t)
{
    for (;;) {
        twin_tenant_t *tenant = twin_first(t);
        twin_seq_t *best = NULL;

        for (int i = 0; i < t->n_waiting; i++) {
            twin_seq_t *s = t->waiting[i];

            if (&t->tenant[s->tenant] == tenant && !s->parked
                && (best == NULL || s->priority < best->priority
                    || (s->priority == best->priority && s->id < best->id)))
            {
                best = s;
            }
        }

        if (best != NULL || tenant == NULL) {
            if (best != NULL) {
                tenant->wants = true;
            }

            return best;
        }

        tenant->aside = ++t->asides;
    }
}


/* Whose sequences are all parked is not to save up. */
static void
twin_rewind(twin_t *t)
{
    for (int k = 1; k <= t->asides; k++) {
        for (int i = 0; i < MAX_TENANTS; i++) {
            twin_tenant_t *tenant = &t->tenant[i];

            if (tenant->aside == k && !tenant->wants) {
                tenant->counter = fmax(tenant->counter, twin_floor(t));
                tenant->wants = true;
            }
        }
    }

    for (int i = 0; i < MAX_TENANTS; i++) {
        t->tenant[i].aside = 0;
        t->tenant[i].wants = false;
    }

    t->asides = 0;
}


static void
twin_admit(twin_t *t, twin_seq_t *s)
{
    const int budget = twin_budget(t);
    int count = s->n_tokens < t->share ? s->n_tokens : t->share;

    twin_pull(t, s);
    t->running[t->n_running++] = s;
    s->running = true;
    s->count = count < budget ? count : budget;

    if (s->admitted) {
        twin_charge(t, s, s->n_tokens - s->charged, 2);
    } else {
        twin_charge(t, s, s->n_tokens, 1);
    }

    s->admitted = true;
}


static void
twin_waiting(twin_t *t)
{
    twin_seq_t *s;

    while ((s = twin_candidate(t)) != NULL) {
        bool took = false;

        if (t->whole && s->n_tokens > twin_budget(t)) {
            break;
        }

        if (!twin_fits(t, s, false) && !twin_fits(t, s, true)) {
            break;
        }

        while (!twin_fits(t, s, false)) {
            twin_preempt(t, twin_victim(t, s));
            took = true;
        }

        for (;;) {
            int free = t->pages - twin_pages(t, s->n_tokens);

            for (int i = 0; i < t->n_running; i++) {
                const twin_seq_t *r = t->running[i];

                free -= twin_pages(t, r->parked ? r->computed : r->n_tokens);
            }

            if (t->n_running < t->max_seqs && free >= 0) {
                break;
            }

            twin_preempt(t, twin_parked(t));
        }

        twin_admit(t, s);

        if (took) {
            break;
        }
    }

    twin_rewind(t);
}


/* What is left of the budget, to the first that can have more. */
static void
twin_rest(twin_t *t, int most)
{
    for (int i = 0; i < t->n_running && twin_budget(t) > 0; i++) {
        twin_seq_t *s = t->running[i];
        const int before = s->count;
        const int rest = twin_budget(t);
        int count = twin_todo(s);

        count = count < most ? count : most;
        count = count < before + rest ? count : before + rest;

        if (before == 0 || count <= before) {
            continue;
        }

        s->count = count;

        if (twin_free(t) < 0) {
            s->count = before;
            return;
        }
    }
}


/* Charges what was generated, and finds the share of the step. */
static void
twin_begin(twin_t *t)
{
    int n = t->n_waiting;
    int rest = t->max_tokens;
    bool generated = false;

    for (int i = 0; i < t->n_running; i++) {
        twin_seq_t *s = t->running[i];

        n += !s->parked && s->n_tokens - s->computed > 1;
        rest -= !s->parked && s->n_tokens - s->computed == 1;
        generated |= s->n_tokens > s->charged;
        twin_charge(t, s, s->n_tokens - s->charged, 2);
        s->count = 0;
    }

    if (generated && t->adapts) {
        t->ratio = fmax(t->ratio * 0.997, 0.01);
    }

    t->share = rest / (n > 4 ? 4 : n > 0 ? n : 1);
    t->share = t->share > t->threshold ? t->share : t->threshold;
    t->share = t->share > 1 ? t->share : 1;

    if (n <= 1 || t->whole) {
        t->share = INT32_MAX;
    }
}


static void
twin_step(twin_t *t)
{
    t->n_rows = 0;
    t->preempted = 0;
    twin_begin(t);
    twin_running(t);

    if (t->preempted == 0) {
        twin_waiting(t);
    }

    twin_rest(t, t->share);
    twin_rest(t, INT32_MAX);

    for (int i = 0; i < t->n_running; i++) {
        twin_seq_t *s = t->running[i];

        if (s->count > 0) {
            t->rows[t->n_rows++] =
                (twin_row_t){ s->id, s->computed, s->count,
                              s->computed + s->count == s->n_tokens };
            s->computed += s->count;
            s->count = 0;
        }
    }
}

#endif /* T_UNIT_SCHED_TWIN_H */
