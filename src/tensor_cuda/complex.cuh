/* SPDX-License-Identifier: Apache-2.0
 *
 * Complex numbers, which CUDA C has not: pairs of doubles with the arithmetic of C. Sums and products have the bits of
 * the CPU; division, magnitudes and functions are the C library's there, and may differ in their last digits.
 */
#ifndef TU_TENSOR_CUDA_COMPLEX_CUH
#define TU_TENSOR_CUDA_COMPLEX_CUH

#include "kernel.cuh"

#ifdef __CUDACC__
#define INSIDE __device__ __forceinline__
#else
#define INSIDE inline
#endif

struct tu_c128 {
    double real, imaginary;
    tu_c128() = default; /* nothing is set: it may lie in shared memory */
    INSIDE tu_c128(double x) : real(x), imaginary(0) {}
    INSIDE tu_c128(double x, double y) : real(x), imaginary(y) {}
};

HERE tu_c128 operator+(tu_c128 left, tu_c128 right) {
    return { left.real + right.real, left.imaginary + right.imaginary };
}
HERE tu_c128 operator-(tu_c128 left, tu_c128 right) {
    return { left.real - right.real, left.imaginary - right.imaginary };
}
HERE tu_c128 operator-(tu_c128 x) {
    return { -x.real, -x.imaginary };
}
/* A real number has no imaginary part, not even a 0 that could become -0 or NaN. */
HERE tu_c128 operator+(tu_c128 left, double right) {
    return { left.real + right, left.imaginary };
}
HERE tu_c128 operator*(tu_c128 left, double right) {
    return { left.real * right, left.imaginary * right };
}
HERE tu_c128 operator*(double left, tu_c128 right) {
    return { left * right.real, left * right.imaginary };
}
HERE tu_c128 operator/(tu_c128 left, double right) {
    return { left.real / right, left.imaginary / right };
}

HERE bool is_infinite(double x) {
    return fabs(x) == (double)INFINITY;
}
/* An infinite number as one of magnitude 1 in its direction, another one as a zero: what is left of it beside infinity.
 */
HERE double beside_infinity(double x) {
    return copysign(is_infinite(x) ? 1.0 : 0.0, x);
}
HERE double without_nan(double x) {
    return x != x ? copysign(0.0, x) : x;
}

/* Where both parts would be NaN, an infinite factor makes the result infinite: C's annex G. */
APART tu_c128 multiply_infinite(tu_c128 left, tu_c128 right, tu_c128 found) {
    bool again = false;
    if (is_infinite(left.real) || is_infinite(left.imaginary)) {
        left = { beside_infinity(left.real), beside_infinity(left.imaginary) };
        right = { without_nan(right.real), without_nan(right.imaginary) };
        again = true;
    }
    if (is_infinite(right.real) || is_infinite(right.imaginary)) {
        right = { beside_infinity(right.real), beside_infinity(right.imaginary) };
        left = { without_nan(left.real), without_nan(left.imaginary) };
        again = true;
    }
    if (!again && (is_infinite(left.real * right.real) || is_infinite(left.imaginary * right.imaginary) ||
                   is_infinite(left.real * right.imaginary) || is_infinite(left.imaginary * right.real))) {
        left = { without_nan(left.real), without_nan(left.imaginary) };
        right = { without_nan(right.real), without_nan(right.imaginary) };
        again = true;
    }
    if (!again)
        return found;
    return { (double)INFINITY * (left.real * right.real - left.imaginary * right.imaginary),
             (double)INFINITY * (left.real * right.imaginary + left.imaginary * right.real) };
}
HERE tu_c128 operator*(tu_c128 left, tu_c128 right) {
    tu_c128 found = { left.real * right.real - left.imaginary * right.imaginary,
                      left.real * right.imaginary + left.imaginary * right.real };
    bool none = found.real != found.real && found.imaginary != found.imaginary;
    return none ? multiply_infinite(left, right, found) : found;
}

/* Where both parts would be NaN: a number by 0 and an infinite one are infinite, one by an infinite is 0. */
APART tu_c128 divide_infinite(tu_c128 left, tu_c128 right, tu_c128 found) {
    bool infinite = is_infinite(left.real) || is_infinite(left.imaginary);
    if (right.real == 0 && right.imaginary == 0 && (left.real == left.real || left.imaginary == left.imaginary)) {
        double whole = copysign((double)INFINITY, right.real);
        return { whole * left.real, whole * left.imaginary };
    }
    if (infinite && fabs(right.real) < (double)INFINITY && fabs(right.imaginary) < (double)INFINITY) {
        left = { beside_infinity(left.real), beside_infinity(left.imaginary) };
        return { (double)INFINITY * (left.real * right.real + left.imaginary * right.imaginary),
                 (double)INFINITY * (left.imaginary * right.real - left.real * right.imaginary) };
    }
    if ((is_infinite(right.real) || is_infinite(right.imaginary)) && fabs(left.real) < (double)INFINITY &&
        fabs(left.imaginary) < (double)INFINITY) {
        right = { beside_infinity(right.real), beside_infinity(right.imaginary) };
        return { 0.0 * (left.real * right.real + left.imaginary * right.imaginary),
                 0.0 * (left.imaginary * right.real - left.real * right.imaginary) };
    }
    return found;
}
/* By the larger part of the divisor, so that no square over- or underflows. */
HERE tu_c128 operator/(tu_c128 left, tu_c128 right) {
    tu_c128 found;
    if (fabs(right.real) < fabs(right.imaginary)) {
        double ratio = right.real / right.imaginary, all = right.real * ratio + right.imaginary;
        found = { (left.real * ratio + left.imaginary) / all, (left.imaginary * ratio - left.real) / all };
    } else {
        double ratio = right.imaginary / right.real, all = right.imaginary * ratio + right.real;
        found = { (left.imaginary * ratio + left.real) / all, (left.imaginary - left.real * ratio) / all };
    }
    bool none = found.real != found.real && found.imaginary != found.imaginary;
    return none ? divide_infinite(left, right, found) : found;
}
HERE tu_c128 &operator+=(tu_c128 &left, tu_c128 right) {
    return left = left + right;
}
HERE bool operator==(tu_c128 left, tu_c128 right) {
    return left.real == right.real && left.imaginary == right.imaginary;
}
HERE bool operator!=(tu_c128 left, tu_c128 right) {
    return !(left == right);
}

template <> struct computed<tu_c128> {
    MEMBER tu_c128 from(const tu_element &element) {
        return { tu_element_real(&element, TUTTI_C128), element.whole ? 0 : element.imaginary };
    }
    MEMBER tu_element wide(tu_c128 x) {
        return { x.real, x.imaginary, 0, false, false };
    }
};
struct lying_c128 {
    tu_c128 bits;
    MEMBER tu_c128 widen(lying_c128 x) {
        return x.bits;
    }
    MEMBER lying_c128 narrow(tu_c128 x) {
        return { x };
    }
};

#endif
