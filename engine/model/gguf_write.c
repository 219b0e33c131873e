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


/* The bytes of a value without its type. */
static void
add_value(buf_t *buf, const gguf_kv_t *kv)
{
    if (kv->type != GGUF_STRING) {
        buf_add(buf, kv->data, gguf_type_size(kv->type) * (size_t) kv->n);
        return;
    }

    for (int64_t i = 0; i < kv->n; i++) {
        add_str(buf, kv->strings[i].text, kv->strings[i].len);
    }
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


static bool
is_one_of(gguf_str_t name, const char *const *names)
{
    for (; *names != NULL; names++) {
        if (strlen(*names) == name.len
            && memcmp(*names, name.text, name.len) == 0) {
            return true;
        }
    }

    return false;
}


void
gguf_write_keys_of(gguf_writer_t *w, const gguf_t *gguf, const char *const *but)
{
    static const char *const own[] = { "general.alignment", NULL };

    for (uint32_t i = 0; i < gguf->n_kvs; i++) {
        const gguf_kv_t *kv = &gguf->kvs[i];

        if (is_one_of(kv->name, own) || is_one_of(kv->name, but)) {
            continue;
        }

        add_str(&w->kvs, kv->name.text, kv->name.len);
        add_u32(&w->kvs, kv->is_array ? GGUF_ARRAY : kv->type);

        if (kv->is_array) {
            add_u32(&w->kvs, kv->type);
            add_u64(&w->kvs, (uint64_t) kv->n);
        }

        add_value(&w->kvs, kv);
        w->n_kvs++;
    }
}


static uint64_t
padding(uint64_t bytes)
{
    return (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;
}


static void
add_info(gguf_writer_t *w, gguf_str_t name, const gguf_info_t *info)
{
    const uint64_t bytes =
        (uint64_t) op_row_bytes((int) info->tensor.dtype, info->tensor.n_in)
        * (uint64_t) info->tensor.n_out;

    add_str(&w->infos, name.text, name.len);
    add_u32(&w->infos, info->n_dims);

    for (uint32_t i = 0; i < info->n_dims; i++) {
        add_u64(&w->infos, info->ne[i]);
    }

    add_u32(&w->infos, (uint32_t) info->tensor.dtype);
    add_u64(&w->infos, w->promised);
    w->promised += bytes + padding(bytes);
    w->n_infos++;
}


void
gguf_write_tensor(gguf_writer_t *w, const char *name, const op_tensor_t *shape)
{
    const gguf_info_t info = {
        .tensor = *shape,
        .n_dims = shape->n_out > 1 ? 2 : 1,
        .ne = { (uint64_t) shape->n_in, (uint64_t) shape->n_out },
    };

    add_info(w, (gguf_str_t){ name, strlen(name) }, &info);
}


void
gguf_write_tensor_of(gguf_writer_t *w, const gguf_t *gguf, int i,
                     gguf_str_t name, op_dtype_t dtype)
{
    gguf_info_t info = gguf->infos[i];

    info.tensor.dtype = dtype;
    add_info(w, name, &info);
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
        const uint64_t tables = head.len + w->kvs.len + w->infos.len;

        rc = file_new_reserve(&w->file, tables + w->promised, err);
    }
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
