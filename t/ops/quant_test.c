/*
 * Stored formats: half precision, GGUF blocks, and the compute layouts made
 * from them.
 *
 * t/golden/gguf_blocks.txt holds blocks and values of another implementation;
 * the half conversions are checked against exact arithmetic in double.  Run
 * from the repository's root, or with the path of the golden file.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/op/quant.h"
#include "kernels/op/repack.h"

enum { MAX_LINE = 64 * 1024 };

static const char *golden = "t/golden/gguf_blocks.txt";

static const op_dtype_t dtypes[] = { OP_F32,  OP_F16,  OP_BF16, OP_Q4_0,
                                     OP_Q4_1, OP_Q5_0, OP_Q5_1, OP_Q8_0,
                                     OP_Q4_K, OP_Q5_K, OP_Q6_K };

enum { N_DTYPES = 11 };


/* Value of a half by its definition. */
static double
half_value(int h)
{
    int exponent = h >> 10 & 31;
    int fraction = h & 1023;
    double v = exponent == 0 ? ldexp(fraction, -24)
                             : ldexp(1024 + fraction, exponent - 25);

    return h & 0x8000 ? -v : v;
}


static void
half_to_float_is_exact(void **state)
{
    (void) state;

    for (int h = 0; h < 65536; h++) {
        float f = op_half_to_float((uint16_t) h);

        if ((h & 0x7c00) != 0x7c00) {
            assert_true((double) f == half_value(h));
            assert_int_equal(signbit(f) != 0, h >> 15);
        } else if ((h & 1023) == 0) {
            assert_true(isinf(f) && (signbit(f) != 0) == h >> 15);
        } else {
            assert_true(isnan(f));
        }

        if (!isnan(f)) {
            assert_int_equal(op_float_to_half(f), h);
        } else {
            assert_true(isnan(op_half_to_float(op_float_to_half(f))));
        }
    }
}


static void
float_to_half_rounds_to_even(void **state)
{
    (void) state;

    for (int h = 0; h < 0x7c00; h++) {
        double low = half_value(h);
        double high = h + 1 < 0x7c00 ? half_value(h + 1) : 65536.0;
        float middle = (float) ((low + high) / 2); /* exact */
        int even = h % 2 == 0 ? h : h + 1;

        assert_int_equal(op_float_to_half(middle), even);
        assert_int_equal(op_float_to_half(nextafterf(middle, 0.0f)), h);
        assert_int_equal(op_float_to_half(nextafterf(middle, 1e9f)), h + 1);
        assert_int_equal(op_float_to_half(-middle), even | 0x8000);
        assert_int_equal(op_float_to_half(-nextafterf(middle, 0.0f)),
                         h | 0x8000);
    }

    assert_int_equal(op_float_to_half(1e30f), 0x7c00);
    assert_int_equal(op_float_to_half(INFINITY), 0x7c00);
    assert_int_equal(op_float_to_half(-INFINITY), 0xfc00);
    assert_true(isnan(op_half_to_float(op_float_to_half(NAN))));
}


static void
sizes_and_names(void **state)
{
    (void) state;

    assert_string_equal(op_dtype_name(OP_Q4_1), "Q4_1");
    assert_string_equal(op_dtype_name(OP_Q6_K), "Q6_K");
    assert_null(op_dtype_name(10)); /* Q2_K */
    assert_null(op_dtype_name(-1));
    assert_int_equal(op_dtype_block(OP_F16), 1);
    assert_int_equal(op_dtype_block(OP_Q8_0), 32);
    assert_int_equal(op_dtype_block(OP_Q5_K), 256);
    assert_int_equal(op_dtype_block(99), 0);
    assert_int_equal(op_dtype_bytes(99), 0);
    assert_int_equal(op_row_bytes(OP_Q4_1, 576), 18 * 20);
    assert_int_equal(op_row_bytes(OP_Q6_K, 512), 420);
    assert_int_equal(op_row_bytes(OP_F32, 3), 12);
    assert_int_equal(op_row_bytes(77, 32), 0);
    assert_int_equal(op_layout_of((op_dtype_t) 10), -1);
}


static int
dtype_named(const char *name)
{
    for (int i = 0; i < N_DTYPES; i++) {
        if (strcmp(op_dtype_name((int) dtypes[i]), name) == 0) {
            return (int) dtypes[i];
        }
    }

    return -1;
}


static size_t
unhex(const char *text, uint8_t *out)
{
    size_t n = 0;
    unsigned byte;

    while (text[2 * n] != '\0' && sscanf(text + 2 * n, "%2x", &byte) == 1) {
        out[n++] = (uint8_t) byte;
    }

    return n;
}


static void
check_decode(int dtype, const uint8_t *blocks, size_t n_bytes,
             const float *values, size_t n)
{
    static float got[4096];

    assert_int_equal(op_row_bytes(dtype, (int64_t) n), n_bytes);
    op_dequant_row((op_dtype_t) dtype, blocks, got, (int64_t) n);
    assert_memory_equal(got, values, n * sizeof(float));
}


static void
check_encode(int dtype, const float *values, size_t n, const uint8_t *blocks,
             size_t n_bytes)
{
    static uint8_t got[16384];

    assert_int_equal(op_row_bytes(dtype, (int64_t) n), n_bytes);
    assert_int_equal(op_quant_row((op_dtype_t) dtype, values, got, (int64_t) n),
                     0);
    assert_memory_equal(got, blocks, n_bytes);
}


static void
agrees_with_golden_blocks(void **state)
{
    static char line[MAX_LINE], first[MAX_LINE], second[MAX_LINE];
    static uint8_t a[MAX_LINE];
    static uint8_t b[MAX_LINE];
    static float values[4096];
    char verb[16], name[16];
    FILE *f = fopen(golden, "r");
    int decoded = 0;
    int encoded = 0;

    (void) state;
    assert_non_null(f);

    while (fgets(line, sizeof(line), f) != NULL) {
        size_t n_a, n_b;
        int dtype;

        if (line[0] == '#') {
            continue;
        }

        assert_int_equal(
            sscanf(line, "%15s %15s %s %s", verb, name, first, second), 4);
        dtype = dtype_named(name);
        assert_true(dtype >= 0);
        n_a = unhex(first, a);
        n_b = unhex(second, b);

        if (strcmp(verb, "decode") == 0) {
            memcpy(values, b, n_b);
            check_decode(dtype, a, n_a, values, n_b / sizeof(float));
            decoded++;
        } else {
            memcpy(values, a, n_a);
            check_encode(dtype, values, n_a / sizeof(float), b, n_b);
            encoded++;
        }
    }

    fclose(f);
    assert_int_equal(decoded, 10);
    assert_int_equal(encoded, 7);
}


static void
tiny_and_zero_values_encode_to_zero(void **state)
{
    static const op_dtype_t kinds[] = { OP_Q4_0, OP_Q4_1, OP_Q5_0, OP_Q5_1,
                                        OP_Q8_0 };
    float x[32], back[32];
    uint8_t row[64];

    (void) state;

    for (int k = 0; k < 5; k++) {
        for (int i = 0; i < 32; i++) {
            x[i] = i % 2 == 0 ? 0x1p-149f : -0x1p-140f;
        }

        assert_int_equal(op_quant_row(kinds[k], x, row, 32), 0);
        op_dequant_row(kinds[k], row, back, 32);

        for (int i = 0; i < 32; i++) {
            assert_true(back[i] == 0.0f);
        }
    }

    assert_int_equal(op_quant_row(OP_Q4_K, x, row, 32), -1);
}


/* A layout, read by its description in repack.h, against the block. */
static void
check_record(op_layout_t layout, const uint8_t *record, int lane,
             const op_block_t *b, int from)
{
    const op_record_t *rec = op_layout_record(layout);

    for (int k = 0; k < 32; k++) {
        int q;

        if (rec->bits == 8) {
            q = (int8_t) record[k / 4 * 64 + lane * 4 + k % 4];
        } else {
            q = record[k % 16 / 4 * 64 + lane * 4 + k % 4];
            q = (k < 16 ? q % 16 : q / 16) - rec->zero;
        }

        assert_int_equal(q, b->q[from + k]);
    }
}


static void
repacked_rows_come_back_exactly(void **state)
{
    enum { N = 768 };
    static uint8_t rows[OP_LANES][4 * N];
    static float want[N], got[N];
    unsigned s = 12345;

    (void) state;

    for (int i = 0; i < N_DTYPES; i++) {
        op_dtype_t dtype = dtypes[i];
        op_layout_t layout = (op_layout_t) op_layout_of(dtype);
        const op_record_t *rec = op_layout_record(layout);
        size_t bytes = op_layout_group_bytes(layout, N);
        uint8_t *group = calloc(1, bytes);

        assert_non_null(group);

        for (int lane = 0; lane < OP_LANES; lane++) {
            for (int k = 0; k < 4 * N; k++) {
                s = s * 1103515245u + 12345u;
                rows[lane][k] = (uint8_t) (s >> 16);

                /* no infinities and NaN, in any type */
                if (rec->bits == 0 && k % 2 == 1) {
                    rows[lane][k] &= 0xb7;
                }
            }

            op_repack_row(dtype, rows[lane], N, group, lane);
        }

        for (int lane = 0; lane < OP_LANES; lane++) {
            op_block_t b;

            op_dequant_row(dtype, rows[lane], want, N);
            op_unpack_row(layout, group, lane, got, N);

            for (int k = 0; k < N; k++) {
                assert_true(got[k] == want[k]
                            || (isnan(got[k]) && isnan(want[k])));
            }

            if (rec->bits != 0) {
                op_block_unpack(dtype, rows[lane], &b);
                check_record(layout, group, lane, &b, 0);
            }
        }

        free(group);
    }
}


int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_to_float_is_exact),
        cmocka_unit_test(float_to_half_rounds_to_even),
        cmocka_unit_test(sizes_and_names),
        cmocka_unit_test(agrees_with_golden_blocks),
        cmocka_unit_test(tiny_and_zero_values_encode_to_zero),
        cmocka_unit_test(repacked_rows_come_back_exactly),
    };

    if (argc > 1) {
        golden = argv[1];
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
