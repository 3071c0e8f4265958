/* SPDX-License-Identifier: Apache-2.0
 *
 * The reference: every reduction of every type in plain C. It defines the results; the other kernels are compared with
 * it.
 *
 * A block of elements is accumulated in a local array, source by source, then stored to every destination: so a
 * destination may be a source, any number of sources keeps its order, and compilers vectorise the short loops.
 */
#include <stdint.h>
#include <string.h>

#include "base/float16.h"
#include "kernel/table.h"

#define BLOCK 256

/* min and max of floats: a NaN from either side passes; -0 lies below +0. Of equal values, only zeros differ in
 * bits. */
#define DEFINE_EXTREMES(type, bits_type)            \
    static inline type min_##type(type a, type b) { \
        if (a != a || b != b)                       \
            return a + b;                           \
        if (a == b) {                               \
            bits_type x, y;                         \
            memcpy(&x, &a, sizeof x);               \
            memcpy(&y, &b, sizeof y);               \
            x |= y;                                 \
            memcpy(&a, &x, sizeof a);               \
            return a;                               \
        }                                           \
        return a < b ? a : b;                       \
    }                                               \
    static inline type max_##type(type a, type b) { \
        return -min_##type(-a, -b);                 \
    }
DEFINE_EXTREMES(float, uint32_t)
DEFINE_EXTREMES(double, uint64_t)

/* Defines reduce_<dtype>_<op>. `load` and `store` convert between the element and the accumulator; `prepare` sees the
 * loaded value x and the source's number s, `combine` the accumulator a and the value x, `finish` the accumulator a. */
#define DEFINE(dtype, op, element, accumulator, load, store, prepare, combine, finish)     \
    static void reduce_##dtype##_##op(const tu_reduce_args *r, size_t begin, size_t end) { \
        accumulator block[BLOCK];                                                          \
        for (size_t at = begin; at < end; at += BLOCK) {                                   \
            size_t count = end - at < BLOCK ? end - at : BLOCK;                            \
            for (int s = 0; s < r->from_count; s++) {                                      \
                const char *from = (const char *)r->from[s] + at * sizeof(element);        \
                for (size_t i = 0; i < count; i++) {                                       \
                    element e;                                                             \
                    memcpy(&e, from + i * sizeof e, sizeof e);                             \
                    accumulator x = load(e);                                               \
                    x = prepare;                                                           \
                    if (s == 0) {                                                          \
                        block[i] = x;                                                      \
                        continue;                                                          \
                    }                                                                      \
                    accumulator a = block[i];                                              \
                    block[i] = (accumulator)(combine);                                     \
                }                                                                          \
            }                                                                              \
            for (size_t i = 0; i < count; i++) {                                           \
                accumulator a = block[i];                                                  \
                element e = store(finish);                                                 \
                for (int d = 0; d < r->to_count; d++)                                      \
                    memcpy((char *)r->to[d] + (at + i) * sizeof e, &e, sizeof e);          \
            }                                                                              \
        }                                                                                  \
    }

#define DEFINE_FLOAT(dtype, element, acc, load, store)                              \
    DEFINE(dtype, sum, element, acc, load, store, x, a + x, a)                      \
    DEFINE(dtype, avg, element, acc, load, store, x, a + x, a / (acc)r->from_count) \
    DEFINE(dtype, product, element, acc, load, store, x, a *x, a)                   \
    DEFINE(dtype, min, element, acc, load, store, x, min_##acc(a, x), a)            \
    DEFINE(dtype, max, element, acc, load, store, x, max_##acc(a, x), a)            \
    DEFINE(dtype, premul_sum, element, acc, load, store, x *(acc)r->factors[s], a + x, a)

/* `wide` is the 64-bit type of the same sign: arithmetic in uint64_t wraps, division keeps the sign. */
#define DEFINE_INTEGER(dtype, type, wide)                                                                         \
    DEFINE(dtype, sum, type, type, (type), (type), x, (uint64_t)a + (uint64_t)x, a)                               \
    DEFINE(dtype, avg, type, type, (type), (type), x, (uint64_t)a + (uint64_t)x, ((wide)a / (wide)r->from_count)) \
    DEFINE(dtype, product, type, type, (type), (type), x, (uint64_t)a *(uint64_t)x, a)                            \
    DEFINE(dtype, min, type, type, (type), (type), x, a < x ? a : x, a)                                           \
    DEFINE(dtype, max, type, type, (type), (type), x, a > x ? a : x, a)                                           \
    DEFINE(dtype, band, type, type, (type), (type), x, a &x, a)                                                   \
    DEFINE(dtype, bor, type, type, (type), (type), x, a | x, a)                                                   \
    DEFINE(dtype, bxor, type, type, (type), (type), x, a ^ x, a)

#define AS_IS(x) (x)
#define TRUTH(x) ((x) != 0)

DEFINE_FLOAT(f64, double, double, AS_IS, AS_IS)
DEFINE_FLOAT(f32, float, float, AS_IS, AS_IS)
DEFINE_FLOAT(f16, uint16_t, float, tu_f16_to_f32, tu_f32_to_f16)
DEFINE_FLOAT(bf16, uint16_t, float, tu_bf16_to_f32, tu_f32_to_bf16)
DEFINE_FLOAT(e4m3, uint8_t, float, tu_e4m3_to_f32, tu_f32_to_e4m3)
DEFINE_FLOAT(e5m2, uint8_t, float, tu_e5m2_to_f32, tu_f32_to_e5m2)
DEFINE_INTEGER(i8, int8_t, int64_t)
DEFINE_INTEGER(i16, int16_t, int64_t)
DEFINE_INTEGER(i32, int32_t, int64_t)
DEFINE_INTEGER(i64, int64_t, int64_t)
DEFINE_INTEGER(u8, uint8_t, uint64_t)
DEFINE_INTEGER(u16, uint16_t, uint64_t)
DEFINE_INTEGER(u32, uint32_t, uint64_t)
DEFINE_INTEGER(u64, uint64_t, uint64_t)
DEFINE(boolean, or, uint8_t, uint8_t, TRUTH, AS_IS, x, a | x, a)
DEFINE(boolean, and, uint8_t, uint8_t, TRUTH, AS_IS, x, a &x, a)
DEFINE(boolean, xor, uint8_t, uint8_t, TRUTH, AS_IS, x, a ^ x, a)

/* One row per reduction: the floats of f64 to f8, the integers of i8 to u64. */
#define FLOATS(op)                                                                                    \
    [TU_KERNEL_DTYPE(TUTTI_F64)] = reduce_f64_##op, [TU_KERNEL_DTYPE(TUTTI_F32)] = reduce_f32_##op,   \
    [TU_KERNEL_DTYPE(TUTTI_F16)] = reduce_f16_##op, [TU_KERNEL_DTYPE(TUTTI_BF16)] = reduce_bf16_##op, \
    [TU_KERNEL_DTYPE(TUTTI_F8_E4M3)] = reduce_e4m3_##op, [TU_KERNEL_DTYPE(TUTTI_F8_E5M2)] = reduce_e5m2_##op
#define INTEGERS(op)                                                                                \
    [TU_KERNEL_DTYPE(TUTTI_I8)] = reduce_i8_##op, [TU_KERNEL_DTYPE(TUTTI_I16)] = reduce_i16_##op,   \
    [TU_KERNEL_DTYPE(TUTTI_I32)] = reduce_i32_##op, [TU_KERNEL_DTYPE(TUTTI_I64)] = reduce_i64_##op, \
    [TU_KERNEL_DTYPE(TUTTI_U8)] = reduce_u8_##op, [TU_KERNEL_DTYPE(TUTTI_U16)] = reduce_u16_##op,   \
    [TU_KERNEL_DTYPE(TUTTI_U32)] = reduce_u32_##op, [TU_KERNEL_DTYPE(TUTTI_U64)] = reduce_u64_##op
#define BOOLEAN(op) [TU_KERNEL_DTYPE(TUTTI_BOOL)] = reduce_boolean_##op

const tu_kernels tu_kernels_reference = {
    .name = "reference",
    .reduce = {
        [TU_KERNEL_OP(TUTTI_SUM)] = { FLOATS(sum), INTEGERS(sum), BOOLEAN(or) },
        [TU_KERNEL_OP(TUTTI_AVG)] = { FLOATS(avg), INTEGERS(avg) },
        [TU_KERNEL_OP(TUTTI_PRODUCT)] = { FLOATS(product), INTEGERS(product), BOOLEAN(and) },
        [TU_KERNEL_OP(TUTTI_MIN)] = { FLOATS(min), INTEGERS(min), BOOLEAN(and) },
        [TU_KERNEL_OP(TUTTI_MAX)] = { FLOATS(max), INTEGERS(max), BOOLEAN(or) },
        [TU_KERNEL_OP(TUTTI_BAND)] = { INTEGERS(band), BOOLEAN(and) },
        [TU_KERNEL_OP(TUTTI_BOR)] = { INTEGERS(bor), BOOLEAN(or) },
        [TU_KERNEL_OP(TUTTI_BXOR)] = { INTEGERS(bxor), BOOLEAN(xor) },
        [TU_KERNEL_OP(TUTTI_PREMUL_SUM)] = { FLOATS(premul_sum) },
    },
};
