/*
 * The inner products of linear(): what cpu_linear.c asks of an instruction
 * set, and the quantised activations between them.
 *
 * Four files fill one table each: cpu_dot.c (portable), cpu_dot_avx2.c,
 * cpu_dot_avx512.c and cpu_dot_amx.c.  All give the same bits, because an
 * output is one chain of operations whatever the blocking (op.h, linear):
 *   acc = fmaf((float) dot, d_w * d_x, acc), blocks ascending,
 *   low = fmaf(m_w, s_x, low), where s_x = d_x * (float) sum(q_x),
 *   y = acc + low.
 */

#ifndef KERNELS_CPU_CPU_DOT_H
#define KERNELS_CPU_CPU_DOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/op/repack.h"

#define CPU_INLINE static inline __attribute__((always_inline))

/* Full unrolling of loops with constant bounds, so that arrays of
 * accumulators become registers.  clang ignores GCC's pragma. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { CPU_TILE = 16 }; /* rows of activations stored together */

/* Rows of one dtype within a weight, repacked (op/repack.h). */
typedef struct {
    op_layout_t layout;
    int n_in;
    int n_records; /* per group: n_in / 32, or n_in of a float layout */
    int n_out;
    int n_groups;  /* of 16 outputs; the last one may be part empty */
    int first_out; /* where its outputs start in the weight's */
    size_t group_bytes;
    uint8_t *data;
} cpu_segment_t;

/*
 * Activations as int8, by row and block of 32:
 *   d = max|x| / 127, q = x / d rounded to nearest even, within ±127;
 *   d = 0 or not finite: q = 0 (so a row with NaN or infinity gives NaN).
 * Entry (row, block) is at cpu_act_at(row) + block * tile; a tile of rows is
 * contiguous, which a matrix unit can load as it is.
 */
typedef struct {
    int n_blocks;
    int tile;      /* rows in a tile: 16, or all when there are fewer */
    int8_t *q;     /* [entries][32] */
    float *d;      /* [entries] */
    float *s;      /* d * (float) sum of q */
    int32_t *sum;  /* of the 32 q */
    int32_t *half; /* of the first 16 */

    /* [tiles of 16 rows][n_blocks]: d is 0 in all the tile's rows, so the
     * block adds nothing; NULL: not known. */
    const uint8_t *empty;
} cpu_act_t;

typedef struct {
    const cpu_segment_t *seg;
    const cpu_act_t *act; /* for quantised layouts */
    const float *x;       /* [rows][n_in], for float layouts */
    float *y;             /* the segment's first output of row 0 */
    int ldy;
    int add;       /* y += instead of y = */
    int8_t *panel; /* this thread's: panel_bytes for each block of inputs */
} cpu_dot_t;

/* Rows row … row_end − 1 of groups group … group_end − 1; row is a multiple
 * of 16. */
typedef struct {
    int row;
    int row_end;
    int group;
    int group_end;
} cpu_range_t;

typedef void (*cpu_dot_fn)(const cpu_dot_t *job, const cpu_range_t *range);

typedef struct {
    int chunk_rows;  /* a chunk of rows has at least so many, if there are */
    int panel_bytes; /* or 0: it wants no panel */

    /* Quantises one row, 32 * act->n_blocks values. */
    void (*quantise)(const float *x, const cpu_act_t *act, int row);
    cpu_dot_fn dot[OP_LAY_COUNT];
} cpu_dot_table_t;


/* NULL where the compiler was not given the instruction set. */
const cpu_dot_table_t *cpu_dot_baseline(void);
const cpu_dot_table_t *cpu_dot_avx2(void);
const cpu_dot_table_t *cpu_dot_avx512(void);
const cpu_dot_table_t *cpu_dot_amx(void); /* over cpu_dot_avx512() */

/* Whether both give the same bits for a product of each quantised layout. */
bool cpu_dot_same(const cpu_dot_table_t *a, const cpu_dot_table_t *b);


/* The entry of (row, block 0). */
static inline size_t
cpu_act_at(const cpu_act_t *act, int row)
{
    size_t tile = (size_t) (row / CPU_TILE) * (size_t) act->n_blocks;

    return tile * (size_t) act->tile + (size_t) (row % CPU_TILE);
}


/* The flags of a row's tile, or NULL. */
static inline const uint8_t *
cpu_act_empty(const cpu_act_t *act, int row)
{
    if (act->empty == NULL) {
        return NULL;
    }

    return act->empty + (size_t) (row / CPU_TILE) * (size_t) act->n_blocks;
}


/* Outputs of a group that exist. */
static inline int
cpu_group_lanes(const cpu_segment_t *seg, int group)
{
    int left = seg->n_out - group * OP_LANES;

    return left < OP_LANES ? left : OP_LANES;
}


/* The same facts as op_layout_record(), foldable when the layout is a
 * constant. */
CPU_INLINE int
lay_is_float(int layout)
{
    return layout == OP_LAY_F32 || layout == OP_LAY_F16
           || layout == OP_LAY_BF16;
}


CPU_INLINE int
lay_is_q4(int layout)
{
    return layout == OP_LAY_Q4_D16 || layout == OP_LAY_Q4_DM16
           || layout == OP_LAY_Q4_DM32;
}


CPU_INLINE int
lay_has_min(int layout)
{
    return layout == OP_LAY_Q4_DM16 || layout == OP_LAY_Q4_DM32
           || layout == OP_LAY_Q8_DM16 || layout == OP_LAY_Q8_DM32;
}


CPU_INLINE int
lay_is_wide(int layout)
{
    return layout == OP_LAY_Q4_DM32 || layout == OP_LAY_Q8_DM32
           || layout == OP_LAY_Q8_DD32;
}


CPU_INLINE int
lay_halves(int layout)
{
    return layout == OP_LAY_Q8_DD32 ? 2 : 1;
}


CPU_INLINE int
lay_d_at(int layout)
{
    return lay_is_q4(layout) ? 256 : 512;
}


CPU_INLINE int
lay_m_at(int layout)
{
    return lay_d_at(layout) + (lay_is_wide(layout) ? 64 : 32);
}


CPU_INLINE int
lay_bytes(int layout)
{
    int scales = lay_has_min(layout) || lay_halves(layout) == 2 ? 2 : 1;

    return lay_d_at(layout) + scales * (lay_is_wide(layout) ? 64 : 32);
}

#endif /* KERNELS_CPU_CPU_DOT_H */
