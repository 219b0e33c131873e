/*
 * Arithmetic of sizes: what a model takes, and what a memory can serve.
 *
 * Pure functions over shapes: nothing is opened, allocated or measured, so the
 * plan command answers for machines and models that are not there, and the
 * engine knows before loading whether a model can fit.  Bytes, tokens, and
 * seconds throughout.
 */

#ifndef ENGINE_SIZING_H
#define ENGINE_SIZING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/model/config.h"
#include "kernels/op/tensor.h"

/* The shape of a llama-like model. */
typedef struct {
    const char *name;
    int n_layers;
    int n_embd;
    int n_ff;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int n_vocab;
    int n_ctx;
    bool tied; /* one matrix embeds and makes logits */
    bool bias; /* of the query, key and value projections */
} sizing_shape_t;

typedef struct {
    int max_rows; /* tokens of one step */
    int max_out;  /* rows of logits computed at once */
    int max_len;  /* longest sequence */
    int samplers; /* rows drawn at once */
} sizing_step_t;

typedef struct {
    size_t step_weights;  /* bytes of weights that one step reads */
    size_t kv_per_token;  /* bytes */
    int64_t n_pages;      /* of the cache */
    int context;          /* the length that a reservation must allow for */
    int mean;             /* tokens that a request really reaches */
    int max_seqs;         /* sequences in one step */
    double bytes_per_sec; /* of the memory; 0: not known */
} sizing_load_t;

typedef struct {
    int64_t tokens;         /* of the cache */
    int64_t reserved;       /* requests at once, the maximum set aside each */
    int64_t paged;          /* requests at once, pages taken when needed */
    double reserved_waste;  /* part of the memory taken that stays empty */
    double paged_waste;     /* likewise: half of the last page */
    double single_per_sec;  /* tokens: one sequence alone */
    int64_t batch;          /* paged requests in one step: ≤ max_seqs */
    double batch_per_sec;   /* tokens: these together */
    double batch_step_secs; /* the time of one such step */
} sizing_plan_t;


/* A well-known model by name; NULL when the table does not have it. */
const sizing_shape_t *sizing_find(const char *name);

/* The i-th of the table; NULL behind the last. */
const sizing_shape_t *sizing_at(int i);

/* The shape of a model file. */
sizing_shape_t sizing_shape(const model_config_t *config, bool tied);

/* Number of parameters. */
int64_t sizing_params(const sizing_shape_t *shape);

/* Bytes of a matrix of this type as the engine keeps it: the layouts of
 * kernels/op/repack.h, outputs in groups of 16. */
size_t sizing_matrix_bytes(op_dtype_t dtype, int64_t n_in, int64_t n_out);

/* Bytes of all weights when every matrix has this type (vectors are f32), and
 * of those that one step reads: an embedding that is not tied is looked up
 * by row, so it does not count. */
size_t sizing_weight_bytes(const sizing_shape_t *shape, op_dtype_t dtype);
size_t sizing_step_bytes(const sizing_shape_t *shape, op_dtype_t dtype);

/* Bytes of the activations that model_load() reserves, f32. */
size_t sizing_activation_bytes(const sizing_shape_t *shape,
                               const sizing_step_t *step);

/* Bytes of K and V of a token, all layers.  dtype: OP_F16, OP_BF16, OP_F32, or
 * OP_Q8_0 (bytes, and two more for the scale of every 32, as the pages have
 * them: the last of a head may be fewer). */
size_t sizing_kv_bytes(const sizing_shape_t *shape, op_dtype_t dtype);

/* What the load comes to.  A paged request of unknown length leaves its last
 * page half empty: 7.5 of 16 tokens in the mean. */
void sizing_plan(const sizing_load_t *load, sizing_plan_t *plan);

#endif /* ENGINE_SIZING_H */
