/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices, for one type: b is packed in panels of two registers, a tile of c stays in registers while k is
 * walked. See fold.h for the words.
 */
#define PANEL (2 * LANES)

static void NAMED(pack)(int64_t k, int64_t n, const void *from, int64_t row, int64_t column, void *packed) {
    const TYPE *b = from;
    TYPE *to = packed;
    for (int64_t j = 0; j < n; j += PANEL, to += k * PANEL) {
        int64_t width = n - j < PANEL ? n - j : PANEL;
        if (width < PANEL)
            memset(to, 0, (size_t)(k * PANEL) * sizeof *to);
        if (column == 1) {
            for (int64_t l = 0; l < k; l++)
                memcpy(to + l * PANEL, b + l * row + j, (size_t)width * sizeof *to);
            continue;
        }
        for (int64_t i = 0; i < width; i++)
            for (int64_t l = 0; l < k; l++)
                to[l * PANEL + i] = b[l * row + (j + i) * column];
    }
}

/* `rows` of a times one panel; `width` columns of it count. rows and add are constants where this is inlined. */
TU_LANE void NAMED(tile)(int rows, int64_t width, int64_t k, const TYPE *a, int64_t a_row, int64_t a_column,
                         const TYPE *b, TYPE *c, int64_t ldc, bool add) {
    VEC sum[TU_TILE_ROWS][2];
    TU_UNROLL_TILE for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = MATH(splat)(0);
    for (int64_t l = 0; l < k; l++) {
        VEC left = MATH(load)(b + l * PANEL), right = MATH(load)(b + l * PANEL + LANES);
        TU_UNROLL_TILE for (int r = 0; r < rows; r++) {
            VEC factor = MATH(splat)(a[r * a_row + l * a_column]);
            sum[r][0] = MATH(fma)(factor, left, sum[r][0]);
            sum[r][1] = MATH(fma)(factor, right, sum[r][1]);
        }
    }
    int64_t first = width < LANES ? width : LANES, second = width - first;
    TU_UNROLL_TILE for (int r = 0; r < rows; r++) {
        TYPE *to = c + r * ldc;
        if (width == PANEL) {
            MATH(store)(to, add ? MATH(load)(to) + sum[r][0] : sum[r][0]);
            MATH(store)(to + LANES, add ? MATH(load)(to + LANES) + sum[r][1] : sum[r][1]);
            continue;
        }
        MATH(store_part)(to, add ? MATH(load_part)(to, first) + sum[r][0] : sum[r][0], first);
        if (second > 0)
            MATH(store_part)(to + LANES, add ? MATH(load_part)(to + LANES, second) + sum[r][1] : sum[r][1], second);
    }
}

TU_LANE void NAMED(column_of_tiles)(int64_t m, int64_t width, int64_t k, const TYPE *a, int64_t a_row, int64_t a_column,
                                    const TYPE *b, TYPE *c, int64_t ldc, bool add) {
    int64_t i = 0;
    for (; i + TU_TILE_ROWS <= m; i += TU_TILE_ROWS)
        NAMED(tile)(TU_TILE_ROWS, width, k, a + i * a_row, a_row, a_column, b, c + i * ldc, ldc, add);
    for (; i + 4 <= m; i += 4)
        NAMED(tile)(4, width, k, a + i * a_row, a_row, a_column, b, c + i * ldc, ldc, add);
    for (; i < m; i++)
        NAMED(tile)(1, width, k, a + i * a_row, a_row, a_column, b, c + i * ldc, ldc, add);
}

static void NAMED(product)(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_column,
                           const void *b, int64_t packed_k, void *c, int64_t ldc, bool add) {
    const TYPE *panel = b;
    for (int64_t j = 0; j < n; j += PANEL, panel += packed_k * PANEL) {
        int64_t width = n - j < PANEL ? n - j : PANEL;
        if (add)
            NAMED(column_of_tiles)(m, width, k, a, a_row, a_column, panel, (TYPE *)c + j, ldc, true);
        else
            NAMED(column_of_tiles)(m, width, k, a, a_row, a_column, panel, (TYPE *)c + j, ldc, false);
    }
}
#undef PANEL
