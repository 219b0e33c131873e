/*
 * No memory in quantize and trim: the n-th allocation fails, for each n.  It is
 * told, and nothing is left; the first n that is never reached ends it.
 *
 * Linked with --wrap for malloc, calloc and realloc.
 */

#include "t/unit/engine_convert.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);

static long countdown; /* 0: none fails */


static bool
fails(void)
{
    return countdown > 0 && --countdown == 0;
}


void *
__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}


void *
__wrap_calloc(size_t n, size_t bytes)
{
    return fails() ? NULL : __real_calloc(n, bytes);
}


void *
__wrap_realloc(void *p, size_t bytes)
{
    return fails() ? NULL : __real_realloc(p, bytes);
}


static int
convert(bool quantize)
{
    return quantize ? convert_quantize(in, out, OP_Q8_0, OP_F16, &done, &err)
                    : convert_trim(in, out, "1", &done, &err);
}


static void
test_no_memory(void **state)
{
    const tiny_t t = { .n_layers = 2,
                       .n_embd = 64,
                       .n_ff = 96,
                       .n_heads = 2,
                       .n_kv_heads = 2,
                       .head_dim = 32,
                       .n_vocab = 40,
                       .seed = 3 };

    (void) state;
    put_tiny(&t, OP_F32);

    for (int quantize = 0; quantize < 2; quantize++) {
        int rc = LLM_NOMEM;
        long n = 0;

        while (rc != LLM_OK) {
            assert_true(n < 1000);
            countdown = ++n;
            memset(&err, 0, sizeof(err));
            rc = convert(quantize);

            if (rc != LLM_OK) {
                assert_int_equal(rc, LLM_NOMEM);
                assert_int_equal(err.code, LLM_NOMEM);
                assert_non_null(strstr(err.text, "memory"));
                assert_int_equal(files_in_dir(), 1);
            }
        }

        /* the fault was still to come, and there were some before */
        assert_true(countdown > 0 && n > 5);
        countdown = 0;
        assert_int_equal(files_in_dir(), 2);
        unlink(out);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_no_memory) };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (!convert_begin()) {
        return 1;
    }

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    convert_end();

    return rc;
}
