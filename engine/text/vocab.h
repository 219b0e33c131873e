/*
 * The vocabulary: what bytes each token stands for, which token each byte is,
 * and the special tokens as a trie.
 *
 * A normal token is stored in the byte-level alphabet of GPT-2, where each
 * byte is one printable character; control and user-defined tokens are stored
 * as they read.  Here everything is bytes.  Immutable after vocab_init.
 */

#ifndef ENGINE_TEXT_VOCAB_H
#define ENGINE_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/map.h"
#include "engine/base/status.h"
#include "engine/text/tokenizer.h"

/* What a token may be used for, beside its type. */
enum {
    VOCAB_CONTROL = 1, /* control or unknown: never made from plain text */
    VOCAB_USER = 2,    /* matched as text, before all else */
    VOCAB_EOG = 4,     /* ends a generation */
    VOCAB_MERGES = 8,  /* in the byte-level alphabet: merges may make it */
};

typedef struct {
    int n;
    int n_user;
    size_t longest;    /* bytes of the longest token */
    char *bytes;       /* of all tokens, one behind the other */
    uint32_t *start;   /* [n + 1] into bytes */
    uint8_t *flags;    /* [n] */
    int32_t byte[256]; /* byte → token, -1: the model has none */

    map_t trie;       /* node << 8 | byte → node; node 0 is the root */
    int32_t *trie_id; /* node → token, -1: none ends here */
    bool first[256];  /* a special token begins with this byte */
} vocab_t;

/* A special token found in a text. */
typedef struct {
    int32_t id;
    size_t len;
} vocab_match_t;


/* Reads all tokens of spec.  by_text, empty before, maps their stored text to
 * ids and borrows it from spec: for resolving the merges.  Memory is arena's,
 * but for the maps: vocab_fini in any case. */
int vocab_init(vocab_t *vocab, const tok_spec_t *spec, arena_t *arena,
               map_bytes_t *by_text, llm_err_t *err);
void vocab_fini(vocab_t *vocab);

const char *vocab_bytes(const vocab_t *vocab, int32_t id, size_t *len);

/* The longest special token at the start of text: user-defined ones always,
 * control tokens only with `control` and where their trusted bytes (NULL: all)
 * are non-zero.  False: none. */
bool vocab_special(const vocab_t *vocab, const char *text, size_t len,
                   const uint8_t *trusted, bool control, vocab_match_t *match);

#endif /* ENGINE_TEXT_VOCAB_H */
