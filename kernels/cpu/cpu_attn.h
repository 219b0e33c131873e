/*
 * The kernels under paged attention, one table per instruction set.
 *
 * cpu_attn.c decides what is computed where; these compute one split of at
 * most 256 tokens for one KV head and a few rows (a row is one query head of
 * one token).  Each sum has one order, written here, and the tables agree to
 * the bit.
 *
 * K and V are read as cpu_kv.h lays them out; both types become f32 without
 * rounding, so they differ in nothing but the loads.
 */

#ifndef KERNELS_CPU_CPU_ATTN_H
#define KERNELS_CPU_CPU_ATTN_H

#include <stdint.h>

#include "kernels/cpu/cpu_kv.h"
#include "kernels/op/op.h"

enum {
    CPU_ATTN_PAGES = OP_SPLIT / OP_PAGE, /* pages in a split */
    CPU_ATTN_GROUP = 4,                  /* pages widened at once */
    CPU_ATTN_HEAD = 16                   /* floats before o in a partial */
};

/* Accumulators must live in registers, so their loops must vanish; clang
 * ignores gcc's pragma. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The K and V that a kernel reads: one split of one KV head. */
typedef struct {
    const uint8_t *page[CPU_ATTN_PAGES]; /* records of the KV head */
    cpu_kv_layout_t layout;
    int n_pages;
    int head_dim;
} cpu_attn_split_t;

typedef struct {
    /* s[r][16 p + t] = sum of q[r][d] * K[p][d][t] by fma from 0, d
     * ascending.  q: [rows][head_dim], scaled; s: [rows][OP_SPLIT], 64-byte
     * aligned.  Lanes past the sequence's end hold anything. */
    void (*scores)(const cpu_attn_split_t *split, float *s, const float *q,
                   int rows);

    /* The same for 1 … 4 widened pages.  k: [n_pages][head_dim][16]. */
    void (*scores_wide)(float *s, const float *q, int rows, const float *k,
                        int n_pages, int head_dim);

    /* In place over the n valid scores of a row: m = their maximum,
     * s = exp(s − m), l = their sum: per lane over pages ascending, then
     * lanes j + (j + 8), j + (j + 4), j + (j + 2), 0 + 1.  To ml[0], ml[1]. */
    void (*softmax)(float *s, int n, float *ml);

    /* o[r][d] = sum of s[r][t] * V[t][d] by fma from 0, t ascending to the
     * last valid token n − 1; no more of V is read.  head_dim is a multiple
     * of 16; o: rows of `ldo` floats, 64-byte aligned. */
    void (*values)(const cpu_attn_split_t *split, float *o, int ldo,
                   const float *s, int rows, int n);

    /* o[r][d] += the same over n rows of widened V.  v: [n][dim], dim a
     * multiple of 16. */
    void (*values_wide)(float *o, int ldo, const float *s, int rows,
                        const float *v, int n, int dim);

    /* A page's K to f32, exact: [head_dim][16]. */
    void (*widen_keys)(const cpu_attn_split_t *split, float *out, int page);

    /* The same of V for its first n tokens, rows of `ld` floats. */
    void (*widen_values)(const cpu_attn_split_t *split, float *out, int ld,
                         int page, int n);

    /* y[d] = (sum of w_i * o_i[d] by fma from 0, i ascending) / sum.
     * parts: n partials `stride` floats apart, w_i at [2], o_i at [16]. */
    void (*combine)(float *y, const float *parts, int n, size_t stride,
                    int head_dim, float sum);

    /* One token of up to so many rows is read without widening; 0: scores and
     * values are NULL. */
    int direct_rows;
} cpu_attn_kernels_t;

/* What an item computes, and where: buffers of its thread, partials of its
 * tile.  Rows are the tile's queries times the query heads of the KV head. */
typedef struct {
    cpu_attn_split_t split;
    int first; /* position of the split's first token */
    int pos;   /* of the tile's first query; the others follow it */
    int n_queries;
    int group;     /* query heads of the KV head */
    int dim;       /* head_dim rounded up to 16 */
    int ldo;       /* floats of a partial: CPU_ATTN_HEAD + dim */
    float *q;      /* [rows][head_dim], scaled */
    float *scores; /* [rows][OP_SPLIT] */
    float *wide;   /* [CPU_ATTN_GROUP * OP_PAGE][dim] */
    float *parts;  /* [rows][ldo]: maximum, sum, …, o */
} cpu_attn_item_t;


/* A page's f16: V, or the scales of K and V. */
static inline const uint16_t *
cpu_attn_halves(const cpu_attn_split_t *split, int page, size_t offset)
{
    return (const uint16_t *) (const void *) (split->page[page] + offset);
}


/* Tokens of the split that a query sees. */
static inline int
cpu_attn_visible(const cpu_attn_item_t *item, int query)
{
    const int n = item->pos + query + 1 - item->first;

    return n < OP_SPLIT ? n : OP_SPLIT;
}


/* Fills the item's partials from its q and pages. */
void cpu_attn_item(const cpu_attn_kernels_t *kernels,
                   const cpu_attn_item_t *item);

extern const cpu_attn_kernels_t cpu_attn_baseline;
#if defined(__x86_64__)
extern const cpu_attn_kernels_t cpu_attn_avx2;
extern const cpu_attn_kernels_t cpu_attn_avx512;
#endif

#endif /* KERNELS_CPU_CPU_ATTN_H */
