/*
 * A backend, a KV page pool and sequences whose inputs depend on their place
 * only, so that the same tokens can be fed in any batches and the answers
 * compared bit for bit.
 *
 * Every pool starts full of NaN and Inf, and pages are handed out in random
 * order, so whatever leaks from a slot that is not the row's own shows.
 */

#ifndef T_OPS_LIB_ATTN_WORLD_H
#define T_OPS_LIB_ATTN_WORLD_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/op/op.h"

enum { WORLD_SEQS = 16, WORLD_LAYERS = 2, WORLD_LAYER = 1, WORLD_ISAS = 3 };

typedef struct {
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int n_seqs; /* that the pool has pages for */
} world_shape_t;

/* What K and V of the worlds to be opened are stored as. */
extern op_dtype_t world_dtype;

/* Setups of tests: the type of K and V from here on. */
int world_use_q8_0(void **unused);
int world_use_f16(void **unused);

/* A backend with a poisoned page pool and what its sequences answered. */
typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    op_attn_t attn;
    op_kv_t kv;
    size_t kv_bytes;
    int max_len;
    int width; /* floats of a row of out */
    int n_free;
    int32_t *free_pages;
    int32_t *table[WORLD_SEQS];
    int len[WORLD_SEQS]; /* positions fed */
    float *out[WORLD_SEQS];
    float *cos_sin;
} world_t;

typedef struct {
    int seq;
    int n;
} world_chunk_t;

extern const char *const world_isas[WORLD_ISAS]; /* the best first */
extern uint64_t world_seed;

/* Takes the seed from SEED or the clock and prints it. */
void world_start(void);

/* isa NULL: the oracle.  0; or -1: this machine lacks the instruction set. */
int world_open(world_t *w, const char *isa, int threads,
               const world_shape_t *shape, int max_len);
void world_close(world_t *w);

/* calloc() that ends the program instead of failing. */
void *world_must(size_t n, size_t size);

/* The same input for the same place, whoever asks: −1 … 1. */
float world_value(int seq, int pos, int i);

/* One row of q, k and v heads; q large enough that softmax is not flat.
 * Returns the end of the row. */
float *world_qkv(const world_t *w, int seq, int pos, float *to);

/* One step: each chunk's next n positions, rotated, written, attended.
 * Answers go to w->out. */
void world_feed(world_t *w, const world_chunk_t *chunks, int n_chunks);

/* Random steps until the sequences have these lengths. */
void world_feed_randomly(world_t *w, const int *len, int n_seqs, int largest);

/* Writes len positions of a sequence (of sequence 0) to its pages and attends
 * nothing.  K is not rotated: the oracle and the product round the same values
 * then. */
void world_fill_seq(world_t *w, int seq, int len);
void world_fill(world_t *w, int len);

/* The same bits, and finite. */
void world_assert_same(const world_t *a, const world_t *b, int n_seqs,
                       const char *what);
void world_assert_finite(const world_t *w, int seq);

#endif /* T_OPS_LIB_ATTN_WORLD_H */
