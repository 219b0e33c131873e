/*
 * Repacked weights of the CPU backend, and who owns their memory.
 */

#include <stdio.h>
#include <stdlib.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_weight.h"
#include "kernels/op/repack.h"

enum {
    /* Weights share blocks of memory, so that small ones too lie on huge
     * pages. */
    ARENA_BYTES = 64 * 1024 * 1024
};

struct cpu_arena_s {
    cpu_arena_t *next;
    uint8_t *base;
    size_t bytes;
    size_t used;
    int n_weights; /* the memory goes when the last of them is freed */
};


/* The newest arena, or a new one when it has no room. */
static cpu_arena_t *
arena_with(op_dev_t *dev, size_t bytes)
{
    cpu_arena_t *arena = dev->weight_arenas;

    if (arena != NULL && arena->bytes - arena->used >= bytes) {
        return arena;
    }

    arena = calloc(1, sizeof(cpu_arena_t));

    if (arena == NULL) {
        return NULL;
    }

    arena->bytes = bytes > ARENA_BYTES ? bytes : ARENA_BYTES;
    arena->base = cpu_alloc(dev, arena->bytes);

    if (arena->base == NULL) {
        free(arena);
        return NULL;
    }

    arena->next = dev->weight_arenas;
    dev->weight_arenas = arena;

    return arena;
}


static void
arena_release(op_dev_t *dev, cpu_arena_t *arena)
{
    cpu_arena_t **at = &dev->weight_arenas;

    if (--arena->n_weights > 0) {
        return;
    }

    while (*at != arena) {
        at = &(*at)->next;
    }

    *at = arena->next;
    cpu_free(dev, arena->base, arena->bytes);
    free(arena);
}


/* Segments of w from the parts, without their data.  A segment's parts have
 * one dtype, not only one layout, so that repacking asks each row's type
 * once. */
static void
plan_segments(op_weight_t *w, const op_tensor_t *parts, int n_parts)
{
    cpu_segment_t *seg = NULL;

    w->n_in = (int) parts[0].n_in;

    for (int i = 0; i < n_parts; i++) {
        if (i == 0 || parts[i].dtype != parts[i - 1].dtype) {
            seg = &w->segments[w->n_segments++];
            seg->layout = (op_layout_t) op_layout_of(parts[i].dtype);
            seg->n_in = w->n_in;
            seg->n_records = w->n_in / op_layout_record(seg->layout)->span;
            seg->group_bytes = op_layout_group_bytes(seg->layout, w->n_in);
            seg->first_out = w->n_out;
            w->has_quantised |= op_layout_record(seg->layout)->bits != 0;
        }

        seg->n_out += (int) parts[i].n_out;
        w->n_out += (int) parts[i].n_out;
    }

    for (int i = 0; i < w->n_segments; i++) {
        seg = &w->segments[i];
        seg->n_groups = (seg->n_out + OP_LANES - 1) / OP_LANES;
        w->bytes += ((size_t) seg->n_groups * seg->group_bytes + 63) / 64 * 64;
    }
}


typedef struct {
    const cpu_segment_t *seg;
    const op_tensor_t *parts; /* the segment's first part */
} repack_job_t;


static void
repack_run(void *arg, int thread, int n_threads)
{
    const repack_job_t *job = arg;
    const cpu_segment_t *seg = job->seg;
    const op_tensor_t *part = job->parts;
    const size_t row_bytes = op_row_bytes((int) part->dtype, part->n_in);
    int64_t before = 0; /* outputs of the parts before this one */
    int from, to;

    cpu_pool_share(seg->n_groups, 1, thread, n_threads, &from, &to);

    for (int o = from * OP_LANES; o < to * OP_LANES && o < seg->n_out; o++) {
        uint8_t *group = seg->data + (size_t) (o / OP_LANES) * seg->group_bytes;

        while (o - before >= part->n_out) {
            before += part->n_out;
            part++;
        }

        op_repack_row(part->dtype,
                      (const uint8_t *) part->data
                          + (size_t) (o - before) * row_bytes,
                      part->n_in, group, o % OP_LANES);
    }
}


static void
place_segments(op_weight_t *w, uint8_t *data)
{
    for (int i = 0; i < w->n_segments; i++) {
        cpu_segment_t *seg = &w->segments[i];

        seg->data = data;
        data += ((size_t) seg->n_groups * seg->group_bytes + 63) / 64 * 64;
    }
}


static void
repack_parts(op_dev_t *dev, op_weight_t *w, const op_tensor_t *parts)
{
    for (int i = 0; i < w->n_segments; i++) {
        cpu_segment_t *seg = &w->segments[i];
        repack_job_t job = { seg, parts };
        int64_t n_out = 0;

        cpu_pool_run(dev->pool, repack_run, &job);

        while (n_out < seg->n_out) {
            n_out += parts->n_out;
            parts++;
        }
    }
}


/* A weight with its segments planned, without memory for them. */
static op_weight_t *
weight_plan(const op_tensor_t *parts, int n_parts, op_err_t *err)
{
    op_weight_t *w;
    int64_t n_out = 0;

    for (int i = 0; i < n_parts; i++) {
        if (op_part_check(&parts[i], parts[0].n_in, err) != 0) {
            return NULL;
        }

        n_out += parts[i].n_out;
    }

    if (n_parts < 1 || n_out > OP_MAX_SIDE) {
        snprintf(err->text, sizeof(err->text), "a weight of %lld rows",
                 (long long) n_out);
        return NULL;
    }

    w = calloc(1,
               sizeof(op_weight_t) + (size_t) n_parts * sizeof(cpu_segment_t));

    if (w == NULL) {
        snprintf(err->text, sizeof(err->text),
                 "no memory for a weight of %lld rows", (long long) n_out);
        return NULL;
    }

    plan_segments(w, parts, n_parts);

    return w;
}


op_weight_t *
cpu_weight(op_dev_t *dev, const op_tensor_t *parts, int n_parts, op_err_t *err)
{
    op_weight_t *w = weight_plan(parts, n_parts, err);

    if (w == NULL) {
        return NULL;
    }

    w->arena = arena_with(dev, w->bytes);

    if (w->arena == NULL) {
        snprintf(err->text, sizeof(err->text),
                 "no memory for a weight of %d rows", w->n_out);
        free(w);
        return NULL;
    }

    place_segments(w, w->arena->base + w->arena->used);
    repack_parts(dev, w, parts);
    w->arena->used += w->bytes;
    w->arena->n_weights++;

    return w;
}


/* All instruction sets read one layout.  Whatever changes repack.c's output or
 * the order of segments gets a new name. */
const char *
cpu_weight_form(const op_dev_t *dev)
{
    (void) dev;

    return "cpu lanes16 v1";
}


const void *
cpu_weight_data(const op_weight_t *weight)
{
    return weight->segments[0].data;
}


op_weight_t *
cpu_weight_over(op_dev_t *dev, const op_tensor_t *parts, int n_parts,
                const op_bytes_t *data, op_err_t *err)
{
    op_weight_t *w = weight_plan(parts, n_parts, err);

    (void) dev;

    if (w == NULL) {
        return NULL;
    }

    if (w->bytes != data->len || (uintptr_t) data->data % 64 != 0) {
        snprintf(err->text, sizeof(err->text),
                 "%zu bytes at %p are no weight of %zu", data->len, data->data,
                 w->bytes);
        free(w);
        return NULL;
    }

    /* nothing writes to a weight but repacking */
    place_segments(w, (uint8_t *) (uintptr_t) data->data);

    return w;
}


void
cpu_weight_free(op_dev_t *dev, op_weight_t *weight)
{
    if (weight == NULL) {
        return;
    }

    if (weight->arena != NULL) {
        arena_release(dev, weight->arena);
    }

    free(weight);
}


size_t
cpu_weight_bytes(const op_weight_t *weight)
{
    return weight->bytes;
}


void
cpu_weight_fini(op_dev_t *dev)
{
    while (dev->weight_arenas != NULL) {
        cpu_arena_t *arena = dev->weight_arenas;

        dev->weight_arenas = arena->next;
        cpu_free(dev, arena->base, arena->bytes);
        free(arena);
    }
}


void
cpu_embed(op_dev_t *dev, float *x, const op_weight_t *w, const int32_t *tokens,
          int rows)
{
    (void) dev;

    for (int r = 0; r < rows; r++) {
        const cpu_segment_t *seg = w->segments;
        int o = tokens[r];

        while (o >= seg->n_out) {
            o -= seg->n_out;
            seg++;
        }

        op_unpack_row(seg->layout,
                      seg->data + (size_t) (o / OP_LANES) * seg->group_bytes,
                      o % OP_LANES, x + (size_t) r * (size_t) w->n_in, w->n_in);
    }
}
