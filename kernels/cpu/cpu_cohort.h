/*
 * Cohorts: sequences of a batch that decode one token each and begin with the
 * same pages, as requests with a common prefix do.  Attention reads the splits
 * they share once for all of them.
 */

#ifndef KERNELS_CPU_CPU_COHORT_H
#define KERNELS_CPU_CPU_COHORT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/op/op.h"

enum { CPU_COHORT_SLOTS = 256 }; /* a power of two */

/* Every sequence belongs to one cohort, if only to its own.  The last one
 * leads it. */
typedef struct {
    int32_t *leader; /* [max_seqs] */
    int32_t *size;   /* [max_seqs] of the cohort of a leader */
    int32_t *shared; /* [max_seqs] whole splits that it has in common; of a
                        sequence that does not decode: 0 */
    int32_t *first;  /* [max_seqs] where its sequences begin in seqs */
    int32_t *seqs;   /* [max_seqs] leaders first */
    int32_t *older;  /* [max_seqs] the leader before, of the same slot */
    int32_t slot[CPU_COHORT_SLOTS];
} cpu_cohorts_t;


/* Bytes of the arrays, which bind borrows. */
size_t cpu_cohorts_bytes(int max_seqs);
void cpu_cohorts_bind(cpu_cohorts_t *cohorts, void *arrays, int max_seqs);

/* The batch's cohorts, of `most` sequences at most. */
void cpu_cohorts_find(cpu_cohorts_t *cohorts, const op_batch_t *batch,
                      int most);

#endif /* KERNELS_CPU_CPU_COHORT_H */
