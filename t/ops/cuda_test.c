/*
 * The CUDA backend as a device: opening it and why not, memory, what happens
 * when something fails; and its row ops, against the oracle and, where the
 * arithmetic is the same, bit for bit with the CPU's.  Run over the emulation.
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
#include "kernels/cuda/cuda_ops.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/hosted.h"
#include "t/shim/options.h"

enum { ROWS = 9 };

/* of the runtime: errors that stay go with it */
int cudaDeviceReset(void);

static const int dims[] = { 1,   2,   15,  16,   17,   31,   33,  64,
                            100, 128, 576, 1023, 1024, 1028, 2049 };

enum { N_DIMS = sizeof(dims) / sizeof(dims[0]) };

static const op_limits_t limits = { .max_rows = 16,
                                    .max_seqs = 4,
                                    .max_len = 100,
                                    .max_in = 256,
                                    .n_heads = 4,
                                    .n_kv_heads = 2,
                                    .head_dim = 64 };

static uint64_t state;
static const op_table_t *ref, *cpu;
static op_dev_t *dev, *ref_dev, *cpu_dev;


static float *
floats(size_t n, float range)
{
    float *p = malloc(n * sizeof(float));

    assert_non_null(p);

    for (size_t i = 0; i < n; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        p[i] = range * ((float) (state >> 40) / 8388608.0f - 1.0f);
    }

    return p;
}


/* --- the device --- */

static op_dev_t *
open_as(const char *device, int number, op_err_t *err)
{
    const op_open_t params = { .device = number };

    shim_options()->device = device != NULL ? device : "80";
    err->text[0] = '\0';

    op_dev_t *opened = cuda_ops.open(&params, err);

    shim_options()->device = "80";

    return opened;
}


static void
test_open(void **unused)
{
    op_err_t err;
    op_dev_t *opened = open_as(NULL, 0, &err);

    (void) unused;

    assert_non_null(opened);
    assert_non_null(strstr(cuda_ops.describe(opened), "GPU 0"));
    cuda_ops.close(opened);

    opened = open_as("90", -1, &err);
    assert_non_null(opened);
    assert_non_null(strstr(cuda_ops.describe(opened), "9.0"));
    cuda_ops.close(opened);

    assert_null(open_as("none", -1, &err));
    assert_non_null(strstr(err.text, "driver"));
    assert_null(open_as("old", 0, &err));
    assert_non_null(strstr(err.text, "update the driver"));
    assert_null(open_as("61", 0, &err));
    assert_non_null(strstr(err.text, "compute capability 6.1"));
    assert_null(open_as(NULL, 5, &err));
    assert_non_null(strstr(err.text, "no GPU 5"));

    cuda_ops.close(NULL);
}


/* Whatever call fails: a sentence and no device, or a device that works. */
static void
test_open_fails(void **unused)
{
    (void) unused;

    for (int kind = 0; kind < SHIM_FAIL_KINDS; kind++) {
        for (uint64_t n = 1; n <= 12; n++) {
            op_err_t err;

            shim_fail_at((shim_fail_t) kind, n);

            op_dev_t *opened = open_as(NULL, -1, &err);

            shim_fail_at((shim_fail_t) kind, 0);
            assert_true(opened != NULL || err.text[0] != '\0');
            cuda_ops.close(opened);
            cudaDeviceReset();
        }
    }
}


static void
test_limits(void **unused)
{
    op_err_t err;
    op_dev_t *opened = open_as(NULL, 0, &err);
    op_limits_t bad = limits;

    (void) unused;

    assert_int_equal(cuda_ops.prepare(opened, &limits, &err), 0);
    assert_int_equal(cuda_ops.prepare(opened, &limits, &err), 0); /* again */

    bad.n_heads = 5;
    assert_int_equal(cuda_ops.prepare(opened, &bad, &err), -1);
    assert_non_null(strstr(err.text, "5 heads"));
    bad = limits;
    bad.max_rows = 0;
    assert_int_equal(cuda_ops.prepare(opened, &bad, &err), -1);

    for (int n = 1; n <= 4; n++) {
        shim_fail_at(SHIM_FAIL_MALLOC, (uint64_t) n);
        err.text[0] = '\0';
        assert_int_equal(cuda_ops.prepare(opened, &limits, &err), -1);
        assert_non_null(strstr(err.text, "no memory"));
    }

    shim_fail_at(SHIM_FAIL_MALLOC, 0);
    assert_int_equal(cuda_ops.prepare(opened, &limits, &err), 0);
    cuda_ops.close(opened);
}


static void
test_memory(void **unused)
{
    static const size_t sizes[] = { 0, 1, 255, 4097, 1 << 20 };
    op_err_t err;
    op_dev_t *opened = open_as(NULL, 0, &err);
    const op_memory_t before = cuda_ops.memory(opened);
    uint8_t *host = malloc(1 << 20);

    (void) unused;

    assert_true(before.free > 0 && before.free <= before.total);

    for (int i = 0; i < 5; i++) {
        uint8_t *p = cuda_ops.alloc(opened, sizes[i]);

        assert_non_null(p);
        assert_int_equal((uintptr_t) p % 64, 0);
        memset(host, 0xaa, sizes[i]);
        cuda_ops.get(opened, host, p, sizes[i]);

        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(host[k], 0);
            host[k] = (uint8_t) (k * 7);
        }

        cuda_ops.put(opened, p, host, sizes[i]);
        memset(host, 0, sizes[i]);
        cuda_ops.get(opened, host, p, sizes[i]);

        for (size_t k = 0; k < sizes[i]; k++) {
            assert_int_equal(host[k], (uint8_t) (k * 7));
        }

        cuda_ops.free(opened, p, sizes[i]);
    }

    assert_null(cuda_ops.alloc(opened, SIZE_MAX / 4));
    assert_int_equal(cuda_ops.check(opened, &err), 0);
    assert_true(cuda_ops.memory(opened).free == before.free);
    cuda_ops.free(opened, NULL, 10);
    free(host);
    cuda_ops.close(opened);
}


/* The largest lists that a step may bring take no memory then. */
static void
test_lists(void **unused)
{
    enum { PAGES = 6, COPIES = 5 };
    op_err_t err;
    op_dev_t *opened = open_as(NULL, 0, &err);

    (void) unused;
    assert_int_equal(cuda_ops.prepare(opened, &limits, &err), 0);
    assert_int_equal(limits.max_seqs + 1, COPIES);

    const size_t page = cuda_ops.kv_page_bytes(opened, OP_F16, 2, 2, 64);
    op_kv_t kv = {
        cuda_ops.alloc(opened, PAGES * page), PAGES, 2, 2, 64, OP_F16
    };
    float *x = cuda_ops.alloc(opened, 16 * sizeof(float));
    float *y = cuda_ops.alloc(opened, 16 * sizeof(float));
    const size_t before = cuda_ops.memory(opened).free;
    op_copy_t copies[COPIES];
    int32_t idx[16];

    for (int i = 0; i < COPIES; i++) {
        copies[i] = (op_copy_t){ i, i + 1 };
    }
    for (int i = 0; i < 16; i++) {
        idx[i] = 15 - i;
    }

    cuda_ops.kv_copy(opened, &kv, copies, COPIES);
    cuda_ops.gather(opened, y, x, idx, 16, 1);
    assert_true(cuda_ops.memory(opened).free == before);
    assert_int_equal(cuda_ops.check(opened, &err), 0);

    cuda_ops.free(opened, kv.base, PAGES * page);
    cuda_ops.free(opened, x, 16 * sizeof(float));
    cuda_ops.free(opened, y, 16 * sizeof(float));
    cuda_ops.close(opened);
}


/* A kernel that dies: check() says so from then on, and nothing crashes. */
static void
test_failure(void **unused)
{
    const shim_fail_t kinds[] = { SHIM_FAIL_ASYNC, SHIM_FAIL_LAUNCH,
                                  SHIM_FAIL_CALL };
    float host[64] = { 0.0f };
    op_err_t err;

    (void) unused;

    for (int i = 0; i < 3; i++) {
        op_dev_t *opened = open_as(NULL, 0, &err);
        float *x = cuda_ops.alloc(opened, sizeof(host));

        cuda_ops.get(opened, host, x, sizeof(host));
        assert_int_equal(cuda_ops.check(opened, &err), 0);

        shim_fail_at(kinds[i], 1);
        cuda_ops.silu_mul(opened, x, x, 1, 32);
        cuda_ops.get(opened, host, x, sizeof(host));
        shim_fail_at(kinds[i], 0);

        for (int again = 0; again < 2; again++) {
            err.text[0] = '\0';
            assert_int_equal(cuda_ops.check(opened, &err), -1);
            assert_non_null(strstr(err.text, "GPU 0"));
            cuda_ops.silu_mul(opened, x, x, 1, 32);
            cuda_ops.get(opened, host, x, sizeof(host));
            assert_null(cuda_ops.alloc(opened, 10));
        }

        cuda_ops.free(opened, x, sizeof(host));
        cuda_ops.close(opened);
        cudaDeviceReset();
    }
}


/* --- row ops --- */

static void
test_rmsnorm(void **unused)
{
    (void) unused;

    for (int i = 0; i < N_DIMS; i++) {
        const int dim = dims[i];
        const size_t n = (size_t) ROWS * (size_t) dim;
        float *x = floats(n, 3.0f);
        float *w = floats((size_t) dim, 2.0f);
        float *want = floats(n, 0.0f);
        float *first = floats(n, 0.0f);
        float *y = floats(n, 0.0f);

        memset(x, 0, (size_t) dim * sizeof(float)); /* a row of zeros */
        ref->rmsnorm(ref_dev, want, x, w, ROWS, dim, 1e-5f);
        hosted_cuda.rmsnorm(dev, first, x, w, ROWS, dim, 1e-5f);
        assert_near_floats(want, first, n, 1e-6);

        /* one row at a time, in place */
        memcpy(y, x, n * sizeof(float));
        for (int r = 0; r < ROWS; r++) {
            float *row = y + (size_t) r * (size_t) dim;

            hosted_cuda.rmsnorm(dev, row, row, w, 1, dim, 1e-5f);
        }
        assert_memory_equal(y, first, n * sizeof(float));

        free(x);
        free(w);
        free(want);
        free(first);
        free(y);
    }
}


/* The same bits as the CPU's: one exponential, no sums. */
static void
test_silu(void **unused)
{
    static const float odd[] = { 0.0f,    -0.0f, 1e-30f, 87.5f, -87.5f, 88.9f,
                                 -120.0f, 1e30f, -1e30f, 3e38f, -3e38f, NAN };
    enum { N_ODD = sizeof(odd) / sizeof(odd[0]) };

    (void) unused;

    for (int i = 0; i < N_DIMS; i++) {
        const int dim = dims[i];
        const size_t n = (size_t) ROWS * (size_t) dim;
        float *x = floats(2 * n, 20.0f);
        float *want = floats(n, 0.0f);
        float *y = floats(n, 0.0f);

        for (int k = 0; k < dim && k < N_ODD; k++) {
            x[k] = odd[k];
        }

        cpu->silu_mul(cpu_dev, want, x, ROWS, dim);
        hosted_cuda.silu_mul(dev, y, x, ROWS, dim);
        assert_memory_equal(y, want, n * sizeof(float));
        hosted_cuda.silu_mul(dev, y, x + 2 * dim, 1, dim);
        assert_memory_equal(y, want + dim, (size_t) dim * sizeof(float));

        free(x);
        free(want);
        free(y);
    }
}


static void
test_gather(void **unused)
{
    enum { FROM = 40, N = 70 };
    int32_t idx[N];

    (void) unused;

    for (int i = 0; i < N; i++) {
        idx[i] = i * 7 % FROM;
    }

    for (int i = 0; i < N_DIMS; i++) {
        const size_t dim = (size_t) dims[i];
        float *x = floats(FROM * dim, 1.0f);
        float *y = floats(N * dim, 0.0f);

        hosted_cuda.gather(dev, y, x, idx, N, dims[i]);

        for (int r = 0; r < N; r++) {
            assert_memory_equal(y + (size_t) r * dim, x + (size_t) idx[r] * dim,
                                dim * sizeof(float));
        }

        free(x);
        free(y);
    }
}


static int
open_all(void **unused)
{
    const op_open_t params = { .threads = 1 };
    op_err_t err;

    (void) unused;

    ref = backend_find("ref");
    cpu = backend_find("cpu");
    ref_dev = ref->open(&params, &err);
    cpu_dev = cpu->open(&params, &err);
    dev = hosted_cuda.open(&params, &err);

    return ref_dev == NULL || cpu_dev == NULL || dev == NULL;
}


static int
close_all(void **unused)
{
    (void) unused;

    hosted_cuda.close(dev);
    cpu->close(cpu_dev);
    ref->close(ref_dev);

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),    cmocka_unit_test(test_open_fails),
        cmocka_unit_test(test_limits),  cmocka_unit_test(test_memory),
        cmocka_unit_test(test_rmsnorm), cmocka_unit_test(test_silu),
        cmocka_unit_test(test_gather),  cmocka_unit_test(test_lists),
        cmocka_unit_test(test_failure),
    };
    const uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10)
                                         : (uint64_t) time(NULL);

    state = seed | 1;
    printf("# seed %llu\n", (unsigned long long) seed);

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, open_all, close_all);
}
