/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over rows in an order that no level changes: WIDE lanes (32 of f32, 16 of f64), element i in lane i modulo WIDE,
 * at the end lane l plus lane l + WIDE/2, and so on by halves. A level has WIDE lanes in REGISTERS registers.
 *
 * Included by the bodies of kernels once per type, after these are defined: SUFFIX (f32 or f64), TYPE the type.
 */
#ifndef TU_TENSOR_KERNEL_FOLD_H
#define TU_TENSOR_KERNEL_FOLD_H

#define TU_JOIN_(first, second) first##second
#define TU_JOIN(first, second) TU_JOIN_(first, second)
#define TU_JOIN3_(first, second, third) first##second##third
#define TU_JOIN3(first, second, third) TU_JOIN3_(first, second, third)

/* A name of this type; a function of elementary.h; the vector type. */
#define NAMED(name) TU_JOIN3(name, _, SUFFIX)
#define MATH(name) TU_JOIN3(tu_##name, _, SUFFIX)
#define VEC TU_JOIN(vec_, SUFFIX)

#define LANES ((int64_t)(sizeof(VEC) / sizeof(TYPE)))
#define WIDE ((int64_t)(128 / sizeof(TYPE)))
#define REGISTERS ((int)(128 / sizeof(VEC)))

/* Loops over registers must be unrolled, or the registers become memory. */
#if defined(__clang__) || !defined(__OPTIMIZE__) || defined(TUTTI_SANITIZED)
#define TU_UNROLL
#else
#define TU_UNROLL _Pragma("GCC unroll 8")
#endif

#endif
