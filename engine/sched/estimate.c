/*
 * The estimate of outputs, used by admit.c and sched.c.
 *
 * SGLang's ratio starts at 0.7, falls by the same amount in each step down to
 * 0.1, and jumps to the part of the possible output that has been generated.
 * In simulations (t/unit/sched_sim_test.c) that left 40 % of the pages unused
 * when clients do not limit their output, because 0.1 of all that is possible
 * is far too much, and jumped far too high for the others.  Factors fit all of
 * them: over 90 % of the pages are used and some 1 % of the requests preempted,
 * and a high start only costs time.
 */

#include "engine/sched/estimate.h"

#include <math.h>

enum { OUTPUT_MAX = 4096 }; /* an output expected to be longer is no plan */

static const double ratio_start = 0.1;
static const double ratio_least = 0.01;
static const double fall = 0.997; /* to a tenth in some 800 steps */
static const double rise = 1.5;
static const double rise_more = 0.01;


void
estimate_init(estimate_t *estimate, double ratio)
{
    estimate->fixed = ratio < 0;
    estimate->ratio = ratio < 0 ? 0 : ratio > 0 ? ratio : ratio_start;
}


int
estimate_tokens(const estimate_t *estimate, const seq_t *seq)
{
    int rest = seq->cap_tokens - seq->n_tokens;

    rest = rest < 0 ? 0 : rest < OUTPUT_MAX ? rest : OUTPUT_MAX;

    return seq->n_tokens + (int) ceil(estimate->ratio * rest);
}


void
estimate_sink(estimate_t *estimate)
{
    if (!estimate->fixed) {
        estimate->ratio = fmax(estimate->ratio * fall, ratio_least);
    }
}


void
estimate_rise(estimate_t *estimate)
{
    if (!estimate->fixed) {
        estimate->ratio = fmin(estimate->ratio * rise + rise_more, 1);
    }
}
