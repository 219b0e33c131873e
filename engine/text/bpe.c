/*
 * Byte-pair merges with a heap.
 *
 * Most words of a text are a single token.  Those whose merges end in that
 * token anyway are looked up at once; bpe_index_words finds them at start by
 * running the merges over the vocabulary itself, so the short cut is exact.
 */

#include "engine/text/bpe.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* no neighbour, no merge */
#define NONE UINT32_MAX

/* A piece of the word.  It sits at the index of its first byte, so a merge
 * keeps the left symbol and unlinks the right one. */
struct bpe_symbol_s {
    int32_t id; /* -1: a byte without a token, merges with nothing */
    uint32_t prev;
    uint32_t next;
    uint32_t rank; /* of the merge with next; NONE: there is none */
};


static int
merge_parts(const tok_spec_t *spec, int i, const map_bytes_t *by_text,
            uint32_t part[3], llm_err_t *err)
{
    const char *text;
    size_t len;
    char joined[512];

    if (!spec->merge(spec->source, i, &text, &len)) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: merge %d is missing", i);
    }

    const char *space = len > 2 ? memchr(text + 1, ' ', len - 2) : NULL;
    if (space == NULL || len > sizeof(joined)) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: merge %d is not two tokens", i);
    }

    const size_t left = (size_t) (space - text);

    memcpy(joined, text, left);
    memcpy(joined + left, space + 1, len - left - 1);

    if (!map_bytes_get(by_text, text, left, &part[0])
        || !map_bytes_get(by_text, space + 1, len - left - 1, &part[1])
        || !map_bytes_get(by_text, joined, len - 1, &part[2]))
    {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: merge %d, \"%.*s\", is not of tokens "
                           "of the vocabulary",
                           i, (int) (len < 200 ? len : 200), text);
    }

    return LLM_OK;
}


int
bpe_init(bpe_t *bpe, const tok_spec_t *spec, const vocab_t *vocab,
         arena_t *arena, const map_bytes_t *by_text, llm_err_t *err)
{
    *bpe = (bpe_t){ .vocab = vocab };

    if (spec->n_merges < 0) {
        return llm_err_set(err, LLM_ERROR, NULL, "tokenizer: no merges");
    }

    const size_t n = (size_t) spec->n_merges;

    bpe->merged = arena_alloc(arena, (n + 1) * sizeof(int32_t));
    if (bpe->merged == NULL || map_reserve(&bpe->ranks, n) != LLM_OK) {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "tokenizer: no memory for %d merges",
                           spec->n_merges);
    }

    for (int i = 0; i < spec->n_merges; i++) {
        uint32_t part[3], earlier;

        const int rc = merge_parts(spec, i, by_text, part, err);
        if (rc != LLM_OK) {
            return rc;
        }

        const uint64_t key = (uint64_t) part[0] << 32 | part[1];

        bpe->merged[i] = (int32_t) part[2];

        /* Plain text must never become a control token.  Of two equal merges
         * the first has the better rank. */
        if (vocab->flags[part[2]] & VOCAB_MERGES
            && !map_get(&bpe->ranks, key, &earlier))
        {
            map_put(&bpe->ranks, key, (uint32_t) i); /* room is reserved */
        }
    }

    return LLM_OK;
}


void
bpe_fini(bpe_t *bpe)
{
    map_fini(&bpe->ranks);
    map_bytes_fini(&bpe->words);
}


int
bpe_push(tok_ids_t *ids, int32_t id, int max_ids)
{
    if (ids->n >= max_ids) {
        return LLM_LIMIT;
    }

    if (ids->n == ids->cap) {
        if (ids->cap > INT_MAX / 8) {
            return LLM_NOMEM;
        }

        const int cap = ids->cap < 64 ? 64 : ids->cap * 2;
        int32_t *grown = realloc(ids->ids, (size_t) cap * sizeof(int32_t));

        if (grown == NULL) {
            return LLM_NOMEM;
        }

        ids->ids = grown;
        ids->cap = cap;
    }

    ids->ids[ids->n++] = id;

    return LLM_OK;
}


static int
scratch_reserve(bpe_scratch_t *scratch, size_t len)
{
    if (len <= scratch->cap) {
        return LLM_OK;
    }

    const size_t cap = len < 256 ? 256 : len + len / 2;

    bpe_scratch_fini(scratch);

    /* A symbol enters the heap once at the start, and each merge, of which
     * there are fewer than symbols, adds two. */
    scratch->symbols = malloc(cap * sizeof(bpe_symbol_t));
    scratch->heap = malloc(cap * 3 * sizeof(uint64_t));

    if (scratch->symbols == NULL || scratch->heap == NULL) {
        bpe_scratch_fini(scratch);
        return LLM_NOMEM;
    }

    scratch->cap = cap;

    return LLM_OK;
}


void
bpe_scratch_fini(bpe_scratch_t *scratch)
{
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (bpe_scratch_t){ 0 };
}


/* The heap's entries are rank << 32 | index: the smallest is the best merge,
 * the leftmost of equals. */
static size_t
heap_push(uint64_t *heap, size_t n, uint64_t entry)
{
    size_t i = n;

    while (i > 0 && heap[(i - 1) / 2] > entry) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }

    heap[i] = entry;

    return n + 1;
}


/* Removes the smallest, heap[0]. */
static size_t
heap_pop(uint64_t *heap, size_t n)
{
    const uint64_t last = heap[--n];
    size_t i = 0;

    for (size_t child = 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && heap[child + 1] < heap[child]) {
            child++;
        }

        if (heap[child] >= last) {
            break;
        }

        heap[i] = heap[child];
        i = child;
    }

    heap[i] = last;

    return n;
}


/* Sets the rank of symbol i with its right neighbour; grows the heap if they
 * merge. */
static size_t
rank_pair(const bpe_t *bpe, const bpe_scratch_t *scratch, uint32_t i,
          size_t n_heap)
{
    bpe_symbol_t *s = &scratch->symbols[i];

    s->rank = NONE;

    if (s->next == NONE || s->id < 0 || scratch->symbols[s->next].id < 0) {
        return n_heap;
    }

    const uint32_t right = (uint32_t) scratch->symbols[s->next].id;

    if (!map_get(&bpe->ranks, (uint64_t) s->id << 32 | right, &s->rank)) {
        return n_heap;
    }

    return heap_push(scratch->heap, n_heap, (uint64_t) s->rank << 32 | i);
}


static void
merge_all(const bpe_t *bpe, const bpe_scratch_t *scratch, size_t n_heap)
{
    bpe_symbol_t *symbols = scratch->symbols;

    while (n_heap > 0) {
        const uint32_t rank = (uint32_t) (scratch->heap[0] >> 32);
        const uint32_t i = (uint32_t) scratch->heap[0];
        bpe_symbol_t *s = &symbols[i];

        n_heap = heap_pop(scratch->heap, n_heap);

        /* the pair has changed since it was put here */
        if (s->rank != rank) {
            continue;
        }

        bpe_symbol_t *right = &symbols[s->next];

        s->id = bpe->merged[rank];
        s->next = right->next;
        right->rank = NONE;

        if (s->next != NONE) {
            symbols[s->next].prev = i;
        }

        n_heap = rank_pair(bpe, scratch, i, n_heap);

        if (s->prev != NONE) {
            n_heap = rank_pair(bpe, scratch, s->prev, n_heap);
        }
    }
}


/* One symbol a byte; returns how many have a token. */
static size_t
set_symbols(const bpe_t *bpe, const bpe_scratch_t *scratch, const char *word,
            size_t len)
{
    size_t n_known = 0;

    for (size_t i = 0; i < len; i++) {
        const int32_t id = bpe->vocab->byte[(uint8_t) word[i]];

        n_known += id >= 0 ? 1 : 0;
        scratch->symbols[i] = (bpe_symbol_t){
            .id = id,
            .prev = i == 0 ? NONE : (uint32_t) i - 1,
            .next = i + 1 == len ? NONE : (uint32_t) i + 1,
        };
    }

    return n_known;
}


int
bpe_encode(const bpe_t *bpe, bpe_scratch_t *scratch, const char *word,
           size_t len, int max_ids, tok_ids_t *ids)
{
    uint32_t whole;

    if (map_bytes_get(&bpe->words, word, len, &whole)) {
        return bpe_push(ids, (int32_t) whole, max_ids);
    }

    if (len == 0) {
        return LLM_OK;
    }

    if (len >= NONE || scratch_reserve(scratch, len) != LLM_OK) {
        return LLM_NOMEM;
    }

    const size_t n_known = set_symbols(bpe, scratch, word, len);

    const size_t room = ids->n < max_ids ? (size_t) (max_ids - ids->n) : 0;

    /* a word that cannot fit is not worth its merges */
    if (n_known / bpe->vocab->longest > room) {
        return LLM_LIMIT;
    }

    size_t n_heap = 0;

    for (uint32_t i = 0; i < len; i++) {
        n_heap = rank_pair(bpe, scratch, i, n_heap);
    }

    merge_all(bpe, scratch, n_heap);

    for (uint32_t i = 0; i != NONE; i = scratch->symbols[i].next) {
        const int32_t id = scratch->symbols[i].id;
        const int rc = id < 0 ? LLM_OK : bpe_push(ids, id, max_ids);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    return LLM_OK;
}


int
bpe_index_words(bpe_t *bpe, bool whole_words)
{
    const vocab_t *vocab = bpe->vocab;
    bpe_scratch_t scratch = { 0 };
    tok_ids_t ids = { 0 };
    map_bytes_t words = { 0 };
    int rc = map_bytes_reserve(&words, (size_t) vocab->n);

    for (int32_t id = 0; rc == LLM_OK && id < vocab->n; id++) {
        size_t len;
        const char *word = vocab_bytes(vocab, id, &len);

        if (!(vocab->flags[id] & VOCAB_MERGES) || len == 0) {
            continue;
        }

        if (!whole_words) {
            ids.n = 0;
            rc = bpe_encode(bpe, &scratch, word, len, INT_MAX, &ids);

            if (rc != LLM_OK || ids.n != 1 || ids.ids[0] != id) {
                continue;
            }
        }

        map_bytes_put(&words, word, len, (uint32_t) id); /* room is reserved */
    }

    bpe_scratch_fini(&scratch);
    tok_ids_fini(&ids);

    /* not before: until now bpe_encode had to ask the merges */
    bpe->words = words;

    return rc;
}
