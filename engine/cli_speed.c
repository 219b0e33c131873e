/*
 * llm-engine bench | perplexity: how fast, and how good.
 */

#include "engine/cli_tool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "engine/intake.h"

enum {
    REPEAT_MAX = 100,
    BATCH_MAX = 4096, /* the largest max_num_seqs */
    CHUNK_MIN = 4,    /* scores one token at least */
};


/* Sum of the log-probabilities of the second half of one chunk. */
static int
chunk_score(cli_t *cli, const int32_t *ids, double *sum)
{
    llm_record_t record;
    llm_logprob_t entry;
    int position = 0;

    cli->params.max_tokens = 0;

    request_t *req =
        cli_submit(cli, LLM_REQ_TOKENS, LLM_F_ECHO | LLM_F_LOGPROBS, ids,
                   (size_t) cli->chunk * sizeof(int32_t));

    if (req == NULL) {
        return 1;
    }

    while (!req->finished && engine_step(cli->engine)) {
    }

    while (cli_record(req, &record)) {
        uint32_t pos = 0;

        if (record.type == LLM_REC_ERROR) {
            fprintf(stderr, "llm-engine: %s\n", record.u.fail.text);
            return 1;
        }

        while (record.type == LLM_REC_DELTA
               && llm_logprob_next(&record.u.delta, &pos, &entry))
        {
            if (position++ > cli->chunk / 2) {
                *sum += entry.chosen.logprob;
            }
        }
    }

    request_destroy(req);

    return 0;
}


/* Chunks of cli->chunk tokens, the second half of each scored, as
 * llama.cpp's perplexity tool does. */
int
cli_perplexity(cli_t *cli)
{
    tok_ids_t ids = { 0 };
    double sum = 0;
    int rc = 1;

    if (cli->chunk < CHUNK_MIN || cli->chunk > cli->engine->max_model_len) {
        fprintf(stderr, "llm-engine: perplexity: --chunk %d to %d\n", CHUNK_MIN,
                cli->engine->max_model_len);
        return 1;
    }

    if (cli_encode(cli, TOK_ADD_SPECIAL, &ids) != LLM_OK) {
        tok_ids_fini(&ids);
        return 1;
    }

    const int chunks = ids.n / cli->chunk;
    const int scored = cli->chunk - cli->chunk / 2 - 1;

    if (chunks == 0) {
        fprintf(stderr,
                "llm-engine: the text has %d tokens, fewer than one "
                "chunk of %d\n",
                ids.n, cli->chunk);
    }

    for (int i = 0; i < chunks; i++) {
        rc = chunk_score(cli, ids.ids + (size_t) i * (size_t) cli->chunk, &sum);

        if (rc != 0) {
            break;
        }

        printf("chunk %d: %.4f\n", i + 1, exp(-sum / ((i + 1) * scored)));
    }

    if (rc == 0) {
        printf("perplexity: %.4f over %d tokens\n",
               exp(-sum / (chunks * scored)), chunks * scored);
    }

    tok_ids_fini(&ids);

    return rc;
}


static int
compare_double(const void *a, const void *b)
{
    const double x = *(const double *) a, y = *(const double *) b;

    return (x > y) - (x < y);
}


static void
print_speed(const char *what, double *v, int n)
{
    qsort(v, (size_t) n, sizeof(double), compare_double);
    printf("%-28s %9.1f %9.1f %9.1f tok/s (min, median, max of %d)\n", what,
           v[0], v[n / 2], v[n - 1], n);
}


/* `batch` requests of n random prompt tokens; how many there are now. */
static int
bench_submit(cli_t *cli, int n, request_t **reqs)
{
    static uint32_t lcg = 1;
    int32_t *ids = malloc((size_t) n * sizeof(int32_t));
    int b = 0;

    for (; ids != NULL && b < cli->batch; b++) {
        for (int i = 0; i < n; i++) {
            lcg = lcg * 1664525u + 1013904223u;
            ids[i] = (int32_t) ((lcg >> 8)
                                % (uint32_t) tok_n_vocab(cli->engine->tok));
        }

        reqs[b] = cli_submit(cli, LLM_REQ_TOKENS, 0, ids,
                             (size_t) n * sizeof(int32_t));

        if (reqs[b] == NULL) {
            break;
        }
    }

    free(ids);

    return b;
}


/* Tokens so far; a request that failed makes the numbers worthless. */
static int
bench_tokens(cli_t *cli, request_t **reqs, int *failed)
{
    llm_record_t record;
    int n = 0;

    for (int b = 0; b < cli->batch; b++) {
        n += reqs[b]->n_output;

        while (cli_record(reqs[b], &record)) {
            if (record.type == LLM_REC_ERROR && (*failed)++ == 0) {
                fprintf(stderr, "llm-engine: %s\n", record.u.fail.text);
            }
        }
    }

    return n;
}


/* Runs `batch` requests of n random prompt tokens and `gen` generated ones.
 * Tokens a second until all had their first token, and from there to the end.
 * LLM_ERROR when a request failed. */
static int
bench_run(cli_t *cli, int n, int gen, double *prefill, double *decode)
{
    static request_t *reqs[BATCH_MAX];
    const uint64_t start = clock_now_ns();
    int waiting = cli->batch, failed = 0;

    cli->params.max_tokens = gen;
    cli->ignore_eos = true;

    if (bench_submit(cli, n, reqs) < cli->batch) {
        return LLM_NOMEM; /* the engine keeps and frees what there is */
    }

    while (waiting > 0 && engine_step(cli->engine)) {
        waiting = 0;

        for (int b = 0; b < cli->batch; b++) {
            waiting += reqs[b]->n_output == 0 && !reqs[b]->finished;
        }
    }

    const uint64_t middle = clock_now_ns();
    const int before = bench_tokens(cli, reqs, &failed);

    while (engine_step(cli->engine)) {
    }

    const uint64_t end = clock_now_ns();
    const int after = bench_tokens(cli, reqs, &failed);

    for (int b = 0; b < cli->batch; b++) {
        request_destroy(reqs[b]);
    }

    *prefill = (double) cli->batch * n / ((double) (middle - start) / 1e9);
    *decode =
        after > before ? (after - before) / ((double) (end - middle) / 1e9) : 0;

    return failed > 0 ? LLM_ERROR : LLM_OK;
}


int
cli_bench(cli_t *cli)
{
    double prefill[REPEAT_MAX], decode[REPEAT_MAX], unused;
    const int depth = cli->depth > 0 ? cli->depth : 1;
    char what[64];

    if (cli->repeat < 1 || cli->repeat > REPEAT_MAX || cli->batch < 1
        || cli->batch > cli->conf.max_num_seqs || cli->prompt_tokens < 1)
    {
        fprintf(stderr,
                "llm-engine: bench: --repeat 1…%d, --batch 1…%d, "
                "--prompt-tokens ≥ 1\n",
                REPEAT_MAX, cli->conf.max_num_seqs);
        return 1;
    }

    /* the answer is cut where the context ends: it would be another test */
    if (cli->prompt_tokens + 1 > cli->engine->max_model_len
        || depth + cli->gen + 1 > cli->engine->max_model_len)
    {
        fprintf(stderr,
                "llm-engine: bench: the context of %d tokens is too short for "
                "--prompt-tokens %d, or for --depth %d and --gen %d\n",
                cli->engine->max_model_len, cli->prompt_tokens, cli->depth,
                cli->gen);
        return 1;
    }

    bench_run(cli, 8, 2, &unused, &unused); /* pages touched, threads awake */

    for (int r = 0; r < cli->repeat; r++) {
        if (bench_run(cli, cli->prompt_tokens, 1, &prefill[r], &unused)
                != LLM_OK
            || bench_run(cli, depth, cli->gen + 1, &unused, &decode[r])
                   != LLM_OK)
        {
            return 1;
        }
    }

    snprintf(what, sizeof(what), "prefill %d × %d", cli->batch,
             cli->prompt_tokens);
    print_speed(what, prefill, cli->repeat);
    snprintf(what, sizeof(what), "decode %d × %d at %d", cli->batch, cli->gen,
             cli->depth);
    print_speed(what, decode, cli->repeat);

    return 0;
}
