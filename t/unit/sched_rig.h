/* A scheduler, a pool, and what a test written out by hand says to them. */

#ifndef T_UNIT_SCHED_RIG_H
#define T_UNIT_SCHED_RIG_H

#include "engine/base/status.h"
#include "engine/kv/pool.h"
#include "engine/sched/sched.h"

typedef struct {
    kv_pool_t *pool;
    sched_t *sched;
    const plan_t *plan;
} rig_t;


static inline rig_t
rig_with(int pages, const sched_conf_t *conf)
{
    rig_t rig = { .pool = kv_pool_create(pages) };

    rig.sched = sched_create(conf, rig.pool);
    assert_non_null(rig.sched);

    return rig;
}


static inline rig_t
rig_create(int pages, int max_tokens, int max_seqs)
{
    return rig_with(pages, &(sched_conf_t){ .max_tokens = max_tokens,
                                            .max_seqs = max_seqs });
}


static inline void
rig_destroy(rig_t *rig)
{
    sched_check(rig->sched);
    assert_int_equal(kv_pool_free_pages(rig->pool), kv_pool_pages(rig->pool));
    sched_destroy(rig->sched);
    kv_pool_destroy(rig->pool);
}


static inline void
rig_add(rig_t *rig, seq_t *seq, int n_tokens, int room)
{
    *seq = (seq_t){ .n_tokens = n_tokens, .n_prompt = n_tokens };
    assert_int_equal(kv_table_init(&seq->table, room), LLM_OK);
    sched_add(rig->sched, seq);
}


/* With a priority, of the tenant named by one letter; 0: the nameless one. */
static inline void
rig_add_of(rig_t *rig, seq_t *seq, int n_tokens, int priority, char tenant)
{
    *seq = (seq_t){ .n_tokens = n_tokens,
                    .n_prompt = n_tokens,
                    .priority = priority };

    if (tenant != 0) {
        seq->tenant = sched_tenant(rig->sched, &tenant, 1, 1);
        assert_non_null(seq->tenant);
    }

    assert_int_equal(kv_table_init(&seq->table, 1600), LLM_OK);
    sched_add(rig->sched, seq);
}


static inline void
rig_drop(rig_t *rig, seq_t *seq)
{
    sched_remove(rig->sched, seq);
    assert_int_equal(seq->state, SEQ_FINISHED);
    kv_table_fini(&seq->table);
}


static inline void
rig_step(rig_t *rig, int n_rows)
{
    rig->plan = sched_step(rig->sched);
    sched_check(rig->sched);
    assert_int_equal(rig->plan->n_rows, n_rows);
}


static inline void
expect_row(const rig_t *rig, int i, const seq_t *seq, int first, int count)
{
    const plan_row_t *row = &rig->plan->rows[i];

    assert_ptr_equal(row->seq, seq);
    assert_int_equal(row->first, first);
    assert_int_equal(row->count, count);
    assert_int_equal(row->last, first + count == seq->n_tokens);
}

#endif /* T_UNIT_SCHED_RIG_H */
