/* SPDX-License-Identifier: Apache-2.0
 *
 * Nests: the loops that a program is made of, before they are code. A nest walks the elements of one shape, in pieces
 * that stay in the cache. In each piece it runs a list of lines; a line works on slots, dense rows of one type:
 *
 *     loop 0: [64, 1000], 64 rows of 1000
 *         reads  0 x: f32
 *         writes 1 softmax: f32
 *         s1: f32 row = amax(s0)
 *         s2: f32 = sub(s0, s1)
 *         s3: f32 = exp(s2)
 *         ...
 *
 * A slot is wide, with an element for every one of the piece, or narrow, with one for each row: what a reduction over
 * the last dimensions gives. Where a tensor's elements lie as the slot needs them the slot is that memory itself.
 *
 * Lines are exact copies of what the operators do one by one: each computes in the type that the operator computes in,
 * and its result is rounded to the dtype of the tensor that it would have been. That is why a nest gives their bits.
 */
#ifndef TU_LOOPS_NEST_H
#define TU_LOOPS_NEST_H

#include <stdatomic.h>

#include "graph/graph.h"
#include "tensor/gemm.h"
#include "tensor/loop.h"

/* What one nest may have; a group that would need more is cut. */
#define TU_NEST_TENSORS 24
#define TU_NEST_MEMBERS 64
/* Elements of a row that is kept whole, since it is reduced and read again. */
#define TU_NEST_COLUMNS 16384

typedef enum tu_line_kind {
    TU_LINE_POINTWISE, /* an operator's expression */
    TU_LINE_CONVERT,   /* the same numbers in another dtype, or a copy in the same */
    TU_LINE_FOLD       /* a reduction of each row */
} tu_line_kind;

typedef struct tu_line {
    tu_line_kind kind;
    const tu_vertex *vertex;
    tu_kernel *kernel; /* of pointwise lines */
    int fold;          /* TU_FOLD_… */
    bool mean;
    int in[TU_OPERANDS], in_count, out; /* slots */
} tu_line;

typedef struct tu_slot {
    tutti_dtype dtype;
    bool narrow;
    bool constant; /* the same number everywhere: `number`, of the slot's dtype */
    bool truth;    /* 0 or 1 of a number's type, which bool would not change */
    _Alignas(16) char number[16];
    int tensor;              /* whose memory it is, or is copied from or to; -1: none */
    const tu_value *value;   /* what it holds, for texts; may be NULL */
    int first, last;         /* among the actions of the nest */
    int level;               /* of kernels: how many reductions come before it; */
    bool needed;             /* and whether the pass that is written needs it */
    int buffer, wide_buffer; /* where it is where it is not in a tensor; and repeated along the rows; -1: nowhere */
} tu_slot;

/* A tensor that the nest reads or writes. */
typedef struct tu_nest_tensor {
    const tu_value *value;
    bool written, fresh; /* fresh: the nest makes it; else a written one is changed in place */
    bool narrow;
    int slot;
    int64_t strides[TT_MAX_DIMS]; /* by dimension of the space */
    int64_t outer[TT_MAX_DIMS], row, column;
    bool still;    /* the same elements in every piece */
    bool single;   /* one element everywhere */
    bool streamed; /* so large that it is stored past the caches */
    bool ahead;    /* what the next piece reads is asked for while this one runs by kernels */
} tu_nest_tensor;

/* What a value's version rises by. */
typedef struct tu_nest_bump {
    const tu_value *value;
    int count;
} tu_nest_bump;

/* A part of the nest that was compiled: lines from `first` to `end` - 1 at once. `at` are the slots in the order of
 * `slots`, inputs first, and `steps` the elements from one row of each to the next; a narrow or constant one has one
 * element per row or one in all. */
typedef void tu_stage_function(void *const *at, const int64_t *steps, int64_t rows, int64_t columns);
typedef struct tu_stage {
    int first, end;
    int slots[TU_NEST_TENSORS * 2], input_count, slot_count;
    bool by_rows; /* it has narrow inputs and wide ones */
    tu_stage_function *function;
} tu_stage;

/* What runs, one after the other: the lines from `line` to `end` - 1. They are a stage; or one line by its kernel; or
 * several, joined: at once, each on what the line before gives, which nothing else takes. */
typedef struct tu_action {
    int line, end;
    int stage; /* -1: none */
    bool joined;
} tu_action;
/* Lines that are joined, at most. */
#define TU_NEST_JOINED 16

typedef struct tu_nest {
    int number;
    tutti_device device; /* of all its tensors */
    int ndim;
    int64_t sizes[TT_MAX_DIMS];
    int split;    /* dimensions from here on are a row that is reduced; -1: there are no reductions */
    bool is_long; /* its rows do not stay in the cache: what reductions give is only written */
    bool tiled;   /* it runs behind a product, on rectangles of its result: rows and columns are the product's */
    int member_count;
    const tu_vertex **members;
    int line_count, slot_count, tensor_count, bump_count, stage_count, action_count;
    int line_room, slot_room;
    tu_line *lines;
    tu_slot *slots;
    tu_nest_tensor tensors[TU_NEST_TENSORS];
    tu_nest_bump *bumps;
    tu_stage *stages;
    tu_action *actions;
    /* The walk: outer dimensions, then rows, then columns; a piece is some rows, or a part of one. */
    int outer_ndim;
    int64_t outer_sizes[TT_MAX_DIMS], outer_count, rows, columns;
    int64_t piece_rows, piece_columns;
    int buffer_count;
    size_t buffer_bytes;
    const void *loop; /* of devices: what the target launches; NULL: nothing */
} tu_nest;

/* The nest of these vertices, which are in program order, over this space. `uses` counts, for each value by number, its
 * uses by all of the graph. *made is NULL with TUTTI_OK where they cannot be one. */
tutti_status tu_nest_make(const tu_vertex *const *members, int member_count, int ndim, const int64_t *sizes, int split,
                          bool tiled, const int *uses, tu_nest **made);
void tu_nest_free(tu_nest *nest);
/* Decides what is run, after stages were given functions or not: actions, buffers, sizes of pieces. */
tutti_status tu_nest_schedule(tu_nest *nest);
/* Puts lines in an order in which those that can be joined stand together, behind what they wait for. */
tutti_status tu_nest_order_joined(tu_nest *nest);
/* Whether the line may be joined with others: one of TU_JOINED_OPERATORS on wide slots of a float. */
bool tu_line_can_join(const tu_nest *nest, const tu_line *line);
/* Which input of `line` is what `before` gives, where they can be joined, in which case nothing else takes that; else
 * -1. */
int tu_line_goes_on(const tu_nest *nest, const tu_line *before, const tu_line *line);
/* Whether the last dimensions from `split` on are one stride apart, broadcast to the space. */
bool tu_nest_row_is_even(const tu_shape *shape, int ndim, const int64_t *sizes, int split);
/* Whether rows of so many elements, of so many in all, are too long to be kept, or too few for the threads. */
bool tu_nest_is_long(int64_t columns, int64_t total);
/* Which dimensions a reduction takes: the first of the last ones, or -1 where they are others. *fold and *mean say
 * what it does; false where the operator is none that a nest has. */
bool tu_nest_fold(const tu_vertex *vertex, int *split, int *fold, bool *mean);
/* Operators that copy: clone, contiguous, to, copy_. */
bool tu_nest_copies(const tu_vertex *vertex);

/* Runs it on the CPU on these tensors, one for each of the nest's. */
tutti_status tu_nest_run(const tu_nest *nest, tt_tensor *const *tensors);

/* A tiled nest as the epilogue of the product that makes this value: it runs on each part of the product when that is
 * final. Where the product never begins it, tu_nest_run does the work afterwards. */
typedef struct tu_nest_epilogue {
    tu_epilogue own;
    const tu_nest *nest;
    tt_tensor *const *tensors; /* one for each of the nest's; that of the product's result is not there yet */
    const tu_value *product;
    bool begun;
    _Atomic bool out_of_memory; /* set by whichever thread had none; read after the product */
    char *data[TU_NEST_TENSORS];
} tu_nest_epilogue;
void tu_nest_epilogue_init(tu_nest_epilogue *epilogue, const tu_nest *nest, tt_tensor *const *tensors,
                           const tu_value *product);

void tu_nest_print(FILE *to, const tu_nest *nest);

#endif
