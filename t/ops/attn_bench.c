/*
 * How fast attention, the pointwise ops and kv_copy are, on the shape of
 * SmolLM2-135M: 9 heads, 3 KV heads of 64.
 *
 *   attn_bench [isa [f16 | q8_0]]
 *
 * isa: baseline, avx2, avx512; best by default.
 *
 * Microseconds per token and layer, the best of several runs, because other
 * programs disturb them.  Successive calls use different layers, so decode
 * reads K and V as cold as a real step does.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/op/op.h"

enum {
    HEADS = 9,
    KV_HEADS = 3,
    DIM = 64,
    LAYERS = 30,
    MAX_SEQS = 16,
    MAX_LEN = 4096,
    MAX_ROWS = 512,
    STRIDE = (HEADS + 2 * KV_HEADS) * DIM,
    HIDDEN = 576,
    FFN = 1536,
    POOL_PAGES = 2 * MAX_LEN / OP_PAGE
};

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    op_kv_t kv;
    op_attn_t attn;
    float *qkv;
    float *out;
    float *cos_sin;
    int32_t table[MAX_SEQS][MAX_LEN / OP_PAGE];
    const int32_t *tables[MAX_SEQS];
    int32_t pos[MAX_ROWS];
    int32_t row_start[MAX_SEQS + 1];
} bench_t;


static double
now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec * 1e6 + 1e-3 * (double) t.tv_nsec;
}


static void
open_bench(bench_t *b, const char *isa, op_dtype_t dtype, int threads)
{
    const op_open_t params = { .threads = threads, .isa = isa };
    const op_limits_t limits = {
        .max_rows = MAX_ROWS,
        .max_seqs = MAX_SEQS,
        .max_len = MAX_LEN,
        .max_in = FFN,
        .n_heads = HEADS,
        .n_kv_heads = KV_HEADS,
        .head_dim = DIM,
    };
    op_err_t err;

    b->ops = backend_find("cpu");
    b->dev = b->ops->open(&params, &err);
    if (b->dev == NULL || b->ops->prepare(b->dev, &limits, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }

    b->attn = (op_attn_t){ HEADS, KV_HEADS, DIM, 0.125f };
    const size_t pool_bytes =
        POOL_PAGES
        * b->ops->kv_page_bytes(b->dev, (int) dtype, LAYERS, KV_HEADS, DIM);

    b->kv = (op_kv_t){ NULL, POOL_PAGES, LAYERS, KV_HEADS, DIM, dtype };
    b->kv.base = b->ops->alloc(b->dev, pool_bytes);
    b->qkv = b->ops->alloc(b->dev, sizeof(float) * MAX_ROWS * 2 * FFN);
    b->out = b->ops->alloc(b->dev, sizeof(float) * MAX_ROWS * FFN);
    b->cos_sin = b->ops->alloc(b->dev, sizeof(float) * MAX_LEN * DIM);
    if (b->kv.base == NULL || b->qkv == NULL || b->out == NULL
        || b->cos_sin == NULL)
    {
        fprintf(stderr, "no memory\n");
        exit(1);
    }

    uint16_t *halves = b->kv.base;
    uint32_t h = 12345;

    /* 1/8 … 255/512 as halves, so as scales too */
    for (size_t i = 0; i < pool_bytes / 2; i++) {
        h = h * 1664525u + 1013904223u;
        halves[i] = (uint16_t) (0x3000 + (h >> 16 & 0x87ff));
    }
    for (int i = 0; i < MAX_ROWS * STRIDE; i++) {
        h = h * 1664525u + 1013904223u;
        b->qkv[i] = (float) (h >> 8) / 8388608.0f - 1.0f;
    }
    for (int s = 0; s < MAX_SEQS; s++) {
        b->tables[s] = b->table[s];
        for (int i = 0; i < MAX_LEN / OP_PAGE; i++) {
            h = h * 1664525u + 1013904223u;
            b->table[s][i] = (int32_t) ((h >> 8) % POOL_PAGES);
        }
    }
}


static double
attention_us(bench_t *b, const op_batch_t *batch, int calls)
{
    double best = 1e30;

    for (int repeat = 0; repeat < 7; repeat++) {
        const double start = now_us();

        for (int i = 0; i < calls; i++) {
            b->ops->attention(b->dev, b->out, b->qkv, batch, &b->attn, &b->kv,
                              i % LAYERS);
        }

        const double each = (now_us() - start) / calls / batch->n_rows;
        best = each < best ? each : best;
    }

    return best;
}


/* All sequences have the first `common` positions' pages in common. */
static void
bench_attention(bench_t *b, int context, int n_seqs, int queries, int common)
{
    const int32_t *own[MAX_SEQS];
    int32_t(*mixed)[MAX_LEN / OP_PAGE] = calloc(MAX_SEQS, sizeof(b->table[0]));
    int row = 0;

    if (mixed == NULL) {
        exit(1);
    }
    for (int s = 0; s < n_seqs; s++) {
        own[s] = mixed[s];
        for (int i = 0; i < MAX_LEN / OP_PAGE; i++) {
            mixed[s][i] = b->table[i < common / OP_PAGE ? 0 : s][i];
        }
    }

    for (int s = 0; s < n_seqs; s++) {
        b->row_start[s] = row;
        for (int i = 0; i < queries; i++) {
            b->pos[row++] = context - queries + i;
        }
    }
    b->row_start[n_seqs] = row;

    const op_batch_t batch = {
        .n_rows = row,
        .n_seqs = n_seqs,
        .pos = b->pos,
        .row_start = b->row_start,
        .block_table = own,
    };
    const double mean = context - 0.5 * (queries - 1); /* causal */
    const double us = attention_us(b, &batch, queries > 16 ? 4 : 30);
    const double bytes = b->kv.dtype == OP_Q8_0 ? 2 + 4.0 / 32 : 4;

    printf("  context %4d (%4d in common), %2d x %3d rows: %8.2f us, "
           "%6.1f GFLOP/s, %5.1f GB/s of KV\n",
           context, common, n_seqs, queries, us, 4e-3 * mean * HEADS * DIM / us,
           1e-3 * bytes * context * KV_HEADS * DIM / us / queries);
    free(mixed);
}


static void
bench_point(bench_t *b, int rows)
{
    double best[3] = { 1e30, 1e30, 1e30 };

    b->row_start[0] = 0;
    b->row_start[1] = rows;
    for (int r = 0; r < rows; r++) {
        b->pos[r] = r;
    }

    const op_batch_t batch = {
        .n_rows = rows,
        .n_seqs = 1,
        .pos = b->pos,
        .row_start = b->row_start,
        .block_table = b->tables,
    };

    for (int repeat = 0; repeat < 50; repeat++) {
        const double t0 = now_us();
        b->ops->rmsnorm(b->dev, b->out, b->qkv, b->qkv, rows, HIDDEN, 1e-5f);
        const double t1 = now_us();
        b->ops->silu_mul(b->dev, b->out, b->qkv, rows, FFN);
        const double t2 = now_us();
        b->ops->rope_kv(b->dev, b->qkv, &batch, &b->attn, b->cos_sin, DIM,
                        OP_ROPE_PAIRS, &b->kv, repeat % LAYERS);
        const double t3 = now_us();
        const double us[3] = { t1 - t0, t2 - t1, t3 - t2 };

        for (int i = 0; i < 3; i++) {
            best[i] = us[i] < best[i] ? us[i] : best[i];
        }
    }

    printf("  %3d rows: rmsnorm %.3f, silu_mul %.3f, rope_kv %.3f us a row\n",
           rows, best[0] / rows, best[1] / rows, best[2] / rows);
}


/* Far apart, so that pages come from memory. */
static void
bench_copy(bench_t *b, int n)
{
    const size_t bytes =
        b->ops->kv_page_bytes(b->dev, (int) b->kv.dtype, LAYERS, KV_HEADS, DIM);
    op_copy_t copies[7];
    double best = 1e30;

    for (int repeat = 0; repeat < 30; repeat++) {
        for (int i = 0; i < n; i++) {
            copies[i].from = (repeat * 16 + i * 2) % POOL_PAGES;
            copies[i].to = (repeat * 16 + i * 2 + 1) % POOL_PAGES;
        }

        const double t0 = now_us();
        b->ops->kv_copy(b->dev, &b->kv, copies, n);
        const double us = now_us() - t0;

        best = us < best ? us : best;
    }

    printf("  kv_copy of %d: %.1f us a page of %zu KiB\n", n, best / n,
           bytes / 1024);
}


int
main(int argc, char **argv)
{
    static const int contexts[] = { 128, 1024, 4096 };
    static bench_t b;
    const op_dtype_t dtype =
        argc > 2 && strcmp(argv[2], "q8_0") == 0 ? OP_Q8_0 : OP_F16;

    for (int threads = 1; threads <= 2; threads++) {
        open_bench(&b, argc > 1 && argv[1][0] != '\0' ? argv[1] : NULL, dtype,
                   threads);
        printf("%s, KV as %s\n", b.ops->describe(b.dev),
               op_dtype_name((int) dtype));

        for (int i = 0; i < 3; i++) {
            bench_attention(&b, contexts[i], 1, 1, 0);
            bench_attention(&b, contexts[i], 16, 1, 0);
            bench_attention(&b, contexts[i], 16, 1, contexts[i] / 256 * 256);
            bench_attention(&b, contexts[i], 16, 1, contexts[i] - 40);
            bench_attention(&b, contexts[i], 1, 16, 0);
            bench_attention(&b, contexts[i], 1, 128, 0);
        }
        bench_point(&b, 1);
        bench_point(&b, 16);
        bench_point(&b, 512);
        bench_copy(&b, 1);
        bench_copy(&b, 7);
        b.ops->close(b.dev);
    }

    return 0;
}
