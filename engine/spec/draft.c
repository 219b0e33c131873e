/*
 * Drafting.  A run begins with what the sequences lack, all in one pass; each
 * further pass has one row for every sequence that wants another draft.
 */

#include "engine/spec/draft.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/kv/store.h"
#include "engine/sched/cost.h"
#include "engine/spec/choose.h"
#include "engine/spec/hash.h"

enum { LOGIT_ROWS_MAX = 64 };

/* Of what a page holds K and V. */
typedef struct {
    uint64_t hash; /* of its n tokens and all before them */
    int n;
} draft_page_t;

struct draft_s {
    const op_table_t *ops;
    op_dev_t *dev;
    model_t *model;
    samp_t *samp;
    op_kv_t kv;
    draft_page_t *pages; /* [n_pages] */
    cost_t cost;         /* of a pass */

    int max_rows;
    int max_out;
    int32_t *tokens;        /* [max_rows] */
    int32_t *pos;           /* [max_rows] */
    int32_t *row_start;     /* [max_seqs + 1] */
    int32_t *out_rows;      /* [max_seqs] */
    const int32_t **tables; /* [max_seqs] */
    draft_want_t **active;  /* [max_seqs] with a row to look at in this pass */
};


/* --- opening --- */

/* The vocabularies must be the same, or a draft would mean something else. */
static int
check_vocabulary(const gguf_t *a, const gguf_t *b, llm_err_t *err)
{
    const char *key = "tokenizer.ggml.tokens";
    const int n = (int) gguf_array_len(a, key);
    const int m = (int) gguf_array_len(b, key);

    if (n != m) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "it has %d tokens, the model %d: use one of the "
                           "same vocabulary",
                           n, m);
    }

    for (int i = 0; i < n; i++) {
        gguf_str_t s, t;

        if (!gguf_array_str(a, key, i, &s) || !gguf_array_str(b, key, i, &t)
            || s.len != t.len || memcmp(s.text, t.text, s.len) != 0)
        {
            return llm_err_set(err, LLM_ERROR, NULL,
                               "its token %d is not that of the model: use one "
                               "of the same vocabulary",
                               i);
        }
    }

    return LLM_OK;
}


static int
open_model(draft_t *draft, const draft_open_t *how, llm_err_t *err)
{
    op_err_t op_err = { "" };
    const op_open_t open = { .beside = how->dev };

    draft->ops = how->ops;
    draft->dev = how->ops->open(&open, &op_err);

    if (draft->dev == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL, "%s", op_err.text);
    }

    const model_load_t load = {
        .ops = how->ops,
        .dev = draft->dev,
        .max_rows = how->max_rows,
        .max_seqs = how->max_seqs,
        .max_out = draft->max_out,
        .max_len = how->max_len,
        .repack_cache = how->repack_cache,
        .path = how->path,
    };

    return model_load(how->gguf, &load, &draft->model, err);
}


static int
open_arrays(draft_t *draft, int max_seqs, llm_err_t *err)
{
    const size_t rows = (size_t) draft->max_rows, seqs = (size_t) max_seqs;

    draft->samp = samp_create(model_config(draft->model)->n_vocab);
    draft->tokens = calloc(rows, sizeof(int32_t));
    draft->pos = calloc(rows, sizeof(int32_t));
    draft->row_start = calloc(seqs + 1, sizeof(int32_t));
    draft->out_rows = calloc(seqs, sizeof(int32_t));
    draft->tables = calloc(seqs, sizeof(int32_t *));
    draft->active = calloc(seqs, sizeof(draft_want_t *));

    if (draft->samp == NULL || draft->tokens == NULL || draft->pos == NULL
        || draft->row_start == NULL || draft->out_rows == NULL
        || draft->tables == NULL || draft->active == NULL)
    {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for drafts");
    }

    return LLM_OK;
}


int
draft_open(const draft_open_t *how, draft_t **out, llm_err_t *err)
{
    draft_t *draft = calloc(1, sizeof(draft_t));

    if (draft == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for drafts");
    }

    draft->max_rows = how->max_rows;
    draft->max_out =
        how->max_seqs < LOGIT_ROWS_MAX ? how->max_seqs : LOGIT_ROWS_MAX;

    int rc = check_vocabulary(how->gguf, how->target, err);

    if (rc == LLM_OK) {
        rc = open_model(draft, how, err);
    }

    if (rc == LLM_OK) {
        rc = open_arrays(draft, how->max_seqs, err);
    }

    if (rc != LLM_OK) {
        draft_close(draft);
        return rc;
    }

    const model_config_t *config = model_config(draft->model);

    draft->kv = (op_kv_t){ .n_layers = config->n_layers,
                           .n_kv_heads = config->n_kv_heads,
                           .head_dim = config->head_dim,
                           .dtype = how->kv_dtype };
    *out = draft;

    return LLM_OK;
}


int
draft_reserve(draft_t *draft, int n_pages, llm_err_t *err)
{
    draft->kv.n_pages = n_pages;
    draft->pages = calloc((size_t) n_pages, sizeof(draft_page_t));

    if (draft->pages == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for drafts");
    }

    const int rc = kv_store_create(draft->ops, draft->dev, &draft->kv, err);
    op_err_t op_err = { "" };

    /* of which a lack of memory may come */
    if (draft->ops->check(draft->dev, &op_err) != 0) {
        return llm_err_set(err, LLM_ERROR, NULL, "speculative_model: %s",
                           op_err.text);
    }

    return rc;
}


void
draft_close(draft_t *draft)
{
    if (draft == NULL) {
        return;
    }

    if (draft->kv.base != NULL) {
        kv_store_destroy(draft->ops, draft->dev, &draft->kv);
    }

    model_free(draft->model);

    if (draft->dev != NULL) {
        draft->ops->close(draft->dev);
    }

    samp_destroy(draft->samp);
    free(draft->pages);
    free(draft->tokens);
    free(draft->pos);
    free(draft->row_start);
    free(draft->out_rows);
    free(draft->tables);
    free(draft->active);
    free(draft);
}


size_t
draft_weight_bytes(const draft_t *draft)
{
    return model_weight_bytes(draft->model);
}


size_t
draft_activation_bytes(const draft_t *draft)
{
    return model_activation_bytes(draft->model);
}


size_t
draft_page_bytes(const draft_t *draft)
{
    return model_page_bytes(draft->model, (int) draft->kv.dtype);
}


size_t
draft_later_bytes(const draft_t *draft)
{
    return draft->ops->memory(draft->dev).later;
}


const char *
draft_name(const draft_t *draft)
{
    return model_config(draft->model)->name;
}


/* --- what is there already --- */

/* Of the first n tokens of a sequence. */
static uint64_t
hash_of(const seq_t *seq, uint64_t owner, draft_track_t *track, int n)
{
    const int pages = n / KV_PAGE;

    while (track->n_hashes < pages) {
        const int i = track->n_hashes;
        uint64_t hash = i > 0 ? track->hashes[i - 1] : owner;

        for (int k = 0; k < KV_PAGE; k++) {
            hash = spec_hash_token(hash, seq->tokens[i * KV_PAGE + k]);
        }

        track->hashes[track->n_hashes++] = hash;
    }

    uint64_t hash = pages > 0 ? track->hashes[pages - 1] : owner;

    for (int k = pages * KV_PAGE; k < n; k++) {
        hash = spec_hash_token(hash, seq->tokens[k]);
    }

    return hash;
}


int
draft_missing(const draft_t *draft, const seq_t *seq, uint64_t owner,
              draft_track_t *track)
{
    const kv_table_t *table = &seq->table;
    const int last = seq->n_tokens - 1; /* it is always computed again */
    int n = KV_PAGE;

    track->done = 0;
    track->hash = owner;

    for (int i = 0; n == KV_PAGE && i < table->n; i++) {
        const draft_page_t *page = &draft->pages[table->pages[i]];
        const int done = i * KV_PAGE + page->n;

        n = page->n;

        if (n == 0 || done > last
            || hash_of(seq, owner, track, done) != page->hash) {
            break;
        }

        track->done = done;
        track->hash = page->hash;
    }

    return seq->n_tokens - track->done;
}


/* --- running --- */

static int32_t
token_of(const draft_want_t *want, int position)
{
    const int n = want->seq->n_tokens;

    return position < n ? want->seq->tokens[position]
                        : want->draft[position - n];
}


/* The next `count` tokens of a sequence become rows, and are as good as
 * computed. */
static void
add_rows(draft_t *draft, op_batch_t *batch, const draft_want_t *want, int count)
{
    const int32_t *pages = want->seq->table.pages;
    draft_track_t *track = want->track;

    draft->tables[batch->n_seqs] = pages;
    draft->row_start[batch->n_seqs++] = batch->n_rows;

    for (int i = 0; i < count; i++) {
        const int at = track->done++;
        const int32_t token = token_of(want, at);

        track->hash = spec_hash_token(track->hash, token);
        draft->pages[pages[at / KV_PAGE]] =
            (draft_page_t){ track->hash, at % KV_PAGE + 1 };
        draft->tokens[batch->n_rows] = token;
        draft->pos[batch->n_rows++] = at;
    }

    draft->row_start[batch->n_seqs] = batch->n_rows;
}


static void
look_at_last(draft_t *draft, op_batch_t *batch, draft_want_t *want)
{
    draft->active[batch->n_out] = want;
    draft->out_rows[batch->n_out++] = batch->n_rows - 1;
}


/* The k-th draft of the active ones. */
static void
draw(draft_t *draft, int n, int k)
{
    const size_t n_vocab = (size_t) model_config(draft->model)->n_vocab;

    for (int first = 0; first < n; first += draft->max_out) {
        const int left = n - first;
        const int count = left < draft->max_out ? left : draft->max_out;
        float *logits = model_logits(draft->model, first, count);

        for (int i = 0; i < count; i++) {
            draft_want_t *want = draft->active[first + i];
            samp_params_t params = *want->params;
            samp_result_t result;

            params.top_logprobs = -1;
            samp_sample(draft->samp, &params, want->state,
                        logits + (size_t) i * n_vocab, want->n_output + k,
                        (uint64_t) (want->seq->n_tokens + k), &result);
            want->draft[k] = result.token;
        }
    }
}


static void
pass(draft_t *draft, op_batch_t *batch, int k)
{
    const uint64_t start = clock_now_ns();
    cost_step_t step = { .rows = batch->n_rows };

    for (int i = 0; i < batch->n_rows; i++) {
        step.attended += batch->pos[i] + 1;
    }

    batch->tokens = draft->tokens;
    model_forward(draft->model, batch, &draft->kv);
    draw(draft, batch->n_out, k);
    cost_observe(&draft->cost, step, clock_now_ns() - start);
}


static op_batch_t
empty_batch(const draft_t *draft)
{
    return (op_batch_t){ .tokens = draft->tokens,
                         .pos = draft->pos,
                         .row_start = draft->row_start,
                         .block_table = draft->tables,
                         .out_rows = draft->out_rows };
}


void
draft_run(draft_t *draft, draft_want_t *wants, int n)
{
    op_batch_t batch = empty_batch(draft);

    for (int i = 0; i < n; i++) {
        draft_want_t *want = &wants[i];
        const int missing = want->seq->n_tokens - want->track->done;
        const int count = want->rows < missing ? want->rows : missing;

        if (count == 0) {
            continue;
        }

        add_rows(draft, &batch, want, count);

        if (count == missing && want->n > 0) {
            look_at_last(draft, &batch, want);
        }
    }

    for (int k = 0; batch.n_rows > 0; k++) {
        pass(draft, &batch, k);
        batch = empty_batch(draft);

        for (int i = 0; i < n; i++) {
            draft_want_t *want = &wants[i];

            if (want->n > k + 1 && want->track->done == want->seq->n_tokens + k)
            {
                add_rows(draft, &batch, want, 1);
                look_at_last(draft, &batch, want);
            }
        }
    }
}


void
draft_settle(draft_t *draft, const seq_t *seq, uint64_t owner,
             draft_track_t *track, int n_draft, int n_right)
{
    /* the last draft was not computed */
    const int computed = n_right < n_draft ? n_right : n_draft - 1;
    const int certain = seq->executed + 1 + computed;
    const int page = (certain - 1) / KV_PAGE;

    if (page < seq->table.n) {
        draft->pages[seq->table.pages[page]] =
            (draft_page_t){ hash_of(seq, owner, track, certain),
                            (certain - 1) % KV_PAGE + 1 };
    }
}


double
draft_pass_ns(const draft_t *draft, int rows)
{
    return cost_least_ns(&draft->cost, (cost_step_t){ .rows = rows });
}
