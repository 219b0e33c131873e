/*
 * Counter-based random numbers: a draw depends on (seed, position) only, never
 * on batch, slot or history, so a request draws the same numbers at any load,
 * after a preemption and after a crash.
 */

#ifndef ENGINE_SAMPLE_RNG_H
#define ENGINE_SAMPLE_RNG_H

#include <stdint.h>


/* Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
 * 3", SC11): ten rounds over counter and key. */
void rng_philox(const uint32_t counter[4], const uint32_t key[2],
                uint32_t out[4]);

/* Uniform in [0, 1), 24 bits, by Philox with key = seed and counter =
 * position. */
float rng_uniform(uint64_t seed, uint64_t position);

#endif /* ENGINE_SAMPLE_RNG_H */
