/*
 * Attention and the KV write: against the oracle, and bit for bit against
 * itself under every way to cut the same tokens into batches.
 *
 * Every pool starts full of NaN and Inf, and pages are handed out in random
 * order, so whatever leaks from a slot that is not the row's own shows.
 * An argument names the one test to run; SEED in the environment its seed.
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

enum { MAX_SEQS = 16, LAYERS = 2, LAYER = 1 };

static const char *const isas[] = { "avx512", "avx2", "baseline" };

enum { N_ISAS = 3 };

typedef struct {
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int n_seqs; /* that the pool has pages for */
} shape_t;

/* A backend with a poisoned page pool and what its sequences answered. */
typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    op_attn_t attn;
    op_kv_t kv;
    size_t kv_bytes;
    int max_len;
    int width; /* floats of a row of out */
    int n_free;
    int32_t *free_pages;
    int32_t *table[MAX_SEQS];
    int len[MAX_SEQS]; /* positions fed */
    float *out[MAX_SEQS];
    float *cos_sin;
} world_t;

typedef struct {
    int seq;
    int n;
} chunk_t;

static uint64_t seed;
static uint64_t state;


static uint64_t
next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}


static int
below(int n)
{
    return (int) ((next_random() >> 20) % (uint64_t) n);
}


/* The same input for the same place, whoever asks: −1 … 1. */
static float
value_at(int seq, int pos, int i)
{
    uint64_t h = seed + (uint64_t) seq * 0x9E3779B97F4A7C15u
                 + (uint64_t) pos * 0xC2B2AE3D27D4EB4Fu
                 + (uint64_t) i * 0x165667B19E3779F9u;

    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    return (float) ((double) (h >> 40) / 8388608.0 - 1.0);
}


static void *
must(size_t n, size_t size)
{
    void *p = calloc(n, size);

    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return p;
}


static void
poison(world_t *w)
{
    static const uint16_t bad[4] = { 0x7e00, 0x7c00, 0xfc00, 0xfdff };
    uint16_t *p = w->kv.base;

    for (size_t i = 0; i < w->kv_bytes / 2; i++) {
        p[i] = bad[next_random() >> 33 & 3];
    }
}


static void
make_pool(world_t *w, const shape_t *shape)
{
    const int n_seqs = shape->n_seqs;
    const int per_seq = (w->max_len + OP_PAGE - 1) / OP_PAGE;
    const int n_pages = per_seq * n_seqs + 3;

    w->kv = (op_kv_t){
        .n_pages = n_pages,
        .n_layers = LAYERS,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
    };
    w->kv_bytes = n_pages
                  * w->ops->kv_page_bytes(w->dev, LAYERS, shape->n_kv_heads,
                                          shape->head_dim);
    w->kv.base = w->ops->alloc(w->dev, w->kv_bytes);
    if (w->kv.base == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    poison(w);

    w->n_free = n_pages;
    w->free_pages = must(n_pages, sizeof(int32_t));
    for (int i = 0; i < n_pages; i++) {
        const int j = below(i + 1);

        w->free_pages[i] = w->free_pages[j];
        w->free_pages[j] = i;
    }
    for (int s = 0; s < n_seqs; s++) {
        w->table[s] = must(per_seq, sizeof(int32_t));
        w->out[s] = must((size_t) w->max_len * w->width, sizeof(float));
    }
}


/* 0; or -1: this machine lacks the instruction set. */
static int
world_open(world_t *w, const char *isa, int threads, const shape_t *shape,
           int max_len)
{
    const op_open_t params = { .threads = threads, .isa = isa };
    op_err_t err = { "" };

    memset(w, 0, sizeof(*w));
    w->ops = backend_find(isa == NULL ? "ref" : "cpu");
    w->dev = w->ops->open(&params, &err);
    if (w->dev == NULL) {
        return -1;
    }

    const op_limits_t limits = {
        .max_rows = shape->n_seqs * max_len,
        .max_seqs = MAX_SEQS,
        .max_len = max_len,
        .max_in = shape->n_heads * shape->head_dim,
        .n_heads = shape->n_heads,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
    };
    if (w->ops->prepare(w->dev, &limits, &err) != 0) {
        fprintf(stderr, "prepare: %s\n", err.text);
        exit(1);
    }

    w->attn = (op_attn_t){
        .n_heads = shape->n_heads,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
        .scale = 1.0f / sqrtf((float) shape->head_dim),
    };
    w->max_len = max_len;
    w->width = shape->n_heads * shape->head_dim;
    make_pool(w, shape);

    w->cos_sin = must((size_t) max_len * shape->head_dim, sizeof(float));
    for (int p = 0; p < max_len; p++) {
        for (int i = 0; i < shape->head_dim / 2; i++) {
            const double angle = p * pow(10000.0, -2.0 * i / shape->head_dim);
            float *entry = w->cos_sin + (size_t) p * shape->head_dim + 2 * i;

            entry[0] = (float) cos(angle);
            entry[1] = (float) sin(angle);
        }
    }
    return 0;
}


static void
world_close(world_t *w)
{
    w->ops->free(w->dev, w->kv.base, w->kv_bytes);
    w->ops->close(w->dev);
    free(w->free_pages);
    free(w->cos_sin);
    for (int s = 0; s < MAX_SEQS; s++) {
        free(w->table[s]);
        free(w->out[s]);
    }
}


static float *
make_qkv(const world_t *w, int seq, int pos, float *to)
{
    const int q_floats = w->width;
    const int kv_floats = w->attn.n_kv_heads * w->attn.head_dim;

    for (int i = 0; i < q_floats + 2 * kv_floats; i++) {
        to[i] = value_at(seq, pos, i);
        if (i < q_floats) {
            to[i] *= 6.0f; /* so that softmax is not flat */
        }
    }
    return to + q_floats + 2 * kv_floats;
}


/* One step: each chunk's next n positions.  Answers go to w->out. */
static void
feed(world_t *w, const chunk_t *chunks, int n_chunks)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    int32_t row_start[MAX_SEQS + 1] = { 0 };
    const int32_t *tables[MAX_SEQS];
    int rows = 0;

    for (int c = 0; c < n_chunks; c++) {
        rows += chunks[c].n;
        row_start[c + 1] = rows;
        tables[c] = w->table[chunks[c].seq];
    }

    int32_t *pos = must(rows, sizeof(int32_t));
    float *qkv = must((size_t) rows * stride, sizeof(float));
    float *out = must((size_t) rows * w->width, sizeof(float));
    float *at = qkv;

    for (int c = 0, r = 0; c < n_chunks; c++) {
        const int s = chunks[c].seq;

        for (int i = 0; i < chunks[c].n; i++, r++) {
            pos[r] = w->len[s] + i;
            at = make_qkv(w, s, pos[r], at);
            if (pos[r] % OP_PAGE == 0) {
                w->table[s][pos[r] / OP_PAGE] = w->free_pages[--w->n_free];
            }
        }
    }

    const op_batch_t batch = {
        .n_rows = rows,
        .n_seqs = n_chunks,
        .pos = pos,
        .row_start = row_start,
        .block_table = tables,
    };
    w->ops->rope_kv(w->dev, qkv, &batch, &w->attn, w->cos_sin, w->attn.head_dim,
                    OP_ROPE_PAIRS, &w->kv, LAYER);
    w->ops->attention(w->dev, out, qkv, &batch, &w->attn, &w->kv, LAYER);

    for (int c = 0; c < n_chunks; c++) {
        const int s = chunks[c].seq;

        memcpy(w->out[s] + (size_t) w->len[s] * w->width,
               out + (size_t) row_start[c] * w->width,
               (size_t) chunks[c].n * w->width * sizeof(float));
        w->len[s] += chunks[c].n;
    }

    free(pos);
    free(qkv);
    free(out);
}


/* Random steps until the sequences have these lengths. */
static void
feed_randomly(world_t *w, const int *len, int n_seqs, int largest)
{
    for (;;) {
        chunk_t chunks[MAX_SEQS];
        int n = 0, left = 0;

        for (int s = 0; s < n_seqs; s++) {
            const int rest = len[s] - w->len[s];

            left += rest;
            if (rest > 0 && below(4) > 0) {
                const int want = below(3) == 0 ? 1 : 1 + below(largest);

                chunks[n].seq = s;
                chunks[n++].n = want < rest ? want : rest;
            }
        }
        if (left == 0) {
            return;
        }
        for (int i = n - 1; i > 0; i--) {
            const int j = below(i + 1);
            const chunk_t c = chunks[i];

            chunks[i] = chunks[j];
            chunks[j] = c;
        }
        if (n > 0) {
            feed(w, chunks, n);
        }
    }
}


static void
assert_same(const world_t *a, const world_t *b, int n_seqs, const char *what)
{
    for (int s = 0; s < n_seqs; s++) {
        assert_int_equal(a->len[s], b->len[s]);
        for (int p = 0; p < a->len[s]; p++) {
            const size_t at = (size_t) p * a->width;

            if (memcmp(a->out[s] + at, b->out[s] + at, a->width * sizeof(float))
                != 0) {
                fail_msg("%s: seq %d position %d differs, seed %llu", what, s,
                         p, (unsigned long long) seed);
            }
        }
    }
}


static void
assert_finite(const world_t *w, int seq)
{
    for (size_t i = 0; i < (size_t) w->len[seq] * w->width; i++) {
        assert_true(isfinite(w->out[seq][i]));
    }
}


/* --- against the oracle --- */

/* Attention of chosen contexts of one sequence, as one batch of single rows. */
static void
probe(world_t *w, const int *contexts, int n, float *out)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    float *qkv = must((size_t) n * stride, sizeof(float));
    const int32_t *tables[MAX_SEQS];
    int32_t row_start[MAX_SEQS + 1] = { 0 }, pos[MAX_SEQS];

    for (int i = 0; i < n; i++) {
        make_qkv(w, 1, contexts[i] - 1, qkv + (size_t) i * stride);
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
    w->ops->attention(w->dev, out, qkv, &batch, &w->attn, &w->kv, LAYER);
    free(qkv);
}


static void
fill_kv(world_t *w, int len)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    float *qkv = must((size_t) len * stride, sizeof(float));
    float *at = qkv;
    int32_t *pos = must(len, sizeof(int32_t));
    const int32_t row_start[2] = { 0, len };
    const int32_t *table = w->table[0];

    for (int p = 0; p < len; p++) {
        pos[p] = p;
        at = make_qkv(w, 0, p, at);
        if (p % OP_PAGE == 0) {
            w->table[0][p / OP_PAGE] = w->free_pages[--w->n_free];
        }
    }

    const op_batch_t batch = {
        .n_rows = len,
        .n_seqs = 1,
        .pos = pos,
        .row_start = row_start,
        .block_table = &table,
    };
    w->ops->rope_kv(w->dev, qkv, &batch, &w->attn, w->cos_sin, w->attn.head_dim,
                    OP_ROPE_HALVES, &w->kv, LAYER);
    free(pos);
    free(qkv);
}


static void
check_shape(const shape_t *shape)
{
    static const int contexts[] = { 1,   2,   15,  16,  17,  31,  255,
                                    256, 257, 272, 511, 512, 513, 1100 };
    enum { N = sizeof(contexts) / sizeof(contexts[0]), LONGEST = 1100 };
    const size_t floats = (size_t) N * shape->n_heads * shape->head_dim;
    float *want = must(floats, sizeof(float));
    float *got = must(floats, sizeof(float));
    float *first = must(floats, sizeof(float));
    world_t w;
    int seen = 0;

    assert_int_equal(world_open(&w, NULL, 1, shape, LONGEST), 0);
    fill_kv(&w, LONGEST);
    probe(&w, contexts, N, want);
    world_close(&w);

    for (int i = 0; i < N_ISAS; i++) {
        double worst = 0.0;

        if (world_open(&w, isas[i], 2, shape, LONGEST) != 0) {
            continue;
        }
        fill_kv(&w, LONGEST);
        probe(&w, contexts, N, got);
        world_close(&w);

        for (size_t k = 0; k < floats; k++) {
            const double error = fabs((double) got[k] - want[k]);

            assert_true(isfinite(got[k]));
            worst = error > worst ? error : worst;
        }
        if (worst > 1e-4) {
            fail_msg("%s %d/%d/%d: off by %g", isas[i], shape->n_heads,
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
    static const shape_t shapes[] = {
        { 9, 3, 64, 1 },  { 4, 1, 64, 1 },  { 8, 8, 64, 1 },  { 4, 2, 80, 1 },
        { 6, 2, 96, 1 },  { 8, 2, 128, 1 }, { 4, 2, 256, 1 }, { 3, 1, 2, 1 },
        { 4, 4, 18, 1 },  { 2, 2, 30, 1 },  { 14, 2, 48, 1 }, { 26, 2, 32, 1 },
        { 71, 1, 64, 1 }, { 5, 1, 160, 1 }, { 2, 1, 512, 1 },
    };

    (void) unused;

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check_shape(&shapes[i]);
    }
}


/* --- against itself --- */

static const shape_t same_shapes[] = {
    { 9, 3, 64, 6 }, { 4, 1, 80, 6 }, { 8, 8, 64, 6 },  { 8, 2, 128, 6 },
    { 3, 1, 26, 6 }, { 2, 2, 96, 6 }, { 16, 1, 32, 6 }, { 70, 1, 16, 6 },
};


/* Whole prefill in the baseline is the standard; against it whole prefill,
 * token by token, and random chunks among other sequences, by threads. */
static void
check_same(const shape_t *shape, const char *isa, const world_t *standard,
           const int *len)
{
    world_t w;

    if (world_open(&w, isa, 1, shape, standard->max_len) != 0) {
        return;
    }
    for (int s = 0; s < shape->n_seqs; s++) {
        const chunk_t whole = { s, len[s] };

        feed(&w, &whole, 1);
    }
    assert_same(standard, &w, shape->n_seqs, isa);
    world_close(&w);

    world_open(&w, isa, 2, shape, standard->max_len);
    for (int done = 0, p = 0; !done; p++) {
        chunk_t step[MAX_SEQS];
        int n = 0;

        for (int s = 0; s < shape->n_seqs; s++) {
            if (p < len[s]) {
                step[n].seq = s;
                step[n++].n = 1;
            }
        }
        done = n == 0;
        if (n > 0) {
            feed(&w, step, n);
        }
    }
    assert_same(standard, &w, shape->n_seqs, "token by token");
    world_close(&w);

    for (int threads = 1; threads <= 3; threads++) {
        world_open(&w, isa, threads, shape, standard->max_len);
        feed_randomly(&w, len, shape->n_seqs, threads == 1 ? 7 : 90);
        assert_same(standard, &w, shape->n_seqs, "random chunks");
        world_close(&w);
    }
}


static void
test_same_bits(void **unused)
{
    static const int len[] = { 270, 40, 17, 1, 258, 64 };
    const int n_shapes = sizeof(same_shapes) / sizeof(same_shapes[0]);

    (void) unused;

    for (int i = 0; i < n_shapes; i++) {
        const shape_t *shape = &same_shapes[i];
        world_t standard, again;

        world_open(&standard, "baseline", 1, shape, len[0]);
        for (int s = 0; s < shape->n_seqs; s++) {
            const chunk_t whole = { s, len[s] };

            feed(&standard, &whole, 1);
            assert_finite(&standard, s);
        }
        for (int k = 0; k < N_ISAS - 1; k++) {
            check_same(shape, isas[k], &standard, len);
        }

        if (i < 2) { /* it is slow */
            world_open(&again, "baseline", 2, shape, len[0]);
            feed_randomly(&again, len, shape->n_seqs, 90);
            assert_same(&standard, &again, shape->n_seqs, "baseline");
            world_close(&again);
        }
        world_close(&standard);
    }
}


/* The same last 16 positions as one chunk and one by one, after a long prefix
 * that is only written. */
static void
check_waves(const shape_t *shape, const char *isa, int prefix)
{
    enum { LAST = 16 };
    world_t chunked, single;
    const chunk_t chunk = { 0, LAST }, one = { 0, 1 };

    if (world_open(&chunked, isa, 2, shape, prefix + LAST) != 0) {
        return;
    }
    fill_kv(&chunked, prefix);
    chunked.len[0] = prefix;
    feed(&chunked, &chunk, 1);
    assert_finite(&chunked, 0);

    world_open(&single, isa, 1, shape, prefix + LAST);
    fill_kv(&single, prefix);
    single.len[0] = prefix;
    for (int i = 0; i < LAST; i++) {
        feed(&single, &one, 1);
    }

    assert_same(&chunked, &single, 1, "waves");
    world_close(&chunked);
    world_close(&single);
}


/* Partials of 1, 2 and more than 4 MB: in the last, one tile's heads do not
 * fit the scratch together. */
static void
test_long_tiles(void **unused)
{
    static const shape_t few = { 9, 3, 64, 1 }, many = { 256, 64, 16, 1 };

    (void) unused;

    for (int i = 0; i < N_ISAS - 1; i++) {
        check_waves(&few, isas[i], 8000);
        check_waves(&many, isas[i], 2080);
    }
}


/* A prefill that needs several waves, against decode of the same rows. */
static void
test_many_tiles(void **unused)
{
    static const shape_t shape = { 9, 3, 64, 1 };
    const int len = 2500;
    world_t whole, single;
    const chunk_t all = { 0, len }, one = { 0, 1 };

    (void) unused;

    for (int i = 0; i < N_ISAS - 1; i++) {
        if (world_open(&whole, isas[i], 2, &shape, len) != 0) {
            continue;
        }
        feed(&whole, &all, 1);
        world_open(&single, isas[i], 2, &shape, len);
        while (single.len[0] < len) {
            feed(&single, &one, 1);
        }
        assert_same(&whole, &single, 1, "many tiles");
        world_close(&whole);
        world_close(&single);
    }
}


static uint16_t *
v_of(const world_t *w, int pos, int head)
{
    const size_t head_halves = (size_t) 2 * OP_PAGE * w->attn.head_dim;
    const size_t page =
        (size_t) LAYER * w->kv.n_pages + w->table[0][pos / OP_PAGE];

    return (uint16_t *) w->kv.base
           + (page * w->attn.n_kv_heads + head) * head_halves
           + (size_t) (OP_PAGE + pos % OP_PAGE) * w->attn.head_dim;
}


/* A later token whose V overflowed to Inf, in the same page and the same
 * batch, changes no earlier row. */
static void
test_no_leak(void **unused)
{
    static const shape_t shape = { 6, 2, 64, 1 };
    enum { LEN = 300, BAD = 281 };

    (void) unused;

    for (int i = 0; i < N_ISAS; i++) {
        world_t good, bad;
        const chunk_t all = { 0, LEN };
        const int stride = (6 + 2 * 2) * 64;
        const int32_t row_start[2] = { 0, LEN };
        int32_t pos[LEN];
        float *qkv = must((size_t) LEN * stride, sizeof(float));

        if (world_open(&good, isas[i], 2, &shape, LEN) != 0) {
            free(qkv);
            continue;
        }
        feed(&good, &all, 1);
        world_open(&bad, isas[i], 2, &shape, LEN);
        feed(&bad, &all, 1);

        for (int p = 0; p < LEN; p++) {
            pos[p] = p;
            make_qkv(&bad, 0, p, qkv + (size_t) p * stride);
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
                         OP_ROPE_PAIRS, &bad.kv, LAYER);
        for (int d = 0; d < 64; d++) {
            v_of(&bad, BAD, 0)[d] = 0x7c00;
            v_of(&bad, BAD, 1)[d] = 0x7e00;
        }
        bad.ops->attention(bad.dev, bad.out[0], qkv, &batch, &bad.attn, &bad.kv,
                           LAYER);

        assert_memory_equal(good.out[0], bad.out[0],
                            (size_t) BAD * bad.width * sizeof(float));
        assert_false(isfinite(bad.out[0][(size_t) BAD * bad.width]));
        world_close(&good);
        world_close(&bad);
        free(qkv);
    }
}


/* The other layer's pages and unused slots keep their poison: bytes. */
static void
test_writes_own_slots(void **unused)
{
    static const shape_t shape = { 3, 1, 64, 1 };
    world_t w;
    const chunk_t some = { 0, 21 };
    size_t changed = 0;

    (void) unused;

    for (int i = 0; i < N_ISAS; i++) {
        if (world_open(&w, isas[i], 2, &shape, 40) != 0) {
            continue;
        }
        uint16_t *before = must(w.kv_bytes, 1);
        const uint16_t *after = w.kv.base;

        memcpy(before, after, w.kv_bytes);
        feed(&w, &some, 1);
        changed = 0;
        for (size_t k = 0; k < w.kv_bytes / 2; k++) {
            changed += before[k] != after[k];
        }
        assert_int_equal(changed, 21 * 2 * 64);
        assert_memory_equal(before, after, w.kv_bytes / LAYERS);
        world_close(&w);
        free(before);
    }
}


/* No rows; scores of equal, huge and opposite size. */
static void
test_extremes(void **unused)
{
    static const shape_t shape = { 3, 1, 64, 1 };
    enum { LEN = 600 };
    const int stride = (3 + 2) * 64;

    (void) unused;

    for (int i = 0; i < N_ISAS; i++) {
        world_t w;
        const op_batch_t none = { .n_rows = 0 };
        const int32_t row_start[2] = { 0, 1 };
        const int32_t pos = LEN - 1;
        float *q = must(stride, sizeof(float));
        float out[3 * 64];

        if (world_open(&w, isas[i], 2, &shape, LEN) != 0) {
            free(q);
            continue;
        }
        w.ops->rope_kv(w.dev, NULL, &none, &w.attn, w.cos_sin, 64, 0, &w.kv, 0);
        w.ops->attention(w.dev, NULL, NULL, &none, &w.attn, &w.kv, 0);

        fill_kv(&w, LEN);
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
            q[64 + d] = 1e5f * value_at(7, 0, d);
            q[128 + d] = -q[64 + d];
        }
        w.ops->attention(w.dev, out, q, &batch, &w.attn, &w.kv, LAYER);
        for (int d = 0; d < 64; d++) {
            double mean = 0.0;

            for (int p = 0; p < LEN; p++) {
                mean += (double) value_at(0, p, 3 * 64 + 64 + d) / LEN;
            }
            assert_true(fabs(out[d] - mean) < 1e-4);
            assert_true(fabsf(out[64 + d]) <= 1.0f);
            assert_true(fabsf(out[128 + d]) <= 1.0f);
            assert_true(out[64 + d] != out[128 + d]);
        }
        world_close(&w);
        free(q);
    }
}


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_long_tiles),
        cmocka_unit_test(test_many_tiles),
        cmocka_unit_test(test_no_leak),
        cmocka_unit_test(test_writes_own_slots),
        cmocka_unit_test(test_extremes),
    };

    seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10)
                          : (uint64_t) time(NULL);
    state = seed | 1;
    printf("# seed %llu\n", (unsigned long long) seed);

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
