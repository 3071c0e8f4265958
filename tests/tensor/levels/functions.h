/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions of tensor/kernel/elementary.h over arrays, compiled once per instruction set for
 * tests/tensor/elementary.c.
 */
#ifndef TEST_TENSOR_FUNCTIONS_H
#define TEST_TENSOR_FUNCTIONS_H

/* Counts are multiples of 16. Functions of one argument leave y alone. */
typedef struct test_function {
    const char *name;
    void (*f32)(const float *x, const float *y, float *out, long count);
    void (*f64)(const double *x, const double *y, double *out, long count);
} test_function;

extern const test_function test_functions_reference[], test_functions_neon[], test_functions_avx2[],
    test_functions_avx512[];

#endif
