/*
 * The matrix unit of x86 (AMX): eight tiles of up to 16 rows of 64 bytes a
 * thread, and the few instructions on them that products of bytes need (Intel
 * 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter
 * 18).
 *
 * cpu_dot_amx.c is the only user.  They are written as assembly, each with a
 * memory clobber, so that any compiler takes them without flags and none
 * moves a store across them; numbers of tiles are literals.  With CPU_TILE_EMU
 * they are functions in C that tests link (t/ops/twin/), for machines without
 * the unit.
 */

#ifndef KERNELS_CPU_CPU_TILE_H
#define KERNELS_CPU_CPU_TILE_H

#include <stdbool.h>
#include <stdint.h>

/* The operand of LDTILECFG.  Tiles whose rows are 0 are not used. */
typedef struct {
    uint8_t palette; /* 1 */
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} cpu_tile_config_t;

_Static_assert(sizeof(cpu_tile_config_t) == 64, "as LDTILECFG reads it");


/* Asks the system for the unit, for all threads of the process: true when it
 * is there, does products of bytes and may be used.  Only for processors with
 * AVX. */
bool cpu_tile_permit(void);


/* Tiles t, c, a, b are literals 0 … 7; a row of a tile is `stride` bytes from
 * the one before.  Configure and release frame what a thread does; released,
 * the unit costs nothing at a switch of threads.
 *
 * DOT: c[m][n] += sum over k of a[m][k] * b[k / 4][4 n + k % 4], signed bytes
 * and 32-bit sums. */

#if defined(CPU_TILE_EMU)

#include "t/ops/twin/tile.h"

#elif defined(__x86_64__)

static inline void
cpu_tile_configure(const cpu_tile_config_t *config)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*config) : "memory");
}


static inline void
cpu_tile_release(void)
{
    __asm__ volatile("tilerelease" : : : "memory");
}


#define CPU_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")

#define CPU_TILE_LOAD(t, p, stride)                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t    \
                     :                                  \
                     : "r"(p), "r"((uint64_t) (stride)) \
                     : "memory")

#define CPU_TILE_STORE(t, p, stride)                     \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" \
                     :                                   \
                     : "r"(p), "r"((uint64_t) (stride))  \
                     : "memory")

#define CPU_TILE_DOT(c, a, b)                                     \
    __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c \
                     :                                            \
                     :                                            \
                     : "memory")

#endif

#endif /* KERNELS_CPU_CPU_TILE_H */
