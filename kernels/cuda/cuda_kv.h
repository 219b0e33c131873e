/*
 * Where K and V lie in a page of the KV pool on the GPU.
 *
 * The pool is [layer][page][KV head], and each of these records holds 16
 * tokens: rows [16][dim] of K, then of V.  dim is head_dim rounded up to a
 * size that attention is compiled for, what is added is 0.  As q8_0 the scales
 * come first, f16, [blocks of 32 of dim][16] for K, likewise for V; the rows
 * are bytes, in an order in which a lane of mma.sync finds what it needs in
 * one load.  Records are multiples of 64 bytes.
 *
 * cuda_kv.cu writes by it, cuda_attn.cu reads by it.
 */

#ifndef KERNELS_CUDA_CUDA_KV_H
#define KERNELS_CUDA_CUDA_KV_H

#include "kernels/cuda/cuda.h"

enum { CUDA_KV_GROUP = 64 }; /* bytes of a q8_0 row that are reordered */
enum { WARP_SIZE = 32 };

/* Offsets in bytes. */
typedef struct {
    int dim;
    int size; /* bytes of a value: 2 or 1 */
    size_t v; /* K's rows are at k */
    size_t k;
    size_t k_scales; /* of q8_0 */
    size_t v_scales;
    size_t head_bytes; /* of a record */
    size_t page_bytes; /* of one layer */
} cuda_kv_layout_t;


/* --- a warp --- */

static __device__ __forceinline__ int
lane_id(void)
{
    return (int) threadIdx.x % WARP_SIZE;
}


static __device__ __forceinline__ bool
warp_any(bool x)
{
    return __any_sync(FULL_MASK, x) != 0;
}


/* --- the layout --- */

/* The compiled size that holds head_dim; 0: there is none. */
static inline int
cuda_kv_dim(int head_dim)
{
    const int dims[] = { 32, 64, 80, 96, 128, 256 };
    const int n = sizeof(dims) / sizeof(dims[0]);

    for (int i = 0; i < n && head_dim > 0; i++) {
        if (head_dim <= dims[i]) {
            return dims[i];
        }
    }
    return 0;
}


static inline cuda_kv_layout_t
cuda_kv_layout(int dtype, int n_kv_heads, int head_dim)
{
    const int dim = cuda_kv_dim(head_dim);
    const size_t scales = dtype == OP_Q8_0
                              ? (size_t) (dim + OP_KV_BLOCK - 1) / OP_KV_BLOCK
                                    * OP_PAGE * sizeof(uint16_t)
                              : 0;
    cuda_kv_layout_t layout = {};

    layout.dim = dim;
    layout.size = dtype == OP_Q8_0 ? 1 : 2;
    layout.v_scales = scales;
    layout.k = 2 * scales;
    layout.v = layout.k + (size_t) OP_PAGE * dim * layout.size;
    layout.head_bytes = layout.v + (size_t) OP_PAGE * dim * layout.size;
    layout.page_bytes = layout.head_bytes * (size_t) n_kv_heads;
    return layout;
}


/* The byte of a q8_0 row of K where value d is: in each whole group of 64,
 * lane t = 0 … 3 has 8 t … 8 t + 7 of the first block of 32, then of the
 * second. */
static inline __host__ __device__ int
cuda_kv_key_byte(int d, int dim)
{
    const int first = d / CUDA_KV_GROUP * CUDA_KV_GROUP;

    if (first + CUDA_KV_GROUP > dim) {
        return d;
    }
    return first + d % 32 / 8 * 16 + d / 32 % 2 * 8 + d % 8;
}


/* The same of V: lane g = 0 … 7 has 4 g … 4 g + 3 of each block. */
static inline __host__ __device__ int
cuda_kv_value_byte(int d, int dim)
{
    const int first = d / CUDA_KV_GROUP * CUDA_KV_GROUP;

    if (first + CUDA_KV_GROUP > dim) {
        return d;
    }
    return first + d % 32 / 4 * 8 + d / 32 % 2 * 4 + d % 4;
}

#endif /* KERNELS_CUDA_CUDA_KV_H */
