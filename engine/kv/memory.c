/*
 * Reads limits and usage of memory from /proc and /sys.  Called at start-up.
 *
 * A container's limit is its cgroup's, wherever on the path to the root it was
 * set; what is left below it is the limit less what the group's processes use,
 * without the page cache, which the kernel gives up when asked to.
 */

#include "engine/kv/memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { PATH_LEN = 4096, KIB_SHIFT = 10 };

/* Names of one cgroup version. */
typedef struct {
    const char *dir;
    const char *limit;
    const char *usage;
    const char *cache[2]; /* keys of memory.stat */
} cgroup_files_t;

typedef struct {
    size_t limit;
    size_t room;
} level_t;

static const cgroup_files_t v2_files = {
    "/sys/fs/cgroup",
    "memory.max",
    "memory.current",
    { "inactive_file", "active_file" },
};

static const cgroup_files_t v1_files = {
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    { "total_inactive_file", "total_active_file" },
};


static size_t
smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}


static FILE *
open_in(const char *dir, const char *name)
{
    char path[PATH_LEN + 64];
    const int n = snprintf(path, sizeof(path), "%s/%s", dir, name);

    return n > 0 && (size_t) n < sizeof(path) ? fopen(path, "re") : NULL;
}


/* The number in a file; otherwise for "max", and for a file that does not
 * exist or holds something else. */
static size_t
read_number(const char *dir, const char *name, size_t otherwise)
{
    FILE *file = open_in(dir, name);
    unsigned long long value;

    if (file == NULL) {
        return otherwise;
    }

    if (fscanf(file, "%llu", &value) != 1 || value >= SIZE_MAX) {
        value = otherwise;
    }

    fclose(file);

    return (size_t) value;
}


/* The number behind a key at the start of a line ("MemTotal:  12 kB",
 * "active_file 4096"); otherwise when there is none. */
static size_t
read_key(const char *dir, const char *name, const char *key, size_t otherwise)
{
    FILE *file = open_in(dir, name);
    const size_t len = strlen(key);
    char line[256];
    unsigned long long value;
    size_t found = otherwise;

    if (file == NULL) {
        return otherwise;
    }

    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, key, len) == 0
            && (line[len] == ' ' || line[len] == ':')
            && sscanf(line + len + 1, "%llu", &value) == 1 && value < SIZE_MAX)
        {
            found = (size_t) value;
            break;
        }
    }

    fclose(file);

    return found;
}


/* A value that the file gives in kB, in bytes. */
static size_t
read_kib(const char *dir, const char *name, const char *key, size_t otherwise)
{
    const size_t kib = read_key(dir, name, key, SIZE_MAX);

    return kib > SIZE_MAX >> KIB_SHIFT ? otherwise : kib << KIB_SHIFT;
}


/* One directory of a hierarchy. */
static void
read_level(const cgroup_files_t *files, const char *dir, level_t *level)
{
    const size_t limit = read_number(dir, files->limit, SIZE_MAX);

    if (limit == SIZE_MAX) {
        return;
    }

    size_t usage = read_number(dir, files->usage, 0);

    for (int i = 0; i < 2; i++) {
        const size_t cache = read_key(dir, "memory.stat", files->cache[i], 0);

        usage -= smaller(usage, cache);
    }

    level->limit = smaller(level->limit, limit);
    level->room = smaller(level->room, limit - smaller(limit, usage));
}


/* The smallest limit in dir/group and the directories above it, dir included.
 * A container may see its group's path from the host's point of view while
 * its own group is mounted as dir: levels that do not exist are no limit. */
static void
read_levels(const cgroup_files_t *files, const char *root, const char *group,
            level_t *level)
{
    char path[PATH_LEN];
    const int n =
        snprintf(path, sizeof(path), "%s%s%s", root, files->dir, group);

    if (n < 0 || (size_t) n >= sizeof(path)) {
        return;
    }

    const size_t floor = strlen(root) + strlen(files->dir);

    for (;;) {
        read_level(files, path, level);

        char *slash = strrchr(path + floor, '/');

        if (slash == NULL) {
            return;
        }

        *slash = '\0';
    }
}


/* True if the comma-separated list of v1 controllers names memory. */
static bool
has_memory(const char *controllers)
{
    static const char name[] = "memory";
    const size_t len = sizeof(name) - 1;

    for (const char *p = controllers; *p != '\0';) {
        const size_t word = strcspn(p, ",");

        if (word == len && memcmp(p, name, len) == 0) {
            return true;
        }

        p += word;
        p += *p == ',';
    }

    return false;
}


/* One line of /proc/self/cgroup, "hierarchy:controllers:path": v2's has the
 * number 0 and no controllers. */
static void
read_group(const char *root, char *line, level_t *level)
{
    char *controllers = strchr(line, ':');

    if (controllers == NULL) {
        return;
    }

    *controllers++ = '\0';

    char *group = strchr(controllers, ':');

    if (group == NULL) {
        return;
    }

    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';

    if (strcmp(line, "0") == 0 && *controllers == '\0') {
        read_levels(&v2_files, root, group, level);

    } else if (has_memory(controllers)) {
        read_levels(&v1_files, root, group, level);
    }
}


size_t
kv_memory_cgroup(const char *root, size_t *room)
{
    level_t level = { .limit = SIZE_MAX, .room = SIZE_MAX };
    char *line = NULL;
    size_t cap = 0;
    FILE *file = open_in(root, "proc/self/cgroup");

    if (file != NULL) {
        while (getline(&line, &cap, file) > 0) {
            read_group(root, line, &level);
        }

        free(line);
        fclose(file);
    }

    if (room != NULL) {
        *room = level.room;
    }

    return level.limit;
}


void
kv_memory_read(const char *root, kv_memory_t *memory)
{
    struct rlimit space;
    size_t room;

    memory->total = kv_memory_cgroup(root, &room);
    memory->total = smaller(
        memory->total, read_kib(root, "proc/meminfo", "MemTotal", SIZE_MAX));
    memory->space = SIZE_MAX;

    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        const size_t limit = (size_t) space.rlim_cur;
        const size_t used = read_kib(root, "proc/self/status", "VmSize", 0);
        const size_t data = read_kib(root, "proc/self/status", "VmData", 0);
        const size_t other = used - smaller(used, data);

        /* mappings of files and the segment shared with nginx, gigabytes that
         * are mostly never touched, take address space but no memory */
        memory->total = smaller(memory->total, limit - smaller(limit, other));
        memory->space = limit - smaller(limit, used);
    }

    memory->free = smaller(
        room, read_kib(root, "proc/meminfo", "MemAvailable", memory->total));
    memory->own = read_kib(root, "proc/self/status", "RssAnon", 0);
    memory->mapped = read_kib(root, "proc/self/status", "VmData", 0);
}
