/*
 * Logits → token.  Order of operations, for each row:
 *
 *   1  raw log-probabilities for `logprobs` (before anything below)
 *   2  logit_bias
 *   3  min_tokens: end-of-generation and stop tokens masked
 *   4  repetition penalty over prompt and output; presence and frequency
 *      penalties over the output only
 *   5  temperature (0: the largest logit, ties to the lowest id, done)
 *   6  min_p relative to the largest probability
 *   7  top_k (ties to the lowest id), then top_p over what is left, at least
 *      one token kept
 *   8  one draw by inverse CDF, candidates in descending order (ties: lowest
 *      id first), with rng_uniform(seed, position)
 *
 * Own exp and log, and weights that are multiples of 2^-34, whose sums are
 * exact: the same bits everywhere, in whatever order weights are added.  A
 * token of less than 2^-35 of the largest's probability is never drawn.
 */

#ifndef ENGINE_SAMPLE_SAMPLER_H
#define ENGINE_SAMPLE_SAMPLER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"

enum { SAMP_TOP_MAX = 20 };

typedef struct {
    int32_t token;
    float bias;
} samp_bias_t;

typedef struct {
    float temperature;
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    int top_k;
    int min_tokens;
    uint64_t seed;
    int top_logprobs; /* -1: no log-probabilities; 0 … 20 alternatives */
    const samp_bias_t *bias;
    int n_bias;
    const int32_t *masked; /* ids that may not appear before min_tokens */
    int n_masked;
} samp_params_t;

typedef struct {
    int32_t token;
    float logprob;
} samp_logprob_t;

typedef struct {
    int32_t token;
    float logprob; /* raw, at least −9999; NaN unless asked for */
    int n_top;     /* fewer than asked for if fewer tokens are above −∞ */
    samp_logprob_t top[SAMP_TOP_MAX]; /* best first, ties lowest id first */
} samp_result_t;

/* Per request: which tokens it has seen.  Only if penalties are on. */
typedef struct samp_state_s samp_state_t;

/* Scratch for one thread: n_vocab candidates. */
typedef struct samp_s samp_t;


/* Memory that the scratch takes. */
size_t samp_bytes(int n_vocab);

/* NULL: no memory.  n_vocab: at most 2^19. */
samp_t *samp_create(int n_vocab);
void samp_destroy(samp_t *samp);

/* At most how many times the temperature below the largest logit a token may be
 * to be drawn, negative: by min_p, and where there is no weight any more. */
float samp_depth(const samp_params_t *params);

/* True if any penalty is on. */
bool samp_needs_state(const samp_params_t *params);

/* NULL: no memory.  Lives in arena. */
samp_state_t *samp_state_create(arena_t *arena, const samp_params_t *params,
                                int n_vocab);

/* Tells the state of a token of the prompt or of the output. */
void samp_state_add(samp_state_t *state, int32_t token, bool output);

/* logits: [n_vocab], destroyed.  state: NULL if no penalty is on.  n_output:
 * tokens generated so far (for min_tokens); position: of the token to be
 * drawn, in the sequence.  NaN counts as −∞; the token is always in range. */
void samp_sample(samp_t *samp, const samp_params_t *params,
                 const samp_state_t *state, float *logits, int n_output,
                 uint64_t position, samp_result_t *result);

/* Log-probability of a given token, and the best n_top, from raw logits (left
 * as they are).  For echoed prompts and for perplexity.  A token outside the
 * vocabulary has NaN. */
void samp_score(samp_t *samp, const float *logits, int32_t token, int n_top,
                samp_result_t *result);

#endif /* ENGINE_SAMPLE_SAMPLER_H */
