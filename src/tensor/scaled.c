/* SPDX-License-Identifier: Apache-2.0
 *
 * The product of narrow matrices with scales: see scaled.h.
 */
#include "tensor/scaled.h"

#include "tensor/convert.h"
#include "tensor/thread.h"

#define PANEL_ROWS 512 /* of the left matrix that are in f32 at a time */

static tutti_status float_copy(const tt_tensor *x, float **copy) {
    *copy = tu_block_alloc(tu_self(), (size_t)x->numel * sizeof **copy);
    return *copy == NULL ? tu_error_memory("a copy in f32", (size_t)x->numel * sizeof **copy)
                         : tu_copy_out(x, *copy, TUTTI_F32);
}

static void free_floats(float *copy, int64_t count) {
    tu_block_free(tu_self(), copy, (size_t)count * sizeof *copy);
}

tutti_status tu_scaled_check(const char *who, const char *what, const tt_tensor *scale, int64_t rows, int64_t columns) {
    if (scale->dtype != TUTTI_F32)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %s is %s and must be f32", who, what, tu_describe(scale));
    if (scale->numel == 1 || (scale->ndim == 2 && scale->sizes[0] == rows && scale->sizes[1] == columns))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s is %s and must have one element or shape [%lld, %lld]", who, what,
                    tu_describe(scale), (long long)rows, (long long)columns);
}

tutti_status tu_scaled_open(tu_scaled *scaled, const tt_tensor *b, const tt_tensor *scale_b, const tt_tensor *bias,
                            const tt_tensor *result_scale) {
    *scaled = (tu_scaled){ .depth = b->sizes[0],
                           .columns = b->sizes[1],
                           .whole = result_scale != NULL ? *(const float *)tu_pointer(result_scale) : 1,
                           .scale_step = scale_b->numel == 1 ? 0 : 1 };
    tutti_status status = float_copy(b, &scaled->right);
    if (status == TUTTI_OK)
        status = float_copy(scale_b, &scaled->scales);
    if (status == TUTTI_OK && bias != NULL)
        status = float_copy(bias, &scaled->bias);
    if (status != TUTTI_OK)
        tu_scaled_close(scaled);
    return status;
}

void tu_scaled_close(tu_scaled *scaled) {
    free_floats(scaled->right, scaled->depth * scaled->columns);
    free_floats(scaled->scales, scaled->scale_step == 0 ? 1 : scaled->columns);
    free_floats(scaled->bias, scaled->columns);
    *scaled = (tu_scaled){ 0 };
}

static void apply_scales(const tu_scaled *scaled, float *row, float of_row) {
    for (int64_t j = 0; j < scaled->columns; j++) {
        float value = row[j] * of_row * scaled->scales[j * scaled->scale_step];
        row[j] = (value + (scaled->bias != NULL ? scaled->bias[j] : 0)) * scaled->whole;
    }
}

/* A few rows: in f32, multiplied, scaled, rounded. */
static tutti_status panel(const tu_scaled *scaled, int64_t rows, tu_matrix left, tutti_dtype dtype, const float *scales,
                          int64_t scale_step, float *wide, float *product, char *out, tutti_dtype out_dtype) {
    size_t size = tu_dtype_bytes[dtype];
    tutti_status status = TUTTI_OK;
    for (int64_t i = 0; i < rows && status == TUTTI_OK; i++) {
        const char *from = (const char *)left.data + (size_t)(i * left.row) * size;
        char *packed = (char *)product; /* free until the product; as wide as a row at least */
        if (left.column != 1) {
            tu_pack(packed, from, left.column, size, scaled->depth);
            from = packed;
        }
        status = tutti_convert(from, dtype, wide + i * scaled->depth, TUTTI_F32, (size_t)scaled->depth);
    }
    if (status == TUTTI_OK)
        status = tu_gemm(TUTTI_F32, rows, scaled->columns, scaled->depth, (tu_matrix){ wide, scaled->depth, 1 },
                         (tu_matrix){ scaled->right, scaled->columns, 1 }, 0, product, scaled->columns, NULL);
    for (int64_t i = 0; i < rows && status == TUTTI_OK; i++) {
        float *row = product + i * scaled->columns;
        apply_scales(scaled, row, scales[i * scale_step]);
        status = tutti_convert(row, TUTTI_F32, out + (size_t)(i * scaled->columns) * tu_dtype_bytes[out_dtype],
                               out_dtype, (size_t)scaled->columns);
    }
    return status;
}

tutti_status tu_scaled_rows(const tu_scaled *scaled, int64_t rows, tu_matrix left, tutti_dtype dtype,
                            const float *scales, int64_t scale_step, void *out, tutti_dtype out_dtype) {
    int64_t tall = rows < PANEL_ROWS ? rows : PANEL_ROWS, depth = scaled->depth, columns = scaled->columns;
    if (rows == 0 || columns == 0)
        return TUTTI_OK;
    int64_t room = tall * columns > depth * 2 ? tall * columns : depth * 2; /* a row of f64 fits, too */
    float *wide = tu_block_alloc(tu_self(), (size_t)(tall * depth) * sizeof *wide);
    float *product = tu_block_alloc(tu_self(), (size_t)room * sizeof *product);
    tutti_status status = wide != NULL && product != NULL
                              ? TUTTI_OK
                              : tu_error_memory("a scaled product", (size_t)(tall * depth + room) * sizeof *wide);
    for (int64_t first = 0; first < rows && status == TUTTI_OK; first += tall) {
        tu_matrix part = { (const char *)left.data + (size_t)(first * left.row) * tu_dtype_bytes[dtype], left.row,
                           left.column };
        status = panel(scaled, rows - first < tall ? rows - first : tall, part, dtype, scales + first * scale_step,
                       scale_step, wide, product, (char *)out + (size_t)(first * columns) * tu_dtype_bytes[out_dtype],
                       out_dtype);
    }
    free_floats(wide, tall * depth);
    free_floats(product, room);
    return status;
}
