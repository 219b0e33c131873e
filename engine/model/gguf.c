/*
 * The GGUF reader: parses and checks a file once, when it is opened.
 *
 * Called at start-up with a file an administrator chose, which may still be
 * damaged or hostile.  So a cursor walks the file and every length is compared
 * with what is left before it is used; counts are bounded by the bytes they
 * would need at least; what is stored is pointers into the mapping.  After a
 * successful parse nothing needs checking again (gguf_get.c).
 */

#include "engine/model/gguf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/model/gguf_file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "GGUF is read in place, as little endian");

/* Far above any model there is; they bound the work a hostile file causes. */
enum {
    MAX_KVS = 8192,
    MAX_TENSORS = 32768,
    MAX_NAME = 1024,
    MAX_ALIGNMENT = 1 << 20,
    DEFAULT_ALIGNMENT = 32,
    MIN_KV_BYTES = 8 + 1 + 4 + 1,           /* name, type, value */
    MIN_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8, /* name, dims, type, offset */
};


int
gguf_cut_short(gguf_cursor_t *c, const char *where)
{
    return gguf_err(c->gguf, c->err, "the file ends inside %s, at byte %zu",
                    where, (size_t) (c->p - c->gguf->data));
}


int
gguf_no_memory(gguf_cursor_t *c)
{
    gguf_err(c->gguf, c->err, "no memory for the index of the file");
    if (c->err != NULL) {
        c->err->code = LLM_NOMEM;
    }

    return LLM_NOMEM;
}


/* Takes n bytes; NULL when fewer are left. */
const uint8_t *
gguf_take(gguf_cursor_t *c, uint64_t n)
{
    const uint8_t *p = c->p;

    if (n > c->left) {
        return NULL;
    }

    c->p += n;
    c->left -= n;

    return p;
}


bool
gguf_take_u32(gguf_cursor_t *c, uint32_t *out)
{
    const uint8_t *p = gguf_take(c, sizeof(*out));

    if (p == NULL) {
        return false;
    }

    memcpy(out, p, sizeof(*out));

    return true;
}


bool
gguf_take_u64(gguf_cursor_t *c, uint64_t *out)
{
    const uint8_t *p = gguf_take(c, sizeof(*out));

    if (p == NULL) {
        return false;
    }

    memcpy(out, p, sizeof(*out));

    return true;
}


static bool
take_str(gguf_cursor_t *c, gguf_str_t *out)
{
    uint64_t len;

    if (!gguf_take_u64(c, &len)) {
        return false;
    }

    out->text = (const char *) gguf_take(c, len);
    out->len = (size_t) len;

    return out->text != NULL;
}


/* A key or a tensor's name. */
int
gguf_take_name(gguf_cursor_t *c, gguf_str_t *out, const char *what, uint32_t i)
{
    if (!take_str(c, out)) {
        return gguf_err(c->gguf, c->err,
                        "the file ends inside the name of %s "
                        "%u",
                        what, i);
    }

    if (out->len == 0 || out->len > MAX_NAME) {
        return gguf_err(c->gguf, c->err,
                        "the name of %s %u is %zu bytes long; "
                        "1 to %d are allowed",
                        what, i, out->len, MAX_NAME);
    }

    return LLM_OK;
}


/* --- metadata --- */

static int
take_strings(gguf_cursor_t *c, gguf_kv_t *kv)
{
    gguf_str_t *strings = NULL;

    /* each string has a length of 8 bytes at least, and n is below that */
    if (kv->n > 0) {
        strings =
            arena_alloc(c->gguf->arena, (size_t) kv->n * sizeof(gguf_str_t));
        if (strings == NULL) {
            return gguf_no_memory(c);
        }
    }

    for (int64_t i = 0; i < kv->n; i++) {
        if (!take_str(c, &strings[i])) {
            return gguf_err(c->gguf, c->err,
                            "string %lld of key \"%s\" reaches "
                            "past the end of the file",
                            (long long) i, gguf_show(kv->name).text);
        }
    }

    kv->strings = strings;

    return LLM_OK;
}


static int
take_value(gguf_cursor_t *c, gguf_kv_t *kv)
{
    uint64_t n = 1;
    bool whole = true;

    if (!gguf_take_u32(c, &kv->type)) {
        return gguf_cut_short(c, "the type of a value");
    }

    kv->is_array = kv->type == GGUF_ARRAY;
    if (kv->is_array) {
        whole = gguf_take_u32(c, &kv->type) && gguf_take_u64(c, &n);
    }

    if (!whole) {
        return gguf_cut_short(c, "the head of an array");
    }

    if (kv->is_array && kv->type == GGUF_ARRAY) {
        return gguf_err(c->gguf, c->err,
                        "key \"%s\" is an array of arrays, "
                        "which is not supported",
                        gguf_show(kv->name).text);
    }

    const bool is_string = kv->type == GGUF_STRING;
    const size_t size = is_string ? 8 : gguf_type_size(kv->type);

    if (size == 0) {
        return gguf_err(c->gguf, c->err,
                        "key \"%s\" has a value of unknown "
                        "type %u",
                        gguf_show(kv->name).text, kv->type);
    }

    if (n > c->left / size) {
        return gguf_err(c->gguf, c->err,
                        "key \"%s\" claims %llu elements, "
                        "more than the rest of the file holds",
                        gguf_show(kv->name).text, (unsigned long long) n);
    }

    kv->n = (int64_t) n;
    if (is_string) {
        return take_strings(c, kv);
    }

    kv->data = gguf_take(c, n * size);

    return LLM_OK;
}


static int
take_kvs(gguf_cursor_t *c)
{
    gguf_t *gguf = c->gguf;

    for (uint32_t i = 0; i < gguf->n_kvs; i++) {
        gguf_kv_t *kv = &gguf->kvs[i];
        int rc = gguf_take_name(c, &kv->name, "key", i);

        if (rc == LLM_OK) {
            rc = take_value(c, kv);
        }
        if (rc != LLM_OK) {
            return rc;
        }

        uint32_t *slot =
            gguf_names_slot(&gguf->kv_names, kv->name, gguf_kv_name, gguf->kvs);
        if (*slot != 0) {
            return gguf_err(gguf, c->err, "key \"%s\" is there twice",
                            gguf_show(kv->name).text);
        }
        *slot = i + 1;
    }

    return LLM_OK;
}


static int
read_alignment(gguf_cursor_t *c)
{
    const char *key = "general.alignment";
    uint32_t alignment = DEFAULT_ALIGNMENT;

    if (gguf_has(c->gguf, key) && !gguf_u32(c->gguf, key, &alignment)) {
        return gguf_err(c->gguf, c->err, "key \"%s\" is not a number", key);
    }

    if (alignment < 8 || alignment > MAX_ALIGNMENT
        || (alignment & (alignment - 1)) != 0)
    {
        return gguf_err(c->gguf, c->err,
                        "key \"%s\" is %u; a power of two from "
                        "8 to %d is needed",
                        key, alignment, MAX_ALIGNMENT);
    }

    c->gguf->alignment = alignment;

    return LLM_OK;
}


/* --- the whole --- */

static int
take_head(gguf_cursor_t *c)
{
    gguf_t *gguf = c->gguf;
    uint32_t version;
    uint64_t n_infos, n_kvs;
    const uint8_t *magic = gguf_take(c, 4);

    if (magic == NULL || memcmp(magic, "GGUF", 4) != 0) {
        return gguf_err(gguf, c->err, "this is not a GGUF file");
    }

    if (!gguf_take_u32(c, &version)) {
        return gguf_cut_short(c, "its head");
    }

    if ((version & 0xffff) == 0 && version != 0) {
        return gguf_err(gguf, c->err,
                        "this GGUF file is big-endian, which is "
                        "not supported");
    }

    if (version != 2 && version != 3) {
        return gguf_err(gguf, c->err,
                        "this is GGUF version %u; 2 and 3 are "
                        "supported",
                        version);
    }

    if (!gguf_take_u64(c, &n_infos) || !gguf_take_u64(c, &n_kvs)) {
        return gguf_cut_short(c, "its head");
    }

    if (n_kvs > MAX_KVS || n_kvs > c->left / MIN_KV_BYTES) {
        return gguf_err(gguf, c->err,
                        "the file claims %llu keys, more than it "
                        "can hold",
                        (unsigned long long) n_kvs);
    }

    if (n_infos > MAX_TENSORS || n_infos > c->left / MIN_INFO_BYTES) {
        return gguf_err(gguf, c->err,
                        "the file claims %llu tensors, more than "
                        "it can hold",
                        (unsigned long long) n_infos);
    }

    gguf->n_kvs = (uint32_t) n_kvs;
    gguf->n_infos = (uint32_t) n_infos;

    return LLM_OK;
}


static int
parse(gguf_t *gguf, llm_err_t *err)
{
    gguf_cursor_t c = { gguf, err, gguf->data, gguf->len };
    int rc = take_head(&c);

    if (rc != LLM_OK) {
        return rc;
    }

    gguf->kvs =
        arena_calloc(gguf->arena, (gguf->n_kvs + 1) * sizeof(gguf_kv_t));
    gguf->infos =
        arena_calloc(gguf->arena, (gguf->n_infos + 1) * sizeof(gguf_info_t));

    if (gguf->kvs == NULL || gguf->infos == NULL
        || !gguf_names_init(&gguf->kv_names, gguf->arena, gguf->n_kvs)
        || !gguf_names_init(&gguf->info_names, gguf->arena, gguf->n_infos))
    {
        return gguf_no_memory(&c);
    }

    rc = take_kvs(&c);
    if (rc == LLM_OK) {
        rc = read_alignment(&c);
    }
    if (rc == LLM_OK) {
        rc = gguf_take_infos(&c);
    }
    if (rc == LLM_OK) {
        rc = gguf_place_tensors(&c);
    }

    return rc;
}


static gguf_t *
create(llm_err_t *err)
{
    arena_t *arena = arena_create(16 * 1024);
    gguf_t *gguf = arena == NULL ? NULL : arena_calloc(arena, sizeof(gguf_t));

    if (gguf == NULL) {
        if (arena != NULL) {
            arena_destroy(arena);
        }
        llm_err_set(err, LLM_NOMEM, NULL, "no memory to open a model file");
        return NULL;
    }

    gguf->arena = arena;

    return gguf;
}


int
gguf_parse(const uint8_t *data, size_t len, gguf_t **out, llm_err_t *err)
{
    gguf_t *gguf = create(err);

    *out = NULL;
    if (gguf == NULL) {
        return LLM_NOMEM;
    }

    gguf->data = data;
    gguf->len = len;

    const int rc = parse(gguf, err);

    if (rc != LLM_OK) {
        gguf_close(gguf);
        return rc;
    }

    *out = gguf;

    return LLM_OK;
}


int
gguf_open(const char *path, gguf_t **out, llm_err_t *err)
{
    gguf_t *gguf = create(err);

    *out = NULL;
    if (gguf == NULL) {
        return LLM_NOMEM;
    }

    int rc = file_map(path, &gguf->map, err);

    if (rc == LLM_OK) {
        gguf->data = gguf->map.data;
        gguf->len = gguf->map.len;
        gguf->path = arena_strndup(gguf->arena, path, strlen(path));
        rc = parse(gguf, err);
    }

    if (rc != LLM_OK) {
        gguf_close(gguf);
        return rc;
    }

    *out = gguf;

    return LLM_OK;
}


void
gguf_close(gguf_t *gguf)
{
    if (gguf != NULL) {
        file_unmap(&gguf->map);
        arena_destroy(gguf->arena);
    }
}


int
gguf_err(const gguf_t *gguf, llm_err_t *err, const char *fmt, ...)
{
    char text[400];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);

    if (gguf->path == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL, "%s", text);
    }

    /* of a long path the end tells more */
    const size_t len = strlen(gguf->path);
    const char *path = len > 120 ? gguf->path + len - 120 : gguf->path;

    return llm_err_set(err, LLM_ERROR, NULL, "\"%s%s\": %s",
                       path == gguf->path ? "" : "...", path, text);
}
