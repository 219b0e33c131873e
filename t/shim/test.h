/*
 * What the tests of the emulation share: memory of the device with something
 * in it, and back.
 */

#ifndef T_SHIM_TEST_H
#define T_SHIM_TEST_H

#include "kernels/cuda/prim.cuh"
#include "t/shim/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" {
#include <cmocka.h>
}

#define OK(call) assert_int_equal((call), cudaSuccess)

/* counts elements of an array */
#define N_OF(array) (sizeof(array) / sizeof((array)[0]))


static inline void *
on_device(const void *src, size_t n_bytes)
{
    void *ptr = NULL;

    OK(cudaMalloc(&ptr, n_bytes));

    if (src != NULL) {
        OK(cudaMemcpy(ptr, src, n_bytes, cudaMemcpyHostToDevice));
    }

    return ptr;
}


static inline void
from_device(void *dst, const void *src, size_t n_bytes)
{
    OK(cudaMemcpy(dst, src, n_bytes, cudaMemcpyDeviceToHost));
}


/* numbers between -1 and 1 that repeat from run to run */
static inline float
test_number(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;

    return (float) (int32_t) *state / 2147483648.0f;
}

#endif
