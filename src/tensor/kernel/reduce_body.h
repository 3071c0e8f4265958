/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions of long rows and of columns, for one type. See fold.h for the words.
 */

/* One step; `kind` is a constant wherever this is inlined. */
TU_LANE VEC NAMED(fold_step)(VEC left, VEC right, int kind) {
    return kind == TU_FOLD_SUM       ? left + right
           : kind == TU_FOLD_PRODUCT ? left * right
           : kind == TU_FOLD_MAXIMUM ? MATH(maximum)(left, right)
                                     : MATH(minimum)(left, right);
}
TU_LANE TYPE NAMED(fold_first)(int kind) {
    return kind == TU_FOLD_SUM       ? 0
           : kind == TU_FOLD_PRODUCT ? 1
           : kind == TU_FOLD_MAXIMUM ? -(TYPE)__builtin_inf()
                                     : (TYPE)__builtin_inf();
}

/* Lanes in one number, by halves. */
TU_LANE TYPE NAMED(fold_lanes)(VEC *lanes, int kind) {
    TYPE numbers[WIDE];
    memcpy(numbers, lanes, sizeof numbers);
    for (int64_t half = WIDE / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++)
            numbers[lane] =
                MATH(first)(NAMED(fold_step)(MATH(splat)(numbers[lane]), MATH(splat)(numbers[lane + half]), kind));
    return numbers[0];
}

/* Blocks of fixed size, then their results one after the other: long sums stay exact to a few units in the last
 * place. */
TU_LANE void NAMED(fold_row)(void *to, const void *from, int64_t count, int kind) {
    const TYPE *x = from;
    VEC first = MATH(splat)(NAMED(fold_first)(kind)), total = MATH(splat)(*(TYPE *)to);
    for (int64_t begin = 0; begin < count; begin += TU_FOLD_BLOCK) {
        int64_t end = begin + TU_FOLD_BLOCK < count ? begin + TU_FOLD_BLOCK : count, i = begin;
        VEC lanes[REGISTERS];
        NAMED(start)(lanes, first);
        for (; i + WIDE <= end; i += WIDE)
            TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] =
                NAMED(fold_step)(lanes[slot], MATH(load)(x + i + slot * LANES), kind);
        if (i < end)
            TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] = NAMED(fold_step)(
                lanes[slot], NAMED(load_or)(x + i + slot * LANES, end - i - slot * LANES, first), kind);
        TYPE block = kind == TU_FOLD_SUM ? NAMED(sum_of)(lanes) : NAMED(fold_lanes)(lanes, kind);
        total = NAMED(fold_step)(total, MATH(splat)(block), kind);
    }
    *(TYPE *)to = MATH(first)(total);
}
TU_LANE void NAMED(fold_column)(void *to, const void *from, int64_t count, int kind) {
    const TYPE *x = from;
    TYPE *out = to;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        MATH(store)(out + i, NAMED(fold_step)(MATH(load)(out + i), MATH(load)(x + i), kind));
    if (i < count) {
        VEC value = NAMED(fold_step)(MATH(load_part)(out + i, count - i), MATH(load_part)(x + i, count - i), kind);
        MATH(store_part)(out + i, value, count - i);
    }
}
#define FOLDS(name, kind)                                                         \
    static void NAMED(name##_row)(void *to, const void *from, int64_t count) {    \
        NAMED(fold_row)(to, from, count, kind);                                   \
    }                                                                             \
    static void NAMED(name##_column)(void *to, const void *from, int64_t count) { \
        NAMED(fold_column)(to, from, count, kind);                                \
    }                                                                             \
    static void NAMED(name##_start)(void *to, int64_t count) {                    \
        for (int64_t i = 0; i < count; i++)                                       \
            ((TYPE *)to)[i] = NAMED(fold_first)(kind);                            \
    }
FOLDS(sum, TU_FOLD_SUM)
FOLDS(prod, TU_FOLD_PRODUCT)
FOLDS(amax, TU_FOLD_MAXIMUM)
FOLDS(amin, TU_FOLD_MINIMUM)
#undef FOLDS
