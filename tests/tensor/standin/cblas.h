/* SPDX-License-Identifier: Apache-2.0
 *
 * A CBLAS in plain C with just what libtutti-tensor asks of one, for cross builds where none is at hand. scripts/test
 * arm64 uses it.
 */
#ifndef STANDIN_CBLAS_H
#define STANDIN_CBLAS_H

#define OPENBLAS_VERSION "stand-in"

typedef int blasint;

enum CBLAS_ORDER {
    CblasRowMajor = 101
};

enum CBLAS_TRANSPOSE {
    CblasNoTrans = 111,
    CblasTrans = 112
};

/* How many threads the program wants; the stand-in has one itself. */
int openblas_get_num_threads(void);
void openblas_set_num_threads(int threads);

/* out = alpha left right + beta out, in which left is (rows, depth) and right (depth, columns) once transposed. */
#define STANDIN_GEMM(name, scalar, element)                                                                            \
    void name(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE left_order, enum CBLAS_TRANSPOSE right_order, blasint rows, \
              blasint columns, blasint depth, scalar alpha, const element *left, blasint left_stride,                  \
              const element *right, blasint right_stride, scalar beta, element *out, blasint out_stride)
STANDIN_GEMM(cblas_sgemm, float, float);
STANDIN_GEMM(cblas_dgemm, double, double);
STANDIN_GEMM(cblas_cgemm, const void *, void);
STANDIN_GEMM(cblas_zgemm, const void *, void);

#endif
