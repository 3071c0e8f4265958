/* SPDX-License-Identifier: Apache-2.0
 *
 * The attention kernels of one type, included once for each: T is the type, V a vector of 64 bytes of it, NAME(x) adds
 * its suffix, EXP its exponential.
 *
 * A head is worked on in blocks of query rows, so that the scores of a block stay in the second-level cache. Products
 * of blocks are done here and not by the BLAS, because they run on several threads at once and are small.
 */

#define LANES ((int64_t)(sizeof(V) / sizeof(T)))
#define ROWS 8

/* c (rows, 2 LANES) (+)= a (rows, k) b (k, 2 LANES); a by strides, b and c by rows. */
TU_INLINE void NAME(tile)(int64_t rows, int64_t k, const T *a, int64_t a_row, int64_t a_column, const T *b, int64_t ldb,
                          T *c, int64_t ldc, bool add) {
    V sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        sum[r][0] = sum[r][1] = (V){ 0 };
    if (rows == ROWS) {
        for (int64_t l = 0; l < k; l++) {
            V left, right;
            memcpy(&left, b + l * ldb, sizeof left);
            memcpy(&right, b + l * ldb + LANES, sizeof right);
            for (int r = 0; r < ROWS; r++) {
                T factor = a[r * a_row + l * a_column];
                sum[r][0] += left * factor;
                sum[r][1] += right * factor;
            }
        }
    } else {
        for (int64_t l = 0; l < k; l++) {
            V left, right;
            memcpy(&left, b + l * ldb, sizeof left);
            memcpy(&right, b + l * ldb + LANES, sizeof right);
            for (int64_t r = 0; r < rows; r++) {
                T factor = a[r * a_row + l * a_column];
                sum[r][0] += left * factor;
                sum[r][1] += right * factor;
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        V left = sum[r][0], right = sum[r][1], old;
        if (add) {
            memcpy(&old, c + r * ldc, sizeof old);
            left += old;
            memcpy(&old, c + r * ldc + LANES, sizeof old);
            right += old;
        }
        memcpy(c + r * ldc, &left, sizeof left);
        memcpy(c + r * ldc + LANES, &right, sizeof right);
    }
}

TU_CLONES static void NAME(multiply)(int64_t m, int64_t n, int64_t k, const T *a, int64_t a_row, int64_t a_column,
                                     const T *b, int64_t ldb, T *c, int64_t ldc, bool add) {
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        for (int64_t i = 0; i < m; i += ROWS)
            NAME(tile)
    (m - i < ROWS ? m - i : ROWS, k, a + i * a_row, a_row, a_column, b + j, ldb, c + i * ldc + j, ldc, add);
    for (int64_t i = 0; i < m && j < n; i++) { /* the last columns */
        for (int64_t q = j; q < n && !add; q++)
            c[i * ldc + q] = 0;
        for (int64_t l = 0; l < k; l++)
            for (int64_t q = j; q < n; q++)
                c[i * ldc + q] += a[i * a_row + l * a_column] * b[l * ldb + q];
    }
}

/* exp(scale x - shift) for `count` elements; returns their sum. */
TU_CLONES static T NAME(exponentials)(T *x, int64_t count, T scale, T shift) {
    T lanes[16] = { 0 }, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int l = 0; l < 16; l++) {
            T e = EXP(x[i + l] * scale - shift);
            x[i + l] = e;
            lanes[l] += e;
        }
    for (; i < count; i++)
        sum += x[i] = EXP(x[i] * scale - shift);
    for (int l = 0; l < 16; l++)
        sum += lanes[l];
    return sum;
}

TU_CLONES static T NAME(largest)(const T *x, int64_t count) {
    T lanes[16], top = -INFINITY;
    int64_t i = 0;
    for (int l = 0; l < 16; l++)
        lanes[l] = -INFINITY;
    for (; i + 16 <= count; i += 16)
        for (int l = 0; l < 16; l++)
            lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (; i < count; i++)
        top = x[i] > top ? x[i] : top;
    for (int l = 0; l < 16; l++)
        top = lanes[l] > top ? lanes[l] : top;
    return top;
}

TU_CLONES static void NAME(scale_row)(T *x, int64_t count, T factor) {
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor;
}

/* x (rows, columns), rows `row` apart, as (columns, rows) dense */
static void NAME(turn)(const T *x, int64_t row, int64_t rows, int64_t columns, T *to) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j++)
            for (int64_t r = i; r < i + 16 && r < rows; r++)
                to[j * rows + r] = x[r * row + j];
}

/* Scores of query rows [first, first + count) against the keys they may see: count rows of `keys` columns, the first
 * `seen` of them set. */
static int64_t NAME(scores)(const heads *h, const T *q, int64_t q_row, const T *turned_k, int64_t first, int64_t count,
                            T *s) {
    int64_t seen = h->causal && first + count < h->keys ? first + count : h->keys;
    NAME(multiply)(count, seen, h->depth, q + first * q_row, q_row, 1, turned_k, h->keys, s, h->keys, false);
    for (int64_t r = 0; r < count && h->scale < 0; r++) /* so that the largest is the largest after scaling, too */
        NAME(scale_row)(s + r * h->keys, seen, -1);
    return seen;
}

static void NAME(forward_head)(const heads *h, int64_t head, T *buffer) {
    const T *q = (const T *)h->q + head_offset(&h->of_q, head), *k = (const T *)h->k + head_offset(&h->of_k, head);
    const T *v = (const T *)h->v + head_offset(&h->of_v, head);
    T *o = (T *)h->o + head * h->queries * h->width, *lse = (T *)h->lse + head * h->queries;
    T *turned = buffer, *s = turned + h->keys * h->depth;
    NAME(turn)(k, h->of_k.row, h->keys, h->depth, turned);
    for (int64_t first = 0; first < h->queries; first += BLOCK) {
        int64_t count = h->queries - first < BLOCK ? h->queries - first : BLOCK;
        int64_t seen = NAME(scores)(h, q, h->of_q.row, turned, first, count, s);
        for (int64_t r = 0; r < count; r++) {
            int64_t visible = h->causal && first + r + 1 < seen ? first + r + 1 : seen;
            T *row = s + r * h->keys;
            T top = NAME(largest)(row, visible) * (T)fabs(h->scale);
            T sum = NAME(exponentials)(row, visible, (T)fabs(h->scale), top);
            NAME(scale_row)(row, visible, 1 / sum);
            for (int64_t i = visible; i < seen; i++)
                row[i] = 0;
            lse[first + r] = top + (T)log((double)sum);
        }
        NAME(multiply)(count, h->width, seen, s, h->keys, 1, v, h->of_v.row, o + first * h->width, h->width, false);
    }
}

static void NAME(backward_head)(const heads *h, int64_t head, T *buffer) {
    const T *q = (const T *)h->q + head_offset(&h->of_q, head), *k = (const T *)h->k + head_offset(&h->of_k, head);
    const T *v = (const T *)h->v + head_offset(&h->of_v, head), *g = (const T *)h->g + head_offset(&h->of_g, head);
    const T *o = (const T *)h->o + head * h->queries * h->width, *lse = (const T *)h->lse + head * h->queries;
    T *dq = (T *)h->dq + head * h->queries * h->depth, *dk = (T *)h->dk + head * h->keys * h->depth,
      *dv = (T *)h->dv + head * h->keys * h->width;
    T *turned_k = buffer, *turned_v = turned_k + h->keys * h->depth, *p = turned_v + h->keys * h->width,
      *dp = p + BLOCK * h->keys;
    NAME(turn)(k, h->of_k.row, h->keys, h->depth, turned_k);
    NAME(turn)(v, h->of_v.row, h->keys, h->width, turned_v);
    if (h->keys > 0) {
        memset(dk, 0, (size_t)(h->keys * h->depth) * sizeof *dk);
        memset(dv, 0, (size_t)(h->keys * h->width) * sizeof *dv);
    }
    for (int64_t first = 0; first < h->queries; first += BLOCK) {
        int64_t count = h->queries - first < BLOCK ? h->queries - first : BLOCK;
        int64_t seen = NAME(scores)(h, q, h->of_q.row, turned_k, first, count, p);
        NAME(multiply)
        (count, seen, h->width, g + first * h->of_g.row, h->of_g.row, 1, turned_v, h->keys, dp, h->keys, false);
        for (int64_t r = 0; r < count; r++) {
            int64_t visible = h->causal && first + r + 1 < seen ? first + r + 1 : seen;
            T *row = p + r * h->keys, *of_row = dp + r * h->keys, d = 0;
            for (int64_t i = 0; i < h->width; i++)
                d += g[(first + r) * h->of_g.row + i] * o[(first + r) * h->width + i];
            NAME(exponentials)(row, visible, (T)fabs(h->scale), lse[first + r]);
            for (int64_t i = 0; i < visible; i++)
                of_row[i] = row[i] * (of_row[i] - d) * (T)h->scale;
            for (int64_t i = visible; i < seen; i++)
                row[i] = of_row[i] = 0;
        }
        NAME(multiply)(seen, h->width, count, p, 1, h->keys, g + first * h->of_g.row, h->of_g.row, dv, h->width, true);
        NAME(multiply)(count, h->depth, seen, dp, h->keys, 1, k, h->of_k.row, dq + first * h->depth, h->depth, false);
        NAME(multiply)(seen, h->depth, count, dp, 1, h->keys, q + first * h->of_q.row, h->of_q.row, dk, h->depth, true);
    }
}

#undef LANES
#undef ROWS
