/*
 * Attention and the KV write: against the oracle, and bit for bit against
 * itself under every way to cut the same tokens into batches, with pools of
 * f16 and of q8_0.
 *
 *   attn_test [name]    SEED in the environment gives the seed
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

#include "kernels/cpu/cpu_kv.h"
#include "kernels/op/op.h"
#include "t/ops/lib/attn_world.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/small.h"


/* --- against the oracle --- */

/* Attention of chosen contexts of one sequence, as one batch of single rows. */
static void
probe(world_t *w, const int *contexts, int n, float *out)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    float *qkv = world_must((size_t) n * stride, sizeof(float));
    const int32_t *tables[WORLD_SEQS];
    int32_t row_start[WORLD_SEQS + 1] = { 0 }, pos[WORLD_SEQS];

    for (int i = 0; i < n; i++) {
        world_qkv(w, 1, contexts[i] - 1, qkv + (size_t) i * stride);
        pos[i] = contexts[i] - 1;
        row_start[i + 1] = i + 1;
        tables[i] = w->table[0];
    }

    const op_batch_t batch = {
        .n_rows = n,
        .n_seqs = n,
        .pos = pos,
        .row_start = row_start,
        .block_table = tables,
    };
    w->ops->attention(w->dev, out, qkv, &batch, &w->attn, &w->kv, WORLD_LAYER);
    free(qkv);
}


static void
check_shape(const world_shape_t *shape)
{
    static const int contexts[] = { 1,   2,   15,  16,  17,  31,  255,
                                    256, 257, 272, 511, 512, 513, 1100 };
    enum { N = sizeof(contexts) / sizeof(contexts[0]), LONGEST = 1100 };
    const size_t floats = (size_t) N * shape->n_heads * shape->head_dim;
    float *want = world_must(floats, sizeof(float));
    float *got = world_must(floats, sizeof(float));
    float *first = world_must(floats, sizeof(float));
    world_t w;
    int seen = 0;

    assert_int_equal(world_open(&w, NULL, 1, shape, LONGEST), 0);
    world_fill(&w, LONGEST);
    probe(&w, contexts, N, want);
    world_close(&w);

    for (int i = 0; i < WORLD_ISAS; i++) {
        if (world_open(&w, world_isas[i], 2, shape, LONGEST) != 0) {
            continue;
        }
        world_fill(&w, LONGEST);
        probe(&w, contexts, N, got);
        world_close(&w);

        const double worst = compare_most(want, got, floats);

        if (!(worst <= 1e-4)) {
            fail_msg("%s %d/%d/%d: off by %g", world_isas[i], shape->n_heads,
                     shape->n_kv_heads, shape->head_dim, worst);
        }
        if (seen++ == 0) {
            memcpy(first, got, floats * sizeof(float));
        }
        assert_memory_equal(first, got, floats * sizeof(float));
    }

    assert_true(seen > 0);
    free(want);
    free(got);
    free(first);
}


static void
test_oracle(void **unused)
{
    /* the small set is what stands first: each head size */
    static const world_shape_t shapes[] = {
        { 3, 1, 64, 1 },  { 2, 1, 80, 1 },  { 2, 2, 96, 1 },  { 2, 1, 128, 1 },
        { 1, 1, 256, 1 }, { 3, 1, 2, 1 },   { 4, 4, 18, 1 },  { 17, 1, 32, 1 },
        { 1, 1, 512, 1 }, { 9, 3, 64, 1 },  { 4, 1, 64, 1 },  { 8, 8, 64, 1 },
        { 4, 2, 80, 1 },  { 6, 2, 96, 1 },  { 8, 2, 128, 1 }, { 4, 2, 256, 1 },
        { 2, 2, 30, 1 },  { 14, 2, 48, 1 }, { 26, 2, 32, 1 }, { 71, 1, 64, 1 },
        { 5, 1, 160, 1 }, { 2, 1, 512, 1 },
    };
    const int n = SMALL_SET ? 9 : sizeof(shapes) / sizeof(shapes[0]);

    (void) unused;

    for (int i = 0; i < n; i++) {
        check_shape(&shapes[i]);
    }
}


/* --- against itself --- */

/* The small set is what stands first: each head size. */
static const world_shape_t same_shapes[] = {
    { 3, 1, 64, 3 },  { 2, 1, 80, 3 },  { 2, 2, 96, 3 }, { 2, 1, 128, 3 },
    { 1, 1, 256, 3 }, { 3, 1, 26, 6 },  { 9, 3, 64, 6 }, { 4, 1, 80, 6 },
    { 8, 8, 64, 6 },  { 8, 2, 128, 6 }, { 2, 2, 96, 6 }, { 16, 1, 32, 6 },
    { 70, 1, 16, 6 },
};


/* Whole prefill in the baseline is the standard; against it whole prefill,
 * token by token, and random chunks among other sequences, by threads. */
static void
check_same(const world_shape_t *shape, const char *isa, const world_t *standard,
           const int *len)
{
    world_t w;

    if (world_open(&w, isa, 1, shape, standard->max_len) != 0) {
        return;
    }
    for (int s = 0; s < shape->n_seqs; s++) {
        const world_chunk_t whole = { s, len[s] };

        world_feed(&w, &whole, 1);
    }
    world_assert_same(standard, &w, shape->n_seqs, isa);
    world_close(&w);

    world_open(&w, isa, 2, shape, standard->max_len);
    for (int done = 0, p = 0; !done; p++) {
        world_chunk_t step[WORLD_SEQS];
        int n = 0;

        for (int s = 0; s < shape->n_seqs; s++) {
            if (p < len[s]) {
                step[n].seq = s;
                step[n++].n = 1;
            }
        }
        done = n == 0;
        if (n > 0) {
            world_feed(&w, step, n);
        }
    }
    world_assert_same(standard, &w, shape->n_seqs, "token by token");
    world_close(&w);

    for (int threads = SMALL_SET ? 2 : 1; threads <= 3; threads++) {
        world_open(&w, isa, threads, shape, standard->max_len);
        world_feed_randomly(&w, len, shape->n_seqs, threads % 2 == 1 ? 7 : 90);
        world_assert_same(standard, &w, shape->n_seqs, "random chunks");
        world_close(&w);
    }
}


static void
test_same_bits(void **unused)
{
    static const int len[] = { 270, 40, 17, 1, 258, 64 };
    const int n_shapes =
        SMALL_SET ? 6 : sizeof(same_shapes) / sizeof(same_shapes[0]);

    (void) unused;

    for (int i = 0; i < n_shapes; i++) {
        const world_shape_t *shape = &same_shapes[i];
        world_t standard, again;

        world_open(&standard, "baseline", 1, shape, len[0]);
        for (int s = 0; s < shape->n_seqs; s++) {
            const world_chunk_t whole = { s, len[s] };

            world_feed(&standard, &whole, 1);
            world_assert_finite(&standard, s);
        }
        for (int k = 0; k < WORLD_ISAS - 1; k++) {
            check_same(shape, world_isas[k], &standard, len);
        }

        if (i < 2) { /* it is slow */
            world_open(&again, "baseline", 2, shape, len[0]);
            world_feed_randomly(&again, len, shape->n_seqs, 90);
            world_assert_same(&standard, &again, shape->n_seqs, "baseline");
            world_close(&again);
        }
        world_close(&standard);
    }
}


/* The same last 16 positions as one chunk and one by one, after a long prefix
 * that is only written. */
static void
check_waves(const world_shape_t *shape, const char *isa, int prefix)
{
    enum { LAST = 16 };
    world_t chunked, single;
    const world_chunk_t chunk = { 0, LAST }, one = { 0, 1 };

    if (world_open(&chunked, isa, 2, shape, prefix + LAST) != 0) {
        return;
    }
    world_fill(&chunked, prefix);
    chunked.len[0] = prefix;
    world_feed(&chunked, &chunk, 1);
    world_assert_finite(&chunked, 0);

    world_open(&single, isa, 1, shape, prefix + LAST);
    world_fill(&single, prefix);
    single.len[0] = prefix;
    for (int i = 0; i < LAST; i++) {
        world_feed(&single, &one, 1);
    }

    world_assert_same(&chunked, &single, 1, "waves");
    world_close(&chunked);
    world_close(&single);
}


/* Partials of 1, 2 and more than 4 MB: in the last, one tile's heads do not
 * fit the scratch together. */
static void
test_long_tiles(void **unused)
{
    static const world_shape_t few = { 9, 3, 64, 1 }, many = { 256, 64, 16, 1 };

    (void) unused;

    for (int i = 0; i < WORLD_ISAS - 1; i++) {
        if (!SMALL_SET) {
            check_waves(&few, world_isas[i], 8000);
        }
        check_waves(&many, world_isas[i], 2080);
    }
}


/* A prefill that needs several waves, against decode of the same rows. */
static void
test_many_tiles(void **unused)
{
    static const world_shape_t shape = { 9, 3, 64, 1 };
    const int len = SMALL_SET ? 1100 : 2500;
    world_t whole, single;
    const world_chunk_t all = { 0, len }, one = { 0, 1 };

    (void) unused;

    for (int i = 0; i < WORLD_ISAS - 1; i++) {
        if (world_open(&whole, world_isas[i], 2, &shape, len) != 0) {
            continue;
        }
        world_feed(&whole, &all, 1);
        world_open(&single, world_isas[i], 2, &shape, len);
        while (single.len[0] < len) {
            world_feed(&single, &one, 1);
        }
        world_assert_same(&whole, &single, 1, "many tiles");
        world_close(&whole);
        world_close(&single);
    }
}


/* The record of sequence 0's position. */
static uint8_t *
record_of(const world_t *w, const cpu_kv_layout_t *at, int pos, int head)
{
    return cpu_kv_layer(&w->kv, at, WORLD_LAYER)
           + (size_t) w->table[0][pos / OP_PAGE] * at->page_bytes
           + (size_t) head * at->head_bytes;
}


/* V of one position and head becomes this half; in a pool of q8_0, its scales
 * do. */
static void
spoil_v(const world_t *w, int pos, int head, uint16_t half)
{
    const int dim = w->attn.head_dim;
    const cpu_kv_layout_t at =
        cpu_kv_layout((int) w->kv.dtype, w->attn.n_kv_heads, dim);
    uint8_t *record = record_of(w, &at, pos, head);
    uint16_t *v = (uint16_t *) (void *) (record + at.v);
    uint16_t *scale = (uint16_t *) (void *) (record + at.v_scales);

    if (w->kv.dtype == OP_F16) {
        for (int d = 0; d < dim; d++) {
            v[pos % OP_PAGE * dim + d] = half;
        }
        return;
    }

    for (int b = 0; b < dim; b += OP_KV_BLOCK) {
        scale[b / OP_KV_BLOCK * OP_PAGE + pos % OP_PAGE] = half;
    }
}


/* A later token whose V overflowed to Inf, in the same page and the same
 * batch, changes no earlier row. */
static void
test_no_leak(void **unused)
{
    enum { LEN = 300, BAD = 281, HEADS = SMALL_SET ? 2 : 6 };
    static const world_shape_t shape = { HEADS, 2, 64, 1 };

    (void) unused;

    for (int i = 0; i < WORLD_ISAS; i++) {
        world_t good, bad;
        const world_chunk_t all = { 0, LEN };
        const int stride = (HEADS + 2 * 2) * 64;
        const int32_t row_start[2] = { 0, LEN };
        int32_t pos[LEN];
        float *qkv = world_must((size_t) LEN * stride, sizeof(float));

        if (world_open(&good, world_isas[i], 2, &shape, LEN) != 0) {
            free(qkv);
            continue;
        }
        world_feed(&good, &all, 1);
        world_open(&bad, world_isas[i], 2, &shape, LEN);
        world_feed(&bad, &all, 1);

        for (int p = 0; p < LEN; p++) {
            pos[p] = p;
            world_qkv(&bad, 0, p, qkv + (size_t) p * stride);
        }
        const int32_t *table = bad.table[0];
        const op_batch_t batch = {
            .n_rows = LEN,
            .n_seqs = 1,
            .pos = pos,
            .row_start = row_start,
            .block_table = &table,
        };
        bad.ops->rope_kv(bad.dev, qkv, &batch, &bad.attn, bad.cos_sin, 64,
                         OP_ROPE_PAIRS, &bad.kv, WORLD_LAYER);
        spoil_v(&bad, BAD, 0, 0x7c00);
        spoil_v(&bad, BAD, 1, 0x7e00);
        bad.ops->attention(bad.dev, bad.out[0], qkv, &batch, &bad.attn, &bad.kv,
                           WORLD_LAYER);

        assert_same_floats(good.out[0], bad.out[0], (size_t) BAD * bad.width,
                           "rows before it");
        assert_false(isfinite(bad.out[0][(size_t) BAD * bad.width]));
        world_close(&good);
        world_close(&bad);
        free(qkv);
    }
}


/* Blanks what the first n positions of sequence 0 own in a copy of the pool.
 */
static void
blank_own(const world_t *w, uint8_t *copy, int n)
{
    const int dim = w->attn.head_dim;
    const int size = w->kv.dtype == OP_F16 ? 2 : 1;
    const cpu_kv_layout_t at =
        cpu_kv_layout((int) w->kv.dtype, w->attn.n_kv_heads, dim);

    for (int i = 0; i < n * w->attn.n_kv_heads; i++) {
        const int pos = i / w->attn.n_kv_heads;
        const int slot = pos % OP_PAGE;
        uint8_t *record = copy
                          + (record_of(w, &at, pos, i % w->attn.n_kv_heads)
                             - (uint8_t *) w->kv.base);

        memset(record + at.v + slot * dim * size, 0, dim * size);
        for (int d = 0; d < dim; d++) {
            memset(record + at.k + (d * OP_PAGE + slot) * size, 0, size);
            if (w->kv.dtype == OP_Q8_0) {
                const int scale = (d / OP_KV_BLOCK * OP_PAGE + slot) * 2;

                memset(record + at.k_scales + scale, 0, 2);
                memset(record + at.v_scales + scale, 0, 2);
            }
        }
    }
}


/* The other layer's pages, other pages and unused slots keep their poison. */
static void
test_writes_own_slots(void **unused)
{
    static const world_shape_t shape = { 4, 2, 70, 1 };
    world_t w;
    const world_chunk_t some = { 0, 21 };

    (void) unused;

    for (int i = 0; i < WORLD_ISAS; i++) {
        if (world_open(&w, world_isas[i], 2, &shape, 40) != 0) {
            continue;
        }
        uint8_t *before = world_must(w.kv_bytes, 1);
        uint8_t *after = w.kv.base;

        memcpy(before, after, w.kv_bytes);
        world_feed(&w, &some, 1);
        assert_memory_not_equal(before, after, w.kv_bytes);
        blank_own(&w, before, some.n);
        blank_own(&w, after, some.n);
        assert_memory_equal(before, after, w.kv_bytes);
        world_close(&w);
        free(before);
    }
}


/* No rows; scores of equal, huge and opposite size. */
static void
test_extremes(void **unused)
{
    static const world_shape_t shape = { 3, 1, 64, 1 };
    enum { LEN = 600 };
    const int stride = (3 + 2) * 64;

    /* 600 errors of a uniform ±1/254 have a mean of 0.0001, times five */
    const double bound = world_dtype == OP_Q8_0 ? 5e-4 : 1e-4;

    (void) unused;

    for (int i = 0; i < WORLD_ISAS; i++) {
        world_t w;
        const op_batch_t none = { .n_rows = 0 };
        const int32_t row_start[2] = { 0, 1 };
        const int32_t pos = LEN - 1;
        float *q = world_must(stride, sizeof(float));
        float out[3 * 64];

        if (world_open(&w, world_isas[i], 2, &shape, LEN) != 0) {
            free(q);
            continue;
        }
        w.ops->rope_kv(w.dev, NULL, &none, &w.attn, w.cos_sin, 64, 0, &w.kv, 0);
        w.ops->attention(w.dev, NULL, NULL, &none, &w.attn, &w.kv, 0);

        world_fill(&w, LEN);
        const int32_t *table = w.table[0];
        const op_batch_t batch = {
            .n_rows = 1,
            .n_seqs = 1,
            .pos = &pos,
            .row_start = row_start,
            .block_table = &table,
        };

        /* head 0: all scores 0, so the mean of V; heads 1 and 2: the softmax
         * of scores in the ten thousands picks one token */
        for (int d = 0; d < 64; d++) {
            q[64 + d] = 1e5f * world_value(7, 0, d);
            q[128 + d] = -q[64 + d];
        }
        w.ops->attention(w.dev, out, q, &batch, &w.attn, &w.kv, WORLD_LAYER);
        for (int d = 0; d < 64; d++) {
            double mean = 0.0;

            for (int p = 0; p < LEN; p++) {
                mean += (double) world_value(0, p, 3 * 64 + 64 + d) / LEN;
            }
            assert_true(fabs(out[d] - mean) < bound);
            assert_true(fabsf(out[64 + d]) <= 1.0f);
            assert_true(fabsf(out[128 + d]) <= 1.0f);
            assert_true(out[64 + d] != out[128 + d]);
        }
        world_close(&w);
        free(q);
    }
}


/* K and V that no type can hold: nothing crashes, rows before them are
 * finite, and q8_0 says NaN where it cannot say the value. */
static void
test_not_numbers(void **unused)
{
    enum { LEN = 40, BAD = 20, DIM = 80, STRIDE = 4 * DIM };
    static const world_shape_t shape = { 2, 1, DIM, 1 };
    static const float values[] = { NAN, INFINITY, -INFINITY, 3e38f, -3e38f };
    const int32_t row_start[2] = { 0, LEN };

    (void) unused;

    for (int i = 0; i < WORLD_ISAS * 5; i++) {
        world_t w;
        int32_t pos[LEN];

        if (world_open(&w, world_isas[i / 5], 2, &shape, LEN) != 0) {
            continue;
        }
        world_fill(&w, LEN);

        float *qkv = world_must((size_t) LEN * STRIDE, sizeof(float));
        const int32_t *table = w.table[0];
        const op_batch_t batch = {
            .n_rows = LEN,
            .n_seqs = 1,
            .pos = pos,
            .row_start = row_start,
            .block_table = &table,
        };

        for (int p = 0; p < LEN; p++) {
            pos[p] = p;
            world_qkv(&w, 0, p, qkv + (size_t) p * STRIDE);
        }
        qkv[BAD * STRIDE + 2 * DIM] = values[i % 5]; /* K, then the last V */
        qkv[(BAD + 1) * STRIDE - 1] = values[i % 5];
        w.ops->rope_kv(w.dev, qkv, &batch, &w.attn, w.cos_sin, DIM,
                       OP_ROPE_PAIRS, &w.kv, WORLD_LAYER);
        w.ops->attention(w.dev, w.out[0], qkv, &batch, &w.attn, &w.kv,
                         WORLD_LAYER);

        for (int k = 0; k < BAD * w.width; k++) {
            assert_true(isfinite(w.out[0][k]));
        }
        assert_false(isfinite(w.out[0][(BAD + 1) * w.width - 1]));
        world_close(&w);
        free(qkv);
    }
}


/* The same memory holds nearly twice the tokens. */
static void
test_page_bytes(void **unused)
{
    world_t w;
    static const world_shape_t shape = { 3, 1, 64, 1 };

    (void) unused;

    for (int i = -1; i < WORLD_ISAS; i++) {
        if (world_open(&w, i < 0 ? NULL : world_isas[i], 1, &shape, 16) != 0) {
            continue;
        }
        assert_int_equal(w.ops->kv_page_bytes(w.dev, OP_F16, 30, 3, 64),
                         30 * 3 * 2 * 16 * 64 * 2);
        assert_int_equal(w.ops->kv_page_bytes(w.dev, OP_Q8_0, 30, 3, 64),
                         30 * 3 * 2 * 16 * (64 + 2 * 2));
        assert_int_equal(w.ops->kv_page_bytes(w.dev, OP_Q8_0, 1, 1, 34),
                         2 * 16 * (34 + 2 * 2));
        assert_int_equal(w.ops->kv_page_bytes(w.dev, OP_F32, 30, 3, 64), 0);
        assert_int_equal(w.ops->kv_page_bytes(w.dev, OP_Q4_0, 30, 3, 64), 0);
        world_close(&w);
    }
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
        BOTH(test_oracle),
        BOTH(test_same_bits),
        BOTH(test_long_tiles),
        BOTH(test_many_tiles),
        BOTH(test_no_leak),
        BOTH(test_writes_own_slots),
        BOTH(test_extremes),
        BOTH(test_not_numbers),
        cmocka_unit_test(test_page_bytes),
    };

    world_start();

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
