/*
 * Which instruction set a device uses; see cpu_isa.c.
 */

#ifndef KERNELS_CPU_CPU_ISA_H
#define KERNELS_CPU_CPU_ISA_H

#include "kernels/op/op.h"

/* Ordered: a machine that can do one can do those before it. */
enum {
    CPU_ISA_BASELINE = 0, /* portable C */
    CPU_ISA_AVX2 = 1,     /* avx2, fma, f16c */
    CPU_ISA_AVX512 = 2,   /* avx512f, bw, dq, vl, vnni besides */
    CPU_ISA_AMX = 3,      /* amx-tile, amx-int8 besides */
    CPU_ISA_COUNT
};


/* The set called name; NULL: what LLM_ISA says, or the best.  -1 with err:
 * unknown, or this machine lacks it.  *note: what a description should add,
 * or "". */
int cpu_isa_choose(const char *name, const char **note, op_err_t *err);

/* For a device's description. */
const char *cpu_isa_name(int isa);

#endif /* KERNELS_CPU_CPU_ISA_H */
