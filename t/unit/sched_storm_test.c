/*
 * The scheduler in random storms.  Every plan is compared with that of a naive
 * twin (arrays, everything recomputed), and the promises of the scheduler are
 * checked beside it: the budget, a token for every running sequence, strict
 * order, progress, all pages back at the end.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <malloc.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/sched/sched.h"
#include "t/unit/random.h"

enum { MAX_LIVE = 64 };


/* --- the twin --- */

typedef struct {
    int id;
    int n_tokens;
    int computed;
    bool parked;
    bool running;
} twin_seq_t;

typedef struct {
    int id, first, count;
    bool last;
} twin_row_t;

/* The rules again, written as plainly as possible. */
typedef struct {
    int pages, max_tokens, max_seqs, threshold;
    bool whole;
    int share;                     /* of one sequence, in this step */
    twin_seq_t *running[MAX_LIVE]; /* by admission */
    int n_running;
    twin_seq_t *waiting[MAX_LIVE]; /* by id, which is by arrival */
    int n_waiting;
    twin_row_t rows[MAX_LIVE];
    int n_rows;
    bool preempted;
} twin_t;


static int
pages_of(int n)
{
    return (n + 15) / 16;
}


static int
twin_free(const twin_t *t)
{
    int n = t->pages;

    for (int i = 0; i < t->n_running; i++) {
        n -= pages_of(t->running[i]->computed);
    }

    return n;
}


static void
twin_take(twin_seq_t **list, int *n, int i)
{
    (*n)--;
    memmove(list + i, list + i + 1, (size_t) (*n - i) * sizeof(*list));
}


static void
twin_preempt(twin_t *t, int i)
{
    twin_seq_t *s = t->running[i];
    int at = 0;

    twin_take(t->running, &t->n_running, i);
    s->computed = 0;
    s->running = false;

    while (at < t->n_waiting && t->waiting[at]->id < s->id) {
        at++;
    }

    memmove(t->waiting + at + 1, t->waiting + at,
            (size_t) (t->n_waiting - at) * sizeof(*t->waiting));
    t->waiting[at] = s;
    t->n_waiting++;
}


static int
twin_last_parked(const twin_t *t)
{
    for (int i = t->n_running - 1; i >= 0; i--) {
        if (t->running[i]->parked) {
            return i;
        }
    }

    return -1;
}


static int
twin_index(const twin_t *t, const twin_seq_t *s)
{
    for (int i = 0; i < t->n_running; i++) {
        if (t->running[i] == s) {
            return i;
        }
    }

    return -1;
}


static void
twin_row(twin_t *t, twin_seq_t *s, int count)
{
    t->rows[t->n_rows++] = (twin_row_t){ s->id, s->computed, count,
                                         s->computed + count == s->n_tokens };
    s->computed += count;
}


static int
twin_used(const twin_t *t)
{
    int n = 0;

    for (int i = 0; i < t->n_rows; i++) {
        n += t->rows[i].count;
    }

    return n;
}


static void
twin_running(twin_t *t)
{
    twin_seq_t *order[MAX_LIVE];
    int n = 0;

    for (int i = 0; i < t->n_running; i++) {
        twin_seq_t *s = t->running[i];

        if (!s->parked && s->computed < s->n_tokens) {
            order[n++] = s;
        }
    }

    for (int i = 0; i < n; i++) {
        twin_seq_t *s = order[i];
        const int most = t->max_tokens - twin_used(t) - (n - 1 - i);
        int count = s->n_tokens - s->computed;

        if (twin_index(t, s) < 0) {
            return; /* it was a victim, and so are all behind it */
        }

        count = count < t->share ? count : t->share;
        count = count < most ? count : most;

        while (pages_of(s->computed + count) - pages_of(s->computed)
               > twin_free(t)) {
            const int parked = twin_last_parked(t);

            t->preempted = true;
            twin_preempt(t, parked >= 0 ? parked : t->n_running - 1);

            if (twin_index(t, s) < 0) {
                return;
            }
        }

        twin_row(t, s, count);
    }
}


static void
twin_waiting(twin_t *t)
{
    for (int i = 0; i < t->n_waiting;) {
        twin_seq_t *s = t->waiting[i];
        int budget = t->max_tokens - twin_used(t);
        int seats = t->max_seqs;
        int pages = twin_free(t);
        int need = pages_of(s->n_tokens);
        int count = s->n_tokens < t->share ? s->n_tokens : t->share;

        if (s->parked) {
            i++;
            continue;
        }

        for (int j = 0; j < t->n_running; j++) {
            const twin_seq_t *r = t->running[j];

            seats -= !r->parked;
            pages += r->parked ? pages_of(r->computed) : 0;
            need +=
                r->parked ? 0 : pages_of(r->n_tokens) - pages_of(r->computed);
        }

        if (budget == 0 || seats == 0 || pages < need
            || (t->whole && s->n_tokens > budget))
        {
            return;
        }

        while (t->n_running == t->max_seqs || twin_free(t) < need) {
            twin_preempt(t, twin_last_parked(t));
        }

        for (i = 0; t->waiting[i] != s; i++) {
        }

        twin_take(t->waiting, &t->n_waiting, i);
        t->running[t->n_running++] = s;
        s->running = true;
        twin_row(t, s, count < budget ? count : budget);
    }
}


/* What is left of the budget, to the first that can have more. */
static void
twin_rest(twin_t *t)
{
    for (int i = 0; i < t->n_rows && twin_used(t) < t->max_tokens; i++) {
        twin_row_t *row = &t->rows[i];
        twin_seq_t *s = NULL;

        for (int j = 0; j < t->n_running; j++) {
            s = t->running[j]->id == row->id ? t->running[j] : s;
        }

        int more = s->n_tokens - s->computed;
        const int rest = t->max_tokens - twin_used(t);

        more = more < rest ? more : rest;

        if (pages_of(s->computed + more) - pages_of(s->computed) > twin_free(t))
        {
            return;
        }

        s->computed += more;
        row->count += more;
        row->last = s->computed == s->n_tokens;
    }
}


static void
twin_share(twin_t *t)
{
    int n = t->n_waiting;

    for (int i = 0; i < t->n_running; i++) {
        const twin_seq_t *s = t->running[i];

        n += !s->parked && s->n_tokens - s->computed > 1;
    }

    t->share = t->max_tokens / (n > 4 ? 4 : n > 0 ? n : 1);
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
    t->preempted = false;
    twin_share(t);
    twin_running(t);

    if (!t->preempted) {
        twin_waiting(t);
    }

    twin_rest(t);
}


static void
twin_remove(twin_t *t, twin_seq_t *s)
{
    const int at = twin_index(t, s);

    if (at >= 0) {
        twin_take(t->running, &t->n_running, at);
        return;
    }

    for (int i = 0; i < t->n_waiting; i++) {
        if (t->waiting[i] == s) {
            twin_take(t->waiting, &t->n_waiting, i);
            return;
        }
    }
}


/* --- the storm --- */

typedef struct {
    bool live;
    bool owed; /* the step reached its end: a token is to be appended */
    int target;
    seq_t seq;
    twin_seq_t twin;
} actor_t;

typedef struct {
    kv_pool_t *pool;
    sched_t *sched;
    const plan_t *plan;
    twin_t twin;
    actor_t actor[MAX_LIVE];
    random_t *random;
    int max_len;
    int next_id;
    int finished;
    uint64_t rows; /* digest of all plans */
} storm_t;


static void
storm_add(storm_t *s)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (a->live) {
            continue;
        }

        const int prompt = 1 + random_below(s->random, s->max_len - 1);
        const int more = random_below(s->random, s->max_len - prompt + 1);

        *a = (actor_t){ .live = true, .target = prompt + more };
        a->seq = (seq_t){ .n_tokens = prompt, .n_prompt = prompt, .owner = a };
        assert_int_equal(kv_table_init(&a->seq.table, s->max_len), LLM_OK);

        if (more > 0 && random_below(s->random, 4) == 0) {
            a->seq.n_tokens += random_below(s->random, more); /* recovered */
        }

        sched_add(s->sched, &a->seq);
        a->twin =
            (twin_seq_t){ .id = s->next_id++, .n_tokens = a->seq.n_tokens };
        s->twin.waiting[s->twin.n_waiting++] = &a->twin;
        return;
    }
}


static void
storm_drop(storm_t *s, actor_t *a)
{
    twin_remove(&s->twin, &a->twin);
    sched_remove(s->sched, &a->seq);
    assert_int_equal(a->seq.state, SEQ_FINISHED);
    kv_table_fini(&a->seq.table);
    a->live = false;
}


/* What must hold whatever the twin says. */
static void
storm_promises(const storm_t *s, const bool *could, const int *computed)
{
    const plan_t *plan = s->plan;
    bool planned[MAX_LIVE] = { 0 };
    int oldest_left = INT32_MAX;
    int newest_taken = -1;
    bool runnable = false;

    assert_true(plan->n_tokens <= s->twin.max_tokens);

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        const actor_t *a = row->seq->owner;

        assert_false(row->seq->parked);
        assert_true(row->count >= 1);
        assert_int_equal(row->seq->computed, row->first + row->count);
        assert_false(planned[a - s->actor]); /* once a step */
        planned[a - s->actor] = true;

        if (row->first == 0 && row->count == row->seq->computed
            && computed[a - s->actor] == 0 && a->twin.id > newest_taken)
        {
            newest_taken = a->twin.id;
        }
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        if (!a->live) {
            continue;
        }

        assert_true(a->seq.table.n <= pages_of(a->seq.n_tokens));

        /* who ran and could go on got a token, or was preempted */
        if (could[i]) {
            assert_true(planned[i] || a->seq.state == SEQ_WAITING);
        }

        if (a->seq.state == SEQ_WAITING && !a->seq.parked
            && a->twin.id < oldest_left) {
            oldest_left = a->twin.id;
        }

        runnable |= !a->seq.parked
                    && (a->seq.state == SEQ_WAITING || planned[i]
                        || a->seq.computed < a->seq.n_tokens);
    }

    assert_true(newest_taken < oldest_left); /* no overtaking */

    if (runnable && s->twin.n_running == 0) {
        fail_msg("nothing runs though something could");
    }
}


static void
storm_step(storm_t *s)
{
    const plan_t *plan;
    bool could[MAX_LIVE];
    int computed[MAX_LIVE];
    const size_t heap = mallinfo2().uordblks;

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        computed[i] = a->seq.computed;
        could[i] = a->live && a->seq.state == SEQ_RUNNING && !a->seq.parked
                   && a->seq.computed < a->seq.n_tokens;
    }

    plan = s->plan = sched_step(s->sched);
    assert_int_equal(mallinfo2().uordblks, heap); /* no allocation */
    sched_check(s->sched);

    twin_step(&s->twin);
    assert_int_equal(plan->n_rows, s->twin.n_rows);

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        const twin_row_t *want = &s->twin.rows[i];
        actor_t *a = row->seq->owner;

        assert_int_equal(a->twin.id, want->id);
        assert_int_equal(row->first, want->first);
        assert_int_equal(row->count, want->count);
        assert_int_equal(row->last, want->last);
        a->owed |= row->last;

        s->rows =
            (s->rows * 31 + (uint64_t) want->id) * 31 + (uint64_t) want->count;
    }

    storm_promises(s, could, computed);
    assert_int_equal(kv_pool_free_pages(s->pool), twin_free(&s->twin));
    assert_int_equal(sched_running(s->sched), s->twin.n_running);
    assert_int_equal(sched_waiting(s->sched), s->twin.n_waiting);
}


/* The owner's part: append what was sampled (now and then a step late), end
 * what reached its target. */
static void
storm_append(storm_t *s, bool late)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (!a->live || !a->owed || (late && random_below(s->random, 10) == 0))
        {
            continue;
        }

        a->owed = false;

        if (a->seq.n_tokens >= a->target) {
            storm_drop(s, a);
            s->finished++;
            continue;
        }

        a->seq.n_tokens++;
        a->twin.n_tokens++;
    }
}


static void
storm_park(actor_t *a, bool parked)
{
    a->seq.parked = parked;
    a->twin.parked = parked;
}


static void
storm_chaos(storm_t *s)
{
    for (int n = random_below(s->random, 3); n > 0; n--) {
        storm_add(s);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (!a->live) {
            continue;
        }

        if (random_below(s->random, 30) == 0) {
            storm_park(a, !a->seq.parked);
        }

        if (random_below(s->random, 300) == 0) {
            storm_drop(s, a);
        }
    }
}


static uint64_t
storm_run(random_t *random, int n_steps, uint64_t *preemptions)
{
    static storm_t s;
    int steps = 0;

    s = (storm_t){ .random = random };

    const int pages = 2 + random_below(random, 40);
    const bool whole = random_below(random, 4) == 0;
    const int threshold = random_below(random, 3) * random_below(random, 60);
    const int max_tokens =
        1 + random_below(random, 100) + (whole ? pages * 16 : 0);
    const int max_seqs = 1 + random_below(random, 24);

    s.max_len = 2 + random_below(random, pages * 16 - 1);
    s.pool = kv_pool_create(pages);
    s.sched = sched_create(&(sched_conf_t){ .max_tokens = max_tokens,
                                            .max_seqs = max_seqs,
                                            .whole_prompts = whole,
                                            .long_prefill = threshold },
                           s.pool);
    assert_non_null(s.sched);
    s.twin =
        (twin_t){ .pages = pages,
                  .max_tokens = max_tokens,
                  .max_seqs = max_seqs < max_tokens ? max_seqs : max_tokens,
                  .threshold = threshold,
                  .whole = whole };

    for (int i = 0; i < n_steps; i++) {
        storm_chaos(&s);
        storm_step(&s);
        storm_append(&s, true);
    }

    /* no more arrivals, all clients read: everyone comes to an end */
    for (int i = 0; i < MAX_LIVE; i++) {
        storm_park(&s.actor[i], false);
    }

    while (sched_running(s.sched) + sched_waiting(s.sched) > 0) {
        storm_step(&s);
        storm_append(&s, false);
        assert_true(steps++ < 200000);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        assert_false(s.actor[i].live);
    }

    *preemptions += sched_preemptions(s.sched);
    assert_int_equal(kv_pool_free_pages(s.pool), pages);
    sched_destroy(s.sched);
    kv_pool_destroy(s.pool);

    return s.rows;
}


static void
test_storms(void **state)
{
    random_t random = random_start("scheduler storms");
    uint64_t preemptions = 0;

    (void) state;

    for (int i = 0; i < 150; i++) {
        storm_run(&random, 300, &preemptions);
    }

    printf("# %llu preemptions\n", (unsigned long long) preemptions);
    assert_true(preemptions > 1000); /* or the storms were too mild */
}


/* The same requests, the same plans. */
static void
test_deterministic(void **state)
{
    uint64_t preemptions[2] = { 0 };
    uint64_t digest[2];

    (void) state;

    for (int i = 0; i < 2; i++) {
        random_t random = { 20 };

        digest[i] = storm_run(&random, 2000, &preemptions[i]);
    }

    assert_int_equal(digest[0], digest[1]);
    assert_int_equal(preemptions[0], preemptions[1]);
    assert_true(digest[0] != 0);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_storms),
        cmocka_unit_test(test_deterministic),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
