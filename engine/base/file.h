/* Files: map one for reading, read a small one whole. */

#ifndef ENGINE_BASE_FILE_H
#define ENGINE_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

/* What the file system knows of a file: enough to tell that it has changed.
 * Nobody can set changed_ns but the clock. */
typedef struct {
    uint64_t dev;
    uint64_t ino;
    uint64_t size;
    int64_t modified_ns;
    int64_t changed_ns;
    uint32_t mode;
    uint32_t uid;
} file_id_t;

typedef struct {
    const uint8_t *data;
    size_t len;
    file_id_t id;
} file_map_t;


/* Maps path read-only.  On failure err names the path and the cause.  A file
 * that is truncated later raises SIGBUS: loaders copy what they keep. */
int file_map(const char *path, file_map_t *map, llm_err_t *err);
void file_unmap(file_map_t *map);

/* Asks for huge pages and reads all of it in; a kernel that cannot (before
 * 5.14) does nothing. */
void file_map_populate(const file_map_t *map);

/* Bytes of it that are mapped by huge pages now. */
size_t file_map_huge(const file_map_t *map);

/* The pages of a part are not needed soon: they leave the process.  They are
 * there again when read. */
void file_map_done(const file_map_t *map, const void *part, size_t len);

/* LLM_ERROR when there is no such file. */
int file_id_read(const char *path, file_id_t *id);

/* Reads at most max bytes into a fresh zero-terminated heap buffer, which the
 * caller frees.  LLM_LIMIT when the file is larger. */
int file_read(const char *path, size_t max, char **data, size_t *len,
              llm_err_t *err);

#endif /* ENGINE_BASE_FILE_H */
