/*
 * One step: build the batch, run the model over it, look at the rows that
 * matter.  Rows that sample draw the next token; rows of an echoed prompt are
 * scored.
 *
 * All rows of a block of logits are drawn before the first of them is emitted,
 * so that the backend can do them all at once (draw.h), and a few looks at the
 * clock tell the two apart.  No row depends on what another one of its block
 * emits: a sequence has one row that samples, and scores depend on the prompt
 * alone.
 *
 * Drafts are verified like this: the row of each is drawn as if all before it
 * were right; the token that is drawn at a position is what the answer has
 * there, with or without drafts, and the next row counts only if the draft was
 * that token.  With penalties a draw depends on the tokens before it, so these
 * rows wait until those have been emitted.
 */

#include "engine/runner.h"

#include "engine/ahead.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/draw.h"
#include "engine/emit.h"
#include "engine/tally.h"


static void
emit_row(engine_t *engine, const batch_out_t *out, const samp_result_t *result)
{
    request_t *req = out->seq->owner;

    if (!out->sample) {
        emit_prompt_score(engine, req, out->position + 1, result);
        return;
    }

    if (req->max_tokens == 0) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return;
    }

    emit_token(engine, req, result);
}


/* What came from a device that has failed means nothing: nobody gets it. */
static bool
device_failed(engine_t *engine)
{
    op_err_t err;

    if (!engine->failed && engine->ops->check(engine->dev, &err) != 0) {
        engine->failed = true;
        log_write(LOG_EMERG,
                  "llm_engine \"%s\": the device has failed: %s; requests are "
                  "lost and the process leaves",
                  engine->conf.name, err.text);
    }

    return engine->failed;
}


/* Row `row` of a block, of a sequence with drafts: the i-th counts if i of them
 * were right. */
static void
verify_row(engine_t *engine, const batch_out_t *out, float *logits, int row)
{
    const samp_result_t *result = &engine->results[row];
    request_t *req = out->seq->owner;
    seq_t *seq = out->seq;
    const int i = out->position - seq->executed;

    if (req->finished || req->n_right < i) {
        return;
    }

    if (draw_waits(out)) {
        draw_late(engine, out, logits, row);

        if (device_failed(engine)) {
            return;
        }
    }

    if (i == 0) {
        req->n_drafted += (uint32_t) seq->n_draft;
    }

    /* a draft that is right has its K and V in the pages; counted before the
     * token, which may be the last, ends the sequence */
    if (i < seq->n_draft && result->token == seq->draft[i]) {
        seq->computed++;
        req->n_right++;
        req->n_accepted++;
    }

    emit_row(engine, out, result);
}


/* Results of rows that do not wait for others, on the host. */
static void
emit_block(engine_t *engine, const batch_out_t *outs, int n, float *logits,
           uint64_t *since)
{
    draw_end(engine, outs, n);
    tally_phase(engine,
                draw_is_remote(engine) ? LLM_PHASE_FORWARD : LLM_PHASE_SAMPLE,
                since);
    engine->results_ns = *since;

    if (device_failed(engine)) {
        return;
    }

    for (int i = 0; i < n && !engine->failed; i++) {
        if (outs[i].verify) {
            verify_row(engine, &outs[i], logits, i);
        } else {
            emit_row(engine, &outs[i], &engine->results[i]);
        }
    }

    tally_phase(engine, LLM_PHASE_EMIT, since);
}


/* Rows first … first + n − 1 of those that are looked at.  What a backend draws
 * is a part of its pass, and so is the wait for it. */
static float *
begin_block(engine_t *engine, int first, int n, uint64_t *since)
{
    batch_out_t *outs = &engine->batch.outs[first];
    float *logits = draw_is_remote(engine)
                        ? model_logits_at(engine->model, first, n)
                        : model_logits(engine->model, first, n);

    tally_phase(engine, LLM_PHASE_FORWARD, since);
    draw_begin(engine, outs, logits, n, 0);
    ahead_note(outs, n);

    return logits;
}


/* The rows that have been computed ahead. */
static void
emit_taken(engine_t *engine, const batch_out_t *taken, int n_taken,
           uint64_t *since)
{
    for (int first = 0; first < n_taken && !engine->failed;
         first += engine->max_out)
    {
        const int left = n_taken - first;

        emit_block(engine, taken + first,
                   left < engine->max_out ? left : engine->max_out, NULL,
                   since);
    }
}


static void
note_scheduled(engine_t *engine, const plan_t *plan, uint64_t now)
{
    for (int i = 0; i < plan->n_rows; i++) {
        request_t *req = plan->rows[i].seq->owner;

        if (req->scheduled_ns == 0) {
            req->scheduled_ns = now;
            req->fresh = false;
            engine->n_fresh--;
        }
    }
}


static void
forward(engine_t *engine, const plan_t *rest, uint64_t *since)
{
    batch_t *batch = &engine->batch;

    batch_build(batch, rest);

    /* Forks first, in the plan's order: the last step's rows are all there,
     * and no row of this step is yet.  A source whose sequence lost its pages
     * to somebody in this same plan is intact, too: its page can only be
     * written by this forward pass, or by a copy that was planned later.  What
     * runs ahead writes behind the tokens that count in a page. */
    engine->ops->kv_copy(engine->dev, &engine->kv, batch->copies,
                         batch->n_copies);
    tally_phase(engine, LLM_PHASE_SCHEDULE, since);

    if (batch->op.n_rows > 0) {
        model_forward(engine->model, &batch->op, &engine->kv);
    }

    tally_phase(engine, LLM_PHASE_FORWARD, since);
}


/* A step of which nothing is drawn: nothing else would wait for it, and it
 * would seem to have taken no time. */
static void
await(engine_t *engine, uint64_t *since)
{
    uint32_t word;

    engine->ops->get(engine->dev, &word, engine->kv.base, sizeof(word));
    tally_phase(engine, LLM_PHASE_FORWARD, since);
    engine->results_ns = *since;
    device_failed(engine);
}


/* The rows of the batch and those that were computed ahead. */
static void
run_rows(engine_t *engine, const plan_t *plan, const batch_out_t *taken,
         int n_taken, uint64_t *since)
{
    const batch_out_t *outs = engine->batch.outs;
    const int n_out = engine->batch.op.n_out, most = engine->max_out;
    float *logits = NULL;
    int first = 0;

    for (; n_out - first > most && !engine->failed; first += most) {
        logits = begin_block(engine, first, most, since);
        emit_block(engine, outs + first, most, logits, since);
    }

    if (n_out > 0 && !engine->failed) {
        logits = begin_block(engine, first, n_out - first, since);
    }

    /* from here on the device has work while the host waits and writes */
    ahead_launch(engine, plan);
    emit_taken(engine, taken, n_taken, since);

    if (n_out > 0 && !engine->failed) {
        emit_block(engine, outs + first, n_out - first, logits, since);
    }
}


uint64_t
runner_step(engine_t *engine, const plan_t *plan)
{
    const uint64_t now = clock_now_ns(), before = engine->results_ns;
    const bool remote = draw_is_remote(engine), behind = engine->in_flight;
    const batch_out_t *taken = NULL;
    uint64_t since = now;
    plan_t rest;

    engine->in_flight = false;
    note_scheduled(engine, plan, now);

    const int n_taken = ahead_take(engine, plan, &rest, &taken);

    forward(engine, &rest, &since);
    run_rows(engine, plan, taken, n_taken, &since);

    if (!remote) {
        return since - now;
    }

    if (n_taken == 0 && engine->batch.op.n_out == 0) {
        await(engine, &since);
    }

    if (!behind) {
        return engine->results_ns - now;
    }

    return n_taken > 0 ? engine->results_ns - before : 0;
}
