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


/* Rows first … first + n − 1 of those that are looked at.  What a backend draws
 * is a part of its pass, and so is the wait for it. */
static void
run_block(engine_t *engine, int first, int n, uint64_t *since)
{
    const batch_out_t *outs = &engine->batch.outs[first];
    const bool remote = draw_is_remote(engine);
    float *logits = remote ? model_logits_at(engine->model, first, n)
                           : model_logits(engine->model, first, n);

    tally_phase(engine, LLM_PHASE_FORWARD, since);
    draw_block(engine, outs, logits, n);
    tally_phase(engine, remote ? LLM_PHASE_FORWARD : LLM_PHASE_SAMPLE, since);

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


void
runner_step(engine_t *engine, const plan_t *plan)
{
    batch_t *batch = &engine->batch;
    const uint64_t now = clock_now_ns();
    uint64_t since = now;
    int n;

    for (int i = 0; i < plan->n_rows; i++) {
        request_t *req = plan->rows[i].seq->owner;

        if (req->scheduled_ns == 0) {
            req->scheduled_ns = now;
            req->fresh = false;
            engine->n_fresh--;
        }
    }

    batch_build(batch, plan);

    /* Forks first, in the plan's order: the last step's rows are all there,
     * and no row of this step is yet.  A source whose sequence lost its pages
     * to somebody in this same plan is intact, too: its page can only be
     * written by this forward pass, or by a copy that was planned later. */
    engine->ops->kv_copy(engine->dev, &engine->kv, batch->copies,
                         batch->n_copies);
    tally_phase(engine, LLM_PHASE_SCHEDULE, &since);
    model_forward(engine->model, &batch->op, &engine->kv);
    tally_phase(engine, LLM_PHASE_FORWARD, &since);

    for (int first = 0; first < batch->op.n_out && !engine->failed; first += n)
    {
        n = batch->op.n_out - first;
        n = n < engine->max_out ? n : engine->max_out;

        run_block(engine, first, n, &since);
    }
}
