/*
 * The pointwise row kernels, compiled with AVX-512.  The bodies are those of
 * every instruction set; see cpu_point_body.h.
 */

#if defined(__x86_64__)

#define CPU_POINT_TABLE cpu_point_avx512

#include "kernels/cpu/cpu_point_body.h"

#endif
