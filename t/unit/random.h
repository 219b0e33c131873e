/* A small generator for the tests' random operations, and its seed: from
 * LLM_TEST_SEED if set, else from the clock, always printed, so that a failure
 * can be repeated. */

#ifndef T_UNIT_RANDOM_H
#define T_UNIT_RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    uint64_t state;
} random_t;


/* splitmix64 (Steele et al., 2014) */
static inline uint64_t
random_next(random_t *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15ULL;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;

    return z ^ (z >> 31);
}


/* 0 … n − 1 */
static inline int
random_below(random_t *random, int n)
{
    return (int) (random_next(random) % (uint64_t) n);
}


/* [0, 1) */
static inline double
random_unit(random_t *random)
{
    return (double) (random_next(random) >> 11) * 0x1p-53;
}


static inline random_t
random_start(const char *what)
{
    const char *given = getenv("LLM_TEST_SEED");
    const uint64_t seed =
        given != NULL ? strtoull(given, NULL, 0) : (uint64_t) time(NULL);

    printf("# %s: LLM_TEST_SEED=%llu\n", what, (unsigned long long) seed);

    return (random_t){ seed };
}

#endif /* T_UNIT_RANDOM_H */
