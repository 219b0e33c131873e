/*
 * How much of the output that it may still generate a running sequence is
 * expected to generate: the ratio of SGLang's scheduler.
 *
 * Whoever is admitted must leave room for what those that run are expected to
 * need.  The ratio begins high and sinks with every step that decodes, until
 * pages run out: then it rises to what those that run have generated of their
 * possible output, and a little more.
 */

#ifndef ENGINE_SCHED_ESTIMATE_H
#define ENGINE_SCHED_ESTIMATE_H

#include "engine/base/list.h"
#include "engine/sched/seq.h"

typedef struct {
    double ratio; /* 0 … 1 */
    double least; /* it sinks to this */
    double fall;  /* by so much a step */
} estimate_t;


/* ratio: at the start; 0: the default; < 0: nothing is ever expected. */
void estimate_init(estimate_t *estimate, double ratio);

/* Tokens of the sequence in the end, as far as expected; ≥ n_tokens. */
int estimate_tokens(const estimate_t *estimate, const seq_t *seq);

/* A step has generated tokens. */
void estimate_sink(estimate_t *estimate);

/* Pages have run out; running is the queue of those that are left. */
void estimate_rise(estimate_t *estimate, const list_t *running);

#endif /* ENGINE_SCHED_ESTIMATE_H */
