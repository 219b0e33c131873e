/*
 * Repacked weights on disk, so that a start maps them instead of making them
 * again.
 *
 * A cache belongs to one state of one model file and to one form of weights
 * (op.h); whatever does not fit, or is damaged, is repacked from the model and
 * the cache is written anew.  Nothing here fails a start: the worst is a line
 * in the log.
 */

#ifndef ENGINE_MODEL_REPACK_CACHE_H
#define ENGINE_MODEL_REPACK_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/file.h"
#include "engine/model/gguf.h"
#include "kernels/op/op.h"

/* What a cache is for. */
typedef struct {
    char magic[8];
    char form[40];
    uint64_t size;      /* of the model file */
    uint64_t sample[2]; /* hash of its metadata, and of samples of the rest */
} repack_key_t;

/* One weight: what it was made of, its bytes and their hash. */
typedef struct {
    uint64_t ident;
    uint64_t bytes;
    uint64_t hash;
} repack_entry_t;

typedef struct {
    const char *path; /* NULL: there is no cache */
    const op_table_t *ops;
    op_dev_t *dev;
    const file_map_t *model;
    repack_key_t key;

    /* what was found; data is in the mapping, or a copy of it */
    file_map_t map;
    const repack_entry_t *entries;
    uint64_t n_entries;
    uint64_t next; /* entry */
    const uint8_t *data;
    size_t data_bytes;
    size_t at; /* of the next entry's data */
    bool copied;
    bool touched; /* the model's times are others than in the cache */

    buf_t made; /* what weights there are: (ident, weight) */
    int n_taken;
    int n_damaged;
    int n_made;
} repack_cache_t;


/* The file for a setting: "on" (next to the model), or a folder; heap.  NULL
 * for "off", NULL, and without memory. */
char *repack_cache_path(const char *setting, const char *model);

/* Looks for a cache at path (NULL: does nothing, as all others then).  path
 * and gguf are needed until repack_cache_save(), dev to the end. */
void repack_cache_open(repack_cache_t *cache, const char *path,
                       const gguf_t *gguf, const op_table_t *ops,
                       op_dev_t *dev);

/* The next weight, over the cache's data; NULL: it has to be repacked.  ident
 * tells it from others of the model. */
op_weight_t *repack_cache_take(repack_cache_t *cache, uint64_t ident,
                               const op_tensor_t *parts, int n_parts);

/* Every weight of the model, in order, wherever it came from. */
void repack_cache_add(repack_cache_t *cache, uint64_t ident,
                      op_weight_t *weight);

/* All weights are there: writes the cache unless it was right.  `path`: of the
 * model, which must not have changed meanwhile. */
void repack_cache_save(repack_cache_t *cache, const char *path);

/* The last, after all weights have been freed. */
void repack_cache_close(repack_cache_t *cache);

#endif /* ENGINE_MODEL_REPACK_CACHE_H */
