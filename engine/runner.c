/*
 * One step: build the batch, run the model over it, look at the rows that
 * matter.  Rows that sample draw the next token; rows of an echoed prompt are
 * scored.
 */

#include "engine/runner.h"

#include "engine/base/clock.h"
#include "engine/emit.h"


static void
runner_row(engine_t *engine, const batch_out_t *out, float *logits)
{
    request_t *req = out->seq->owner;
    samp_result_t result;

    if (!out->sample) {
        const int next = out->position + 1;

        samp_score(engine->samp, logits, req->seq.tokens[next],
                   req->samp.top_logprobs, &result);
        emit_prompt_score(engine, req, next, &result);
        return;
    }

    if (req->max_tokens == 0) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return;
    }

    samp_sample(engine->samp, &req->samp, req->samp_state, logits,
                req->n_output, (uint64_t) req->seq.n_tokens, &result);
    emit_token(engine, req, &result);
}


void
runner_step(engine_t *engine, const plan_t *plan)
{
    batch_t *batch = &engine->batch;
    const uint64_t now = clock_now_ns();
    int n;

    for (int i = 0; i < plan->n_rows; i++) {
        request_t *req = plan->rows[i].seq->owner;

        if (req->scheduled_ns == 0) {
            req->scheduled_ns = now;
        }
    }

    batch_build(batch, plan);

    /* Forks first, in the plan's order: the last step's rows are all there,
     * and no row of this step is yet.  A source whose sequence lost its pages
     * to somebody in this same plan is intact, too: its page can only be
     * written by this forward pass, or by a copy that was planned later. */
    engine->ops->kv_copy(engine->dev, &engine->kv, batch->copies,
                         batch->n_copies);
    model_forward(engine->model, &batch->op, &engine->kv);

    const int n_vocab = model_config(engine->model)->n_vocab;

    for (int first = 0; first < batch->op.n_out; first += n) {
        n = batch->op.n_out - first;
        n = n < engine->max_out ? n : engine->max_out;

        float *logits = model_logits(engine->model, first, n);

        for (int i = 0; i < n; i++) {
            runner_row(engine, &batch->outs[first + i],
                       logits + (size_t) i * (size_t) n_vocab);
        }
    }

    llm_stats_add(&engine->stats->steps, 1);
}
