/*
 * Searching a row of logits for a token, one thread block a row: the device
 * side of op.h's draw(), used by cuda_draw.cu alone.
 *
 * Nothing is sorted.  Candidates fall into bins by how far below the largest
 * logit they are, with a count and a sum of weights for each; the bin in which
 * a goal lies is listed, and each of the list finds out by itself how much is
 * before it.  Where a bin has more than fits the list (ties, flat rows), the
 * digits of its keys narrow it down.  Weights are integers, in units of 2^-34,
 * so sums do not depend on the order, and atomics may be used.
 *
 * A key puts candidates in their order: the larger logit, then the lower id.
 */

#ifndef KERNELS_CUDA_CUDA_DRAW_CUH
#define KERNELS_CUDA_CUDA_DRAW_CUH

#include <float.h>
#include <math.h>

#include "kernels/cuda/prim.cuh"

enum {
    DRAW_THREADS = 1024,
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
        for (int i = thread; i < DRAW_THREADS; i += 32) {
            sum += s->key[i];
        }

        s->weight[thread] = sum;
    }

    __syncthreads();
    sum = 0;

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
        for (int i = thread; i < DRAW_THREADS; i += 32) {
            value = min(value, s->key[i]);
        }

        s->weight[thread] = value;
    }

    __syncthreads();
    value = s->weight[0];

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
    float mine = -INFINITY;
    int at = 0;

#pragma unroll 4
    for (int i = (int) threadIdx.x; i < n; i += DRAW_THREADS) {
        const float v = x[i];

        if (v > mine) {
            mine = v;
            at = i;
        }
    }

    const draw_units_t least = draw_least(s, draw_key(mine, at));

    at = draw_id(least);
    *max = least < draw_key(-INFINITY, 0) ? x[at] : -INFINITY;

    return at;
}


/* --- bins --- */

/* Counts and sums of all bins; the sum of all. */
static __device__ draw_sum_t
draw_fill(draw_shared_t *s, const draw_row_t *row)
{
    const int thread = (int) threadIdx.x;
    draw_sum_t all, low = { 0, 0 }, high = { 0, 0 };

    __syncthreads();

    for (int i = thread; i < DRAW_BINS; i += DRAW_THREADS) {
        s->count[i] = 0;
        s->units[i] = 0;
    }

    __syncthreads();

#pragma unroll 4
    for (int i = thread; i < row->n; i += DRAW_THREADS) {
        const float x = row->x[i];

        if (!(x >= row->floor)) {
            continue;
        }

        const draw_units_t units = draw_weight_of(row, x);
        const int bin = draw_bin(row, x);

        /* most of a vocabulary, as a rule: no atomics */
        if (bin == DRAW_BINS - 1) {
            low.count++;
            low.units += units;
        } else {
            high.count++;
            high.units += units;
            atomicAdd(&s->count[bin], 1u);
            atomicAdd(&s->units[bin], units);
        }
    }

    low.count = (unsigned) draw_sum_all(s, low.count);
    low.units = draw_sum_all(s, low.units);
    all.count = (unsigned) draw_sum_all(s, high.count) + low.count;
    all.units = draw_sum_all(s, high.units) + low.units;

    if (thread == 0) {
        s->count[DRAW_BINS - 1] = low.count;
        s->units[DRAW_BINS - 1] = low.units;
    }

    __syncthreads();

    return all;
}


/* The sum of the weights alone. */
static __device__ draw_units_t
draw_sum(draw_shared_t *s, const draw_row_t *row)
{
    draw_units_t units = 0;

#pragma unroll 4
    for (int i = (int) threadIdx.x; i < row->n; i += DRAW_THREADS) {
        units += draw_weight_of(row, row->x[i]);
    }

    return draw_sum_all(s, units);
}


static __device__ __forceinline__ bool
draw_reached(const draw_sum_t *goal, const draw_sum_t *sum)
{
    return sum->count >= goal->count || sum->units >= goal->units;
}


/* Adds n bins one by one to *sum until the goal is reached.  Which one that
 * was, or the last that is not empty; *sum is what was before it. */
static __device__ int
draw_walk(const unsigned *count, const draw_units_t *units, int n,
          const draw_sum_t *goal, draw_sum_t *sum)
{
    draw_sum_t at = *sum;
    int pick = 0;

    for (int i = 0; i < n; i++) {
        if (count[i] == 0) {
            continue;
        }

        *sum = at;
        pick = i;
        at.count += count[i];
        at.units += units[i];

        if (draw_reached(goal, &at)) {
            break;
        }
    }

    return pick;
}


/* Of n bins the one in which the goal is reached, or the last that is not
 * empty, goes to s->found, and what is before it is added to s->before. */
static __device__ void
draw_find_bin(draw_shared_t *s, const unsigned *count,
              const draw_units_t *units, int n, const draw_sum_t *goal)
{
    const int thread = (int) threadIdx.x;
    const int size = n / DRAW_GROUPS;

    __syncthreads();

    if (thread < DRAW_GROUPS) {
        draw_sum_t sum = { 0, 0 };

        /* each begins elsewhere: other banks */
        for (int i = 0; i < size; i++) {
            const int bin = thread * size + (i + thread) % size;

            sum.count += count[bin];
            sum.units += units[bin];
        }

        s->group[thread] = sum;
    }

    __syncthreads();

    if (thread == 0) {
        draw_sum_t before = s->before, at = before;
        int pick = 0;

        for (int i = 0; i < DRAW_GROUPS; i++) {
            if (s->group[i].count == 0) {
                continue;
            }

            before = at;
            pick = i;
            at.count += s->group[i].count;
            at.units += s->group[i].units;

            if (draw_reached(goal, &at)) {
                break;
            }
        }

        pick *= size;
        pick += draw_walk(count + pick, units + pick, size, goal, &before);
        s->found = (draw_units_t) pick;
        s->before = before;
        s->n_here = count[pick];
    }

    __syncthreads();
}


/* --- searching --- */

/* The candidates of one bin whose keys begin with `prefix`, that is, without
 * their last `shift` bits. */
typedef struct {
    int bin;
    int shift;
    draw_units_t prefix;
} draw_part_t;


static __device__ __forceinline__ bool
draw_in_part(const draw_row_t *row, const draw_part_t *part, int i,
             draw_units_t *key)
{
    const float x = row->x[i];

    if (!(x >= row->floor) || draw_bin(row, x) != part->bin) {
        return false;
    }

    *key = draw_key(x, i);

    return *key >> part->shift == part->prefix;
}


/* The next digit of the part's keys. */
static __device__ void
draw_narrow(draw_shared_t *s, const draw_row_t *row, const draw_sum_t *goal,
            draw_part_t *part)
{
    const int thread = (int) threadIdx.x, shift = part->shift - 8;
    draw_units_t key;

    if (thread < DRAW_DIGITS) {
        s->digit_count[thread] = 0;
        s->digit_units[thread] = 0;
    }

    __syncthreads();

    for (int i = thread; i < row->n; i += DRAW_THREADS) {
        if (draw_in_part(row, part, i, &key)) {
            const unsigned digit = (unsigned) (key >> shift) % DRAW_DIGITS;

            atomicAdd(&s->digit_count[digit], 1u);
            atomicAdd(&s->digit_units[digit], draw_weight_of(row, row->x[i]));
        }
    }

    draw_find_bin(s, s->digit_count, s->digit_units, DRAW_DIGITS, goal);
    part->prefix = part->prefix << 8 | s->found;
    part->shift = shift;
}


/* The list, at most as many as threads, holds what s->before is before of.  Who
 * is at the goal, or else the last one, says so. */
static __device__ void
draw_rank(draw_shared_t *s, const draw_sum_t *goal)
{
    const unsigned thread = threadIdx.x, n = s->n_listed;
    draw_sum_t before = s->before, with;
    draw_units_t key = 0;

    if (thread < n) {
        const unsigned first = before.count;

        key = s->key[thread];

        for (unsigned i = 0; i < n; i++) {
            if (s->key[i] < key) {
                before.count++;
                before.units += s->weight[i];
            }
        }

        with.count = before.count + 1;
        with.units = before.units + s->weight[thread];

        const bool last = with.count == first + n;

        if (draw_reached(goal, &before) || !(last || draw_reached(goal, &with)))
        {
            key = 0;
        }
    }

    __syncthreads();

    if (thread < n && key != 0) {
        s->found = key;
        s->before = with;
    }

    __syncthreads();
}


/* The key at which the goal is reached, from the first candidate on in their
 * order, or that of the last one; *sum: up to it and with it.  The bins are
 * filled, not all empty, and stay. */
static __device__ draw_units_t
draw_find(draw_shared_t *s, const draw_row_t *row, const draw_sum_t *goal,
          draw_sum_t *sum)
{
    const int thread = (int) threadIdx.x;
    draw_part_t part = { 0, DRAW_KEY_BITS, 0 };
    draw_units_t key;

    __syncthreads();

    if (thread == 0) {
        s->before.count = 0;
        s->before.units = 0;
        s->n_listed = 0;
    }

    draw_find_bin(s, s->count, s->units, DRAW_BINS, goal);
    part.bin = (int) s->found;

    while (s->n_here > DRAW_LIST) {
        draw_narrow(s, row, goal, &part);
    }

    for (int i = thread; i < row->n; i += DRAW_THREADS) {
        if (draw_in_part(row, &part, i, &key)) {
            const unsigned at = atomicAdd(&s->n_listed, 1u);

            s->key[at] = key;
            s->weight[at] = draw_weight_of(row, row->x[i]);
        }
    }

    __syncthreads();
    draw_rank(s, goal);
    *sum = s->before;

    return s->found;
}

#endif /* KERNELS_CUDA_CUDA_DRAW_CUH */
