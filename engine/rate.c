/*
 * The rate at which the queue moves, for Retry-After.  Called by engine.c with
 * every step, asked by emit.c and port.c.
 *
 * Only time during which somebody waited counts: an idle engine takes what
 * comes, which says nothing about how fast a queue would move.  The average is
 * over the last dozen or so that were scheduled, not over a stretch of time,
 * so it is as good for a model that answers in a minute as for one that
 * answers in a millisecond.  While nobody is scheduled for longer than the
 * mean, that silence counts too.
 */

#include "engine/rate.h"

#include <math.h>

/* what one scheduled request leaves of the weight of those before it */
#define KEEP (1 - 1.0 / 16)


void
rate_step(rate_t *rate, uint64_t now_ns, int n, int waiting)
{
    if (rate->queue && now_ns > rate->step_ns) {
        rate->open_s += (double) (now_ns - rate->step_ns) / 1e9;
    }

    if (rate->queue && n > 0) {
        const double keep = pow(KEEP, n);

        rate->time_s = rate->time_s * keep + rate->open_s;
        rate->count = rate->count * keep + n;
    }

    if (n > 0 || waiting == 0) {
        rate->open_s = 0;
    }

    rate->queue = waiting > 0;
    rate->step_ns = now_ns;
}


uint32_t
rate_wait_s(const rate_t *rate, int waiting)
{
    double each_s = rate->open_s; /* no more than one in this time */

    if (rate->count > 0) {
        const double mean_s = rate->time_s / rate->count;

        each_s = mean_s;

        if (rate->open_s > mean_s) {
            each_s += (rate->open_s - mean_s) / rate->count;
        }
    }

    const double wait_s = ceil(each_s * waiting);

    if (wait_s >= RATE_WAIT_MAX_S) {
        return RATE_WAIT_MAX_S;
    }

    return wait_s > 1 ? (uint32_t) wait_s : 1;
}
