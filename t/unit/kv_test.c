/*
 * The page pool and block tables against a naive model, in random operations;
 * the sizing of the store, its messages, and cgroup limits in a tree of files
 * made for the purpose.
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/kv/pool.h"
#include "engine/kv/store.h"
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
    kv_pool_unref(pool, 1);
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


/* --- the store --- */

static size_t asked_bytes;
static size_t freed_bytes;
static bool refuse;


static size_t
fake_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                int head_dim)
{
    (void) dev;
    return (size_t) n_layers * n_kv_heads * head_dim * OP_PAGE
           * (dtype == OP_Q8_0 ? 2 : 4);
}


static void *
fake_alloc(op_dev_t *dev, size_t bytes)
{
    (void) dev;
    asked_bytes = bytes;
    return refuse ? NULL : malloc(16);
}


static void
fake_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) dev;
    freed_bytes = bytes;
    free(p);
}


static const op_table_t fake_ops = { .kv_page_bytes = fake_page_bytes,
                                     .alloc = fake_alloc,
                                     .free = fake_free };


static void
test_store_create(void **state)
{
    op_kv_t kv = {
        .n_pages = 10,
        .n_layers = 2,
        .n_kv_heads = 3,
        .head_dim = 8,
        .dtype = OP_F16,
    };
    llm_err_t err;

    (void) state;
    refuse = false;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_OK);
    assert_non_null(kv.base);
    assert_int_equal(asked_bytes, 10 * 2 * 3 * 8 * 16 * 4);
    kv_store_destroy(&fake_ops, NULL, &kv);
    assert_int_equal(freed_bytes, asked_bytes);
    assert_null(kv.base);
    kv_store_destroy(&fake_ops, NULL, &kv);

    kv.dtype = OP_Q8_0;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_OK);
    assert_int_equal(asked_bytes, 10 * 2 * 3 * 8 * 16 * 2);
    kv_store_destroy(&fake_ops, NULL, &kv);
    assert_int_equal(freed_bytes, asked_bytes);

    refuse = true;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_NOMEM);
    assert_null(kv.base);
    assert_non_null(strstr(err.text, "10 pages"));
    assert_non_null(strstr(err.text, "lower kv_cache_memory"));
}


static void
test_store_pages(void **state)
{
    const size_t mib = 1 << 20;
    llm_err_t err;
    int n = -1;

    (void) state;

    /* explicit: all of it, whatever the sequences need */
    assert_int_equal(kv_store_pages(mib, 100 * mib, 1, 16, &n, &err), LLM_OK);
    assert_int_equal(n, 100);
    assert_int_equal(kv_store_pages(mib, 100 * mib - 1, 8, 99 * 16, &n, &err),
                     LLM_OK);
    assert_int_equal(n, 99);

    /* by default: what they need */
    assert_int_equal(kv_store_pages(64, 0, 3, 33, &n, &err), LLM_OK);
    assert_int_equal(n, 9);

    /* more pages than have numbers */
    assert_int_equal(kv_store_pages(1, SIZE_MAX, 3, 33, &n, &err), LLM_OK);
    assert_int_equal(n, INT32_MAX / 16);

    n = 7;
    assert_int_equal(kv_store_pages(mib / 2, 100 * mib, 8, 4097, &n, &err),
                     LLM_LIMIT);
    assert_int_equal(n, 7);
    assert_int_equal(err.code, LLM_LIMIT);
    assert_string_equal(err.text,
                        "the KV cache of 4097 tokens needs 129 MiB, "
                        "kv_cache_memory allows 100 MiB; the longest context "
                        "that fits is 3200; raise kv_cache_memory or lower "
                        "max_model_len");

    assert_int_equal(kv_store_pages(mib, 10, 8, 1, &n, &err), LLM_LIMIT);
    assert_non_null(strstr(err.text, "the longest context that fits is 0;"));
}


/* The default is a quarter of the memory the process may use, and a limit on
 * its address space counts. */
static void
test_store_default_limit(void **state)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void) state; /* the sanitizers' own mappings exceed any limit */
#else
    struct rlimit old, low;
    llm_err_t err;
    int n = 0;

    (void) state;
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);

    low = old;
    low.rlim_cur = 256 << 20;
    assert_int_equal(setrlimit(RLIMIT_AS, &low), 0);
    const size_t memory = kv_store_memory();
    const int rc = kv_store_pages(1 << 20, 0, 1000, 16 * 64, &n, &err);
    const int rc_more = kv_store_pages(1 << 20, 0, 1, 16 * 64 + 1, &n, &err);
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);

    assert_int_equal(memory, 256 << 20);
    assert_int_equal(rc, LLM_OK);
    assert_int_equal(n, 64);
    assert_int_equal(rc_more, LLM_LIMIT);
    assert_non_null(strstr(err.text, "needs 65 MiB, kv_cache_memory (a quarter "
                                     "of the memory by default) allows 64"));
#endif
}


static void
test_store_memory(void **state)
{
    const size_t memory = kv_store_memory();

    (void) state;
    assert_true(memory >= 16 << 20);
    assert_true(memory <= kv_store_cgroup(""));
    assert_true(memory <= (size_t) sysconf(_SC_PHYS_PAGES)
                              * (size_t) sysconf(_SC_PAGESIZE));
}


static char tree[64];


/* Writes text to tree/name, making the directories on the way. */
static void
put(const char *name, const char *text)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", tree, name);

    for (char *p = path + strlen(tree) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        mkdir(path, 0700);
        *p = '/';
    }

    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}


static void
test_cgroup(void **state)
{
    char command[128];

    (void) state;
    snprintf(tree, sizeof(tree), "/tmp/kv_test_XXXXXX");
    assert_non_null(mkdtemp(tree));

    assert_true(kv_store_cgroup(tree) == SIZE_MAX); /* no /proc at all */

    /* v2: the group has no limit, an ancestor has */
    put("proc/self/cgroup", "0::/a/b/c\n");
    assert_true(kv_store_cgroup(tree) == SIZE_MAX);
    put("sys/fs/cgroup/a/b/c/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.max", "7000\n");
    put("sys/fs/cgroup/a/memory.max", "9000\n");
    assert_int_equal(kv_store_cgroup(tree), 7000);
    put("sys/fs/cgroup/a/b/c/memory.max", "5000\n");
    assert_int_equal(kv_store_cgroup(tree), 5000);
    put("sys/fs/cgroup/a/b/c/memory.max", "rubbish\n");
    assert_int_equal(kv_store_cgroup(tree), 7000);
    put("sys/fs/cgroup/a/b/c/memory.max", "");
    assert_int_equal(kv_store_cgroup(tree), 7000);

    /* a container: the path is the host's, the mount is the group itself */
    put("proc/self/cgroup", "0::/docker/0123\n");
    put("sys/fs/cgroup/memory.max", "8000\n");
    assert_int_equal(kv_store_cgroup(tree), 8000);
    put("proc/self/cgroup", "0::/\n");
    assert_int_equal(kv_store_cgroup(tree), 8000);

    /* v1, with an unlimited group and other controllers around */
    put("proc/self/cgroup", "3:cpu,cpuacct:/x\n5:hugetlb,memory:/x/y\n"
                            "1:name=systemd:/\n");
    put("sys/fs/cgroup/memory/x/y/memory.limit_in_bytes",
        "9223372036854771712\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096000\n");
    assert_int_equal(kv_store_cgroup(tree), 4096000);
    put("proc/self/cgroup", "5:hugememory:/x/y\nnonsense\n::\n");
    assert_true(kv_store_cgroup(tree) == SIZE_MAX);

    snprintf(command, sizeof(command), "rm -r '%s'", tree);
    assert_int_equal(system(command), 0);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_for),
        cmocka_unit_test(test_pool_order),
        cmocka_unit_test(test_table_all_or_nothing),
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_store_create),
        cmocka_unit_test(test_store_pages),
        cmocka_unit_test(test_store_default_limit),
        cmocka_unit_test(test_store_memory),
        cmocka_unit_test(test_cgroup),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
