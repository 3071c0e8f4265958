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
 *     ABS SIGN SQRT EXP LOG SIN COS TANH ERF SIGMOID FLOOR CEIL ROUND CONJ    of one value
 *     NORMAL_CDF(x)        the share of a normal distribution below x
 *     POW(a, b) MAXIMUM(a, b) MINIMUM(a, b)       the last two pass a NaN on
 *
 * Before including this file define TYPE, the compute type, and SUFFIX, its name (f32, f64, i64, u64, c128). It can be
 * included again after both are redefined.
 */
#ifndef TU_TENSOR_DIALECT_H
#define TU_TENSOR_DIALECT_H

#include <complex.h>
#include <math.h>
#include <stdint.h>

#include "tensor/vector_math.h"

#define TU_MEANING(word) TU_MEANING_OF(word, SUFFIX)
#define TU_MEANING_OF(word, suffix) TU_MEANING_JOIN(word, suffix)
#define TU_MEANING_JOIN(word, suffix) tu_##word##_##suffix

#define NUMBER(number) ((TYPE)(number))
#define SELECT(condition, a, b) ((condition) ? (a) : (b))
#define TRUTH(condition) ((TYPE)((condition) != 0))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define NOT(a) (!(a))
#define FMA(a, b, c) TU_MEANING(fma)(a, b, c)
#define ABS(x) TU_MEANING(abs)(x)
#define SIGN(x) TU_MEANING(sign)(x)
#define SQRT(x) TU_MEANING(sqrt)(x)
#define EXP(x) TU_MEANING(exp)(x)
#define LOG(x) TU_MEANING(log)(x)
#define SIN(x) TU_MEANING(sin)(x)
#define COS(x) TU_MEANING(cos)(x)
#define TANH(x) TU_MEANING(tanh)(x)
#define ERF(x) TU_MEANING(erf)(x)
#define SIGMOID(x) TU_MEANING(sigmoid)(x)
#define NORMAL_CDF(x) TU_MEANING(normal_cdf)(x)
#define POW(a, b) TU_MEANING(pow)(a, b)
#define FLOOR(x) TU_MEANING(floor)(x)
#define CEIL(x) TU_MEANING(ceil)(x)
#define ROUND(x) TU_MEANING(round)(x)
#define CONJ(x) TU_MEANING(conj)(x)
#define MAXIMUM(a, b) TU_MEANING(maximum)(a, b)
#define MINIMUM(a, b) TU_MEANING(minimum)(a, b)

/* ---- floats ---- */

#define TU_FLOAT_MEANINGS(suffix, type, letter)                           \
    TU_INLINE type tu_fma_##suffix(type a, type b, type c) {              \
        return fma##letter(a, b, c);                                      \
    }                                                                     \
    TU_INLINE type tu_abs_##suffix(type x) {                              \
        return fabs##letter(x);                                           \
    }                                                                     \
    TU_INLINE type tu_sign_##suffix(type x) {                             \
        return x > 0 ? (type)1 : x < 0 ? (type)-1 : x != x ? x : (type)0; \
    }                                                                     \
    TU_INLINE type tu_sqrt_##suffix(type x) {                             \
        return sqrt##letter(x);                                           \
    }                                                                     \
    TU_INLINE type tu_erf_##suffix(type x) {                              \
        return erf##letter(x);                                            \
    }                                                                     \
    TU_INLINE type tu_pow_##suffix(type a, type b) {                      \
        return pow##letter(a, b);                                         \
    }                                                                     \
    TU_INLINE type tu_floor_##suffix(type x) {                            \
        return floor##letter(x);                                          \
    }                                                                     \
    TU_INLINE type tu_ceil_##suffix(type x) {                             \
        return ceil##letter(x);                                           \
    }                                                                     \
    TU_INLINE type tu_round_##suffix(type x) {                            \
        return rint##letter(x);                                           \
    }                                                                     \
    TU_INLINE type tu_conj_##suffix(type x) {                             \
        return x;                                                         \
    }                                                                     \
    TU_INLINE type tu_maximum_##suffix(type a, type b) {                  \
        return a != a ? a : b != b ? b : a > b ? a : b;                   \
    }                                                                     \
    TU_INLINE type tu_minimum_##suffix(type a, type b) {                  \
        return a != a ? a : b != b ? b : a < b ? a : b;                   \
    }
TU_FLOAT_MEANINGS(f32, float, f)
TU_FLOAT_MEANINGS(f64, double, )

TU_INLINE float tu_exp_f32(float x) {
    return tu_expf(x);
}
TU_INLINE double tu_exp_f64(double x) {
    return exp(x);
}
/* Denormals are scaled up first; what has no logarithm is chosen at the end. */
TU_INLINE float tu_log_f32(float x) {
    float scaled = x < 1.17549435e-38f ? x * 0x1p23f : x;
    float result = tu_logf_normal(scaled) - (x < 1.17549435e-38f ? 15.9423847f : 0.0f);
    result = x == 0 ? -INFINITY : result;
    result = x < 0 ? NAN : result;
    return x != x || x == INFINITY ? x : result;
}
TU_INLINE double tu_log_f64(double x) {
    return log(x);
}
TU_INLINE float tu_sin_f32(float x) {
    return fabsf(x) < 8192.0f ? tu_sincosf(x, 0) : sinf(x);
}
TU_INLINE double tu_sin_f64(double x) {
    return sin(x);
}
TU_INLINE float tu_cos_f32(float x) {
    return fabsf(x) < 8192.0f ? tu_sincosf(x, 1) : cosf(x);
}
TU_INLINE double tu_cos_f64(double x) {
    return cos(x);
}
TU_INLINE float tu_tanh_f32(float x) {
    return tu_tanhf(x);
}
TU_INLINE double tu_tanh_f64(double x) {
    return tanh(x);
}
TU_INLINE float tu_sigmoid_f32(float x) {
    return tu_sigmoidf(x);
}
TU_INLINE double tu_sigmoid_f64(double x) {
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}
TU_INLINE float tu_normal_cdf_f32(float x) {
    return tu_normal_cdff(x);
}
TU_INLINE double tu_normal_cdf_f64(double x) {
    return 0.5 * erfc(-x * M_SQRT1_2);
}

/* ---- integers, which wrap: compiled with -fwrapv ---- */

#define TU_INTEGER_MEANINGS(suffix, type)                                      \
    TU_INLINE type tu_conj_##suffix(type x) {                                  \
        return x;                                                              \
    }                                                                          \
    TU_INLINE type tu_floor_##suffix(type x) {                                 \
        return x;                                                              \
    }                                                                          \
    TU_INLINE type tu_ceil_##suffix(type x) {                                  \
        return x;                                                              \
    }                                                                          \
    TU_INLINE type tu_round_##suffix(type x) {                                 \
        return x;                                                              \
    }                                                                          \
    TU_INLINE type tu_maximum_##suffix(type a, type b) {                       \
        return a > b ? a : b;                                                  \
    }                                                                          \
    TU_INLINE type tu_minimum_##suffix(type a, type b) {                       \
        return a < b ? a : b;                                                  \
    }                                                                          \
    TU_INLINE type tu_abs_##suffix(type x) {                                   \
        return x > 0 ? x : -x;                                                 \
    }                                                                          \
    TU_INLINE type tu_sign_##suffix(type x) {                                  \
        return (type)(x > 0) - (type)(x != 0 && !(x > 0));                     \
    }                                                                          \
    /* A negative power is a fraction, cut to 0 unless the base is 1 or -1. */ \
    TU_INLINE type tu_pow_##suffix(type a, type b) {                           \
        type result = 1;                                                       \
        if (b < (type)1 && b != 0)                                             \
            return a == 1 ? 1 : a == (type)-1 ? (b % 2 == 0 ? 1 : a) : 0;      \
        for (type square = a; b != 0; b /= 2, square *= square)                \
            result *= b % 2 != 0 ? square : 1;                                 \
        return result;                                                         \
    }
TU_INTEGER_MEANINGS(i64, int64_t)
TU_INTEGER_MEANINGS(u64, uint64_t)

/* ---- complex numbers ---- */

typedef double _Complex tu_c128;
TU_INLINE tu_c128 tu_conj_c128(tu_c128 x) {
    return conj(x);
}
TU_INLINE tu_c128 tu_abs_c128(tu_c128 x) {
    return cabs(x);
}
TU_INLINE tu_c128 tu_sqrt_c128(tu_c128 x) {
    return csqrt(x);
}
TU_INLINE tu_c128 tu_exp_c128(tu_c128 x) {
    return cexp(x);
}
TU_INLINE tu_c128 tu_log_c128(tu_c128 x) {
    return clog(x);
}

#endif
