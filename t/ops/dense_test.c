/*
 * Products of float weights on the CUDA backend.  Exact: the same bits
 * whatever the number of rows, cuBLAS or not, and near the oracle.  Loose:
 * cuBLAS is asked, a row's bits then depend on the others (the emulated library
 * is like the real one in that), its failures are the device's, and without it
 * everything is as when exact.  Run over the emulation.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/cuda/cuda_ops.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/hosted.h"
#include "t/ops/lib/linear.h"
#include "t/shim/options.h"

enum { N_IN = 200, N_OUT = 70, ROWS = 70, N_FLOAT = 3 };

/* of the runtime: errors that stay go with it */
int cudaDeviceReset(void);


static device_t
open_as(const char *capability, bool loose)
{
    const op_open_t params = { .device = 0, .loose = loose };
    device_t d = { &hosted_cuda, NULL, IN_CLASSES };
    op_err_t err;

    shim_options()->device = capability;
    d.dev = hosted_cuda.open(&params, &err);
    shim_options()->device = "80";
    assert_non_null(d.dev);

    return d;
}


static uint64_t
products(void)
{
    return shim_stats.products;
}


static float *
of_oracle(const op_tensor_t *t, const float *x, int rows)
{
    op_weight_t *w = make_weight(&ref, t, 1);
    float *y = run_linear(&ref, w, (int) t->n_out, x, rows);

    ref.ops->weight_free(ref.dev, w);

    return y;
}


/* Rows 0 … 69 from every cut of them; how many values are not the same bits
 * as with all of them at once. */
static int
count_different(const device_t *d, const op_tensor_t *t, const float *x)
{
    static const int counts[] = { 1, 2, 8, 9, 31, 32, 33, 64, 65 };
    const int n_out = (int) t->n_out, n_in = (int) t->n_in;
    op_weight_t *w = make_weight(d, t, 1);
    float *all = run_linear(d, w, n_out, x, ROWS);
    int n = 0;

    for (int k = 0; k < 9; k++) {
        for (int first = 0; first < ROWS; first += counts[k]) {
            const int left = ROWS - first;
            const int rows = left < counts[k] ? left : counts[k];
            float *y = run_linear(d, w, n_out, x + first * n_in, rows);

            for (int i = 0; i < rows * n_out; i++) {
                n += memcmp(&y[i], &all[first * n_out + i], sizeof(float)) != 0;
            }

            free(y);

            if (counts[k] == 1 && first == 4) {
                break; /* some rows alone are enough */
            }
        }
    }

    d->ops->weight_free(d->dev, w);
    free(all);

    return n;
}


static void
exact_whatever_the_rows(void **state)
{
    static const char *const capabilities[] = { "75", "80", "90" };
    static const int widths[] = { N_IN, 201, 8, 520 };
    device_t with = open_as("80", true);

    (void) state;

    for (int c = 0; c < 3; c++) {
        device_t d = open_as(capabilities[c], false);
        const uint64_t before = products();

        for (int i = 0; i < N_FLOAT; i++) {
            for (int k = 0; k < 4; k++) {
                op_tensor_t t = random_tensor(dtypes[i], widths[k], N_OUT);
                float *x = random_rows(ROWS, widths[k]);

                assert_int_equal(count_different(&d, &t, x), 0);
                free(x);
                free((void *) t.data);
            }
        }

        assert_int_equal(products(), before);
        d.ops->close(d.dev);
    }

    with.ops->close(with.dev);
}


/* f16 and bf16 inputs would be a thousand times as far off. */
static void
exact_is_near(void **state)
{
    static const float ranges[] = { 1e-6f, 1.0f, 1e6f };
    static const char *const capabilities[] = { "75", "80" };

    (void) state;

    for (int c = 0; c < 2; c++) {
        device_t d = open_as(capabilities[c], false);

        for (int i = 0; i < N_FLOAT; i++) {
            for (int k = 0; k < 3; k++) {
                op_tensor_t t = random_tensor(dtypes[i], 1536, N_OUT);
                float *x = random_rows(ROWS, 1536);

                for (int j = 0; j < ROWS * 1536; j++) {
                    x[j] *= ranges[k];
                }

                op_weight_t *w = make_weight(&d, &t, 1);
                float *want = of_oracle(&t, x, ROWS);
                float *y = run_linear(&d, w, N_OUT, x, ROWS);
                const double error = compare_rms(want, y, ROWS * N_OUT);

                if (!(error < 1e-6)) {
                    fail_msg("%s, inputs of %g: error %g",
                             op_dtype_name((int) dtypes[i]), ranges[k], error);
                }

                d.ops->weight_free(d.dev, w);
                free(want);
                free(y);
                free(x);
                free((void *) t.data);
            }
        }

        d.ops->close(d.dev);
    }
}


/* Without tensor cores for it, and where rows are odd: the documented bits. */
static void
without_tensor_cores(void **state)
{
    device_t d = open_as("75", false);
    op_tensor_t t = random_tensor(OP_F16, 203, 9);
    float *x = random_rows(10, 203);
    op_weight_t *w = make_weight(&d, &t, 1);
    float *y = run_linear(&d, w, 9, x, 10);

    (void) state;

    for (int i = 0; i < 90; i++) {
        assert_true(y[i] == expected(IN_CLASSES, &t, i % 9, x + i / 9 * 203));
    }

    d.ops->weight_free(d.dev, w);
    d.ops->close(d.dev);
    free(y);
    free(x);
    free((void *) t.data);
}


/* Normed and gated inputs: the same bits as the two ops one after the other;
 * and few rows are one launch. */
static void
exact_of(void **state)
{
    static const int widths[] = { N_IN, 8, 1544 };
    enum { MOST = 1544, OF_ROWS = 11 };
    device_t d = open_as("80", false);
    static float got[OF_ROWS * N_OUT], want[OF_ROWS * N_OUT],
        between[OF_ROWS * MOST];

    (void) state;

    for (int i = 0; i < 3 * N_FLOAT; i++) {
        const int n = widths[i / N_FLOAT];
        op_tensor_t t = random_tensor(dtypes[i % N_FLOAT], n, N_OUT);
        float *x = random_rows(OF_ROWS, 2 * n);
        float *norm = random_rows(1, n);
        op_weight_t *w = make_weight(&d, &t, 1);

        for (int k = 0; k < 2 * OF_ROWS; k++) {
            const int rows = k / 2 + 1;
            const op_input_t in = { .kind = k % 2 == 0 ? OP_NORMED : OP_GATED,
                                    .dim = n,
                                    .x = x,
                                    .norm = norm,
                                    .eps = 1e-5f };
            uint64_t before = shim_stats.launches;

            /* and whatever the schedule */
            shim_options()->seed = (uint64_t) (i % 4);
            d.ops->linear_of(d.dev, got, N_OUT, &in, rows, w, OP_SET);
            shim_options()->seed = 0;
            assert_int_equal(shim_stats.launches - before,
                             rows <= 8 && t.dtype != OP_F32 ? 1 : 2);

            if (in.kind == OP_NORMED) {
                d.ops->rmsnorm(d.dev, between, x, norm, rows, n, in.eps);
            } else {
                d.ops->silu_mul(d.dev, between, x, rows, n);
            }

            d.ops->linear(d.dev, want, N_OUT, between, rows, w, OP_SET);
            check_same(want, got, rows * N_OUT,
                       in.kind == OP_NORMED ? "normed" : "gated",
                       (int) t.dtype);
        }

        d.ops->weight_free(d.dev, w);
        free(x);
        free(norm);
        free((void *) t.data);
    }

    d.ops->close(d.dev);
}


static void
loose_is_cublas(void **state)
{
    static const double bounds[N_FLOAT] = { 1e-6, 1e-3, 5e-3 };
    device_t d = open_as("80", true);
    const uint64_t workspaces = shim_stats.workspaces;

    (void) state;
    assert_non_null(strstr(d.ops->describe(d.dev), "by cuBLAS 13.0"));

    for (int i = 0; i < N_FLOAT; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        float *x = random_rows(ROWS, N_IN);
        float *want = of_oracle(&t, x, ROWS);
        op_weight_t *w = make_weight(&d, &t, 1);
        uint64_t before = products();
        float *y = run_linear(&d, w, N_OUT, x, 8);

        /* few rows are not its */
        assert_int_equal(products(), before);
        free(y);
        y = run_linear(&d, w, N_OUT, x, 9);
        assert_int_equal(products(), before + 1);
        free(y);

        y = run_linear(&d, w, N_OUT, x, ROWS);
        assert_true(compare_rms(want, y, ROWS * N_OUT) < bounds[i]);
        assert_true(count_different(&d, &t, x) > 0);

        /* one addition behind the sum */
        float sum[ROWS * N_OUT];

        for (int k = 0; k < ROWS * N_OUT; k++) {
            sum[k] = (float) (k % 5);
        }

        d.ops->linear(d.dev, sum, N_OUT, x, ROWS, w, OP_ADD);

        for (int k = 0; k < ROWS * N_OUT; k++) {
            assert_true(sum[k] == (float) (k % 5) + y[k]);
        }

        d.ops->weight_free(d.dev, w);
        free(y);
        free(want);
        free(x);
        free((void *) t.data);
    }

    /* or each captured graph would have one */
    assert_int_equal(shim_stats.workspaces, workspaces);
    d.ops->close(d.dev);
}


/* Parts of several types in one weight: each has its inputs. */
static void
loose_in_parts(void **state)
{
    device_t d = open_as("80", true);
    float *x = random_rows(ROWS, N_IN);
    op_tensor_t parts[] = { random_tensor(OP_BF16, N_IN, 20),
                            random_tensor(OP_F16, N_IN, 17),
                            random_tensor(OP_F32, N_IN, 30),
                            random_tensor(OP_F16, N_IN, 3) };
    op_weight_t *w = make_weight(&d, parts, 4);
    const uint64_t before = products();
    float *y = run_linear(&d, w, N_OUT, x, ROWS);

    (void) state;
    assert_int_equal(products(), before + 4);

    for (int i = 0, first = 0; i < 4; i++) {
        const int n_out = (int) parts[i].n_out;
        float *want = of_oracle(&parts[i], x, ROWS);

        for (int r = 0; r < ROWS; r++) {
            assert_true(compare_rms(want + r * n_out, y + r * N_OUT + first,
                                    (size_t) n_out)
                        < 2e-2);
        }

        first += n_out;
        free(want);
        free((void *) parts[i].data);
    }

    d.ops->weight_free(d.dev, w);
    d.ops->close(d.dev);
    free(y);
    free(x);
}


/* Normed and gated inputs, of whom cuBLAS knows nothing. */
static void
loose_of(void **state)
{
    device_t d = open_as("80", true);
    device_t exact = open_as("80", false);
    op_tensor_t t = random_tensor(OP_BF16, N_IN, N_OUT);
    float *x = random_rows(ROWS, 2 * N_IN);
    float *norm = random_rows(1, N_IN);
    op_weight_t *w = make_weight(&d, &t, 1);
    op_weight_t *w_exact = make_weight(&exact, &t, 1);

    (void) state;

    for (int kind = OP_NORMED; kind <= OP_GATED; kind++) {
        static float got[ROWS * N_OUT], want[ROWS * N_OUT];
        const op_input_t in = {
            .kind = kind, .dim = N_IN, .x = x, .norm = norm, .eps = 1e-5f
        };

        d.ops->linear_of(d.dev, got, N_OUT, &in, ROWS, w, OP_SET);
        exact.ops->linear_of(exact.dev, want, N_OUT, &in, ROWS, w_exact,
                             OP_SET);
        assert_true(compare_rms(want, got, ROWS * N_OUT) < 5e-3);
    }

    d.ops->weight_free(d.dev, w);
    exact.ops->weight_free(exact.dev, w_exact);
    d.ops->close(d.dev);
    exact.ops->close(exact.dev);
    free(x);
    free(norm);
    free((void *) t.data);
}


/* Inputs beyond the largest f16 stay finite, small ones count, and what is not
 * finite is seen. */
static void
loose_in_range(void **state)
{
    device_t d = open_as("80", true);
    op_tensor_t t = random_tensor(OP_F16, N_IN, N_OUT);
    float *x = random_rows(ROWS, N_IN);
    op_weight_t *w = make_weight(&d, &t, 1);

    (void) state;

    for (int i = 0; i < N_IN; i++) {
        x[i] *= 1e5f;             /* row 0: above 65504 */
        x[N_IN + i] *= 1e-2f;     /* row 1 */
        x[2 * N_IN + i] *= 1e30f; /* row 2: cut, but finite */
    }

    float *want = of_oracle(&t, x, ROWS);
    float *y = run_linear(&d, w, N_OUT, x, ROWS);

    assert_true(compare_rms(want, y, N_OUT) < 1e-3);
    assert_true(compare_rms(want + N_OUT, y + N_OUT, N_OUT) < 1e-3);

    for (int i = 0; i < N_OUT; i++) {
        assert_true(isfinite(y[2 * N_OUT + i]));
    }

    free(y);
    y = malloc(sizeof(float) * ROWS * N_OUT);
    x[3 * N_IN + 5] = INFINITY;
    x[4 * N_IN + 6] = NAN;
    d.ops->linear(d.dev, y, N_OUT, x, ROWS, w, OP_SET);

    for (int i = 0; i < N_OUT; i++) {
        assert_false(isfinite(y[3 * N_OUT + i]));
        assert_false(isfinite(y[4 * N_OUT + i]));
        assert_true(isfinite(y[5 * N_OUT + i]));
    }

    d.ops->weight_free(d.dev, w);
    d.ops->close(d.dev);
    free(y);
    free(want);
    free(x);
    free((void *) t.data);
}


/* No library, or one that does not start: as when exact, and it is said. */
static void
without_the_library(void **state)
{
    op_tensor_t t = random_tensor(OP_F16, N_IN, N_OUT);
    float *x = random_rows(ROWS, N_IN);

    (void) state;

    for (int fails = 0; fails < 2; fails++) {
        shim_options()->no_cublas = !fails;
        shim_fail_at(SHIM_FAIL_CUBLAS, (uint64_t) fails);

        device_t d = open_as("80", true);
        const uint64_t before = products();

        shim_options()->no_cublas = false;
        shim_fail_at(SHIM_FAIL_CUBLAS, 0);
        assert_non_null(strstr(d.ops->describe(d.dev), "without cuBLAS ("));
        assert_int_equal(count_different(&d, &t, x), 0);
        assert_int_equal(products(), before);
        d.ops->close(d.dev);
    }

    free(x);
    free((void *) t.data);
}


/* Whatever call fails while it opens and prepares: a device or a sentence. */
static void
loose_opening_fails(void **state)
{
    static const op_limits_t limits = { 16, 4, 64, 256, 4, 2, 16 };
    const op_open_t params = { .device = 0, .loose = true };

    (void) state;

    for (int kind = 0; kind < SHIM_FAIL_KINDS; kind++) {
        for (uint64_t n = 1; n <= 16; n++) {
            op_err_t err = { "" };

            shim_fail_at((shim_fail_t) kind, n);

            op_dev_t *dev = cuda_ops.open(&params, &err);

            if (dev != NULL && cuda_ops.prepare(dev, &limits, &err) == 0) {
                err.text[0] = '?';
            }

            shim_fail_at((shim_fail_t) kind, 0);
            assert_true(err.text[0] != '\0');
            cuda_ops.close(dev);
            cudaDeviceReset();
        }
    }
}


/* A product that fails is the device's failure; the first one is kept. */
static void
loose_product_fails(void **state)
{
    static const op_limits_t limits = { ROWS, 4, 64, N_IN, 4, 2, 16 };
    const op_open_t params = { .device = 0, .loose = true };
    op_tensor_t t = random_tensor(OP_F16, N_IN, N_OUT);
    op_err_t err = { "" };
    op_dev_t *dev = cuda_ops.open(&params, &err);

    (void) state;
    assert_non_null(dev);
    assert_int_equal(cuda_ops.prepare(dev, &limits, &err), 0);

    op_weight_t *w = cuda_ops.weight(dev, &t, 1, &err);
    float *x = cuda_ops.alloc(dev, sizeof(float) * ROWS * N_IN);
    float *y = cuda_ops.alloc(dev, sizeof(float) * ROWS * N_OUT);

    assert_int_equal(cuda_ops.check(dev, &err), 0);
    shim_fail_at(SHIM_FAIL_CUBLAS, 1);
    cuda_ops.linear(dev, y, N_OUT, x, ROWS, w, OP_SET);
    assert_int_equal(cuda_ops.check(dev, &err), -1);
    assert_string_equal(err.text, "GPU 0: linear: cuBLAS status 13");

    const uint64_t before = products();

    cuda_ops.linear(dev, y, N_OUT, x, ROWS, w, OP_SET);
    assert_int_equal(products(), before);
    assert_int_equal(cuda_ops.check(dev, &err), -1);
    assert_non_null(strstr(err.text, "cuBLAS status 13"));

    cuda_ops.free(dev, x, 0);
    cuda_ops.free(dev, y, 0);
    cuda_ops.weight_free(dev, w);
    cuda_ops.close(dev);
    free((void *) t.data);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_whatever_the_rows),
        cmocka_unit_test(exact_is_near),
        cmocka_unit_test(without_tensor_cores),
        cmocka_unit_test(exact_of),
        cmocka_unit_test(loose_is_cublas),
        cmocka_unit_test(loose_in_parts),
        cmocka_unit_test(loose_of),
        cmocka_unit_test(loose_in_range),
        cmocka_unit_test(without_the_library),
        cmocka_unit_test(loose_product_fails),
        cmocka_unit_test(loose_opening_fails),
    };
    int failed;

    if (open_devices() != 0) {
        return 1;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();

    return failed;
}
