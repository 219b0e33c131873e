/*
 * The scheduler with a prefix cache, in random storms.  The memory behind the
 * pages is played by a digest of the history for each position: the plan's
 * copies are made, then all positions before a row that is computed must hold
 * the right ones, and a page that somebody else can see must not be written.
 * After the step every sequence must have all it believes to have.  So a wrong
 * hit, a page shared or copied too early or reused too soon shows at once,
 * whatever the plan was.
 *
 * Then the rules for sequences with a common beginning, by hand.
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
#include "engine/kv/prefix.h"
#include "engine/sched/sched.h"
#include "t/unit/random.h"
#include "t/unit/sched_shared.h"

enum { MAX_LIVE = 40, MAX_PAGES = 64, MAX_LEN = MAX_PAGES * 16 };

typedef struct {
    bool live;
    bool owed; /* a token is to be appended */
    int target;
    int salt;
    seq_t seq;
    int32_t tokens[MAX_LEN];
    uint64_t digest[MAX_LEN]; /* of the history up to each position */
    int n_digests;
} actor_t;

typedef struct {
    kv_pool_t *pool;
    kv_prefix_t *prefix;
    sched_t *sched;
    actor_t actor[MAX_LIVE];
    uint64_t memory[MAX_PAGES][16];
    random_t *random;
    int max_len;
    int finished;
    int waited; /* sequences that have waited for a leader */
    int copies;
    int lost; /* sources that somebody else had already when copied */
} storm_t;


static uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 29;
}


static uint64_t
digest_at(actor_t *a, int position)
{
    for (; a->n_digests <= position; a->n_digests++) {
        const uint64_t before = a->n_digests > 0 ? a->digest[a->n_digests - 1]
                                                 : (uint64_t) a->salt + 1;

        a->digest[a->n_digests] =
            mix(before * 31 + (uint64_t) a->tokens[a->n_digests] + 7);
    }

    return a->digest[position];
}


/* Prompts from a few beginnings, so that many share a lot. */
static void
storm_add(storm_t *s)
{
    actor_t *a = s->actor;

    while (a < s->actor + MAX_LIVE && a->live) {
        a++;
    }

    if (a == s->actor + MAX_LIVE) {
        return;
    }

    const int prompt = 1 + random_below(s->random, s->max_len - 1);
    const int more = random_below(s->random, s->max_len - prompt + 1);
    const int own = random_below(s->random, 2 * prompt);
    random_t text = { (uint64_t) random_below(s->random, 3) };

    memset(a, 0, sizeof(*a));
    a->live = true;
    a->target = prompt + more;
    a->salt = random_below(s->random, 5) == 0;

    for (int i = 0; i < prompt; i++) {
        a->tokens[i] = random_below(i < own ? &text : s->random, 50);
    }

    a->seq =
        (seq_t){ .tokens = a->tokens,
                 .n_tokens = prompt,
                 .n_prompt = prompt,
                 .want_prompt = random_below(s->random, 12) == 0,
                 .root = kv_prefix_root(s->prefix, &a->salt, sizeof(a->salt)),
                 .owner = a };
    assert_int_equal(kv_table_init(&a->seq.table, s->max_len), LLM_OK);
    sched_add(s->sched, &a->seq);
}


static void
storm_drop(storm_t *s, actor_t *a)
{
    sched_remove(s->sched, &a->seq);
    s->waited += a->seq.waits > 0;
    kv_table_fini(&a->seq.table);
    a->live = false;
}


/* Each copy goes to a page that one sequence of the plan has alone.  Its
 * source may be anybody's by now, but what it holds is what it held. */
static void
storm_copies(storm_t *s, const plan_t *plan)
{
    for (int c = 0; c < plan->n_copies; c++) {
        const plan_copy_t *copy = &plan->copies[c];
        int owners = 0;

        assert_int_not_equal(copy->from, copy->to);
        assert_int_equal(kv_pool_refs(s->pool, copy->to), 1);
        assert_false(kv_pool_kept(s->pool, copy->to));

        for (int i = 0; i < plan->n_rows; i++) {
            const plan_row_t *row = &plan->rows[i];

            owners += row->first % 16 > 0
                      && row->seq->table.pages[row->first / 16] == copy->to;
        }

        assert_int_equal(owners, 1);

        for (int later = c + 1; later < plan->n_copies; later++) {
            assert_int_not_equal(copy->to, plan->copies[later].from);
            s->lost += plan->copies[later].to == copy->from;
        }

        s->lost += kv_pool_refs(s->pool, copy->from) == 0;
        memcpy(s->memory[copy->to], s->memory[copy->from],
               sizeof(s->memory[0]));
    }

    s->copies += plan->n_copies;
}


/* Everybody has what it counts as computed. */
static void
storm_contents(storm_t *s)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        for (int p = 0; a->live && p < a->seq.computed; p++) {
            assert_true(s->memory[a->seq.table.pages[p / 16]][p % 16]
                        == digest_at(a, p));
        }
    }
}


/* What the row reads must be there, before anything of this step is. */
static void
row_reads(const storm_t *s, const plan_row_t *row)
{
    const seq_t *seq = row->seq;

    for (int p = 0; p < row->first; p++) {
        assert_true(s->memory[seq->table.pages[p / 16]][p % 16]
                    == digest_at(seq->owner, p));
    }
}


static void
row_writes(storm_t *s, const plan_row_t *row)
{
    const seq_t *seq = row->seq;

    for (int p = row->first; p < row->first + row->count; p++) {
        const int32_t page = seq->table.pages[p / 16];

        assert_int_equal(kv_pool_refs(s->pool, page), 1);
        assert_false(kv_pool_kept(s->pool, page));
        s->memory[page][p % 16] = digest_at(seq->owner, p);
    }
}


static void
storm_step(storm_t *s)
{
    bool could[MAX_LIVE], fresh[MAX_LIVE];
    const size_t heap = mallinfo2().uordblks;

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        could[i] = a->live && a->seq.state == SEQ_RUNNING && !a->seq.parked
                   && a->seq.computed < a->seq.n_tokens;
        fresh[i] = a->live && a->seq.state == SEQ_WAITING;
    }

    const plan_t *plan = sched_step(s->sched);

    assert_int_equal(mallinfo2().uordblks, heap); /* no allocation */
    sched_check(s->sched);
    storm_copies(s, plan);

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        actor_t *a = row->seq->owner;

        assert_true(row->count >= 1); /* the last token is always computed */
        assert_int_equal(row->first + row->count, row->seq->computed);
        assert_true(!fresh[a - s->actor] || !row->seq->want_prompt
                    || row->first == 0);
        row_reads(s, row);
        could[a - s->actor] = false;
        a->owed |= row->last;
    }

    for (int i = 0; i < plan->n_rows; i++) {
        row_writes(s, &plan->rows[i]);
    }

    storm_contents(s);

    bool idle = sched_running(s->sched) == 0;

    for (int i = 0; i < MAX_LIVE; i++) {
        const actor_t *a = &s->actor[i];

        /* who ran and could go on got a token, or was preempted */
        assert_true(!could[i] || a->seq.state == SEQ_WAITING);
        assert_true(!idle || !a->live || a->seq.parked
                    || a->seq.state != SEQ_WAITING);
    }
}


/* What is sampled follows from the history alone, as with a model. */
static void
storm_append(storm_t *s)
{
    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (!a->live || !a->owed) {
            continue;
        }

        a->owed = false;

        if (a->seq.n_tokens == a->target) {
            storm_drop(s, a);
            s->finished++;
            continue;
        }

        a->tokens[a->seq.n_tokens] =
            (int32_t) (digest_at(a, a->seq.n_tokens - 1) % 50);
        a->seq.n_tokens++;
    }
}


static void
storm_chaos(storm_t *s)
{
    for (int n = random_below(s->random, 3); n > 0; n--) {
        storm_add(s);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        actor_t *a = &s->actor[i];

        if (a->live && random_below(s->random, 30) == 0) {
            a->seq.parked = !a->seq.parked;
        }

        if (a->live && random_below(s->random, 100) == 0) {
            storm_drop(s, a);
        }
    }
}


typedef struct {
    sched_hits_t hits;
    uint64_t preemptions;
    int waited;
    int copies;
    int lost;
} sum_t;


static void
storm_run(random_t *random, int n_steps, sum_t *sum)
{
    static storm_t s;
    const int pages = 2 + random_below(random, MAX_PAGES - 1);
    const bool whole = random_below(random, 4) == 0;

    memset(&s, 0, sizeof(s));
    s.random = random;
    s.max_len = 2 + random_below(random, pages * 16 - 1);
    s.pool = kv_pool_create(pages);
    s.prefix = kv_prefix_create(s.pool);
    s.sched = sched_create(
        &(sched_conf_t){ .max_tokens = 1 + random_below(random, 150)
                                       + (whole ? MAX_LEN : 0),
                         .max_seqs = 1 + random_below(random, 24),
                         .prefix = s.prefix,
                         .whole_prompts = whole,
                         .long_prefill = random_below(random, 60) },
        s.pool);
    assert_non_null(s.sched);

    for (int i = 0; i < n_steps; i++) {
        storm_chaos(&s);
        storm_step(&s);
        storm_append(&s);
    }

    for (int i = 0; i < MAX_LIVE; i++) {
        s.actor[i].seq.parked = false;
    }

    for (int steps = 0; sched_running(s.sched) + sched_waiting(s.sched) > 0;) {
        storm_step(&s);
        storm_append(&s);
        assert_true(steps++ < 200000);
    }

    const sched_hits_t *hits = sched_hits(s.sched);

    sum->hits.queries += hits->queries;
    sum->hits.hits += hits->hits;
    sum->hits.again_queries += hits->again_queries;
    sum->hits.again_hits += hits->again_hits;
    sum->hits.forks += hits->forks;
    sum->waited += s.waited;
    sum->copies += s.copies;
    sum->lost += s.lost;
    sum->preemptions += sched_preemptions(s.sched);
    assert_int_equal(kv_pool_free_pages(s.pool), pages);
    sched_destroy(s.sched);
    kv_prefix_destroy(s.prefix);
    kv_pool_destroy(s.pool);
}


static void
test_storms(void **state)
{
    random_t random = random_start("prefix scheduler storms");
    sum_t sum = { 0 };

    (void) state;

    for (int i = 0; i < 120; i++) {
        storm_run(&random, 250, &sum);
    }

    printf("# %llu of %llu tokens hit, %llu of %llu after %llu preemptions, "
           "%d waited, %llu forks, %d copies, %d from pages lost\n",
           (unsigned long long) sum.hits.hits,
           (unsigned long long) sum.hits.queries,
           (unsigned long long) sum.hits.again_hits,
           (unsigned long long) sum.hits.again_queries,
           (unsigned long long) sum.preemptions, sum.waited,
           (unsigned long long) sum.hits.forks, sum.copies, sum.lost);
    assert_true(sum.hits.hits > 10000 && sum.hits.again_hits > 1000);
    assert_true(sum.preemptions > 500 && sum.waited > 100);
    assert_true(sum.copies > 500 && sum.hits.forks >= (uint64_t) sum.copies);
    assert_true(sum.lost > 10);
}


/* --- by hand --- */

/* The first computes the common part; who shares it waits until it is there,
 * who does not, or hardly, goes first. */
static void
test_followers(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 100, 80);
    rig_add(&rig, 0, 100, 64);
    rig_add(&rig, 1, 90, 64); /* shares 4 pages */
    rig_add(&rig, 2, 10, 0);  /* none */
    rig_add(&rig, 3, 31, 20); /* 20 tokens: not worth it */

    rig_step(&rig, 3);
    expect_row(&rig, 0, 0, 0, 50); /* its share of 20 and what is left */
    expect_row(&rig, 1, 2, 0, 10);
    expect_row(&rig, 2, 3, 0, 20);
    assert_int_equal(rig.seq[1].waits_for, 64);

    rig_step(&rig, 2); /* three of the four pages are there */
    expect_row(&rig, 0, 0, 50, 50);
    expect_row(&rig, 1, 3, 20, 11);
    rig_step(&rig, 1);
    expect_row(&rig, 0, 1, 64, 26);
    assert_int_equal(rig.seq[1].cached, 64);
    assert_int_equal(rig.seq[1].table.pages[3], rig.seq[0].table.pages[3]);
    assert_int_equal(rig.seq[3].cached, 0);
    assert_int_equal(sched_hits(rig.sched)->hits, 64);
    rig_destroy(&rig, 4);
}


/* A prompt of whole pages that is there entirely computes its last page. */
static void
test_last_page(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 100, 200);
    rig_add(&rig, 0, 64, 64);
    rig_step(&rig, 1);
    rig_step(&rig, 0);
    rig_add(&rig, 1, 64, 64);
    rig_add(&rig, 2, 65, 65);
    rig_step(&rig, 2);
    expect_row(&rig, 0, 1, 63, 1); /* by a copy of the last page */
    expect_row(&rig, 1, 2, 64, 1);
    expect_copy(&rig, 0, 0, 1, 3);
    assert_int_equal(rig.plan->n_copies, 1);

    /* which is full then, and there once too often */
    rig_step(&rig, 0);
    assert_int_equal(rig.plan->n_copies, 0);
    assert_int_equal(rig.seq[1].table.pages[3], rig.seq[0].table.pages[3]);
    rig_drop(&rig, 0);
    rig_drop(&rig, 1);
    rig_drop(&rig, 2);

    /* nobody runs: nothing is copied */
    rig_add(&rig, 1, 64, 64);
    rig_step(&rig, 1);
    expect_row(&rig, 0, 1, 48, 16);
    rig_drop(&rig, 1);
    rig_destroy(&rig, 0);
}


/* Hits make a long prompt fit; free pages that are hits are not counted as
 * free for the rest of it. */
static void
test_room_with_hits(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 8, 200);
    rig_add(&rig, 0, 80, 64);
    rig_step(&rig, 1); /* holds 5 of 8 pages */
    rig_add(&rig, 1, 112, 64);
    rig_step(&rig, 1); /* 7 pages, 4 of them shared */
    expect_row(&rig, 0, 1, 64, 48);
    assert_int_equal(kv_pool_free_pages(rig.pool), 0);
    rig_drop(&rig, 1);

    /* it has left 2 of its own beside the 4: of 3 free pages these are
     * two, and 2 more do not fit */
    rig_add(&rig, 1, 128, 64);
    rig_step(&rig, 0);
    rig_drop(&rig, 0);

    /* now all are free, 6 of them hits: 2 more fit exactly */
    rig_step(&rig, 1);
    expect_row(&rig, 0, 1, 96, 32);
    rig_add(&rig, 0, 10, 0);
    rig_step(&rig, 0);
    rig_destroy(&rig, 2);
}


/* Pages that parked sequences share go when all of them go. */
static void
test_parked_sharers(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 8, 200);
    rig_add(&rig, 0, 70, 64);
    rig_step(&rig, 1);
    rig_add(&rig, 1, 72, 64);
    rig_step(&rig, 1);
    assert_int_equal(kv_pool_free_pages(rig.pool), 2);
    rig.seq[0].parked = true;

    /* one page more would not do */
    rig_add(&rig, 2, 100, 0);
    rig_step(&rig, 0);
    assert_int_equal(rig.seq[0].state, SEQ_RUNNING);

    rig.seq[1].parked = true;
    rig_step(&rig, 1);
    expect_row(&rig, 0, 2, 0, 100);
    assert_int_equal(rig.seq[0].state, SEQ_WAITING);
    assert_int_equal(rig.seq[1].state, SEQ_WAITING);
    rig_destroy(&rig, 3);
}


/* A preempted sequence finds what has not been reused. */
static void
test_preempted_finds_itself(void **state)
{
    rig_t rig;

    (void) state;
    rig_create(&rig, 8, 200);
    rig_add(&rig, 0, 64, 0);
    rig_add(&rig, 1, 64, 0);
    rig_step(&rig, 2);
    rig.seq[0].n_tokens++;
    rig_step(&rig, 1); /* takes a page of 1, its tail */
    assert_int_equal(rig.seq[1].state, SEQ_WAITING);
    rig_drop(&rig, 0);
    rig_step(&rig, 1);
    expect_row(&rig, 0, 1, 48, 16);
    assert_int_equal(sched_hits(rig.sched)->hits, 0);
    assert_int_equal(sched_hits(rig.sched)->again_hits, 48);
    assert_int_equal(rig.seq[1].cached, 0);
    rig_drop(&rig, 1);
    rig_destroy(&rig, 0);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_storms),
        cmocka_unit_test(test_followers),
        cmocka_unit_test(test_last_page),
        cmocka_unit_test(test_room_with_hits),
        cmocka_unit_test(test_parked_sharers),
        cmocka_unit_test(test_preempted_finds_itself),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
