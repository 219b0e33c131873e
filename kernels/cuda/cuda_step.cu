/*
 * What a step tells the device: the batch's arrays, gathered in one piece of
 * pinned memory and sent by one copy, so that the host neither waits nor is
 * waited for; and lists of indices that are not the step's.
 */

#include "kernels/cuda/cuda_dev.h"

#include <string.h>


/* --- staging --- */

int
cuda_stage_create(op_dev_t *dev, cuda_stage_t *stage, size_t bytes, int n_turns)
{
    memset(stage, 0, sizeof(*stage));
    stage->bytes = bytes;
    stage->n_turns = n_turns < CUDA_TURNS_MAX ? n_turns : CUDA_TURNS_MAX;
    stage->device = (uint8_t *) cuda_alloc(dev, bytes);

    if (stage->device != NULL) {
        stage->pinned =
            (uint8_t *) cuda_alloc_host(dev, (size_t) stage->n_turns * bytes);
    }

    bool done = stage->pinned != NULL;

    for (int i = 0; i < stage->n_turns && done; i++) {
        done = cuda_event(dev, &stage->sent[i]);
    }

    if (!done) {
        cuda_stage_destroy(dev, stage);
        return -1;
    }

    return 0;
}


void
cuda_stage_destroy(op_dev_t *dev, cuda_stage_t *stage)
{
    for (int i = 0; i < stage->n_turns; i++) {
        if (stage->sent[i] != NULL) {
            cudaEventDestroy(stage->sent[i]);
        }
    }

    if (stage->pinned != NULL) {
        cudaFreeHost(stage->pinned);
    }

    cuda_free(dev, stage->device, stage->bytes);
    memset(stage, 0, sizeof(*stage));
}


bool
cuda_stage_take(op_dev_t *dev, cuda_stage_t *stage)
{
    stage->turn = (stage->turn + 1) % stage->n_turns;
    stage->host = stage->pinned + (size_t) stage->turn * stage->bytes;

    return cuda_ok(dev, cudaEventSynchronize(stage->sent[stage->turn]),
                   "a step before");
}


bool
cuda_stage_send(op_dev_t *dev, cuda_stage_t *stage, size_t bytes)
{
    return cuda_ok(dev,
                   cudaMemcpyAsync(stage->device, stage->host, bytes,
                                   cudaMemcpyHostToDevice, dev->stream),
                   "sending a step")
           && cuda_ok(dev,
                      cudaEventRecord(stage->sent[stage->turn], dev->stream),
                      "sending a step");
}


/* --- the step --- */

/* Of n values the padding up to a number. */
typedef struct {
    int n;
    int upto;
    int first;
    int more;
} pad_t;


static int
pages_of(int len)
{
    return (len + OP_PAGE - 1) / OP_PAGE;
}


/* An array begins at a multiple of 16 bytes. */
static size_t
array_bytes(size_t n)
{
    return (n * sizeof(int32_t) + 15) / 16 * 16;
}


size_t
cuda_step_bytes(const op_limits_t *limits)
{
    const size_t rows = (size_t) limits->max_rows;
    const size_t seqs = (size_t) limits->max_seqs;

    return 4 * array_bytes(rows) + array_bytes(seqs + 1)
           + array_bytes(seqs * (size_t) pages_of(limits->max_len));
}


/* A row each, or a copy of a page for each sequence and one more. */
size_t
cuda_index_bytes(const op_limits_t *limits)
{
    const size_t rows = (size_t) limits->max_rows;
    const size_t copies = 2 * ((size_t) limits->max_seqs + 1);

    return (rows > copies ? rows : copies) * sizeof(int32_t);
}


/* n values, or zeros where the step has none, behind what is there. */
static const int32_t *
append(cuda_stage_t *stage, size_t *at, const int32_t *from, size_t n)
{
    int32_t *host = (int32_t *) (stage->host + *at);
    const int32_t *device = (const int32_t *) (stage->device + *at);

    if (from == NULL) {
        memset(host, 0, n * sizeof(int32_t));
    } else {
        memcpy(host, from, n * sizeof(int32_t));
    }

    *at += array_bytes(n);

    return device;
}


/* Which sequence each row is of. */
static const int32_t *
append_seq(cuda_stage_t *stage, size_t *at, const op_batch_t *batch)
{
    int32_t *host = (int32_t *) (stage->host + *at);

    for (int s = 0; s < batch->n_seqs; s++) {
        for (int r = batch->row_start[s]; r < batch->row_start[s + 1]; r++) {
            host[r] = s;
        }
    }

    *at += array_bytes((size_t) batch->n_rows);

    return (const int32_t *) (stage->device + *at
                              - array_bytes((size_t) batch->n_rows));
}


static const int32_t *
append_tables(cuda_stage_t *stage, size_t *at, const op_batch_t *batch,
              const cuda_batch_t *to)
{
    const int width = to->table_width;
    const size_t n = (size_t) to->n_seqs * (size_t) width;
    int32_t *host = (int32_t *) (stage->host + *at);
    const int32_t *device = (const int32_t *) (stage->device + *at);

    memset(host, 0, n * sizeof(int32_t));

    for (int s = 0; s < batch->n_seqs; s++) {
        const int last = batch->pos[batch->row_start[s + 1] - 1];

        memcpy(host + (size_t) s * (size_t) width, batch->block_table[s],
               (size_t) pages_of(last + 1) * sizeof(int32_t));
    }

    *at += array_bytes(n);

    return device;
}


/* The step's lengths: for the host, which chooses grids by them. */
static void
measure(const op_batch_t *batch, cuda_batch_t *to)
{
    to->n_rows = batch->n_rows;
    to->n_seqs = batch->n_seqs;
    to->n_out = batch->n_out;
    to->max_len = 0;
    to->max_seq_rows = 0;

    for (int s = 0; s < batch->n_seqs; s++) {
        const int end = batch->row_start[s + 1];
        const int rows = end - batch->row_start[s];
        const int len = batch->pos[end - 1] + 1;

        to->max_len = len > to->max_len ? len : to->max_len;
        to->max_seq_rows = rows > to->max_seq_rows ? rows : to->max_seq_rows;
    }

    to->table_width = pages_of(to->max_len);
}


void
cuda_step(op_dev_t *dev, const op_batch_t *batch)
{
    cuda_stage_t *stage = &dev->step_stage;
    cuda_batch_t *to = &dev->batch;
    const size_t rows = (size_t) batch->n_rows;
    size_t at = 0;

    if (!cuda_enter(dev) || !cuda_stage_take(dev, stage)) {
        return;
    }

    measure(batch, to);
    to->tokens = append(stage, &at, batch->tokens, rows);
    to->pos = append(stage, &at, batch->pos, rows);
    to->seq = append_seq(stage, &at, batch);
    to->out_rows = append(stage, &at, batch->out_rows, (size_t) batch->n_out);
    to->row_start =
        append(stage, &at, batch->row_start, (size_t) batch->n_seqs + 1);
    to->tables = append_tables(stage, &at, batch, to);

    dev->host_tokens = batch->tokens;
    dev->host_out_rows = batch->out_rows;
    cuda_stage_send(dev, stage, at);
}


/* n values and padding: `first`, and each `more` than the one before. */
static const int32_t *
append_padded(cuda_stage_t *stage, size_t *at, const int32_t *from,
              const pad_t *pad)
{
    int32_t *host = (int32_t *) (stage->host + *at);
    const int32_t *device = (const int32_t *) (stage->device + *at);

    for (int i = 0; i < pad->upto; i++) {
        host[i] = i < pad->n ? from[i] : pad->first + (i - pad->n) * pad->more;
    }

    *at += array_bytes((size_t) pad->upto);

    return device;
}


/* The host's side of an array of the step. */
static const int32_t *
host_side(const cuda_stage_t *stage, const int32_t *device)
{
    return (const int32_t *) (stage->host
                              + ((const uint8_t *) device - stage->device));
}


void
cuda_step_padded(op_dev_t *dev, const op_batch_t *batch, int rows, int len,
                 op_batch_t *given)
{
    cuda_stage_t *stage = &dev->step_stage;
    cuda_batch_t *to = &dev->batch;
    const int n = batch->n_rows;
    const pad_t zeros = { n, rows, 0, 0 }, nowhere = { n, rows, -1, 0 };
    const pad_t count = { 0, rows, 0, 1 }, starts = { 0, rows + 1, 0, 1 };
    size_t at = 0;

    if (dev->failed || !cuda_stage_take(dev, stage)) {
        return;
    }

    to->n_rows = to->n_seqs = to->n_out = rows;
    to->max_len = len;
    to->max_seq_rows = 1;
    to->table_width = pages_of(len);
    to->tokens = append_padded(stage, &at, batch->tokens, &zeros);
    to->pos = append_padded(stage, &at, batch->pos, &nowhere);
    to->seq = append_padded(stage, &at, NULL, &count);
    to->out_rows = append_padded(stage, &at, NULL, &count);
    to->row_start = append_padded(stage, &at, NULL, &starts);
    to->tables = append_tables(stage, &at, batch, to);

    given->n_rows = given->n_seqs = given->n_out = rows;
    given->tokens = host_side(stage, to->tokens);
    given->pos = host_side(stage, to->pos);
    given->row_start = host_side(stage, to->row_start);
    given->out_rows = host_side(stage, to->out_rows);
    given->block_table = NULL;

    dev->host_tokens = given->tokens;
    dev->host_out_rows = given->out_rows;
    cuda_stage_send(dev, stage, at);
}


const int32_t *
cuda_indices(op_dev_t *dev, const int32_t *idx, int n)
{
    cuda_stage_t *stage = &dev->index_stage;
    const size_t bytes = (size_t) n * sizeof(int32_t);

    if (dev->failed) {
        return NULL;
    }

    if (idx == dev->host_tokens && n <= dev->batch.n_rows) {
        return dev->batch.tokens;
    }
    if (idx == dev->host_out_rows && n <= dev->batch.n_out) {
        return dev->batch.out_rows;
    }

    if (bytes > stage->bytes) {
        cuda_stage_destroy(dev, stage);

        if (cuda_stage_create(dev, stage, 2 * bytes, CUDA_TURNS) != 0) {
            cuda_ok(dev, cudaErrorMemoryAllocation, "a list of indices");
            return NULL;
        }
    }

    if (!cuda_stage_take(dev, stage)) {
        return NULL;
    }

    memcpy(stage->host, idx, bytes);

    return cuda_stage_send(dev, stage, bytes) ? (const int32_t *) stage->device
                                              : NULL;
}
