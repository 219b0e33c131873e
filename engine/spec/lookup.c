/*
 * The index is a ring of tokens, each with the place of the last one before it
 * that ends the same three tokens, by hash, as compressors find matches
 * (Ziv, Lempel 1977).  A lookup walks such a chain, newest first, and takes
 * the longest match.  A chain is cut where the ring has been overwritten.
 *
 * Sequences in the ring are divided by a token that no text has, so that a
 * match never runs from one into another.
 */

#include "engine/spec/lookup.h"

#include <stdlib.h>

#include "engine/spec/hash.h"

enum {
    GRAM = 3,       /* tokens that a chain has in common */
    CHAIN_MAX = 32, /* places looked at */
    MATCH_MAX = 64, /* longer is not better */
    DIVIDER = -1
};

struct spec_index_s {
    int32_t *ring;  /* [cap] */
    uint32_t *who;  /* [cap] of the owner's number, 32 bits */
    uint32_t *back; /* [cap] tokens back to the place before; 0: none */
    uint64_t *head; /* [cap] by hash: place + 1 where it was seen at last */
    uint64_t mask;  /* cap − 1 */
    uint64_t end;   /* tokens ever added: the next one's place */
};


int
spec_lookup(const int32_t *tokens, int n_tokens, int min, int max, int n,
            int32_t *draft, int *matched)
{
    int best = 0, at = 0;

    /* tokens[i − 1] is to be the last of the run */
    for (int i = n_tokens - 1; i >= min && best < max; i--) {
        int length = 0;

        while (length < max && length < i
               && tokens[i - 1 - length] == tokens[n_tokens - 1 - length])
        {
            length++;
        }

        if (length >= min && length > best) {
            best = length;
            at = i;
        }
    }

    *matched = best;

    if (best == 0) {
        return 0;
    }

    /* what follows may reach the end, and then goes on with itself */
    for (int i = 0; i < n; i++) {
        draft[i] =
            at + i < n_tokens ? tokens[at + i] : draft[at + i - n_tokens];
    }

    return n;
}


spec_index_t *
spec_index_create(int cap)
{
    spec_index_t *index = calloc(1, sizeof(spec_index_t));
    uint64_t size = 16;

    if (index == NULL) {
        return NULL;
    }

    while (size < (uint64_t) cap) {
        size *= 2;
    }

    index->ring = calloc(size, sizeof(int32_t));
    index->who = calloc(size, sizeof(uint32_t));
    index->back = calloc(size, sizeof(uint32_t));
    index->head = calloc(size, sizeof(uint64_t));
    index->mask = size - 1;

    if (index->ring == NULL || index->who == NULL || index->back == NULL
        || index->head == NULL)
    {
        spec_index_destroy(index);
        return NULL;
    }

    return index;
}


void
spec_index_destroy(spec_index_t *index)
{
    if (index == NULL) {
        return;
    }

    free(index->ring);
    free(index->who);
    free(index->back);
    free(index->head);
    free(index);
}


/* Of the GRAM tokens that end before tokens[end]. */
static uint64_t
gram_hash(uint64_t owner, const int32_t *tokens, int end)
{
    uint64_t h = owner;

    for (int i = end - GRAM; i < end; i++) {
        h = spec_hash_token(h, tokens[i]);
    }

    return h;
}


static void
add_token(spec_index_t *index, uint64_t owner, int32_t token)
{
    const uint64_t at = index->end++ & index->mask;

    index->ring[at] = token;
    index->who[at] = (uint32_t) owner;
    index->back[at] = 0;
}


void
spec_index_add(spec_index_t *index, uint64_t owner, const int32_t *tokens,
               int n_tokens)
{
    /* the end of what would overwrite its own beginning */
    if ((uint64_t) n_tokens >= index->mask) {
        tokens += (uint64_t) n_tokens - index->mask;
        n_tokens = (int) index->mask;
    }

    add_token(index, owner, DIVIDER);

    for (int i = 0; i < n_tokens; i++) {
        const uint64_t place = index->end;

        add_token(index, owner, tokens[i]);

        if (i + 1 < GRAM) {
            continue;
        }

        uint64_t *head =
            &index->head[gram_hash(owner, tokens, i + 1) & index->mask];
        const uint64_t back = *head > 0 ? place - (*head - 1) : 0;

        index->back[place & index->mask] =
            back <= index->mask ? (uint32_t) back : 0;
        *head = place + 1;
    }
}


/* How many tokens that end at a place are those at the end of tokens. */
static int
match_length(const spec_index_t *index, uint64_t owner, uint64_t place,
             const int32_t *tokens, int n_tokens)
{
    int length = 0;

    while (length < MATCH_MAX && length < n_tokens
           && index->end - (place - (uint64_t) length) <= index->mask
           && index->ring[(place - (uint64_t) length) & index->mask]
                  == tokens[n_tokens - 1 - length]
           && index->who[(place - (uint64_t) length) & index->mask]
                  == (uint32_t) owner)
    {
        length++;
    }

    return length;
}


int
spec_index_lookup(const spec_index_t *index, uint64_t owner,
                  const int32_t *tokens, int n_tokens, int n, int32_t *draft,
                  int *matched)
{
    uint64_t best_place = 0;
    int best = 0, found = 0;

    *matched = 0;

    if (n_tokens < GRAM) {
        return 0;
    }

    uint64_t next =
        index->head[gram_hash(owner, tokens, n_tokens) & index->mask];

    for (int i = 0; next > 0 && i < CHAIN_MAX; i++) {
        const uint64_t place = next - 1;

        if (index->end - place > index->mask) {
            break; /* overwritten */
        }

        const int length = match_length(index, owner, place, tokens, n_tokens);

        if (length >= GRAM && length > best) {
            best = length;
            best_place = place;
        }

        const uint32_t back = index->back[place & index->mask];

        next = back > 0 && back <= place ? next - back : 0;
    }

    for (; best > 0 && found < n; found++) {
        const uint64_t place = best_place + 1 + (uint64_t) found;

        if (place >= index->end || index->ring[place & index->mask] == DIVIDER)
        {
            break;
        }

        draft[found] = index->ring[place & index->mask];
    }

    *matched = best;

    return found;
}
