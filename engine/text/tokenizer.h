/*
 * Text ↔ token ids: byte-level BPE with merges and pre-tokenizer as the model
 * file states them.
 *
 * A tokenizer is immutable after creation and shared by threads.
 */

#ifndef ENGINE_TEXT_TOKENIZER_H
#define ENGINE_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"

/* Token types, GGUF's numbers (tokenizer.ggml.token_type). */
enum {
    TOK_NORMAL = 1,
    TOK_UNKNOWN = 2,
    TOK_CONTROL = 3,
    TOK_USER = 4,
    TOK_UNUSED = 5,
    TOK_BYTE = 6,
};

/* Where a tokenizer comes from: filled from a GGUF by the caller.  All strings,
 * those of the callbacks too, stay valid until tok_create returns and are not
 * needed afterwards. */
typedef struct {
    const char *model; /* tokenizer.ggml.model: "gpt2" */
    const char *pre;   /* tokenizer.ggml.pre: "smollm", "gpt-2", "llama-bpe",
                          "qwen2" */
    int n_tokens;
    int n_merges;
    void *source; /* passed to the callbacks */
    /* Text as stored (byte-level alphabet), its length, and the type. */
    bool (*token)(void *source, int i, const char **text, size_t *len,
                  int *type);
    bool (*merge)(void *source, int i, const char **text, size_t *len);
    int32_t bos; /* -1: none */
    int32_t eos;
    int32_t eot; /* -1: none */
    bool add_bos;
    bool add_eos;
} tok_spec_t;

typedef struct tok_s tok_t;

enum {
    TOK_ADD_SPECIAL = 1,   /* BOS / EOS where the model asks for them */
    TOK_PARSE_SPECIAL = 2, /* control tokens in the text count */
};

typedef struct {
    int32_t *ids; /* heap; tok_ids_fini frees */
    int n;
    int cap;
} tok_ids_t;


/* A model or pre-tokenizer that is not known, and a vocabulary that does not
 * hold together, are LLM_ERROR with a text that names what is wrong. */
int tok_create(const tok_spec_t *spec, tok_t **tok, llm_err_t *err);
void tok_destroy(tok_t *tok);

/* Appends the ids of text to ids.  text must be valid UTF-8 (LLM_BADREQ).
 * trusted: NULL, or one byte per byte of text: with TOK_PARSE_SPECIAL a
 * control token is recognised only where all its bytes are non-zero (text that
 * the chat template itself wrote, never a message's content).  User-defined
 * tokens are recognised everywhere.  LLM_LIMIT once more than max_ids are in
 * ids (work stops there).  Bytes for which the vocabulary has no token (some
 * models lack a few control characters) are left out.  May be called from
 * several threads at once. */
int tok_encode(const tok_t *tok, const char *text, size_t len,
               const uint8_t *trusted, int flags, int max_ids, tok_ids_t *ids,
               llm_err_t *err);
void tok_ids_fini(tok_ids_t *ids);

int tok_n_vocab(const tok_t *tok);

/* The bytes a token stands for (control tokens: their name), not
 * zero-terminated; id in range. */
const char *tok_bytes(const tok_t *tok, int32_t id, size_t *len);

bool tok_is_control(const tok_t *tok, int32_t id);

/* Ends a generation: EOS, EOT and the family's usual names. */
bool tok_is_eog(const tok_t *tok, int32_t id);

/* All such ids; *n of them. */
const int32_t *tok_eog(const tok_t *tok, int *n);

/* Text of ids at once, appended to out; control tokens are left out unless
 * keep_special.  Bytes that are not UTF-8 become U+FFFD.  LLM_BADREQ, and
 * nothing appended, when an id is out of range. */
int tok_decode(const tok_t *tok, const int32_t *ids, int n, bool keep_special,
               buf_t *out);

#endif /* ENGINE_TEXT_TOKENIZER_H */
