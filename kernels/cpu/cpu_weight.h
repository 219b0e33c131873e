/*
 * A repacked weight, as matrix products read it: a list of segments, one per
 * run of parts of equal dtype.
 */

#ifndef KERNELS_CPU_CPU_WEIGHT_H
#define KERNELS_CPU_CPU_WEIGHT_H

#include <stddef.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_dot.h"

struct op_weight_s {
    int n_in;
    int n_out;
    size_t bytes;
    cpu_arena_t *arena; /* NULL: the data are somebody else's */
    int has_quantised;
    int n_segments;
    cpu_segment_t segments[];
};

#endif /* KERNELS_CPU_CPU_WEIGHT_H */
