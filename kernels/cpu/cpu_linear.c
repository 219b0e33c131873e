/*
 * Matrix products of the CPU backend: quantised activations, and how a
 * product is shared by threads.
 *
 * A weight is a list of segments, one per run of parts of equal dtype; each
 * segment is cut by groups of 16 outputs, a contiguous range per thread.
 * Inside, rows go in chunks whose activations stay in the second level
 * cache.  None of this touches the order of additions of an output.
 */

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_dot.h"
#include "kernels/cpu/cpu_weight.h"

enum {
    /* Up to so many inputs each thread quantises all rows for itself, which
     * is cheaper than one more meeting of the threads. */
    OWN_VALUES = 4096,

    /* Activations of a chunk of rows, in values: 1.5 bytes each, half of a
     * second level cache of 1 MB. */
    CHUNK_VALUES = 352 * 1024
};

/* One allocation holding activations for `values` inputs. */
typedef struct {
    uint8_t *base;
    size_t bytes;
    size_t entries; /* blocks of 32 */
} act_buffer_t;

typedef struct {
    int max_rows;
    int max_in;
    int n_threads;
    act_buffer_t shared;
    act_buffer_t *own; /* [n_threads] */

    /* for OP_FINE, of each thread: a row's rest, and which blocks of a tile
     * have none (cpu_act_t) */
    float *left;
    uint8_t *empty;
    size_t empty_bytes; /* of one thread */

    int8_t *panels; /* [n_threads], where the instruction set wants them */
    size_t panel_bytes;
} linear_t;


static const cpu_dot_table_t *
dot_table(int isa)
{
    const cpu_dot_table_t *table = NULL;

    if (isa == CPU_ISA_AMX) {
        table = cpu_dot_amx();
    } else if (isa == CPU_ISA_AVX512) {
        table = cpu_dot_avx512();
    } else if (isa == CPU_ISA_AVX2) {
        table = cpu_dot_avx2();
    }

    return table != NULL ? table : cpu_dot_baseline();
}


/* --- scratch --- */

static int
act_buffer_create(op_dev_t *dev, act_buffer_t *buffer, size_t entries)
{
    /* q, then d, s, sum, half; whole cache lines each */
    entries = (entries + 15) / 16 * 16;
    buffer->entries = entries;
    buffer->bytes = entries * (32 + 4 * 4);
    buffer->base = cpu_alloc(dev, buffer->bytes);

    return buffer->base != NULL ? 0 : -1;
}


static void
act_buffers_free(op_dev_t *dev, linear_t *lin)
{
    cpu_free(dev, lin->shared.base, lin->shared.bytes);
    lin->shared.base = NULL;

    for (int i = 0; lin->own != NULL && i < lin->n_threads; i++) {
        cpu_free(dev, lin->own[i].base, lin->own[i].bytes);
    }

    free(lin->own);
    lin->own = NULL;
    free(lin->left);
    lin->left = NULL;
    free(lin->empty);
    lin->empty = NULL;
    cpu_free(dev, lin->panels, (size_t) lin->n_threads * lin->panel_bytes);
    lin->panels = NULL;
}


int
cpu_linear_prepare(op_dev_t *dev, const op_limits_t *limits)
{
    linear_t *lin = dev->linear_scratch;
    size_t blocks = ((size_t) limits->max_in + 31) / 32;
    size_t rows = (size_t) limits->max_rows;
    size_t own = 2 * OWN_VALUES / 32; /* rows may be rounded up to a tile */

    if (lin == NULL) {
        lin = dev->linear_scratch = calloc(1, sizeof(linear_t));
    }
    if (lin == NULL) {
        return -1;
    }

    act_buffers_free(dev, lin);
    lin->max_rows = limits->max_rows;
    lin->max_in = limits->max_in;
    lin->n_threads = cpu_pool_threads(dev->pool);
    lin->own = calloc((size_t) lin->n_threads, sizeof(act_buffer_t));
    lin->left = calloc((size_t) lin->n_threads * blocks, 32 * sizeof(float));
    rows = (rows + CPU_TILE - 1) / CPU_TILE * CPU_TILE;
    lin->empty_bytes = rows / CPU_TILE * blocks;
    lin->empty = calloc((size_t) lin->n_threads, lin->empty_bytes);

    if (lin->own == NULL || lin->left == NULL || lin->empty == NULL
        || act_buffer_create(dev, &lin->shared, rows * blocks) != 0)
    {
        return -1;
    }

    for (int i = 0; i < lin->n_threads; i++) {
        size_t entries = blocks > own ? blocks : own;

        if (act_buffer_create(dev, &lin->own[i], entries) != 0) {
            return -1;
        }
    }

    lin->panel_bytes = blocks * (size_t) dot_table(dev->isa)->panel_bytes;

    if (lin->panel_bytes > 0) {
        lin->panels =
            cpu_alloc(dev, (size_t) lin->n_threads * lin->panel_bytes);
    }

    return lin->panels != NULL || lin->panel_bytes == 0 ? 0 : -1;
}


void
cpu_linear_fini(op_dev_t *dev)
{
    linear_t *lin = dev->linear_scratch;

    if (lin == NULL) {
        return;
    }

    act_buffers_free(dev, lin);

    free(lin);
    dev->linear_scratch = NULL;
}


/* --- products --- */

typedef struct {
    const cpu_dot_table_t *table;
    linear_t *lin;
    const op_weight_t *w;
    const float *x;
    float *y;
    int ldy;
    int rows;
    int mode;
    int left;      /* the product of what quantising left over */
    int own;       /* each thread quantises for itself */
    cpu_act_t act; /* when it does not */
} linear_job_t;


static void
act_bind(cpu_act_t *act, const act_buffer_t *buffer, int rows, int n_in)
{
    float *p = (float *) (buffer->base + 32 * buffer->entries);

    act->n_blocks = n_in / 32;
    act->empty = NULL;
    act->tile = rows < CPU_TILE ? rows : CPU_TILE;
    act->q = (int8_t *) buffer->base;
    act->d = p;
    act->s = p + buffer->entries;
    act->sum = (int32_t *) (p + 2 * buffer->entries);
    act->half = (int32_t *) (p + 3 * buffer->entries);
}


/* What the quantised row is short of x, in the blocks of large scale; 0 in
 * the others. */
static void
left_over(const cpu_act_t *act, int row, const float *x, float *left)
{
    const size_t at = cpu_act_at(act, row);
    float top = 0.0f;

    for (int b = 0; b < act->n_blocks; b++) {
        const float d = act->d[at + (size_t) b * (size_t) act->tile];

        top = d > top ? d : top;
    }

    for (int b = 0; b < act->n_blocks; b++) {
        const size_t entry = at + (size_t) b * (size_t) act->tile;
        const int8_t *q = act->q + entry * 32;
        const float d = act->d[entry];

        if (d < OP_FINE_SCALE * top) {
            memset(left + b * 32, 0, 32 * sizeof(float));
            continue;
        }

        for (int i = 0; i < 32; i++) {
            left[b * 32 + i] = x[b * 32 + i] - d * (float) q[i];
        }
    }
}


/* Blocks that are 0 in all rows of a tile, of which OP_FINE leaves many. */
static void
find_empty(cpu_act_t *act, int rows, uint8_t *empty)
{
    act->empty = empty;

    for (int row = 0; row < rows; row += CPU_TILE) {
        const float *d = act->d + cpu_act_at(act, row);
        const int n = rows - row < act->tile ? rows - row : act->tile;

        for (int b = 0; b < act->n_blocks; b++, d += act->tile) {
            int any = 0;

            for (int r = 0; r < n; r++) {
                any |= d[r] != 0.0f; /* NaN too */
            }

            *empty++ = !any;
        }
    }
}


static void
quantise_rows(const linear_job_t *job, const cpu_act_t *act, int thread,
              const int span[2])
{
    float *left =
        job->lin->left
        + (size_t) thread * (((size_t) job->lin->max_in + 31) / 32 * 32);

    for (int r = span[0]; r < span[1]; r++) {
        const float *x = job->x + (size_t) r * (size_t) job->w->n_in;

        job->table->quantise(x, act, r);

        if (job->left) {
            left_over(act, r, x, left);
            job->table->quantise(left, act, r);
        }
    }
}


static void
quantise_run(void *arg, int thread, int n_threads)
{
    const linear_job_t *job = arg;
    int span[2];

    cpu_pool_share(job->rows, 1, thread, n_threads, &span[0], &span[1]);
    quantise_rows(job, &job->act, thread, span);
}


/* NULL where no panels are wanted, nor scratch at all for float weights. */
static int8_t *
panel_of(const linear_t *lin, int thread)
{
    if (lin == NULL || lin->panels == NULL) {
        return NULL;
    }

    return lin->panels + (size_t) thread * lin->panel_bytes;
}


static void
linear_run(void *arg, int thread, int n_threads)
{
    const linear_job_t *job = arg;
    const op_weight_t *w = job->w;
    cpu_act_t act = job->act;
    int chunk = CHUNK_VALUES / w->n_in / CPU_TILE * CPU_TILE;

    if (job->own) {
        const int span[2] = { 0, job->rows };

        act_bind(&act, &job->lin->own[thread], job->rows, w->n_in);
        quantise_rows(job, &act, thread, span);
    }

    if (job->left) {
        find_empty(&act, job->rows,
                   job->lin->empty + (size_t) thread * job->lin->empty_bytes);
    }

    chunk = chunk < job->table->chunk_rows ? job->table->chunk_rows : chunk;

    for (int i = 0; i < w->n_segments; i++) {
        const cpu_segment_t *seg = &w->segments[i];
        cpu_dot_t dot = {
            .seg = seg,
            .act = &act,
            .x = job->x,
            .y = job->y + seg->first_out,
            .ldy = job->ldy,
            .add = job->left || (job->mode & OP_ADD),
            .panel = panel_of(job->lin, thread),
        };
        cpu_range_t range;

        if (job->left && lay_is_float((int) seg->layout)) {
            continue; /* nothing was left over */
        }

        cpu_pool_share(seg->n_groups, 1, thread, n_threads, &range.group,
                       &range.group_end);

        for (range.row = 0; range.row < job->rows; range.row += chunk) {
            int left = job->rows - range.row;

            range.row_end = range.row + (left < chunk ? left : chunk);
            job->table->dot[seg->layout](&dot, &range);
        }
    }
}


static void
linear_pass(op_dev_t *dev, linear_job_t *job)
{
    if (job->w->has_quantised && !job->own) {
        act_bind(&job->act, &job->lin->shared, job->rows, job->w->n_in);
        cpu_pool_run(dev->pool, quantise_run, job);
    }

    cpu_pool_run(dev->pool, linear_run, job);
}


void
cpu_linear(op_dev_t *dev, float *y, int ldy, const float *x, int rows,
           const op_weight_t *w, int mode)
{
    linear_t *lin = dev->linear_scratch;
    linear_job_t job = { .table = dot_table(dev->isa),
                         .lin = lin,
                         .w = w,
                         .x = x,
                         .y = y,
                         .ldy = ldy,
                         .rows = rows,
                         .mode = mode };

    if (rows <= 0) {
        return;
    }

    if (w->has_quantised) {
        assert(lin->own != NULL && rows <= lin->max_rows
               && w->n_in <= lin->max_in);

        job.own = rows == 1 || (int64_t) rows * w->n_in <= OWN_VALUES;
    }

    linear_pass(dev, &job);

    if ((mode & OP_FINE) && w->has_quantised) {
        job.left = 1;
        linear_pass(dev, &job);
    }
}
