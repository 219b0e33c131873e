/*
 * llm-engine generate | bench | tokenize | perplexity.
 *
 * They submit requests to an engine in this process in the very form that the
 * module uses, and read the same records.
 */

#include "engine/cli.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/emit.h"
#include "engine/engine.h"
#include "engine/intake.h"

enum { REQUEST_CAP = 8 << 20, REPEAT_MAX = 100 };

typedef struct {
    engine_conf_t conf;
    const char *prompt;
    const char *chat;
    const char *file;
    llm_params_t params;
    bool ignore_eos;
    int chunk;
    int prompt_tokens;
    int gen;
    int batch;
    int depth;
    int repeat;
    uint8_t *area; /* REQUEST_CAP bytes */
    engine_t *engine;
} cli_t;

static char setting[64][512]; /* storage for key=value words */


static int
cli_int(const char *text, int min, int *out)
{
    char *end;
    const long n = strtol(text, &end, 10);

    if (end == text || *end != '\0' || n < min || n > 1 << 24) {
        return LLM_BADREQ;
    }

    *out = (int) n;
    return LLM_OK;
}


static int
cli_float(const char *text, float *out)
{
    char *end;

    *out = strtof(text, &end);

    return end != text && *end == '\0' && isfinite(*out) ? LLM_OK : LLM_BADREQ;
}


/* An option of the commands themselves; LLM_AGAIN when it is none. */
static int
cli_own_option(cli_t *cli, const char *name, const char *value)
{
    const struct {
        const char *name;
        const char **text;
        int *number;
        float *real;
    } rows[] = {
        { "prompt", &cli->prompt, NULL, NULL },
        { "chat", &cli->chat, NULL, NULL },
        { "file", &cli->file, NULL, NULL },
        { "max-tokens", NULL, &cli->params.max_tokens, NULL },
        { "top-k", NULL, &cli->params.top_k, NULL },
        { "chunk", NULL, &cli->chunk, NULL },
        { "prompt-tokens", NULL, &cli->prompt_tokens, NULL },
        { "gen", NULL, &cli->gen, NULL },
        { "batch", NULL, &cli->batch, NULL },
        { "depth", NULL, &cli->depth, NULL },
        { "repeat", NULL, &cli->repeat, NULL },
        { "temperature", NULL, NULL, &cli->params.temperature },
        { "top-p", NULL, NULL, &cli->params.top_p },
        { "min-p", NULL, NULL, &cli->params.min_p },
    };

    if (strcmp(name, "seed") == 0) {
        cli->params.seed = strtoull(value, NULL, 10);
        return LLM_OK;
    }

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(name, rows[i].name) != 0) {
            continue;
        }

        if (rows[i].text != NULL) {
            *rows[i].text = value;
            return LLM_OK;
        }

        return rows[i].number != NULL ? cli_int(value, 0, rows[i].number)
                                      : cli_float(value, rows[i].real);
    }

    return LLM_AGAIN;
}


static int
cli_parse(cli_t *cli, int argc, char **argv)
{
    llm_err_t err;
    int n = 0;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ignore-eos") == 0) {
            cli->ignore_eos = true;
            continue;
        }

        if (strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc || n >= 64) {
            fprintf(stderr, "llm-engine: \"%s\" needs the form --name value\n",
                    argv[i]);
            return LLM_BADREQ;
        }

        const char *name = argv[i] + 2, *value = argv[++i];
        int rc = cli_own_option(cli, name, value);

        if (rc == LLM_AGAIN) {
            snprintf(setting[n], sizeof(setting[n]), "%s=%s", name, value);

            for (char *p = setting[n]; *p != '='; p++) {
                *p = *p == '-' ? '_' : *p;
            }

            rc = engine_conf_set(&cli->conf, setting[n++], &err);

            if (rc != LLM_OK) {
                fprintf(stderr, "llm-engine: %s\n", err.text);
                return rc;
            }

        } else if (rc != LLM_OK) {
            fprintf(stderr,
                    "llm-engine: --%s: \"%s\" is not a number in its "
                    "range\n",
                    name, value);
            return rc;
        }
    }

    if (engine_conf_check(&cli->conf, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return LLM_BADREQ;
    }

    return LLM_OK;
}


static request_t *
cli_submit(cli_t *cli, uint32_t kind, uint32_t flags, const void *prompt,
           size_t len)
{
    const request_origin_t from = { .submit_ns = clock_now_ns() };
    const uint32_t sec =
        kind == LLM_REQ_CHAT ? LLM_SEC_MESSAGES : LLM_SEC_PROMPT;
    llm_request_writer_t w;

    llm_request_begin(&w, cli->area, REQUEST_CAP, kind,
                      flags | (cli->ignore_eos ? LLM_F_IGNORE_EOS : 0),
                      &cli->params);
    llm_request_section(&w, sec);
    llm_request_add(&w, prompt, len);

    const uint32_t n = llm_request_end(&w);

    if (n == 0) {
        fprintf(stderr, "llm-engine: the prompt is too long\n");
        return NULL;
    }

    return intake_request(cli->engine, cli->area, n, &from);
}


/* The next record a request has written; false when there is none yet. */
static bool
cli_record(request_t *req, llm_record_t *record)
{
    uint32_t len;

    if (req->out_pos >= req->out.len) {
        return false;
    }

    memcpy(&len, req->out.data + req->out_pos, sizeof(len));

    const uint8_t *payload =
        (uint8_t *) req->out.data + req->out_pos + sizeof(len);
    req->out_pos += sizeof(len) + len;

    return llm_record_decode(payload, len, record) == 0;
}


/* Prints text as it comes; the exit status. */
static int
cli_stream(cli_t *cli, request_t *req)
{
    llm_record_t record;

    for (;;) {
        while (cli_record(req, &record)) {
            if (record.type == LLM_REC_DELTA) {
                fwrite(record.u.delta.text, 1, record.u.delta.text_len, stdout);
                fflush(stdout);

            } else if (record.type == LLM_REC_ERROR) {
                fprintf(stderr, "llm-engine: %s\n", record.u.fail.text);
                return 1;

            } else if (record.type == LLM_REC_DONE) {
                const llm_done_t *d = &record.u.done;
                putchar('\n');
                log_write(LOG_INFO,
                          "generate: %u + %u tokens, first after "
                          "%.1f ms, %.1f ms in all",
                          d->prompt_tokens, d->completion_tokens,
                          d->ttft_us / 1e3, d->total_us / 1e3);
                return 0;
            }
        }

        engine_step(cli->engine);
    }
}


static int
cli_generate(cli_t *cli)
{
    const uint32_t flags = LLM_F_STREAM | LLM_F_GENERATION_PROMPT;

    if (cli->chat != NULL) {
        cJSON *messages = cJSON_CreateArray(), *message = cJSON_CreateObject();
        cJSON_AddStringToObject(message, "role", "user");
        cJSON_AddStringToObject(message, "content", cli->chat);
        cJSON_AddItemToArray(messages, message);

        char *text = cJSON_PrintUnformatted(messages);
        request_t *req =
            cli_submit(cli, LLM_REQ_CHAT, flags, text, strlen(text));
        free(text);
        cJSON_Delete(messages);

        return req != NULL ? cli_stream(cli, req) : 1;
    }

    if (cli->prompt == NULL) {
        fprintf(stderr, "llm-engine: generate needs --prompt or --chat\n");
        return -1;
    }

    request_t *req = cli_submit(cli, LLM_REQ_TEXT,
                                flags | LLM_F_ADD_SPECIAL | LLM_F_PARSE_SPECIAL,
                                cli->prompt, strlen(cli->prompt));

    return req != NULL ? cli_stream(cli, req) : 1;
}


/* --prompt, or the content of --file; heap. */
static char *
cli_text(const cli_t *cli, size_t *len)
{
    llm_err_t err;
    char *data;

    if (cli->prompt != NULL) {
        *len = strlen(cli->prompt);
        return strdup(cli->prompt);
    }

    if (cli->file == NULL) {
        fprintf(stderr, "llm-engine: give --prompt TEXT or --file FILE\n");
        return NULL;
    }

    if (file_read(cli->file, REQUEST_CAP / 2, &data, len, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return NULL;
    }

    return data;
}


static int
cli_encode(cli_t *cli, int flags, tok_ids_t *ids)
{
    llm_err_t err;
    size_t len;
    char *text = cli_text(cli, &len);

    if (text == NULL) {
        return LLM_ERROR;
    }

    const int rc = tok_encode(cli->engine->tok, text, len, NULL, flags, 1 << 24,
                              ids, &err);
    free(text);

    if (rc != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
    }

    return rc;
}


static int
cli_tokenize(cli_t *cli)
{
    tok_ids_t ids = { 0 };
    const int rc = cli_encode(cli, TOK_ADD_SPECIAL | TOK_PARSE_SPECIAL, &ids);

    for (int i = 0; i < ids.n; i++) {
        printf("%s%d", i > 0 ? " " : "", ids.ids[i]);
    }

    putchar('\n');
    tok_ids_fini(&ids);

    return rc == LLM_OK ? 0 : 1;
}


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
static int
cli_perplexity(cli_t *cli)
{
    tok_ids_t ids = { 0 };
    double sum = 0;
    int rc = 1;

    if (cli_encode(cli, TOK_ADD_SPECIAL, &ids) != LLM_OK) {
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


/* Runs `batch` requests of n random prompt tokens and `gen` generated ones.
 * Seconds until all had their first token, and from there to the end. */
static int
bench_run(cli_t *cli, int n, int gen, double *prefill, double *decode)
{
    request_t *reqs[4096];
    int32_t *ids = malloc((size_t) n * sizeof(int32_t));
    const uint64_t start = clock_now_ns();
    static uint32_t lcg = 1;
    int waiting = cli->batch;

    cli->params.max_tokens = gen;
    cli->ignore_eos = true;

    for (int b = 0; b < cli->batch; b++) {
        for (int i = 0; i < n; i++) {
            lcg = lcg * 1664525u + 1013904223u;
            ids[i] = (int32_t) ((lcg >> 8)
                                % (uint32_t) tok_n_vocab(cli->engine->tok));
        }

        reqs[b] = cli_submit(cli, LLM_REQ_TOKENS, 0, ids,
                             (size_t) n * sizeof(int32_t));
    }

    while (waiting > 0 && engine_step(cli->engine)) {
        waiting = 0;

        for (int b = 0; b < cli->batch; b++) {
            waiting += reqs[b]->n_output == 0 && !reqs[b]->finished;
        }
    }

    const uint64_t middle = clock_now_ns();
    int before = 0, after = 0;

    for (int b = 0; b < cli->batch; b++) {
        before += reqs[b]->n_output;
    }

    while (engine_step(cli->engine)) {
    }

    const uint64_t end = clock_now_ns();

    for (int b = 0; b < cli->batch; b++) {
        after += reqs[b]->n_output;
        request_destroy(reqs[b]);
    }

    free(ids);

    *prefill = (double) cli->batch * n / ((double) (middle - start) / 1e9);
    *decode =
        after > before ? (after - before) / ((double) (end - middle) / 1e9) : 0;

    return 0;
}


static int
cli_bench(cli_t *cli)
{
    double prefill[REPEAT_MAX], decode[REPEAT_MAX], unused;
    char what[64];

    if (cli->repeat < 1 || cli->repeat > REPEAT_MAX || cli->batch < 1
        || cli->batch > cli->conf.max_num_seqs || cli->prompt_tokens < 1)
    {
        fprintf(stderr,
                "llm-engine: bench: --repeat 1…%d, --batch 1…%d, "
                "--prompt-tokens ≥ 1\n",
                REPEAT_MAX, cli->conf.max_num_seqs);
        return -1;
    }

    bench_run(cli, 16, 2, &unused, &unused);

    for (int r = 0; r < cli->repeat; r++) {
        bench_run(cli, cli->prompt_tokens, 1, &prefill[r], &unused);
        bench_run(cli, cli->depth > 0 ? cli->depth : 1, cli->gen + 1, &unused,
                  &decode[r]);
    }

    snprintf(what, sizeof(what), "prefill %d × %d", cli->batch,
             cli->prompt_tokens);
    print_speed(what, prefill, cli->repeat);
    snprintf(what, sizeof(what), "decode %d × %d at %d", cli->batch, cli->gen,
             cli->depth);
    print_speed(what, decode, cli->repeat);

    return 0;
}


int
cli_main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(cli_t *);
    } commands[] = {
        { "generate", cli_generate },
        { "bench", cli_bench },
        { "tokenize", cli_tokenize },
        { "perplexity", cli_perplexity },
    };

    cli_t cli = {
        .params = { .top_p = 1, .repetition_penalty = 1, .max_tokens = 128 },
        .chunk = 256,
        .prompt_tokens = 512,
        .gen = 128,
        .batch = 1,
        .repeat = 5,
    };
    llm_err_t err;
    int rc = -1;

    engine_conf_init(&cli.conf);
    cli.conf.log_level = LOG_WARN;

    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(argv[0], commands[i].name) != 0) {
            continue;
        }

        if (cli_parse(&cli, argc, argv) != LLM_OK) {
            return 1;
        }

        log_open(NULL, cli.conf.log_level);

        if (engine_open(&cli.conf, &cli.engine, &err) != LLM_OK) {
            fprintf(stderr, "llm-engine: %s\n", err.text);
            return 1;
        }

        cli.area = malloc(REQUEST_CAP);
        rc = cli.area != NULL ? commands[i].run(&cli) : 1;
        free(cli.area);
        engine_close(cli.engine);
    }

    return rc;
}
