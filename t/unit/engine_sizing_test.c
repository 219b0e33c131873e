/*
 * Sizes of well-known models against numbers worked out by hand, the
 * article's 13-billion model on a 40 GB card among them; the account of a
 * loaded model against what it really reserved; the settings of the memory.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/budget.h"
#include "engine/conf.h"
#include "engine/kv/store.h"
#include "engine/kv/table.h"
#include "engine/sizing.h"
#include "kernels/backend.h"


/* Published parameter counts. */
static void
test_params(void **state)
{
    static const struct {
        const char *name;
        int64_t params;
    } rows[] = {
        { "llama-7b", 6738415616 },     { "llama-13b", 13015864320 },
        { "llama-3-8b", 8030261248 },   { "llama-3-70b", 70553706496 },
        { "llama-3.2-1b", 1235814400 }, { "mistral-7b", 7241732096 },
        { "smollm2-135m", 134515008 },  { "qwen2.5-7b", 7615616512 },
        { "llama-1b", 1235814400 },
    };
    const int n = sizeof(rows) / sizeof(rows[0]);

    (void) state;

    for (int i = 0; i < n; i++) {
        const sizing_shape_t *shape = sizing_find(rows[i].name);

        assert_non_null(shape);
        assert_string_equal(shape->name, rows[i].name);
        assert_int_equal(sizing_params(shape), rows[i].params);
    }

    assert_non_null(sizing_at(n - 1));
    assert_null(sizing_at(n));
    assert_null(sizing_at(-1));
    assert_null(sizing_find("llama"));
    assert_null(sizing_find(""));
}


static void
test_bytes(void **state)
{
    const sizing_shape_t *big = sizing_find("llama-13b");
    const sizing_shape_t *tied = sizing_find("smollm2-135m");

    (void) state;

    /* two bytes a parameter, vectors four */
    assert_int_equal(sizing_weight_bytes(big, OP_F16),
                     2 * 13015864320 + 2 * 81 * 5120);
    assert_int_equal(sizing_weight_bytes(big, OP_BF16),
                     sizing_weight_bytes(big, OP_F16));

    /* a step looks 5120 × 32000 up by row */
    assert_int_equal(sizing_weight_bytes(big, OP_F16)
                         - sizing_step_bytes(big, OP_F16),
                     5120 * 32000 * 2);
    assert_int_equal(sizing_weight_bytes(tied, OP_F16),
                     sizing_step_bytes(tied, OP_F16));

    /* Q4_0: 18 bytes for 32 values; 17 outputs take two groups of 16 */
    assert_int_equal(sizing_matrix_bytes(OP_Q4_0, 64, 32), 32 * 2 * 18);
    assert_int_equal(sizing_matrix_bytes(OP_Q4_0, 64, 17), 32 * 2 * 18);
    assert_int_equal(sizing_matrix_bytes(OP_Q8_0, 64, 16), 16 * 2 * 34);
    assert_int_equal(sizing_matrix_bytes(OP_F32, 64, 16), 16 * 64 * 4);

    /* 2 × 40 layers × 40 heads × 128 × 2 bytes; 128 KiB for llama-3-8b */
    assert_int_equal(sizing_kv_bytes(big, OP_F16), 819200);
    assert_int_equal(sizing_kv_bytes(big, OP_Q8_0), 435200);
    assert_int_equal(sizing_kv_bytes(sizing_find("llama-3-8b"), OP_BF16),
                     128 << 10);
    assert_int_equal(sizing_kv_bytes(tied, OP_F16), 23040);

    /* a head of 80 values has three scales: 2 × 7 × 5 × (80 + 6) */
    const sizing_shape_t odd = { .n_layers = 7,
                                 .n_kv_heads = 5,
                                 .head_dim = 80 };

    assert_int_equal(sizing_kv_bytes(&odd, OP_Q8_0), 6020);

    /* a row: 3 × 5120, and the MLP's 3 × 13824, in which attention's 15360 +
     * 5120 find room: 56832 floats */
    const sizing_step_t step = { 2048, 64, 2048, 1 };

    assert_int_equal(sizing_activation_bytes(big, &step),
                     4 * (2048 * 56832 + 2048 * 128));

    /* logits that are larger than the rest: 64 × 49152 */
    const sizing_step_t wide = { 128, 64, 16, 1 };

    assert_int_equal(sizing_activation_bytes(tied, &wide),
                     4 * (128 * 3 * 576 + 64 * 49152 + 16 * 64));
}


/* 13 billion parameters, 26 GB of f16 weights, 40 GB: the weights take 65 %,
 * requests of a quarter of the maximum waste 75 % of their reservation, and
 * pages hold four times as many. */
static void
test_article(void **state)
{
    const sizing_shape_t *shape = sizing_find("llama-13b");
    const sizing_step_t step = { 2048, 64, 2048, 1 };
    const size_t weights = sizing_weight_bytes(shape, OP_F16);
    const kv_ask_t ask = {
        .page_bytes = 16 * sizing_kv_bytes(shape, OP_F16),
        .total = 40000000000,
        .held = weights + sizing_activation_bytes(shape, &step),
        .free = SIZE_MAX,
        .utilization = 0.9,
        .max_seqs = 128,
        .max_len = 2048,
    };
    kv_size_t size;
    llm_err_t err;
    sizing_plan_t plan;

    (void) state;
    assert_int_equal(weights, 26032558080);
    assert_int_equal(weights * 100 / ask.total, 65);

    /* 36e9 − 26032558080 − 466616320 = 9500825600 = 724.9 × 13107200 */
    assert_int_equal(kv_store_size(&ask, &size, &err), LLM_OK);
    assert_int_equal(size.n_pages, 724);
    assert_int_equal(size.max_len, 2048);

    const sizing_load_t load = {
        .step_weights = sizing_step_bytes(shape, OP_F16),
        .kv_per_token = sizing_kv_bytes(shape, OP_F16),
        .n_pages = size.n_pages,
        .context = 2048,
        .mean = 512,
        .max_seqs = 128,
        .bytes_per_sec = 2e12,
    };

    sizing_plan(&load, &plan);
    assert_int_equal(plan.tokens, 11584);
    assert_int_equal(plan.reserved, 5); /* 11584 / 2048 */
    assert_int_equal(plan.paged, 22);   /* 11584 / 519.5 */
    assert_int_equal(plan.batch, 22);
    assert_float_equal(plan.reserved_waste, 0.75, 1e-9);
    assert_float_equal(plan.paged_waste, 7.5 / 519.5, 1e-9);
    assert_true(plan.paged_waste < 0.04);

    /* 2e12 / (25704878080 + 512 × 819200 = 26124308480) */
    assert_float_equal(plan.single_per_sec, 76.5570, 1e-3);

    /* 25704878080 + 22 × 419430400 = 34932346880 bytes a step */
    assert_float_equal(plan.batch_step_secs, 17.46617344e-3, 1e-9);
    assert_float_equal(plan.batch_per_sec, 1259.5776, 1e-3);
}


static void
test_plan_edges(void **state)
{
    sizing_load_t load = { .step_weights = 1000,
                           .kv_per_token = 10,
                           .n_pages = 10,
                           .context = 64,
                           .mean = 1,
                           .max_seqs = 4 };
    sizing_plan_t plan;

    (void) state;

    /* a token takes a page; no bandwidth, no speed; max_seqs caps the step */
    sizing_plan(&load, &plan);
    assert_int_equal(plan.reserved, 2);
    assert_int_equal(plan.paged, 10);
    assert_int_equal(plan.batch, 4);
    assert_float_equal(plan.paged_waste, 15.0 / 16, 1e-9);
    assert_true(plan.single_per_sec == 0 && plan.batch_per_sec == 0);

    /* not one request fits: nothing is divided by 0 */
    load.n_pages = 1;
    load.mean = 64;
    load.bytes_per_sec = 1640;
    sizing_plan(&load, &plan);
    assert_int_equal(plan.reserved, 0);
    assert_int_equal(plan.paged, 0);
    assert_float_equal(plan.reserved_waste, 0, 1e-9);
    assert_float_equal(plan.single_per_sec, 1, 1e-9);
    assert_true(plan.batch_per_sec == 0 && plan.batch_step_secs == 0);
}


/* The estimate before loading is what loading takes. */
static void
test_account(void **state)
{
    const char *path = getenv("LLM_TEST_MODEL");
    model_config_t config;
    model_t *model;
    gguf_t *gguf;
    llm_err_t err;

    (void) state;

    if (path == NULL) {
        print_message("# LLM_TEST_MODEL is not set: no account\n");
        return;
    }

    const op_open_t open = { .threads = 1 };
    op_err_t op_err;
    const op_table_t *ops = backend_find("cpu");
    op_dev_t *dev = ops->open(&open, &op_err);
    const sizing_step_t step = { 256, 16, 1024, 1 };
    const model_load_t how = { .ops = ops,
                               .dev = dev,
                               .max_rows = step.max_rows,
                               .max_seqs = 16,
                               .max_out = step.max_out,
                               .max_len = step.max_len };

    assert_int_equal(gguf_open(path, &gguf, &err), LLM_OK);
    assert_int_equal(model_config_read(gguf, &config, &err), LLM_OK);
    assert_int_equal(model_load(gguf, &how, &model, &err), LLM_OK);

    const sizing_shape_t shape = sizing_shape(&config, true);

    assert_int_equal(budget_weight_bytes(gguf), model_weight_bytes(model));
    assert_int_equal(sizing_activation_bytes(&shape, &step),
                     model_activation_bytes(model));
    assert_int_equal(sizing_kv_bytes(&shape, OP_F16) * KV_PAGE,
                     model_page_bytes(model, OP_F16));
    assert_int_equal(sizing_kv_bytes(&shape, OP_Q8_0) * KV_PAGE,
                     model_page_bytes(model, OP_Q8_0));

    gguf_close(gguf);
    model_free(model);
    ops->close(dev);
}


static void
assert_setting(const char *word, int rc)
{
    engine_conf_t conf;
    llm_err_t err = { .text = "" };

    engine_conf_init(&conf);

    if (engine_conf_set(&conf, word, &err) != rc) {
        fail_msg("%s: %s", word, err.text);
    }

    /* what is refused is named */
    if (rc != LLM_OK) {
        assert_non_null(strstr(err.text, word));
    }
}


static void
test_settings(void **state)
{
    engine_conf_t conf;
    llm_err_t err;

    (void) state;
    engine_conf_init(&conf);
    assert_true(conf.gpu_memory_utilization == 0);
    assert_false(conf.kv_cache_prefault);

    assert_int_equal(
        engine_conf_set(&conf, "gpu_memory_utilization=0.95", &err), LLM_OK);
    assert_float_equal(conf.gpu_memory_utilization, 0.95, 1e-12);
    assert_int_equal(engine_conf_set(&conf, "kv_cache_prefault=on", &err),
                     LLM_OK);
    assert_true(conf.kv_cache_prefault);
    assert_int_equal(engine_conf_set(&conf, "kv_cache_prefault=off", &err),
                     LLM_OK);
    assert_false(conf.kv_cache_prefault);

    assert_setting("gpu_memory_utilization=0.05", LLM_OK);
    assert_setting("gpu_memory_utilization=1", LLM_OK);
    assert_setting("gpu_memory_utilization=.5", LLM_OK);
    assert_setting("gpu_memory_utilization=0.049", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=1.001", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=0", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=-0.5", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=0.5x", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=0.5.5", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=nan", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=0x1", LLM_BADREQ);
    assert_setting("gpu_memory_utilization=90%", LLM_BADREQ);
    assert_setting("kv_cache_prefault=yes", LLM_BADREQ);
    assert_setting("kv_cache_prefault=", LLM_BADREQ);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_params),  cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_article), cmocka_unit_test(test_plan_edges),
        cmocka_unit_test(test_account), cmocka_unit_test(test_settings),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
