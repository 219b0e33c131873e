/* Files: map and read. */

#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>


static file_id_t
id_of(const struct stat *st)
{
    return (file_id_t){
        .dev = (uint64_t) st->st_dev,
        .ino = (uint64_t) st->st_ino,
        .size = (uint64_t) st->st_size,
        .modified_ns =
            (int64_t) st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
        .changed_ns =
            (int64_t) st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec,
        .mode = (uint32_t) st->st_mode,
        .uid = (uint32_t) st->st_uid,
    };
}


int
file_id_read(const char *path, file_id_t *id)
{
    struct stat st;

    if (stat(path, &st) == -1) {
        return LLM_ERROR;
    }

    *id = id_of(&st);

    return LLM_OK;
}


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
    map->id = id_of(&st);

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


void
file_map_populate(const file_map_t *map)
{
    void *p = (void *) (uintptr_t) map->data;

    madvise(p, map->len, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_READ
    madvise(p, map->len, MADV_POPULATE_READ);
#endif
}


size_t
file_map_huge(const file_map_t *map)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    char line[512];
    unsigned long long from, to, kib, bytes = 0;
    bool inside = false;

    if (f == NULL) {
        return 0;
    }

    /* a line "from-to perms …" opens the part of each mapping */
    while (fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2) {
            inside = from >= (uintptr_t) map->data
                     && from < (uintptr_t) map->data + map->len;

        } else if (inside && sscanf(line, "FilePmdMapped: %llu", &kib) == 1) {
            bytes += kib * 1024;
        }
    }

    fclose(f);

    return (size_t) bytes;
}


void
file_map_done(const file_map_t *map, const void *part, size_t len)
{
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t from = (uintptr_t) part / page * page;

    llm_dassert(from >= (uintptr_t) map->data && len <= map->len);
    (void) map;

    madvise((void *) from, (uintptr_t) part + len - from, MADV_DONTNEED);
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
