/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector kernels, written once for every instruction set with the vector types of gcc and clang. The file of an
 * instruction set defines VECTOR (bytes of a register), includes this, writes the primitives declared below with its
 * own instructions, and ends with DEFINE_TABLE.
 *
 * A step holds a few registers of accumulators, adds every source to them in order, and stores them to every
 * destination: each source is read once, nothing passes through memory in between, and as all sources of a step are
 * read before it is stored, a destination may be a source. What is left at the end goes through the same code with
 * partial loads and stores, so that there is no second arithmetic for tails.
 *
 * One register of 16-bit or 8-bit elements becomes 2 or 4 registers of f32 accumulators. Which element sits where does
 * not matter, as long as it is the same for every source: so bf16 and f8 are taken apart by shifts and masks inside
 * each 32-bit lane, without moving anything between lanes.
 *
 * `dtype` and `reduction` are constants wherever these functions are inlined: the switches disappear.
 */
#include <stdint.h>
#include <string.h>

#include "kernel/table.h"

#define INLINE static inline __attribute__((always_inline))

/* Loops over registers must be unrolled, or the registers become memory. clang does that by itself; a build that is not
 * optimised, or checked, cannot. */
#if defined(__clang__) || !defined(__OPTIMIZE__) || defined(TUTTI_SANITIZED)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif

/* Bits in a register; the other types view them. Widened 16-bit and 8-bit elements are f32 lanes. */
typedef uint8_t vector __attribute__((vector_size(VECTOR)));
typedef uint16_t vector_u16 __attribute__((vector_size(VECTOR)));
typedef uint32_t vector_u32 __attribute__((vector_size(VECTOR)));
typedef uint64_t vector_u64 __attribute__((vector_size(VECTOR)));
typedef int8_t vector_i8 __attribute__((vector_size(VECTOR)));
typedef int16_t vector_i16 __attribute__((vector_size(VECTOR)));
typedef int32_t vector_i32 __attribute__((vector_size(VECTOR)));
typedef int64_t vector_i64 __attribute__((vector_size(VECTOR)));
typedef float vector_f32 __attribute__((vector_size(VECTOR)));
typedef double vector_f64 __attribute__((vector_size(VECTOR)));

/* --- the primitives that an instruction set provides --- */

INLINE vector load(const char *from);
INLINE void store(char *to, vector value);
INLINE void store_stream(char *to, vector value); /* past the caches; `to` is aligned to VECTOR */
/* 0 < `bytes` < VECTOR; what a load leaves is zero, and nothing else is touched. */
INLINE vector load_partial(const char *from, size_t bytes);
INLINE void store_partial(char *to, vector value, size_t bytes);
/* VECTOR bytes of f16 to two registers of f32, the first for the lower half, and back. From memory, because conversion
 * of a loaded half is one instruction and taking a register apart is another. */
INLINE void widen_f16(const char *from, vector *wide);
INLINE vector narrow_f16(const vector *wide);
/* The smaller or larger of each pair: a NaN of either side passes, -0 lies below +0. A NaN made of operands whose lower
 * halves are zero has one too (narrow_bf16 relies on it). */
INLINE vector_f32 extreme_f32(vector_f32 a, vector_f32 b, bool largest);
INLINE vector_f64 extreme_f64(vector_f64 a, vector_f64 b, bool largest);

/* --- elements to accumulators and back --- */

INLINE size_t element_size(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F64:
    case TUTTI_I64:
    case TUTTI_U64:
        return 8;
    case TUTTI_F32:
    case TUTTI_I32:
    case TUTTI_U32:
        return 4;
    case TUTTI_F16:
    case TUTTI_BF16:
    case TUTTI_I16:
    case TUTTI_U16:
        return 2;
    default:
        return 1;
    }
}

/* Registers of accumulators for one register of elements. */
INLINE int registers(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
    case TUTTI_BF16:
        return 2;
    case TUTTI_F8_E4M3:
    case TUTTI_F8_E5M2:
        return 4;
    default:
        return 1;
    }
}

/* Lanes of `a` where the mask is all ones, else of `b`. */
INLINE vector_u32 choose_u32(vector_i32 mask, vector_u32 a, vector_u32 b) {
    return ((vector_u32)mask & a) | (~(vector_u32)mask & b);
}

/* bf16 is the upper half of an f32: even elements are shifted up, odd ones are in place. */
INLINE void widen_bf16(vector packed, vector *wide) {
    wide[0] = (vector)((vector_u32)packed << 16);
    wide[1] = (vector)((vector_u32)packed & 0xffff0000);
}

INLINE vector_u32 round_bf16(vector wide, bool any_nan) {
    vector_u32 bits = (vector_u32)wide;
    vector_u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    return any_nan ? choose_u32((vector_f32)wide != (vector_f32)wide, bits | 0x400000, rounded) : rounded;
}

/* A NaN that comes from elements has a lower half of zeros, through arithmetic too, so that rounding leaves it alone.
 * Only a factor can bring another: `any_nan`. */
INLINE vector narrow_bf16(const vector *wide, bool any_nan) {
    return (vector)(round_bf16(wide[0], any_nan) >> 16 | (round_bf16(wide[1], any_nan) & 0xffff0000));
}

/* e4m3 and e5m2, in the lowest byte of each lane, to f32. Normals: shift the mantissa up and change the exponent's
 * bias. Denormals: put the mantissa behind the implicit one of the smallest normal and subtract that again, exactly.
 * Above `largest`: what the type has beyond its finite values, `infinity` standing for the pattern of infinity. */
INLINE vector widen_f8(vector_u32 bits, int exponent_bits, int mantissa_bits, int32_t largest, uint32_t infinity) {
    const uint32_t rebias = (uint32_t)(127 - ((1 << (exponent_bits - 1)) - 1)) << 23;
    vector_u32 zero = bits - bits;
    vector_u32 sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
    vector_u32 normal = (magnitude << (23 - mantissa_bits)) + rebias;
    vector_u32 smallest = zero + (rebias + (1u << 23));
    vector_u32 tiny = (vector_u32)((vector_f32)(normal + (1u << 23)) - (vector_f32)smallest);
    vector_u32 huge = 0x7f800000 | (magnitude - infinity) << 20;
    vector_u32 result = choose_u32((vector_i32)magnitude < (1 << mantissa_bits), tiny, normal);
    result = choose_u32((vector_i32)magnitude > largest, huge, result);
    return (vector)(result | sign);
}

/* The reverse. Normals: add half of the last place, ties to even, in integers. Denormals: adding a number whose last
 * place is the smallest denormal lets the f32 addition round. From `too_large` up: `overflow`. */
INLINE vector_u32 narrow_f8(vector wide, int exponent_bits, int mantissa_bits, uint32_t overflow, int32_t too_large) {
    const int bias = (1 << (exponent_bits - 1)) - 1, drop = 23 - mantissa_bits;
    vector_u32 bits = (vector_u32)wide, zero = bits - bits;
    vector_u32 sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    vector_u32 normal = magnitude - ((uint32_t)(127 - bias) << 23);
    normal = (normal + ((1u << (drop - 1)) - 1) + (normal >> drop & 1)) >> drop;
    vector_u32 magic = zero + ((uint32_t)(127 - bias + 1 + drop) << 23);
    vector_u32 tiny = (vector_u32)((vector_f32)magnitude + (vector_f32)magic) - magic;
    vector_u32 result = choose_u32((vector_i32)magnitude < ((127 - bias + 1) << 23), tiny, normal);
    result = choose_u32((vector_i32)magnitude >= too_large, zero + overflow, result);
    result = choose_u32((vector_i32)magnitude > 0x7f800000, zero + 0x7f, result);
    return result | sign;
}

INLINE void widen(vector packed, vector *wide, tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
        widen_f16((const char *)&packed, wide);
        break;
    case TUTTI_BF16:
        widen_bf16(packed, wide);
        break;
    case TUTTI_F8_E4M3:
        UNROLL for (int i = 0; i < 4; i++) wide[i] = widen_f8((vector_u32)packed >> 8 * i & 0xff, 4, 3, 0x7e, 0x7e);
        break;
    case TUTTI_F8_E5M2:
        UNROLL for (int i = 0; i < 4; i++) wide[i] = widen_f8((vector_u32)packed >> 8 * i & 0xff, 5, 2, 0x7b, 0x7c);
        break;
    case TUTTI_BOOL:
        wide[0] = (vector)(packed != 0) & 1;
        break;
    default:
        wide[0] = packed;
    }
}

INLINE vector narrow(const vector *wide, tutti_dtype dtype, tutti_reduction reduction) {
    vector_u32 packed = { 0 };
    switch (dtype) {
    case TUTTI_F16:
        return narrow_f16(wide);
    case TUTTI_BF16:
        return narrow_bf16(wide, reduction == TUTTI_PREMUL_SUM);
    case TUTTI_F8_E4M3:
        UNROLL for (int i = 0; i < 4; i++) packed |= narrow_f8(wide[i], 4, 3, 0x7e, 0x43e00000) << 8 * i;
        return (vector)packed;
    case TUTTI_F8_E5M2:
        UNROLL for (int i = 0; i < 4; i++) packed |= narrow_f8(wide[i], 5, 2, 0x7c, 0x47800000) << 8 * i;
        return (vector)packed;
    default:
        return wide[0];
    }
}

/* --- the operations --- */

#define COMBINE_FLOAT(type, extreme)                     \
    switch (reduction) {                                 \
    case TUTTI_PRODUCT:                                  \
        return (vector)((type)a * (type)b);              \
    case TUTTI_MIN:                                      \
        return (vector)extreme((type)a, (type)b, false); \
    case TUTTI_MAX:                                      \
        return (vector)extreme((type)a, (type)b, true);  \
    default:                                             \
        return (vector)((type)a + (type)b);              \
    }

/* `wraps` is the unsigned type of the same width. */
#define COMBINE_INTEGER(type, wraps)               \
    switch (reduction) {                           \
    case TUTTI_PRODUCT:                            \
        return (vector)((wraps)a * (wraps)b);      \
    case TUTTI_MIN: {                              \
        vector mask = (vector)((type)a < (type)b); \
        return (mask & a) | (~mask & b);           \
    }                                              \
    case TUTTI_MAX: {                              \
        vector mask = (vector)((type)a > (type)b); \
        return (mask & a) | (~mask & b);           \
    }                                              \
    case TUTTI_BAND:                               \
        return a & b;                              \
    case TUTTI_BOR:                                \
        return a | b;                              \
    case TUTTI_BXOR:                               \
        return a ^ b;                              \
    default:                                       \
        return (vector)((wraps)a + (wraps)b);      \
    }

INLINE vector combine_bool(vector a, vector b, tutti_reduction reduction) {
    switch (reduction) {
    case TUTTI_PRODUCT:
    case TUTTI_MIN:
    case TUTTI_BAND:
        return a & b;
    case TUTTI_BXOR:
        return a ^ b;
    default:
        return a | b;
    }
}

INLINE vector combine(vector a, vector b, tutti_dtype dtype, tutti_reduction reduction) {
    switch (dtype) {
    case TUTTI_F64:
        COMBINE_FLOAT(vector_f64, extreme_f64)
    case TUTTI_I8:
        COMBINE_INTEGER(vector_i8, vector)
    case TUTTI_I16:
        COMBINE_INTEGER(vector_i16, vector_u16)
    case TUTTI_I32:
        COMBINE_INTEGER(vector_i32, vector_u32)
    case TUTTI_I64:
        COMBINE_INTEGER(vector_i64, vector_u64)
    case TUTTI_U8:
        COMBINE_INTEGER(vector, vector)
    case TUTTI_U16:
        COMBINE_INTEGER(vector_u16, vector_u16)
    case TUTTI_U32:
        COMBINE_INTEGER(vector_u32, vector_u32)
    case TUTTI_U64:
        COMBINE_INTEGER(vector_u64, vector_u64)
    case TUTTI_BOOL:
        return combine_bool(a, b, reduction);
    default: /* f32 and what is widened to it */
        COMBINE_FLOAT(vector_f32, extreme_f32)
    }
}

INLINE vector multiply(vector a, double factor, tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? (vector)((vector_f64)a * factor) : (vector)((vector_f32)a * (float)factor);
}

INLINE vector divide(const tu_reduce_args *r, vector a, tutti_dtype dtype) {
    if (r->reciprocal != 0)
        return multiply(a, r->reciprocal, dtype);
    return dtype == TUTTI_F64 ? (vector)((vector_f64)a / (double)r->from_count)
                              : (vector)((vector_f32)a / (float)r->from_count);
}

/* The registers of accumulators at `sum` take in `bytes` (at most VECTOR) of source `s`; the first source starts
 * them. */
INLINE void accumulate(const tu_reduce_args *r, vector *sum, int s, size_t at, size_t bytes, tutti_dtype dtype,
                       tutti_reduction reduction) {
    const char *from = (const char *)r->from[s] + at;
    vector wide[4];
    if (bytes < VECTOR)
        widen(load_partial(from, bytes), wide, dtype);
    else if (dtype == TUTTI_F16)
        widen_f16(from, wide);
    else
        widen(load(from), wide, dtype);
    UNROLL for (int i = 0; i < registers(dtype); i++) {
        if (reduction == TUTTI_PREMUL_SUM)
            wide[i] = multiply(wide[i], r->factors[s], dtype);
        sum[i] = s == 0 ? wide[i] : combine(sum[i], wide[i], dtype, reduction);
    }
}

INLINE vector finish(const tu_reduce_args *r, vector *sum, tutti_dtype dtype, tutti_reduction reduction) {
    UNROLL for (int i = 0; i < registers(dtype); i++) {
        if (reduction == TUTTI_AVG)
            sum[i] = divide(r, sum[i], dtype);
    }
    return narrow(sum, dtype, reduction);
}

/* --- the loops --- */

#define STEP 4 /* registers of accumulators */

/* Elements until the first destination is aligned for streaming stores; 0 where that cannot be, or is not worth it. */
INLINE size_t elements_to_alignment(const tu_reduce_args *r, size_t count, size_t size) {
    size_t beyond = (uintptr_t)r->to[0] % VECTOR;
    if (count * size < 1024 || beyond == 0 || beyond % size != 0)
        return 0;
    return (VECTOR - beyond) / size;
}

/* Register by register, the last one perhaps partly. */
INLINE void reduce_rest(const tu_reduce_args *r, size_t begin, size_t end, tutti_dtype dtype,
                        tutti_reduction reduction) {
    const size_t size = element_size(dtype);
    for (size_t at = begin * size; at < end * size; at += VECTOR) {
        size_t left = end * size - at;
        vector sum[4];
        accumulate(r, sum, 0, at, left, dtype, reduction);
        for (int s = 1; s < r->from_count; s++)
            accumulate(r, sum, s, at, left, dtype, reduction);
        vector result = finish(r, sum, dtype, reduction);
        for (int d = 0; d < r->to_count; d++) {
            char *to = (char *)r->to[d] + at;
            if (left < VECTOR)
                store_partial(to, result, left);
            else
                store(to, result);
        }
    }
}

INLINE void reduce_step(const tu_reduce_args *r, size_t at, tutti_dtype dtype, tutti_reduction reduction) {
    const int ratio = registers(dtype);
    vector sum[STEP], result[STEP];
    UNROLL for (int i = 0; i < STEP / ratio; i++)
        accumulate(r, sum + i * ratio, 0, at + i * VECTOR, VECTOR, dtype, reduction);
    for (int s = 1; s < r->from_count; s++) {
        UNROLL for (int i = 0; i < STEP / ratio; i++)
            accumulate(r, sum + i * ratio, s, at + i * VECTOR, VECTOR, dtype, reduction);
    }
    UNROLL for (int i = 0; i < STEP / ratio; i++) result[i] = finish(r, sum + i * ratio, dtype, reduction);
    for (int d = 0; d < r->to_count; d++) {
        char *to = (char *)r->to[d] + at;
        if (r->stream && (uintptr_t)to % VECTOR == 0) {
            UNROLL for (int i = 0; i < STEP / ratio; i++) store_stream(to + i * VECTOR, result[i]);
        } else {
            UNROLL for (int i = 0; i < STEP / ratio; i++) store(to + i * VECTOR, result[i]);
        }
    }
}

INLINE void copy_aside(const tu_reduce_args *r, size_t at) {
    char *to = r->aside_to + at;
    const char *from = r->aside_from + at;
    for (size_t i = 0; i < r->aside_turn; i += VECTOR)
        store(to + i, load(from + i));
}

/* A piece of the reduction and a piece of the copy beside it, in turn, as long as both have whole ones. Returns where
 * the reduction has come to. */
INLINE size_t reduce_beside(const tu_reduce_args *r, size_t at, size_t end, tutti_dtype dtype,
                            tutti_reduction reduction) {
    const size_t size = element_size(dtype), step = STEP / registers(dtype) * VECTOR;
    size_t done = 0;
    for (; at + TU_KERNEL_TURN / size <= end && done + r->aside_turn <= r->aside_bytes; at += TU_KERNEL_TURN / size) {
        for (size_t i = 0; i < TU_KERNEL_TURN; i += step)
            reduce_step(r, at * size + i, dtype, reduction);
        copy_aside(r, done);
        done += r->aside_turn;
    }
    *r->aside_done = done;
    return at;
}

INLINE void reduce(const tu_reduce_args *r, size_t begin, size_t end, tutti_dtype dtype, tutti_reduction reduction) {
    const size_t size = element_size(dtype), step = STEP / registers(dtype) * VECTOR / size;
    size_t at = begin + elements_to_alignment(r, end - begin, size);
    if (at > begin)
        reduce_rest(r, begin, at, dtype, reduction);
    if (r->aside_bytes != 0)
        at = reduce_beside(r, at, end, dtype, reduction);
    for (; at + step <= end; at += step)
        reduce_step(r, at * size, dtype, reduction);
    reduce_rest(r, at, end, dtype, reduction);
}

/* --- the table; what it leaves out (averages of integers) is left to the reference --- */

#define DEFINE(dtype, reduction)                                                                  \
    static void reduce_##dtype##_##reduction(const tu_reduce_args *r, size_t begin, size_t end) { \
        reduce(r, begin, end, TUTTI_##dtype, TUTTI_##reduction);                                  \
    }
#define DEFINE_FLOAT(dtype) \
    DEFINE(dtype, SUM)      \
    DEFINE(dtype, AVG)      \
    DEFINE(dtype, PRODUCT)  \
    DEFINE(dtype, MIN)      \
    DEFINE(dtype, MAX)      \
    DEFINE(dtype, PREMUL_SUM)
#define DEFINE_INTEGER(dtype) \
    DEFINE(dtype, SUM)        \
    DEFINE(dtype, PRODUCT)    \
    DEFINE(dtype, MIN)        \
    DEFINE(dtype, MAX)        \
    DEFINE(dtype, BAND)       \
    DEFINE(dtype, BOR)        \
    DEFINE(dtype, BXOR)

DEFINE_FLOAT(F64)
DEFINE_FLOAT(F32)
DEFINE_FLOAT(F16)
DEFINE_FLOAT(BF16)
DEFINE_FLOAT(F8_E4M3)
DEFINE_FLOAT(F8_E5M2)
DEFINE_INTEGER(I8)
DEFINE_INTEGER(I16)
DEFINE_INTEGER(I32)
DEFINE_INTEGER(I64)
DEFINE_INTEGER(U8)
DEFINE_INTEGER(U16)
DEFINE_INTEGER(U32)
DEFINE_INTEGER(U64)
DEFINE(BOOL, BOR)
DEFINE(BOOL, BAND)
DEFINE(BOOL, BXOR)

#define ENTRY(dtype, reduction) [TU_KERNEL_DTYPE(TUTTI_##dtype)] = reduce_##dtype##_##reduction
#define FLOATS(reduction)                                                                        \
    ENTRY(F64, reduction), ENTRY(F32, reduction), ENTRY(F16, reduction), ENTRY(BF16, reduction), \
        ENTRY(F8_E4M3, reduction), ENTRY(F8_E5M2, reduction)
#define INTEGERS(reduction)                                                                                          \
    ENTRY(I8, reduction), ENTRY(I16, reduction), ENTRY(I32, reduction), ENTRY(I64, reduction), ENTRY(U8, reduction), \
        ENTRY(U16, reduction), ENTRY(U32, reduction), ENTRY(U64, reduction)

#define DEFINE_TABLE(table, table_name) \
    const tu_kernels table = {                                                                                         \
        .name = table_name,                                                                                            \
        .reduce = {                                                                                                    \
            [TU_KERNEL_OP(TUTTI_SUM)] = { FLOATS(SUM), INTEGERS(SUM), ENTRY(BOOL, BOR) },                              \
            [TU_KERNEL_OP(TUTTI_AVG)] = { FLOATS(AVG) },                                                               \
            [TU_KERNEL_OP(TUTTI_PRODUCT)] = { FLOATS(PRODUCT), INTEGERS(PRODUCT), ENTRY(BOOL, BAND) },                 \
            [TU_KERNEL_OP(TUTTI_MIN)] = { FLOATS(MIN), INTEGERS(MIN), ENTRY(BOOL, BAND) },                             \
            [TU_KERNEL_OP(TUTTI_MAX)] = { FLOATS(MAX), INTEGERS(MAX), ENTRY(BOOL, BOR) },                              \
            [TU_KERNEL_OP(TUTTI_BAND)] = { INTEGERS(BAND), ENTRY(BOOL, BAND) },                                        \
            [TU_KERNEL_OP(TUTTI_BOR)] = { INTEGERS(BOR), ENTRY(BOOL, BOR) },                                           \
            [TU_KERNEL_OP(TUTTI_BXOR)] = { INTEGERS(BXOR), ENTRY(BOOL, BXOR) },                                        \
            [TU_KERNEL_OP(TUTTI_PREMUL_SUM)] = { FLOATS(PREMUL_SUM) },                                                 \
        },                                                                                                             \
    }
