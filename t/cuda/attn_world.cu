/*
 * The world in which the GPU's attention is tested; see attn_world.h.
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
}

#ifdef LLM_CUDA_EMU
#include "t/shim/options.h"
#endif

static uint64_t state = 88172645463325252u;


int
gpu_below(int n)
{
    state = state * 6364136223846793005u + world_seed * 2 + 1;
    return (int) ((state >> 33) % (uint64_t) n);
}


uint64_t
gpu_schedule(uint64_t seed)
{
#ifdef LLM_CUDA_EMU
    const uint64_t before = shim_options()->seed;

    shim_options()->seed = seed;

    return before;
#else
    return seed;
#endif
}


void
gpu_must(cudaError_t result)
{
    if (result != cudaSuccess) {
        fprintf(stderr, "cuda: %s\n", cudaGetErrorString(result));
        abort();
    }
}


void *
gpu_take(size_t bytes, const void *from)
{
    void *p = NULL;

    gpu_must(cudaMalloc(&p, bytes > 0 ? bytes : 16));
    if (from != NULL && bytes > 0) {
        gpu_must(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    }
    return p;
}


void
gpu_give(void *p)
{
    gpu_must(cudaFree(p));
}


void *
gpu_read(const void *from, size_t bytes)
{
    void *to = world_must(bytes > 0 ? bytes : 1, 1);

    gpu_must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
    return to;
}


static void
make_pool(gpu_world_t *w, const world_shape_t *shape)
{
    static const uint16_t bad[4] = { 0x7e00, 0x7c00, 0xfc00, 0xfdff };
    const int per_seq = (w->max_len + OP_PAGE - 1) / OP_PAGE;
    const int n_pages = per_seq * shape->n_seqs + 3;

    w->kv = {
        NULL,       n_pages, WORLD_LAYERS, shape->n_kv_heads, shape->head_dim,
        world_dtype
    };
    w->kv_bytes = n_pages
                  * cuda_kv_bytes((int) world_dtype, WORLD_LAYERS,
                                  shape->n_kv_heads, shape->head_dim);

    uint16_t *poison = (uint16_t *) world_must(w->kv_bytes, 1);

    for (size_t i = 0; i < w->kv_bytes / 2; i++) {
        poison[i] = bad[gpu_below(4)];
    }
    w->kv.base = gpu_take(w->kv_bytes, poison);
    free(poison);

    w->n_free = n_pages;
    w->free_pages = (int32_t *) world_must(n_pages, sizeof(int32_t));
    for (int i = 0; i < n_pages; i++) {
        const int j = gpu_below(i + 1);

        w->free_pages[i] = w->free_pages[j];
        w->free_pages[j] = i;
    }
    for (int s = 0; s < shape->n_seqs; s++) {
        w->table[s] = (int32_t *) world_must(per_seq, sizeof(int32_t));
        w->out[s] =
            (float *) world_must((size_t) w->max_len * w->width, sizeof(float));
    }
}


void
gpu_open(gpu_world_t *w, const world_shape_t *shape, int max_len)
{
    const int dim = shape->head_dim;
    const op_limits_t limits = {
        shape->n_seqs * max_len,
        WORLD_SEQS,
        max_len,
        shape->n_heads * dim,
        shape->n_heads,
        shape->n_kv_heads,
        dim,
    };
    float *cos_sin =
        (float *) world_must((size_t) max_len * dim, sizeof(float));
    op_err_t err;

    memset((void *) w, 0, sizeof(*w));
    assert_int_equal(cuda_attn_check(&limits, &err), 0);
    w->attn = { shape->n_heads, shape->n_kv_heads, dim,
                1.0f / sqrtf((float) dim) };
    w->max_len = max_len;
    w->width = shape->n_heads * dim;
    w->stride = w->width + 2 * shape->n_kv_heads * dim;
    make_pool(w, shape);

    for (int i = 0; i < max_len * (dim / 2); i++) {
        const int p = i / (dim / 2), k = i % (dim / 2);
        const double angle = p * pow(10000.0, -2.0 * k / dim);

        cos_sin[p * dim + 2 * k] = (float) cos(angle);
        cos_sin[p * dim + 2 * k + 1] = (float) sin(angle);
    }
    w->cos_sin =
        (float *) gpu_take((size_t) max_len * dim * sizeof(float), cos_sin);
    free(cos_sin);

    w->scratch_bytes = cuda_attn_scratch_bytes(&limits);
    w->scratch = gpu_take(w->scratch_bytes, NULL);
    w->arrived = (unsigned *) gpu_take(cuda_attn_arrived_bytes(&limits), NULL);
    gpu_must(cudaMemset(w->arrived, 0, cuda_attn_arrived_bytes(&limits)));
    gpu_must(cudaStreamCreate(&w->stream));
}


void
gpu_close(gpu_world_t *w)
{
    gpu_must(cudaStreamDestroy(w->stream));
    gpu_give(w->kv.base);
    gpu_give(w->cos_sin);
    gpu_give(w->scratch);
    gpu_give(w->arrived);
    free(w->free_pages);
    for (int s = 0; s < WORLD_SEQS; s++) {
        free(w->table[s]);
        free(w->out[s]);
    }
}


float *
gpu_qkv(const gpu_world_t *w, int seq, int pos, float *to)
{
    world_t like;

    memset((void *) &like, 0, sizeof(like));
    like.width = w->width;
    like.attn = w->attn;
    return world_qkv(&like, seq, pos, to);
}


/* The batch on the device; to be given back by free_batch(). */
static cuda_batch_t
make_batch(const gpu_rows_t *rows)
{
    cuda_batch_t batch;
    int32_t *seq = (int32_t *) world_must(rows->n_rows + 1, sizeof(int32_t));
    int32_t *tables;

    memset((void *) &batch, 0, sizeof(batch));
    batch.n_rows = rows->n_rows;
    batch.n_seqs = rows->n_seqs;

    for (int s = 0; s < rows->n_seqs; s++) {
        const int first = rows->row_start[s],
                  n = rows->row_start[s + 1] - first;

        for (int i = 0; i < n; i++) {
            seq[first + i] = s;
        }
        if (n > 0 && rows->pos[first] + n > batch.max_len) {
            batch.max_len = rows->pos[first] + n;
        }
        batch.max_seq_rows = n > batch.max_seq_rows ? n : batch.max_seq_rows;
    }

    batch.table_width = (batch.max_len + OP_PAGE - 1) / OP_PAGE;
    tables = (int32_t *) world_must(
        (size_t) rows->n_seqs * batch.table_width + 1, sizeof(int32_t));
    for (int s = 0; s < rows->n_seqs; s++) {
        const int first = rows->row_start[s],
                  n = rows->row_start[s + 1] - first;

        if (n > 0) {
            memcpy(tables + (size_t) s * batch.table_width, rows->tables[s],
                   (size_t) (rows->pos[first + n - 1] / OP_PAGE + 1)
                       * sizeof(int32_t));
        }
    }

    batch.pos = (int32_t *) gpu_take(rows->n_rows * sizeof(int32_t), rows->pos);
    batch.seq = (int32_t *) gpu_take(rows->n_rows * sizeof(int32_t), seq);
    batch.row_start = (int32_t *) gpu_take((rows->n_seqs + 1) * sizeof(int32_t),
                                           rows->row_start);
    batch.tables = (int32_t *) gpu_take(
        (size_t) rows->n_seqs * batch.table_width * sizeof(int32_t), tables);
    free(seq);
    free(tables);
    return batch;
}


static void
free_batch(const cuda_batch_t *batch)
{
    gpu_give((void *) batch->pos);
    gpu_give((void *) batch->seq);
    gpu_give((void *) batch->row_start);
    gpu_give((void *) batch->tables);
}


void
gpu_run(gpu_world_t *w, const gpu_rows_t *rows, float *qkv, float *out, int rot,
        int mode)
{
    const size_t in_bytes = (size_t) rows->n_rows * w->stride * sizeof(float);
    const size_t out_bytes = (size_t) rows->n_rows * w->width * sizeof(float);
    const cuda_batch_t batch = make_batch(rows);
    float *in_device = (float *) gpu_take(in_bytes, qkv);
    float *out_device = (float *) gpu_take(out_bytes, NULL);
    cuda_attn_call_t call;

    memset((void *) &call, 0, sizeof(call));
    call.batch = &batch;
    call.attn = &w->attn;
    call.kv = &w->kv;
    call.layer = WORLD_LAYER;
    call.scratch = w->scratch;
    call.scratch_bytes = w->scratch_bytes;
    call.arrived = w->arrived;
    call.stream = w->stream;
    call.window = w->window;
    call.softcap = w->softcap;

    if (rot >= 0) {
        cuda_rope_kv_launch(&call, in_device, w->cos_sin, rot, mode);
    }
    if (out != NULL) {
        cuda_attention_launch(&call, out_device, in_device);
    }
    gpu_must(cudaGetLastError());
    gpu_must(cudaStreamSynchronize(w->stream));

    if (in_bytes > 0) {
        gpu_must(cudaMemcpy(qkv, in_device, in_bytes, cudaMemcpyDeviceToHost));
    }
    if (out != NULL && out_bytes > 0) {
        gpu_must(
            cudaMemcpy(out, out_device, out_bytes, cudaMemcpyDeviceToHost));
    }
    gpu_give(in_device);
    gpu_give(out_device);
    free_batch(&batch);
}


void
gpu_feed(gpu_world_t *w, const world_chunk_t *chunks, int n_chunks)
{
    int32_t row_start[WORLD_SEQS + 1] = { 0 };
    const int32_t *tables[WORLD_SEQS];

    for (int c = 0; c < n_chunks; c++) {
        row_start[c + 1] = row_start[c] + chunks[c].n;
        tables[c] = w->table[chunks[c].seq];
    }

    const int n = row_start[n_chunks];
    int32_t *pos = (int32_t *) world_must(n, sizeof(int32_t));
    float *qkv = (float *) world_must((size_t) n * w->stride, sizeof(float));
    float *out = (float *) world_must((size_t) n * w->width, sizeof(float));
    float *at = qkv;

    for (int c = 0, r = 0; c < n_chunks; c++) {
        const int s = chunks[c].seq;

        for (int i = 0; i < chunks[c].n; i++, r++) {
            pos[r] = w->len[s] + i;
            at = gpu_qkv(w, s, pos[r], at);
            if (pos[r] % OP_PAGE == 0) {
                w->table[s][pos[r] / OP_PAGE] = w->free_pages[--w->n_free];
            }
        }
    }

    const gpu_rows_t rows = { n, n_chunks, pos, row_start, tables };

    gpu_run(w, &rows, qkv, out, w->attn.head_dim, OP_ROPE_PAIRS);
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


void
gpu_feed_randomly(gpu_world_t *w, const int *len, int n_seqs, int largest)
{
    for (;;) {
        world_chunk_t chunks[WORLD_SEQS];
        int n = 0, left = 0;

        for (int s = 0; s < n_seqs; s++) {
            const int rest = len[s] - w->len[s];

            left += rest;
            if (rest > 0 && gpu_below(4) > 0) {
                const int want = gpu_below(3) == 0 ? 1 : 1 + gpu_below(largest);

                chunks[n].seq = s;
                chunks[n++].n = want < rest ? want : rest;
            }
        }
        if (left == 0) {
            return;
        }
        for (int i = n - 1; i > 0; i--) {
            const int j = gpu_below(i + 1);
            const world_chunk_t c = chunks[i];

            chunks[i] = chunks[j];
            chunks[j] = c;
        }
        if (n > 0) {
            gpu_feed(w, chunks, n);
        }
    }
}


void
gpu_fill(gpu_world_t *w, int len)
{
    float *qkv = (float *) world_must((size_t) len * w->stride, sizeof(float));
    int32_t *pos = (int32_t *) world_must(len, sizeof(int32_t));
    const int32_t row_start[2] = { 0, len };
    const int32_t *table = w->table[0];
    float *at = qkv;

    for (int p = 0; p < len; p++) {
        pos[p] = p;
        at = gpu_qkv(w, 0, p, at);
        if (p % OP_PAGE == 0) {
            w->table[0][p / OP_PAGE] = w->free_pages[--w->n_free];
        }
    }

    const gpu_rows_t rows = { len, 1, pos, row_start, &table };

    gpu_run(w, &rows, qkv, NULL, 0, OP_ROPE_HALVES);
    free(pos);
    free(qkv);
}


void
gpu_assert_same(const gpu_world_t *a, const gpu_world_t *b, int n_seqs,
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
