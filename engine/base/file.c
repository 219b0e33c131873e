/* Files: map and read. */

#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>


int
file_map(const char *path, file_map_t *map, llm_err_t *err)
{
    struct stat st;

    const int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd == -1) {
        return llm_err_set(err, LLM_ERROR, NULL, "cannot open \"%s\": %s", path,
                           strerror(errno));
    }

    if (fstat(fd, &st) == -1 || !S_ISREG(st.st_mode) || st.st_size == 0) {
        close(fd);
        return llm_err_set(err, LLM_ERROR, NULL,
                           "\"%s\" is not a regular file with content", path);
    }

    void *p = mmap(NULL, (size_t) st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    const int saved = errno;
    close(fd);

    if (p == MAP_FAILED) {
        return llm_err_set(err, LLM_ERROR, NULL, "cannot map \"%s\": %s", path,
                           strerror(saved));
    }

    map->data = p;
    map->len = (size_t) st.st_size;

    return LLM_OK;
}


void
file_unmap(file_map_t *map)
{
    if (map->data != NULL) {
        munmap((void *) map->data, map->len);
        map->data = NULL;
        map->len = 0;
    }
}


int
file_read(const char *path, size_t max, char **data, size_t *len,
          llm_err_t *err)
{
    FILE *f = fopen(path, "rbe");

    if (f == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL, "cannot open \"%s\": %s", path,
                           strerror(errno));
    }

    char *p = malloc(max + 1);
    const size_t n = p == NULL ? 0 : fread(p, 1, max + 1, f);
    const int saved = p != NULL && ferror(f) ? errno : 0;
    fclose(f);

    if (p == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for \"%s\"", path);
    }

    if (saved != 0) {
        free(p);
        return llm_err_set(err, LLM_ERROR, NULL, "cannot read \"%s\": %s", path,
                           strerror(saved));
    }

    if (n > max) {
        free(p);
        return llm_err_set(err, LLM_LIMIT, NULL,
                           "\"%s\" is larger than %zu "
                           "bytes",
                           path, max);
    }

    p[n] = '\0';
    *data = p;
    *len = n;

    return LLM_OK;
}
