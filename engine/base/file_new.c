/* Files that appear whole.  Called by writers of models and of caches. */

#include "engine/base/file_new.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* between the open and the lock another writer may finish and rename */
enum { LOCK_TRIES = 10 };


static int
cannot(const char *path, int cause, llm_err_t *err)
{
    return llm_err_set(err, LLM_ERROR, NULL, "cannot write \"%s\": %s", path,
                       strerror(cause));
}


static void
forget(file_new_t *file)
{
    if (file->fd != -1) {
        close(file->fd);
    }

    free(file->path);
    free(file->temp);
    *file = (file_new_t){ .fd = -1 };
}


/* Is the locked file still the one that the name leads to? */
static bool
still_named(const file_new_t *file)
{
    struct stat opened, named;

    return fstat(file->fd, &opened) == 0 && lstat(file->temp, &named) == 0
           && opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}


/* LLM_AGAIN: try once more, the name has moved on. */
static int
try_lock(file_new_t *file, unsigned mode, llm_err_t *err)
{
    file->fd = open(file->temp, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW,
                    S_IRUSR | S_IWUSR);

    if (file->fd == -1) {
        return cannot(file->path, errno, err);
    }

    if (flock(file->fd, LOCK_EX | LOCK_NB) == -1) {
        const int cause = errno;

        return cause == EWOULDBLOCK
                   ? llm_err_set(err, LLM_LIMIT, NULL,
                                 "\"%s\" is being written by another process",
                                 file->path)
                   : cannot(file->path, cause, err);
    }

    if (!still_named(file)) {
        close(file->fd);
        file->fd = -1;
        return LLM_AGAIN;
    }

    if (ftruncate(file->fd, 0) == -1) {
        return cannot(file->path, errno, err);
    }

    /* some file systems have no permissions to give */
    fchmod(file->fd, mode);

    return LLM_OK;
}


int
file_new_open(file_new_t *file, const char *path, unsigned mode, llm_err_t *err)
{
    const size_t len = strlen(path) + sizeof(".tmp");
    struct stat st;

    *file = (file_new_t){ .fd = -1 };

    /* a device would be replaced, not written to */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "cannot write \"%s\": it is there and not a file",
                           path);
    }

    file->path = strdup(path);
    file->temp = malloc(len);

    if (file->path == NULL || file->temp == NULL) {
        forget(file);
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory to write \"%s\"",
                           path);
    }

    snprintf(file->temp, len, "%s.tmp", path);

    int rc = LLM_AGAIN;

    for (int i = 0; rc == LLM_AGAIN && i < LOCK_TRIES; i++) {
        rc = try_lock(file, mode, err);
    }

    if (rc == LLM_AGAIN) {
        rc = cannot(file->path, EBUSY, err);
    }

    if (rc != LLM_OK) {
        forget(file);
    }

    return rc == LLM_LIMIT ? LLM_AGAIN : rc;
}


int
file_new_reserve(file_new_t *file, uint64_t bytes, llm_err_t *err)
{
    int rc;

    if (bytes == 0) {
        return LLM_OK;
    }

    if (bytes > INT64_MAX) {
        return cannot(file->path, EFBIG, err);
    }

    /* not posix_fallocate(), which would write zeroes where this has no say;
     * the size stays what has been written */
    do {
        rc = fallocate(file->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t) bytes);
    } while (rc == -1 && errno == EINTR);

    if (rc == 0 || (errno != ENOSPC && errno != EDQUOT && errno != EFBIG)) {
        return LLM_OK;
    }

    return llm_err_set(err, LLM_ERROR, NULL,
                       "cannot write \"%s\": %s: it needs %.1f MB", file->path,
                       strerror(errno), (double) bytes / 1e6);
}


int
file_new_write(file_new_t *file, const void *data, size_t len, llm_err_t *err)
{
    const uint8_t *p = data;

    while (len > 0) {
        const ssize_t n = write(file->fd, p, len);

        if (n == -1 && errno == EINTR) {
            continue;
        }

        if (n <= 0) {
            return cannot(file->path, n == 0 ? ENOSPC : errno, err);
        }

        p += n;
        len -= (size_t) n;
    }

    return LLM_OK;
}


int
file_new_commit(file_new_t *file, llm_err_t *err)
{
    /* Renamed while the lock is held: afterwards the name of the temporary
     * file is another writer's.  Some file systems tell only when closing that
     * the disk was full, hence the second descriptor, which is closed first. */
    const int second = dup(file->fd);
    int rc = LLM_OK;

    if (second == -1 || close(second) == -1
        || rename(file->temp, file->path) == -1) {
        rc = cannot(file->path, errno, err);
        unlink(file->temp);
    }

    forget(file);

    return rc;
}


void
file_new_drop(file_new_t *file)
{
    if (file->fd != -1) {
        unlink(file->temp);
    }

    forget(file);
}
