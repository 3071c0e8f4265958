/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products: f32, f64 and i8 by our own kernels (product.c), or by CBLAS where the level has no vectors; complex
 * by CBLAS; bf16 by oneDNN where it can, else, like the other narrow floats, by conversion to f32 in panels; other
 * integers by plain loops.
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
        if (tu_convert(from, dtype, target, to, (size_t)columns) != TUTTI_OK)
            break;
    }
    return copy;
}
static void free_matrix(void *copy, int64_t rows, int64_t columns, tutti_dtype dtype, tutti_dtype to) {
    tu_block_free(tu_self(), copy,
                  (size_t)(rows * columns) * tu_dtype_bytes[to] + (size_t)columns * tu_dtype_bytes[dtype]);
}

static void call_blas(tutti_dtype dtype, enum CBLAS_TRANSPOSE left_order, enum CBLAS_TRANSPOSE right_order,
                      int64_t rows, int64_t columns, int64_t depth, const void *left, blasint left_stride,
                      const void *right, blasint right_stride, double beta, void *out, blasint out_stride) {
    const float one_c64[2] = { 1, 0 }, beta_c64[2] = { (float)beta, 0 };
    const double one_c128[2] = { 1, 0 }, beta_c128[2] = { beta, 0 };
    blasint blas_rows = (blasint)rows, blas_columns = (blasint)columns, blas_depth = (blasint)depth;
    tu_libraries_limit();
    switch (dtype) {
    case TUTTI_F32:
        cblas_sgemm(CblasRowMajor, left_order, right_order, blas_rows, blas_columns, blas_depth, 1, left, left_stride,
                    right, right_stride, (float)beta, out, out_stride);
        break;
    case TUTTI_F64:
        cblas_dgemm(CblasRowMajor, left_order, right_order, blas_rows, blas_columns, blas_depth, 1, left, left_stride,
                    right, right_stride, beta, out, out_stride);
        break;
    case TUTTI_C64:
        cblas_cgemm(CblasRowMajor, left_order, right_order, blas_rows, blas_columns, blas_depth, one_c64, left,
                    left_stride, right, right_stride, beta_c64, out, out_stride);
        break;
    default:
        cblas_zgemm(CblasRowMajor, left_order, right_order, blas_rows, blas_columns, blas_depth, one_c128, left,
                    left_stride, right, right_stride, beta_c128, out, out_stride);
        break;
    }
}

static tutti_status blas_gemm(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                              tu_matrix right, double beta, void *out, int64_t out_stride) {
    enum CBLAS_TRANSPOSE left_order, right_order;
    blasint left_stride, right_stride;
    void *left_copy = NULL, *right_copy = NULL;
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (!blas_layout(&left, rows, depth, &left_order, &left_stride)) {
        if ((left_copy = dense_matrix(&left, rows, depth, dtype, dtype)) == NULL)
            return status;
        left.data = left_copy;
        left_order = CblasNoTrans;
        left_stride = (blasint)depth;
    }
    if (!blas_layout(&right, depth, columns, &right_order, &right_stride)) {
        if ((right_copy = dense_matrix(&right, depth, columns, dtype, dtype)) == NULL)
            goto free_left;
        right.data = right_copy;
        right_order = CblasNoTrans;
        right_stride = (blasint)columns;
    }
    call_blas(dtype, left_order, right_order, rows, columns, depth, left.data, left_stride, right.data, right_stride,
              beta, out, (blasint)out_stride);
    status = TUTTI_OK;
    free_matrix(right_copy, depth, columns, dtype, dtype);
free_left:
    free_matrix(left_copy, rows, depth, dtype, dtype);
    return status;
}

/* Narrow floats: all of the right matrix in f32, the left one and the result in panels of rows. */
static tutti_status narrow_gemm(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                                tu_matrix right, void *out, int64_t out_stride) {
    int64_t tall = rows < 256 ? rows : 256;
    size_t size = tu_dtype_bytes[dtype];
    tutti_status status = TUTTI_ERROR_MEMORY;
    void *wide_right = dense_matrix(&right, depth, columns, dtype, TUTTI_F32);
    if (wide_right == NULL)
        return status;
    float *panel = tu_block_alloc(tu_self(), (size_t)(tall * columns) * sizeof *panel);
    if (panel == NULL) {
        tu_error_memory("a panel of a matrix product", (size_t)(tall * columns) * sizeof *panel);
        goto free_right;
    }
    status = TUTTI_OK;
    for (int64_t first = 0; first < rows && status == TUTTI_OK; first += tall) {
        int64_t count = rows - first < tall ? rows - first : tall;
        tu_matrix part = { (const char *)left.data + (size_t)(first * left.row) * size, left.row, left.column };
        void *wide_left = dense_matrix(&part, count, depth, dtype, TUTTI_F32);
        if (wide_left == NULL) {
            status = TUTTI_ERROR_MEMORY;
            break;
        }
        status = tu_gemm(TUTTI_F32, count, columns, depth, (tu_matrix){ wide_left, depth, 1 },
                         (tu_matrix){ wide_right, columns, 1 }, 0, panel, columns, NULL);
        for (int64_t i = 0; i < count && status == TUTTI_OK; i++)
            status = tu_convert(panel + i * columns, TUTTI_F32, (char *)out + (size_t)((first + i) * out_stride) * size,
                                dtype, (size_t)columns);
        free_matrix(wide_left, count, depth, dtype, TUTTI_F32);
    }
    tu_block_free(tu_self(), panel, (size_t)(tall * columns) * sizeof *panel);
free_right:
    free_matrix(wide_right, depth, columns, dtype, TUTTI_F32);
    return status;
}

static tutti_status integer_gemm(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                                 tu_matrix right, void *out, int64_t out_stride) {
    size_t size = tu_dtype_bytes[dtype];
    tutti_status status = TUTTI_ERROR_MEMORY;
    uint64_t *wide_left = dense_matrix(&left, rows, depth, dtype, TUTTI_I64), *wide_right = NULL, *row = NULL;
    if (wide_left == NULL || (wide_right = dense_matrix(&right, depth, columns, dtype, TUTTI_I64)) == NULL)
        goto free_copies;
    if ((row = tu_block_alloc(tu_self(), (size_t)columns * sizeof *row)) == NULL) {
        tu_error_memory("a row of a matrix product", (size_t)columns * sizeof *row);
        goto free_copies;
    }
    status = TUTTI_OK;
    for (int64_t i = 0; i < rows && status == TUTTI_OK; i++) {
        memset(row, 0, (size_t)columns * sizeof *row);
        for (int64_t inner = 0; inner < depth; inner++)
            for (int64_t j = 0; j < columns; j++)
                row[j] += wide_left[i * depth + inner] * wide_right[inner * columns + j];
        status = tutti_convert(row, TUTTI_I64, (char *)out + (size_t)(i * out_stride) * size, dtype, (size_t)columns);
    }
    tu_block_free(tu_self(), row, (size_t)columns * sizeof *row);
free_copies:
    free_matrix(wide_left, rows, depth, dtype, TUTTI_I64);
    free_matrix(wide_right, depth, columns, dtype, TUTTI_I64);
    return status;
}

/* ---- i8 ---- */

typedef struct int8_job {
    const tu_tensor_kernels *kernels;
    int64_t columns, pairs;
    const int32_t *left, *right;
    int32_t *out;
} int8_job;

static void int8_rows(void *context, int64_t begin, int64_t end) {
    const int8_job *job = context;
    job->kernels->int8_product(end - begin, job->columns, job->pairs, job->left + begin * job->pairs, job->right,
                               job->out + begin * job->columns, job->columns);
}

/* Two neighbours of an i8 matrix, `step` apart, as 16-bit halves of a word; behind the last is 0. */
static int32_t pair_of(const int8_t *x, int64_t step, bool both) {
    return (int32_t)((uint32_t)(uint16_t)x[0] | (both ? (uint32_t)(uint16_t)x[step] << 16 : 0));
}

tutti_status tu_int8_gemm(int64_t rows, int64_t columns, int64_t depth, tu_matrix left, tu_matrix right, int32_t *out) {
    const tu_tensor_kernels *kernels = tu_tensor_kernels_get();
    int64_t pairs = (depth + 1) / 2, panel = kernels->panel[TU_F32], padded = (columns + panel - 1) / panel * panel;
    size_t bytes = (size_t)(pairs * (rows + padded)) * sizeof(int32_t);
    if (depth == 0) {
        memset(out, 0, (size_t)(rows * columns) * sizeof *out);
        return TUTTI_OK;
    }
    int32_t *packed_left = tu_block_alloc(tu_self(), bytes);
    if (packed_left == NULL)
        return tu_error_memory("packed matrices of i8", bytes);
    int32_t *packed_right = packed_left + pairs * rows;
    const int8_t *of_left = left.data, *of_right = right.data;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t inner = 0; inner < pairs; inner++)
            packed_left[i * pairs + inner] =
                pair_of(of_left + i * left.row + 2 * inner * left.column, left.column, 2 * inner + 1 < depth);
    for (int64_t j = 0; j < padded; j++)
        for (int64_t inner = 0; inner < pairs; inner++)
            packed_right[(j / panel * pairs + inner) * panel + j % panel] =
                j < columns
                    ? pair_of(of_right + 2 * inner * right.row + j * right.column, right.row, 2 * inner + 1 < depth)
                    : 0;
    int8_job job = { kernels, columns, pairs, packed_left, packed_right, out };
    tu_parallel(rows, 1 + 262144 / (columns * depth + 1), int8_rows, &job);
    tu_block_free(tu_self(), packed_left, bytes);
    return TUTTI_OK;
}

/* Narrow floats that oneDNN does not take are converted for a product of f32. */
bool tu_gemm_is_of_library(tutti_dtype dtype) {
    bool narrow = tu_is_float(dtype) && dtype != TUTTI_F32 && dtype != TUTTI_F64;
    if (narrow && !tu_dnnl_takes(dtype))
        dtype = TUTTI_F32;
    return (tu_is_float(dtype) || tu_is_complex(dtype)) && !tu_product_is_ours(dtype);
}

tutti_status tu_gemm(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left, tu_matrix right,
                     double beta, void *out, int64_t out_stride, tu_epilogue *epilogue) {
    if (rows == 0 || columns == 0)
        return TUTTI_OK;
    if (depth == 0) {
        for (int64_t i = 0; i < rows && beta == 0; i++)
            memset((char *)out + (size_t)(i * out_stride) * tu_dtype_bytes[dtype], 0,
                   (size_t)columns * tu_dtype_bytes[dtype]);
        return TUTTI_OK;
    }
    if (rows > INT32_MAX || columns > INT32_MAX || depth > INT32_MAX || out_stride > INT32_MAX)
        return tu_error(
            TUTTI_ERROR_RANGE,
            "a matrix product (%lld, %lld) (%lld, %lld) has a dimension above 2^31, which the BLAS cannot take",
            (long long)rows, (long long)depth, (long long)depth, (long long)columns);
    if (tu_product_is_ours(dtype))
        return tu_product(dtype, rows, columns, depth, left, right, beta != 0 ? out : NULL, out_stride, out, out_stride,
                          epilogue);
    if (dtype == TUTTI_F32 || dtype == TUTTI_F64 || tu_is_complex(dtype))
        return blas_gemm(dtype, rows, columns, depth, left, right, beta, out, out_stride);
    if (tu_is_float(dtype))
        return tu_dnnl_gemm(dtype, dtype, rows, columns, depth, left, right, out, out_stride)
                   ? TUTTI_OK
                   : narrow_gemm(dtype, rows, columns, depth, left, right, out, out_stride);
    return integer_gemm(dtype, rows, columns, depth, left, right, out, out_stride);
}
