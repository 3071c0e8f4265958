/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products: f32, f64 and complex by CBLAS; bf16 by oneDNN where it can, else, like the other narrow floats, by
 * conversion to f32 in panels; i8 by a kernel of our own; other integers by plain loops.
 */
#include "tensor/gemm.h"

#include <cblas.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"
#include "tensor/kernel/libraries.h"
#include "tensor/parallel.h"
#include "tensor/thread.h"

/* How CBLAS can read a matrix: as it lies, transposed, or not at all. */
static bool blas_layout(const tu_matrix *x, int64_t rows, int64_t columns, enum CBLAS_TRANSPOSE *transpose,
                        blasint *ld) {
    int64_t stride;
    if (x->column == 1 || columns == 1) {
        *transpose = CblasNoTrans;
        stride = rows == 1 ? columns : x->row;
        if (stride < columns)
            return false;
    } else if (x->row == 1 || rows == 1) {
        *transpose = CblasTrans;
        stride = columns == 1 ? rows : x->column;
        if (stride < rows)
            return false;
    } else {
        return false;
    }
    *ld = (blasint)(stride < 1 ? 1 : stride);
    return stride <= INT32_MAX;
}

/* A dense copy, converted; the caller frees it with tu_block_free. */
static void *dense_matrix(const tu_matrix *x, int64_t rows, int64_t columns, tutti_dtype dtype, tutti_dtype to) {
    size_t from_size = tu_dtype_bytes[dtype], to_size = tu_dtype_bytes[to];
    char *copy = tu_block_alloc(tu_self(), (size_t)(rows * columns) * to_size + (size_t)columns * from_size);
    if (copy == NULL) {
        tu_error_memory("a copy of a matrix", (size_t)(rows * columns) * to_size);
        return NULL;
    }
    char *row = copy + (size_t)(rows * columns) * to_size;
    for (int64_t i = 0; i < rows; i++) {
        const char *from = (const char *)x->data + (size_t)(i * x->row) * from_size;
        char *target = copy + (size_t)(i * columns) * to_size;
        if (dtype == to) {
            tu_pack(target, from, x->column, to_size, columns);
            continue;
        }
        if (x->column != 1) {
            tu_pack(row, from, x->column, from_size, columns);
            from = row;
        }
        if (tutti_convert(from, dtype, target, to, (size_t)columns) != TUTTI_OK)
            break;
    }
    return copy;
}
static void free_matrix(void *copy, int64_t rows, int64_t columns, tutti_dtype dtype, tutti_dtype to) {
    tu_block_free(tu_self(), copy,
                  (size_t)(rows * columns) * tu_dtype_bytes[to] + (size_t)columns * tu_dtype_bytes[dtype]);
}

static void call_blas(tutti_dtype dtype, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb, int64_t m, int64_t n,
                      int64_t k, const void *a, blasint lda, const void *b, blasint ldb, double beta, void *c,
                      blasint ldc) {
    const float one_c64[2] = { 1, 0 }, beta_c64[2] = { (float)beta, 0 };
    const double one_c128[2] = { 1, 0 }, beta_c128[2] = { beta, 0 };
    blasint M = (blasint)m, N = (blasint)n, K = (blasint)k;
    tu_libraries_limit();
    switch (dtype) {
    case TUTTI_F32:
        cblas_sgemm(CblasRowMajor, ta, tb, M, N, K, 1, a, lda, b, ldb, (float)beta, c, ldc);
        break;
    case TUTTI_F64:
        cblas_dgemm(CblasRowMajor, ta, tb, M, N, K, 1, a, lda, b, ldb, beta, c, ldc);
        break;
    case TUTTI_C64:
        cblas_cgemm(CblasRowMajor, ta, tb, M, N, K, one_c64, a, lda, b, ldb, beta_c64, c, ldc);
        break;
    default:
        cblas_zgemm(CblasRowMajor, ta, tb, M, N, K, one_c128, a, lda, b, ldb, beta_c128, c, ldc);
        break;
    }
}

static tutti_status blas_gemm(tutti_dtype dtype, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, double beta,
                              void *c, int64_t ldc) {
    enum CBLAS_TRANSPOSE ta, tb;
    blasint lda, ldb;
    void *copy_a = NULL, *copy_b = NULL;
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (!blas_layout(&a, m, k, &ta, &lda)) {
        if ((copy_a = dense_matrix(&a, m, k, dtype, dtype)) == NULL)
            return status;
        a.data = copy_a;
        ta = CblasNoTrans;
        lda = (blasint)k;
    }
    if (!blas_layout(&b, k, n, &tb, &ldb)) {
        if ((copy_b = dense_matrix(&b, k, n, dtype, dtype)) == NULL)
            goto free_a;
        b.data = copy_b;
        tb = CblasNoTrans;
        ldb = (blasint)n;
    }
    call_blas(dtype, ta, tb, m, n, k, a.data, lda, b.data, ldb, beta, c, (blasint)ldc);
    status = TUTTI_OK;
    free_matrix(copy_b, k, n, dtype, dtype);
free_a:
    free_matrix(copy_a, m, k, dtype, dtype);
    return status;
}

/* Narrow floats: all of b in f32, a and c in panels of rows. */
static tutti_status narrow_gemm(tutti_dtype dtype, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, void *c,
                                int64_t ldc) {
    int64_t rows = m < 256 ? m : 256;
    size_t size = tu_dtype_bytes[dtype];
    tutti_status status = TUTTI_ERROR_MEMORY;
    void *wide_b = dense_matrix(&b, k, n, dtype, TUTTI_F32);
    if (wide_b == NULL)
        return status;
    float *panel = tu_block_alloc(tu_self(), (size_t)(rows * n) * sizeof *panel);
    if (panel == NULL) {
        tu_error_memory("a panel of a matrix product", (size_t)(rows * n) * sizeof *panel);
        goto free_b;
    }
    status = TUTTI_OK;
    for (int64_t first = 0; first < m && status == TUTTI_OK; first += rows) {
        int64_t count = m - first < rows ? m - first : rows;
        tu_matrix part = { (const char *)a.data + (size_t)(first * a.row) * size, a.row, a.column };
        void *wide_a = dense_matrix(&part, count, k, dtype, TUTTI_F32);
        if (wide_a == NULL) {
            status = TUTTI_ERROR_MEMORY;
            break;
        }
        call_blas(TUTTI_F32, CblasNoTrans, CblasNoTrans, count, n, k, wide_a, (blasint)k, wide_b, (blasint)n, 0, panel,
                  (blasint)n);
        for (int64_t i = 0; i < count && status == TUTTI_OK; i++)
            status = tutti_convert(panel + i * n, TUTTI_F32, (char *)c + (size_t)((first + i) * ldc) * size, dtype,
                                   (size_t)n);
        free_matrix(wide_a, count, k, dtype, TUTTI_F32);
    }
    tu_block_free(tu_self(), panel, (size_t)(rows * n) * sizeof *panel);
free_b:
    free_matrix(wide_b, k, n, dtype, TUTTI_F32);
    return status;
}

static tutti_status integer_gemm(tutti_dtype dtype, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, void *c,
                                 int64_t ldc) {
    size_t size = tu_dtype_bytes[dtype];
    tutti_status status = TUTTI_ERROR_MEMORY;
    uint64_t *wide_a = dense_matrix(&a, m, k, dtype, TUTTI_I64), *wide_b = NULL, *row = NULL;
    if (wide_a == NULL || (wide_b = dense_matrix(&b, k, n, dtype, TUTTI_I64)) == NULL)
        goto free_copies;
    if ((row = tu_block_alloc(tu_self(), (size_t)n * sizeof *row)) == NULL) {
        tu_error_memory("a row of a matrix product", (size_t)n * sizeof *row);
        goto free_copies;
    }
    status = TUTTI_OK;
    for (int64_t i = 0; i < m && status == TUTTI_OK; i++) {
        memset(row, 0, (size_t)n * sizeof *row);
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++)
                row[j] += wide_a[i * k + l] * wide_b[l * n + j];
        status = tutti_convert(row, TUTTI_I64, (char *)c + (size_t)(i * ldc) * size, dtype, (size_t)n);
    }
    tu_block_free(tu_self(), row, (size_t)n * sizeof *row);
free_copies:
    free_matrix(wide_a, m, k, dtype, TUTTI_I64);
    free_matrix(wide_b, k, n, dtype, TUTTI_I64);
    return status;
}

/* ---- i8 ---- */

typedef struct int8_job {
    const tu_tensor_kernels *kernels;
    int64_t n, pairs;
    const int32_t *a, *b;
    int32_t *c;
} int8_job;

static void int8_rows(void *context, int64_t begin, int64_t end) {
    const int8_job *job = context;
    job->kernels->int8_product(end - begin, job->n, job->pairs, job->a + begin * job->pairs, job->b,
                               job->c + begin * job->n, job->n);
}

/* Two neighbours of an i8 matrix, `step` apart, as 16-bit halves of a word; behind the last is 0. */
static int32_t pair_of(const int8_t *x, int64_t step, bool both) {
    return (int32_t)((uint32_t)(uint16_t)x[0] | (both ? (uint32_t)(uint16_t)x[step] << 16 : 0));
}

tutti_status tu_int8_gemm(int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, int32_t *c) {
    const tu_tensor_kernels *kernels = tu_tensor_kernels_get();
    int64_t pairs = (k + 1) / 2, panel = kernels->panel[TU_F32], columns = (n + panel - 1) / panel * panel;
    size_t bytes = (size_t)(pairs * (m + columns)) * sizeof(int32_t);
    if (k == 0) {
        memset(c, 0, (size_t)(m * n) * sizeof *c);
        return TUTTI_OK;
    }
    int32_t *packed_a = tu_block_alloc(tu_self(), bytes), *packed_b = packed_a + pairs * m;
    if (packed_a == NULL)
        return tu_error_memory("packed matrices of i8", bytes);
    const int8_t *of_a = a.data, *of_b = b.data;
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < pairs; l++)
            packed_a[i * pairs + l] = pair_of(of_a + i * a.row + 2 * l * a.column, a.column, 2 * l + 1 < k);
    for (int64_t j = 0; j < columns; j++)
        for (int64_t l = 0; l < pairs; l++)
            packed_b[(j / panel * pairs + l) * panel + j % panel] =
                j < n ? pair_of(of_b + 2 * l * b.row + j * b.column, b.row, 2 * l + 1 < k) : 0;
    int8_job job = { kernels, n, pairs, packed_a, packed_b, c };
    tu_parallel(m, 1 + 262144 / (n * k + 1), int8_rows, &job);
    tu_block_free(tu_self(), packed_a, bytes);
    return TUTTI_OK;
}

tutti_status tu_gemm(tutti_dtype dtype, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, double beta, void *c,
                     int64_t ldc) {
    if (m == 0 || n == 0)
        return TUTTI_OK;
    if (k == 0) {
        for (int64_t i = 0; i < m && beta == 0; i++)
            memset((char *)c + (size_t)(i * ldc) * tu_dtype_bytes[dtype], 0, (size_t)n * tu_dtype_bytes[dtype]);
        return TUTTI_OK;
    }
    if (m > INT32_MAX || n > INT32_MAX || k > INT32_MAX || ldc > INT32_MAX)
        return tu_error(
            TUTTI_ERROR_RANGE,
            "a matrix product (%lld, %lld) (%lld, %lld) has a dimension above 2^31, which the BLAS cannot take",
            (long long)m, (long long)k, (long long)k, (long long)n);
    if (dtype == TUTTI_F32 || dtype == TUTTI_F64 || tu_is_complex(dtype))
        return blas_gemm(dtype, m, n, k, a, b, beta, c, ldc);
    if (tu_is_float(dtype))
        return tu_dnnl_gemm(dtype, dtype, m, n, k, a, b, c, ldc) ? TUTTI_OK : narrow_gemm(dtype, m, n, k, a, b, c, ldc);
    return integer_gemm(dtype, m, n, k, a, b, c, ldc);
}
