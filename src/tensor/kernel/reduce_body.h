/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions of long rows and of columns, for one type. See fold.h for the words.
 */

/* One step; `kind` is a constant wherever this is inlined. */
TU_LANE V N(fold_step)(V a, V b, int kind) {
    return kind == TU_FOLD_SUM       ? a + b
           : kind == TU_FOLD_PRODUCT ? a * b
           : kind == TU_FOLD_MAXIMUM ? F(maximum)(a, b)
                                     : F(minimum)(a, b);
}
TU_LANE T N(fold_first)(int kind) {
    return kind == TU_FOLD_SUM       ? 0
           : kind == TU_FOLD_PRODUCT ? 1
           : kind == TU_FOLD_MAXIMUM ? -(T)__builtin_inf()
                                     : (T)__builtin_inf();
}

/* Lanes in one number, by halves. */
TU_LANE T N(fold_lanes)(V *lanes, int kind) {
    T numbers[WIDE];
    memcpy(numbers, lanes, sizeof numbers);
    for (int64_t half = WIDE / 2; half > 0; half /= 2)
        for (int64_t l = 0; l < half; l++)
            numbers[l] = F(first)(N(fold_step)(F(splat)(numbers[l]), F(splat)(numbers[l + half]), kind));
    return numbers[0];
}

/* Blocks of fixed size, then their results one after the other: long sums stay exact to a few units in the last
 * place. */
TU_LANE void N(fold_row)(void *to, const void *from, int64_t count, int kind) {
    const T *x = from;
    V first = F(splat)(N(fold_first)(kind)), total = F(splat)(*(T *)to);
    for (int64_t begin = 0; begin < count; begin += TU_FOLD_BLOCK) {
        int64_t end = begin + TU_FOLD_BLOCK < count ? begin + TU_FOLD_BLOCK : count, i = begin;
        V lanes[REGISTERS];
        N(start)(lanes, first);
        for (; i + WIDE <= end; i += WIDE)
            TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] =
                N(fold_step)(lanes[r], F(load)(x + i + r * LANES), kind);
        if (i < end)
            TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] =
                N(fold_step)(lanes[r], N(load_or)(x + i + r * LANES, end - i - r * LANES, first), kind);
        T block = kind == TU_FOLD_SUM ? N(sum_of)(lanes) : N(fold_lanes)(lanes, kind);
        total = N(fold_step)(total, F(splat)(block), kind);
    }
    *(T *)to = F(first)(total);
}
TU_LANE void N(fold_column)(void *to, const void *from, int64_t count, int kind) {
    const T *x = from;
    T *o = to;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        F(store)(o + i, N(fold_step)(F(load)(o + i), F(load)(x + i), kind));
    if (i < count) {
        V value = N(fold_step)(F(load_part)(o + i, count - i), F(load_part)(x + i, count - i), kind);
        F(store_part)(o + i, value, count - i);
    }
}
#define FOLDS(name, kind)                                                     \
    static void N(name##_row)(void *to, const void *from, int64_t count) {    \
        N(fold_row)(to, from, count, kind);                                   \
    }                                                                         \
    static void N(name##_column)(void *to, const void *from, int64_t count) { \
        N(fold_column)(to, from, count, kind);                                \
    }                                                                         \
    static void N(name##_start)(void *to, int64_t count) {                    \
        for (int64_t i = 0; i < count; i++)                                   \
            ((T *)to)[i] = N(fold_first)(kind);                               \
    }
FOLDS(sum, TU_FOLD_SUM)
FOLDS(prod, TU_FOLD_PRODUCT)
FOLDS(amax, TU_FOLD_MAXIMUM)
FOLDS(amin, TU_FOLD_MINIMUM)
#undef FOLDS
