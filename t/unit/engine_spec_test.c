/*
 * Speculative decoding changes no answer: the requests of engine_storm.h with
 * drafts by look-up, with good ones that have mistakes planted in them, with
 * none but wrong ones, in any number, with few pages and many.  And what it
 * counts is true.
 *
 * Needs LLM_TEST_MODEL.  LLM_TEST_LONG runs every drafter with every number of
 * drafts on every setting.
 */

#include "t/unit/engine_storm.h"

static bool whole_matrix;
static int first_count; /* of drafts, in counts */
static random_t noise;


/* What no answer has but by chance. */
static int
draft_noise(const int32_t *tokens, int n_tokens, int n, int32_t *draft)
{
    (void) tokens;
    (void) n_tokens;

    for (int i = 0; i < n; i++) {
        draft[i] = (int32_t) random_below(&noise, 49152);
    }

    return n;
}


/* How many of the answer's tokens follow a prompt as long as its own; 0 if they
 * are others. */
static int
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
static int
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
        draft[found] = best->token[most + found];
        draft[found] += (most + found) % 8 == 5;
    }

    return found;
}


typedef struct {
    const char *name;
    const char *speculative;
    int (*drafter)(const int32_t *tokens, int n_tokens, int n, int32_t *draft);
    bool model; /* the model drafts for itself */
} drafter_t;

static const drafter_t drafters[] = {
    { "known", NULL, draft_known, false },
    { "noise", NULL, draft_noise, false },
    { "ngram", "ngram:1:5", NULL, false },
    { "suffix", "suffix", NULL, false },
    { "noise before ngram and suffix", "ngram:2:4,suffix", draft_noise, false },
    { "model", NULL, NULL, true },
    { "suffix before model", "suffix", NULL, true },
};


static void
check_drafts(const engine_t *engine, const setup_t *setup, const char *name)
{
    const llm_stats_t *stats = engine->stats;
    const uint64_t drafts = llm_stats_get(&stats->spec_drafts);
    const uint64_t tokens = llm_stats_get(&stats->spec_draft_tokens);
    const uint64_t accepted = llm_stats_get(&stats->spec_accepted);
    uint64_t sum = 0;

    printf("# %s, k %s: %u of %u drafts right, in %u\n", name,
           setup->k != NULL ? setup->k : "auto", (unsigned) accepted,
           (unsigned) tokens, (unsigned) drafts);

    for (int i = 0; i < LLM_SPEC_MAX; i++) {
        const uint64_t at = llm_stats_get(&stats->spec_accepted_at[i]);

        assert_true(at <= drafts);
        sum += at;
    }

    assert_int_equal(sum, accepted);
    assert_true(accepted <= tokens && drafts <= tokens);

    /* auto drafts where it pays by the clock: anywhere, or nowhere */
    if (setup->k != NULL
        && (setup->drafter != NULL || setup->draft_model != NULL)) {
        assert_true(tokens > 0);
    }

    if (setup->drafter == draft_noise) {
        assert_true(100 * accepted <= tokens);
    } else if (setup->drafter == draft_known || setup->draft_model != NULL) {
        assert_true(3 * accepted > tokens || tokens == 0);
    }
}


static void
run_with(setup_t setup, const drafter_t *drafter, const char *k,
         random_t *random)
{
    setup.k = k;
    setup.speculative = drafter->speculative;
    setup.drafter = drafter->drafter;
    setup.draft_model = drafter->model ? getenv("LLM_TEST_MODEL") : NULL;

    engine_t *engine = open_engine(&setup);

    run_round(engine, &setup, random);
    check_drafts(engine, &setup, drafter->name);
    close_idle(engine);
}


static void
test_same_answers(void **state)
{
    static const setup_t setups[] = {
        { .caching = true,
          .chunked = true,
          .budget = 64,
          .max_len = MAX_LEN,
          .pages = FEW_PAGES,
          .dtype = OP_F16 },
        { .caching = true,
          .chunked = true,
          .budget = 512,
          .max_len = MAX_LEN,
          .dtype = OP_Q8_0 },
        { .chunked = false,
          .budget = 512,
          .max_len = MAX_LEN,
          .pages = FEW_PAGES,
          .dtype = OP_Q8_0 },
        { .chunked = true,
          .budget = 2048,
          .max_len = MAX_LEN,
          .dtype = OP_F16 },
    };
    static const char *const counts[] = { "1", "3", "7", NULL };
    enum { N_DRAFTERS = sizeof(drafters) / sizeof(drafters[0]) };
    random_t random = random_start("speculative decoding");

    (void) state;
    noise = random;
    run_alone(OP_F16, alone[0]);
    run_alone(OP_Q8_0, alone[1]);

    for (int i = 0; i < 4 * N_DRAFTERS * 4; i++) {
        const int s = i % 4, d = i / 4 % N_DRAFTERS, k = i / 4 / N_DRAFTERS;

        /* each drafter and number with one setting */
        if (whole_matrix || ((d + k) % 4 == s && k >= first_count)) {
            run_with(setups[s], &drafters[d], counts[k], &random);
        }
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_answers),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    whole_matrix = getenv("LLM_TEST_LONG") != NULL;
    n_preemptions = 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    whole_matrix = false;
    first_count = 2;
    n_requests = 16;
    n_preemptions = 5;
#endif

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
