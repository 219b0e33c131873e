/*
 * Inner products for the matrix unit: the int32 dots of 16 rows by 16 outputs
 * by one block of inputs come from one instruction, and AVX-512 makes floats
 * of them in the order that all instruction sets keep.
 *
 * A block has its own scale, so every tile of dots goes through memory into 16
 * accumulators, which costs three times what the unit does; that is why it
 * pays only from AMX_ROWS rows on.  Tiles run two steps ahead of the additions,
 * or each would wait for the store of its dots.  Fewer rows than that, rows
 * over a multiple of 16, float layouts and activations are AVX-512's business.
 */

#include "kernels/cpu/cpu_dot.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

#include "kernels/cpu/cpu_dot_zmm.h"
#include "kernels/cpu/cpu_tile.h"

enum {
    /* Rows from which tiles beat VNNI at all widths, as measured on Sapphire
     * Rapids by a prototype of these kernels. */
    AMX_ROWS = 32,

    AHEAD = 4096, /* bytes between a load of weights and its prefetch */
    RING = 4,     /* tiles of dots in memory */
    BEHIND = 2    /* steps by which additions trail */
};

/* The dots of one step, rows by outputs. */
typedef int32_t dots_t[CPU_TILE][OP_LANES];

/* A tile of outputs: 16 rows of one group.  Pointers are to its first block;
 * a step is a block, or half of one where halves have scales of their own. */
typedef struct {
    const uint8_t *w;
    const int8_t *panel; /* [block][8][64]: the group's quants as bytes */
    const int8_t *q;     /* [block][16 rows][32] */
    const float *d;      /* [block][16 rows] */
    const float *s;
    const uint8_t *empty;
    int n_blocks;
} place_t;


CPU_INLINE cpu_tile_config_t
tiles_for(const int layout)
{
    const int inputs = 32 / lay_halves(layout);
    cpu_tile_config_t config = { .palette = 1 };

    /* 0, 1: dots; 2, 3: activations; 4, 5: weights */
    for (int t = 0; t < 2; t++) {
        config.rows[t] = CPU_TILE;
        config.row_bytes[t] = 4 * OP_LANES;
        config.rows[2 + t] = CPU_TILE;
        config.row_bytes[2 + t] = (uint16_t) inputs;
        config.rows[4 + t] = (uint8_t) (inputs / 4);
        config.row_bytes[4 + t] = 4 * OP_LANES;
    }

    return config;
}


/* A group's quants as signed bytes, on whole cache lines: a tile's rows would
 * cross them where a record is no multiple of 64 bytes. */
CPU_INLINE void
unpack(const uint8_t *w, int n_blocks, int8_t *panel, const int layout)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    const __m512i zero = _mm512_set1_epi8(layout == OP_LAY_Q4_D16 ? 8 : 0);
    const int n = lay_is_q4(layout) ? 4 : 8;

    for (int b = 0; b < n_blocks; b++, w += lay_bytes(layout), panel += 512) {
        UNROLL
        for (int v = 0; v < n; v++) {
            __m512i q = _mm512_loadu_si512(w + 64 * v);
            __m512i hi = _mm512_and_si512(_mm512_srli_epi16(q, 4), low4);

            _mm_prefetch((const char *) w + 64 * v + AHEAD, _MM_HINT_T0);

            if (lay_is_q4(layout)) {
                q = _mm512_sub_epi8(_mm512_and_si512(q, low4), zero);
                hi = _mm512_sub_epi8(hi, zero);
                _mm512_store_si512(panel + 256 + 64 * v, hi);
            }

            _mm512_store_si512(panel + 64 * v, q);
        }
    }
}


/* The dots of a step; tiles alternate, so that two are under way. */
CPU_INLINE void
multiply(const place_t *at, int step, int odd, dots_t *dots, const int layout)
{
    const int halves = lay_halves(layout);
    const int b = step / halves, h = step % halves;
    const int8_t *q = at->q + (size_t) b * 512 + 16 * h;
    const int8_t *w = at->panel + (size_t) b * 512 + 256 * h;

    if (odd) {
        CPU_TILE_ZERO(1);
        CPU_TILE_LOAD(3, q, 32);
        CPU_TILE_LOAD(5, w, 64);
        CPU_TILE_DOT(1, 3, 5);
        CPU_TILE_STORE(1, dots, 64);
    } else {
        CPU_TILE_ZERO(0);
        CPU_TILE_LOAD(2, q, 32);
        CPU_TILE_LOAD(4, w, 64);
        CPU_TILE_DOT(0, 2, 4);
        CPU_TILE_STORE(0, dots, 64);
    }
}


CPU_INLINE void
add_step(const place_t *at, int step, const dots_t *dots, __m512 *acc,
         const int layout)
{
    const int halves = lay_halves(layout);
    const int b = step / halves, h = step % halves;
    const uint8_t *w = at->w + (size_t) b * (size_t) lay_bytes(layout);
    const float *x = at->d + (size_t) b * CPU_TILE;
    const __m512 d = zmm_scales(w + lay_d_at(layout) + 64 * h, layout);

    UNROLL
    for (int r = 0; r < CPU_TILE; r++) {
        const __m512i dot = _mm512_load_si512((*dots)[r]);

        acc[r] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot),
                            _mm512_mul_ps(d, _mm512_set1_ps(x[r])), acc[r]);
    }
}


/* All minima of a tile: a pass of its own, as 32 accumulators would fill the
 * registers. */
CPU_INLINE void
add_minima(const place_t *at, __m512 *low, const int layout)
{
    const uint8_t *w = at->w + lay_m_at(layout);
    const float *s = at->s;

    for (int b = 0; b < at->n_blocks; b++) {
        if (at->empty == NULL || !at->empty[b]) {
            const __m512 m = zmm_scales(w, layout);

            UNROLL
            for (int r = 0; r < CPU_TILE; r++) {
                low[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(s[r]), low[r]);
            }
        }

        w += lay_bytes(layout);
        s += CPU_TILE;
    }
}


CPU_INLINE void
add_dots(const place_t *at, __m512 *acc, const int layout)
{
    const int halves = lay_halves(layout);
    _Alignas(64) dots_t dots[RING];
    int step_of[RING];
    int n = 0;

    for (int step = 0; step < at->n_blocks * halves; step++) {
        if (at->empty != NULL && at->empty[step / halves]) {
            continue;
        }

        multiply(at, step, n % 2, &dots[n % RING], layout);
        step_of[n % RING] = step;

        if (n >= BEHIND) {
            const int k = (n - BEHIND) % RING;

            add_step(at, step_of[k], &dots[k], acc, layout);
        }

        n++;
    }

    for (int k = n > BEHIND ? n - BEHIND : 0; k < n; k++) {
        add_step(at, step_of[k % RING], &dots[k % RING], acc, layout);
    }
}


CPU_INLINE void
tile(const cpu_dot_t *job, int row, int group, const int layout)
{
    const cpu_act_t *act = job->act;
    const size_t first = cpu_act_at(act, row);
    const place_t at = {
        .w = job->seg->data + (size_t) group * job->seg->group_bytes,
        .panel = job->panel,
        .q = act->q + 32 * first,
        .d = act->d + first,
        .s = act->s + first,
        .empty = cpu_act_empty(act, row),
        .n_blocks = act->n_blocks,
    };
    _Alignas(64) float low[CPU_TILE][OP_LANES];
    __m512 acc[CPU_TILE];

    UNROLL
    for (int r = 0; r < CPU_TILE; r++) {
        acc[r] = _mm512_setzero_ps();
    }

    if (lay_has_min(layout)) {
        add_minima(&at, acc, layout);

        UNROLL
        for (int r = 0; r < CPU_TILE; r++) {
            _mm512_store_ps(low[r], acc[r]);
            acc[r] = _mm512_setzero_ps();
        }
    }

    add_dots(&at, acc, layout);

    UNROLL
    for (int r = 0; r < CPU_TILE; r++) {
        if (lay_has_min(layout)) {
            acc[r] = _mm512_add_ps(acc[r], _mm512_load_ps(low[r]));
        }

        zmm_store(job, row + r, group, acc[r]);
    }
}


static void
dot_avx512(const cpu_dot_t *job, const cpu_range_t *range)
{
    cpu_dot_avx512()->dot[job->seg->layout](job, range);
}


CPU_INLINE void
dot_all(const cpu_dot_t *job, const cpu_range_t *range, const int layout)
{
    const cpu_tile_config_t config = tiles_for(layout);
    const int n_rows = range->row_end - range->row;
    const int whole = range->row_end - n_rows % CPU_TILE;

    if (n_rows < AMX_ROWS) {
        dot_avx512(job, range);
        return;
    }

    cpu_tile_configure(&config);

    for (int group = range->group; group < range->group_end; group++) {
        const cpu_range_t rest = { whole, range->row_end, group, group + 1 };

        unpack(job->seg->data + (size_t) group * job->seg->group_bytes,
               job->act->n_blocks, job->panel, layout);

        for (int row = range->row; row < whole; row += CPU_TILE) {
            tile(job, row, group, layout);
        }

        if (whole < range->row_end) {
            dot_avx512(job, &rest);
        }
    }

    cpu_tile_release();
}


#define DOT(name, layout)                                            \
    static void name(const cpu_dot_t *job, const cpu_range_t *range) \
    {                                                                \
        dot_all(job, range, layout);                                 \
    }

DOT(dot_q4_d16, OP_LAY_Q4_D16)
DOT(dot_q4_dm16, OP_LAY_Q4_DM16)
DOT(dot_q4_dm32, OP_LAY_Q4_DM32)
DOT(dot_q8_d16, OP_LAY_Q8_D16)
DOT(dot_q8_dm16, OP_LAY_Q8_DM16)
DOT(dot_q8_dm32, OP_LAY_Q8_DM32)
DOT(dot_q8_dd32, OP_LAY_Q8_DD32)


static void
quantise(const float *x, const cpu_act_t *act, int row)
{
    cpu_dot_avx512()->quantise(x, act, row);
}


const cpu_dot_table_t *
cpu_dot_amx(void)
{
    static const cpu_dot_table_t table = {
        .chunk_rows = AMX_ROWS,
        .panel_bytes = 32 * OP_LANES,
        .quantise = quantise,
        .dot = { [OP_LAY_F32] = dot_avx512,
                 [OP_LAY_F16] = dot_avx512,
                 [OP_LAY_BF16] = dot_avx512,
                 [OP_LAY_Q4_D16] = dot_q4_d16,
                 [OP_LAY_Q4_DM16] = dot_q4_dm16,
                 [OP_LAY_Q4_DM32] = dot_q4_dm32,
                 [OP_LAY_Q8_D16] = dot_q8_d16,
                 [OP_LAY_Q8_DM16] = dot_q8_dm16,
                 [OP_LAY_Q8_DM32] = dot_q8_dm32,
                 [OP_LAY_Q8_DD32] = dot_q8_dd32 },
    };

    return &table;
}

#else

const cpu_dot_table_t *
cpu_dot_amx(void)
{
    return NULL;
}

#endif
