/* Files: map one for reading, read a small one whole. */

#ifndef ENGINE_BASE_FILE_H
#define ENGINE_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct {
    const uint8_t *data;
    size_t len;
} file_map_t;


/* Maps path read-only.  On failure err names the path and the cause.  A file
 * that is truncated later raises SIGBUS: loaders copy what they keep. */
int file_map(const char *path, file_map_t *map, llm_err_t *err);
void file_unmap(file_map_t *map);

/* Reads at most max bytes into a fresh zero-terminated heap buffer, which the
 * caller frees.  LLM_LIMIT when the file is larger. */
int file_read(const char *path, size_t max, char **data, size_t *len,
              llm_err_t *err);

#endif /* ENGINE_BASE_FILE_H */
