/*
 * Searching a row of logits for a token, one thread block a row: the device
 * side of op.h's draw(), used by cuda_draw.cu alone.
 *
 * Nothing is sorted.  Candidates fall into bins by how far below the largest
 * logit they are, with a count and a sum of weights for each; the bin in which
 * a goal lies is listed, and each of the list finds out by itself how much is
 * before it.  Where a bin has more than fits the list (ties, flat rows), the
 * digits of its keys narrow it down.
 */

#ifndef KERNELS_CUDA_CUDA_DRAW_FIND_CUH
#define KERNELS_CUDA_CUDA_DRAW_FIND_CUH

#include "kernels/cuda/cuda_draw.cuh"


/* --- bins --- */

/* Puts a candidate into its bin; *low is the last one's. */
static __device__ __forceinline__ void
draw_put(draw_shared_t *s, const draw_row_t *row, float x, draw_sum_t *low,
         draw_sum_t *all)
{
    const draw_units_t units = draw_weight_of(row, x);
    const int bin = draw_bin(row, x);

    all->count++;
    all->units += units;

    /* most of a vocabulary, as a rule: no atomics */
    if (bin == DRAW_BINS - 1) {
        low->count++;
        low->units += units;
    } else {
        add_count(&s->count[bin], 1u);
        add_units(&s->units[bin], units);
    }
}


/* Counts and sums of all bins; the sum of all. */
static __device__ draw_sum_t
draw_fill(draw_shared_t *s, const draw_row_t *row)
{
    const int thread = (int) threadIdx.x;
    draw_sum_t all = { 0, 0 }, low = { 0, 0 };
    float x[DRAW_BATCH];

    __syncthreads();

    for (int i = thread; i < DRAW_BINS; i += DRAW_THREADS) {
        s->count[i] = 0;
        s->units[i] = 0;
    }

    __syncthreads();

    for (int i = thread; i < row->n; i += DRAW_BATCH * DRAW_THREADS) {
        draw_load(row->x, row->n, i, x);

#pragma unroll
        for (int j = 0; j < DRAW_BATCH; j++) {
            if (x[j] >= row->floor) {
                draw_put(s, row, x[j], &low, &all);
            }
        }
    }

    low.count = (unsigned) draw_sum_all(s, low.count);
    low.units = draw_sum_all(s, low.units);
    all.count = (unsigned) draw_sum_all(s, all.count);
    all.units = draw_sum_all(s, all.units);

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
    float x[DRAW_BATCH];

    for (int i = (int) threadIdx.x; i < row->n; i += DRAW_BATCH * DRAW_THREADS)
    {
        draw_load(row->x, row->n, i, x);

#pragma unroll
        for (int j = 0; j < DRAW_BATCH; j++) {
            units += draw_weight_of(row, x[j]);
        }
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

#pragma unroll 1
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
#pragma unroll 1
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

#pragma unroll 1
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
draw_in_part(const draw_row_t *row, const draw_part_t *part, float x, int i,
             draw_units_t *key)
{
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
        if (draw_in_part(row, part, row->x[i], i, &key)) {
            const unsigned digit = (unsigned) (key >> shift) % DRAW_DIGITS;

            add_count(&s->digit_count[digit], 1u);
            add_units(&s->digit_units[digit], draw_weight_of(row, row->x[i]));
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


/* Lists the part. */
static __device__ void
draw_list(draw_shared_t *s, const draw_row_t *row, const draw_part_t *part)
{
    draw_units_t key;
    float x[DRAW_BATCH];

    for (int i = (int) threadIdx.x; i < row->n; i += DRAW_BATCH * DRAW_THREADS)
    {
        draw_load(row->x, row->n, i, x);

#pragma unroll
        for (int j = 0; j < DRAW_BATCH; j++) {
            if (draw_in_part(row, part, x[j], i + j * DRAW_THREADS, &key)) {
                const unsigned at = add_count(&s->n_listed, 1u);

                s->key[at] = key;
                s->weight[at] = draw_weight_of(row, x[j]);
            }
        }
    }
}


/* The key at which the goal is reached, from the first candidate on in their
 * order, or that of the last one; *sum: up to it and with it.  The bins are
 * filled, not all empty, and stay. */
static __device__ draw_units_t
draw_find(draw_shared_t *s, const draw_row_t *row, const draw_sum_t *goal,
          draw_sum_t *sum)
{
    draw_part_t part = { 0, DRAW_KEY_BITS, 0 };

    __syncthreads();

    if (threadIdx.x == 0) {
        s->before.count = 0;
        s->before.units = 0;
        s->n_listed = 0;
    }

    draw_find_bin(s, s->count, s->units, DRAW_BINS, goal);
    part.bin = (int) s->found;

    while (s->n_here > DRAW_LIST) {
        draw_narrow(s, row, goal, &part);
    }

    draw_list(s, row, &part);
    __syncthreads();
    draw_rank(s, goal);
    *sum = s->before;

    return s->found;
}

#endif /* KERNELS_CUDA_CUDA_DRAW_FIND_CUH */
