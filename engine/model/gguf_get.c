/*
 * Answers about a parsed GGUF file: values by key, tensors by name.
 *
 * gguf.c has checked every offset, so these functions only look up and
 * convert.  Numbers lie unaligned in the file and are copied out.
 */

#include "engine/model/gguf.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/model/gguf_file.h"


size_t
gguf_type_size(uint32_t type)
{
    switch (type) {
    case GGUF_U8:
    case GGUF_I8:
    case GGUF_BOOL:
        return 1;
    case GGUF_U16:
    case GGUF_I16:
        return 2;
    case GGUF_U32:
    case GGUF_I32:
    case GGUF_F32:
        return 4;
    case GGUF_U64:
    case GGUF_I64:
    case GGUF_F64:
        return 8;
    default:
        return 0;
    }
}


/* --- names --- */

/* FNV-1a. */
static uint32_t
hash(gguf_str_t name)
{
    uint32_t h = 2166136261u;

    for (size_t i = 0; i < name.len; i++) {
        h = (h ^ (uint8_t) name.text[i]) * 16777619u;
    }

    return h ^ (h >> 15);
}


bool
gguf_names_init(gguf_names_t *names, arena_t *arena, uint32_t n)
{
    uint32_t size = 8;

    while (size < 2 * n) {
        size *= 2;
    }

    names->slots = arena_calloc(arena, size * sizeof(uint32_t));
    names->mask = size - 1;

    return names->slots != NULL;
}


uint32_t *
gguf_names_slot(const gguf_names_t *names, gguf_str_t name,
                gguf_str_t (*at)(const void *source, uint32_t i),
                const void *source)
{
    uint32_t i = hash(name) & names->mask;

    while (names->slots[i] != 0) {
        const gguf_str_t other = at(source, names->slots[i] - 1);

        if (other.len == name.len
            && memcmp(other.text, name.text, name.len) == 0) {
            break;
        }

        i = (i + 1) & names->mask;
    }

    return &names->slots[i];
}


gguf_str_t
gguf_kv_name(const void *kvs, uint32_t i)
{
    return ((const gguf_kv_t *) kvs)[i].name;
}


gguf_str_t
gguf_info_name(const void *infos, uint32_t i)
{
    return ((const gguf_info_t *) infos)[i].name;
}


static const gguf_kv_t *
find(const gguf_t *gguf, const char *key, bool is_array)
{
    const gguf_str_t name = { key, strlen(key) };
    const uint32_t *slot =
        gguf_names_slot(&gguf->kv_names, name, gguf_kv_name, gguf->kvs);

    if (*slot == 0 || gguf->kvs[*slot - 1].is_array != is_array) {
        return NULL;
    }

    return &gguf->kvs[*slot - 1];
}


bool
gguf_has(const gguf_t *gguf, const char *key)
{
    return find(gguf, key, false) != NULL || find(gguf, key, true) != NULL;
}


/* --- numbers --- */

/* An integer of any type, if it fits low … high. */
static bool
get_int(const gguf_kv_t *kv, int64_t i, int64_t low, int64_t high, int64_t *out)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
    } v;
    int64_t n;

    if (kv == NULL || i < 0 || i >= kv->n || kv->data == NULL) {
        return false;
    }

    const size_t size = gguf_type_size(kv->type);

    memcpy(&v, kv->data + (size_t) i * size, size);

    switch (kv->type) {
    case GGUF_U8:
        n = v.u8;
        break;
    case GGUF_I8:
        n = v.i8;
        break;
    case GGUF_U16:
        n = v.u16;
        break;
    case GGUF_I16:
        n = v.i16;
        break;
    case GGUF_U32:
        n = v.u32;
        break;
    case GGUF_I32:
        n = v.i32;
        break;
    case GGUF_U64:
        n = v.u64 > INT64_MAX ? INT64_MAX : (int64_t) v.u64;
        break;
    case GGUF_I64:
        n = v.i64;
        break;
    default:
        return false;
    }

    *out = n;

    return n >= low && n <= high;
}


static bool
get_float(const gguf_kv_t *kv, int64_t i, float *out)
{
    double d;

    if (kv == NULL || i < 0 || i >= kv->n) {
        return false;
    }

    switch (kv->type) {
    case GGUF_F32:
        memcpy(out, kv->data + (size_t) i * sizeof(float), sizeof(float));
        return true;
    case GGUF_F64:
        memcpy(&d, kv->data + (size_t) i * sizeof(double), sizeof(double));
        if (isfinite(d) && fabs(d) > FLT_MAX) {
            return false;
        }
        *out = (float) d;
        return true;
    default:
        return false;
    }
}


bool
gguf_u32(const gguf_t *gguf, const char *key, uint32_t *out)
{
    int64_t n;

    if (!get_int(find(gguf, key, false), 0, 0, UINT32_MAX, &n)) {
        return false;
    }

    *out = (uint32_t) n;

    return true;
}


bool
gguf_f32(const gguf_t *gguf, const char *key, float *out)
{
    return get_float(find(gguf, key, false), 0, out);
}


bool
gguf_bool(const gguf_t *gguf, const char *key, bool *out)
{
    const gguf_kv_t *kv = find(gguf, key, false);

    if (kv == NULL || kv->type != GGUF_BOOL) {
        return false;
    }

    *out = kv->data[0] != 0;

    return true;
}


bool
gguf_str(const gguf_t *gguf, const char *key, gguf_str_t *out)
{
    const gguf_kv_t *kv = find(gguf, key, false);

    if (kv == NULL || kv->type != GGUF_STRING) {
        return false;
    }

    *out = kv->strings[0];

    return true;
}


/* --- arrays --- */

int64_t
gguf_array_len(const gguf_t *gguf, const char *key)
{
    const gguf_kv_t *kv = find(gguf, key, true);

    return kv == NULL ? -1 : kv->n;
}


bool
gguf_array_str(const gguf_t *gguf, const char *key, int64_t i, gguf_str_t *out)
{
    const gguf_kv_t *kv = find(gguf, key, true);

    if (kv == NULL || kv->type != GGUF_STRING || i < 0 || i >= kv->n) {
        return false;
    }

    *out = kv->strings[i];

    return true;
}


bool
gguf_array_i32(const gguf_t *gguf, const char *key, int64_t i, int32_t *out)
{
    int64_t n;

    if (!get_int(find(gguf, key, true), i, INT32_MIN, INT32_MAX, &n)) {
        return false;
    }

    *out = (int32_t) n;

    return true;
}


bool
gguf_array_f32(const gguf_t *gguf, const char *key, int64_t i, float *out)
{
    return get_float(find(gguf, key, true), i, out);
}


/* --- tensors --- */

int
gguf_n_tensors(const gguf_t *gguf)
{
    return (int) gguf->n_infos;
}


int
gguf_tensor_index(const gguf_t *gguf, const char *name)
{
    const gguf_str_t str = { name, strlen(name) };
    const uint32_t *slot =
        gguf_names_slot(&gguf->info_names, str, gguf_info_name, gguf->infos);

    return (int) *slot - 1;
}


void
gguf_tensor_at(const gguf_t *gguf, int i, gguf_str_t *name, op_tensor_t *out)
{
    *name = gguf->infos[i].name;
    *out = gguf->infos[i].tensor;
}


bool
gguf_tensor(const gguf_t *gguf, const char *name, op_tensor_t *out)
{
    const int i = gguf_tensor_index(gguf, name);

    if (i < 0) {
        return false;
    }

    *out = gguf->infos[i].tensor;

    return true;
}


const file_map_t *
gguf_map(const gguf_t *gguf)
{
    return gguf->map.data != NULL ? &gguf->map : NULL;
}


void
gguf_tensor_done(const gguf_t *gguf, const op_tensor_t *tensor)
{
    if (gguf->map.data != NULL) {
        file_map_done(&gguf->map, tensor->data,
                      op_row_bytes((int) tensor->dtype, tensor->n_in)
                          * (size_t) tensor->n_out);
    }
}


size_t
gguf_tensor_bytes(const gguf_t *gguf)
{
    return gguf->tensor_bytes;
}


gguf_shown_t
gguf_show(gguf_str_t str)
{
    gguf_shown_t shown;
    size_t n = str.len > 64 ? 64 : str.len;

    for (size_t i = 0; i < n; i++) {
        const char ch = str.text[i];

        shown.text[i] = ch >= 0x20 && ch < 0x7f && ch != '"' ? ch : '?';
    }

    if (str.len > 64) {
        memcpy(shown.text + n, "...", 3);
        n += 3;
    }

    shown.text[n] = '\0';

    return shown;
}
