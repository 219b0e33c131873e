/*
 * The GGUF writer.  Numbers are written as this machine has them, which is
 * little endian (gguf.c asserts it).
 */

#include "engine/model/gguf_write.h"

#include <string.h>

#include "engine/model/gguf_file.h"

enum { ALIGNMENT = 32, VERSION = 3 };


void
gguf_write_init(gguf_writer_t *w)
{
    *w = (gguf_writer_t){ .file = { .fd = -1 } };
}


void
gguf_write_fini(gguf_writer_t *w)
{
    buf_fini(&w->kvs);
    buf_fini(&w->infos);
    file_new_drop(&w->file);
}


static void
add_u32(buf_t *buf, uint32_t value)
{
    buf_add(buf, &value, sizeof(value));
}


static void
add_u64(buf_t *buf, uint64_t value)
{
    buf_add(buf, &value, sizeof(value));
}


static void
add_str(buf_t *buf, const char *text, size_t len)
{
    add_u64(buf, len);
    buf_add(buf, text, len);
}


static void
add_key(gguf_writer_t *w, const char *key, uint32_t type)
{
    add_str(&w->kvs, key, strlen(key));
    add_u32(&w->kvs, type);
    w->n_kvs++;
}


void
gguf_write_str(gguf_writer_t *w, const char *key, const char *value)
{
    add_key(w, key, GGUF_STRING);
    add_str(&w->kvs, value, strlen(value));
}


void
gguf_write_u32(gguf_writer_t *w, const char *key, uint32_t value)
{
    add_key(w, key, GGUF_U32);
    add_u32(&w->kvs, value);
}


void
gguf_write_f32(gguf_writer_t *w, const char *key, float value)
{
    add_key(w, key, GGUF_F32);
    buf_add(&w->kvs, &value, sizeof(value));
}


void
gguf_write_bool(gguf_writer_t *w, const char *key, bool value)
{
    add_key(w, key, GGUF_BOOL);
    buf_addc(&w->kvs, value ? 1 : 0);
}


static void
add_array(gguf_writer_t *w, const char *key, uint32_t type, uint64_t n)
{
    add_key(w, key, GGUF_ARRAY);
    add_u32(&w->kvs, type);
    add_u64(&w->kvs, n);
}


void
gguf_write_strs(gguf_writer_t *w, const char *key, uint64_t n)
{
    add_array(w, key, GGUF_STRING, n);
}


void
gguf_write_str_item(gguf_writer_t *w, const char *text, size_t len)
{
    add_str(&w->kvs, text, len);
}


void
gguf_write_i32s(gguf_writer_t *w, const char *key, uint64_t n)
{
    add_array(w, key, GGUF_I32, n);
}


void
gguf_write_i32_item(gguf_writer_t *w, int32_t value)
{
    buf_add(&w->kvs, &value, sizeof(value));
}


static uint64_t
padding(uint64_t bytes)
{
    return (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;
}


void
gguf_write_tensor(gguf_writer_t *w, const char *name, const op_tensor_t *shape)
{
    const bool matrix = shape->n_out > 1;
    const uint64_t bytes =
        (uint64_t) op_row_bytes((int) shape->dtype, shape->n_in)
        * (uint64_t) shape->n_out;

    add_str(&w->infos, name, strlen(name));
    add_u32(&w->infos, matrix ? 2 : 1);
    add_u64(&w->infos, (uint64_t) shape->n_in);

    if (matrix) {
        add_u64(&w->infos, (uint64_t) shape->n_out);
    }

    add_u32(&w->infos, (uint32_t) shape->dtype);
    add_u64(&w->infos, w->promised);
    w->promised += bytes + padding(bytes);
    w->n_infos++;
}


int
gguf_write_begin(gguf_writer_t *w, const char *path, llm_err_t *err)
{
    static const char zeroes[ALIGNMENT];
    buf_t head = { 0 };

    buf_adds(&head, "GGUF");
    add_u32(&head, VERSION);
    add_u64(&head, w->n_infos);
    add_u64(&head, w->n_kvs);
    buf_add(&w->infos, zeroes,
            (size_t) padding(head.len + w->kvs.len + w->infos.len));

    if (head.failed || w->kvs.failed || w->infos.failed) {
        buf_fini(&head);
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory to write \"%s\"",
                           path);
    }

    int rc = file_new_open(&w->file, path, 0644, err);

    if (rc == LLM_OK) {
        rc = file_new_write(&w->file, head.data, head.len, err);
    }
    if (rc == LLM_OK) {
        rc = file_new_write(&w->file, w->kvs.data, w->kvs.len, err);
    }
    if (rc == LLM_OK) {
        rc = file_new_write(&w->file, w->infos.data, w->infos.len, err);
    }

    buf_fini(&head);

    return rc;
}


int
gguf_write_data(gguf_writer_t *w, const void *data, size_t len, llm_err_t *err)
{
    w->written += len;

    return file_new_write(&w->file, data, len, err);
}


int
gguf_write_pad(gguf_writer_t *w, llm_err_t *err)
{
    static const char zeroes[ALIGNMENT];

    return gguf_write_data(w, zeroes, (size_t) padding(w->written), err);
}


int
gguf_write_end(gguf_writer_t *w, llm_err_t *err)
{
    llm_assert(w->written == w->promised);

    return file_new_commit(&w->file, err);
}
