/*
 * engine/base: arena with memory failing at every step, buffer, maps against a
 * naive model, UTF-8 exhaustively.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/map.h"
#include "engine/base/status.h"
#include "engine/base/utf8.h"

static uint64_t seed = 20240614;


static uint32_t
rnd(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;

    return (uint32_t) (seed >> 33) % below;
}


static void
test_arena(void **state)
{
    (void) state;
    arena_t *arena = arena_create(1000);
    uint8_t *kept[200];
    size_t sizes[200];

    assert_non_null(arena);

    for (int i = 0; i < 200; i++) {
        sizes[i] = rnd(20) == 0 ? rnd(5000) : rnd(100);
        kept[i] = arena_alloc(arena, sizes[i]);
        assert_non_null(kept[i]);
        assert_int_equal((uintptr_t) kept[i] % 16, 0);
        memset(kept[i], i, sizes[i]);
    }

    /* nothing overlaps */
    for (int i = 0; i < 200; i++) {
        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(kept[i][k], i);
        }
    }

    const char *copy = arena_strndup(arena, "abcdef", 3);
    assert_string_equal(copy, "abc");

    const uint8_t *zero = arena_calloc(arena, 333);
    for (int i = 0; i < 333; i++) {
        assert_int_equal(zero[i], 0);
    }

    /* sizes that cannot be */
    assert_null(arena_alloc(arena, SIZE_MAX));
    assert_null(arena_alloc(arena, SIZE_MAX / 2 + 1));
    assert_null(arena_alloc(arena, SIZE_MAX - 14));
    assert_null(arena_strndup(arena, "", SIZE_MAX));
    assert_non_null(arena_alloc(arena, 0));

    assert_true(arena_bytes(arena) > 2000);
    arena_reset(arena);
    const size_t after = arena_bytes(arena);
    assert_true(after < 6000);

    /* the kept block is used again */
    assert_non_null(arena_alloc(arena, 100));
    assert_int_equal(arena_bytes(arena), after);
    arena_reset(arena);
    arena_reset(arena);
    arena_destroy(arena);
    arena_destroy(NULL);
}


static char order[16];


static void
note(void *data)
{
    strcat(order, data);
}


static void
test_arena_handlers(void **state)
{
    (void) state;
    arena_t *arena = arena_create(0);

    order[0] = '\0';
    assert_true(arena_on_destroy(arena, note, "a"));
    assert_true(arena_on_destroy(arena, note, "b"));
    arena_reset(arena);
    assert_string_equal(order, "ba");
    arena_reset(arena);
    assert_string_equal(order, "ba");
    assert_true(arena_on_destroy(arena, note, "c"));
    arena_destroy(arena);
    assert_string_equal(order, "bac");
}


static void
test_arena_no_memory(void **state)
{
    (void) state;

    arena_fail_after(1);
    assert_null(arena_create(256));

    for (long n = 1; n < 12; n++) {
        arena_t *arena = arena_create(256);
        int failures = 0;

        order[0] = '\0';
        arena_fail_after(n);

        for (int i = 0; i < 10; i++) {
            uint8_t *p = arena_alloc(arena, 200);

            if (p == NULL) {
                failures++;
                /* it goes on after a failure */
                p = arena_alloc(arena, 200);
            }

            assert_non_null(p);
            memset(p, 1, 200);
        }

        arena_fail_after(0);
        assert_int_equal(failures, n <= 10 ? 1 : 0);

        arena_fail_after(1);
        while (arena_alloc(arena, 1) != NULL) {
        }
        arena_fail_after(1);
        assert_false(arena_on_destroy(arena, note, "x"));
        arena_fail_after(1);
        assert_null(arena_calloc(arena, 5000));
        arena_fail_after(1);
        assert_null(arena_strndup(arena, "abc", 3));
        arena_fail_after(0);

        arena_destroy(arena);
        assert_string_equal(order, "");
    }
}


static void
test_buf(void **state)
{
    (void) state;
    buf_t buf = { 0 };

    buf_add(&buf, NULL, 0);
    buf_consume(&buf, 0);
    buf_adds(&buf, "ab");
    buf_addc(&buf, 'c');
    buf_addf(&buf, "%d-%s", 42, "x");
    assert_int_equal(buf.len, 7);
    assert_memory_equal(buf.data, "abc42-x", 7);

    buf_consume(&buf, 3);
    assert_memory_equal(buf.data, "42-x", 4);
    buf_consume(&buf, 4);
    assert_int_equal(buf.len, 0);
    buf_consume(&buf, 0);

    /* grows by any steps, keeps all */
    for (uint32_t i = 0; i < 20000; i++) {
        buf_addc(&buf, (char) (i % 251));
        if (i % 100 == 0) {
            char *room = buf_room(&buf, 1 + rnd(3000));
            assert_non_null(room);
            assert_ptr_equal(room, buf.data + buf.len);
        }
    }
    assert_int_equal(buf.len, 20000);
    for (uint32_t i = 0; i < 20000; i++) {
        assert_int_equal((uint8_t) buf.data[i], i % 251);
    }

    /* a failure drops what follows until it is cleared */
    assert_null(buf_room(&buf, SIZE_MAX));
    assert_true(buf.failed);
    buf_adds(&buf, "lost");
    buf_addf(&buf, "%s", "lost");
    assert_int_equal(buf.len, 20000);
    buf_clear(&buf);
    buf_adds(&buf, "found");
    assert_false(buf.failed);
    assert_int_equal(buf.len, 5);

    buf_fini(&buf);
    assert_null(buf.data);
    buf_fini(&buf);
}


static void
test_map(void **state)
{
    (void) state;
    static uint32_t naive[4096];
    map_t map = { 0 };
    uint32_t value = 7;
    size_t n = 0;

    memset(naive, 0xff, sizeof(naive));
    assert_false(map_get(&map, 0, &value));
    assert_int_equal(value, 7);

    for (int i = 0; i < 20000; i++) {
        const uint32_t slot = rnd(4096);
        /* keys that differ in high bits only, in low bits only, and 0 */
        const uint64_t key =
            slot % 2 ? (uint64_t) slot << 48 : (uint64_t) slot << 3;

        if (rnd(2)) {
            const uint32_t v = rnd(1000);
            n += naive[slot] == UINT32_MAX ? 1 : 0;
            naive[slot] = v;
            assert_int_equal(map_put(&map, key, v), LLM_OK);
        } else {
            const bool found = map_get(&map, key, &value);
            assert_int_equal(found, naive[slot] != UINT32_MAX);
            if (found) {
                assert_int_equal(value, naive[slot]);
            }
        }

        assert_int_equal(map.n, n);
        assert_true(map.n * 2 <= map.cap);
    }

    assert_int_equal(map_put(&map, UINT64_MAX, UINT32_MAX), LLM_OK);
    assert_true(map_get(&map, UINT64_MAX, &value));
    assert_int_equal(value, UINT32_MAX);

    /* what cannot be reserved changes nothing */
    assert_int_equal(map_reserve(&map, SIZE_MAX), LLM_NOMEM);
    assert_int_equal(map.n, n + 1);
    assert_true(map_get(&map, UINT64_MAX, &value));

    const size_t cap = map.cap;
    assert_int_equal(map_reserve(&map, 1), LLM_OK);
    assert_int_equal(map.cap, cap);

    map_fini(&map);
    map_fini(&map);
}


static void
test_map_bytes(void **state)
{
    (void) state;
    enum { N = 3000 };
    static char keys[N][24];
    static size_t lens[N];
    static uint32_t values[N];
    static int first[N];
    map_bytes_t map = { 0 };
    uint32_t value = 7;

    assert_false(map_bytes_get(&map, "", 0, &value));

    for (int i = 0; i < N; i++) {
        /* few letters and zero bytes: many equal keys, many prefixes */
        lens[i] = rnd(sizeof(keys[i]));
        for (size_t k = 0; k < lens[i]; k++) {
            keys[i][k] = (char) (rnd(8) ? 0 : rnd(3));
        }

        first[i] = i;
        for (int j = 0; j < i; j++) {
            if (lens[j] == lens[i] && memcmp(keys[j], keys[i], lens[i]) == 0) {
                first[i] = j;
                break;
            }
        }

        const bool found = map_bytes_get(&map, keys[i], lens[i], &value);
        assert_int_equal(found, first[i] != i);
        if (found) {
            assert_int_equal(value, values[first[i]]);
        }

        values[first[i]] = rnd(1000000);
        assert_int_equal(
            map_bytes_put(&map, keys[i], lens[i], values[first[i]]), LLM_OK);
    }

    for (int i = 0; i < N; i++) {
        assert_true(map_bytes_get(&map, keys[i], lens[i], &value));
        assert_int_equal(value, values[first[i]]);
    }

    assert_int_equal(map_bytes_reserve(&map, SIZE_MAX), LLM_NOMEM);
    assert_true(map_bytes_get(&map, keys[0], lens[0], &value));
    map_bytes_fini(&map);
}


static void
test_utf8_exhaustive(void **state)
{
    (void) state;
    uint8_t p[4];
    uint32_t got;

    /* every code point there and back */
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xd800 && cp < 0xe000) {
            continue;
        }

        const int n = utf8_encode(cp, p);

        assert_int_equal(n, cp < 0x80      ? 1
                            : cp < 0x800   ? 2
                            : cp < 0x10000 ? 3
                                           : 4);
        assert_int_equal(utf8_decode(p, (size_t) n, &got), n);
        assert_int_equal(got, cp);
        assert_true(utf8_valid(p, (size_t) n));
        assert_int_equal(utf8_complete(p, (size_t) n), n);

        /* each beginning waits for the rest */
        for (int k = 1; k < n; k++) {
            assert_int_equal(utf8_decode(p, (size_t) k, &got), 0);
            assert_int_equal(utf8_complete(p, (size_t) k), 0);
            assert_false(utf8_valid(p, (size_t) k));
        }
    }

    assert_int_equal(utf8_decode(p, 0, &got), 0);
    assert_true(utf8_valid(p, 0));
    assert_int_equal(utf8_complete(p, 0), 0);
}


/* Of all four-byte strings, as many begin with a character as there are. */
static void
test_utf8_all_bytes(void **state)
{
    (void) state;
    uint32_t n_of[5] = { 0 };
    uint32_t cp;

    for (uint32_t w = 0; w < 1u << 24; w++) {
        const uint8_t p[3] = { (uint8_t) (w >> 16), (uint8_t) (w >> 8),
                               (uint8_t) w };
        const int rc = utf8_decode(p, 3, &cp);

        if (rc > 0) {
            n_of[rc]++;
        } else if (rc == 0) {
            n_of[4]++;
            assert_int_equal(utf8_complete(p, 3), 0);
        }
    }

    assert_int_equal(n_of[1], 0x80 << 16);
    assert_int_equal(n_of[2], 0x780 << 8);
    assert_int_equal(n_of[3], 0x10000 - 0x800 - 0x800);
    /* the fronts of 0x100000 characters of four bytes */
    assert_int_equal(n_of[4], 0x100000 >> 6);

    static const char *const bad[] = {
        "\x80",         "\xbf",         "\xc0\x80",     "\xc1\xbf",
        "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80", "\xf5\x80",     "\xfe",         "\xff",
        "\xc3\x28",     "\xe2\x82\x28", "\xf0\x9f\x98z"
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const uint8_t *p = (const uint8_t *) bad[i];

        assert_int_equal(utf8_decode(p, strlen(bad[i]), &cp), -1);
        assert_false(utf8_valid(p, strlen(bad[i])));
        assert_int_equal(utf8_complete(p, strlen(bad[i])), strlen(bad[i]));
    }

    const uint8_t mixed[] = "a\xf0\x9f\x98\x80 \xf0\x9f\x98";
    assert_int_equal(utf8_complete(mixed, 9), 6);
    assert_int_equal(utf8_complete(mixed, 8), 6);
    assert_int_equal(utf8_complete(mixed, 7), 6);
    assert_int_equal(utf8_complete(mixed, 6), 6);
    assert_int_equal(utf8_complete(mixed, 5), 5);
    assert_int_equal(utf8_complete(mixed, 4), 1);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_arena_handlers),
        cmocka_unit_test(test_arena_no_memory),
        cmocka_unit_test(test_buf),
        cmocka_unit_test(test_map),
        cmocka_unit_test(test_map_bytes),
        cmocka_unit_test(test_utf8_exhaustive),
        cmocka_unit_test(test_utf8_all_bytes),
    };

    printf("# seed %llu\n", (unsigned long long) seed);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
