/*
 * The cache of repacked weights.  Called while a model is loaded.
 *
 * The file: a header, the table of weights, and from 2 MiB on the weights.  It
 * is written in pieces of 2 MiB, so that file systems which can keep their
 * pages in large folios do, and the mapping then has huge pages.  Where it has
 * none the weights are copied into memory that has: reading weights is all
 * that decoding does, and small pages made it up to a quarter slower.
 *
 * Is it the right one?  Its model's size, times, metadata and 64 samples are
 * compared.  The time of an inode's last change is the file system's own and
 * cannot be set, so it moves with every write, also by tools that restore the
 * time of modification; but it moves with a new link or owner, too.  So times
 * that differ are no verdict: then the hash of the whole model decides, which
 * takes longer but is still faster than repacking.  A model that was changed
 * in the last moment, within the grain of those times, is not cached.
 *
 * Is it whole?  Each weight has a hash of its own, against damage.  Against
 * malice there is the owner of the file, who must be this user, root, or the
 * model's owner.
 */

#include "engine/model/repack_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#include "engine/base/file_new.h"
#include "engine/base/log.h"

enum {
    DATA_AT = 2 * 1024 * 1024, /* a huge page */
    STAGE_BYTES = 2 * 1024 * 1024,
    PIECE_BYTES = 16 * 1024 * 1024,
    SAMPLES = 64,
    SAMPLE_BYTES = 4096,
};

typedef struct {
    repack_key_t key;
    int64_t modified_ns; /* the model's times, and the hash of all of it */
    int64_t changed_ns;
    uint64_t whole[2];
    uint64_t n_entries;
    uint64_t data_bytes;
    uint64_t table_hash;
    uint64_t hash; /* of all before */
} header_t;

enum {
    ENTRIES_MAX = (DATA_AT - sizeof(header_t)) / sizeof(repack_entry_t),
};

typedef struct {
    uint64_t ident;
    op_weight_t *weight;
} made_t;

/* A file being written, in whole pieces. */
typedef struct {
    file_new_t file;
    uint8_t *stage;
    size_t used;
    llm_err_t err;
} out_t;


char *
repack_cache_path(const char *setting, const char *model)
{
    buf_t path = { 0 };

    if (setting == NULL || strcmp(setting, "off") == 0) {
        return NULL;
    }

    if (strcmp(setting, "on") == 0) {
        buf_adds(&path, model);

    } else {
        /* models of one name in different folders may share this one */
        const char *slash = strrchr(model, '/');
        char *real = realpath(model, NULL);
        const char *whole = real != NULL ? real : model;

        buf_addf(&path, "%s/%s-%016llx", setting,
                 slash != NULL ? slash + 1 : model,
                 (unsigned long long) XXH3_64bits(whole, strlen(whole)));
        free(real);
    }

    buf_adds(&path, ".repack");
    buf_addc(&path, '\0');

    if (path.failed) {
        buf_fini(&path);
    }

    return path.data;
}


/* --- the right one? --- */

/* Bytes before the first tensor. */
static size_t
metadata_bytes(const gguf_t *gguf, const file_map_t *map)
{
    size_t least = map->len;

    for (int i = 0; i < gguf_n_tensors(gguf); i++) {
        gguf_str_t name;
        op_tensor_t tensor;

        gguf_tensor_at(gguf, i, &name, &tensor);

        const size_t at = (size_t) ((const uint8_t *) tensor.data - map->data);

        least = at < least ? at : least;
    }

    return least;
}


static void
fill_key(repack_cache_t *cache, const gguf_t *gguf)
{
    const file_map_t *map = cache->model;
    const size_t head = metadata_bytes(gguf, map);
    const size_t rest = map->len - head;
    repack_key_t *key = &cache->key;
    XXH3_state_t *state = XXH3_createState();

    memset(key, 0, sizeof(*key));
    memcpy(key->magic, "LLMREPK", sizeof(key->magic));
    snprintf(key->form, sizeof(key->form), "%s",
             cache->ops->weight_form(cache->dev));
    key->size = map->id.size;

    if (state == NULL) {
        cache->path = NULL;
        return;
    }

    XXH3_128bits_reset(state);
    XXH3_128bits_update(state, map->data, head);

    for (size_t i = 0; i < SAMPLES && rest > SAMPLE_BYTES; i++) {
        const size_t at = head + (rest - SAMPLE_BYTES) / (SAMPLES - 1) * i;

        XXH3_128bits_update(state, map->data + at, SAMPLE_BYTES);
    }

    const XXH128_hash_t hash = XXH3_128bits_digest(state);

    key->sample[0] = hash.low64;
    key->sample[1] = hash.high64;
    XXH3_freeState(state);
}


/* False: no memory. */
static bool
hash_whole(const file_map_t *map, uint64_t out[2])
{
    XXH3_state_t *state = XXH3_createState();

    if (state == NULL) {
        return false;
    }

    XXH3_128bits_reset(state);

    for (size_t at = 0; at < map->len; at += PIECE_BYTES) {
        const size_t left = map->len - at;
        const size_t n = left < PIECE_BYTES ? left : PIECE_BYTES;

        XXH3_128bits_update(state, map->data + at, n);
        file_map_done(map, map->data + at, n);
    }

    const XXH128_hash_t hash = XXH3_128bits_digest(state);

    out[0] = hash.low64;
    out[1] = hash.high64;
    XXH3_freeState(state);

    return true;
}


/* Is a cache with these times and this hash one of the model as it is? */
static bool
same_model(repack_cache_t *cache, const header_t *header)
{
    const file_id_t *id = &cache->model->id;
    uint64_t whole[2];

    if (memcmp(&header->key, &cache->key, sizeof(header->key)) != 0) {
        return false;
    }

    cache->touched = header->modified_ns != id->modified_ns
                     || header->changed_ns != id->changed_ns;

    return !cache->touched
           || (hash_whole(cache->model, whole)
               && memcmp(whole, header->whole, sizeof(whole)) == 0);
}


static bool
trusted(const repack_cache_t *cache, const file_id_t *id)
{
    return (id->uid == 0 || id->uid == geteuid()
            || id->uid == cache->model->id.uid)
           && (id->mode & (S_IWGRP | S_IWOTH)) == 0;
}


/* NULL when the mapped file is a cache of this model; else why it is not.
 * Weights are checked when they are taken. */
static const char *
check_header(repack_cache_t *cache)
{
    const file_map_t *map = &cache->map;
    header_t header;
    uint64_t sum = 0;

    if (!trusted(cache, &map->id)) {
        return "belongs to somebody who might be anybody";
    }

    if (map->len < DATA_AT) {
        return "is cut short";
    }

    memcpy(&header, map->data, sizeof(header));

    if (memcmp(header.key.magic, cache->key.magic, sizeof(header.key.magic))
            != 0
        || header.hash != XXH3_64bits(&header, offsetof(header_t, hash))
        || header.n_entries > ENTRIES_MAX)
    {
        return "is damaged";
    }

    if (!same_model(cache, &header)) {
        return "is of another state of the model, or of another version";
    }

    const repack_entry_t *entries =
        (const repack_entry_t *) (map->data + sizeof(header));

    if (header.table_hash
        != XXH3_64bits(entries, header.n_entries * sizeof(*entries)))
    {
        return "is damaged";
    }

    for (uint64_t i = 0; i < header.n_entries; i++) {
        sum += entries[i].bytes;
    }

    if (sum != header.data_bytes || sum != map->len - DATA_AT) {
        return "is cut short";
    }

    cache->entries = entries;
    cache->n_entries = header.n_entries;
    cache->data = map->data + DATA_AT;
    cache->data_bytes = sum;

    return NULL;
}


/* Copies the weights where the mapping has small pages. */
static void
choose_pages(repack_cache_t *cache)
{
    file_map_populate(&cache->map);

    if (cache->data_bytes < DATA_AT
        || file_map_huge(&cache->map) >= cache->data_bytes / 2)
    {
        return;
    }

    uint8_t *copy = cache->ops->alloc(cache->dev, cache->data_bytes);

    if (copy == NULL) {
        return;
    }

    for (size_t at = 0; at < cache->data_bytes; at += PIECE_BYTES) {
        const size_t left = cache->data_bytes - at;
        const size_t n = left < PIECE_BYTES ? left : PIECE_BYTES;

        memcpy(copy + at, cache->data + at, n);
        file_map_done(&cache->map, cache->data + at, n);
    }

    cache->data = copy;
    cache->copied = true;
}


void
repack_cache_open(repack_cache_t *cache, const char *path, const gguf_t *gguf,
                  const op_table_t *ops, op_dev_t *dev)
{
    *cache =
        (repack_cache_t){ .ops = ops, .dev = dev, .model = gguf_map(gguf) };

    if (path == NULL || cache->model == NULL) {
        return;
    }

    if (ops->weight_form == NULL) {
        log_write(LOG_NOTICE, "repack cache: device \"%s\" has no use for one",
                  ops->name);
        return;
    }

    cache->path = path;
    fill_key(cache, gguf);

    if (access(path, F_OK) == -1 || file_map(path, &cache->map, NULL) != LLM_OK)
    {
        return;
    }

    const char *why = check_header(cache);

    if (why != NULL) {
        log_write(LOG_NOTICE, "repack cache: \"%s\" %s", path, why);
        file_unmap(&cache->map);
        return;
    }

    choose_pages(cache);
}


/* --- weights --- */

op_weight_t *
repack_cache_take(repack_cache_t *cache, uint64_t ident,
                  const op_tensor_t *parts, int n_parts)
{
    op_err_t err;

    if (cache->next >= cache->n_entries) {
        return NULL;
    }

    const repack_entry_t *entry = &cache->entries[cache->next++];
    const op_bytes_t data = { cache->data + cache->at, (size_t) entry->bytes };

    cache->at += data.len;

    op_weight_t *weight =
        entry->ident == ident && entry->hash == XXH3_64bits(data.data, data.len)
            ? cache->ops->weight_over(cache->dev, parts, n_parts, &data, &err)
            : NULL;

    if (weight != NULL) {
        cache->n_taken++;
    } else {
        cache->n_damaged++;
    }

    return weight;
}


void
repack_cache_add(repack_cache_t *cache, uint64_t ident, op_weight_t *weight)
{
    const made_t made = { ident, weight };

    if (cache->path != NULL) {
        buf_add(&cache->made, &made, sizeof(made));
        cache->n_made++;
    }
}


/* --- writing --- */

static int
flush(out_t *out)
{
    const int rc = file_new_write(&out->file, out->stage, out->used, &out->err);

    out->used = 0;

    return rc;
}


static int
put(out_t *out, const void *data, size_t len)
{
    const uint8_t *p = data;

    while (len > 0) {
        const size_t room = STAGE_BYTES - out->used;
        const size_t n = len < room ? len : room;

        memcpy(out->stage + out->used, p, n);
        out->used += n;
        p += n;
        len -= n;

        if (out->used == STAGE_BYTES && flush(out) != LLM_OK) {
            return LLM_ERROR;
        }
    }

    return LLM_OK;
}


/* Header and table, filled up to DATA_AT, which is one stage. */
static int
put_head(out_t *out, const repack_cache_t *cache, const uint64_t whole[2])
{
    const made_t *made = (const made_t *) (const void *) cache->made.data;
    header_t header = { .key = cache->key,
                        .modified_ns = cache->model->id.modified_ns,
                        .changed_ns = cache->model->id.changed_ns,
                        .whole = { whole[0], whole[1] },
                        .n_entries = (uint64_t) cache->n_made };
    repack_entry_t *entries =
        (repack_entry_t *) (void *) (out->stage + sizeof(header));
    const size_t table = (size_t) cache->n_made * sizeof(*entries);

    _Static_assert((int) STAGE_BYTES == (int) DATA_AT, "the head is a stage");
    memset(out->stage, 0, STAGE_BYTES);

    for (int i = 0; i < cache->n_made; i++) {
        const size_t bytes = cache->ops->weight_bytes(made[i].weight);
        const void *data = cache->ops->weight_data(made[i].weight);

        entries[i] =
            (repack_entry_t){ made[i].ident, bytes, XXH3_64bits(data, bytes) };
        header.data_bytes += bytes;
    }

    header.table_hash = XXH3_64bits(entries, table);
    header.hash = XXH3_64bits(&header, offsetof(header_t, hash));
    memcpy(out->stage, &header, sizeof(header));
    out->used = STAGE_BYTES;

    return flush(out);
}


static int
write_cache(out_t *out, const repack_cache_t *cache, const uint64_t whole[2])
{
    const made_t *made = (const made_t *) (const void *) cache->made.data;
    const unsigned mode = (cache->model->id.mode & 0444) | S_IRUSR | S_IWUSR;
    int rc = file_new_open(&out->file, cache->path, mode, &out->err);

    if (rc == LLM_OK) {
        rc = put_head(out, cache, whole);
    }

    for (int i = 0; rc == LLM_OK && i < cache->n_made; i++) {
        rc = put(out, cache->ops->weight_data(made[i].weight),
                 cache->ops->weight_bytes(made[i].weight));
    }

    if (rc == LLM_OK) {
        rc = flush(out);
    }
    if (rc == LLM_OK) {
        return file_new_commit(&out->file, &out->err);
    }

    file_new_drop(&out->file);

    return rc;
}


/* Has the model kept still since before it was mapped, and long enough before
 * for its times to tell?  They tick with the kernel's clock, or, where they
 * have no fraction, with the seconds. */
static bool
settled(const repack_cache_t *cache, const char *path)
{
    const file_id_t *was = &cache->model->id;
    const int64_t grain =
        was->changed_ns % 1000000000 == 0 ? 2000000000 : 100000000;
    struct timespec now;
    file_id_t is;

    clock_gettime(CLOCK_REALTIME, &now);

    return file_id_read(path, &is) == LLM_OK && is.size == was->size
           && is.ino == was->ino && is.changed_ns == was->changed_ns
           && is.modified_ns == was->modified_ns
           && (int64_t) now.tv_sec * 1000000000 + now.tv_nsec - was->changed_ns
                  > grain;
}


void
repack_cache_save(repack_cache_t *cache, const char *path)
{
    const bool right = cache->n_taken == cache->n_made
                       && (uint64_t) cache->n_made == cache->n_entries;
    uint64_t whole[2];
    out_t out = { .file = { .fd = -1 } };

    if (cache->path == NULL) {
        return;
    }

    if (right && !cache->touched) {
        log_write(LOG_NOTICE, "repack cache: %d weights from \"%s\"%s",
                  cache->n_taken, cache->path,
                  cache->copied ? ", copied to huge pages" : "");
        return;
    }

    if (cache->n_damaged > 0) {
        log_write(LOG_WARN,
                  "repack cache: \"%s\" is damaged: %d of %d weights were "
                  "repacked",
                  cache->path, cache->n_made - cache->n_taken, cache->n_made);
    }

    const bool hashed = hash_whole(cache->model, whole);

    if (!settled(cache, path)) {
        log_write(LOG_NOTICE,
                  "repack cache: \"%s\" has only just been written, so it is "
                  "cached by a later start",
                  path);
        return;
    }

    out.stage = !hashed || cache->made.failed || cache->n_made > ENTRIES_MAX
                    ? NULL
                    : malloc(STAGE_BYTES);

    if (out.stage == NULL) {
        log_write(LOG_NOTICE, "repack cache: no memory to write \"%s\"",
                  cache->path);
        return;
    }

    if (write_cache(&out, cache, whole) == LLM_OK) {
        log_write(LOG_NOTICE, "repack cache: \"%s\" written, %d weights",
                  cache->path, cache->n_made);
    } else {
        log_write(LOG_NOTICE, "repack cache: not written: %s", out.err.text);
    }

    free(out.stage);
    buf_fini(&cache->made);
}


void
repack_cache_close(repack_cache_t *cache)
{
    if (cache->copied) {
        cache->ops->free(cache->dev, (void *) (uintptr_t) cache->data,
                         cache->data_bytes);
    }

    file_unmap(&cache->map);
    buf_fini(&cache->made);
    *cache = (repack_cache_t){ .path = NULL };
}
