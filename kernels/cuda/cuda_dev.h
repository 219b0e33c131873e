/*
 * The opened CUDA device: its stream, its scratch, the step it is in, and what
 * went wrong.  One thread uses it at a time; see cuda_enter().
 */

#ifndef KERNELS_CUDA_CUDA_DEV_H
#define KERNELS_CUDA_CUDA_DEV_H

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cuda_linear.h"

extern "C" {

enum {
    /* steps that may wait for the device before the host does: one that runs,
     * what was found to be missing from it, the one behind it */
    CUDA_TURNS = 3,
    CUDA_TURNS_MAX = 32
};

/* Values that the host has for the device: written into pinned memory, copied
 * when the stream gets there.  The host's side has several places, which take
 * turns; `sent` says when one may be written again. */
typedef struct {
    uint8_t *host; /* in this turn */
    uint8_t *device;
    size_t bytes;
    int n_turns;
    int turn;
    uint8_t *pinned; /* [n_turns][bytes] */
    cudaEvent_t sent[CUDA_TURNS_MAX];
} cuda_stage_t;

typedef struct cuda_blas_s cuda_blas_t;

/* A pass that was recorded, or seen once (exec NULL), see cuda_graph.cu. */
typedef struct {
    const void *model;
    op_kv_t kv;
    int rows; /* with padding */
    int len;  /* that attention is laid out for */
    uint64_t used;
    cudaGraphExec_t exec;
    int n_kernels;
} cuda_graph_t;

enum {
    CUDA_GRAPHS = 64,          /* that are kept */
    CUDA_GRAPH_NODES = 1 << 13 /* more are not counted */
};

typedef struct {
    bool off; /* not wanted, or refused */
    int n;
    cuda_graph_t all[CUDA_GRAPHS];
    cuda_graph_t *current; /* being recorded */
    uint64_t clock;
    uint64_t n_recorded;
    uint64_t n_replays;
    uint64_t n_saved;                        /* launches that were a graph's */
    cudaGraphNode_t nodes[CUDA_GRAPH_NODES]; /* scratch */
} cuda_graphs_t;

enum { CUDA_DRAWS = 64 }; /* calls of draw() that are told apart */

/* What draw() takes, see cuda_draw.cu. */
typedef struct {
    op_draw_limits_t limits;
    cuda_stage_t stage; /* draws, then adjustments */
    float *was;         /* [max_adjusts] */
    op_drawn_t *drawn;  /* [max_places] */
    op_drawn_t *host;   /* the same, pinned */
    uint8_t *call;      /* [max_places] which call's results these are */
    unsigned n_calls;
    cudaEvent_t there[CUDA_DRAWS]; /* the results of call n, or of n plus a
                                      multiple of this number */
} cuda_draw_t;

struct op_dev_s {
    int id;
    cudaStream_t stream;
    int max_smem;        /* shared memory that a thread block may ask for */
    int max_blocks;      /* thread blocks worth having: a few a processor */
    bool tensor_floats;  /* it multiplies TF32 matrices */
    bool beside;         /* another one uses the same GPU, see op_open_t */
    int n_segments;      /* of its weights */
    const char *lacking; /* what there was not enough of, the last time */
    char describe[320];
    op_limits_t limits; /* all 0 before prepare() */

    /* the first error, and whether there was one: then ops do nothing */
    char error[200];
    bool failed;

    /* the step, and where the host has it */
    cuda_batch_t batch;
    const int32_t *host_tokens;
    const int32_t *host_out_rows;
    cuda_stage_t step_stage;
    cuda_stage_t index_stage; /* indices that are not the step's */

    cuda_act_t act; /* quantised activations */
    size_t act_q_bytes;
    size_t act_ds_bytes;
    void *attn_scratch;
    size_t attn_bytes;
    unsigned *attn_arrived;
    size_t attn_arrived_bytes;
    bool loose;        /* cuBLAS is wanted, but not yet looked for */
    cuda_blas_t *blas; /* NULL: not wanted, or not there */

    cuda_draw_t draw;
    cuda_graphs_t graphs;
    char told[480]; /* what describe() gives */
};


/* --- cuda_memory.cu --- */

/* From here on the calling thread speaks to this device: each thread has a
 * current one, and the device before may have been another engine's.  Called
 * by the ops that reserve, move and free memory and that begin something, a
 * step or a pass; the ops of a step follow on the same thread.  False: the
 * device has failed. */
bool cuda_enter(op_dev_t *dev);

/* Device memory, zeroed, and memory of the host that copies do not wait for.
 * NULL: there is none left, or the device has failed; cuda_lacks() says so. */
void *cuda_alloc(op_dev_t *dev, size_t bytes);
void *cuda_alloc_host(op_dev_t *dev, size_t bytes);

/* An event without time; false: the device has failed. */
bool cuda_event(op_dev_t *dev, cudaEvent_t *event);

/* Why something was not to be had: the device's error, or what is lacking, and
 * for what. */
void cuda_lacks(const op_dev_t *dev, op_err_t *err, const char *what, ...)
    __attribute__((format(printf, 3, 4)));

void cuda_free(op_dev_t *dev, void *p, size_t bytes);
void cuda_put(op_dev_t *dev, void *to, const void *from, size_t bytes);
void cuda_get(op_dev_t *dev, void *to, const void *from, size_t bytes);

/* True if nothing is wrong.  The first error is kept: what was asked for, and
 * what the runtime says. */
bool cuda_ok(op_dev_t *dev, cudaError_t error, const char *what);

/* op.h: check(), memory(). */
int cuda_check(op_dev_t *dev, op_err_t *err);
op_memory_t cuda_memory(op_dev_t *dev);

/* --- cuda_step.cu --- */

/* 0, or -1: no memory, as cuda_alloc(). */
int cuda_stage_create(op_dev_t *dev, cuda_stage_t *stage, size_t bytes,
                      int n_turns);
void cuda_stage_destroy(op_dev_t *dev, cuda_stage_t *stage);

/* The next turn: stage->host may be written. */
bool cuda_stage_take(op_dev_t *dev, cuda_stage_t *stage);

/* Sends the first bytes of the stage. */
bool cuda_stage_send(op_dev_t *dev, cuda_stage_t *stage, size_t bytes);

/* What a step may need at most. */
size_t cuda_step_bytes(const op_limits_t *limits);
size_t cuda_index_bytes(const op_limits_t *limits);
void cuda_step(op_dev_t *dev, const op_batch_t *batch);

/* A step of n_seqs sequences of one row each, with rows that are nobody's up to
 * `rows`, laid out for sequences of `len`; given: the batch with them, which
 * has no block tables. */
void cuda_step_padded(op_dev_t *dev, const op_batch_t *batch, int rows, int len,
                      op_batch_t *given);

/* n indices of the host on the device, until the next call; the step's own
 * where they are the step's.  Room for more than a step has is taken when it
 * is needed.  NULL after an error. */
const int32_t *cuda_indices(op_dev_t *dev, const int32_t *idx, int n);

/* --- cuda_graph.cu --- */

/* op.h: pass(). */
bool cuda_pass(op_dev_t *dev, op_pass_t *pass);

/* Forgets what was recorded: memory that it may use goes. */
void cuda_graphs_drop(op_dev_t *dev);

/* Bytes that recordings will take of the device. */
size_t cuda_graphs_later(const op_dev_t *dev);


/* --- cuda_draw.cu --- */

/* op.h: draw_prepare(), draw(), drawn().  Free: what was prepared. */
int cuda_draw_prepare(op_dev_t *dev, const op_draw_limits_t *limits,
                      op_err_t *err);
void cuda_draw(op_dev_t *dev, const op_draw_job_t *job);
void cuda_drawn(op_dev_t *dev, op_drawn_t *results, int first, int n);
void cuda_draw_free(op_dev_t *dev);


/* --- cuda_open.cu --- */

op_dev_t *cuda_open(const op_open_t *params, op_err_t *err);
void cuda_close(op_dev_t *dev);

/* Frees what prepare() reserved. */
void cuda_unprepare(op_dev_t *dev);

/* --- cuda_cublas.cu --- */

/* Opens the library if it is wanted and there, which dev->describe says then,
 * and reserves what a step needs.  0, or -1: no memory for that.  Later: bytes
 * that the library takes of its own accord. */
void cuda_blas_close(op_dev_t *dev);
int cuda_blas_prepare(op_dev_t *dev, const op_limits_t *limits);
size_t cuda_blas_later(const op_dev_t *dev);

/* A float segment's product: whether it is cuBLAS's; its inputs as the weights
 * are, for all segments of one type; the product, whose error is kept. */
bool cuda_blas_fits(const op_dev_t *dev, const cuda_dot_t *dot);
void cuda_blas_narrow(op_dev_t *dev, const cuda_dot_t *dot);
void cuda_blas_gemm(op_dev_t *dev, const cuda_dot_t *dot);

} /* extern "C" */

#endif /* KERNELS_CUDA_CUDA_DEV_H */
