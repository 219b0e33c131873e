/*
 * Whether two tables of inner products agree, bit for bit: how an instruction
 * set shows that it works here, before a device uses it.
 *
 * One small product of each quantised layout: more than one tile of rows and
 * groups, neither whole, and an odd number of blocks.
 */

#include "kernels/cpu/cpu_dot.h"

#include <string.h>

#include "kernels/op/tensor.h"

enum {
    ROWS = 37,
    OUTS = 40,
    BLOCKS = 5,
    GROUPS = (OUTS + OP_LANES - 1) / OP_LANES,
    ENTRIES = (ROWS + CPU_TILE - 1) / CPU_TILE * CPU_TILE * BLOCKS,
    RECORD = 640, /* bytes of the largest one */
    PANEL = 32 * OP_LANES
};

typedef struct {
    _Alignas(64) uint8_t w[GROUPS * BLOCKS * RECORD];
    _Alignas(64) int8_t q[ENTRIES * 32];
    _Alignas(64) int8_t panel[BLOCKS * PANEL];
    float d[ENTRIES];
    float s[ENTRIES];
    int32_t sum[ENTRIES];
    int32_t half[ENTRIES];
    uint32_t random;
} trial_t;


static uint32_t
draw(trial_t *t)
{
    t->random = t->random * 1664525u + 1013904223u;
    return t->random >> 16;
}


/* -1 … 1 */
static float
draw_float(trial_t *t)
{
    return (float) draw(t) / 32768.0f - 1.0f;
}


static void
fill_scales(trial_t *t, uint8_t *p, int wide)
{
    for (int c = 0; c < OP_LANES; c++) {
        const float f = draw_float(t);
        const uint16_t h = op_float_to_half(f);

        memcpy(p + (wide ? 4 : 2) * c, wide ? (const void *) &f : &h,
               wide ? sizeof(f) : sizeof(h));
    }
}


static void
fill_weights(trial_t *t, const op_record_t *rec)
{
    uint8_t *p = t->w;

    for (int i = 0; i < GROUPS * BLOCKS; i++, p += rec->bytes) {
        for (int k = 0; k < rec->d_at; k++) {
            p[k] = (uint8_t) draw(t);
        }

        fill_scales(t, p + rec->d_at, rec->wide);

        if (rec->halves == 2) {
            fill_scales(t, p + rec->d_at + 64, rec->wide);
        }

        if (rec->has_min) {
            fill_scales(t, p + rec->m_at, rec->wide);
        }
    }
}


static void
fill_rows(trial_t *t, const cpu_act_t *act)
{
    float x[BLOCKS * 32];

    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < BLOCKS * 32; i++) {
            x[i] = draw_float(t);
        }

        cpu_dot_baseline()->quantise(x, act, r);
    }
}


static bool
same_products(trial_t *t, const cpu_act_t *act, cpu_dot_fn a, cpu_dot_fn b,
              const cpu_segment_t *seg)
{
    const cpu_range_t all = { 0, ROWS, 0, GROUPS };
    float ya[ROWS * OUTS], yb[ROWS * OUTS];
    cpu_dot_t job = { .seg = seg, .act = act, .ldy = OUTS, .panel = t->panel };

    memset(ya, 0, sizeof(ya));
    memset(yb, 0, sizeof(yb));
    job.y = ya;
    a(&job, &all);
    job.y = yb;
    b(&job, &all);

    return memcmp(ya, yb, sizeof(ya)) == 0;
}


bool
cpu_dot_same(const cpu_dot_table_t *a, const cpu_dot_table_t *b)
{
    trial_t t = { .random = 1 };
    const cpu_act_t act = { .n_blocks = BLOCKS,
                            .tile = CPU_TILE,
                            .q = t.q,
                            .d = t.d,
                            .s = t.s,
                            .sum = t.sum,
                            .half = t.half };

    fill_rows(&t, &act);

    for (int layout = 0; layout < OP_LAY_COUNT; layout++) {
        const op_record_t *rec = op_layout_record((op_layout_t) layout);
        const cpu_segment_t seg = { .layout = (op_layout_t) layout,
                                    .n_in = BLOCKS * 32,
                                    .n_records = BLOCKS,
                                    .n_out = OUTS,
                                    .n_groups = GROUPS,
                                    .group_bytes =
                                        (size_t) (BLOCKS * rec->bytes),
                                    .data = t.w };

        if (rec->bits == 0) {
            continue;
        }

        fill_weights(&t, rec);

        if (!same_products(&t, &act, a->dot[layout], b->dot[layout], &seg)) {
            return false;
        }
    }

    return true;
}
