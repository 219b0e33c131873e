/*
 * Tensors → weights: find, check the shape, hand to the backend.
 *
 * Called by arch_*.c while a model is loaded.  It keeps the account of bytes
 * and of the tensors that were used.
 */

#include "engine/model/weights.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "kernels/op/quant.h"


int
weights_init(weights_t *weights, arena_t *arena)
{
    const int n = gguf_n_tensors(weights->gguf);

    weights->bytes = 0;
    weights->used = arena_calloc(arena, (size_t) n + 1);
    if (weights->used == NULL) {
        return llm_err_set(weights->err, LLM_NOMEM, NULL,
                           "no memory to load the model");
    }

    return LLM_OK;
}


bool
weights_has(const weights_t *weights, const char *name)
{
    return gguf_tensor_index(weights->gguf, name) >= 0;
}


static int
find(weights_t *weights, const char *name, int64_t n_in, int64_t n_out,
     op_tensor_t *out)
{
    gguf_str_t str;
    const int i = gguf_tensor_index(weights->gguf, name);

    if (i < 0) {
        return gguf_err(weights->gguf, weights->err, "tensor \"%s\" is missing",
                        name);
    }

    gguf_tensor_at(weights->gguf, i, &str, out);
    if (out->n_in != n_in || out->n_out != n_out) {
        return gguf_err(weights->gguf, weights->err,
                        "tensor \"%s\" is %lld x %lld, but the metadata ask "
                        "for %lld x %lld",
                        name, (long long) out->n_in, (long long) out->n_out,
                        (long long) n_in, (long long) n_out);
    }

    weights->used[i] = 1;

    return LLM_OK;
}


int
weights_vector(weights_t *weights, const char *name, int64_t n, float *out)
{
    op_tensor_t tensor;
    const int rc = find(weights, name, n, 1, &tensor);

    if (rc == LLM_OK) {
        op_dequant_row(tensor.dtype, tensor.data, out, n);
    }

    return rc;
}


int
weights_norm(weights_t *weights, const char *name, int64_t n, float *out)
{
    if (weights->ops->host) {
        return weights_vector(weights, name, n, out);
    }

    float *values = malloc((size_t) n * sizeof(float));

    if (values == NULL) {
        return llm_err_set(weights->err, LLM_NOMEM, NULL,
                           "no memory to load the model");
    }

    const int rc = weights_vector(weights, name, n, values);

    if (rc == LLM_OK) {
        weights->ops->put(weights->dev, out, values,
                          (size_t) n * sizeof(float));
    }

    free(values);

    return rc;
}


/* Tells a matrix from the others of its file: what it is made of, and how the
 * parts follow one another. */
static uint64_t
ident_of(const weights_part_t *parts, const op_tensor_t *tensors, int n_parts)
{
    uint64_t hash = 0;

    for (int i = 0; i < n_parts; i++) {
        const int64_t shape[3] = { tensors[i].dtype, tensors[i].n_in,
                                   tensors[i].n_out };

        hash = XXH3_64bits_withSeed(parts[i].name, strlen(parts[i].name), hash);
        hash = XXH3_64bits_withSeed(shape, sizeof(shape), hash);
    }

    return hash;
}


int
weights_matrix(weights_t *weights, const weights_part_t *parts, int n_parts,
               int64_t n_in, op_weight_t **out)
{
    op_tensor_t tensors[WEIGHTS_PARTS];
    op_err_t op_err = { "" };

    llm_assert(n_parts >= 1 && n_parts <= WEIGHTS_PARTS);

    for (int i = 0; i < n_parts; i++) {
        const int rc =
            find(weights, parts[i].name, n_in, parts[i].n_out, &tensors[i]);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    const uint64_t ident = ident_of(parts, tensors, n_parts);

    *out = repack_cache_take(weights->cache, ident, tensors, n_parts);

    if (*out == NULL) {
        *out = weights->ops->weight(weights->dev, tensors, n_parts, &op_err);

        /* or else the whole file would be resident beside its copy */
        for (int i = 0; i < n_parts; i++) {
            gguf_tensor_done(weights->gguf, &tensors[i]);
        }
    }

    if (*out == NULL) {
        return gguf_err(weights->gguf, weights->err,
                        "cannot load tensor \"%s\": %s", parts[0].name,
                        op_err.text);
    }

    weights->bytes += weights->ops->weight_bytes(*out);
    repack_cache_add(weights->cache, ident, *out);

    return LLM_OK;
}


int
weights_finish(const weights_t *weights)
{
    for (int i = 0; i < gguf_n_tensors(weights->gguf); i++) {
        gguf_str_t name;
        op_tensor_t tensor;

        if (weights->used[i]) {
            continue;
        }

        gguf_tensor_at(weights->gguf, i, &name, &tensor);

        const bool bias =
            name.len > 5 && memcmp(name.text + name.len - 5, ".bias", 5) == 0;

        return gguf_err(weights->gguf, weights->err,
                        "tensor \"%s\" is %s for this architecture",
                        gguf_show(name).text,
                        bias ? "a bias, which is not supported"
                             : "not known, so not supported,");
    }

    return LLM_OK;
}
