/*
 * Bias, masks and penalties, in the order of sampler.h.
 *
 * The penalties need to know which tokens a request has seen, and how often it
 * has produced them.  The state keeps a count per token of the vocabulary and
 * a list of the distinct tokens seen, so that a step costs what was seen and
 * not what could have been.
 */

#include "engine/sample/logits.h"

#include <math.h>

struct samp_state_s {
    int n_vocab;
    bool prompt; /* the prompt's tokens matter, too */
    int n_seen;
    int32_t *seen;  /* [n_vocab] distinct tokens, in order of appearance */
    int32_t *count; /* [n_vocab] 0: not seen; 1 + times in the output */
};


bool
samp_needs_state(const samp_params_t *params)
{
    return params->repetition_penalty != 1.0f || params->presence_penalty != 0
           || params->frequency_penalty != 0;
}


samp_state_t *
samp_state_create(arena_t *arena, const samp_params_t *params, int n_vocab)
{
    samp_state_t *state = arena_calloc(arena, sizeof(samp_state_t));

    if (state == NULL) {
        return NULL;
    }

    const size_t bytes = (size_t) n_vocab * sizeof(int32_t);

    state->n_vocab = n_vocab;
    state->prompt = params->repetition_penalty != 1.0f;
    state->seen = arena_alloc(arena, bytes);
    state->count = arena_calloc(arena, bytes);

    if (state->seen == NULL || state->count == NULL) {
        return NULL;
    }

    return state;
}


void
samp_state_add(samp_state_t *state, int32_t token, bool output)
{
    if (token < 0 || token >= state->n_vocab || !(output || state->prompt)) {
        return;
    }

    if (state->count[token] == 0) {
        state->count[token] = 1;
        state->seen[state->n_seen++] = token;
    }

    state->count[token] += output;
}


int
logits_seen(const samp_state_t *state, const int32_t **seen,
            const int32_t **count)
{
    *seen = state->seen;
    *count = state->count;

    return state->n_seen;
}


static void
add_bias(const samp_params_t *params, float *logits, int n_vocab)
{
    for (int i = 0; i < params->n_bias; i++) {
        const int32_t token = params->bias[i].token;

        if (token >= 0 && token < n_vocab) {
            logits[token] += params->bias[i].bias;
        }
    }
}


static void
mask(const samp_params_t *params, float *logits, int n_vocab)
{
    for (int i = 0; i < params->n_masked; i++) {
        const int32_t token = params->masked[i];

        if (token >= 0 && token < n_vocab) {
            logits[token] = -INFINITY;
        }
    }
}


/* Repetition: Keskar et al., "CTRL", 2019, section 4.1, with vLLM's reading
 * of it (a negative logit is multiplied); presence and frequency as in
 * OpenAI's API. */
static void
penalize(const samp_params_t *params, const samp_state_t *state, float *logits,
         int n_vocab)
{
    const float repetition = params->repetition_penalty;

    for (int i = 0; i < state->n_seen; i++) {
        const int32_t token = state->seen[i];
        const int32_t outputs = state->count[token] - 1;

        /* a tokenizer may know more ids than the model */
        if (token >= n_vocab) {
            continue;
        }

        float x = logits[token];

        x = x > 0.0f ? x / repetition : x * repetition;

        if (outputs > 0) {
            x -= params->frequency_penalty * (float) outputs;
            x -= params->presence_penalty;
        }

        logits[token] = x;
    }
}


bool
logits_adjusts(const samp_params_t *params, const samp_state_t *state,
               int n_output)
{
    return params->n_bias > 0
           || (params->n_masked > 0 && n_output < params->min_tokens)
           || (state != NULL && state->n_seen > 0);
}


void
logits_adjust(const samp_params_t *params, const samp_state_t *state,
              float *logits, int n_vocab, int n_output)
{
    add_bias(params, logits, n_vocab);

    if (n_output < params->min_tokens) {
        mask(params, logits, n_vocab);
    }

    if (state != NULL) {
        penalize(params, state, logits, n_vocab);
    }
}
