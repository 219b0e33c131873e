/*
 * Candidates: gathering, buckets, the search for a goal.  Called by sampler.c.
 *
 * Sums of weights run bucket by bucket and, within the bucket of the goal, in
 * descending order.  They are exact (math.h), so a sum is the same whatever the
 * buckets are.
 */

#include "engine/sample/cand.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sample/math.h"

/* up to here an insertion sort is quicker, and one bucket will do */
enum { FEW = 48 };


size_t
cand_bytes(int n_vocab)
{
    const size_t n = (size_t) n_vocab;
    const size_t n_blocks = (n + MATH_BLOCK - 1) / MATH_BLOCK;

    return n_blocks * sizeof(float)
           + n * (2 * sizeof(float) + sizeof(int32_t) + 2 * sizeof(cand_t));
}


bool
cand_init(cand_set_t *set, int n_vocab)
{
    const size_t n = (size_t) n_vocab;
    const size_t n_blocks = (n + MATH_BLOCK - 1) / MATH_BLOCK;

    *set = (cand_set_t){ .n_vocab = n_vocab, .n_blocks = (int) n_blocks };

    set->block = malloc(n_blocks * sizeof(float));
    set->x = malloc(n * sizeof(float));
    set->weight = malloc(n * sizeof(float));
    set->token = malloc(n * sizeof(int32_t));
    set->sorted = malloc(n * sizeof(cand_t));
    set->spare = malloc(n * sizeof(cand_t));

    if (set->block == NULL || set->x == NULL || set->weight == NULL
        || set->token == NULL || set->sorted == NULL || set->spare == NULL)
    {
        cand_fini(set);
        return false;
    }

    return true;
}


void
cand_fini(cand_set_t *set)
{
    free(set->block);
    free(set->x);
    free(set->weight);
    free(set->token);
    free(set->sorted);
    free(set->spare);
    *set = (cand_set_t){ 0 };
}


/* Larger keys for smaller logits: floats compare like sign and magnitude. */
static uint32_t
descending_key(float x)
{
    uint32_t bits;

    x += 0.0f; /* −0 and 0 are a tie */
    memcpy(&bits, &x, sizeof(bits));

    return bits & 0x80000000U ? bits : ~(bits | 0x80000000U);
}


static void
sort_few(cand_t *cand, int n)
{
    for (int i = 1; i < n; i++) {
        const cand_t c = cand[i];
        int j = i;

        for (; j > 0 && cand[j - 1].x < c.x; j--) {
            cand[j] = cand[j - 1];
        }

        cand[j] = c;
    }
}


/* Radix sort, a byte at a time: linear, and stable, so that ties keep the
 * order of their ids. */
static void
sort_many(cand_t *cand, cand_t *spare, int n)
{
    for (int shift = 0; shift < 32; shift += 8) {
        int start[257] = { 0 };

        for (int i = 0; i < n; i++) {
            start[(descending_key(cand[i].x) >> shift & 255) + 1]++;
        }

        for (int i = 1; i < 256; i++) {
            start[i] += start[i - 1];
        }

        for (int i = 0; i < n; i++) {
            const uint32_t key = descending_key(cand[i].x);

            spare[start[key >> shift & 255]++] = cand[i];
        }

        /* four passes: the result ends where it began */
        cand_t *swap = cand;
        cand = spare;
        spare = swap;
    }
}


static void
sort(cand_set_t *set, int n)
{
    if (n <= FEW) {
        sort_few(set->sorted, n);
        return;
    }

    sort_many(set->sorted, set->spare, n);
}


/* Integers in the order of floats that are numbers. */
static int32_t
ascending_key(float x)
{
    int32_t bits;

    x += 0.0f; /* −0 and 0 are a tie */
    memcpy(&bits, &x, sizeof(bits));

    return bits < 0 ? bits ^ INT32_MAX : bits;
}


/* The k-th largest of n keys, bit by bit: the largest number that k of them
 * reach.  The counts are vectors, and nothing is moved. */
static int32_t
kth_largest(const int32_t *key, int n, int k)
{
    int32_t found = INT32_MIN;

    for (int bit = 31; bit >= 0; bit--) {
        const int32_t next = bit == 31 ? 0 : found | (int32_t) (1U << bit);
        int count = 0;

        for (int i = 0; i < n; i++) {
            count += key[i] >= next;
        }

        found = count >= k ? next : found;
    }

    return found;
}


float
cand_bound(cand_set_t *set, int k)
{
    int32_t *key = set->token; /* not in use yet */
    float bound;

    if (k > set->n_blocks) {
        return -INFINITY;
    }

    for (int b = 0; b < set->n_blocks; b++) {
        key[b] = ascending_key(set->block[b]);
    }

    int32_t bits = kth_largest(key, set->n_blocks, k);

    bits = bits < 0 ? bits ^ INT32_MAX : bits;
    memcpy(&bound, &bits, sizeof(bound));

    return bound;
}


/* Rises as x falls.  A cut at max makes the scale infinite, one at −FLT_MAX
 * may make it zero; what is then no number goes to the last bucket. */
static int
bucket_of(const cand_set_t *set, const cand_row_t *row, float x)
{
    const float at = (row->max - x) * set->scale;

    if (set->n <= FEW) {
        return 0;
    }

    return at < CAND_BUCKETS - 1 ? (int) at : CAND_BUCKETS - 1;
}


static void
fill_buckets(cand_set_t *set, const cand_row_t *row)
{
    memset(set->bucket, 0, sizeof(set->bucket));

    for (int i = 0; i < set->n; i++) {
        cand_bucket_t *bucket = &set->bucket[bucket_of(set, row, set->x[i])];

        bucket->count++;
        bucket->weight += set->weight[i];
    }
}


void
cand_gather(cand_set_t *set, const cand_row_t *row, float cut)
{
    const float *logits = row->logits;
    int n = 0;

    for (int b = 0; b < set->n_blocks; b++) {
        if (set->block[b] < cut) {
            continue;
        }

        const int whole = (b + 1) * MATH_BLOCK;
        const int end = whole < set->n_vocab ? whole : set->n_vocab;

        /* no branch to guess wrongly: written always, kept if it counts; the
         * place written is at most the token's own */
        for (int i = b * MATH_BLOCK; i < end; i++) {
            set->x[n] = logits[i];
            set->token[n] = i;
            n += logits[i] >= cut;
        }
    }

    set->n = n;
    set->scale = CAND_BUCKETS / (row->max - cut);
    math_weights(set->weight, set->x, n, row->max, row->temperature);
    fill_buckets(set, row);
}


double
cand_weight(const cand_set_t *set)
{
    double sum = 0.0;

    for (int b = 0; b < CAND_BUCKETS; b++) {
        sum += set->bucket[b].weight;
    }

    return sum;
}


/* Puts one bucket into sorted; the number of its candidates. */
static int
sort_bucket(cand_set_t *set, const cand_row_t *row, int b)
{
    int n = 0;

    for (int i = 0; i < set->n; i++) {
        if (bucket_of(set, row, set->x[i]) == b) {
            set->sorted[n++] =
                (cand_t){ set->x[i], set->weight[i], set->token[i] };
        }
    }

    sort(set, n);

    return n;
}


static bool
reached(const cand_goal_t *goal, int count, double weight)
{
    return count >= goal->count || weight > goal->weight
           || (!goal->above && weight == goal->weight);
}


cand_t
cand_find(cand_set_t *set, const cand_row_t *row, const cand_goal_t *goal,
          double *sum)
{
    int count = 0, count_before = 0, pick = 0;
    double weight = 0.0, weight_before = 0.0;

    for (int b = 0; b < CAND_BUCKETS; b++) {
        const cand_bucket_t *bucket = &set->bucket[b];

        if (bucket->count == 0) {
            continue;
        }

        pick = b;
        count_before = count;
        weight_before = weight;
        count += bucket->count;
        weight += bucket->weight;

        if (reached(goal, count, weight)) {
            break;
        }
    }

    const int n = sort_bucket(set, row, pick);
    int i = 0;

    for (;; i++) {
        weight_before += set->sorted[i].weight;

        if (i == n - 1 || reached(goal, count_before + i + 1, weight_before)) {
            break;
        }
    }

    *sum = weight_before;

    return set->sorted[i];
}
