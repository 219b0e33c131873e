/*
 * Hyperparameters: GGUF metadata → model_config_t.
 *
 * Called once, before the weights are bound.  Every value is bounded, so that
 * the products of sizes later on cannot overflow and a damaged file is refused
 * with the key's name.  What a file asks for and this project does not do
 * (experts, other RoPE scalings) is refused too, never ignored.
 *
 * Source: the GGUF specification, "Standardized key-value pairs".
 */

#include "engine/model/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/model/arch.h"

typedef struct {
    const gguf_t *gguf;
    const char *arch;
    llm_err_t *err;
} reader_t;

typedef struct {
    char text[96];
} key_name_t;

/* An integer: its key behind "arch.", its bounds and where it goes. */
typedef struct {
    const char *key;
    int low;
    int high;
    int fallback; /* NO_DEFAULT: the key must be there */
    int *out;
} int_row_t;

enum { NO_DEFAULT = -1 };


static key_name_t
key_name(const reader_t *r, const char *key)
{
    key_name_t name;

    snprintf(name.text, sizeof(name.text), "%s.%s", r->arch, key);

    return name;
}


static int
missing(const reader_t *r, const char *key)
{
    return gguf_err(r->gguf, r->err, "key \"%s\" is missing", key);
}


static int
read_int(const reader_t *r, const int_row_t *row)
{
    const key_name_t key = key_name(r, row->key);
    uint32_t n;

    if (!gguf_has(r->gguf, key.text)) {
        if (row->fallback == NO_DEFAULT) {
            return missing(r, key.text);
        }
        n = (uint32_t) row->fallback;

    } else if (!gguf_u32(r->gguf, key.text, &n)) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is not one non-negative integer", key.text);
    }

    if (n < (uint32_t) row->low || n > (uint32_t) row->high) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is %u; %d to %d are possible", key.text, n,
                        row->low, row->high);
    }

    *row->out = (int) n;

    return LLM_OK;
}


static int
read_ints(const reader_t *r, const int_row_t *rows, int n)
{
    for (int i = 0; i < n; i++) {
        const int rc = read_int(r, &rows[i]);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    return LLM_OK;
}


/* Between low and high; *out keeps its value when the key is absent. */
static int
read_float(const reader_t *r, const char *name, double low, double high,
           float *out)
{
    const key_name_t key = key_name(r, name);

    if (!gguf_has(r->gguf, key.text)) {
        return LLM_OK;
    }

    if (!gguf_f32(r->gguf, key.text, out)) {
        return gguf_err(r->gguf, r->err, "key \"%s\" is not one float",
                        key.text);
    }

    /* written so that NaN fails */
    if (!((double) *out >= low && (double) *out <= high)) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is %g; %g to %g are possible", key.text,
                        (double) *out, low, high);
    }

    return LLM_OK;
}


static int
read_arch(const gguf_t *gguf, model_config_t *config, llm_err_t *err)
{
    gguf_str_t str;

    if (!gguf_str(gguf, "general.architecture", &str)) {
        return gguf_err(gguf, err,
                        "key \"general.architecture\" is missing "
                        "or no string");
    }

    if (str.len < sizeof(config->arch)) {
        memcpy(config->arch, str.text, str.len);
    }

    if (strlen(config->arch) != str.len || arch_find(config->arch) == NULL) {
        return gguf_err(gguf, err,
                        "architecture \"%s\" is not supported; supported: %s",
                        gguf_show(str).text, arch_names());
    }

    if (gguf_str(gguf, "general.name", &str)) {
        snprintf(config->name, sizeof(config->name), "%.*s",
                 str.len < sizeof(config->name) ? (int) str.len
                                                : (int) sizeof(config->name),
                 str.text);
    }

    return LLM_OK;
}


/* Sizes of the layers. */
static int
read_sizes(const reader_t *r, model_config_t *c)
{
    int experts;
    const int_row_t rows[] = {
        { "block_count", 1, 1024, NO_DEFAULT, &c->n_layers },
        { "context_length", 1, 1 << 24, NO_DEFAULT, &c->n_ctx },
        { "embedding_length", 1, 1 << 16, NO_DEFAULT, &c->n_embd },
        { "feed_forward_length", 1, 1 << 18, NO_DEFAULT, &c->n_ff },
        { "attention.head_count", 1, 1024, NO_DEFAULT, &c->n_heads },
        { "expert_count", 0, INT32_MAX, 0, &experts },
    };
    const int rc = read_ints(r, rows, sizeof(rows) / sizeof(rows[0]));

    if (rc == LLM_OK && experts > 0) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is %d: mixtures of experts are not "
                        "supported",
                        key_name(r, "expert_count").text, experts);
    }

    return rc;
}


static int
read_heads(const reader_t *r, model_config_t *c)
{
    int value_length;
    const key_name_t key = key_name(r, "attention.key_length");

    if (!gguf_has(r->gguf, key.text) && c->n_embd % c->n_heads != 0) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is missing, and %d values do not divide "
                        "into %d heads",
                        key.text, c->n_embd, c->n_heads);
    }

    const int_row_t first[] = {
        { "attention.head_count_kv", 1, c->n_heads, c->n_heads,
          &c->n_kv_heads },
        { "attention.key_length", 2, 1024, c->n_embd / c->n_heads,
          &c->head_dim },
    };
    int rc = read_ints(r, first, 2);

    if (rc != LLM_OK) {
        return rc;
    }

    const int_row_t second[] = {
        { "attention.value_length", 2, 1024, c->head_dim, &value_length },
        { "rope.dimension_count", 2, c->head_dim, c->head_dim, &c->rot_dim },
    };

    rc = read_ints(r, second, 2);
    if (rc != LLM_OK) {
        return rc;
    }

    if (c->n_heads % c->n_kv_heads != 0) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is %d, which does not divide %d heads",
                        key_name(r, "attention.head_count_kv").text,
                        c->n_kv_heads, c->n_heads);
    }

    if (c->head_dim % 2 != 0 || c->rot_dim % 2 != 0) {
        return gguf_err(r->gguf, r->err,
                        "heads of %d values with %d rotated: both must be even",
                        c->head_dim, c->rot_dim);
    }

    if (value_length != c->head_dim) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is %d, but keys have %d values; different "
                        "lengths are not supported",
                        key_name(r, "attention.value_length").text,
                        value_length, c->head_dim);
    }

    return LLM_OK;
}


/* Linear scaling divides positions by a factor; the old name of the factor is
 * rope.scale_linear.  A factor without a type means linear. */
static int
read_scaling(const reader_t *r, model_config_t *c)
{
    const key_name_t key = key_name(r, "rope.scaling.type");
    gguf_str_t type = { "linear", 6 };
    float factor = 1;

    if (gguf_has(r->gguf, key.text) && !gguf_str(r->gguf, key.text, &type)) {
        return gguf_err(r->gguf, r->err, "key \"%s\" is no string", key.text);
    }

    const bool linear = type.len == 6 && memcmp(type.text, "linear", 6) == 0;
    const bool none = type.len == 4 && memcmp(type.text, "none", 4) == 0;

    if (!linear && !none) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" is \"%s\", which is not supported; "
                        "supported: none, linear",
                        key.text, gguf_show(type).text);
    }

    int rc = read_float(r, "rope.scale_linear", 0, 1e6, &factor);

    if (rc == LLM_OK) {
        rc = read_float(r, "rope.scaling.factor", 0, 1e6, &factor);
    }
    if (rc != LLM_OK) {
        return rc;
    }

    /* 0 is written by converters that mean "none" */
    c->rope_scale = none || factor == 0 ? 1 : 1 / factor;
    if (c->rope_scale > 1e6f) {
        return gguf_err(r->gguf, r->err,
                        "the linear RoPE factor is %g, "
                        "impossibly small",
                        (double) factor);
    }

    return LLM_OK;
}


static int
read_vocab(const reader_t *r, model_config_t *c)
{
    const char *key = "tokenizer.ggml.tokens";
    const char *name = "token_embd.weight";
    const int64_t n = gguf_array_len(r->gguf, key);
    op_tensor_t embd;

    if (n < 0) {
        return missing(r, key);
    }

    if (n < 1 || n > OP_VOCAB_MAX) {
        return gguf_err(r->gguf, r->err,
                        "key \"%s\" has %lld elements; 1 to %d are possible",
                        key, (long long) n, OP_VOCAB_MAX);
    }

    if (!gguf_tensor(r->gguf, name, &embd)) {
        return gguf_err(r->gguf, r->err, "tensor \"%s\" is missing", name);
    }

    if (embd.n_out != n) {
        return gguf_err(r->gguf, r->err,
                        "tensor \"%s\" has %lld rows, but key \"%s\" has %lld "
                        "elements",
                        name, (long long) embd.n_out, key, (long long) n);
    }

    c->n_vocab = (int) n;

    return LLM_OK;
}


int
model_config_read(const gguf_t *gguf, model_config_t *config, llm_err_t *err)
{
    const reader_t r = { gguf, config->arch, err };
    bool causal = true;

    memset(config, 0, sizeof(*config));
    config->rope_base = 10000;

    int rc = read_arch(gguf, config, err);

    if (rc == LLM_OK) {
        rc = read_sizes(&r, config);
    }
    if (rc == LLM_OK) {
        rc = read_heads(&r, config);
    }
    if (rc == LLM_OK) {
        rc = read_float(&r, "rope.freq_base", 1, 1e12, &config->rope_base);
    }
    if (rc == LLM_OK) {
        rc = read_scaling(&r, config);
    }
    if (rc != LLM_OK) {
        return rc;
    }

    const key_name_t eps = key_name(&r, "attention.layer_norm_rms_epsilon");

    if (!gguf_has(gguf, eps.text)) {
        return missing(&r, eps.text);
    }

    rc = read_float(&r, "attention.layer_norm_rms_epsilon", 1e-20, 1,
                    &config->rms_eps);
    if (rc != LLM_OK) {
        return rc;
    }

    if (gguf_bool(gguf, key_name(&r, "attention.causal").text, &causal)
        && !causal) {
        return gguf_err(gguf, err,
                        "key \"%s\" is false: models that look "
                        "ahead are not supported",
                        key_name(&r, "attention.causal").text);
    }

    return read_vocab(&r, config);
}
