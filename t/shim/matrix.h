/*
 * Collectives of a whole warp: sums, and what matrix instructions do.  Called
 * by the twins in kernels/cuda/prim*.cuh.
 */

#ifndef T_SHIM_MATRIX_H
#define T_SHIM_MATRIX_H

#include "t/shim/exec.h"

typedef enum { SHIM_F16, SHIM_BF16 } shim_half_t;

/* over 32 lanes, or each 4 of them, in the order of the shuffles that a device
 * takes: by 16, 8, 4, 2, 1, and by 1, 2 */
float shim_warp_sum(float value, shim_site_t site);
float shim_warp_max(float value, shim_site_t site);
int shim_warp_sum_int(int value, shim_site_t site);
float shim_quad_sum(float value, shim_site_t site);
float shim_quad_max(float value, shim_site_t site);

/* up to 8 values, each over 16 lanes: by 8, 4, 2, 1 */
void shim_half_sums(float *values, int n, shim_site_t site);

/* For ldmatrix: the rows that this lane has to read, of four matrices whose
 * rows the lanes point to.  Transposed, two of each matrix. */
void shim_matrix_rows(const void *row, const void *rows[4], shim_site_t site);
void shim_matrix_rows_transposed(const void *row, const void *rows[8],
                                 shim_site_t site);

/* d[16, 8] += a[16, 16] · b[16, 8]: products exact, sums in f32, k ascending */
void shim_mma_16816(shim_half_t type, float d[4], const uint32_t a[4],
                    const uint32_t b[2], shim_site_t site);

/* d[16, 8] += a[16, 8] · b[8, 8]: f32 of which the low 13 bits are not looked
 * at; products exact, sums in f32, k ascending */
void shim_mma_tf32_1688(float d[4], const uint32_t a[4], const uint32_t b[2],
                        shim_site_t site);

/* d[16, 8] += a[16, 32] · b[32, 8], signed bytes, exact */
void shim_mma_s8_16832(int32_t d[4], const uint32_t a[4], const uint32_t b[2],
                       shim_site_t site);

#endif
