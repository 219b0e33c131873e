/*
 * linear(), embed() and weights: the documented order of arithmetic, computed
 * here step by step, must come out bit for bit from every instruction set,
 * number of threads, batch and cut of the columns; and be near the oracle.
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
#include "kernels/op/op.h"
#include "kernels/op/quant.h"

enum { MAX_ROWS = 130, MAX_IN = 1536, MAX_OUT = 576, MAX_DEVS = 6 };

static const op_dtype_t dtypes[] = { OP_F32,  OP_F16,  OP_BF16, OP_Q4_0,
                                     OP_Q4_1, OP_Q5_0, OP_Q5_1, OP_Q8_0,
                                     OP_Q4_K, OP_Q5_K, OP_Q6_K };

enum { N_DTYPES = 11 };

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
} device_t;

/* Every instruction set this machine has, with 1 and with 2 threads. */
static device_t devices[MAX_DEVS];
static int n_devices;
static device_t ref;

static uint64_t seed;
static uint64_t state_bits;


static uint32_t
draw(void)
{
    state_bits ^= state_bits << 13;
    state_bits ^= state_bits >> 7;
    state_bits ^= state_bits << 17;
    return (uint32_t) (state_bits >> 32);
}


/* Roughly normal, variance 1. */
static float
draw_normal(void)
{
    float sum = 0.0f;

    for (int i = 0; i < 12; i++) {
        sum += (float) (draw() >> 8) * 0x1p-24f;
    }

    return sum - 6.0f;
}


static void *
take(size_t bytes)
{
    void *p = malloc(bytes != 0 ? bytes : 1);

    assert_non_null(p);
    return p;
}


static float *
random_rows(int rows, int n)
{
    float *x = take(sizeof(float) * (size_t) rows * (size_t) n);

    for (int i = 0; i < rows * n; i++) {
        x[i] = draw_normal();
    }

    return x;
}


/* Random bits for quants and sub-scales, sensible f16 scales of both signs:
 * minima of one sign would be common to all outputs, and cancel. */
static void
random_blocks(op_dtype_t dtype, uint8_t *p, size_t n_blocks)
{
    int bytes = op_dtype_bytes((int) dtype);

    for (size_t b = 0; b < n_blocks; b++, p += bytes) {
        int at = dtype == OP_Q6_K ? 208 : 0;
        int has_min = dtype == OP_Q4_1 || dtype == OP_Q5_1 || dtype == OP_Q4_K
                      || dtype == OP_Q5_K;

        for (int i = 0; i < bytes; i++) {
            p[i] = (uint8_t) draw();
        }

        for (int i = 0; i <= has_min; i++) {
            float v = (0.5f + 0.1f * draw_normal()) * (i == 0 ? 0.02f : 0.2f);
            uint16_t h = op_float_to_half(draw() % 2 == 0 ? -v : v);

            memcpy(p + at + 2 * i, &h, sizeof(h));
        }
    }
}


static op_tensor_t
random_tensor(op_dtype_t dtype, int n_in, int n_out)
{
    size_t bytes = op_row_bytes((int) dtype, n_in) * (size_t) n_out;
    size_t n = (size_t) n_in * (size_t) n_out;
    uint8_t *data = take(bytes);
    op_tensor_t tensor = { data, dtype, n_in, n_out };

    if (op_dtype_block((int) dtype) > 1) {
        random_blocks(dtype, data,
                      bytes / (size_t) op_dtype_bytes((int) dtype));
        return tensor;
    }

    for (size_t i = 0; i < n; i++) {
        float v = 0.05f * draw_normal();

        if (dtype == OP_F32) {
            memcpy(data + 4 * i, &v, sizeof(v));
        } else {
            op_quant_row(dtype, &v, data + 2 * i, 1);
        }
    }

    return tensor;
}


static op_weight_t *
make_weight(const device_t *d, const op_tensor_t *parts, int n_parts)
{
    op_err_t err = { "" };
    op_weight_t *w = d->ops->weight(d->dev, parts, n_parts, &err);

    if (w == NULL) {
        fail_msg("weight: %s", err.text);
    }

    return w;
}


/* --- the documented arithmetic, step by step --- */

typedef struct {
    float d;
    int q[32];
} act_block_t;


static void
expected_act(const float *x, act_block_t *out)
{
    float top = 0.0f;

    for (int i = 0; i < 32; i++) {
        top = fmaxf(top, fabsf(x[i]));
    }

    out->d = top / 127.0f;

    for (int i = 0; i < 32; i++) {
        float v = out->d > 0.0f ? nearbyintf(x[i] / out->d) : 0.0f;

        out->q[i] = (int) fminf(fmaxf(v, -127.0f), 127.0f);
    }
}


/* One output of a quantised weight from the file's own blocks. */
static float
expected_quantised(const op_tensor_t *t, int o, const float *x)
{
    size_t row = op_row_bytes((int) t->dtype, t->n_in);
    const uint8_t *p = (const uint8_t *) t->data + (size_t) o * row;
    float acc = 0.0f;
    float low = 0.0f;
    int has_min = 0;
    op_block_t b;

    for (int i = 0; i < t->n_in; i += b.n) {
        op_block_unpack(t->dtype, p, &b);
        p += op_dtype_bytes((int) t->dtype);
        has_min = b.has_min;

        for (int k = 0; k < b.n; k += 32) {
            act_block_t a;
            int sum = 0;

            expected_act(x + i + k, &a);

            for (int s = 0; s < 32; s += b.sub) {
                int dot = 0;

                for (int j = s; j < s + b.sub; j++) {
                    dot += b.q[k + j] * a.q[j];
                    sum += a.q[j];
                }

                acc = fmaf((float) dot, b.d[(k + s) / b.sub] * a.d, acc);
            }

            if (has_min) {
                low = fmaf(b.m[k / b.sub], a.d * (float) sum, low);
            }
        }
    }

    return has_min ? acc + low : acc;
}


static float
expected_float(const op_tensor_t *t, int o, const float *x)
{
    static float w[MAX_IN];
    size_t row = op_row_bytes((int) t->dtype, t->n_in);
    float acc = 0.0f;

    op_dequant_row(t->dtype, (const uint8_t *) t->data + (size_t) o * row, w,
                   t->n_in);

    for (int i = 0; i < t->n_in; i++) {
        acc = fmaf(w[i], x[i], acc);
    }

    return acc;
}


static float
expected(const op_tensor_t *t, int o, const float *x)
{
    return op_dtype_block((int) t->dtype) > 1 ? expected_quantised(t, o, x)
                                              : expected_float(t, o, x);
}


/* --- checks --- */

/* linear() into a frame of guard values, which must stay as they were. */
static float *
run_linear(const device_t *d, const op_weight_t *w, int n_out, const float *x,
           int rows)
{
    int ldy = n_out + 5;
    float *y = take(sizeof(float) * (size_t) ldy * (size_t) rows);
    float *packed = take(sizeof(float) * (size_t) n_out * (size_t) rows);

    for (int i = 0; i < ldy * rows; i++) {
        y[i] = NAN;
    }

    d->ops->linear(d->dev, y, ldy, x, rows, w, OP_SET);

    for (int r = 0; r < rows; r++) {
        for (int o = 0; o < ldy; o++) {
            if (o < n_out) {
                assert_false(isnan(y[r * ldy + o]));
                packed[r * n_out + o] = y[r * ldy + o];
            } else {
                assert_true(isnan(y[r * ldy + o]));
            }
        }
    }

    free(y);

    return packed;
}


static void
check_same(const float *a, const float *b, int n, const char *what, int dtype)
{
    if (memcmp(a, b, sizeof(float) * (size_t) n) == 0) {
        return;
    }

    for (int i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], sizeof(float)) != 0) {
            fail_msg("%s, %s: value %d is %a, not %a (seed %llu)",
                     op_dtype_name(dtype), what, i, (double) b[i],
                     (double) a[i], (unsigned long long) seed);
        }
    }
}


/* All devices and row counts, against `want` of the most rows: a row does
 * not depend on the others. */
static void
check_devices(const op_tensor_t *t, const float *x, const float *want,
              const int *counts, int n_counts)
{
    int n_out = (int) t->n_out;

    for (int i = 0; i < n_devices; i++) {
        const device_t *d = &devices[i];
        op_weight_t *w = make_weight(d, t, 1);

        for (int k = 0; k < n_counts; k++) {
            float *y = run_linear(d, w, n_out, x, counts[k]);

            check_same(want, y, counts[k] * n_out, d->ops->describe(d->dev),
                       (int) t->dtype);
            free(y);
        }

        d->ops->weight_free(d->dev, w);
    }
}


static float *
expected_all(const op_tensor_t *t, const float *x, int rows)
{
    float *want = take(sizeof(float) * (size_t) rows * (size_t) t->n_out);

    for (int r = 0; r < rows; r++) {
        for (int o = 0; o < t->n_out; o++) {
            want[r * t->n_out + o] = expected(t, o, x + r * t->n_in);
        }
    }

    return want;
}


static void
linear_has_the_documented_bits(void **state)
{
    static const int shapes[][2] = { { 256, 1 },   { 32, 7 },   { 96, 16 },
                                     { 768, 17 },  { 512, 33 }, { 576, 200 },
                                     { 1536, 31 }, { 64, 576 }, { 7, 20 },
                                     { 256, 130 } };
    static const int counts[] = { 1, 2, 3, 5, 8, 13, 16, 20 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        for (int s = 0; s < 10; s++) {
            int n_in = shapes[s][0];

            if (n_in % op_dtype_block((int) dtypes[i]) != 0) {
                continue;
            }

            op_tensor_t t = random_tensor(dtypes[i], n_in, shapes[s][1]);
            float *x = random_rows(20, n_in);
            float *want = expected_all(&t, x, 20);

            check_devices(&t, x, want, counts, 8);
            free(want);
            free(x);
            free((void *) t.data);
        }
    }
}


static void
rows_do_not_depend_on_the_batch(void **state)
{
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
        op_tensor_t t = random_tensor(dtypes[i], 768, 100);
        float *x = random_rows(MAX_ROWS, 768);
        op_weight_t *w = make_weight(&devices[0], &t, 1);
        float *want = run_linear(&devices[0], w, 100, x, MAX_ROWS);

        check_devices(&t, x, want, counts, n);

        for (int r = 0; r < MAX_ROWS; r += 7) {
            float *y = run_linear(&devices[0], w, 100, x + r * 768, 1);

            check_same(want + r * 100, y, 100, "row alone", (int) t.dtype);
            free(y);
        }

        devices[0].ops->weight_free(devices[0].dev, w);
        free(want);
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
                    float v = expected(&parts[i], o, x + r * N_IN);

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


/* Relative RMS error of one row; NaN is an error without bound. */
static double
row_error(const float *want, const float *got, int n)
{
    double error = 0.0;
    double norm = 0.0;

    for (int i = 0; i < n; i++) {
        double e = (double) got[i] - want[i];

        if (!isfinite(got[i]) || !isfinite(want[i])) {
            return INFINITY;
        }

        error += e * e;
        norm += (double) want[i] * want[i];
    }

    return sqrt(error / norm);
}


static void
linear_is_near_the_oracle(void **state)
{
    enum { N_OUT = 300, ROWS = 10 };
    static const int widths[] = { 256, 768, 1536 };

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        for (int s = 0; s < 3; s++) {
            op_tensor_t t = random_tensor(dtypes[i], widths[s], N_OUT);
            float *x = random_rows(ROWS, widths[s]);
            op_weight_t *w = make_weight(&devices[0], &t, 1);
            op_weight_t *w_ref = make_weight(&ref, &t, 1);
            float *y = run_linear(&devices[0], w, N_OUT, x, ROWS);
            float *want = run_linear(&ref, w_ref, N_OUT, x, ROWS);
            double bound = op_dtype_block((int) t.dtype) > 1 ? 1.5e-2 : 1e-5;

            for (int r = 0; r < ROWS; r++) {
                double e = row_error(want + r * N_OUT, y + r * N_OUT, N_OUT);

                if (!(e <= bound)) {
                    fail_msg("%s, %d inputs: error %g (seed %llu)",
                             op_dtype_name((int) t.dtype), widths[s], e,
                             (unsigned long long) seed);
                }
            }

            devices[0].ops->weight_free(devices[0].dev, w);
            ref.ops->weight_free(ref.dev, w_ref);
            free(want);
            free(y);
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
            float *want;

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

            want = expected_all(&t, x, ROWS);
            check_devices(&t, x, want, counts, 4);
            free(want);
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
        float *want;

        for (int k = 0; k < N_IN; k++) {
            x[0 * N_IN + k] = 0.0f;
            x[1 * N_IN + k] *= 1e-40f;
            x[2 * N_IN + k] *= 1e30f;
            x[3 * N_IN + k] = k % 32 == 0 ? 127.0f : (float) (k % 32) - 15.5f;
            x[4 * N_IN + k] = -0.0f;
            x[5 * N_IN + k] = k % 2 == 0 ? 0x1p-149f : -0x1.8p-143f;
            x[6 * N_IN + k] = k == 77 ? -1e-5f : 0.0f;
        }

        want = expected_all(&t, x, ROWS);
        check_devices(&t, x, want, counts, 3);

        for (int o = 0; o < N_OUT; o++) {
            assert_true(want[o] == 0.0f);
        }

        free(want);
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
                float last = expected(&t[i], (int) t[i].n_out - 1, x);

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
    assert_ptr_equal(backend_find("auto"), backend_find("cpu"));
    assert_string_equal(backend_find("cpu")->name, "cpu");
    assert_string_equal(backend_find("ref")->name, "ref");
    assert_null(backend_find("cuda:7"));
    assert_null(backend_find(""));
}


static int
open_device(device_t *d, const char *backend, const char *isa, int threads)
{
    static const op_limits_t limits = { MAX_ROWS, 4, 64, MAX_IN, 4, 2, 16 };
    op_open_t params = { threads, isa };
    op_err_t err = { "" };

    d->ops = backend_find(backend);
    d->dev = d->ops->open(&params, &err);

    if (d->dev == NULL) {
        printf("# %s: %s\n", isa, err.text);
        return -1;
    }

    return d->ops->prepare(d->dev, &limits, &err);
}


int
main(void)
{
    static const char *const isas[] = { "avx512", "avx2", "baseline" };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backends_are_found_by_name),
        cmocka_unit_test(linear_has_the_documented_bits),
        cmocka_unit_test(rows_do_not_depend_on_the_batch),
        cmocka_unit_test(columns_do_not_depend_on_the_cut),
        cmocka_unit_test(parts_of_different_types_stand_side_by_side),
        cmocka_unit_test(embed_is_exact),
        cmocka_unit_test(add_mode_adds_once),
        cmocka_unit_test(linear_is_near_the_oracle),
        cmocka_unit_test(extreme_quants_do_not_overflow),
        cmocka_unit_test(odd_activations_have_the_same_bits),
        cmocka_unit_test(non_finite_rows_stay_alone),
        cmocka_unit_test(bad_weights_are_refused),
        cmocka_unit_test(weights_come_and_go),
    };
    int failed;

    seed = getenv("SEED") != NULL ? strtoull(getenv("SEED"), NULL, 10)
                                  : (uint64_t) time(NULL);
    state_bits = seed * 2654435761u + 88172645463325252u;
    printf("# seed %llu\n", (unsigned long long) seed);

    for (int i = 0; i < 3; i++) {
        for (int threads = 1; threads <= 2; threads++) {
            if (open_device(&devices[n_devices], "cpu", isas[i], threads) == 0)
            {
                n_devices++;
            }
        }
    }

    if (n_devices < 2 || open_device(&ref, "ref", NULL, 1) != 0) {
        return 1;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);
    failed = cmocka_run_group_tests(tests, NULL, NULL);

    for (int i = 0; i < n_devices; i++) {
        devices[i].ops->close(devices[i].dev);
    }

    ref.ops->close(ref.dev);

    return failed;
}
