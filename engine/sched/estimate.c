/* The estimate of outputs, used by admit.c and sched.c.  The constants are
 * SGLang's; where they are wrong for a load, the ratio adapts. */

#include "engine/sched/estimate.h"

#include <math.h>

enum {
    OUTPUT_MAX = 4096, /* an output expected to be longer is no plan */
    FALL_STEPS = 600,  /* from the start to the least */
    MORE_TOKENS = 20   /* a step of a preemption is not the last one */
};

static const double ratio_start = 0.7;
static const double ratio_least = 0.1;


void
estimate_init(estimate_t *estimate, double ratio)
{
    *estimate = (estimate_t){ .ratio = ratio == 0 ? ratio_start : ratio };

    if (ratio < 0) {
        estimate->ratio = 0;
        return;
    }

    estimate->least = ratio_least;
    estimate->fall = (ratio_start - ratio_least) / FALL_STEPS;
}


/* Of n possible ones those that count. */
static int
possible(int n)
{
    return n < 0 ? 0 : n < OUTPUT_MAX ? n : OUTPUT_MAX;
}


int
estimate_tokens(const estimate_t *estimate, const seq_t *seq)
{
    const int rest = possible(seq->cap_tokens - seq->n_tokens);

    return seq->n_tokens + (int) ceil(estimate->ratio * rest);
}


void
estimate_sink(estimate_t *estimate)
{
    if (estimate->ratio - estimate->fall > estimate->least) {
        estimate->ratio -= estimate->fall;
    } else if (estimate->ratio > estimate->least) {
        estimate->ratio = estimate->least;
    }
}


void
estimate_rise(estimate_t *estimate, const list_t *running)
{
    double generated = 0;
    double whole = 0;

    if (estimate->fall == 0) {
        return;
    }

    for (const list_t *l = running->next; l != running; l = l->next) {
        const seq_t *seq = list_entry(l, const seq_t, link);

        if (!seq->parked) {
            generated += seq->n_tokens - seq->n_prompt + MORE_TOKENS;
            whole += possible(seq->cap_tokens - seq->n_prompt);
        }
    }

    if (whole > 0 && generated / whole > estimate->ratio) {
        estimate->ratio = generated < whole ? generated / whole : 1;
    }
}
