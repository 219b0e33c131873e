/*
 * A small vocabulary for tests: all 256 bytes, a few merges and one token of
 * every other type.  Used by the unit test of engine/text and its fuzzer.
 */

#ifndef T_UNIT_MINI_VOCAB_H
#define T_UNIT_MINI_VOCAB_H

#include <stdio.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/tokenizer.h"

typedef struct {
    char text[64];
    int type;
} mini_token_t;

typedef struct {
    mini_token_t tokens[512];
    int n;
} mini_vocab_t;

/* In the byte-level alphabet: c4 a0 is the space, c4 8a the newline. */
static const char *const mini_merges[] = {
    "h e",        "l l",
    "he ll",      "hell o",
    "\xc4\xa0 w", "o r",
    "l d",        "or ld",
    "a a",        "aa aa",
    "aaaa aaaa",  "\xc4\xa0 \xc4\xa0",
    "b c",        "a b",
    "x y",        "\xc3\x83 \xc2\xa9", /* é */
    "1 2",        "\xc4\x8a \xc4\x8a",
    "i n",        "in g",
};

enum { MINI_N_MERGES = sizeof(mini_merges) / sizeof(mini_merges[0]) };

/* The tokens behind the merges'. */
enum {
    MINI_SPECIALS = 256 + MINI_N_MERGES,
    MINI_A = MINI_SPECIALS,
    MINI_AB,
    MINI_IM_END,
    MINI_USER,
    MINI_USER_LONG,
    MINI_UNK,
    MINI_UNUSED,
    MINI_BOS,
    MINI_EOT_NAMED,
    MINI_END_TEXT, /* a normal token with the text of an EOG name */
    MINI_N,
};

static const mini_token_t mini_specials[] = {
    { "<|a|>", TOK_CONTROL },      { "<|a|>b", TOK_CONTROL },
    { "<|im_end|>", TOK_CONTROL }, { "[U]", TOK_USER },
    { "[U][U]x", TOK_USER },       { "<unk>", TOK_UNKNOWN },
    { "[unused1]", TOK_UNUSED },   { "<s>", TOK_CONTROL },
    { "<|eot_id|>", TOK_CONTROL }, { "<|end|>", TOK_NORMAL },
};


static inline void
mini_init(mini_vocab_t *vocab)
{
    int next = 256;

    memset(vocab, 0, sizeof(*vocab));

    for (int b = 0; b < 256; b++) {
        const int itself = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        const int cp = itself ? b : next++;

        utf8_encode((uint32_t) cp, (uint8_t *) vocab->tokens[b].text);
        vocab->tokens[b].type = TOK_NORMAL;
    }

    vocab->n = 256;

    for (int i = 0; i < MINI_N_MERGES; i++) {
        const char *space = strchr(mini_merges[i], ' ');
        mini_token_t *token = &vocab->tokens[vocab->n++];

        snprintf(token->text, sizeof(token->text), "%.*s%s",
                 (int) (space - mini_merges[i]), mini_merges[i], space + 1);
        token->type = TOK_NORMAL;
    }

    memcpy(&vocab->tokens[vocab->n], mini_specials, sizeof(mini_specials));
    vocab->n = MINI_N;
}


static inline bool
mini_token(void *source, int i, const char **text, size_t *len, int *type)
{
    mini_vocab_t *vocab = source;

    *text = vocab->tokens[i].text;
    *len = strlen(*text);
    *type = vocab->tokens[i].type;

    return true;
}


static inline bool
mini_merge(void *source, int i, const char **text, size_t *len)
{
    (void) source;
    *text = mini_merges[i];
    *len = strlen(*text);

    return true;
}


static inline tok_spec_t
mini_spec(mini_vocab_t *vocab, const char *pre)
{
    return (tok_spec_t){
        .model = "gpt2",
        .pre = pre,
        .n_tokens = MINI_N,
        .n_merges = MINI_N_MERGES,
        .source = vocab,
        .token = mini_token,
        .merge = mini_merge,
        .bos = MINI_BOS,
        .eos = MINI_IM_END,
        .eot = -1,
    };
}

#endif /* T_UNIT_MINI_VOCAB_H */
