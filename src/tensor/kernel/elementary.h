/* SPDX-License-Identifier: Apache-2.0
 *
 * Elementary functions in f32 and f64, written once on the types vec_f32 and vec_f64: one lane (scalar.h; also in CUDA
 * C) or the register of an instruction set (avx2.h, avx512.h, neon.h; include it first).
 *
 * Every step is an IEEE operation that all levels have: + - * /, square root, fma where written, and integer work on
 * the bits. So a function gives the same bits at every level and on a GPU. Denormals are kept; NaN gives NaN.
 *
 * Largest errors in units in the last place, in f32 and f64 alike (tests/tensor/elementary.c sweeps them):
 *
 *   exp, log 1;  log1p, erf, rsqrt 1.5;  expm1, sin, cos 2;  tanh, sigmoid 2.5;  pow 1 (f32), 2 (f64);
 *   normal_cdf 6, down to where it underflows, and gelu 6.5 in f64 alike;  gelu_tanh 25 for x > -4 (its own formula,
 *   not exact gelu);  slopes 6 units of numbers around 1/4, since they cross 0.  In f32 gelu is x times a share
 *   that is good to 7 units of numbers around 1/4 (7 in the last place for x > -1), and its slope to 8 of them.
 *
 * The polynomials are minimax fits on the intervals that the comments name.
 */
#ifndef TU_TENSOR_KERNEL_ELEMENTARY_H
#define TU_TENSOR_KERNEL_ELEMENTARY_H

#ifndef TU_LANE /* no level's header came first: one lane */
#include "tensor/kernel/scalar.h"
#endif

#define TU_K32(x) tu_splat_f32(x)
#define TU_K64(x) tu_splat_f64(x)

/* ---- signs ---- */

#ifdef __CUDACC__
TU_LANE vec_f32 tu_abs_f32(vec_f32 x) {
    return fabsf(x); /* a part of the instruction that takes it */
}
#else
TU_LANE vec_f32 tu_abs_f32(vec_f32 x) {
    return tu_float_f32(tu_bits_f32(x) & 0x7fffffff);
}
#endif
TU_LANE vec_f64 tu_abs_f64(vec_f64 x) {
    return tu_float_f64(tu_bits_f64(x) & INT64_MAX);
}
/* The magnitude of x with the sign of y. */
#ifdef __CUDACC__
TU_LANE vec_f32 tu_copysign_f32(vec_f32 x, vec_f32 y) {
    return copysignf(x, y); /* one instruction, where the compiler would make two of the bits below */
}
#else
TU_LANE vec_f32 tu_copysign_f32(vec_f32 x, vec_f32 y) {
    return tu_float_f32((tu_bits_f32(x) & 0x7fffffff) | (tu_bits_f32(y) & INT32_MIN));
}
#endif
TU_LANE vec_f64 tu_copysign_f64(vec_f64 x, vec_f64 y) {
    return tu_float_f64((tu_bits_f64(x) & INT64_MAX) | (tu_bits_f64(y) & INT64_MIN));
}

/* The larger and the smaller; a NaN of either side passes. */
#define TU_EXTREMES(suffix)                                                          \
    TU_LANE vec_##suffix tu_maximum_##suffix(vec_##suffix x, vec_##suffix y) {       \
        vec_##suffix larger = tu_greater_##suffix(x, y); /* y where either is NaN */ \
        return TU_SELECT(x != x, x, larger);                                         \
    }                                                                                \
    TU_LANE vec_##suffix tu_minimum_##suffix(vec_##suffix x, vec_##suffix y) {       \
        vec_##suffix smaller = tu_lesser_##suffix(x, y);                             \
        return TU_SELECT(x != x, x, smaller);                                        \
    }
TU_EXTREMES(f32)
TU_EXTREMES(f64)
#undef TU_EXTREMES

/* left / right for a right between 1 and 2^60 and a left of at most 2^100 in magnitude; where left is tiny (below
 * 2^-100), right is a power of two. A GPU divides by the same steps that its compiler writes, without asking
 * whether numbers are out of the ordinary, which costs branches: with these they are not, and for a power of two every
 * step is exact but the last. */
#ifdef __CUDACC__
TU_LANE vec_f32 tu_tame_ratio_f32(vec_f32 left, vec_f32 right) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(right));
    inverse = tu_fma_f32(inverse, tu_fma_f32(-right, inverse, 1.0f), inverse);
    float ratio = left * inverse;
    return tu_fma_f32(inverse, tu_fma_f32(-right, ratio, left), ratio);
}
#else
TU_LANE vec_f32 tu_tame_ratio_f32(vec_f32 left, vec_f32 right) {
    return left / right;
}
#endif
/* The same in tanh and sigmoid, where on Hopper its inverse is good enough as it comes: that was tried for every number
 * (tests/cuda/elementary.c), and is known of no other processor. */
TU_LANE vec_f32 tu_tried_ratio_f32(vec_f32 left, vec_f32 right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(TU_RATIOS_UNTRIED)
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(right));
    float ratio = left * inverse;
    return tu_fma_f32(tu_fma_f32(-right, ratio, left), inverse, ratio);
#else
    return tu_tame_ratio_f32(left, right);
#endif
}
TU_LANE vec_f64 tu_tame_ratio_f64(vec_f64 left, vec_f64 right) {
    return left / right;
}

/* ---- powers of two ----
 *
 * Adding 1.5 * 2^23 (2^52 for f64) to a small number rounds it to an integer, which then stands in the low bits. */

#define TU_MAGIC32 12582912.0f
#define TU_MAGIC64 6755399441055744.0

/* 2^exponent for a whole exponent from -126 to 127 (-1022 to 1023) */
TU_LANE vec_f32 tu_power_of_two_f32(vec_f32 exponent) {
    return tu_float_f32(tu_left_f32(tu_bits_f32(exponent + TU_K32(TU_MAGIC32 + 127)), 23));
}
TU_LANE vec_f64 tu_power_of_two_f64(vec_f64 exponent) {
    return tu_float_f64(tu_left_f64(tu_bits_f64(exponent + TU_K64(TU_MAGIC64 + 1023)), 52));
}
/* 2^(exponent + more) where the sum of an exponent and the magic number is at hand, as rounding left it. */
TU_LANE vec_f32 tu_power_of_sum_f32(vec_f32 sum, int more) {
    return tu_float_f32((vec_i32)((vec_u32)tu_left_f32(tu_bits_f32(sum), 23) + ((uint32_t)(127 + more) << 23)));
}
TU_LANE vec_f64 tu_power_of_sum_f64(vec_f64 sum, int more) {
    return tu_float_f64((vec_i64)((vec_u64)tu_left_f64(tu_bits_f64(sum), 52) + ((uint64_t)(1023 + more) << 52)));
}

#ifdef TU_SCALE_BY_PARTS
/* x 2^exponent for x between 1/2 and 2: the first factor is exact, the second rounds once, to a denormal or infinity
 * too. */
TU_LANE vec_f32 tu_scale_f32(vec_f32 x, vec_f32 exponent) {
    vec_f32 half = tu_fma_f32(exponent, TU_K32(0.5f), TU_K32(TU_MAGIC32)) - TU_K32(TU_MAGIC32);
    return x * tu_power_of_two_f32(half) * tu_power_of_two_f32(exponent - half);
}
TU_LANE vec_f64 tu_scale_f64(vec_f64 x, vec_f64 exponent) {
    vec_f64 half = tu_fma_f64(exponent, TU_K64(0.5), TU_K64(TU_MAGIC64)) - TU_K64(TU_MAGIC64);
    return x * tu_power_of_two_f64(half) * tu_power_of_two_f64(exponent - half);
}

/* The same for an exponent that is not above 0, in fewer steps; of it there is the sum with the magic number. */
TU_LANE vec_f32 tu_scale_down_f32(vec_f32 x, vec_f32 sum) {
    return x * tu_power_of_sum_f32(sum, 64) * TU_K32(0x1p-64f);
}
TU_LANE vec_f64 tu_scale_down_f64(vec_f64 x, vec_f64 sum) {
    return x * tu_power_of_sum_f64(sum, 512) * TU_K64(0x1p-512);
}
#else
TU_LANE vec_f32 tu_scale_down_f32(vec_f32 x, vec_f32 sum) {
    return tu_scale_f32(x, sum - TU_K32(TU_MAGIC32));
}
TU_LANE vec_f64 tu_scale_down_f64(vec_f64 x, vec_f64 sum) {
    return tu_scale_f64(x, sum - TU_K64(TU_MAGIC64));
}
#endif

/* ---- exp, expm1 ---- */

/* x = n ln 2 + r with |r| <= ln 2 / 2: sets the sum of the exponent n and the magic number, and the remainder r, and
 * returns (e^r - 1 - r) / r^2, which is 1/2 + r/6 + …. */
TU_LANE vec_f32 tu_exp_fit_f32(vec_f32 x, vec_f32 *sum, vec_f32 *remainder) {
    *sum = tu_fma_f32(x, TU_K32(0x1.715476p+0f), TU_K32(TU_MAGIC32));
    vec_f32 whole = *sum - TU_K32(TU_MAGIC32);
    vec_f32 rest = tu_fma_f32(whole, TU_K32(-0x1.62e43p-1f), x);
    *remainder = rest = tu_fma_f32(whole, TU_K32(0x1.05c61p-29f), rest);
    vec_f32 fit = tu_fma_f32(rest, TU_K32(0x1.6da0cp-10f), TU_K32(0x1.122d8ep-7f));
    fit = tu_fma_f32(fit, rest, TU_K32(0x1.55547ep-5f));
    fit = tu_fma_f32(fit, rest, TU_K32(0x1.5554a8p-3f));
    return tu_fma_f32(fit, rest, TU_K32(0.5f));
}
/* e^r, and the sum. */
TU_LANE vec_f32 tu_exp_rest_f32(vec_f32 x, vec_f32 *sum) {
    vec_f32 rest, fit = tu_exp_fit_f32(x, sum, &rest);
    return tu_fma_f32(tu_fma_f32(fit, rest, TU_K32(1.0f)), rest, TU_K32(1.0f));
}
/* In f64 e^r - 1 - r is returned. */
TU_LANE vec_f64 tu_exp_parts_f64(vec_f64 x, vec_f64 *sum, vec_f64 *remainder) {
    *sum = tu_fma_f64(x, TU_K64(0x1.71547652b82fep+0), TU_K64(TU_MAGIC64));
    vec_f64 whole = *sum - TU_K64(TU_MAGIC64);
    vec_f64 rest = tu_fma_f64(whole, TU_K64(-0x1.62e42fefa39efp-1), x);
    rest = tu_fma_f64(whole, TU_K64(-0x1.abc9e3b39803fp-56), rest);
    vec_f64 fit = tu_fma_f64(rest, TU_K64(0x1.1f98c0a3023cap-29), TU_K64(0x1.af63bc088d0a1p-26));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.27e4c374028acp-22));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.71ddf5abe3caep-19));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.a01a01b1ba890p-16));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.a01a01b0db871p-13));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.6c16c16c14110p-10));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.111111110f484p-7));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.555555555555bp-5));
    fit = tu_fma_f64(fit, rest, TU_K64(0x1.5555555555559p-3));
    fit = tu_fma_f64(fit, rest, TU_K64(0.5));
    *remainder = rest;
    return fit * (rest * rest);
}

/* Beyond the limits the results are 0 and infinity; the order of the arguments lets a NaN through. */
TU_LANE vec_f32 tu_exp_f32(vec_f32 x) {
    vec_f32 sum, limited = tu_greater_f32(TU_K32(-104.0f), tu_lesser_f32(TU_K32(89.0f), x));
    vec_f32 rest = tu_exp_rest_f32(limited, &sum);
    return tu_scale_f32(rest, sum - TU_K32(TU_MAGIC32));
}
TU_LANE vec_f64 tu_exp_f64(vec_f64 x) {
    vec_f64 sum, remainder, limited = tu_greater_f64(TU_K64(-746.0), tu_lesser_f64(TU_K64(710.0), x));
    vec_f64 more = tu_exp_parts_f64(limited, &sum, &remainder);
    return tu_scale_f64(TU_K64(1.0) + (remainder + more), sum - TU_K64(TU_MAGIC64));
}

/* The same bits for x that is not above 0, or NaN, as what is left of a row when its largest element is taken away. */
TU_LANE vec_f32 tu_exp_below_f32(vec_f32 x) {
    vec_f32 sum, rest = tu_exp_rest_f32(tu_greater_f32(TU_K32(-104.0f), x), &sum);
    return tu_scale_down_f32(rest, sum);
}
/* And of -|x|. */
TU_LANE vec_f32 tu_exp_minus_f32(vec_f32 x) {
    vec_f32 sum, rest = tu_exp_rest_f32(-tu_lesser_f32(TU_K32(104.0f), tu_abs_f32(x)), &sum);
    return tu_scale_down_f32(rest, sum);
}
TU_LANE vec_f64 tu_exp_below_f64(vec_f64 x) {
    vec_f64 sum, remainder, more = tu_exp_parts_f64(tu_greater_f64(TU_K64(-746.0), x), &sum, &remainder);
    return tu_scale_down_f64(TU_K64(1.0) + (remainder + more), sum);
}
/* And of -|x|. */
TU_LANE vec_f64 tu_exp_minus_f64(vec_f64 x) {
    vec_f64 sum, remainder, limited = -tu_lesser_f64(TU_K64(746.0), tu_abs_f64(x));
    vec_f64 more = tu_exp_parts_f64(limited, &sum, &remainder);
    return tu_scale_down_f64(TU_K64(1.0) + (remainder + more), sum);
}

/* With exponent n and remainder r: 2^n (e^r - 1) + (2^n - 1), halved so that the largest 2^n fits; below the lower
 * limit it rounds to -1. */
TU_LANE vec_f32 tu_expm1_f32(vec_f32 x) {
    vec_f32 sum, rest, limited = tu_greater_f32(TU_K32(-18.0f), tu_lesser_f32(TU_K32(89.0f), x));
    vec_f32 fit = tu_exp_fit_f32(limited, &sum, &rest), power = tu_power_of_sum_f32(sum, -1);
    vec_f32 result = tu_fma_f32(power, tu_fma_f32(fit, rest * rest, rest), power - TU_K32(0.5f));
    return TU_SELECT(x == TU_K32(0.0f), x, result + result); /* -0 stays */
}
TU_LANE vec_f64 tu_expm1_f64(vec_f64 x) {
    vec_f64 sum, remainder, limited = tu_greater_f64(TU_K64(-40.0), tu_lesser_f64(TU_K64(710.0), x));
    vec_f64 more = tu_exp_parts_f64(limited, &sum, &remainder), power = tu_power_of_sum_f64(sum, -1);
    vec_f64 result = tu_fma_f64(power, remainder + more, power - TU_K64(0.5));
    return TU_SELECT(x == TU_K64(0.0), x, result + result);
}

/* ---- log, log1p ---- */

/* x = 2^n (1 + fraction) with 1 + fraction in [sqrt 1/2, sqrt 2), for normal positive x; returns n. */
TU_LANE vec_f32 tu_log_parts_f32(vec_f32 x, vec_f32 *fraction) {
    vec_i32 bits = (vec_i32)((vec_u32)tu_bits_f32(x) + (0x3f800000 - 0x3f3504f3)); /* wraps for a NaN */
    *fraction = tu_float_f32((bits & 0x7fffff) + 0x3f3504f3) - TU_K32(1.0f);
    return tu_float_f32(((bits >> 23) & 0x1ff) | 0x4b000000) - TU_K32(8388608.0f + 127);
}
TU_LANE vec_f64 tu_log_parts_f64(vec_f64 x, vec_f64 *fraction) {
    vec_i64 bits = (vec_i64)((vec_u64)tu_bits_f64(x) + (UINT64_C(0x3ff0000000000000) - UINT64_C(0x3fe6a09e667f3bcd)));
    *fraction = tu_float_f64((bits & INT64_C(0xfffffffffffff)) + INT64_C(0x3fe6a09e667f3bcd)) - TU_K64(1.0);
    return tu_float_f64(tu_right_f64(bits, 52) | INT64_C(0x4330000000000000)) - TU_K64(4503599627370496.0 + 1023);
}

/* log(1 + fraction) + exponent ln 2, the small parts first. */
TU_LANE vec_f32 tu_log_sum_f32(vec_f32 fraction, vec_f32 exponent) {
    vec_f32 square = fraction * fraction;
    vec_f32 fit = tu_fma_f32(fraction, TU_K32(-0x1.38b428p-4f), TU_K32(0x1.056fa2p-3f));
    fit = tu_fma_f32(fit, fraction, TU_K32(-0x1.0d8ed6p-3f));
    fit = tu_fma_f32(fit, fraction, TU_K32(0x1.22d80ep-3f));
    fit = tu_fma_f32(fit, fraction, TU_K32(-0x1.547126p-3f));
    fit = tu_fma_f32(fit, fraction, TU_K32(0x1.99a014p-3f));
    fit = tu_fma_f32(fit, fraction, TU_K32(-0x1.00022ap-2f));
    fit = tu_fma_f32(fit, fraction, TU_K32(0x1.555554p-2f));
    fit = tu_fma_f32(fit, fraction * square, exponent * TU_K32(-0x1.05c61p-29f));
    fit = tu_fma_f32(square, TU_K32(-0.5f), fit);
    return tu_fma_f32(exponent, TU_K32(0x1.62e43p-1f), fraction + fit);
}
/* With f the fraction, by the ratio s = f / (2 + f): log(1 + f) = 2 s + s^3 R(s^2) = f - f^2/2 + s (f^2/2 + s^2 R). */
TU_LANE vec_f64 tu_log_sum_f64(vec_f64 fraction, vec_f64 exponent) {
    vec_f64 ratio = fraction / (fraction + TU_K64(2.0)), square = ratio * ratio,
            half = TU_K64(0.5) * fraction * fraction;
    vec_f64 fit = tu_fma_f64(square, TU_K64(0x1.0f72f78127f25p-3), TU_K64(0x1.0f5b0b8900d58p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.3b20bf397917ep-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.745cddc30cf63p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.c71c725a6a5e6p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.249249242a0cfp-2));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.9999999999e0ep-2));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.5555555555555p-1));
    fit = tu_fma_f64(ratio, tu_fma_f64(fit, square, half), exponent * TU_K64(0x1.abc9e3b39803fp-56));
    return tu_fma_f64(exponent, TU_K64(0x1.62e42fefa39efp-1), fraction - (half - fit));
}

/* What is not normal and positive: denormals are scaled up, the rest has fixed results. */
TU_LANE vec_f32 tu_log_f32(vec_f32 x) {
    vec_f32 fraction, scaled = TU_SELECT(x < TU_K32(0x1p-126f), x * TU_K32(8388608.0f), x);
    vec_f32 exponent = tu_log_parts_f32(scaled, &fraction);
    exponent = TU_SELECT(x < TU_K32(0x1p-126f), exponent - TU_K32(23.0f), exponent);
    vec_f32 result = tu_log_sum_f32(fraction, exponent);
    result = TU_SELECT(x < TU_K32(__builtin_inff()), result, x + x); /* infinity and NaN */
    result = TU_SELECT(x == TU_K32(0.0f), TU_K32(-__builtin_inff()), result);
    return TU_SELECT(x < TU_K32(0.0f), TU_K32(__builtin_nanf("")), result);
}
/* Of what is neither below the smallest normal number nor above the largest. */
TU_LANE vec_f64 tu_log_normal_f64(vec_f64 x) {
    vec_f64 fraction, exponent = tu_log_parts_f64(x, &fraction);
    return tu_log_sum_f64(fraction, exponent);
}
TU_LANE vec_f64 tu_log_f64(vec_f64 x) {
    vec_f64 fraction, scaled = TU_SELECT(x < TU_K64(0x1p-1022), x * TU_K64(4503599627370496.0), x);
    vec_f64 exponent = tu_log_parts_f64(scaled, &fraction);
    exponent = TU_SELECT(x < TU_K64(0x1p-1022), exponent - TU_K64(52.0), exponent);
    vec_f64 result = tu_log_sum_f64(fraction, exponent);
    result = TU_SELECT(x < TU_K64(__builtin_inf()), result, x + x);
    result = TU_SELECT(x == TU_K64(0.0), TU_K64(-__builtin_inf()), result);
    return TU_SELECT(x < TU_K64(0.0), TU_K64(__builtin_nan("")), result);
}

/* The sum 1 + x loses `lost`, which joins the fraction at its scale. */
TU_LANE vec_f32 tu_log1p_f32(vec_f32 x) {
    vec_f32 fraction, sum = x + TU_K32(1.0f);
    vec_f32 lost = TU_SELECT(x < TU_K32(1.0f), x - (sum - TU_K32(1.0f)), TU_K32(1.0f) - (sum - x));
    vec_f32 exponent = tu_log_parts_f32(sum, &fraction);
    fraction = tu_fma_f32(lost, tu_power_of_two_f32(tu_greater_f32(TU_K32(-126.0f), -exponent)), fraction);
    vec_f32 result = tu_log_sum_f32(fraction, exponent);
    result = TU_SELECT(sum < TU_K32(__builtin_inff()), result, sum);
    result = TU_SELECT(sum == TU_K32(0.0f), TU_K32(-__builtin_inff()), result);
    result = TU_SELECT(sum < TU_K32(0.0f), TU_K32(__builtin_nanf("")), result);
    return TU_SELECT(tu_abs_f32(x) < TU_K32(0x1p-25f), x, result); /* denormals and -0 stay */
}
TU_LANE vec_f64 tu_log1p_f64(vec_f64 x) {
    vec_f64 fraction, sum = x + TU_K64(1.0);
    vec_f64 lost = TU_SELECT(x < TU_K64(1.0), x - (sum - TU_K64(1.0)), TU_K64(1.0) - (sum - x));
    vec_f64 exponent = tu_log_parts_f64(sum, &fraction);
    fraction = tu_fma_f64(lost, tu_power_of_two_f64(tu_greater_f64(TU_K64(-1022.0), -exponent)), fraction);
    vec_f64 result = tu_log_sum_f64(fraction, exponent);
    result = TU_SELECT(sum < TU_K64(__builtin_inf()), result, sum);
    result = TU_SELECT(sum == TU_K64(0.0), TU_K64(-__builtin_inf()), result);
    result = TU_SELECT(sum < TU_K64(0.0), TU_K64(__builtin_nan("")), result);
    return TU_SELECT(tu_abs_f64(x) < TU_K64(0x1p-54), x, result);
}

/* ---- sin, cos ---- */

#ifdef __CUDACC__
#define TU_FMA64 fma
#else
#define TU_FMA64 __builtin_fma
#endif

/* x = q pi/2 + remainder for one large finite x: the bits of 2/pi that matter, times the mantissa, modulo 4, in
 * integers. Returns q modulo 4; for what is not finite the remainder is NaN. */
TU_RARE int tu_reduce_large(double x, double *remainder) {
    static const uint64_t two_over_pi[23] = { /* two words of zeros, then the bits behind the point */
                                              0,
                                              0,
                                              0xa2f9836e4e441529,
                                              0xfc2757d1f534ddc0,
                                              0xdb6295993c439041,
                                              0xfe5163abdebbc561,
                                              0xb7246e3a424dd2e0,
                                              0x06492eea09d1921c,
                                              0xfe1deb1cb129a73e,
                                              0xe88235f52ebb4484,
                                              0xe99c7026b45f7e41,
                                              0x3991d639835339f4,
                                              0x9c845f8bbdf9283b,
                                              0x1ff897ffde05980f,
                                              0xef2f118b5a0a6d1f,
                                              0x6d367ecf27cb09b7,
                                              0x4f463f669e5fea2d,
                                              0x7527bac7ebe5f17b,
                                              0x3d0739f78a5292ea,
                                              0x6bfb5fb11f8d5d08,
                                              0x56033046fc7b6bab,
                                              0xf0cfbc209af4361d,
                                              0
    };
    uint64_t bits, window[3];
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52 & 0x7ff);
    uint64_t mantissa = (bits & 0xfffffffffffff) | 0x10000000000000;
    if (exponent == 0x7ff) {
        *remainder = x - x;
        return 0;
    }
    int first = exponent - 1075 + 126; /* the first bit whose product with the mantissa is below 4 */
    for (int i = 0; i < 3; i++) {
        int word = first / 64 + i, shift = first % 64;
        window[i] = two_over_pi[word] << shift;
        if (shift != 0)
            window[i] |= two_over_pi[word + 1] >> (64 - shift);
    }
    unsigned __int128 low = (unsigned __int128)window[2] * mantissa;
    unsigned __int128 high = ((unsigned __int128)(window[0] * mantissa) << 64) +
                             (unsigned __int128)window[1] * mantissa + (uint64_t)(low >> 64);
    int quadrant = (int)(high >> 126);
    unsigned __int128 part = high << 2; /* of a quadrant, as a fraction of 2^128 */
    bool negative = part >> 127 != 0;   /* nearer to the next one */
    if (negative) {
        part = -part;
        quadrant++;
    }
    int zeros = 0;
    while (zeros < 127 && part >> 127 == 0) {
        part <<= 1;
        zeros++;
    }
    double upper = (double)(uint64_t)(part >> 75), lower = (double)(uint64_t)(part >> 22 & 0x1fffffffffffff);
    uint64_t scale_bits = (uint64_t)(1023 - 53 - zeros) << 52; /* 2^(-53 - zeros) */
    double scale;
    memcpy(&scale, &scale_bits, sizeof scale);
    double rest = upper * 0x1.1a62633145c07p-54 + lower * 0x1.921fb54442d18p-53;
    double value = TU_FMA64(upper, 0x1.921fb54442d18p+0, rest) * scale;
    if ((bits >> 63 != 0) != negative)
        value = -value;
    *remainder = value;
    return (bits >> 63 != 0 ? -quadrant : quadrant) & 3;
}

/* The lanes of x that are too large for the fast reduction, one by one; `quadrant` lanes are q modulo 4. */
TU_RARE void tu_reduce_lanes_f32(const float *x, float *remainder, int32_t *quadrant) {
    for (int i = 0; i < TU_LANES_F32; i++) {
        double rest;
        if (x[i] < 65536.0f && x[i] > -65536.0f)
            continue;
        quadrant[i] = tu_reduce_large((double)x[i], &rest);
        remainder[i] = (float)rest;
    }
}
TU_RARE void tu_reduce_lanes_f64(const double *x, double *remainder, int64_t *quadrant) {
    for (int i = 0; i < TU_LANES_F64; i++)
        if (!(x[i] < 65536.0 && x[i] > -65536.0))
            quadrant[i] = tu_reduce_large(x[i], &remainder[i]);
}

/* x = q pi/2 + remainder; only the last two bits of q count. pi/2 in three parts; fma makes each step exact or nearly
 * so. */
TU_LANE vec_f32 tu_reduce_f32(vec_f32 x, vec_i32 *quadrant) {
    vec_f32 shifted = tu_fma_f32(x, TU_K32(0x1.45f306p-1f), TU_K32(TU_MAGIC32)), whole = shifted - TU_K32(TU_MAGIC32);
    vec_f32 remainder = tu_fma_f32(whole, TU_K32(-0x1.921fb6p+0f), x);
    remainder = tu_fma_f32(whole, TU_K32(0x1.777a5cp-25f), remainder);
    remainder = tu_fma_f32(whole, TU_K32(0x1.ee59dap-50f), remainder);
    *quadrant = tu_bits_f32(shifted);
    if (tu_any_f32(TU_NOT(tu_abs_f32(x) < TU_K32(65536.0f)))) {
        vec_f32 lanes = x;
        tu_reduce_lanes_f32((const float *)&lanes, (float *)&remainder, (int32_t *)quadrant);
    }
    return remainder;
}
/* The same for |x| < 65536. */
TU_LANE vec_f64 tu_reduce_near_f64(vec_f64 x, vec_i64 *quadrant) {
    vec_f64 shifted = tu_fma_f64(x, TU_K64(0x1.45f306dc9c883p-1), TU_K64(TU_MAGIC64)),
            whole = shifted - TU_K64(TU_MAGIC64);
    vec_f64 remainder = tu_fma_f64(whole, TU_K64(-0x1.921fb54442d18p+0), x);
    remainder = tu_fma_f64(whole, TU_K64(-0x1.1a62633145c07p-54), remainder);
    remainder = tu_fma_f64(whole, TU_K64(0x1.f1976b7ed8fbcp-110), remainder);
    *quadrant = tu_bits_f64(shifted);
    return remainder;
}
TU_LANE vec_f64 tu_reduce_f64(vec_f64 x, vec_i64 *quadrant) {
    vec_f64 remainder = tu_reduce_near_f64(x, quadrant);
    if (tu_any_f64(TU_NOT(tu_abs_f64(x) < TU_K64(65536.0)))) {
        vec_f64 lanes = x;
        tu_reduce_lanes_f64((const double *)&lanes, (double *)&remainder, (int64_t *)quadrant);
    }
    return remainder;
}

TU_LANE vec_f32 tu_wave_f32(vec_f32 remainder, vec_i32 quadrant) {
    vec_f32 square = remainder * remainder;
    vec_f32 sine = tu_fma_f32(square, TU_K32(0x1.6cbeccp-19f), TU_K32(-0x1.a00f32p-13f));
    sine = tu_fma_f32(sine, square, TU_K32(0x1.111108p-7f));
    sine = tu_fma_f32(sine, square, TU_K32(-0x1.555556p-3f));
    sine = tu_fma_f32(sine * square, remainder, remainder);
    vec_f32 cosine = tu_fma_f32(square, TU_K32(-0x1.2417ep-22f), TU_K32(0x1.a010c4p-16f));
    cosine = tu_fma_f32(cosine, square, TU_K32(-0x1.6c16b8p-10f));
    cosine = tu_fma_f32(cosine, square, TU_K32(0x1.555556p-5f));
    cosine = tu_fma_f32(cosine, square * square, tu_fma_f32(square, TU_K32(-0.5f), TU_K32(1.0f)));
    vec_f32 value = TU_SELECT((quadrant & 1) == 0, sine, cosine);
    return tu_float_f32(tu_bits_f32(value) ^ tu_left_f32(quadrant & 2, 30));
}
TU_LANE vec_f64 tu_wave_f64(vec_f64 remainder, vec_i64 quadrant) {
    vec_f64 square = remainder * remainder;
    vec_f64 sine = tu_fma_f64(square, TU_K64(0x1.5d80ec281a777p-33), TU_K64(-0x1.ae5e2957b3f7dp-26));
    sine = tu_fma_f64(sine, square, TU_K64(0x1.71de352c12a1fp-19));
    sine = tu_fma_f64(sine, square, TU_K64(-0x1.a01a019bbd241p-13));
    sine = tu_fma_f64(sine, square, TU_K64(0x1.111111110f5f0p-7));
    sine = tu_fma_f64(sine, square, TU_K64(-0x1.5555555555547p-3));
    sine = tu_fma_f64(sine * square, remainder, remainder);
    vec_f64 cosine = tu_fma_f64(square, TU_K64(-0x1.8f9acb2d81f48p-37), TU_K64(0x1.1ee9c69bf0db3p-29));
    cosine = tu_fma_f64(cosine, square, TU_K64(-0x1.27e4f7d4a3004p-22));
    cosine = tu_fma_f64(cosine, square, TU_K64(0x1.a01a019c6a5dcp-16));
    cosine = tu_fma_f64(cosine, square, TU_K64(-0x1.6c16c16c14ebep-10));
    cosine = tu_fma_f64(cosine, square, TU_K64(0x1.555555555554ap-5));
    cosine = tu_fma_f64(cosine, square * square, tu_fma_f64(square, TU_K64(-0.5), TU_K64(1.0)));
    vec_f64 value = TU_SELECT((quadrant & 1) == 0, sine, cosine);
    return tu_float_f64(tu_bits_f64(value) ^ tu_left_f64(quadrant & 2, 62));
}

#define TU_SIN_COS(suffix, integers)                                                                              \
    TU_LANE vec_##suffix tu_sin_##suffix(vec_##suffix x) {                                                        \
        integers quadrant;                                                                                        \
        vec_##suffix remainder = tu_reduce_##suffix(x, &quadrant), value = tu_wave_##suffix(remainder, quadrant); \
        return TU_SELECT(x == tu_splat_##suffix(0), x, value); /* -0 stays */                                     \
    }                                                                                                             \
    TU_LANE vec_##suffix tu_cos_##suffix(vec_##suffix x) {                                                        \
        integers quadrant;                                                                                        \
        vec_##suffix remainder = tu_reduce_##suffix(x, &quadrant);                                                \
        return tu_wave_##suffix(remainder, quadrant + 1);                                                         \
    }
TU_SIN_COS(f32, vec_i32)
TU_SIN_COS(f64, vec_i64)
#undef TU_SIN_COS

/* ---- tanh, sigmoid ---- */

/* With h = (exp(2 |x|) - 1) / 2: h / (h + 1). The limit is past where it rounds to 1. In f32 the remainder of 2 |x| is
 * halved too, and needs no second part: where |x| / ln 2 is not small, the error of h is. */
TU_LANE vec_f32 tu_tanh_f32(vec_f32 x) {
    vec_f32 limited = tu_lesser_f32(TU_K32(10.0f), tu_abs_f32(x));
    vec_f32 sum = tu_fma_f32(limited, TU_K32(0x1.715476p+1f), TU_K32(TU_MAGIC32)), whole = sum - TU_K32(TU_MAGIC32);
    vec_f32 rest = tu_fma_f32(whole, TU_K32(-0x1.62e43p-2f), limited);
    vec_f32 fit = tu_fma_f32(rest, TU_K32(0x1.6da0cp-5f), TU_K32(0x1.122d8ep-3f));
    fit = tu_fma_f32(fit, rest, TU_K32(0x1.55547ep-2f));
    fit = tu_fma_f32(fit, rest, TU_K32(0x1.5554a8p-1f));
    fit = tu_fma_f32(fit, rest, TU_K32(1.0f));
    vec_f32 power = tu_power_of_sum_f32(sum, 0), less = tu_fma_f32(power, TU_K32(0.5f), TU_K32(-0.5f));
    vec_f32 half = tu_fma_f32(power, tu_fma_f32(fit, rest * rest, rest), less);
    return tu_copysign_f32(tu_tried_ratio_f32(half, half + TU_K32(1.0f)), x);
}
TU_LANE vec_f64 tu_tanh_f64(vec_f64 x) {
    vec_f64 sum, remainder, twice = tu_lesser_f64(TU_K64(42.0), TU_K64(2.0) * tu_abs_f64(x));
    vec_f64 more = tu_exp_parts_f64(twice, &sum, &remainder), power = tu_power_of_sum_f64(sum, 0);
    vec_f64 exponential = tu_fma_f64(power, remainder + more, power - TU_K64(1.0));
    return tu_copysign_f64(exponential / (exponential + TU_K64(2.0)), x);
}

/* In f32 e / (1 + e) with e = exp(x): the upper limit is past where it rounds to 1, and e is made 2^64 times as large,
 * so that only the result is a denormal. In f64 the exponential is at most 1. */
TU_LANE vec_f32 tu_sigmoid_f32(vec_f32 x) {
    vec_f32 sum, limited = tu_greater_f32(TU_K32(-104.0f), tu_lesser_f32(TU_K32(20.0f), x));
    vec_f32 rest = tu_exp_rest_f32(limited, &sum), large = rest * tu_power_of_sum_f32(sum, 64);
    vec_f32 more = tu_fma_f32(large, TU_K32(0x1p-64f), TU_K32(1.0f));
    return tu_tried_ratio_f32(large, more) * TU_K32(0x1p-64f);
}
TU_LANE vec_f64 tu_sigmoid_f64(vec_f64 x) {
    vec_f64 exponential = tu_exp_minus_f64(x), one = TU_K64(1.0);
    return TU_SELECT(x < TU_K64(0.0), exponential, one) / (one + exponential);
}

/* sigmoid(x), and what is missing to 1, with all its digits too. */
#define TU_SIGMOID_PAIR(suffix)                                                                               \
    TU_LANE vec_##suffix tu_sigmoid_pair_##suffix(vec_##suffix x, vec_##suffix *rest) {                       \
        vec_##suffix exponential = tu_exp_minus_##suffix(x), one = tu_splat_##suffix(1);                      \
        vec_##suffix larger = tu_tame_ratio_##suffix(one, one + exponential), smaller = exponential * larger; \
        *rest = TU_SELECT(x < tu_splat_##suffix(0), larger, smaller);                                         \
        return TU_SELECT(x < tu_splat_##suffix(0), smaller, larger);                                          \
    }
TU_SIGMOID_PAIR(f32)
TU_SIGMOID_PAIR(f64)
#undef TU_SIGMOID_PAIR

/* ---- the normal distribution, erf ---- */

/* Q(z) exp(z^2 / 2) for a distance z >= 0, where Q is the share of the normal distribution above z. */
TU_LANE vec_f32 tu_mills_f32(vec_f32 distance) {
    vec_f32 inverse = tu_tame_ratio_f32(TU_K32(1.0f), tu_fma_f32(distance, TU_K32(0.3f), TU_K32(1.0f)));
    vec_f32 fit = tu_fma_f32(inverse, TU_K32(-0x1.51e4ep-6f), TU_K32(0x1.cc88fep-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(-0x1.d36152p-3f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.88c5eap-3f));
    fit = tu_fma_f32(fit, inverse, TU_K32(-0x1.4550e8p-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.89db6ap-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.41159ep-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.c38632p-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.e9c424p-4f));
    fit = tu_fma_f32(fit, inverse, TU_K32(0x1.ea3c98p-4f));
    return fit * inverse;
}
TU_LANE vec_f64 tu_mills_f64(vec_f64 distance) {
    vec_f64 inverse = TU_K64(1.0) / tu_fma_f64(distance, TU_K64(0.25), TU_K64(1.0)), centred = inverse - TU_K64(0.5);
    vec_f64 fit = tu_fma_f64(centred, TU_K64(0x1.70d57dfbb8d6bp-10), TU_K64(-0x1.4c1b72cd2152dp-9));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.e30a5eceb4f0bp-11));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.4a56e80570d3cp-8));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.ce498a372a852p-10));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.6c20e4e3831fdp-8));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.4cec5c7f23f5ep-8));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.233bae41e8976p-8));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.1236b9d23850ep-7));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.51e40d4fc5dfap-9));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.8d4b1eba5eb98p-7));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.80b164e4fe3e8p-11));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.26d0996f60e0ep-6));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.001e484927047p-11));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.e4a4256de975ap-6));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.17a4ae29eddacp-7));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.ab825fc0f9d63p-5));
    fit = tu_fma_f64(fit, centred, TU_K64(-0x1.c81719d53e70ap-5));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.ee2761047f312p-5));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.eec4cc3e4d200p-3));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.7dff2bff68399p-2));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.8c6dbf2cfc2b5p-2));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.373e3a893c28ap-2));
    fit = tu_fma_f64(fit, centred, TU_K64(0x1.82b4bb8c94dcep-3));
    return fit * inverse;
}

/* exp(-factor distance^2), factor 1 or 1/2: the square is rounded, and what it lost comes back as a factor. */
#define TU_BELL(suffix)                                                                                 \
    TU_LANE vec_##suffix tu_bell_##suffix(vec_##suffix distance, vec_##suffix factor) {                 \
        vec_##suffix square = distance * distance, lost = tu_fma_##suffix(distance, distance, -square); \
        vec_##suffix value = tu_exp_##suffix(-(factor * square));                                       \
        return tu_fma_##suffix(-(factor * value), lost, value);                                         \
    }
TU_BELL(f32)
TU_BELL(f64)
#undef TU_BELL

/* Phi(x), the share of the normal distribution below x, and (bell) exp(-x^2 / 2): around 0 by 1/2 + x P(x^2), else by
 * its tail. Past the limit the tail is 0. */
TU_LANE vec_f32 tu_normal_f32(vec_f32 x, vec_f32 *bell) {
    vec_f32 distance = tu_lesser_f32(TU_K32(15.0f), tu_abs_f32(x));
    *bell = tu_bell_f32(distance, TU_K32(0.5f));
    vec_f32 square = distance * distance, tail = *bell * tu_mills_f32(distance);
    vec_f32 fit = tu_fma_f32(square, TU_K32(0x1.afc39ep-14f), TU_K32(-0x1.35aab4p-10f));
    fit = tu_fma_f32(fit, square, TU_K32(0x1.46c62p-7f));
    fit = tu_fma_f32(fit, square, TU_K32(-0x1.10582p-4f));
    fit = tu_fma_f32(fit, square, TU_K32(0x1.988454p-2f));
    vec_f32 far = TU_SELECT(x < TU_K32(0.0f), tail, TU_K32(1.0f) - tail);
    return TU_SELECT(distance < TU_K32(0.75f), tu_fma_f32(x, fit, TU_K32(0.5f)), far);
}
TU_LANE vec_f64 tu_normal_f64(vec_f64 x, vec_f64 *bell) {
    vec_f64 distance = tu_lesser_f64(TU_K64(39.0), tu_abs_f64(x));
    *bell = tu_bell_f64(distance, TU_K64(0.5));
    vec_f64 square = distance * distance, tail = *bell * tu_mills_f64(distance);
    vec_f64 fit = tu_fma_f64(square, TU_K64(0x1.1399ce58326d7p-29), TU_K64(-0x1.5fc0a20e71bdbp-25));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.6574a39b87139p-21));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.3ce8892dc5c52p-17));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.e42b0a8ef4394p-14));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.37403f66ca0b0p-10));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.46d04297609aep-7));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.1058377e2ce84p-4));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.9884533d43650p-2));
    vec_f64 far = TU_SELECT(x < TU_K64(0.0), tail, TU_K64(1.0) - tail);
    return TU_SELECT(distance < TU_K64(0.75), tu_fma_f64(x, fit, TU_K64(0.5)), far);
}
TU_LANE vec_f32 tu_normal_cdf_f32(vec_f32 x) {
    vec_f32 bell;
    return tu_normal_f32(x, &bell);
}
TU_LANE vec_f64 tu_normal_cdf_f64(vec_f64 x) {
    vec_f64 bell;
    return tu_normal_f64(x, &bell);
}

/* Near 0 by its own polynomial, else 1 - 2 Q(sqrt 2 |x|). */
TU_LANE vec_f32 tu_erf_f32(vec_f32 x) {
    vec_f32 distance = tu_lesser_f32(TU_K32(10.0f), tu_abs_f32(x)), square = distance * distance;
    vec_f32 fit = tu_fma_f32(square, TU_K32(0x1.496a0ep-14f), TU_K32(-0x1.a3f6f2p-11f));
    fit = tu_fma_f32(fit, square, TU_K32(0x1.5405bp-8f));
    fit = tu_fma_f32(fit, square, TU_K32(-0x1.b7f90cp-6f));
    fit = tu_fma_f32(fit, square, TU_K32(0x1.ce2cf8p-4f));
    fit = tu_fma_f32(fit, square, TU_K32(-0x1.81273ep-2f));
    fit = tu_fma_f32(fit, square, TU_K32(0x1.06eba8p-3f)); /* 2 / sqrt pi - 1 */
    vec_f32 tail = TU_K32(2.0f) * tu_bell_f32(distance, TU_K32(1.0f)) * tu_mills_f32(distance * TU_K32(0x1.6a09e6p+0f));
    return TU_SELECT(distance < TU_K32(1.0f), tu_fma_f32(x, fit, x), tu_copysign_f32(TU_K32(1.0f) - tail, x));
}
TU_LANE vec_f64 tu_erf_f64(vec_f64 x) {
    vec_f64 distance = tu_lesser_f64(TU_K64(10.0), tu_abs_f64(x)), square = distance * distance;
    vec_f64 fit = tu_fma_f64(square, TU_K64(-0x1.abae54a37ae52p-31), TU_K64(0x1.d71b12fe92ddap-27));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.5c07277bc0addp-23));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.b97fd3ee7776fp-20));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.f4ca4d710781ep-17));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.f9a2baa9148fcp-14));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.c02db03dd7994p-11));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.565bccf92b302p-8));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.b82ce311fa93ep-6));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.ce2f21a040d16p-4));
    fit = tu_fma_f64(fit, square, TU_K64(-0x1.812746b0379bdp-2));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.06eba8214db69p-3));
    vec_f64 tail =
        TU_K64(2.0) * tu_bell_f64(distance, TU_K64(1.0)) * tu_mills_f64(distance * TU_K64(0x1.6a09e667f3bcdp+0));
    return TU_SELECT(distance < TU_K64(1.0), tu_fma_f64(x, fit, x), tu_copysign_f64(TU_K64(1.0) - tail, x));
}

/* ---- activations and their derivatives ---- */

#define TU_ACTIVATIONS(suffix)                                           \
    TU_LANE vec_##suffix tu_rsqrt_##suffix(vec_##suffix x) {             \
        return tu_splat_##suffix(1) / tu_sqrt_##suffix(x);               \
    }                                                                    \
    TU_LANE vec_##suffix tu_silu_slope_##suffix(vec_##suffix x) {        \
        vec_##suffix rest, sigmoid = tu_sigmoid_pair_##suffix(x, &rest); \
        return sigmoid * tu_fma_##suffix(x, rest, tu_splat_##suffix(1)); \
    }
TU_ACTIVATIONS(f32)
TU_ACTIVATIONS(f64)
#undef TU_ACTIVATIONS

/* gelu and its slope in f32 by quotients of polynomials, which cost a third of exp and the tail: 1/2 + x P(x^2) /
 * Q(x^2) up to where f32 cannot tell the result from 0 or 1; at the limits the sums are 0 and 1, so that nothing is
 * left of an x far below. The errors are absolute: the far tail has no digits, and below the lower limit gelu is -0. */
TU_LANE vec_f32 tu_gelu_f32(vec_f32 x) {
    vec_f32 limit = TU_K32(0x1.5999d6p+2f), limited = tu_greater_f32(-limit, tu_lesser_f32(limit, x));
    vec_f32 square = limited * limited;
    vec_f32 above = tu_fma_f32(square, TU_K32(0x1.91caa6p-26f), TU_K32(0x1.aacf5p-18f));
    above = tu_fma_f32(above, square, TU_K32(0x1.58971ep-13f));
    above = tu_fma_f32(above, square, TU_K32(0x1.30cb7ep-8f));
    above = tu_fma_f32(above, square, TU_K32(0x1.1160f2p-5f));
    above = tu_fma_f32(above, square, TU_K32(0x1.98845p-2f));
    vec_f32 below = tu_fma_f32(square, TU_K32(0x1.46947p-20f), TU_K32(0x1.2fa844p-14f));
    below = tu_fma_f32(below, square, TU_K32(0x1.e74efep-10f));
    below = tu_fma_f32(below, square, TU_K32(0x1.d0f2e6p-6f));
    below = tu_fma_f32(below, square, TU_K32(0x1.0052ccp-2f));
    below = tu_fma_f32(below, square, TU_K32(0x1p+0f));
    vec_f32 share = TU_K32(0.5f) + limited * tu_tame_ratio_f32(above, below);
    return x * tu_greater_f32(TU_K32(0.0f), share);
}
TU_LANE vec_f32 tu_gelu_slope_f32(vec_f32 x) {
    vec_f32 limit = TU_K32(0x1.7998b4p+2f), limited = tu_greater_f32(-limit, tu_lesser_f32(limit, x));
    vec_f32 square = limited * limited;
    vec_f32 above = tu_fma_f32(square, TU_K32(-0x1.f307ep-36f), TU_K32(0x1.a38c86p-27f));
    above = tu_fma_f32(above, square, TU_K32(0x1.0cbe0cp-20f));
    above = tu_fma_f32(above, square, TU_K32(0x1.0cc948p-15f));
    above = tu_fma_f32(above, square, TU_K32(0x1.f637c2p-13f));
    above = tu_fma_f32(above, square, TU_K32(0x1.bfefeep-7f));
    above = tu_fma_f32(above, square, TU_K32(-0x1.50fb58p-6f));
    above = tu_fma_f32(above, square, TU_K32(0x1.988452p-1f));
    vec_f32 below = tu_fma_f32(square, TU_K32(0x1.6397e4p-22f), TU_K32(0x1.57033cp-17f));
    below = tu_fma_f32(below, square, TU_K32(0x1.034a28p-12f));
    below = tu_fma_f32(below, square, TU_K32(0x1.07829ap-8f));
    below = tu_fma_f32(below, square, TU_K32(0x1.6dca88p-5f));
    below = tu_fma_f32(below, square, TU_K32(0x1.3aefbap-2f));
    below = tu_fma_f32(below, square, TU_K32(0x1p+0f));
    return TU_K32(0.5f) + limited * tu_tame_ratio_f32(above, below);
}
/* In f64 with all digits, by the tail: x Phi(x), and Phi(x) + x phi(x). */
TU_LANE vec_f64 tu_gelu_f64(vec_f64 x) {
    return x * tu_normal_cdf_f64(x);
}
TU_LANE vec_f64 tu_gelu_slope_f64(vec_f64 x) {
    vec_f64 bell, share = tu_normal_f64(x, &bell);
    return tu_fma_f64(x * TU_K64(0.39894228040143267794), bell, share);
}

/* x (1 + tanh u) / 2 = x sigmoid(2 u) with 2 u = sqrt(8 / pi) (x + 0.044715 x^3); the sigmoid keeps small results. */
#define TU_GELU_TANH(suffix, linear, cubic)                                                                          \
    TU_LANE vec_##suffix tu_gelu_tanh_##suffix(vec_##suffix x) {                                                     \
        vec_##suffix inner = x * tu_fma_##suffix(x * x, tu_splat_##suffix(cubic), tu_splat_##suffix(linear));        \
        return x * tu_sigmoid_##suffix(inner);                                                                       \
    }                                                                                                                \
    TU_LANE vec_##suffix tu_gelu_tanh_slope_##suffix(vec_##suffix x) {                                               \
        vec_##suffix limit = tu_splat_##suffix(20), one = tu_splat_##suffix(1);                                      \
        x = tu_greater_##suffix(-limit, tu_lesser_##suffix(limit, x)); /* beyond it is 0 or 1 */                     \
        vec_##suffix square = x * x, rest;                                                                           \
        vec_##suffix sigmoid = tu_sigmoid_pair_##suffix(                                                             \
            x * tu_fma_##suffix(square, tu_splat_##suffix(cubic), tu_splat_##suffix(linear)), &rest);                \
        vec_##suffix slope = x * tu_fma_##suffix(square, tu_splat_##suffix(3 * (cubic)), tu_splat_##suffix(linear)); \
        return sigmoid * tu_fma_##suffix(slope, rest, one);                                                          \
    }
TU_GELU_TANH(f32, 1.5957691216057308f, 0.07135481282688345f)
TU_GELU_TANH(f64, 1.5957691216057308, 0.07135481627260025)
#undef TU_GELU_TANH

/* ---- pow ---- */

/* log of a positive x as an unevaluated sum of two numbers, good to about 2^-65. */
TU_LANE vec_f64 tu_log_pair_f64(vec_f64 x, vec_f64 *low) {
    vec_f64 fraction, scaled = TU_SELECT(x < TU_K64(0x1p-1022), x * TU_K64(4503599627370496.0), x);
    vec_f64 exponent = tu_log_parts_f64(scaled, &fraction);
    exponent = TU_SELECT(x < TU_K64(0x1p-1022), exponent - TU_K64(52.0), exponent);
    /* ratio = fraction / (2 + fraction) in two parts; 2 + fraction = sum + sum_low */
    vec_f64 sum = fraction + TU_K64(2.0), sum_low = fraction - (sum - TU_K64(2.0));
    vec_f64 ratio = fraction / sum, ratio_low = (tu_fma_f64(-ratio, sum, fraction) - ratio * sum_low) / sum;
    vec_f64 square = ratio * ratio, square_low = tu_fma_f64(ratio, ratio, -square) + TU_K64(2.0) * ratio * ratio_low;
    vec_f64 fit = tu_fma_f64(square, TU_K64(0x1.0f72f78127f25p-3), TU_K64(0x1.0f5b0b8900d58p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.3b20bf397917ep-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.745cddc30cf63p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.c71c725a6a5e6p-3));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.249249242a0cfp-2));
    fit = tu_fma_f64(fit, square, TU_K64(0x1.9999999999e0ep-2));
    /* factor = 2/3 + square fit, term = square factor, cube = ratio term, each in two parts */
    vec_f64 rest = square * fit, two_thirds = TU_K64(0x1.5555555555555p-1);
    vec_f64 factor = two_thirds + rest, factor_low = (rest - (factor - two_thirds)) + TU_K64(0x1.5555555555555p-55);
    vec_f64 term = square * factor,
            term_low = tu_fma_f64(square, factor, -term) + tu_fma_f64(square, factor_low, square_low * factor);
    vec_f64 cube = ratio * term,
            cube_low = tu_fma_f64(ratio, term, -cube) + tu_fma_f64(ratio, term_low, ratio_low * term);
    /* exponent ln 2 + 2 ratio + cube, largest first; 2 ratio + cube keeps its order since the cube is small */
    vec_f64 twice = ratio + ratio, small = twice + cube,
            small_low = (cube - (small - twice)) + (ratio_low + ratio_low + cube_low);
    vec_f64 large = exponent * TU_K64(0x1.62e42fefa39efp-1),
            large_low = tu_fma_f64(exponent, TU_K64(0x1.62e42fefa39efp-1), -large);
    large_low = tu_fma_f64(exponent, TU_K64(0x1.abc9e3b39803fp-56), large_low);
    vec_f64 total = small + large, virtual_large = total - small;
    vec_f64 error = (small - (total - virtual_large)) + (large - virtual_large);
    *low = error + (small_low + large_low);
    return total;
}

/* x^y for positive finite x and finite y. */
TU_LANE vec_f64 tu_pow_positive_f64(vec_f64 x, vec_f64 y) {
    vec_f64 low, high = tu_log_pair_f64(x, &low), sum, remainder;
    vec_f64 product = high * y, product_low = tu_fma_f64(low, y, tu_fma_f64(high, y, -product));
    vec_f64 limited = tu_greater_f64(TU_K64(-746.0), tu_lesser_f64(TU_K64(710.0), product));
    product_low = TU_SELECT(limited == product, product_low, TU_K64(0.0));
    vec_f64 more = tu_exp_parts_f64(limited, &sum, &remainder);
    return tu_scale_f64(TU_K64(1.0) + (remainder + (more + tu_fma_f64(remainder + more, product_low, product_low))),
                        sum - TU_K64(TU_MAGIC64));
}
/* The same for f32, by way of f64. */
TU_LANE vec_f32 tu_pow_positive_f32(vec_f32 x, vec_f32 y) {
    vec_f64 base[TU_HALVES], exponent[TU_HALVES];
    tu_widen(x, base);
    tu_widen(y, exponent);
    for (int i = 0; i < TU_HALVES; i++) {
        vec_f64 fraction, twos = tu_log_parts_f64(base[i], &fraction);
        base[i] = tu_exp_f64(exponent[i] * tu_log_sum_f64(fraction, twos));
    }
    return tu_narrow(base);
}

/* The cases of C's pow around it. An odd y keeps the sign of x. */
#define TU_POW(suffix, infinity, nan)                                                                                \
    TU_LANE vec_##suffix tu_pow_##suffix(vec_##suffix x, vec_##suffix y) {                                           \
        vec_##suffix zero = tu_splat_##suffix(0), one = tu_splat_##suffix(1), endless = tu_splat_##suffix(infinity); \
        vec_##suffix size = tu_abs_##suffix(x), half = y * tu_splat_##suffix(0.5f);                                  \
        vec_##suffix result = tu_pow_positive_##suffix(size, y);                                                     \
        vec_##suffix grows = TU_SELECT(y < zero, zero, endless), shrinks = TU_SELECT(y < zero, endless, zero);       \
        result = TU_SELECT((size == zero), shrinks, result);                                                         \
        result = TU_SELECT((size == endless), grows, result);                                                        \
        vec_##suffix at_end = TU_SELECT(size < one, shrinks, TU_SELECT(size == one, one, grows));                    \
        result = TU_SELECT(tu_abs_##suffix(y) == endless, at_end, result);                                           \
        vec_##suffix turned = TU_SELECT(tu_floor_##suffix(half) == half, result, tu_copysign_##suffix(result, x));   \
        vec_##suffix whole = TU_SELECT(tu_floor_##suffix(y) == y, turned, result);                                   \
        result =                                                                                                     \
            TU_SELECT((tu_floor_##suffix(y) != y) & (x < zero) & (size < endless), tu_splat_##suffix(nan), whole);   \
        result = TU_SELECT((x != x) | (y != y), x + y, result);                                                      \
        return TU_SELECT((x == one) | (y == zero), one, result);                                                     \
    }
TU_POW(f32, __builtin_inff(), __builtin_nanf(""))
TU_POW(f64, __builtin_inf(), __builtin_nan(""))
#undef TU_POW

#endif
