/*
 * RoPE and the KV write: against the oracle, bit for bit between instruction
 * sets and thread counts, and what a pool of each type holds afterwards.
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
#include "kernels/cpu/cpu_kv.h"
#include "kernels/op/op.h"

enum { N_ISAS = 3, MAX_DEVS = 2 * N_ISAS };

static const char *const isas[N_ISAS] = { "baseline", "avx2", "avx512" };

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


typedef struct {
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int rot;
    int mode;
} rope_case_t;


static op_dtype_t pool_dtype;


/* Two sequences of 21 and 20 rows at positions 5 … and 40 …, on pages 3 to 0
 * and 7 to 4. */
static void
run_rope(const op_table_t *ops, op_dev_t *dev, const rope_case_t *c, float *qkv,
         void *pages)
{
    enum { A = 21, B = 20 };
    static const int32_t table_a[] = { 3, 2, 1, 0 };
    static const int32_t table_b[] = { 7, 6, 5, 4 };
    const int32_t *tables[] = { table_a, table_b };
    const int32_t row_start[] = { 0, A, A + B };
    int32_t pos[A + B];
    const op_attn_t attn = { c->n_heads, c->n_kv_heads, c->head_dim, 1.0f };
    const op_kv_t kv = { pages, 8, 2, c->n_kv_heads, c->head_dim, pool_dtype };
    float cos_sin[64 * 512];

    for (int i = 0; i < A + B; i++) {
        pos[i] = i < A ? 5 + i : 40 + i - A;
    }
    for (int p = 0; p < 64; p++) {
        for (int i = 0; i < c->rot / 2; i++) {
            const double angle = p * pow(1e4, -2.0 * i / c->rot);

            cos_sin[p * c->rot + 2 * i] = (float) cos(angle);
            cos_sin[p * c->rot + 2 * i + 1] = (float) sin(angle);
        }
    }

    const op_batch_t batch = {
        .n_rows = A + B,
        .n_seqs = 2,
        .pos = pos,
        .row_start = row_start,
        .block_table = tables,
    };
    ops->rope_kv(dev, qkv, &batch, &attn, cos_sin, c->rot, c->mode, &kv, 1);
}


/* The rule of op_kv_t for n ≤ 32 values, in its own words. */
static uint16_t
quantise(int8_t *q, const float *x, int n)
{
    double top = 0.0;

    for (int i = 0; i < n; i++) {
        top = isfinite(x[i]) && !(top > 1e300) ? fmax(top, fabs((double) x[i]))
                                               : INFINITY;
    }

    /* one rounding to f32, as the rule's division, and one to f16 */
    const uint16_t scale = op_float_to_half((float) top / 127.0f);
    const double d = op_half_to_float(scale);

    for (int i = 0; i < n; i++) {
        const double r =
            d > 0.0 && isfinite(d) ? rint((double) (float) (x[i] / d)) : 0.0;

        q[i] = (int8_t) (r > 127.0 ? 127.0 : r < -127.0 ? -127.0 : r);
    }
    return isfinite(d) ? scale : 0x7e00;
}


/* One head of one token in its record of the pool. */
static void
assert_slot(const uint8_t *record, const cpu_kv_layout_t *at, int dim, int slot,
            const float *const *kv)
{
    for (int d = 0; d < dim; d++) {
        const int steps[2] = { d * 16 + slot, slot * dim + d };

        for (int i = 0; i < 2; i++) {
            const uint8_t *data = record + (i == 0 ? at->k : at->v);
            const uint16_t *scales =
                (const void *) (record
                                + (i == 0 ? at->k_scales : at->v_scales));
            const int first = d / 32 * 32;
            int8_t q[32];

            if (at->dtype == OP_F16) {
                assert_int_equal(((const uint16_t *) data)[steps[i]],
                                 op_float_to_half(kv[i][d]));
                continue;
            }

            const uint16_t scale =
                quantise(q, kv[i] + first, dim - first < 32 ? dim - first : 32);

            assert_int_equal(((const int8_t *) data)[steps[i]], q[d - first]);
            assert_int_equal(scales[d / 32 * 16 + slot], scale);
        }
    }
}


/* k and v of the page pool against the rows they came from. */
static void
assert_kv(const rope_case_t *c, const float *qkv, const uint8_t *pages)
{
    const int dim = c->head_dim;
    const int stride = (c->n_heads + 2 * c->n_kv_heads) * dim;
    const cpu_kv_layout_t at =
        cpu_kv_layout((int) pool_dtype, c->n_kv_heads, dim);

    for (int r = 0; r < 41; r++) {
        const int pos = r < 21 ? 5 + r : 19 + r;
        const int page = r < 21 ? 3 - pos / 16 : 7 - pos / 16;

        for (int h = 0; h < c->n_kv_heads; h++) {
            const float *k = qkv + (size_t) r * stride + (c->n_heads + h) * dim;
            const float *const kv[2] = { k, k + c->n_kv_heads * dim };

            assert_slot(pages + (size_t) (8 + page) * at.page_bytes
                            + (size_t) h * at.head_bytes,
                        &at, dim, pos % 16, kv);
        }
    }
}


static void
check_rope(const rope_case_t *c)
{
    const size_t n =
        (size_t) 41 * (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
    const size_t bytes = 8
                         * cpu->kv_page_bytes(devs[0], (int) pool_dtype, 2,
                                              c->n_kv_heads, c->head_dim);
    float *x = floats(n, 4.0f);
    float *want = floats(n, 0.0f);
    float *first = floats(n, 0.0f);
    float *y = floats(n, 0.0f);
    uint8_t *pages = calloc(bytes, 1);
    uint8_t *first_pages = calloc(bytes, 1);

    assert_non_null(pages);
    assert_non_null(first_pages);
    x[n - 1] = 1e6f;  /* v that overflows f16 */
    x[n - 2] = 3e-8f; /* subnormal in f16 */
    x[n - 3] = 65519.99f;
    x[n - 4] = NAN;

    memcpy(want, x, n * sizeof(float));
    run_rope(ref, ref_dev, c, want, pages);
    memset(pages, 0, bytes);

    for (int k = 0; k < n_devs; k++) {
        memcpy(y, x, n * sizeof(float));
        memset(pages, 0, bytes);
        run_rope(cpu, devs[k], c, y, pages);
        for (size_t i = 0; i < n; i++) {
            if (i != n - 4) {
                assert_true(isfinite(want[i]));
                assert_true(fabsf(y[i] - want[i]) <= 2e-6f * 4.0f);
            }
        }
        assert_kv(c, y, pages);

        if (k == 0) {
            memcpy(first, y, n * sizeof(float));
            memcpy(first_pages, pages, bytes);
        }
        assert_memory_equal(first, y, n * sizeof(float));
        assert_memory_equal(first_pages, pages, bytes);
    }

    free(x);
    free(want);
    free(first);
    free(y);
    free(pages);
    free(first_pages);
}


static void
test_rope(void **unused)
{
    static const rope_case_t cases[] = {
        { 9, 3, 64, 64, OP_ROPE_PAIRS },    { 9, 3, 64, 64, OP_ROPE_HALVES },
        { 4, 2, 128, 128, OP_ROPE_HALVES }, { 4, 2, 128, 64, OP_ROPE_PAIRS },
        { 4, 4, 80, 20, OP_ROPE_HALVES },   { 2, 1, 96, 96, OP_ROPE_PAIRS },
        { 2, 1, 18, 14, OP_ROPE_PAIRS },    { 2, 1, 18, 14, OP_ROPE_HALVES },
        { 2, 2, 2, 2, OP_ROPE_PAIRS },      { 1, 1, 512, 512, OP_ROPE_HALVES },
        { 8, 1, 256, 256, OP_ROPE_PAIRS },  { 3, 3, 64, 0, OP_ROPE_PAIRS },
    };

    (void) unused;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        pool_dtype = OP_F16;
        check_rope(&cases[i]);
        pool_dtype = OP_Q8_0;
        check_rope(&cases[i]);
    }
}


/* Random blocks, with zeros, subnormal and huge ones, Inf and NaN. */
static void
fill_blocks(float *x, int n)
{
    for (int i = 0; i < n; i++) {
        x[i] = uniform(-1.0f, 1.0f);
    }
    for (int b = 0; b < n; b += OP_KV_BLOCK) {
        const int last = n - b < OP_KV_BLOCK ? n - b - 1 : OP_KV_BLOCK - 1;
        const int kind = (int) uniform(0.0f, 8.0f);
        const float size = kind < 6 ? exp2f(uniform(-40.0f, 26.0f)) : 1.0f;

        for (int i = b; i <= b + last; i++) {
            x[i] *= kind == 0 ? 0.0f : size;
        }
        if (kind == 1) { /* halves, so that quotients tie */
            for (int i = b; i < b + last; i++) {
                x[i] = (float) (int) (x[i] / size * 254.0f) * 0.5f;
            }
            x[b + last] = 127.0f;
        }
        if (kind >= 6) {
            static const float odd[] = { NAN,    -NAN,  INFINITY,  -INFINITY,
                                         1e-45f, 3e38f, 8319000.0f };

            x[b + last] = odd[(int) uniform(0.0f, 6.99f)];
        }
    }
}


/* The attention of a first token is its V, as the pool rounded it: the same
 * from the oracle and from every instruction set. */
static void
test_round_trip(void **unused)
{
    enum { N_HEADS = 1, DIM = 498, TRIALS = 400 };
    static const int32_t zero[1] = { 0 }, row_start[2] = { 0, 1 };
    const int32_t *const table = zero;
    const op_attn_t attn = { N_HEADS, 1, DIM, 1.0f };
    const op_limits_t limits = { 1, 1, 16, DIM, N_HEADS, 1, DIM };
    const op_batch_t batch = {
        .n_rows = 1,
        .n_seqs = 1,
        .pos = zero,
        .row_start = row_start,
        .block_table = &table,
    };
    op_err_t err;
    int nans = 0;

    (void) unused;

    for (int trial = 0; trial < TRIALS; trial++) {
        const op_dtype_t dtype = trial % 4 == 0 ? OP_F16 : OP_Q8_0;
        float qkv[3 * DIM] = { 0.0f }, want[DIM], got[DIM];

        fill_blocks(qkv + 2 * DIM, DIM);

        for (int k = -1; k < n_devs; k++) {
            const op_table_t *ops = k < 0 ? ref : cpu;
            op_dev_t *dev = k < 0 ? ref_dev : devs[k];
            const size_t bytes =
                ops->kv_page_bytes(dev, (int) dtype, 1, 1, DIM);
            op_kv_t kv = { ops->alloc(dev, bytes), 1, 1, 1, DIM, dtype };

            assert_non_null(kv.base);
            assert_int_equal(ops->prepare(dev, &limits, &err), 0);
            ops->rope_kv(dev, qkv, &batch, &attn, NULL, 0, OP_ROPE_PAIRS, &kv,
                         0);
            ops->attention(dev, k < 0 ? want : got, qkv, &batch, &attn, &kv, 0);
            ops->free(dev, kv.base, bytes);

            for (int d = 0; k >= 0 && d < DIM; d++) {
                nans += isnan(got[d]);
                assert_true(got[d] == want[d]
                            || (isnan(got[d]) && isnan(want[d])));
            }
        }

        for (int d = 0; d < DIM && dtype == OP_Q8_0; d++) {
            const float *block = qkv + 2 * DIM + d / 32 * 32;
            double top = 0.0;

            for (int i = 0; i < 32 && d / 32 * 32 + i < DIM; i++) {
                top = fmax(top, fabs((double) block[i]));
            }
            /* d is within 2^-11, or 2^-25 where f16 is subnormal */
            assert_true(isnan(want[d])
                        || fabs((double) want[d] - block[d % 32])
                               <= top * 0.5001 / 127 * (1 + 0x1p-11)
                                      + top * 0x1p-11 + 127.5 * 0x1p-25);
        }
    }

    assert_true(nans > 0);
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
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_round_trip),
    };
    const uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10)
                                         : (uint64_t) time(NULL);

    state = seed | 1;
    printf("# seed %llu\n", (unsigned long long) seed);

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, open_all, close_all);
}
