/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows, for one type: softmax and its kin, norms, cross entropy. See fold.h for the words.
 */

/* Lanes of the last registers of a row: what is there, else `other`. */
TU_LANE VEC NAMED(load_or)(const TYPE *from, int64_t left, VEC other) {
    int64_t part = left < 0 ? 0 : left < LANES ? left : LANES;
    return TU_SELECT(MATH(below)(part), MATH(load_part)(from, part), other);
}
TU_LANE VEC NAMED(get)(const TYPE *from, int64_t part) {
    return part == LANES ? MATH(load)(from) : MATH(load_part)(from, part);
}
TU_LANE void NAMED(put)(TYPE *to, VEC x, int64_t part) {
    if (part == LANES)
        MATH(store)(to, x);
    else
        MATH(store_part)(to, x, part);
}

TU_LANE void NAMED(start)(VEC *lanes, VEC value) {
    TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] = value;
}
TU_LANE TYPE NAMED(sum_of)(VEC *lanes) {
    TU_UNROLL for (int half = REGISTERS / 2; half > 0; half /= 2) TU_UNROLL for (int slot = 0; slot < half; slot++)
        lanes[slot] += lanes[slot + half];
    return MATH(fold_add)(lanes[0]);
}

/* The largest element, a NaN left out; -infinity of none. */
TU_LANE TYPE NAMED(largest_of)(const TYPE *x, int64_t size) {
    VEC lanes[REGISTERS], none = MATH(splat)(-(TYPE)__builtin_inf());
    int64_t i = 0;
    NAMED(start)(lanes, none);
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] =
            MATH(greater)(MATH(load)(x + i + slot * LANES), lanes[slot]);
    if (i < size)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] =
            MATH(greater)(NAMED(load_or)(x + i + slot * LANES, size - i - slot * LANES, none), lanes[slot]);
    TU_UNROLL for (int slot = 1; slot < REGISTERS; slot++) lanes[0] = MATH(greater)(lanes[slot], lanes[0]);
    return MATH(fold_greater)(lanes[0]);
}

/* The sum of exp(scale x - shift); `y`, where there is one, gets the terms. `top`, a constant wherever this is inlined:
 * scale is 1 and no element is above shift, so that fewer steps give the same bits. */
TU_LANE TYPE NAMED(exponentials_of)(TYPE *y, const TYPE *x, int64_t size, TYPE scale, TYPE shift, bool top) {
    VEC lanes[REGISTERS], factor = MATH(splat)(scale), less = MATH(splat)(-shift),
                          none = MATH(splat)(-(TYPE)__builtin_inf());
    int64_t i = 0;
    NAMED(start)(lanes, MATH(splat)(0));
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) {
            VEC term = MATH(load)(x + i + slot * LANES);
            VEC power = top ? MATH(exp_below)(term + less) : MATH(exp)(MATH(fma)(term, factor, less));
            if (y != NULL)
                MATH(store)(y + i + slot * LANES, power);
            lanes[slot] += power;
        }
    if (i < size)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) {
            int64_t left = size - i - slot * LANES, part = left < 0 ? 0 : left < LANES ? left : LANES;
            VEC term = MATH(fma)(MATH(load_part)(x + i + slot * LANES, part), factor, less);
            term = TU_SELECT(MATH(below)(part), term, none);
            VEC power = top ? MATH(exp_below)(term) : MATH(exp)(term);
            if (y != NULL)
                MATH(store_part)(y + i + slot * LANES, power, part);
            lanes[slot] += power;
        }
    return NAMED(sum_of)(lanes);
}

/* The sum of x, of x y, or of (x - shift)^2: whichever `kind` says, a constant wherever this is inlined. */
enum NAMED(sums) {
    NAMED(PLAIN),
    NAMED(PRODUCTS),
    NAMED(SQUARES)
};
TU_LANE VEC NAMED(sum_term)(VEC lane, VEC x, VEC y, VEC shift, enum NAMED(sums) kind) {
    VEC away = x - shift;
    return kind == NAMED(PLAIN)      ? lane + x
           : kind == NAMED(PRODUCTS) ? MATH(fma)(x, y, lane)
                                     : MATH(fma)(away, away, lane);
}
TU_LANE TYPE NAMED(total)(const TYPE *x, const TYPE *y, int64_t size, TYPE shift, enum NAMED(sums) kind) {
    VEC lanes[REGISTERS], less = MATH(splat)(shift);
    int64_t i = 0;
    NAMED(start)(lanes, MATH(splat)(0));
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] = NAMED(sum_term)(
            lanes[slot], MATH(load)(x + i + slot * LANES), MATH(load)(y + i + slot * LANES), less, kind);
    if (i < size)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) lanes[slot] =
            NAMED(sum_term)(lanes[slot], NAMED(load_or)(x + i + slot * LANES, size - i - slot * LANES, less),
                            NAMED(load_or)(y + i + slot * LANES, size - i - slot * LANES, less), less, kind);
    return NAMED(sum_of)(lanes);
}

TU_LANE TYPE NAMED(one_log)(TYPE x) {
    return MATH(first)(MATH(log)(MATH(splat)(x)));
}

/* ---- softmax ---- */

TU_LANE void NAMED(multiply_row)(TYPE *x, int64_t size, TYPE factor) {
    VEC by = MATH(splat)(factor);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        MATH(store)(x + i, MATH(load)(x + i) * by);
    if (i < size)
        MATH(store_part)(x + i, MATH(load_part)(x + i, size - i) * by, size - i);
}

/* A row of -infinity is not a number, as 0 / 0 is. */
static void NAMED(softmax)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *x = (const TYPE *)in[0] + row * size;
        TYPE *y = (TYPE *)out + row * size, top = NAMED(largest_of)(x, size);
        TYPE sum = NAMED(exponentials_of)(y, x, size, 1, top == -(TYPE)__builtin_inf() ? 0 : top, true);
        NAMED(multiply_row)(y, size, 1 / sum);
    }
}

/* The same for results that are too large for the caches, stored past them: rows of at most TU_STREAM_ROW bytes, whole
 * registers and aligned. The exponentials wait in a buffer. */
static void NAMED(softmax_stream)(const void *const *in, void *out, int64_t rows, int64_t size) {
    _Alignas(64) TYPE waiting[TU_STREAM_ROW / sizeof(TYPE)];
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *x = (const TYPE *)in[0] + row * size;
        TYPE *y = (TYPE *)out + row * size, top = NAMED(largest_of)(x, size);
        VEC by =
            MATH(splat)(1 / NAMED(exponentials_of)(waiting, x, size, 1, top == -(TYPE)__builtin_inf() ? 0 : top, true));
        for (int64_t i = 0; i < size; i += LANES)
            MATH(stream)(y + i, MATH(load)(waiting + i) * by);
    }
    TU_STREAM_END();
}

static void NAMED(log_softmax)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *x = (const TYPE *)in[0] + row * size;
        TYPE *y = (TYPE *)out + row * size, top = NAMED(largest_of)(x, size);
        top = top == -(TYPE)__builtin_inf() ? 0 : top;
        /* One after the other: the sum of both would lose the logarithm's last bits beside a large top. */
        VEC shift = MATH(splat)(top),
            all = MATH(splat)(NAMED(one_log)(NAMED(exponentials_of)(NULL, x, size, 1, top, true)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            MATH(store)(y + i, MATH(load)(x + i) - shift - all);
        if (i < size)
            MATH(store_part)(y + i, MATH(load_part)(x + i, size - i) - shift - all, size - i);
    }
}

/* from (grad, y): y (grad - sum(grad y)) */
TU_LANE void NAMED(softmax_slope)(TYPE *out, const TYPE *grad, const TYPE *y, VEC dot, int64_t part) {
    NAMED(put)(out, NAMED(get)(y, part) * (NAMED(get)(grad, part) - dot), part);
}
static void NAMED(softmax_backward)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *grad = (const TYPE *)in[0] + row * size, *y = (const TYPE *)in[1] + row * size;
        TYPE *to = (TYPE *)out + row * size;
        VEC dot = MATH(splat)(NAMED(total)(grad, y, size, 0, NAMED(PRODUCTS)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            NAMED(softmax_slope)(to + i, grad + i, y + i, dot, LANES);
        if (i < size)
            NAMED(softmax_slope)(to + i, grad + i, y + i, dot, size - i);
    }
}

/* from (grad, y): grad - exp(y) sum(grad) */
TU_LANE void NAMED(log_softmax_slope)(TYPE *out, const TYPE *grad, const TYPE *y, VEC sum, int64_t part) {
    NAMED(put)(out, MATH(fma)(MATH(exp)(NAMED(get)(y, part)), -sum, NAMED(get)(grad, part)), part);
}
static void NAMED(log_softmax_backward)(const void *const *in, void *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *grad = (const TYPE *)in[0] + row * size, *y = (const TYPE *)in[1] + row * size;
        TYPE *to = (TYPE *)out + row * size;
        VEC sum = MATH(splat)(NAMED(total)(grad, grad, size, 0, NAMED(PLAIN)));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            NAMED(log_softmax_slope)(to + i, grad + i, y + i, sum, LANES);
        if (i < size)
            NAMED(log_softmax_slope)(to + i, grad + i, y + i, sum, size - i);
    }
}

/* ---- norms ---- */

TU_LANE void NAMED(norm_part)(TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, VEC mean, VEC scale,
                              int64_t part, bool stream) {
    VEC value = (NAMED(get)(x, part) - mean) * scale;
    if (weight != NULL && bias != NULL)
        value = MATH(fma)(value, NAMED(get)(weight, part), NAMED(get)(bias, part));
    else if (weight != NULL)
        value = value * NAMED(get)(weight, part);
    else if (bias != NULL)
        value = value + NAMED(get)(bias, part);
    if (stream && part == LANES)
        MATH(stream)(y, value);
    else
        NAMED(put)(y, value, part);
}
TU_LANE void NAMED(norm_row)(TYPE *y, const TYPE *x, const TYPE *weight, const TYPE *bias, TYPE mean, TYPE scale,
                             int64_t size, bool stream) {
    VEC less = MATH(splat)(mean), by = MATH(splat)(scale);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        NAMED(norm_part)(y + i, x + i, weight ? weight + i : NULL, bias ? bias + i : NULL, less, by, LANES, stream);
    if (i < size)
        NAMED(norm_part)(y + i, x + i, weight ? weight + i : NULL, bias ? bias + i : NULL, less, by, size - i, stream);
}
TU_LANE void NAMED(norm_row_of)(const tu_norm_rows *rows, int64_t row) {
    int64_t size = rows->size;
    const TYPE *x = (const TYPE *)rows->x + row * size;
    TYPE *y = (TYPE *)rows->y + row * size, mean = ((TYPE *)rows->mean)[row], scale = ((TYPE *)rows->scale)[row];
    bool stream = rows->stream && (uintptr_t)y % sizeof(VEC) == 0;
    if (rows->weight != NULL && rows->bias != NULL)
        NAMED(norm_row)(y, x, rows->weight, rows->bias, mean, scale, size, stream);
    else if (rows->weight != NULL)
        NAMED(norm_row)(y, x, rows->weight, NULL, mean, scale, size, stream);
    else if (rows->bias != NULL)
        NAMED(norm_row)(y, x, NULL, rows->bias, mean, scale, size, stream);
    else
        NAMED(norm_row)(y, x, NULL, NULL, mean, scale, size, stream);
}
/* A few rows at a time where they fit into the first cache: the sum of one row is folded, divided and rooted while the
 * next one is read. */
#define NORM_ROWS 4
#define NORM_BYTES 16384
static void NAMED(norm)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    int64_t size = rows->size, most = size * NORM_ROWS * (int64_t)sizeof(TYPE) <= NORM_BYTES ? NORM_ROWS : 1;
    TYPE *means = rows->mean, *scales = rows->scale, count = (TYPE)size;
    for (int64_t first = begin, last; first < end; first = last) {
        last = end - first < most ? end : first + most;
        for (int64_t row = first; row < last; row++) {
            const TYPE *x = (const TYPE *)rows->x + row * size;
            means[row] = rows->centred ? NAMED(total)(x, x, size, 0, NAMED(PLAIN)) / count : 0;
        }
        for (int64_t row = first; row < last; row++) {
            const TYPE *x = (const TYPE *)rows->x + row * size;
            TYPE square = NAMED(total)(x, x, size, means[row], NAMED(SQUARES)) / count;
            scales[row] = 1 / MATH(first)(MATH(sqrt)(MATH(splat)(square + (TYPE)rows->epsilon)));
        }
        for (int64_t row = first; row < last; row++)
            NAMED(norm_row_of)(rows, row);
    }
    if (rows->stream)
        TU_STREAM_END();
}
#undef NORM_ROWS
#undef NORM_BYTES

/* dx = scale (gw - mean(gw) - xh mean(gw xh)) with gw = grad weight, xh = (x - mean) scale; RMS norm lacks the first
 * mean.
 */
TU_LANE void NAMED(norm_sums)(VEC *plain, VEC *crossed, VEC grad, VEC weight, VEC x, VEC mean) {
    VEC gw = grad * weight;
    *plain += gw;
    *crossed = MATH(fma)(gw, x - mean, *crossed);
}
TU_LANE void NAMED(norm_slope)(TYPE *out, const TYPE *grad, const TYPE *weight, const TYPE *x, VEC mean, VEC scale,
                               VEC of_g, VEC of_gx, int64_t part) {
    VEC gw = NAMED(get)(grad, part);
    if (weight != NULL)
        gw = gw * NAMED(get)(weight, part);
    NAMED(put)(out, scale * MATH(fma)(NAMED(get)(x, part) - mean, -of_gx, gw - of_g), part);
}
TU_LANE void NAMED(norm_row_backward)(const tu_norm_rows *rows, int64_t row, const TYPE *weight) {
    int64_t size = rows->size, i = 0;
    const TYPE *x = (const TYPE *)rows->x + row * size, *grad = (const TYPE *)rows->grad + row * size;
    TYPE *to = (TYPE *)rows->y + row * size, scale = ((TYPE *)rows->scale)[row];
    VEC mean = MATH(splat)(((TYPE *)rows->mean)[row]), by = MATH(splat)(scale);
    VEC one = MATH(splat)(1), zero = MATH(splat)(0), plain[REGISTERS], crossed[REGISTERS];
    NAMED(start)(plain, zero);
    NAMED(start)(crossed, zero);
    for (; i + WIDE <= size; i += WIDE)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) {
            int64_t at = i + slot * LANES;
            VEC factor = weight ? MATH(load)(weight + at) : one;
            NAMED(norm_sums)(&plain[slot], &crossed[slot], MATH(load)(grad + at), factor, MATH(load)(x + at), mean);
        }
    if (i < size)
        TU_UNROLL for (int slot = 0; slot < REGISTERS; slot++) {
            int64_t at = i + slot * LANES, left = size - at;
            VEC factor = weight ? NAMED(load_or)(weight + at, left, zero) : one,
                of_g = NAMED(load_or)(grad + at, left, zero);
            NAMED(norm_sums)(&plain[slot], &crossed[slot], of_g, factor, NAMED(load_or)(x + at, left, mean), mean);
        }
    VEC of_g = MATH(splat)(rows->centred ? NAMED(sum_of)(plain) / (TYPE)size : 0);
    VEC of_gx = MATH(splat)(NAMED(sum_of)(crossed) * scale * scale / (TYPE)size);
    for (i = 0; i + LANES <= size; i += LANES)
        NAMED(norm_slope)(to + i, grad + i, weight ? weight + i : NULL, x + i, mean, by, of_g, of_gx, LANES);
    if (i < size)
        NAMED(norm_slope)(to + i, grad + i, weight ? weight + i : NULL, x + i, mean, by, of_g, of_gx, size - i);
}
static void NAMED(norm_backward)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        if (rows->weight != NULL)
            NAMED(norm_row_backward)(rows, row, rows->weight);
        else
            NAMED(norm_row_backward)(rows, row, NULL);
    }
}

/* Columns [begin, end) of the gradients of weight and bias. Rows are added in parts of TU_NORM_PART, each from 0 on,
 * and the parts in their order: so the sums are read and written less often, and a device can add parts at once. */
TU_LANE void NAMED(norm_columns_part)(const tu_norm_rows *rows, int64_t row, int count, int64_t i, int64_t part) {
    TYPE *of_weight = (TYPE *)rows->of_weight + i, *of_bias = (TYPE *)rows->of_bias + i;
    VEC weight = MATH(splat)(0), bias = MATH(splat)(0);
    TU_UNROLL for (int more = 0; more < count; more++) {
        int64_t at = (row + more) * rows->size + i;
        VEC grad = NAMED(get)((const TYPE *)rows->grad + at, part);
        VEC away = NAMED(get)((const TYPE *)rows->x + at, part) - MATH(splat)(((const TYPE *)rows->mean)[row + more]);
        weight = MATH(fma)(grad, away * MATH(splat)(((const TYPE *)rows->scale)[row + more]), weight);
        bias += grad;
    }
    NAMED(put)(of_weight, NAMED(get)(of_weight, part) + weight, part);
    NAMED(put)(of_bias, NAMED(get)(of_bias, part) + bias, part);
}
TU_LANE void NAMED(norm_columns_rows)(const tu_norm_rows *rows, int64_t row, int count, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        NAMED(norm_columns_part)(rows, row, count, i, LANES);
    if (i < end)
        NAMED(norm_columns_part)(rows, row, count, i, end - i);
}
static void NAMED(norm_columns)(const tu_norm_rows *rows, int64_t begin, int64_t end) {
    int64_t row = 0;
    memset((TYPE *)rows->of_weight + begin, 0, (size_t)(end - begin) * sizeof(TYPE));
    memset((TYPE *)rows->of_bias + begin, 0, (size_t)(end - begin) * sizeof(TYPE));
    for (; row + TU_NORM_PART <= rows->count; row += TU_NORM_PART)
        NAMED(norm_columns_rows)(rows, row, TU_NORM_PART, begin, end);
    if (row < rows->count)
        NAMED(norm_columns_rows)(rows, row, (int)(rows->count - row), begin, end);
}

/* ---- cross entropy ---- */

static void NAMED(entropy)(const tu_entropy_rows *rows, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const TYPE *x = (const TYPE *)rows->logits + row * rows->classes;
        TYPE top = NAMED(largest_of)(x, rows->classes);
        TYPE shift = top == -(TYPE)__builtin_inf() ? 0 : top;
        TYPE *sums = (TYPE *)rows->sums + 2 * row;
        sums[0] = shift;
        sums[1] = NAMED(one_log)(NAMED(exponentials_of)(NULL, x, rows->classes, 1, shift, true));
    }
}

TU_LANE void NAMED(entropy_slope)(TYPE *out, const TYPE *x, VEC largest, VEC more, VEC scale, int64_t part) {
    NAMED(put)(out, MATH(exp)(NAMED(get)(x, part) - largest - more) * scale, part);
}
static void NAMED(entropy_backward)(const tu_entropy_rows *rows, int64_t begin, int64_t end) {
    int64_t size = rows->classes;
    for (int64_t row = begin; row < end; row++) {
        const TYPE *x = (const TYPE *)rows->logits + row * size;
        TYPE *to = (TYPE *)rows->out + row * size, scale = (TYPE)rows->scale;
        const TYPE *sums = (const TYPE *)rows->sums + 2 * row;
        VEC largest = MATH(splat)(sums[0]), more = MATH(splat)(sums[1]);
        if (rows->targets[row] == rows->ignore) {
            memset(to, 0, (size_t)size * sizeof *to);
            continue;
        }
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            NAMED(entropy_slope)(to + i, x + i, largest, more, MATH(splat)(scale), LANES);
        if (i < size)
            NAMED(entropy_slope)(to + i, x + i, largest, more, MATH(splat)(scale), size - i);
        to[rows->targets[row]] -= scale;
    }
}

/* ---- optimizer steps ---- */

TU_LANE void NAMED(sgd_part)(const tu_step *step, int64_t i, int64_t part) {
    TYPE *parameter = (TYPE *)step->parameter + i, *velocity = step->first ? (TYPE *)step->first + i : NULL;
    VEC old = NAMED(get)(parameter, part);
    VEC change = MATH(fma)(MATH(splat)((TYPE)step->decay), old, NAMED(get)((const TYPE *)step->gradient + i, part));
    if (velocity != NULL) {
        change = MATH(fma)(MATH(splat)((TYPE)step->momentum), NAMED(get)(velocity, part), change);
        NAMED(put)(velocity, change, part);
    }
    NAMED(put)(parameter, MATH(fma)(MATH(splat)(-(TYPE)step->rate), change, old), part);
}
static void NAMED(sgd)(const tu_step *step, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        NAMED(sgd_part)(step, i, LANES);
    if (i < end)
        NAMED(sgd_part)(step, i, end - i);
}

TU_LANE void NAMED(adamw_part)(const tu_step *step, int64_t i, int64_t part) {
    TYPE *parameter = (TYPE *)step->parameter + i, *first = (TYPE *)step->first + i, *second = (TYPE *)step->second + i;
    VEC grad = NAMED(get)((const TYPE *)step->gradient + i, part);
    VEC mean = NAMED(get)(first, part);
    mean = MATH(fma)(grad - mean, MATH(splat)((TYPE)(1 - step->beta1)), mean);
    VEC square = MATH(fma)(MATH(splat)((TYPE)step->beta2), NAMED(get)(second, part),
                           MATH(splat)((TYPE)(1 - step->beta2)) * grad * grad);
    VEC root = MATH(fma)(MATH(sqrt)(square), MATH(splat)((TYPE)step->correct), MATH(splat)((TYPE)step->epsilon));
    VEC change = MATH(splat)(-(TYPE)step->rate) * (mean / root);
    NAMED(put)(first, mean, part);
    NAMED(put)(second, square, part);
    NAMED(put)(parameter, MATH(fma)(MATH(splat)((TYPE)step->decay), NAMED(get)(parameter, part), change), part);
}
static void NAMED(adamw)(const tu_step *step, int64_t begin, int64_t end) {
    const tu_step held = *step;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        NAMED(adamw_part)(&held, i, LANES);
    if (i < end)
        NAMED(adamw_part)(&held, i, end - i);
}

/* ---- attention ---- */

static double NAMED(largest)(const void *x, int64_t count) {
    return NAMED(largest_of)(x, count);
}
static double NAMED(exponentials)(void *x, int64_t count, double scale, double shift) {
    return NAMED(exponentials_of)(x, x, count, (TYPE)scale, (TYPE)shift, false);
}
static void NAMED(multiply)(void *x, int64_t count, double factor) {
    NAMED(multiply_row)(x, count, (TYPE)factor);
}
TU_LANE void NAMED(slope_part)(TYPE *dp, const TYPE *shares, VEC shift, VEC scale, int64_t part) {
    NAMED(put)(dp, NAMED(get)(shares, part) * (NAMED(get)(dp, part) - shift) * scale, part);
}
static void NAMED(slopes)(const void *shares, void *dp, int64_t count, double shift, double scale) {
    VEC less = MATH(splat)((TYPE)shift), by = MATH(splat)((TYPE)scale);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAMED(slope_part)((TYPE *)dp + i, (const TYPE *)shares + i, less, by, LANES);
    if (i < count)
        NAMED(slope_part)((TYPE *)dp + i, (const TYPE *)shares + i, less, by, count - i);
}
static double NAMED(dot)(const void *x, const void *y, int64_t count) {
    return NAMED(total)(x, y, count, 0, NAMED(PRODUCTS));
}
static double NAMED(log)(double x) {
    return NAMED(one_log)((TYPE)x);
}
