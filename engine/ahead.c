/*
 * Which rows are computed ahead, and handing them to the step that wants them.
 * Called by runner.c.
 *
 * All or nothing: a step whose decodes came from two passes would read the
 * weights twice.  So nothing runs ahead behind a step with prefill or drafts,
 * which rarely comes alone, nor where one of the sequences that go on needs its
 * token known first: penalties look at all tokens before.  What ran ahead of a
 * step with drafts runs again in it; drafts come in runs, so some steps without
 * have to come first.
 *
 * Results go to places of the backend, in two sets that take turns: while one
 * is read the other is written.
 */

#include "engine/ahead.h"

#include <stdlib.h>

#include "engine/draw.h"

enum {
    CALM = 16 /* steps, so at worst one in so many is in vain for drafts */
};

struct ahead_s {
    batch_t batch;
    batch_out_t *taken; /* [max_num_seqs] */
    plan_row_t *rest;   /* [max_num_seqs] */
    int turn;
    int calm;   /* steps without drafts, in a row, */
    int enough; /* of these */
};


size_t
ahead_bytes(int max_seqs)
{
    return batch_bytes(max_seqs, max_seqs)
           + (size_t) max_seqs * (sizeof(batch_out_t) + sizeof(plan_row_t));
}


int
ahead_places(const engine_conf_t *conf)
{
    return 2 * conf->max_num_seqs;
}


int
ahead_open(engine_t *engine, llm_err_t *err)
{
    const int seqs = engine->conf.max_num_seqs;

    if (!draw_is_remote(engine) || engine->conf.ahead_after < 0) {
        return LLM_OK;
    }

    engine->ahead = calloc(1, sizeof(ahead_t));

    if (engine->ahead != NULL) {
        const int after = engine->conf.ahead_after;

        engine->ahead->enough = after > 0 ? after : CALM;
        engine->ahead->taken = calloc((size_t) seqs, sizeof(batch_out_t));
        engine->ahead->rest = calloc((size_t) seqs, sizeof(plan_row_t));
    }

    if (engine->ahead == NULL || engine->ahead->taken == NULL
        || engine->ahead->rest == NULL
        || batch_init(&engine->ahead->batch, seqs, seqs) != LLM_OK)
    {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for the batch");
    }

    return LLM_OK;
}


void
ahead_close(engine_t *engine)
{
    ahead_t *ahead = engine->ahead;

    if (ahead == NULL) {
        return;
    }

    batch_fini(&ahead->batch);
    free(ahead->taken);
    free(ahead->rest);
    free(ahead);
    engine->ahead = NULL;
}


int
ahead_take(engine_t *engine, const plan_t *plan, plan_t *rest,
           const batch_out_t **taken)
{
    ahead_t *ahead = engine->ahead;
    int n = 0;

    *rest = *plan;

    if (ahead == NULL) {
        return 0;
    }

    rest->rows = ahead->rest;
    rest->n_rows = 0;
    *taken = ahead->taken;

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        seq_t *seq = row->seq;

        /* a row with drafts is computed again: the same bits */
        if (seq->ahead && row->count == 1 && row->last) {
            const request_t *req = seq->owner;

            ahead->taken[n++] = (batch_out_t){ .seq = seq,
                                               .position = row->first,
                                               .sample = true,
                                               .place = req->place };
            rest->n_tokens--;
        } else {
            rest->rows[rest->n_rows++] = *row;
        }

        seq->ahead = false;
    }

    llm_stats_add(&engine->stats->rows_ahead_used, (uint64_t) n);

    return n;
}


void
ahead_note(const batch_out_t *outs, int n)
{
    for (int i = 0; i < n; i++) {
        if (outs[i].sample) {
            request_t *req = outs[i].seq->owner;

            req->place = outs[i].place;
        }
    }
}


/* --- what comes next --- */

/* The token that this step draws has been handed over. */
static bool
is_known(const seq_t *seq)
{
    return seq->n_tokens > seq->computed;
}


/* Does this step end it for certain, or has it?  A stop is not foreseen. */
static bool
ends(const seq_t *seq)
{
    const request_t *req = seq->owner;
    const int n_output = req->n_output + (is_known(seq) ? 0 : 1);

    return seq->state != SEQ_RUNNING || n_output >= req->max_tokens;
}


/* Can the token behind the next one be drawn by what is known now? */
static bool
can_follow(const engine_t *engine, const seq_t *seq)
{
    const request_t *req = seq->owner;

    return req->samp_state == NULL && (is_known(seq) || req->place >= 0)
           && draw_fits(engine, &req->samp, NULL,
                        seq->computed + 1 - seq->n_prompt);
}


static void
count_calm(ahead_t *ahead, const plan_t *plan)
{
    bool drafts = false;

    for (int i = 0; i < plan->n_rows; i++) {
        drafts |= plan->rows[i].n_draft > 0;
    }

    ahead->calm = drafts ? 0 : ahead->calm + (ahead->calm < ahead->enough);
}


/* Is the next step most likely one of decodes alone that can all be computed
 * now? */
static bool
may_run(const engine_t *engine, const plan_t *plan)
{
    int lacking = 0, n = 0;

    if (engine->spec != NULL && engine->ahead->calm < engine->ahead->enough) {
        return false;
    }

    for (int i = 0; i < plan->n_rows; i++) {
        const plan_row_t *row = &plan->rows[i];
        const seq_t *seq = row->seq;

        if (row->count != 1 || !row->last) {
            return false;
        }

        if (ends(seq)) {
            continue;
        }

        if (seq->parked || !can_follow(engine, seq)) {
            return false;
        }

        n++;
        lacking += kv_pages_for(seq->computed + 1) > seq->table.n;
    }

    return n > 0 && lacking <= kv_pool_free_pages(engine->pool);
}


/* The row behind the sequence's last one. */
static void
add_row(engine_t *engine, seq_t *seq)
{
    batch_t *batch = &engine->ahead->batch;
    const request_t *req = seq->owner;
    const int n = batch->op.n_rows++;
    const int rc = kv_table_grow(&seq->table, engine->pool, seq->computed + 1);

    llm_assert(rc == LLM_OK);
    (void) rc;

    batch->tokens[n] =
        is_known(seq) ? seq->tokens[seq->computed] : -1 - req->place;
    batch->pos[n] = seq->computed;
    batch->row_start[n] = n;
    batch->row_start[n + 1] = n + 1;
    batch->block_table[n] = seq->table.pages;
    batch->out_rows[n] = n;
    batch->outs[n] =
        (batch_out_t){ .seq = seq, .position = seq->computed, .sample = true };
    seq->ahead = true;
}


void
ahead_launch(engine_t *engine, const plan_t *plan)
{
    ahead_t *ahead = engine->ahead;

    if (ahead == NULL) {
        return;
    }

    count_calm(ahead, plan);

    if (engine->failed || !draw_is_remote(engine) || !may_run(engine, plan)) {
        return;
    }

    batch_t *batch = &ahead->batch;

    batch->op.n_rows = 0;

    for (int i = 0; i < plan->n_rows; i++) {
        if (!ends(plan->rows[i].seq)) {
            add_row(engine, plan->rows[i].seq);
        }
    }

    const int n_rows = batch->op.n_rows;
    const int places =
        engine->max_out + ahead->turn * engine->conf.max_num_seqs;

    batch->op.n_seqs = n_rows;
    batch->op.n_out = n_rows;
    ahead->turn = 1 - ahead->turn;
    engine->in_flight = true;
    llm_stats_add(&engine->stats->rows_ahead, (uint64_t) n_rows);

    model_forward(engine->model, &batch->op, &engine->kv);

    for (int first = 0; first < n_rows; first += engine->max_out) {
        const int left = n_rows - first;
        const int n = left < engine->max_out ? left : engine->max_out;
        float *logits = model_logits_at(engine->model, first, n);

        draw_begin(engine, &batch->outs[first], logits, n, places + first);
    }

    ahead_note(batch->outs, n_rows);
}
