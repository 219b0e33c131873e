/*
 * The lane that comes last computes for the whole warp: one rendezvous for what
 * would be five, and a product of matrices as one loop.
 */

#include "t/shim/formats.h"
#include "t/shim/matrix.h"
#include "t/shim/worker.h"

#define ALL 0xffffffffu
#define ROWS 16
#define COLUMNS 8
#define MAX_K 32


static void
check_full(const shim_slots_t *slots)
{
    if (slots->lanes != ALL) {
        shim_kernel_fault("a collective of the whole warp in one of %d lanes",
                          __builtin_popcount(slots->lanes));
    }
}


/* --- sums --- */

static float
larger(float a, float b)
{
    /* as fmaxf: a NaN loses */
    return a > b || b != b ? a : b;
}


static float *
float_in(shim_slots_t *slots, int lane)
{
    return (float *) slots->in[lane];
}


static float *
float_out(shim_slots_t *slots, int lane)
{
    return (float *) slots->out[lane];
}


static void
sum_all(shim_slots_t *slots)
{
    float v[SHIM_LANES];

    check_full(slots);

    for (int i = 0; i < SHIM_LANES; i++) {
        v[i] = *float_in(slots, i);
    }

    for (int half = SHIM_LANES / 2; half != 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            v[i] += v[i + half];
        }
    }

    for (int i = 0; i < SHIM_LANES; i++) {
        *float_out(slots, i) = v[0];
    }
}


static void
max_all(shim_slots_t *slots)
{
    float best = *float_in(slots, 0);

    check_full(slots);

    for (int i = 1; i < SHIM_LANES; i++) {
        best = larger(best, *float_in(slots, i));
    }

    for (int i = 0; i < SHIM_LANES; i++) {
        *float_out(slots, i) = best;
    }
}


static void
sum_int_all(shim_slots_t *slots)
{
    uint32_t sum = 0;

    check_full(slots);

    for (int i = 0; i < SHIM_LANES; i++) {
        sum += *(const shim_word_t *) slots->in[i];
    }

    for (int i = 0; i < SHIM_LANES; i++) {
        *(shim_word_t *) slots->out[i] = sum;
    }
}


/* Eight values at a time. */
static void
sum_halves(shim_slots_t *slots)
{
    check_full(slots);

    for (int first = 0; first < SHIM_LANES; first += 16) {
        float v[16][8];

        for (int i = 0; i < 16; i++) {
            shim_move(v[i], float_in(slots, first + i), sizeof(v[i]));
        }

        for (int half = 8; half != 0; half /= 2) {
            for (int i = 0; i < half; i++) {
                for (int k = 0; k < 8; k++) {
                    v[i][k] += v[i + half][k];
                }
            }
        }

        for (int i = 0; i < 16; i++) {
            shim_move(float_out(slots, first + i), v[0], sizeof(v[0]));
        }
    }
}


static void
sum_quads(shim_slots_t *slots)
{
    check_full(slots);

    for (int i = 0; i < SHIM_LANES; i += 4) {
        const float low = *float_in(slots, i) + *float_in(slots, i + 1);
        const float high = *float_in(slots, i + 2) + *float_in(slots, i + 3);

        for (int j = i; j < i + 4; j++) {
            *float_out(slots, j) = low + high;
        }
    }
}


static void
max_quads(shim_slots_t *slots)
{
    check_full(slots);

    for (int i = 0; i < SHIM_LANES; i += 4) {
        float best = *float_in(slots, i);

        for (int j = i + 1; j < i + 4; j++) {
            best = larger(best, *float_in(slots, j));
        }

        for (int j = i; j < i + 4; j++) {
            *float_out(slots, j) = best;
        }
    }
}


static float
reduce(void (*compute)(shim_slots_t *), float value, shim_site_t site)
{
    const shim_collective_t collective = { sizeof(float), sizeof(float),
                                           compute };
    float result = 0;

    shim_collective(ALL, &collective, &value, &result, site);

    return result;
}


float
shim_warp_sum(float value, shim_site_t site)
{
    return reduce(sum_all, value, site);
}


float
shim_warp_max(float value, shim_site_t site)
{
    return reduce(max_all, value, site);
}


float
shim_quad_sum(float value, shim_site_t site)
{
    return reduce(sum_quads, value, site);
}


float
shim_quad_max(float value, shim_site_t site)
{
    return reduce(max_quads, value, site);
}


void
shim_half_sums(float *values, int n, shim_site_t site)
{
    static const shim_collective_t collective
        = { 8 * sizeof(float), 8 * sizeof(float), sum_halves };
    float in[8] = {}, out[8];

    shim_move(in, values, (size_t) n * sizeof(float));
    shim_collective(ALL, &collective, in, out, site);
    shim_move(values, out, (size_t) n * sizeof(float));
}


int
shim_warp_sum_int(int value, shim_site_t site)
{
    static const shim_collective_t collective = { sizeof(int), sizeof(int),
                                                  sum_int_all };
    int result = 0;

    shim_collective(ALL, &collective, &value, &result, site);

    return result;
}


/* --- ldmatrix --- */

static const void *
row_of(const shim_slots_t *slots, int lane)
{
    const void *row;

    shim_move(&row, slots->in[lane], sizeof(row));

    if ((uintptr_t) row % 16 != 0) {
        shim_kernel_fault("ldmatrix: row %p of lane %d is not aligned to 16",
                          row, lane);
    }

    return row;
}


static void
deal_rows(shim_slots_t *slots)
{
    check_full(slots);

    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const void *rows[4];

        for (int i = 0; i < 4; i++) {
            rows[i] = row_of(slots, i * 8 + lane / 4);
        }

        shim_move(slots->out[lane], rows, sizeof(rows));
    }
}


static void
deal_rows_transposed(shim_slots_t *slots)
{
    check_full(slots);

    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const void *rows[8];

        for (int i = 0; i < 8; i++) {
            rows[i] = row_of(slots, i / 2 * 8 + lane % 4 * 2 + i % 2);
        }

        shim_move(slots->out[lane], rows, sizeof(rows));
    }
}


void
shim_matrix_rows(const void *row, const void *rows[4], shim_site_t site)
{
    static const shim_collective_t collective
        = { sizeof(row), 4 * sizeof(row), deal_rows };

    shim_collective(ALL, &collective, &row, rows, site);
}


void
shim_matrix_rows_transposed(const void *row, const void *rows[8],
                            shim_site_t site)
{
    static const shim_collective_t collective
        = { sizeof(row), 8 * sizeof(row), deal_rows_transposed };

    shim_collective(ALL, &collective, &row, rows, site);
}


/* --- mma --- */

/* What a lane brings: numbers of a and b as they are, and of d.  Numbers of a
 * are in words 0 and 1 of rows lane / 4 and 8 below, then in 2 and 3. */
typedef struct {
    uint32_t a[4], b[2], d[4];
} fragments_t;

/* the widest: of bytes */
typedef struct {
    float a[ROWS][MAX_K], b[MAX_K][COLUMNS];
} operands_t;


/* Exact for bytes, too: a sum of 32 products of them is below 2^24. */
static void
multiply(const operands_t *operands, int n_k, float sum[ROWS][COLUMNS])
{
    for (int row = 0; row < ROWS; row++) {
        float line[COLUMNS] = {};

        for (int k = 0; k < n_k; k++) {
            for (int column = 0; column < COLUMNS; column++) {
                line[column] += operands->a[row][k] * operands->b[k][column];
            }
        }

        for (int column = 0; column < COLUMNS; column++) {
            sum[row][column] = line[column];
        }
    }
}


/* n: numbers in a word */
template <typename convert_t>
static inline void
gather(const shim_slots_t *slots, int n, convert_t convert,
       operands_t *operands)
{
    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const fragments_t *in = (const fragments_t *) slots->in[lane];
        const int group = lane / 4, at = lane % 4 * n;

        for (int i = 0; i < n; i++) {
            for (int word = 0; word < 4; word++) {
                operands->a[group + word % 2 * 8][at + word / 2 * 4 * n + i]
                    = convert(in->a[word], i);
            }

            for (int word = 0; word < 2; word++) {
                operands->b[at + word * 4 * n + i][group]
                    = convert(in->b[word], i);
            }
        }
    }
}


static inline float
f16_of(uint32_t word, int i)
{
    return shim_f16_to_f32((uint16_t) (word >> 16 * i));
}


static inline float
bf16_of(uint32_t word, int i)
{
    return shim_bf16_to_f32((uint16_t) (word >> 16 * i));
}


static inline float
tf32_of(uint32_t word, int)
{
    float x;

    word &= 0xffffe000u;
    shim_move(&x, &word, sizeof(x));

    return x;
}


static inline float
byte_of(uint32_t word, int i)
{
    return (int8_t) (word >> 8 * i);
}


/* d += sum, for each lane's four elements */
static void
scatter(shim_slots_t *slots, const float sum[ROWS][COLUMNS])
{
    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const fragments_t *in = (const fragments_t *) slots->in[lane];

        for (int i = 0; i < 4; i++) {
            float d;

            shim_move(&d, &in->d[i], sizeof(d));
            d += sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
            shim_move(&slots->out[lane][4 * i], &d, sizeof(d));
        }
    }
}


static void
multiply_f16(shim_slots_t *slots)
{
    operands_t operands;
    float sum[ROWS][COLUMNS];

    check_full(slots);
    gather(slots, 2, f16_of, &operands);
    multiply(&operands, 16, sum);
    scatter(slots, sum);
}


static void
multiply_bf16(shim_slots_t *slots)
{
    operands_t operands;
    float sum[ROWS][COLUMNS];

    check_full(slots);
    gather(slots, 2, bf16_of, &operands);
    multiply(&operands, 16, sum);
    scatter(slots, sum);
}


static void
multiply_tf32(shim_slots_t *slots)
{
    operands_t operands;
    float sum[ROWS][COLUMNS];

    check_full(slots);
    gather(slots, 1, tf32_of, &operands);
    multiply(&operands, 8, sum);
    scatter(slots, sum);
}


static void
multiply_bytes(shim_slots_t *slots)
{
    operands_t operands;
    float sum[ROWS][COLUMNS];

    check_full(slots);
    gather(slots, 4, byte_of, &operands);
    multiply(&operands, 32, sum);

    for (int lane = 0; lane < SHIM_LANES; lane++) {
        const fragments_t *in = (const fragments_t *) slots->in[lane];

        for (int i = 0; i < 4; i++) {
            const int32_t x
                = (int32_t) sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];

            ((shim_word_t *) slots->out[lane])[i] = in->d[i] + (uint32_t) x;
        }
    }
}


static void
meet(void (*compute)(shim_slots_t *), void *d, const uint32_t a[4],
     const uint32_t b[2], shim_site_t site)
{
    const shim_collective_t collective
        = { sizeof(fragments_t), 4 * sizeof(uint32_t), compute };
    fragments_t in;

    shim_move(in.a, a, sizeof(in.a));
    shim_move(in.b, b, sizeof(in.b));
    shim_move(in.d, d, sizeof(in.d));
    shim_collective(ALL, &collective, &in, d, site);
}


void
shim_mma_16816(shim_half_t type, float d[4], const uint32_t a[4],
               const uint32_t b[2], shim_site_t site)
{
    meet(type == SHIM_F16 ? multiply_f16 : multiply_bf16, d, a, b, site);
}


void
shim_mma_tf32_1688(float d[4], const uint32_t a[4], const uint32_t b[2],
                   shim_site_t site)
{
    meet(multiply_tf32, d, a, b, site);
}


void
shim_mma_s8_16832(int32_t d[4], const uint32_t a[4], const uint32_t b[2],
                  shim_site_t site)
{
    meet(multiply_bytes, d, a, b, site);
}
