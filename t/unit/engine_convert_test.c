/*
 * quantize on tiny files: every value, every name, every key of the output
 * against what the input says, block by block.
 */

#include "t/unit/engine_convert.h"

/* token_embd is larger than what is converted at once, and no divisor of it
 * is a row */
static const tiny_t legacy = { .n_layers = 2,
                               .n_embd = 288,
                               .n_ff = 96,
                               .n_heads = 6,
                               .n_kv_heads = 2,
                               .head_dim = 48,
                               .n_vocab = 300,
                               .seed = 11 };

/* rows of whole blocks of 256 */
static const tiny_t wide = { .n_layers = 1,
                             .n_embd = 256,
                             .n_ff = 512,
                             .n_heads = 2,
                             .n_kv_heads = 2,
                             .head_dim = 128,
                             .n_vocab = 70,
                             .seed = 12 };

/* --- quantize --- */


/* Row by row: what the output must hold of a tensor. */
static void
check_tensor(gguf_str_t name, const op_tensor_t *from, const op_tensor_t *to)
{
    static float x[1 << 12];
    static uint8_t want[1 << 14];
    const uint8_t *p = from->data, *q = to->data;
    const size_t in_bytes = op_row_bytes((int) from->dtype, from->n_in);
    const size_t out_bytes = op_row_bytes((int) to->dtype, to->n_in);

    for (int64_t o = 0; o < from->n_out; o++) {
        if (to->dtype == from->dtype) {
            memcpy(want, p, in_bytes);
        } else {
            op_dequant_row(from->dtype, p, x, from->n_in);
            memcpy(want, x, to->dtype == OP_F32 ? out_bytes : 0);
            if (to->dtype != OP_F32) {
                assert_int_equal(op_quant_row(to->dtype, x, want, to->n_in), 0);
            }
        }

        if (memcmp(want, q, out_bytes) != 0) {
            fail_msg("%.*s: row %d differs", (int) name.len, name.text,
                     (int) o);
        }

        p += in_bytes;
        q += out_bytes;
    }
}


/* Every tensor of `in` is in `out`, in its place and as it must be. */
static void
check_quantized(op_dtype_t dtype, op_dtype_t head, const char *head_name)
{
    gguf_t *from = opened(in), *to = opened(out);
    uint64_t bytes = 0;

    assert_int_equal(gguf_n_tensors(to), gguf_n_tensors(from));
    assert_int_equal(done.n_tensors, gguf_n_tensors(from));

    for (int i = 0; i < gguf_n_tensors(from); i++) {
        gguf_str_t a, b;
        op_tensor_t x, y;

        gguf_tensor_at(from, i, &a, &x);
        gguf_tensor_at(to, i, &b, &y);
        assert_int_equal(a.len, b.len);
        assert_memory_equal(a.text, b.text, a.len);
        assert_int_equal(x.n_in, y.n_in);
        assert_int_equal(x.n_out, y.n_out);

        const bool is_head =
            a.len == strlen(head_name) && memcmp(a.text, head_name, a.len) == 0;

        assert_int_equal(y.dtype, x.n_out == 1 ? OP_F32
                                  : is_head    ? head
                                               : dtype);
        check_tensor(a, &x, &y);
        bytes += bytes_of(&y);
    }

    assert_int_equal(bytes, done.bytes_out);
    assert_int_equal(gguf_tensor_bytes(from), done.bytes_in);
    gguf_close(from);
    gguf_close(to);
}


static void
test_types(void **state)
{
    static const op_dtype_t to[] = { OP_F32,  OP_F16,  OP_BF16, OP_Q8_0,
                                     OP_Q5_1, OP_Q5_0, OP_Q4_1, OP_Q4_0 };
    static const op_dtype_t k_types[] = { OP_Q4_K, OP_Q5_K, OP_Q6_K };
    const int n = sizeof(to) / sizeof(to[0]);

    (void) state;
    for (int i = 0; i < n + 3; i++) {
        put_tiny(i < n ? &legacy : &wide, i < n ? to[i] : k_types[i - n]);

        for (int j = 0; j < n; j++) {
            const op_dtype_t head = j > 3 ? OP_Q8_0 : to[j];

            if (convert_quantize(in, out, to[j], head, &done, &err) != LLM_OK) {
                fail_msg("%s", err.text);
            }

            check_quantized(to[j], head, "token_embd.weight");
            assert_int_equal(files_in_dir(), 2);
        }
    }
}


/* Where output.weight is there, it is the head and the embedding is not. */
static void
test_head(void **state)
{
    tiny_t t = legacy;

    (void) state;
    t.separate_head = true;
    put_tiny(&t, OP_F32);
    assert_int_equal(convert_quantize(in, out, OP_Q4_0, OP_BF16, &done, &err),
                     LLM_OK);
    check_quantized(OP_Q4_0, OP_BF16, "output.weight");
}


/* What a half holds comes back bit by bit, and the error is told. */
static void
test_exact(void **state)
{
    (void) state;
    put_tiny(&legacy, OP_F16);
    assert_int_equal(convert_quantize(in, out, OP_F32, OP_F32, &done, &err),
                     LLM_OK);
    assert_true(done.error == 0);

    char back[160];

    snprintf(back, sizeof(back), "%s.back", out);
    assert_int_equal(convert_quantize(out, back, OP_F16, OP_F16, &done, &err),
                     LLM_OK);
    assert_true(done.error == 0);

    /* uniform values below d in steps of d / 127: d / 127 / sqrt(12) over
     * d / sqrt(3), and the largest of a block is a little below d */
    assert_int_equal(convert_quantize(out, back, OP_Q8_0, OP_Q8_0, &done, &err),
                     LLM_OK);
    assert_in_range((long) (done.error * 1e5), 360, 394);

    /* Q4_1 has 15 steps between the extremes, 2 d apart */
    assert_int_equal(convert_quantize(out, back, OP_Q4_1, OP_Q4_1, &done, &err),
                     LLM_OK);
    assert_in_range((long) (done.error * 1e5), 5800, 6667);
    unlink(back);
}


/* --- keys --- */

static const gguf_kv_t *
key(const gguf_t *gguf, const char *name)
{
    for (uint32_t i = 0; i < gguf->n_kvs; i++) {
        if (gguf->kvs[i].name.len == strlen(name)
            && memcmp(gguf->kvs[i].name.text, name, strlen(name)) == 0)
        {
            return &gguf->kvs[i];
        }
    }

    return NULL;
}


static void
check_key(const gguf_kv_t *a, const gguf_kv_t *b)
{
    assert_non_null(b);
    assert_int_equal(a->type, b->type);
    assert_int_equal(a->is_array, b->is_array);
    assert_int_equal(a->n, b->n);

    for (int64_t i = 0; a->type == GGUF_STRING && i < a->n; i++) {
        assert_int_equal(a->strings[i].len, b->strings[i].len);
        assert_memory_equal(a->strings[i].text, b->strings[i].text,
                            a->strings[i].len);
    }

    if (a->type != GGUF_STRING && a->n > 0) {
        assert_memory_equal(a->data, b->data,
                            (size_t) a->n * gguf_type_size(a->type));
    }
}


/* All keys of `in` are in `out`, but for `n` of them. */
static void
check_keys(const char *const *but, int n, int fresh)
{
    gguf_t *from = opened(in), *to = opened(out);

    for (uint32_t i = 0; i < from->n_kvs; i++) {
        char name[64] = "";
        bool left = false;

        memcpy(name, from->kvs[i].name.text, from->kvs[i].name.len);
        for (int k = 0; k < n; k++) {
            left |= strcmp(name, but[k]) == 0;
        }

        if (!left) {
            check_key(&from->kvs[i], key(to, name));
        }
    }

    assert_int_equal(to->n_kvs, (int) from->n_kvs - n + fresh);
    gguf_close(from);
    gguf_close(to);
}


/* A value of every type, alone and as an array of two and of none. */
static void
put_every_key(void)
{
    static const uint8_t raw[16] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 };
    build_t b = { 0 };
    tiny_t t = legacy;

    t.dtype = OP_F16;
    tiny_build(&b, &t);

    for (uint32_t type = 0; type <= GGUF_F64; type++) {
        const size_t size = gguf_type_size(type);
        char name[32];

        if (size == 0) {
            continue;
        }

        snprintf(name, sizeof(name), "x.scalar.%u", type);
        build_kv(&b, name, type, raw, size);
        snprintf(name, sizeof(name), "x.array.%u", type);
        build_kv_array(&b, name, type, 2);
        buf_add(&b.kvs, raw, 2 * size);
        snprintf(name, sizeof(name), "x.none.%u", type);
        build_kv_array(&b, name, type, 0);
    }

    build_kv(&b, "x.zero", GGUF_STRING, NULL, 0);
    build_u64(&b.kvs, 5);
    buf_add(&b.kvs, "a\0\xff\"b", 5);
    build_kv_str(&b, "x.empty", "");
    build_kv_array(&b, "x.strings.none", GGUF_STRING, 0);
    build_kv_str(&b, "general.size_label", "1T");
    build_kv_u32(&b, "general.file_type", 99);
    build_kv_u32(&b, "general.quantization_version", 1);
    build_kv_u32(&b, "general.alignment", 8);
    put_file(&b);
}


static void
test_keys(void **state)
{
    static const char *const quantized[] = { "general.file_type",
                                             "general.quantization_version",
                                             "general.alignment" };
    static const char *const trimmed[] = { "general.name", "general.size_label",
                                           "llama.block_count",
                                           "general.alignment" };
    static const struct {
        op_dtype_t dtype;
        uint32_t number;
    } rows[] = {
        { OP_F32, 0 },  { OP_F16, 1 },  { OP_Q4_0, 2 }, { OP_Q4_1, 3 },
        { OP_Q8_0, 7 }, { OP_Q5_0, 8 }, { OP_Q5_1, 9 }, { OP_BF16, 32 }
    };
    uint32_t n;
    gguf_str_t name;

    (void) state;
    put_every_key();

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(
            convert_quantize(in, out, rows[i].dtype, OP_F16, &done, &err),
            LLM_OK);
        check_keys(quantized, 3, 2);

        gguf_t *to = opened(out);

        assert_true(gguf_u32(to, "general.file_type", &n));
        assert_int_equal(n, rows[i].number);
        assert_true(gguf_u32(to, "general.quantization_version", &n));
        assert_int_equal(n, 2);
        gguf_close(to);
    }

    assert_int_equal(convert_trim(in, out, "1", &done, &err), LLM_OK);
    check_keys(trimmed, 4, 2);

    gguf_t *to = opened(out);

    assert_true(gguf_str(to, "general.name", &name));
    assert_int_equal(name.len, strlen("tiny, 1 of 2 layers"));
    assert_memory_equal(name.text, "tiny, 1 of 2 layers", name.len);
    assert_true(gguf_u32(to, "general.file_type", &n));
    assert_int_equal(n, 99);
    gguf_close(to);
}


/* Tensors of more than two dimensions keep them. */
static void
test_dimensions(void **state)
{
    const uint64_t ne[4] = { 32, 3, 2, 5 };
    const uint64_t row[2] = { 64, 1 };
    build_t b = { 0 };
    tiny_t t = legacy;
    uint32_t random = 5;

    (void) state;
    t.dtype = OP_F32;
    tiny_build(&b, &t);
    build_info(&b, "deep", 4, ne, OP_F32);
    for (int i = 0; i < 30; i++) {
        build_row(&b, OP_F32, 32, &random);
    }
    build_pad(&b.data);
    build_info(&b, "flat", 2, row, OP_F16);
    build_row(&b, OP_F16, 64, &random);
    build_pad(&b.data);
    put_file(&b);

    assert_int_equal(convert_quantize(in, out, OP_Q4_1, OP_Q8_0, &done, &err),
                     LLM_OK);
    check_quantized(OP_Q4_1, OP_Q8_0, "token_embd.weight");

    gguf_t *to = opened(out);
    const gguf_info_t *deep = &to->infos[gguf_tensor_index(to, "deep")];
    const gguf_info_t *flat = &to->infos[gguf_tensor_index(to, "flat")];

    assert_int_equal(deep->n_dims, 4);
    assert_memory_equal(deep->ne, ne, sizeof(ne));
    assert_int_equal(flat->n_dims, 2);
    assert_memory_equal(flat->ne, row, sizeof(row));
    gguf_close(to);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types),      cmocka_unit_test(test_head),
        cmocka_unit_test(test_exact),      cmocka_unit_test(test_keys),
        cmocka_unit_test(test_dimensions),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (!convert_begin()) {
        return 1;
    }

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    convert_end();

    return rc;
}
