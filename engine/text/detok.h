/*
 * Streaming detokenizer: token by token, never part of a UTF-8 character.
 *
 * Bytes are held back until their character is complete; bytes that can never
 * become one are replaced by U+FFFD.  The concatenation of everything emitted
 * equals tok_decode() of all tokens.
 */

#ifndef ENGINE_TEXT_DETOK_H
#define ENGINE_TEXT_DETOK_H

#include "engine/text/tokenizer.h"

typedef struct {
    uint8_t held[4]; /* an unfinished character */
    int n_held;
} detok_t;


/* A zeroed detok_t is ready.  Appends what became complete to out. */
void detok_push(detok_t *detok, const tok_t *tok, int32_t id, bool keep_special,
                buf_t *out);

/* The end: an unfinished character becomes U+FFFD. */
void detok_finish(detok_t *detok, buf_t *out);

#endif /* ENGINE_TEXT_DETOK_H */
