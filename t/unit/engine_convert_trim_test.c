/*
 * trim on tiny files: which layers, under which names, with the input's bytes.
 */

#include "t/unit/engine_convert.h"

static const tiny_t small = { .n_layers = 2,
                              .n_embd = 256,
                              .n_ff = 256,
                              .n_heads = 2,
                              .n_kv_heads = 2,
                              .head_dim = 128,
                              .n_vocab = 20,
                              .seed = 12 };


/* Layers of the output, as numbers of the input's: their bytes are equal. */
static void
check_trimmed(const int *layers, int k, int n)
{
    gguf_t *from = opened(in), *to = opened(out);
    uint32_t count;
    int n_out = 0;

    assert_true(gguf_u32(to, "llama.block_count", &count));
    assert_int_equal(count, k);
    assert_int_equal(done.n_layers_out, k);
    assert_int_equal(done.n_layers_in, n);

    for (int i = 0; i < gguf_n_tensors(from); i++) {
        gguf_str_t name;
        op_tensor_t x, y;
        char want[80] = "", rest[64] = "";
        int layer, place = -1;

        gguf_tensor_at(from, i, &name, &x);
        memcpy(want, name.text, name.len);

        if (sscanf(want, "blk.%d%63s", &layer, rest) == 2) {
            for (int j = 0; j < k; j++) {
                place = layers[j] == layer ? j : place;
            }

            if (place < 0) {
                continue;
            }

            snprintf(want, sizeof(want), "blk.%d%s", place, rest);
        }

        assert_int_equal(gguf_tensor_index(to, want), n_out);
        assert_true(gguf_tensor(to, want, &y));
        assert_int_equal(x.dtype, y.dtype);
        assert_int_equal(x.n_in, y.n_in);
        assert_int_equal(x.n_out, y.n_out);
        assert_memory_equal(x.data, y.data, bytes_of(&x));
        n_out++;
    }

    assert_int_equal(gguf_n_tensors(to), n_out);
    assert_int_equal(done.n_tensors, n_out);
    gguf_close(from);
    gguf_close(to);
}


static void
test_trim(void **state)
{
    static const struct {
        const char *text;
        int k;
        int layers[12];
    } rows[] = {
        { "1", 1, { 0 } },
        { "2", 2, { 0, 11 } },
        { "3", 3, { 0, 1, 11 } },
        { "4", 4, { 0, 1, 10, 11 } },
        { "11", 11, { 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11 } },
        { "12", 12, { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 } },
        { "0-2,11", 4, { 0, 1, 2, 11 } },
        { "3-3", 1, { 3 } },
        { "0,5,10-11", 4, { 0, 5, 10, 11 } },
        { "02-04", 3, { 2, 3, 4 } },
    };
    tiny_t t = small;

    (void) state;
    t.n_layers = 12;
    put_tiny(&t, OP_Q6_K);

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (convert_trim(in, out, rows[i].text, &done, &err) != LLM_OK) {
            fail_msg("%s", err.text);
        }

        check_trimmed(rows[i].layers, rows[i].k, 12);
    }
}


/* Names that only resemble a layer's are nobody's. */
static void
test_trim_names(void **state)
{
    static const char *const odd[] = { "blk.", "blk.x.y", "blk.1", "blk..y",
                                       "blk.1x.y" };
    const uint64_t ne[1] = { 8 };
    build_t b = { 0 };
    tiny_t t = small;
    uint32_t random = 5;

    (void) state;
    t.dtype = OP_Q4_0;
    tiny_build(&b, &t);

    for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
        build_info(&b, odd[i], 1, ne, OP_F32);
        build_row(&b, OP_F32, 8, &random);
    }

    /* of layers that the model does not count */
    build_info(&b, "blk.2.extra", 1, ne, OP_F32);
    build_row(&b, OP_F32, 8, &random);
    build_info(&b, "blk.99999999999999999999.extra", 1, ne, OP_F32);
    build_row(&b, OP_F32, 8, &random);
    put_file(&b);

    assert_int_equal(convert_trim(in, out, "1-1", &done, &err), LLM_OK);

    gguf_t *to = opened(out);

    for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
        assert_true(gguf_tensor_index(to, odd[i]) >= 0);
    }

    assert_int_equal(gguf_n_tensors(to), 2 + 9 + 5);
    gguf_close(to);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trim),
        cmocka_unit_test(test_trim_names),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (!convert_begin()) {
        return 1;
    }

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    convert_end();

    return rc;
}
