/*
 * The sizing of the store on machines that are only numbers, its messages to
 * the letter, reserving and touching its memory.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/kv/store.h"

#define MIB ((size_t) 1 << 20)

static size_t asked_bytes;
static size_t freed_bytes;
static bool refuse;


static size_t
fake_page_bytes(op_dev_t *dev, int dtype, int n_layers, int n_kv_heads,
                int head_dim)
{
    (void) dev;
    return (size_t) n_layers * n_kv_heads * head_dim * OP_PAGE
           * (dtype == OP_Q8_0 ? 2 : 4);
}


static void *
fake_alloc(op_dev_t *dev, size_t bytes)
{
    (void) dev;
    asked_bytes = bytes;
    return refuse ? NULL : malloc(16);
}


static void
fake_free(op_dev_t *dev, void *p, size_t bytes)
{
    (void) dev;
    freed_bytes = bytes;
    free(p);
}


static const op_table_t fake_ops = { .kv_page_bytes = fake_page_bytes,
                                     .alloc = fake_alloc,
                                     .free = fake_free };


static void
test_store_create(void **state)
{
    op_kv_t kv = {
        .n_pages = 10,
        .n_layers = 2,
        .n_kv_heads = 3,
        .head_dim = 8,
        .dtype = OP_F16,
    };
    llm_err_t err;

    (void) state;
    refuse = false;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_OK);
    assert_non_null(kv.base);
    assert_int_equal(asked_bytes, 10 * 2 * 3 * 8 * 16 * 4);
    kv_store_destroy(&fake_ops, NULL, &kv);
    assert_int_equal(freed_bytes, asked_bytes);
    assert_null(kv.base);
    kv_store_destroy(&fake_ops, NULL, &kv);

    kv.dtype = OP_Q8_0;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_OK);
    assert_int_equal(asked_bytes, 10 * 2 * 3 * 8 * 16 * 2);
    kv_store_destroy(&fake_ops, NULL, &kv);
    assert_int_equal(freed_bytes, asked_bytes);

    refuse = true;
    assert_int_equal(kv_store_create(&fake_ops, NULL, &kv, &err), LLM_NOMEM);
    assert_null(kv.base);
    assert_non_null(strstr(err.text, "10 pages"));
    assert_non_null(strstr(err.text, "lower kv_cache_memory"));
}


/* A machine of 1000 pages of 1 MiB, 100 of them held, all others free. */
static kv_ask_t
ask_of(double utilization, size_t kv_cache_memory, int max_seqs, int max_len)
{
    return (kv_ask_t){ .page_bytes = MIB,
                       .total = 1000 * MIB,
                       .held = 100 * MIB,
                       .free = 900 * MIB,
                       .utilization = utilization,
                       .kv_cache_memory = kv_cache_memory,
                       .max_seqs = max_seqs,
                       .max_len = max_len };
}


static void
assert_pages(const kv_ask_t *ask, int n_pages, int max_len)
{
    kv_size_t size = { 0 };
    llm_err_t err;

    if (kv_store_size(ask, &size, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    assert_int_equal(size.n_pages, n_pages);
    assert_int_equal(size.max_len, max_len);
}


static void
assert_refused(const kv_ask_t *ask, const char *text)
{
    kv_size_t size = { -7, -8 };
    llm_err_t err;

    assert_int_equal(kv_store_size(ask, &size, &err), LLM_LIMIT);
    assert_int_equal(err.code, LLM_LIMIT);
    assert_string_equal(err.text, text);
    assert_int_equal(size.n_pages, -7);
    assert_int_equal(size.max_len, -8);
}


static void
test_size_explicit(void **state)
{
    kv_ask_t ask = ask_of(0, 100 * MIB, 1, 16);

    (void) state;

    /* all of it, whatever the sequences need and the utilization says */
    assert_pages(&ask, 100, 16);
    ask.utilization = 0.5;
    assert_pages(&ask, 100, 16);

    ask = ask_of(0, 100 * MIB - 1, 8, 99 * 16);
    assert_pages(&ask, 99, 99 * 16);

    /* more pages than have numbers */
    ask = ask_of(0, SIZE_MAX, 3, 33);
    ask.page_bytes = 1;
    ask.free = SIZE_MAX;
    assert_pages(&ask, INT32_MAX / 16, 33);

    ask = ask_of(0, 100 * MIB, 8, 4097);
    ask.page_bytes = MIB / 2;
    assert_refused(&ask, "one sequence of max_model_len 4097 tokens needs a KV "
                         "cache of 128.5 MiB, but kv_cache_memory allows 100.0 "
                         "MiB; the longest context that fits is 3200; raise "
                         "kv_cache_memory or lower max_model_len");

    /* auto: exactly what fits */
    ask.auto_len = true;
    assert_pages(&ask, 200, 3200);
    ask.max_len = 3201;
    assert_pages(&ask, 200, 3200);
    ask.max_len = 3200;
    assert_pages(&ask, 200, 3200);
    ask.max_len = 3199;
    assert_pages(&ask, 200, 3199);

    /* not a page */
    ask.kv_cache_memory = 10;
    assert_refused(&ask, "one sequence of max_model_len 3199 tokens needs a KV "
                         "cache of 100.0 MiB, but kv_cache_memory allows 0.0 "
                         "MiB; the longest context that fits is 0; raise "
                         "kv_cache_memory or lower max_model_len");

    /* not there */
    ask = ask_of(0, 900 * MIB, 8, 16);
    assert_pages(&ask, 900, 16);
    ask.free -= 1;
    assert_refused(&ask, "kv_cache_memory allows a KV cache of 900.0 MiB, but "
                         "only 900.0 MiB of memory are free: lower "
                         "kv_cache_memory, or end what else uses the memory");
}


/* What is kept about pages comes out of what a share allows, and beside what
 * was asked for by name. */
static void
test_size_records(void **state)
{
    kv_ask_t ask = ask_of(0.5, 0, 1, 16);

    (void) state;

    assert_pages(&ask, 400, 16);
    ask.record_bytes = MIB / 4;
    assert_pages(&ask, 320, 16);

    ask = ask_of(0, 0, 1000, 16);
    assert_pages(&ask, 250, 16);
    ask.record_bytes = MIB;
    assert_pages(&ask, 125, 16);

    ask = ask_of(0, 720 * MIB, 1, 16);
    ask.record_bytes = MIB / 4;
    assert_pages(&ask, 720, 16);
    ask.kv_cache_memory += MIB;
    assert_refused(&ask, "kv_cache_memory allows a KV cache of 901.2 MiB, but "
                         "only 900.0 MiB of memory are free: lower "
                         "kv_cache_memory, or end what else uses the memory");
}


static void
test_size_utilization(void **state)
{
    kv_ask_t ask = ask_of(0.5, 0, 1, 16);

    (void) state;

    /* requested − held, used whole */
    assert_pages(&ask, 400, 16);
    ask.utilization = 1;
    assert_pages(&ask, 900, 16);
    ask.utilization = 0.1;
    assert_refused(&ask, "no memory is left for the KV cache: "
                         "gpu_memory_utilization 0.1 of 1000.0 MiB allows "
                         "100.0 MiB, and weights, activations and the process "
                         "itself take 100.0 MiB: raise gpu_memory_utilization, "
                         "lower max_num_batched_tokens or use a smaller "
                         "model");

    ask = ask_of(0.2, 0, 1, 1601);
    assert_refused(&ask, "one sequence of max_model_len 1601 tokens needs a KV "
                         "cache of 101.0 MiB, but gpu_memory_utilization 0.2, "
                         "less weights, activations and the process, allows "
                         "100.0 MiB; the longest context that fits is 1600; "
                         "raise gpu_memory_utilization or lower "
                         "max_model_len");
    ask.auto_len = true;
    assert_pages(&ask, 100, 1600);

    /* somebody else took it in the meantime */
    ask = ask_of(0.5, 0, 1, 16);
    ask.free = 400 * MIB;
    assert_pages(&ask, 400, 16);
    ask.free = 399 * MIB;
    assert_refused(&ask, "gpu_memory_utilization 0.5, less weights, "
                         "activations and the process, allows a KV cache of "
                         "400.0 MiB, but only 399.0 MiB of memory are free: "
                         "lower gpu_memory_utilization, or end what else uses "
                         "the memory");
}


/* Without a word about it: what the sequences need, but never much. */
static void
test_size_modest(void **state)
{
    kv_ask_t ask = ask_of(0, 0, 3, 33);

    (void) state;
    assert_pages(&ask, 9, 33);

    /* a quarter */
    ask.max_seqs = 1000;
    assert_pages(&ask, 250, 33);

    /* what 0.9 leaves */
    ask.held = 700 * MIB;
    assert_pages(&ask, 200, 33);

    /* 7/8 of what is free */
    ask.free = 80 * MIB;
    assert_pages(&ask, 70, 33);

    ask.max_len = 71 * 16;
    assert_refused(&ask, "one sequence of max_model_len 1136 tokens needs a KV "
                         "cache of 71.0 MiB, but the default share, 7/8 of the "
                         "free memory, allows 70.0 MiB; the longest context "
                         "that fits is 1120; free some memory or lower "
                         "max_model_len");
    ask.auto_len = true;
    assert_pages(&ask, 70, 1120);

    ask = ask_of(0, 0, 1, 251 * 16);
    assert_refused(&ask, "one sequence of max_model_len 4016 tokens needs a KV "
                         "cache of 251.0 MiB, but the default share, a quarter "
                         "of the memory, allows 250.0 MiB; the longest context "
                         "that fits is 4000; set kv_cache_memory or lower "
                         "max_model_len");

    ask.held = 900 * MIB;
    assert_refused(&ask, "no memory is left for the KV cache: "
                         "gpu_memory_utilization 0.9 of 1000.0 MiB allows "
                         "900.0 MiB, and weights, activations and the process "
                         "itself take 900.0 MiB: raise gpu_memory_utilization, "
                         "lower max_num_batched_tokens or use a smaller "
                         "model");
}


static void
test_requested(void **state)
{
    llm_err_t err;

    (void) state;
    assert_int_equal(kv_store_requested(1000, 0.5), 500);
    assert_int_equal(kv_store_requested(1001, 0.5), 501); /* rounded up */
    assert_int_equal(kv_store_requested(1000, 1), 1000);
    assert_int_equal(kv_store_requested(0, 0.9), 0);
    assert_int_equal(kv_store_requested((size_t) 40 << 30, 0.9),
                     38654705664); /* 36 GiB */

    assert_int_equal(kv_store_check(1001, 501, 0.5, &err), LLM_OK);
    assert_int_equal(kv_store_check(1001, 500, 0.5, &err), LLM_LIMIT);
    assert_int_equal(
        kv_store_check((size_t) 40 << 30, (size_t) 30 << 30, 0.95, &err),
        LLM_LIMIT);
    assert_string_equal(err.text,
                        "gpu_memory_utilization 0.95 asks for 38.00 GiB of the "
                        "40.00 GiB that this process may use, but only 30.00 "
                        "GiB are free: lower gpu_memory_utilization, or end "
                        "what else uses the memory");
}


/* Contents stay, and everything is resident afterwards; any alignment. */
static void
test_prefault(void **state)
{
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    const size_t bytes = 20 * page;
    unsigned char resident[20] = { 0 };
    llm_err_t err;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void) state;
    assert_true(base != MAP_FAILED);
    base[5 * page + 7] = 'x';

    assert_int_equal(kv_store_prefault(base, 0, &err), LLM_OK);
    assert_int_equal(kv_store_prefault(base + page + 100, page, &err), LLM_OK);
    assert_int_equal(mincore(base, bytes, resident), 0);
    assert_int_equal(resident[1] & 1, 1);
    assert_int_equal(resident[2] & 1, 1);
    assert_int_equal(resident[4] & 1, 0);

    assert_int_equal(kv_store_prefault(base, bytes, &err), LLM_OK);
    assert_int_equal(mincore(base, bytes, resident), 0);

    for (int i = 0; i < 20; i++) {
        assert_int_equal(resident[i] & 1, 1);
    }

    assert_int_equal(base[5 * page + 7], 'x');
    munmap(base, bytes);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_store_create),
        cmocka_unit_test(test_size_explicit),
        cmocka_unit_test(test_size_records),
        cmocka_unit_test(test_size_utilization),
        cmocka_unit_test(test_size_modest),
        cmocka_unit_test(test_requested),
        cmocka_unit_test(test_prefault),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
