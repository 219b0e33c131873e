/*
 * Pre-tokenizer: cuts a text into the words that byte-pair merges never cross,
 * by the regular expressions of a model family, after normalising it where
 * the family asks for that.
 *
 * Families are known by the names of GGUF's tokenizer.ggml.pre.
 */

#ifndef ENGINE_TEXT_PRETOK_H
#define ENGINE_TEXT_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/status.h"

/* Immutable after creation, shared by threads. */
typedef struct pretok_s pretok_t;

/* Work memory of one thread. */
typedef struct pretok_scratch_s pretok_scratch_t;

/* Takes one word; anything but LLM_OK ends the work. */
typedef int (*pretok_word_t)(void *data, const char *word, size_t len);


/* An unknown name is an error that tells it and the known ones. */
int pretok_create(const char *name, pretok_t **pretok, llm_err_t *err);
void pretok_destroy(pretok_t *pretok);

/* The family takes a word that is a token as it is, without merging. */
bool pretok_whole_words(const pretok_t *pretok);

/* NULL: no memory. */
pretok_scratch_t *pretok_scratch_create(void);
void pretok_scratch_destroy(pretok_scratch_t *scratch);

/* Calls word(data, …) for every word of text, in order; together they are the
 * normalised text.  text is valid UTF-8: nothing checks it again. */
int pretok_run(const pretok_t *pretok, pretok_scratch_t *scratch,
               const char *text, size_t len, pretok_word_t word, void *data);

#endif /* ENGINE_TEXT_PRETOK_H */
