/* SPDX-License-Identifier: Apache-2.0
 *
 * What the code of loops on a GPU stands on, besides the expressions' dialect. Its text is a part of the library (see
 * loops/text.c) and goes before every loop that is written, so nothing is included: NVRTC has no headers. A compiler
 * for the CPU builds the same text for the stand-in driver of the tests, which says below what a GPU is.
 *
 *     LOOP(name)                          a kernel; `args` has the addresses of the loop's tensors
 *     EACH_ELEMENT(i, first, total, step) all threads of all blocks share the numbers from first on
 *     EACH_PACK(i, total, width, packs)   the same, `packs` times for each thread, a block's width apart; `total` is a
 *                                         multiple of what a block has
 *     EACH_ROW(row, count, lanes)         a team of `lanes` threads for each row
 *     EACH_LANE(lane, lanes)              what every one of the team does: a phase
 *     HELD(type, name, count)             numbers of each lane that live longer than a phase, HAD(name) in it
 *     FOLDED(fold, lanes, name)           what all lanes hold in name[0], folded by halves: the same for all
 */
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807ll
#define INT64_MIN (-INT64_MAX - 1)
#define UINT64_MAX 18446744073709551615ull
#define INT64_C(number) number##ll
#define UINT64_C(number) number##ull
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000ll)
#define __builtin_nanf(text) __int_as_float(0x7fc00000)
#define __builtin_nan(text) __longlong_as_double(0x7ff8000000000000ll)
#endif

#include "base/element.h"
#include "tensor/dialect.h"

struct tu_places {
    char *at[TU_LOOP_PLACES];
};

#ifdef __CUDACC__
#define HERE static __device__ __forceinline__
#define LOOP(name) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ tu_places args)
#define EACH_ELEMENT(i, first, total, step)                                                            \
    for (int64_t i = (first) + ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * (step); i < (total); \
         i += (int64_t)gridDim.x * blockDim.x * (step))
#define EACH_PACK(i, total, width, packs)                                                               \
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x * (packs) + threadIdx.x) * (width); i < (total); \
         i += (int64_t)gridDim.x * blockDim.x * (packs) * (width))
#define EACH_ROW(row, count, lanes)                                                                         \
    for (int64_t row = (int64_t)blockIdx.x * (blockDim.x / (lanes)) + threadIdx.x / (lanes); row < (count); \
         row += (int64_t)gridDim.x * (blockDim.x / (lanes)))
#define EACH_LANE(lane, lanes) if (const int lane = (int)(threadIdx.x % (lanes)); true)
#define HELD(type, name, count) type name[count]
#define HAD(name) name
#define UNROLL _Pragma("unroll")

template <class Fold, int LANES, class Type> HERE Type tu_folded(const Type *held) {
    const unsigned team = LANES == 32 ? 0xffffffffu : ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
    Type folded = *held;
    UNROLL
    for (int half = LANES / 2; half > 0; half /= 2)
        folded = Fold::step(folded, __shfl_down_sync(team, folded, half, LANES));
    return __shfl_sync(team, folded, 0, LANES);
}
#define FOLDED(fold, lanes, name) tu_folded<fold, lanes>(name)
#endif

/* ---- elements ---- */

/* Some neighbours, as wide as a load may be. */
template <class Type, int WIDTH> struct alignas(sizeof(Type) * WIDTH < 16 ? sizeof(Type) * WIDTH : 16) pack {
    Type at[WIDTH];
};
template <class Type, int WIDTH> HERE pack<Type, WIDTH> get(const char *from, int64_t place) {
    return *(const pack<Type, WIDTH> *)((const Type *)from + place);
}
template <class Type, int WIDTH> HERE void put(char *to, int64_t place, const pack<Type, WIDTH> &x) {
    *(pack<Type, WIDTH> *)((Type *)to + place) = x;
}

/* The same of what is so long that nobody finds it in a cache: it is to leave them first. */
#if defined(__CUDA_ARCH__)
template <class Type, int WIDTH> HERE pack<Type, WIDTH> get_past(const char *from, int64_t place) {
    pack<Type, WIDTH> x;
    if constexpr (sizeof x % 16 == 0) {
        const uint32_t *at = (const uint32_t *)((const Type *)from + place);
        uint32_t *to = (uint32_t *)&x;
        UNROLL
        for (int i = 0; i < (int)sizeof x / 4; i += 4)
            asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                         : "l"(at + i));
        return x;
    }
    return get<Type, WIDTH>(from, place);
}
template <class Type, int WIDTH> HERE void put_past(char *to, int64_t place, const pack<Type, WIDTH> &x) {
    if constexpr (sizeof x % 16 == 0) {
        uint32_t *at = (uint32_t *)((Type *)to + place);
        const uint32_t *from = (const uint32_t *)&x;
        UNROLL
        for (int i = 0; i < (int)sizeof x / 4; i += 4)
            asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
                         :
                         : "l"(at + i), "r"(from[i]), "r"(from[i + 1]), "r"(from[i + 2]), "r"(from[i + 3])
                         : "memory");
        return;
    }
    put<Type, WIDTH>(to, place, x);
}
#else
template <class Type, int WIDTH> HERE pack<Type, WIDTH> get_past(const char *from, int64_t place) {
    return get<Type, WIDTH>(from, place);
}
template <class Type, int WIDTH> HERE void put_past(char *to, int64_t place, const pack<Type, WIDTH> &x) {
    put<Type, WIDTH>(to, place, x);
}
#endif

/* One element of a dtype as another: what base/element.h says. */
enum {
    f64 = TUTTI_F64,
    f32 = TUTTI_F32,
    f16 = TUTTI_F16,
    bf16 = TUTTI_BF16,
    f8_e4m3 = TUTTI_F8_E4M3,
    f8_e5m2 = TUTTI_F8_E5M2,
    i8 = TUTTI_I8,
    i16 = TUTTI_I16,
    i32 = TUTTI_I32,
    i64 = TUTTI_I64,
    u8 = TUTTI_U8,
    u16 = TUTTI_U16,
    u32 = TUTTI_U32,
    u64 = TUTTI_U64,
    boolean = TUTTI_BOOL
};
template <int DTYPE> struct element;
#define TU_ELEMENT(dtype, type_) \
    template <> struct element<dtype> { typedef type_ type; };
TU_ELEMENT(f64, double)
TU_ELEMENT(f32, float)
TU_ELEMENT(f16, uint16_t)
TU_ELEMENT(bf16, uint16_t)
TU_ELEMENT(f8_e4m3, uint8_t)
TU_ELEMENT(f8_e5m2, uint8_t)
TU_ELEMENT(i8, int8_t)
TU_ELEMENT(i16, int16_t)
TU_ELEMENT(i32, int32_t)
TU_ELEMENT(i64, int64_t)
TU_ELEMENT(u8, uint8_t)
TU_ELEMENT(u16, uint16_t)
TU_ELEMENT(u32, uint32_t)
TU_ELEMENT(u64, uint64_t)
TU_ELEMENT(boolean, uint8_t)

template <int TO, int FROM> struct conversion {
    HERE typename element<TO>::type of(typename element<FROM>::type x) {
        typename element<TO>::type converted;
        tu_element_store(tu_element_load(&x, FROM), &converted, TO);
        return converted;
    }
};
#define TU_CONVERSION(to, from, how)                       \
    template <> struct conversion<to, from> {              \
        HERE element<to>::type of(element<from>::type x) { \
            return how;                                    \
        }                                                  \
    };
/* To bf16 and back. The processor rounds as tu_f32_to_bf16 does; every NaN becomes one NaN. It makes two numbers at
 * once more quickly than one; with a zero in the lower half the bits of both are the rounded number again. */
HERE float tu_rounded(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
    return tu_f32_from_bits(pair);
#else
    return tu_bf16_to_f32(tu_f32_to_bf16(x));
#endif
}
HERE uint16_t tu_narrowed(float x) {
    return (uint16_t)(tu_f32_bits(tu_rounded(x)) >> 16);
}
TU_CONVERSION(f32, bf16, tu_bf16_to_f32(x))
TU_CONVERSION(bf16, f32, tu_narrowed(x))
TU_CONVERSION(f64, f32, (double)x)
TU_CONVERSION(f32, f64, (float)x)
#ifdef __CUDACC__
HERE float tu_half_widened(uint16_t x) {
    float widened;
    asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(x));
    return widened;
}
HERE uint16_t tu_half_of(float x) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    return (uint16_t)pair;
#else
    uint16_t rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
#endif
}
TU_CONVERSION(f32, f16, tu_half_widened(x))
TU_CONVERSION(f16, f32, tu_half_of(x))
#endif
template <int TO, int FROM> HERE typename element<TO>::type convert(typename element<FROM>::type x) {
    return conversion<TO, FROM>::of(x);
}

#include "loops/near.cuh"

/* ---- reductions, in the order of tensor/kernel/fold.h ---- */

#define TU_FOLD(name, suffix, type, begin, next) \
    struct name##_##suffix {                     \
        HERE type first() {                      \
            return begin;                        \
        }                                        \
        HERE type step(type held, type x) {      \
            return next;                         \
        }                                        \
    };
TU_FOLD(fold_sum, f32, float, 0, held + x)
TU_FOLD(fold_sum, f64, double, 0, held + x)
TU_FOLD(fold_prod, f32, float, 1, held *x)
TU_FOLD(fold_prod, f64, double, 1, held *x)
TU_FOLD(fold_amax, f32, float, tu_float_f32(0x7f800000 | INT32_MIN), tu_maximum_f32(held, x))
TU_FOLD(fold_amax, f64, double, -(double)tu_float_f32(0x7f800000), tu_maximum_f64(held, x))
TU_FOLD(fold_amin, f32, float, tu_float_f32(0x7f800000), tu_minimum_f32(held, x))
TU_FOLD(fold_amin, f64, double, (double)tu_float_f32(0x7f800000), tu_minimum_f64(held, x))
