/* What one step runs, as decided by the scheduler. */

#ifndef ENGINE_SCHED_PLAN_H
#define ENGINE_SCHED_PLAN_H

#include <stdbool.h>

#include "engine/sched/cost.h"
#include "engine/sched/seq.h"

typedef struct {
    seq_t *seq;
    int first;   /* position of the first token to compute */
    int count;   /* tokens to compute, ≥ 1, with the drafts */
    int n_draft; /* of them: behind the sequence's last token */
    bool last;   /* the step reaches the end of its tokens: sample */
} plan_row_t;

/* A page to be copied before anything is computed (share.h). */
typedef struct {
    int32_t from;
    int32_t to;
} plan_copy_t;

typedef struct {
    plan_row_t *rows;
    int n_rows;   /* sequences in the step */
    int n_tokens; /* sum of count, ≤ the token budget */

    plan_copy_t *copies; /* in the order in which they are to be made */
    int n_copies;        /* at most max_seqs + 1 */
} plan_t;


/* Its rows, and what they attend to: with all tokens of the sequence before. */
cost_step_t plan_cost(const plan_t *plan);

#endif /* ENGINE_SCHED_PLAN_H */
