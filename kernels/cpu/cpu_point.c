/*
 * The pointwise ops: RMSNorm, SiLU, RoPE with the KV write, and picking rows.
 * This file splits rows over the threads; the arithmetic of a row is in
 * cpu_point_body.h, compiled here for the baseline.
 */

#define CPU_POINT_TABLE cpu_point_baseline

#include "kernels/cpu/cpu_point_body.h"

#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_kv.h"

/* Floats a thread should have to do before waking others pays. */
enum { POINT_GRAIN = 8192 };

typedef struct {
    const cpu_point_kernels_t *kernels;
    float *y;
    const float *x;
    const float *w;
    const int32_t *idx;
    int rows;
    int dim;
    float eps;
} rows_job_t;

typedef struct {
    const cpu_point_kernels_t *kernels;
    float *qkv;
    const op_batch_t *batch;
    const op_attn_t *attn;
    const float *cos_sin;
    int rot;
    int mode;
    uint8_t *pages; /* of the layer */
    cpu_kv_layout_t layout;
} rope_job_t;


static const cpu_point_kernels_t *
kernels_of(int isa)
{
#if defined(__x86_64__)
    if (isa >= CPU_ISA_AVX512) {
        return &cpu_point_avx512;
    }
    if (isa == CPU_ISA_AVX2) {
        return &cpu_point_avx2;
    }
#endif
    (void) isa;
    return &cpu_point_baseline;
}


static void
run_rows(op_dev_t *dev, cpu_pool_fn fn, void *arg, size_t floats)
{
    if (floats <= POINT_GRAIN) {
        fn(arg, 0, 1);
    } else {
        cpu_pool_run(dev->pool, fn, arg);
    }
}


static void
rmsnorm_rows(void *arg, int thread, int n_threads)
{
    const rows_job_t *job = arg;
    int from, to;

    cpu_pool_share(job->rows, 1, thread, n_threads, &from, &to);
    for (int r = from; r < to; r++) {
        job->kernels->rmsnorm(job->y + (size_t) r * job->dim,
                              job->x + (size_t) r * job->dim, job->w, job->dim,
                              job->eps);
    }
}


void
cpu_rmsnorm(op_dev_t *dev, float *y, const float *x, const float *w, int rows,
            int dim, float eps)
{
    rows_job_t job = {
        .kernels = kernels_of(dev->isa),
        .y = y,
        .x = x,
        .w = w,
        .rows = rows,
        .dim = dim,
        .eps = eps,
    };

    run_rows(dev, rmsnorm_rows, &job, (size_t) rows * dim);
}


static void
silu_rows(void *arg, int thread, int n_threads)
{
    const rows_job_t *job = arg;
    int from, to;

    cpu_pool_share(job->rows, 1, thread, n_threads, &from, &to);
    for (int r = from; r < to; r++) {
        const float *gate = job->x + (size_t) r * 2 * job->dim;

        job->kernels->silu_mul(job->y + (size_t) r * job->dim, gate,
                               gate + job->dim, job->dim);
    }
}


void
cpu_silu_mul(op_dev_t *dev, float *y, const float *gate_up, int rows, int dim)
{
    rows_job_t job = {
        .kernels = kernels_of(dev->isa),
        .y = y,
        .x = gate_up,
        .rows = rows,
        .dim = dim,
    };

    run_rows(dev, silu_rows, &job, (size_t) rows * 2 * dim);
}


static void
gather_rows(void *arg, int thread, int n_threads)
{
    const rows_job_t *job = arg;
    int from, to;

    cpu_pool_share(job->rows, 1, thread, n_threads, &from, &to);
    for (int r = from; r < to; r++) {
        memcpy(job->y + (size_t) r * job->dim,
               job->x + (size_t) job->idx[r] * job->dim,
               (size_t) job->dim * sizeof(float));
    }
}


void
cpu_gather(op_dev_t *dev, float *y, const float *x, const int32_t *idx, int n,
           int dim)
{
    rows_job_t job = {
        .y = y,
        .x = x,
        .idx = idx,
        .rows = n,
        .dim = dim,
    };

    run_rows(dev, gather_rows, &job, (size_t) n * dim);
}


static uint16_t *
halves(uint8_t *page, size_t offset)
{
    return (uint16_t *) (void *) (page + offset);
}


/* One KV head of one token into its slot of the page. */
static void
store_halves(const rope_job_t *job, uint8_t *page, int slot, const float *k,
             const float *v)
{
    const int head_dim = job->attn->head_dim;
    uint16_t *key = halves(page, job->layout.k) + slot;
    uint16_t half[CPU_MAX_HEAD_DIM];

    job->kernels->narrow(half, k, head_dim);
    for (int d = 0; d < head_dim; d++) {
        key[d * OP_PAGE] = half[d];
    }

    job->kernels->narrow(halves(page, job->layout.v) + slot * head_dim, v,
                         head_dim);
}


static void
store_bytes(const rope_job_t *job, uint8_t *page, int slot, const float *k,
            const float *v)
{
    const int head_dim = job->attn->head_dim;
    int8_t *key = (int8_t *) page + job->layout.k + slot;
    int8_t *value = (int8_t *) page + job->layout.v + slot * head_dim;
    uint16_t *k_scale = halves(page, job->layout.k_scales) + slot;
    uint16_t *v_scale = halves(page, job->layout.v_scales) + slot;

    for (int b = 0; b < head_dim; b += OP_KV_BLOCK) {
        const int n = head_dim - b < OP_KV_BLOCK ? head_dim - b : OP_KV_BLOCK;
        int8_t q[OP_KV_BLOCK];

        *k_scale = job->kernels->quantise(q, k + b, n);
        for (int i = 0; i < n; i++) {
            key[(b + i) * OP_PAGE] = q[i];
        }
        *v_scale = job->kernels->quantise(value + b, v + b, n);

        k_scale += OP_PAGE;
        v_scale += OP_PAGE;
    }
}


/* One token's k and v into slot pos % 16 of its page. */
static void
store_kv(const rope_job_t *job, uint8_t *page, int slot, const float *k,
         const float *v)
{
    for (int h = 0; h < job->attn->n_kv_heads; h++) {
        if (job->layout.dtype == OP_Q8_0) {
            store_bytes(job, page, slot, k, v);
        } else {
            store_halves(job, page, slot, k, v);
        }

        page += job->layout.head_bytes;
        k += job->attn->head_dim;
        v += job->attn->head_dim;
    }
}


static void
rope_rows(void *arg, int thread, int n_threads)
{
    const rope_job_t *job = arg;
    const op_batch_t *batch = job->batch;
    const op_attn_t *attn = job->attn;
    const size_t stride =
        (size_t) (attn->n_heads + 2 * attn->n_kv_heads) * attn->head_dim;
    int from, to, seq = 0;

    cpu_pool_share(batch->n_rows, 1, thread, n_threads, &from, &to);
    for (int r = from; r < to; r++) {
        const int pos = batch->pos[r];
        float *q = job->qkv + r * stride;
        float *k = q + (size_t) attn->n_heads * attn->head_dim;

        while (r >= batch->row_start[seq + 1]) {
            seq++;
        }

        /* q and k heads are side by side and turn by the same angles */
        job->kernels->rope(q, attn->n_heads + attn->n_kv_heads, attn->head_dim,
                           job->cos_sin + (size_t) pos * job->rot, job->rot,
                           job->mode);
        store_kv(job,
                 job->pages
                     + batch->block_table[seq][pos / OP_PAGE]
                           * job->layout.page_bytes,
                 pos % OP_PAGE, k,
                 k + (size_t) attn->n_kv_heads * attn->head_dim);
    }
}


void
cpu_rope_kv(op_dev_t *dev, float *qkv, const op_batch_t *batch,
            const op_attn_t *attn, const float *cos_sin, int rot, int mode,
            const op_kv_t *kv, int layer)
{
    rope_job_t job = {
        .kernels = kernels_of(dev->isa),
        .qkv = qkv,
        .batch = batch,
        .attn = attn,
        .cos_sin = cos_sin,
        .rot = rot,
        .mode = mode,
        .layout = cpu_kv_layout(kv->dtype, kv->n_kv_heads, kv->head_dim),
    };

    job.pages = cpu_kv_layer(kv, &job.layout, layer);

    run_rows(dev, rope_rows, &job,
             (size_t) batch->n_rows * (attn->n_heads + 2 * attn->n_kv_heads)
                 * attn->head_dim);
}
