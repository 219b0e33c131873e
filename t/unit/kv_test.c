/*
 * The page pool and block tables against a naive model, in random operations.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/kv/table.h"
#include "t/unit/random.h"

enum { N_PAGES = 61, N_TABLES = 9, MAX_TOKENS = 500, N_OPS = 1000000 };


static void
test_pages_for(void **state)
{
    (void) state;

    assert_int_equal(kv_pages_for(0), 0);
    assert_int_equal(kv_pages_for(1), 1);
    assert_int_equal(kv_pages_for(16), 1);
    assert_int_equal(kv_pages_for(17), 2);
    assert_int_equal(kv_pages_for(32), 2);
    assert_int_equal(kv_pages_for(INT32_MAX), 1 << 27);
}


static void
test_pool_order(void **state)
{
    kv_pool_t *pool = kv_pool_create(3);

    (void) state;
    assert_non_null(pool);
    assert_int_equal(kv_pool_pages(pool), 3);
    assert_int_equal(kv_pool_free_pages(pool), 3);

    /* in order, until there is none */
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(kv_pool_take(pool), i);
        assert_int_equal(kv_pool_refs(pool, i), 1);
    }

    assert_int_equal(kv_pool_take(pool), -1);
    assert_int_equal(kv_pool_free_pages(pool), 0);

    /* a shared page stays until its last holder lets go */
    kv_pool_ref(pool, 1);
    assert_int_equal(kv_pool_shared_pages(pool), 1);
    kv_pool_ref(pool, 1);
    assert_int_equal(kv_pool_shared_pages(pool), 1);
    kv_pool_unref(pool, 1);
    assert_int_equal(kv_pool_shared_pages(pool), 1);
    kv_pool_unref(pool, 1);
    assert_int_equal(kv_pool_shared_pages(pool), 0);
    assert_int_equal(kv_pool_free_pages(pool), 0);
    kv_pool_unref(pool, 1);
    assert_int_equal(kv_pool_free_pages(pool), 1);

    /* last freed, first reused */
    kv_pool_unref(pool, 0);
    kv_pool_check(pool);
    assert_int_equal(kv_pool_take(pool), 0);
    assert_int_equal(kv_pool_take(pool), 1);

    for (int32_t i = 0; i < 3; i++) {
        kv_pool_unref(pool, i);
    }

    kv_pool_check(pool);
    kv_pool_destroy(pool);
    kv_pool_destroy(NULL);
}


static void
test_table_all_or_nothing(void **state)
{
    kv_pool_t *pool = kv_pool_create(4);
    kv_table_t a, b;

    (void) state;
    assert_int_equal(kv_table_init(&a, 64), LLM_OK);
    assert_int_equal(kv_table_init(&b, 64), LLM_OK);
    assert_int_equal(a.cap, 4);

    assert_int_equal(kv_table_grow(&a, pool, 0), LLM_OK);
    assert_int_equal(a.n, 0);
    assert_int_equal(kv_table_grow(&a, pool, 33), LLM_OK);
    assert_int_equal(a.n, 3);
    assert_int_equal(kv_table_grow(&a, pool, 5), LLM_OK);
    assert_int_equal(a.n, 3);

    assert_int_equal(kv_table_grow(&b, pool, 17), LLM_AGAIN);
    assert_int_equal(b.n, 0);
    assert_int_equal(kv_pool_free_pages(pool), 1);
    assert_int_equal(kv_table_grow(&b, pool, 16), LLM_OK);

    kv_table_truncate(&a, pool, 1000);
    assert_int_equal(a.n, 3);
    kv_table_truncate(&a, pool, 32);
    assert_int_equal(a.n, 2);
    kv_table_truncate(&a, pool, 0);
    kv_table_truncate(&b, pool, 0);
    assert_int_equal(kv_pool_free_pages(pool), 4);

    kv_table_fini(&a);
    kv_table_fini(&b);
    kv_pool_destroy(pool);
}


/* --- random operations --- */

typedef struct {
    kv_pool_t *pool;
    kv_table_t table[N_TABLES];
    int n_tokens[N_TABLES];
    int refs[N_PAGES]; /* the model: references by page */
    int extra[N_PAGES];
    random_t random;
} storm_t;


static int
model_free(const storm_t *s)
{
    int n = 0;

    for (int p = 0; p < N_PAGES; p++) {
        n += s->refs[p] == 0;
    }

    return n;
}


static void
storm_grow(storm_t *s, int t)
{
    kv_table_t *table = &s->table[t];
    const int want = random_below(&s->random, MAX_TOKENS + 1);
    const int before = table->n;
    const int more = kv_pages_for(want) - before;
    const bool fits = more <= model_free(s);

    assert_int_equal(kv_table_grow(table, s->pool, want),
                     fits ? LLM_OK : LLM_AGAIN);
    assert_int_equal(table->n, fits && more > 0 ? before + more : before);

    for (int i = before; i < table->n; i++) {
        const int32_t page = table->pages[i];

        assert_in_range(page, 0, N_PAGES - 1);
        assert_int_equal(s->refs[page], 0); /* nobody else had it */
        s->refs[page] = 1;
    }

    if (fits && want > s->n_tokens[t]) {
        s->n_tokens[t] = want;
    }
}


static void
storm_truncate(storm_t *s, int t)
{
    kv_table_t *table = &s->table[t];
    const int keep = random_below(&s->random, 3) == 0
                         ? 0
                         : random_below(&s->random, MAX_TOKENS + 1);

    for (int i = kv_pages_for(keep); i < table->n; i++) {
        s->refs[table->pages[i]]--;
    }

    kv_table_truncate(table, s->pool, keep);

    if (keep < s->n_tokens[t]) {
        s->n_tokens[t] = keep;
    }
}


/* Holds and drops pages beside the tables, as shared prefixes will. */
static void
storm_share(storm_t *s)
{
    const int page = random_below(&s->random, N_PAGES);

    if (s->extra[page] > 0 && random_below(&s->random, 2)) {
        kv_pool_unref(s->pool, page);
        s->extra[page]--;
        s->refs[page]--;

    } else if (s->refs[page] > 0) {
        kv_pool_ref(s->pool, page);
        s->extra[page]++;
        s->refs[page]++;
    }
}


static void
storm_take(storm_t *s)
{
    const int before = model_free(s);
    const int32_t page = kv_pool_take(s->pool);

    if (before == 0) {
        assert_int_equal(page, -1);
        return;
    }

    assert_in_range(page, 0, N_PAGES - 1);
    assert_int_equal(s->refs[page], 0);
    s->refs[page] = 1;
    s->extra[page] = 1;
}


static void
storm_verify(const storm_t *s)
{
    kv_pool_check(s->pool);
    assert_int_equal(kv_pool_free_pages(s->pool), model_free(s));

    for (int p = 0; p < N_PAGES; p++) {
        assert_int_equal(kv_pool_refs(s->pool, p), s->refs[p]);
    }

    for (int t = 0; t < N_TABLES; t++) {
        assert_int_equal(s->table[t].n, kv_pages_for(s->n_tokens[t]));
    }
}


static void
test_storm(void **state)
{
    static storm_t s;

    (void) state;
    s.random = random_start("kv storm");
    s.pool = kv_pool_create(N_PAGES);

    for (int t = 0; t < N_TABLES; t++) {
        assert_int_equal(kv_table_init(&s.table[t], MAX_TOKENS), LLM_OK);
    }

    for (int op = 0; op < N_OPS; op++) {
        const int t = random_below(&s.random, N_TABLES);

        switch (random_below(&s.random, 8)) {
        case 0:
        case 1:
        case 2:
            storm_grow(&s, t);
            break;
        case 3:
        case 4:
        case 5:
            storm_truncate(&s, t);
            break;
        case 6:
            storm_share(&s);
            break;
        default:
            if (random_below(&s.random, 4) == 0) {
                storm_take(&s);
            } else {
                storm_share(&s);
            }
        }

        if (op % 64 == 0) {
            storm_verify(&s);
        }
    }

    for (int t = 0; t < N_TABLES; t++) {
        kv_table_truncate(&s.table[t], s.pool, 0);
        kv_table_fini(&s.table[t]);
    }

    for (int p = 0; p < N_PAGES; p++) {
        for (; s.extra[p] > 0; s.extra[p]--) {
            kv_pool_unref(s.pool, p);
        }
    }

    kv_pool_check(s.pool);
    assert_int_equal(kv_pool_free_pages(s.pool), N_PAGES);
    kv_pool_destroy(s.pool);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_for),
        cmocka_unit_test(test_pool_order),
        cmocka_unit_test(test_table_all_or_nothing),
        cmocka_unit_test(test_storm),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
