/*
 * libFuzzer target: any bytes as a GGUF file.  What parses is read in full:
 * every getter on every key a model or a tokenizer asks for, every tensor's
 * bytes, and the hyperparameters.
 */

#include <stdlib.h>
#include <string.h>

#include "engine/model/config.h"
#include "engine/model/gguf.h"


static void
read_key(const gguf_t *gguf, const char *key)
{
    uint32_t u;
    int32_t n;
    float f;
    bool flag;
    gguf_str_t s;
    volatile char sink = 0;

    gguf_u32(gguf, key, &u);
    gguf_f32(gguf, key, &f);
    gguf_bool(gguf, key, &flag);
    if (gguf_str(gguf, key, &s) && s.len > 0) {
        sink = s.text[s.len - 1];
    }

    const int64_t len = gguf_array_len(gguf, key);

    for (int64_t i = -1; i <= len && i < 10000; i++) {
        if (gguf_array_str(gguf, key, i, &s) && s.len > 0) {
            sink = s.text[s.len - 1];
        }
        gguf_array_i32(gguf, key, i, &n);
        gguf_array_f32(gguf, key, i, &f);
    }
    (void) sink;
}


static void
read_tensors(const gguf_t *gguf)
{
    for (int i = 0; i < gguf_n_tensors(gguf); i++) {
        gguf_str_t name;
        op_tensor_t t;
        volatile uint8_t sink = 0;

        gguf_tensor_at(gguf, i, &name, &t);

        const size_t bytes =
            op_row_bytes((int) t.dtype, t.n_in) * (size_t) t.n_out;
        const uint8_t *data = t.data;

        sink = (uint8_t) (data[0] + data[bytes - 1]);
        (void) sink;
        if (gguf_show(name).text[0] == '\0') {
            abort();
        }
    }

    if (gguf_tensor_index(gguf, "token_embd.weight") >= gguf_n_tensors(gguf)) {
        abort();
    }
}


int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);


int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const keys[] = {
        "general.architecture",
        "general.name",
        "general.alignment",
        "llama.block_count",
        "llama.rope.freq_base",
        "llama.rope.scaling.factor",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.chat_template",
    };
    gguf_t *gguf;
    model_config_t config;
    llm_err_t err = { 0 };

    if (gguf_parse(data, size, &gguf, &err) != LLM_OK) {
        if (gguf != NULL || err.text[0] == '\0') {
            abort();
        }
        return 0;
    }

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        read_key(gguf, keys[i]);
    }

    read_tensors(gguf);

    if (gguf_tensor_bytes(gguf) > size) {
        abort();
    }

    if (model_config_read(gguf, &config, &err) == LLM_OK
        && (config.n_heads % config.n_kv_heads != 0 || config.n_vocab < 1
            || config.rot_dim > config.head_dim))
    {
        abort();
    }

    gguf_close(gguf);

    return 0;
}
