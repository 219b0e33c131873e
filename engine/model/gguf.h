/*
 * GGUF v3 reader: metadata and the tensor table, every size and offset
 * checked against the file before anything is touched.
 *
 * Source: the GGUF specification (ggml docs/gguf.md).
 */

#ifndef ENGINE_MODEL_GGUF_H
#define ENGINE_MODEL_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/op/tensor.h"

typedef struct gguf_s gguf_t;

typedef struct {
    const char *text; /* in the mapping, no terminating zero */
    size_t len;
} gguf_str_t;


/* Maps and checks path.  The views below live as long as the gguf_t. */
int gguf_open(const char *path, gguf_t **gguf, llm_err_t *err);

/* The same from memory that outlives the gguf_t (tests, fuzzing). */
int gguf_parse(const uint8_t *data, size_t len, gguf_t **gguf, llm_err_t *err);

void gguf_close(gguf_t *gguf);

/* Fills *err (may be NULL) with one sentence that opens with the file's name,
 * where there is one, and returns LLM_ERROR. */
int gguf_err(const gguf_t *gguf, llm_err_t *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

bool gguf_has(const gguf_t *gguf, const char *key);

/* Metadata by key.  False when absent or of another kind.  Integers accept
 * every integer type whose value fits; floats accept F32 and F64. */
bool gguf_str(const gguf_t *gguf, const char *key, gguf_str_t *out);
bool gguf_u32(const gguf_t *gguf, const char *key, uint32_t *out);
bool gguf_f32(const gguf_t *gguf, const char *key, float *out);
bool gguf_bool(const gguf_t *gguf, const char *key, bool *out);

/* Arrays: the number of elements, or -1.  Elements by index in O(1) for
 * numbers; strings are indexed once, at open. */
int64_t gguf_array_len(const gguf_t *gguf, const char *key);
bool gguf_array_str(const gguf_t *gguf, const char *key, int64_t i,
                    gguf_str_t *out);
bool gguf_array_i32(const gguf_t *gguf, const char *key, int64_t i,
                    int32_t *out);
bool gguf_array_f32(const gguf_t *gguf, const char *key, int64_t i, float *out);

/* A tensor by name as a matrix view: n_in = ne[0], n_out = product of the
 * rest.  False when absent.  Tensors of a type this project does not read make
 * gguf_open fail with the tensor's name and type. */
bool gguf_tensor(const gguf_t *gguf, const char *name, op_tensor_t *out);

/* The same by number: 0 … gguf_n_tensors() − 1.  gguf_tensor_index() is −1 for
 * a name that is absent. */
int gguf_n_tensors(const gguf_t *gguf);
int gguf_tensor_index(const gguf_t *gguf, const char *name);
void gguf_tensor_at(const gguf_t *gguf, int i, gguf_str_t *name,
                    op_tensor_t *out);

/* The file as it is mapped; NULL when the gguf_t is over memory. */
const file_map_t *gguf_map(const gguf_t *gguf);

/* The data of a tensor are not needed soon: their pages of the mapping go.
 * They are there again when read. */
void gguf_tensor_done(const gguf_t *gguf, const op_tensor_t *tensor);

/* Bytes of tensor data in the file. */
size_t gguf_tensor_bytes(const gguf_t *gguf);

/* A string of the file for a message: at most 64 bytes of it, printable ASCII
 * only, zero-terminated. */
typedef struct {
    char text[72];
} gguf_shown_t;

gguf_shown_t gguf_show(gguf_str_t str);

#endif /* ENGINE_MODEL_GGUF_H */
