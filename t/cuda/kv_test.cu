/*
 * The GPU's KV pool, emulated, or on a GPU (t/gpu.sh): RoPE with the bits of
 * the CPU backend, pages that hold what op.h says where cuda_kv.h says, copies
 * of pages in order.
 *
 *   kv_test [name]    SEED in the environment gives the seed
 */

#include "t/cuda/attn_world.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include <cmocka.h>
#include "kernels/backend.h"
#include "t/ops/lib/compare.h"
}

enum { PAGES = 7, COPIES = 12 };


/* --- the write --- */

typedef struct {
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int rot;
    int mode;
} rope_case_t;

/* Two sequences of 21 and 20 rows at positions 5 … and 40 … */
enum { A = 21, B = 20 };


static int32_t
position(int row)
{
    return row < A ? 5 + row : 40 + row - A;
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


/* One row of K or V in its record; what is beyond head_dim is 0. */
static void
assert_row(const uint8_t *record, const cuda_kv_layout_t *at, int head_dim,
           int slot, const float *x, bool is_key)
{
    const uint8_t *row =
        record + (is_key ? at->k : at->v) + (size_t) slot * at->dim * at->size;
    const uint16_t *scales =
        (const uint16_t *) (record + (is_key ? at->k_scales : at->v_scales));

    for (int d = 0; d < at->dim; d++) {
        const int first = d / OP_KV_BLOCK * OP_KV_BLOCK;
        int8_t q[OP_KV_BLOCK];

        if (at->size == 2) {
            const uint16_t half = ((const uint16_t *) row)[d];
            const uint16_t want = d < head_dim ? op_float_to_half(x[d]) : 0;

            /* NaN is any of them */
            assert_true(half == want
                        || (isnan(op_half_to_float(half))
                            && isnan(op_half_to_float(want))));
            continue;
        }

        const int left = head_dim - first;
        const uint16_t scale =
            left <= 0 ? 0 : quantise(q, x + first, left < 32 ? left : 32);

        assert_int_equal((int8_t) row[is_key ? cuda_kv_key_byte(d, at->dim)
                                             : cuda_kv_value_byte(d, at->dim)],
                         d < head_dim ? q[d - first] : 0);
        assert_int_equal(scales[d / OP_KV_BLOCK * OP_PAGE + slot], scale);
    }
}


static void
assert_pages(const gpu_world_t *w, const float *qkv, const uint8_t *pages)
{
    const int dim = w->attn.head_dim;
    const cuda_kv_layout_t at =
        cuda_kv_layout((int) w->kv.dtype, w->attn.n_kv_heads, dim);

    for (int r = 0; r < A + B; r++) {
        const int pos = position(r);
        const int page = w->table[r >= A][pos / OP_PAGE];

        for (int h = 0; h < w->attn.n_kv_heads; h++) {
            const uint8_t *record =
                pages
                + ((size_t) WORLD_LAYER * w->kv.n_pages + page) * at.page_bytes
                + (size_t) h * at.head_bytes;
            const float *k = qkv + (size_t) r * w->stride + w->width + h * dim;

            assert_row(record, &at, dim, pos % OP_PAGE, k, true);
            assert_row(record, &at, dim, pos % OP_PAGE,
                       k + w->attn.n_kv_heads * dim, false);
        }
    }
}


/* What is not these rows' is as it was. */
static void
assert_rest(const gpu_world_t *w, const uint8_t *before, const uint8_t *after)
{
    const cuda_kv_layout_t at =
        cuda_kv_layout((int) w->kv.dtype, w->attn.n_kv_heads, w->attn.head_dim);
    uint8_t *own = (uint8_t *) world_must(w->kv_bytes, 1);
    size_t n = 0;

    for (int r = 0; r < (A + B) * w->attn.n_kv_heads; r++) {
        const int pos = position(r / w->attn.n_kv_heads);
        const int page = w->table[r / w->attn.n_kv_heads >= A][pos / OP_PAGE];
        const int slot = pos % OP_PAGE, row = at.dim * at.size;
        uint8_t *record =
            own + ((size_t) WORLD_LAYER * w->kv.n_pages + page) * at.page_bytes
            + (size_t) (r % w->attn.n_kv_heads) * at.head_bytes;

        memset(record + at.k + slot * row, 1, row);
        memset(record + at.v + slot * row, 1, row);
        for (int b = 0; b < at.dim && at.size == 1; b += OP_KV_BLOCK) {
            const int scale = (b / OP_KV_BLOCK * OP_PAGE + slot) * 2;

            memset(record + at.k_scales + scale, 1, 2);
            memset(record + at.v_scales + scale, 1, 2);
        }
    }
    for (size_t i = 0; i < w->kv_bytes; i++) {
        assert_true(own[i] || before[i] == after[i]);
        n += own[i];
    }
    assert_true(n > 0 && n < w->kv_bytes);
    free(own);
}


/* The same rows by the CPU backend, whose pages do not matter here. */
static void
run_cpu(const rope_case_t *c, const float *cos_sin, const int32_t *pos,
        float *qkv)
{
    static const int32_t table[] = { 3, 2, 1, 0 };
    const int32_t *const tables[] = { table, table };
    const int32_t row_start[] = { 0, A, A + B };
    op_open_t params = {};
    const op_table_t *cpu = backend_find("cpu");
    op_err_t err;

    params.threads = 1;
    params.isa = "baseline";

    op_dev_t *dev = cpu->open(&params, &err);
    const size_t bytes =
        4 * cpu->kv_page_bytes(dev, OP_F16, 1, c->n_kv_heads, c->head_dim);
    const op_attn_t attn = { c->n_heads, c->n_kv_heads, c->head_dim, 1.0f };
    const op_kv_t kv = { cpu->alloc(dev, bytes), 4,           1,
                         c->n_kv_heads,          c->head_dim, OP_F16 };
    op_batch_t batch;

    memset((void *) &batch, 0, sizeof(batch));
    batch.n_rows = A + B;
    batch.n_seqs = 2;
    batch.pos = pos;
    batch.row_start = row_start;
    batch.block_table = tables;
    cpu->rope_kv(dev, qkv, &batch, &attn, cos_sin, c->rot, c->mode, &kv, 0);
    cpu->free(dev, kv.base, bytes);
    cpu->close(dev);
}


static float *
angles(const rope_case_t *c)
{
    float *cos_sin = (float *) world_must(64 * (c->rot + 1), sizeof(float));

    for (int i = 0; i < 64 * (c->rot / 2); i++) {
        const int p = i / (c->rot / 2), k = i % (c->rot / 2);
        const double angle = p * pow(1e4, -2.0 * k / c->rot);

        cos_sin[p * c->rot + 2 * k] = (float) cos(angle);
        cos_sin[p * c->rot + 2 * k + 1] = (float) sin(angle);
    }
    return cos_sin;
}


static void
check_rope(const rope_case_t *c)
{
    const world_shape_t shape = { c->n_heads, c->n_kv_heads, c->head_dim, 2 };
    const int32_t row_start[] = { 0, A, A + B };
    int32_t pos[A + B];
    gpu_world_t w;

    gpu_open(&w, &shape, 64);

    const size_t n = (size_t) (A + B) * w.stride;
    float *want = (float *) world_must(n, sizeof(float));
    float *got = (float *) world_must(n, sizeof(float));
    float *cos_sin = angles(c);

    for (int i = 0; i < A + B; i++) {
        pos[i] = position(i);
        gpu_qkv(&w, i >= A, pos[i], got + (size_t) i * w.stride);
    }
    got[n - 1] = 1e6f;  /* v that overflows f16 */
    got[n - 2] = 3e-8f; /* subnormal in f16 */
    got[n - 3] = 65519.99f;
    got[n - 4] = NAN;
    memcpy(want, got, n * sizeof(float));
    run_cpu(c, cos_sin, pos, want);

    for (int s = 0; s < 2; s++) {
        for (int p = 0; p < 4; p++) {
            w.table[s][p] = w.free_pages[--w.n_free];
        }
    }
    gpu_give(w.cos_sin);
    w.cos_sin = (float *) gpu_take(64 * (c->rot + 1) * sizeof(float), cos_sin);

    const gpu_rows_t rows = { A + B, 2, pos, row_start, w.table };
    uint8_t *before = (uint8_t *) gpu_read(w.kv.base, w.kv_bytes);

    gpu_run(&w, &rows, got, NULL, c->rot, c->mode);

    uint8_t *after = (uint8_t *) gpu_read(w.kv.base, w.kv_bytes);

    assert_memory_equal(want, got, n * sizeof(float));
    assert_pages(&w, got, after);
    assert_rest(&w, before, after);

    free(before);
    free(after);
    free(want);
    free(got);
    free(cos_sin);
    gpu_close(&w);
}


static void
test_rope(void **unused)
{
    static const rope_case_t cases[] = {
        { 9, 3, 64, 64, OP_ROPE_PAIRS },    { 9, 3, 64, 64, OP_ROPE_HALVES },
        { 4, 2, 128, 128, OP_ROPE_HALVES }, { 4, 2, 128, 64, OP_ROPE_PAIRS },
        { 4, 4, 80, 20, OP_ROPE_HALVES },   { 2, 1, 96, 96, OP_ROPE_PAIRS },
        { 2, 1, 18, 14, OP_ROPE_PAIRS },    { 2, 1, 18, 14, OP_ROPE_HALVES },
        { 2, 2, 4, 4, OP_ROPE_PAIRS },      { 2, 1, 256, 256, OP_ROPE_HALVES },
        { 3, 3, 64, 0, OP_ROPE_PAIRS },     { 1, 1, 100, 50, OP_ROPE_HALVES },
    };

    (void) unused;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check_rope(&cases[i]);
    }
}


/* Blocks of every size, with NaN, Inf, zeros and ties, row for row as op.h
 * has it. */
static void
test_blocks(void **unused)
{
    enum { TRIALS = 20 };
    static const world_shape_t shape = { 1, 1, 160, 2 };
    static const float odd[] = { NAN,    -NAN,  INFINITY,  -INFINITY,
                                 1e-45f, 3e38f, 8319000.0f };
    const int32_t row_start[] = { 0, A, A + B };
    int32_t pos[A + B];

    (void) unused;

    for (int trial = 0; trial < TRIALS; trial++) {
        gpu_world_t w;

        gpu_open(&w, &shape, 64);

        const size_t n = (size_t) (A + B) * w.stride;
        float *qkv = (float *) world_must(n, sizeof(float));

        for (int i = 0; i < A + B; i++) {
            pos[i] = position(i);
            gpu_qkv(&w, trial, pos[i] + i, qkv + (size_t) i * w.stride);
        }
        for (size_t b = 0; b < n; b += OP_KV_BLOCK) {
            const int kind = gpu_below(8);
            const float size = exp2f((float) gpu_below(66) - 40.0f);

            for (int i = 0; i < OP_KV_BLOCK; i++) {
                qkv[b + i] *= kind == 0 ? 0.0f : kind < 6 ? size : 1.0f;
                if (kind == 1) { /* halves, so that quotients tie */
                    qkv[b + i] = (float) (gpu_below(508) - 254) * 0.5f;
                }
            }
            if (kind == 1) {
                qkv[b] = 127.0f;
            } else if (kind >= 6) {
                qkv[b + gpu_below(OP_KV_BLOCK)] = odd[gpu_below(7)];
            }
        }
        for (int s = 0; s < 2; s++) {
            for (int p = 0; p < 4; p++) {
                w.table[s][p] = w.free_pages[--w.n_free];
            }
        }

        const gpu_rows_t rows = { A + B, 2, pos, row_start, w.table };

        gpu_run(&w, &rows, qkv, NULL, 0, OP_ROPE_PAIRS);

        uint8_t *after = (uint8_t *) gpu_read(w.kv.base, w.kv_bytes);

        assert_pages(&w, qkv, after);
        free(after);
        free(qkv);
        gpu_close(&w);
    }
}


/* --- copies --- */

static void
check_list(const op_kv_t *kv, size_t bytes, const op_copy_t *copies, int n)
{
    const size_t record = bytes / PAGES / (size_t) kv->n_layers;
    uint8_t *want = (uint8_t *) world_must(bytes, 1);
    op_copy_t *list = (op_copy_t *) gpu_take(n * sizeof(op_copy_t), copies);

    for (size_t i = 0; i < bytes; i++) {
        want[i] = (uint8_t) (i * 37 + i / 256 * 11 + i / 65536);
    }
    gpu_must(cudaMemcpy(kv->base, want, bytes, cudaMemcpyHostToDevice));
    cuda_kv_copy_launch(kv, list, n, NULL);
    gpu_must(cudaGetLastError());
    gpu_must(cudaDeviceSynchronize());

    for (int i = 0; i < n; i++) {
        for (int l = 0; l < kv->n_layers; l++) {
            uint8_t *pages = want + (size_t) l * PAGES * record;

            memmove(pages + (size_t) copies[i].to * record,
                    pages + (size_t) copies[i].from * record, record);
        }
    }

    uint8_t *got = (uint8_t *) gpu_read(kv->base, bytes);

    assert_memory_equal(want, got, bytes);
    gpu_give(list);
    free(want);
    free(got);
}


/* Nothing, chains, pages read and then written, pages written twice, a page
 * onto itself. */
static void
test_lists(void **unused)
{
    static const op_copy_t chain[] = { { 0, 1 }, { 1, 2 }, { 2, 3 }, { 6, 0 } };
    static const op_copy_t swap[] = { { 0, 6 }, { 1, 0 }, { 6, 1 },
                                      { 5, 5 }, { 4, 2 }, { 3, 2 } };
    static const int dims[] = { 34, 80, 128 };

    (void) unused;

    for (int k = 0; k < 3; k++) {
        op_kv_t kv = { NULL, PAGES, 1 + 2 * k, 1 + k, dims[k], world_dtype };
        const size_t bytes = PAGES
                             * cuda_kv_bytes((int) kv.dtype, kv.n_layers,
                                             kv.n_kv_heads, dims[k]);
        op_copy_t some[COPIES];

        kv.base = gpu_take(bytes, NULL);
        check_list(&kv, bytes, chain, 0);
        check_list(&kv, bytes, chain, 4);
        check_list(&kv, bytes, swap, 6);
        for (int round = 0; round < 10; round++) {
            for (int c = 0; c < COPIES; c++) {
                some[c].from = gpu_below(PAGES);
                some[c].to = gpu_below(PAGES);
            }
            check_list(&kv, bytes, some, 1 + round % COPIES);
        }
        gpu_give(kv.base);
    }
}


/* A sequence that goes on behind a copy of half a page has the bits of one
 * that computed everything itself. */
static void
check_fork(const world_shape_t *shape, int own)
{
    enum { LEN = 60 };
    const int full = own / OP_PAGE;
    const world_chunk_t all = { 0, LEN };
    gpu_world_t w;

    gpu_open(&w, shape, LEN);
    gpu_feed(&w, &all, 1);

    const int32_t pages[2] = { w.table[0][full], w.free_pages[--w.n_free] };
    const op_copy_t copy = { pages[0], pages[1] };
    op_copy_t *list = (op_copy_t *) gpu_take(sizeof(copy), &copy);
    float *want = w.out[0];

    cuda_kv_copy_launch(&w.kv, list, 1, NULL);
    gpu_must(cudaDeviceSynchronize());

    /* the copy is a copy: what it was made from goes bad */
    const cuda_kv_layout_t at =
        cuda_kv_layout((int) w.kv.dtype, w.attn.n_kv_heads, w.attn.head_dim);

    for (int l = 0; l < w.kv.n_layers; l++) {
        gpu_must(cudaMemset((uint8_t *) w.kv.base
                                + ((size_t) l * w.kv.n_pages + pages[0])
                                      * at.page_bytes,
                            0xff, at.page_bytes));
    }

    w.out[0] = (float *) world_must((size_t) LEN * w.width, sizeof(float));
    w.table[0][full] = pages[1];
    w.len[0] = own;
    while (w.len[0] < LEN) {
        const int left = LEN - w.len[0];
        const world_chunk_t some = { 0, left < 9 ? left : 9 };

        gpu_feed(&w, &some, 1);
    }
    assert_same_floats(want + own * w.width, w.out[0] + own * w.width,
                       (size_t) (LEN - own) * w.width, "behind a copy");
    free(want);
    gpu_give(list);
    gpu_close(&w);
}


static void
test_forks(void **unused)
{
    static const world_shape_t shapes[] = {
        { 9, 3, 64, 2 }, { 2, 1, 80, 2 }, { 4, 2, 26, 2 }, { 4, 4, 128, 2 }
    };
    static const int owns[] = { 1, 15, 17, 33, 58 };

    (void) unused;

    for (int i = 0; i < 4 * 5; i++) {
        check_fork(&shapes[i / 5], owns[i % 5]);
    }
}


/* Every schedule writes the same pages. */
static void
test_schedules(void **unused)
{
    static const rope_case_t c = { 4, 2, 96, 96, OP_ROPE_HALVES };
    const uint64_t before = gpu_schedule(0);

    (void) unused;

    for (int seed = 1; seed < 9; seed++) {
        gpu_schedule((uint64_t) seed);
        check_rope(&c);
    }
    gpu_schedule(before);
}


#define BOTH(test)                                      \
    { #test, test, world_use_f16, NULL, NULL },         \
    {                                                   \
#test "_q8_0", test, world_use_q8_0, NULL, NULL \
    }


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        BOTH(test_rope),  BOTH(test_blocks),    BOTH(test_lists),
        BOTH(test_forks), BOTH(test_schedules),
    };

    world_start();

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
