/*
 * Loading and running tiny models: what a file must and must not hold, and
 * the promise that a row's logits depend on its sequence alone.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/base/arena.h"
#include "t/tools/model_run.h"
#include "t/tools/model_storm.h"
#include "t/unit/gguf_build.h"

static const tiny_t tiny = { .n_layers = 2,
                             .n_embd = 64,
                             .n_ff = 96,
                             .n_heads = 4,
                             .n_kv_heads = 2,
                             .head_dim = 16,
                             .n_vocab = 40,
                             .dtype = OP_Q8_0,
                             .seed = 7 };

static const run_how_t how = { .backend = "ref",
                               .max_rows = 64,
                               .max_seqs = 4,
                               .max_len = 128,
                               .n_pages = 40 };

static const char *const backends[] = { "ref", "cpu" };

/* a sequence of the tiny vocabulary, longer than two pages */
static const int32_t text[] = { 5,  1,  39, 0,  7,  7,  12, 30, 2,  9,
                                11, 23, 38, 4,  4,  4,  17, 31, 8,  20,
                                6,  3,  15, 28, 33, 1,  0,  5,  22, 10,
                                9,  14, 36, 27, 13, 2,  2 };

enum { N_TEXT = sizeof(text) / sizeof(text[0]) };


static gguf_t *
parse(build_t *b, buf_t *file)
{
    gguf_t *gguf;
    llm_err_t err;

    *file = build_finish(b);
    if (gguf_parse((const uint8_t *) file->data, file->len, &gguf, &err)
        != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return gguf;
}


/* Loads what is in b with `backend`; fills err when that fails. */
static int
load(build_t *b, const char *backend, run_t *run, llm_err_t *err)
{
    buf_t file;
    gguf_t *gguf = parse(b, &file);
    run_how_t h = how;

    h.backend = backend;
    memset(err, 0, sizeof(*err));

    const int rc = run_open(run, gguf, &h, err);

    /* a loaded model needs the file no more */
    gguf_close(gguf);
    memset(file.data, 0xee, file.len);
    buf_fini(&file);

    return rc;
}


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


/* --- what is refused --- */

static void
expect(build_t *b, const char *want)
{
    run_t run;
    llm_err_t err;

    assert_int_equal(load(b, "ref", &run, &err), LLM_ERROR);
    if (strstr(err.text, want) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", want, err.text);
    }
}


/* One more integer key, or another value for one that is there. */
static void
expect_u32(const char *key, uint32_t value, const char *want)
{
    build_t b = { 0 };
    tiny_t t = tiny;

    t.skip = key;
    tiny_build(&b, &t);
    build_kv_u32(&b, key, value);
    expect(&b, want);
}


static void
test_config(void **state)
{
    build_t b = { 0 };
    buf_t file;
    model_config_t c;
    llm_err_t err;
    tiny_t t = tiny;

    (void) state;
    t.skip = "llama.attention.key_length";
    tiny_build(&b, &t);
    build_kv_f32(&b, "llama.rope.scaling.factor", 4);

    gguf_t *gguf = parse(&b, &file);

    assert_int_equal(model_config_read(gguf, &c, &err), LLM_OK);
    assert_string_equal(c.arch, "llama");
    assert_string_equal(c.name, "tiny");
    assert_int_equal(c.n_layers, 2);
    assert_int_equal(c.n_embd, 64);
    assert_int_equal(c.n_ff, 96);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.rot_dim, 16);
    assert_int_equal(c.n_vocab, 40);
    assert_int_equal(c.n_ctx, 512);
    assert_true(c.rms_eps == 1e-5f);
    assert_true(c.rope_base == 10000.0f);
    assert_true(c.rope_scale == 0.25f);
    gguf_close(gguf);
    buf_fini(&file);
}


static void
test_bad_sizes(void **state)
{
    (void) state;
    expect_u32("llama.block_count", 0, "\"llama.block_count\" is 0; 1 to");
    expect_u32("llama.block_count", 4000000000u, "is 4000000000");
    expect_u32("llama.context_length", 0, "\"llama.context_length\" is 0");
    expect_u32("llama.embedding_length", 1u << 30, "is 1073741824");
    expect_u32("llama.embedding_length", 96,
               "tensor \"token_embd.weight\" is 64 x 40, but the metadata ask "
               "for 96 x 40");
    expect_u32("llama.feed_forward_length", 64, "blk.0.ffn_gate.weight");
    expect_u32("llama.attention.head_count", 0, "head_count\" is 0");
    expect_u32("llama.attention.head_count_kv", 3, "does not divide 4 heads");
    expect_u32("llama.attention.head_count_kv", 8, "1 to 4 are possible");
    expect_u32("llama.attention.key_length", 17, "must be even");
    expect_u32("llama.attention.value_length", 8, "different lengths");
    expect_u32("llama.rope.dimension_count", 32, "2 to 16 are possible");
    expect_u32("llama.rope.dimension_count", 3, "must be even");
    expect_u32("llama.expert_count", 8, "mixtures of experts");
    expect_u32("llama.rope.freq_base", 10000, "is not one float");
}


static void
expect_str(const char *key, const char *value, const char *want)
{
    build_t b = { 0 };

    tiny_build(&b, &tiny);
    build_kv_str(&b, key, value);
    expect(&b, want);
}


static void
expect_f32(const char *key, float value, const char *want)
{
    build_t b = { 0 };

    tiny_build(&b, &tiny);
    build_kv_f32(&b, key, value);
    expect(&b, want);
}


static void
test_bad_values(void **state)
{
    build_t b = { 0 };
    tiny_t t = tiny;

    (void) state;
    expect_f32("llama.rope.freq_base", NAN, "\"llama.rope.freq_base\" is nan");
    expect_f32("llama.rope.freq_base", 0.5f, "is 0.5");
    expect_f32("llama.rope.scaling.factor", -2, "is -2");
    expect_f32("llama.rope.scaling.factor", 1e-30f, "impossibly small");
    expect_str("llama.rope.scaling.type", "yarn",
               "\"llama.rope.scaling.type\" is \"yarn\", which is not "
               "supported; supported: none, linear");
    expect_str("llama.expert_count", "8", "not one non-negative integer");

    t.skip = "epsilon";
    tiny_build(&b, &t);
    build_kv_f32(&b, "llama.attention.layer_norm_rms_epsilon", INFINITY);
    expect(&b, "layer_norm_rms_epsilon\" is inf");

    tiny_build(&b, &tiny);
    build_kv(&b, "llama.attention.causal", 7, "\0", 1);
    expect(&b, "\"llama.attention.causal\" is false");

    build_kv_str(&b, "general.architecture", "gem\nma3");
    expect(&b, "architecture \"gem?ma3\" is not supported; supported: llama");

    build_kv_str(&b, "general.architecture",
                 "an architecture with a very long name indeed");
    expect(&b, "architecture \"an architecture with");

    build_kv_u32(&b, "general.architecture", 1);
    expect(&b, "\"general.architecture\" is missing");
}


static void
test_missing(void **state)
{
    static const char *const names[] = {
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",
        "blk.1.attn_k.weight",
        "blk.0.attn_v.weight",
        "blk.0.attn_output.weight",
        "blk.1.ffn_norm.weight",
        "blk.1.ffn_gate.weight",
        "blk.0.ffn_up.weight",
        "blk.1.ffn_down.weight",
    };

    (void) state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        build_t b = { 0 };
        tiny_t t = tiny;
        char want[128];

        t.skip = names[i];
        tiny_build(&b, &t);
        snprintf(want, sizeof(want), "\"%s\" is missing", names[i]);
        expect(&b, want);

        if (strstr(names[i], ".weight") != NULL) {
            t.skip = NULL;
            t.bend = names[i];
            tiny_build(&b, &t);
            snprintf(want, sizeof(want), "tensor \"%s\" ", names[i]);
            expect(&b, want);
        }
    }
}


static void
test_left_over(void **state)
{
    build_t b = { 0 };
    tiny_t t = tiny;
    const uint64_t ne[1] = { 8 };

    (void) state;
    tiny_build(&b, &tiny);
    build_info(&b, "blk.0.attn_q.bias", 1, ne, OP_F32);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "tensor \"blk.0.attn_q.bias\" is a bias, which is not "
               "supported");

    tiny_build(&b, &tiny);
    build_info(&b, "blk.0.attn_q_norm.weight", 1, ne, OP_F32);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "tensor \"blk.0.attn_q_norm.weight\" is not known");

    t.n_layers = 3;
    t.skip = "llama.block_count";
    tiny_build(&b, &t);
    build_kv_u32(&b, "llama.block_count", 2);
    expect(&b, "tensor \"blk.2.");

    t = tiny;
    t.rope_freqs = -1;
    tiny_build(&b, &t);
    expect(&b, "\"rope_freqs.weight\" holds -1");
}


static void
test_no_memory(void **state)
{
    int failed = 0;

    (void) state;
    for (long n = 1; n < 50; n++) {
        build_t b = { 0 };
        buf_t file;
        run_t run;
        llm_err_t err;

        tiny_build(&b, &tiny);

        gguf_t *gguf = parse(&b, &file);

        arena_fail_after(n);

        const int rc = run_open(&run, gguf, &how, &err);

        arena_fail_after(0);
        gguf_close(gguf);
        buf_fini(&file);
        if (rc == LLM_OK) {
            run_close(&run);
            break;
        }
        assert_int_equal(rc, LLM_NOMEM);
        failed++;
    }

    assert_true(failed > 0 && failed < 49);
}


/* --- what comes out --- */

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
    assert_true(model_page_bytes(run.model) >= 16 * 2 * 2 * 2 * 16 * 2);
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
            if (storm(&run, how.n_pages, how.max_rows, k == 0 ? 36 : 90, why) != 0) {
                fail_msg("%s %s: %s", backends[k],
                         op_dtype_name((int) t.dtype), why);
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
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_bad_sizes),
        cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_left_over),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_out_rows),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_cpu_near_ref),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
