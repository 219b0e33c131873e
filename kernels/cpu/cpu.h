/*
 * What the files of the CPU backend share: the opened device and the ops
 * themselves.
 *
 * cpu.c owns the device and the op table, cpu_weight.c the weights;
 * cpu_linear.c, cpu_point.c and cpu_attn.c hold the ops.  Each op chooses its
 * kernel by dev->isa; all kernels of an op give the same bits.
 */

#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/cpu_pool.h"
#include "kernels/op/op.h"

/* Bounds buffers on the stack of the attention and RoPE kernels. */
enum { CPU_MAX_HEAD_DIM = 512 };

/* Memory of weights. */
typedef struct cpu_arena_s cpu_arena_t;

struct op_dev_s {
    cpu_pool_t *pool;
    int borrows_pool; /* op_open_t's beside */
    int isa;
    op_limits_t limits;
    char describe[128];

    /* Each op family's own scratch, sized by its _prepare(), which is given
     * the old one to replace; freed by its _fini(). */
    void *linear_scratch;
    void *attn_scratch;

    cpu_arena_t *weight_arenas;
};


/* --- cpu.c --- */

/* Zeroed, 64-byte aligned, huge pages when large; NULL: no memory. */
void *cpu_alloc(op_dev_t *dev, size_t bytes);
void cpu_free(op_dev_t *dev, void *p, size_t bytes);

extern const op_table_t cpu_ops;

/* --- cpu_linear.c --- */

/* The scratch of linear(): quantised activations.  0, or -1: no memory. */
int cpu_linear_prepare(op_dev_t *dev, const op_limits_t *limits);
void cpu_linear_fini(op_dev_t *dev);

void cpu_linear(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
                const op_weight_t *w, int mode);

/* --- cpu_weight.c --- */

/* Frees the memory of all weights. */
void cpu_weight_fini(op_dev_t *dev);

op_weight_t *cpu_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts,
                        op_err_t *err);
void cpu_weight_free(op_dev_t *dev, op_weight_t *weight);
size_t cpu_weight_bytes(const op_weight_t *weight);
const char *cpu_weight_form(const op_dev_t *dev);
const void *cpu_weight_data(const op_weight_t *weight);
op_weight_t *cpu_weight_over(op_dev_t *dev, const op_tensor_t *parts,
                             int n_parts, const op_bytes_t *data,
                             op_err_t *err);

void cpu_embed(op_dev_t *dev, float *x, const op_weight_t *w,
               const int32_t *tokens, int rows);
/* --- cpu_attn.c --- */

/* The scratch of attention().  0, or -1: no memory. */
int cpu_attn_prepare(op_dev_t *dev, const op_limits_t *limits);
void cpu_attn_fini(op_dev_t *dev);

void cpu_attention(op_dev_t *dev, float *out, const float *q,
                   const op_batch_t *batch, const op_attn_t *attn,
                   const op_kv_t *kv, int layer);

/* --- cpu_kv.c --- */

size_t cpu_kv_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                         int head_dim);
void cpu_kv_copy(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies,
                 int n);

/* --- cpu_point.c --- */

void cpu_rmsnorm(op_dev_t *dev, float *y, const float *x, const float *w,
                 int rows, int dim, float eps);
void cpu_gather(op_dev_t *dev, float *y, const float *x, const int32_t *idx,
                int n, int dim);
void cpu_silu_mul(op_dev_t *dev, float *y, const float *gate_up, int rows,
                  int dim);
void cpu_rope_kv(op_dev_t *dev, float *qkv, const op_batch_t *batch,
                 const op_attn_t *attn, const float *cos_sin, int rot, int mode,
                 const op_kv_t *kv, int layer);

#endif /* KERNELS_CPU_CPU_H */
