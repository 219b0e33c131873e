/*
 * The settings: every key with its range, sizes, and what the messages say.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "engine/conf.h"
#include "kernels/op/tensor.h"

static engine_conf_t conf;
static llm_err_t err;


static int
setup(void **state)
{
    (void) state;
    engine_conf_init(&conf);
    memset(&err, 0, sizeof(err));

    return 0;
}


static void
accept(const char *word)
{
    if (engine_conf_set(&conf, word, &err) != LLM_OK) {
        fail_msg("%s: %s", word, err.text);
    }
}


/* Refused, with a text that holds `says`, and nothing has changed. */
static void
refuse(const char *word, const char *says)
{
    const engine_conf_t before = conf;

    memset(&err, 0, sizeof(err));

    if (engine_conf_set(&conf, word, &err) != LLM_BADREQ) {
        fail_msg("%s is accepted", word);
    }

    if (strstr(err.text, says) == NULL) {
        fail_msg("%s: \"%s\" does not say \"%s\"", word, err.text, says);
    }

    assert_memory_equal(&before, &conf, sizeof(conf));
}


static void
test_defaults(void **state)
{
    (void) state;
    assert_string_equal(conf.name, "default");
    assert_string_equal(conf.device, "auto");
    assert_null(conf.model);
    assert_null(conf.alias);
    assert_null(conf.isa);
    assert_null(conf.chat_template);
    assert_null(conf.repack_cache);
    assert_null(conf.log);
    assert_int_equal(conf.log_level, LOG_NOTICE);
    assert_int_equal(conf.max_model_len, 0);
    assert_int_equal(conf.block_size, 16);
    assert_int_equal(conf.max_num_seqs, 128);
    assert_int_equal(conf.max_num_batched_tokens, 2048);
    assert_int_equal(conf.long_prefill_token_threshold, 0);
    assert_true(conf.chunked_prefill);
    assert_true(conf.prefix_caching);
    assert_true(conf.inter_token_target == 60);
    assert_false(conf.reservation);
    assert_true(conf.gpu_memory_utilization == 0);
    assert_int_equal(conf.kv_cache_memory, 0);
    assert_false(conf.kv_cache_prefault);
    assert_int_equal(conf.kv_cache_dtype, OP_F16);
    assert_int_equal(conf.threads, 0);
    assert_int_equal(conf.reserved_cpus, 0);
    assert_false(conf.cpu_affinity);
    assert_true(conf.deterministic);
    assert_int_equal(conf.workers, 8);
    assert_int_equal(conf.n_drafters, 0);
    assert_null(conf.speculative_model);
    assert_int_equal(conf.num_speculative_tokens, 0);
}


static void
test_strings(void **state)
{
    (void) state;
    accept("name=chat");
    accept("model=/m/a=b.gguf");
    accept("alias=tiny model");
    accept("device=cpu");
    accept("isa=avx2");
    accept("chat_template=/t.jinja");
    accept("log=/var/log/x");
    accept("repack_cache=/var/cache");
    accept("speculative_model=/m/small.gguf");

    assert_string_equal(conf.name, "chat");
    assert_string_equal(conf.model, "/m/a=b.gguf");
    assert_string_equal(conf.alias, "tiny model");
    assert_string_equal(conf.device, "cpu");
    assert_string_equal(conf.isa, "avx2");
    assert_string_equal(conf.chat_template, "/t.jinja");
    assert_string_equal(conf.log, "/var/log/x");
    assert_string_equal(conf.repack_cache, "/var/cache");
    assert_string_equal(conf.speculative_model, "/m/small.gguf");

    /* an empty name is a mistake in a script, never a wish */
    refuse("model=", "model= is empty");
    refuse("alias=", "alias= is empty");
    refuse("log=", "log= is empty");
    refuse("speculative_model=", "speculative_model= is empty");
}


typedef struct {
    const char *key;
    long min;
    long max;
    int automatic;
    const int *place;
} int_key_t;


static void
test_numbers(void **state)
{
    const int_key_t keys[] = {
        { "max_model_len", 16, 1 << 24, 1, &conf.max_model_len },
        { "block_size", 16, 16, 0, &conf.block_size },
        { "max_num_seqs", 1, 4096, 0, &conf.max_num_seqs },
        { "max_num_batched_tokens", 1, 1 << 17, 0,
          &conf.max_num_batched_tokens },
        { "long_prefill_token_threshold", 0, 1 << 17, 0,
          &conf.long_prefill_token_threshold },
        { "num_speculative_tokens", 1, 15, 1, &conf.num_speculative_tokens },
        { "threads", 1, 256, 1, &conf.threads },
        { "reserved_cpus", 0, 255, 0, &conf.reserved_cpus },
        { "workers", 1, 256, 0, &conf.workers },
    };
    static const char *const bad[] = {
        "",    " ",          "x",   "7x",  "0x10", "1e3",
        "-1",  " 16",        "16 ", "+16", "-0",   "99999999999999999999",
        "16.", "4294967312", /* 2^32 + 16 */
    };
    char word[128], says[128];

    (void) state;

    for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++) {
        const int_key_t *key = &keys[k];

        snprintf(word, sizeof(word), "%s=%ld", key->key, key->min);
        accept(word);
        assert_int_equal(*key->place, key->min);
        snprintf(word, sizeof(word), "%s=%ld", key->key, key->max);
        accept(word);
        assert_int_equal(*key->place, key->max);

        snprintf(says, sizeof(says), "from %ld to %ld%s", key->min, key->max,
                 key->automatic ? ", or auto" : "");
        snprintf(word, sizeof(word), "%s=%ld", key->key, key->min - 1);
        refuse(word, says);
        assert_string_equal(err.param, key->key);
        snprintf(word, sizeof(word), "%s=%ld", key->key, key->max + 1);
        refuse(word, says);

        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            snprintf(word, sizeof(word), "%s=%s", key->key, bad[i]);
            refuse(word, says);
            assert_non_null(strstr(err.text, word)); /* shows the value */
        }

        snprintf(word, sizeof(word), "%s=auto", key->key);
        if (key->automatic) {
            accept(word);
            assert_int_equal(*key->place, 0);
        } else {
            refuse(word, says);
        }
    }
}


static void
test_sizes(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        { "1", 1 },
        { "4096", 4096 },
        { "3k", 3 << 10 },
        { "3K", 3 << 10 },
        { "64m", 64 << 20 },
        { "64M", 64 << 20 },
        { "2g", 2ull << 30 },
        { "2G", 2ull << 30 },
        { "17179869183G", 17179869183ull << 30 },
        { "18446744073709551615", UINT64_MAX },
    };
    static const char *const bad[] = {
        "",
        "0",
        "0g",
        "-1",
        " -1",
        " 1",
        "+1",
        "g",
        "1gg",
        "1 g",
        "1t",
        "1.5g",
        "18446744073709551616",
        "17179869184G",
        "0x10",
        "auto",
    };
    char word[64];

    (void) state;

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        snprintf(word, sizeof(word), "kv_cache_memory=%s", good[i].text);
        accept(word);
        assert_true(conf.kv_cache_memory == good[i].bytes);
    }

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(word, sizeof(word), "kv_cache_memory=%s", bad[i]);
        refuse(word, "a number with k, m or g");
        assert_string_equal(err.param, "kv_cache_memory");
    }
}


static void
test_flags(void **state)
{
    const struct {
        const char *key;
        const bool *place;
    } keys[] = {
        { "chunked_prefill", &conf.chunked_prefill },
        { "prefix_caching", &conf.prefix_caching },
        { "reservation", &conf.reservation },
        { "kv_cache_prefault", &conf.kv_cache_prefault },
        { "cpu_affinity", &conf.cpu_affinity },
        { "deterministic", &conf.deterministic },
    };
    static const char *const bad[] = { "",    "On", "1",   "0",
                                       "yes", "no", "on ", "offf" };
    char word[64];

    (void) state;

    for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++) {
        for (int on = 1; on >= 0; on--) {
            snprintf(word, sizeof(word), "%s=%s", keys[k].key,
                     on ? "on" : "off");
            accept(word);
            assert_int_equal(*keys[k].place, on);

            for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
                snprintf(word, sizeof(word), "%s=%s", keys[k].key, bad[i]);
                refuse(word, "use on or off");
                assert_string_equal(err.param, keys[k].key);
            }
        }
    }
}


/* What of "ngram" and "suffix" is set, as one word. */
static const char *
drafters(void)
{
    static char text[128];
    size_t len = 0;

    text[0] = '\0';

    for (int i = 0; i < conf.n_drafters; i++) {
        const conf_drafter_t *d = &conf.drafters[i];

        len += (size_t) (d->kind == DRAFT_SUFFIX
                             ? sprintf(text + len, " suffix")
                             : sprintf(text + len, " ngram %d to %d", d->min,
                                       d->max));
    }

    return text;
}


static void
test_drafters(void **state)
{
    static const char *const bad[] = {
        "",
        "on",
        "Off",
        "off,suffix",
        "suffix,off",
        "suffix,",
        ",suffix",
        "suffix,,suffix",
        "suffix suffix",
        "suffix:1",
        "ngram",
        "ngram:",
        "ngram:2",
        "ngram:2:",
        "ngram::5",
        "ngram:2:5:6",
        "ngram:0:5",
        "ngram:5:4",
        "ngram:2:65",
        "ngram:65:65",
        "ngram:2:500",
        "ngram:2:4294967300",
        "ngram:-2:5",
        "ngram:2:+5",
        "ngram: 2:5",
        "ngram:2: 5",
        "ngram:2:5 ",
        "ngram:2:5x",
        "ngram:2:5,model",
        "ngram:1:1,ngram:2:2,ngram:3:3,ngram:4:4",
        "ngram:00000000000000000000000000000000000000002:5",
    };
    char word[128];

    (void) state;
    accept("speculative=ngram:2:5");
    assert_string_equal(drafters(), " ngram 2 to 5");
    accept("speculative=ngram:1:64");
    assert_string_equal(drafters(), " ngram 1 to 64");
    accept("speculative=suffix");
    assert_string_equal(drafters(), " suffix");
    accept("speculative=suffix,ngram:7:7");
    assert_string_equal(drafters(), " suffix ngram 7 to 7");
    accept("speculative=ngram:8:9,suffix,ngram:2:3");
    assert_string_equal(drafters(), " ngram 8 to 9 suffix ngram 2 to 3");

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(word, sizeof(word), "speculative=%s", bad[i]);
        refuse(word, "use off, ngram:MIN:MAX (1 to 64 tokens) or suffix");
        assert_non_null(strstr(err.text, word));
        assert_string_equal(err.param, "speculative");
    }

    accept("speculative=off");
    assert_string_equal(drafters(), "");
}


static void
test_levels(void **state)
{
    static const char *const names[] = { "emerg", "alert",  "crit", "error",
                                         "warn",  "notice", "info", "debug" };
    char word[64];

    (void) state;

    for (int i = 0; i < 8; i++) {
        snprintf(word, sizeof(word), "log_level=%s", names[i]);
        accept(word);
        assert_int_equal(conf.log_level, LOG_EMERG + i);
    }

    refuse("log_level=", "use emerg, alert");
    refuse("log_level=loud", "log_level=loud: use emerg, alert");
    refuse("log_level=INFO", "use emerg, alert");
    refuse("log_level=4", "use emerg, alert");
}


static void
test_words(void **state)
{
    char word[2048];

    (void) state;
    refuse("", "not of the form key=value");
    refuse("model", "\"model\" is not of the form key=value");
    refuse("=x", "unknown setting \"=x\"");
    refuse("mode=x", "unknown setting \"mode=x\"");
    refuse("models=x", "unknown setting");
    refuse("Model=x", "unknown setting");
    refuse(" model=x", "unknown setting");

    /* longer than any message */
    memset(word, 'k', sizeof(word));
    word[1000] = '=';
    word[sizeof(word) - 1] = '\0';
    refuse(word, "unknown setting \"kkk");
    memcpy(word, "max_num_seqs=", 13);
    refuse(word, "max_num_seqs=kkk");

    assert_int_equal(engine_conf_set(&conf, "x", NULL), LLM_BADREQ);
}


static void
test_check(void **state)
{
    (void) state;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_BADREQ);
    assert_string_equal(err.param, "model");
    assert_non_null(strstr(err.text, "give model=FILE"));

    conf.model = "";
    assert_int_equal(engine_conf_check(&conf, &err), LLM_BADREQ);

    conf.model = "m.gguf";
    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);

    conf.max_num_seqs = 64;
    conf.max_num_batched_tokens = 64;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);

    conf.max_num_batched_tokens = 63;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_BADREQ);
    assert_string_equal(err.param, "max_num_batched_tokens");
    assert_non_null(strstr(err.text, "max_num_batched_tokens=63 is below "
                                     "max_num_seqs=64"));

    /* a whole prompt must fit a step; auto follows the budget */
    conf.max_num_batched_tokens = 128;
    conf.chunked_prefill = false;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);
    conf.max_model_len = 128;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);
    conf.max_model_len = 129;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_BADREQ);
    assert_non_null(strstr(err.text, "max_model_len=129"));
    conf.chunked_prefill = true;
    assert_int_equal(engine_conf_check(&conf, &err), LLM_OK);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_defaults, setup),
        cmocka_unit_test_setup(test_strings, setup),
        cmocka_unit_test_setup(test_numbers, setup),
        cmocka_unit_test_setup(test_sizes, setup),
        cmocka_unit_test_setup(test_flags, setup),
        cmocka_unit_test_setup(test_drafters, setup),
        cmocka_unit_test_setup(test_levels, setup),
        cmocka_unit_test_setup(test_words, setup),
        cmocka_unit_test_setup(test_check, setup),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
