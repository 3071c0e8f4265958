/* SPDX-License-Identifier: Apache-2.0
 *
 * The primitives of elementary.h on vector registers, as far as the compiler's vector types express them. The header of
 * an instruction set defines VECTOR (bytes of a register), includes this, and adds what needs an instruction by name:
 * fma, sqrt, rounding, lesser, greater, parts of registers, halves, and whether any lane of a mask is set.
 *
 * A comparison of vectors gives a mask of the same width, all ones or all zeros in each lane.
 */
#ifndef TU_TENSOR_KERNEL_VECTOR_H
#define TU_TENSOR_KERNEL_VECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define TU_LANE static inline __attribute__((always_inline, unused))
#define TU_RARE static __attribute__((noinline, unused))

#define TU_LANES_F32 (VECTOR / 4)
#define TU_LANES_F64 (VECTOR / 8)

typedef float vec_f32 __attribute__((vector_size(VECTOR)));
typedef int32_t vec_i32 __attribute__((vector_size(VECTOR)));
typedef double vec_f64 __attribute__((vector_size(VECTOR)));
typedef int64_t vec_i64 __attribute__((vector_size(VECTOR)));
typedef uint32_t vec_u32 __attribute__((vector_size(VECTOR)));
typedef uint64_t vec_u64 __attribute__((vector_size(VECTOR)));

TU_LANE vec_i32 tu_bits_f32(vec_f32 x) {
    return (vec_i32)x;
}
TU_LANE vec_f32 tu_float_f32(vec_i32 bits) {
    return (vec_f32)bits;
}
TU_LANE vec_i64 tu_bits_f64(vec_f64 x) {
    return (vec_i64)x;
}
TU_LANE vec_f64 tu_float_f64(vec_i64 bits) {
    return (vec_f64)bits;
}

/* Compilers turn this into a blend. */
#define TU_SELECT(mask, yes, no)                                                                              \
    ({                                                                                                        \
        __typeof__(mask) tu_mask = (mask);                                                                    \
        __typeof__(yes) tu_yes = (yes), tu_no = (no);                                                         \
        (__typeof__(yes))(((__typeof__(tu_mask))tu_yes & tu_mask) | ((__typeof__(tu_mask))tu_no & ~tu_mask)); \
    })
#define TU_NOT(mask) (~(mask))

TU_LANE vec_i32 tu_left_f32(vec_i32 bits, int count) {
    return bits << count;
}
TU_LANE vec_i64 tu_left_f64(vec_i64 bits, int count) {
    return bits << count;
}
TU_LANE vec_i64 tu_right_f64(vec_i64 bits, int count) {
    return (vec_i64)((vec_u64)bits >> count);
}

#define TU_VECTOR_PRIMITIVES(suffix, type)                     \
    TU_LANE vec_##suffix tu_splat_##suffix(type x) {           \
        return x - (vec_##suffix){ 0 };                        \
    }                                                          \
    TU_LANE vec_##suffix tu_load_##suffix(const type *from) {  \
        vec_##suffix x;                                        \
        memcpy(&x, from, sizeof x);                            \
        return x;                                              \
    }                                                          \
    TU_LANE void tu_store_##suffix(type *to, vec_##suffix x) { \
        memcpy(to, &x, sizeof x);                              \
    }                                                          \
    TU_LANE type tu_first_##suffix(vec_##suffix x) {           \
        return x[0];                                           \
    }
TU_VECTOR_PRIMITIVES(f32, float)
TU_VECTOR_PRIMITIVES(f64, double)
TU_VECTOR_PRIMITIVES(i64, int64_t)
TU_VECTOR_PRIMITIVES(u64, uint64_t)
#undef TU_VECTOR_PRIMITIVES

/* The mask of the first `count` lanes. */
TU_LANE vec_i32 tu_below_f32(int64_t count) {
    static const int32_t numbers[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    vec_i32 lane;
    memcpy(&lane, numbers, sizeof lane);
    return lane < (int32_t)count;
}
TU_LANE vec_i64 tu_below_f64(int64_t count) {
    static const int64_t numbers[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    vec_i64 lane;
    memcpy(&lane, numbers, sizeof lane);
    return lane < count;
}

#define TU_HALVES 2

#endif
