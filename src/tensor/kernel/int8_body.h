/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of i8: see tu_int8_kernel. Instructions that multiply unsigned by signed bytes saturate at 16 bits on the
 * way on some processors; products of 16-bit halves are exact everywhere.
 */
#define PANEL (2 * TU_LANES_F32)

TU_LANE void int8_tile(int rows, int64_t width, int64_t pairs, const int32_t *a, const int32_t *b, int32_t *c,
                       int64_t ldc) {
    vec_i32 sum[4][2], zero = tu_bits_f32(tu_splat_f32(0));
    TU_UNROLL for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = zero;
    for (int64_t l = 0; l < pairs; l++) {
        vec_i32 left, right;
        memcpy(&left, b + l * PANEL, sizeof left);
        memcpy(&right, b + l * PANEL + TU_LANES_F32, sizeof right);
        TU_UNROLL for (int r = 0; r < rows; r++) {
            vec_i32 factor = zero + a[r * pairs + l];
            sum[r][0] += tu_dot_halves(factor, left);
            sum[r][1] += tu_dot_halves(factor, right);
        }
    }
    TU_UNROLL for (int r = 0; r < rows; r++) memcpy(c + r * ldc, sum[r], (size_t)width * sizeof *c);
}

static void int8_product(int64_t m, int64_t n, int64_t pairs, const int32_t *a, const int32_t *b, int32_t *c,
                         int64_t ldc) {
    for (int64_t j = 0; j < n; j += PANEL, b += pairs * PANEL) {
        int64_t i = 0, width = n - j < PANEL ? n - j : PANEL;
        for (; i + 4 <= m; i += 4)
            int8_tile(4, width, pairs, a + i * pairs, b, c + i * ldc + j, ldc);
        for (; i < m; i++)
            int8_tile(1, width, pairs, a + i * pairs, b, c + i * ldc + j, ldc);
    }
}
#undef PANEL
