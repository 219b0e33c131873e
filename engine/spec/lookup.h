/*
 * Drafts without a model: what followed the last tokens when they were seen
 * before.  In the sequence itself (prompt look-up), or in what the engine
 * generated lately (suffix index).
 */

#ifndef ENGINE_SPEC_LOOKUP_H
#define ENGINE_SPEC_LOOKUP_H

#include <stddef.h>
#include <stdint.h>

typedef struct spec_index_s spec_index_t;


/* Looks for the longest run of min … max tokens at the end of tokens that
 * stands somewhere before, the latest of equal ones, and writes what follows
 * it, n tokens at most.  *matched: tokens of the run.  How many; 0 when there
 * is no such run. */
int spec_lookup(const int32_t *tokens, int n_tokens, int min, int max, int n,
                int32_t *draft, int *matched);

/* An index over the last `cap` tokens that were added, 20 bytes for each,
 * rounded up to a power of two.  NULL: no memory. */
spec_index_t *spec_index_create(int cap);
void spec_index_destroy(spec_index_t *index);

/* Adds a sequence that ended.  Only lookups of the same owner will find it
 * (cache salts: nobody learns from the time that his drafts take what others
 * wrote). */
void spec_index_add(spec_index_t *index, uint64_t owner, const int32_t *tokens,
                    int n_tokens);

/* As spec_lookup(), among what was added. */
int spec_index_lookup(const spec_index_t *index, uint64_t owner,
                      const int32_t *tokens, int n_tokens, int n,
                      int32_t *draft, int *matched);

#endif /* ENGINE_SPEC_LOOKUP_H */
