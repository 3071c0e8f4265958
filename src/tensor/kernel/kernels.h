/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of the tensor library: one table per instruction set, chosen once per process (base/instructions.h).
 * Their sources are the .c files of this folder, compiled once per level on the types of scalar.h, avx2.h, avx512.h or
 * neon.h. Every level gives the same bits, whatever the number of threads: sums go over a fixed number of lanes, which
 * are added by halves (fold.h).
 *
 * A kernel comes in pairs, for f32 and f64: [TU_F32] and [TU_F64].
 */
#ifndef TU_TENSOR_KERNEL_KERNELS_H
#define TU_TENSOR_KERNEL_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/dtype.h>

enum {
    TU_F32,
    TU_F64,
    TU_FLOATS
};

/* out[i] = f(in[0][i], in[1][i], …) for i < count: an operator's expression; `attributes` is its own struct. */
typedef void tu_float_kernel(const void *const *in, void *out, int64_t count, const void *attributes);

/* Operators that can be joined: several run at once, each on what the step before gave, from registers to registers:
 * to[i] = … step2(step1(from[i], other1[i]), other2[i]) …, the very bits of their kernels one by one, but for
 * which NaN comes of two. `past`: stored past the caches where `to` is aligned for that; who asks for it calls
 * tu_stream_end in the end. `to` may be `from` or any `other`. Of one input or two they are: */
#define TU_JOINED_OPERATORS(unary, binary)                                                                             \
    unary(add_scalar) unary(mul_scalar) unary(div_scalar) unary(neg) unary(abs) unary(square) unary(clamp) unary(relu) \
        unary(reciprocal) unary(sqrt) unary(rsqrt) unary(exp) unary(tanh) unary(sigmoid) binary(add) binary(sub)       \
            binary(mul) binary(div) binary(maximum) binary(minimum) binary(add_scaled) binary(relu_backward)           \
                binary(sigmoid_backward)
typedef struct tu_joined_step {
    int number;        /* TU_POINTWISE_… */
    int side;          /* which input is what the step before gave: 0, or 1 of two; */
    const void *other; /* and the other one; something readable of as many elements where there is none */
    const void *attributes;
} tu_joined_step;
#define TU_JOINED_CASE(number, side) (2 * (int)(number) + (side))
typedef void tu_joined_kernel(const tu_joined_step *steps, int step_count, const void *from, void *to, int64_t count,
                              bool past);

/* Reductions: `row` folds `count` dense elements into *to, in blocks of TU_FOLD_BLOCK; `column` folds a dense row of
 * `count` into as many accumulators. */
enum {
    TU_FOLD_SUM,
    TU_FOLD_PRODUCT,
    TU_FOLD_MAXIMUM,
    TU_FOLD_MINIMUM,
    TU_FOLDS
};
#define TU_FOLD_BLOCK 1024
typedef struct tu_fold_kernels {
    void (*row)(void *to, const void *from, int64_t count);
    void (*column)(void *to, const void *from, int64_t count);
    void (*start)(void *to, int64_t count); /* what folding nothing gives */
} tu_fold_kernels;

/* softmax, log_softmax: rows of `size` elements; `in` is x, or g and y. */
typedef void tu_row_kernel(const void *const *in, void *out, int64_t rows, int64_t size);
#define TU_STREAM_ROW \
    8192 /* bytes of a row, at most, that softmax_stream takes: multiples of 64, at a multiple of 64 */

/* Layer norm and RMS norm: rows of `size` elements. Backward has `grad`; forward has not. NULL weight: ones; NULL bias:
 * zeros. The kernels work on rows or columns [begin, end). */
typedef struct tu_norm_rows {
    const void *x, *grad, *weight, *bias;
    void *mean, *scale, *y, *of_weight, *of_bias;
    int64_t count, size;
    double epsilon;
    bool centred; /* layer norm; else RMS norm */
    bool stream;  /* the result is too large for the caches: it is stored past them */
} tu_norm_rows;
typedef void tu_norm_kernel(const tu_norm_rows *rows, int64_t begin, int64_t end);

/* Cross entropy: `sums` has two numbers per row, whose sum is the logarithm of the sum of exponentials: the largest
 * logit, and what the others add to it. One number would lose the second beside a large first. `out` and `scale`, g
 * over the number of targets, are of backward. */
typedef struct tu_entropy_rows {
    const void *logits;
    const int64_t *targets;
    void *sums, *out;
    int64_t classes, ignore;
    double scale;
} tu_entropy_rows;
typedef void tu_entropy_kernel(const tu_entropy_rows *rows, int64_t begin, int64_t end);

/* Optimizer steps on elements [begin, end) of the parameter, its gradient and the states. */
typedef struct tu_step {
    void *parameter;
    const void *gradient;
    void *first, *second;         /* velocity or NULL; both moments */
    double rate, momentum, decay; /* AdamW: decay is the factor of the parameter, rate has its bias correction in it */
    double beta1, beta2, epsilon, correct; /* correct: the factor of the root */
} tu_step;
typedef void tu_step_kernel(const tu_step *step, int64_t begin, int64_t end);

/* `count` numbers from one float to another. */
typedef void tu_convert_kernel(const void *from, void *to, int64_t count);

/* Dropout of elements [begin, end), begin a multiple of the group: 0 where the element's random word is below the
 * limit, else x times `kept`. In place is allowed. See random_body.h for the words. */
#define TU_DROPOUT_GROUP 64
typedef struct tu_dropout_draw {
    const void *x;
    void *out;
    uint64_t seed, block; /* of the first element */
    uint32_t rank, limit;
    double kept;
} tu_dropout_draw;
typedef void tu_dropout_kernel(const tu_dropout_draw *draw, int64_t begin, int64_t end);

/* out (rows, columns), its rows out_stride apart, = left (rows, depth) right (depth, columns), or start + left right
 * where `start` is not NULL: its rows are start_stride apart, 0 for one row that all begin with; it may be `out`.
 * Element (i, j) of left at left[i * left_row + j * left_column]. `right` is packed, the first `depth` of its
 * `packed_depth` rows count. Each element of out is one chain of fma along the depth, from its begin to its end, so
 * that the tiles do not show in the bits. */
typedef void tu_product_kernel(int64_t rows, int64_t columns, int64_t depth, const void *left, int64_t left_row,
                               int64_t left_column, const void *right, int64_t packed_depth, const void *start,
                               int64_t start_stride, void *out, int64_t out_stride);
/* Element (i, j) of right, at right[i * row + j * column], into packed form of `tu_packed_size` elements. */
typedef void tu_pack_kernel(int64_t depth, int64_t columns, const void *right, int64_t row, int64_t column,
                            void *packed);

/* Likewise for the left matrix, whose rows lie in tiles of `tile_rows`, the last of which may be short, and one panel
 * of the right one, of which `width` columns count. */
typedef void tu_pack_left_kernel(int64_t rows, int64_t depth, const void *left, int64_t row, int64_t column,
                                 void *packed);
typedef void tu_packed_product_kernel(int64_t rows, int64_t width, int64_t depth, const void *left, const void *panel,
                                      const void *start, int64_t start_stride, void *out, int64_t out_stride);

/* Pieces of attention on one row: the largest element; exp(scale x - shift) in place and its sum; x times a factor;
 * shares (dp - dot) scale into dp. */
typedef struct tu_score_kernels {
    double (*largest)(const void *x, int64_t count);
    double (*exponentials)(void *x, int64_t count, double scale, double shift);
    void (*multiply)(void *x, int64_t count, double factor);
    void (*slopes)(const void *shares, void *dp, int64_t count, double dot, double scale);
    double (*dot)(const void *x, const void *y, int64_t count);
    double (*log)(double x);
} tu_score_kernels;

/* Products of i8, exact in i32 (which wraps): out (rows, columns), its rows out_stride apart. Two neighbours along the
 * depth lie in one 32-bit word, as 16-bit numbers: left (rows, pairs) by rows, right in panels as for products of
 * floats, panel[TU_F32] columns wide. */
typedef void tu_int8_kernel(int64_t rows, int64_t columns, int64_t pairs, const int32_t *left, const int32_t *right,
                            int32_t *out, int64_t out_stride);

/* Squares of sixteen by sixteen numbers of 32 bits, turned: they lie one below the other in `from`, whose lines are
 * `line` numbers apart, and side by side in `to`, whose lines are `apart`. `soon` is where the same lines are read
 * next, in or near the tensor: a wish. `past`: every line of `to` is aligned to 64 bytes and is stored past the caches
 * where the level can. */
typedef void tu_turn_kernel(const void *from, int64_t line, const void *soon, void *to, int64_t apart, int64_t squares,
                            bool past);

typedef struct tu_tensor_kernels {
    tu_float_kernel *const *pointwise[TU_FLOATS]; /* by TU_POINTWISE_ numbers */
    tu_joined_kernel *joined[TU_FLOATS];
    tu_fold_kernels folds[TU_FLOATS][TU_FOLDS];
    tu_row_kernel *softmax[TU_FLOATS], *softmax_stream[TU_FLOATS], *log_softmax[TU_FLOATS];
    tu_row_kernel *softmax_backward[TU_FLOATS], *log_softmax_backward[TU_FLOATS];
    tu_norm_kernel *norm[TU_FLOATS], *norm_backward[TU_FLOATS], *norm_columns[TU_FLOATS];
    tu_entropy_kernel *entropy[TU_FLOATS], *entropy_backward[TU_FLOATS];
    tu_step_kernel *sgd[TU_FLOATS], *adamw[TU_FLOATS];
    tu_dropout_kernel *dropout[TU_FLOATS];
    tu_convert_kernel *narrow_bf16, *widen_bf16, *narrow_f16, *widen_f16; /* from and to f32 */
    tu_product_kernel *product[TU_FLOATS];
    tu_pack_kernel *pack[TU_FLOATS];
    tu_pack_left_kernel *pack_left[TU_FLOATS];
    tu_packed_product_kernel *packed_product[TU_FLOATS];
    tu_int8_kernel *int8_product;
    tu_turn_kernel *turn;
    /* Pairs of uniform numbers in [0, 1) become pairs of normal ones, by Box and Muller. */
    void (*normals)(double *first, double *second, int64_t count);
    /* Cosine and sine of factor * x. */
    void (*waves)(double factor, const double *x, double *cosines, double *sines, int64_t count);
    int panel[TU_FLOATS]; /* columns of the right matrix that are packed together */
    int tile_rows;        /* rows of the left one that are */
    tu_score_kernels scores[TU_FLOATS];
} tu_tensor_kernels;

/* The table of the process's level. */
const tu_tensor_kernels *tu_tensor_kernels_get(void);

static inline int tu_float_index(tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? TU_F64 : TU_F32;
}

/* Elements of a packed (depth, columns): its last panel is filled up with zeros. */
static inline int64_t tu_packed_size(const tu_tensor_kernels *kernels, int which, int64_t depth, int64_t columns) {
    int64_t panel = kernels->panel[which];
    return depth * ((columns + panel - 1) / panel * panel);
}

#endif
