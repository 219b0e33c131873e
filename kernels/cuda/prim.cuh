/*
 * With prim_mma.cuh the only place for what is special to a device: the order
 * of blocks, vector loads, warp reductions, number formats.  Each has a twin
 * for the emulation (LLM_CUDA_EMU), so that kernels are written once and run on
 * any CPU.
 */

#ifndef KERNELS_CUDA_PRIM_CUH
#define KERNELS_CUDA_PRIM_CUH

#ifdef LLM_CUDA_EMU

#include "t/shim/cuda_shim.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* kernel may be in parentheses; arguments are converted as in a call */
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

/* the dynamic shared memory of the block, aligned to 16 */
#define DYN_SMEM(type, name)                                               \
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[]; \
    type *name = (type *) dynamic_shared_memory

#endif

#define FULL_MASK 0xffffffffu

/* Of shared memory a block has 64 KiB on Turing and more on all later ones: a
 * kernel asks for at most SHARED_LEAST at its launch, and what it declares
 * beside that is only there with SHARED_MORE. */
enum { SHARED_LEAST = 65536 };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define SHARED_MORE false
#else
#define SHARED_MORE true
#endif


#ifdef LLM_CUDA_EMU

/* --- blocks --- */

/* Of n blocks that call this, all threads of each, the last one gets true, and
 * sees what the others had written.  *count is 0 before and afterwards. */
static inline bool
last_block(unsigned *count, unsigned n)
{
    int last = 0;

    __syncthreads();

    if (threadIdx.x == 0) {
        last = __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL) == n - 1;

        if (last) {
            *count = 0;
        }
    }

    return __syncthreads_or(last);
}


/* --- loads and stores of 16 bytes; the address is a multiple of 16 --- */

static inline void
prim_check_aligned(const void *ptr, const char *file, int line)
{
    if ((uintptr_t) ptr % 16 != 0) {
        shim_kernel_fault("%s:%d: %p is not aligned to 16", file, line, ptr);
    }
}


static inline uint4
load_v4(const void *ptr, SHIM_FROM)
{
    prim_check_aligned(ptr, file, line);

    return *(const uint4 *) ptr;
}


static inline uint4
load_v4_once(const void *ptr, SHIM_FROM)
{
    prim_check_aligned(ptr, file, line);

    return *(const uint4 *) ptr;
}


static inline void
store_v4(void *ptr, uint4 value, SHIM_FROM)
{
    prim_check_aligned(ptr, file, line);
    *(uint4 *) ptr = value;
}


/* --- integer dot products --- */

static inline int
dp4a(int a, int b, int c)
{
    return __dp4a(a, b, c);
}


static inline int
dp4a_us(unsigned a, int b, int c)
{
    for (int i = 0; i < 32; i += 8) {
        c += (int) (uint8_t) (a >> i) * (int) (int8_t) (b >> i);
    }

    return c;
}


/* --- warp reductions --- */

static inline float
warp_sum(float value, SHIM_FROM)
{
    return shim_warp_sum(value, SHIM_SITE("warp_sum"));
}


static inline float
warp_max(float value, SHIM_FROM)
{
    return shim_warp_max(value, SHIM_SITE("warp_max"));
}


static inline int
warp_sum_int(int value, SHIM_FROM)
{
    return shim_warp_sum_int(value, SHIM_SITE("warp_sum_int"));
}


static inline float
quad_sum(float value, SHIM_FROM)
{
    return shim_quad_sum(value, SHIM_SITE("quad_sum"));
}


static inline float
quad_max(float value, SHIM_FROM)
{
    return shim_quad_max(value, SHIM_SITE("quad_max"));
}


template <int N>
static inline void
half_sums(float *values, SHIM_FROM)
{
    static_assert(N <= 8, "values of one meeting");
    shim_half_sums(values, N, SHIM_SITE("half_sums"));
}


/* --- number formats --- */

static inline float
f16_to_f32(uint16_t bits)
{
    return shim_f16_to_f32(bits);
}


static inline uint16_t
f32_to_f16(float x)
{
    return shim_f32_to_f16(x);
}


static inline float
bf16_to_f32(uint16_t bits)
{
    return shim_bf16_to_f32(bits);
}


static inline uint16_t
f32_to_bf16(float x)
{
    return shim_f32_to_bf16(x);
}

#else

/* --- blocks --- */

static __device__ __forceinline__ bool
last_block(unsigned *count, unsigned n)
{
    int last = 0;

    __threadfence();
    __syncthreads();

    if (threadIdx.x == 0) {
        last = atomicAdd(count, 1) == n - 1;

        if (last) {
            *count = 0;
        }
    }

    last = __syncthreads_or(last);
    __threadfence();

    return last;
}


/* --- loads and stores of 16 bytes; the address is a multiple of 16 --- */

/* What nobody writes while the kernel runs. */
static __device__ __forceinline__ uint4
load_v4(const void *ptr)
{
    return __ldg((const uint4 *) ptr);
}


/* The same for what is read once, as weights are: leaves L1 alone. */
static __device__ __forceinline__ uint4
load_v4_once(const void *ptr)
{
    uint4 v;

    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(ptr));

    return v;
}


static __device__ __forceinline__ void
store_v4(void *ptr, uint4 value)
{
    *(uint4 *) ptr = value;
}


/* --- integer dot products --- */

/* c + the sum of four products of signed bytes */
static __device__ __forceinline__ int
dp4a(int a, int b, int c)
{
    return __dp4a(a, b, c);
}


/* the same; the bytes of a are unsigned */
static __device__ __forceinline__ int
dp4a_us(unsigned a, int b, int c)
{
    int d;

    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));

    return d;
}


/* --- warp reductions: all 32 lanes, all get the same result --- */

static __device__ __forceinline__ float
warp_sum(float value)
{
#pragma unroll
    for (int i = 16; i != 0; i /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, i);
    }

    return value;
}


static __device__ __forceinline__ float
warp_max(float value)
{
#pragma unroll
    for (int i = 16; i != 0; i /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, i));
    }

    return value;
}


static __device__ __forceinline__ int
warp_sum_int(int value)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_MASK, value);
#else
#pragma unroll
    for (int i = 16; i != 0; i /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, i);
    }

    return value;
#endif
}


/* of lanes 4i to 4i + 3: a row of an mma's result */
static __device__ __forceinline__ float
quad_sum(float value)
{
    value += __shfl_xor_sync(FULL_MASK, value, 1);
    value += __shfl_xor_sync(FULL_MASK, value, 2);

    return value;
}


static __device__ __forceinline__ float
quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 1));
    value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 2));

    return value;
}


/* N values, each over lanes 0 to 15, and 16 to 31: lane i and i + 8, then + 4,
 * + 2, + 1 */
template <int N>
static __device__ __forceinline__ void
half_sums(float *values)
{
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int i = 8; i != 0; i /= 2) {
            values[k] += __shfl_xor_sync(FULL_MASK, values[k], i);
        }
    }
}


/* --- number formats, rounded to nearest even --- */

static __device__ __forceinline__ float
f16_to_f32(uint16_t bits)
{
    return __half2float(__ushort_as_half(bits));
}


static __device__ __forceinline__ uint16_t
f32_to_f16(float x)
{
    return __half_as_ushort(__float2half_rn(x));
}


static __device__ __forceinline__ float
bf16_to_f32(uint16_t bits)
{
    return __uint_as_float((unsigned) bits << 16);
}


static __device__ __forceinline__ uint16_t
f32_to_bf16(float x)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

#endif


/* two 16-bit numbers in a word, the first in the low half */
static __device__ __forceinline__ uint32_t
pack_halves(uint16_t low, uint16_t high)
{
    return low | (uint32_t) high << 16;
}


static __device__ __forceinline__ uint16_t
low_half(uint32_t word)
{
    return (uint16_t) word;
}


static __device__ __forceinline__ uint16_t
high_half(uint32_t word)
{
    return (uint16_t) (word >> 16);
}


/* --- what threads of a block do to the same word: integers only, for their
 * sums are the same in any order --- */

/* What was there before. */
static __device__ __forceinline__ unsigned
add_count(unsigned *at, unsigned n)
{
    return atomicAdd(at, n);
}


static __device__ __forceinline__ void
add_units(unsigned long long *at, unsigned long long n)
{
    atomicAdd(at, n);
}


/* Several may store the same. */
static __device__ __forceinline__ void
store_same(float *at, float value)
{
    atomicExch((unsigned *) at, __float_as_uint(value));
}

#endif
