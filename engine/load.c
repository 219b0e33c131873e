/*
 * GGUF metadata → tokenizer and chat template.  The folders text/ and chat/ do
 * not know the file format; this is the bridge.
 */

#include "engine/load.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/file.h"

enum { TEMPLATE_BYTES_MAX = 1 << 20 };


static bool
load_token(void *source, int i, const char **text, size_t *len, int *type)
{
    const gguf_t *gguf = source;
    gguf_str_t s;
    int32_t t = TOK_NORMAL;

    if (!gguf_array_str(gguf, "tokenizer.ggml.tokens", i, &s)) {
        return false;
    }

    gguf_array_i32(gguf, "tokenizer.ggml.token_type", i, &t);

    *text = s.text;
    *len = s.len;
    *type = t;

    return true;
}


static bool
load_merge(void *source, int i, const char **text, size_t *len)
{
    gguf_str_t s;

    if (!gguf_array_str(source, "tokenizer.ggml.merges", i, &s)) {
        return false;
    }

    *text = s.text;
    *len = s.len;

    return true;
}


static int32_t
load_token_id(const gguf_t *gguf, const char *key)
{
    uint32_t id;

    return gguf_u32(gguf, key, &id) && id <= INT32_MAX ? (int32_t) id : -1;
}


/* A metadata string, zero-terminated, on the heap; NULL without memory. */
static char *
load_string(const gguf_t *gguf, const char *key)
{
    gguf_str_t s;

    return gguf_str(gguf, key, &s) ? strndup(s.text, s.len) : strdup("");
}


static int
load_tokenizer(engine_t *engine, const gguf_t *gguf, llm_err_t *err)
{
    char *model = load_string(gguf, "tokenizer.ggml.model");
    char *pre = load_string(gguf, "tokenizer.ggml.pre");
    int rc;

    tok_spec_t spec = {
        .model = model,
        .pre = pre,
        .n_tokens = (int) gguf_array_len(gguf, "tokenizer.ggml.tokens"),
        .n_merges = (int) gguf_array_len(gguf, "tokenizer.ggml.merges"),
        .source = (void *) gguf,
        .token = load_token,
        .merge = load_merge,
        .bos = load_token_id(gguf, "tokenizer.ggml.bos_token_id"),
        .eos = load_token_id(gguf, "tokenizer.ggml.eos_token_id"),
        .eot = load_token_id(gguf, "tokenizer.ggml.eot_token_id"),
    };

    /* files of this family leave the key out and mean it (llama.cpp: pre type
     * LLAMA3) */
    spec.add_bos = pre != NULL && strcmp(pre, "llama-bpe") == 0;

    gguf_bool(gguf, "tokenizer.ggml.add_bos_token", &spec.add_bos);
    gguf_bool(gguf, "tokenizer.ggml.add_eos_token", &spec.add_eos);

    if (model == NULL || pre == NULL) {
        rc = llm_err_set(err, LLM_NOMEM, NULL, "no memory for the tokenizer");
    } else {
        rc = tok_create(&spec, &engine->tok, err);
    }

    free(model);
    free(pre);

    if (rc != LLM_OK) {
        return rc;
    }

    const int32_t ids[2] = { spec.bos, spec.eos };
    char **const texts[2] = { &engine->bos_text, &engine->eos_text };

    for (int i = 0; i < 2; i++) {
        const char *text = "";
        size_t len = 0;

        if (ids[i] >= 0 && ids[i] < tok_n_vocab(engine->tok)) {
            text = tok_bytes(engine->tok, ids[i], &len);
        }

        *texts[i] = strndup(text, len);

        if (*texts[i] == NULL) {
            return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
        }
    }

    return LLM_OK;
}


static int
load_template(engine_t *engine, const gguf_t *gguf, llm_err_t *err)
{
    gguf_str_t s;
    char *data;
    size_t len;

    engine->own_template = true;

    if (engine->conf.chat_template != NULL) {
        int rc = file_read(engine->conf.chat_template, TEMPLATE_BYTES_MAX,
                           &data, &len, err);

        if (rc == LLM_OK) {
            rc = chat_template_create(data, len, &engine->tmpl, err);
            free(data);
        }

        return rc;
    }

    if (gguf_str(gguf, "tokenizer.chat_template", &s)) {
        return chat_template_create(s.text, s.len, &engine->tmpl, err);
    }

    engine->own_template = false;

    return chat_template_builtin("chatml", &engine->tmpl, err);
}


int
load_text(engine_t *engine, const gguf_t *gguf, llm_err_t *err)
{
    const int rc = load_tokenizer(engine, gguf, err);

    return rc == LLM_OK ? load_template(engine, gguf, err) : rc;
}
