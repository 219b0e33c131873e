/*
 * See compare.h.
 */

#include "t/ops/lib/compare.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>


static bool
are_finite(const float *want, const float *got)
{
    return isfinite(*want) && isfinite(*got);
}


size_t
compare_bits(const float *want, const float *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&want[i], &got[i], sizeof(float)) != 0
            || !are_finite(&want[i], &got[i]))
        {
            return i;
        }
    }

    return n;
}


size_t
compare_near(const float *want, const float *got, size_t n, double relative)
{
    for (size_t i = 0; i < n; i++) {
        const double bound = relative * fabs((double) want[i]) + 1e-37;

        if (!are_finite(&want[i], &got[i])
            || !(fabs((double) got[i] - want[i]) <= bound))
        {
            return i;
        }
    }

    return n;
}


double
compare_most(const float *want, const float *got, size_t n)
{
    double most = 0.0;

    for (size_t i = 0; i < n; i++) {
        if (!are_finite(&want[i], &got[i])) {
            return INFINITY;
        }

        most = fmax(most, fabs((double) got[i] - want[i]));
    }

    return most;
}


double
compare_rms(const float *want, const float *got, size_t n)
{
    double error = 0.0;
    double norm = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double e = (double) got[i] - want[i];

        if (!are_finite(&want[i], &got[i])) {
            return INFINITY;
        }

        error += e * e;
        norm += (double) want[i] * want[i];
    }

    return norm > 0.0 ? sqrt(error / norm) : INFINITY;
}


void
assert_same_floats(const float *want, const float *got, size_t n,
                   const char *what)
{
    const size_t i = compare_bits(want, got, n);

    if (i < n) {
        fail_msg("%s: value %zu is %a, not %a", what, i, (double) got[i],
                 (double) want[i]);
    }
}


void
assert_near_floats(const float *want, const float *got, size_t n,
                   double relative)
{
    const size_t i = compare_near(want, got, n, relative);

    if (i < n) {
        fail_msg("value %zu is %.9g, the oracle says %.9g", i, (double) got[i],
                 (double) want[i]);
    }
}
