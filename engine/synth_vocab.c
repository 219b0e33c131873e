/*
 * A byte-level BPE vocabulary of any size, made without a corpus.  Called by
 * cli_synth.c.
 *
 * Token k behind the bytes is the k-th string of two letters, then of three,
 * then of four, and the merge that makes it joins all but its last letter with
 * that letter; so every merge finds its parts.  The first letter may be the
 * space.
 */

#include "engine/synth_vocab.h"

#include <stdint.h>
#include <string.h>

enum { LETTERS = 26, FIRST = LETTERS + 1, TOKEN_MAX = 16 };

static const char *const control[SYNTH_CONTROL] = { "<|endoftext|>",
                                                    "<|im_start|>",
                                                    "<|im_end|>" };

static const char chatml[] =
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' "
    "+ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

typedef struct {
    char text[TOKEN_MAX];
    size_t len;
    size_t last; /* bytes before its last letter */
} token_t;


/* GPT-2's stand-in for a byte: itself where it prints in Latin-1, else one of
 * the code points from 256 on, in order. */
static uint32_t
byte_letter(int byte)
{
    uint32_t extra = 256;

    for (int b = 0; b <= byte; b++) {
        const bool prints =
            (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);

        if (b == byte) {
            return prints ? (uint32_t) b : extra;
        }

        extra += prints ? 0 : 1;
    }

    return 0;
}


/* As UTF-8, which has two bytes below U+0800. */
static void
add_letter(token_t *t, uint32_t letter)
{
    t->last = t->len;

    if (letter < 0x80) {
        t->text[t->len++] = (char) letter;

    } else {
        t->text[t->len++] = (char) (0xc0 | letter >> 6);
        t->text[t->len++] = (char) (0x80 | (letter & 0x3f));
    }
}


static void
merged_token(int k, token_t *t)
{
    int digits[4], n = 2;

    for (int count = FIRST * LETTERS; k >= count; count *= LETTERS, n++) {
        k -= count;
    }

    for (int i = n - 1; i > 0; i--) {
        digits[i] = k % LETTERS;
        k /= LETTERS;
    }

    add_letter(t, k < LETTERS ? (uint32_t) ('a' + k) : byte_letter(' '));

    for (int i = 1; i < n; i++) {
        add_letter(t, (uint32_t) ('a' + digits[i]));
    }
}


static token_t
token_at(int i)
{
    token_t t = { .len = 0 };

    if (i < SYNTH_CONTROL) {
        t.len = strlen(control[i]);
        memcpy(t.text, control[i], t.len);

    } else if (i < SYNTH_VOCAB_MIN) {
        add_letter(&t, byte_letter(i - SYNTH_CONTROL));

    } else {
        merged_token(i - SYNTH_VOCAB_MIN, &t);
    }

    return t;
}


bool
synth_vocab_printable(int token)
{
    const int byte = token - SYNTH_CONTROL;

    return token == SYNTH_CONTROL - 1 || byte >= 256
           || (byte >= ' ' && byte <= '~');
}


void
synth_vocab_write(gguf_writer_t *w, int n_vocab)
{
    enum { CONTROL_TYPE = 3, NORMAL_TYPE = 1 };

    gguf_write_str(w, "tokenizer.ggml.model", "gpt2");
    gguf_write_str(w, "tokenizer.ggml.pre", "gpt-2");
    gguf_write_strs(w, "tokenizer.ggml.tokens", (uint64_t) n_vocab);

    for (int i = 0; i < n_vocab; i++) {
        const token_t t = token_at(i);

        gguf_write_str_item(w, t.text, t.len);
    }

    gguf_write_i32s(w, "tokenizer.ggml.token_type", (uint64_t) n_vocab);

    for (int i = 0; i < n_vocab; i++) {
        gguf_write_i32_item(w, i < SYNTH_CONTROL ? CONTROL_TYPE : NORMAL_TYPE);
    }

    gguf_write_strs(w, "tokenizer.ggml.merges",
                    (uint64_t) (n_vocab - SYNTH_VOCAB_MIN));

    for (int i = SYNTH_VOCAB_MIN; i < n_vocab; i++) {
        const token_t t = token_at(i);
        char merge[TOKEN_MAX + 1];

        memcpy(merge, t.text, t.last);
        merge[t.last] = ' ';
        memcpy(merge + t.last + 1, t.text + t.last, t.len - t.last);
        gguf_write_str_item(w, merge, t.len + 1);
    }

    gguf_write_u32(w, "tokenizer.ggml.bos_token_id", 1);
    gguf_write_u32(w, "tokenizer.ggml.eos_token_id", 2);
    gguf_write_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    gguf_write_u32(w, "tokenizer.ggml.padding_token_id", 2);
    gguf_write_bool(w, "tokenizer.ggml.add_bos_token", false);
    gguf_write_str(w, "tokenizer.chat_template", chatml);
}
