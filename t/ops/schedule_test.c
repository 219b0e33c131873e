/*
 * Kernels of rows and products on the emulated GPU, whatever order their
 * threads run in: the documented bits; and with device memory that the host
 * cannot touch.  Every type of weight, every way a product's inputs come,
 * few rows and many.  Small, so that it can run under sanitizers, which look
 * for races and for accesses out of bounds meanwhile.
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

#include "t/ops/lib/hosted.h"
#include "t/ops/lib/linear.h"
#include "t/ops/lib/small.h"
#include "t/shim/options.h"

enum { N_SEEDS = SMALL_SET ? 2 : 6, COUNT_STEP = SMALL_SET ? 2 : 1 };

enum { N_IN = 512, N_OUT = 37, ROWS = 33, N_COUNTS = 7 };

static const int counts[N_COUNTS] = { 1, 4, 5, 8, 9, 17, ROWS };

static device_t cuda;

/* A product in every way; y is [rows][N_OUT]. */
typedef struct {
    const op_tensor_t *t;
    const op_weight_t *w;
    const float *x;    /* [ROWS][2 n_in] */
    const float *norm; /* [n_in] */
    int rows;
} product_t;


static void
use_seed(int order)
{
    shim_options()->seed = (uint64_t) order;
}


static void
check_documented(const product_t *p, const float *y)
{
    const int n = (int) p->t->n_out;

    for (int i = 0; i < p->rows * n; i++) {
        const float want =
            expected(IN_CLASSES, p->t, i % n, p->x + i / n * p->t->n_in);

        check_same(&want, &y[i], 1, "plain", (int) p->t->dtype);
    }
}


/* Way 0: plain; then normed, gated, each also added, each also finely. */
static void
run_way(const product_t *p, int way, float *y)
{
    static const int kinds[] = { OP_PLAIN, OP_NORMED, OP_GATED };
    static float scratch[ROWS * N_IN];
    const int kind = kinds[way % 3];
    const int mode = way / 3 % 2 == 0 ? OP_SET : OP_ADD;
    const op_input_t in = { kind,  (int) p->t->n_in, p->x, p->norm,
                            1e-5f, scratch };

    for (int i = 0; i < p->rows * (int) p->t->n_out; i++) {
        y[i] = mode == OP_ADD ? (float) (i % 13) : NAN;
    }

    cuda.ops->linear_of(cuda.dev, y, (int) p->t->n_out, &in, p->rows, p->w,
                        way / 6 == 0 ? mode : mode | OP_FINE);
}


static void
check_product(const product_t *p)
{
    static float want[ROWS * N_OUT], got[ROWS * N_OUT];
    const int n = p->rows * (int) p->t->n_out;

    for (int way = 0; way < 12; way++) {
        use_seed(0);
        run_way(p, way, want);

        if (way == 0) {
            check_documented(p, want);
        }

        for (int i = 0; i < n; i++) {
            assert_true(isfinite(want[i]));
        }

        for (int s = 1; s <= N_SEEDS; s++) {
            use_seed(s);
            run_way(p, way, got);
            check_same(want, got, n, "another schedule", (int) p->t->dtype);
        }
    }

    use_seed(0);
}


static void
products(void **state)
{
    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        const bool small = op_dtype_block((int) dtypes[i]) <= 32;

        for (int s = 0; s < 1 + small; s++) {
            op_tensor_t t = random_tensor(dtypes[i], s == 0 ? N_IN : 96,
                                          s == 0 ? N_OUT : 5);
            float *x = random_rows(ROWS, 2 * (int) t.n_in);
            float *norm = random_rows(1, (int) t.n_in);
            op_weight_t *w = make_weight(&cuda, &t, 1);

            for (int k = (i + s) % COUNT_STEP; k < N_COUNTS; k += COUNT_STEP) {
                const product_t p = { &t, w, x, norm, counts[k] };

                check_product(&p);
            }

            cuda.ops->weight_free(cuda.dev, w);
            free(x);
            free(norm);
            free((void *) t.data);
        }
    }
}


/* Host code of the backend never looks into device memory. */
static void
out_of_reach(void **state)
{
    static float y[ROWS * N_OUT];

    (void) state;
    shim_options()->protect = true;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        float *x = random_rows(ROWS, 2 * N_IN);
        float *norm = random_rows(1, N_IN);
        op_weight_t *w = make_weight(&cuda, &t, 1);

        /* it takes long: a way with few rows, another one with many */
        for (int k = 0; k < 2; k++) {
            const product_t p = { &t, w, x, norm, k == 0 ? 3 : 20 };

            run_way(&p, (i + k * 7) % 12, y);
        }

        cuda.ops->weight_free(cuda.dev, w);
        free(x);
        free(norm);
        free((void *) t.data);
    }

    shim_options()->protect = false;
}


/* Rows of each table, against the oracle, which they must equal. */
static void
embeddings(void **state)
{
    static const int32_t tokens[] = { 5, 0, N_OUT - 1, 5, 17 };
    static float want[5 * N_IN], got[5 * N_IN];

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], N_IN, N_OUT);
        op_weight_t *w = make_weight(&cuda, &t, 1);
        op_weight_t *w_ref = make_weight(&ref, &t, 1);

        ref.ops->embed(ref.dev, want, w_ref, tokens, 5);

        for (int s = 0; s <= N_SEEDS; s++) {
            use_seed(s);
            memset(got, 0xff, sizeof(got));
            cuda.ops->embed(cuda.dev, got, w, tokens, 5);
            check_same(want, got, 5 * N_IN, "embedding", (int) dtypes[i]);
        }

        use_seed(0);
        cuda.ops->weight_free(cuda.dev, w);
        ref.ops->weight_free(ref.dev, w_ref);
        free((void *) t.data);
    }
}


/* Of 3 rows: norms (0), gates (1), rows picked (2). */
static void
run_rows(int op, const float *x, const float *norm, int dim, float *y)
{
    static const int32_t picked[] = { 2, 2, 0 };

    memset(y, 0xff, 3 * (size_t) dim * sizeof(float));

    if (op == 0) {
        cuda.ops->rmsnorm(cuda.dev, y, x, norm, 3, dim, 1e-5f);
    } else if (op == 1) {
        cuda.ops->silu_mul(cuda.dev, y, x, 3, dim);
    } else {
        cuda.ops->gather(cuda.dev, y, x, picked, 3, dim);
    }
}


static void
rows(void **state)
{
    static const int dims[] = { 1, 33, 64, 576, 1028, 2047 };
    static float want[3 * 2047], got[3 * 2047];

    (void) state;

    for (int i = 0; i < 3 * 6; i++) {
        const int dim = dims[i / 3];
        float *x = random_rows(3, 2 * dim);
        float *norm = random_rows(1, dim);

        for (int s = 0; s <= N_SEEDS; s++) {
            use_seed(s);
            run_rows(i % 3, x, norm, dim, s == 0 ? want : got);

            for (int k = 0; k < 3 * dim; k++) {
                assert_true(isfinite(want[k]));
            }
            if (s > 0) {
                check_same(want, got, 3 * dim, "rows", OP_F32);
            }
        }

        use_seed(0);
        free(x);
        free(norm);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(embeddings),
        cmocka_unit_test(rows),
        cmocka_unit_test(out_of_reach),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (open_devices() != 0) {
        printf("1..0 # SKIP no device\n");
        return 0;
    }

    cuda = devices[n_devices - 1];

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    close_devices();

    return rc;
}
