/*
 * Rows of logits → drawn tokens and scores.  Called by runner.c.
 *
 * On the host the backend's threads share the rows: a draw reads the engine's
 * state and writes its row and its result only.  For a backend that draws
 * itself all rows of a block are described and handed over at once, in several
 * calls if what they adjust does not fit one.
 */

#include "engine/draw.h"

#include <stdlib.h>
#include <string.h>

#include "engine/ahead.h"
#include "engine/sample/logits.h"
#include "engine/sample/math.h"
#include "engine/sample/rng.h"

_Static_assert((int) SAMP_TOP_MAX == (int) OP_TOP_MAX, "as many alternatives");
_Static_assert((int) MATH_WEIGHTS_MAX == (int) OP_VOCAB_MAX, "as many tokens");

/* Draws for the backend that wait for one call. */
struct draw_queue_s {
    op_draw_t *draws;
    op_drawn_t *drawn; /* [max_out] scratch */
    int n;
    int first; /* place of the first of them */
    op_adjust_t *adjusts;
    int n_adjusts;
    int max_adjusts;
    float *row; /* [n_vocab] of the host, for what does not fit */
};

typedef struct {
    const engine_t *engine;
    const batch_out_t *outs;
    float *logits;
    int n;
} host_job_t;


bool
draw_is_remote(const engine_t *engine)
{
    return engine->ops->draw != NULL;
}


bool
draw_waits(const batch_out_t *out)
{
    const request_t *req = out->seq->owner;

    return out->verify && req->samp_state != NULL
           && out->position > out->seq->executed;
}


/* --- on the host --- */

static void
host_row(samp_t *samp, const batch_out_t *out, float *logits,
         samp_result_t *result)
{
    const request_t *req = out->seq->owner;

    if (!out->sample) {
        samp_score(samp, logits, req->seq.tokens[out->position + 1],
                   req->samp.top_logprobs, result);
        return;
    }

    if (req->max_tokens > 0) {
        const int position = out->position + 1; /* of the token */

        samp_sample(samp, &req->samp, req->samp_state, logits,
                    position - req->seq.n_prompt, (uint64_t) position, result);
    }
}


/* Rows in turn: neighbours often want the same kind of work. */
static void
host_share(void *arg, int share, int n_shares)
{
    const host_job_t *job = arg;
    const engine_t *engine = job->engine;
    const size_t n_vocab = (size_t) model_config(engine->model)->n_vocab;
    const int n = n_shares < engine->n_samplers ? n_shares : engine->n_samplers;

    for (int i = share; share < n && i < job->n; i += n) {
        if (!draw_waits(&job->outs[i])) {
            host_row(engine->samplers[share], &job->outs[i],
                     job->logits + (size_t) i * n_vocab, &engine->results[i]);
        }
    }
}


static void
host_block(host_job_t *job)
{
    const engine_t *engine = job->engine;

    if (job->n > 1 && engine->n_samplers > 1) {
        engine->ops->parallel(engine->dev, host_share, job);
    } else {
        host_share(job, 0, 1);
    }
}


/* --- by the backend --- */

int
draw_adjusts(const samp_params_t *params, const samp_state_t *state,
             int n_output)
{
    const int32_t *seen, *count;

    return params->n_bias
           + (n_output < params->min_tokens ? params->n_masked : 0)
           + (state != NULL ? logits_seen(state, &seen, &count) : 0);
}


bool
draw_fits(const engine_t *engine, const samp_params_t *params,
          const samp_state_t *state, int n_output)
{
    return params->n_bias <= OP_BIAS_MAX
           && draw_adjusts(params, state, n_output)
                  <= engine->draws->max_adjusts;
}


void
draw_describe(const samp_params_t *params, const samp_state_t *state,
              int n_output, uint64_t position, op_draw_t *draw,
              op_adjust_t *list)
{
    const int32_t *seen, *count;

    *draw = (op_draw_t){
        .kind = OP_DRAW,
        .n_top = params->top_logprobs,
        .top_k = params->top_k,
        .top_p = params->top_p,
        .temperature = params->temperature,
        .depth = samp_depth(params),
        .u = rng_uniform(params->seed, position),
        .repetition = params->repetition_penalty,
        .presence = params->presence_penalty,
        .frequency = params->frequency_penalty,
        .n_bias = params->n_bias,
        .n_masked = n_output < params->min_tokens ? params->n_masked : 0,
        .n_seen = state != NULL ? logits_seen(state, &seen, &count) : 0,
    };

    for (int i = 0; i < draw->n_bias; i++) {
        *list++ = (op_adjust_t){ params->bias[i].token, params->bias[i].bias };
    }

    for (int i = 0; i < draw->n_masked; i++) {
        *list++ = (op_adjust_t){ params->masked[i], 0.0f };
    }

    for (int i = 0; i < draw->n_seen; i++) {
        /* none, in the output, of a token of the prompt alone */
        *list++ = (op_adjust_t){ seen[i], (float) (count[seen[i]] - 1) };
    }
}


void
draw_result(const op_drawn_t *drawn, samp_result_t *result)
{
    result->token = drawn->token;
    result->logprob = drawn->logprob;
    result->n_top = drawn->n_top;

    for (int i = 0; i < drawn->n_top; i++) {
        result->top[i] =
            (samp_logprob_t){ drawn->top[i].token, drawn->top[i].value };
    }
}


/* Has the backend draw what waits. */
static void
flush(engine_t *engine, float *logits)
{
    draw_queue_t *queue = engine->draws;
    const op_draw_job_t job = { .logits = logits,
                                .draws = queue->draws,
                                .n = queue->n,
                                .adjusts = queue->adjusts,
                                .n_adjusts = queue->n_adjusts,
                                .first = queue->first };

    if (queue->n > 0) {
        engine->ops->draw(engine->dev, &job);
    }

    queue->first += queue->n;
    queue->n = 0;
    queue->n_adjusts = 0;
}


/* A row whose adjustments are more than the backend takes. */
static void
fetch_row(engine_t *engine, const batch_out_t *out, const float *logits,
          samp_result_t *result)
{
    const size_t n_vocab = (size_t) model_config(engine->model)->n_vocab;

    engine->ops->get(engine->dev, engine->draws->row, logits,
                     n_vocab * sizeof(float));
    host_row(engine->samplers[0], out, engine->draws->row, result);
}


/* Row i waits for the next call. */
static void
queue_row(engine_t *engine, batch_out_t *out, float *logits, int i)
{
    const size_t n_vocab = (size_t) model_config(engine->model)->n_vocab;
    const request_t *req = out->seq->owner;
    const int position = out->position + 1; /* of the token */
    const int n_output = position - req->seq.n_prompt;
    draw_queue_t *queue = engine->draws;
    const int n_adjusts =
        out->sample ? draw_adjusts(&req->samp, req->samp_state, n_output) : 0;

    out->place = -1;

    if (out->sample && req->max_tokens == 0) {
        return;
    }

    if (out->sample
        && !draw_fits(engine, &req->samp, req->samp_state, n_output)) {
        fetch_row(engine, out, logits + (size_t) i * n_vocab,
                  &engine->results[i]);
        return;
    }

    if (n_adjusts > queue->max_adjusts - queue->n_adjusts) {
        flush(engine, logits);
    }

    op_draw_t *draw = &queue->draws[queue->n];

    if (out->sample) {
        draw_describe(&req->samp, req->samp_state, n_output,
                      (uint64_t) position, draw,
                      queue->adjusts + queue->n_adjusts);
    } else {
        *draw = (op_draw_t){ .kind = OP_SCORE,
                             .token = req->seq.tokens[position],
                             .n_top = req->samp.top_logprobs };
    }

    draw->row = i;
    draw->adjusts = queue->n_adjusts;
    queue->n_adjusts += n_adjusts;
    out->place = queue->first + queue->n++;
}


/* What is at the places of outs. */
static void
fetch_results(engine_t *engine, const batch_out_t *outs, int n)
{
    op_drawn_t *drawn = engine->draws->drawn;
    int end;

    for (int i = 0; i < n; i = end) {
        end = i + 1;

        if (outs[i].place < 0) {
            continue;
        }

        while (end < n && outs[end].place == outs[i].place + end - i) {
            end++;
        }

        engine->ops->drawn(engine->dev, drawn, outs[i].place, end - i);

        for (int k = i; k < end; k++) {
            draw_result(&drawn[k - i], &engine->results[k]);
        }
    }
}


/* --- either --- */

void
draw_begin(engine_t *engine, batch_out_t *outs, float *logits, int n, int first)
{
    if (!draw_is_remote(engine)) {
        host_job_t job = {
            .engine = engine, .outs = outs, .logits = logits, .n = n
        };

        host_block(&job);
        return;
    }

    engine->draws->first = first;

    for (int i = 0; i < n; i++) {
        if (!draw_waits(&outs[i])) {
            queue_row(engine, &outs[i], logits, i);
        }
    }

    flush(engine, logits);
}


void
draw_end(engine_t *engine, const batch_out_t *outs, int n)
{
    if (draw_is_remote(engine)) {
        fetch_results(engine, outs, n);
    }
}


void
draw_late(engine_t *engine, const batch_out_t *out, float *logits, int i)
{
    const size_t n_vocab = (size_t) model_config(engine->model)->n_vocab;
    batch_out_t late = *out;

    if (!draw_is_remote(engine)) {
        host_row(engine->samplers[0], out, logits + (size_t) i * n_vocab,
                 &engine->results[i]);
        return;
    }

    engine->draws->first = 0;
    queue_row(engine, &late, logits, i);
    flush(engine, logits);

    if (late.place >= 0) {
        engine->ops->drawn(engine->dev, engine->draws->drawn, late.place, 1);
        draw_result(engine->draws->drawn, &engine->results[i]);
    }
}


/* --- opening --- */

/* All of a context may have been seen, and more in a call where rows have less:
 * what does not fit one goes with the next. */
static int
max_adjusts(const engine_t *engine)
{
    const int n_vocab = model_config(engine->model)->n_vocab;
    const int most =
        engine->max_model_len < n_vocab ? engine->max_model_len : n_vocab;

    return most + 4 * OP_BIAS_MAX + engine->max_out * (OP_BIAS_MAX / 4);
}


int
draw_reserve(engine_t *engine, llm_err_t *err)
{
    if (!draw_is_remote(engine)) {
        return LLM_OK;
    }

    const size_t n = (size_t) engine->max_out;
    const op_draw_limits_t limits = {
        .n_vocab = model_config(engine->model)->n_vocab,
        .max_rows = engine->max_out,
        .max_places = engine->max_out + ahead_places(&engine->conf),
        .max_adjusts = max_adjusts(engine),
    };
    op_err_t op_err;
    draw_queue_t *queue = calloc(1, sizeof(*queue));

    if (queue == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for draws");
    }

    engine->draws = queue;

    if (engine->ops->draw_prepare(engine->dev, &limits, &op_err) != 0) {
        return llm_err_set(err, LLM_NOMEM, NULL, "%s", op_err.text);
    }

    queue->max_adjusts = limits.max_adjusts;
    queue->draws = calloc(n, sizeof(op_draw_t));
    queue->drawn = calloc(n, sizeof(op_drawn_t));
    queue->adjusts = calloc((size_t) limits.max_adjusts, sizeof(op_adjust_t));
    queue->row = calloc((size_t) limits.n_vocab, sizeof(float));

    return queue->draws != NULL && queue->drawn != NULL
                   && queue->adjusts != NULL && queue->row != NULL
               ? LLM_OK
               : llm_err_set(err, LLM_NOMEM, NULL, "no memory for draws");
}


int
draw_open(engine_t *engine, llm_err_t *err)
{
    bool samplers = true;

    for (int i = 0; i < engine->n_samplers && samplers; i++) {
        engine->samplers[i] = samp_create(model_config(engine->model)->n_vocab);
        samplers = engine->samplers[i] != NULL;
    }

    engine->results = calloc((size_t) engine->max_out, sizeof(samp_result_t));

    if (!samplers || engine->results == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for samplers");
    }

    return LLM_OK;
}


void
draw_close(engine_t *engine)
{
    draw_queue_t *queue = engine->draws;

    for (int i = 0; i < engine->n_samplers; i++) {
        samp_destroy(engine->samplers[i]);
    }

    free(engine->results);

    if (queue == NULL) {
        return;
    }

    free(queue->draws);
    free(queue->drawn);
    free(queue->adjusts);
    free(queue->row);
    free(queue);
}
