/*
 * The exactness matrix: the requests of engine_storm.h with prefix caching on
 * and off, prompts in chunks and whole, budgets of 64, 512 and 2048 tokens,
 * ample pages and so few that sequences are preempted all the time, and a KV
 * cache of either type.  Tokens, text and log-probabilities must be the same
 * bit for bit.
 *
 * Whole prompts and a budget of 64 ask for sequences of at most 64 tokens; that
 * run has those requests that fit.
 *
 * Needs LLM_TEST_MODEL.  LLM_TEST_LONG runs the whole matrix; without it, some
 * corners.
 */

#include "t/unit/engine_storm.h"

static bool whole_matrix;


/* The whole matrix in its order; corner: the place of a run in it. */
static void
run_matrix(const int *corners, int n_corners)
{
    static const int budgets[] = { 64, 512, 2048 };
    random_t random = random_start("exactness matrix");
    bool have[2] = { false, false };

    for (int at = 0; at < 48; at++) {
        const bool few = at / 24, caching = at / 12 % 2, chunked = at / 6 % 2;
        const int budget = budgets[at / 2 % 3];
        const bool only_short = !chunked && budget < MAX_LEN;
        const setup_t setup = {
            .caching = caching,
            .chunked = chunked,
            .budget = budget,
            .max_len = only_short ? SHORT_LEN : MAX_LEN,
            .pages = !few         ? 0
                     : only_short ? FEW_SHORT_PAGES
                                  : FEW_PAGES,
            .dtype = at % 2 ? OP_Q8_0 : OP_F16,
        };
        bool wanted = corners == NULL;

        for (int k = 0; k < n_corners; k++) {
            wanted |= corners[k] == at;
        }

        if (!wanted) {
            continue;
        }

        if (!have[at % 2]) {
            run_alone(setup.dtype, alone[at % 2]);
            have[at % 2] = true;
        }

        run_together(&setup, &random);
    }
}


static void
test_matrix(void **state)
{
    /* few pages: no cache, whole prompts, 64, q8_0; a cache, whole prompts,
     * 512, q8_0; a cache, chunks, 64, q8_0.  Ample: a cache, chunks, 64,
     * q8_0 */
    static const int corners[] = { 24 + 1, 24 + 12 + 3, 24 + 12 + 6 + 1,
                                   12 + 6 + 1 };

    (void) state;

    if (whole_matrix) {
        run_matrix(NULL, 0);
    } else {
        run_matrix(corners, 4);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrix),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    whole_matrix = getenv("LLM_TEST_LONG") != NULL;

    if (!whole_matrix) {
        n_requests = 32;
        n_preemptions = 50;
    }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    /* twenty times slower: fewer requests, the corners only */
    whole_matrix = false;
    n_requests = 16;
    n_preemptions = 15;
#endif

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
