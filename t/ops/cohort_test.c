/*
 * Sequences that decode behind common pages: who is put together, and that
 * attention answers each as if it were alone, bit for bit.
 *
 *   cohort_test [name]    SEED in the environment gives the seed
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/cpu/cpu_cohort.h"
#include "kernels/op/op.h"
#include "t/ops/lib/attn_world.h"
#include "t/ops/lib/compare.h"
#include "t/ops/lib/small.h"

enum {
    PAGES = OP_SPLIT / OP_PAGE, /* of a split */
    MOST_SEQS = 40,
    SPLITS = 6,
    TEXTS = 5,
    LEN = 800
};

/* A batch whose tables are made of a few texts' pages. */
typedef struct {
    int32_t table[MOST_SEQS][SPLITS * PAGES];
    const int32_t *tables[MOST_SEQS];
    int32_t row_start[MOST_SEQS + 1];
    int32_t pos[MOST_SEQS * 8];
    op_batch_t batch;
} mix_t;


static uint64_t state;


static int
draw(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int) ((state >> 33) % (uint64_t) n);
}


/* Adds a sequence with `rows` rows, the last one at position `pos`. */
static int32_t *
add_seq(mix_t *mix, int rows, int pos)
{
    const int seq = mix->batch.n_seqs++;

    mix->tables[seq] = mix->table[seq];
    for (int i = 0; i < rows; i++) {
        mix->pos[mix->batch.n_rows++] = pos - rows + 1 + i;
    }
    mix->row_start[seq + 1] = mix->batch.n_rows;

    return mix->table[seq];
}


static void
start_mix(mix_t *mix)
{
    memset(mix, 0, sizeof(*mix));
    mix->batch.pos = mix->pos;
    mix->batch.row_start = mix->row_start;
    mix->batch.block_table = mix->tables;
}


/* --- who is together --- */

typedef struct {
    cpu_cohorts_t cohorts;
    int32_t arrays[MOST_SEQS * 6];
} finder_t;


static void
find(finder_t *finder, const mix_t *mix, int most)
{
    assert_int_equal(cpu_cohorts_bytes(MOST_SEQS), sizeof(finder->arrays));
    memset(finder, 0x55, sizeof(*finder));
    cpu_cohorts_bind(&finder->cohorts, finder->arrays, MOST_SEQS);
    cpu_cohorts_find(&finder->cohorts, &mix->batch, most);
}


/* Pages `from` … of a table, which count up from `first`. */
static void
number_pages(int32_t *table, int from, int first)
{
    for (int i = from; i < SPLITS * PAGES; i++) {
        table[i] = first + i;
    }
}


static void
test_example(void **unused)
{
    finder_t finder;
    mix_t mix;
    const cpu_cohorts_t *c = &finder.cohorts;

    (void) unused;
    start_mix(&mix);

    number_pages(add_seq(&mix, 1, 600), 0, 0);    /* 0: two whole splits */
    number_pages(add_seq(&mix, 1, 600), 0, 1000); /* 1: other pages */
    number_pages(add_seq(&mix, 1, 1100), 0, 0);   /* 2: four, two common */
    number_pages(add_seq(&mix, 8, 600), 0, 0);    /* 3: a prefill */
    number_pages(add_seq(&mix, 1, 254), 0, 0);    /* 4: none is whole */
    number_pages(add_seq(&mix, 1, 255), 0, 0);    /* 5: one is */
    find(&finder, &mix, 16);

    assert_int_equal(c->leader[5], 5);
    assert_int_equal(c->leader[2], 5);
    assert_int_equal(c->leader[0], 5);
    assert_int_equal(c->size[5], 3);
    assert_int_equal(c->shared[5], 1);
    assert_int_equal(c->seqs[c->first[5]], 5);
    assert_int_equal(c->seqs[c->first[5] + 1], 2);
    assert_int_equal(c->seqs[c->first[5] + 2], 0);
    for (int seq = 1; seq < 5; seq += seq == 1 ? 2 : 1) {
        assert_int_equal(c->leader[seq], seq);
        assert_int_equal(c->size[seq], 1);
    }

    find(&finder, &mix, 2);
    assert_int_equal(c->size[5], 2);
    assert_int_equal(c->leader[0], 0);

    find(&finder, &mix, 1);
    assert_int_equal(c->size[5], 1);
    assert_int_equal(c->leader[2], 2);

    /* one page differs in the second split */
    mix.table[5][0] = 7;
    mix.table[0][PAGES + 3]++;
    find(&finder, &mix, 16);
    assert_int_equal(c->leader[5], 5);
    assert_int_equal(c->leader[0], 2);
    assert_int_equal(c->shared[2], 1);
}


static int
same_pages(const mix_t *mix, int a, int b, int splits)
{
    return memcmp(mix->table[a], mix->table[b],
                  (size_t) splits * PAGES * sizeof(int32_t))
           == 0;
}


static void
check_cohorts(const finder_t *finder, const mix_t *mix, int most)
{
    const cpu_cohorts_t *c = &finder->cohorts;
    int seen[MOST_SEQS] = { 0 };

    for (int seq = 0; seq < mix->batch.n_seqs; seq++) {
        const int leader = c->leader[seq];
        const int last = mix->row_start[seq + 1] - 1;

        assert_in_range(leader, seq, mix->batch.n_seqs - 1);
        assert_int_equal(c->leader[leader], leader);

        if (c->size[leader] > 1) {
            assert_int_equal(last, mix->row_start[seq]);
            assert_true(c->shared[leader] >= 1);
            assert_true((c->shared[leader] * OP_SPLIT) <= mix->pos[last] + 1);
            assert_true(same_pages(mix, seq, leader, c->shared[leader]));
        }
        if (leader != seq) {
            continue;
        }

        assert_in_range(c->size[seq], 1, most);
        assert_int_equal(c->seqs[c->first[seq]], seq);
        for (int i = 0; i < c->size[seq]; i++) {
            const int member = c->seqs[c->first[seq] + i];

            assert_int_equal(c->leader[member], seq);
            assert_int_equal(seen[member]++, 0);
        }
    }
    for (int seq = 0; seq < mix->batch.n_seqs; seq++) {
        assert_int_equal(seen[seq], 1);
    }
}


static void
test_random_batches(void **unused)
{
    int together = 0;

    (void) unused;

    for (int round = 0; round < 2000; round++) {
        const int n = draw(MOST_SEQS + 1);
        const int most = 1 + draw(16);
        finder_t finder;
        mix_t mix;

        start_mix(&mix);
        for (int i = 0; i < n; i++) {
            const int rows = draw(4) == 0 ? 1 + draw(8) : 1;
            int32_t *table =
                add_seq(&mix, rows, 8 + draw(SPLITS * OP_SPLIT - 8));

            /* the first pages of two texts fall into one slot */
            number_pages(table, 0, CPU_COHORT_SLOTS * draw(3));
            number_pages(table, draw(SPLITS * PAGES), 10000 * (1 + draw(3)));
        }
        find(&finder, &mix, most);
        check_cohorts(&finder, &mix, most);
        for (int i = 0; i < n; i++) {
            together += finder.cohorts.leader[i] != i;
        }
    }

    assert_true(together > 1000);
}


/* --- what they are answered --- */

/* Sequences of random lengths behind a random text each, which they leave at a
 * random page for another one. */
static void
mix_texts(const world_t *w, mix_t *mix)
{
    start_mix(mix);

    for (int i = 0; i < WORLD_SEQS; i++) {
        const int rows = draw(6) == 0 ? 2 + draw(7) : 1;
        const int pos = draw(5) == 0 ? 7 + draw(LEN - 7) : LEN - 1 - draw(400);
        const int32_t *text = w->table[draw(2)];
        const int32_t *other = w->table[draw(TEXTS)];
        const int leave =
            draw(3) == 0 ? draw(LEN / OP_PAGE) : LEN / OP_PAGE - draw(20);
        int32_t *table = add_seq(mix, rows, pos);

        for (int p = 0; p <= pos / OP_PAGE; p++) {
            table[p] = p < leave ? text[p] : other[p];
        }
    }
}


/* The rows of sequence `seq` as a batch of their own. */
static op_batch_t
alone(const mix_t *mix, int seq, int32_t *row_start)
{
    op_batch_t batch = mix->batch;

    row_start[0] = 0;
    row_start[1] = mix->row_start[seq + 1] - mix->row_start[seq];
    batch.n_rows = row_start[1];
    batch.n_seqs = 1;
    batch.pos += mix->row_start[seq];
    batch.row_start = row_start;
    batch.block_table += seq;

    return batch;
}


static void
check_answers(const world_t *w, const mix_t *mix)
{
    const size_t stride =
        w->width + 2 * (size_t) w->attn.n_kv_heads * w->attn.head_dim;
    const size_t n = mix->batch.n_rows;
    float *qkv = world_must(n * stride, sizeof(float));
    float *got = world_must(n * w->width, sizeof(float));
    float *want = world_must(n * w->width, sizeof(float));

    for (size_t r = 0; r < n; r++) {
        world_qkv(w, (int) r, mix->pos[r], qkv + r * stride);
    }
    w->ops->attention(w->dev, got, qkv, &mix->batch, &w->attn, &w->kv,
                      WORLD_LAYER);

    for (int seq = 0; seq < mix->batch.n_seqs; seq++) {
        const size_t row = mix->row_start[seq];
        int32_t row_start[2];
        const op_batch_t batch = alone(mix, seq, row_start);

        w->ops->attention(w->dev, want + row * w->width, qkv + row * stride,
                          &batch, &w->attn, &w->kv, WORLD_LAYER);
    }

    assert_same_floats(want, got, n * w->width, "together");
    free(want);
    free(got);
    free(qkv);
}


static void
test_same_answers(void **unused)
{
    static const world_shape_t shapes[] = {
        { 9, 3, 64, TEXTS }, { 4, 1, 80, TEXTS },  { 2, 2, 96, TEXTS },
        { 8, 1, 18, TEXTS }, { 70, 1, 16, TEXTS },
    };
    (void) unused;

    for (int i = 0; i < 5 * WORLD_ISAS; i++) {
        const char *isa = world_isas[i % WORLD_ISAS];
        world_t w;

        if (i > WORLD_ISAS && i % WORLD_ISAS == WORLD_ISAS - 1) {
            continue; /* the baseline is slow */
        }
        if (world_open(&w, isa, 1 + i % 3, &shapes[i / WORLD_ISAS], LEN) != 0) {
            continue;
        }
        for (int s = 0; s < TEXTS; s++) {
            world_fill_seq(&w, s, LEN);
        }
        for (int round = 0; round < (SMALL_SET ? 2 : 4); round++) {
            mix_t mix;

            mix_texts(&w, &mix);
            check_answers(&w, &mix);
        }
        world_close(&w);
    }
}


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_example),
        cmocka_unit_test(test_random_batches),
        cmocka_unit_test_setup(test_same_answers, world_use_f16),
        { "test_same_answers_q8_0", test_same_answers, world_use_q8_0, NULL,
          NULL },
    };

    world_start();
    state = world_seed;

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
