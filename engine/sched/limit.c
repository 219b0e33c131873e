/*
 * Limits of a step (limit.h), from what steps were seen to cost: inter_token_ns
 * is how long a step with tokens in it should take.
 */

#include "engine/sched/limit.h"

#include <limits.h>

enum {
    SHARES_MAX = 4, /* a share of the step is not cut smaller */
    PREFILL_MIN = 4 /* rows of prefill that the others always put up with */
};


/* Are steps in which tokens are drawn to be short? */
static bool
has_target(const sched_t *sched)
{
    return sched->cost != NULL && sched->inter_token_ns > 0
           && !sched->whole_prompts;
}


int
limit_step(const sched_t *sched)
{
    const sched_load_t *load = &sched->load;
    const int rest = sched->max_tokens - load->decode.rows;
    int least = load->n_prefill > PREFILL_MIN ? load->n_prefill : PREFILL_MIN;

    if (!has_target(sched) || load->decode.rows == 0) {
        return sched->max_tokens;
    }

    const double twice = 2 * cost_ns(sched->cost, load->decode);
    const double most =
        twice > sched->inter_token_ns ? twice : sched->inter_token_ns;
    const int extra =
        cost_extra(sched->cost, load->decode, load->context, most, rest);

    least = least < rest ? least : rest;

    return load->decode.rows + (extra > least ? extra : least);
}


int
limit_share(const sched_t *sched)
{
    const int n = sched->load.n_prefill + sched->fair.n_waiting;
    const int rest = sched->budget - sched->load.decode.rows;

    if (sched->whole_prompts || n <= 1) {
        return INT_MAX;
    }

    const int share = rest / (n < SHARES_MAX ? n : SHARES_MAX);

    if (share < sched->long_prefill) {
        return sched->long_prefill;
    }

    return share > 0 ? share : 1;
}


int
limit_part(const sched_t *sched)
{
    const sched_load_t *load = &sched->load;

    if (!has_target(sched) || load->decode.rows > 0
        || sched->fair.n_waiting == 0) {
        return INT_MAX;
    }

    const cost_step_t one = { .rows = 1, .attended = load->context };
    const int rows = 1
                     + cost_extra(sched->cost, one, load->context,
                                  sched->inter_token_ns, sched->max_tokens);

    return rows > PREFILL_MIN ? rows : PREFILL_MIN;
}


void
limit_rest(sched_t *sched)
{
    cost_step_t step = { 0 };
    int context = 0;
    bool ends = false;

    if (!has_target(sched) || sched->load.decode.rows > 0) {
        return;
    }

    for (list_t *l = sched->running.next; l != &sched->running; l = l->next) {
        const seq_t *seq = sched_seq(l);
        const int end = seq->computed + seq->count;

        if (seq->count > 0) {
            step.rows += seq->count;
            step.attended += (double) seq->count * end;
            context = end > context ? end : context;
            ends |= end == seq->n_tokens;
        }
    }

    if (ends) {
        sched->budget = cost_extra(sched->cost, step, context,
                                   sched->inter_token_ns, sched->budget);
    }
}
