/*
 * The twin of the matrix unit: products by the manual's definition, and every
 * misuse that a processor would answer with an exception.
 */

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "t/ops/twin/tile.h"


static cpu_tile_config_t
shape_of(int rows, int columns, int inputs)
{
    return (cpu_tile_config_t){
        .palette = 1,
        .rows = { (uint8_t) rows, (uint8_t) rows, (uint8_t) (inputs / 4) },
        .row_bytes = { (uint16_t) (4 * columns), (uint16_t) inputs,
                       (uint16_t) (4 * columns) },
    };
}


/* Bytes that use both ends of their range. */
static void
fill_bytes(int8_t *p, int n, int fill)
{
    for (int i = 0; i < n; i++) {
        p[i] = (int8_t) (fill == 0 ? i * 37 + 11 : fill == 1 ? -128 : 127);
    }
}


static void
test_product(void **state)
{
    enum { A_STRIDE = 80, B_STRIDE = 96, C_STRIDE = 72 };
    static const int shapes[][3] = { { 16, 16, 64 },
                                     { 16, 16, 32 },
                                     { 16, 16, 16 },
                                     { 5, 7, 12 },
                                     { 1, 1, 4 } };
    static int8_t a[16 * A_STRIDE], b[16 * B_STRIDE];
    static uint8_t c[16 * C_STRIDE];

    (void) state;

    for (int s = 0; s < 5 * 3; s++) {
        const int *shape = shapes[s / 3];
        const cpu_tile_config_t config = shape_of(shape[0], shape[1], shape[2]);

        fill_bytes(a, sizeof(a), s % 3);
        fill_bytes(b, sizeof(b), s % 2);
        memset(c, 0xee, sizeof(c));
        cpu_tile_configure(&config);
        CPU_TILE_ZERO(0);
        CPU_TILE_LOAD(1, a, A_STRIDE);
        CPU_TILE_LOAD(2, b, B_STRIDE);
        CPU_TILE_DOT(0, 1, 2);
        CPU_TILE_DOT(0, 1, 2); /* onto what is there */
        CPU_TILE_STORE(0, c, C_STRIDE);
        cpu_tile_release();

        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < C_STRIDE / 4; n++) {
                int32_t want = 0, got;

                for (int k = 0; k < shape[2]; k++) {
                    want += 2 * a[m * A_STRIDE + k]
                            * b[k / 4 * B_STRIDE + (4 * n + k % 4) % B_STRIDE];
                }

                if (m >= shape[0] || n >= shape[1]) {
                    want = (int32_t) 0xeeeeeeee;
                }

                memcpy(&got, c + m * C_STRIDE + 4 * n, sizeof(got));
                assert_int_equal(got, want);
            }
        }
    }

    assert_int_equal(twin_configured(), 0);
}


typedef enum {
    USE_PALETTE,
    USE_RESERVED,
    USE_NINTH,
    USE_ROWS,
    USE_BYTES,
    USE_HALF,
    USE_UNCONFIGURED,
    USE_RELEASED,
    USE_PALETTE_0,
    USE_UNNAMED,
    USE_TWICE,
    USE_DOT_ROWS,
    USE_DOT_COLUMNS,
    USE_DOT_INPUTS,
    USE_OTHER_THREAD,
    N_USES
} use_t;

static const char *const complaints[N_USES] = {
    [USE_PALETTE] = "#GP: palette",
    [USE_RESERVED] = "#GP: reserved bytes",
    [USE_NINTH] = "#GP: no such tile",
    [USE_ROWS] = "#GP: rows",
    [USE_BYTES] = "#GP: bytes of a row",
    [USE_HALF] = "#GP: rows without bytes",
    [USE_UNCONFIGURED] = "#UD: no configuration",
    [USE_RELEASED] = "#UD: no configuration",
    [USE_PALETTE_0] = "#UD: no configuration",
    [USE_UNNAMED] = "#UD: tile without configuration",
    [USE_TWICE] = "#UD: one tile twice",
    [USE_DOT_ROWS] = "#UD: rows of dots",
    [USE_DOT_COLUMNS] = "#UD: columns of dots",
    [USE_DOT_INPUTS] = "#UD: inputs",
    [USE_OTHER_THREAD] = "#UD: no configuration",
};


static void *
zero_elsewhere(void *unused)
{
    CPU_TILE_ZERO(0);

    return unused;
}


/* Changes a good configuration. */
static void
spoil(cpu_tile_config_t *c, use_t use)
{
    switch (use) {
    case USE_PALETTE:
        c->palette = 2;
        break;
    case USE_RESERVED:
        c->reserved[13] = 1;
        break;
    case USE_NINTH:
        c->rows[8] = 1;
        break;
    case USE_ROWS:
        c->rows[0] = 17;
        break;
    case USE_BYTES:
        c->row_bytes[0] = 68;
        break;
    case USE_HALF:
        c->rows[1] = 0;
        break;
    case USE_PALETTE_0:
        *c = (cpu_tile_config_t){ 0 };
        break;
    case USE_DOT_ROWS:
        c->rows[1] = 4;
        break;
    case USE_DOT_COLUMNS:
        c->row_bytes[2] = 32;
        break;
    case USE_DOT_INPUTS:
        c->row_bytes[1] = 16;
        break;
    default:
        break;
    }
}


static void
misuse(use_t use)
{
    cpu_tile_config_t config = shape_of(8, 16, 32);
    pthread_t thread;

    spoil(&config, use);

    if (use != USE_UNCONFIGURED) {
        cpu_tile_configure(&config);
    }

    if (use == USE_RELEASED) {
        cpu_tile_release();
    }

    if (use == USE_UNNAMED) {
        CPU_TILE_ZERO(3);
    } else if (use == USE_TWICE) {
        CPU_TILE_DOT(0, 1, 1);
    } else if (use == USE_OTHER_THREAD) {
        assert_int_equal(pthread_create(&thread, NULL, zero_elsewhere, NULL),
                         0);
        pthread_join(thread, NULL);
    } else {
        CPU_TILE_DOT(0, 1, 2);
    }
}


static void
test_misuse(void **state)
{
    (void) state;

    for (int use = 0; use < N_USES; use++) {
        char text[256];
        int ends[2], status;

        assert_int_equal(pipe(ends), 0);
        fflush(stdout);

        const pid_t pid = fork();

        if (pid == 0) {
            signal(SIGABRT, SIG_DFL);
            dup2(ends[1], 2);
            misuse(use);
            _exit(0);
        }

        close(ends[1]);

        const ssize_t n = read(ends[0], text, sizeof(text) - 1);

        close(ends[0]);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        text[n > 0 ? n : 0] = '\0';

        if (!WIFSIGNALED(status) || strstr(text, complaints[use]) == NULL) {
            fail_msg("misuse %d: status %d, \"%s\", not \"%s\"", use, status,
                     text, complaints[use]);
        }
    }
}


static bool
cpu_has_avx512(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f")
           && __builtin_cpu_supports("avx512bw")
           && __builtin_cpu_supports("avx512dq")
           && __builtin_cpu_supports("avx512vl");
#else
    return true;
#endif
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_product),
        cmocka_unit_test(test_misuse),
    };

    /* it is compiled with AVX-512, which makes it fast */
    if (!cpu_has_avx512()) {
        printf("1..0 # SKIP this CPU lacks AVX-512\n");
        return 0;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
