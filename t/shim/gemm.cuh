/*
 * A matrix product as kernels write it: tiles copied asynchronously into two
 * buffers in turn, fragments by ldmatrix, mma.  For the tests of the emulation;
 * with BUG, the barrier that protects a buffer from its next use is missing.
 */

#ifndef T_SHIM_GEMM_CUH
#define T_SHIM_GEMM_CUH

#include "kernels/cuda/prim_mma.cuh"

enum {
    GEMM_TILE = 64,
    GEMM_K = 32,
    GEMM_STRIDE = 40, /* of a row in shared memory: no conflicts of banks */
    GEMM_SHARED = 2 * 2 * GEMM_TILE * GEMM_STRIDE * 2
};


static __device__ void
gemm_fetch(uint16_t *tile, const uint16_t *matrix, int first, int k, int n_k)
{
    for (int i = threadIdx.x; i < GEMM_TILE * GEMM_K / 8; i += blockDim.x) {
        const int row = i / (GEMM_K / 8), column = i % (GEMM_K / 8) * 8;

        cp_async16(tile + row * GEMM_STRIDE + column,
                   matrix + (size_t) (first + row) * n_k + k + column);
    }
}


/* c[m, n] f32 = a[m, k] · b[n, k]ᵀ, f16; 128 threads a tile of 64 × 64 */
template <bool BUG>
static __global__ void __launch_bounds__(128)
gemm(float *c, const uint16_t *a, const uint16_t *b, int n_columns, int n_k)
{
    DYN_SMEM(uint16_t, tiles);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 2 * 32, column = warp % 2 * 32;
    const int tile = GEMM_TILE * GEMM_STRIDE;
    float d[2][4][4] = {};

    gemm_fetch(tiles, a, blockIdx.y * GEMM_TILE, 0, n_k);
    gemm_fetch(tiles + 2 * tile, b, blockIdx.x * GEMM_TILE, 0, n_k);
    cp_async_commit();

    for (int k = 0; k < n_k; k += GEMM_K) {
        const int now = k / GEMM_K % 2;

        if (k + GEMM_K < n_k) {
            gemm_fetch(tiles + (now ^ 1) * tile, a, blockIdx.y * GEMM_TILE,
                       k + GEMM_K, n_k);
            gemm_fetch(tiles + (2 + (now ^ 1)) * tile, b,
                       blockIdx.x * GEMM_TILE, k + GEMM_K, n_k);
            cp_async_commit();
            cp_async_wait<1>();

        } else {
            cp_async_wait<0>();
        }

        __syncthreads();

        const uint16_t *ta = tiles + now * tile;
        const uint16_t *tb = tiles + (2 + now) * tile;

        for (int kk = 0; kk < GEMM_K; kk += 16) {
            uint32_t fa[2][4], fb[2][4];

            for (int i = 0; i < 2; i++) {
                ldmatrix_x4(fa[i], ta
                                       + (row + i * 16 + lane % 16)
                                             * GEMM_STRIDE
                                       + kk + lane / 16 * 8);
                ldmatrix_x4(fb[i], tb
                                       + (column + i * 16 + lane % 8
                                          + lane / 16 * 8)
                                             * GEMM_STRIDE
                                       + kk + lane / 8 % 2 * 8);
            }

            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 4; j++) {
                    mma_f16_16816(d[i][j], fa[i], &fb[j / 2][j % 2 * 2]);
                }
            }
        }

        if (!BUG) {
            __syncthreads();
        }
    }

    for (int i = 0; i < 2 * 4 * 4; i++) {
        const int r = blockIdx.y * GEMM_TILE + row + i / 16 * 16 + lane / 4
                      + i % 4 / 2 * 8;
        const int col = blockIdx.x * GEMM_TILE + column + i / 4 % 4 * 8
                        + lane % 4 * 2 + i % 2;

        c[(size_t) r * n_columns + col] = d[i / 16][i / 4 % 4][i % 4];
    }
}

#endif
