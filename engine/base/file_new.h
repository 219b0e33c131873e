/*
 * A file that appears whole or not at all: it is written as PATH.tmp and takes
 * its name when it is complete.
 *
 * One process writes at a time: the temporary file is locked, and what a
 * process that was killed left behind is written over by the next.
 */

#ifndef ENGINE_BASE_FILE_NEW_H
#define ENGINE_BASE_FILE_NEW_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct {
    int fd;
    char *path;
    char *temp;
} file_new_t;


/* mode: the file's permissions.  LLM_AGAIN when somebody else is writing it;
 * LLM_ERROR with path and cause in err.  After LLM_OK one of commit and drop
 * follows. */
int file_new_open(file_new_t *file, const char *path, unsigned mode,
                  llm_err_t *err);

/* Asks for the room that `bytes` in all will need, so that a disk too small
 * tells before the work, not behind it.  Where a file system has no such
 * promise to give, nothing happens. */
int file_new_reserve(file_new_t *file, uint64_t bytes, llm_err_t *err);

/* Appends all len bytes.  After a failure only drop makes sense. */
int file_new_write(file_new_t *file, const void *data, size_t len,
                   llm_err_t *err);

/* Gives the file its name, in place of an older one.  Either way the
 * file_new_t is done with: a failure leaves nothing. */
int file_new_commit(file_new_t *file, llm_err_t *err);

/* Removes what was written. */
void file_new_drop(file_new_t *file);

#endif /* ENGINE_BASE_FILE_NEW_H */
