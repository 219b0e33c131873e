/*
 * How much of the output that it may still generate a running sequence is
 * expected to generate: a ratio, after SGLang's scheduler.
 *
 * Whoever is admitted must leave room for what those that run are expected to
 * need.  The ratio sinks with every step that decodes; every step in which
 * pages run out raises it by half and a little.  So it settles where pages run
 * out now and then, wherever that is: clients that ask for as much as they need
 * want some 0.1, those that ask for all there is 0.02.
 */

#ifndef ENGINE_SCHED_ESTIMATE_H
#define ENGINE_SCHED_ESTIMATE_H

#include "engine/sched/seq.h"

typedef struct {
    double ratio; /* 0 … 1 */
    bool fixed;   /* at 0 */
} estimate_t;


/* ratio: at the start; 0: the default; < 0: nothing is ever expected. */
void estimate_init(estimate_t *estimate, double ratio);

/* Tokens of the sequence in the end, as far as expected; ≥ n_tokens. */
int estimate_tokens(const estimate_t *estimate, const seq_t *seq);

/* A step has generated tokens. */
void estimate_sink(estimate_t *estimate);

/* Pages have run out. */
void estimate_rise(estimate_t *estimate);

#endif /* ENGINE_SCHED_ESTIMATE_H */
