/*
 * llm-engine synth: writes a GGUF file of a well-known shape with weights from
 * a seed, so that speed can be measured on models that are not at hand.
 *
 * What such a model says means nothing, but the numbers behave: activations
 * keep their size through the layers, logits vary, and the tokenizer is whole,
 * so any text goes in and mostly letters come out.  The same options give the
 * same bytes on every machine: the weights are integers of a generator times
 * one float, quantised by kernels/op.  Memory does not depend on the shape.
 */

#include "engine/cli_synth.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cli_tool.h"
#include "engine/model/gguf_write.h"
#include "engine/sizing.h"
#include "engine/synth_vocab.h"
#include "kernels/op/quant.h"

enum { CHUNK_BYTES = 256 * 1024 };

/* Standard deviation of the logits, about: so decided that greedy tokens are
 * far apart, so open that sampling varies. */
static const double logit_std = 4;

/* What the layers add in all, over the size of a layer's input. */
static const double buried = 8;

/* Rows of tokens that are no printable text, so that they are rare. */
static const double rare = 0.05;

typedef struct {
    const char *like;
    const char *type;
    const char *out;
    uint64_t seed;
    int layers; /* 0: the shape's */
    int vocab;
    int context;
    sizing_shape_t shape;
    op_dtype_t dtype;
} synth_args_t;

/* What is being written. */
typedef struct {
    const synth_args_t *args;
    gguf_writer_t w;
    bool writing; /* the second pass; the first one announces */
    uint64_t n_tensors;
    uint8_t *chunk;
    float *row;
    llm_err_t err;
} synth_t;


/* --- options --- */

static int
parse_number(const char *name, const char *value, uint64_t max, uint64_t *out)
{
    char use[64];
    char *end;

    errno = 0;
    *out = strtoull(value, &end, 10);

    if (value[0] < '0' || value[0] > '9' || *end != '\0' || errno != 0
        || *out > max)
    {
        snprintf(use, sizeof(use), "a number from 0 to %llu",
                 (unsigned long long) max);
        return cli_complain(name, value, use);
    }

    return LLM_OK;
}


static int
parse_option(synth_args_t *args, const char *name, const char *value)
{
    const struct {
        const char *name;
        const char **text;
        int *number;
        uint64_t max;
    } rows[] = {
        { "like", &args->like, NULL, 0 },
        { "type", &args->type, NULL, 0 },
        { "out", &args->out, NULL, 0 },
        { "layers", NULL, &args->layers, 1024 },
        { "vocab", NULL, &args->vocab, SYNTH_VOCAB_MAX },
        { "context", NULL, &args->context, 1 << 24 },
    };
    uint64_t n;

    if (strcmp(name, "seed") == 0) {
        return parse_number(name, value, UINT64_MAX, &args->seed);
    }

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(name, rows[i].name) != 0) {
            continue;
        }

        if (rows[i].text != NULL) {
            *rows[i].text = value;
            return LLM_OK;
        }

        const int rc = parse_number(name, value, rows[i].max, &n);

        *rows[i].number = (int) n;
        return rc;
    }

    return cli_complain(name, value, "an option that synth has (see --help)");
}


static int
choose_shape(synth_args_t *args)
{
    const sizing_shape_t *shape = sizing_find(args->like);

    if (shape == NULL || shape->bias) {
        fprintf(stderr, "llm-engine: --like %s: %suse one of", args->like,
                shape == NULL ? "" : "the engine has no biases, ");

        for (int i = 0; sizing_at(i) != NULL; i++) {
            if (!sizing_at(i)->bias) {
                fprintf(stderr, " %s", sizing_at(i)->name);
            }
        }

        fputc('\n', stderr);
        return LLM_BADREQ;
    }

    args->shape = *shape;
    args->shape.n_layers = args->layers > 0 ? args->layers : shape->n_layers;
    args->shape.n_vocab = args->vocab > 0 ? args->vocab : shape->n_vocab;
    args->shape.n_ctx = args->context > 0 ? args->context : shape->n_ctx;

    if (args->shape.n_vocab < SYNTH_VOCAB_MIN) {
        fprintf(stderr,
                "llm-engine: --vocab %d: use a number from %d to %d: all bytes "
                "need a token\n",
                args->vocab, SYNTH_VOCAB_MIN, SYNTH_VOCAB_MAX);
        return LLM_BADREQ;
    }

    return LLM_OK;
}


static int
parse_args(synth_args_t *args, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        if (strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc) {
            fprintf(stderr, "llm-engine: \"%s\" needs the form --name value\n",
                    argv[i]);
            return LLM_BADREQ;
        }

        const int rc = parse_option(args, argv[i] + 2, argv[i + 1]);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    if (args->like == NULL || args->out == NULL) {
        fprintf(stderr, "llm-engine: synth needs --like NAME and --out FILE\n");
        return LLM_BADREQ;
    }

    const int rc = choose_shape(args);

    return rc == LLM_OK ? cli_dtype("type", args->type, &args->dtype) : rc;
}


/* --- numbers --- */

/* The next of splitmix64 (Steele, Lea, Flood 2014): every state is a seed. */
static uint64_t
next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;

    return z ^ z >> 31;
}


/* n values of mean 0: the sum of four bytes of a word is near a bell, and two
 * of them fit one word. */
static void
fill(uint64_t *state, float *out, int64_t n, double std)
{
    /* four times the variance of 0 … 255, and twice the mean */
    const float scale = (float) (std / sqrt(4 * (256.0 * 256 - 1) / 12));

    for (int64_t i = 0; i < n; i += 2) {
        const uint64_t bits = next(state);
        const uint64_t pairs =
            (bits & 0x00ff00ff00ff00ffu) + (bits >> 8 & 0x00ff00ff00ff00ffu);
        const uint32_t low = (uint32_t) pairs, high = (uint32_t) (pairs >> 32);

        out[i] = (float) ((int) ((low & 0xffff) + (low >> 16)) - 510) * scale;

        if (i + 1 < n) {
            out[i + 1] =
                (float) ((int) ((high & 0xffff) + (high >> 16)) - 510) * scale;
        }
    }
}


/* --- tensors --- */

/* Where the numbers of a tensor start: far from those of all others. */
static uint64_t
tensor_state(const synth_t *s)
{
    uint64_t state = s->args->seed;
    const uint64_t mixed = next(&state);

    state = mixed ^ s->n_tensors << 40;

    return next(&state);
}


static int
put_vector(synth_t *s, const char *name, int64_t n)
{
    const op_tensor_t shape = { .dtype = OP_F32, .n_in = n, .n_out = 1 };
    uint64_t state = tensor_state(s);

    s->n_tensors++;

    if (!s->writing) {
        gguf_write_tensor(&s->w, name, &shape);
        return LLM_OK;
    }

    for (int64_t i = 0; i < n; i++) {
        s->row[i] = 0.5f + (float) (next(&state) >> 40) * 0x1p-24f;
    }

    const int rc =
        gguf_write_data(&s->w, s->row, (size_t) n * sizeof(float), &s->err);

    return rc == LLM_OK ? gguf_write_pad(&s->w, &s->err) : rc;
}


/* A matrix with a standard deviation; by_token: its rows are tokens. */
static int
put_matrix(synth_t *s, const char *name, const op_tensor_t *shape, double std,
           bool by_token)
{
    const size_t bytes = op_row_bytes((int) shape->dtype, shape->n_in);
    uint64_t state = tensor_state(s);
    size_t used = 0;
    int rc = LLM_OK;

    s->n_tensors++;

    if (!s->writing) {
        gguf_write_tensor(&s->w, name, shape);
        return LLM_OK;
    }

    for (int64_t o = 0; rc == LLM_OK && o < shape->n_out; o++) {
        const bool seldom = by_token && !synth_vocab_printable((int) o);

        fill(&state, s->row, shape->n_in, seldom ? std * rare : std);

        if (shape->dtype == OP_F32) {
            memcpy(s->chunk + used, s->row, bytes);
        } else {
            op_quant_row(shape->dtype, s->row, s->chunk + used, shape->n_in);
        }

        used += bytes;

        if (used + bytes > CHUNK_BYTES || o == shape->n_out - 1) {
            rc = gguf_write_data(&s->w, s->chunk, used, &s->err);
            used = 0;
        }
    }

    return rc == LLM_OK ? gguf_write_pad(&s->w, &s->err) : rc;
}


static int
put_layer(synth_t *s, int l)
{
    const sizing_shape_t *m = &s->args->shape;
    const int64_t n_q = (int64_t) m->n_heads * m->head_dim;
    const int64_t n_kv = (int64_t) m->n_kv_heads * m->head_dim;

    /* What is added to the residual stream 2 n_layers times: it must bury the
     * token's embedding, or else a head that is tied to the embedding would
     * repeat the last token for ever. */
    const double added = buried / sqrt(2.0 * m->n_layers);
    const struct {
        const char *name;
        int64_t n_in;
        int64_t n_out;
        double gain;
    } rows[] = {
        { "attn_norm", m->n_embd, 1, 1 },
        { "attn_q", m->n_embd, n_q, 1 },
        { "attn_k", m->n_embd, n_kv, 1 },
        { "attn_v", m->n_embd, n_kv, 1 },
        { "attn_output", n_q, m->n_embd, added },
        { "ffn_norm", m->n_embd, 1, 1 },
        { "ffn_gate", m->n_embd, m->n_ff, 1 },
        { "ffn_up", m->n_embd, m->n_ff, 1 },
        { "ffn_down", m->n_ff, m->n_embd, added },
    };
    int rc = LLM_OK;

    for (size_t i = 0; rc == LLM_OK && i < sizeof(rows) / sizeof(rows[0]); i++)
    {
        const op_tensor_t shape = { .dtype = s->args->dtype,
                                    .n_in = rows[i].n_in,
                                    .n_out = rows[i].n_out };
        char name[64];

        snprintf(name, sizeof(name), "blk.%d.%s.weight", l, rows[i].name);
        rc = shape.n_out == 1
                 ? put_vector(s, name, shape.n_in)
                 : put_matrix(s, name, &shape,
                              rows[i].gain / sqrt((double) shape.n_in), false);
    }

    return rc;
}


static int
put_tensors(synth_t *s)
{
    const sizing_shape_t *m = &s->args->shape;
    const op_tensor_t tokens = { .dtype = s->args->dtype,
                                 .n_in = m->n_embd,
                                 .n_out = m->n_vocab };
    const double std = logit_std / sqrt(m->n_embd);

    s->n_tensors = 0;

    int rc = put_matrix(s, "token_embd.weight", &tokens, std, true);

    if (rc == LLM_OK && !m->tied) {
        rc = put_matrix(s, "output.weight", &tokens, std, true);
    }
    if (rc == LLM_OK) {
        rc = put_vector(s, "output_norm.weight", m->n_embd);
    }

    for (int l = 0; rc == LLM_OK && l < m->n_layers; l++) {
        rc = put_layer(s, l);
    }

    return rc;
}


static void
put_metadata(synth_t *s)
{
    const sizing_shape_t *m = &s->args->shape;
    gguf_writer_t *w = &s->w;
    char name[128];

    snprintf(name, sizeof(name), "%s synthetic, seed %llu", m->name,
             (unsigned long long) s->args->seed);

    gguf_write_str(w, "general.architecture", "llama");
    gguf_write_str(w, "general.name", name);
    gguf_write_u32(w, "general.quantization_version", 2);
    gguf_write_u32(w, "llama.block_count", (uint32_t) m->n_layers);
    gguf_write_u32(w, "llama.context_length", (uint32_t) m->n_ctx);
    gguf_write_u32(w, "llama.embedding_length", (uint32_t) m->n_embd);
    gguf_write_u32(w, "llama.feed_forward_length", (uint32_t) m->n_ff);
    gguf_write_u32(w, "llama.attention.head_count", (uint32_t) m->n_heads);
    gguf_write_u32(w, "llama.attention.head_count_kv",
                   (uint32_t) m->n_kv_heads);
    gguf_write_u32(w, "llama.attention.key_length", (uint32_t) m->head_dim);
    gguf_write_u32(w, "llama.attention.value_length", (uint32_t) m->head_dim);
    gguf_write_u32(w, "llama.rope.dimension_count", (uint32_t) m->head_dim);
    gguf_write_u32(w, "llama.vocab_size", (uint32_t) m->n_vocab);
    gguf_write_f32(w, "llama.rope.freq_base", 10000);
    gguf_write_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    synth_vocab_write(w, m->n_vocab);
}


static int
synth_write(synth_t *s)
{
    const sizing_shape_t *m = &s->args->shape;
    int64_t widest = m->n_embd > m->n_ff ? m->n_embd : m->n_ff;
    const int64_t n_q = (int64_t) m->n_heads * m->head_dim;

    widest = widest > n_q ? widest : n_q;

    s->row = malloc((size_t) widest * sizeof(float));
    s->chunk = malloc(CHUNK_BYTES + (size_t) widest * sizeof(float));

    if (s->row == NULL || s->chunk == NULL) {
        return llm_err_set(&s->err, LLM_NOMEM, NULL, "no memory");
    }

    put_metadata(s);
    put_tensors(s);

    int rc = gguf_write_begin(&s->w, s->args->out, &s->err);

    s->writing = true;

    if (rc == LLM_OK) {
        rc = put_tensors(s);
    }

    return rc == LLM_OK ? gguf_write_end(&s->w, &s->err) : rc;
}


int
cli_synth(int argc, char **argv)
{
    synth_args_t args = { .type = "q4_1", .seed = 1 };
    synth_t s = { .args = &args };

    if (parse_args(&args, argc, argv) != LLM_OK) {
        return 1;
    }

    gguf_write_init(&s.w);

    const int rc = synth_write(&s);

    gguf_write_fini(&s.w);
    free(s.row);
    free(s.chunk);

    if (rc != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", s.err.text);
        return 1;
    }

    printf("%s: %.2f billion parameters, %s, seed %llu\n", args.shape.name,
           (double) sizing_params(&args.shape) / 1e9,
           op_dtype_name((int) args.dtype), (unsigned long long) args.seed);

    return 0;
}
