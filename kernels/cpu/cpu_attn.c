/*
 * Paged attention: which thread computes what.  The arithmetic of an item is
 * in cpu_attn_item.c and the kernels; nothing here changes a result.
 *
 * A unit is a tile, a few rows of one sequence in one page, so that all of
 * them end in the same page; or it is a cohort, sequences that decode behind
 * a common prefix: their common splits are items of all of them, the others
 * items of one.  The work list is (unit, split, KV head), heads innermost,
 * since the heads of a page lie side by side.  Threads take items as they
 * come; an item leaves its rows' partials (maximum, sum, o) in the scratch,
 * and the thread that finishes the last item of a unit's head combines them.
 * When the partials of a step exceed the scratch, the list is run in waves.
 */

#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/cpu/cpu_attn.h"
#include "kernels/cpu/cpu_cohort.h"
#include "kernels/cpu/cpu_math.h"

enum {
    TILE_ROWS = 64,        /* rows of a tile, unless one token has more */
    PARTS_BYTES = 4 << 20, /* partials of a wave, at least */
    PARTS_PER_THREAD = 2 << 20,
    ITEMS_PER_THREAD = 8 /* fewer: take single items, for balance */
};

/* A tile or cohort, restricted to the KV heads whose partials still fitted. */
typedef struct {
    int seq;
    int row;             /* its first row in the batch */
    int n_queries;       /* rows of the batch */
    const int32_t *seqs; /* [n_queries] of a cohort, else NULL */
    int n_splits;        /* of the longest query */
    int shared;          /* splits that are one item, not one of each query */
    int items;           /* of one KV head */
    int head;            /* first KV head */
    int n_heads;
    int item;     /* number of its first item in the wave */
    size_t parts; /* where its partials begin, in floats */
} unit_t;

typedef struct {
    void *block;
    size_t block_bytes;
    unit_t *units;
    cpu_cohorts_t cohorts;
    atomic_int *left; /* [unit][KV head]: items not yet done */
    float *parts;
    size_t parts_floats;
    float *threads; /* each: q, scores, widened pages */
    size_t thread_floats;
    int group; /* query heads per KV head */
    int tile_queries;
    int dim; /* head_dim, rounded up to 16 */
} scratch_t;

typedef struct {
    const cpu_attn_kernels_t *kernels;
    scratch_t *scratch;
    float *out;
    const float *q;
    const op_batch_t *batch;
    const op_attn_t *attn;
    const uint8_t *pages; /* of the layer */
    cpu_kv_layout_t layout;
    int n_units;
    int n_items;
    int grain; /* items taken at once */
    atomic_int next;
} job_t;

/* Where the next wave begins: sequences from the last to the first, because
 * the scheduler puts prefill chunks last and large items should start early. */
typedef struct {
    int seq;
    int row;
    int head;
} walk_t;


static const cpu_attn_kernels_t *
kernels_of(int isa)
{
#if defined(__x86_64__)
    if (isa >= CPU_ISA_AVX512) {
        return &cpu_attn_avx512;
    }
    if (isa == CPU_ISA_AVX2) {
        return &cpu_attn_avx2;
    }
#endif
    (void) isa;
    return &cpu_attn_baseline;
}


/* --- scratch --- */

static size_t
take(size_t *at, size_t bytes)
{
    const size_t offset = *at;

    *at += (bytes + 63) / 64 * 64;
    return offset;
}


int
cpu_attn_prepare(op_dev_t *dev, const op_limits_t *limits)
{
    const int group = limits->n_heads / limits->n_kv_heads;
    const int tile_rows = group > TILE_ROWS ? group : TILE_ROWS;
    const int dim = (limits->head_dim + 15) / 16 * 16;
    const size_t splits = ((size_t) limits->max_len + OP_SPLIT - 1) / OP_SPLIT;
    const size_t tile = tile_rows * splits * (dim + CPU_ATTN_HEAD);
    const int threads = cpu_pool_threads(dev->pool);
    size_t parts = (size_t) threads * PARTS_PER_THREAD / sizeof(float);
    size_t at = 0;
    scratch_t *scratch = calloc(1, sizeof(scratch_t));

    if (scratch == NULL) {
        return -1;
    }

    parts = parts < PARTS_BYTES / sizeof(float) ? PARTS_BYTES / sizeof(float)
                                                : parts;
    scratch->parts_floats = parts < tile ? tile : parts;
    scratch->thread_floats =
        (size_t) tile_rows * (dim + OP_SPLIT) + CPU_ATTN_GROUP * OP_PAGE * dim;
    scratch->group = group;
    scratch->dim = dim;
    scratch->tile_queries = TILE_ROWS / group;
    if (scratch->tile_queries < 1) {
        scratch->tile_queries = 1;
    } else if (scratch->tile_queries > OP_PAGE) {
        scratch->tile_queries = OP_PAGE;
    }

    const size_t units = take(&at, limits->max_rows * sizeof(unit_t));
    const size_t left = take(&at, (size_t) limits->max_rows * limits->n_kv_heads
                                      * sizeof(atomic_int));
    const size_t cohorts = take(&at, cpu_cohorts_bytes(limits->max_seqs));
    const size_t parts_at = take(&at, scratch->parts_floats * sizeof(float));
    const size_t threads_at =
        take(&at, threads * scratch->thread_floats * sizeof(float));
    char *block = cpu_alloc(dev, at);

    if (block == NULL) {
        free(scratch);
        return -1;
    }

    scratch->block = block;
    scratch->block_bytes = at;
    scratch->units = (unit_t *) (block + units);
    scratch->left = (atomic_int *) (block + left);
    cpu_cohorts_bind(&scratch->cohorts, block + cohorts, limits->max_seqs);
    scratch->parts = (float *) (block + parts_at);
    scratch->threads = (float *) (block + threads_at);

    cpu_attn_fini(dev);
    dev->attn_scratch = scratch;
    return 0;
}


void
cpu_attn_fini(op_dev_t *dev)
{
    scratch_t *scratch = dev->attn_scratch;

    if (scratch != NULL) {
        cpu_free(dev, scratch->block, scratch->block_bytes);
        free(scratch);
        dev->attn_scratch = NULL;
    }
}


/* --- the work list --- */

static size_t
partial_floats(const job_t *job)
{
    return CPU_ATTN_HEAD + job->scratch->dim;
}


/* The sequence of a unit's query. */
static int
seq_of(const unit_t *unit, int query)
{
    return unit->seqs == NULL ? unit->seq : unit->seqs[query];
}


static int
row_of(const job_t *job, const unit_t *unit, int query)
{
    return unit->seqs == NULL ? unit->row + query
                              : job->batch->row_start[unit->seqs[query]];
}


/* Splits that a unit's query sees something of. */
static int
splits_of(const job_t *job, const unit_t *unit, int query)
{
    return job->batch->pos[row_of(job, unit, query)] / OP_SPLIT + 1;
}


static void
fill_tile(const job_t *job, const walk_t *walk, unit_t *unit)
{
    int n = OP_PAGE - job->batch->pos[walk->row] % OP_PAGE;

    if (n > job->batch->row_start[walk->seq + 1] - walk->row) {
        n = job->batch->row_start[walk->seq + 1] - walk->row;
    }
    if (n > job->scratch->tile_queries) {
        n = job->scratch->tile_queries;
    }

    unit->seqs = NULL;
    unit->seq = walk->seq;
    unit->row = walk->row;
    unit->n_queries = n;
    unit->n_splits = splits_of(job, unit, n - 1);
    unit->shared = unit->n_splits;
    unit->items = unit->n_splits;
}


static void
fill_cohort(const job_t *job, const walk_t *walk, unit_t *unit)
{
    const cpu_cohorts_t *cohorts = &job->scratch->cohorts;

    unit->seqs = cohorts->seqs + cohorts->first[walk->seq];
    unit->n_queries = cohorts->size[walk->seq];
    unit->n_splits = 0;
    unit->shared = cohorts->shared[walk->seq];
    unit->items = unit->shared;

    for (int i = 0; i < unit->n_queries; i++) {
        const int splits = splits_of(job, unit, i);

        unit->items += splits - unit->shared;
        unit->n_splits = splits > unit->n_splits ? splits : unit->n_splits;
    }
}


/* To the next sequence that has rows left; false: there is none. */
static int
settle(const job_t *job, walk_t *walk)
{
    const op_batch_t *batch = job->batch;
    const int32_t *leader = job->scratch->cohorts.leader;

    while (walk->seq >= 0
           && (walk->row == batch->row_start[walk->seq + 1]
               || leader[walk->seq] != walk->seq))
    {
        walk->seq--;
        if (walk->seq >= 0) {
            walk->row = batch->row_start[walk->seq];
        }
    }

    return walk->seq >= 0;
}


/* Lists as many units as the scratch has room for; false: none are left. */
static int
build_wave(job_t *job, walk_t *walk)
{
    scratch_t *scratch = job->scratch;
    const int n_kv = job->attn->n_kv_heads;
    size_t used = 0;

    job->n_units = 0;
    job->n_items = 0;

    while (settle(job, walk)) {
        unit_t *unit = &scratch->units[job->n_units];

        if (scratch->cohorts.size[walk->seq] > 1) {
            fill_cohort(job, walk, unit);
        } else {
            fill_tile(job, walk, unit);
        }

        const size_t per_head = (size_t) unit->n_queries * scratch->group
                                * unit->n_splits * partial_floats(job);
        const size_t fit = (scratch->parts_floats - used) / per_head;
        int heads = n_kv - walk->head;

        if (fit < (size_t) heads) {
            if (job->n_units > 0) {
                break;
            }
            heads = (int) fit;
        }

        unit->head = walk->head;
        unit->n_heads = heads;
        unit->item = job->n_items;
        unit->parts = used;
        for (int h = 0; h < heads; h++) {
            atomic_store_explicit(&scratch->left[job->n_units * n_kv + h],
                                  unit->items, memory_order_relaxed);
        }

        used += per_head * heads;
        job->n_items += unit->items * heads;
        job->n_units++;

        walk->head += heads;
        if (walk->head == n_kv) {
            walk->head = 0;
            walk->row += unit->seqs == NULL ? unit->n_queries : 1;
        }
    }

    return job->n_units > 0;
}


static int
unit_of(const job_t *job, int item)
{
    int low = 0, high = job->n_units - 1;

    while (low < high) {
        const int middle = (low + high + 1) / 2;

        if (job->scratch->units[middle].item <= item) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }

    return low;
}


/* --- one item --- */

/* Some queries of a unit, one split of one KV head. */
typedef struct {
    const unit_t *unit;
    int head;
    int split;
    int query; /* the first; the others have the same pages */
} task_t;


/* A cohort's items of one query, after those of all. */
static void
find_query(const job_t *job, task_t *task)
{
    const unit_t *unit = task->unit;
    int after = task->split - unit->shared;

    for (;;) {
        const int splits = splits_of(job, unit, task->query) - unit->shared;

        if (after < splits) {
            break;
        }

        after -= splits;
        task->query++;
    }

    task->split = unit->shared + after;
}


static void
load_pages(const job_t *job, const task_t *task, cpu_attn_item_t *item)
{
    const int seq = seq_of(task->unit, task->query);
    const int32_t *table = job->batch->block_table[seq] + item->first / OP_PAGE;
    const int last = cpu_attn_visible(item, item->n_queries - 1);
    const size_t offset = (size_t) task->head * job->layout.head_bytes;

    item->split.n_pages = (last + OP_PAGE - 1) / OP_PAGE;
    for (int p = 0; p < item->split.n_pages; p++) {
        item->split.page[p] =
            job->pages + table[p] * job->layout.page_bytes + offset;
    }
}


static void
load_queries(const job_t *job, const task_t *task, const cpu_attn_item_t *item)
{
    const op_attn_t *attn = job->attn;
    const int n = item->group * attn->head_dim;
    const size_t stride =
        (size_t) (attn->n_heads + 2 * attn->n_kv_heads) * attn->head_dim;

    for (int i = 0; i < item->n_queries; i++) {
        const float *from = job->q
                            + row_of(job, task->unit, task->query + i) * stride
                            + (size_t) task->head * n;
        float *to = item->q + (size_t) i * n;

        for (int d = 0; d < n; d++) {
            to[d] = from[d] * attn->scale;
        }
    }
}


/* Where a unit's partials of a KV head and split begin; those of the next
 * split are partials_stride() floats on. */
static size_t
partials_stride(const job_t *job, const unit_t *unit)
{
    return (size_t) unit->n_queries * job->scratch->group * partial_floats(job);
}


static float *
partials_of(const job_t *job, const unit_t *unit, int head, int split)
{
    return job->scratch->parts + unit->parts
           + ((size_t) (head - unit->head) * unit->n_splits + split)
                 * partials_stride(job, unit);
}


static void
combine_head(const job_t *job, const unit_t *unit, int head)
{
    const op_attn_t *attn = job->attn;
    const int group = job->scratch->group;
    const size_t stride = partials_stride(job, unit);
    float *first = partials_of(job, unit, head, 0);

    for (int r = 0; r < unit->n_queries * group; r++) {
        const int row = row_of(job, unit, r / group);
        const int n_splits = splits_of(job, unit, r / group);
        float max = first[0];
        float sum = 0.0f;

        for (int i = 1; i < n_splits; i++) {
            max = first[i * stride] > max ? first[i * stride] : max;
        }
        for (int i = 0; i < n_splits; i++) {
            float *part = first + i * stride;

            part[2] = cpu_exp_neg(part[0] - max);
            sum = fmaf(part[2], part[1], sum);
        }

        job->kernels->combine(
            job->out
                + ((size_t) row * attn->n_heads + head * group + r % group)
                      * attn->head_dim,
            first, n_splits, stride, attn->head_dim, sum);
        first += partial_floats(job);
    }
}


static void
run_item(const job_t *job, int number, float *buffers)
{
    scratch_t *scratch = job->scratch;
    const int index = unit_of(job, number);
    const unit_t *unit = &scratch->units[index];
    const int tile_rows =
        scratch->group > TILE_ROWS ? scratch->group : TILE_ROWS;
    task_t task = {
        .unit = unit,
        .head = unit->head + (number - unit->item) % unit->n_heads,
        .split = (number - unit->item) / unit->n_heads,
    };
    cpu_attn_item_t item = {
        .split.layout = job->layout,
        .split.head_dim = job->attn->head_dim,
        .n_queries = unit->n_queries,
        .group = scratch->group,
        .dim = scratch->dim,
        .ldo = (int) partial_floats(job),
        .scores = buffers,
    };

    if (task.split >= unit->shared) {
        find_query(job, &task);
        item.n_queries = 1;
    }

    item.first = task.split * OP_SPLIT;
    item.pos = job->batch->pos[row_of(job, unit, task.query)];
    if (unit->seqs != NULL && task.split < unit->shared) {
        item.pos = item.first + OP_SPLIT; /* all see all of it */
    }

    item.wide = item.scores + (size_t) tile_rows * OP_SPLIT;
    item.q = item.wide + CPU_ATTN_GROUP * OP_PAGE * scratch->dim;
    item.parts = partials_of(job, unit, task.head, task.split)
                 + (size_t) task.query * scratch->group * item.ldo;

    load_pages(job, &task, &item);
    load_queries(job, &task, &item);
    cpu_attn_item(job->kernels, &item);

    atomic_int *left =
        &scratch->left[index * job->attn->n_kv_heads + task.head - unit->head];
    if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) == 1) {
        combine_head(job, unit, task.head);
    }
}


static void
run_items(void *arg, int thread, int n_threads)
{
    job_t *job = arg;
    float *buffers =
        job->scratch->threads + (size_t) thread * job->scratch->thread_floats;

    (void) n_threads;

    for (;;) {
        const int from = atomic_fetch_add_explicit(&job->next, job->grain,
                                                   memory_order_relaxed);
        const int to =
            from + job->grain < job->n_items ? from + job->grain : job->n_items;
        if (from >= job->n_items) {
            return;
        }
        for (int i = from; i < to; i++) {
            run_item(job, i, buffers);
        }
    }
}


void
cpu_attention(op_dev_t *dev, float *out, const float *q,
              const op_batch_t *batch, const op_attn_t *attn, const op_kv_t *kv,
              int layer)
{
    const int threads = cpu_pool_threads(dev->pool);
    walk_t walk = { .seq = batch->n_seqs };
    job_t job = {
        .kernels = kernels_of(dev->isa),
        .scratch = dev->attn_scratch,
        .out = out,
        .q = q,
        .batch = batch,
        .attn = attn,
        .layout = cpu_kv_layout(kv->dtype, kv->n_kv_heads, kv->head_dim),
    };

    job.pages = cpu_kv_layer(kv, &job.layout, layer);
    cpu_cohorts_find(&job.scratch->cohorts, batch, job.scratch->tile_queries);

    walk.seq = batch->n_seqs - 1;
    walk.row = batch->n_seqs > 0 ? batch->row_start[walk.seq] : 0;

    while (build_wave(&job, &walk)) {
        job.grain = job.n_items >= threads * attn->n_kv_heads * ITEMS_PER_THREAD
                        ? attn->n_kv_heads
                        : 1;
        atomic_store_explicit(&job.next, 0, memory_order_relaxed);

        if (job.n_items == 1) {
            run_items(&job, 0, 1);
        } else {
            cpu_pool_run(dev->pool, run_items, &job);
        }
    }
}
