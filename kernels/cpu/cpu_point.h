/*
 * The row kernels of the pointwise ops.  One source, cpu_point_body.h, is
 * compiled once per instruction set; its arithmetic is plain multiplies, adds,
 * divisions and square roots in a written order, so every compilation gives
 * the same bits.
 */

#ifndef KERNELS_CPU_CPU_POINT_H
#define KERNELS_CPU_CPU_POINT_H

#include <stdint.h>

typedef struct {
    /* One row.  The sum of squares is 16 lanes (element i in lane i mod 16,
     * ascending), then lanes j + (j + 8), j + (j + 4), j + (j + 2), 0 + 1;
     * y = x * (1 / sqrt(sum / dim + eps)) * w, left to right. */
    void (*rmsnorm)(float *y, const float *x, const float *w, int dim,
                    float eps);

    /* y = gate / (1 + exp(−gate)) * up.  n elements. */
    void (*silu_mul)(float *y, const float *gate, const float *up, int n);

    /* Rotates n_heads heads in place by one position's table row: products
     * are rounded, then subtracted or added (no fma). */
    void (*rope)(float *x, int n_heads, int head_dim, const float *cos_sin,
                 int rot, int mode);

    /* n f32 to f16, to nearest even. */
    void (*narrow)(uint16_t *out, const float *in, int n);

    /* n f32 under one scale to bytes, by the rule of op_kv_t; returns the
     * scale, an f16. */
    uint16_t (*quantise)(int8_t *out, const float *in, int n);
} cpu_point_kernels_t;

extern const cpu_point_kernels_t cpu_point_baseline;
#if defined(__x86_64__)
extern const cpu_point_kernels_t cpu_point_avx2;
extern const cpu_point_kernels_t cpu_point_avx512;
#endif

#endif /* KERNELS_CPU_CPU_POINT_H */
