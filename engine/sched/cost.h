/*
 * What a step costs, learned while the engine runs:
 *
 *   time = by the rows of the batch + slope × tokens that they attend to
 *
 * Decode is bound by memory traffic and prefill by arithmetic, so the first
 * part is flat for few rows and then grows with each of them; where the bend
 * lies depends on model and machine.  Nothing is assumed: each measured step
 * corrects the point near its number of rows and the slope, and what was never
 * measured is taken from the nearest points.
 *
 * The scheduler asks how many rows of prefill may ride along with decodes,
 * speculative decoding how many rows of drafts.
 */

#ifndef ENGINE_SCHED_COST_H
#define ENGINE_SCHED_COST_H

#include <stdbool.h>
#include <stdint.h>

enum { COST_POINTS = 64 };

typedef struct {
    double rows; /* average of what was measured; 0: nothing yet */
    double ns;
} cost_point_t;

/* Zero is a model that knows nothing. */
typedef struct {
    cost_point_t point[COST_POINTS]; /* by cost_index() of the rows */
    double slope;                    /* ns for each attended token */
    double attended;                 /* average over the steps */
    bool warm;                       /* the first step is behind */
} cost_t;

/* A step: its rows, and the sum of their contexts. */
typedef struct {
    int rows; /* ≥ 1 */
    double attended;
} cost_step_t;


/* The step took ns.  The first one tells nothing: it touches memory that nobody
 * has touched before. */
void cost_observe(cost_t *cost, cost_step_t step, uint64_t ns);

/* What it will take, ns; 0 when nothing was ever measured.  Between two points
 * by interpolation, beyond the last in proportion to the rows (it cannot grow
 * faster), below the first as long as that. */
double cost_ns(const cost_t *cost, cost_step_t step);

/* The same, but beyond the last point, and for one row more than any point, no
 * longer than there, and 0 below the first, if attended costs nothing: what it
 * takes if rows that were never tried come for nothing. */
double cost_least_ns(const cost_t *cost, cost_step_t step);

/* How many rows, at most max, that attend to context tokens each, may be added
 * to step before it takes longer than ns.  max while nothing is known. */
int cost_extra(const cost_t *cost, cost_step_t step, int context, double ns,
               int max);

#endif /* ENGINE_SCHED_COST_H */
