/*
 * What the products for AVX-512 and for the matrix unit share: the 16 outputs
 * of a group in one register.
 */

#ifndef KERNELS_CPU_CPU_DOT_ZMM_H
#define KERNELS_CPU_CPU_DOT_ZMM_H

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/cpu_dot.h"


/* A record's 16 scales or minima. */
CPU_INLINE __m512
zmm_scales(const uint8_t *p, const int layout)
{
    if (lay_is_wide(layout)) {
        return _mm512_loadu_ps(p);
    }

    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
}


CPU_INLINE void
zmm_store(const cpu_dot_t *job, int row, int group, __m512 v)
{
    int lanes = cpu_group_lanes(job->seg, group);
    __mmask16 mask = (__mmask16) ((1u << lanes) - 1);
    float *y = job->y + (size_t) row * (size_t) job->ldy + group * OP_LANES;

    if (job->add) {
        v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
    }

    _mm512_mask_storeu_ps(y, mask, v);
}

#endif /* KERNELS_CPU_CPU_DOT_ZMM_H */
