/*
 * One item of attention: one split of one KV head for the rows of a tile, from
 * pages to partials.  A single token with few heads reads pages as they
 * are; a tile has its pages widened to f32 once for all rows.  Both keep the
 * one order of cpu_attn.h.
 */

#include <string.h>

#include "kernels/cpu/cpu_attn.h"


static void
softmax_rows(const cpu_attn_kernels_t *kernels, const cpu_attn_item_t *item)
{
    const int group = item->group;
    const int rows = item->n_queries * group;

    for (int r = 0; r < rows; r++) {
        kernels->softmax(item->scores + (size_t) r * OP_SPLIT,
                         cpu_attn_visible(item, r / group),
                         item->parts + (size_t) r * item->ldo);
    }
}


static void
widen_values(const cpu_attn_kernels_t *kernels, const cpu_attn_item_t *item,
             int page, int n)
{
    const int head_dim = item->split.head_dim;
    const int dim = item->dim;
    float *to = item->wide;

    for (int t = 0; t < n; t += OP_PAGE) {
        const int tokens = n - t < OP_PAGE ? n - t : OP_PAGE;

        kernels->widen_values(&item->split, to + (size_t) t * dim, dim,
                              page + t / OP_PAGE, tokens);

        for (int i = t; i < t + tokens && head_dim < dim; i++) {
            memset(to + (size_t) i * dim + head_dim, 0,
                   (dim - head_dim) * sizeof(float));
        }
    }
}


/* The values of up to four pages for all rows.  The tokens that every query
 * sees go together; the rest, in the last page, query by query, so that no
 * row ever touches a token after it: 0 * V is not 0 if V is Inf or NaN. */
static void
values_group(const cpu_attn_kernels_t *kernels, const cpu_attn_item_t *item,
             int page)
{
    const int group = item->group;
    const int dim = item->dim;
    const int base = page * OP_PAGE;
    const int limit = CPU_ATTN_GROUP * OP_PAGE;
    const int queries = item->n_queries;
    const int rows = queries * group;
    int all = cpu_attn_visible(item, 0) - base;
    int most = cpu_attn_visible(item, queries - 1) - base;

    /* all ≥ 1: the queries of a tile end in the same page */
    all = all > limit ? limit : all;
    most = most > limit ? limit : most;
    widen_values(kernels, item, page, most);

    kernels->values_wide(item->parts + CPU_ATTN_HEAD, item->ldo,
                         item->scores + base, rows, item->wide, all, dim);
    if (all == most) {
        return;
    }

    for (int i = 1; i < queries; i++) {
        const int n = cpu_attn_visible(item, i) - base;

        kernels->values_wide(
            item->parts + (size_t) i * group * item->ldo + CPU_ATTN_HEAD,
            item->ldo,
            item->scores + (size_t) i * group * OP_SPLIT + base + all, group,
            item->wide + (size_t) all * dim, (n < limit ? n : limit) - all,
            dim);
    }
}


/* Pages are widened to f32 once for all rows of the tile. */
static void
compute_wide(const cpu_attn_kernels_t *kernels, const cpu_attn_item_t *item)
{
    const int k_floats = OP_PAGE * item->split.head_dim;
    const int n_pages = item->split.n_pages;
    const int rows = item->n_queries * item->group;

    for (int p = 0; p < n_pages; p += CPU_ATTN_GROUP) {
        const int n =
            n_pages - p < CPU_ATTN_GROUP ? n_pages - p : CPU_ATTN_GROUP;
        for (int i = 0; i < n; i++) {
            kernels->widen_keys(&item->split, item->wide + i * k_floats, p + i);
        }
        kernels->scores_wide(item->scores + p * OP_PAGE, item->q, rows,
                             item->wide, n, item->split.head_dim);
    }

    softmax_rows(kernels, item);

    for (int r = 0; r < rows; r++) {
        memset(item->parts + (size_t) r * item->ldo + CPU_ATTN_HEAD, 0,
               item->dim * sizeof(float));
    }
    for (int p = 0; p < n_pages; p += CPU_ATTN_GROUP) {
        values_group(kernels, item, p);
    }
}


void
cpu_attn_item(const cpu_attn_kernels_t *kernels, const cpu_attn_item_t *item)
{
    const int rows = item->n_queries * item->group;

    if (item->n_queries > 1 || rows > kernels->direct_rows
        || item->split.head_dim != item->dim)
    {
        compute_wide(kernels, item);
        return;
    }

    kernels->scores(&item->split, item->scores, item->q, rows);
    softmax_rows(kernels, item);
    kernels->values(&item->split, item->parts + CPU_ATTN_HEAD, item->ldo,
                    item->scores, rows, cpu_attn_visible(item, 0));
}
