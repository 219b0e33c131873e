/*
 * Running tiny models: a row's logits depend on its sequence alone, and on
 * the weights as they should.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/tools/model_storm.h"
#include "t/unit/model_tiny.h"

static const char *const backends[] = { "ref", "cpu" };

/* a sequence of the tiny vocabulary, longer than two pages */
static const int32_t text[] = { 5,  1,  39, 0,  7,  7, 12, 30, 2,  9,
                                11, 23, 38, 4,  4,  4, 17, 31, 8,  20,
                                6,  3,  15, 28, 33, 1, 0,  5,  22, 10,
                                9,  14, 36, 27, 13, 2, 2 };

enum { N_TEXT = sizeof(text) / sizeof(text[0]) };


static float *
solo(run_t *run, int chunk)
{
    int32_t *table = run_table(how.n_pages);
    float *out = malloc((size_t) N_TEXT * (size_t) run->n_vocab * sizeof(*out));

    run_sequence(run, text, N_TEXT, chunk, table, out);
    free(table);

    return out;
}


/* The logits of `text` under the model in t, to be freed. */
static float *
logits_of(const tiny_t *t, const char *backend)
{
    build_t b = { 0 };
    run_t run;
    llm_err_t err;

    tiny_build(&b, t);
    if (load(&b, backend, &run, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    float *out = solo(&run, N_TEXT);

    run_close(&run);

    return out;
}


static void
assert_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], sizeof(float)) != 0) {
            fail_msg("value %zu: %.9g, not %.9g", i, (double) a[i],
                     (double) b[i]);
        }
    }
}


static double
worst(const float *a, const float *b, size_t n)
{
    double most = 0;

    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double) a[i] - (double) b[i]);

        /* written so that NaN counts */
        most = d <= most ? most : d;
    }

    return most;
}


/* Root mean square of the difference over that of a. */
static double
relative(const float *a, const float *b, size_t n)
{
    double diff = 0, all = 0;

    for (size_t i = 0; i < n; i++) {
        diff += pow((double) a[i] - (double) b[i], 2);
        all += pow((double) a[i], 2);
    }

    return sqrt(diff / all);
}


/* RoPE factors of 1 change nothing and factors of 2 are linear scaling by 2; a
 * head of its own is used where there is one. */
static void
test_variants(void **state)
{
    const size_t n = (size_t) N_TEXT * (size_t) tiny.n_vocab;

    (void) state;
    for (size_t k = 0; k < 2; k++) {
        tiny_t t = tiny;
        build_t b = { 0 };
        run_t run;
        llm_err_t err;
        float *plain = logits_of(&t, backends[k]);

        t.rope_freqs = 1;

        float *ones = logits_of(&t, backends[k]);

        assert_same(plain, ones, n);
        t.rope_freqs = 2;

        float *twos = logits_of(&t, backends[k]);

        assert_true(worst(plain, twos, n) > 1e-3);
        tiny_build(&b, &tiny);
        build_kv_f32(&b, "llama.rope.scaling.factor", 2);
        assert_int_equal(load(&b, backends[k], &run, &err), LLM_OK);

        float *scaled = solo(&run, N_TEXT);

        assert_same(twos, scaled, n);
        run_close(&run);

        t.rope_freqs = 0;
        t.separate_head = true;

        float *head = logits_of(&t, backends[k]);

        assert_true(worst(plain, head, n) > 1e-3);
        free(plain);
        free(ones);
        free(twos);
        free(scaled);
        free(head);
    }
}


static void
test_sizes(void **state)
{
    build_t b = { 0 };
    run_t run;
    llm_err_t err;

    (void) state;
    tiny_build(&b, &tiny);
    assert_int_equal(load(&b, "cpu", &run, &err), LLM_OK);

    /* f16 K and V of 16 tokens, 2 layers, 2 heads of 16 */
    assert_int_equal(model_page_bytes(run.model, OP_F16),
                     16 * 2 * 2 * 2 * 16 * 2);

    /* bytes, and a scale for each 16 of them */
    assert_int_equal(model_page_bytes(run.model, OP_Q8_0),
                     16 * 2 * 2 * 2 * (16 + 2));
    assert_int_equal(model_page_bytes(run.model, OP_Q4_0), 0);
    assert_true(model_weight_bytes(run.model) > 64 * 40);
    assert_true(model_activation_bytes(run.model)
                > (size_t) how.max_rows * 64 * 4);
    assert_int_equal(model_config(run.model)->n_vocab, 40);
    run_close(&run);
    model_free(NULL);
}


/* Logits of some rows are those of all rows, and rows that want none still
 * leave K and V behind. */
static void
test_out_rows(void **state)
{
    (void) state;
    for (size_t k = 0; k < 2; k++) {
        build_t b = { 0 };
        run_t run;
        llm_err_t err;

        tiny_build(&b, &tiny);
        assert_int_equal(load(&b, backends[k], &run, &err), LLM_OK);

        float *all = solo(&run, N_TEXT);
        int32_t *table = run_table(how.n_pages);
        const int32_t *const tables[1] = { table };
        const int32_t start[2] = { 0, 20 }, rest[2] = { 0, N_TEXT - 20 };
        const int32_t picked[3] = { 1, 7, N_TEXT - 21 };
        int32_t pos[N_TEXT];
        op_batch_t batch = { 20, 1, text, pos, start, tables, 0, NULL };

        for (int i = 0; i < N_TEXT; i++) {
            pos[i] = i;
        }

        model_forward(run.model, &batch, &run.kv);

        batch.n_rows = N_TEXT - 20;
        batch.tokens = text + 20;
        batch.pos = pos + 20;
        batch.row_start = rest;
        batch.n_out = 3;
        batch.out_rows = picked;
        model_forward(run.model, &batch, &run.kv);

        /* the second and third alone, then the first */
        const size_t v = (size_t) run.n_vocab;
        const float *two = model_logits(run.model, 1, 2);

        assert_same(two, all + 27 * v, v);
        assert_same(two + v, all + (N_TEXT - 1) * v, v);
        assert_same(model_logits(run.model, 0, 1), all + 21 * v, v);

        free(all);
        free(table);
        run_close(&run);
    }
}


/* Chunks, pages and neighbours never show. */
static void
test_exact(void **state)
{
    static const op_dtype_t dtypes[] = { OP_F32,  OP_F16,  OP_BF16, OP_Q4_0,
                                         OP_Q4_1, OP_Q5_0, OP_Q5_1, OP_Q8_0,
                                         OP_Q4_K, OP_Q5_K, OP_Q6_K };

    (void) state;
    for (size_t d = 0; d < sizeof(dtypes) / sizeof(dtypes[0]); d++) {
        tiny_t t = tiny;

        t.dtype = dtypes[d];
        if (op_dtype_block((int) t.dtype) == 256) {
            t.n_embd = 256;
            t.n_ff = 512;
            t.head_dim = 64;
        }

        for (size_t k = 0; k < 2; k++) {
            build_t b = { 0 };
            run_t run;
            llm_err_t err;
            char why[200];

            tiny_build(&b, &t);
            if (load(&b, backends[k], &run, &err) != LLM_OK) {
                fail_msg("%s", err.text);
            }
            if (storm(&run, how.n_pages, how.max_rows, k == 0 ? 36 : 90, why)
                != 0) {
                fail_msg("%s %s: %s", backends[k], op_dtype_name((int) t.dtype),
                         why);
            }
            run_close(&run);
        }
    }
}


/* cpu against the oracle, for each format. */
static void
test_cpu_near_ref(void **state)
{
    static const op_dtype_t dtypes[] = { OP_F32,  OP_F16,  OP_BF16,
                                         OP_Q4_1, OP_Q8_0, OP_Q6_K };

    (void) state;
    for (size_t d = 0; d < sizeof(dtypes) / sizeof(dtypes[0]); d++) {
        tiny_t t = tiny;

        t.dtype = dtypes[d];
        if (t.dtype == OP_Q6_K) {
            t.n_embd = 256;
            t.n_ff = 512;
            t.head_dim = 64;
        }

        float *want = logits_of(&t, "ref");
        float *got = logits_of(&t, "cpu");
        const size_t n = (size_t) N_TEXT * (size_t) t.n_vocab;
        const double bound = op_dtype_block((int) t.dtype) == 1 ? 1e-3 : 5e-2;
        const double is = relative(want, got, n);

        print_message("# %s: relative error %.2g\n",
                      op_dtype_name((int) t.dtype), is);
        if (!(is <= bound)) {
            fail_msg("%s: %g", op_dtype_name((int) t.dtype), is);
        }
        free(want);
        free(got);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_variants),     cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_out_rows),     cmocka_unit_test(test_exact),
        cmocka_unit_test(test_cpu_near_ref),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
