/*
 * Plan → the arrays of one forward pass, and which of its rows are looked at.
 */

#ifndef ENGINE_BATCH_H
#define ENGINE_BATCH_H

#include "engine/base/status.h"
#include "engine/sched/plan.h"
#include "kernels/op/op.h"

/* Why a row's logits are wanted. */
typedef struct {
    seq_t *seq;
    int position; /* of the row */
    bool sample;  /* draw the next token; else score the prompt's */
    bool verify;  /* one of several rows of its sequence that sample: a draft
                     follows, or is its token */
    int place;    /* of the backend, where its result is; −1: it has none */
} batch_out_t;

typedef struct {
    op_batch_t op;
    int32_t *tokens;
    int32_t *pos;
    int32_t *row_start;
    const int32_t **block_table;
    int32_t *out_rows;
    batch_out_t *outs; /* [op.n_out] */
    op_copy_t *copies; /* [n_copies] before the forward pass, in order */
    int n_copies;
} batch_t;


/* Memory that it takes. */
size_t batch_bytes(int max_tokens, int max_seqs);

/* Room for steps of max_tokens tokens and max_seqs sequences. */
int batch_init(batch_t *batch, int max_tokens, int max_seqs);
void batch_fini(batch_t *batch);

void batch_build(batch_t *batch, const plan_t *plan);

#endif /* ENGINE_BATCH_H */
