/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of bf16 numbers whose results are rounded to bf16 at once: there are 65536 of them, and for each one these
 * shorter forms round to what the functions of tensor/kernel/elementary.h give. What the processor approximates may be
 * three units in the last place off without a change (tests/loops/near.c tries all numbers), so that it is no matter
 * which processor it is.
 */
#ifdef __CUDACC__
HERE float tu_near_inverse(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
/* 2^x; 0 where that is a denormal. */
HERE float tu_near_power(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
#elif !defined(TU_NEAR_TRIED) /* a test has its own */
HERE float tu_near_inverse(float x) {
    return 1 / x;
}
HERE float tu_near_power(float x) {
    return __builtin_exp2f(x);
}
#endif

/* x P(x^2) / Q(x^2) up to where the result rounds to 1. */
HERE float tu_near_tanh(float x) {
    const float limited = tu_greater_f32(-3.5f, tu_lesser_f32(3.5f, x)), square = limited * limited;
    const float above = tu_fma_f32(tu_fma_f32(square, 0x1.b1213p-11f, 0x1.b5356ap-4f), square, 1.0f);
    const float below = tu_fma_f32(tu_fma_f32(square, 0x1.d24978p-7f, 0x1.c299f2p-2f), square, 1.0f);
    return limited * above * tu_near_inverse(below);
}

/* e / (1 + e) with e = exp(x), the square of exp(x / 2), which is no denormal where e is one; around 0, where numbers
 * lie close to halfway between two of bf16, by 1/2 + x/4 - x^3/48. */
HERE float tu_near_sigmoid(float x) {
    const float half = tu_near_power(tu_lesser_f32(80.0f, x) * 0x1.715476p-1f);
    const float far = half * half * tu_near_inverse(tu_fma_f32(half, half, 1.0f));
    const float around = tu_fma_f32(x, tu_fma_f32(x * x, -0x1.54p-6f, 0.25f), 0.5f);
    return tu_abs_f32(x) < 0.25f ? around : far;
}
