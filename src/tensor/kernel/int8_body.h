/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of i8: see tu_int8_kernel. Instructions that multiply unsigned by signed bytes saturate at 16 bits on the
 * way on some processors; products of 16-bit halves are exact everywhere.
 */
#define PANEL (2 * TU_LANES_F32)

TU_LANE void int8_tile(int rows, int64_t width, int64_t pairs, const int32_t *left, const int32_t *panel, int32_t *out,
                       int64_t out_stride) {
    vec_i32 zero = tu_bits_f32(tu_splat_f32(0));
    vec_u32 sum[4][2]; /* which wrap */
    TU_UNROLL for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = (vec_u32)zero;
    for (int64_t inner = 0; inner < pairs; inner++) {
        vec_i32 low, high;
        memcpy(&low, panel + inner * PANEL, sizeof low);
        memcpy(&high, panel + inner * PANEL + TU_LANES_F32, sizeof high);
        TU_UNROLL for (int row = 0; row < rows; row++) {
            vec_i32 factor = zero + left[row * pairs + inner];
            sum[row][0] += (vec_u32)tu_dot_halves(factor, low);
            sum[row][1] += (vec_u32)tu_dot_halves(factor, high);
        }
    }
    TU_UNROLL for (int row = 0; row < rows; row++)
        memcpy(out + row * out_stride, sum[row], (size_t)width * sizeof *out);
}

static void int8_product(int64_t rows, int64_t columns, int64_t pairs, const int32_t *left, const int32_t *panel,
                         int32_t *out, int64_t out_stride) {
    for (int64_t j = 0; j < columns; j += PANEL, panel += pairs * PANEL) {
        int64_t i = 0, width = columns - j < PANEL ? columns - j : PANEL;
        for (; i + 4 <= rows; i += 4)
            int8_tile(4, width, pairs, left + i * pairs, panel, out + i * out_stride + j, out_stride);
        for (; i < rows; i++)
            int8_tile(1, width, pairs, left + i * pairs, panel, out + i * out_stride + j, out_stride);
    }
}
#undef PANEL
