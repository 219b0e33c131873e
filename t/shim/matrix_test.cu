/*
 * Matrix instructions, asynchronous copies, number formats and bytes: what
 * prim*.cuh offer beside CUDA's own language.
 */

#include "t/shim/gemm.cuh"
#include "t/shim/test.h"

#define N_SEEDS 12


/* --- matrix instructions --- */

static void
products_f16(void **state)
{
    enum { M = 128, N = 64, K = 96 };
    static uint16_t a[M * K], b[N * K];
    static float c[M * N], first[M * N];
    uint32_t seed = 5;

    (void) state;

    for (int i = 0; i < M * K; i++) {
        a[i] = shim_f32_to_f16(test_number(&seed));
    }

    for (int i = 0; i < N * K; i++) {
        b[i] = shim_f32_to_f16(test_number(&seed));
    }

    uint16_t *da = (uint16_t *) on_device(a, sizeof(a));
    uint16_t *db = (uint16_t *) on_device(b, sizeof(b));
    float *dc = (float *) on_device(NULL, sizeof(c));

    for (int run = 0; run < N_SEEDS; run++) {
        shim_options()->seed = run;
        LAUNCH((gemm<false>), dim3(N / GEMM_TILE, M / GEMM_TILE), 128,
               GEMM_SHARED, NULL, dc, da, db, N, K);
        from_device(c, dc, sizeof(c));

        if (run == 0) {
            memcpy(first, c, sizeof(c));
        }

        assert_memory_equal(c, first, sizeof(c));
    }

    for (int i = 0; i < M * N; i++) {
        double want = 0;

        for (int k = 0; k < K; k++) {
            want += (double) shim_f16_to_f32(a[i / N * K + k])
                    * shim_f16_to_f32(b[i % N * K + k]);
        }

        assert_true(fabs(c[i] - want) < 1e-5);
    }

    OK(cudaFree(da));
    OK(cudaFree(db));
    OK(cudaFree(dc));
}


/* One tile of each, fragments by hand as the PTX ISA lays them out. */
static __global__ void
one_tile(float *c, int *ci, const uint16_t *a, const uint16_t *b,
         const int8_t *qa, const int8_t *qb)
{
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t fa[4], fb[2];
    float d[4] = { 1, 2, 3, 4 };
    int di[4] = { 1, 2, 3, 4 };

    for (int i = 0; i < 4; i++) {
        memcpy(&fa[i], a + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8, 4);
    }

    for (int i = 0; i < 2; i++) {
        memcpy(&fb[i], b + g * 16 + t * 2 + i * 8, 4);
    }

    mma_bf16_16816(d, fa, fb);

    for (int i = 0; i < 4; i++) {
        memcpy(&fa[i], qa + (g + i % 2 * 8) * 32 + t * 4 + i / 2 * 16, 4);
    }

    for (int i = 0; i < 2; i++) {
        memcpy(&fb[i], qb + g * 32 + t * 4 + i * 16, 4);
    }

    mma_s8_16832(di, fa, fb);

    for (int i = 0; i < 4; i++) {
        c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
        ci[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = di[i];
    }
}


static void
products_by_hand(void **state)
{
    uint16_t a[16 * 16], b[8 * 16];
    int8_t qa[16 * 32], qb[8 * 32];
    float c[16 * 8];
    int ci[16 * 8];

    (void) state;

    for (int i = 0; i < 16 * 16; i++) {
        a[i] = shim_f32_to_bf16(i % 13 - 6);
    }

    for (int i = 0; i < 8 * 16; i++) {
        b[i] = shim_f32_to_bf16(i % 11 - 5);
    }

    for (int i = 0; i < 16 * 32; i++) {
        qa[i] = i * 37;
    }

    for (int i = 0; i < 8 * 32; i++) {
        qb[i] = i * 91;
    }

    void *d[] = { on_device(NULL, sizeof(c)), on_device(NULL, sizeof(ci)),
                  on_device(a, sizeof(a)),    on_device(b, sizeof(b)),
                  on_device(qa, sizeof(qa)),  on_device(qb, sizeof(qb)) };

    LAUNCH(one_tile, 1, 32, 0, NULL, (float *) d[0], (int *) d[1],
           (uint16_t *) d[2], (uint16_t *) d[3], (int8_t *) d[4],
           (int8_t *) d[5]);
    from_device(c, d[0], sizeof(c));
    from_device(ci, d[1], sizeof(ci));

    for (int i = 0; i < 16 * 8; i++) {
        /* what d began with: by row half and by column */
        const int begin = 1 + i / 64 * 2 + i % 2;
        float want = begin;
        int want_int = begin;

        for (int k = 0; k < 16; k++) {
            want += ((i / 8 * 16 + k) % 13 - 6) * ((i % 8 * 16 + k) % 11 - 5);
        }

        for (int k = 0; k < 32; k++) {
            want_int += qa[i / 8 * 32 + k] * qb[i % 8 * 32 + k];
        }

        assert_true(c[i] == want);
        assert_int_equal(ci[i], want_int);
    }

    for (size_t i = 0; i < N_OF(d); i++) {
        OK(cudaFree(d[i]));
    }
}


/* TF32: one tile, and the low bits do not count. */
static __global__ void
one_tile_tf32(float *c, const uint32_t *a, const uint32_t *b)
{
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t fa[4], fb[2];
    float d[4] = { 1, 2, 3, 4 };

    for (int i = 0; i < 4; i++) {
        fa[i] = a[(g + i % 2 * 8) * 8 + t + i / 2 * 4];
    }

    for (int i = 0; i < 2; i++) {
        fb[i] = b[g * 8 + t + i * 4];
    }

    mma_tf32_1688(d, fa, fb);

    for (int i = 0; i < 4; i++) {
        c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
    }
}


static void
products_tf32(void **state)
{
    uint32_t a[16 * 8], b[8 * 8];
    float c[16 * 8];

    (void) state;

    for (int i = 0; i < 16 * 8; i++) {
        a[i] = shim_bits_of((float) (i % 13 - 6)) | 0x1fff;
    }

    for (int i = 0; i < 8 * 8; i++) {
        b[i] = shim_bits_of((float) (i % 11 - 5)) | 0x1000;
    }

    void *d[] = { on_device(NULL, sizeof(c)), on_device(a, sizeof(a)),
                  on_device(b, sizeof(b)) };

    LAUNCH(one_tile_tf32, 1, 32, 0, NULL, (float *) d[0], (uint32_t *) d[1],
           (uint32_t *) d[2]);
    from_device(c, d[0], sizeof(c));

    for (int i = 0; i < 16 * 8; i++) {
        float want = 1 + i / 64 * 2 + i % 2;

        for (int k = 0; k < 8; k++) {
            want += ((i / 8 * 8 + k) % 13 - 6) * ((i % 8 * 8 + k) % 11 - 5);
        }

        assert_true(c[i] == want);
    }

    for (size_t i = 0; i < N_OF(d); i++) {
        OK(cudaFree(d[i]));
    }
}


static __global__ void
transpose(uint16_t *out, const uint16_t *x)
{
    __shared__ __align__(16) uint16_t tile[32 * 8];
    const int lane = threadIdx.x;
    uint32_t r[4];

    store_v4(tile + lane * 8, load_v4(x + lane * 8));
    __syncwarp();
    ldmatrix_x4_trans(r, tile + lane * 8);

    for (int m = 0; m < 4; m++) {
        out[m * 64 + lane / 4 * 8 + lane % 4 * 2] = low_half(r[m]);
        out[m * 64 + lane / 4 * 8 + lane % 4 * 2 + 1] = high_half(r[m]);
    }
}


static void
transposed(void **state)
{
    uint16_t x[256], got[256];

    (void) state;

    for (int i = 0; i < 256; i++) {
        x[i] = i;
    }

    uint16_t *dx = (uint16_t *) on_device(x, sizeof(x));
    uint16_t *out = (uint16_t *) on_device(NULL, sizeof(x));

    LAUNCH(transpose, 1, 32, 0, NULL, out, dx);
    from_device(got, out, sizeof(got));

    for (int i = 0; i < 256; i++) {
        assert_int_equal(got[i], x[i / 64 * 64 + i % 8 * 8 + i / 8 % 8]);
    }

    OK(cudaFree(dx));
    OK(cudaFree(out));
}


/* --- copies with nothing behind the end; products of bytes --- */

static __global__ void
fetch_some(uint4 *out, const uint4 *x, int n)
{
    __shared__ uint4 got[32];
    const int i = threadIdx.x;

    cp_async16_if(&got[i], x + i, i < n);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[i] = got[i ^ 1];
}


static void
copies_with_zeros(void **state)
{
    enum { N = 11 };
    uint4 x[N], got[32];

    (void) state;
    memset(x, 0x5a, sizeof(x));

    uint4 *dx = (uint4 *) on_device(x, sizeof(x));
    uint4 *out = (uint4 *) on_device(NULL, sizeof(got));

    LAUNCH(fetch_some, 1, 32, 0, NULL, out, dx, N);
    from_device(got, out, sizeof(got));

    for (int i = 0; i < 32; i++) {
        assert_int_equal(got[i].x, (i ^ 1) < N ? 0x5a5a5a5a : 0);
        assert_int_equal(got[i].w, (i ^ 1) < N ? 0x5a5a5a5a : 0);
    }

    OK(cudaFree(dx));
    OK(cudaFree(out));
}


static void
bytes(void **state)
{
    (void) state;

    /* -1·2 + 127·-128 + -128·-128 + 3·4 */
    assert_int_equal(dp4a(0x03807fff, 0x04808002, 100),
                     100 - 2 - 16256 + 16384 + 12);
    assert_int_equal(dp4a_us(0x03807fff, 0x04808002, 100),
                     100 + 510 - 16256 - 16384 + 12);
    assert_int_equal(__float2int_rn(2.5f), 2);
    assert_int_equal(__float2int_rn(-3.5f), -4);
    assert_int_equal(__float2int_rn(1e20f), INT32_MAX);
    assert_int_equal(__float2int_rn(NAN), 0);
}


/* --- number formats, against what their definition says --- */

static double
value_of_f16(int bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 0 ? ldexp(fraction, -24)
                                      : ldexp(1024 + fraction, exponent - 25);

    return bits & 0x8000 ? -size : size;
}


static void
formats(void **state)
{
    (void) state;

    for (int bits = 0; bits < 0x7c00; bits++) {
        const double x = value_of_f16(bits), next = value_of_f16(bits + 1);
        const float middle = (float) ((x + next) / 2);

        assert_true(shim_f16_to_f32(bits) == x);
        assert_true(shim_f16_to_f32(bits | 0x8000) == -x);
        assert_int_equal(shim_f32_to_f16((float) x), bits);

        /* half way: to the even one; a little to either side: to that */
        assert_int_equal(shim_f32_to_f16(middle), bits + bits % 2);
        assert_int_equal(shim_f32_to_f16(-middle), 0x8000 | (bits + bits % 2));
        assert_int_equal(shim_f32_to_f16(nextafterf(middle, 0)), bits);
        assert_int_equal(shim_f32_to_f16(nextafterf(middle, 1e9f)), bits + 1);
    }

    assert_int_equal(shim_f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(shim_f32_to_f16(-1e9f), 0xfc00);
    assert_true(isinf(shim_f16_to_f32(0x7c00)));
    assert_true(isnan(shim_f16_to_f32(0x7c01)));
    assert_true(isnan(shim_f16_to_f32(shim_f32_to_f16(NAN))));

    assert_int_equal(shim_f32_to_bf16(1.0f), 0x3f80);
    assert_int_equal(shim_f32_to_bf16(1.00390625f), 0x3f80);
    assert_int_equal(shim_f32_to_bf16(1.01171875f), 0x3f82);
    assert_true(shim_bf16_to_f32(0xc040) == -3.0f);
    assert_true(isnan(shim_bf16_to_f32(shim_f32_to_bf16(NAN))));

    /* a half goes away from zero */
    assert_int_equal(f32_to_tf32(1.0f), 0x3f800000);
    assert_int_equal(f32_to_tf32(1.0f + 0x1p-11f), 0x3f802000);
    assert_int_equal(f32_to_tf32(-1.0f - 0x1p-11f), 0xbf802000);
    assert_int_equal(f32_to_tf32(1.0f + 0x1.fep-12f), 0x3f800000);
    assert_int_equal(f32_to_tf32(INFINITY), 0x7f800000);
    assert_true(isnan(shim_float_of(f32_to_tf32(NAN))));
}


/* Several workers give the same bits. */
static void
workers(void **state)
{
    shim_options()->workers = 3;
    products_f16(state);
    transposed(state);
    copies_with_zeros(state);
    shim_options()->workers = 1;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_f16),
        cmocka_unit_test(products_by_hand),
        cmocka_unit_test(products_tf32),
        cmocka_unit_test(transposed),
        cmocka_unit_test(copies_with_zeros),
        cmocka_unit_test(bytes),
        cmocka_unit_test(formats),
        cmocka_unit_test(workers),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
