/*
 * What changes logits before a token is chosen: bias, min_tokens, penalties
 * (steps 2 to 4 of sampler.h).  Also the state behind the penalties.
 */

#ifndef ENGINE_SAMPLE_LOGITS_H
#define ENGINE_SAMPLE_LOGITS_H

#include <stdbool.h>

#include "engine/sample/sampler.h"


/* True if logits_adjust would change anything. */
bool logits_adjusts(const samp_params_t *params, const samp_state_t *state,
                    int n_output);

/* How many different tokens have been seen.  Which, in order of appearance; and
 * by token of the vocabulary 1 + how often it is in the output. */
int logits_seen(const samp_state_t *state, const int32_t **seen,
                const int32_t **count);

/* logits: [n_vocab].  state may be NULL: no penalties.  Ids outside the
 * vocabulary are passed over.  Touches only the tokens named. */
void logits_adjust(const samp_params_t *params, const samp_state_t *state,
                   float *logits, int n_vocab, int n_output);

#endif /* ENGINE_SAMPLE_LOGITS_H */
