/* SPDX-License-Identifier: Apache-2.0
 *
 * The dialect in which operators.def writes expressions: + - * / and unary minus on values; == != < <= > >= between
 * values where a condition stands; and the words below. One expression serves the kernels of every compute type, the
 * text of compiled code, and the documentation.
 *
 *     NUMBER(c)            a literal, as a value of the compute type
 *     SELECT(condition, a, b), TRUTH(condition)   a or b; 1 or 0. Both sides are computed.
 *     AND(c, d) OR(c, d) NOT(c)                   of conditions
 *     FMA(a, b, c)         a * b + c with one rounding
 *     ABS SIGN SQRT RSQRT EXP EXPM1 LOG LOG1P SIN COS TANH ERF SIGMOID FLOOR CEIL ROUND TRUNC CONJ    of one value
 *     NORMAL_CDF(x)        the share of a normal distribution below x
 *     GELU GELU_TANH, GELU_SLOPE GELU_TANH_SLOPE SILU_SLOPE   activations and derivatives that share an exponential
 *     POW(a, b) COPYSIGN(a, b) MAXIMUM(a, b) MINIMUM(a, b)    the last two pass a NaN on
 *
 * Meanings for floats are those of tensor/kernel/elementary.h, for one number or a register of them: the same bits
 * everywhere. Before including this file define SUFFIX, the compute type's name (f32, f64, i64, u64, c128); a level's
 * header (tensor/kernel/avx2.h) may come first. The words follow SUFFIX when it is redefined.
 */
#ifndef TU_TENSOR_DIALECT_H
#define TU_TENSOR_DIALECT_H

#ifndef __cplusplus /* in CUDA C there are no complex numbers */
#include <complex.h>
#endif
#include <stdint.h>

#include "tensor/kernel/elementary.h"

#define TU_MEANING(word) TU_MEANING_OF(word, SUFFIX)
#define TU_MEANING_OF(word, suffix) TU_MEANING_JOIN(word, suffix)
#define TU_MEANING_JOIN(word, suffix) tu_##word##_##suffix

#define NUMBER(value) TU_MEANING(number)(value)
#define SELECT(condition, left, right) TU_SELECT(condition, left, right)
#define TRUTH(condition) TU_SELECT(condition, NUMBER(1), NUMBER(0))
/* Masks of vectors have no && and ||; on single numbers clang asks whether they were meant. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wbitwise-instead-of-logical"
#endif
#define AND(left, right) ((left) & (right))
#define OR(left, right) ((left) | (right))
#define NOT(left) TU_NOT(left)
#define FMA(left, right, addend) TU_MEANING(fma)(left, right, addend)
#define ABS(x) TU_MEANING(abs)(x)
#define SIGN(x) TU_MEANING(sign)(x)
#define SQRT(x) TU_MEANING(sqrt)(x)
#define RSQRT(x) TU_MEANING(rsqrt)(x)
#define EXP(x) TU_MEANING(exp)(x)
#define EXPM1(x) TU_MEANING(expm1)(x)
#define LOG(x) TU_MEANING(log)(x)
#define LOG1P(x) TU_MEANING(log1p)(x)
#define SIN(x) TU_MEANING(sin)(x)
#define COS(x) TU_MEANING(cos)(x)
#define TANH(x) TU_MEANING(tanh)(x)
#define ERF(x) TU_MEANING(erf)(x)
#define SIGMOID(x) TU_MEANING(sigmoid)(x)
#define NORMAL_CDF(x) TU_MEANING(normal_cdf)(x)
#define GELU(x) TU_MEANING(gelu)(x)
#define GELU_SLOPE(x) TU_MEANING(gelu_slope)(x)
#define GELU_TANH(x) TU_MEANING(gelu_tanh)(x)
#define GELU_TANH_SLOPE(x) TU_MEANING(gelu_tanh_slope)(x)
#define SILU_SLOPE(x) TU_MEANING(silu_slope)(x)
#define POW(left, right) TU_MEANING(pow)(left, right)
#define FLOOR(x) TU_MEANING(floor)(x)
#define CEIL(x) TU_MEANING(ceil)(x)
#define ROUND(x) TU_MEANING(round)(x)
#define TRUNC(x) TU_MEANING(trunc)(x)
#define COPYSIGN(left, right) TU_MEANING(copysign)(left, right)
#define CONJ(x) TU_MEANING(conj)(x)
#define MAXIMUM(left, right) TU_MEANING(maximum)(left, right)
#define MINIMUM(left, right) TU_MEANING(minimum)(left, right)

/* ---- floats: what elementary.h has not ---- */

#define TU_FLOAT_MEANINGS(suffix, type)                                                   \
    TU_LANE vec_##suffix tu_number_##suffix(double number) {                              \
        return tu_splat_##suffix((type)number);                                           \
    }                                                                                     \
    TU_LANE vec_##suffix tu_sign_##suffix(vec_##suffix x) {                               \
        vec_##suffix zero = tu_splat_##suffix(0), one = tu_splat_##suffix(1);             \
        vec_##suffix nonpositive = TU_SELECT(x < zero, -one, TU_SELECT(x != x, x, zero)); \
        return TU_SELECT(x > zero, one, nonpositive);                                     \
    }                                                                                     \
    TU_LANE vec_##suffix tu_conj_##suffix(vec_##suffix x) {                               \
        return x;                                                                         \
    }
TU_FLOAT_MEANINGS(f32, float)
TU_FLOAT_MEANINGS(f64, double)
#undef TU_FLOAT_MEANINGS

/* ---- integers, which wrap: compiled with -fwrapv ---- */

#define TU_INTEGER_MEANINGS(suffix, type)                                              \
    TU_LANE type tu_number_##suffix(type number) {                                     \
        return number;                                                                 \
    }                                                                                  \
    TU_LANE type tu_conj_##suffix(type x) {                                            \
        return x;                                                                      \
    }                                                                                  \
    TU_LANE type tu_floor_##suffix(type x) {                                           \
        return x;                                                                      \
    }                                                                                  \
    TU_LANE type tu_ceil_##suffix(type x) {                                            \
        return x;                                                                      \
    }                                                                                  \
    TU_LANE type tu_round_##suffix(type x) {                                           \
        return x;                                                                      \
    }                                                                                  \
    TU_LANE type tu_maximum_##suffix(type left, type right) {                          \
        return left > right ? left : right;                                            \
    }                                                                                  \
    TU_LANE type tu_minimum_##suffix(type left, type right) {                          \
        return left < right ? left : right;                                            \
    }                                                                                  \
    TU_LANE type tu_abs_##suffix(type x) {                                             \
        return x > 0 ? x : -x;                                                         \
    }                                                                                  \
    TU_LANE type tu_sign_##suffix(type x) {                                            \
        return (type)(x > 0) - (type)(x != 0 && !(x > 0));                             \
    }                                                                                  \
    /* A negative power is a fraction, cut to 0 unless the base is 1 or -1. */         \
    TU_LANE type tu_pow_##suffix(type left, type right) {                              \
        type result = 1;                                                               \
        if (right < (type)1 && right != 0)                                             \
            return left == 1 ? 1 : left == (type)-1 ? (right % 2 == 0 ? 1 : left) : 0; \
        for (type square = left; right != 0; right /= 2, square *= square)             \
            result *= right % 2 != 0 ? square : 1;                                     \
        return result;                                                                 \
    }
TU_INTEGER_MEANINGS(i64, int64_t)
TU_INTEGER_MEANINGS(u64, uint64_t)

/* ---- complex numbers ---- */

#ifndef __cplusplus
typedef double _Complex tu_c128;
TU_LANE tu_c128 tu_number_c128(double number) {
    return number;
}
TU_LANE tu_c128 tu_conj_c128(tu_c128 x) {
    return conj(x);
}
TU_LANE tu_c128 tu_abs_c128(tu_c128 x) {
    return cabs(x);
}
TU_LANE tu_c128 tu_sqrt_c128(tu_c128 x) {
    return csqrt(x);
}
TU_LANE tu_c128 tu_exp_c128(tu_c128 x) {
    return cexp(x);
}
TU_LANE tu_c128 tu_log_c128(tu_c128 x) {
    return clog(x);
}
#endif

#endif
