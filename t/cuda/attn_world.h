/*
 * The kernels of attention and of the KV pool without the rest of the backend:
 * a pool, sequences whose inputs depend on their place only (world_value() of
 * t/ops/lib/attn_world.h), and steps that feed them in any batches.
 *
 * A pool starts full of NaN and Inf, and pages are handed out in random order.
 */

#ifndef T_CUDA_ATTN_WORLD_H
#define T_CUDA_ATTN_WORLD_H

#include "kernels/cuda/cuda_kv.h"

extern "C" {
#include "t/ops/lib/attn_world.h"
}

typedef struct {
    op_attn_t attn;
    op_kv_t kv; /* base is device memory */
    size_t kv_bytes;
    int window;
    float softcap;
    int max_len;
    int width;  /* floats of a row of out */
    int stride; /* floats of a row of qkv */
    int n_free;
    int32_t *free_pages;
    int32_t *table[WORLD_SEQS];
    int len[WORLD_SEQS]; /* positions fed */
    float *out[WORLD_SEQS];
    float *cos_sin; /* device memory */
    void *scratch;  /* device memory */
    size_t scratch_bytes;
    unsigned *arrived;
    cudaStream_t stream;
} gpu_world_t;

/* A step's rows; arrays are the host's. */
typedef struct {
    int n_rows;
    int n_seqs;
    const int32_t *pos;
    const int32_t *row_start;
    const int32_t *const *tables;
} gpu_rows_t;

/* The emulation's schedule from now on (LLM_SHIM_SEED); returns the one before.
 * A GPU has its own. */
uint64_t gpu_schedule(uint64_t seed);

/* Dies unless CUDA says yes. */
void gpu_must(cudaError_t result);

/* Device memory with these bytes; NULL: as it is. */
void *gpu_take(size_t bytes, const void *from);
void gpu_give(void *p);

/* bytes of the host's memory */
void *gpu_read(const void *from, size_t bytes);

void gpu_open(gpu_world_t *w, const world_shape_t *shape, int max_len);
void gpu_close(gpu_world_t *w);

/* rope_kv() in place unless rot is negative, then attention() to out unless
 * that is NULL; qkv and out are the host's. */
void gpu_run(gpu_world_t *w, const gpu_rows_t *rows, float *qkv, float *out,
             int rot, int mode);

/* As their twins of attn_world.h. */
float *gpu_qkv(const gpu_world_t *w, int seq, int pos, float *to);
void gpu_feed(gpu_world_t *w, const world_chunk_t *chunks, int n_chunks);
void gpu_feed_randomly(gpu_world_t *w, const int *len, int n_seqs, int largest);
void gpu_fill(gpu_world_t *w, int len);
void gpu_assert_same(const gpu_world_t *a, const gpu_world_t *b, int n_seqs,
                     const char *what);

/* 0 … n − 1 */
int gpu_below(int n);

#endif /* T_CUDA_ATTN_WORLD_H */
