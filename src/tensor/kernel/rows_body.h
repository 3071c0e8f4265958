/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows, for one type: softmax and its kin, norms, cross entropy. See fold.h for the words.
 */

/* Lanes of the last registers of a row: what is there, else `other`. */
TU_LANE V N(load_or)(const T *from, int64_t left, V other) {
    int64_t part = left < 0 ? 0 : left < LANES ? left : LANES;
    return TU_SELECT(F(below)(part), F(load_part)(from, part), other);
}
TU_LANE V N(get)(const T *from, int64_t part) {
    return part == LANES ? F(load)(from) : F(load_part)(from, part);
}
TU_LANE void N(put)(T *to, V x, int64_t part) {
    if (part == LANES)
        F(store)(to, x);
    else
        F(store_part)(to, x, part);
}

TU_LANE void N(start)(V *lanes, V value) {
    TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] = value;
}
TU_LANE T N(sum_of)(V *lanes) {
    TU_UNROLL for (int half = REGISTERS / 2; half > 0; half /= 2) TU_UNROLL for (int r = 0; r < half; r++) lanes[r] +=
        lanes[r + half];
    return F(fold_add)(lanes[0]);
}

/* The largest element, a NaN left out; -infinity of none. */
TU_LANE T N(largest_of)(const T *x, int64_t size) {
    V lanes[REGISTERS], none = F(splat)(-(T)__builtin_inf());
    int64_t i = 0;
    N(start)(lanes, none);
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] = F(greater)(F(load)(x + i + r * LANES), lanes[r]);
    if (i < size)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] =
            F(greater)(N(load_or)(x + i + r * LANES, size - i - r * LANES, none), lanes[r]);
    TU_UNROLL for (int r = 1; r < REGISTERS; r++) lanes[0] = F(greater)(lanes[r], lanes[0]);
    return F(fold_greater)(lanes[0]);
}

/* The sum of exp(scale x - shift); `y`, where there is one, gets the terms. */
TU_LANE T N(exponentials_of)(T *y, const T *x, int64_t size, T scale, T shift) {
    V lanes[REGISTERS], factor = F(splat)(scale), less = F(splat)(-shift), none = F(splat)(-(T)__builtin_inf());
    int64_t i = 0;
    N(start)(lanes, F(splat)(0));
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) {
            V e = F(exp)(F(fma)(F(load)(x + i + r * LANES), factor, less));
            if (y != NULL)
                F(store)(y + i + r * LANES, e);
            lanes[r] += e;
        }
    if (i < size)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) {
            int64_t left = size - i - r * LANES, part = left < 0 ? 0 : left < LANES ? left : LANES;
            V term = F(fma)(F(load_part)(x + i + r * LANES, part), factor, less);
            V e = F(exp)(TU_SELECT(F(below)(part), term, none));
            if (y != NULL)
                F(store_part)(y + i + r * LANES, e, part);
            lanes[r] += e;
        }
    return N(sum_of)(lanes);
}

/* The sum of x, of x y, or of (x - shift)^2: whichever `kind` says, a constant wherever this is inlined. */
enum N(sums) {
    N(PLAIN),
    N(PRODUCTS),
    N(SQUARES)
};
TU_LANE V N(sum_term)(V lane, V x, V y, V shift, enum N(sums) kind) {
    V away = x - shift;
    return kind == N(PLAIN) ? lane + x : kind == N(PRODUCTS) ? F(fma)(x, y, lane) : F(fma)(away, away, lane);
}
TU_LANE T N(total)(const T *x, const T *y, int64_t size, T shift, enum N(sums) kind) {
    V lanes[REGISTERS], less = F(splat)(shift);
    int64_t i = 0;
    N(start)(lanes, F(splat)(0));
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] =
            N(sum_term)(lanes[r], F(load)(x + i + r * LANES), F(load)(y + i + r * LANES), less, kind);
    if (i < size)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) lanes[r] =
            N(sum_term)(lanes[r], N(load_or)(x + i + r * LANES, size - i - r * LANES, less),
                        N(load_or)(y + i + r * LANES, size - i - r * LANES, less), less, kind);
    return N(sum_of)(lanes);
}

TU_LANE T N(one_log)(T x) {
    return F(first)(F(log)(F(splat)(x)));
}

/* ---- softmax ---- */

TU_LANE void N(multiply_row)(T *x, int64_t size, T factor) {
    V by = F(splat)(factor);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        F(store)(x + i, F(load)(x + i) * by);
    if (i < size)
        F(store_part)(x + i, F(load_part)(x + i, size - i) * by, size - i);
}

/* A row of -infinity is not a number, as 0 / 0 is. */
static void N(softmax)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const T *x = (const T *)in[0] + row * size;
        T *y = (T *)out + row * size, top = N(largest_of)(x, size);
        T sum = N(exponentials_of)(y, x, size, 1, top == -(T)__builtin_inf() ? 0 : top);
        N(multiply_row)(y, size, 1 / sum);
    }
}

static void N(log_softmax)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const T *x = (const T *)in[0] + row * size;
        T *y = (T *)out + row * size, top = N(largest_of)(x, size);
        top = top == -(T)__builtin_inf() ? 0 : top;
        V all = F(splat)(top + N(one_log)(N(exponentials_of)(NULL, x, size, 1, top)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            F(store)(y + i, F(load)(x + i) - all);
        if (i < size)
            F(store_part)(y + i, F(load_part)(x + i, size - i) - all, size - i);
    }
}

/* from (g, y): y (g - sum(g y)) */
TU_LANE void N(softmax_slope)(T *out, const T *g, const T *y, V dot, int64_t part) {
    N(put)(out, N(get)(y, part) * (N(get)(g, part) - dot), part);
}
static void N(softmax_backward)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const T *g = (const T *)in[0] + row * size, *y = (const T *)in[1] + row * size;
        T *o = (T *)out + row * size;
        V dot = F(splat)(N(total)(g, y, size, 0, N(PRODUCTS)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            N(softmax_slope)(o + i, g + i, y + i, dot, LANES);
        if (i < size)
            N(softmax_slope)(o + i, g + i, y + i, dot, size - i);
    }
}

/* from (g, y): g - exp(y) sum(g) */
TU_LANE void N(log_softmax_slope)(T *out, const T *g, const T *y, V sum, int64_t part) {
    N(put)(out, F(fma)(F(exp)(N(get)(y, part)), -sum, N(get)(g, part)), part);
}
static void N(log_softmax_backward)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const T *g = (const T *)in[0] + row * size, *y = (const T *)in[1] + row * size;
        T *o = (T *)out + row * size;
        V sum = F(splat)(N(total)(g, g, size, 0, N(PLAIN)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            N(log_softmax_slope)(o + i, g + i, y + i, sum, LANES);
        if (i < size)
            N(log_softmax_slope)(o + i, g + i, y + i, sum, size - i);
    }
}

/* ---- norms ---- */

TU_LANE void N(norm_part)(T *y, const T *x, const T *weight, const T *bias, V mean, V scale, int64_t part) {
    V value = (N(get)(x, part) - mean) * scale;
    if (weight != NULL && bias != NULL)
        value = F(fma)(value, N(get)(weight, part), N(get)(bias, part));
    else if (weight != NULL)
        value = value * N(get)(weight, part);
    else if (bias != NULL)
        value = value + N(get)(bias, part);
    N(put)(y, value, part);
}
TU_LANE void N(norm_row)(T *y, const T *x, const T *weight, const T *bias, T mean, T scale, int64_t size) {
    V less = F(splat)(mean), by = F(splat)(scale);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        N(norm_part)(y + i, x + i, weight ? weight + i : NULL, bias ? bias + i : NULL, less, by, LANES);
    if (i < size)
        N(norm_part)(y + i, x + i, weight ? weight + i : NULL, bias ? bias + i : NULL, less, by, size - i);
}
static void N(norm)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    int64_t size = rows->size;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)rows->x + row * size;
        T *y = (T *)rows->y + row * size, count = (T)size;
        T mean = rows->centred ? N(total)(x, x, size, 0, N(PLAIN)) / count : 0;
        T square = N(total)(x, x, size, mean, N(SQUARES)) / count;
        T scale = 1 / F(first)(F(sqrt)(F(splat)(square + (T)rows->epsilon)));
        if (rows->weight != NULL && rows->bias != NULL)
            N(norm_row)(y, x, rows->weight, rows->bias, mean, scale, size);
        else if (rows->weight != NULL)
            N(norm_row)(y, x, rows->weight, NULL, mean, scale, size);
        else if (rows->bias != NULL)
            N(norm_row)(y, x, NULL, rows->bias, mean, scale, size);
        else
            N(norm_row)(y, x, NULL, NULL, mean, scale, size);
        ((T *)rows->mean)[row] = mean;
        ((T *)rows->scale)[row] = scale;
    }
}

/* dx = scale (gw - mean(gw) - xh mean(gw xh)) with gw = g weight, xh = (x - mean) scale; RMS norm lacks the first mean.
 */
TU_LANE void N(norm_sums)(V *plain, V *crossed, V g, V weight, V x, V mean) {
    V gw = g * weight;
    *plain += gw;
    *crossed = F(fma)(gw, x - mean, *crossed);
}
TU_LANE void N(norm_slope)(T *out, const T *g, const T *weight, const T *x, V mean, V scale, V of_g, V of_gx,
                           int64_t part) {
    V gw = N(get)(g, part);
    if (weight != NULL)
        gw = gw * N(get)(weight, part);
    N(put)(out, scale * F(fma)(N(get)(x, part) - mean, -of_gx, gw - of_g), part);
}
TU_LANE void N(norm_row_backward)(const tu_norm_rows *rows, int64_t row, const T *weight) {
    int64_t size = rows->size, i = 0;
    const T *x = (const T *)rows->x + row * size, *g = (const T *)rows->g + row * size;
    T *o = (T *)rows->y + row * size, scale = ((T *)rows->scale)[row];
    V mean = F(splat)(((T *)rows->mean)[row]), one = F(splat)(1), plain[REGISTERS], crossed[REGISTERS];
    N(start)(plain, F(splat)(0));
    N(start)(crossed, F(splat)(0));
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++)
            N(norm_sums)(&plain[r], &crossed[r], F(load)(g + i + r * LANES),
                         weight ? F(load)(weight + i + r * LANES) : one, F(load)(x + i + r * LANES), mean);
    if (i < size)
        TU_UNROLL for (int r = 0; r < REGISTERS; r++) {
            int64_t left = size - i - r * LANES;
            N(norm_sums)
            (&plain[r], &crossed[r], N(load_or)(g + i + r * LANES, left, F(splat)(0)),
             weight ? N(load_or)(weight + i + r * LANES, left, F(splat)(0)) : one,
             N(load_or)(x + i + r * LANES, left, mean), mean);
        }
    V of_g = F(splat)(rows->centred ? N(sum_of)(plain) / (T)size : 0);
    V of_gx = F(splat)(N(sum_of)(crossed) * scale * scale / (T)size);
    for (i = 0; i + LANES <= size; i += LANES)
        N(norm_slope)(o + i, g + i, weight ? weight + i : NULL, x + i, mean, F(splat)(scale), of_g, of_gx, LANES);
    if (i < size)
        N(norm_slope)(o + i, g + i, weight ? weight + i : NULL, x + i, mean, F(splat)(scale), of_g, of_gx, size - i);
}
static void N(norm_backward)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        if (rows->weight != NULL)
            N(norm_row_backward)(rows, row, rows->weight);
        else
            N(norm_row_backward)(rows, row, NULL);
    }
}

/* Columns [begin, end) of the gradients of weight and bias, rows in order. A few rows at a time, so that the sums are
 * read and written less often. */
#define ROWS_AT_ONCE 4
TU_LANE void N(norm_columns_part)(const tu_norm_rows *rows, int64_t row, int count, int64_t i, int64_t part) {
    T *of_weight = (T *)rows->of_weight + i, *of_bias = (T *)rows->of_bias + i;
    V weight = N(get)(of_weight, part), bias = N(get)(of_bias, part);
    TU_UNROLL for (int r = 0; r < count; r++) {
        int64_t at = (row + r) * rows->size + i;
        V g = N(get)((const T *)rows->g + at, part);
        V away = N(get)((const T *)rows->x + at, part) - F(splat)(((const T *)rows->mean)[row + r]);
        weight = F(fma)(g, away * F(splat)(((const T *)rows->scale)[row + r]), weight);
        bias += g;
    }
    N(put)(of_weight, weight, part);
    N(put)(of_bias, bias, part);
}
TU_LANE void N(norm_columns_rows)(const tu_norm_rows *rows, int64_t row, int count, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        N(norm_columns_part)(rows, row, count, i, LANES);
    if (i < end)
        N(norm_columns_part)(rows, row, count, i, end - i);
}
static void N(norm_columns)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    int64_t row = 0;
    memset((T *)rows->of_weight + begin, 0, (size_t)(end - begin) * sizeof(T));
    memset((T *)rows->of_bias + begin, 0, (size_t)(end - begin) * sizeof(T));
    for (; row + ROWS_AT_ONCE <= rows->count; row += ROWS_AT_ONCE)
        N(norm_columns_rows)(rows, row, ROWS_AT_ONCE, begin, end);
    for (; row < rows->count; row++)
        N(norm_columns_rows)(rows, row, 1, begin, end);
}
#undef ROWS_AT_ONCE

/* ---- cross entropy ---- */

static void N(entropy)(const tu_entropy_rows *rows, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)rows->logits + row * rows->classes;
        T top = N(largest_of)(x, rows->classes);
        T shift = top == -(T)__builtin_inf() ? 0 : top;
        ((T *)rows->lse)[row] = shift + N(one_log)(N(exponentials_of)(NULL, x, rows->classes, 1, shift));
    }
}

TU_LANE void N(entropy_slope)(T *out, const T *x, V lse, V scale, int64_t part) {
    N(put)(out, F(exp)(N(get)(x, part) - lse) * scale, part);
}
static void N(entropy_backward)(const tu_entropy_rows *rows, int64_t begin, int64_t end) {
    int64_t size = rows->classes;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)rows->logits + row * size;
        T *o = (T *)rows->out + row * size, scale = (T)rows->scale;
        V lse = F(splat)(((T *)rows->lse)[row]);
        if (rows->targets[row] == rows->ignore) {
            memset(o, 0, (size_t)size * sizeof *o);
            continue;
        }
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            N(entropy_slope)(o + i, x + i, lse, F(splat)(scale), LANES);
        if (i < size)
            N(entropy_slope)(o + i, x + i, lse, F(splat)(scale), size - i);
        o[rows->targets[row]] -= scale;
    }
}

/* ---- optimizer steps ---- */

TU_LANE void N(sgd_part)(const tu_step *step, int64_t i, int64_t part) {
    T *p = (T *)step->parameter + i, *velocity = step->first ? (T *)step->first + i : NULL;
    V old = N(get)(p, part);
    V change = F(fma)(F(splat)((T)step->decay), old, N(get)((const T *)step->gradient + i, part));
    if (velocity != NULL) {
        change = F(fma)(F(splat)((T)step->momentum), N(get)(velocity, part), change);
        N(put)(velocity, change, part);
    }
    N(put)(p, F(fma)(F(splat)(-(T)step->rate), change, old), part);
}
static void N(sgd)(const tu_step *step, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        N(sgd_part)(step, i, LANES);
    if (i < end)
        N(sgd_part)(step, i, end - i);
}

TU_LANE void N(adamw_part)(const tu_step *step, int64_t i, int64_t part) {
    T *p = (T *)step->parameter + i, *first = (T *)step->first + i, *second = (T *)step->second + i;
    V g = N(get)((const T *)step->gradient + i, part);
    V m = N(get)(first, part);
    m = F(fma)(g - m, F(splat)((T)(1 - step->beta1)), m);
    V v = F(fma)(F(splat)((T)step->beta2), N(get)(second, part), F(splat)((T)(1 - step->beta2)) * g * g);
    V root = F(fma)(F(sqrt)(v), F(splat)((T)step->correct), F(splat)((T)step->epsilon));
    N(put)(first, m, part);
    N(put)(second, v, part);
    N(put)(p, F(fma)(F(splat)((T)step->decay), N(get)(p, part), F(splat)(-(T)step->rate) * (m / root)), part);
}
static void N(adamw)(const tu_step *step, int64_t begin, int64_t end) {
    const tu_step held = *step;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        N(adamw_part)(&held, i, LANES);
    if (i < end)
        N(adamw_part)(&held, i, end - i);
}

/* ---- attention ---- */

static double N(largest)(const void *x, int64_t count) {
    return N(largest_of)(x, count);
}
static double N(exponentials)(void *x, int64_t count, double scale, double shift) {
    return N(exponentials_of)(x, x, count, (T)scale, (T)shift);
}
static void N(multiply)(void *x, int64_t count, double factor) {
    N(multiply_row)(x, count, (T)factor);
}
TU_LANE void N(slope_part)(T *dp, const T *p, V d, V scale, int64_t part) {
    N(put)(dp, N(get)(p, part) * (N(get)(dp, part) - d) * scale, part);
}
static void N(slopes)(const void *p, void *dp, int64_t count, double d, double scale) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        N(slope_part)((T *)dp + i, (const T *)p + i, F(splat)((T)d), F(splat)((T)scale), LANES);
    if (i < count)
        N(slope_part)((T *)dp + i, (const T *)p + i, F(splat)((T)d), F(splat)((T)scale), count - i);
}
static double N(dot)(const void *x, const void *y, int64_t count) {
    return N(total)(x, y, count, 0, N(PRODUCTS));
}
static double N(log)(double x) {
    return N(one_log)((T)x);
}
