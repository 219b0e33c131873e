/*
 * Which instruction set a device uses, chosen when it is opened.
 *
 * It is found from CPUID feature bits and from what the operating system saves
 * (XGETBV), never from the processor's model.  All sets give the same bits, so
 * LLM_ISA in the environment may force a lesser one in any test.  The matrix
 * unit must also show that its products are right before it is believed: few
 * machines have it, and their hypervisors differ.
 */

#include "kernels/cpu/cpu_isa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu_dot.h"
#include "kernels/cpu/cpu_tile.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const isa_names[CPU_ISA_COUNT] = { "baseline", "avx2",
                                                      "avx512", "amx" };
static const char *const isa_long_names[CPU_ISA_COUNT] = {
    "baseline", "avx2", "avx512vnni", "amx-int8 avx512vnni"
};


#if defined(__x86_64__)

/* The register states the operating system saves on a switch. */
static unsigned
saved_states(void)
{
    unsigned low, high;

    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}


/* Of those without the matrix unit. */
static int
best_isa(void)
{
    const unsigned need_512 =
        bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    const unsigned need_256 = bit_FMA | bit_F16C | bit_OSXSAVE | bit_AVX;
    unsigned a, b, c, d, states;

    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need_256) != need_256) {
        return CPU_ISA_BASELINE;
    }

    /* bits 1, 2: xmm and ymm; 5, 6, 7: masks and zmm */
    states = saved_states();
    if ((states & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)
        || !(b & bit_AVX2))
    {
        return CPU_ISA_BASELINE;
    }

    if ((states & 0xe0) == 0xe0 && (b & need_512) == need_512
        && (c & bit_AVX512VNNI))
    {
        return CPU_ISA_AVX512;
    }

    return CPU_ISA_AVX2;
}

#else

static int
best_isa(void)
{
    return CPU_ISA_BASELINE;
}

#endif


/* The matrix unit, if it is there and right; else `isa`. */
static int
best_with_tiles(int isa, const char **note)
{
    if (isa < CPU_ISA_AVX512 || cpu_dot_amx() == NULL || !cpu_tile_permit()) {
        return isa;
    }

    if (!cpu_dot_same(cpu_dot_amx(), cpu_dot_avx512())) {
        *note = ", amx left out: its products are wrong";
        return isa;
    }

    return CPU_ISA_AMX;
}


static int
isa_of(const char *name)
{
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        if (strcmp(name, isa_names[isa]) == 0) {
            return isa;
        }
    }

    return -1;
}


int
cpu_isa_choose(const char *name, const char **note, op_err_t *err)
{
    int best = best_isa();

    *note = "";

    if (name == NULL) {
        name = getenv("LLM_ISA");
        if (name == NULL || *name == '\0') {
            return best_with_tiles(best, note);
        }
    }

    const int isa = isa_of(name);

    if (isa < 0) {
        snprintf(err->text, sizeof(err->text),
                 "unknown instruction set \"%.32s\"; "
                 "it is one of baseline, avx2, avx512, amx",
                 name);
        return -1;
    }

    /* the unit is asked for only where it is wanted */
    if (isa > best) {
        best = best_with_tiles(best, note);
    }

    if (isa > best) {
        snprintf(err->text, sizeof(err->text),
                 "this CPU or its operating system lacks %s; "
                 "its best is %s%s",
                 name, isa_names[best], *note);
        return -1;
    }

    return isa;
}


const char *
cpu_isa_name(int isa)
{
    return isa_long_names[isa];
}
