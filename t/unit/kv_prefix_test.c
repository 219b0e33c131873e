/*
 * The prefix cache against a naive twin: an array of what each page holds, in
 * plain tokens, and a list of free pages in their order.  Random sequences over
 * a tiny vocabulary grow, publish, end and come back.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/kv/table.h"
#include "t/unit/random.h"

enum { N_PAGES = 40, N_SEQS = 8, MAX_LEN = 160, N_OPS = 300000 };

static const char *const salts[] = { "", "a", "b" };


/* --- by hand --- */

static void
test_share_and_evict(void **state)
{
    kv_pool_t *pool = kv_pool_create(4);
    kv_prefix_t *prefix = kv_prefix_create(pool);
    const kv_hash_t root = kv_prefix_root(prefix, "", 0);
    kv_table_t a, b;
    int32_t tokens[64];

    (void) state;
    assert_non_null(prefix);
    assert_int_equal(kv_table_init(&a, 64), LLM_OK);
    assert_int_equal(kv_table_init(&b, 64), LLM_OK);

    for (int i = 0; i < 64; i++) {
        tokens[i] = i;
    }

    assert_int_equal(kv_table_grow(&a, pool, 40), LLM_OK);
    kv_prefix_publish(prefix, &a, &root, tokens, 40);
    assert_int_equal(kv_prefix_pages(prefix), 2); /* full ones alone */
    assert_int_equal(a.n_public, 2);

    /* shared while held */
    kv_prefix_hash(prefix, &b, &root, tokens, 64);
    assert_int_equal(kv_prefix_attach(prefix, &b, &root, tokens, 1), 1);
    assert_int_equal(b.pages[0], a.pages[0]);
    assert_int_equal(kv_pool_refs(pool, a.pages[0]), 2);
    kv_table_truncate(&b, pool, 0);

    /* and findable when free; the page that was not full is reused first,
     * then the tail */
    kv_table_truncate(&a, pool, 0);
    assert_int_equal(kv_pool_free_pages(pool), 4);
    assert_int_equal(kv_prefix_pages(prefix), 2);
    assert_int_equal(kv_pool_take(pool), 2);
    assert_int_equal(kv_pool_take(pool), 3);
    assert_int_equal(kv_pool_evictions(pool), 0);
    assert_int_equal(kv_pool_take(pool), 1);
    assert_int_equal(kv_pool_evictions(pool), 1);
    assert_int_equal(kv_prefix_pages(prefix), 1);
    assert_int_equal(kv_prefix_attach(prefix, &b, &root, tokens, 4), 1);
    assert_int_equal(b.pages[0], 0);
    assert_int_equal(kv_pool_free_pages(pool), 0);
    kv_prefix_check(prefix);

    kv_table_truncate(&b, pool, 0);
    assert_int_equal(kv_pool_take(pool), 0);
    assert_int_equal(kv_prefix_pages(prefix), 0);
    assert_int_equal(kv_prefix_attach(prefix, &b, &root, tokens, 4), 0);
    kv_prefix_check(prefix);

    kv_table_fini(&a);
    kv_table_fini(&b);
    kv_prefix_destroy(prefix);
    kv_pool_destroy(pool);
    kv_prefix_destroy(NULL);
}


/* What was computed twice is kept once. */
static void
test_duplicates(void **state)
{
    kv_pool_t *pool = kv_pool_create(4);
    kv_prefix_t *prefix = kv_prefix_create(pool);
    const kv_hash_t root = kv_prefix_root(prefix, "x", 1);
    const int32_t tokens[32] = { 5, 6 };
    kv_table_t t[2];

    (void) state;

    for (int i = 0; i < 2; i++) {
        assert_int_equal(kv_table_init(&t[i], 32), LLM_OK);
        assert_int_equal(kv_table_grow(&t[i], pool, 32), LLM_OK);
    }

    assert_int_equal(kv_pool_free_pages(pool), 0);

    for (int i = 0; i < 2; i++) {
        kv_prefix_publish(prefix, &t[i], &root, tokens, 32);
    }

    assert_int_equal(kv_pool_free_pages(pool), 2);
    assert_int_equal(kv_prefix_pages(prefix), 2);
    assert_memory_equal(t[0].pages, t[1].pages, 2 * sizeof(int32_t));
    assert_int_equal(kv_pool_refs(pool, t[0].pages[1]), 2);

    for (int i = 0; i < 2; i++) {
        kv_table_truncate(&t[i], pool, 0);
        kv_table_fini(&t[i]);
    }

    kv_prefix_check(prefix);
    kv_prefix_destroy(prefix);
    kv_pool_destroy(pool);
}


/* Two contents under one hash: the second is not found, and finds nothing. */
static void
test_collision(void **state)
{
    kv_pool_t *pool = kv_pool_create(4);
    kv_prefix_t *prefix = kv_prefix_create(pool);
    const kv_hash_t root = kv_prefix_root(prefix, "", 0);
    int32_t tokens[2][16] = { { 1 }, { 2 } };
    kv_table_t t[2], probe;

    (void) state;
    assert_int_equal(kv_table_init(&probe, 16), LLM_OK);

    for (int i = 0; i < 2; i++) {
        assert_int_equal(kv_table_init(&t[i], 16), LLM_OK);
        assert_int_equal(kv_table_grow(&t[i], pool, 16), LLM_OK);
        kv_prefix_hash(prefix, &t[i], &root, tokens[i], 16);
    }

    t[1].hashes[0] = t[0].hashes[0]; /* as if */
    kv_prefix_publish(prefix, &t[0], &root, tokens[0], 16);
    kv_prefix_publish(prefix, &t[1], &root, tokens[1], 16);
    assert_int_equal(kv_prefix_pages(prefix), 1);
    assert_int_not_equal(t[0].pages[0], t[1].pages[0]);

    probe.hashes[0] = t[0].hashes[0];
    probe.n_hashes = 1;
    assert_int_equal(kv_prefix_attach(prefix, &probe, &root, tokens[1], 1), 0);
    assert_int_equal(kv_prefix_attach(prefix, &probe, &root, tokens[0], 1), 1);

    /* another chain with the same tokens and, as if, the same hash */
    const kv_hash_t other = kv_prefix_root(prefix, "other", 5);

    kv_table_truncate(&probe, pool, 0);
    assert_int_equal(kv_prefix_attach(prefix, &probe, &other, tokens[0], 1), 0);

    for (int i = 0; i < 2; i++) {
        kv_table_truncate(&t[i], pool, 0);
        kv_table_fini(&t[i]);
    }

    kv_table_fini(&probe);
    kv_prefix_destroy(prefix);
    kv_pool_destroy(pool);
}


/* --- random operations --- */

typedef struct {
    int salt;
    int len;
    int32_t tokens[MAX_LEN];
} text_t;

typedef struct {
    bool live;
    text_t text;
    int computed;
    kv_table_t table;
    kv_hash_t root;
    int pages[MAX_LEN / 16]; /* the twin's table */
    int n;
    int n_public;
} actor_t;

typedef struct {
    kv_pool_t *pool;
    kv_prefix_t *prefix;
    random_t random;
    actor_t actor[N_SEQS];

    /* the twin: what a public page stands for (len 0: it is not public), who
     * holds it, and the free pages from front to back */
    text_t holds[N_PAGES];
    int refs[N_PAGES];
    int order[N_PAGES];
    int n_free;

    int hits;
    int evictions;
    int duplicates;
} twin_t;


static void
order_remove(twin_t *s, int page)
{
    int i = 0;

    while (s->order[i] != page) {
        i++;
    }

    s->n_free--;
    memmove(s->order + i, s->order + i + 1,
            (size_t) (s->n_free - i) * sizeof(int));
}


static int
twin_take(twin_t *s)
{
    const int page = s->order[0];

    order_remove(s, page);
    s->evictions += s->holds[page].len > 0;
    s->holds[page].len = 0;
    s->refs[page] = 1;

    return page;
}


static void
twin_ref(twin_t *s, int page)
{
    if (s->refs[page]++ == 0) {
        order_remove(s, page);
    }
}


static void
twin_unref(twin_t *s, int page)
{
    if (--s->refs[page] > 0) {
        return;
    }

    if (s->holds[page].len > 0) {
        s->order[s->n_free++] = page;
        return;
    }

    memmove(s->order + 1, s->order, (size_t) s->n_free * sizeof(int));
    s->order[0] = page;
    s->n_free++;
}


/* The public page that holds the first len tokens of text, or −1. */
static int
twin_find(const twin_t *s, const text_t *text, int len)
{
    for (int p = 0; p < N_PAGES; p++) {
        const text_t *h = &s->holds[p];

        if (h->len == len && h->salt == text->salt
            && memcmp(h->tokens, text->tokens, (size_t) len * sizeof(int32_t))
                   == 0)
        {
            return p;
        }
    }

    return -1;
}


static void
op_begin(twin_t *s, actor_t *a)
{
    int max;

    *a = (actor_t){ .live = true };
    a->text.salt = random_below(&s->random, 3);
    a->text.len = 1 + random_below(&s->random, MAX_LEN);

    /* long equal runs: the token changes seldom */
    for (int i = 0; i < a->text.len; i++) {
        a->text.tokens[i] = i > 0 && random_below(&s->random, 40) > 0
                                ? a->text.tokens[i - 1]
                                : random_below(&s->random, 2);
    }

    assert_int_equal(kv_table_init(&a->table, MAX_LEN), LLM_OK);
    a->root = kv_prefix_root(s->prefix, salts[a->text.salt],
                             strlen(salts[a->text.salt]));
    kv_prefix_hash(s->prefix, &a->table, &a->root, a->text.tokens, a->text.len);
    max = random_below(&s->random, a->text.len / 16 + 1);

    while (a->n < max) {
        const int page = twin_find(s, &a->text, 16 * (a->n + 1));

        if (page < 0) {
            break;
        }

        twin_ref(s, page);
        a->pages[a->n++] = page;
        s->hits++;
    }

    assert_int_equal(
        kv_prefix_attach(s->prefix, &a->table, &a->root, a->text.tokens, max),
        a->n);
    a->computed = 16 * a->n;
    a->n_public = a->n;
}


static void
op_grow(twin_t *s, actor_t *a)
{
    const int to =
        a->computed + random_below(&s->random, a->text.len - a->computed + 1);
    const int need = kv_pages_for(to);

    if (need - a->n > s->n_free) {
        assert_int_equal(kv_table_grow(&a->table, s->pool, to), LLM_AGAIN);
        return;
    }

    assert_int_equal(kv_table_grow(&a->table, s->pool, to), LLM_OK);
    a->computed = to;

    while (a->n < need) {
        a->pages[a->n++] = twin_take(s);
    }
}


static void
op_publish(twin_t *s, actor_t *a)
{
    kv_prefix_publish(s->prefix, &a->table, &a->root, a->text.tokens,
                      a->computed);

    for (; a->n_public < a->computed / 16; a->n_public++) {
        const int len = 16 * (a->n_public + 1);
        const int page = a->pages[a->n_public];
        const int other = twin_find(s, &a->text, len);

        if (other >= 0) {
            twin_ref(s, other);
            twin_unref(s, page);
            a->pages[a->n_public] = other;
            s->duplicates++;
            continue;
        }

        s->holds[page] = a->text;
        s->holds[page].len = len;
    }
}


static void
op_end(twin_t *s, actor_t *a)
{
    kv_table_truncate(&a->table, s->pool, 0);
    assert_int_equal(a->table.n_public, 0);
    kv_table_fini(&a->table);

    while (a->n > 0) {
        twin_unref(s, a->pages[--a->n]);
    }

    a->live = false;
}


static void
verify(const twin_t *s)
{
    int n_public = 0;

    kv_pool_check(s->pool);
    kv_prefix_check(s->prefix);
    assert_int_equal(kv_pool_free_pages(s->pool), s->n_free);

    for (int p = 0; p < N_PAGES; p++) {
        assert_int_equal(kv_pool_refs(s->pool, p), s->refs[p]);
        assert_int_equal(kv_pool_kept(s->pool, p), s->holds[p].len > 0);
        n_public += s->holds[p].len > 0;
    }

    assert_int_equal(kv_prefix_pages(s->prefix), n_public);

    for (int i = 0; i < N_SEQS; i++) {
        const actor_t *a = &s->actor[i];

        if (!a->live) {
            continue;
        }

        assert_int_equal(a->table.n, a->n);
        assert_int_equal(a->table.n_public, a->n_public);

        /* the very pages, so the order of reuse is the twin's, too */
        for (int k = 0; k < a->n; k++) {
            assert_int_equal(a->table.pages[k], a->pages[k]);
        }
    }
}


static void
test_storm(void **state)
{
    static twin_t s;

    (void) state;
    s.random = random_start("prefix storm");
    s.pool = kv_pool_create(N_PAGES);
    s.prefix = kv_prefix_create(s.pool);

    for (int p = 0; p < N_PAGES; p++) {
        s.order[s.n_free++] = p;
    }

    for (int op = 0; op < N_OPS; op++) {
        actor_t *a = &s.actor[random_below(&s.random, N_SEQS)];

        if (!a->live) {
            op_begin(&s, a);
        } else {
            switch (random_below(&s.random, 8)) {
            case 0:
                op_end(&s, a);
                break;
            case 1:
            case 2:
            case 3:
                op_publish(&s, a);
                break;
            default:
                op_grow(&s, a);
            }
        }

        if (op % 16 == 0) {
            verify(&s);
        }
    }

    printf("# %d hits, %d evictions, %d duplicates\n", s.hits, s.evictions,
           s.duplicates);
    assert_true(s.hits > 1000 && s.evictions > 1000 && s.duplicates > 1000);

    for (int i = 0; i < N_SEQS; i++) {
        if (s.actor[i].live) {
            op_end(&s, &s.actor[i]);
        }
    }

    verify(&s);
    assert_int_equal(kv_pool_free_pages(s.pool), N_PAGES);
    kv_prefix_destroy(s.prefix);
    kv_pool_destroy(s.pool);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_share_and_evict),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_collision),
        cmocka_unit_test(test_storm),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
