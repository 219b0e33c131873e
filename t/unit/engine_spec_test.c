/*
 * Speculative decoding changes no answer: the requests of engine_storm.h with
 * drafts by look-up, with good ones that have mistakes planted in them, with
 * none but wrong ones, in any number, with few pages and many.  And what it
 * counts is true.
 *
 * Needs LLM_TEST_MODEL.  LLM_TEST_LONG runs every drafter with every number of
 * drafts on every setting.
 */

#include "t/unit/engine_drafts.h"

static bool whole_matrix;
static int first_count; /* of drafts, in counts */


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

    check_drafters(first_count == 0);
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
