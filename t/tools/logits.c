/*
 * Logits of every position of a token sequence, for the tests that compare
 * them with another implementation.
 *
 *   logits MODEL BACKEND CHUNK OUT ID...
 *
 * Writes [n][n_vocab] f32 to OUT ("-": the best five of each row as text to
 * standard output), CHUNK rows a pass.  The environment variable LLM_TEST_ISA
 * picks the instruction set.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "t/tools/model_run.h"


static void
print_best(const float *row, int n_vocab)
{
    float below = 1e30f;

    for (int k = 0; k < 5; k++) {
        int best = -1;

        for (int i = 0; i < n_vocab; i++) {
            if (row[i] < below && (best < 0 || row[i] > row[best])) {
                best = i;
            }
        }

        if (best >= 0) {
            printf("%s%d %.5f", k ? "  " : "", best, (double) row[best]);
            below = row[best];
        }
    }

    printf("\n");
}


static int
emit(const char *path, const float *logits, int n, int n_vocab)
{
    if (strcmp(path, "-") == 0) {
        for (int i = 0; i < n; i++) {
            print_best(logits + (size_t) i * (size_t) n_vocab, n_vocab);
        }
        return 0;
    }

    FILE *f = fopen(path, "wb");
    const size_t count = (size_t) n * (size_t) n_vocab;

    if (f == NULL || fwrite(logits, sizeof(float), count, f) != count
        || fclose(f) != 0)
    {
        perror(path);
        return 1;
    }

    return 0;
}


static int
compute(const gguf_t *gguf, char **argv, const int32_t *ids, int n)
{
    const int chunk = atoi(argv[3]) > 0 ? atoi(argv[3]) : n;
    run_how_t how = { .backend = argv[2],
                      .max_rows = chunk,
                      .max_seqs = 1,
                      .max_len = n,
                      .n_pages = (n + OP_PAGE - 1) / OP_PAGE };
    run_t run;
    llm_err_t err;

    how.open.isa = getenv("LLM_TEST_ISA");
    if (run_open(&run, gguf, &how, &err) != LLM_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }

    int rc = 1;
    int32_t *table = run_table(how.n_pages);
    float *logits = malloc((size_t) n * (size_t) run.n_vocab * sizeof(float));

    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= run.n_vocab) {
            fprintf(stderr, "token %d is out of range\n", ids[i]);
            goto done;
        }
    }

    fprintf(stderr, "%s: %s, weights %zu, activations %zu, page %zu bytes\n",
            how.backend, run.ops->describe(run.dev),
            model_weight_bytes(run.model), model_activation_bytes(run.model),
            model_page_bytes(run.model, OP_F16));
    run_sequence(&run, ids, n, chunk, table, logits);
    rc = emit(argv[4], logits, n, run.n_vocab);

done:

    free(logits);
    free(table);
    run_close(&run);

    return rc;
}


int
main(int argc, char **argv)
{
    gguf_t *gguf;
    llm_err_t err;

    if (argc < 6) {
        fprintf(stderr, "usage: logits MODEL BACKEND CHUNK OUT ID...\n");
        return 2;
    }

    if (gguf_open(argv[1], &gguf, &err) != LLM_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }

    const int n = argc - 5;
    int32_t *ids = malloc((size_t) n * sizeof(*ids));

    for (int i = 0; i < n; i++) {
        ids[i] = atoi(argv[5 + i]);
    }

    const int rc = compute(gguf, argv, ids, n);

    free(ids);
    gguf_close(gguf);

    return rc;
}
