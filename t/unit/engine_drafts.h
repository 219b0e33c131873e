/*
 * Drafters for the requests of engine_storm.h: good ones that have mistakes
 * planted in them, ones that are never right, look-up, and a draft model; and
 * a storm with one of them, after which all answers must be as they were
 * alone, and what has been counted is true.
 */

#ifndef T_UNIT_ENGINE_DRAFTS_H
#define T_UNIT_ENGINE_DRAFTS_H

#include "t/unit/engine_storm.h"

static random_t noise;
static uint64_t n_preempted; /* in all rounds */

/* 2: all is asked twice, where answers have too little in common */
static int rounds_of_suffix = 1;


/* What no answer has but by chance. */
static inline int
draft_noise(const int32_t *tokens, int n_tokens, int n, int32_t *draft)
{
    (void) tokens;
    (void) n_tokens;

    for (int i = 0; i < n; i++) {
        draft[i] = (int32_t) random_below(&noise, subject.n_vocab);
    }

    return n;
}


/* How many of the answer's tokens follow a prompt as long as its own; 0 if they
 * are others. */
static inline int
begun(const answer_t *answer, const int32_t *tokens, int n_tokens)
{
    const int n = n_tokens - (int) answer->prompt;

    return n > 0 && n <= answer->n
                   && memcmp(answer->token, tokens + answer->prompt,
                             (size_t) n * sizeof(int32_t))
                          == 0
               ? n
               : 0;
}


/* The rest of the answer that has begun the furthest, every eighth token
 * wrong. */
static inline int
draft_known(const int32_t *tokens, int n_tokens, int n, int32_t *draft)
{
    const answer_t *best = NULL;
    int most = 0, found = 0;

    for (int i = 0; i < 2 * N_REQUESTS; i++) {
        const answer_t *answer = &alone[i % 2][i / 2];
        const int m = begun(answer, tokens, n_tokens);

        if (m > most) {
            most = m;
            best = answer;
        }
    }

    for (; best != NULL && found < n && most + found < best->n; found++) {
        const int wrong = (most + found) % 8 == 5;

        draft[found] = (best->token[most + found] + wrong) % subject.n_vocab;
    }

    return found;
}


typedef struct {
    const char *name;
    const char *speculative;
    int (*drafter)(const int32_t *tokens, int n_tokens, int n, int32_t *draft);
    bool model; /* subject.draft drafts, or the model for itself */

    /* of all that it has drafted so far */
    uint64_t tokens;
    uint64_t accepted;
} drafter_t;

static drafter_t drafters[] = {
    { "known", NULL, draft_known, false, 0, 0 },
    { "noise", NULL, draft_noise, false, 0, 0 },
    { "ngram", "ngram:1:5", NULL, false, 0, 0 },
    { "suffix", "suffix", NULL, false, 0, 0 },
    { "noise before ngram and suffix", "ngram:2:4,suffix", draft_noise, false,
      0, 0 },
    { "model", NULL, NULL, true, 0, 0 },
    { "suffix before model", "suffix", NULL, true, 0, 0 },
};

enum { N_DRAFTERS = sizeof(drafters) / sizeof(drafters[0]) };


static inline void
check_drafts(const engine_t *engine, const setup_t *setup, drafter_t *drafter)
{
    const llm_stats_t *stats = engine->stats;
    const uint64_t drafts = llm_stats_get(&stats->spec_drafts);
    const uint64_t tokens = llm_stats_get(&stats->spec_draft_tokens);
    const uint64_t accepted = llm_stats_get(&stats->spec_accepted);
    uint64_t sum = 0;

    printf("# %s, k %s: %u of %u drafts right, in %u; %u preemptions\n",
           drafter->name, setup->k != NULL ? setup->k : "auto",
           (unsigned) accepted, (unsigned) tokens, (unsigned) drafts,
           (unsigned) sched_preemptions(engine->sched));

    for (int i = 0; i < LLM_SPEC_MAX; i++) {
        const uint64_t at = llm_stats_get(&stats->spec_accepted_at[i]);

        assert_true(at <= drafts);
        sum += at;
    }

    assert_int_equal(sum, accepted);
    assert_true(accepted <= tokens && drafts <= tokens);
    drafter->tokens += tokens;
    drafter->accepted += accepted;

    /* auto drafts where it pays by the clock: anywhere, or nowhere */
    if (setup->k != NULL
        && (setup->drafter != NULL || setup->draft_model != NULL)) {
        assert_true(tokens > 0);
    }

    /* of a few, which auto may try, all can be wrong */
    const bool few = setup->k == NULL && tokens < 64;

    if (setup->drafter == draft_noise) {
        assert_true(accepted <= 6 + 4 * tokens / (uint64_t) subject.n_vocab);
    } else if (setup->drafter == draft_known) {
        assert_true(3 * accepted > tokens || few);
    } else if (setup->draft_model != NULL) {
        const uint64_t first = llm_stats_get(&stats->spec_accepted_at[0]);

        assert_true(3 * first > drafts || few);
    }
}


static inline void
run_with(setup_t setup, drafter_t *drafter, const char *k, random_t *random)
{
    setup.k = k;
    setup.speculative = drafter->speculative;
    setup.drafter = drafter->drafter;

    if (drafter->model) {
        setup.draft_model =
            subject.draft != NULL ? subject.draft : getenv("LLM_TEST_MODEL");
    }

    engine_t *engine = open_engine(&setup);

    run_round(engine, &setup, random);

    if (rounds_of_suffix > 1 && drafter->speculative != NULL
        && strcmp(drafter->speculative, "suffix") == 0)
    {
        run_round(engine, &setup, random);
    }

    check_drafts(engine, &setup, drafter);
    n_preempted += sched_preemptions(engine->sched);
    close_idle(engine);
}


/* After all rounds: somebody was preempted; and if they were enough, none
 * drafted nothing, none but noise nothing right, and none nothing wrong. */
static inline void
check_drafters(bool enough)
{
    assert_true(n_preempted > 0);

    for (int i = 0; i < N_DRAFTERS && enough; i++) {
        const drafter_t *drafter = &drafters[i];

        assert_true(drafter->tokens > 0);
        assert_true(drafter->accepted < drafter->tokens);

        if (drafter->drafter != draft_noise) {
            assert_true(drafter->accepted > 0);
        }
    }
}

#endif /* T_UNIT_ENGINE_DRAFTS_H */
