/*
 * Byte-pair encoding of one word: merge the adjacent pair of lowest rank,
 * leftmost first, until none is left.
 *
 * Sennrich et al., "Neural Machine Translation of Rare Words with Subword
 * Units", over bytes as GPT-2 does it.  A heap of candidates over a linked
 * list keeps a word of n bytes at O(n log n), whatever it is made of.
 */

#ifndef ENGINE_TEXT_BPE_H
#define ENGINE_TEXT_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/map.h"
#include "engine/base/status.h"
#include "engine/text/tokenizer.h"
#include "engine/text/vocab.h"

/* Immutable after bpe_init. */
typedef struct {
    const vocab_t *vocab;
    map_t ranks;       /* left << 32 | right → rank */
    int32_t *merged;   /* rank → token */
    map_bytes_t words; /* whole words that are one token */
} bpe_t;

typedef struct bpe_symbol_s bpe_symbol_t;

/* Work memory, one per thread; zeroed it is ready. */
typedef struct {
    bpe_symbol_t *symbols;
    uint64_t *heap;
    size_t cap;
} bpe_scratch_t;


/* Resolves the merges of spec.  whole_words: a word that is a token is that
 * token, without asking the merges (Llama 3's rule).  Else the table holds
 * those words whose merges lead to the same.  bpe_fini in any case. */
int bpe_init(bpe_t *bpe, const tok_spec_t *spec, const vocab_t *vocab,
             arena_t *arena, const map_bytes_t *by_text, llm_err_t *err);
int bpe_index_words(bpe_t *bpe, bool whole_words);
void bpe_fini(bpe_t *bpe);

/* Appends the tokens of one word.  Bytes the vocabulary has no token for are
 * left out.  LLM_LIMIT as soon as more than max_ids are certain, LLM_NOMEM. */
int bpe_encode(const bpe_t *bpe, bpe_scratch_t *scratch, const char *word,
               size_t len, int max_ids, tok_ids_t *ids);
void bpe_scratch_fini(bpe_scratch_t *scratch);

/* Appends one id: LLM_LIMIT when ids then hold more than max_ids. */
int bpe_push(tok_ids_t *ids, int32_t id, int max_ids);

#endif /* ENGINE_TEXT_BPE_H */
