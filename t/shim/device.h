/*
 * The device side of CUDA as the emulation offers it: qualifiers, indices,
 * vector types, warp intrinsics, atomics.  Included through cuda_shim.h.
 */

#ifndef T_SHIM_DEVICE_H
#define T_SHIM_DEVICE_H

#include "t/shim/exec.h"
#include "t/shim/fiber.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* --- qualifiers --- */

#define __global__ __attribute__((unused))
#define __device__ __attribute__((unused))
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

/* ASan puts red zones around plain variables only; there is one worker then,
 * while otherwise each has its own. */
#ifdef SHIM_ASAN
#define __shared__ static
#else
#define __shared__ static __thread
#endif

#define threadIdx (shim_worker->self->index)
#define blockIdx (shim_worker->block_index)
#define blockDim (shim_worker->block_dim)
#define gridDim (shim_worker->grid_dim)

static const int warpSize __attribute__((unused)) = 32;

/* the caller's line, as a default argument */
#define SHIM_FROM                                                              \
    const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SHIM_SITE(what) { what, file, line }

/* --- types --- */

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
        : x(x_), y(y_), z(z_)
    {
    }
};

#define SHIM_VECTORS(type, base)                                               \
    struct alignas(2 * sizeof(base)) type##2 {                                 \
        base x, y;                                                             \
    };                                                                         \
    struct type##3 {                                                           \
        base x, y, z;                                                          \
    };                                                                         \
    struct alignas(4 * sizeof(base)) type##4 {                                 \
        base x, y, z, w;                                                       \
    };                                                                         \
    static inline type##2 make_##type##2(base x, base y)                       \
    {                                                                          \
        return { x, y };                                                       \
    }                                                                          \
    static inline type##4 make_##type##4(base x, base y, base z, base w)       \
    {                                                                          \
        return { x, y, z, w };                                                 \
    }

SHIM_VECTORS(float, float)
SHIM_VECTORS(int, int)
SHIM_VECTORS(char, signed char)
SHIM_VECTORS(uchar, unsigned char)
SHIM_VECTORS(short, short)
SHIM_VECTORS(ushort, unsigned short)

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};


static inline uint2
make_uint2(unsigned x, unsigned y)
{
    return { x, y };
}


static inline uint4
make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return { x, y, z, w };
}


/* --- barriers and collectives --- */

#define __syncthreads() shim_barrier({ "__syncthreads", __FILE__, __LINE__ })
#define __syncthreads_count(p)                                                 \
    shim_barrier_count((p), { "__syncthreads_count", __FILE__, __LINE__ })
#define __syncthreads_or(p) (__syncthreads_count(p) != 0)
#define __syncthreads_and(p) (__syncthreads_count(!(p)) == 0)


static inline void
__syncwarp(unsigned mask = 0xffffffffu, SHIM_FROM)
{
    shim_warp_barrier(mask, SHIM_SITE("__syncwarp"));
}


static inline int
shim_lane(void)
{
    return shim_worker->self->id % SHIM_LANES;
}


template <typename T>
static inline T
__shfl_sync(unsigned mask, T value, int src, int width = 32, SHIM_FROM)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
    T got;
    const int lane = (shim_lane() & -width) | (src & (width - 1));

    shim_shuffle(mask, &value, &got, sizeof(T), lane,
                 SHIM_SITE("__shfl_sync"));

    return got;
}


template <typename T>
static inline T
__shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SHIM_FROM)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
    T got;
    const int self = shim_lane();
    int lane = self ^ bits;

    /* lanes of later groups of width keep their own */
    lane = (lane & -width) > (self & -width) ? self : lane;
    shim_shuffle(mask, &value, &got, sizeof(T), lane,
                 SHIM_SITE("__shfl_xor_sync"));

    return got;
}


template <typename T>
static inline T
__shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 SHIM_FROM)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
    T got;
    const int self = shim_lane();
    const int end = (self & -width) + width;
    const int lane = self + (int) delta < end ? self + (int) delta : self;

    shim_shuffle(mask, &value, &got, sizeof(T), lane,
                 SHIM_SITE("__shfl_down_sync"));

    return got;
}


template <typename T>
static inline T
__shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
               SHIM_FROM)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
    T got;
    const int self = shim_lane();
    const int first = self & -width;
    const int lane = self - (int) delta >= first ? self - (int) delta : self;

    shim_shuffle(mask, &value, &got, sizeof(T), lane,
                 SHIM_SITE("__shfl_up_sync"));

    return got;
}


static inline unsigned
__ballot_sync(unsigned mask, int predicate, SHIM_FROM)
{
    return shim_ballot(mask, predicate, SHIM_SITE("__ballot_sync"));
}


static inline int
__any_sync(unsigned mask, int predicate, SHIM_FROM)
{
    return shim_ballot(mask, predicate, SHIM_SITE("__any_sync")) != 0;
}


static inline int
__all_sync(unsigned mask, int predicate, SHIM_FROM)
{
    return shim_ballot(mask, !predicate, SHIM_SITE("__all_sync")) == 0;
}


/* --- arithmetic --- */

static inline int
__dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8) {
        c += (int) (int8_t) (a >> i) * (int) (int8_t) (b >> i);
    }

    return c;
}


static inline int
__float2int_rn(float x)
{
    /* saturates, and NaN is 0 */
    return x != x              ? 0
           : x >= 2147483648.f ? INT32_MAX
           : x < -2147483648.f ? INT32_MIN
                               : (int) nearbyintf(x);
}


static inline float
rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}


static inline float
shim_expf(float x)
{
    return expf(x);
}


static inline float
__fdividef(float x, float y)
{
    return x / y;
}


static inline float
__fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}


static inline float
__fadd_rn(float a, float b)
{
    return a + b;
}


static inline float
__fmul_rn(float a, float b)
{
    return a * b;
}


static inline unsigned
__float_as_uint(float x)
{
    unsigned bits;

    memcpy(&bits, &x, sizeof(bits));

    return bits;
}


static inline float
__uint_as_float(unsigned bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));

    return x;
}


static inline int
__float_as_int(float x)
{
    return (int) __float_as_uint(x);
}


static inline float
__int_as_float(int bits)
{
    return __uint_as_float((unsigned) bits);
}


static inline int
__popc(unsigned bits)
{
    return __builtin_popcount(bits);
}


static inline int
__ffs(int bits)
{
    return __builtin_ffs(bits);
}


static inline int
__clz(int bits)
{
    return bits == 0 ? 32 : __builtin_clz((unsigned) bits);
}


static inline unsigned
__umulhi(unsigned a, unsigned b)
{
    return (unsigned) ((uint64_t) a * b >> 32);
}


#define SHIM_MIN_MAX(type)                                                     \
    static inline type min(type a, type b)                                     \
    {                                                                          \
        return a < b ? a : b;                                                  \
    }                                                                          \
    static inline type max(type a, type b)                                     \
    {                                                                          \
        return a > b ? a : b;                                                  \
    }

SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long)
SHIM_MIN_MAX(unsigned long)
SHIM_MIN_MAX(long long)
SHIM_MIN_MAX(unsigned long long)

/* libc has a function of this name */
#define __expf shim_expf
#define __ldg(p) (*(p))

/* --- atomics and fences --- */

#define SHIM_ATOMICS(type)                                                     \
    static inline type atomicAdd(type *at, type value)                         \
    {                                                                          \
        return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);                \
    }                                                                          \
    static inline type atomicExch(type *at, type value)                        \
    {                                                                          \
        return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);               \
    }                                                                          \
    static inline type atomicCAS(type *at, type old, type value)               \
    {                                                                          \
        __atomic_compare_exchange_n(at, &old, value, 0, __ATOMIC_RELAXED,      \
                                    __ATOMIC_RELAXED);                         \
        return old;                                                            \
    }                                                                          \
    static inline type atomicMax(type *at, type value)                         \
    {                                                                          \
        type old = __atomic_load_n(at, __ATOMIC_RELAXED);                      \
        while (old < value                                                     \
               && !__atomic_compare_exchange_n(at, &old, value, 0,             \
                                               __ATOMIC_RELAXED,               \
                                               __ATOMIC_RELAXED)) {            \
        }                                                                      \
        return old;                                                            \
    }                                                                          \
    static inline type atomicMin(type *at, type value)                         \
    {                                                                          \
        type old = __atomic_load_n(at, __ATOMIC_RELAXED);                      \
        while (old > value                                                     \
               && !__atomic_compare_exchange_n(at, &old, value, 0,             \
                                               __ATOMIC_RELAXED,               \
                                               __ATOMIC_RELAXED)) {            \
        }                                                                      \
        return old;                                                            \
    }

SHIM_ATOMICS(int)
SHIM_ATOMICS(unsigned)
SHIM_ATOMICS(unsigned long long)


static inline unsigned
atomicOr(unsigned *at, unsigned bits)
{
    return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED);
}


static inline unsigned
atomicAnd(unsigned *at, unsigned bits)
{
    return __atomic_fetch_and(at, bits, __ATOMIC_RELAXED);
}


/* the order of additions is that of the schedule, as on a device */
static inline float
atomicAdd(float *at, float value)
{
    unsigned *bits = (unsigned *) at;
    unsigned old = __atomic_load_n(bits, __ATOMIC_RELAXED);

    while (!__atomic_compare_exchange_n(
        bits, &old, __float_as_uint(__uint_as_float(old) + value), 0,
        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    {
    }

    return __uint_as_float(old);
}


static inline void
__threadfence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}


static inline void
__threadfence_block(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}


#define __trap() shim_kernel_fault("__trap at %s:%d", __FILE__, __LINE__)

#endif
