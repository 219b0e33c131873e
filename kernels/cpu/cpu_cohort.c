/*
 * Who decodes behind the same pages.  A sequence looks among the leaders
 * whose first page is its own for one with which it has enough splits in
 * common, and joins its cohort or leads a new one.
 */

#include "kernels/cpu/cpu_cohort.h"

#include <string.h>

enum { SPLIT_PAGES = OP_SPLIT / OP_PAGE };


size_t
cpu_cohorts_bytes(int max_seqs)
{
    return (size_t) max_seqs * 6 * sizeof(int32_t);
}


void
cpu_cohorts_bind(cpu_cohorts_t *cohorts, void *arrays, int max_seqs)
{
    int32_t *at = arrays;

    cohorts->leader = at;
    cohorts->size = at += max_seqs;
    cohorts->shared = at += max_seqs;
    cohorts->first = at += max_seqs;
    cohorts->seqs = at += max_seqs;
    cohorts->older = at + max_seqs;
}


/* Splits that the only row of a sequence sees whole; 0 if it has more rows. */
static int
whole_splits(const op_batch_t *batch, int seq)
{
    const int row = batch->row_start[seq];

    if (batch->row_start[seq + 1] - row != 1) {
        return 0;
    }

    return (batch->pos[row] + 1) / OP_SPLIT;
}


/* Of the first n splits, those whose pages are the same. */
static int
common_splits(const int32_t *a, const int32_t *b, int n)
{
    int i = 0;

    while (i < n
           && memcmp(a + i * SPLIT_PAGES, b + i * SPLIT_PAGES,
                     SPLIT_PAGES * sizeof(int32_t))
                  == 0)
    {
        i++;
    }

    return i;
}


/* A cohort never gives up more than half of what it shares for one more. */
static int
try_join(cpu_cohorts_t *cohorts, const op_batch_t *batch, int leader, int seq)
{
    const int theirs = cohorts->shared[leader];
    const int mine = cohorts->shared[seq];
    const int common =
        common_splits(batch->block_table[leader], batch->block_table[seq],
                      mine < theirs ? mine : theirs);

    if (common == 0 || (cohorts->size[leader] > 1 && 2 * common < theirs)) {
        return 0;
    }

    cohorts->leader[seq] = leader;
    cohorts->shared[leader] = common;
    cohorts->size[leader]++;

    return 1;
}


/* The sequences of each cohort side by side. */
static void
gather(cpu_cohorts_t *cohorts, int n_seqs)
{
    int at = 0;

    for (int seq = n_seqs - 1; seq >= 0; seq--) {
        const int leader = cohorts->leader[seq];

        if (leader == seq) {
            cohorts->first[seq] = at;
            at += cohorts->size[seq];
            cohorts->size[seq] = 0;
        }

        cohorts->seqs[cohorts->first[leader] + cohorts->size[leader]++] = seq;
    }
}


void
cpu_cohorts_find(cpu_cohorts_t *cohorts, const op_batch_t *batch, int most)
{
    memset(cohorts->slot, 0xff, sizeof(cohorts->slot));

    for (int seq = batch->n_seqs - 1; seq >= 0; seq--) {
        cohorts->leader[seq] = seq;
        cohorts->size[seq] = 1;
        cohorts->shared[seq] = whole_splits(batch, seq);

        if (cohorts->shared[seq] == 0) {
            continue;
        }

        int32_t *slot =
            &cohorts->slot[batch->block_table[seq][0] & (CPU_COHORT_SLOTS - 1)];
        int leader = *slot;

        while (leader >= 0
               && (cohorts->size[leader] >= most
                   || !try_join(cohorts, batch, leader, seq)))
        {
            leader = cohorts->older[leader];
        }

        if (leader < 0) {
            cohorts->older[seq] = *slot;
            *slot = seq;
        }
    }

    gather(cohorts, batch->n_seqs);
}
