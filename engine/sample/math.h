/*
 * The exp and log of sampling, and the scans over a row of logits.
 *
 * Plain IEEE additions and multiplications in one fixed order, so the bits are
 * the same on every machine, whatever its libm; written so that a compiler can
 * use vectors.  NaN counts as "not there" (−∞) and +∞ as the largest float.
 */

#ifndef ENGINE_SAMPLE_MATH_H
#define ENGINE_SAMPLE_MATH_H

enum { MATH_BLOCK = 64 }; /* values per block of math_block_max */

/* A weight is a multiple of 2^-34 and at most 1, so a sum of as many as this is
 * exact in double, and the same in any order. */
enum { MATH_WEIGHTS_MAX = 1 << 19 };

/* From here down e^x is nearer to 0 than to 2^-34: no weight. */
#define MATH_WEIGHT_FLOOR -25.0f

typedef enum { MATH_PLAIN, MATH_AVX2, MATH_AVX512, MATH_WIDTHS } math_width_t;

typedef struct {
    const float *x;
    int n;
    const float *block; /* by math_block_max over x */
} math_row_t;


/* e^x for x ≤ 0, 1 above; 0 below −87.  ≤ 1.2e-7 relative. */
float math_exp(float x);

/* math_exp, rounded to a multiple of 2^-34: what is summed. */
float math_weight(float x);

/* Natural logarithm of a positive, normal x.  ≤ 1e-15 relative to 1. */
double math_log(double x);

/* block[b] = the largest of x[64 b] … x[64 b + 63], −∞ when there is none.
 * Returns the largest of all. */
float math_block_max(const float *x, int n, float *block);

/* weight[i] = math_weight((x[i] − max) / temperature); max is finite. */
void math_weights(float *weight, const float *x, int n, float max,
                  float temperature);

/* The sum over the row of math_weight((x − max) / temperature), exact; max is
 * its largest. */
double math_sum_exp(const math_row_t *row, float max, float temperature);

/* The widest vectors in use, by what the processor has; they change no bit. */
math_width_t math_width(void);

/* For tests: nothing wider than `most`.  Returns what is used. */
math_width_t math_limit(math_width_t most);

#endif /* ENGINE_SAMPLE_MATH_H */
