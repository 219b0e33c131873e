/*
 * Builds GGUF files in memory for the model tests: any keys and tensors, and a
 * tiny llama model with random weights.
 */

#ifndef T_UNIT_GGUF_BUILD_H
#define T_UNIT_GGUF_BUILD_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/buf.h"
#include "kernels/op/quant.h"
#include "kernels/op/tensor.h"

typedef struct {
    buf_t kvs;
    buf_t infos;
    buf_t data;
    uint64_t n_kvs;
    uint64_t n_infos;
} build_t;

/* A tiny llama; `skip` and `bend` name one key or tensor to leave out or to
 * give another size. */
typedef struct {
    int n_layers;
    int n_embd;
    int n_ff;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int n_vocab;
    op_dtype_t dtype;
    bool separate_head;
    float rope_freqs; /* 0: no such tensor; else every factor */
    uint32_t seed;
    const char *skip;
    const char *bend;
} tiny_t;


static inline void
build_u32(buf_t *buf, uint32_t v)
{
    buf_add(buf, &v, sizeof(v));
}


static inline void
build_u64(buf_t *buf, uint64_t v)
{
    buf_add(buf, &v, sizeof(v));
}


static inline void
build_str(buf_t *buf, const char *text)
{
    build_u64(buf, strlen(text));
    buf_add(buf, text, strlen(text));
}


/* A key with a value of `type` whose bytes follow. */
static inline void
build_kv(build_t *b, const char *key, uint32_t type, const void *value,
         size_t len)
{
    build_str(&b->kvs, key);
    build_u32(&b->kvs, type);
    buf_add(&b->kvs, value, len);
    b->n_kvs++;
}


static inline void
build_kv_u32(build_t *b, const char *key, uint32_t v)
{
    build_kv(b, key, 4, &v, sizeof(v));
}


static inline void
build_kv_f32(build_t *b, const char *key, float v)
{
    build_kv(b, key, 6, &v, sizeof(v));
}


static inline void
build_kv_str(build_t *b, const char *key, const char *text)
{
    build_kv(b, key, 8, NULL, 0);
    build_str(&b->kvs, text);
}


/* The head of an array; the caller appends n elements to b->kvs. */
static inline void
build_kv_array(build_t *b, const char *key, uint32_t type, uint64_t n)
{
    build_kv(b, key, 9, NULL, 0);
    build_u32(&b->kvs, type);
    build_u64(&b->kvs, n);
}


static inline void
build_info(build_t *b, const char *name, uint32_t n_dims, const uint64_t *ne,
           uint32_t type)
{
    build_str(&b->infos, name);
    build_u32(&b->infos, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) {
        build_u64(&b->infos, ne[i]);
    }
    build_u32(&b->infos, type);
    build_u64(&b->infos, b->data.len);
    b->n_infos++;
}


static inline void
build_pad(buf_t *buf)
{
    while (buf->len % 32 != 0) {
        buf_addc(buf, '\0');
    }
}


/* The file; b is empty afterwards. */
static inline buf_t
build_finish(build_t *b)
{
    buf_t out = { 0 };

    buf_add(&out, "GGUF", 4);
    build_u32(&out, 3);
    build_u64(&out, b->n_infos);
    build_u64(&out, b->n_kvs);
    buf_add(&out, b->kvs.data, b->kvs.len);
    buf_add(&out, b->infos.data, b->infos.len);
    build_pad(&out);
    buf_add(&out, b->data.data, b->data.len);
    buf_fini(&b->kvs);
    buf_fini(&b->infos);
    buf_fini(&b->data);
    memset(b, 0, sizeof(*b));

    return out;
}


/* --- the tiny model --- */

/* xorshift32, never 0 */
static inline uint32_t
build_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;

    return *state;
}


static inline float
build_uniform(uint32_t *state)
{
    return (float) (build_random(state) >> 8) / 8388608.0f - 1.0f;
}


/* One row of random weights of about 1 / sqrt(n).  K-quants have no packer:
 * random bits with sane scales are valid blocks. */
static inline void
build_row(build_t *b, op_dtype_t dtype, int n, uint32_t *state)
{
    float x[1024];
    uint8_t raw[4096];
    const size_t bytes = op_row_bytes((int) dtype, n);
    const float scale = 2.0f / sqrtf((float) n);

    for (int i = 0; i < n; i++) {
        x[i] = scale * build_uniform(state);
    }

    if (dtype == OP_F32) {
        memcpy(raw, x, bytes);

    } else if (op_quant_row(dtype, x, raw, n) != 0) {
        const size_t block = (size_t) op_dtype_bytes((int) dtype);
        const float d = dtype == OP_Q6_K ? scale / 2000 : scale / 400;
        const uint16_t half = op_float_to_half(d);
        const size_t at = dtype == OP_Q6_K ? block - 2 : 0;

        for (size_t i = 0; i < bytes; i++) {
            raw[i] = (uint8_t) (build_random(state) >> 11);
        }
        for (size_t i = 0; i < bytes; i += block) {
            memcpy(raw + i + at, &half, 2);
            if (dtype != OP_Q6_K) {
                const uint16_t min = op_float_to_half(d * 7);

                memcpy(raw + i + 2, &min, 2);
            }
        }
    }

    buf_add(&b->data, raw, bytes);
}


/* A tensor's values depend on its name, not on its place in the file. */
static inline uint32_t
build_seed(uint32_t seed, const char *name)
{
    uint32_t state = seed * 2654435761u + 1;

    for (const char *p = name; *p; p++) {
        state = state * 31 + (uint8_t) *p;
    }

    return state | 1;
}


static inline void
tiny_matrix(build_t *b, const tiny_t *t, const char *name, int n_in, int n_out)
{
    const bool bent = t->bend != NULL && strcmp(t->bend, name) == 0;
    const uint64_t ne[2] = { (uint64_t) n_in, (uint64_t) n_out + bent };
    uint32_t state = build_seed(t->seed, name);

    if (t->skip != NULL && strcmp(t->skip, name) == 0) {
        return;
    }

    build_info(b, name, 2, ne, t->dtype);
    for (int i = 0; i < (int) ne[1]; i++) {
        build_row(b, t->dtype, n_in, &state);
    }
    build_pad(&b->data);
}


/* value 0: random around 1 */
static inline void
tiny_vector(build_t *b, const tiny_t *t, const char *name, int n, float value)
{
    const bool bent = t->bend != NULL && strcmp(t->bend, name) == 0;
    const uint64_t ne[1] = { (uint64_t) n + bent };
    uint32_t state = build_seed(t->seed, name);

    if (t->skip != NULL && strcmp(t->skip, name) == 0) {
        return;
    }

    build_info(b, name, 1, ne, OP_F32);
    for (uint64_t i = 0; i < ne[0]; i++) {
        const float v = value != 0 ? value : 1 + 0.5f * build_uniform(&state);

        buf_add(&b->data, &v, sizeof(v));
    }
    build_pad(&b->data);
}


static inline void
tiny_keys(build_t *b, const tiny_t *t)
{
    const struct {
        const char *key;
        int value;
    } rows[] = {
        { "llama.block_count", t->n_layers },
        { "llama.context_length", 512 },
        { "llama.embedding_length", t->n_embd },
        { "llama.feed_forward_length", t->n_ff },
        { "llama.attention.head_count", t->n_heads },
        { "llama.attention.head_count_kv", t->n_kv_heads },
        { "llama.attention.key_length", t->head_dim },
        { "llama.attention.value_length", t->head_dim },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (t->skip == NULL || strcmp(t->skip, rows[i].key) != 0) {
            build_kv_u32(b, rows[i].key, (uint32_t) rows[i].value);
        }
    }

    build_kv_str(b, "general.architecture", "llama");
    build_kv_str(b, "general.name", "tiny");
    if (t->skip == NULL || strstr(t->skip, "epsilon") == NULL) {
        build_kv_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    }
    if (t->skip == NULL || strcmp(t->skip, "tokenizer.ggml.tokens") != 0) {
        build_kv_array(b, "tokenizer.ggml.tokens", 8, (uint64_t) t->n_vocab);
        for (int i = 0; i < t->n_vocab; i++) {
            build_str(&b->kvs, "t");
        }
    }
}


/* Keys and tensors into b, so that a test can add more before the end. */
static inline void
tiny_build(build_t *b, const tiny_t *t)
{
    const int n_q = t->n_heads * t->head_dim;
    const int n_kv = t->n_kv_heads * t->head_dim;
    char name[64];

    tiny_keys(b, t);
    tiny_matrix(b, t, "token_embd.weight", t->n_embd, t->n_vocab);
    tiny_vector(b, t, "output_norm.weight", t->n_embd, 0);
    if (t->separate_head) {
        tiny_matrix(b, t, "output.weight", t->n_embd, t->n_vocab);
    }
    if (t->rope_freqs != 0) {
        tiny_vector(b, t, "rope_freqs.weight", t->head_dim / 2, t->rope_freqs);
    }

    for (int l = 0; l < t->n_layers; l++) {
        const struct {
            const char *name;
            int n_in;
            int n_out; /* 0: a vector */
        } rows[] = {
            { "attn_norm", t->n_embd, 0 },
            { "ffn_norm", t->n_embd, 0 },
            { "attn_q", t->n_embd, n_q },
            { "attn_k", t->n_embd, n_kv },
            { "attn_v", t->n_embd, n_kv },
            { "attn_output", n_q, t->n_embd },
            { "ffn_gate", t->n_embd, t->n_ff },
            { "ffn_up", t->n_embd, t->n_ff },
            { "ffn_down", t->n_ff, t->n_embd },
        };

        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            snprintf(name, sizeof(name), "blk.%d.%s.weight", l, rows[i].name);
            if (rows[i].n_out == 0) {
                tiny_vector(b, t, name, rows[i].n_in, 0);
            } else {
                tiny_matrix(b, t, name, rows[i].n_in, rows[i].n_out);
            }
        }
    }
}

#endif /* T_UNIT_GGUF_BUILD_H */
