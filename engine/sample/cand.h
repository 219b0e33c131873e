/*
 * The tokens that may be drawn from one row of logits, and the way through
 * them in descending order.
 *
 * The vocabulary is not sorted.  cand_gather takes what is above a cut; the
 * candidates fall into buckets by the size of their logits, and cand_find
 * sorts only the bucket in which its goal lies.
 */

#ifndef ENGINE_SAMPLE_CAND_H
#define ENGINE_SAMPLE_CAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CAND_BUCKETS = 256 };

typedef struct {
    const float *logits;
    float max;         /* the largest logit, finite */
    float temperature; /* > 0 */
    float floor;       /* no token below it can be drawn */
} cand_row_t;

typedef struct {
    float x; /* the logit */
    float weight;
    int32_t token;
} cand_t;

typedef struct {
    int count;
    double weight;
} cand_bucket_t;

typedef struct {
    int n_vocab;
    int n_blocks;
    float *block; /* [n_blocks] by math_block_max, before cand_gather */

    /* the candidates, ids ascending; room for n_vocab */
    float *x;
    float *weight; /* math_weight((x − max) / temperature) */
    int32_t *token;
    int n;

    cand_bucket_t bucket[CAND_BUCKETS]; /* the first: the largest logits */
    float scale;                        /* from max − x to the bucket */

    cand_t *sorted; /* [n_vocab] one bucket in descending order */
    cand_t *spare;  /* [n_vocab] scratch of the sort */
} cand_set_t;

/* Where to stop on the way down: at the count, or where the sum of weights
 * reaches (above: exceeds) weight. */
typedef struct {
    int count;
    double weight;
    bool above;
} cand_goal_t;


/* Memory that a set takes. */
size_t cand_bytes(int n_vocab);

/* False: no memory. */
bool cand_init(cand_set_t *set, int n_vocab);
void cand_fini(cand_set_t *set);

/* A logit that at least k tokens reach: the k-th largest block maximum.  −∞
 * when there are fewer blocks. */
float cand_bound(cand_set_t *set, int k);

/* The candidates become all tokens with a logit of at least cut (≤ max, not
 * −∞). */
void cand_gather(cand_set_t *set, const cand_row_t *row, float cut);

/* Sum of the weights of all candidates. */
double cand_weight(const cand_set_t *set);

/* The candidate, in descending order with ties by id, at which the goal is
 * reached, or else the last one.  *sum: the weights up to and with it.  There
 * must be a candidate. */
cand_t cand_find(cand_set_t *set, const cand_row_t *row,
                 const cand_goal_t *goal, double *sum);

#endif /* ENGINE_SAMPLE_CAND_H */
