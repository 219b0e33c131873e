/*
 * The segment: creation, attach, its limits, what a hostile or foreign header
 * does, sparse memory.  Worker indexes and doorbells: ipc_worker_test.c.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/ipc/shm.h"

static const llm_geometry_t geometry = {
    .n_workers = 4,
    .slots_per_worker = 8,
    .request_bytes = 1000000, /* not a multiple of a page */
    .out_bytes = 65536,
    .log_tokens = 5000,
};


static void
create(llm_shm_t *shm)
{
    char err[256] = "";

    if (llm_shm_create(&geometry, shm, err, sizeof(err)) != 0) {
        fail_msg("%s", err);
    }
}


static void
destroy(llm_shm_t *shm)
{
    int fd = shm->fd;

    llm_shm_detach(shm);
    assert_null(shm->base);
    assert_int_equal(close(fd), 0);
}


static uint64_t
resident_bytes(int fd)
{
    struct stat st;

    assert_int_equal(fstat(fd, &st), 0);

    return (uint64_t) st.st_blocks * 512;
}


/* Every part in order, none over the next, all inside the file. */
static void
layout_holds(void **state)
{
    llm_shm_t shm;
    struct stat st;

    (void) state;

    create(&shm);

    assert_int_equal(fstat(shm.fd, &st), 0);
    assert_int_equal(st.st_size, shm.size);

    uint8_t *base = shm.base;
    uint8_t *last = base + sizeof(llm_header_t);

    assert_ptr_equal(shm.header, base);
    assert_true((uint8_t *) shm.stats >= last);
    last = (uint8_t *) (shm.stats + 1);

    for (uint32_t w = 0; w < 4; w++) {
        uint8_t *p = (uint8_t *) llm_shm_worker(&shm, w);

        assert_true(p >= last);
        assert_int_equal((uintptr_t) p % 64, 0);
        last = p + sizeof(llm_worker_t);
    }

    assert_int_equal(llm_shm_submit_cap(&shm), 32);
    assert_int_equal(llm_shm_ready_cap(&shm), 16);

    for (uint32_t w = 0; w < 4; w++) {
        uint8_t *p = (uint8_t *) llm_shm_submit_cells(&shm, w);

        assert_true(p >= last);
        last = p + 32 * 8;
        assert_ptr_equal(llm_shm_ready_cells(&shm, w), last);
        last += 16 * 8;
    }

    for (uint32_t i = 0; i < 32; i++) {
        uint8_t *p = (uint8_t *) llm_shm_slot(&shm, i / 8, i % 8);

        assert_true(p >= last);
        assert_int_equal((uintptr_t) p % 64, 0);
        last = p + sizeof(llm_slot_t);
    }

    for (uint32_t i = 0; i < 32; i++) {
        uint8_t *p = llm_shm_request(&shm, i / 8, i % 8);

        assert_true(p >= last);
        assert_int_equal((uintptr_t) p % 4096, 0);
        last = p + 1000000;
        p = llm_shm_out(&shm, i / 8, i % 8);
        assert_true(p >= last);
        last = p + 65536;
        p = (uint8_t *) llm_shm_log(&shm, i / 8, i % 8);
        assert_true(p >= last);
        last = p + 5000 * sizeof(int32_t);
    }

    assert_true(last <= base + shm.size);
    assert_true(base + shm.size - last < 4096);

    destroy(&shm);
}


static void
file_is_sparse_sealed_and_private(void **state)
{
    llm_shm_t shm;

    (void) state;

    create(&shm);

    assert_true(shm.size > 30u << 20);
    assert_true(resident_bytes(shm.fd) <= 16384);

    assert_int_equal(ftruncate(shm.fd, 4096), -1);
    assert_int_equal(ftruncate(shm.fd, (off_t) shm.size * 2), -1);
    assert_int_equal(fcntl(shm.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);

    /* nothing but zero in what the first user sees */
    assert_int_equal(atomic_load(&shm.header->state), LLM_ENGINE_ABSENT);
    assert_int_equal(atomic_load(&shm.header->epoch), 0);
    assert_int_equal(atomic_load(&llm_shm_worker(&shm, 3)->state),
                     LLM_WORKER_FREE);

    destroy(&shm);
}


static void
geometry_limits(void **state)
{
    static const llm_geometry_t bad[] = {
        { 0, 8, 4096, 16384, 100 },
        { 257, 8, 4096, 16384, 100 },
        { UINT32_MAX, 8, 4096, 16384, 1 },
        { 4, 0, 4096, 16384, 100 },
        { 4, 6, 4096, 16384, 100 },
        { 4, 8192, 4096, 16384, 100 },
        { 4, 1u << 31, 4096, 16384, 100 },
        { 4, 8, 64, 16384, 100 },
        { 4, 8, UINT32_MAX, 16384, 100 },
        { 4, 8, 4096, 0, 100 },
        { 4, 8, 4096, 8192, 100 },
        { 4, 8, 4096, 16385, 100 },
        { 4, 8, 4096, 1u << 31, 100 },
        { 4, 8, 4096, 16384, 0 },
        { 4, 8, 4096, 16384, UINT32_MAX },
        /* each alone is allowed, together they are 3 PiB */
        { 256, 4096, 1 << 30, 1 << 30, 1 << 28 },
    };

    (void) state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        llm_shm_t shm;
        char err[128] = "";

        assert_int_equal(llm_shm_create(&bad[i], &shm, err, sizeof(err)), -1);
        assert_non_null(strstr(err, "shared segment: "));
        assert_null(shm.base);
    }

    /* the smallest one, and a message buffer that is too short */
    const llm_geometry_t small = { 1, 1, 512, 16384, 1 };
    llm_shm_t shm;
    char err[8] = "";

    assert_int_equal(llm_shm_create(&small, &shm, err, sizeof(err)), 0);
    assert_ptr_equal(llm_shm_out(&shm, 0, 0),
                     llm_shm_request(&shm, 0, 0) + 4096);
    destroy(&shm);
    assert_int_equal(llm_shm_create(&bad[0], &shm, err, sizeof(err)), -1);
    assert_int_equal(strlen(err), 7);
}


static void
attach_sees_the_same(void **state)
{
    llm_shm_t a, b;
    char err[256] = "";

    (void) state;

    create(&a);
    assert_int_equal(llm_shm_attach(a.fd, &b, err, sizeof(err)), 0);
    assert_ptr_not_equal(a.base, b.base);
    assert_int_equal(a.size, b.size);
    assert_memory_equal(&a.geo, &b.geo, sizeof(a.geo));
    assert_int_equal(a.off_areas, b.off_areas);

    llm_shm_log(&a, 3, 7)[4999] = 12345;
    assert_int_equal(llm_shm_log(&b, 3, 7)[4999], 12345);
    llm_stats_add(&b.stats->steps, 5);
    assert_int_equal(llm_stats_get(&a.stats->steps), 5);

    /* later changes of the header change nothing in a mapped view */
    a.header->geo.slots_per_worker = 4096;
    assert_int_equal(llm_shm_submit_cap(&b), 32);

    llm_shm_detach(&b);
    llm_shm_detach(&b);
    destroy(&a);
}


/* Every single bit of what the creator wrote matters. */
static void
attach_refuses_a_spoiled_header(void **state)
{
    llm_shm_t a, b;
    char err[256];
    size_t n = offsetof(llm_header_t, layout) + sizeof(uint32_t);

    (void) state;

    create(&a);

    for (size_t bit = 0; bit < n * 8; bit++) {
        uint8_t *byte = (uint8_t *) a.base + bit / 8;

        *byte ^= (uint8_t) (1 << bit % 8);
        err[0] = '\0';
        assert_int_equal(llm_shm_attach(a.fd, &b, err, sizeof(err)), -1);
        assert_non_null(strstr(err, "shared segment: "));
        assert_null(b.base);
        *byte ^= (uint8_t) (1 << bit % 8);
    }

    assert_int_equal(llm_shm_attach(a.fd, &b, err, sizeof(err)), 0);
    llm_shm_detach(&b);
    destroy(&a);
}


static void
refuse(int fd, const char *words)
{
    llm_shm_t shm;
    char err[256] = "";

    assert_int_equal(llm_shm_attach(fd, &shm, err, sizeof(err)), -1);
    assert_non_null(strstr(err, words));

    if (fd != -1) {
        close(fd);
    }
}


static int
memfd(size_t size, int seals)
{
    int fd = memfd_create("t", MFD_ALLOW_SEALING);

    assert_true(fd != -1);
    assert_int_equal(ftruncate(fd, (off_t) size), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);

    return fd;
}


static void
attach_refuses_other_files(void **state)
{
    const int both = F_SEAL_SHRINK | F_SEAL_GROW;
    char path[] = "/tmp/ipc_shm_test.XXXXXX";
    int fd = mkstemp(path);

    (void) state;

    assert_true(fd != -1);
    unlink(path);
    assert_int_equal(ftruncate(fd, 1 << 20), 0);

    refuse(-1, "fstat");
    refuse(fd, "not a sealed memfd");
    refuse(memfd(1 << 20, F_SEAL_SHRINK), "not a sealed memfd");
    refuse(memfd(0, both), "shorter than its header");
    refuse(memfd(sizeof(llm_header_t) - 1, both), "shorter than its header");
    refuse(memfd(1 << 20, both), "magic");

    /* a true header before too few and too many bytes */
    llm_shm_t a;

    create(&a);

    for (int more = -1; more <= 1; more++) {
        char err[256] = "";
        llm_shm_t b;

        fd = memfd_create("t", MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(fd, (off_t) a.size + more), 0);
        assert_int_equal(write(fd, a.base, sizeof(llm_header_t)),
                         sizeof(llm_header_t));
        assert_int_equal(fcntl(fd, F_ADD_SEALS, both), 0);

        if (more != 0) {
            refuse(fd, "its geometry needs");
        } else {
            assert_int_equal(llm_shm_attach(fd, &b, err, sizeof(err)), 0);
            destroy(&b);
        }
    }

    destroy(&a);
}


static void
trim_gives_pages_back(void **state)
{
    llm_shm_t shm;

    (void) state;

    create(&shm);

    uint8_t *request = llm_shm_request(&shm, 2, 3);
    uint8_t *before = (uint8_t *) llm_shm_log(&shm, 2, 2);
    uint8_t *after = llm_shm_out(&shm, 2, 3);
    uint64_t empty = resident_bytes(shm.fd);

    memset(before, 1, 5000 * sizeof(int32_t));
    memset(request, 2, 1000000);
    memset(after, 3, 65536);
    assert_true(resident_bytes(shm.fd) > empty + 1000000 + 65536);

    llm_slot_trim(&shm, 2, 3, 5000);
    assert_in_range(resident_bytes(shm.fd), empty + 8192,
                    empty + 65536 * 2 + 65536 + 5000 * 4);

    for (uint32_t i = 0; i < 5000; i++) {
        assert_int_equal(request[i], 2);
    }

    assert_int_equal(request[999999], 0);
    assert_int_equal(before[5000 * sizeof(int32_t) - 1], 1);
    assert_int_equal(after[0], 3);

    /* nothing to give, and more than there is */
    llm_slot_trim(&shm, 2, 3, 1000000);
    llm_slot_trim(&shm, 2, 3, UINT32_MAX);
    assert_int_equal(after[0], 3);
    assert_int_equal(request[4999], 2);

    llm_slot_trim(&shm, 2, 3, 0);
    assert_int_equal(request[0], 0);
    assert_int_equal(after[0], 3);
    assert_int_equal(before[0], 1);

    destroy(&shm);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_holds),
        cmocka_unit_test(file_is_sparse_sealed_and_private),
        cmocka_unit_test(geometry_limits),
        cmocka_unit_test(attach_sees_the_same),
        cmocka_unit_test(attach_refuses_a_spoiled_header),
        cmocka_unit_test(attach_refuses_other_files),
        cmocka_unit_test(trim_gives_pages_back),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
