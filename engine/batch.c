/* Plan → batch arrays. */

#include "engine/batch.h"

#include <stdlib.h>


size_t
batch_bytes(int max_tokens, int max_seqs)
{
    const size_t row = 3 * sizeof(int32_t) + sizeof(batch_out_t);
    const size_t seq = sizeof(int32_t) + sizeof(int32_t *);

    return (size_t) max_tokens * row + (size_t) max_seqs * seq
           + sizeof(int32_t);
}


int
batch_init(batch_t *batch, int max_tokens, int max_seqs)
{
    const size_t rows = (size_t) max_tokens, seqs = (size_t) max_seqs;

    *batch = (batch_t){
        .tokens = malloc(rows * sizeof(int32_t)),
        .pos = malloc(rows * sizeof(int32_t)),
        .row_start = malloc((seqs + 1) * sizeof(int32_t)),
        .block_table = malloc(seqs * sizeof(int32_t *)),
        .out_rows = malloc(rows * sizeof(int32_t)),
        .outs = malloc(rows * sizeof(batch_out_t)),
        .copies = malloc((seqs + 1) * sizeof(op_copy_t)),
    };

    if (batch->tokens == NULL || batch->pos == NULL || batch->row_start == NULL
        || batch->block_table == NULL || batch->out_rows == NULL
        || batch->outs == NULL || batch->copies == NULL)
    {
        batch_fini(batch);
        return LLM_NOMEM;
    }

    batch->op.tokens = batch->tokens;
    batch->op.pos = batch->pos;
    batch->op.row_start = batch->row_start;
    batch->op.block_table = batch->block_table;
    batch->op.out_rows = batch->out_rows;

    return LLM_OK;
}


void
batch_fini(batch_t *batch)
{
    free(batch->tokens);
    free(batch->pos);
    free(batch->row_start);
    free(batch->block_table);
    free(batch->out_rows);
    free(batch->outs);
    free(batch->copies);
    *batch = (batch_t){ 0 };
}


/* Does anyone look at the logits of this position? */
static bool
row_wanted(const plan_row_t *row, int position, bool *sample)
{
    const seq_t *seq = row->seq;

    *sample = row->last && position >= seq->n_tokens - 1;

    return *sample || (seq->want_prompt && position + 1 < seq->n_prompt);
}


static int32_t
token_at(const seq_t *seq, int position)
{
    return position < seq->n_tokens ? seq->tokens[position]
                                    : seq->draft[position - seq->n_tokens];
}


void
batch_build(batch_t *batch, const plan_t *plan)
{
    int n = 0, n_out = 0;
    bool sample;

    for (int s = 0; s < plan->n_rows; s++) {
        const plan_row_t *row = &plan->rows[s];
        seq_t *seq = row->seq;

        batch->row_start[s] = n;
        batch->block_table[s] = seq->table.pages;

        for (int i = 0; i < row->count; i++, n++) {
            const int position = row->first + i;

            batch->tokens[n] = token_at(seq, position);
            batch->pos[n] = position;

            if (row_wanted(row, position, &sample)) {
                batch->outs[n_out] = (batch_out_t){ .seq = seq,
                                                    .position = position,
                                                    .sample = sample,
                                                    .verify = row->n_draft > 0,
                                                    .place = -1 };
                batch->out_rows[n_out++] = n;
            }
        }
    }

    for (int i = 0; i < plan->n_copies; i++) {
        batch->copies[i] = (op_copy_t){ .from = plan->copies[i].from,
                                        .to = plan->copies[i].to };
    }

    batch->n_copies = plan->n_copies;
    batch->row_start[plan->n_rows] = n;
    batch->op.n_rows = n;
    batch->op.n_seqs = plan->n_rows;
    batch->op.n_out = n_out;
}
