/*
 * GGUF v3 writer: metadata, then the table of tensors, then their data in the
 * order of the table, as a stream.
 *
 * Called by the commands that write models.  The keys and the table are kept
 * in memory until the first data, the data are not.
 *
 * Source: the GGUF specification (ggml docs/gguf.md).
 */

#ifndef ENGINE_MODEL_GGUF_WRITE_H
#define ENGINE_MODEL_GGUF_WRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/file_new.h"
#include "engine/base/status.h"
#include "engine/model/gguf.h"
#include "kernels/op/tensor.h"

typedef struct {
    buf_t kvs;
    buf_t infos;
    uint64_t n_kvs;
    uint64_t n_infos;
    uint64_t promised; /* bytes of tensors, with padding */
    uint64_t written;
    file_new_t file;
} gguf_writer_t;


/* A zeroed gguf_writer_t, after which fini always follows: it frees, and drops
 * the file unless gguf_write_end() has been there. */
void gguf_write_init(gguf_writer_t *w);
void gguf_write_fini(gguf_writer_t *w);

void gguf_write_str(gguf_writer_t *w, const char *key, const char *value);
void gguf_write_u32(gguf_writer_t *w, const char *key, uint32_t value);
void gguf_write_f32(gguf_writer_t *w, const char *key, float value);
void gguf_write_bool(gguf_writer_t *w, const char *key, bool value);

/* Arrays: the head, then n elements. */
void gguf_write_strs(gguf_writer_t *w, const char *key, uint64_t n);
void gguf_write_str_item(gguf_writer_t *w, const char *text, size_t len);
void gguf_write_i32s(gguf_writer_t *w, const char *key, uint64_t n);
void gguf_write_i32_item(gguf_writer_t *w, int32_t value);

/* All keys of another file as they are there, but for those named in `but`
 * (NULL at its end) and the alignment, which is the writer's own. */
void gguf_write_keys_of(gguf_writer_t *w, const gguf_t *gguf,
                        const char *const *but);

/* Announces a tensor: n_out rows of n_in values; n_out 1 is a vector. */
void gguf_write_tensor(gguf_writer_t *w, const char *name,
                       const op_tensor_t *shape);

/* The same with the dimensions of a tensor of another file, by its number,
 * under a name and with a type of its own. */
void gguf_write_tensor_of(gguf_writer_t *w, const gguf_t *gguf, int i,
                          gguf_str_t name, op_dtype_t dtype);

/* Opens path, asks for the room that the whole file needs, and writes what was
 * announced.  No memory for it shows here as LLM_NOMEM. */
int gguf_write_begin(gguf_writer_t *w, const char *path, llm_err_t *err);

/* Data of the tensors, in any pieces; behind each tensor gguf_write_pad(). */
int gguf_write_data(gguf_writer_t *w, const void *data, size_t len,
                    llm_err_t *err);
int gguf_write_pad(gguf_writer_t *w, llm_err_t *err);

/* All tensors are there: the file takes its name. */
int gguf_write_end(gguf_writer_t *w, llm_err_t *err);

#endif /* ENGINE_MODEL_GGUF_WRITE_H */
