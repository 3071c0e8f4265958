/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen by sixteen numbers of 32 bits, turned in registers, so that a line of the result is stored whole. Included by
 * rows.c once per level; how many numbers a register holds decides by which rounds of shuffles.
 */

/* Stores a register past the caches, where the place is aligned to a line, or into them. */
#define TU_PUT(place, value)                          \
    do {                                              \
        if (past)                                     \
            tu_stream_f32(place, (vec_f32)(value));   \
        else                                          \
            memcpy(place, &(value), sizeof(vec_f32)); \
    } while (0)

#if TU_LANES_F32 == 16
/* Neighbours of two registers side by side, in each quarter; then pairs of them; then quarters, twice. */
#define TU_LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define TU_HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define TU_LOW_PAIRS(x, y) __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define TU_HIGH_PAIRS(x, y) __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define TU_EVEN_QUARTERS(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define TU_ODD_QUARTERS(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

TU_LANE void turn_sixteen(const float *from, int64_t line, float *to, int64_t apart, bool past) {
    vec_f32 row[16], half[16];
    for (int i = 0; i < 16; i++)
        memcpy(&row[i], from + i * line, sizeof row[i]);
    for (int i = 0; i < 16; i += 2) {
        half[i] = TU_LOW(row[i], row[i + 1]);
        half[i + 1] = TU_HIGH(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        row[i] = TU_LOW_PAIRS(half[i], half[i + 2]);
        row[i + 1] = TU_HIGH_PAIRS(half[i], half[i + 2]);
        row[i + 2] = TU_LOW_PAIRS(half[i + 1], half[i + 3]);
        row[i + 3] = TU_HIGH_PAIRS(half[i + 1], half[i + 3]);
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k += 8) {
            half[k + i] = TU_EVEN_QUARTERS(row[k + i], row[k + 4 + i]);
            half[k + 4 + i] = TU_ODD_QUARTERS(row[k + i], row[k + 4 + i]);
        }
    for (int i = 0; i < 8; i++) {
        row[i] = TU_EVEN_QUARTERS(half[i], half[8 + i]);
        row[8 + i] = TU_ODD_QUARTERS(half[i], half[8 + i]);
    }
    for (int i = 0; i < 16; i++)
        TU_PUT(to + i * apart, row[i]);
}
#elif TU_LANES_F32 == 8
#define TU_LOW(x, y) __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define TU_HIGH(x, y) __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define TU_LOW_PAIRS(x, y) __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define TU_HIGH_PAIRS(x, y) __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15)

/* Eight by eight, to lines of sixteen. Halves of lines that are four apart are loaded into one register, which saves a
 * round. */
TU_LANE void turn_eight(const float *from, int64_t line, float *to) {
    for (int column = 0; column < 8; column += 4) {
        vec_f32 row[4], half[4];
        for (int i = 0; i < 4; i++) {
            tu_four low, high;
            memcpy(&low, from + i * line + column, sizeof low);
            memcpy(&high, from + (i + 4) * line + column, sizeof high);
            row[i] = (vec_f32)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
        }
        half[0] = TU_LOW(row[0], row[1]);
        half[1] = TU_HIGH(row[0], row[1]);
        half[2] = TU_LOW(row[2], row[3]);
        half[3] = TU_HIGH(row[2], row[3]);
        row[0] = TU_LOW_PAIRS(half[0], half[2]);
        row[1] = TU_HIGH_PAIRS(half[0], half[2]);
        row[2] = TU_LOW_PAIRS(half[1], half[3]);
        row[3] = TU_HIGH_PAIRS(half[1], half[3]);
        for (int i = 0; i < 4; i++)
            memcpy(to + (column + i) * 16, &row[i], sizeof row[i]);
    }
}

/* By way of a buffer: half a line that waits for the other half would leave for memory alone. */
TU_LANE void turn_sixteen(const float *from, int64_t line, float *to, int64_t apart, bool past) {
    _Alignas(64) float turned[16 * 16];
    for (int j = 0; j < 16; j += 8)
        for (int i = 0; i < 16; i += 8)
            turn_eight(from + j * line + i, line, turned + i * 16 + j);
    for (int i = 0; i < 16; i++) {
        vec_f32 left, right;
        memcpy(&left, turned + i * 16, sizeof left);
        memcpy(&right, turned + i * 16 + 8, sizeof right);
        TU_PUT(to + i * apart, left);
        TU_PUT(to + i * apart + 8, right);
    }
}
#else
TU_LANE void turn_sixteen(const float *from, int64_t line, float *to, int64_t apart, bool past) {
    (void)past;
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 16; j += 4)
            tu_turn_square(from + j * line + i, line, to + i * apart + j, apart);
}
#endif

static void turn_squares(const void *from, int64_t line, const void *soon, void *to, int64_t apart, int64_t squares,
                         bool past) {
    for (int64_t i = 0; i < squares; i++) {
        /* Into the second cache: lines that are a power of two apart meet in a few sets of the first. */
        for (int k = 0; k < 16; k++)
            __builtin_prefetch((const float *)soon + (16 * i + k) * line, 0, 2);
        turn_sixteen((const float *)from + 16 * i * line, line, (float *)to + 16 * i, apart, past);
    }
}

#undef TU_PUT
#undef TU_LOW
#undef TU_HIGH
#undef TU_LOW_PAIRS
#undef TU_HIGH_PAIRS
#undef TU_EVEN_QUARTERS
#undef TU_ODD_QUARTERS
