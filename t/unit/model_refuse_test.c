/*
 * What a model file must and must not hold: hyperparameters, missing,
 * misshapen and left-over tensors; every refusal names the culprit.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/base/arena.h"
#include "t/unit/model_tiny.h"


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
        "llama.block_count",          "llama.context_length",
        "llama.embedding_length",     "llama.feed_forward_length",
        "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",      "token_embd.weight",
        "output_norm.weight",         "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",        "blk.1.attn_k.weight",
        "blk.0.attn_v.weight",        "blk.0.attn_output.weight",
        "blk.1.ffn_norm.weight",      "blk.1.ffn_gate.weight",
        "blk.0.ffn_up.weight",        "blk.1.ffn_down.weight",
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


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),     cmocka_unit_test(test_bad_sizes),
        cmocka_unit_test(test_bad_values), cmocka_unit_test(test_missing),
        cmocka_unit_test(test_left_over),  cmocka_unit_test(test_no_memory),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
