/*
 * What drafts bring, or cost: requests with speculative decoding and without,
 * in turn, by two engines of one process.
 *
 *     build/t/bench/drafts --model FILE [--draft FILE] [--rounds N]
 *                          [--only NAME]
 *
 * Prints tokens a second of both (medians) and the ratio's min, median, max
 * over the rounds.  Exits with 1 if an answer differs.  "noise" drafts at
 * random; "repeat" asks for a text again, which look-up is for; the rest are
 * questions in plain words.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/engine.h"
#include "engine/intake.h"
#include "engine/ipc/msg.h"
#include "engine/model/model.h"
#include "t/unit/random.h"

enum {
    MAX_STREAMS = 64,
    MAX_ROUNDS = 100,
    MAX_PROMPT = 4096,
    N_TOKENS = 96,
    CONTEXT = 1024
};

typedef struct {
    const char *name;
    const char *speculative; /* or NULL */
    bool noise;
    bool model;
    bool repeat;
    int streams;
} contest_t;

static const contest_t contests[] = {
    { "noise", NULL, true, false, false, 1 },
    { "noise", NULL, true, false, false, 4 },
    { "noise", NULL, true, false, false, 16 },
    { "noise", NULL, true, false, false, 64 },
    { "repeat", "ngram:2:5", false, false, true, 1 },
    { "look-up", "ngram:2:5,suffix", false, false, false, 1 },
    { "look-up", "ngram:2:5,suffix", false, false, false, 16 },
    { "look-up", "ngram:2:5,suffix", false, false, false, 64 },
    { "model", NULL, false, true, false, 1 },
    { "model", NULL, false, true, false, 4 },
    { "model", NULL, false, true, false, 16 },
    { "model", NULL, false, true, false, 64 },
};

static const char *const words[] = {
    "river", "city",  "light",  "stone",  "music", "bread", "winter", "engine",
    "paper", "green", "window", "market", "ship",  "horse", "bridge", "garden",
};

static const char code[] =
    "```python\n"
    "def read_table(path, separator=','):\n"
    "    rows = []\n"
    "    with open(path, encoding='utf-8') as file:\n"
    "        for line in file:\n"
    "            cells = line.rstrip('\\n').split(separator)\n"
    "            rows.append([cell.strip() for cell in cells])\n"
    "    header, body = rows[0], rows[1:]\n"
    "    return [dict(zip(header, row)) for row in body]\n"
    "```\n";

static random_t noise;
static int n_vocab;


/* What one round of one engine gave. */
typedef struct {
    double tokens_s;
    buf_t text;
} round_t;


static void
die(const char *what)
{
    fprintf(stderr, "drafts: %s\n", what);
    exit(2);
}


static int
draft_noise(const int32_t *tokens, int n_tokens, int n, int32_t *draft)
{
    (void) tokens;
    (void) n_tokens;

    for (int i = 0; i < n; i++) {
        draft[i] = (int32_t) random_below(&noise, n_vocab);
    }

    return n;
}


static engine_t *
open_engine(const char *model, const char *draft, const contest_t *contest)
{
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;
    char word[64];
    int rc = LLM_OK;

    engine_conf_init(&conf);
    conf.model = model;
    conf.log_level = LOG_WARN;
    conf.max_model_len = CONTEXT;
    conf.max_num_seqs = MAX_STREAMS;

    if (contest != NULL) {
        conf.test_drafter = contest->noise ? draft_noise : NULL;
        conf.speculative_model = contest->model ? draft : NULL;

        if (contest->speculative != NULL) {
            snprintf(word, sizeof(word), "speculative=%s",
                     contest->speculative);
            rc = engine_conf_set(&conf, word, &err);
        }
    }

    if (rc != LLM_OK || engine_conf_check(&conf, &err) != LLM_OK
        || engine_open(&conf, &engine, &err) != LLM_OK)
    {
        die(err.text);
    }

    n_vocab = model_config(engine->model)->n_vocab;

    return engine;
}


/* Question i of a round. */
static size_t
write_prompt(const contest_t *contest, random_t *random, char *to)
{
    size_t n = 0;

    if (contest->repeat) {
        n += (size_t) sprintf(to,
                              "%s\nThe same program once more, unchanged:"
                              "\n\n```python\ndef read_table",
                              code);
        return n;
    }

    n += (size_t) sprintf(to + n, "A short story about a");

    for (int i = 0; i < 24; i++) {
        n += (size_t) sprintf(to + n, " %s", words[random_below(random, 16)]);
    }

    return n + (size_t) sprintf(to + n, ". Once");
}


static request_t *
submit(engine_t *engine, const contest_t *contest, random_t *random)
{
    static uint8_t area[2 * MAX_PROMPT];
    const request_origin_t from = { .submit_ns = 1 };
    const llm_params_t params = { .temperature = 0,
                                  .top_p = 1,
                                  .repetition_penalty = 1,
                                  .max_tokens = N_TOKENS };
    char prompt[MAX_PROMPT];
    const size_t n = write_prompt(contest, random, prompt);
    llm_request_writer_t w;

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT, LLM_F_IGNORE_EOS,
                      &params);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, prompt, n);

    request_t *req = intake_request(engine, area, llm_request_end(&w), &from);

    if (req == NULL) {
        die("no request");
    }

    return req;
}


/* The text of a finished request, which goes. */
static void
take_text(request_t *req, buf_t *text)
{
    for (size_t pos = 0; pos < req->out.len;) {
        llm_record_t record;
        uint32_t len;

        memcpy(&len, req->out.data + pos, sizeof(len));

        if (llm_record_decode((uint8_t *) req->out.data + pos + sizeof(len),
                              len, &record)
                != 0
            || record.type == LLM_REC_ERROR)
        {
            die("a request failed");
        }

        if (record.type == LLM_REC_DELTA) {
            buf_add(text, record.u.delta.text, record.u.delta.text_len);
        }

        pos += sizeof(len) + len;
    }

    request_destroy(req);
}


static round_t
run_round(engine_t *engine, const contest_t *contest, uint64_t seed)
{
    static request_t *reqs[MAX_STREAMS];
    random_t random = { seed * 2654435761u + 1 };
    round_t round = { 0 };
    const uint64_t start = clock_now_ns();

    for (int i = 0; i < contest->streams; i++) {
        reqs[i] = submit(engine, contest, &random);
    }

    while (engine_step(engine)) {
    }

    round.tokens_s =
        contest->streams * N_TOKENS * 1e9 / (double) (clock_now_ns() - start);

    for (int i = 0; i < contest->streams; i++) {
        take_text(reqs[i], &round.text);
    }

    return round;
}


static int
compare_double(const void *a, const void *b)
{
    const double x = *(const double *) a, y = *(const double *) b;

    return (x > y) - (x < y);
}


static void
print_contest(const contest_t *contest, double (*v)[MAX_ROUNDS], int n,
              const llm_stats_t *stats)
{
    for (int i = 0; i < 3; i++) {
        qsort(v[i], (size_t) n, sizeof(double), compare_double);
    }

    printf("%-8s %2d streams: off %7.1f, on %7.1f tok/s, ratio %.3f / %.3f / "
           "%.3f; %u of %u drafts right\n",
           contest->name, contest->streams, v[0][n / 2], v[1][n / 2], v[2][0],
           v[2][n / 2], v[2][n - 1],
           (unsigned) llm_stats_get(&stats->spec_accepted),
           (unsigned) llm_stats_get(&stats->spec_draft_tokens));
    fflush(stdout);
}


/* True: the answers are the same. */
static bool
hold(const contest_t *contest, const char *model, const char *draft, int rounds)
{
    engine_t *engines[2] = { open_engine(model, NULL, NULL),
                             open_engine(model, draft, contest) };
    double v[3][MAX_ROUNDS];
    bool equal = true;

    /* the first one is not counted: memory is touched, costs are learned */
    for (int i = -1; i < rounds; i++) {
        round_t rounds_of[2];

        for (int k = 0; k < 2; k++) {
            const int e = (i + k) & 1;

            rounds_of[e] = run_round(engines[e], contest, (uint64_t) (i + 2));
        }

        equal = equal && rounds_of[0].text.len == rounds_of[1].text.len
                && memcmp(rounds_of[0].text.data, rounds_of[1].text.data,
                          rounds_of[0].text.len)
                       == 0;

        if (i >= 0) {
            v[0][i] = rounds_of[0].tokens_s;
            v[1][i] = rounds_of[1].tokens_s;
            v[2][i] = rounds_of[1].tokens_s / rounds_of[0].tokens_s;
        }

        buf_fini(&rounds_of[0].text);
        buf_fini(&rounds_of[1].text);
    }

    print_contest(contest, v, rounds, engines[1]->stats);
    engine_close(engines[1]);
    engine_close(engines[0]);

    return equal;
}


int
main(int argc, char **argv)
{
    const char *model = getenv("LLM_TEST_MODEL"), *draft = NULL, *only = NULL;
    int rounds = 5;
    bool equal = true;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--model") == 0) {
            model = argv[i + 1];
        } else if (strcmp(argv[i], "--draft") == 0) {
            draft = argv[i + 1];
        } else if (strcmp(argv[i], "--only") == 0) {
            only = argv[i + 1];
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = atoi(argv[i + 1]);
        } else {
            die("--model FILE, --draft FILE, --rounds N, --only NAME");
        }
    }

    if (model == NULL || rounds < 1 || rounds > MAX_ROUNDS) {
        die("give --model FILE, and --rounds of 1 to 100");
    }

    log_open(NULL, LOG_WARN);
    noise = random_start("drafts");

    for (size_t i = 0; i < sizeof(contests) / sizeof(contests[0]); i++) {
        const contest_t *contest = &contests[i];

        if ((only == NULL || strcmp(only, contest->name) == 0)
            && (draft != NULL || !contest->model))
        {
            equal = hold(contest, model, draft, rounds) && equal;
        }
    }

    if (!equal) {
        printf("ANSWERS DIFFER\n");
    }

    return !equal;
}
