/*
 * Tensor cores and what feeds them: asynchronous copies to shared memory,
 * loads of fragments, matrix instructions; each with a twin for the emulation,
 * as in prim.cuh.  Before sm_80 copies are plain, bf16 has no tensor cores, and
 * TF32 has no instruction at all.
 *
 * Fragments are laid out as in the PTX ISA, "Matrix Fragments for mma.m16n8k16"
 * and "mma.m16n8k32".
 */

#ifndef KERNELS_CUDA_PRIM_MMA_CUH
#define KERNELS_CUDA_PRIM_MMA_CUH

#include "kernels/cuda/prim.cuh"

#ifdef LLM_CUDA_EMU

/* --- asynchronous copies --- */

static inline void
cp_async16(void *dst, const void *src, SHIM_FROM)
{
    shim_copy_async(dst, src, 16, SHIM_SITE("cp.async"));
}


static inline void
cp_async16_if(void *dst, const void *src, bool valid, SHIM_FROM)
{
    shim_copy_async(dst, src, valid ? 16 : 0, SHIM_SITE("cp.async"));
}


static inline void
cp_async_commit(void)
{
    shim_copy_commit();
}


template <int N>
static inline void
cp_async_wait(void)
{
    shim_copy_wait(N);
}


/* --- matrix instructions --- */

/* In a function of its own: the read is the kernel's, and sanitizers look. */
static inline uint32_t
prim_read(const void *row, int byte)
{
    return *(const uint32_t *) ((const char *) row + byte);
}


static inline uint32_t
prim_read_half(const void *row, int byte)
{
    return *(const uint16_t *) ((const char *) row + byte);
}


static inline void
ldmatrix_x4(uint32_t r[4], const void *row, SHIM_FROM)
{
    const void *rows[4];

    shim_matrix_rows(row, rows, SHIM_SITE("ldmatrix"));

    for (int i = 0; i < 4; i++) {
        r[i] = prim_read(rows[i], shim_lane() % 4 * 4);
    }
}


static inline void
ldmatrix_x4_trans(uint32_t r[4], const void *row, SHIM_FROM)
{
    const void *rows[8];
    const int at = shim_lane() / 4 * 2;

    shim_matrix_rows_transposed(row, rows, SHIM_SITE("ldmatrix.trans"));

    for (int i = 0; i < 4; i++) {
        r[i] = prim_read_half(rows[2 * i], at)
               | prim_read_half(rows[2 * i + 1], at) << 16;
    }
}


static inline void
mma_f16_16816(float d[4], const uint32_t a[4], const uint32_t b[2], SHIM_FROM)
{
    shim_mma_16816(SHIM_F16, d, a, b, SHIM_SITE("mma.f16"));
}


static inline void
mma_bf16_16816(float d[4], const uint32_t a[4], const uint32_t b[2], SHIM_FROM)
{
    shim_mma_16816(SHIM_BF16, d, a, b, SHIM_SITE("mma.bf16"));
}


static inline void
mma_s8_16832(int32_t d[4], const uint32_t a[4], const uint32_t b[2], SHIM_FROM)
{
    shim_mma_s8_16832(d, a, b, SHIM_SITE("mma.s8"));
}


static inline void
mma_tf32_1688(float d[4], const uint32_t a[4], const uint32_t b[2], SHIM_FROM)
{
    shim_mma_tf32_1688(d, a, b, SHIM_SITE("mma.tf32"));
}


static inline uint32_t
f32_to_tf32(float x)
{
    return shim_f32_to_tf32(x);
}

#else

/* --- asynchronous copies --- */

static __device__ __forceinline__ unsigned
prim_shared(const void *ptr)
{
    return (unsigned) __cvta_generic_to_shared(ptr);
}


/* 16 bytes from global to shared memory; both addresses are multiples of 16.
 * There after cp_async_wait, for other threads after a barrier behind it. */
static __device__ __forceinline__ void
cp_async16(void *dst, const void *src)
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(prim_shared(dst)),
        "l"(src)
        : "memory");
#else
    *(uint4 *) dst = *(const uint4 *) src;
#endif
}


/* The same, or zeros if not valid; src is not read then. */
static __device__ __forceinline__ void
cp_async16_if(void *dst, const void *src, bool valid)
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(prim_shared(dst)),
        "l"(src), "r"(valid ? 16 : 0)
        : "memory");
#else
    *(uint4 *) dst = valid ? *(const uint4 *) src : make_uint4(0, 0, 0, 0);
#endif
}


static __device__ __forceinline__ void
cp_async_commit(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}


/* until at most N of this thread's groups are on their way */
template <int N>
static __device__ __forceinline__ void
cp_async_wait(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}


/* --- matrix instructions: all 32 lanes --- */

/* Four 8x8 matrices of 16-bit numbers from shared memory; lane i points to row
 * i % 8 of matrix i / 8.  r[m]: of matrix m, row lane / 4, columns
 * lane % 4 * 2 and the next. */
static __device__ __forceinline__ void
ldmatrix_x4(uint32_t r[4], const void *row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(prim_shared(row))
        : "memory");
}


/* the same of the transposed matrices */
static __device__ __forceinline__ void
ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(prim_shared(row))
        : "memory");
}


/* d[16, 8] += a[16, 16] · b[16, 8] in f32.  With g = lane / 4, t = lane % 4:
 * a[0]: row g, k 2t and 2t + 1; a[1]: row g + 8; a[2], a[3]: k + 8;
 * b[0]: k 2t and 2t + 1, column g; b[1]: k + 8;
 * d[0], d[1]: row g, columns 2t and 2t + 1; d[2], d[3]: row g + 8. */
static __device__ __forceinline__ void
mma_f16_16816(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
    }
#endif
}


#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800

/* The product of mma_bf16_16816() without tensor cores: lane 4 g + t has row g
 * of a and column g of b at k 2t, 2t + 1, and 8 more. */
static __device__ __noinline__ float4
prim_mma_bf16(float4 d, uint4 a, uint2 b)
{
    const int lane = (int) threadIdx.x % 32;

    for (int k = 0; k < 16; k++) {
        const int from = k % 8 / 2, shift = k % 2 * 16;
        const uint32_t low = k < 8 ? a.x : a.z, high = k < 8 ? a.y : a.w;
        const uint32_t column = k < 8 ? b.x : b.y;
        const int at = lane % 4 * 8 + from;

        const float x = __uint_as_float(
            __shfl_sync(FULL_MASK, low, (lane & 28) + from) >> shift << 16);
        const float y = __uint_as_float(
            __shfl_sync(FULL_MASK, high, (lane & 28) + from) >> shift << 16);
        const float u =
            __uint_as_float(__shfl_sync(FULL_MASK, column, at) >> shift << 16);
        const float v = __uint_as_float(__shfl_sync(FULL_MASK, column, at + 4)
                                        >> shift << 16);

        d.x = fmaf(x, u, d.x);
        d.y = fmaf(x, v, d.y);
        d.z = fmaf(y, u, d.z);
        d.w = fmaf(y, v, d.w);
    }
    return d;
}

#endif


static __device__ __forceinline__ void
mma_bf16_16816(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    /* no such instruction */
    const float4 sum = prim_mma_bf16(make_float4(d[0], d[1], d[2], d[3]),
                                     make_uint4(a[0], a[1], a[2], a[3]),
                                     make_uint2(b[0], b[1]));

    d[0] = sum.x;
    d[1] = sum.y;
    d[2] = sum.z;
    d[3] = sum.w;
#endif
}


/* d[16, 8] += a[16, 8] · b[8, 8] of TF32 numbers (f32 whose low 13 bits are 0).
 * With g and t as above: a[0]: row g, k t; a[1]: row g + 8; a[2], a[3]: k + 4;
 * b[0]: k t, column g; b[1]: k + 4; d as above.  From sm_80 on. */
static __device__ __forceinline__ void
mma_tf32_1688(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    (void) d;
    (void) a;
    (void) b;
    __trap(); /* no such instruction, and nobody asks for it */
#endif
}


/* d[16, 8] += a[16, 32] · b[32, 8] of signed bytes.  With g and t as above:
 * a[0]: row g, k 4t to 4t + 3; a[1]: row g + 8; a[2], a[3]: k + 16;
 * b[0]: k 4t to 4t + 3, column g; b[1]: k + 16; d as above. */
static __device__ __forceinline__ void
mma_s8_16832(int32_t d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        /* rows below 8 and above, k below 16 and above */
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 "
                     "{%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
                     : "r"(a[i]), "r"(b[i / 2]));
    }
#endif
}


/* rounded to nearest, away from zero where two are as near */
static __device__ __forceinline__ uint32_t
f32_to_tf32(float x)
{
#if __CUDA_ARCH__ >= 800
    uint32_t bits;

    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));

    return bits;
#else
    return __float_as_uint(x);
#endif
}

#endif

#endif
