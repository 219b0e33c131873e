/*
 * The GGUF reader: values of every type, and files that are cut short, bent or
 * hostile.  Every file is parsed from a heap block of its exact size, so that
 * the address sanitizer sees one byte too far.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/model/gguf.h"
#include "t/unit/gguf_build.h"


/* A small file with something of everything. */
static buf_t
sample(void)
{
    build_t b = { 0 };
    const uint8_t u8 = 200;
    const int8_t i8 = -3;
    const uint16_t u16 = 60000;
    const int16_t i16 = -30000;
    const int32_t i32 = -70000;
    const uint64_t u64 = UINT64_MAX;
    const int64_t i64 = 77;
    const double f64 = 0.5, huge = 1e300;
    const uint64_t ne[4] = { 32, 2, 3, 1 }, vector[1] = { 5 };

    build_kv(&b, "u8", 0, &u8, 1);
    build_kv(&b, "i8", 1, &i8, 1);
    build_kv(&b, "u16", 2, &u16, 2);
    build_kv(&b, "i16", 3, &i16, 2);
    build_kv_u32(&b, "u32", 4000000000u);
    build_kv(&b, "i32", 5, &i32, 4);
    build_kv_f32(&b, "f32", 1.25f);
    build_kv(&b, "bool", 7, "\1", 1);
    build_kv(&b, "false", 7, "\0", 1);
    build_kv_str(&b, "str", "a text");
    build_kv_str(&b, "empty", "");
    build_kv(&b, "u64", 10, &u64, 8);
    build_kv(&b, "i64", 11, &i64, 8);
    build_kv(&b, "f64", 12, &f64, 8);
    build_kv(&b, "huge", 12, &huge, 8);

    build_kv_array(&b, "strings", 8, 3);
    build_str(&b.kvs, "one");
    build_str(&b.kvs, "");
    build_str(&b.kvs, "three");
    build_kv_array(&b, "i8s", 1, 2);
    buf_add(&b.kvs, "\xff\x07", 2);
    build_kv_array(&b, "f32s", 6, 1);
    buf_add(&b.kvs, &(float){ 2.5f }, 4);
    build_kv_array(&b, "none", 8, 0);

    build_info(&b, "m", 4, ne, OP_Q8_0);
    for (int i = 0; i < 6 * 34; i++) {
        buf_addc(&b.data, (char) i);
    }
    build_pad(&b.data);
    build_info(&b, "v", 1, vector, OP_F32);
    for (int i = 0; i < 5; i++) {
        buf_add(&b.data, &(float){ (float) i }, 4);
    }

    return build_finish(&b);
}


/* Parses an exact copy; the caller frees *copy after closing. */
static int
parse_copy(const void *data, size_t len, uint8_t **copy, gguf_t **gguf,
           llm_err_t *err)
{
    *copy = malloc(len > 0 ? len : 1);
    if (len > 0) {
        memcpy(*copy, data, len);
    }
    memset(err, 0, sizeof(*err));

    const int rc = gguf_parse(*copy, len, gguf, err);

    if (rc != LLM_OK) {
        assert_null(*gguf);
        assert_true(strlen(err->text) > 10);
        assert_null(strchr(err->text, '\n'));
    }

    return rc;
}


/* Reads everything there is, for the sanitizers. */
static void
read_all(const gguf_t *gguf)
{
    static const char *const keys[] = {
        "u8",  "i8",  "u16",  "i16",     "u32", "i32",  "f32",  "bool", "str",
        "u64", "i64", "huge", "strings", "i8s", "f32s", "none", "f64",  "empty"
    };

    for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++) {
        uint32_t u;
        int32_t n;
        float f;
        bool flag;
        gguf_str_t s;

        gguf_u32(gguf, keys[k], &u);
        gguf_f32(gguf, keys[k], &f);
        gguf_bool(gguf, keys[k], &flag);
        if (gguf_str(gguf, keys[k], &s)) {
            gguf_show(s);
        }
        for (int64_t i = -1; i <= gguf_array_len(gguf, keys[k]); i++) {
            if (gguf_array_str(gguf, keys[k], i, &s)) {
                gguf_show(s);
            }
            gguf_array_i32(gguf, keys[k], i, &n);
            gguf_array_f32(gguf, keys[k], i, &f);
        }
    }

    for (int i = 0; i < gguf_n_tensors(gguf); i++) {
        gguf_str_t name;
        op_tensor_t t;
        volatile uint8_t sum = 0;

        gguf_tensor_at(gguf, i, &name, &t);

        const size_t bytes =
            op_row_bytes((int) t.dtype, t.n_in) * (size_t) t.n_out;

        for (size_t k = 0; k < bytes; k++) {
            sum = (uint8_t) (sum + ((const uint8_t *) t.data)[k]);
        }
    }
}


static void
test_numbers(void **state)
{
    buf_t file = sample();
    uint8_t *copy;
    gguf_t *g;
    llm_err_t err;
    uint32_t u = 1;
    float f;
    bool flag;
    gguf_str_t s;

    (void) state;
    assert_int_equal(parse_copy(file.data, file.len, &copy, &g, &err), LLM_OK);

    assert_true(gguf_u32(g, "u8", &u) && u == 200);
    assert_true(gguf_u32(g, "u16", &u) && u == 60000);
    assert_true(gguf_u32(g, "u32", &u) && u == 4000000000u);
    assert_true(gguf_u32(g, "i64", &u) && u == 77);
    assert_false(gguf_u32(g, "i8", &u));
    assert_false(gguf_u32(g, "i16", &u));
    assert_false(gguf_u32(g, "i32", &u));
    assert_false(gguf_u32(g, "u64", &u));
    assert_false(gguf_u32(g, "f32", &u));
    assert_false(gguf_u32(g, "bool", &u));
    assert_false(gguf_u32(g, "str", &u));
    assert_false(gguf_u32(g, "i8s", &u));
    assert_false(gguf_u32(g, "absent", &u));
    assert_int_equal(u, 77);

    assert_true(gguf_f32(g, "f32", &f) && f == 1.25f);
    assert_true(gguf_f32(g, "f64", &f) && f == 0.5f);
    assert_false(gguf_f32(g, "huge", &f));
    assert_false(gguf_f32(g, "u32", &f));

    assert_true(gguf_bool(g, "bool", &flag) && flag);
    assert_true(gguf_bool(g, "false", &flag) && !flag);
    assert_false(gguf_bool(g, "u8", &flag));

    assert_true(gguf_str(g, "str", &s));
    assert_int_equal(s.len, 6);
    assert_memory_equal(s.text, "a text", 6);
    assert_true(gguf_str(g, "empty", &s) && s.len == 0);
    assert_false(gguf_str(g, "strings", &s));
    assert_true(gguf_has(g, "strings") && gguf_has(g, "u8"));
    assert_false(gguf_has(g, "u") || gguf_has(g, "") || gguf_has(g, "u88"));

    gguf_close(g);
    free(copy);
    buf_fini(&file);
}


static void
test_arrays_and_tensors(void **state)
{
    buf_t file = sample();
    uint8_t *copy;
    gguf_t *g;
    llm_err_t err;
    gguf_str_t s;
    int32_t n;
    float f;
    op_tensor_t t;

    (void) state;
    assert_int_equal(parse_copy(file.data, file.len, &copy, &g, &err), LLM_OK);

    assert_int_equal(gguf_array_len(g, "strings"), 3);
    assert_int_equal(gguf_array_len(g, "none"), 0);
    assert_int_equal(gguf_array_len(g, "str"), -1);
    assert_int_equal(gguf_array_len(g, "absent"), -1);
    assert_true(gguf_array_str(g, "strings", 2, &s) && s.len == 5);
    assert_memory_equal(s.text, "three", 5);
    assert_true(gguf_array_str(g, "strings", 1, &s) && s.len == 0);
    assert_false(gguf_array_str(g, "strings", 3, &s));
    assert_false(gguf_array_str(g, "strings", -1, &s));
    assert_false(gguf_array_str(g, "none", 0, &s));
    assert_false(gguf_array_i32(g, "strings", 0, &n));
    assert_false(gguf_array_f32(g, "strings", 0, &f));
    assert_true(gguf_array_i32(g, "i8s", 0, &n) && n == -1);
    assert_true(gguf_array_i32(g, "i8s", 1, &n) && n == 7);
    assert_false(gguf_array_i32(g, "i8s", 2, &n));
    assert_true(gguf_array_f32(g, "f32s", 0, &f) && f == 2.5f);
    assert_false(gguf_array_f32(g, "i8s", 0, &f));

    assert_int_equal(gguf_n_tensors(g), 2);
    assert_true(gguf_tensor(g, "m", &t));
    assert_int_equal(t.n_in, 32);
    assert_int_equal(t.n_out, 6);
    assert_int_equal(t.dtype, OP_Q8_0);
    assert_int_equal(((const uint8_t *) t.data)[203], 203);
    assert_true(gguf_tensor(g, "v", &t));
    assert_int_equal(t.n_in, 5);
    assert_int_equal(t.n_out, 1);
    assert_true(((const float *) t.data)[4] == 4.0f);
    assert_false(gguf_tensor(g, "w", &t));
    assert_int_equal(gguf_tensor_index(g, "v"), 1);
    assert_int_equal(gguf_tensor_bytes(g), 6 * 34 + 20);

    gguf_close(g);
    free(copy);
    buf_fini(&file);
}


static void
test_cut_anywhere(void **state)
{
    buf_t file = sample();

    (void) state;
    for (size_t len = 0; len < file.len; len++) {
        uint8_t *copy;
        gguf_t *g;
        llm_err_t err;

        assert_int_equal(parse_copy(file.data, len, &copy, &g, &err),
                         LLM_ERROR);
        free(copy);
    }

    buf_fini(&file);
}


/* Any byte may be anything: an error or a file that can be read in full. */
static void
test_bend_every_byte(void **state)
{
    static const uint8_t values[] = { 0, 1, 8, 9, 0x20, 0x7f, 0x80, 0xff };
    buf_t file = sample();

    (void) state;
    for (size_t at = 0; at < file.len; at++) {
        for (size_t v = 0; v < sizeof(values); v++) {
            const char saved = file.data[at];
            uint8_t *copy;
            gguf_t *g;
            llm_err_t err;

            file.data[at] = (char) values[v];
            if (parse_copy(file.data, file.len, &copy, &g, &err) == LLM_OK) {
                read_all(g);
                gguf_close(g);
            }
            free(copy);
            file.data[at] = saved;
        }
    }

    buf_fini(&file);
}


/* Builds, parses, and expects an error that contains `text`. */
static void
expect(build_t *b, const char *text)
{
    buf_t file = build_finish(b);
    uint8_t *copy;
    gguf_t *g;
    llm_err_t err;

    assert_int_equal(parse_copy(file.data, file.len, &copy, &g, &err),
                     LLM_ERROR);
    if (strstr(err.text, text) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", text, err.text);
    }
    free(copy);
    buf_fini(&file);
}


static void
expect_head(const char *magic, uint32_t version, uint64_t n_infos,
            uint64_t n_kvs, const char *text)
{
    uint8_t head[64] = { 0 };
    uint8_t *copy;
    gguf_t *g;
    llm_err_t err;

    memcpy(head, magic, 4);
    memcpy(head + 4, &version, 4);
    memcpy(head + 8, &n_infos, 8);
    memcpy(head + 16, &n_kvs, 8);
    assert_int_equal(parse_copy(head, sizeof(head), &copy, &g, &err),
                     LLM_ERROR);
    if (strstr(err.text, text) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", text, err.text);
    }
    free(copy);
}


static void
test_hostile_head(void **state)
{
    uint8_t *copy;
    gguf_t *g;
    llm_err_t err;

    (void) state;
    expect_head("GGML", 3, 0, 0, "not a GGUF file");
    expect_head("GGUF", 1, 0, 0, "version 1; 2 and 3");
    expect_head("GGUF", 4, 0, 0, "version 4");
    expect_head("GGUF", 0x03000000, 0, 0, "big-endian");
    expect_head("GGUF", 3, 0, UINT64_MAX, "18446744073709551615 keys");
    expect_head("GGUF", 3, 0, 100, "100 keys");
    expect_head("GGUF", 3, UINT64_MAX / 2, 0, "tensors");
    expect_head("GGUF", 3, 2, 0, "2 tensors");

    /* a file with nothing in it is a file */
    assert_int_equal(parse_copy("GGUF\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
                                24, &copy, &g, &err),
                     LLM_OK);
    gguf_close(g);
    free(copy);
}


static void
test_hostile_keys(void **state)
{
    build_t b = { 0 };

    (void) state;
    build_kv_u32(&b, "k", 1);
    build_kv_u32(&b, "k", 2);
    expect(&b, "key \"k\" is there twice");

    build_kv_u32(&b, "", 1);
    expect(&b, "the name of key 0 is 0 bytes long");

    build_kv(&b, "odd", 13, "xxxx", 4);
    expect(&b, "key \"odd\" has a value of unknown type 13");

    build_kv_array(&b, "deep", 9, 1);
    expect(&b, "key \"deep\" is an array of arrays");

    build_kv_array(&b, "long", 4, UINT64_MAX / 4 + 2);
    expect(&b, "key \"long\" claims 4611686018427387905 elements");

    build_kv_array(&b, "many", 8, 3);
    expect(&b, "key \"many\" claims 3 elements");

    build_kv_array(&b, "strings", 8, 2);
    build_str(&b.kvs, "fine");
    build_u64(&b.kvs, UINT64_MAX);
    build_u64(&b.kvs, 0);
    expect(&b, "string 1 of key \"strings\" reaches past");

    build_kv_u32(&b, "general.alignment", 24);
    expect(&b, "\"general.alignment\" is 24");

    build_kv_str(&b, "general.alignment", "32");
    expect(&b, "\"general.alignment\" is not a number");

    build_kv_u32(&b, "a\nb\"c", 1);
    build_kv_u32(&b, "a\nb\"c", 1);
    expect(&b, "key \"a?b?c\"");
}


static void
test_hostile_tensors(void **state)
{
    build_t b = { 0 };
    uint64_t ne[5] = { 32, 1, 1, 1, 1 };

    (void) state;
    build_info(&b, "blk.0.attn_q.weight", 1, ne, 23);
    expect(&b, "tensor \"blk.0.attn_q.weight\" has type IQ4_XS (23), which is "
               "not supported; supported: F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, "
               "Q8_0, Q4_K, Q5_K, Q6_K, BF16");

    build_info(&b, "t", 1, ne, 0x80000000u);
    expect(&b, "type unknown (2147483648)");

    build_info(&b, "t", 0, ne, OP_F32);
    buf_add(&b.data, "xxxx", 4);
    expect(&b, "0 dimensions");

    build_info(&b, "t", 5, ne, OP_F32);
    expect(&b, "5 dimensions");

    ne[1] = 0;
    build_info(&b, "t", 2, ne, OP_F32);
    expect(&b, "dimension 1 is 0");

    ne[1] = 1 << 16;
    ne[2] = 1 << 15;
    build_info(&b, "t", 3, ne, OP_F32);
    expect(&b, "dimension 2 is 32768");

    ne[0] = UINT64_MAX;
    build_info(&b, "t", 1, ne, OP_F32);
    expect(&b, "dimension 0 is 18446744073709551615");

    ne[0] = INT32_MAX;
    ne[1] = INT32_MAX;
    build_info(&b, "t", 2, ne, OP_F32);
    expect(&b, "reaches past the end of the file");

    ne[0] = 48;
    build_info(&b, "t", 1, ne, OP_Q4_0);
    expect(&b, "rows of 48 values, not a multiple of 32");

    ne[0] = 8;
    build_info(&b, "t", 1, ne, OP_F32);
    build_info(&b, "t", 1, ne, OP_F32);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "tensor \"t\" is there twice");

    build_info(&b, "t", 1, ne, OP_F32);
    build_info(&b, "u", 1, ne, OP_F32);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "tensors \"t\" and \"u\" overlap");

    buf_add(&b.data, "0123", 4);
    build_info(&b, "t", 1, ne, OP_F32);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "offset 4, not a multiple of the alignment 32");
}


/* An offset that wraps round when the size is added. */
static void
test_offset_wraps(void **state)
{
    build_t b = { 0 };
    const uint64_t ne[1] = { 8 }, offset = UINT64_MAX - 31;

    (void) state;
    build_info(&b, "t", 1, ne, OP_F32);
    memcpy(b.infos.data + b.infos.len - 8, &offset, 8);
    buf_add(&b.data, "0123456789012345678901234567890", 32);
    expect(&b, "reaches past the end of the file");
}


static void
test_no_memory(void **state)
{
    buf_t file = sample();
    int failed = 0;

    (void) state;
    for (long n = 1; n < 50; n++) {
        uint8_t *copy;
        gguf_t *g;
        llm_err_t err;

        arena_fail_after(n);

        const int rc = parse_copy(file.data, file.len, &copy, &g, &err);

        arena_fail_after(0);
        if (rc == LLM_OK) {
            gguf_close(g);
            free(copy);
            break;
        }

        assert_int_equal(rc, LLM_NOMEM);
        assert_int_equal(err.code, LLM_NOMEM);
        failed++;
        free(copy);
    }

    assert_true(failed > 0 && failed < 49);
    buf_fini(&file);
}


static void
test_open(void **state)
{
    buf_t file = sample();
    char path[] = "/tmp/gguf_test_XXXXXX";
    const int fd = mkstemp(path);
    gguf_t *g;
    llm_err_t err;
    uint32_t u;

    (void) state;
    assert_true(fd >= 0);
    assert_int_equal(write(fd, file.data, file.len), (ssize_t) file.len);
    assert_int_equal(gguf_open(path, &g, &err), LLM_OK);
    assert_true(gguf_u32(g, "u8", &u) && u == 200);
    gguf_err(g, &err, "is %d", 5);
    assert_non_null(strstr(err.text, path));
    assert_non_null(strstr(err.text, "\": is 5"));
    gguf_close(g);

    assert_int_equal(ftruncate(fd, 300), 0);
    assert_int_equal(gguf_open(path, &g, &err), LLM_ERROR);
    assert_null(g);
    assert_non_null(strstr(err.text, path));
    close(fd);
    unlink(path);

    assert_int_equal(gguf_open(path, &g, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(gguf_open("/tmp", &g, &err), LLM_ERROR);
    assert_int_equal(gguf_open("/tmp", &g, NULL), LLM_ERROR);
    buf_fini(&file);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_arrays_and_tensors),
        cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_bend_every_byte),
        cmocka_unit_test(test_hostile_head),
        cmocka_unit_test(test_hostile_keys),
        cmocka_unit_test(test_hostile_tensors),
        cmocka_unit_test(test_offset_wraps),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_open),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
