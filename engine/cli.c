/*
 * llm-engine generate | bench | tokenize | perplexity.
 *
 * They submit requests to an engine in this process in the very form that the
 * module uses, and read the same records.
 */

#include "engine/cli.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <cjson/cJSON.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/cli_tool.h"
#include "engine/intake.h"

enum { SETTINGS_MAX = 64 };

static char setting[SETTINGS_MAX][4200]; /* key=value words: a path fits */


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
cli_seed(const char *text, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, 10);

    return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0
               ? LLM_OK
               : LLM_BADREQ;
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
        return cli_seed(value, &cli->params.seed);
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


/* A setting of the engine: --max-num-seqs 4 is max_num_seqs=4. */
static int
cli_setting(cli_t *cli, char *word, const char *name, const char *value)
{
    llm_err_t err;
    const int n = snprintf(word, sizeof(setting[0]), "%s=%s", name, value);

    if (n < 0 || (size_t) n >= sizeof(setting[0])) {
        fprintf(stderr, "llm-engine: --%.40s: the value is too long\n", name);
        return LLM_BADREQ;
    }

    for (char *p = word; *p != '='; p++) {
        *p = *p == '-' ? '_' : *p;
    }

    if (engine_conf_set(&cli->conf, word, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return LLM_BADREQ;
    }

    return LLM_OK;
}


static int
cli_option(cli_t *cli, int *n_settings, const char *name, const char *value)
{
    const int rc = cli_own_option(cli, name, value);

    if (rc == LLM_AGAIN) {
        if (*n_settings == SETTINGS_MAX) {
            fprintf(stderr, "llm-engine: more than %d settings\n",
                    SETTINGS_MAX);
            return LLM_BADREQ;
        }

        return cli_setting(cli, setting[(*n_settings)++], name, value);
    }

    if (rc != LLM_OK) {
        fprintf(stderr,
                "llm-engine: --%s: \"%s\" is not a number in its range\n", name,
                value);
    }

    return rc;
}


static int
cli_parse(cli_t *cli, int argc, char **argv)
{
    llm_err_t err;
    int n_settings = 0;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ignore-eos") == 0) {
            cli->ignore_eos = true;
            continue;
        }

        if (strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc) {
            fprintf(stderr, "llm-engine: \"%s\" needs the form --name value\n",
                    argv[i]);
            return LLM_BADREQ;
        }

        if (cli_option(cli, &n_settings, argv[i] + 2, argv[i + 1]) != LLM_OK) {
            return LLM_BADREQ;
        }

        i++;
    }

    if (engine_conf_check(&cli->conf, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return LLM_BADREQ;
    }

    return LLM_OK;
}


request_t *
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

    request_t *req = intake_request(cli->engine, cli->area, n, &from);

    if (req == NULL) {
        fprintf(stderr, "llm-engine: no memory\n");
    }

    return req;
}


bool
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


/* Prints one record.  False when it is the last; *status is then set. */
static bool
cli_print(const llm_record_t *record, int *status)
{
    const llm_done_t *d = &record->u.done;

    switch (record->type) {
    case LLM_REC_DELTA:
        fwrite(record->u.delta.text, 1, record->u.delta.text_len, stdout);
        fflush(stdout);
        return true;

    case LLM_REC_ERROR:
        fprintf(stderr, "llm-engine: %s\n", record->u.fail.text);
        *status = 1;
        return false;

    case LLM_REC_DONE:
        putchar('\n');
        log_write(LOG_INFO,
                  "generate: %u + %u tokens, first after %.1f ms, %.1f ms in "
                  "all, %u of %u drafts right",
                  d->prompt_tokens, d->completion_tokens, d->ttft_us / 1e3,
                  d->total_us / 1e3, d->accepted_tokens, d->drafted_tokens);
        *status = 0;
        return false;
    }

    return true;
}


/* Prints text as it comes; the exit status. */
static int
cli_stream(cli_t *cli, request_t *req)
{
    llm_record_t record;
    int status = 1;

    if (req == NULL) {
        return 1;
    }

    for (;;) {
        while (cli_record(req, &record)) {
            if (!cli_print(&record, &status)) {
                return status;
            }
        }

        if (!engine_step(cli->engine)) {
            fprintf(stderr, "llm-engine: the answer has no end\n");
            return 1;
        }
    }
}


static int
cli_generate(cli_t *cli)
{
    const uint32_t flags = LLM_F_STREAM | LLM_F_GENERATION_PROMPT;

    if (cli->prompt != NULL) {
        return cli_stream(
            cli, cli_submit(cli, LLM_REQ_TEXT,
                            flags | LLM_F_ADD_SPECIAL | LLM_F_PARSE_SPECIAL,
                            cli->prompt, strlen(cli->prompt)));
    }

    cJSON *messages = cJSON_CreateArray(), *message = cJSON_CreateObject();

    cJSON_AddStringToObject(message, "role", "user");
    cJSON_AddStringToObject(message, "content", cli->chat);
    cJSON_AddItemToArray(messages, message);

    char *text = cJSON_PrintUnformatted(messages);
    int rc = 1;

    if (text != NULL) {
        rc = cli_stream(
            cli, cli_submit(cli, LLM_REQ_CHAT, flags, text, strlen(text)));
    }

    free(text);
    cJSON_Delete(messages);

    return rc;
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

    if (file_read(cli->file, REQUEST_CAP / 2, &data, len, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return NULL;
    }

    return data;
}


int
cli_complain(const char *name, const char *value, const char *use)
{
    fprintf(stderr, "llm-engine: --%s %s: use %s\n", name, value, use);

    return LLM_BADREQ;
}


int
cli_dtype(const char *name, const char *value, op_dtype_t *out)
{
    static const op_dtype_t types[] = { OP_F32,  OP_F16,  OP_BF16, OP_Q8_0,
                                        OP_Q5_1, OP_Q5_0, OP_Q4_1, OP_Q4_0 };

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (strcasecmp(op_dtype_name((int) types[i]), value) == 0) {
            *out = types[i];
            return LLM_OK;
        }
    }

    return cli_complain(name, value,
                        "f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0");
}


int
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

    for (int i = 0; rc == LLM_OK && i < ids.n; i++) {
        printf("%s%d", i > 0 ? " " : "", ids.ids[i]);
    }

    if (rc == LLM_OK) {
        putchar('\n');
    }

    tok_ids_fini(&ids);

    return rc == LLM_OK ? 0 : 1;
}


/* What a command needs and does not have; NULL when it is complete.  Before
 * the model is loaded, which may take a while. */
static const char *
cli_lacks(const cli_t *cli, const char *command)
{
    const bool text = cli->prompt != NULL || cli->file != NULL;

    if (strcmp(command, "generate") == 0) {
        return cli->prompt != NULL || cli->chat != NULL
                   ? NULL
                   : "--prompt TEXT or --chat TEXT";
    }

    return text || strcmp(command, "bench") == 0
               ? NULL
               : "--prompt TEXT or --file FILE";
}


static int
cli_run(cli_t *cli, int (*run)(cli_t *))
{
    llm_err_t err;
    int rc = 1;

    if (engine_open(&cli->conf, &cli->engine, &err) != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return 1;
    }

    cli->area = malloc(REQUEST_CAP);

    if (cli->area != NULL) {
        rc = run(cli);
    }

    free(cli->area);
    engine_close(cli->engine);

    return rc;
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

    engine_conf_init(&cli.conf);
    cli.conf.log_level = LOG_WARN;

    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(argv[0], commands[i].name) != 0) {
            continue;
        }

        if (cli_parse(&cli, argc, argv) != LLM_OK) {
            return 1;
        }

        const char *lacks = cli_lacks(&cli, argv[0]);

        if (lacks != NULL) {
            fprintf(stderr, "llm-engine: %s needs %s\n", argv[0], lacks);
            return 1;
        }

        if (log_open(cli.conf.log, cli.conf.log_level) != LLM_OK) {
            fprintf(stderr, "llm-engine: cannot open log \"%s\"\n",
                    cli.conf.log);
            return 1;
        }

        return cli_run(&cli, commands[i].run);
    }

    fprintf(stderr, "llm-engine: there is no command \"%s\"\n", argv[0]);

    return -1;
}
