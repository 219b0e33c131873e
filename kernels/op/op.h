/*
 * The interface of the number crunching: one table of functions per backend.
 *
 * Model code is written once, over this table.  `ref` is the slow and obvious
 * oracle, `cpu` and `cuda` are the products.  Buffers of activations come from
 * alloc() and belong to the caller; a backend keeps its scratch to itself,
 * sized by prepare(), and allocates nothing inside an op.
 *
 * Where a device has memory of its own, the buffers and the pages that ops
 * are given lie there, and only put() and get() carry values between it and
 * the host; batches, tokens and other indices are always the host's.  Its ops
 * return before they are done; they are done one after the other.
 *
 * Exactness (architecture.md): every output row is reduced in one fixed
 * order, whatever the number of rows, the threads, the instruction set or the
 * other rows in the batch.  So an op's result for a row depends on that row's
 * inputs and its sequence's pages only.
 *
 * All matrices are row-major.  A "row" is one token of the batch.
 */

#ifndef KERNELS_OP_OP_H
#define KERNELS_OP_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/op/tensor.h"

enum { OP_PAGE = 16 };     /* tokens in a KV page */
enum { OP_SPLIT = 256 };   /* tokens in an attention split, see attention() */
enum { OP_KV_BLOCK = 32 }; /* values under one scale of a q8_0 cache */

typedef struct op_dev_s op_dev_t;       /* an opened backend */
typedef struct op_weight_s op_weight_t; /* a repacked weight matrix */

typedef struct {
    char text[256]; /* one sentence */
} op_err_t;

/* Borrowed memory. */
typedef struct {
    const void *data;
    size_t len;
} op_bytes_t;

typedef struct {
    int threads;     /* 0: as many as the process may use, less reserved */
    const char *isa; /* NULL: the best; baseline, avx2, avx512, amx */
    int reserved;    /* CPUs that are left to others */
    bool pinned;     /* a CPU for each thread, where all but those reserved
                        are ours */
    bool no_graphs;  /* passes are not recorded, see pass() */
    int device;      /* which of several, from 0; -1: the one with most room */
    bool loose;      /* linear() of float weights may be faster and less exact:
                        its bits may depend on the number of rows, and inputs
                        be rounded to the weights' type.  Most backends have no
                        use for it. */

    /* NULL, or an open device of the same backend whose processor (threads)
     * this one uses, too: they never run at once, and this one is closed
     * first.  threads and isa are then those of it. */
    op_dev_t *beside;
} op_open_t;

/* Memory of a device, bytes. */
typedef struct {
    size_t total;
    size_t free;
    size_t later; /* of free: what it takes for itself once it works (code of
                     kernels, recorded passes), whatever it is asked for */
} op_memory_t;

/* Upper bounds of all later calls; fixes the scratch. */
typedef struct {
    int max_rows; /* tokens in one step */
    int max_seqs; /* sequences in one step */
    int max_len;  /* longest sequence, tokens */
    int max_in;   /* widest input of a linear() */
    int n_heads;
    int n_kv_heads;
    int head_dim;
} op_limits_t;

/* The KV pool.  Page p of layer l holds K and V of 16 consecutive positions of
 * one sequence for all KV heads, in a layout of the backend's own.
 *
 * K and V are rounded to the pool's type when they are written, and whatever
 * reads them reads that, even inside the same chunk.  OP_F16: to nearest even.
 * OP_Q8_0: per position, KV head and block of 32 of head_dim (the last may be
 * shorter) d = max|x| / 127, rounded to f16, and q = x / d, rounded to even and
 * kept within ±127, or 0 where d is 0; K or V is then q * d, which is exact in
 * f32.  A block with a NaN or Inf, or whose d is beyond f16, is all NaN. */
typedef struct {
    void *base; /* from alloc(), n_pages * kv_page_bytes() */
    int n_pages;
    int n_layers;
    int n_kv_heads;
    int head_dim;
    op_dtype_t dtype; /* OP_F16 or OP_Q8_0 */
} op_kv_t;

/* A page whose content goes into another one. */
typedef struct {
    int32_t from;
    int32_t to;
} op_copy_t;

/* What one forward pass is told. */
typedef struct {
    int n_rows;
    int n_seqs;
    const int32_t *tokens;    /* [n_rows]; −1 − p: what draw() leaves
                                 at place p, where the backend draws */
    const int32_t *pos;       /* [n_rows] position in its sequence */
    const int32_t *row_start; /* [n_seqs + 1]: sequence s has the rows
                                 row_start[s] … row_start[s + 1] − 1, at
                                 consecutive positions */
    const int32_t *const *block_table; /* [n_seqs]: block_table[s][i] is the
                                          page of positions 16 i … 16 i + 15 */
    int n_out;
    const int32_t *out_rows; /* [n_out] ascending: rows that want logits */
} op_batch_t;

/* A forward pass that the backend may record.  phase is the backend's, 0 at
 * first. */
typedef struct {
    const void *model; /* whose: the ops between two calls of pass() follow
                          from this, the pool and the batch */
    const op_kv_t *kv;
    const op_batch_t *batch;
    op_batch_t given; /* what the ops are to be given in place of batch: it may
                         have more rows, and no block tables */
    int phase;
} op_pass_t;

typedef struct {
    int n_heads;
    int n_kv_heads; /* divides n_heads */
    int head_dim;   /* even */
    float scale;    /* of q·k, usually 1/sqrt(head_dim) */
} op_attn_t;

enum {
    OP_ROPE_PAIRS = 0, /* rotate (2i, 2i + 1): GGUF's llama order */
    OP_ROPE_HALVES = 1 /* rotate (i, i + rot/2): NeoX order */
};

/* What is wanted of a row of logits. */
enum { OP_SCORE = 0, OP_DRAW = 1 };

enum {
    OP_VOCAB_MAX = 1 << 19, /* of draw(): sums of weights are exact up to it */
    OP_TOP_MAX = 20,
    OP_BIAS_MAX = 1024
};

/* A token whose logit is changed before one is drawn. */
typedef struct {
    int32_t token;
    float value;
} op_adjust_t;

typedef struct {
    int32_t row; /* of the logits */
    int32_t kind;
    int32_t token; /* OP_SCORE: whose log-probability */
    int32_t n_top; /* −1: no log-probabilities; 0 … OP_TOP_MAX best ones */
    int32_t top_k; /* ≤ 0: all */
    float top_p;   /* ≥ 1: all */
    float temperature; /* not above 0: the largest logit */
    float depth; /* times temperature below the largest logit: nothing below
                    that is drawn; −25 … 0 */
    float u;     /* in [0, 1): where in the sum of weights */
    float repetition;
    float presence;
    float frequency;

    /* In the list of adjustments from `adjusts` on, one run after another.
     * Tokens outside the vocabulary are passed over. */
    int32_t adjusts;
    int32_t n_bias;   /* ≤ OP_BIAS_MAX: value is added */
    int32_t n_masked; /* −∞; no value */
    int32_t n_seen;   /* different tokens; value: times in the output */
} op_draw_t;

typedef struct {
    int32_t token;
    float logprob; /* NaN: not asked for, or a token that is not there */
    int32_t n_top; /* fewer than asked for if fewer tokens are above −∞ */
    op_adjust_t top[OP_TOP_MAX]; /* best first, ties lowest id first; values:
                                    log-probabilities */
} op_drawn_t;

/* Upper bounds of all later calls of draw(). */
typedef struct {
    int n_vocab;    /* ≤ OP_VOCAB_MAX */
    int max_rows;   /* of one call */
    int max_places; /* for results, ≥ max_rows */
    int max_adjusts;
} op_draw_limits_t;

typedef struct {
    float *logits; /* [rows][n_vocab] */
    const op_draw_t *draws;
    int n;
    const op_adjust_t *adjusts; /* the host's, as draws are */
    int n_adjusts;
    int first; /* results go to the places first … first + n − 1 */
} op_draw_job_t;

/* Share t of n_shares of a job. */
typedef void (*op_share_fn)(void *arg, int share, int n_shares);

/* Modes of linear(); OP_FINE may be added to either. */
enum { OP_SET = 0, OP_ADD = 1, OP_FINE = 2 };

/* OP_FINE: of a row's largest scale, from where on a block is done finely. */
#define OP_FINE_SCALE 0.2f

/* What a product reads, see linear_of(). */
enum { OP_PLAIN = 0, OP_NORMED = 1, OP_GATED = 2 };

typedef struct {
    int kind;
    int dim;           /* n_in of the product */
    const float *x;    /* [rows, dim]; OP_GATED: [rows, 2 dim], gate first */
    const float *norm; /* OP_NORMED: [dim] */
    float eps;
    float *scratch; /* [rows, dim], what it holds afterwards is not said; not
                       for OP_PLAIN */
} op_input_t;

typedef struct {
    const char *name;

    /* --- device --- */

    /* NULL and a sentence in err on failure. */
    op_dev_t *(*open)(const op_open_t *params, op_err_t *err);
    void (*close)(op_dev_t *dev);

    /* "avx512vnni, 2 threads", static or owned by dev. */
    const char *(*describe)(op_dev_t *dev);

    /* 0, or -1 with err (no memory, an unsupported shape). */
    int (*prepare)(op_dev_t *dev, const op_limits_t *limits, op_err_t *err);

    /* Zeroed, 64-byte aligned, huge pages where they help; NULL: no memory. */
    void *(*alloc)(op_dev_t *dev, size_t bytes);
    void (*free)(op_dev_t *dev, void *p, size_t bytes);

    /* Threads on this machine's processors that parallel() would use, and the
     * caller is one of them.  parallel: calls fn once for each of as many
     * shares and returns when all are done; a thread may do several, one after
     * another, so a share must not wait for another one.  For the caller's own
     * work between two ops.  NULL: the backend has no such threads. */
    int (*threads)(const op_dev_t *dev);
    void (*parallel)(op_dev_t *dev, op_share_fn fn, void *arg);

    /* True: alloc() gives memory of the host's, which it may read and write
     * itself, between any two ops. */
    bool host;

    /* What the device has; all zero where its memory is the host's. */
    op_memory_t (*memory)(op_dev_t *dev);

    /* The host's values into memory of alloc(), and back; in order with the
     * ops.  get() waits for all that was asked for before. */
    void (*put)(op_dev_t *dev, void *to, const void *from, size_t bytes);
    void (*get)(op_dev_t *dev, void *to, const void *from, size_t bytes);

    /* A step begins: until the next one, ops that take a batch are given this
     * one, and its arrays stay as they are. */
    void (*step)(op_dev_t *dev, const op_batch_t *batch);

    /* In place of step(), for a whole pass:
     *     while (pass(dev, &p)) { every op of the pass, over p.given }
     * The ops may be called once, twice, or not at all, where the backend has
     * recorded them and runs what it recorded; nothing but ops that wait for
     * nothing may stand there.  Afterwards the rows of the batch are done, bit
     * for bit as by step() and the ops.  NULL: step() it is. */
    bool (*pass)(op_dev_t *dev, op_pass_t *pass);

    /* 0; or -1 when the device has failed, with what happened in err: then
     * whatever came from it since the last check that was good is void, and so
     * is the device.  Waits for nothing: ask after get(). */
    int (*check)(op_dev_t *dev, op_err_t *err);

    /* --- weights --- */

    /* Repacks n_parts matrices of one n_in, concatenated along n_out (fused
     * QKV, gate and up), into the backend's layout.  The tensors' data is not
     * needed afterwards.  Parts may differ in dtype. */
    op_weight_t *(*weight)(op_dev_t *dev, const op_tensor_t *parts, int n_parts,
                           op_err_t *err);
    void (*weight_free)(op_dev_t *dev, op_weight_t *weight);
    size_t (*weight_bytes)(const op_weight_t *weight);

    /* Repacked weights can be kept and used again.  weight_form names the
     * layout and its version, as this device has it: data of one form mean the
     * same to every device of that form (NULL, and so are the other two: not
     * this backend's).  weight_data: the weight_bytes() of a weight.
     * weight_over: a weight over such data, from parts whose own data are not
     * looked at; 64-byte aligned, read only, outlives the weight.  NULL when
     * it is of another size, or as weight(). */
    const char *(*weight_form)(const op_dev_t *dev);
    const void *(*weight_data)(const op_weight_t *weight);
    op_weight_t *(*weight_over)(op_dev_t *dev, const op_tensor_t *parts,
                                int n_parts, const op_bytes_t *data,
                                op_err_t *err);

    /* --- ops --- */

    /* x[r,:] = dequantised row tokens[r] of w.  x: [rows, n_in] f32; tokens:
     * the host's, in range (the caller checks).  Exact. */
    void (*embed)(op_dev_t *dev, float *x, const op_weight_t *w,
                  const int32_t *tokens, int rows);

    /* y[r,:] = x[r,:] / sqrt(mean(x[r,:]^2) + eps) * w.  x, y: [rows, dim]
     * f32, may be the same; w: [dim].  ≤ 1e-5 relative to ref. */
    void (*rmsnorm)(op_dev_t *dev, float *y, const float *x, const float *w,
                    int rows, int dim, float eps);

    /* y[r,:] = W x[r,:] (OP_SET) or y[r,:] += W x[r,:] (OP_ADD: one addition
     * after the whole sum).  x: [rows, n_in] f32; y: [rows, n_out] f32 with
     * leading dimension ldy ≥ n_out.
     * Quantised W: x is quantised to int8 per row and per block of 32
     * (d = max|x| / 127, q = x / d rounded to even), dots are exact int32,
     * and per output acc = fmaf((float) dot, d_w * d_x, acc), blocks
     * ascending; minima likewise in an accumulator of their own,
     * min = fmaf(m_w, d_x * sum(q), min); y = acc + min (cpu_study.md §2).
     * OP_FINE: what quantising x left over, r = x − d_x * q (a product and a
     * difference, each rounded), is quantised by the same rule, and its
     * product is added as by OP_ADD.  For inputs with large outliers: it is
     * done in the row's blocks of d_x ≥ OP_FINE_SCALE * its largest d_x, and
     * r is 0 in the others, whose rounding is small beside theirs.
     * F32, F16, BF16 W: acc = fmaf(w, x, acc), inputs ascending.
     * This is the order of `cpu`; `cuda` has one of its own (cuda_linear.h),
     * over the same integers, and for F16 and BF16 W takes x in two parts.
     * ref computes in double over dequantised weights and unquantised x: the
     * relative RMS error of a row against it is ≤ 1.5e-2 for quantised
     * weights (1.5e-4 with OP_FINE), ≤ 1e-5 for float ones. */
    void (*linear)(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
                   const op_weight_t *w, int mode);

    /* linear() of x, of rmsnorm(x), or of silu_mul(x): the same bits as the two
     * ops one after the other, in fewer launches.  y is none of the others. */
    void (*linear_of)(op_dev_t *dev, float *y, int ldy, const op_input_t *in,
                      int rows, const op_weight_t *w, int mode);

    /* x rows picked: y[i,:] = x[idx[i],:].  [n, dim]; idx: the host's.
     * Exact. */
    void (*gather)(op_dev_t *dev, float *y, const float *x, const int32_t *idx,
                   int n, int dim);

    /* y[r,i] = silu(gate[r,i]) * up[r,i], silu(g) = g / (1 + exp(−g)).
     * gate_up: [rows, 2 dim], gate first; y: [rows, dim].  ≤ 1e-5 relative. */
    void (*silu_mul)(op_dev_t *dev, float *y, const float *gate_up, int rows,
                     int dim);

    /* qkv: [rows, (n_heads + 2 n_kv_heads) * head_dim] f32: q heads, k heads,
     * v heads.  Rotates q in place; rotates k; writes k and v, rounded to the
     * pool's type, to their sequence's pages of `layer`.
     * cos_sin: [max_len][rot / 2][2] f32, row = position; rot ≤ head_dim. */
    void (*rope_kv)(op_dev_t *dev, float *qkv, const op_batch_t *batch,
                    const op_attn_t *attn, const float *cos_sin, int rot,
                    int mode, const op_kv_t *kv, int layer);

    /* Causal paged attention of each row over positions 0 … pos[row] of its
     * sequence.  q: the buffer rope_kv left (row stride (n_heads +
     * 2 n_kv_heads) * head_dim); out: [rows, n_heads * head_dim] f32.
     * Order (cpu_study.md §7): splits of 256 tokens; in a split, scores by
     * fma over d ascending with q pre-scaled, maximum, own exp, sum per lane
     * over pages then a fixed tree over 16 lanes, out by fma over tokens
     * ascending; splits combined ascending.  The same for decode, prefill and
     * verify, and for both types of the pool, whose K and V are widened to f32
     * exactly, in registers.  `cuda` has the same splits and an order of its
     * own in them (cuda_attn.cuh).  ≤ 2e-3 absolute against ref for |v| ≤ 1.
     */
    void (*attention)(op_dev_t *dev, float *out, const float *q,
                      const op_batch_t *batch, const op_attn_t *attn,
                      const op_kv_t *kv, int layer);

    /* Bytes of one page over all layers; 0: the pool cannot have this type. */
    size_t (*kv_page_bytes)(op_dev_t *dev, int dtype, int n_layers,
                            int n_kv_heads, int head_dim);

    /* Page copies[i].to becomes page copies[i].from, K and V of all layers and
     * heads, scales too; i = 0 … n − 1 as if one after the other, so a copy
     * sees what those before it wrote, and a page may be read and then be
     * written.  A page onto itself: nothing happens.  Pages are in range (the
     * caller checks); n = 0 is allowed.  All 16 positions are copied, whatever
     * is in them: K and V of a position are scaled by themselves, so those
     * that count are exact whatever stands behind them.  Exact: the bits. */
    void (*kv_copy)(op_dev_t *dev, const op_kv_t *kv, const op_copy_t *copies,
                    int n);

    /* --- drawing tokens; NULL: the caller does that --- */

    /* Reserves what draw() takes.  0, or −1 with err. */
    int (*draw_prepare)(op_dev_t *dev, const op_draw_limits_t *limits,
                        op_err_t *err);

    /* Log-probabilities of rows of logits, and tokens drawn from them.  As any
     * op it waits for nothing: results stay in places of the backend, where
     * drawn() finds them and batches may name them as tokens, until others go
     * there.  All is exact, so it is done in any order with the same bits:
     *   weight of x: e^((x − max) / temperature), by the formula of exp of
     *     the engine's sampler, rounded to a multiple of 2^-34;
     *   log-probability: x − max − log(sum of weights at temperature 1), at
     *     least −9999, from the logits as they were given;
     *   OP_DRAW: adjusts (bias in the list's order, masks, then for each token
     *     seen x > 0 ? x / repetition : x * repetition, and if it was in the
     *     output − frequency * times − presence), the temperature, the depth,
     *     top_k, then top_p of the sum left, where the sum exceeds u times
     *     what it is then; candidates in descending order, ties by id.
     * NaN counts as −∞.  Rows that are adjusted are left changed; no two draws
     * are of one row. */
    void (*draw)(op_dev_t *dev, const op_draw_job_t *job);

    /* The results at n places, for the host: waits until they are there, but
     * for nothing that was asked for after the draws. */
    void (*drawn)(op_dev_t *dev, op_drawn_t *results, int first, int n);
} op_table_t;

#endif /* KERNELS_OP_OP_H */
