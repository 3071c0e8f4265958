/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs inside. A graph is a list of vertices in program order; a vertex is a call of an operator: its row, its
 * operands, a copy of its attributes, and the values that it makes. A value is one tensor: metadata, and the number of
 * the storage that it looks at, which views share. An operator that writes changes the value that it is given and makes
 * none; so a graph says what a program did, in place and all, and passes rewrite it.
 */
#ifndef TU_GRAPH_GRAPH_H
#define TU_GRAPH_GRAPH_H

#include <stdatomic.h>

#include <tutti/graph.h>

#include "tensor/operator.h"

typedef struct tu_vertex tu_vertex;

typedef struct tu_value {
    struct tu_value *next; /* of all values of the graph */
    char *name;
    int number; /* counted from 0 as they are made */
    tu_shape shape;
    int storage;      /* values with one number share memory */
    tu_vertex *maker; /* NULL: an input */
    int place;        /* among the results of its maker, or among the inputs */
    uint8_t flags;    /* TU_REQUIRES_GRAD and TU_IS_PARAMETER, as at the capture */
    int mark;         /* free for a pass */
} tu_value;

/* What a vertex is given: a value, a number that adopts the dtype of what it meets, or nothing. */
typedef struct tu_operand {
    tu_value *value;
    tutti_dtype number; /* I64 or F64; 0: no number */
    union {
        int64_t whole;
        double real;
    } at;
} tu_operand;

struct tu_vertex {
    tu_vertex *before, *next;
    const tu_operator *entry;
    bool in_place;
    int operand_count, result_count;
    tu_operand *operands;
    tu_value **results;
    void *attributes; /* a copy: see tu_attributes_copy */
    int position;     /* as tu_graph_number found it */
    bool hidden;      /* of a collective: a product runs beside it, as tu_pass_hide found */
};

typedef enum tu_input_kind {
    TU_INPUT_ARGUMENT, /* the `index`-th input of the function */
    TU_INPUT_CONSTANT, /* a tensor that was met on the way, held */
    TU_INPUT_HELD,     /* what a holder has at each run: a module's slot */
    TU_INPUT_GRADIENT, /* the gradient that the `index`-th input of the graph has at each run */
    TU_INPUT_SAVED,    /* of a backward: what the forward saved for it */
    TU_INPUT_TANGENT   /* of a backward: the gradient of a result */
} tu_input_kind;

typedef struct tu_graph_input {
    tu_value *value;
    tu_input_kind kind;
    int index;         /* of an argument: its place; of a gradient: whose it is */
    tt_tensor *tensor; /* of a constant; of the others NULL */
    tu_holder holder;
    /* What the capture saw of the tensor. The function asked about its storage's size, or about its gradient. */
    size_t bytes;
    bool asks_bytes, asks_gradient, has_gradient;
    bool has_node; /* it was computed by something that has a gradient */
} tu_graph_input;

/* What a run leaves in a holder; NULL empties it. */
typedef struct tu_graph_effect {
    tu_holder holder;
    tu_value *value;
} tu_graph_effect;

struct tt_graph {
    atomic_int references;
    tu_vertex *first, *last;
    tu_value *values; /* all of them, newest first */
    int value_count, storage_count, vertex_count, argument_count;
    tu_graph_input *inputs; /* the arguments first, in order; then the others as they were met */
    int input_count, input_capacity;
    tu_operand *outputs; /* values, or nothing */
    int output_count;
    tu_graph_effect *effects;
    int effect_count;
    struct tu_names *names;
};

/* ---- building (graph.c) ---- */

tt_graph *tu_graph_new(void); /* NULL with the thread's error written */
/* A value under a name of its own, made from `base`; NULL with the thread's error written. */
tu_value *tu_graph_value(tt_graph *graph, const char *base, const tu_shape *shape, int storage);
/* A value that comes from outside. */
tu_graph_input *tu_graph_input_add(tt_graph *graph, tu_input_kind kind, tu_value *value);
/* A vertex before `place` (NULL: at the end), with room for its operands and results; attributes are copied. */
tu_vertex *tu_graph_vertex(tt_graph *graph, const tu_operator *entry, int operands, int results, const void *attributes,
                           tu_vertex *place);
/* Takes a vertex out and frees it. Nothing may use its results any more. */
void tu_vertex_erase(tt_graph *graph, tu_vertex *vertex);
/* Takes it out and puts it before `place` (NULL: to the end). */
void tu_vertex_move(tt_graph *graph, tu_vertex *vertex, tu_vertex *place);
/* Every operand and output that is `from` becomes `to`. */
void tu_value_replace(tt_graph *graph, tu_value *from, tu_value *to);
/* Sets every value's mark to the number of times it is used. */
void tu_graph_count_uses(tt_graph *graph);
/* Whether two shapes are the same but for the offset. */
bool tu_shape_equal(const tu_shape *left, const tu_shape *right);
/* Whether its strides are those of a new tensor of its sizes. */
bool tu_shape_is_row_major(const tu_shape *shape);
/* Whether the vertex may be left out where nobody uses its results. */
bool tu_vertex_is_pure(const tu_vertex *vertex);
/* Whether the vertex writes the memory of this operand. An effect that does not say what it writes (a wait, a resize, a
 * gradient that is set) counts as writing all that it is given. */
bool tu_vertex_writes(const tu_vertex *vertex, int operand);

/* How many results a call of the row has. */
int tu_result_count(const tu_operator *entry, bool in_place, int operands, const void *attributes);
/* A call of an operator as a vertex before `place`, with results as its shape rule says, under new names; those of
 * views share the memory of the first operand. NULL with the thread's error written. */
tu_vertex *tu_graph_call(tt_graph *graph, const tu_operator *entry, int operand_count, const tu_operand *operands,
                         const void *attributes, tu_vertex *place);
/* Makes a value, whoever made it before, the result of `vertex` at that place. The value that was there is forgotten.
 */
void tu_vertex_adopt(tu_vertex *vertex, int place, tu_value *value);
/* `to` stands for `from` everywhere, and its memory for that of `from` and its views. */
void tu_value_become(tt_graph *graph, tu_value *from, tu_value *to);
/* Whether views lead from `base` to a value, or it is `base` itself. */
bool tu_value_is_view_of(const tu_value *value, const tu_value *base);
/* The same views of `now` as those that lead from `base` to `value`, before `place`. NULL with the error written. */
tu_value *tu_value_view_again(tt_graph *graph, tu_value *value, const tu_value *base, tu_value *now, tu_vertex *place);
/* What the shape rule says of the first result of a vertex when it is not in place. */
tutti_status tu_vertex_infer(const tt_graph *graph, const tu_vertex *vertex, tu_shape *first);
/* Sets every vertex's position: 0 for the first, and so on. */
void tu_graph_number(tt_graph *graph);

/* ---- collectives (collective.c) ---- */

/* The group of a vertex, NULL where there is none; its reduction, 0; its dimension counted from 0, -1. */
tutti_group *tu_vertex_group(const tu_vertex *vertex);
tutti_reduction tu_vertex_reduction(const tu_vertex *vertex);
int tu_vertex_dim(const tu_vertex *vertex);
/* Whether it meets other ranks, so that its place among those that do is part of the program. */
bool tu_vertex_communicates(const tu_vertex *vertex);
/* Whether it is a wait for this memory. */
bool tu_vertex_waits_for(const tu_vertex *vertex, int storage);

/* Its text; whether it could be written is for ferror to say (text.c). */
void tu_graph_print(FILE *to, const tt_graph *graph);

/* An error where the graph is not well formed. `who` is who made it so. */
tutti_status tu_graph_check(const char *who, const tt_graph *graph);
/* An error where a value is not what its operator's shape rule says (check.c). For one vertex alone: `tensors` has a
 * place for each value of the graph, where fakes are made that the caller drops. */
tutti_status tu_vertex_check_shapes(const char *who, const tu_vertex *vertex, tt_tensor **tensors);
tutti_status tu_graph_check_shapes(const char *who, const tt_graph *graph);
/* Gives the results of a vertex the shapes that its operator says for its operands as they are now (check.c).
 * `tensors`, one per value and NULL at first, has stand-ins of operands, which are the caller's. */
tutti_status tu_vertex_reshape(const char *who, tu_vertex *vertex, tt_tensor **tensors);

/* ---- copies (copy.c) ---- */

/* A copy under way: what of `from` is in `to` already. It ends with tu_graph_copy_end. An operand, output or effect is
 * copied after what it refers to. */
typedef struct tu_graph_copy {
    const tt_graph *from;
    tt_graph *to;
    tu_value **values; /* of `to`, by their number in `from`; NULL: not there */
} tu_graph_copy;
tutti_status tu_graph_copy_begin(tu_graph_copy *copy, const tt_graph *from);
tutti_status tu_graph_copy_input(tu_graph_copy *copy, const tu_graph_input *input);
/* A value of `from` as an input of that kind. */
tutti_status tu_graph_copy_as(tu_graph_copy *copy, const tu_value *value, tu_input_kind kind);
tutti_status tu_graph_copy_vertex(tu_graph_copy *copy, const tu_vertex *vertex);
tutti_status tu_graph_copy_output(tu_graph_copy *copy, const tu_operand *output);
tutti_status tu_graph_copy_effect(tu_graph_copy *copy, const tu_graph_effect *effect);
/* What `from` begins with: so many of its inputs, the vertices before `end` (NULL: all), outputs and effects. */
tutti_status tu_graph_copy_first(tu_graph_copy *copy, int inputs, const tu_vertex *end, int outputs, int effects);
/* Hands over what was made, unless `status`, which is passed on, is an error. */
tutti_status tu_graph_copy_end(tu_graph_copy *copy, tutti_status status, tt_graph **made);
/* All of it. */
tutti_status tu_graph_clone(const tt_graph *from, tt_graph **made);

/* ---- text (text.c) ---- */

/* A stream into memory: tu_text_end gives its text, which is the caller's, or NULL with the thread's error written. */
typedef struct tu_text {
    FILE *to;
    char *at;
    size_t bytes;
} tu_text;
tutti_status tu_text_begin(tu_text *text);
char *tu_text_end(tu_text *text);
/* "sin: f32 [10] = sin(x)", without the end of the line. */
void tu_vertex_print(FILE *to, const tu_vertex *vertex);
/* Its two halves: "sin: f32 [10]", nothing where there are no results; and "sin(x)". */
void tu_vertex_print_results(FILE *to, const tu_vertex *vertex);
void tu_vertex_print_call(FILE *to, const tu_vertex *vertex);
/* "f32 [2, 3] strides [1, 2]" */
void tu_shape_print(FILE *to, const tu_shape *shape);

/* ---- running (run.c) ---- */

/* Runs the graph vertex by vertex on real tensors, without recording gradients. `inputs` has one per input of the
 * graph; what goes to `outputs` is held by the caller. */
tutti_status tu_graph_interpret(const tt_graph *graph, tt_tensor *const *inputs, tt_tensor **outputs);
/* Runs a vertex on the tensors of its operands, by their number; a number among them becomes a tensor. `call` is the
 * caller's and has the results, which belong to the scope. */
tutti_status tu_vertex_run(const tu_vertex *vertex, tt_tensor *const *tensors, tu_call *call);
/* The same in parts, for those who run some vertices their own way: the tensor of every value that is needed yet. */
typedef struct tu_graph_run {
    const tt_graph *graph;
    int value_count;
    tt_tensor **tensors; /* by the number of the value; held */
    uint32_t *versions;  /* that inputs had at the beginning */
    int *uses;           /* that are left; an output or an effect is one */
} tu_graph_run;
/* Counts the uses and holds the inputs. tu_graph_run_end follows, whatever the status. */
tutti_status tu_graph_run_begin(tu_graph_run *now, const tt_graph *graph, tt_tensor *const *inputs);
/* Runs a vertex on the tensors of its operands and keeps the results that are needed. In a scope. */
tutti_status tu_graph_run_vertex(tu_graph_run *now, const tu_vertex *vertex);
/* Its operands are used once less; the last use lets a tensor go. */
void tu_graph_run_let_go(tu_graph_run *now, const tu_vertex *vertex);
/* Effects on holders, and the outputs, which the caller then holds. */
tutti_status tu_graph_run_finish(tu_graph_run *now, tt_tensor **outputs);
void tu_graph_run_end(tu_graph_run *now);
/* The tensors of all inputs for these arguments, held; an error where an argument does not fit. */
tutti_status tu_graph_gather(const char *who, const tt_graph *graph, tt_tensor_list arguments, tt_tensor **inputs);

#endif
