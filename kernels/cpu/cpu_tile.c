/*
 * Whether the matrix unit may be used: the processor has it, the operating
 * system saves its registers, and this process has asked for them.
 *
 * The registers are 8 KB, so Linux gives them only on request (arch_prctl,
 * since 5.16); the permission is the whole process's.  It is refused where
 * somebody's alternate signal stack has no room for them.
 */

#include "kernels/cpu/cpu_tile.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    REQUEST_PERMISSION = 0x1023, /* ARCH_REQ_XCOMP_PERM */
    TILE_DATA = 18,              /* XFEATURE_XTILEDATA, a bit of XCR0, too */
    TILE_CONFIG = 17
};


/* CPUID, leaf 7: the tiles and their products of bytes; leaf 0x1d: palette 1
 * has the shape that is documented. */
static bool
has_tiles(void)
{
    const unsigned tile = 1u << 24, int8 = 1u << 25;
    unsigned a, b, c, d;

    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & tile) || !(d & int8))
    {
        return false;
    }

    if (!__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) || a < 1
        || !__get_cpuid_count(0x1d, 1, &a, &b, &c, &d))
    {
        return false;
    }

    /* bytes of a row, tiles, rows */
    return (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) >= 16;
}


static bool
are_saved(void)
{
    const unsigned need = 1u << TILE_DATA | 1u << TILE_CONFIG;
    unsigned low, high;

    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));

    return (low & need) == need;
}


bool
cpu_tile_permit(void)
{
    return has_tiles() && are_saved()
           && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

bool
cpu_tile_permit(void)
{
    return false;
}

#endif
