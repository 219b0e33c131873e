/*
 * The matrix unit's kernels on its twin, bit for bit against AVX-512 and the
 * documented arithmetic; and what a device says that has no unit, or a wrong
 * one.
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

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_dot.h"
#include "t/ops/lib/linear.h"
#include "t/ops/twin/tile.h"

enum { MODE_ROWS = 83 };
enum { LIMIT_IN = 12288, LIMIT_ROWS = 150, N_SETS = 5, FLOATS = 3 };

static const op_limits_t limits = { LIMIT_ROWS, 4, 64, LIMIT_IN, 4, 2, 16 };

/* The unit with 1 to 3 threads, then what it is compared with. */
static device_t sets[N_SETS];


/* --- opening --- */

static void
opens_as(const char *isa, const char *describe)
{
    const op_table_t *cpu = backend_find("cpu");
    const op_open_t params = { .threads = 2, .isa = isa };
    op_err_t err = { "" };
    op_dev_t *dev = cpu->open(&params, &err);

    if (dev == NULL) {
        fail_msg("%s: %s", isa != NULL ? isa : "the best", err.text);
    }

    assert_string_equal(cpu->describe(dev), describe);
    cpu->close(dev);
}


static void
refuses(const char *what)
{
    const op_open_t params = { .threads = 2, .isa = "amx" };
    op_err_t err = { "" };

    assert_null(backend_find("cpu")->open(&params, &err));
    assert_string_equal(err.text, what);
}


static void
test_open(void **state)
{
    (void) state;

    unsetenv("LLM_ISA");
    opens_as(NULL, "amx-int8 avx512vnni, 2 threads");
    opens_as("amx", "amx-int8 avx512vnni, 2 threads");
    opens_as("avx512", "avx512vnni, 2 threads");
    setenv("LLM_ISA", "amx", 1);
    opens_as(NULL, "amx-int8 avx512vnni, 2 threads");
    unsetenv("LLM_ISA");

    twin_faults.absent = true;
    opens_as(NULL, "avx512vnni, 2 threads");
    opens_as("avx512", "avx512vnni, 2 threads");
    refuses("this CPU or its operating system lacks amx; its best is avx512");
    twin_faults.absent = false;

    twin_faults.wrong = true;
    opens_as(NULL, "avx512vnni, 2 threads, amx left out: its products are "
                   "wrong");
    opens_as("avx512", "avx512vnni, 2 threads");
    refuses("this CPU or its operating system lacks amx; its best is avx512, "
            "amx left out: its products are wrong");
    twin_faults.wrong = false;

    assert_int_equal(twin_configured(), 0);
}


/* One flipped bit in each layout must be seen, not in the first alone. */
static void
test_check_sees(void **state)
{
    cpu_dot_table_t table = *cpu_dot_avx512();

    (void) state;
    assert_true(cpu_dot_same(cpu_dot_amx(), cpu_dot_avx512()));
    assert_true(cpu_dot_same(cpu_dot_baseline(), cpu_dot_avx512()));

    for (int layout = OP_LAY_Q4_D16; layout < OP_LAY_COUNT; layout++) {
        table.dot[layout] = cpu_dot_amx()->dot[layout];
        twin_faults.wrong = true;
        assert_false(cpu_dot_same(&table, cpu_dot_avx512()));
        twin_faults.wrong = false;
        assert_true(cpu_dot_same(&table, cpu_dot_avx512()));
        table.dot[layout] = cpu_dot_avx512()->dot[layout];
    }
}


/* A device beside another one has its instruction set. */
static void
test_beside(void **state)
{
    const op_open_t params = { .beside = sets[1].dev, .isa = "amx" };
    op_err_t err;
    op_dev_t *dev = sets[1].ops->open(&params, &err);

    (void) state;
    assert_non_null(dev);
    assert_int_equal(dev->isa, CPU_ISA_AMX);
    sets[1].ops->close(dev);
}


/* --- products --- */

/* Instructions for a product: whole tiles of rows, from 32 rows on. */
static uint64_t
products_of(const op_tensor_t *t, int rows)
{
    const uint64_t groups = ((uint64_t) t->n_out + 15) / 16;
    const uint64_t halves = t->dtype == OP_Q6_K ? 2 : 1;
    const int tiles = rows < 32 ? 0 : rows / 16;

    if (op_dtype_block((int) t->dtype) == 1) {
        return 0;
    }

    return groups * halves * (uint64_t) (t->n_in / 32) * (uint64_t) tiles;
}


static void
compare_sets(const op_tensor_t *t, const int *counts, int n_counts,
             const float *x)
{
    const int n_out = (int) t->n_out;

    for (int k = 0; k < n_counts; k++) {
        float *want = NULL;

        for (int i = N_SETS - 1; i >= 0; i--) {
            op_weight_t *w = make_weight(&sets[i], t, 1);
            const uint64_t before = twin_products();
            float *y = run_linear(&sets[i], w, n_out, x, counts[k]);

            assert_int_equal(twin_products() - before,
                             i < 3 ? products_of(t, counts[k]) : 0);
            assert_int_equal(twin_configured(), 0);
            sets[i].ops->weight_free(sets[i].dev, w);

            if (want == NULL) {
                want = y;
                continue;
            }

            check_same(want, y, counts[k] * n_out,
                       sets[i].ops->describe(sets[i].dev), (int) t->dtype);
            free(y);
        }

        free(want);
    }
}


static void
test_shapes(void **state)
{
    static const int shapes[][2] = { { 32, 1 },   { 64, 16 },  { 96, 17 },
                                     { 128, 33 }, { 256, 50 }, { 512, 79 },
                                     { 768, 31 } };
    static const int counts[] = { 16, 31, 32,  33,  47,  48, 49,
                                  63, 64, 101, 127, 128, 150 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        for (int s = 0; s < 7; s++) {
            const int n_in = shapes[s][0];

            if (n_in % op_dtype_block((int) dtypes[i]) != 0) {
                continue;
            }

            op_tensor_t t = random_tensor(dtypes[i], n_in, shapes[s][1]);
            float *x = random_rows(LIMIT_ROWS, n_in);

            compare_sets(&t, counts, 13, x);
            free(x);
            free((void *) t.data);
        }
    }
}


/* Rows in chunks, as a chunk of 16 rows would never reach the unit; and the
 * documented arithmetic. */
static void
test_wide(void **state)
{
    enum { OUTS = 9, ROWS = 70 };
    static const int counts[] = { 32, 64, ROWS };

    (void) state;

    for (int i = FLOATS; i < N_DTYPES; i++) {
        op_tensor_t t = random_tensor(dtypes[i], LIMIT_IN, OUTS);
        float *x = random_rows(ROWS, LIMIT_IN);
        op_weight_t *w = make_weight(&sets[1], &t, 1);
        float *y = run_linear(&sets[1], w, OUTS, x, ROWS);

        for (int r = 0; r < ROWS; r += 23) {
            for (int o = 0; o < OUTS; o++) {
                const float v = expected(IN_ONE, &t, o, x + r * LIMIT_IN);

                check_same(&v, &y[r * OUTS + o], 1, "wide", (int) t.dtype);
            }
        }

        compare_sets(&t, counts, 3, x);
        sets[1].ops->weight_free(sets[1].dev, w);
        free(y);
        free(x);
        free((void *) t.data);
    }
}


/* The largest quants on both sides, as files may have them. */
static void
test_extremes(void **state)
{
    enum { N_IN = 512, OUTS = 18, ROWS = 48 };
    static const int counts[] = { ROWS };
    static const uint8_t fills[] = { 0xff, 0x80, 0x7f, 0x00 };

    (void) state;

    for (int i = FLOATS; i < N_DTYPES; i++) {
        for (int f = 0; f < 4; f++) {
            op_tensor_t t = random_tensor(dtypes[i], N_IN, OUTS);
            const size_t bytes = (size_t) op_dtype_bytes((int) t.dtype);
            const size_t size = op_row_bytes((int) t.dtype, N_IN) * OUTS;
            const size_t scales =
                t.dtype == OP_Q8_0 || t.dtype == OP_Q5_0 || t.dtype == OP_Q4_0
                    ? 2
                    : 4;
            uint8_t *data = (uint8_t *) t.data;
            float *x = random_rows(ROWS, N_IN);

            for (size_t k = 0; k < size; k++) {
                const size_t in = k % bytes;

                if (t.dtype == OP_Q6_K ? in < 208 : in >= scales) {
                    data[k] = fills[f];
                }
            }

            for (int k = 0; k < ROWS * N_IN; k++) {
                x[k] = (k / N_IN) % 2 == 0 ? 3.0f : -3.0f;
            }

            compare_sets(&t, counts, 1, x);
            free(x);
            free(data);
        }
    }
}


/* Blocks of no scale, subnormals, NaN and infinity, minus zero. */
static void
make_odd(float *x, int rows, int n_in)
{
    for (int i = 0; i < rows * n_in; i++) {
        const int row = i / n_in, block = i % n_in / 32;

        if (row % 16 < 8 && block % 3 == 1) {
            x[i] = row % 2 == 0 ? 0.0f : -0.0f;
        } else if (block % 3 == 2) {
            x[i] *= row / 16 % 2 == 0 ? 0.01f : 1e-41f;
        } else if (row % 16 == 9) {
            x[i] *= 1e30f;
        }
    }

    x[3 * n_in + 40] = NAN;
    x[20 * n_in + 7] = INFINITY;
    x[33 * n_in + n_in - 1] = -INFINITY;
}


static void
run_mode(const device_t *d, const op_tensor_t *parts, const float *x, int rows,
         int mode, float *y)
{
    op_weight_t *w = make_weight(d, parts, 3);
    const int n_out = (int) (parts[0].n_out + parts[1].n_out + parts[2].n_out);

    for (int i = 0; i < rows * n_out; i++) {
        y[i] = (float) (i % 19) - 9.0f;
    }

    d->ops->linear(d->dev, y, n_out, x, rows, w, mode);
    d->ops->weight_free(d->dev, w);
}


/* Rows of n_out: those that make_odd() spoiled are as spoiled in both; of NaN,
 * which one comes out of an addition of two is nobody's choice. */
static void
same_or_odd(const float *a, const float *b, int n_out, const char *what,
            int dtype)
{
    for (int i = 0; i < MODE_ROWS * n_out; i++) {
        const int row = i / n_out;

        if (row != 3 && row != 20 && row != 33) {
            check_same(&a[i], &b[i], 1, what, dtype);
        } else {
            assert_false(isfinite(a[i]));
            assert_true(a[i] == b[i] || (isnan(a[i]) && isnan(b[i])));
        }
    }
}


/* Instructions of the unit for a product, or 0 without it: of the second one,
 * for inputs in two parts, not all. */
static void
check_skips(const op_tensor_t *parts, int mode, bool unit, uint64_t n)
{
    const uint64_t once =
        products_of(&parts[0], MODE_ROWS) + products_of(&parts[1], MODE_ROWS);

    if (unit && (mode & OP_FINE)) {
        assert_true(n > once && n < 2 * once);
    } else {
        assert_int_equal(n, unit ? once : 0);
    }
}


/* Odd activations, sums onto what is there, inputs in two parts (whose second
 * has blocks that are skipped), weights of several types. */
static void
test_modes(void **state)
{
    enum { N_IN = 512, OUTS = 21, ROWS = MODE_ROWS, N_OUT = OUTS + 16 + 5 };
    static const int modes[] = { OP_SET, OP_ADD, OP_SET | OP_FINE,
                                 OP_ADD | OP_FINE };
    static float want[ROWS * N_OUT], got[ROWS * N_OUT];

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_tensor_t parts[3] = { random_tensor(dtypes[i], N_IN, OUTS),
                                 random_tensor(OP_Q4_0, N_IN, 16),
                                 random_tensor(OP_F16, N_IN, 5) };
        float *x = random_rows(ROWS, N_IN);

        make_odd(x, ROWS, N_IN);

        for (int m = 0; m < 4; m++) {
            run_mode(&sets[N_SETS - 1], parts, x, ROWS, modes[m], want);

            for (int k = 0; k < N_SETS - 1; k++) {
                const uint64_t before = twin_products();

                run_mode(&sets[k], parts, x, ROWS, modes[m], got);
                same_or_odd(want, got, N_OUT, "modes", (int) dtypes[i]);
                check_skips(parts, modes[m], k < 3, twin_products() - before);
            }
        }

        for (int p = 0; p < 3; p++) {
            free((void *) parts[p].data);
        }

        free(x);
    }
}


/* AVX-512 is what a machine may lack; with it the twin has to open. */
static int
open_sets(void)
{
    static const char *const isas[N_SETS] = { "amx", "amx", "amx", "avx512",
                                              "baseline" };

    for (int i = N_SETS - 1; i >= 0; i--) {
        const op_open_t params = { .threads = i < 3 ? i + 1 : 2,
                                   .isa = isas[i] };
        op_err_t err = { "" };

        sets[i] = (device_t){ .ops = backend_find("cpu"), .order = IN_ONE };
        sets[i].dev = sets[i].ops->open(&params, &err);

        if (sets[i].dev == NULL
            || sets[i].ops->prepare(sets[i].dev, &limits, &err) != 0)
        {
            printf(i < 3 ? "%s\n" : "1..0 # SKIP %s\n", err.text);
            return i < 3 ? 1 : -1;
        }
    }

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {

        cmocka_unit_test(test_open),   cmocka_unit_test(test_check_sees),
        cmocka_unit_test(test_beside), cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_wide),   cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_modes),
    };

    start_random();

    const int rc = open_sets();

    if (rc != 0) {
        return rc > 0;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    const int failed = cmocka_run_group_tests(tests, NULL, NULL);

    for (int i = 0; i < N_SETS; i++) {
        sets[i].ops->close(sets[i].dev);
    }

    return failed;
}
