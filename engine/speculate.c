/*
 * Who is asked for drafts, and how many are taken (spec/choose.h).
 *
 * Looking up costs next to nothing, so these drafters are asked first and
 * their drafts cut to what is worth a row.  They are tried in the order of the
 * settings, until one has something.
 */

#include "engine/speculate.h"

#include <stdlib.h>
#include <string.h>

#include "engine/spec/lookup.h"

enum { INDEX_TOKENS = 1 << 18 };

_Static_assert((int) SPEC_MAX == (int) LLM_SPEC_MAX, "a counter for each");

struct speculate_s {
    spec_prior_t prior[SPEC_DRAFTERS];
    spec_index_t *index; /* of the suffix drafter, or NULL */
    request_t **who;     /* [max_num_seqs] */
    spec_bid_t *bids;    /* [max_num_seqs] of these */
    int n_bids;
};


int
speculate_open(engine_t *engine, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    const size_t seqs = (size_t) conf->max_num_seqs;
    bool suffix = false;

    if (conf->n_drafters == 0 && conf->test_drafter == NULL) {
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
        spec->index = suffix ? spec_index_create(INDEX_TOKENS) : NULL;
    }

    if (spec == NULL || spec->who == NULL || spec->bids == NULL
        || (suffix && spec->index == NULL))
    {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "no memory for speculative decoding");
    }

    for (int i = 0; i < SPEC_DRAFTERS; i++) {
        spec_prior_init(&spec->prior[i]);
    }

    return LLM_OK;
}


void
speculate_close(engine_t *engine)
{
    speculate_t *spec = engine->spec;

    if (spec == NULL) {
        return;
    }

    spec_index_destroy(spec->index);
    free(spec->who);
    free(spec->bids);
    free(spec);
    engine->spec = NULL;
}


/* Who reads what others wrote: under equal salts. */
static uint64_t
owner_of(const request_t *req)
{
    uint32_t len;
    const uint8_t *salt = request_section(req, LLM_SEC_SALT, &len);
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */

    for (uint32_t i = 0; i < len; i++) {
        hash = (hash ^ salt[i]) * 0x100000001b3u;
    }

    return hash;
}


/* Asks one drafter after the other for n drafts.  How many came. */
static int
look_up(engine_t *engine, request_t *req, int n)
{
    const engine_conf_t *conf = &engine->conf;
    const seq_t *seq = &req->seq;
    int found = 0, matched;

    req->drafter = 0;

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
            found = spec_index_lookup(engine->spec->index, owner_of(req),
                                      seq->tokens, seq->n_tokens, n, req->draft,
                                      &matched);
        }
    }

    return found;
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
    const int found = most > 0 ? look_up(engine, req, most) : 0;

    if (found > 0) {
        spec->who[spec->n_bids] = req;
        spec->bids[spec->n_bids++] = (spec_bid_t){
            .right = spec_right(&spec->prior[req->drafter],
                                &req->track[req->drafter]),
            .most = found,
        };
    }
}


void
speculate_propose(engine_t *engine)
{
    speculate_t *spec = engine->spec;
    const list_t *head = &engine->requests;
    cost_step_t step = { 0 };
    int prefill = 0;

    if (spec == NULL) {
        return;
    }

    spec->n_bids = 0;

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

    int room = engine->conf.max_num_batched_tokens - step.rows;

    prefill = prefill < room ? prefill : room;
    room -= prefill;
    step.rows += prefill;

    if (engine->conf.num_speculative_tokens > 0) {
        for (int i = 0; i < spec->n_bids; i++) {
            spec->bids[i].n = spec->bids[i].most;
        }
    } else if (spec->n_bids > 0) {
        spec_choose(&engine->cost, step, 0, room, spec->bids, spec->n_bids);
    }

    for (int i = 0; i < spec->n_bids; i++) {
        spec->who[i]->seq.n_draft = spec->bids[i].n;

        if (spec->bids[i].n == 0) {
            spec_pass(&spec->who[i]->track[spec->who[i]->drafter]);
        }
    }
}


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

    for (int i = 0; spec != NULL && i < plan->n_rows; i++) {
        const int n_draft = plan->rows[i].n_draft;
        request_t *req = plan->rows[i].seq->owner;

        if (n_draft > 0) {
            spec_learn(&spec->prior[req->drafter], &req->track[req->drafter],
                       n_draft, req->n_right);
            count(engine->stats, n_draft, req->n_right);
        }
    }
}


void
speculate_end(engine_t *engine, const request_t *req)
{
    speculate_t *spec = engine->spec;

    if (spec != NULL && spec->index != NULL && req->n_output > 0) {
        spec_index_add(spec->index, owner_of(req), req->seq.tokens,
                       req->seq.n_tokens);
    }
}
