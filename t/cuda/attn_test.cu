/*
 * The GPU's attention, emulated, or on a GPU (t/gpu.sh): against the oracle and
 * a naive sum, and bit for bit against itself under every way to cut the same
 * tokens into batches and under many schedules.
 *
 *   attn_test [name]    SEED in the environment gives the seed
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
#include "t/ops/lib/compare.h"
#include "t/ops/lib/small.h"
}


/* --- against the oracle --- */

/* The rows of chosen contexts of sequence 0, one after the other. */
static float *
probe_rows(const gpu_world_t *w, const int *contexts, int n, int32_t *pos)
{
    float *qkv = (float *) world_must((size_t) n * w->stride, sizeof(float));

    for (int i = 0; i < n; i++) {
        pos[i] = contexts[i] - 1;
        gpu_qkv(w, 1, pos[i], qkv + (size_t) i * w->stride);
    }
    return qkv;
}


/* Attention of these contexts as one batch of single rows. */
static void
probe(gpu_world_t *w, const int *contexts, int n, float *out)
{
    int32_t pos[WORLD_SEQS], row_start[WORLD_SEQS + 1] = { 0 };
    const int32_t *tables[WORLD_SEQS];
    float *qkv = probe_rows(w, contexts, n, pos);

    for (int i = 0; i < n; i++) {
        row_start[i + 1] = i + 1;
        tables[i] = w->table[0];
    }

    const gpu_rows_t rows = { n, n, pos, row_start, tables };

    gpu_run(w, &rows, qkv, out, -1, 0);
    free(qkv);
}


static void
probe_oracle(const world_shape_t *shape, const int *contexts, int n,
             int longest, float *out)
{
    world_t ref;
    int32_t pos[WORLD_SEQS], row_start[WORLD_SEQS + 1] = { 0 };
    const int32_t *tables[WORLD_SEQS];

    assert_int_equal(world_open(&ref, NULL, 1, shape, longest), 0);
    world_fill(&ref, longest);

    const int stride = ref.width + 2 * shape->n_kv_heads * shape->head_dim;
    float *qkv = (float *) world_must((size_t) n * stride, sizeof(float));
    op_batch_t batch;

    for (int i = 0; i < n; i++) {
        pos[i] = contexts[i] - 1;
        world_qkv(&ref, 1, pos[i], qkv + (size_t) i * stride);
        row_start[i + 1] = i + 1;
        tables[i] = ref.table[0];
    }

    memset((void *) &batch, 0, sizeof(batch));
    batch.n_rows = batch.n_seqs = n;
    batch.pos = pos;
    batch.row_start = row_start;
    batch.block_table = tables;
    ref.ops->attention(ref.dev, out, qkv, &batch, &ref.attn, &ref.kv,
                       WORLD_LAYER);
    free(qkv);
    world_close(&ref);
}


static void
check_shape(const world_shape_t *shape)
{
    static const int contexts[] = { 1,  2,   15,  16,  17,  63,  64,
                                    65, 127, 255, 256, 257, 320, 513 };
    enum { N = sizeof(contexts) / sizeof(contexts[0]), LONGEST = 513 };
    const size_t floats = (size_t) N * shape->n_heads * shape->head_dim;
    float *want = (float *) world_must(floats, sizeof(float));
    float *got = (float *) world_must(floats, sizeof(float));
    gpu_world_t w;

    probe_oracle(shape, contexts, N, LONGEST, want);
    gpu_open(&w, shape, LONGEST);
    gpu_fill(&w, LONGEST);
    probe(&w, contexts, N, got);
    gpu_close(&w);

    const double worst = compare_most(want, got, floats);

    printf("# %d/%d/%d: off by %.2g\n", shape->n_heads, shape->n_kv_heads,
           shape->head_dim, worst);
    assert_true(worst <= 3e-5);

    free(want);
    free(got);
}


static void
test_oracle(void **unused)
{
    /* the small set is what stands first: each head size */
    static const world_shape_t shapes[] = {
        { 3, 1, 64, 1 },  { 2, 2, 80, 1 }, { 2, 1, 96, 1 },  { 2, 1, 128, 1 },
        { 1, 1, 256, 1 }, { 1, 1, 2, 1 },  { 2, 1, 70, 1 },  { 17, 1, 32, 1 },
        { 71, 1, 16, 1 }, { 4, 2, 96, 1 }, { 5, 1, 128, 1 }, { 2, 1, 256, 1 },
        { 3, 1, 48, 1 },  { 2, 2, 98, 1 }, { 1, 1, 160, 1 },
    };
    const int n = SMALLEST_SET ? 8 : sizeof(shapes) / sizeof(shapes[0]);

    (void) unused;

    for (int i = 0; i < n; i++) {
        check_shape(&shapes[i]);
    }
}


/* --- windows and caps, against a naive sum --- */

/* K (which 0) or V (1) of sequence 0, as the pool has it. */
static double
stored(const gpu_world_t *w, int pos, int head, int which, int d)
{
    const int dim = w->attn.head_dim;
    const int at = w->width + (which * w->attn.n_kv_heads + head) * dim;
    const int first = d / OP_KV_BLOCK * OP_KV_BLOCK;
    float top = 0.0f;

    if (w->kv.dtype == OP_F16) {
        return op_half_to_float(op_float_to_half(world_value(0, pos, at + d)));
    }
    for (int i = first; i < first + OP_KV_BLOCK && i < dim; i++) {
        top = fmaxf(top, fabsf(world_value(0, pos, at + i)));
    }

    const float scale = op_half_to_float(op_float_to_half(top / 127.0f));
    const double q = nearbyint(world_value(0, pos, at + d) / scale);

    return fmax(-127.0, fmin(127.0, q)) * (double) scale;
}


static void
naive(const gpu_world_t *w, int pos, int head, double *out)
{
    const int dim = w->attn.head_dim;
    const int kv_head = head / (w->attn.n_heads / w->attn.n_kv_heads);
    const int from =
        w->window > 0 && pos >= w->window ? pos + 1 - w->window : 0;
    float *qkv = (float *) world_must(w->stride, sizeof(float));
    double *p = (double *) world_must(pos + 1, sizeof(double));
    double top = -HUGE_VAL, sum = 0.0;

    gpu_qkv(w, 1, pos, qkv);
    for (int t = from; t <= pos; t++) {
        for (int d = 0; d < dim; d++) {
            p[t] += (double) qkv[head * dim + d] * w->attn.scale
                    * stored(w, t, kv_head, 0, d);
        }
        if (w->softcap > 0.0f) {
            p[t] = w->softcap * tanh(p[t] / w->softcap);
        }
        top = fmax(top, p[t]);
    }

    memset(out, 0, dim * sizeof(double));
    for (int t = from; t <= pos; t++) {
        const double weight = exp(p[t] - top);

        sum += weight;
        for (int d = 0; d < dim; d++) {
            out[d] += weight * stored(w, t, kv_head, 1, d);
        }
    }
    for (int d = 0; d < dim; d++) {
        out[d] /= sum;
    }
    free(qkv);
    free(p);
}


static void
check_window(int window, float softcap)
{
    static const world_shape_t shape = { 4, 2, 64, 1 };
    static const int contexts[] = { 1, 7, 64, 65, 100, 256, 257, 300, 520 };
    enum { N = sizeof(contexts) / sizeof(contexts[0]), LONGEST = 520 };
    float got[N * 4 * 64];
    double want[64];
    gpu_world_t w;

    gpu_open(&w, &shape, LONGEST);
    w.window = window;
    w.softcap = softcap;
    gpu_fill(&w, LONGEST);
    probe(&w, contexts, N, got);

    for (int i = 0; i < N * 4; i++) {
        naive(&w, contexts[i / 4] - 1, i % 4, want);
        for (int d = 0; d < 64; d++) {
            if (!(fabs(got[i * 64 + d] - want[d]) <= 3e-5)) {
                fail_msg("window %d, cap %g, context %d: %g instead of %g",
                         window, softcap, contexts[i / 4], got[i * 64 + d],
                         want[d]);
            }
        }
    }
    gpu_close(&w);
}


static void
test_windows(void **unused)
{
    (void) unused;

    check_window(0, 0.0f);
    check_window(1, 0.0f);
    check_window(64, 0.0f);
    check_window(100, 0.0f);
    check_window(300, 5.0f);
    check_window(0, 1.5f);
}


/* --- against itself --- */

/* Whole prefill is the standard; against it token by token, drafts of a few
 * rows, and random chunks among other sequences. */
static void
check_same(const world_shape_t *shape, const int *len, int window, float cap)
{
    gpu_world_t standard, w;
    const int n_seqs = shape->n_seqs;

    gpu_open(&standard, shape, len[0]);
    standard.window = window;
    standard.softcap = cap;
    for (int s = 0; s < n_seqs; s++) {
        const world_chunk_t whole = { s, len[s] };

        gpu_feed(&standard, &whole, 1);
    }

    for (int way = 1; way <= 5; way += 4) {
        gpu_open(&w, shape, len[0]);
        w.window = window;
        w.softcap = cap;
        for (;;) {
            world_chunk_t step[WORLD_SEQS];
            int n = 0;

            for (int s = 0; s < n_seqs; s++) {
                if (w.len[s] < len[s]) {
                    const int left = len[s] - w.len[s];

                    step[n].seq = s;
                    step[n++].n = left < way ? left : way;
                }
            }
            if (n == 0) {
                break;
            }
            gpu_feed(&w, step, n);
        }
        gpu_assert_same(&standard, &w, n_seqs,
                        way == 1 ? "token by token" : "drafts");
        gpu_close(&w);
    }

    for (int round = 0; round < 2; round++) {
        gpu_open(&w, shape, len[0]);
        w.window = window;
        w.softcap = cap;
        if (round == 1) {
            w.scratch_bytes = 0; /* all go to the kernel that needs none */
        }
        gpu_feed_randomly(&w, len, n_seqs, round == 0 ? 7 : 90);
        gpu_assert_same(&standard, &w, n_seqs, "random chunks");
        gpu_close(&w);
    }
    gpu_close(&standard);
}


static void
test_same_bits(void **unused)
{
    static const int len[] = { 70, 33, 17, 1 };
    /* the small set is what stands first: each head size */
    static const world_shape_t shapes[] = {
        { 3, 1, 64, 4 },  { 1, 1, 80, 3 },  { 2, 2, 96, 1 },  { 2, 1, 128, 2 },
        { 1, 1, 256, 2 }, { 7, 1, 18, 3 },  { 5, 1, 32, 1 },  { 4, 1, 80, 3 },
        { 2, 2, 96, 2 },  { 8, 2, 128, 2 }, { 2, 1, 256, 2 }, { 17, 1, 32, 2 },
        { 70, 1, 16, 1 },
    };
    const int n = SMALLEST_SET ? 7 : sizeof(shapes) / sizeof(shapes[0]);

    (void) unused;

    for (int i = 0; i < n; i++) {
        check_same(&shapes[i], len, 0, 0.0f);
    }
}


static void
test_same_bits_window(void **unused)
{
    static const int len[] = { 70, 33, 17, 1 };
    static const world_shape_t shape = { 4, 2, 64, 4 };

    (void) unused;

    check_same(&shape, len, 20, 0.0f);
    check_same(&shape, len, 64, 3.0f);
}


/* The last n positions as one chunk and in pieces, after a long prefix that
 * is only written. */
static void
check_tail(const world_shape_t *shape, int prefix, int n, int window)
{
    static const int pieces[] = { 1, 3, 8, 9 };
    gpu_world_t whole, parts;
    const world_chunk_t all = { 0, n };

    gpu_open(&whole, shape, prefix + n);
    whole.window = window;
    gpu_fill(&whole, prefix);
    whole.len[0] = prefix;
    whole.scratch_bytes = 0;
    gpu_feed(&whole, &all, 1);

    for (int i = 0; i < 4; i++) {
        gpu_open(&parts, shape, prefix + n);
        parts.window = window;
        gpu_fill(&parts, prefix);
        parts.len[0] = prefix;
        while (parts.len[0] < prefix + n) {
            const int left = prefix + n - parts.len[0];
            const world_chunk_t some = { 0,
                                         left < pieces[i] ? left : pieces[i] };

            gpu_feed(&parts, &some, 1);
        }
        gpu_assert_same(&whole, &parts, 1, "tail");
        gpu_close(&parts);
    }
    gpu_close(&whole);
}


static void
test_boundaries(void **unused)
{
    static const world_shape_t shape = { 3, 1, 64, 1 };

    (void) unused;

    check_tail(&shape, 0, 12, 0);
    check_tail(&shape, 10, 12, 0);
    check_tail(&shape, 58, 12, 0);
    check_tail(&shape, 250, 12, 0);
    check_tail(&shape, 506, 12, 0);
    check_tail(&shape, 506, 12, 260);
    check_tail(&shape, 762, 12, 200);
}


/* Every schedule gives the same bits. */
static void
test_schedules(void **unused)
{
    static const world_shape_t shape = { 4, 2, 64, 2 };
    static const int len[] = { 40, 21 };
    const uint64_t before = gpu_schedule(0);
    gpu_world_t standard, w;

    (void) unused;

    for (int seed = 0; seed < (SMALLEST_SET ? 4 : 8); seed++) {
        gpu_world_t *to = seed == 0 ? &standard : &w;

        gpu_schedule((uint64_t) seed);
        gpu_open(to, &shape, 600);
        gpu_fill(to, 540);
        to->len[0] = 540;
        gpu_feed_randomly(to, (const int[]){ 552, len[1] }, 2, 12);
        if (seed > 0) {
            /* sequence 1 is whole, of sequence 0 the end */
            assert_same_floats(standard.out[0] + 540 * standard.width,
                               w.out[0] + 540 * w.width, 12 * w.width,
                               "sequence 0");
            assert_same_floats(standard.out[1], w.out[1], len[1] * w.width,
                               "sequence 1");
            gpu_close(&w);
        }
    }
    gpu_close(&standard);
    gpu_schedule(before);
}


/* --- what is no number --- */

/* K and V of one token that no type can hold, in the middle of a chunk:
 * earlier rows have the bits they have without it, later ones say so.  By
 * chunks and token by token alike. */
static void
check_odd(float value, int which, int step)
{
    enum { LEN = 90, BAD = 70, DIM = 64, HEADS = 2 };
    static const world_shape_t shape = { HEADS, 1, DIM, 1 };
    const int stride = (HEADS + 2) * DIM;
    const int32_t *table;
    int32_t pos[LEN];
    float *out[2];

    for (int odd = 0; odd < 2; odd++) {
        float *qkv = (float *) world_must((size_t) LEN * stride, sizeof(float));
        gpu_world_t w;

        gpu_open(&w, &shape, LEN);
        out[odd] =
            (float *) world_must((size_t) LEN * HEADS * DIM, sizeof(float));
        for (int p = 0; p < LEN; p++) {
            pos[p] = p;
            gpu_qkv(&w, 0, p, qkv + (size_t) p * stride);
            if (p % OP_PAGE == 0) {
                w.table[0][p / OP_PAGE] = w.free_pages[--w.n_free];
            }
        }
        if (odd) {
            qkv[BAD * stride + (HEADS + which) * DIM + 5] = value;
        }

        table = w.table[0];
        for (int p = 0; p < LEN; p += step) {
            const int n = LEN - p < step ? LEN - p : step;
            const int32_t row_start[2] = { 0, n };
            const gpu_rows_t rows = { n, 1, pos + p, row_start, &table };

            gpu_run(&w, &rows, qkv + (size_t) p * stride,
                    out[odd] + (size_t) p * HEADS * DIM, DIM, OP_ROPE_HALVES);
        }
        gpu_close(&w);
        free(qkv);
    }

    assert_same_floats(out[0], out[1], BAD * HEADS * DIM, "rows before it");
    for (int p = BAD; p < LEN && (which == 1 || isnan(value)); p++) {
        for (int h = 0; h < HEADS; h++) {
            assert_false(isfinite(out[1][(p * HEADS + h) * DIM + 5]));
        }
    }
    free(out[0]);
    free(out[1]);
}


static void
test_not_numbers(void **unused)
{
    static const float values[] = { NAN, INFINITY, -INFINITY, 3e38f };

    (void) unused;

    for (int i = 0; i < 4; i++) {
        for (int which = 0; which < 2; which++) {
            check_odd(values[i], which, 90);
            check_odd(values[i], which, 7);
        }
    }
    check_odd(NAN, 1, 1);
}


/* V of the only token comes out as the pool has it, to the bit, from
 * subnormals to what f16 cannot hold. */
static void
test_round_trip(void **unused)
{
    enum { DIM = 96, TRIALS = 60 };
    static const world_shape_t shape = { 1, 1, DIM, 1 };
    static const int32_t zero = 0, row_start[2] = { 0, 1 };

    (void) unused;

    for (int trial = 0; trial < TRIALS; trial++) {
        const float size = exp2f((float) gpu_below(64) - 36.0f);
        float qkv[3 * DIM], want[DIM], got[DIM];
        int32_t page = 0;
        const int32_t *table = &page;
        gpu_world_t w;
        world_t ref;
        op_batch_t batch;

        gpu_open(&w, &shape, 16);
        gpu_qkv(&w, 0, trial, qkv);
        for (int d = 0; d < DIM; d++) {
            qkv[2 * DIM + d] *= size;
        }

        const gpu_rows_t rows = { 1, 1, &zero, row_start, &table };

        assert_int_equal(world_open(&ref, NULL, 1, &shape, 16), 0);
        memset((void *) &batch, 0, sizeof(batch));
        batch.n_rows = batch.n_seqs = 1;
        batch.pos = &zero;
        batch.row_start = row_start;
        batch.block_table = &table;
        ref.ops->rope_kv(ref.dev, qkv, &batch, &ref.attn, NULL, 0,
                         OP_ROPE_PAIRS, &ref.kv, WORLD_LAYER);
        ref.ops->attention(ref.dev, want, qkv, &batch, &ref.attn, &ref.kv,
                           WORLD_LAYER);
        gpu_run(&w, &rows, qkv, got, 0, OP_ROPE_PAIRS);

        for (int d = 0; d < DIM; d++) {
            if (!(got[d] == want[d] || (isnan(got[d]) && isnan(want[d])))) {
                fail_msg("V of %g: %g instead of %g", size, got[d], want[d]);
            }
        }
        gpu_close(&w);
        world_close(&ref);
    }
}


/* No rows; scores of equal, huge, tiny and opposite size. */
static void
test_extremes(void **unused)
{
    enum { LEN = 300, DIM = 64, HEADS = 5 };
    static const world_shape_t shape = { HEADS, 1, DIM, 1 };
    static const int32_t pos = LEN - 1, row_start[2] = { 0, 1 };
    static const float sizes[HEADS] = { 0.0f, 1e7f, -1e7f, 1e-37f, 1e-44f };
    float qkv[(HEADS + 2) * DIM] = {}, out[HEADS * DIM];
    const double bound = world_dtype == OP_Q8_0 ? 5e-4 : 1e-4;
    int n_different = 0;
    gpu_world_t w;

    (void) unused;

    gpu_open(&w, &shape, LEN);

    const gpu_rows_t none = { 0, 0, NULL, row_start, NULL };

    gpu_run(&w, &none, NULL, out, 0, OP_ROPE_PAIRS);
    gpu_fill(&w, LEN);

    const int32_t *table = w.table[0];
    const gpu_rows_t rows = { 1, 1, &pos, row_start, &table };

    for (int i = 0; i < HEADS * DIM; i++) {
        qkv[i] = sizes[i / DIM] * world_value(7, 0, i % DIM);
    }
    gpu_run(&w, &rows, qkv, out, -1, 0);

    for (int d = 0; d < DIM; d++) {
        double mean = 0.0;

        for (int p = 0; p < LEN; p++) {
            mean += (double) world_value(0, p, (HEADS + 1) * DIM + d) / LEN;
        }
        assert_true(fabs(out[d] - mean) < bound);
        assert_true(fabsf(out[DIM + d]) <= 1.0f);
        assert_true(fabsf(out[2 * DIM + d]) <= 1.0f);
        n_different += out[DIM + d] != out[2 * DIM + d];
        assert_true(fabs(out[3 * DIM + d] - mean) < bound);
        assert_true(fabs(out[4 * DIM + d] - mean) < bound);
    }

    /* of two positions; a few values of f16 may happen to be the same */
    assert_true(n_different > DIM / 2);
    gpu_close(&w);
}


static void
test_limits(void **unused)
{
    op_limits_t limits = { 64, 8, 4096, 512, 8, 2, 64 };
    op_err_t err;

    (void) unused;

    assert_int_equal(cuda_attn_check(&limits, &err), 0);
    /* 64 rows, 16 splits, 8 heads, 4 + 64 floats */
    assert_int_equal(cuda_attn_scratch_bytes(&limits), 64 * 16 * 8 * 68 * 4);
    limits.max_seqs = 100;
    assert_int_equal(cuda_attn_scratch_bytes(&limits), 100 * 16 * 8 * 68 * 4);
    limits.max_len = 1 << 20;
    assert_true(cuda_attn_scratch_bytes(&limits) <= (size_t) 256 << 20);
    assert_true(cuda_attn_scratch_bytes(&limits) > (size_t) 240 << 20);
    limits.max_len = 256;
    assert_int_equal(cuda_attn_scratch_bytes(&limits), 0);

    limits.head_dim = 258;
    assert_int_equal(cuda_attn_check(&limits, &err), -1);
    assert_non_null(strstr(err.text, "258"));
    limits.head_dim = 64;
    limits.n_kv_heads = 3;
    assert_int_equal(cuda_attn_check(&limits, &err), -1);

    assert_int_equal(cuda_kv_bytes(OP_F16, 30, 3, 64),
                     30 * 3 * 2 * 16 * 64 * 2);
    assert_int_equal(cuda_kv_bytes(OP_Q8_0, 30, 3, 64),
                     30 * 3 * 2 * 16 * (64 + 2 * 2));
    assert_int_equal(cuda_kv_bytes(OP_Q8_0, 1, 1, 80), 2 * 16 * (80 + 3 * 2));
    assert_int_equal(cuda_kv_bytes(OP_F32, 30, 3, 64), 0);
    assert_int_equal(cuda_kv_bytes(OP_F16, 30, 3, 300), 0);
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
        BOTH(test_oracle),      BOTH(test_windows),
        BOTH(test_same_bits),   BOTH(test_same_bits_window),
        BOTH(test_boundaries),  BOTH(test_schedules),
        BOTH(test_not_numbers), BOTH(test_round_trip),
        BOTH(test_extremes),    cmocka_unit_test(test_limits),
    };

    world_start();

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
