/*
 * op.h's draw(): tokens and log-probabilities from rows of logits that are on
 * the device, with the bits of the host's sampler.  Only what was drawn is
 * copied to the host.
 *
 * One thread block has a row and goes over it as seldom as what is wanted
 * allows: once for the largest logit, once for sums of weights, once for each
 * goal that is searched (cuda_draw_find.cuh).
 */

#include "kernels/cuda/cuda_draw_find.cuh"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_dev.h"

/* a log-probability that means never, and no number, both as on the host */
#define LOGPROB_FLOOR -9999.0f
#define NO_NUMBER 0x7fc00000u

/* What all rows have in common. */
typedef struct {
    float *logits;
    int n_vocab;
    const op_draw_t *draws;
    const op_adjust_t *adjusts;
    float *was; /* logits before they were adjusted */
    op_drawn_t *drawn;
} call_t;

/* The raw row: what log-probabilities are taken of. */
typedef struct {
    float max;
    double log_sum;
} score_t;


/* --- log-probabilities --- */

static __device__ float
logprob_of(float x, const score_t *score)
{
    if (!(x > -INFINITY)) {
        return LOGPROB_FLOOR;
    }

    x = x < FLT_MAX ? x : FLT_MAX;

    const float logprob = (float) ((double) x - score->max - score->log_sum);

    return logprob > LOGPROB_FLOOR ? logprob : LOGPROB_FLOOR;
}


/* The best n_top of all, which are in the bins, into the result. */
static __device__ void
find_top(draw_shared_t *s, const draw_row_t *row, const score_t *score,
         int n_top, op_drawn_t *drawn)
{
    const draw_sum_t goal = { (unsigned) n_top, ~0ull };
    const unsigned thread = threadIdx.x;
    draw_sum_t sum;
    const draw_units_t last = draw_find(s, row, &goal, &sum);

    __syncthreads();

    if (thread == 0) {
        s->n_listed = 0;
    }

    __syncthreads();

    for (int i = (int) thread; i < row->n; i += DRAW_THREADS) {
        if (row->x[i] >= row->floor) {
            const draw_units_t key = draw_key(row->x[i], i);

            if (key <= last) {
                s->key[add_count(&s->n_listed, 1u)] = key;
            }
        }
    }

    __syncthreads();

    if (thread < s->n_listed) {
        const draw_units_t key = s->key[thread];
        const int token = draw_id(key);
        int rank = 0;

        for (unsigned i = 0; i < s->n_listed; i++) {
            rank += s->key[i] < key;
        }

        drawn->top[rank].token = token;
        drawn->top[rank].value = logprob_of(row->x[token], score);
    }

    if (thread == 0) {
        drawn->n_top = (int) s->n_listed;
    }
}


/* Sums over the raw row, whose largest logit is known.  All of it, if the bins
 * are filled. */
static __device__ draw_sum_t
score_row(draw_shared_t *s, const op_draw_t *draw, draw_row_t *row,
          score_t *score, op_drawn_t *drawn)
{
    const int n_top = draw->n_top < OP_TOP_MAX ? draw->n_top : OP_TOP_MAX;
    draw_sum_t all = { 0, 0 };

    /* a row without any logit: all of it practically never */
    row->max = row->max > -FLT_MAX ? row->max : -FLT_MAX;
    row->max = row->max < FLT_MAX ? row->max : FLT_MAX;
    row->temperature = 1.0f;
    row->floor = -FLT_MAX;
    row->scale = DRAW_BINS / DRAW_BIN_DEPTH;

    if (n_top > 0) {
        all = draw_fill(s, row);
    } else {
        all.units = draw_sum(s, row);
    }

    score->max = row->max;
    score->log_sum =
        all.units > 0 ? draw_log((double) all.units / 17179869184.0) : 0.0;

    if (n_top > 0 && all.count > 0) {
        find_top(s, row, score, n_top, drawn);
    }

    all.count = n_top > 0 ? all.count : 0;

    return all;
}


/* --- adjusting --- */

/* Bias of a token that is named again goes to it in the list's order: by the
 * thread of the first. */
static __device__ void
add_bias(float *x, int n, const op_adjust_t *list, int n_bias)
{
    for (int i = (int) threadIdx.x; i < n_bias; i += DRAW_THREADS) {
        const int token = list[i].token;
        int j = 0;

        while (j < i && list[j].token != token) {
            j++;
        }

        if (j < i || token < 0 || token >= n) {
            continue;
        }

        float sum = x[token] + list[i].value;

        for (j = i + 1; j < n_bias; j++) {
            if (list[j].token == token) {
                sum += list[j].value;
            }
        }

        x[token] = sum;
    }
}


static __device__ float
penalized(const op_draw_t *draw, float x, float times)
{
    x = x > 0.0f ? x / draw->repetition : x * draw->repetition;

    if (times > 0.0f) {
        x -= draw->frequency * times;
        x -= draw->presence;
    }

    return x;
}


/* was: as long as the row's adjustments. */
static __device__ void
adjust(const op_draw_t *draw, float *x, int n, const op_adjust_t *list,
       float *was)
{
    const int thread = (int) threadIdx.x;
    const int masks = draw->n_bias, seen = masks + draw->n_masked;
    const int end = seen + draw->n_seen;

    __syncthreads();

    for (int i = thread; i < end; i += DRAW_THREADS) {
        const int token = list[i].token;

        was[i] = token >= 0 && token < n ? x[token] : 0.0f;
    }

    __syncthreads();
    add_bias(x, n, list, draw->n_bias);
    __syncthreads();

    for (int i = masks + thread; i < seen; i += DRAW_THREADS) {
        if (list[i].token >= 0 && list[i].token < n) {
            store_same(&x[list[i].token], -INFINITY); /* some come twice */
        }
    }

    __syncthreads();

    for (int i = seen + thread; i < end; i += DRAW_THREADS) {
        const int token = list[i].token;

        if (token >= 0 && token < n) {
            x[token] = penalized(draw, x[token], list[i].value);
        }
    }

    __syncthreads();
}


/* The logit that a token had: all entries of a token know it. */
static __device__ float
raw_logit(draw_shared_t *s, int token, float x, const op_adjust_t *list,
          const float *was, int n_adjusts)
{
    draw_units_t first = (draw_units_t) n_adjusts;

    for (int i = (int) threadIdx.x; i < n_adjusts; i += DRAW_THREADS) {
        if (list[i].token == token) {
            first = (draw_units_t) i;
            break;
        }
    }

    first = draw_least(s, first);

    return first < (draw_units_t) n_adjusts ? was[first] : x;
}


/* --- drawing --- */

/* The least sum of weights that reaches (above: exceeds) a share of a sum. */
static __device__ draw_units_t
share_of(draw_units_t sum, float share, bool above)
{
    const double goal = (double) sum * share;

    if (!(goal > 0.0)) {
        return 1; /* the first has some */
    }

    return (draw_units_t) (above ? floor(goal) + 1.0 : ceil(goal));
}


/* max is finite.  all: what is in the bins by score_row() where nothing was
 * adjusted since: they may do. */
static __device__ int
draw_token(draw_shared_t *s, const op_draw_t *draw, draw_row_t *row,
           draw_sum_t all)
{
    const float floor = row->max + draw->depth * draw->temperature;
    draw_units_t key = 0;

    /* below the depth of no weight there is nothing to draw either way */
    if (all.count == 0 || draw->temperature != 1.0f
        || draw->depth > DRAW_NO_WEIGHT) {
        row->temperature = draw->temperature;
        row->floor = floor >= -FLT_MAX ? floor : -FLT_MAX;
        row->scale = DRAW_BINS / (DRAW_BIN_DEPTH * draw->temperature);
        all = draw_fill(s, row);
    }

    /* top_k, top_p, the draw: each a share of what the one before left */
#pragma unroll 1
    for (int step = 0; step < 3; step++) {
        draw_sum_t goal = { ~0u, ~0ull };

        if (step == 2) {
            goal.units = share_of(all.units, draw->u, true);
        } else if (step == 1 && draw->top_p < 1.0f) {
            goal.units = share_of(all.units, draw->top_p, false);
        } else if (step == 0 && draw->top_k > 0
                   && (unsigned) draw->top_k < all.count) {
            goal.count = (unsigned) draw->top_k;
        } else {
            continue;
        }

        key = draw_find(s, row, &goal, &all);
    }

    return draw_id(key);
}


__global__ void
__launch_bounds__(DRAW_THREADS, 1) draw_rows(const call_t call)
{
    __shared__ draw_shared_t shared;
    draw_shared_t *s = &shared;
    const op_draw_t *draw = &call.draws[blockIdx.x];
    op_drawn_t *drawn = &call.drawn[blockIdx.x];
    float *x = call.logits + (size_t) draw->row * call.n_vocab;
    const op_adjust_t *list = call.adjusts + draw->adjusts;
    float *was = call.was + draw->adjusts;
    const int n_adjusts = draw->n_bias + draw->n_masked + draw->n_seen;
    const bool scored = draw->n_top >= 0;
    draw_row_t row = { x, call.n_vocab, -INFINITY, 1.0f, 0.0f, 0.0f };
    score_t score = { 0.0f, 0.0 };
    draw_sum_t all = { 0, 0 };
    int token = draw->token;

    if (threadIdx.x == 0) {
        drawn->n_top = 0;
    }

    int first = draw_largest(s, x, row.n, &row.max);

    if (scored || draw->kind == OP_SCORE) {
        const float max = row.max;

        all = score_row(s, draw, &row, &score, drawn);
        row.max = max;
    }

    if (draw->kind == OP_DRAW) {
        if (n_adjusts > 0) {
            adjust(draw, x, row.n, list, was);
            first = draw_largest(s, x, row.n, &row.max);
            all.count = 0;
        }

        /* written so that NaN is greedy, too */
        token = draw->temperature > 0.0f && row.max >= -FLT_MAX
                        && row.max <= FLT_MAX
                    ? draw_token(s, draw, &row, all)
                    : first;
    }

    const bool there = token >= 0 && token < row.n;
    float raw = there ? x[token] : 0.0f;

    if (scored && draw->kind == OP_DRAW && n_adjusts > 0) {
        raw = raw_logit(s, token, raw, list, was, n_adjusts);
    }

    if (threadIdx.x == 0) {
        drawn->token = token;
        drawn->logprob = there && (scored || draw->kind == OP_SCORE)
                             ? logprob_of(raw, &score)
                             : __uint_as_float(NO_NUMBER);
    }
}


/* --- the op --- */

static size_t
rows_bytes(int n)
{
    return ((size_t) n * sizeof(op_draw_t) + 15) / 16 * 16;
}


void
cuda_draw_free(op_dev_t *dev)
{
    cuda_draw_t *d = &dev->draw;
    const size_t places = (size_t) d->limits.max_places;

    cuda_stage_destroy(dev, &d->stage);
    cuda_free(dev, d->was, (size_t) d->limits.max_adjusts * sizeof(float));
    cuda_free(dev, d->drawn, places * sizeof(op_drawn_t));

    if (d->host != NULL) {
        cudaFreeHost(d->host);
    }

    for (int i = 0; i < CUDA_DRAWS; i++) {
        if (d->there[i] != NULL) {
            cudaEventDestroy(d->there[i]);
        }
    }

    free(d->call);
    memset(d, 0, sizeof(*d));
}


/* Everything but the limits. */
static bool
reserve(op_dev_t *dev, cuda_draw_t *d)
{
    const size_t rows = rows_bytes(d->limits.max_rows);
    const size_t places = (size_t) d->limits.max_places;
    const size_t adjusts = (size_t) d->limits.max_adjusts;

    d->call = (uint8_t *) calloc(places, 1);

    if (d->call == NULL) {
        dev->lacking = "memory on the host";
        return false;
    }

    d->was = (float *) cuda_alloc(dev, adjusts * sizeof(float));
    d->drawn =
        d->was == NULL
            ? NULL
            : (op_drawn_t *) cuda_alloc(dev, places * sizeof(op_drawn_t));

    bool done = d->drawn != NULL
                && cuda_stage_create(
                       dev, &d->stage, rows + adjusts * sizeof(op_adjust_t),
                       CUDA_TURNS + d->limits.max_places / d->limits.max_rows)
                       == 0;

    if (done) {
        d->host =
            (op_drawn_t *) cuda_alloc_host(dev, places * sizeof(op_drawn_t));
        done = d->host != NULL;
    }

    for (int i = 0; i < CUDA_DRAWS && done; i++) {
        done = cuda_event(dev, &d->there[i]);
    }

    return done;
}


int
cuda_draw_prepare(op_dev_t *dev, const op_draw_limits_t *limits, op_err_t *err)
{
    assert(limits->n_vocab > 0 && limits->n_vocab <= OP_VOCAB_MAX
           && limits->max_rows > 0 && limits->max_adjusts >= 0
           && limits->max_places >= limits->max_rows);
    cuda_enter(dev);
    cuda_draw_free(dev);
    dev->draw.limits = *limits;

    if (!reserve(dev, &dev->draw)) {
        cuda_draw_free(dev);
        cuda_lacks(dev, err, "to draw %d tokens at once", limits->max_rows);
        return -1;
    }

    return 0;
}


/* Draws and adjustments on the device, at *draws and *adjusts. */
static bool
send_draws(op_dev_t *dev, const op_draw_job_t *job, const op_draw_t **draws,
           const op_adjust_t **adjusts)
{
    cuda_stage_t *stage = &dev->draw.stage;
    const size_t rows = rows_bytes(job->n);
    const size_t more = (size_t) job->n_adjusts * sizeof(op_adjust_t);

    if (!cuda_stage_take(dev, stage)) {
        return false;
    }

    memcpy(stage->host, job->draws, (size_t) job->n * sizeof(op_draw_t));

    if (more > 0) {
        memcpy(stage->host + rows, job->adjusts, more);
    }

    *draws = (const op_draw_t *) stage->device;
    *adjusts = (const op_adjust_t *) (stage->device + rows);

    return cuda_stage_send(dev, stage, rows + more);
}


void
cuda_draw(op_dev_t *dev, const op_draw_job_t *job)
{
    cuda_draw_t *d = &dev->draw;
    const size_t n = (size_t) job->n, first = (size_t) job->first;
    call_t call = { job->logits, d->limits.n_vocab, NULL, NULL,
                    d->was,      d->drawn + first };

    assert(job->n <= d->limits.max_rows && job->first >= 0
           && job->first + job->n <= d->limits.max_places
           && job->n_adjusts <= d->limits.max_adjusts);

    if (dev->failed || job->n == 0
        || !send_draws(dev, job, &call.draws, &call.adjusts))
    {
        return;
    }

    LAUNCH(draw_rows, (unsigned) job->n, DRAW_THREADS, 0, dev->stream, call);
    cuda_ok(dev, cudaGetLastError(), "draw");
    cuda_ok(dev,
            cudaMemcpyAsync(d->host + first, d->drawn + first,
                            n * sizeof(op_drawn_t), cudaMemcpyDeviceToHost,
                            dev->stream),
            "copying to the host");

    d->n_calls++;
    cuda_ok(dev,
            cudaEventRecord(d->there[d->n_calls % CUDA_DRAWS], dev->stream),
            "draw");
    memset(d->call + first, (int) (d->n_calls % CUDA_DRAWS), n);
}


/* A later call of the same event waits longer, and is right, too. */
void
cuda_drawn(op_dev_t *dev, op_drawn_t *results, int first, int n)
{
    const cuda_draw_t *d = &dev->draw;

    assert(first >= 0 && n >= 0 && first + n <= d->limits.max_places);
    cuda_enter(dev);

    for (int i = first; i < first + n && !dev->failed; i++) {
        if (i == first || d->call[i] != d->call[i - 1]) {
            cuda_ok(dev, cudaEventSynchronize(d->there[d->call[i]]),
                    "running a step");
        }
    }

    if (!dev->failed) {
        memcpy(results, d->host + first, (size_t) n * sizeof(op_drawn_t));
    }
}
