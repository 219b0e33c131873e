/*
 * Comparing what kernels computed.  A value that is not finite is never equal
 * and never near, on either side: a kernel and its oracle that are both NaN
 * agree about nothing.  t/ops/compare_test.c feeds them all of it.
 */

#ifndef T_OPS_LIB_COMPARE_H
#define T_OPS_LIB_COMPARE_H

#include <stddef.h>

/* The first place with other bits or with what is not finite; n: there is
 * none. */
size_t compare_bits(const float *want, const float *got, size_t n);

/* The first place that is more than relative · |want| off; n: there is none.
 * Values below 1e-37 may be anything that small. */
size_t compare_near(const float *want, const float *got, size_t n,
                    double relative);

/* The largest difference; INFINITY if anything is not finite. */
double compare_most(const float *want, const float *got, size_t n);

/* RMS of the differences by that of want; INFINITY if anything is not finite
 * or all that is wanted is 0. */
double compare_rms(const float *want, const float *got, size_t n);

/* Fails the test, with the place, unless all n bits and values are finite and
 * the same; unless they are near. */
void assert_same_floats(const float *want, const float *got, size_t n,
                        const char *what);
void assert_near_floats(const float *want, const float *got, size_t n,
                        double relative);

#endif /* T_OPS_LIB_COMPARE_H */
