/*
 * CUDA graphs for decode: a pass in which each sequence has one row, whose
 * logits are wanted, is recorded once and run by one call afterwards.
 *
 * Launches of a pass follow from its number of rows and from the length that
 * attention is laid out for; so rows are padded to 1, 2, 4, 8, 16, 24, …, and
 * the length to a number of splits that is a power of two.  What is left, the
 * arrays of the batch, are at the same place in the step's memory whenever
 * rows and length are the same, and only what they hold is new.  Padding rows
 * are at position −1, which reads and writes no page.  No other row's bits
 * depend on them, as no row's depend on any other.
 *
 * A shape's first pass is run as it is: whatever happens once, such as loading
 * a kernel, must not happen in a recording, and a shape that does not come
 * back is not worth one.  When a recording or its launch is refused, for lack
 * of memory say, the device goes on without graphs.
 */

#include "kernels/cuda/cuda_dev.h"

#include <string.h>

enum {
    STEP_ROWS = 8, /* between the larger numbers of rows */

    /* what a kernel of a recording takes of the device, not below what vLLM
     * logs: about 8 MB a recording of a model of 32 layers */
    NODE_BYTES = 16 << 10,
    NODES_EACH = 3 /* most kernels for each segment of a weight, where norms and
                      gates are apart */
};

/* What pass->phase says. */
enum { PHASE_NEW = 0, PHASE_PLAIN, PHASE_RECORDED };


/* --- shapes --- */

/* Rows with padding; they stay within the limits. */
static int
padded_rows(const op_limits_t *limits, int rows)
{
    const int most = limits->max_seqs < limits->max_rows ? limits->max_seqs
                                                         : limits->max_rows;
    int n = 1;

    while (n < rows && n < STEP_ROWS) {
        n *= 2;
    }
    while (n < rows) {
        n += STEP_ROWS;
    }

    return n < most ? n : most;
}


static int
padded_len(const op_limits_t *limits, const op_batch_t *batch)
{
    int64_t len = OP_SPLIT;

    for (int i = 0; i < batch->n_rows; i++) {
        while (len <= batch->pos[i]) {
            len *= 2;
        }
    }

    return len < limits->max_len ? (int) len : limits->max_len;
}


/* Shapes that may come, as many of them as are kept. */
static int
n_shapes(const op_limits_t *limits)
{
    const int most = padded_rows(limits, limits->max_seqs);
    int n_rows = 1, n_lens = 1;

    for (int rows = 1; rows < most; n_rows++) {
        rows = padded_rows(limits, rows + 1);
    }
    for (int64_t len = OP_SPLIT; len < limits->max_len; len *= 2) {
        n_lens++;
    }

    return n_rows < CUDA_GRAPHS / n_lens ? n_rows * n_lens : CUDA_GRAPHS;
}


size_t
cuda_graphs_later(const op_dev_t *dev)
{
    const cuda_graphs_t *graphs = &dev->graphs;
    const size_t each = (size_t) dev->n_segments * NODES_EACH * NODE_BYTES;
    int n = 0;

    if (graphs->off || dev->limits.max_rows == 0) {
        return 0;
    }

    for (int i = 0; i < graphs->n; i++) {
        n += graphs->all[i].exec != NULL;
    }

    return (size_t) (n_shapes(&dev->limits) - n) * each;
}


/* Each sequence has one row, and all rows want logits. */
static bool
is_decode(const op_dev_t *dev, const op_batch_t *batch)
{
    return batch->n_rows > 0 && batch->n_rows == batch->n_seqs
           && batch->n_out == batch->n_rows
           && batch->n_rows <= dev->limits.max_seqs
           && batch->n_rows <= dev->limits.max_rows;
}


/* --- recorded passes --- */

static void
graph_drop(cuda_graph_t *graph)
{
    if (graph->exec != NULL) {
        cudaGraphExecDestroy(graph->exec);
    }

    memset(graph, 0, sizeof(*graph));
}


void
cuda_graphs_drop(op_dev_t *dev)
{
    cuda_graphs_t *graphs = &dev->graphs;

    if (graphs->n > 0 && dev->stream != NULL) {
        cuda_ok(dev, cudaStreamSynchronize(dev->stream), "running a step");
    }

    for (int i = 0; i < graphs->n; i++) {
        graph_drop(&graphs->all[i]);
    }

    graphs->n = 0;
    graphs->current = NULL;
}


/* Goes on without; what the runtime said is no failure of the device: if it
 * is one, the next launch says so, too. */
static void
give_up(op_dev_t *dev)
{
    cudaGetLastError();
    dev->graphs.off = true;
    cuda_graphs_drop(dev);
}


static bool
same_pool(const op_kv_t *a, const op_kv_t *b)
{
    return a->base == b->base && a->n_pages == b->n_pages
           && a->n_layers == b->n_layers && a->n_kv_heads == b->n_kv_heads
           && a->head_dim == b->head_dim && a->dtype == b->dtype;
}


static cuda_graph_t *
find(cuda_graphs_t *graphs, const cuda_graph_t *like)
{
    for (int i = 0; i < graphs->n; i++) {
        cuda_graph_t *graph = &graphs->all[i];

        if (graph->rows == like->rows && graph->len == like->len
            && graph->model == like->model && same_pool(&graph->kv, &like->kv))
        {
            return graph;
        }
    }

    return NULL;
}


/* A place for one more: that of the one not used for longest, where there are
 * as many as there may be.  The device may be running it. */
static cuda_graph_t *
place(op_dev_t *dev)
{
    cuda_graphs_t *graphs = &dev->graphs;
    cuda_graph_t *oldest = &graphs->all[0];

    if (graphs->n < CUDA_GRAPHS) {
        return &graphs->all[graphs->n++];
    }

    for (int i = 1; i < graphs->n; i++) {
        if (graphs->all[i].used < oldest->used) {
            oldest = &graphs->all[i];
        }
    }

    cuda_ok(dev, cudaStreamSynchronize(dev->stream), "running a step");
    graph_drop(oldest);

    return oldest;
}


static int
count_kernels(cuda_graphs_t *graphs, cudaGraph_t graph)
{
    cudaGraphNode_t *nodes = graphs->nodes;
    size_t n = 0;
    int n_kernels = 0;

    if (cudaGraphGetNodes(graph, NULL, &n) != cudaSuccess
        || n > CUDA_GRAPH_NODES
        || cudaGraphGetNodes(graph, nodes, &n) != cudaSuccess)
    {
        cudaGetLastError();
        return 0;
    }

    for (size_t i = 0; i < n; i++) {
        cudaGraphNodeType type;

        n_kernels += cudaGraphNodeGetType(nodes[i], &type) == cudaSuccess
                     && type == cudaGraphNodeTypeKernel;
    }

    return n_kernels;
}


/* --- a pass --- */

static bool
launch(op_dev_t *dev, cuda_graph_t *graph)
{
    if (cudaGraphLaunch(graph->exec, dev->stream) != cudaSuccess) {
        give_up(dev);
        return false;
    }

    dev->graphs.n_replays++;
    dev->graphs.n_saved += (uint64_t) graph->n_kernels;

    return true;
}


/* The ops have been called; they run when the recording is launched.  False:
 * there is none, and they have to be called again. */
static bool
finish(op_dev_t *dev)
{
    cuda_graph_t *graph = dev->graphs.current;
    cudaGraph_t recorded = NULL;
    cudaError_t error = cudaStreamEndCapture(dev->stream, &recorded);

    dev->graphs.current = NULL;

    if (error == cudaSuccess && !dev->failed) {
        error = cudaGraphInstantiate(&graph->exec, recorded, 0);
        graph->n_kernels =
            error == cudaSuccess ? count_kernels(&dev->graphs, recorded) : 0;
    }
    if (recorded != NULL) {
        cudaGraphDestroy(recorded);
    }

    if (dev->failed) {
        return true;
    }
    if (error != cudaSuccess) {
        graph->exec = NULL;
        give_up(dev);
        return false;
    }

    dev->graphs.n_recorded++;

    return launch(dev, graph);
}


/* The first call of a pass: how it is going to be run.  False: it has been. */
static bool
begin(op_dev_t *dev, op_pass_t *pass)
{
    cuda_graphs_t *graphs = &dev->graphs;
    cuda_graph_t like = {}, *graph;

    if (graphs->off || !is_decode(dev, pass->batch)) {
        cuda_step(dev, pass->batch);
        pass->given = *pass->batch;
        return true;
    }

    like.model = pass->model;
    like.kv = *pass->kv;
    like.rows = padded_rows(&dev->limits, pass->batch->n_rows);
    like.len = padded_len(&dev->limits, pass->batch);
    like.used = ++graphs->clock;
    cuda_step_padded(dev, pass->batch, like.rows, like.len, &pass->given);

    if (dev->failed) {
        return false;
    }

    graph = find(graphs, &like);

    if (graph == NULL) {
        *place(dev) = like;
        return true;
    }

    graph->used = like.used;

    if (graph->exec != NULL) {
        return !launch(dev, graph);
    }

    if (cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal)
        != cudaSuccess)
    {
        give_up(dev);
        return true;
    }

    graphs->current = graph;
    pass->phase = PHASE_RECORDED;

    return true;
}


bool
cuda_pass(op_dev_t *dev, op_pass_t *pass)
{
    switch (pass->phase) {
    case PHASE_NEW:
        pass->phase = PHASE_PLAIN;
        return cuda_enter(dev) && begin(dev, pass);

    case PHASE_RECORDED:
        pass->phase = PHASE_PLAIN;
        return !finish(dev);

    default:
        return false;
    }
}
