/*
 * linear(): the documented order of arithmetic must come out bit for bit from
 * every instruction set, number of threads, batch and cut of the columns; and
 * be near the oracle.
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

#include "t/ops/lib/compare.h"
#include "t/ops/lib/linear.h"
#include "t/ops/lib/small.h"


/* want: by order; NULL: not known. */
static void
check_devices(const op_tensor_t *t, const float *x, float *const *want,
              const int *counts, int n_counts)
{
    int n_out = (int) t->n_out;

    for (int i = 0; i < n_devices; i++) {
        const device_t *d = &devices[i];

        if (want[d->order] == NULL) {
            continue;
        }

        op_weight_t *w = make_weight(d, t, 1);

        for (int k = 0; k < n_counts; k++) {
            float *y = run_linear(d, w, n_out, x, counts[k]);

            check_same(want[d->order], y, counts[k] * n_out,
                       d->ops->describe(d->dev), (int) t->dtype);
            free(y);
        }

        d->ops->weight_free(d->dev, w);
    }
}


static void
expected_all(const op_tensor_t *t, const float *x, int rows, float **want)
{
    for (int order = 0; order < N_ORDERS; order++) {
        want[order] = NULL;

        if (!is_expected(order, t)) {
            continue;
        }

        want[order] = take(sizeof(float) * (size_t) rows * (size_t) t->n_out);

        for (int r = 0; r < rows; r++) {
            for (int o = 0; o < t->n_out; o++) {
                want[order][r * t->n_out + o] =
                    expected(order, t, o, x + r * t->n_in);
            }
        }
    }
}


static void
free_all(float **want)
{
    for (int order = 0; order < N_ORDERS; order++) {
        free(want[order]);
    }
}


static void
linear_has_the_documented_bits(void **state)
{
    /* the small set is what stands first */
    enum { N_SHAPES = SMALL_SET ? 8 : 11, N_COUNTS = SMALL_SET ? 5 : 8 };
    static const int shapes[][2] = { { 256, 1 },  { 32, 7 },    { 96, 16 },
                                     { 768, 17 }, { 512, 33 },  { 1536, 9 },
                                     { 7, 20 },   { 256, 130 }, { 576, 200 },
                                     { 64, 576 }, { 1536, 31 } };
    static const int counts[] = { 1, 2, 5, 8, 20, 3, 13, 16 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        for (int s = 0; s < N_SHAPES; s++) {
            int n_in = shapes[s][0];

            if (n_in % op_dtype_block((int) dtypes[i]) != 0) {
                continue;
            }

            op_tensor_t t = random_tensor(dtypes[i], n_in, shapes[s][1]);
            float *x = random_rows(20, n_in);
            float *want[N_ORDERS];

            expected_all(&t, x, 20, want);
            check_devices(&t, x, want, counts, N_COUNTS);
            free_all(want);
            free(x);
            free((void *) t.data);
        }
    }
}


enum { BATCH_OUT = SMALL_SET ? 37 : 100 };


static void
rows_alone(const device_t *d, const op_weight_t *w, const float *x,
           const float *want, int dtype)
{
    for (int r = 0; r < MAX_ROWS; r += SMALL_SET ? 43 : 7) {
        float *y = run_linear(d, w, BATCH_OUT, x + r * 768, 1);

        check_same(want + r * BATCH_OUT, y, BATCH_OUT, "row alone", dtype);
        free(y);
    }
}


static void
rows_do_not_depend_on_the_batch(void **state)
{
    /* tiles have 4, 8, 16, 32 … rows */
    static const int small[] = { 1, 2, 4, 5, 8, 9, 16, 17, 32, 33, MAX_ROWS };
    int counts[36];
    int n = 0;

    (void) state;

    for (int m = 1; m <= 33; m++) {
        counts[n++] = m;
    }

    counts[n++] = 64;
    counts[n++] = MAX_ROWS - 1;
    counts[n++] = MAX_ROWS;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], 768, BATCH_OUT);
        float *x = random_rows(MAX_ROWS, 768);
        float *want[N_ORDERS] = { NULL };

        for (int k = 0; k < n_devices; k++) {
            const device_t *d = &devices[k];

            if (want[d->order] == NULL) {
                op_weight_t *w = make_weight(d, &t, 1);

                want[d->order] = run_linear(d, w, BATCH_OUT, x, MAX_ROWS);
                rows_alone(d, w, x, want[d->order], (int) t.dtype);
                d->ops->weight_free(d->dev, w);
            }
        }

        check_devices(&t, x, want, SMALL_SET ? small : counts,
                      SMALL_SET ? (int) (sizeof(small) / sizeof(small[0])) : n);
        free_all(want);
        free(x);
        free((void *) t.data);
    }
}


/* Two or three weights of some of the columns give those columns' bits. */
static void
columns_do_not_depend_on_the_cut(void **state)
{
    static const int cuts[] = { 1, 16, 40, 99 };
    enum { N_IN = 512, N_OUT = 100, ROWS = 9 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        size_t row = op_row_bytes((int) t.dtype, N_IN);
        float *x = random_rows(ROWS, N_IN);

        for (int k = 0; k < n_devices; k++) {
            const device_t *d = &devices[k];
            op_weight_t *whole = make_weight(d, &t, 1);
            float *want = run_linear(d, whole, N_OUT, x, ROWS);

            for (int c = 0; c < 4; c++) {
                op_tensor_t tail = t;

                tail.n_out = N_OUT - cuts[c];
                tail.data = (const uint8_t *) t.data + (size_t) cuts[c] * row;

                op_weight_t *w = make_weight(d, &tail, 1);
                float *y = run_linear(d, w, (int) tail.n_out, x, ROWS);

                for (int r = 0; r < ROWS; r++) {
                    check_same(want + r * N_OUT + cuts[c], y + r * tail.n_out,
                               (int) tail.n_out, "cut", (int) t.dtype);
                }

                d->ops->weight_free(d->dev, w);
                free(y);
            }

            d->ops->weight_free(d->dev, whole);
            free(want);
        }

        free(x);
        free((void *) t.data);
    }
}


static void
add_mode_adds_once(void **state)
{
    enum { N_IN = 256, N_OUT = 37, ROWS = 11 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        float *x = random_rows(ROWS, N_IN);
        float *before = random_rows(ROWS, N_OUT);

        for (int k = 0; k < n_devices; k++) {
            const device_t *d = &devices[k];
            op_weight_t *w = make_weight(d, &t, 1);
            float *y = run_linear(d, w, N_OUT, x, ROWS);
            float sum[ROWS * N_OUT];

            memcpy(sum, before, sizeof(sum));
            d->ops->linear(d->dev, sum, N_OUT, x, ROWS, w, OP_ADD);

            for (int j = 0; j < ROWS * N_OUT; j++) {
                y[j] = before[j] + y[j];
            }

            check_same(y, sum, ROWS * N_OUT, "add", (int) t.dtype);
            d->ops->weight_free(d->dev, w);
            free(y);
        }

        free(before);
        free(x);
        free((void *) t.data);
    }
}


/* Weights of mean zero, as real ones have: random minima would make the rows
 * of W near constant, and a sum of the inputs that happens to cancel would
 * then count as an error. */
static op_tensor_t
centred_tensor(op_dtype_t dtype, int n_in, int n_out)
{
    op_tensor_t t = random_tensor(dtype, n_in, n_out);
    size_t n_bytes = op_row_bytes((int) dtype, n_in) * (size_t) n_out;
    size_t bytes = (size_t) op_dtype_bytes((int) dtype);
    uint8_t *data = (uint8_t *) t.data;

    if (dtype == OP_Q4_K || dtype == OP_Q5_K) {
        float middle = dtype == OP_Q4_K ? 7.5f : 15.5f;

        for (uint8_t *p = data; p < data + n_bytes; p += bytes) {
            uint16_t d;

            memcpy(&d, p, sizeof(d));
            d = op_float_to_half(middle * op_half_to_float(d));
            memcpy(p + 2, &d, sizeof(d));
            memcpy(p + 8, p + 4, 4); /* the minima's integers: the scales' */

            for (int i = 12; i < 16; i++) {
                p[i] = (uint8_t) ((p[i] & 15) * 17);
            }
        }

    } else if (dtype != OP_Q6_K && dtype != OP_F32) {
        float *w = random_rows(n_out, n_in);

        op_quant_row(dtype, w, data, (int64_t) n_in * n_out);
        free(w);
    }

    return t;
}


enum { NEAR_OUT = 300, NEAR_ROWS = 10 };


static void
near_the_oracle(const device_t *d, const op_tensor_t *t, const float *x,
                const float *want)
{
    const double bound = op_dtype_block((int) t->dtype) > 1 ? 1.5e-2 : 1e-5;
    op_weight_t *w = make_weight(d, t, 1);
    float *y = run_linear(d, w, NEAR_OUT, x, NEAR_ROWS);

    for (int r = 0; r < NEAR_ROWS; r++) {
        double e = compare_rms(want + r * NEAR_OUT, y + r * NEAR_OUT, NEAR_OUT);

        if (!(e <= bound)) {
            fail_msg("%s, %s, %d inputs: error %g (seed %llu)", d->ops->name,
                     op_dtype_name((int) t->dtype), (int) t->n_in, e,
                     (unsigned long long) seed);
        }
    }

    d->ops->weight_free(d->dev, w);
    free(y);
}


static void
linear_is_near_the_oracle(void **state)
{
    enum { N_OUT = NEAR_OUT, ROWS = NEAR_ROWS };
    enum { N_WIDTHS = SMALL_SET ? 2 : 3 };
    static const int widths[] = { 256, 768, 1536 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        for (int s = 0; s < N_WIDTHS; s++) {
            op_tensor_t t = centred_tensor(dtypes[i], widths[s], N_OUT);
            float *x = random_rows(ROWS, widths[s]);
            op_weight_t *w_ref = make_weight(&ref, &t, 1);
            float *want = run_linear(&ref, w_ref, N_OUT, x, ROWS);

            near_the_oracle(&devices[0], &t, x, want);
            near_the_oracle(&devices[n_devices - 1], &t, x, want);
            ref.ops->weight_free(ref.dev, w_ref);
            free(want);
            free(x);
            free((void *) t.data);
        }
    }
}


/* The largest quants on both sides, where narrow sums would overflow. */
static void
extreme_quants_do_not_overflow(void **state)
{
    static const int counts[] = { 1, 4, 8, 9 };
    enum { N_IN = 512, N_OUT = 18, ROWS = 9 };

    (void) state;

    for (int i = 3; i < N_DTYPES; i++) {
        for (int fill = 0; fill < 3; fill++) {
            op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
            int bytes = op_dtype_bytes((int) t.dtype);
            size_t size = op_row_bytes((int) t.dtype, N_IN) * N_OUT;
            uint8_t *data = (uint8_t *) t.data;
            float *x = random_rows(ROWS, N_IN);
            float *want[N_ORDERS];

            for (size_t k = 0; k < size; k++) {
                int in = (int) (k % (size_t) bytes);
                int scale = t.dtype == OP_Q6_K ? in >= 208 : in < 4;

                if (t.dtype == OP_Q8_0 || t.dtype == OP_Q5_0
                    || t.dtype == OP_Q4_0) {
                    scale = in < 2;
                }

                if (!scale) {
                    data[k] = fill == 0 ? 0xff : fill == 1 ? 0x80 : 0x00;
                }
            }

            for (int k = 0; k < ROWS * N_IN; k++) {
                x[k] = (k / N_IN) % 2 == 0 ? 3.0f : -3.0f;
            }

            expected_all(&t, x, ROWS, want);
            check_devices(&t, x, want, counts, 4);
            free_all(want);
            free(x);
            free(data);
        }
    }
}


/* Rows of zero, of subnormals, of huge values and with ties. */
static void
odd_activations_have_the_same_bits(void **state)
{
    static const int counts[] = { 1, 6, 8 };
    enum { N_IN = 256, N_OUT = 20, ROWS = 8 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        float *x = random_rows(ROWS, N_IN);
        float *want[N_ORDERS];

        for (int k = 0; k < N_IN; k++) {
            x[0 * N_IN + k] = 0.0f;
            x[1 * N_IN + k] *= 1e-40f;
            x[2 * N_IN + k] *= 1e30f;
            x[3 * N_IN + k] = k % 32 == 0 ? 127.0f : (float) (k % 32) - 15.5f;
            x[4 * N_IN + k] = -0.0f;
            x[5 * N_IN + k] = k % 2 == 0 ? 0x1p-149f : -0x1.8p-143f;
            x[6 * N_IN + k] = k == 77 ? -1e-5f : 0.0f;
        }

        expected_all(&t, x, ROWS, want);
        check_devices(&t, x, want, counts, 3);

        for (int o = 0; o < N_OUT; o++) {
            assert_true(want[IN_ONE][o] == 0.0f);

            if (want[IN_CLASSES] != NULL) {
                assert_true(want[IN_CLASSES][o] == 0.0f);
            }
        }

        free_all(want);
        free(x);
        free((void *) t.data);
    }
}


/* NaN or infinity in a row reaches all its outputs, and no other row's. */
static void
non_finite_rows_stay_alone(void **state)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    enum { N_IN = 256, N_OUT = 20, ROWS = 9 };

    (void) state;

    for (int i = 3; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        float *x = random_rows(ROWS, N_IN);

        for (int k = 0; k < n_devices; k++) {
            const device_t *d = &devices[k];
            op_weight_t *w = make_weight(d, &t, 1);
            float *want = run_linear(d, w, N_OUT, x, ROWS);

            for (int b = 0; b < 3; b++) {
                float y[ROWS * N_OUT];
                float saved = x[4 * N_IN + 70];

                x[4 * N_IN + 70] = bad[b];
                d->ops->linear(d->dev, y, N_OUT, x, ROWS, w, OP_SET);
                x[4 * N_IN + 70] = saved;

                for (int j = 0; j < ROWS * N_OUT; j++) {
                    assert_true(j / N_OUT == 4 ? isnan(y[j]) : y[j] == want[j]);
                }
            }

            d->ops->weight_free(d->dev, w);
            free(want);
        }

        free(x);
        free((void *) t.data);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_has_the_documented_bits),
        cmocka_unit_test(rows_do_not_depend_on_the_batch),
        cmocka_unit_test(columns_do_not_depend_on_the_cut),
        cmocka_unit_test(add_mode_adds_once),
        cmocka_unit_test(linear_is_near_the_oracle),
        cmocka_unit_test(extreme_quants_do_not_overflow),
        cmocka_unit_test(odd_activations_have_the_same_bits),
        cmocka_unit_test(non_finite_rows_stay_alone),
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
