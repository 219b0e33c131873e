/*
 * What the machine can do at best, for roofline: the bandwidth of a pure read
 * of given memory, and the rate of integer products whose operands are in
 * registers.  Both run on a backend's own pool of threads.
 */

#ifndef T_OPS_ROOF_PEAK_H
#define T_OPS_ROOF_PEAK_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const uint8_t *data; /* 64-byte aligned */
    size_t bytes;
} extent_t;

/* A way to read: streams side by side, and how far ahead lines are asked
 * for. */
typedef struct {
    int streams;
    int ahead; /* bytes; 0: what the hardware does by itself */
} read_way_t;

enum { READ_WAYS = 12, READ_STREAMS = 8 };

extern const read_way_t read_ways[READ_WAYS];


/* Reads all extents once, each cut by threads and then by streams.  Returns
 * the bytes read: less than 2 KB a thread and extent are left out. */
size_t peak_read(op_dev_t *dev, const extent_t *extents, int n,
                 const read_way_t *way);

/* Operations (multiplications and additions of 8-bit integers, as GOP/s of
 * linear() counts them) that all threads together do in one call, for the
 * caller to time; 0: the instruction set has no such instruction. */
double peak_dots(op_dev_t *dev);

#endif /* T_OPS_ROOF_PEAK_H */
