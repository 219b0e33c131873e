/*
 * The choice is greedy: the likeliest draft of all goes first, then the next,
 * as long as rows worth a token each, divided by the step's time, grow.  The
 * time by rows has steps and flat parts, so it looks a little beyond the first
 * draft that does not pay.
 */

#include "engine/spec/choose.h"

#include <stddef.h>

enum { LOOK_AHEAD = 16, IDLE_TOKENS = 32 };

static const double start = 0.7;       /* of an engine that knows nothing */
static const double weight = 1.0 / 8;  /* of a draft, for its sequence */
static const double memory = 1.0 / 64; /* and for the engine */
static const double least = 1.0 / 32;  /* less is never worth a row */
static const double revival = 1.0 / 4; /* of one that had none for long */


void
spec_prior_init(spec_prior_t *prior)
{
    prior->right = start;
}


double
spec_right(const spec_prior_t *prior, const spec_track_t *track)
{
    const double right = track->right > 0 ? track->right : prior->right;

    /* texts change: one that drafts were wrong for gets another chance */
    if (track->idle >= IDLE_TOKENS && right < revival) {
        return revival;
    }

    return right;
}


void
spec_learn(spec_prior_t *prior, spec_track_t *track, int n_draft, int n_right)
{
    if (track->right <= 0) {
        track->right = prior->right;
    }

    /* behind the first wrong one nothing is known */
    for (int i = 0; i < n_draft && i <= n_right; i++) {
        const double right = i < n_right;

        track->right += weight * (right - track->right);
        prior->right += memory * (right - prior->right);
    }

    track->idle = 0;
}


void
spec_pass(spec_track_t *track)
{
    track->idle++;
}


/* The bid whose next draft is the likeliest, and how likely; NULL: none. */
static spec_bid_t *
likeliest(spec_bid_t *bids, int n_bids, double *value)
{
    spec_bid_t *best = NULL;

    *value = least;

    for (int i = 0; i < n_bids; i++) {
        spec_bid_t *bid = &bids[i];
        double v = bid->right;

        for (int k = 0; k < bid->n; k++) {
            v *= bid->right;
        }

        if (bid->n < bid->most && v > *value) {
            *value = v;
            best = bid;
        }
    }

    return best;
}


/* The best number of drafts in all, up to room. */
static int
best_total(const cost_t *cost, cost_step_t step, int room, spec_bid_t *bids,
           int n_bids)
{
    const double context = step.attended / step.rows;
    double tokens = step.rows;
    double drafting = 0;
    double yield = tokens / cost_least_ns(cost, step);
    int best = 0;

    for (int n = 1; n <= room && n <= best + LOOK_AHEAD; n++) {
        const cost_step_t with = { step.rows + n, step.attended + n * context };
        double value;
        spec_bid_t *bid = likeliest(bids, n_bids, &value);

        if (bid == NULL) {
            break;
        }

        bid->n++;
        tokens += value;
        drafting += bid->ns;

        const double ns = cost_least_ns(cost, with) + drafting;

        if (tokens / ns > yield) {
            yield = tokens / ns;
            best = n;
        }
    }

    return best;
}


void
spec_choose(const cost_t *cost, cost_step_t step, int room, spec_bid_t *bids,
            int n_bids)
{
    int total = room;
    double value;

    for (int i = 0; i < n_bids; i++) {
        bids[i].n = 0;
    }

    /* nothing is known before the first step */
    if (cost_least_ns(cost, step) > 0) {
        total = best_total(cost, step, room, bids, n_bids);
    }

    for (int i = 0; i < n_bids; i++) {
        bids[i].n = 0;
    }

    for (int n = 0; n < total; n++) {
        spec_bid_t *bid = likeliest(bids, n_bids, &value);

        if (bid == NULL) {
            break;
        }

        bid->n++;
    }
}
