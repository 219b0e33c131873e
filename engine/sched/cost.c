/*
 * Points on a grid that is exact up to 8 rows and has four steps an octave
 * beyond.  Each holds moving averages of rows and time, so that a point lies
 * where it was measured, not in the middle of its cell.
 *
 * What a step took differs from what was expected; the difference goes to its
 * point and to the slope in proportion to what each contributes (normalised
 * least mean squares; Widrow, Hoff 1960).  Noise comes from other processes
 * and only ever makes a step longer: more than half as much again as expected
 * counts as half as much again.
 */

#include "engine/sched/cost.h"

#include <math.h>
#include <stddef.h>

#include "engine/base/status.h"

enum {
    EXACT = 8,     /* rows with a point of their own */
    PER_OCTAVE = 4 /* points beyond */
};

static const double weight = 1.0 / 8; /* of a new measurement */


static int
cost_index(int rows)
{
    llm_assert(rows >= 1);

    if (rows <= EXACT) {
        return rows - 1;
    }

    const int i =
        EXACT - 1 + (int) ceil(PER_OCTAVE * log2((double) rows / EXACT) - 1e-9);

    return i < COST_POINTS ? i : COST_POINTS - 1;
}


void
cost_observe(cost_t *cost, cost_step_t step, uint64_t ns)
{
    cost_point_t *point = &cost->point[cost_index(step.rows)];

    /* the first step touches much memory for the first time */
    if (!cost->warm) {
        cost->warm = true;
        return;
    }

    cost->attended += weight * (step.attended - cost->attended);

    if (point->rows == 0) {
        const double rest = (double) ns - cost->slope * step.attended;

        *point = (cost_point_t){ step.rows, rest > 0 ? rest : 0 };
        return;
    }

    const double expected = point->ns + cost->slope * step.attended;
    const double most = 1.5 * expected;
    const double taken = (double) ns < most ? (double) ns : most;
    const double scale = cost->attended > 1 ? cost->attended : 1;
    const double x = step.attended / scale;
    const double part = 2 * weight * (taken - expected) / (1 + x * x);

    point->rows += weight * (step.rows - point->rows);
    point->ns += part;
    cost->slope += part * x / scale;

    point->ns = point->ns > 0 ? point->ns : 0;
    cost->slope = cost->slope > 0 ? cost->slope : 0;
}


/* least: what is certain.  Steps grow with their rows; so far as nothing is
 * known, beyond the last point and for one row more than a point, they take
 * what it took, and nothing below the first.  Otherwise time grows as the rows
 * do. */
static double
rows_ns(const cost_t *cost, int rows, bool least)
{
    const cost_point_t *below = NULL, *above = NULL;
    const cost_point_t *own = &cost->point[cost_index(rows)];

    for (int i = 0; i < COST_POINTS; i++) {
        const cost_point_t *point = &cost->point[i];

        if (point->rows == 0) {
            continue;
        }

        if (point->rows >= rows) {
            above = point;
            break;
        }

        below = point;
    }

    if (below == NULL) {
        return above == NULL || (least && above != own) ? 0 : above->ns;
    }

    if (least
        && (above == NULL || (rows <= below->rows + 1 && rows < above->rows))) {
        return below->ns;
    }

    if (above == NULL) {
        return below->ns * (rows / below->rows);
    }

    return below->ns
           + (above->ns - below->ns) * (rows - below->rows)
                 / (above->rows - below->rows);
}


double
cost_ns(const cost_t *cost, cost_step_t step)
{
    return rows_ns(cost, step.rows, false) + cost->slope * step.attended;
}


double
cost_least_ns(const cost_t *cost, cost_step_t step)
{
    return rows_ns(cost, step.rows, true) + cost->slope * step.attended;
}


int
cost_extra(const cost_t *cost, cost_step_t step, int context, double ns,
           int max)
{
    int fits = 0, over = max + 1;

    if (cost_ns(cost, step) == 0) {
        return max;
    }

    /* the largest that fits; the points are taken to grow with the rows */
    while (over - fits > 1) {
        const int more = fits + (over - fits) / 2;
        const cost_step_t with = {
            .rows = step.rows + more,
            .attended = step.attended + (double) more * context,
        };

        if (cost_ns(cost, with) <= ns) {
            fits = more;
        } else {
            over = more;
        }
    }

    return fits;
}
