/*
 * The matrix unit of x86 in plain C: one file of tiles for each thread, and
 * instructions that do what the manual says of them, or end the program where
 * the processor would raise an exception.  cpu_tile.h takes these when
 * CPU_TILE_EMU is defined.
 */

#ifndef T_OPS_TWIN_TILE_H
#define T_OPS_TWIN_TILE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/cpu_tile.h"

/* What a test makes of the unit; all threads'. */
typedef struct {
    bool absent; /* permission is refused */
    bool wrong;  /* the lowest bit of one sum of a product is flipped */
} twin_faults_t;

extern twin_faults_t twin_faults;

/* Of all threads, since the program began. */
uint64_t twin_products(void);

/* Threads whose tiles are configured now. */
int twin_configured(void);

/* The instructions. */
void cpu_tile_configure(const cpu_tile_config_t *config);
void cpu_tile_release(void);
void twin_zero(int t);
void twin_load(int t, const void *p, int64_t stride);
void twin_store(int t, void *p, int64_t stride);
void twin_dot(int c, int a, int b);

#define CPU_TILE_ZERO(t) twin_zero(t)
#define CPU_TILE_LOAD(t, p, stride) twin_load(t, p, stride)
#define CPU_TILE_STORE(t, p, stride) twin_store(t, p, stride)
#define CPU_TILE_DOT(c, a, b) twin_dot(c, a, b)

#endif /* T_OPS_TWIN_TILE_H */
