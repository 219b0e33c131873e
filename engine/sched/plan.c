/* What a plan amounts to. */

#include "engine/sched/plan.h"


cost_step_t
plan_cost(const plan_t *plan)
{
    cost_step_t step = { .rows = plan->n_tokens };

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];

        /* row->count tokens, the k-th of them attends to first + k + 1 */
        step.attended += row->count * (row->first + (row->count + 1) / 2.0);
    }

    return step;
}
