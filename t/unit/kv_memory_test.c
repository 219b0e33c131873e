/*
 * What memory there is: this machine's numbers as far as they can be known,
 * and limits, usage and cgroups of machines made of files.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/kv/memory.h"


/* A limit on the address space counts. */
static void
test_memory_address_space(void **state)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void) state; /* the sanitizers' own mappings exceed any limit */
#else
    struct rlimit old, low;
    kv_memory_t memory, later;
    const size_t big = 64 << 20;

    (void) state;
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);

    low = old;
    low.rlim_cur = 256 << 20;
    assert_int_equal(setrlimit(RLIMIT_AS, &low), 0);
    kv_memory_read("", &memory);

    /* shared memory takes away from it, private memory does not */
    void *shared =
        mmap(NULL, big, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    void *own = mmap(NULL, big, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    kv_memory_read("", &later);
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
    assert_true(shared != MAP_FAILED && own != MAP_FAILED);
    munmap(shared, big);
    munmap(own, big);

    assert_true(memory.total <= 256 << 20);
    assert_true(memory.space < memory.total);
    assert_true(memory.space > 128 << 20);
    assert_in_range(memory.total - later.total, big - (1 << 20),
                    big + (1 << 20));
    assert_in_range(memory.space - later.space, 2 * big - (1 << 20),
                    2 * big + (1 << 20));
#endif
}


static void
test_memory(void **state)
{
    kv_memory_t memory, later;
    const size_t bytes = 64 << 20;

    (void) state;
    kv_memory_read("", &memory);
    assert_true(memory.total >= 16 << 20);
    assert_true(memory.total <= kv_memory_cgroup("", NULL));
    assert_true(memory.total <= (size_t) sysconf(_SC_PHYS_PAGES)
                                    * (size_t) sysconf(_SC_PAGESIZE));
    assert_true(memory.free > 0 && memory.free < memory.total);
    assert_true(memory.own > 0 && memory.own < memory.total);

    /* mapped counts at once, own when it is touched */
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_true(p != MAP_FAILED);
    kv_memory_read("", &later);
    assert_true(later.mapped >= memory.mapped + bytes);
    assert_true(later.own < memory.own + bytes / 2);

    memset(p, 1, bytes);
    kv_memory_read("", &later);
    assert_true(later.own >= memory.own + bytes);
    munmap(p, bytes);
}


static char tree[64];


/* Writes text to tree/name, making the directories on the way. */
static void
put(const char *name, const char *text)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", tree, name);

    for (char *p = path + strlen(tree) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        mkdir(path, 0700);
        *p = '/';
    }

    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}


static void
test_cgroup(void **state)
{
    char command[128];

    (void) state;
    snprintf(tree, sizeof(tree), "/tmp/kv_test_XXXXXX");
    assert_non_null(mkdtemp(tree));

    assert_true(kv_memory_cgroup(tree, NULL) == SIZE_MAX); /* no /proc at all */

    /* v2: the group has no limit, an ancestor has */
    put("proc/self/cgroup", "0::/a/b/c\n");
    assert_true(kv_memory_cgroup(tree, NULL) == SIZE_MAX);
    put("sys/fs/cgroup/a/b/c/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.max", "7000\n");
    put("sys/fs/cgroup/a/memory.max", "9000\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 7000);
    put("sys/fs/cgroup/a/b/c/memory.max", "5000\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 5000);
    put("sys/fs/cgroup/a/b/c/memory.max", "rubbish\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 7000);
    put("sys/fs/cgroup/a/b/c/memory.max", "");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 7000);

    /* a container: the path is the host's, the mount is the group itself */
    put("proc/self/cgroup", "0::/docker/0123\n");
    put("sys/fs/cgroup/memory.max", "8000\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 8000);
    put("proc/self/cgroup", "0::/\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 8000);

    /* v1, with an unlimited group and other controllers around */
    put("proc/self/cgroup", "3:cpu,cpuacct:/x\n5:hugetlb,memory:/x/y\n"
                            "1:name=systemd:/\n");
    put("sys/fs/cgroup/memory/x/y/memory.limit_in_bytes",
        "9223372036854771712\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096000\n");
    assert_int_equal(kv_memory_cgroup(tree, NULL), 4096000);
    put("proc/self/cgroup", "5:hugememory:/x/y\nnonsense\n::\n");
    assert_true(kv_memory_cgroup(tree, NULL) == SIZE_MAX);

    snprintf(command, sizeof(command), "rm -r '%s'", tree);
    assert_int_equal(system(command), 0);
}


/* What is left below the limits, and the other numbers, in a machine made of
 * files. */
static void
test_memory_tree(void **state)
{
    char command[128];
    kv_memory_t memory;
    size_t room;

    (void) state;
    snprintf(tree, sizeof(tree), "/tmp/kv_test_XXXXXX");
    assert_non_null(mkdtemp(tree));

    put("proc/meminfo", "MemTotal:       1000 kB\nMemFree:   1 kB\n"
                        "MemAvailable:    800 kB\n");
    put("proc/self/status", "Name:\tx\nVmSize:\t  90 kB\nVmData:\t 70 kB\n"
                            "RssAnon:\t      50 kB\nRssFile:\t 9 kB\n");
    kv_memory_read(tree, &memory);
    assert_int_equal(memory.total, 1000 << 10);
    assert_int_equal(memory.free, 800 << 10);
    assert_int_equal(memory.own, 50 << 10);
    assert_int_equal(memory.mapped, 70 << 10);

    /* v2: the page cache of the group is free, its anonymous memory is not;
     * the tightest level counts, which need not have the smallest limit */
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "500000\n");
    put("sys/fs/cgroup/a/b/memory.current", "300000\n");
    put("sys/fs/cgroup/a/b/memory.stat",
        "anon 90000\nfile 200000\ninactive_file 120000\nactive_file 80000\n");
    assert_int_equal(kv_memory_cgroup(tree, &room), 500000);
    assert_int_equal(room, 400000);
    put("sys/fs/cgroup/a/memory.max", "600000\n");
    put("sys/fs/cgroup/a/memory.current", "550000\n");
    assert_int_equal(kv_memory_cgroup(tree, &room), 500000);
    assert_int_equal(room, 50000);
    kv_memory_read(tree, &memory);
    assert_int_equal(memory.total, 500000);
    assert_int_equal(memory.free, 50000);

    /* over the limit, and more cache than usage: no number wraps */
    put("sys/fs/cgroup/a/memory.current", "700000\n");
    put("sys/fs/cgroup/a/b/memory.current", "3\n");
    assert_int_equal(kv_memory_cgroup(tree, &room), 500000);
    assert_int_equal(room, 0);

    /* v1 */
    put("proc/self/cgroup", "5:hugetlb,memory:/x\n");
    put("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "400000\n");
    put("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "300000\n");
    put("sys/fs/cgroup/memory/x/memory.stat",
        "inactive_file 7\ntotal_inactive_file 1000\n"
        "total_active_file 2000\n");
    assert_int_equal(kv_memory_cgroup(tree, &room), 400000);
    assert_int_equal(room, 103000);

    snprintf(command, sizeof(command), "rm -r '%s'", tree);
    assert_int_equal(system(command), 0);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_address_space),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_cgroup),
        cmocka_unit_test(test_memory_tree),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
