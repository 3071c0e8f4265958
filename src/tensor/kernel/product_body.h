/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices, for one type: the right one is packed in panels of two registers, a tile of the result stays in
 * registers while the depth is walked. See fold.h for the words.
 */
#define PANEL (2 * LANES)

/* A line of `depth` elements `step` apart becomes a column of a packed matrix: `apart` elements between neighbours. */
static void NAMED(spread)(int64_t depth, const TYPE *from, int64_t step, TYPE *to, int64_t apart) {
    for (int64_t inner = 0; inner < depth; inner++)
        to[inner * apart] = from[inner * step];
}

/* `count` dense lines, `line` apart, become neighbouring columns of a packed matrix: in stretches of the depth that
 * stay in the first cache. */
static void NAMED(spread_lines)(int64_t count, int64_t depth, const TYPE *from, int64_t line, TYPE *to, int64_t apart) {
    for (int64_t inner = 0; inner < depth; inner += TU_STRETCH) {
        int64_t part = depth - inner < TU_STRETCH ? depth - inner : TU_STRETCH, i = 0;
        for (; i + TURNED <= count; i += TURNED)
            NAMED(turn_lines)(part, from + i * line + inner, line, to + inner * apart + i, apart);
        for (; i < count; i++)
            NAMED(spread)(part, from + i * line + inner, 1, to + inner * apart + i, apart);
    }
}

/* Rows of at most a panel's width; behind them zeros. */
static void NAMED(pack_rows)(int64_t depth, int64_t width, const TYPE *from, int64_t row, TYPE *to) {
    int64_t first = width < LANES ? width : LANES, second = width - first;
    if (width == PANEL)
        for (int64_t inner = 0; inner < depth; inner++)
            memcpy(to + inner * PANEL, from + inner * row, PANEL * sizeof *to);
    else
        for (int64_t inner = 0; inner < depth; inner++) {
            MATH(store)(to + inner * PANEL, MATH(load_part)(from + inner * row, first));
            MATH(store)(to + inner * PANEL + LANES, MATH(load_part)(from + inner * row + first, second));
        }
}

static void NAMED(pack)(int64_t depth, int64_t columns, const void *from, int64_t row, int64_t column, void *packed) {
    const TYPE *elements = from;
    TYPE *to = packed;
    for (int64_t j = 0; j < columns; j += PANEL, to += depth * PANEL) {
        int64_t width = columns - j < PANEL ? columns - j : PANEL;
        if (column == 1) {
            NAMED(pack_rows)(depth, width, elements + j, row, to);
            continue;
        }
        if (width < PANEL)
            memset(to, 0, (size_t)(depth * PANEL) * sizeof *to);
        if (row == 1)
            NAMED(spread_lines)(width, depth, elements + j * column, column, to, PANEL);
        else
            for (int64_t i = 0; i < width; i++)
                NAMED(spread)(depth, elements + (j + i) * column, row, to + i, PANEL);
    }
}

/* Neighbouring rows of a transposed left matrix: of several tiles at once, so that a line of memory is read once. */
#define TOGETHER (48 / TU_TILE_ROWS) /* tiles */
static void NAMED(pack_tiles)(int tiles, int64_t depth, const TYPE *from, int64_t column, TYPE *to) {
    for (int64_t inner = 0; inner < depth; inner++)
        for (int tile = 0; tile < tiles; tile++)
            memcpy(to + (tile * depth + inner) * TU_TILE_ROWS, from + inner * column + tile * TU_TILE_ROWS,
                   TU_TILE_ROWS * sizeof *to);
}

/* The left matrix in packed form: tiles of rows, the rows of a tile side by side along the depth. Behind the last row
 * of the last tile there is nothing that anybody reads. */
static void NAMED(pack_left)(int64_t rows, int64_t depth, const void *from, int64_t row, int64_t column, void *packed) {
    const TYPE *elements = from;
    TYPE *to = packed;
    int64_t i = 0;
    for (; row == 1 && i + TOGETHER * TU_TILE_ROWS <= rows; i += TOGETHER * TU_TILE_ROWS)
        NAMED(pack_tiles)(TOGETHER, depth, elements + i, column, to + i * depth);
    for (; i < rows; i += TU_TILE_ROWS) {
        int64_t count = rows - i < TU_TILE_ROWS ? rows - i : TU_TILE_ROWS;
        TYPE *tile = to + i * depth;
        if (row == 1 && count == TU_TILE_ROWS)
            NAMED(pack_tiles)(1, depth, elements + i, column, tile);
        else if (column == 1)
            NAMED(spread_lines)(count, depth, elements + i * row, row, tile, TU_TILE_ROWS);
        else
            for (int64_t k = 0; k < count; k++)
                NAMED(spread)(depth, elements + (i + k) * row, column, tile + k, TU_TILE_ROWS);
    }
}
#undef TOGETHER

/* `rows` of the left matrix times one panel, of which `width` columns count, in the first register or in both; with
 * `add` on top of what lies at `start`. rows, registers and add are constants where this is inlined. */
TU_LANE void NAMED(tile)(int rows, int registers, int64_t width, int64_t depth, const TYPE *left, int64_t left_row,
                         int64_t left_column, const TYPE *panel, const TYPE *start, int64_t start_stride, TYPE *out,
                         int64_t out_stride, bool add) {
    VEC sum[TU_TILE_ROWS][2];
    TU_UNROLL_TILE for (int row = 0; row < rows; row++) {
        sum[row][0] = sum[row][1] = MATH(splat)(0);
        __builtin_prefetch(out + row * out_stride, 1);
        if (sizeof(VEC) * 2 > 64 && registers > 1)
            __builtin_prefetch(out + row * out_stride + LANES, 1);
    }
    for (int64_t inner = 0; inner < depth; inner++) {
        VEC low = MATH(load)(panel + inner * PANEL),
            high = registers > 1 ? MATH(load)(panel + inner * PANEL + LANES) : low;
        TU_UNROLL_TILE for (int row = 0; row < rows; row++) {
            VEC factor = MATH(splat)(left[row * left_row + inner * left_column]);
            sum[row][0] = MATH(fma)(factor, low, sum[row][0]);
            if (registers > 1)
                sum[row][1] = MATH(fma)(factor, high, sum[row][1]);
        }
    }
    int64_t first = width < LANES ? width : LANES, second = width - first;
    TU_UNROLL_TILE for (int row = 0; row < rows; row++) {
        TYPE *to = out + row * out_stride;
        const TYPE *on = start + row * start_stride;
        if (width == PANEL) {
            MATH(store)(to, add ? MATH(load)(on) + sum[row][0] : sum[row][0]);
            MATH(store)(to + LANES, add ? MATH(load)(on + LANES) + sum[row][1] : sum[row][1]);
            continue;
        }
        MATH(store_part)(to, add ? MATH(load_part)(on, first) + sum[row][0] : sum[row][0], first);
        if (registers > 1 && second > 0)
            MATH(store_part)(to + LANES, add ? MATH(load_part)(on + LANES, second) + sum[row][1] : sum[row][1], second);
    }
}

/* Fewer rows than a tile has, in the tiles that fit. */
TU_LANE void NAMED(last_tiles)(int64_t rows, int registers, int64_t width, int64_t depth, const TYPE *left,
                               int64_t left_row, int64_t left_column, const TYPE *panel, const TYPE *start,
                               int64_t start_stride, TYPE *out, int64_t out_stride, bool add) {
#define TILES(count)                                                                                          \
    for (; rows >= (count) && (count) < TU_TILE_ROWS;                                                         \
         rows -= (count), left += (count)*left_row, start += (count)*start_stride, out += (count)*out_stride) \
        NAMED(tile)                                                                                           \
    (count, registers, width, depth, left, left_row, left_column, panel, start, start_stride, out, out_stride, add)
    TILES(4);
    TILES(2);
    TILES(1);
#undef TILES
}

TU_LANE void NAMED(column_of_tiles)(int64_t rows, int registers, int64_t width, int64_t depth, const TYPE *left,
                                    int64_t left_row, int64_t left_column, int64_t left_tile, const TYPE *panel,
                                    const TYPE *start, int64_t start_stride, TYPE *out, int64_t out_stride, bool add) {
    for (; rows >= TU_TILE_ROWS; rows -= TU_TILE_ROWS, left += left_tile, start += TU_TILE_ROWS * start_stride,
                                 out += TU_TILE_ROWS * out_stride)
        NAMED(tile)
    (TU_TILE_ROWS, registers, width, depth, left, left_row, left_column, panel, start, start_stride, out, out_stride,
     add);
    NAMED(last_tiles)
    (rows, registers, width, depth, left, left_row, left_column, panel, start, start_stride, out, out_stride, add);
}

/* One panel times all rows. left_row and left_column are constants for packed rows. */
TU_LANE void NAMED(panel_product)(int64_t rows, int64_t width, int64_t depth, const TYPE *left, int64_t left_row,
                                  int64_t left_column, int64_t left_tile, const TYPE *panel, const TYPE *start,
                                  int64_t start_stride, TYPE *out, int64_t out_stride) {
    bool add = start != NULL;
    if (!add) { /* which nobody reads then */
        start = out;
        start_stride = 0;
    }
#define PRODUCT(registers, add)                                                                              \
    NAMED(column_of_tiles)                                                                                   \
    (rows, registers, width, depth, left, left_row, left_column, left_tile, panel, start, start_stride, out, \
     out_stride, add)
    if (width > LANES && add)
        PRODUCT(2, true);
    else if (width > LANES)
        PRODUCT(2, false);
    else if (add)
        PRODUCT(1, true);
    else
        PRODUCT(1, false);
#undef PRODUCT
}

static void NAMED(product)(int64_t rows, int64_t columns, int64_t depth, const void *left, int64_t left_row,
                           int64_t left_column, const void *packed, int64_t packed_depth, const void *start,
                           int64_t start_stride, void *out, int64_t out_stride) {
    const TYPE *panel = packed, *on = start;
    for (int64_t j = 0; j < columns; j += PANEL, panel += packed_depth * PANEL)
        NAMED(panel_product)
    (rows, columns - j < PANEL ? columns - j : PANEL, depth, left, left_row, left_column, TU_TILE_ROWS * left_row,
     panel, on != NULL ? on + j : NULL, start_stride, (TYPE *)out + j, out_stride);
}

static void NAMED(packed_product)(int64_t rows, int64_t width, int64_t depth, const void *packed_left,
                                  const void *panel, const void *start, int64_t start_stride, void *out,
                                  int64_t out_stride) {
    NAMED(panel_product)
    (rows, width, depth, packed_left, 1, TU_TILE_ROWS, TU_TILE_ROWS * depth, panel, start, start_stride, out,
     out_stride);
}
#undef PANEL
