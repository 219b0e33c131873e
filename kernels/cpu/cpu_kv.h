/*
 * Where K and V lie in a page of the KV pool.
 *
 * The pool is [layer][page][KV head], and each of these records holds 16
 * tokens: K is [head_dim][16], so that 16 tokens' scores are one 512-bit
 * register, V is [16][head_dim].  As f16 that is all, K before V.  As q8_0
 * the scales come first, f16, [blocks of 32 of head_dim][16] for K, likewise
 * for V; then K and V in bytes.  Every record is a multiple of 64 bytes.
 */

#ifndef KERNELS_CPU_CPU_KV_H
#define KERNELS_CPU_CPU_KV_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/op/op.h"

/* Offsets in bytes. */
typedef struct {
    op_dtype_t dtype;
    size_t k;
    size_t v;
    size_t k_scales; /* of q8_0 */
    size_t v_scales;
    size_t head_bytes; /* of a record */
    size_t page_bytes; /* of one layer */
} cpu_kv_layout_t;


cpu_kv_layout_t cpu_kv_layout(int dtype, int n_kv_heads, int head_dim);

/* The first page of a layer. */
uint8_t *cpu_kv_layer(const op_kv_t *kv, const cpu_kv_layout_t *layout,
                      int layer);

#endif /* KERNELS_CPU_CPU_KV_H */
