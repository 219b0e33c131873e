/*
 * kv_copy(): pages move whole, in order, and a sequence that goes on behind a
 * copy of half a page gets the bits of one that computed everything itself.
 *
 *   copy_test [name]    SEED in the environment gives the seed
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/backend.h"
#include "kernels/op/op.h"
#include "t/ops/lib/attn_world.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/small.h"

enum { PAGES = 7, COPIES = 12 };


/* A pool of bytes without a model. */
typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    op_kv_t kv;
    size_t bytes;
} store_t;


/* isa NULL: the oracle.  -1: this machine lacks the instruction set. */
static int
store_open(store_t *s, const char *isa, int threads, const op_kv_t *kv)
{
    const op_open_t params = { .threads = threads, .isa = isa };
    op_err_t err;

    s->ops = backend_find(isa == NULL ? "ref" : "cpu");
    s->dev = s->ops->open(&params, &err);
    if (s->dev == NULL) {
        return -1;
    }
    s->kv = *kv;
    s->bytes = PAGES
               * s->ops->kv_page_bytes(s->dev, (int) kv->dtype, kv->n_layers,
                                       kv->n_kv_heads, kv->head_dim);
    s->kv.base = s->ops->alloc(s->dev, s->bytes);
    assert_non_null(s->kv.base);
    return 0;
}


static void
store_close(store_t *s)
{
    s->ops->free(s->dev, s->kv.base, s->bytes);
    s->ops->close(s->dev);
}


/* The same by memcpy(), from what is known of the layouts: the oracle keeps a
 * page in one piece, the product one record a layer. */
static void
naive(const store_t *s, uint8_t *bytes, const op_copy_t *copies, int n)
{
    const int pieces = s->ops == backend_find("ref") ? 1 : s->kv.n_layers;
    const size_t record = s->bytes / PAGES / (size_t) pieces;

    for (int i = 0; i < n; i++) {
        for (int l = 0; l < pieces && copies[i].from != copies[i].to; l++) {
            uint8_t *pages = bytes + (size_t) l * PAGES * record;

            memcpy(pages + (size_t) copies[i].to * record,
                   pages + (size_t) copies[i].from * record, record);
        }
    }
}


static void
check_list(store_t *s, const op_copy_t *copies, int n)
{
    uint8_t *want = world_must(s->bytes, 1);
    uint8_t *pool = s->kv.base;

    for (size_t i = 0; i < s->bytes; i++) {
        pool[i] = (uint8_t) (i * 37 + i / 256 * 11 + i / 65536);
    }
    memcpy(want, pool, s->bytes);
    naive(s, want, copies, n);
    s->ops->kv_copy(s->dev, &s->kv, copies, n);
    assert_memory_equal(pool, want, s->bytes);
    free(want);
}


/* Nothing, chains, pages read and then written, pages written twice, a page
 * onto itself; any number of layers and threads. */
static void
test_lists(void **unused)
{
    static const op_copy_t chain[] = { { 0, 1 }, { 1, 2 }, { 2, 3 }, { 6, 0 } };
    static const op_copy_t swap[] = { { 0, 6 }, { 1, 0 }, { 6, 1 },
                                      { 5, 5 }, { 4, 2 }, { 3, 2 } };

    (void) unused;

    for (int i = -1; i < WORLD_ISAS; i++) {
        for (int threads = 1; threads <= 4; threads++) {
            const op_kv_t kv = { .n_pages = PAGES,
                                 .n_layers = 1 + threads % 4 * 2,
                                 .n_kv_heads = 1 + threads % 3,
                                 .head_dim = 34,
                                 .dtype = world_dtype };
            op_copy_t some[COPIES];
            store_t s;

            if (store_open(&s, i < 0 ? NULL : world_isas[i], threads, &kv) != 0)
            {
                continue;
            }

            check_list(&s, NULL, 0);
            check_list(&s, chain, 4);
            check_list(&s, swap, 6);

            for (int round = 0; round < (SMALL_SET ? COPIES : 20); round++) {
                for (int c = 0; c < COPIES; c++) {
                    const float x = world_value(round, c, i + 2);
                    const float y = world_value(round, c, i + 9);

                    some[c].from = (int32_t) ((x + 1) / 2.001f * PAGES);
                    some[c].to = (int32_t) ((y + 1) / 2.001f * PAGES);
                }
                check_list(&s, some, 1 + round % COPIES);
            }
            store_close(&s);
        }
    }
}


/* Rows first … end − 1 of a sequence: `own` is from where on its inputs are
 * its own; those before are sequence 0's. */
typedef struct {
    int own;
    int first;
    int end;
    const int32_t *table;
} stretch_t;


/* One step of one sequence; out: [end][width], filled from first on. */
static void
feed(world_t *w, const stretch_t *s, float *out)
{
    const int n = s->end - s->first;
    const int stride = w->width + 2 * w->attn.n_kv_heads * w->attn.head_dim;
    const int32_t row_start[2] = { 0, n };
    int32_t *pos = world_must((size_t) n, sizeof(int32_t));
    float *qkv = world_must((size_t) n * stride, sizeof(float));

    for (int i = 0; i < n; i++) {
        pos[i] = s->first + i;
        world_qkv(w, pos[i] >= s->own, pos[i], qkv + (size_t) i * stride);
    }

    const op_batch_t batch = {
        .n_rows = n,
        .n_seqs = 1,
        .pos = pos,
        .row_start = row_start,
        .block_table = &s->table,
    };
    w->ops->rope_kv(w->dev, qkv, &batch, &w->attn, w->cos_sin, w->attn.head_dim,
                    OP_ROPE_PAIRS, &w->kv, WORLD_LAYER);
    w->ops->attention(w->dev, out + (size_t) s->first * w->width, qkv, &batch,
                      &w->attn, &w->kv, WORLD_LAYER);
    free(qkv);
    free(pos);
}


/* A sequence of `own` tokens in common with another, which has gone on. */
static void
check_fork(const world_shape_t *shape, const char *isa, int own)
{
    enum { LEN = 60 };
    const int n_pages = (LEN + OP_PAGE - 1) / OP_PAGE;
    const int full = own / OP_PAGE;
    int32_t alone[4], leader[4], fork[4];
    float *want, *got;
    world_t w;

    if (world_open(&w, isa, 2, shape, LEN + 20) != 0) {
        return;
    }
    for (int i = 0; i < n_pages; i++) {
        alone[i] = w.free_pages[--w.n_free];
        leader[i] = w.free_pages[--w.n_free];
        fork[i] = i < full ? leader[i] : w.free_pages[--w.n_free];
    }

    want = world_must((size_t) LEN * w.width, sizeof(float));
    got = world_must((size_t) LEN * w.width, sizeof(float));
    feed(&w, &(stretch_t){ own, 0, LEN, alone }, want);

    /* the leader has one row more than is in common, or some */
    const int lead = own + 1 + own % 5 < LEN ? own + 1 + own % 5 : LEN;

    feed(&w, &(stretch_t){ LEN, 0, lead, leader }, got);
    w.ops->kv_copy(w.dev, &w.kv, &(op_copy_t){ leader[full], fork[full] }, 1);
    feed(&w, &(stretch_t){ own, own, own + 1, fork }, got);

    /* it may go on: the copy is a copy */
    feed(&w, &(stretch_t){ LEN, lead, LEN, leader }, got);
    feed(&w, &(stretch_t){ own, own, LEN, fork }, got);

    assert_same_floats(want + (size_t) own * w.width,
                       got + (size_t) own * w.width,
                       (size_t) (LEN - own) * w.width, "behind a copy");
    for (size_t i = 0; i < (size_t) own * w.width; i++) {
        assert_true(isfinite(got[i]));
    }
    free(want);
    free(got);
    world_close(&w);
}


static void
test_forks(void **unused)
{
    static const world_shape_t shapes[] = {
        { 9, 3, 64, 4 }, { 2, 1, 80, 4 }, { 4, 2, 26, 4 }, { 4, 4, 128, 4 }
    };
    /* the small set is what stands first */
    enum { N_OWNS = SMALL_SET ? 4 : 9 };
    static const int owns[] = { 1, 15, 33, 58, 7, 17, 31, 40, 47 };

    (void) unused;

    for (int s = 0; s < 4; s++) {
        for (int i = -1; i < WORLD_ISAS; i++) {
            for (int k = 0; k < N_OWNS; k++) {
                check_fork(&shapes[s], i < 0 ? NULL : world_isas[i], owns[k]);
            }
        }
    }
}


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_lists, world_use_f16),
        { "test_lists_q8_0", test_lists, world_use_q8_0, NULL, NULL },
        cmocka_unit_test_setup(test_forks, world_use_f16),
        { "test_forks_q8_0", test_forks, world_use_q8_0, NULL, NULL },
    };

    world_start();

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
