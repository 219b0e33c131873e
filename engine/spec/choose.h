/*
 * How many drafts are worth their time, and for whom.
 *
 * A row more in a step costs what steps of so many rows were measured to cost
 * (sched/cost.h); it brings a token with the probability that its draft and
 * all before it are right, which is learned for each sequence.  Drafts are
 * added while the step yields more tokens a second with them.  So where
 * a batch is bound by arithmetic, or drafts are wrong, there are none.
 */

#ifndef ENGINE_SPEC_CHOOSE_H
#define ENGINE_SPEC_CHOOSE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/sched/cost.h"

enum {
    SPEC_MAX = 15,    /* drafts of a sequence in one step */
    SPEC_DRAFTERS = 4 /* ways to make them */
};

/* What is known about the drafts of a sequence. */
typedef struct {
    double right;  /* probability that a draft is right whose predecessors
                       were; 0: not set yet */
    uint32_t idle; /* tokens since it last had a draft */
} spec_track_t;

/* The drafts of all sequences of one engine. */
typedef struct {
    double right; /* where new sequences start */
} spec_prior_t;

/* One sequence of a step. */
typedef struct {
    double right;
    double ns; /* to make one draft */
    int most;  /* drafts that it can have */
    int n;     /* out: that it is to have */
} spec_bid_t;


/* Steps of about as many sequences, with drafts and without: what a token took,
 * averages in ns.  What the cost of a step foretells is tried against it. */
typedef struct {
    double plain;
    double drafted;
    int n_plain;   /* measured, up to what is enough */
    int n_drafted; /* since drafts were allowed */
    int rest;      /* steps that are left without drafts */
} spec_trial_t;


void spec_prior_init(spec_prior_t *prior);

/* The probability to count with. */
double spec_right(const spec_prior_t *prior, const spec_track_t *track);

/* n_draft drafts were verified, of which the first n_right were right. */
void spec_learn(spec_prior_t *prior, spec_track_t *track, int n_draft,
                int n_right);

/* A step without drafts for this sequence. */
void spec_pass(spec_track_t *track);

/* Sets n of each bid.  step: what runs anyway; room: rows that are left.  cost
 * may know nothing yet. */
void spec_choose(const cost_t *cost, cost_step_t step, int room,
                 spec_bid_t *bids, int n_bids);

/* May the next step have drafts? */
bool spec_allowed(spec_trial_t *trial);

/* A step that did nothing but decode took so long for each token. */
void spec_tried(spec_trial_t *trial, bool drafted, double ns);

#endif /* ENGINE_SPEC_CHOOSE_H */
