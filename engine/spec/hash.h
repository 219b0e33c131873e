/* A running hash over tokens, for guesses only: nothing is trusted to it. */

#ifndef ENGINE_SPEC_HASH_H
#define ENGINE_SPEC_HASH_H

#include <stdint.h>


static inline uint64_t
spec_hash_token(uint64_t hash, int32_t token)
{
    hash = (hash ^ (uint32_t) token) * 0x9e3779b97f4a7c15u;

    return hash ^ hash >> 29;
}

#endif /* ENGINE_SPEC_HASH_H */
