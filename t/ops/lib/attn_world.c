/*
 * The world in which attention is tested; see attn_world.h.
 */

#include "t/ops/lib/attn_world.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "kernels/backend.h"
#include "t/ops/lib/compare.h"

const char *const world_isas[WORLD_ISAS] = { "avx512", "avx2", "baseline" };

uint64_t world_seed;
op_dtype_t world_dtype = OP_F16;

static uint64_t state;


void
world_start(void)
{
    world_seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10)
                                : (uint64_t) time(NULL);
    state = world_seed | 1;
    printf("# seed %llu\n", (unsigned long long) world_seed);
}


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
float
world_value(int seq, int pos, int i)
{
    uint64_t h = world_seed + (uint64_t) seq * 0x9E3779B97F4A7C15u
                 + (uint64_t) pos * 0xC2B2AE3D27D4EB4Fu
                 + (uint64_t) i * 0x165667B19E3779F9u;

    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 32)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    return (float) ((double) (h >> 40) / 8388608.0 - 1.0);
}


void *
world_must(size_t n, size_t size)
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
make_pool(world_t *w, const world_shape_t *shape)
{
    const int n_seqs = shape->n_seqs;
    const int per_seq = (w->max_len + OP_PAGE - 1) / OP_PAGE;
    const int n_pages = per_seq * n_seqs + 3;

    w->kv = (op_kv_t){
        .n_pages = n_pages,
        .n_layers = WORLD_LAYERS,
        .n_kv_heads = shape->n_kv_heads,
        .head_dim = shape->head_dim,
        .dtype = world_dtype,
    };
    w->kv_bytes = n_pages
                  * w->ops->kv_page_bytes(w->dev, world_dtype, WORLD_LAYERS,
                                          shape->n_kv_heads, shape->head_dim);
    w->kv.base = w->ops->alloc(w->dev, w->kv_bytes);
    if (w->kv.base == NULL) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    poison(w);

    w->n_free = n_pages;
    w->free_pages = world_must(n_pages, sizeof(int32_t));
    for (int i = 0; i < n_pages; i++) {
        const int j = below(i + 1);

        w->free_pages[i] = w->free_pages[j];
        w->free_pages[j] = i;
    }
    for (int s = 0; s < n_seqs; s++) {
        w->table[s] = world_must(per_seq, sizeof(int32_t));
        w->out[s] = world_must((size_t) w->max_len * w->width, sizeof(float));
    }
}


/* 0; or -1: this machine lacks the instruction set. */
int
world_open(world_t *w, const char *isa, int threads, const world_shape_t *shape,
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
        .max_seqs = WORLD_SEQS,
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

    w->cos_sin = world_must((size_t) max_len * shape->head_dim, sizeof(float));
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


void
world_close(world_t *w)
{
    w->ops->free(w->dev, w->kv.base, w->kv_bytes);
    w->ops->close(w->dev);
    free(w->free_pages);
    free(w->cos_sin);
    for (int s = 0; s < WORLD_SEQS; s++) {
        free(w->table[s]);
        free(w->out[s]);
    }
}


float *
world_qkv(const world_t *w, int seq, int pos, float *to)
{
    const int q_floats = w->width;
    const int kv_floats = w->attn.n_kv_heads * w->attn.head_dim;

    for (int i = 0; i < q_floats + 2 * kv_floats; i++) {
        to[i] = world_value(seq, pos, i);
        if (i < q_floats) {
            to[i] *= 6.0f; /* so that softmax is not flat */
        }
    }
    return to + q_floats + 2 * kv_floats;
}


/* One step: each chunk's next n positions.  Answers go to w->out. */
void
world_feed(world_t *w, const world_chunk_t *chunks, int n_chunks)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    int32_t row_start[WORLD_SEQS + 1] = { 0 };
    const int32_t *tables[WORLD_SEQS];
    int rows = 0;

    for (int c = 0; c < n_chunks; c++) {
        rows += chunks[c].n;
        row_start[c + 1] = rows;
        tables[c] = w->table[chunks[c].seq];
    }

    int32_t *pos = world_must(rows, sizeof(int32_t));
    float *qkv = world_must((size_t) rows * stride, sizeof(float));
    float *out = world_must((size_t) rows * w->width, sizeof(float));
    float *at = qkv;

    for (int c = 0, r = 0; c < n_chunks; c++) {
        const int s = chunks[c].seq;

        for (int i = 0; i < chunks[c].n; i++, r++) {
            pos[r] = w->len[s] + i;
            at = world_qkv(w, s, pos[r], at);
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
                    OP_ROPE_PAIRS, &w->kv, WORLD_LAYER);
    w->ops->attention(w->dev, out, qkv, &batch, &w->attn, &w->kv, WORLD_LAYER);

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
void
world_feed_randomly(world_t *w, const int *len, int n_seqs, int largest)
{
    for (;;) {
        world_chunk_t chunks[WORLD_SEQS];
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
            const world_chunk_t c = chunks[i];

            chunks[i] = chunks[j];
            chunks[j] = c;
        }
        if (n > 0) {
            world_feed(w, chunks, n);
        }
    }
}


void
world_assert_same(const world_t *a, const world_t *b, int n_seqs,
                  const char *what)
{
    for (int s = 0; s < n_seqs; s++) {
        assert_int_equal(a->len[s], b->len[s]);
        for (int p = 0; p < a->len[s]; p++) {
            const size_t at = (size_t) p * a->width, n = a->width;

            if (compare_bits(a->out[s] + at, b->out[s] + at, n) < n) {
                fail_msg("%s: seq %d position %d differs, seed %llu", what, s,
                         p, (unsigned long long) world_seed);
            }
        }
    }
}


void
world_assert_finite(const world_t *w, int seq)
{
    for (size_t i = 0; i < (size_t) w->len[seq] * w->width; i++) {
        assert_true(isfinite(w->out[seq][i]));
    }
}


void
world_fill_seq(world_t *w, int seq, int len)
{
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    float *qkv = world_must((size_t) len * stride, sizeof(float));
    float *at = qkv;
    int32_t *pos = world_must(len, sizeof(int32_t));
    const int32_t row_start[2] = { 0, len };
    const int32_t *table = w->table[seq];

    for (int p = 0; p < len; p++) {
        pos[p] = p;
        at = world_qkv(w, seq, p, at);
        if (p % OP_PAGE == 0) {
            w->table[seq][p / OP_PAGE] = w->free_pages[--w->n_free];
        }
    }

    const op_batch_t batch = {
        .n_rows = len,
        .n_seqs = 1,
        .pos = pos,
        .row_start = row_start,
        .block_table = &table,
    };
    w->ops->rope_kv(w->dev, qkv, &batch, &w->attn, w->cos_sin, 0,
                    OP_ROPE_HALVES, &w->kv, WORLD_LAYER);
    free(pos);
    free(qkv);
}


void
world_fill(world_t *w, int len)
{
    world_fill_seq(w, 0, len);
}


int
world_use_q8_0(void **unused)
{
    (void) unused;
    world_dtype = OP_Q8_0;
    return 0;
}


int
world_use_f16(void **unused)
{
    (void) unused;
    world_dtype = OP_F16;
    return 0;
}
