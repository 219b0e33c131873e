/*
 * What drawing from a row of logits is made of: weights and keys with the bits
 * of the host's sampler, what the threads of a block share, and reductions over
 * them.  cuda_draw_find.cuh searches with it.
 *
 * Weights are integers, in units of 2^-34, so sums do not depend on the order,
 * and atomics may be used.  A key puts candidates in their order: the larger
 * logit, then the lower id.
 */

#ifndef KERNELS_CUDA_CUDA_DRAW_CUH
#define KERNELS_CUDA_CUDA_DRAW_CUH

#include <float.h>
#include <math.h>

#include "kernels/cuda/prim.cuh"

enum {
    DRAW_THREADS = 512,
    DRAW_BATCH = 4,   /* values that a thread asks for at once */
    DRAW_BINS = 1024, /* the last: all that is further down */
    DRAW_DIGITS = 256,
    DRAW_GROUPS = 32, /* of bins, in a search */
    DRAW_LIST = 512,
    DRAW_ID_BITS = 20,
    DRAW_KEY_BITS = 32 + DRAW_ID_BITS
};

/* depths that the bins divide; e^-16 of the largest weight is rarely drawn */
#define DRAW_BIN_DEPTH 16.0f

/* the host sampler's: a float's exponent ends here, weights end before */
#define DRAW_EXP_FLOOR -87.0f
#define DRAW_NO_WEIGHT -25.0f

typedef unsigned long long draw_units_t; /* also keys */

/* How much there is: candidates, and their weights. */
typedef struct {
    unsigned count;
    draw_units_t units;
} draw_sum_t;

/* What the threads of a block share. */
typedef struct {
    unsigned count[DRAW_BINS];
    draw_units_t units[DRAW_BINS];
    unsigned digit_count[DRAW_DIGITS];
    draw_units_t digit_units[DRAW_DIGITS];
    draw_sum_t group[DRAW_GROUPS];
    draw_units_t key[DRAW_THREADS]; /* the list; scratch of reductions */
    draw_units_t weight[DRAW_LIST];
    unsigned n_listed;
    unsigned n_here;    /* candidates in the bin that was found */
    draw_units_t found; /* a bin, or the key at the goal */
    draw_sum_t before; /* the bin; with the candidate at the goal, in the end */
} draw_shared_t;

/* A row with its candidates: x ≥ floor. */
typedef struct {
    const float *x;
    int n;
    float max;
    float temperature;
    float floor;
    float scale; /* from max − x to a bin */
} draw_row_t;


/* --- numbers --- */

/* e^x in units: the host's formula, and its rounding to 2^-34. */
static __device__ __forceinline__ draw_units_t
draw_weight(float x)
{
    const float shift = 12582912.0f;

    x = x > DRAW_EXP_FLOOR ? x : DRAW_EXP_FLOOR;
    x = x < 0.0f ? x : 0.0f;

    const float biased = x * 1.44269504f + shift;
    const float k = biased - shift;
    const float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float y = 1.0f / 5040;

    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    y *= __uint_as_float((__float_as_uint(biased) + 127) << 23);

    return (draw_units_t) llrintf(y * 17179869184.0f);
}


/* The host's logarithm, of x ≥ 1.  Halving is exact, as taking bits is. */
static __device__ double
draw_log(double x)
{
    int k = 0;

    while (x >= 2.0) {
        x *= 0.5;
        k++;
    }

    if (x > 1.4142135623730951) {
        x *= 0.5;
        k++;
    }

    const double s = (x - 1.0) / (x + 1.0);
    const double s2 = s * s;
    double sum = 0.0;

#pragma unroll 1
    for (int i = 23; i >= 1; i -= 2) {
        sum = sum * s2 + 1.0 / i;
    }

    return 2.0 * s * sum + k * 0.6931471805599453;
}


static __device__ __forceinline__ draw_units_t
draw_key(float x, int id)
{
    const unsigned bits = __float_as_uint(x + 0.0f); /* −0 and 0 are a tie */
    const unsigned down =
        (bits & 0x80000000u) != 0 ? bits : ~(bits | 0x80000000u);

    return (draw_units_t) down << DRAW_ID_BITS | (unsigned) id;
}


static __device__ __forceinline__ int
draw_id(draw_units_t key)
{
    return (int) (key & ((1u << DRAW_ID_BITS) - 1));
}


static __device__ __forceinline__ draw_units_t
draw_weight_of(const draw_row_t *row, float x)
{
    return draw_weight((x - row->max) / row->temperature);
}


/* Never falls as x falls, which is all that is asked of it: an infinite scale
 * puts all into the last bin. */
static __device__ __forceinline__ int
draw_bin(const draw_row_t *row, float x)
{
    const float at = (row->max - x) * row->scale;

    if (!(at < DRAW_BINS - 1)) {
        return DRAW_BINS - 1;
    }

    return at > 0.0f ? (int) at : 0;
}


/* The thread's next values of a row, from its `first` on; behind the end there
 * is no number.  All are asked for before one is looked at. */
static __device__ __forceinline__ void
draw_load(const float *x, int n, int first, float *values)
{
#pragma unroll
    for (int j = 0; j < DRAW_BATCH; j++) {
        const int i = first + j * DRAW_THREADS;

        values[j] = i < n ? x[i] : NAN;
    }
}


/* --- reductions: all threads, all get the result --- */

static __device__ draw_units_t
draw_sum_all(draw_shared_t *s, draw_units_t value)
{
    const int thread = (int) threadIdx.x;
    draw_units_t sum = 0;

    __syncthreads(); /* whoever read what is there has done so */
    s->key[thread] = value;
    __syncthreads();

    if (thread < 32) {
#pragma unroll 4
        for (int i = thread; i < DRAW_THREADS; i += 32) {
            sum += s->key[i];
        }

        s->weight[thread] = sum;
    }

    __syncthreads();
    sum = 0;

#pragma unroll 4
    for (int i = 0; i < 32; i++) {
        sum += s->weight[i];
    }

    return sum;
}


static __device__ draw_units_t
draw_least(draw_shared_t *s, draw_units_t value)
{
    const int thread = (int) threadIdx.x;

    __syncthreads();
    s->key[thread] = value;
    __syncthreads();

    if (thread < 32) {
#pragma unroll 4
        for (int i = thread; i < DRAW_THREADS; i += 32) {
            value = min(value, s->key[i]);
        }

        s->weight[thread] = value;
    }

    __syncthreads();
    value = s->weight[0];

#pragma unroll 4
    for (int i = 1; i < 32; i++) {
        value = min(value, s->weight[i]);
    }

    return value;
}


/* The first token with the largest logit, which goes to *max; 0 and −∞ when
 * there is none. */
static __device__ int
draw_largest(draw_shared_t *s, const float *x, int n, float *max)
{
    float mine = -INFINITY, v[DRAW_BATCH];
    int at = 0;

    for (int i = (int) threadIdx.x; i < n; i += DRAW_BATCH * DRAW_THREADS) {
        draw_load(x, n, i, v);

#pragma unroll
        for (int j = 0; j < DRAW_BATCH; j++) {
            if (v[j] > mine) {
                mine = v[j];
                at = i + j * DRAW_THREADS;
            }
        }
    }

    const draw_units_t least = draw_least(s, draw_key(mine, at));

    at = draw_id(least);
    *max = least < draw_key(-INFINITY, 0) ? x[at] : -INFINITY;

    return at;
}

#endif /* KERNELS_CUDA_CUDA_DRAW_CUH */
