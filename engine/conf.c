/*
 * Command line → settings.  One table row per key: name, kind, place, range.
 */

#include "engine/conf.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "kernels/op/tensor.h"

typedef enum {
    CONF_STR,
    CONF_INT,
    CONF_SIZE,
    CONF_LEVEL,
    CONF_REAL, /* its range is in thousandths */
    CONF_FLAG,
    CONF_DTYPE,
    CONF_SPEC
} conf_kind_t;

typedef struct {
    const char *key;
    conf_kind_t kind;
    size_t offset;
    long min;
    long max;
    bool automatic; /* "auto" stands for 0 */
} conf_row_t;

#define AT(field) offsetof(engine_conf_t, field)

static const conf_row_t conf_rows[] = {
    { "name", CONF_STR, AT(name), 0, 0, false },
    { "model", CONF_STR, AT(model), 0, 0, false },
    { "alias", CONF_STR, AT(alias), 0, 0, false },
    { "device", CONF_STR, AT(device), 0, 0, false },
    { "deterministic", CONF_FLAG, AT(deterministic), 0, 0, false },
    { "isa", CONF_STR, AT(isa), 0, 0, false },
    { "chat_template", CONF_STR, AT(chat_template), 0, 0, false },
    { "repack_cache", CONF_STR, AT(repack_cache), 0, 0, false },
    { "log", CONF_STR, AT(log), 0, 0, false },
    { "log_level", CONF_LEVEL, AT(log_level), 0, 0, false },
    { "max_model_len", CONF_INT, AT(max_model_len), 16, 1 << 24, true },
    { "block_size", CONF_INT, AT(block_size), 16, 16, false },
    { "max_num_seqs", CONF_INT, AT(max_num_seqs), 1, 4096, false },
    { "max_num_batched_tokens", CONF_INT, AT(max_num_batched_tokens), 1,
      1 << 17, false },
    { "long_prefill_token_threshold", CONF_INT,
      AT(long_prefill_token_threshold), 0, 1 << 17, false },
    { "chunked_prefill", CONF_FLAG, AT(chunked_prefill), 0, 0, false },
    { "prefix_caching", CONF_FLAG, AT(prefix_caching), 0, 0, false },
    { "reservation", CONF_FLAG, AT(reservation), 0, 0, false },
    { "inter_token_target", CONF_INT, AT(inter_token_target), 0, 60000, false },
    { "gpu_memory_utilization", CONF_REAL, AT(gpu_memory_utilization), 50, 1000,
      false },
    { "kv_cache_prefault", CONF_FLAG, AT(kv_cache_prefault), 0, 0, false },
    { "kv_cache_memory", CONF_SIZE, AT(kv_cache_memory), 1, 0, false },
    { "kv_cache_dtype", CONF_DTYPE, AT(kv_cache_dtype), 0, 0, false },
    { "speculative", CONF_SPEC, AT(drafters), 1, 64, false },
    { "speculative_model", CONF_STR, AT(speculative_model), 0, 0, false },
    { "num_speculative_tokens", CONF_INT, AT(num_speculative_tokens), 1,
      SPEC_MAX, true },
    { "threads", CONF_INT, AT(threads), 1, 256, true },
    { "reserved_cpus", CONF_INT, AT(reserved_cpus), 0, 255, false },
    { "cpu_affinity", CONF_FLAG, AT(cpu_affinity), 0, 0, false },
    { "workers", CONF_INT, AT(workers), 1, 256, false },
};


void
engine_conf_init(engine_conf_t *conf)
{
    *conf = (engine_conf_t){
        .name = "default",
        .device = "auto",
        .deterministic = true,
        .log_level = LOG_NOTICE,
        .block_size = 16,
        .max_num_seqs = 128,
        .max_num_batched_tokens = 2048,
        .inter_token_target = 60,
        .kv_cache_dtype = OP_F16,
        .chunked_prefill = true,
        .prefix_caching = true,
        .workers = 8,
    };
}


/* strtol and strtoull would also take spaces, and strtoull a sign. */
static bool
begins_with_digit(const char *text)
{
    return text[0] >= '0' && text[0] <= '9';
}


/* "64M", "2G", "4096": bytes; false when it is none of these. */
static bool
parse_size(const char *text, uint64_t *bytes)
{
    char *end;

    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);

    if (!begins_with_digit(text) || errno != 0 || n == 0) {
        return false;
    }

    int shift = 0;

    if (*end != '\0') {
        const char *units = "kKmMgG";
        const char *unit = strchr(units, *end);

        if (unit == NULL || end[1] != '\0') {
            return false;
        }

        shift = 10 * (1 + (int) (unit - units) / 2);
    }

    if (n > UINT64_MAX >> shift) {
        return false;
    }

    *bytes = (uint64_t) n << shift;

    return true;
}


/* Digits and one point: strtod() alone would take "inf" and "0x1". */
static int
conf_set_real(const conf_row_t *row, double *place, const char *value,
              llm_err_t *err)
{
    const double least = (double) row->min / 1000;
    const double most = (double) row->max / 1000;
    char *end;
    const double number = strtod(value, &end);

    if (value[0] == '\0' || value[strspn(value, "0123456789.")] != '\0'
        || *end != '\0' || !(number >= least && number <= most))
    {
        return llm_err_set(err, LLM_BADREQ, row->key,
                           "%s=%s: use a number from %g to %g", row->key, value,
                           least, most);
    }

    *place = number;

    return LLM_OK;
}


static int
conf_set_flag(const conf_row_t *row, bool *place, const char *value,
              llm_err_t *err)
{
    const bool on = strcmp(value, "on") == 0;

    if (!on && strcmp(value, "off") != 0) {
        return llm_err_set(err, LLM_BADREQ, row->key, "%s=%s: use on or off",
                           row->key, value);
    }

    *place = on;

    return LLM_OK;
}


static int
conf_set_dtype(const conf_row_t *row, int *place, const char *value,
               llm_err_t *err)
{
    if (strcmp(value, "f16") == 0) {
        *place = OP_F16;

    } else if (strcmp(value, "q8_0") == 0) {
        *place = OP_Q8_0;

    } else {
        return llm_err_set(err, LLM_BADREQ, row->key, "%s=%s: use f16 or q8_0",
                           row->key, value);
    }

    return LLM_OK;
}


/* One of "ngram:MIN:MAX" and "suffix". */
static bool
parse_drafter(const conf_row_t *row, const char *word, size_t len,
              conf_drafter_t *drafter)
{
    char text[32];
    int used = 0;

    if (len >= sizeof(text)) {
        return false;
    }

    memcpy(text, word, len);
    text[len] = '\0';

    if (strcmp(text, "suffix") == 0) {
        *drafter = (conf_drafter_t){ .kind = DRAFT_SUFFIX };
        return true;
    }

    *drafter = (conf_drafter_t){ .kind = DRAFT_NGRAM };

    /* nor the spaces and signs that sscanf() would take */
    return text[strspn(text, "ngram:0123456789")] == '\0'
           && sscanf(text, "ngram:%2d:%2d%n", &drafter->min, &drafter->max,
                     &used)
                  == 2
           && (size_t) used == len && drafter->min >= row->min
           && drafter->max >= drafter->min && drafter->max <= row->max;
}


/* "off", or drafters divided by commas. */
static int
conf_set_spec(engine_conf_t *conf, const conf_row_t *row, const char *value,
              llm_err_t *err)
{
    conf_drafter_t drafters[SPEC_DRAFTERS] = { 0 };
    int n = 0;

    for (const char *word = value; strcmp(value, "off") != 0; word++) {
        const size_t len = strcspn(word, ",");

        if (n == SPEC_DRAFTERS - 1
            || !parse_drafter(row, word, len, &drafters[n])) {
            return llm_err_set(err, LLM_BADREQ, row->key,
                               "%s=%s: use off, ngram:MIN:MAX (1 to %ld tokens)"
                               " or suffix, or some of these with commas",
                               row->key, value, row->max);
        }

        n++;
        word += len;

        if (*word == '\0') {
            break;
        }
    }

    memcpy(conf->drafters, drafters, sizeof(drafters));
    conf->n_drafters = n;

    return LLM_OK;
}


static int
conf_set_row(engine_conf_t *conf, const conf_row_t *row, const char *value,
             llm_err_t *err)
{
    char *const place = (char *) conf + row->offset;
    char *end;
    long n;

    switch (row->kind) {
    case CONF_STR:
        if (value[0] == '\0') {
            return llm_err_set(err, LLM_BADREQ, row->key,
                               "%s= is empty: give a value, or leave it out",
                               row->key);
        }

        *(const char **) (void *) place = value;
        return LLM_OK;

    case CONF_LEVEL:
        n = log_level(value);

        if (n < 0) {
            return llm_err_set(err, LLM_BADREQ, row->key,
                               "log_level=%s: use emerg, alert, crit, error, "
                               "warn, notice, info or debug",
                               value);
        }

        *(int *) (void *) place = (int) n;
        return LLM_OK;

    case CONF_SIZE:
        if (!parse_size(value, (uint64_t *) (void *) place)) {
            return llm_err_set(err, LLM_BADREQ, row->key,
                               "%s=%s: use bytes, or a number with k, m or g",
                               row->key, value);
        }

        return LLM_OK;

    case CONF_REAL:
        return conf_set_real(row, (double *) (void *) place, value, err);

    case CONF_FLAG:
        return conf_set_flag(row, (bool *) (void *) place, value, err);

    case CONF_DTYPE:
        return conf_set_dtype(row, (int *) (void *) place, value, err);

    case CONF_SPEC:
        return conf_set_spec(conf, row, value, err);

    case CONF_INT:
        break;
    }

    if (row->automatic && strcmp(value, "auto") == 0) {
        *(int *) (void *) place = 0;
        return LLM_OK;
    }

    errno = 0;
    n = strtol(value, &end, 10);

    if (!begins_with_digit(value) || *end != '\0' || errno != 0 || n < row->min
        || n > row->max)
    {
        return llm_err_set(err, LLM_BADREQ, row->key,
                           "%s=%s: use a number from %ld to %ld%s", row->key,
                           value, row->min, row->max,
                           row->automatic ? ", or auto" : "");
    }

    *(int *) (void *) place = (int) n;
    return LLM_OK;
}


int
engine_conf_set(engine_conf_t *conf, const char *word, llm_err_t *err)
{
    const char *eq = strchr(word, '=');

    if (eq == NULL) {
        return llm_err_set(err, LLM_BADREQ, NULL,
                           "\"%s\" is not of the form key=value", word);
    }

    for (size_t i = 0; i < sizeof(conf_rows) / sizeof(conf_rows[0]); i++) {
        const conf_row_t *row = &conf_rows[i];
        const size_t len = (size_t) (eq - word);

        if (strlen(row->key) == len && memcmp(row->key, word, len) == 0) {
            return conf_set_row(conf, row, eq + 1, err);
        }
    }

    return llm_err_set(err, LLM_BADREQ, NULL, "unknown setting \"%s\"", word);
}


int
engine_conf_check(const engine_conf_t *conf, llm_err_t *err)
{
    if (conf->model == NULL || conf->model[0] == '\0') {
        return llm_err_set(err, LLM_BADREQ, "model",
                           "no model: give model=FILE, a GGUF file");
    }

    if (conf->max_num_batched_tokens < conf->max_num_seqs) {
        return llm_err_set(err, LLM_BADREQ, "max_num_batched_tokens",
                           "max_num_batched_tokens=%d is below "
                           "max_num_seqs=%d: every running sequence needs a "
                           "token in each step; raise the first or lower the "
                           "second",
                           conf->max_num_batched_tokens, conf->max_num_seqs);
    }

    if (!conf->chunked_prefill
        && conf->max_num_batched_tokens < conf->max_model_len)
    {
        return llm_err_set(err, LLM_BADREQ, "max_num_batched_tokens",
                           "max_num_batched_tokens=%d is below "
                           "max_model_len=%d: with chunked_prefill=off a "
                           "prompt must fit a step; raise the first, lower "
                           "the second or turn chunked_prefill on",
                           conf->max_num_batched_tokens, conf->max_model_len);
    }

    return LLM_OK;
}
