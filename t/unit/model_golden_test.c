/*
 * SmolLM2-135M-Instruct Q4_1 against another implementation (t/golden), and
 * the exactness promise on a real model.
 *
 * LLM_TEST_MODEL names the file; LLM_TEST_BACKEND and LLM_TEST_ISA pick what
 * runs (cpu, the best there is).  The other implementation's own variants part
 * from one another within a few dozen greedy tokens, so its tokens are fed
 * (teacher forcing) and each step is compared by itself.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include <cjson/cJSON.h>

#include "engine/base/file.h"
#include "t/tools/model_run.h"
#include "t/tools/model_storm.h"

/* Where its best token leads by more (in log-probability), ours must agree. */
#define CLEAR_GAP 0.5

/* The other implementation's own error against its F32 oracle. */
#define LOGPROB_ERROR 0.16

#define PERPLEXITY_ERROR 0.01

enum { MAX_TOKENS = 256, TOP = 5 };

static run_t run;
static cJSON *golden;
static int32_t *table;
static float *logits; /* [MAX_TOKENS][n_vocab] */


static double
log_sum_exp(const float *row)
{
    double most = (double) row[0], sum = 0;

    for (int i = 1; i < run.n_vocab; i++) {
        most = (double) row[i] > most ? (double) row[i] : most;
    }
    for (int i = 0; i < run.n_vocab; i++) {
        sum += exp((double) row[i] - most);
    }

    return most + log(sum);
}


static int
best(const float *row)
{
    int b = 0;

    for (int i = 1; i < run.n_vocab; i++) {
        b = row[i] > row[b] ? i : b;
    }

    return b;
}


static int
append_ids(const cJSON *list, int32_t *ids, int n)
{
    const cJSON *item;

    cJSON_ArrayForEach(item, list)
    {
        assert_true(n < MAX_TOKENS);
        ids[n++] = item->valueint;
    }

    return n;
}


/* Fills logits for the prompt and the tokens of one entry; the number of
 * prompt tokens. */
static int
force(const cJSON *entry)
{
    int32_t ids[MAX_TOKENS];
    const int n_prompt =
        append_ids(cJSON_GetObjectItem(entry, "prompt_tokens"), ids, 0);
    const int n =
        append_ids(cJSON_GetObjectItem(entry, "output_tokens"), ids, n_prompt);

    run_sequence(&run, ids, n, MAX_TOKENS, table, logits);

    return n_prompt;
}


static const float *
row_at(int i)
{
    return logits + (size_t) i * (size_t) run.n_vocab;
}


static void
test_best_token(void **state)
{
    const cJSON *entry;
    int steps = 0, clear = 0, agree = 0, sequence = -1;

    (void) state;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItem(golden, "sequences"))
    {
        const int n_prompt = force(entry);

        sequence++;

        const cJSON *tokens = cJSON_GetObjectItem(entry, "output_tokens");
        const cJSON *gaps = cJSON_GetObjectItem(entry, "gaps");

        for (int i = 0; i < cJSON_GetArraySize(tokens); i++) {
            const int want = cJSON_GetArrayItem(tokens, i)->valueint;
            const double gap = cJSON_GetArrayItem(gaps, i)->valuedouble;
            const int is = best(row_at(n_prompt - 1 + i));

            steps++;
            agree += is == want;
            if (gap <= CLEAR_GAP) {
                continue;
            }
            clear++;
            if (is != want) {
                fail_msg("sequence %d, step %d: token %d, not %d (gap %g)",
                         sequence, i, is, want, gap);
            }
        }
    }

    print_message("# best token equal in %d of %d steps, in all %d clear "
                  "ones\n",
                  agree, steps, clear);
    assert_int_equal(
        cJSON_GetArraySize(cJSON_GetObjectItem(golden, "sequences")), 10);
    assert_true(clear > 200);
}


static int
by_value(const void *a, const void *b)
{
    const double x = *(const double *) a, y = *(const double *) b;

    return x < y ? -1 : x > y;
}


static void
test_log_probs(void **state)
{
    double diff[10 * TOP * TOP];
    int n = 0;
    const cJSON *entry;

    (void) state;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItem(golden, "sequences"))
    {
        const int n_prompt = force(entry);
        const cJSON *steps = cJSON_GetObjectItem(entry, "top");

        for (int i = 0; i < cJSON_GetArraySize(steps); i++) {
            const cJSON *step = cJSON_GetArrayItem(steps, i);
            const float *row = row_at(n_prompt - 1 + i);
            const double lse = log_sum_exp(row);

            for (int k = 0; k < TOP; k++) {
                const cJSON *pair = cJSON_GetArrayItem(step, k);
                const int id = cJSON_GetArrayItem(pair, 0)->valueint;
                const double want = cJSON_GetArrayItem(pair, 1)->valuedouble;

                assert_true(n < (int) (sizeof(diff) / sizeof(diff[0])));
                diff[n++] = fabs((double) row[id] - lse - want);
            }
        }
    }

    qsort(diff, (size_t) n, sizeof(diff[0]), by_value);
    print_message("# log-probabilities of %d tokens: median error %.4f, "
                  "90 %% %.4f, most %.4f\n",
                  n, diff[n / 2], diff[n * 9 / 10], diff[n - 1]);
    assert_int_equal(n, 10 * TOP * TOP);
    assert_true(diff[n / 2] <= LOGPROB_ERROR);
}


/* Chunks of 256 tokens, each from an empty context; the second half of each is
 * scored. */
static void
test_perplexity(void **state)
{
    const cJSON *p = cJSON_GetObjectItem(golden, "perplexity");
    const cJSON *tokens = cJSON_GetObjectItem(p, "tokens");
    const int chunk = cJSON_GetObjectItem(p, "chunk")->valueint;
    const int n_chunks = cJSON_GetObjectItem(p, "n_chunks")->valueint;
    const double want = cJSON_GetObjectItem(p, "value")->valuedouble;
    const double first = cJSON_GetObjectItem(p, "first_chunk")->valuedouble;
    double sum = 0;
    int n = 0;

    (void) state;
    assert_int_equal(chunk, MAX_TOKENS);
    for (int c = 0; c < n_chunks; c++) {
        int32_t ids[MAX_TOKENS];

        for (int i = 0; i < chunk; i++) {
            ids[i] = cJSON_GetArrayItem(tokens, c * chunk + i)->valueint;
        }
        run_sequence(&run, ids, chunk, MAX_TOKENS, table, logits);

        for (int i = chunk / 2; i < chunk - 1; i++) {
            sum += log_sum_exp(row_at(i)) - (double) row_at(i)[ids[i + 1]];
            n++;
        }

        const double is = exp(sum / n);
        const double goal = c == 0 ? first : want;

        print_message("# perplexity after chunk %d: %.4f, oracle %.4f "
                      "(%+.2f %%)\n",
                      c + 1, is, goal, 100 * (is / goal - 1));
    }

    assert_int_equal(n_chunks, 2);
    assert_true(fabs(exp(sum / n) / want - 1) <= PERPLEXITY_ERROR);
}


static void
test_exact(void **state)
{
    char why[200];

    (void) state;
    if (storm(&run, 40, 128, 100, why) != 0) {
        fail_msg("%s", why);
    }
}


static int
setup(void **state)
{
    const char *backend = getenv("LLM_TEST_BACKEND");
    run_how_t how = { .backend = backend != NULL ? backend : "cpu",
                      .max_rows = MAX_TOKENS,
                      .max_seqs = 4,
                      .max_len = 512,
                      .n_pages = 40 };
    const char *path = getenv("LLM_TEST_GOLDEN");
    gguf_t *gguf;
    char *text;
    size_t len;
    llm_err_t err;

    (void) state;
    how.open.isa = getenv("LLM_TEST_ISA");
    if (file_read(path != NULL ? path : "t/golden/smollm2.json", 1 << 20, &text,
                  &len, &err)
            != LLM_OK
        || gguf_open(getenv("LLM_TEST_MODEL"), &gguf, &err) != LLM_OK)
    {
        print_error("%s\n", err.text);
        return -1;
    }

    golden = cJSON_Parse(text);
    free(text);

    const int rc = run_open(&run, gguf, &how, &err);

    gguf_close(gguf);
    if (rc != LLM_OK || golden == NULL) {
        print_error("%s\n", rc != LLM_OK ? err.text : "no golden JSON");
        return -1;
    }

    print_message("# %s: %s\n", run.ops->name, run.ops->describe(run.dev));
    table = run_table(how.n_pages);
    logits =
        malloc((size_t) MAX_TOKENS * (size_t) run.n_vocab * sizeof(*logits));

    return 0;
}


static int
teardown(void **state)
{
    (void) state;
    run_close(&run);
    cJSON_Delete(golden);
    free(table);
    free(logits);

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best_token),
        cmocka_unit_test(test_log_probs),
        cmocka_unit_test(test_perplexity),
        cmocka_unit_test(test_exact),
    };
    const char *path = getenv("LLM_TEST_MODEL");

    if (path == NULL || path[0] == '\0') {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set\n");
        return 0;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, setup, teardown);
}
