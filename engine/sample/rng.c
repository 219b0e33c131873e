/*
 * Philox 4x32-10.  Called by sampler.c, once a token.
 *
 * A keyed bijection of the counter: every (seed, position) has its own number
 * and there is no state to save, copy or lose.
 */

#include "engine/sample/rng.h"

enum { ROUNDS = 10 };


void
rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int i = 0; i < ROUNDS; i++) {
        const uint64_t p0 = (uint64_t) 0xd2511f53U * c0;
        const uint64_t p1 = (uint64_t) 0xcd9e8d57U * c2;

        c0 = (uint32_t) (p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t) p1;
        c2 = (uint32_t) (p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t) p0;

        /* the key schedule: golden ratio and √3 − 1, as in the paper */
        k0 += 0x9e3779b9U;
        k1 += 0xbb67ae85U;
    }

    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}


float
rng_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t counter[4] = { (uint32_t) position,
                                  (uint32_t) (position >> 32), 0, 0 };
    const uint32_t key[2] = { (uint32_t) seed, (uint32_t) (seed >> 32) };
    uint32_t out[4];

    rng_philox(counter, key, out);

    /* 24 bits: every one a float, and 1 cannot come out by rounding */
    return (float) (out[0] >> 8) * 0x1p-24f;
}
