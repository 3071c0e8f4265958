/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices, for one type: the right one is packed in panels of two registers, a tile of the result stays in
 * registers while the depth is walked. See fold.h for the words.
 */
#define PANEL (2 * LANES)

static void NAMED(pack)(int64_t depth, int64_t columns, const void *from, int64_t row, int64_t column, void *packed) {
    const TYPE *elements = from;
    TYPE *to = packed;
    for (int64_t j = 0; j < columns; j += PANEL, to += depth * PANEL) {
        int64_t width = columns - j < PANEL ? columns - j : PANEL;
        if (width < PANEL)
            memset(to, 0, (size_t)(depth * PANEL) * sizeof *to);
        if (column == 1) {
            for (int64_t inner = 0; inner < depth; inner++)
                memcpy(to + inner * PANEL, elements + inner * row + j, (size_t)width * sizeof *to);
            continue;
        }
        for (int64_t i = 0; i < width; i++)
            for (int64_t inner = 0; inner < depth; inner++)
                to[inner * PANEL + i] = elements[inner * row + (j + i) * column];
    }
}

/* `rows` of the left matrix times one panel; `width` columns of it count. rows and add are constants where this is
 * inlined. */
TU_LANE void NAMED(tile)(int rows, int64_t width, int64_t depth, const TYPE *left, int64_t left_row,
                         int64_t left_column, const TYPE *panel, TYPE *out, int64_t out_stride, bool add) {
    VEC sum[TU_TILE_ROWS][2];
    TU_UNROLL_TILE for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = MATH(splat)(0);
    for (int64_t inner = 0; inner < depth; inner++) {
        VEC low = MATH(load)(panel + inner * PANEL), high = MATH(load)(panel + inner * PANEL + LANES);
        TU_UNROLL_TILE for (int row = 0; row < rows; row++) {
            VEC factor = MATH(splat)(left[row * left_row + inner * left_column]);
            sum[row][0] = MATH(fma)(factor, low, sum[row][0]);
            sum[row][1] = MATH(fma)(factor, high, sum[row][1]);
        }
    }
    int64_t first = width < LANES ? width : LANES, second = width - first;
    TU_UNROLL_TILE for (int row = 0; row < rows; row++) {
        TYPE *to = out + row * out_stride;
        if (width == PANEL) {
            MATH(store)(to, add ? MATH(load)(to) + sum[row][0] : sum[row][0]);
            MATH(store)(to + LANES, add ? MATH(load)(to + LANES) + sum[row][1] : sum[row][1]);
            continue;
        }
        MATH(store_part)(to, add ? MATH(load_part)(to, first) + sum[row][0] : sum[row][0], first);
        if (second > 0)
            MATH(store_part)(to + LANES, add ? MATH(load_part)(to + LANES, second) + sum[row][1] : sum[row][1], second);
    }
}

TU_LANE void NAMED(column_of_tiles)(int64_t rows, int64_t width, int64_t depth, const TYPE *left, int64_t left_row,
                                    int64_t left_column, const TYPE *panel, TYPE *out, int64_t out_stride, bool add) {
    int64_t i = 0;
    for (; i + TU_TILE_ROWS <= rows; i += TU_TILE_ROWS)
        NAMED(tile)
    (TU_TILE_ROWS, width, depth, left + i * left_row, left_row, left_column, panel, out + i * out_stride, out_stride,
     add);
    for (; i + 4 <= rows; i += 4)
        NAMED(tile)
    (4, width, depth, left + i * left_row, left_row, left_column, panel, out + i * out_stride, out_stride, add);
    for (; i < rows; i++)
        NAMED(tile)
    (1, width, depth, left + i * left_row, left_row, left_column, panel, out + i * out_stride, out_stride, add);
}

static void NAMED(product)(int64_t rows, int64_t columns, int64_t depth, const void *left, int64_t left_row,
                           int64_t left_column, const void *packed, int64_t packed_depth, void *out, int64_t out_stride,
                           bool add) {
    const TYPE *panel = packed;
    for (int64_t j = 0; j < columns; j += PANEL, panel += packed_depth * PANEL) {
        int64_t width = columns - j < PANEL ? columns - j : PANEL;
        if (add)
            NAMED(column_of_tiles)
        (rows, width, depth, left, left_row, left_column, panel, (TYPE *)out + j, out_stride, true);
        else NAMED(column_of_tiles)(rows, width, depth, left, left_row, left_column, panel, (TYPE *)out + j, out_stride,
                                    false);
    }
}
#undef PANEL
