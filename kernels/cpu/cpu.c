/*
 * The CPU backend's device: its threads, its memory, and the op table through
 * which the engine reaches everything else.
 */

#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_BYTES = 2 * 1024 * 1024 };


static void
cpu_close(op_dev_t *dev)
{
    if (dev == NULL) {
        return;
    }

    if (!dev->borrows_pool) {
        cpu_pool_destroy(dev->pool);
    }

    cpu_linear_fini(dev);
    cpu_weight_fini(dev);
    cpu_attn_fini(dev);
    free(dev);
}


static int
threads_of(const op_open_t *params)
{
    if (params->threads > 0) {
        return params->threads;
    }

    const int n = cpu_pool_online() - params->reserved;

    return n > 1 ? n : 1;
}


static op_dev_t *
cpu_open(const op_open_t *params, op_err_t *err)
{
    op_dev_t *dev;
    const char *note;
    const int isa = cpu_isa_choose(params->isa, &note, err);

    if (isa < 0) {
        return NULL;
    }

    if (params->reserved < 0) {
        snprintf(err->text, sizeof(err->text), "%d CPUs cannot be reserved",
                 params->reserved);
        return NULL;
    }

    if (params->threads < 0 || params->threads > CPU_POOL_MAX) {
        snprintf(err->text, sizeof(err->text),
                 "%d threads asked for; 1 to %d are possible, 0 means all",
                 params->threads, CPU_POOL_MAX);
        return NULL;
    }

    dev = calloc(1, sizeof(op_dev_t));
    if (dev == NULL) {
        snprintf(err->text, sizeof(err->text), "no memory for the device");
        return NULL;
    }

    int threads = threads_of(params);

    dev->isa = isa;

    if (params->beside != NULL) {
        dev->isa = params->beside->isa;
        dev->pool = params->beside->pool;
        dev->borrows_pool = 1;
        threads = cpu_pool_threads(dev->pool);
    } else {
        dev->pool = cpu_pool_create(threads);
    }

    if (dev->pool == NULL) {
        snprintf(err->text, sizeof(err->text), "cannot start %d threads",
                 threads);
        free(dev);
        return NULL;
    }

    const char *pinned = "";

    if (params->pinned && !dev->borrows_pool) {
        pinned = cpu_pool_pin(dev->pool, params->reserved) ? ", pinned"
                                                           : ", not pinned";
    }

    snprintf(dev->describe, sizeof(dev->describe), "%s, %d thread%s%s%s",
             cpu_isa_name(dev->isa), threads, threads == 1 ? "" : "s", pinned,
             note);
    return dev;
}


static const char *
cpu_describe(op_dev_t *dev)
{
    return dev->describe;
}


static int
cpu_threads(const op_dev_t *dev)
{
    return cpu_pool_threads(dev->pool);
}


static void
cpu_parallel(op_dev_t *dev, op_share_fn fn, void *arg)
{
    cpu_pool_run(dev->pool, fn, arg);
}


static int
check_limits(const op_limits_t *limits, op_err_t *err)
{
    if (limits->max_rows < 1 || limits->max_seqs < 1 || limits->max_len < 1
        || limits->max_in < 1 || limits->n_kv_heads < 1 || limits->n_heads < 1)
    {
        snprintf(err->text, sizeof(err->text), "a limit is not positive");
        return -1;
    }

    if (limits->n_heads % limits->n_kv_heads != 0) {
        snprintf(err->text, sizeof(err->text),
                 "%d heads are not a multiple of %d KV heads", limits->n_heads,
                 limits->n_kv_heads);
        return -1;
    }

    if (limits->head_dim < 2 || limits->head_dim > CPU_MAX_HEAD_DIM
        || limits->head_dim % 2 != 0)
    {
        snprintf(err->text, sizeof(err->text),
                 "head dimension %d; it must be even, 2 to %d",
                 limits->head_dim, CPU_MAX_HEAD_DIM);
        return -1;
    }

    return 0;
}


static int
cpu_prepare(op_dev_t *dev, const op_limits_t *limits, op_err_t *err)
{
    if (check_limits(limits, err) != 0) {
        return -1;
    }

    if (cpu_linear_prepare(dev, limits) != 0
        || cpu_attn_prepare(dev, limits) != 0) {
        snprintf(err->text, sizeof(err->text),
                 "no memory for the scratch of %d rows, %d tokens long",
                 limits->max_rows, limits->max_len);
        return -1;
    }

    dev->limits = *limits;
    return 0;
}


static size_t
round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}


/* Large blocks come from mmap, on a 2 MB boundary so that the kernel can back
 * them by huge pages: with 4 KB pages one thread reads weights 10 to 30 %
 * slower.  cpu_free() is told the size, so it knows which kind it has. */
void *
cpu_alloc(op_dev_t *dev, size_t bytes)
{
    (void) dev;

    if (bytes > SIZE_MAX / 2) {
        return NULL;
    }

    if (bytes < HUGE_BYTES) {
        const size_t size = round_up(bytes == 0 ? 1 : bytes, 64);
        void *p = aligned_alloc(64, size);

        if (p != NULL) {
            memset(p, 0, size);
        }
        return p;
    }

    const size_t size = round_up(bytes, HUGE_BYTES);
    char *base = mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return NULL;
    }

    char *p = (char *) round_up((uintptr_t) base, HUGE_BYTES);
    if (p > base) {
        munmap(base, (size_t) (p - base));
    }
    munmap(p + size, (size_t) (base + HUGE_BYTES - p));
    madvise(p, size, MADV_HUGEPAGE);
    return p;
}


void
cpu_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) dev;

    if (p == NULL) {
        return;
    }

    if (bytes < HUGE_BYTES) {
        free(p);
    } else {
        munmap(p, round_up(bytes, HUGE_BYTES));
    }
}


static op_memory_t
cpu_memory(op_dev_t *dev)
{
    (void) dev;

    return (op_memory_t){ 0 };
}


static void
cpu_move(op_dev_t *dev, void *to, const void *from, size_t bytes)
{
    (void) dev;
    memmove(to, from, bytes);
}


static void
cpu_step(op_dev_t *dev, const op_batch_t *batch)
{
    (void) dev;
    (void) batch;
}


static int
cpu_check(op_dev_t *dev, op_err_t *err)
{
    (void) dev;
    (void) err;

    return 0;
}


static void
cpu_linear_of(op_dev_t *dev, float *y, int ldy, const op_input_t *in, int rows,
              const op_weight_t *w, int mode)
{
    const float *x = in->kind == OP_PLAIN ? in->x : in->scratch;

    if (in->kind == OP_NORMED) {
        cpu_rmsnorm(dev, in->scratch, in->x, in->norm, rows, in->dim, in->eps);
    } else if (in->kind == OP_GATED) {
        cpu_silu_mul(dev, in->scratch, in->x, rows, in->dim);
    }

    cpu_linear(dev, y, ldy, x, rows, w, mode);
}


const op_table_t cpu_ops = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .prepare = cpu_prepare,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .threads = cpu_threads,
    .parallel = cpu_parallel,
    .host = true,
    .memory = cpu_memory,
    .put = cpu_move,
    .get = cpu_move,
    .step = cpu_step,
    .check = cpu_check,
    .weight = cpu_weight,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .weight_form = cpu_weight_form,
    .weight_data = cpu_weight_data,
    .weight_over = cpu_weight_over,
    .embed = cpu_embed,
    .rmsnorm = cpu_rmsnorm,
    .linear = cpu_linear,
    .linear_of = cpu_linear_of,
    .gather = cpu_gather,
    .silu_mul = cpu_silu_mul,
    .rope_kv = cpu_rope_kv,
    .attention = cpu_attention,
    .kv_page_bytes = cpu_kv_page_bytes,
    .kv_copy = cpu_kv_copy,
};
