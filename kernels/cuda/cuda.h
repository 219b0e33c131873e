/*
 * What the files of the CUDA backend share: the step's batch on the device,
 * and the launchers of the kernels.
 *
 * cuda.cu owns the device and the op table and calls the launchers; nobody
 * outside this folder includes this file (cuda_ops.h is for them).  A launcher
 * takes device pointers, sizes that the host knows, and a stream; it returns
 * nothing, for the runtime keeps the error until cuda.cu asks for it.
 *
 * All files here are compiled twice: by nvcc, and by g++ over an emulated
 * runtime (LLM_CUDA_EMU).  Only prim*.cuh know the difference.
 */

#ifndef KERNELS_CUDA_CUDA_H
#define KERNELS_CUDA_CUDA_H

#include "kernels/cuda/prim.cuh"

extern "C" {

#include "kernels/op/op.h"

/* op_batch_t on the device.  The arrays are device memory, valid for the step;
 * the numbers are for the host, which chooses grids by them. */
typedef struct {
    int n_rows;
    int n_seqs;
    int n_out;
    int table_width;          /* pages in a row of tables */
    const int32_t *tokens;    /* [n_rows] */
    const int32_t *pos;       /* [n_rows]; −1: padding, which is nobody's */
    const int32_t *seq;       /* [n_rows] row → sequence */
    const int32_t *row_start; /* [n_seqs + 1] */
    const int32_t *tables;    /* [n_seqs][table_width]; what lies behind a
                                 sequence's last page is 0 */
    const int32_t *out_rows;  /* [n_out] */
    int max_len;              /* longest sequence: its last position + 1 */
    int max_seq_rows;         /* most rows that one sequence has */
} cuda_batch_t;

/* What the launchers over the KV pool have in common. */
typedef struct {
    const cuda_batch_t *batch;
    const op_attn_t *attn;
    const op_kv_t *kv; /* base is device memory */
    int layer;
    void *scratch; /* cuda_attn_scratch_bytes(), 256-byte aligned; one stream
                      uses it, one launch after the other */
    size_t scratch_bytes;
    unsigned *arrived; /* cuda_attn_arrived_bytes(), zeroed once; as scratch */
    cudaStream_t stream;
    int window;    /* positions that a row sees, its own among them; 0: all */
    float softcap; /* scores become softcap * tanh(score / softcap); 0: none */
} cuda_attn_call_t;


/* --- cuda_attn.cu --- */

/* 0, or -1 with err: a head size or a grouping that no kernel is for. */
int cuda_attn_check(const op_limits_t *limits, op_err_t *err);

/* Bytes of scratch for any batch within limits. */
size_t cuda_attn_scratch_bytes(const op_limits_t *limits);

/* Bytes of its counters. */
size_t cuda_attn_arrived_bytes(const op_limits_t *limits);

/* op.h: attention().  out: [n_rows, n_heads * head_dim]; q: what rope_kv
 * left. */
void cuda_attention_launch(const cuda_attn_call_t *call, float *out,
                           const float *q);

/* --- cuda_kv.cu --- */

/* op.h: kv_page_bytes(). */
size_t cuda_kv_bytes(int dtype, int n_layers, int n_kv_heads, int head_dim);

/* op.h: rope_kv().  qkv and cos_sin are device memory. */
void cuda_rope_kv_launch(const cuda_attn_call_t *call, float *qkv,
                         const float *cos_sin, int rot, int mode);

/* op.h: kv_copy(), n ≥ 1.  copies: device memory. */
void cuda_kv_copy_launch(const op_kv_t *kv, const op_copy_t *copies, int n,
                         cudaStream_t stream);

} /* extern "C" */

#endif /* KERNELS_CUDA_CUDA_H */
