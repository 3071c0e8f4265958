/* SPDX-License-Identifier: Apache-2.0
 *
 * Products by their definition: see cblas.h.
 */
#include <complex.h>

#include "cblas.h"

static int wanted = 64;

int openblas_get_num_threads(void) {
    return wanted;
}

void openblas_set_num_threads(int threads) {
    wanted = threads;
}

#define PRODUCT(number)                                                                                               \
    do {                                                                                                              \
        const number *from_left = left, *from_right = right;                                                          \
        number *to = out;                                                                                             \
        (void)order;                                                                                                  \
        for (blasint i = 0; i < rows; i++)                                                                            \
            for (blasint j = 0; j < columns; j++) {                                                                   \
                number sum = 0;                                                                                       \
                for (blasint k = 0; k < depth; k++)                                                                   \
                    sum +=                                                                                            \
                        from_left[left_order == CblasTrans ? (long)k * left_stride + i : (long)i * left_stride + k] * \
                        from_right[right_order == CblasTrans ? (long)j * right_stride + k                             \
                                                             : (long)k * right_stride + j];                           \
                number *place = &to[(long)i * out_stride + j];                                                        \
                *place =                                                                                              \
                    FACTOR(number, alpha) * sum + (FACTOR(number, beta) == 0 ? 0 : FACTOR(number, beta) * *place);    \
            }                                                                                                         \
    } while (0)

#define FACTOR(number, value) (value)
STANDIN_GEMM(cblas_sgemm, float, float) {
    PRODUCT(float);
}

STANDIN_GEMM(cblas_dgemm, double, double) {
    PRODUCT(double);
}

#undef FACTOR
#define FACTOR(number, value) (*(const number *)(value))
STANDIN_GEMM(cblas_cgemm, const void *, void) {
    PRODUCT(float complex);
}

STANDIN_GEMM(cblas_zgemm, const void *, void) {
    PRODUCT(double complex);
}
