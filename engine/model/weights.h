/*
 * From the tensors of a GGUF file to weights on a backend.
 *
 * An architecture asks for each tensor by name and shape; what is missing,
 * misshapen, or left over is an error that names the tensor.
 */

#ifndef ENGINE_MODEL_WEIGHTS_H
#define ENGINE_MODEL_WEIGHTS_H

#include "engine/base/arena.h"
#include "engine/base/status.h"
#include "engine/model/gguf.h"
#include "engine/model/repack_cache.h"
#include "kernels/op/op.h"

enum { WEIGHTS_PARTS = 3 };

typedef struct {
    const gguf_t *gguf;
    const op_table_t *ops;
    op_dev_t *dev;
    llm_err_t *err;
    repack_cache_t *cache; /* where repacked matrices may be found */
    uint8_t *used;         /* by tensor: somebody asked for it */
    size_t bytes;          /* of the matrices repacked so far */
} weights_t;

/* One matrix of a fused weight. */
typedef struct {
    char name[64];
    int64_t n_out;
} weights_part_t;


/* gguf, dev, err, cache and the arena outlive weights. */
int weights_init(weights_t *weights, arena_t *arena);

bool weights_has(const weights_t *weights, const char *name);

/* Reads a vector of n values as f32 into out, the host's memory. */
int weights_vector(weights_t *weights, const char *name, int64_t n, float *out);

/* The same into memory of the device. */
int weights_norm(weights_t *weights, const char *name, int64_t n, float *out);

/* Repacks 1 … WEIGHTS_PARTS matrices of n_in, concatenated along n_out. */
int weights_matrix(weights_t *weights, const weights_part_t *parts, int n_parts,
                   int64_t n_in, op_weight_t **out);

/* An error when the file holds a tensor that nobody asked for: leaving out a
 * bias or a norm would give wrong answers without a word. */
int weights_finish(const weights_t *weights);

#endif /* ENGINE_MODEL_WEIGHTS_H */
