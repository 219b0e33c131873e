/*
 * The vocabulary of a synthetic model: control tokens, all bytes, and strings
 * of two to four letters with the merges that make them.
 */

#ifndef ENGINE_SYNTH_VOCAB_H
#define ENGINE_SYNTH_VOCAB_H

#include <stdbool.h>

#include "engine/model/gguf_write.h"

enum {
    SYNTH_CONTROL = 3, /* <|endoftext|>, <|im_start|>, <|im_end|> */
    SYNTH_VOCAB_MIN = SYNTH_CONTROL + 256,
    /* a space or a letter first, then one to three letters */
    SYNTH_VOCAB_MAX = SYNTH_VOCAB_MIN + 27 * (26 + 26 * 26 + 26 * 26 * 26)
};


/* Writes the tokenizer's keys and a ChatML template; n_vocab is within the
 * bounds above. */
void synth_vocab_write(gguf_writer_t *w, int n_vocab);

/* Does this token print, or end an answer? */
bool synth_vocab_printable(int token);

#endif /* ENGINE_SYNTH_VOCAB_H */
