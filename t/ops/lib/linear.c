/*
 * See linear.h.  The expected values are computed from the file's blocks, one
 * output at a time, with no layout, tile or thread in between.
 */

#include "t/ops/lib/linear.h"

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
#include "t/ops/lib/hosted.h"
#include "t/ops/lib/small.h"
#include "t/shim/options.h"

/* the emulation's, which is not linked where a GPU is tested */
__attribute__((weak)) shim_options_t *shim_options(void);

const op_dtype_t dtypes[N_DTYPES] = { OP_F32,  OP_F16,  OP_BF16, OP_Q4_0,
                                      OP_Q4_1, OP_Q5_0, OP_Q5_1, OP_Q8_0,
                                      OP_Q4_K, OP_Q5_K, OP_Q6_K };

device_t devices[MAX_DEVS];
int n_devices;
device_t ref;
uint64_t seed;

static uint64_t state_bits;

enum { CLASSES = 16 };

typedef struct {
    float d;
    int q[32];
} act_block_t;


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


void *
take(size_t bytes)
{
    void *p = malloc(bytes != 0 ? bytes : 1);

    assert_non_null(p);
    return p;
}


float *
random_rows(int rows, int n)
{
    float *x = take(sizeof(float) * (size_t) rows * (size_t) n);

    for (int i = 0; i < rows * n; i++) {
        x[i] = draw_normal();
    }

    return x;
}


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


op_tensor_t
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


op_weight_t *
make_weight(const device_t *d, const op_tensor_t *parts, int n_parts)
{
    op_err_t err = { "" };
    op_weight_t *w = d->ops->weight(d->dev, parts, n_parts, &err);

    if (w == NULL) {
        fail_msg("weight: %s", err.text);
    }

    return w;
}


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


/* Adds the classes' sums. */
static float
tree(float *sum, int n)
{
    for (int half = n / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            sum[i] += sum[i + half];
        }
    }

    return sum[0];
}


/* One block of 32 inputs onto acc, and its minimum onto low, which may be the
 * same. */
static void
add_block(const op_block_t *b, int at, const float *x, float *acc, float *low)
{
    act_block_t a;
    int sum = 0;

    expected_act(x, &a);

    for (int s = 0; s < 32; s += b->sub) {
        int dot = 0;

        for (int j = s; j < s + b->sub && j < 32; j++) {
            dot += b->q[at + j] * a.q[j];
            sum += a.q[j];
        }

        *acc = fmaf((float) dot, b->d[(at + s) / b->sub] * a.d, *acc);
    }

    if (b->has_min) {
        *low = fmaf(b->m[at / b->sub], a.d * (float) sum, *low);
    }
}


/* One output of a quantised weight from the file's own blocks. */
static float
expected_quantised(int order, const op_tensor_t *t, int o, const float *x)
{
    size_t row = op_row_bytes((int) t->dtype, t->n_in);
    const uint8_t *p = (const uint8_t *) t->data + (size_t) o * row;
    float acc[CLASSES] = { 0.0f };
    float low = 0.0f;
    op_block_t b = { .n = 32 };

    for (int i = 0; i < t->n_in; i += b.n) {
        op_block_unpack(t->dtype, p, &b);
        p += op_dtype_bytes((int) t->dtype);

        for (int k = 0; k < b.n; k += 32) {
            float *to = &acc[order == IN_ONE ? 0 : (i + k) / 32 % CLASSES];

            add_block(&b, k, x + i + k, to, order == IN_ONE ? &low : to);
        }
    }

    if (order == IN_CLASSES) {
        return tree(acc, CLASSES);
    }

    return b.has_min ? acc[0] + low : acc[0];
}


/* F16 or BF16 weights on tensor cores? */
static bool
is_dense(int order, const op_tensor_t *t)
{
    return order == IN_CLASSES && (t->dtype == OP_F16 || t->dtype == OP_BF16)
           && t->n_in % 8 == 0;
}


bool
is_expected(int order, const op_tensor_t *t)
{
    return shim_options != NULL || !is_dense(order, t);
}


/* The nearest f32 whose low 13 bits are 0. */
static float
tf32(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x1000) & 0xffffe000;
    memcpy(&x, &bits, sizeof(bits));

    return x;
}


/* Blocks of 16 inputs in four classes, in the order of cuda_dense.cu, and
 * within an instruction in that of the emulation. */
static float
expected_dense(const float *w, const float *x, int n)
{
    float acc[4] = { 0.0f };

    for (int i = 0; i < n; i += 16) {
        for (int part = 0; part < 4; part++) {
            float sum = 0.0f;

            for (int k = 0; k < 8; k++) {
                const int at = i + k % 4 * 4 + part / 2 * 2 + k / 4;

                if (at < n) {
                    const float near = tf32(x[at]);

                    sum += w[at] * (part % 2 == 0 ? near : tf32(x[at] - near));
                }
            }

            acc[i / 16 % 4] += sum;
        }
    }

    return (acc[0] + acc[2]) + (acc[1] + acc[3]);
}


static float
expected_float(int order, const op_tensor_t *t, int o, const float *x)
{
    static float w[MAX_IN];
    size_t row = op_row_bytes((int) t->dtype, t->n_in);
    float acc[CLASSES] = { 0.0f };

    op_dequant_row(t->dtype, (const uint8_t *) t->data + (size_t) o * row, w,
                   t->n_in);

    if (is_dense(order, t)) {
        return expected_dense(w, x, (int) t->n_in);
    }

    for (int i = 0; i < t->n_in; i++) {
        float *to = &acc[order == IN_ONE ? 0 : i / 8 % CLASSES];

        *to = fmaf(w[i], x[i], *to);
    }

    return order == IN_ONE ? acc[0] : tree(acc, CLASSES);
}


float
expected(int order, const op_tensor_t *t, int o, const float *x)
{
    return op_dtype_block((int) t->dtype) > 1
               ? expected_quantised(order, t, o, x)
               : expected_float(order, t, o, x);
}


float *
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
                assert_true(isfinite(y[r * ldy + o]));
                packed[r * n_out + o] = y[r * ldy + o];
            } else {
                assert_true(isnan(y[r * ldy + o]));
            }
        }
    }

    free(y);

    return packed;
}


void
check_same(const float *a, const float *b, int n, const char *what, int dtype)
{
    const int i = (int) compare_bits(a, b, (size_t) n);

    if (i < n) {
        fail_msg("%s, %s: value %d is %a, not %a (seed %llu)",
                 op_dtype_name(dtype), what, i, (double) b[i], (double) a[i],
                 (unsigned long long) seed);
    }
}


static int
open_device(device_t *d, const char *backend, const char *isa, int threads)
{
    static const op_limits_t limits = { MAX_ROWS, 4, 64, MAX_IN, 4, 2, 16 };
    op_open_t params = { .threads = threads, .isa = isa };
    op_err_t err = { "" };

    d->ops =
        strcmp(backend, "cuda") == 0 ? &hosted_cuda : backend_find(backend);
    d->order = strcmp(backend, "cuda") == 0 ? IN_CLASSES : IN_ONE;
    d->dev = d->ops->open(&params, &err);

    if (d->dev == NULL) {
        printf("# %s: %s\n", isa != NULL ? isa : backend, err.text);
        return -1;
    }

    return d->ops->prepare(d->dev, &limits, &err);
}


void
start_random(void)
{
    seed = getenv("SEED") != NULL ? strtoull(getenv("SEED"), NULL, 10)
                                  : (uint64_t) time(NULL);
    state_bits = seed * 2654435761u + 88172645463325252u;
    printf("# seed %llu\n", (unsigned long long) seed);
}


int
open_devices(void)
{
    static const char *const isas[] = { "amx", "avx512", "avx2", "baseline" };

    start_random();

    for (int i = 0; i < 4; i++) {
        for (int threads = SMALL_SET ? 2 : 1; threads <= 2; threads++) {
            if (open_device(&devices[n_devices], "cpu", isas[i], threads) == 0)
            {
                n_devices++;
            }
        }
    }

    if (n_devices < 2 || open_device(&devices[n_devices], "cuda", NULL, 0) != 0)
    {
        return -1;
    }

    n_devices++;

    return open_device(&ref, "ref", NULL, 1) != 0 ? -1 : 0;
}


void
close_devices(void)
{
    for (int i = 0; i < n_devices; i++) {
        devices[i].ops->close(devices[i].dev);
    }

    ref.ops->close(ref.dev);
}
