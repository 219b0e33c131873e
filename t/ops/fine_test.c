/*
 * linear() with OP_FINE: the product of the quantised inputs, plus the product
 * of what quantising left over; bit for bit on every instruction set, number
 * of threads and rows, and near the oracle.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "t/ops/lib/compare.h"
#include "t/ops/lib/linear.h"
#include "t/ops/lib/small.h"

enum { WIDE = 512, N_OUT = 37 };


static float
scale_of(const float *x)
{
    float top = 0.0f;

    for (int i = 0; i < 32; i++) {
        top = fmaxf(top, fabsf(x[i]));
    }

    return top / 127.0f;
}


/* x less its quantised self, by the rule of op.h. */
static void
rest_of(const float *x, float *rest, int n)
{
    float largest = 0.0f;

    for (int b = 0; b < n; b += 32) {
        largest = fmaxf(largest, scale_of(x + b));
    }

    for (int b = 0; b < n; b += 32) {
        const float d = scale_of(x + b);

        if (d < OP_FINE_SCALE * largest) {
            memset(rest + b, 0, 32 * sizeof(float));
            continue;
        }

        for (int i = 0; i < 32; i++) {
            const float q = d > 0.0f ? nearbyintf(x[b + i] / d) : 0.0f;
            const volatile float whole = d * q; /* rounded before use */

            rest[b + i] = x[b + i] - whole;
        }
    }
}


/* Blocks of much smaller scale than others, some in all rows, some in a few,
 * and empty rows. */
static void
make_uneven(float *x, int rows)
{
    for (int r = 0; r < rows; r++) {
        for (int b = 0; b < WIDE / 32; b++) {
            const float scale = r % 7 == 5                ? 0.0f
                                : b % 3 != 0              ? 1.0f
                                : b % 2 == 0 || r % 4 > 1 ? 0.1f
                                                          : 3.0f;

            for (int i = 0; i < 32; i++) {
                x[r * WIDE + b * 32 + i] *= scale;
            }
        }
    }
}


/* The documented result in each order. */
static void
expected_fine(const op_tensor_t *t, const float *x, int rows, float **want)
{
    const bool quantised = op_dtype_block((int) t->dtype) > 1;
    float rest[WIDE];

    for (int order = 0; order < N_ORDERS; order++) {
        want[order] = take(sizeof(float) * (size_t) (rows * N_OUT));

        for (int r = 0; r < rows; r++) {
            rest_of(x + r * WIDE, rest, WIDE);

            for (int o = 0; o < N_OUT; o++) {
                float *w = &want[order][r * N_OUT + o];

                *w = expected(order, t, o, x + r * WIDE);
                *w += quantised ? expected(order, t, o, rest) : 0.0f;
            }
        }
    }
}


static void
fine_is_two_products(void **state)
{
    /* the small set is what stands first */
    enum { N_COUNTS = SMALL_SET ? 4 : 6 };
    static const int counts[] = { 1, 3, 17, 33, 2, 130 };

    (void) state;

    for (int t = 0; t < N_DTYPES; t++) {
        op_tensor_t tensor = random_tensor(dtypes[t], WIDE, N_OUT);

        for (int c = 0; c < N_COUNTS; c++) {
            const int rows = counts[c];
            float *x = random_rows(rows, WIDE);

            make_uneven(x, rows);

            float *y = take(sizeof(float) * (size_t) (rows * N_OUT));
            float *added = take(sizeof(float) * (size_t) (rows * N_OUT));
            float *want[N_ORDERS];

            expected_fine(&tensor, x, rows, want);

            for (int k = 0; k < n_devices; k++) {
                const device_t *d = &devices[k];
                op_weight_t *w = make_weight(d, &tensor, 1);

                d->ops->linear(d->dev, y, N_OUT, x, rows, w, OP_SET | OP_FINE);
                check_same(want[d->order], y, rows * N_OUT, "fine",
                           (int) dtypes[t]);

                memset(added, 0, sizeof(float) * (size_t) (rows * N_OUT));
                d->ops->linear(d->dev, added, N_OUT, x, rows, w,
                               OP_ADD | OP_FINE);
                check_same(want[d->order], added, rows * N_OUT, "fine, added",
                           (int) dtypes[t]);
                d->ops->weight_free(d->dev, w);
            }

            for (int order = 0; order < N_ORDERS; order++) {
                free(want[order]);
            }

            free(added);
            free(y);
            free(x);
        }

        free((void *) tensor.data);
    }
}


static void
fine_is_near_the_oracle(void **state)
{
    enum { ROWS = 10, OUTS = 300 };
    float *w_rows = random_rows(OUTS, WIDE);
    uint8_t *data = take(op_row_bytes(OP_Q8_0, WIDE) * OUTS);
    const op_tensor_t tensor = { data, OP_Q8_0, WIDE, OUTS };
    float *x = random_rows(ROWS, WIDE);
    float *y = take(sizeof(float) * ROWS * OUTS);
    float *want = take(sizeof(float) * ROWS * OUTS);

    (void) state;

    op_quant_row(OP_Q8_0, w_rows, data, (int64_t) OUTS * WIDE);

    op_weight_t *w = make_weight(&devices[0], &tensor, 1);
    op_weight_t *w_ref = make_weight(&ref, &tensor, 1);

    devices[0].ops->linear(devices[0].dev, y, OUTS, x, ROWS, w,
                           OP_SET | OP_FINE);
    ref.ops->linear(ref.dev, want, OUTS, x, ROWS, w_ref, OP_SET | OP_FINE);

    for (int r = 0; r < ROWS; r++) {
        const double error = compare_rms(want + r * OUTS, y + r * OUTS, OUTS);

        if (!(error <= 1.5e-4)) {
            fail_msg("row %d: error %g (seed %llu)", r, error,
                     (unsigned long long) seed);
        }
    }

    devices[0].ops->weight_free(devices[0].dev, w);
    ref.ops->weight_free(ref.dev, w_ref);
    free(want);
    free(y);
    free(x);
    free(data);
    free(w_rows);
}


/* linear_of(): the bits of the ops one after the other, at any rows. */
static void
of_is_both_ops(void **state)
{
    static const int counts[] = { 1, 2, 4, 5, 9, 40 };
    static const op_dtype_t kinds[] = { OP_Q4_1, OP_Q6_K, OP_F16 };

    (void) state;

    for (int t = 0; t < 3; t++) {
        op_tensor_t parts[2] = { random_tensor(kinds[t], WIDE, N_OUT),
                                 random_tensor(OP_Q8_0, WIDE, N_OUT) };
        float *norm = random_rows(1, WIDE);

        for (int i = 0; i < 6 * n_devices * 3 * 2; i++) {
            const device_t *d = &devices[i / 36];
            const int rows = counts[i % 6];
            const int kind = i / 6 % 3;
            const int mode = i / 18 % 2 == 0 ? OP_SET : OP_SET | OP_FINE;
            float *x = random_rows(rows, 2 * WIDE);
            float *h = random_rows(rows, 2 * WIDE);
            float *want = random_rows(rows, 2 * N_OUT);
            float *y = random_rows(rows, 2 * N_OUT);
            op_weight_t *w = make_weight(d, parts, 2);
            const op_input_t in = { kind, WIDE, x, norm, 1e-5f, h };

            if (kind == OP_NORMED) {
                d->ops->rmsnorm(d->dev, h, x, norm, rows, WIDE, 1e-5f);
            } else if (kind == OP_GATED) {
                d->ops->silu_mul(d->dev, h, x, rows, WIDE);
            }

            d->ops->linear(d->dev, want, 2 * N_OUT, kind == OP_PLAIN ? x : h,
                           rows, w, mode);
            d->ops->linear_of(d->dev, y, 2 * N_OUT, &in, rows, w, mode);
            check_same(want, y, rows * 2 * N_OUT, "of", (int) kinds[t]);
            d->ops->weight_free(d->dev, w);
            free(x);
            free(h);
            free(want);
            free(y);
        }

        free(norm);
        free((void *) parts[0].data);
        free((void *) parts[1].data);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fine_is_two_products),
        cmocka_unit_test(of_is_both_ops),
        cmocka_unit_test(fine_is_near_the_oracle),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (open_devices() != 0) {
        return 1;
    }

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    close_devices();

    return rc;
}
