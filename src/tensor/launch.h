/* SPDX-License-Identifier: Apache-2.0
 *
 * The arguments of kernels that run on a device, as flat structs: what the host side (tensor/on_device.c and the files
 * of operators) fills, and the kernels (tensor_cuda/) read. Plain C, so that both compilers see one layout.
 */
#ifndef TU_TENSOR_LAUNCH_H
#define TU_TENSOR_LAUNCH_H

#include <stdint.h>

#define TU_LAUNCH_DIMS 8
#define TU_LAUNCH_OPERANDS 4 /* the result and three inputs */
#define TU_LAUNCH_NUMBERS 4

typedef struct tu_launch_operand {
    uint64_t data; /* address; of a literal, its bits in the compute type */
    int64_t strides[TU_LAUNCH_DIMS];
    int32_t dtype;
    int32_t literal; /* 1: a number of the host, the same for every element */
} tu_launch_operand;

/* A loop over the elements of a result. Operand 0 is written. */
typedef struct tu_launch_loop {
    int64_t total;
    int32_t ndim, operands;
    int64_t sizes[TU_LAUNCH_DIMS];
    tu_launch_operand at[TU_LAUNCH_OPERANDS];
    double numbers[TU_LAUNCH_NUMBERS]; /* the attributes of a pointwise operator, in their order */
} tu_launch_loop;

/* The same over elements that lie one behind the other, all of one type: few bytes, since the driver copies them at
 * each launch. Operand 0 is written. */
typedef struct tu_launch_dense {
    int64_t total;
    uint64_t data[TU_LAUNCH_OPERANDS]; /* an address; of a literal, its bits in the compute type */
    uint32_t literals, repeated;       /* bits of operands that are so, or one element for all */
    double numbers[TU_LAUNCH_NUMBERS];
} tu_launch_dense;

/* from (outer, reduced, inner) to (outer, inner), dense and of the compute type; in two steps where `parts` is more
 * than one: to (outer, parts, inner), and these. */
typedef struct tu_launch_fold {
    uint64_t from, to;
    int64_t outer, reduced, inner;
    int64_t parts, part; /* how many, and of how many elements each */
} tu_launch_fold;
#define TU_FOLD_ROWS 64 /* of one part where columns are folded; rows are in parts of TU_FOLD_BLOCK */

/* to[i] = start + i * step, or to[i] times a factor. */
typedef struct tu_launch_line {
    uint64_t to;
    int64_t total;
    double first, second;
    int32_t dtype;
} tu_launch_line;

/* Random numbers: see random.c. */
typedef struct tu_launch_random {
    uint64_t from, to;
    int64_t total;
    uint64_t seed, counter;
    double first, second;
    uint32_t rank, limit;
    int32_t dtype, distribution;
} tu_launch_random;

/* The operators whose kernels look at indices; what a fault names. Values are never reused. */
enum {
    TU_INDEX_SELECT = 1,
    TU_INDEX_ADD = 2,
    TU_INDEX_GATHER = 3,
    TU_INDEX_SCATTER = 4,
    TU_INDEX_EMBEDDING = 5,
    TU_INDEX_TARGET = 6
};

/* Entries of (outer, size, inner) by `count` indices: to (outer, count, inner), or added from there. For gather and
 * scatter, `loop` walks over index: operand 0 is x without its dimension, `along` x's stride in it. */
typedef struct tu_launch_index {
    uint64_t from, to, index, fault;
    int64_t outer, size, count, inner;
    int32_t bytes, operation;
    int64_t along;
    tu_launch_loop loop;
    /* i32, of entries of one place brought together: how many each place has, and behind them one that counts all, 0 at
     * first; where those of a place begin; the number that each entry drew; the entries, as they came and in order. */
    uint64_t counts, rooms, drawn, together;
} tu_launch_index;
#define TU_INDEX_THREADS 128

/* Zero on one side of a diagonal of (…, rows, columns), dense. */
typedef struct tu_launch_triangle {
    uint64_t data;
    int64_t total, rows, columns, diagonal;
    int32_t bytes, lower;
} tu_launch_triangle;

/* Rows of `size` elements, dense: of f32 or f64, of norms and cross entropy also of bf16 and f16, whose other numbers
 * are f32. What a kernel does not use is 0. */
typedef struct tu_launch_rows {
    uint64_t x, other, out;
    int64_t count, size;
    /* norms */
    uint64_t weight, bias, mean, scale, of_weight, of_bias;
    uint64_t
        parts; /* of the gradients of weight and bias: sums of TU_NORM_PART rows each, of weights, then of biases */
    double epsilon;
    int32_t wide_weight, wide_bias; /* these are of the type of computing, and not of that of the rows */
    /* cross entropy: log of the sum of exponentials, targets, loss of each row in f64, how many count, the gradient */
    uint64_t sums, targets, losses, counted, fault;
    int64_t ignore;
    int32_t centred, dtype;
} tu_launch_rows;
#define TU_HELD_MOST 1024 /* elements of rows that kernels keep in registers */
#define TU_HELD_WIDTH(bytes) \
    ((bytes) < 4 ? 4 / (bytes) : 1) /* neighbours that a thread of such has; elements of so many bytes */
#define TU_NORM_PART 32             /* rows whose gradients are added by themselves, on the CPU too */
#define TU_NORM_THREADS 256         /* of a block that adds those */

#define TU_LOSS_PART 64 /* rows whose losses are added by themselves, on the CPU too */

/* Optimizer steps of several parameters: `steps` is an array of tu_launch_step. */
typedef struct tu_launch_step {
    uint64_t parameter, gradient, first, second;
    double rate, momentum, decay, beta1, beta2, epsilon, correct;
    int64_t begin, elements; /* the number of its first chunk among all; how many elements it has */
    int32_t adamw, dtype;    /* f32, f64, bf16 or f16 */
} tu_launch_step;
typedef struct tu_launch_steps {
    uint64_t steps;
    int64_t count, chunks;
} tu_launch_steps;
#define TU_STEP_CHUNK 4096 /* elements that a block does at a time */

/* Rows of `width` elements of two bytes, from one distance between rows, in elements, to another; what there is more of
 * rows and of their elements at `to` is 0. */
typedef struct tu_launch_pitch {
    uint64_t from, to;
    int64_t rows, width, from_row, to_row;
    int64_t to_rows, to_width;
} tu_launch_pitch;

/* to = from + bias, rows of `columns`: from is f32, the others of one type; columns a multiple of four, all aligned. */
typedef struct tu_launch_bias {
    uint64_t from, to, bias;
    int64_t rows, columns;
} tu_launch_bias;

/* Rotary embedding of rows of `depth` f64. */
typedef struct tu_launch_turn {
    uint64_t from, to, position;
    int64_t rows, depth, length;
    double base, sign;
} tu_launch_turn;

/* Rows of scores of attention, `size` keys each; the first `queries` rows are those of the first head, and so on. */
typedef struct tu_launch_scores {
    uint64_t scores, slopes; /* forward: scores become shares. Backward: slopes, their gradients, become the scores' */
    uint64_t sums;           /* the logarithm of each row's sum */
    uint64_t grad, out;      /* of backward: rows of `width` */
    int64_t count, size, queries, width;
    int64_t block; /* where that is causal: so many queries at a time are multiplied with the keys up to their last */
    double scale;
    int32_t causal;
    uint64_t narrow_shares, narrow_slopes; /* of narrow floats: where these go, rounded */
} tu_launch_scores;

/* Attention whose scores stay on the chip: heads of f32, bf16 or f16 in tiles of rows. Head number h of a tensor begins
 * at data[h / inner * outer_step + h % inner * inner_step], its rows `row` apart, and its rows are dense. */
typedef struct tu_launch_heads {
    uint64_t data;
    int64_t outer_step, inner_step, row;
} tu_launch_heads;
typedef struct tu_launch_tiles {
    tu_launch_heads query, key, value, out, grad, of_query, of_key, of_value;
    uint64_t sums,
        dots; /* f32 of each row: the logarithm of its sum; what its gradient and its result have in common */
    int64_t heads, inner, queries, keys;
    float scale;
    int32_t causal;
} tu_launch_tiles;
#define TU_HEAD_ROWS 64     /* queries, or keys, of a block */
#define TU_HEAD_THREADS 128 /* of a block */
/* Bytes of shared memory of a block of f32: twice a tile of the other side's rows of two tensors. */
#define TU_WIDE_HEAD_TILE 64
#define TU_WIDE_HEAD_SHARED(depth) (4 * TU_WIDE_HEAD_TILE * ((depth) + 4) * 4)

/* A product of f32 with its scales, rounded: out = (product row_scale column_scale + bias) whole. Addresses may be 0.
 */
typedef struct tu_launch_scaled {
    uint64_t product, out, row_scales, column_scales, bias, whole;
    int64_t rows, columns, row_step, column_step; /* steps of the scales: 0 or 1 */
    int32_t dtype;
} tu_launch_scaled;

/* out = the sum of `ranks` dense parts, or their average, in their order and with one rounding; part i begins
 * i * step bytes behind `from`. */
typedef struct tu_launch_parts {
    uint64_t from, out;
    int64_t step, count; /* of elements */
    int32_t ranks, dtype, average;
} tu_launch_parts;

/* out (rows, columns) = left (rows, depth) right (depth, columns), `batch` times; element (i, j)
 * of an operand at data[i * row + j * column], the next product `step` further. */
typedef struct tu_launch_product {
    uint64_t left, right, out;
    int64_t rows, columns, depth, batch;
    int64_t left_row, left_column, left_step, right_row, right_column, right_step, out_row, out_step;
    int32_t dtype, result;
} tu_launch_product;

#endif
