/*
 * The layout of KV pages; see cpu_kv.h.  rope_kv() writes by it, attention()
 * reads by it, kv_copy() moves whole records.
 */

#include "kernels/cpu/cpu_kv.h"

#include <string.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const op_kv_t *kv;
    const op_copy_t *copies;
    int n;
} copy_job_t;


cpu_kv_layout_t
cpu_kv_layout(int dtype, int n_kv_heads, int head_dim)
{
    const size_t n = (size_t) OP_PAGE * head_dim;
    cpu_kv_layout_t layout = { .dtype = OP_F16 };

    if (dtype == OP_Q8_0) {
        const size_t blocks =
            ((size_t) head_dim + OP_KV_BLOCK - 1) / OP_KV_BLOCK;
        const size_t scales = blocks * OP_PAGE * sizeof(uint16_t);

        layout.dtype = OP_Q8_0;
        layout.v_scales = scales;
        layout.k = 2 * scales;
        layout.v = layout.k + n;
        layout.head_bytes = layout.v + n;

    } else {
        layout.v = n * sizeof(uint16_t);
        layout.head_bytes = 2 * layout.v;
    }

    layout.page_bytes = layout.head_bytes * (size_t) n_kv_heads;
    return layout;
}


uint8_t *
cpu_kv_layer(const op_kv_t *kv, const cpu_kv_layout_t *layout, int layer)
{
    return (uint8_t *) kv->base
           + (size_t) layer * (size_t) kv->n_pages * layout->page_bytes;
}


size_t
cpu_kv_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                  int head_dim)
{
    (void) dev;

    if (dtype != OP_F16 && dtype != OP_Q8_0) {
        return 0;
    }

    return cpu_kv_layout(dtype, n_kv_heads, head_dim).page_bytes
           * (size_t) n_layers;
}


/* Layers are independent, so the order of copies holds within each. */
static void
copy_run(void *arg, int thread, int n_threads)
{
    const copy_job_t *job = arg;
    const op_kv_t *kv = job->kv;
    const cpu_kv_layout_t layout =
        cpu_kv_layout((int) kv->dtype, kv->n_kv_heads, kv->head_dim);
    const size_t bytes = layout.page_bytes;
    int from, to;

    cpu_pool_share(kv->n_layers, 1, thread, n_threads, &from, &to);

    for (int l = from; l < to; l++) {
        uint8_t *pages = cpu_kv_layer(kv, &layout, l);

        for (int i = 0; i < job->n; i++) {
            memmove(pages + (size_t) job->copies[i].to * bytes,
                    pages + (size_t) job->copies[i].from * bytes, bytes);
        }
    }
}


void
cpu_kv_copy(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies, int n)
{
    copy_job_t job = { kv, copies, n };

    if (n > 0) {
        cpu_pool_run(dev->pool, copy_run, &job);
    }
}
