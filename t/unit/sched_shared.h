/*
 * A scheduler with a prefix cache and up to eight sequences, to be driven by
 * hand: what is in the plan, row by row and copy by copy.
 */

#ifndef T_UNIT_SCHED_SHARED_H
#define T_UNIT_SCHED_SHARED_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/sched/sched.h"

typedef struct {
    kv_pool_t *pool;
    kv_prefix_t *prefix;
    sched_t *sched;
    const plan_t *plan;
    int32_t tokens[8][512];
    seq_t seq[8];
} rig_t;


static inline void
rig_create(rig_t *rig, int pages, int max_tokens)
{
    memset(rig, 0, sizeof(*rig));
    rig->pool = kv_pool_create(pages);
    rig->prefix = kv_prefix_create(rig->pool);
    rig->sched = sched_create(&(sched_conf_t){ .max_tokens = max_tokens,
                                               .max_seqs = 8,
                                               .prefix = rig->prefix },
                              rig->pool);
    assert_non_null(rig->sched);
}


/* Sequence i: `common` tokens that all have, the rest its own. */
static inline seq_t *
rig_add(rig_t *rig, int i, int n_tokens, int common)
{
    seq_t *seq = &rig->seq[i];

    for (int k = 0; k < 512; k++) {
        rig->tokens[i][k] = k < common ? k : 1000 * (i + 1) + k;
    }

    *seq = (seq_t){ .tokens = rig->tokens[i],
                    .n_tokens = n_tokens,
                    .n_prompt = n_tokens };
    assert_int_equal(kv_table_init(&seq->table, 512), LLM_OK);
    sched_add(rig->sched, seq);

    return seq;
}


static inline void
rig_step(rig_t *rig, int n_rows)
{
    rig->plan = sched_step(rig->sched);
    sched_check(rig->sched);
    assert_int_equal(rig->plan->n_rows, n_rows);
}


static inline void
expect_row(const rig_t *rig, int row, int i, int first, int count)
{
    assert_ptr_equal(rig->plan->rows[row].seq, &rig->seq[i]);
    assert_int_equal(rig->plan->rows[row].first, first);
    assert_int_equal(rig->plan->rows[row].count, count);
}


/* Copy c fills a page of sequence `to` with that of sequence `from`. */
static inline void
expect_copy(const rig_t *rig, int c, int from, int to, int page)
{
    assert_true(c < rig->plan->n_copies);
    assert_int_equal(rig->plan->copies[c].from,
                     rig->seq[from].table.pages[page]);
    assert_int_equal(rig->plan->copies[c].to, rig->seq[to].table.pages[page]);
}


static inline void
rig_drop(rig_t *rig, int i)
{
    sched_remove(rig->sched, &rig->seq[i]);
    kv_table_fini(&rig->seq[i].table);
}


static inline void
rig_destroy(rig_t *rig, int n)
{
    for (int i = 0; i < n; i++) {
        rig_drop(rig, i);
    }

    assert_int_equal(kv_pool_free_pages(rig->pool), kv_pool_pages(rig->pool));
    sched_destroy(rig->sched);
    kv_prefix_destroy(rig->prefix);
    kv_pool_destroy(rig->pool);
}

#endif /* T_UNIT_SCHED_SHARED_H */
