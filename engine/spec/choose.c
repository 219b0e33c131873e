/*
 * The choice is greedy: the likeliest draft of all goes first, then the next,
 * as long as rows worth a token each, divided by the step's time, grow.  The
 * time by rows has steps and flat parts, so it looks a little beyond the first
 * draft that does not pay.  What steps take is measured, with noise, and the
 * best of many guesses is mostly one that noise has flattered: drafts must
 * promise a real gain, or there are none.  And they must keep it: where steps
 * with drafts turn out no faster a token, there are none for a while.
 */

#include "engine/spec/choose.h"

#include <stddef.h>

enum {
    LOOK_AHEAD = 16,
    IDLE_TOKENS = 32,
    TRIAL = 8, /* steps that an average needs */
    REST = 128 /* steps without drafts that did not pay */
};

static const double start = 0.7;       /* of an engine that knows nothing */
static const double gain = 1.05;       /* that drafts must promise */
static const double keep = 0.97;       /* of a plain step's time a token */
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
    const double now = cost_least_ns(cost, step);
    const double context = step.attended / step.rows;
    double tokens = step.rows;
    double drafting = 0;
    double yield = gain * tokens / now;
    int best = 0;

    for (int n = 1; n <= room && n <= best + LOOK_AHEAD; n++) {
        const cost_step_t with = { .rows = step.rows + n,
                                   .attended = step.attended + n * context };
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
    int total = 0;
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


bool
spec_allowed(spec_trial_t *trial)
{
    if (trial->n_plain < TRIAL) {
        return false;
    }

    if (trial->rest > 0) {
        trial->rest--;
        return false;
    }

    return true;
}


/* A step that others held up counts as a slow one, no more. */
static void
average(double *mean, double ns)
{
    if (*mean == 0) {
        *mean = ns;
        return;
    }

    *mean += weight * ((ns < 2 * *mean ? ns : 2 * *mean) - *mean);
}


void
spec_tried(spec_trial_t *trial, bool drafted, double ns)
{
    if (!drafted) {
        average(&trial->plain, ns);
        trial->n_plain += trial->n_plain < TRIAL;
        return;
    }

    average(&trial->drafted, ns);
    trial->n_drafted++;

    if (trial->n_drafted >= TRIAL && trial->drafted > keep * trial->plain) {
        trial->rest = REST;
        trial->n_drafted = 0;
        trial->drafted = 0;
    }
}
