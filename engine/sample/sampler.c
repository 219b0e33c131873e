/*
 * Chooses a token.  Called by runner.c for every row of logits.
 *
 * Drawing in descending order does not mean sorting the vocabulary: a first
 * scan finds the largest logit of every block of 64; with these, a cut is
 * found below which nothing can matter, and only what is above it becomes a
 * candidate (cand.h).
 */

#include "engine/sample/sampler.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/sample/cand.h"
#include "engine/sample/logits.h"
#include "engine/sample/math.h"
#include "engine/sample/rng.h"

/* a log-probability a client can read as "practically never"; −∞ is no JSON */
static const float logprob_floor = -9999.0f;

struct samp_s {
    int n_vocab;
    float *raw; /* [n_vocab] logits before they were adjusted */
    cand_set_t cands;
};


size_t
samp_bytes(int n_vocab)
{
    return sizeof(samp_t) + (size_t) n_vocab * sizeof(float)
           + cand_bytes(n_vocab);
}


samp_t *
samp_create(int n_vocab)
{
    llm_assert(n_vocab >= 1 && n_vocab <= MATH_WEIGHTS_MAX);

    samp_t *samp = calloc(1, sizeof(samp_t));

    if (samp == NULL) {
        return NULL;
    }

    samp->n_vocab = n_vocab;
    samp->raw = malloc((size_t) n_vocab * sizeof(float));

    if (samp->raw == NULL || !cand_init(&samp->cands, n_vocab)) {
        samp_destroy(samp);
        return NULL;
    }

    return samp;
}


void
samp_destroy(samp_t *samp)
{
    if (samp == NULL) {
        return;
    }

    cand_fini(&samp->cands);
    free(samp->raw);
    free(samp);
}


/* The first token with the largest logit, max; 0 when there is none at all. */
static int32_t
first_of(const samp_t *samp, const float *logits, float max)
{
    int b = 0;

    if (!(max > -INFINITY)) {
        return 0;
    }

    while (samp->cands.block[b] < max) {
        b++;
    }

    int32_t token = b * MATH_BLOCK;

    while (logits[token] != max) {
        token++;
    }

    return token;
}


/* Over logits whose block maxima are there. */
static double
sum_exp(const samp_t *samp, const float *logits, float max, float temperature)
{
    const math_row_t row = { .x = logits,
                             .n = samp->n_vocab,
                             .block = samp->cands.block };

    return math_sum_exp(&row, max, temperature);
}


/* --- drawing --- */


/* Makes at least the largest k the candidates.  Returns the sum of weights of
 * these k: no goal below it lies behind them, for the sums on the way to it
 * are the same ones, so the others need not be dropped. */
static double
take_top_k(cand_set_t *set, const cand_row_t *row, int k)
{
    const float cut = cand_bound(set, k);
    const cand_goal_t goal = { .count = k, .weight = INFINITY };
    double sum;

    cand_gather(set, row, cut > row->floor ? cut : row->floor);

    cand_find(set, row, &goal, &sum);

    return sum;
}


/* Makes the largest tokens the candidates, at least those whose weights exceed
 * target, by lowering the cut until they do. */
static void
take_weight(cand_set_t *set, const cand_row_t *row, double target)
{
    float cut = INFINITY;

    /* depths in units of the exponent: e^−3, e^−6, e^−12 … */
    for (float depth = 3.0f; cut > row->floor; depth *= 2.0f) {
        cut = row->max - depth * row->temperature;
        cut = cut > row->floor ? cut : row->floor;
        cand_gather(set, row, cut);

        if (cand_weight(set) > target) {
            return;
        }
    }
}


static int32_t
draw(samp_t *samp, const samp_params_t *params, const cand_row_t *row, float u)
{
    cand_set_t *set = &samp->cands;
    const int k = params->top_k;
    const bool cut_p = params->top_p < 1.0f;
    cand_goal_t goal = { .count = INT_MAX };
    double total;

    if (k > 0 && k < samp->n_vocab) {
        total = take_top_k(set, row, k);

    } else if (params->min_p > 0.0f) {
        cand_gather(set, row, row->floor);
        total = cand_weight(set);

    } else {
        total = sum_exp(samp, row->logits, row->max, row->temperature);
        take_weight(set, row, total * (cut_p ? params->top_p : u));
    }

    if (cut_p) {
        goal.weight = total * params->top_p;
        cand_find(set, row, &goal, &total);
    }

    goal.weight = total * u;
    goal.above = true;

    return cand_find(set, row, &goal, &total).token;
}


float
samp_depth(const samp_params_t *params)
{
    float depth = MATH_WEIGHT_FLOOR;

    if (params->min_p >= 1.0f) {
        depth = 0.0f;

    } else if (params->min_p > FLT_MIN) {
        depth = (float) math_log(params->min_p);
    }

    return depth > MATH_WEIGHT_FLOOR ? depth : MATH_WEIGHT_FLOOR;
}


/* The logit below which nothing is drawn. */
static float
row_floor(const samp_params_t *params, const cand_row_t *row)
{
    const float floor = row->max + samp_depth(params) * row->temperature;

    /* −∞ is never drawn */
    return floor >= -FLT_MAX ? floor : -FLT_MAX;
}


static int32_t
choose(samp_t *samp, const samp_params_t *params, const float *logits,
       uint64_t position)
{
    const float max = math_block_max(logits, samp->n_vocab, samp->cands.block);

    /* written so that NaN is greedy too; without a finite maximum there is no
     * distribution to draw from */
    if (!(params->temperature > 0.0f) || !(max >= -FLT_MAX && max <= FLT_MAX)) {
        return first_of(samp, logits, max);
    }

    cand_row_t row = { .logits = logits,
                       .max = max,
                       .temperature = params->temperature };

    row.floor = row_floor(params, &row);

    return draw(samp, params, &row, rng_uniform(params->seed, position));
}


/* --- log-probabilities --- */


/* The best n_top tokens: a short sorted list, and blocks that cannot improve
 * it are skipped.  Ids ascend, so a tie does not displace. */
static void
find_top(const samp_t *samp, const float *logits, int n_top,
         samp_result_t *result)
{
    samp_logprob_t *top = result->top;
    int n = 0;

    for (int b = 0; b < samp->cands.n_blocks; b++) {
        if (n == n_top && samp->cands.block[b] <= top[n - 1].logprob) {
            continue;
        }

        const int whole = (b + 1) * MATH_BLOCK;
        const int end = whole < samp->n_vocab ? whole : samp->n_vocab;

        for (int i = b * MATH_BLOCK; i < end; i++) {
            const float x = logits[i];

            if (!(x > (n == n_top ? top[n - 1].logprob : -INFINITY))) {
                continue;
            }

            int j = n < n_top ? n++ : n - 1;

            for (; j > 0 && top[j - 1].logprob < x; j--) {
                top[j] = top[j - 1];
            }

            top[j] = (samp_logprob_t){ i, x };
        }
    }

    result->n_top = n;
}


static float
logprob_of(float x, float max, double log_sum)
{
    if (!(x > -INFINITY)) {
        return logprob_floor;
    }

    x = x < FLT_MAX ? x : FLT_MAX;

    const float logprob = (float) ((double) x - max - log_sum);

    return logprob > logprob_floor ? logprob : logprob_floor;
}


/* Fills n_top and top, and returns log(sum(exp(x − max))); *max is finite. */
static double
score_row(samp_t *samp, const float *logits, int n_top, float *max,
          samp_result_t *result)
{
    const int n = samp->n_vocab;

    *max = math_block_max(logits, n, samp->cands.block);

    /* a row without any logit: all of it practically never */
    *max = *max > -FLT_MAX ? *max : -FLT_MAX;
    *max = *max < FLT_MAX ? *max : FLT_MAX;

    const double sum = sum_exp(samp, logits, *max, 1.0f);
    const double log_sum = sum > 0.0 ? math_log(sum) : 0.0;

    result->n_top = 0;

    if (n_top > 0) {
        find_top(samp, logits, n_top < SAMP_TOP_MAX ? n_top : SAMP_TOP_MAX,
                 result);
    }

    for (int i = 0; i < result->n_top; i++) {
        samp_logprob_t *top = &result->top[i];

        top->logprob = logprob_of(top->logprob, *max, log_sum);
    }

    return log_sum;
}


void
samp_score(samp_t *samp, const float *logits, int32_t token, int n_top,
           samp_result_t *result)
{
    float max;
    const double log_sum = score_row(samp, logits, n_top, &max, result);

    result->token = token;
    result->logprob = token >= 0 && token < samp->n_vocab
                          ? logprob_of(logits[token], max, log_sum)
                          : NAN;
}


void
samp_sample(samp_t *samp, const samp_params_t *params,
            const samp_state_t *state, float *logits, int n_output,
            uint64_t position, samp_result_t *result)
{
    const bool adjust = logits_adjusts(params, state, n_output);
    const bool score = params->top_logprobs >= 0;
    const float *raw = logits;
    double log_sum = 0.0;
    float max = 0.0f;

    result->n_top = 0;
    result->logprob = NAN;

    if (score) {
        log_sum = score_row(samp, logits, params->top_logprobs, &max, result);
    }

    if (score && adjust) {
        memcpy(samp->raw, logits, (size_t) samp->n_vocab * sizeof(float));
        raw = samp->raw;
    }

    if (adjust) {
        logits_adjust(params, state, logits, samp->n_vocab, n_output);
    }

    result->token = choose(samp, params, logits, position);

    if (score) {
        result->logprob = logprob_of(raw[result->token], max, log_sum);
    }
}
