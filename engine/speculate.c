/*
 * Who is asked for drafts, and how many are taken (spec/choose.h).
 *
 * Looking up costs next to nothing, so these drafters are asked first and
 * their drafts cut to what is worth a row.  They are tried in the order of the
 * settings, until one has something; the draft model is the last.  It makes
 * its drafts when the step is planned, because it writes into the pages that
 * they get.
 */

#include "engine/speculate.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/model/repack_cache.h"
#include "engine/spec/lookup.h"

enum {
    INDEX_TOKENS = 1 << 18,
    TRIALS = 14,      /* up to 2^13 sequences */
    DRAFT_ROWS = 256, /* tokens that the draft model computes in a step */
    SOON = 64 /* drafts over which it must earn what it has to compute */
};

_Static_assert((int) SPEC_MAX == (int) LLM_SPEC_MAX, "a counter for each");

struct speculate_s {
    spec_prior_t prior[SPEC_DRAFTERS];
    spec_trial_t trial[TRIALS]; /* by the sequences of a step: 1, 2, 3 - 4, … */
    uint64_t start;             /* of the step */
    int n_decode;               /* sequences in it that decode */
    bool catching_up;           /* the draft model computes a prompt in it */
    spec_index_t *index;        /* of the suffix drafter, or NULL */
    draft_t *draft;             /* the draft model, or NULL */
    int max_rows;               /* of a pass of it */

    request_t **who;  /* [max_num_seqs] */
    spec_bid_t *bids; /* [max_num_seqs] of these */
    int n_bids;
    draft_want_t *wants; /* [max_num_seqs] of the draft model */
    int n_wants;
};


static int
open_draft(engine_t *engine, const gguf_t *target, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    speculate_t *spec = engine->spec;
    gguf_t *gguf = NULL;
    llm_err_t cause;
    int rc = gguf_open(conf->speculative_model, &gguf, &cause);

    spec->max_rows =
        conf->max_num_seqs > DRAFT_ROWS ? conf->max_num_seqs : DRAFT_ROWS;

    char *cache =
        repack_cache_path(conf->repack_cache, conf->speculative_model);
    const draft_open_t how = {
        .gguf = gguf,
        .path = conf->speculative_model,
        .target = target,
        .ops = engine->ops,
        .dev = engine->dev,
        .max_rows = spec->max_rows,
        .max_seqs = conf->max_num_seqs,
        .max_len = engine->max_model_len,
        .repack_cache = cache,
        .kv_dtype = (op_dtype_t) conf->kv_cache_dtype,
    };

    if (rc == LLM_OK) {
        rc = draft_open(&how, &spec->draft, &cause);
    }

    gguf_close(gguf);
    free(cache);

    return rc == LLM_OK ? rc
                        : llm_err_set(err, rc, "speculative_model",
                                      "speculative_model: %s", cause.text);
}


int
speculate_open(engine_t *engine, const gguf_t *gguf, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    const size_t seqs = (size_t) conf->max_num_seqs;
    bool suffix = false;

    if (conf->n_drafters == 0 && conf->speculative_model == NULL
        && conf->test_drafter == NULL)
    {
        return LLM_OK;
    }

    for (int i = 0; i < conf->n_drafters; i++) {
        suffix |= conf->drafters[i].kind == DRAFT_SUFFIX;
    }

    speculate_t *spec = calloc(1, sizeof(speculate_t));

    engine->spec = spec;

    if (spec != NULL) {
        spec->who = calloc(seqs, sizeof(request_t *));
        spec->bids = calloc(seqs, sizeof(spec_bid_t));
        spec->wants = calloc(seqs, sizeof(draft_want_t));
        spec->index = suffix ? spec_index_create(INDEX_TOKENS) : NULL;
    }

    if (spec == NULL || spec->who == NULL || spec->bids == NULL
        || spec->wants == NULL || (suffix && spec->index == NULL))
    {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "no memory for speculative decoding");
    }

    for (int i = 0; i < SPEC_DRAFTERS; i++) {
        spec_prior_init(&spec->prior[i]);
    }

    return conf->speculative_model != NULL ? open_draft(engine, gguf, err)
                                           : LLM_OK;
}


void
speculate_close(engine_t *engine)
{
    speculate_t *spec = engine->spec;

    if (spec == NULL) {
        return;
    }

    draft_close(spec->draft);
    spec_index_destroy(spec->index);
    free(spec->who);
    free(spec->bids);
    free(spec->wants);
    free(spec);
    engine->spec = NULL;
}


size_t
speculate_page_bytes(const engine_t *engine)
{
    const speculate_t *spec = engine->spec;

    return spec != NULL && spec->draft != NULL ? draft_page_bytes(spec->draft)
                                               : 0;
}


size_t
speculate_model_bytes(const engine_t *engine)
{
    const speculate_t *spec = engine->spec;

    return spec != NULL && spec->draft != NULL
               ? draft_weight_bytes(spec->draft)
                     + draft_activation_bytes(spec->draft)
               : 0;
}


size_t
speculate_later_bytes(const engine_t *engine)
{
    const speculate_t *spec = engine->spec;

    return spec != NULL && spec->draft != NULL ? draft_later_bytes(spec->draft)
                                               : 0;
}


int
speculate_reserve(engine_t *engine, llm_err_t *err)
{
    speculate_t *spec = engine->spec;

    if (spec == NULL || spec->draft == NULL) {
        return LLM_OK;
    }

    log_write(LOG_NOTICE,
              "speculative_model: \"%s\", weights %.1f MiB, activations "
              "%.1f MiB",
              draft_name(spec->draft),
              (double) draft_weight_bytes(spec->draft) / 1048576.0,
              (double) draft_activation_bytes(spec->draft) / 1048576.0);

    return draft_reserve(spec->draft, engine->kv.n_pages, err);
}


/* --- before a step --- */

/* Asks one drafter after the other for n drafts.  How many came. */
static int
look_up(engine_t *engine, request_t *req, int n)
{
    const engine_conf_t *conf = &engine->conf;
    const seq_t *seq = &req->seq;
    int found = 0, matched;

    req->drafter = SPEC_DRAFTERS - 1;

    if (conf->test_drafter != NULL) {
        found = conf->test_drafter(seq->tokens, seq->n_tokens, n, req->draft);
    }

    for (int i = 0; found == 0 && i < conf->n_drafters; i++) {
        const conf_drafter_t *drafter = &conf->drafters[i];

        req->drafter = i;

        if (drafter->kind == DRAFT_NGRAM) {
            found = spec_lookup(seq->tokens, seq->n_tokens, drafter->min,
                                drafter->max, n, req->draft, &matched);
        } else {
            found = spec_index_lookup(engine->spec->index, req->salt_hash,
                                      seq->tokens, seq->n_tokens, n, req->draft,
                                      &matched);
        }
    }

    return found;
}


/* Is it the draft model that was asked last? */
static bool
by_model(const engine_t *engine, const request_t *req)
{
    return engine->spec->draft != NULL
           && req->drafter == engine->conf.n_drafters;
}


/* Drafts beyond the last token of an answer would be in vain. */
static int
most_drafts(const engine_t *engine, const request_t *req)
{
    const int wanted = engine->conf.num_speculative_tokens > 0
                           ? engine->conf.num_speculative_tokens
                           : SPEC_MAX;
    const int left = req->max_tokens - req->n_output - 1;

    return left < wanted ? left : wanted;
}


static void
bid(engine_t *engine, request_t *req)
{
    speculate_t *spec = engine->spec;
    const int most = most_drafts(engine, req);
    int found = most > 0 ? look_up(engine, req, most) : 0;

    if (found == 0 && most > 0 && spec->draft != NULL) {
        req->drafter = engine->conf.n_drafters;
        found = most;
    }

    if (found > 0) {
        spec->who[spec->n_bids] = req;
        spec->bids[spec->n_bids++] = (spec_bid_t){
            .right = spec_right(&spec->prior[req->drafter],
                                &req->track[req->drafter]),
            .most = found,
        };
    }
}


/* What runs anyway, and the bids of those that decode. */
static cost_step_t
collect(engine_t *engine)
{
    const list_t *head = &engine->requests;
    cost_step_t step = { 0 };
    int prefill = 0;

    engine->spec->n_bids = 0;

    for (const list_t *l = head->next; l != head; l = l->next) {
        request_t *req = list_entry(l, request_t, link);
        const seq_t *seq = &req->seq;
        const int todo = seq->n_tokens - seq->computed;

        req->seq.draft = req->draft;
        req->seq.n_draft = 0;
        req->n_right = 0;

        if (seq->state != SEQ_RUNNING || seq->parked) {
            continue;
        }

        if (todo > 1) {
            prefill += todo;
            continue;
        }

        step.rows++;
        step.attended += seq->n_tokens;
        bid(engine, req);
    }

    const int room = engine->conf.max_num_batched_tokens - step.rows;

    engine->spec->n_decode = step.rows;
    step.rows += prefill < room ? prefill : room;

    return step;
}


/* The time that a draft of the model takes, with its part of what has to be
 * computed before.  False: no memory. */
static bool
price(engine_t *engine, request_t *req, int n_models, spec_bid_t *bid)
{
    const draft_t *draft = engine->spec->draft;
    draft_track_t *track = &req->drafted;

    if (track->hashes == NULL) {
        const int pages = kv_pages_for(req->seq.cap_tokens);

        track->hashes =
            arena_alloc(req->arena, (size_t) pages * sizeof(uint64_t));

        if (track->hashes == NULL) {
            return false;
        }
    }

    const int missing = draft_missing(draft, &req->seq, req->salt_hash, track);
    const int left = req->max_tokens - req->n_output;
    const int soon = left < SOON ? left : SOON;

    bid->ns = draft_pass_ns(draft, n_models) / n_models;

    if (missing > KV_PAGE) {
        bid->ns += draft_pass_ns(draft, missing) / soon;
    }

    return true;
}


static void
price_models(engine_t *engine)
{
    speculate_t *spec = engine->spec;
    int n = 0;

    for (int i = 0; i < spec->n_bids; i++) {
        n += by_model(engine, spec->who[i]);
    }

    for (int i = 0; i < spec->n_bids; i++) {
        if (by_model(engine, spec->who[i])
            && !price(engine, spec->who[i], n, &spec->bids[i]))
        {
            spec->bids[i].most = 0;
        }
    }
}


/* The draft model computes what it lacks of a sequence, in as many steps as it
 * takes; then it drafts. */
static void
want(engine_t *engine, request_t *req, int *rows, int n)
{
    speculate_t *spec = engine->spec;
    const int missing = req->seq.n_tokens - req->drafted.done;

    if (n == 0 || *rows == 0) {
        return;
    }

    spec->wants[spec->n_wants++] = (draft_want_t){
        .seq = &req->seq,
        .track = &req->drafted,
        .owner = req->salt_hash,
        .params = &req->samp,
        .state = req->samp_state,
        .n_output = req->n_output,
        .rows = missing < *rows ? missing : *rows,
        .draft = req->draft,
    };

    spec->catching_up |= missing > KV_PAGE;
    req->seq.n_draft = missing <= *rows ? n : 0;
    *rows -= missing < *rows ? missing : *rows;
}


static spec_trial_t *
trial_of(speculate_t *spec)
{
    int i = 0;

    while (i < TRIALS - 1 && 1 << i < spec->n_decode) {
        i++;
    }

    return &spec->trial[i];
}


void
speculate_propose(engine_t *engine)
{
    speculate_t *spec = engine->spec;

    if (spec == NULL) {
        return;
    }

    spec->start = clock_now_ns();
    spec->catching_up = false;

    const cost_step_t step = collect(engine);
    const int room = engine->conf.max_num_batched_tokens - step.rows;
    int rows = spec->max_rows;

    spec->n_wants = 0;

    if (spec->n_bids == 0) {
        return;
    }

    price_models(engine);

    if (engine->conf.num_speculative_tokens > 0) {
        for (int i = 0; i < spec->n_bids; i++) {
            spec->bids[i].n = spec->bids[i].most;
        }
    } else if (spec_allowed(trial_of(spec))) {
        spec_choose(&engine->cost, step, room, spec->bids, spec->n_bids);
    }

    for (int i = 0; i < spec->n_bids; i++) {
        request_t *req = spec->who[i];
        const int n = spec->bids[i].n;

        if (n == 0) {
            spec_pass(&req->track[req->drafter]);
        }

        if (by_model(engine, req)) {
            want(engine, req, &rows, n);
        } else {
            req->seq.n_draft = n;
        }
    }
}


void
speculate_draft(engine_t *engine, const plan_t *plan)
{
    speculate_t *spec = engine->spec;
    int n = 0;

    if (spec == NULL || plan->n_rows == 0) {
        return;
    }

    /* some may have been preempted, or have got fewer rows */
    for (int i = 0; i < spec->n_wants; i++) {
        const seq_t *seq = spec->wants[i].seq;

        if (seq->state == SEQ_RUNNING && seq->computed == seq->n_tokens) {
            spec->wants[n] = spec->wants[i];
            spec->wants[n++].n = seq->n_draft;
        }
    }

    if (n > 0) {
        draft_run(spec->draft, spec->wants, n);
    }
}


/* --- after it --- */

static void
count(llm_stats_t *stats, int n_draft, int n_right)
{
    llm_stats_add(&stats->spec_drafts, 1);
    llm_stats_add(&stats->spec_draft_tokens, (uint64_t) n_draft);
    llm_stats_add(&stats->spec_accepted, (uint64_t) n_right);

    for (int i = 0; i < n_right; i++) {
        llm_stats_add(&stats->spec_accepted_at[i], 1);
    }
}


void
speculate_learn(engine_t *engine, const plan_t *plan)
{
    speculate_t *spec = engine->spec;
    int drafted = 0, n_tokens = 0, n_prefill = 0;

    if (spec == NULL) {
        return;
    }

    for (int i = 0; i < plan->n_rows; i++) {
        const int n_draft = plan->rows[i].n_draft;
        request_t *req = plan->rows[i].seq->owner;

        drafted += n_draft;
        n_tokens += 1 + req->n_right;
        n_prefill += plan->rows[i].count - n_draft - 1;

        if (n_draft == 0) {
            continue;
        }

        spec_learn(&spec->prior[req->drafter], &req->track[req->drafter],
                   n_draft, req->n_right);
        count(engine->stats, n_draft, req->n_right);

        if (by_model(engine, req) && req->seq.state == SEQ_RUNNING) {
            draft_settle(spec->draft, &req->seq, req->salt_hash, &req->drafted,
                         n_draft, req->n_right);
        }
    }

    /* what is done once is no part of what each draft costs */
    if (n_prefill == 0 && n_tokens > 0 && !spec->catching_up) {
        spec_tried(trial_of(spec), drafted > 0,
                   (double) (clock_now_ns() - spec->start) / n_tokens);
    }
}


void
speculate_end(engine_t *engine, const request_t *req)
{
    speculate_t *spec = engine->spec;

    if (spec != NULL && spec->index != NULL && req->n_output > 0) {
        spec_index_add(spec->index, req->salt_hash, req->seq.tokens,
                       req->seq.n_tokens);
    }
}
