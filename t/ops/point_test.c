/*
 * The device (instruction sets, limits, memory) and the pointwise ops:
 * against the oracle, and bit for bit between instruction sets, thread counts
 * and row counts.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_math.h"
#include "kernels/cpu/cpu_point.h"
#include "kernels/op/op.h"
#include "t/ops/lib/compare.h"

enum { N_ISAS = 4, MAX_DEVS = 2 * N_ISAS, MAX_ROWS = 70 };

static const char *const isas[N_ISAS] = { "baseline", "avx2", "avx512", "amx" };

static uint64_t state;

/* Every instruction set of this machine with 1 and with 3 threads. */
static op_dev_t *devs[MAX_DEVS];
static int n_devs;
static const op_table_t *cpu;
static const op_table_t *ref;
static op_dev_t *ref_dev;


static float
uniform(float from, float to)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return from + (to - from) * (float) (state >> 40) / 16777216.0f;
}


static float *
floats(size_t n, float range)
{
    float *p = malloc(n * sizeof(float));

    assert_non_null(p);
    for (size_t i = 0; i < n; i++) {
        p[i] = uniform(-range, range);
    }
    return p;
}


/* --- the device --- */

static void
test_open(void **unused)
{
    op_err_t err;
    op_open_t params = { .threads = 2, .isa = "baseline" };
    op_dev_t *dev = cpu->open(&params, &err);

    (void) unused;

    assert_non_null(dev);
    assert_string_equal(cpu->describe(dev), "baseline, 2 threads");
    cpu->close(dev);

    params.isa = "avx1024";
    assert_null(cpu->open(&params, &err));
    assert_non_null(strstr(err.text, "avx1024"));
    params.isa = "";
    assert_null(cpu->open(&params, &err));
    params.isa = "AVX2";
    assert_null(cpu->open(&params, &err));

    params.isa = "baseline";
    params.threads = -1;
    assert_null(cpu->open(&params, &err));
    assert_non_null(strstr(err.text, "-1"));
    params.threads = 1 << 20;
    assert_null(cpu->open(&params, &err));

    cpu->close(NULL);
}


static void
test_environment(void **unused)
{
    op_err_t err;
    op_open_t params = { .threads = 1, .isa = NULL };
    op_dev_t *dev;
    char *saved = getenv("LLM_ISA") ? strdup(getenv("LLM_ISA")) : NULL;

    (void) unused;

    setenv("LLM_ISA", "baseline", 1);
    dev = cpu->open(&params, &err);
    assert_non_null(dev);
    assert_string_equal(cpu->describe(dev), "baseline, 1 thread");
    cpu->close(dev);

    setenv("LLM_ISA", "sse", 1);
    assert_null(cpu->open(&params, &err));
    assert_non_null(strstr(err.text, "sse"));

    /* what the caller names counts more */
    params.isa = "baseline";
    dev = cpu->open(&params, &err);
    assert_non_null(dev);
    cpu->close(dev);

    /* set but empty is not set */
    params.isa = NULL;
    setenv("LLM_ISA", "", 1);
    dev = cpu->open(&params, &err);
    assert_non_null(dev);
    assert_int_equal(dev->isa, devs[n_devs - 1]->isa);
    cpu->close(dev);

    if (saved != NULL) {
        setenv("LLM_ISA", saved, 1);
        free(saved);
    } else {
        unsetenv("LLM_ISA");
    }
}


static void
test_limits(void **unused)
{
    const op_limits_t good = {
        .max_rows = 4,
        .max_seqs = 2,
        .max_len = 100,
        .max_in = 64,
        .n_heads = 4,
        .n_kv_heads = 2,
        .head_dim = 64,
    };
    op_limits_t bad;
    op_err_t err;
    op_dev_t *dev = devs[0];

    (void) unused;

    assert_int_equal(cpu->prepare(dev, &good, &err), 0);
    assert_int_equal(cpu->prepare(dev, &good, &err), 0); /* again */

    bad = good;
    bad.n_heads = 5;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
    assert_non_null(strstr(err.text, "5 heads"));
    bad = good;
    bad.head_dim = 63;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
    bad.head_dim = 0;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
    bad.head_dim = CPU_MAX_HEAD_DIM + 2;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
    bad = good;
    bad.max_rows = 0;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
    bad = good;
    bad.n_kv_heads = 0;
    assert_int_equal(cpu->prepare(dev, &bad, &err), -1);
}


static void
test_memory(void **unused)
{
    static const size_t sizes[] = {
        0, 1, 63, 64, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 7 << 20
    };

    (void) unused;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        unsigned char *p = cpu->alloc(devs[0], sizes[i]);

        assert_non_null(p);
        assert_int_equal((uintptr_t) p % 64, 0);
        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(p[k], 0);
        }
        memset(p, 0xaa, sizes[i]);
        cpu->free(devs[0], p, sizes[i]);
    }

    assert_null(cpu->alloc(devs[0], SIZE_MAX));
    assert_null(cpu->alloc(devs[0], (size_t) 1 << 60));
    cpu->free(devs[0], NULL, 10);

    assert_int_equal(cpu->kv_page_bytes(devs[0], OP_F16, 30, 3, 64),
                     30 * 3 * 64 * 2 * 16 * 2);
}


/* --- exponential --- */

static void
test_exp(void **unused)
{
    (void) unused;

    assert_true(cpu_exp(0.0f) == 1.0f && cpu_exp_neg(0.0f) == 1.0f);
    assert_true(cpu_exp(1e30f) == INFINITY && cpu_exp(INFINITY) == INFINITY);
    assert_true(cpu_exp(-1e30f) == 0.0f && cpu_exp(-INFINITY) == 0.0f);
    assert_true(cpu_exp(89.0f) == INFINITY);
    assert_true(isfinite(cpu_exp(88.72f)));
    assert_true(cpu_exp_neg(-INFINITY) == cpu_exp_neg(-87.0f));
    assert_true(cpu_exp_neg(-87.0f) > 0.0f);
    assert_true(cpu_exp_neg(-87.0f) < 2e-38f);

    for (float x = -103.9f; x < 88.7f; x += 0.00137f) {
        const double want = exp((double) x);
        const double bound = 4e-7 * want + 1.5e-45; /* subnormals */

        assert_true(fabs(cpu_exp(x) - want) <= bound);
        if (x <= 0.0f && x > -87.0f) {
            assert_true(cpu_exp_neg(x) == cpu_exp(x));
        }
    }
}


/* --- ops --- */

static const int dims[] = { 1, 2, 15, 16, 17, 31, 33, 64, 100, 576, 2049 };

enum { N_DIMS = sizeof(dims) / sizeof(dims[0]) };


static void
test_rmsnorm(void **unused)
{
    (void) unused;

    for (int i = 0; i < N_DIMS; i++) {
        const int dim = dims[i];
        const size_t n = (size_t) MAX_ROWS * dim;
        float *x = floats(n, 3.0f);
        float *w = floats(dim, 2.0f);
        float *want = floats(n, 0.0f);
        float *first = floats(n, 0.0f);
        float *y = floats(n, 0.0f);

        memset(x, 0, dim * sizeof(float)); /* a row of zeros */
        ref->rmsnorm(ref_dev, want, x, w, MAX_ROWS, dim, 1e-5f);
        cpu->rmsnorm(devs[0], first, x, w, MAX_ROWS, dim, 1e-5f);
        assert_near_floats(want, first, n, 1e-6);

        for (int k = 0; k < n_devs; k++) {
            cpu->rmsnorm(devs[k], y, x, w, MAX_ROWS, dim, 1e-5f);
            assert_memory_equal(y, first, n * sizeof(float));

            /* one row at a time, in place */
            memcpy(y, x, n * sizeof(float));
            for (int r = 0; r < MAX_ROWS; r++) {
                float *row = y + (size_t) r * dim;

                cpu->rmsnorm(devs[k], row, row, w, 1, dim, 1e-5f);
            }
            assert_memory_equal(y, first, n * sizeof(float));
        }

        free(x);
        free(w);
        free(want);
        free(first);
        free(y);
    }
}


static void
check_silu(float range)
{
    for (int i = 0; i < N_DIMS; i++) {
        const int dim = dims[i];
        const size_t n = (size_t) MAX_ROWS * dim;
        float *x = floats(2 * n, range);
        float *want = floats(n, 0.0f);
        float *first = floats(n, 0.0f);
        float *y = floats(n, 0.0f);

        ref->silu_mul(ref_dev, want, x, MAX_ROWS, dim);
        cpu->silu_mul(devs[0], first, x, MAX_ROWS, dim);
        assert_near_floats(want, first, n, 1e-6);

        for (int k = 0; k < n_devs; k++) {
            cpu->silu_mul(devs[k], y, x, MAX_ROWS, dim);
            assert_memory_equal(y, first, n * sizeof(float));
            for (int r = 0; r < MAX_ROWS; r++) {
                cpu->silu_mul(devs[k], y + (size_t) r * dim,
                              x + (size_t) r * 2 * dim, 1, dim);
            }
            assert_memory_equal(y, first, n * sizeof(float));
        }

        free(x);
        free(want);
        free(first);
        free(y);
    }
}


static void
test_silu(void **unused)
{
    static const float gates[] = { 0.0f,   -0.0f,  1e-30f, 87.5f,   -87.5f,
                                   88.9f,  -88.9f, 120.0f, -120.0f, 1e30f,
                                   -1e30f, 3e38f,  -3e38f };
    enum { N = sizeof(gates) / sizeof(gates[0]) };
    float x[2 * N], y[N];

    (void) unused;

    check_silu(8.0f);
    check_silu(80.0f);

    for (int i = 0; i < N; i++) {
        x[i] = gates[i];
        x[N + i] = 1.0f;
    }
    for (int k = 0; k < n_devs; k++) {
        cpu->silu_mul(devs[k], y, x, 1, N);
        for (int i = 0; i < N; i++) {
            const double want = gates[i] / (1.0 + exp(-(double) gates[i]));

            assert_true(isfinite(y[i]));
            assert_true(fabs(y[i] - want) <= 1e-6 * fabs(want) + 1e-36);
        }
    }
}


static void
test_gather(void **unused)
{
    enum { ROWS = 40, N = 70, DIM = 576 };
    float *x = floats(ROWS * DIM, 1.0f);
    float *y = floats(N * DIM, 0.0f);
    int32_t idx[N];

    (void) unused;

    for (int i = 0; i < N; i++) {
        idx[i] = i * 7 % ROWS;
    }
    for (int k = 0; k < n_devs; k++) {
        memset(y, 0, N * DIM * sizeof(float));
        cpu->gather(devs[k], y, x, idx, N, DIM);
        for (int i = 0; i < N; i++) {
            assert_memory_equal(y + i * DIM, x + idx[i] * DIM,
                                DIM * sizeof(float));
        }
        cpu->gather(devs[k], y, x, idx, 0, DIM);
    }

    free(x);
    free(y);
}


/* Every f32 whose top 20 bits differ: F16C and the portable conversion. */
static void
test_narrow(void **unused)
{
    enum { BLOCK = 4096 };
    static const cpu_point_kernels_t *tables[CPU_ISA_COUNT];
    float in[BLOCK];
    uint16_t want[BLOCK], got[BLOCK];

    (void) unused;

    tables[CPU_ISA_BASELINE] = &cpu_point_baseline;
#if defined(__x86_64__)
    tables[CPU_ISA_AVX2] = &cpu_point_avx2;
    tables[CPU_ISA_AVX512] = &cpu_point_avx512;
    tables[CPU_ISA_AMX] = &cpu_point_avx512;
#endif

    for (uint32_t top = 0; top < 1u << 20; top += BLOCK / 4) {
        for (int i = 0; i < BLOCK; i++) {
            static const uint32_t low[] = { 0, 1, 0x800, 0xfff };

            in[i] =
                cpu_bits_float((int32_t) ((top + i / 4) << 12 | low[i % 4]));
        }
        for (int i = 0; i < BLOCK; i++) {
            want[i] = op_float_to_half(in[i]);
        }
        for (int k = 0; k < n_devs; k += 2) {
            tables[devs[k]->isa]->narrow(got, in, BLOCK);
            assert_memory_equal(got, want, sizeof(got));
        }
    }
}


static int
open_all(void **unused)
{
    op_err_t err;

    (void) unused;

    cpu = backend_find("cpu");
    ref = backend_find("ref");
    ref_dev = ref->open(&(op_open_t){ .threads = 1 }, &err);

    for (int i = 0; i < N_ISAS; i++) {
        for (int threads = 1; threads <= 3; threads += 2) {
            const op_open_t params = { .threads = threads, .isa = isas[i] };
            op_dev_t *dev = cpu->open(&params, &err);

            if (dev == NULL) {
                printf("# %s\n", err.text);
                continue;
            }
            devs[n_devs++] = dev;
        }
    }
    return ref_dev == NULL || n_devs < 2;
}


static int
close_all(void **unused)
{
    (void) unused;

    for (int k = 0; k < n_devs; k++) {
        cpu->close(devs[k]);
    }
    ref->close(ref_dev);
    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),   cmocka_unit_test(test_environment),
        cmocka_unit_test(test_limits), cmocka_unit_test(test_memory),
        cmocka_unit_test(test_exp),    cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_silu),   cmocka_unit_test(test_gather),
        cmocka_unit_test(test_narrow),
    };
    const uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10)
                                         : (uint64_t) time(NULL);

    state = seed | 1;
    printf("# seed %llu\n", (unsigned long long) seed);

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, open_all, close_all);
}
