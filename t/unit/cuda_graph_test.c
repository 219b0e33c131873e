/*
 * Decode by CUDA graphs, emulated: the same logits bit for bit as without, as
 * batches grow and shrink, contexts get longer, pages move, and other passes
 * come between; how much is launched; and what happens when a recording, or
 * the launch of one, is refused.
 */

#include "t/unit/model_tiny.h"
#include "t/unit/random.h"

#include <math.h>

#include "t/shim/options.h"

enum {
    MAX_SEQS = 12,
    MAX_LEN = 600,
    SEQ_PAGES = (MAX_LEN + OP_PAGE - 1) / OP_PAGE,
    N_PAGES = 13 * SEQ_PAGES, /* a sequence's worth is free */
    N_VOCAB = 40,
    MAX_ROWS = 256,
    KEPT = 64 /* graphs that are kept at most */
};

/* The device's errors that stay go with it. */
int cudaDeviceReset(void);

/* The same model twice: with graphs, and without. */
typedef struct {
    run_t with;
    run_t without;
    int32_t table[MAX_SEQS][SEQ_PAGES];
    int32_t n_free;
    int32_t free[N_PAGES];
    int len[MAX_SEQS];
    random_t random;
    uint64_t replays;
} world_t;

/* Rows of a step: `n` sequences, so many rows each, all of them wanted or only
 * each sequence's last. */
typedef struct {
    int n;
    int seq[MAX_SEQS];
    int rows[MAX_SEQS];
    bool all;
    bool none_of_first;
} step_t;

static int32_t tokens[MAX_ROWS], pos[MAX_ROWS], outs[MAX_ROWS];
static int32_t starts[MAX_SEQS + 1];
static const int32_t *tables[MAX_SEQS];


static void
open_run(run_t *run, int n_layers, bool no_graphs)
{
    tiny_t shape = tiny;
    run_how_t h = how;
    build_t b = { 0 };
    buf_t file;
    llm_err_t err;

    shape.n_layers = n_layers;
    tiny_build(&b, &shape);
    gguf_t *gguf = parse(&b, &file);

    h.backend = "cuda";
    h.open.no_graphs = no_graphs;
    h.max_rows = MAX_ROWS;
    h.max_seqs = MAX_SEQS;
    h.max_len = MAX_LEN;
    h.n_pages = N_PAGES;

    if (run_open(run, gguf, &h, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    gguf_close(gguf);
    buf_fini(&file);
}


static world_t *
world_open(int n_layers, random_t random)
{
    world_t *w = calloc(1, sizeof(*w));

    assert_non_null(w);
    w->random = random;
    w->n_free = N_PAGES;
    open_run(&w->with, n_layers, false);
    open_run(&w->without, n_layers, true);

    for (int i = 0; i < N_PAGES; i++) {
        w->free[i] = i;
    }

    return w;
}


static void
world_close(world_t *w)
{
    run_close(&w->with);
    run_close(&w->without);
    free(w);
}


static uint32_t
draw(world_t *w, uint32_t n)
{
    return (uint32_t) random_below(&w->random, (int) n);
}


static int32_t
take_page(world_t *w)
{
    const int32_t i = (int32_t) draw(w, (uint32_t) w->n_free);
    const int32_t page = w->free[i];

    assert_true(w->n_free > 0);
    w->free[i] = w->free[--w->n_free];

    return page;
}


static op_batch_t
batch_of(world_t *w, const step_t *step)
{
    op_batch_t batch = { .n_seqs = step->n,
                         .tokens = tokens,
                         .pos = pos,
                         .row_start = starts,
                         .block_table = tables,
                         .out_rows = outs };

    for (int i = 0; i < step->n; i++) {
        const int s = step->seq[i];

        starts[i] = batch.n_rows;
        tables[i] = w->table[s];

        for (int r = 0; r < step->rows[i]; r++, w->len[s]++) {
            const int row = batch.n_rows++;

            if (w->len[s] % OP_PAGE == 0) {
                w->table[s][w->len[s] / OP_PAGE] = take_page(w);
            }
            tokens[row] = (int32_t) draw(w, N_VOCAB);
            pos[row] = w->len[s];

            if ((step->all || r == step->rows[i] - 1)
                && (i > 0 || !step->none_of_first)) {
                outs[batch.n_out++] = row;
            }
        }
    }
    starts[step->n] = batch.n_rows;

    return batch;
}


static void
run_pass(run_t *run, const op_batch_t *batch, float *logits)
{
    model_forward(run->model, batch, &run->kv);

    if (batch->n_out > 0) {
        memcpy(logits, model_logits(run->model, 0, batch->n_out),
               (size_t) batch->n_out * N_VOCAB * sizeof(float));
    }
}


static void
run_step(world_t *w, const step_t *step)
{
    static float got[MAX_ROWS * N_VOCAB], want[MAX_ROWS * N_VOCAB];
    const op_batch_t batch = batch_of(w, step);
    const size_t n = (size_t) batch.n_out * N_VOCAB;
    const uint64_t before = shim_stats.graph_launches;
    op_err_t err;

    run_pass(&w->with, &batch, got);
    w->replays += shim_stats.graph_launches - before;
    const uint64_t between = shim_stats.graph_launches;

    run_pass(&w->without, &batch, want);
    assert_int_equal(shim_stats.graph_launches, between);
    assert_int_equal(w->with.ops->check(w->with.dev, &err), 0);
    assert_int_equal(w->without.ops->check(w->without.dev, &err), 0);

    for (size_t i = 0; i < n; i++) {
        assert_true(isfinite(want[i]) && (i == 0 || want[i] != want[i - 1]));
    }
    assert_memory_equal(got, want, n * sizeof(float));
}


/* One row for each of n sequences, from `first` on. */
static void
decode(world_t *w, int first, int n)
{
    step_t step = { .n = n };

    for (int i = 0; i < n; i++) {
        step.seq[i] = (first + i) % MAX_SEQS;
        step.rows[i] = 1;
    }

    run_step(w, &step);
}


static void
prefill(world_t *w, int seq, int rows)
{
    const step_t step = { .n = 1, .seq = { seq }, .rows = { rows } };

    run_step(w, &step);
}


static void
test_sizes(void **unused)
{
    static const int sizes[] = { 1, 1, 1, 2, 2, 2,  3, 3, 4,  5, 8, 7, 12, 12,
                                 9, 8, 6, 3, 1, 11, 4, 2, 10, 1, 5, 3, 12 };
    enum { N = sizeof(sizes) / sizeof(sizes[0]) };
    world_t *w = world_open(2, (random_t){ 5 });

    (void) unused;

    for (int i = 0; i < N; i++) {
        decode(w, 5 * i, sizes[i]);
    }

    /* 1, 2, 4, 8 and 12 rows, and each one's first pass is run as it is */
    assert_int_equal(w->replays, N - 5);
    print_message("# %s\n", w->with.ops->describe(w->with.dev));
    assert_non_null(strstr(w->with.ops->describe(w->with.dev),
                           "5 graphs recorded, 22 passes"));
    assert_null(strstr(w->without.ops->describe(w->without.dev), "graphs"));
    world_close(w);
}


/* Lengths over the borders of splits, where a graph for longer ones takes
 * over, up to the longest. */
static void
test_lengths(void **unused)
{
    world_t *w = world_open(2, (random_t){ 6 });

    (void) unused;
    prefill(w, 0, 251);
    prefill(w, 1, 100);

    for (int i = 0; i < 10; i++) {
        decode(w, 0, 1 + i % 3);
    }

    prefill(w, 0, 246);

    for (int i = 0; i < 10; i++) {
        decode(w, 0, 1 + i % 2);
    }

    prefill(w, 0, MAX_LEN - 4 - w->len[0]);

    for (int i = 0; i < 4; i++) {
        decode(w, 0, 2);
    }

    assert_int_equal(w->len[0], MAX_LEN);
    assert_true(w->replays >= 12 && w->replays < 24);

    /* a short one by the short graphs again */
    const uint64_t before = w->replays;

    decode(w, 1, 1);
    decode(w, 2, 1);
    assert_int_equal(w->replays, before + 2);
    world_close(w);
}


/* A page's content goes elsewhere, and something else is put where it was. */
static void
move_page(world_t *w, int seq)
{
    const int pages = (w->len[seq] + OP_PAGE - 1) / OP_PAGE;
    run_t *const runs[] = { &w->with, &w->without };

    if (pages == 0) {
        return;
    }

    const int i = (int) draw(w, (uint32_t) pages);
    const int32_t from = w->table[seq][i], to = take_page(w);
    const op_copy_t copies[2] = { { from, to }, { w->free[0], from } };

    for (int k = 0; k < 2; k++) {
        runs[k]->ops->kv_copy(runs[k]->dev, &runs[k]->kv, copies, 2);
    }

    w->table[seq][i] = to;
    w->free[w->n_free++] = from;
}


/* Sequences begin again, pages move, chunks and drafts come between, and rows
 * of which nobody wants logits. */
static void
test_storm(void **unused)
{
    world_t *w = world_open(2, random_start("storm"));
    uint64_t n_decode = 0;

    (void) unused;

    for (int i = 0; i < 150; i++) {
        const bool mixed = draw(w, 4) == 0;
        step_t step = { .n = 1 + (int) draw(w, MAX_SEQS),
                        .all = draw(w, 2) == 0,
                        .none_of_first = draw(w, 8) == 0 };
        const int first = (int) draw(w, MAX_SEQS);

        for (int k = 0; k < step.n; k++) {
            const int s = (first + k) % MAX_SEQS;

            step.seq[k] = s;
            step.rows[k] = mixed ? 1 + (int) draw(w, 12) : 1;

            if (w->len[s] + 12 > MAX_LEN || draw(w, 40) == 0) {
                for (; w->len[s] > 0; w->len[s]--) {
                    if ((w->len[s] - 1) % OP_PAGE == 0) {
                        w->free[w->n_free++] =
                            w->table[s][(w->len[s] - 1) / OP_PAGE];
                    }
                }
            }
        }

        if (draw(w, 3) == 0) {
            move_page(w, (int) draw(w, MAX_SEQS));
        }

        n_decode += !mixed && !step.none_of_first;
        run_step(w, &step);
    }

    print_message("# %d of 150 passes by a graph, %d of them decode\n",
                  (int) w->replays, (int) n_decode);
    assert_true(w->replays <= n_decode + 5); /* mixed, but one row each */
    assert_true(w->replays + 10 >= n_decode);
    world_close(w);
}


/* More pools than graphs are kept: the old ones go, and come again. */
static void
test_bound(void **unused)
{
    world_t *w = world_open(1, (random_t){ 7 });

    (void) unused;

    for (int i = 0; i < 2 * (KEPT + 6); i++) {
        w->with.kv.n_pages = w->without.kv.n_pages =
            N_PAGES - i / 2 % (KEPT + 6);
        w->len[0] = 0;
        w->n_free = 40;
        decode(w, 0, 1);
    }

    assert_int_equal(w->replays, KEPT + 6);

    for (int i = 0; i < 2; i++) {
        w->with.kv.n_pages = w->without.kv.n_pages = N_PAGES;
        w->len[0] = 0;
        w->n_free = 40;
        decode(w, 0, 1);
    }

    /* the first pool's graph was gone */
    assert_int_equal(w->replays, KEPT + 7);
    world_close(w);
}


static op_memory_t
memory_of(const run_t *run)
{
    return run->ops->memory(run->dev);
}


/* What recordings will take is announced, and is what they take; when there is
 * no more memory, passes go on without. */
static void
test_memory(void **unused)
{
    static const int lens[] = { 2, 300, 560 };
    static const int sizes[] = { 1, 2, 4, 8, 12 };
    const size_t memory = shim_options()->memory;
    world_t *w = world_open(2, (random_t){ 11 });
    const op_memory_t before = memory_of(&w->with);
    const size_t without = memory_of(&w->without).later;

    (void) unused;
    shim_options()->node_memory = 16 << 10;

    for (int i = 0; i < 3; i++) {
        while (w->len[0] < lens[i]) {
            const int rows = lens[i] - w->len[0];

            prefill(w, 0, rows < MAX_ROWS ? rows : MAX_ROWS);
        }

        for (int k = 0; k < 5; k++) {
            decode(w, 0, sizes[k]);
            decode(w, 0, sizes[k]);
        }
    }

    const op_memory_t after = memory_of(&w->with);
    const size_t announced = before.later - after.later;
    const size_t taken = before.free - after.free;

    print_message("# %d KiB announced, %d KiB taken\n", (int) (announced >> 10),
                  (int) (taken >> 10));
    assert_int_equal(w->replays, 15);
    assert_int_equal(after.later, without);
    assert_in_range(taken, announced / 3, announced);

    /* what was recorded last goes with a block of memory; then there is none */
    w->with.ops->free(w->with.dev, w->with.ops->alloc(w->with.dev, 1), 1);
    assert_int_equal(memory_of(&w->with).free, before.free);
    assert_int_equal(memory_of(&w->with).later, before.later);
    shim_options()->memory -= before.free;

    for (int i = 0; i < 4; i++) {
        decode(w, 1, 3);
    }

    assert_int_equal(w->replays, 15);
    assert_int_equal(memory_of(&w->with).later, without);
    assert_int_equal(memory_of(&w->with).free, 0);

    shim_options()->memory = memory;
    shim_options()->node_memory = 0;
    world_close(w);
}


static uint64_t
launches_of(int n_layers)
{
    world_t *w = world_open(n_layers, (random_t){ 8 });

    decode(w, 0, 1);
    decode(w, 0, 1);

    /* the third is a replay: all kernels are the graph's, but the logits' */
    step_t step = { .n = 1, .rows = { 1 } };
    const op_batch_t batch = batch_of(w, &step);
    const uint64_t before = shim_stats.launches;
    const uint64_t graphs = shim_stats.graph_launches;
    float logits[N_VOCAB];

    run_pass(&w->with, &batch, logits);
    assert_int_equal(shim_stats.graph_launches, graphs + 1);

    const uint64_t n = shim_stats.launches - before;

    world_close(w);

    return n;
}


static void
test_launches(void **unused)
{
    const uint64_t two = launches_of(2), five = launches_of(5);

    (void) unused;
    print_message("# %d kernels of 2 layers, %d of 5\n", (int) two, (int) five);
    assert_int_equal((five - two) % 3, 0);
    assert_in_range((five - two) / 3, 1, 6);
}


/* Every call of the runtime fails, one after the other, in a pass that is run
 * (0), recorded (1) or replayed (2) first: either the device has failed and
 * says so, or the logits are those without graphs. */
static void
test_failures(void **unused)
{
    int n_told = 0, n_survived = 0, n_without[3] = { 0 };

    (void) unused;

    for (int before = 0; before <= 2; before++) {
        for (uint64_t at = 1; at <= 60; at += before > 0 ? 1 : 3) {
            world_t *w = world_open(1, (random_t){ 9 });
            float got[N_VOCAB], want[N_VOCAB];
            op_err_t err;

            for (int i = 0; i < before; i++) {
                decode(w, 0, 1);
            }

            step_t step = { .n = 1, .rows = { 1 } };
            op_batch_t batch = batch_of(w, &step);

            run_pass(&w->without, &batch, want);
            shim_fail_at(SHIM_FAIL_CALL, at);
            run_pass(&w->with, &batch, got);
            shim_fail_at(SHIM_FAIL_CALL, 0);

            if (w->with.ops->check(w->with.dev, &err) != 0) {
                n_told++;
                assert_non_null(strstr(err.text, "GPU 0: "));
            } else {
                const uint64_t graphs = shim_stats.graph_launches;

                assert_memory_equal(got, want, sizeof(got));
                batch = batch_of(w, &step);
                run_pass(&w->without, &batch, want);
                run_pass(&w->with, &batch, got);
                assert_memory_equal(got, want, sizeof(got));
                n_survived++;
                n_without[before] += shim_stats.graph_launches == graphs;
            }

            world_close(w);
            cudaDeviceReset();
        }
    }

    print_message("# %d told, %d went on; without graphs %d that recorded, %d "
                  "that replayed\n",
                  n_told, n_survived, n_without[1], n_without[2]);
    assert_true(n_told > 10);

    /* begin, end, instantiate, the first launch; a later launch */
    assert_true(n_without[1] >= 4);
    assert_int_equal(n_without[2], 1);
}


/* A kernel that is refused, or that dies, in each kind of pass. */
static void
test_kernel_failures(void **unused)
{
    (void) unused;

    for (int i = 0; i < 6; i++) {
        world_t *w = world_open(1, (random_t){ 10 });
        float got[N_VOCAB];
        op_err_t err;
        const shim_fail_t kind = i < 3 ? SHIM_FAIL_ASYNC : SHIM_FAIL_LAUNCH;

        for (int k = 0; k < i % 3; k++) {
            decode(w, 0, 1);
        }

        step_t step = { .n = 1, .rows = { 1 } };
        const op_batch_t batch = batch_of(w, &step);

        /* a replay launches only the logits */
        shim_fail_at(kind, i == 5 ? 1 : 4);
        run_pass(&w->with, &batch, got);
        shim_fail_at(kind, 0);
        assert_int_equal(w->with.ops->check(w->with.dev, &err), -1);
        assert_non_null(strstr(err.text, "GPU 0: "));
        run_pass(&w->with, &batch, got); /* nothing happens */
        world_close(w);
        cudaDeviceReset();
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),           cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_storm),           cmocka_unit_test(test_bound),
        cmocka_unit_test(test_launches),        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_kernel_failures), cmocka_unit_test(test_memory),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
