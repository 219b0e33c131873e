/*
 * Model files from model files: another type of weights, fewer layers.
 *
 * Called by the commands quantize and trim.  Tensors are streamed from the
 * mapped input, so memory stays near one tensor whatever the model's size; the
 * output appears when it is complete.
 */

#ifndef ENGINE_CONVERT_H
#define ENGINE_CONVERT_H

#include <stdint.h>

#include "engine/base/status.h"
#include "kernels/op/tensor.h"

typedef struct {
    int n_tensors;
    int n_layers_in;
    int n_layers_out;
    uint64_t bytes_in; /* of tensors */
    uint64_t bytes_out;
    double error; /* of the matrices' values: rms over rms of the input's */
} convert_done_t;


/*
 * Writes `model` to `out` with matrices of type dtype, but for the one that
 * makes logits (output.weight, or token_embd.weight where the two are one),
 * which gets type head.  Vectors become F32, what has its type already is
 * copied.  All keys stay but general.file_type and the quantisation's version.
 * LLM_BADREQ: the files or the types do not go together.
 */
int convert_quantize(const char *model, const char *out, op_dtype_t dtype,
                     op_dtype_t head, convert_done_t *done, llm_err_t *err);

/*
 * Writes `model` to `out` with some of its layers, as they are.  layers: "10",
 * so many, chosen here, or a list like "0-8,29", numbers from 0, ascending.
 * LLM_BADREQ: the files do not go together, or there are no such layers.
 */
int convert_trim(const char *model, const char *out, const char *layers,
                 convert_done_t *done, llm_err_t *err);

#endif /* ENGINE_CONVERT_H */
