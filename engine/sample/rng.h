/*
 * Counter-based random numbers: a draw depends on (seed, position) only, never
 * on batch, slot or history, so a request draws the same numbers at any load,
 * after a preemption and after a crash.
 */

#ifndef ENGINE_SAMPLE_RNG_H
#define ENGINE_SAMPLE_RNG_H

#include <stdint.h>


/* Uniform in [0, 1), 24 bits.  Source: Philox 4x32-10 (Salmon et al., SC11)
 * with key = seed and counter = position. */
float rng_uniform(uint64_t seed, uint64_t position);

#endif /* ENGINE_SAMPLE_RNG_H */
