/*
 * Weights as things that are made, looked up and freed: parts of different
 * types in one weight, embed(), refusals, and memory shared by many.
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

#include "t/ops/lib/linear.h"


static void
parts_of_different_types_stand_side_by_side(void **state)
{
    enum { N_IN = 256, ROWS = 5, PARTS = 6 };
    static const op_dtype_t kinds[PARTS] = { OP_Q4_1, OP_Q4_1, OP_Q6_K,
                                             OP_F16,  OP_Q8_0, OP_Q5_0 };
    static const int widths[PARTS] = { 24, 10, 3, 17, 32, 1 };
    enum { N_OUT = 87 };
    float *x = random_rows(ROWS, N_IN);
    op_tensor_t parts[PARTS];
    float got[3 * N_IN], want[N_IN];
    static const int32_t tokens[3] = { 33, 36, 86 };
    static const int part_of[3] = { 1, 2, 5 };
    static const int row_of[3] = { 9, 2, 0 };

    (void) state;

    for (int i = 0; i < PARTS; i++) {
        parts[i] = random_tensor(kinds[i], N_IN, widths[i]);
    }

    for (int k = 0; k < n_devices; k++) {
        const device_t *d = &devices[k];
        op_weight_t *w = make_weight(d, parts, PARTS);
        float *y = run_linear(d, w, N_OUT, x, ROWS);
        int first = 0;

        for (int i = 0; i < PARTS; first += widths[i++]) {
            for (int r = 0; r < ROWS; r++) {
                for (int o = 0; o < widths[i]; o++) {
                    float v =
                        expected(d->order, &parts[i], o, x + r * N_IN);

                    check_same(&v, &y[r * N_OUT + first + o], 1, "part",
                               (int) kinds[i]);
                }
            }
        }

        d->ops->embed(d->dev, got, w, tokens, 3);

        for (int i = 0; i < 3; i++) {
            const op_tensor_t *t = &parts[part_of[i]];
            size_t row = op_row_bytes((int) t->dtype, N_IN);

            op_dequant_row(t->dtype,
                           (const uint8_t *) t->data + (size_t) row_of[i] * row,
                           want, N_IN);
            check_same(want, got + i * N_IN, N_IN, "embed", (int) t->dtype);
        }

        d->ops->weight_free(d->dev, w);
        free(y);
    }

    for (int i = 0; i < PARTS; i++) {
        free((void *) parts[i].data);
    }

    free(x);
}


static void
embed_is_exact(void **state)
{
    enum { N_IN = 512, N_OUT = 50 };
    static const int32_t tokens[] = { 0, 49, 15, 16, 16, 7 };
    static float want[N_IN], got[6 * N_IN];

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        size_t row = op_row_bytes((int) t.dtype, N_IN);

        for (int k = -1; k < n_devices; k++) {
            const device_t *d = k < 0 ? &ref : &devices[k];
            op_weight_t *w = make_weight(d, &t, 1);

            d->ops->embed(d->dev, got, w, tokens, 6);

            for (int r = 0; r < 6; r++) {
                op_dequant_row(t.dtype,
                               (const uint8_t *) t.data
                                   + (size_t) tokens[r] * row,
                               want, N_IN);
                check_same(want, got + r * N_IN, N_IN, "embed", (int) t.dtype);
            }

            d->ops->weight_free(d->dev, w);
        }

        free((void *) t.data);
    }
}


static void
bad_weights_are_refused(void **state)
{
    static const uint8_t data[4096];
    const op_tensor_t good = { data, OP_Q4_1, 64, 4 };
    op_tensor_t bad[2][6] = {
        { { data, OP_Q4_1, 48, 4 } },          /* not whole blocks */
        { { data, (op_dtype_t) 10, 256, 4 } }, /* Q2_K */
    };

    (void) state;
    bad[0][1] = (op_tensor_t){ data, OP_Q4_K, 288, 4 };
    bad[0][2] = (op_tensor_t){ data, OP_F32, 0, 4 };
    bad[0][3] = (op_tensor_t){ data, OP_F32, 16, 0 };
    bad[0][4] = (op_tensor_t){ data, OP_F32, -32, 4 };
    bad[0][5] = (op_tensor_t){ data, OP_Q8_0, 64, -1 };

    for (int k = -1; k < n_devices; k++) {
        const device_t *d = k < 0 ? &ref : &devices[k];
        op_tensor_t pair[2] = { good, good };
        op_err_t err;

        for (int i = 0; i < 7; i++) {
            const op_tensor_t *t = i < 6 ? &bad[0][i] : &bad[1][0];

            err.text[0] = '\0';
            assert_null(d->ops->weight(d->dev, t, 1, &err));
            assert_true(err.text[0] != '\0');
        }

        pair[1].n_in = 32;
        err.text[0] = '\0';
        assert_null(d->ops->weight(d->dev, pair, 2, &err));
        assert_true(err.text[0] != '\0');
    }
}


/* Weights share blocks of memory; freeing some leaves the others whole. */
static void
weights_come_and_go(void **state)
{
    enum { COUNT = 40, N_IN = 256 };
    op_tensor_t t[COUNT];
    op_weight_t *w[COUNT];
    float *x = random_rows(1, N_IN);
    const device_t *d = &devices[0];

    (void) state;

    for (int i = 0; i < COUNT; i++) {
        t[i] = random_tensor(dtypes[i % N_DTYPES], N_IN, 1 + 5 * i);
        w[i] = make_weight(d, &t[i], 1);
        assert_true(d->ops->weight_bytes(w[i])
                    >= op_row_bytes((int) t[i].dtype, N_IN)
                           * (size_t) t[i].n_out);
    }

    for (int round = 0; round < 3; round++) {
        for (int i = round; i < COUNT; i += 3) {
            d->ops->weight_free(d->dev, w[i]);
            w[i] = NULL;
        }

        for (int i = 0; i < COUNT; i++) {
            if (w[i] != NULL) {
                float *y = run_linear(d, w[i], (int) t[i].n_out, x, 1);
                float last =
                    expected(d->order, &t[i], (int) t[i].n_out - 1, x);

                check_same(&last, y + t[i].n_out - 1, 1, "kept",
                           (int) t[i].dtype);
                free(y);
            }
        }
    }

    d->ops->weight_free(d->dev, NULL);

    for (int i = 0; i < COUNT; i++) {
        free((void *) t[i].data);
    }

    free(x);
}


static void
backends_are_found_by_name(void **state)
{
    (void) state;
    assert_string_equal(backend_find("auto")->name, "cuda");
    assert_string_equal(backend_find("cuda")->name, "cuda");
    assert_string_equal(backend_find("cuda:7")->name, "cuda");
    assert_int_equal(backend_device("cuda:7"), 7);
    assert_int_equal(backend_device("cuda"), -1);
    assert_int_equal(backend_device("cpu"), -1);
    assert_string_equal(backend_find("cpu")->name, "cpu");
    assert_string_equal(backend_find("ref")->name, "ref");
    assert_null(backend_find("cuda:"));
    assert_null(backend_find("cuda:x"));
    assert_null(backend_find("cuda:-1"));
    assert_null(backend_find("cuda:999999999999"));
    assert_null(backend_find("cuda1"));
    assert_null(backend_find(""));
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_different_types_stand_side_by_side),
        cmocka_unit_test(embed_is_exact),
        cmocka_unit_test(bad_weights_are_refused),
        cmocka_unit_test(weights_come_and_go),
        cmocka_unit_test(backends_are_found_by_name),
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
