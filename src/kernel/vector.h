/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector kernels, written once for every instruction set with the vector types of gcc and clang. The file of an
 * instruction set defines VECTOR (bytes of a register), includes this, writes the primitives declared below with its own
 * instructions, and ends with DEFINE_TABLE.
 *
 * A step holds four registers of accumulators, adds every source to them in order, and stores them to every
 * destination: each source is read once, nothing passes through memory in between, and as all sources of a step are read
 * before it is stored, a destination may be a source. What is left at the end goes through the same code with partial
 * loads and stores, so that there is no second arithmetic for tails.
 *
 * `dtype` and `op` are constants wherever these functions are inlined: the switches disappear.
 */
#include <stdint.h>
#include <string.h>

#include "kernel/table.h"

#define INLINE static inline __attribute__((always_inline))

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

/* `bytes` is VECTOR, or VECTOR / 2 or VECTOR / 4 for elements that are widened; they lie at the front of the register.
 * Bytes of the register beyond are unspecified for whole loads and zero for partial ones. */
INLINE vector load(const char *from, size_t bytes);
INLINE void store(char *to, vector value, size_t bytes);
INLINE void store_stream(char *to, vector value, size_t bytes); /* `to` is aligned to `bytes` */
/* 0 < `bytes` < VECTOR, not a constant; nothing else is touched. */
INLINE vector load_partial(const char *from, size_t bytes);
INLINE void store_partial(char *to, vector value, size_t bytes);
/* Between the 16-bit elements at the front of a register and f32 lanes. */
INLINE vector_f32 widen_f16(vector packed);
INLINE vector narrow_f16(vector_f32 wide);
INLINE vector_u32 widen_u16(vector packed);
INLINE vector narrow_u32_to_u16(vector_u32 wide); /* the values fit in 16 bits */
/* Between the bytes at the front of a register and 32-bit lanes. */
INLINE vector_u32 widen_u8(vector packed);
INLINE vector narrow_u32_to_u8(vector_u32 wide); /* the values fit in 8 bits */

/* Partial access with nothing but scalar moves, for instruction sets without masks. */
INLINE vector load_partial_by_parts(const char *from, size_t bytes) {
    vector value = { 0 };
    char *at = (char *)&value;
    for (size_t part = VECTOR / 2; part >= 1; part /= 2) {
        if (bytes & part) {
            __builtin_memcpy(at, from, part);
            at += part;
            from += part;
        }
    }
    return value;
}

INLINE void store_partial_by_parts(char *to, vector value, size_t bytes) {
    const char *at = (const char *)&value;
    for (size_t part = VECTOR / 2; part >= 1; part /= 2) {
        if (bytes & part) {
            __builtin_memcpy(to, at, part);
            at += part;
            to += part;
        }
    }
}

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

INLINE size_t lane_size(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
    case TUTTI_BF16:
    case TUTTI_F8_E4M3:
    case TUTTI_F8_E5M2:
        return 4;
    default:
        return element_size(dtype);
    }
}

/* Lanes of `a` where the mask is all ones, else of `b`. */
INLINE vector_u32 choose_u32(vector_i32 mask, vector_u32 a, vector_u32 b) {
    return ((vector_u32)mask & a) | (~(vector_u32)mask & b);
}

INLINE vector_u64 choose_u64(vector_i64 mask, vector_u64 a, vector_u64 b) {
    return ((vector_u64)mask & a) | (~(vector_u64)mask & b);
}

INLINE vector narrow_bf16(vector_f32 wide) {
    vector_u32 bits = (vector_u32)wide;
    vector_u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vector_u32 quiet = bits >> 16 | 0x40;
    return narrow_u32_to_u16(choose_u32(wide != wide, quiet, rounded));
}

/* e4m3 and e5m2 to f32 lanes. Normals: shift the mantissa up and change the exponent's bias. Denormals: put the mantissa
 * behind the implicit one of the smallest normal and subtract that again, exactly. Above `largest`: what the type has
 * beyond its finite values, `infinity` standing for the pattern of infinity. */
INLINE vector_f32 widen_f8(vector packed, int exponent_bits, int mantissa_bits, int32_t largest, uint32_t infinity) {
    const uint32_t rebias = (uint32_t)(127 - ((1 << (exponent_bits - 1)) - 1)) << 23;
    vector_u32 bits = widen_u8(packed), zero = bits - bits;
    vector_u32 sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
    vector_u32 normal = (magnitude << (23 - mantissa_bits)) + rebias;
    vector_u32 smallest = zero + (rebias + (1u << 23));
    vector_u32 tiny = (vector_u32)((vector_f32)(normal + (1u << 23)) - (vector_f32)smallest);
    vector_u32 huge = 0x7f800000 | (magnitude - infinity) << 20;
    vector_u32 result = choose_u32((vector_i32)magnitude < (1 << mantissa_bits), tiny, normal);
    result = choose_u32((vector_i32)magnitude > largest, huge, result);
    return (vector_f32)(result | sign);
}

/* Rounds to a float of 4 or 5 exponent bits. Normals: add half of the last place, ties to even, in integers.
 * Denormals: adding a number whose last place is the smallest denormal lets the f32 addition round. */
INLINE vector narrow_f8(vector_f32 wide, int exponent_bits, int mantissa_bits, uint32_t overflow, uint32_t too_large) {
    const int bias = (1 << (exponent_bits - 1)) - 1, drop = 23 - mantissa_bits;
    vector_u32 bits = (vector_u32)wide, zero = bits - bits;
    vector_u32 sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    vector_u32 normal = magnitude - ((uint32_t)(127 - bias) << 23);
    normal = (normal + ((1u << (drop - 1)) - 1) + (normal >> drop & 1)) >> drop;
    vector_u32 magic = zero + ((uint32_t)(127 - bias + 1 + drop) << 23);
    vector_u32 tiny = (vector_u32)((vector_f32)magnitude + (vector_f32)magic) - magic;
    vector_i32 is_tiny = (vector_i32)magnitude < (vector_i32)(zero + ((uint32_t)(127 - bias + 1) << 23));
    vector_u32 result = choose_u32(is_tiny, tiny, normal);
    result = choose_u32((vector_i32)magnitude >= (vector_i32)(zero + too_large), zero + overflow, result);
    result = choose_u32(wide != wide, zero + 0x7f, result);
    return narrow_u32_to_u8(result | sign);
}

INLINE vector widen(vector packed, tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
        return (vector)widen_f16(packed);
    case TUTTI_BF16:
        return (vector)(widen_u16(packed) << 16);
    case TUTTI_F8_E4M3:
        return (vector)widen_f8(packed, 4, 3, 0x7e, 0x7e);
    case TUTTI_F8_E5M2:
        return (vector)widen_f8(packed, 5, 2, 0x7b, 0x7c);
    case TUTTI_BOOL:
        return (vector)(packed != 0) & 1;
    default:
        return packed;
    }
}

INLINE vector narrow(vector wide, tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
        return narrow_f16((vector_f32)wide);
    case TUTTI_BF16:
        return narrow_bf16((vector_f32)wide);
    case TUTTI_F8_E4M3:
        return narrow_f8((vector_f32)wide, 4, 3, 0x7f, 0x43f00000);
    case TUTTI_F8_E5M2:
        return narrow_f8((vector_f32)wide, 5, 2, 0x7c, 0x47800000);
    default:
        return wide;
    }
}

/* --- the operations --- */

/* A NaN of either side passes; of equal values only zeros differ in bits, and -0 is the smaller. */
INLINE vector_f32 extreme_f32(vector_f32 a, vector_f32 b, bool largest) {
    vector_i32 first = largest ? a > b : a < b;
    vector_u32 equal = largest ? (vector_u32)a & (vector_u32)b : (vector_u32)a | (vector_u32)b;
    vector_u32 result = choose_u32(first, (vector_u32)a, (vector_u32)b); /* b where unordered */
    result = choose_u32(a == b, equal, result);
    return (vector_f32)choose_u32(a != a, (vector_u32)a, result);
}

INLINE vector_f64 extreme_f64(vector_f64 a, vector_f64 b, bool largest) {
    vector_i64 first = largest ? a > b : a < b;
    vector_u64 equal = largest ? (vector_u64)a & (vector_u64)b : (vector_u64)a | (vector_u64)b;
    vector_u64 result = choose_u64(first, (vector_u64)a, (vector_u64)b);
    result = choose_u64(a == b, equal, result);
    return (vector_f64)choose_u64(a != a, (vector_u64)a, result);
}

#define COMBINE_FLOAT(type, extreme)                                                                                   \
    switch (op) {                                                                                                      \
    case TUTTI_PRODUCT:                                                                                                \
        return (vector)((type)a * (type)b);                                                                            \
    case TUTTI_MIN:                                                                                                    \
        return (vector)extreme((type)a, (type)b, false);                                                               \
    case TUTTI_MAX:                                                                                                    \
        return (vector)extreme((type)a, (type)b, true);                                                                \
    default:                                                                                                           \
        return (vector)((type)a + (type)b);                                                                            \
    }

/* `wraps` is the unsigned type of the same width. */
#define COMBINE_INTEGER(type, wraps)                                                                                   \
    switch (op) {                                                                                                      \
    case TUTTI_PRODUCT:                                                                                                \
        return (vector)((wraps)a * (wraps)b);                                                                          \
    case TUTTI_MIN: {                                                                                                  \
        vector mask = (vector)((type)a < (type)b);                                                                     \
        return (mask & a) | (~mask & b);                                                                               \
    }                                                                                                                  \
    case TUTTI_MAX: {                                                                                                  \
        vector mask = (vector)((type)a > (type)b);                                                                     \
        return (mask & a) | (~mask & b);                                                                               \
    }                                                                                                                  \
    case TUTTI_BAND:                                                                                                   \
        return a & b;                                                                                                  \
    case TUTTI_BOR:                                                                                                    \
        return a | b;                                                                                                  \
    case TUTTI_BXOR:                                                                                                   \
        return a ^ b;                                                                                                  \
    default:                                                                                                           \
        return (vector)((wraps)a + (wraps)b);                                                                          \
    }

INLINE vector combine_bool(vector a, vector b, tutti_op op) {
    switch (op) {
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

INLINE vector combine(vector a, vector b, tutti_dtype dtype, tutti_op op) {
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
        return combine_bool(a, b, op);
    default: /* f32 and what is widened to it */
        COMBINE_FLOAT(vector_f32, extreme_f32)
    }
}

INLINE vector multiply(vector a, double factor, tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? (vector)((vector_f64)a * factor) : (vector)((vector_f32)a * (float)factor);
}

INLINE vector divide(vector a, int divisor, tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? (vector)((vector_f64)a / (double)divisor) : (vector)((vector_f32)a / (float)divisor);
}

INLINE vector prepare(const tu_reduction *r, vector packed, int source, tutti_dtype dtype, tutti_op op) {
    vector wide = widen(packed, dtype);
    return op == TUTTI_PREMUL_SUM ? multiply(wide, r->factors[source], dtype) : wide;
}

INLINE vector finish(const tu_reduction *r, vector sum, tutti_dtype dtype, tutti_op op) {
    return narrow(op == TUTTI_AVG ? divide(sum, r->from_count, dtype) : sum, dtype);
}

/* --- the loops --- */

#define STEP 4 /* registers of accumulators */

/* Elements until the first destination is aligned for streaming stores; 0 where that cannot be, or is not worth it. */
INLINE size_t elements_to_alignment(const tu_reduction *r, size_t count, size_t size) {
    size_t beyond = (uintptr_t)r->to[0] % 64;
    if (count * size < 1024 || beyond == 0 || beyond % size != 0)
        return 0;
    return (64 - beyond) / size;
}

INLINE void reduce_rest(const tu_reduction *r, size_t begin, size_t end, tutti_dtype dtype, tutti_op op) {
    const size_t size = element_size(dtype), lanes = VECTOR / lane_size(dtype);
    for (size_t at = begin; at < end; at += lanes) {
        size_t left = end - at, bytes = (left < lanes ? left : lanes) * size;
        bool whole = left >= lanes;
        vector sum = { 0 };
        for (int s = 0; s < r->from_count; s++) {
            const char *from = (const char *)r->from[s] + at * size;
            vector packed = whole ? load(from, lanes * size) : load_partial(from, bytes);
            vector value = prepare(r, packed, s, dtype, op);
            sum = s == 0 ? value : combine(sum, value, dtype, op);
        }
        vector result = finish(r, sum, dtype, op);
        for (int d = 0; d < r->to_count; d++) {
            char *to = (char *)r->to[d] + at * size;
            if (whole)
                store(to, result, lanes * size);
            else
                store_partial(to, result, bytes);
        }
    }
}

INLINE void reduce_step(const tu_reduction *r, size_t at, tutti_dtype dtype, tutti_op op) {
    const size_t size = element_size(dtype), bytes = VECTOR / lane_size(dtype) * size;
    const char *from = (const char *)r->from[0] + at * size;
    vector sum[STEP];
    for (int i = 0; i < STEP; i++)
        sum[i] = prepare(r, load(from + i * bytes, bytes), 0, dtype, op);
    for (int s = 1; s < r->from_count; s++) {
        from = (const char *)r->from[s] + at * size;
        for (int i = 0; i < STEP; i++)
            sum[i] = combine(sum[i], prepare(r, load(from + i * bytes, bytes), s, dtype, op), dtype, op);
    }
    for (int i = 0; i < STEP; i++)
        sum[i] = finish(r, sum[i], dtype, op);
    for (int d = 0; d < r->to_count; d++) {
        char *to = (char *)r->to[d] + at * size;
        if (r->stream && (uintptr_t)to % bytes == 0) {
            for (int i = 0; i < STEP; i++)
                store_stream(to + i * bytes, sum[i], bytes);
        } else {
            for (int i = 0; i < STEP; i++)
                store(to + i * bytes, sum[i], bytes);
        }
    }
}

INLINE void reduce(const tu_reduction *r, size_t begin, size_t end, tutti_dtype dtype, tutti_op op) {
    const size_t step = STEP * VECTOR / lane_size(dtype);
    size_t at = begin + elements_to_alignment(r, end - begin, element_size(dtype));
    if (at > begin)
        reduce_rest(r, begin, at, dtype, op);
    for (; at + step <= end; at += step)
        reduce_step(r, at, dtype, op);
    reduce_rest(r, at, end, dtype, op);
}

/* --- the table; what it leaves out (averages of integers) is left to the reference --- */

#define DEFINE(dtype, op)                                                                                              \
    static void reduce_##dtype##_##op(const tu_reduction *r, size_t begin, size_t end) {                               \
        reduce(r, begin, end, TUTTI_##dtype, TUTTI_##op);                                                              \
    }
#define DEFINE_FLOAT(dtype)                                                                                            \
    DEFINE(dtype, SUM)                                                                                                 \
    DEFINE(dtype, AVG)                                                                                                 \
    DEFINE(dtype, PRODUCT)                                                                                             \
    DEFINE(dtype, MIN)                                                                                                 \
    DEFINE(dtype, MAX)                                                                                                 \
    DEFINE(dtype, PREMUL_SUM)
#define DEFINE_INTEGER(dtype)                                                                                          \
    DEFINE(dtype, SUM)                                                                                                 \
    DEFINE(dtype, PRODUCT)                                                                                             \
    DEFINE(dtype, MIN)                                                                                                 \
    DEFINE(dtype, MAX)                                                                                                 \
    DEFINE(dtype, BAND)                                                                                                \
    DEFINE(dtype, BOR)                                                                                                 \
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

#define ENTRY(dtype, op) [TU_KERNEL_DTYPE(TUTTI_##dtype)] = reduce_##dtype##_##op
#define FLOATS(op)                                                                                                     \
    ENTRY(F64, op), ENTRY(F32, op), ENTRY(F16, op), ENTRY(BF16, op), ENTRY(F8_E4M3, op), ENTRY(F8_E5M2, op)
#define INTEGERS(op)                                                                                                   \
    ENTRY(I8, op), ENTRY(I16, op), ENTRY(I32, op), ENTRY(I64, op), ENTRY(U8, op), ENTRY(U16, op), ENTRY(U32, op),      \
        ENTRY(U64, op)

#define DEFINE_TABLE(table, table_name)                                                                                \
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
