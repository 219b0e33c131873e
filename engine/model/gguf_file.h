/*
 * What gguf.c fills while it parses and gguf_get.c answers from: the index of
 * a GGUF file.  Nobody else includes this.
 */

#ifndef ENGINE_MODEL_GGUF_FILE_H
#define ENGINE_MODEL_GGUF_FILE_H

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/model/gguf.h"

/* Value types, GGUF's numbers. */
enum {
    GGUF_U8 = 0,
    GGUF_I8 = 1,
    GGUF_U16 = 2,
    GGUF_I16 = 3,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_STRING = 8,
    GGUF_ARRAY = 9,
    GGUF_U64 = 10,
    GGUF_I64 = 11,
    GGUF_F64 = 12,
};

/* One pair.  A scalar is an array of one element with is_array false, so that
 * one reader serves both. */
typedef struct {
    gguf_str_t name;
    uint32_t type; /* of the elements, never GGUF_ARRAY */
    bool is_array;
    int64_t n;
    const uint8_t *data;       /* numbers: n elements, unaligned */
    const gguf_str_t *strings; /* strings: n of them */
} gguf_kv_t;

enum { GGUF_MAX_DIMS = 4 };

typedef struct {
    gguf_str_t name;
    op_tensor_t tensor;
    uint32_t n_dims;
    uint64_t ne[GGUF_MAX_DIMS];
    uint64_t offset; /* from the start of the tensor data */
    uint64_t bytes;
} gguf_info_t;

/* Names → indexes: open addressing, a power of two slots, at most half full;
 * a slot holds the index + 1. */
typedef struct {
    uint32_t *slots;
    uint32_t mask;
} gguf_names_t;

struct gguf_s {
    arena_t *arena;
    file_map_t map; /* of gguf_open() */
    const char *path;
    const uint8_t *data;
    size_t len;
    gguf_kv_t *kvs;
    gguf_info_t *infos;
    gguf_names_t kv_names;
    gguf_names_t info_names;
    uint32_t n_kvs;
    uint32_t n_infos;
    uint32_t alignment;
    size_t tensor_bytes;
};

/* Where the parser stands. */
typedef struct {
    gguf_t *gguf;
    llm_err_t *err;
    const uint8_t *p;
    size_t left;
} gguf_cursor_t;


/* Takes n bytes; NULL when fewer are left.  The others: false likewise. */
const uint8_t *gguf_take(gguf_cursor_t *c, uint64_t n);
bool gguf_take_u32(gguf_cursor_t *c, uint32_t *out);
bool gguf_take_u64(gguf_cursor_t *c, uint64_t *out);

/* The name of the i-th key or tensor (`what`); fills err. */
int gguf_take_name(gguf_cursor_t *c, gguf_str_t *out, const char *what,
                   uint32_t i);

/* Fill err, return its code. */
int gguf_cut_short(gguf_cursor_t *c, const char *where);
int gguf_no_memory(gguf_cursor_t *c);

/* The tensor table, then, with the cursor behind it, the places. */
int gguf_take_infos(gguf_cursor_t *c);
int gguf_place_tensors(gguf_cursor_t *c);

/* Bytes of one element of a value type that is a number or a boolean; 0 for
 * the others. */
size_t gguf_type_size(uint32_t type);

/* Memory for n names. */
bool gguf_names_init(gguf_names_t *names, arena_t *arena, uint32_t n);

/* The slot of a name, or the empty slot where it belongs.  at(source, i) is
 * the name of entry i. */
uint32_t *gguf_names_slot(const gguf_names_t *names, gguf_str_t name,
                          gguf_str_t (*at)(const void *source, uint32_t i),
                          const void *source);

gguf_str_t gguf_kv_name(const void *kvs, uint32_t i);
gguf_str_t gguf_info_name(const void *infos, uint32_t i);

#endif /* ENGINE_MODEL_GGUF_FILE_H */
