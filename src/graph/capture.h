/* SPDX-License-Identifier: Apache-2.0
 *
 * Capturing inside: a function run once on stand-ins, and what must be remembered of that run besides the graph. A
 * compiler asks for the backward too: it is traced right behind the function, from fake gradients of its results, and
 * stands in the same graph (joint.c).
 */
#ifndef TU_GRAPH_CAPTURE_H
#define TU_GRAPH_CAPTURE_H

#include "autograd/node.h"
#include "graph/graph.h"
#include "tensor/map.h"

/* ---- what a capture gives ---- */

/* Whose gradient a backward computes: that of an input of the graph, or of a leaf that the function made and returned.
 */
typedef struct tu_gradient_target {
    int input;  /* -1: a result instead */
    int result; /* among the function's results */
} tu_gradient_target;

/* Which gradient enters a backward: that of a result, or of an input that the function wrote. */
typedef tu_gradient_target tu_tangent_source;

typedef struct tu_captured {
    tt_graph *graph;  /* its outputs are the results, then the gradients of `targets` */
    int result_count; /* results of the function */
    int input_count;  /* inputs that the function has; those behind belong to the backward alone */
    int effect_count; /* effects of the function; those behind are the backward's */
    tu_vertex *last;  /* vertex of the function; NULL: it has none */
    int tangent_count, target_count;
    tu_tangent_source *tangents; /* one per input of kind TU_INPUT_TANGENT; none: there is no backward */
    tu_gradient_target *targets;
    bool asks_sizes;     /* the function asked for sizes, so that the graph may depend on them in any way */
    bool in_backward;    /* the function itself was captured; whatever went wrong did so in its backward */
    bool inner_backward; /* the function runs a backward itself, and so the hooks of leaves */
    int witness_count;
    tu_witness *witnesses; /* what else it depends on, kept */
    uint64_t *stamps;      /* that they gave */
} tu_captured;

/* Captures the function, and with `joint` the backward of its results, where they have one. On failure *made has the
 * graph as far as it came, or NULL; it ends with tu_captured_end in any case. */
tutti_status tu_capture_function(const char *who, tt_compile_function *function, void *user, tt_tensor_list inputs,
                                 bool joint, tu_captured *made);
void tu_captured_end(tu_captured *made);

/* ---- between the two files ---- */

/* A real tensor that was met, and what stands for it. */
typedef struct tu_meeting {
    struct tu_meeting *next;
    tt_tensor *real, *fake; /* both held */
    tu_input_kind kind;
    int index; /* of arguments */
    int input; /* of the graph; -1 until an operator uses it */
    tu_holder holder;
    struct tu_meeting *leaf; /* of a gradient: whose it is */
    tu_node *entrance;       /* of a tensor with a history: where gradients leave the graph; held */
    int hooks;               /* that the real tensor had */
    bool asks_gradient, sets_gradient, asks_bytes;
    bool inside;         /* its hooks run inside of the backward */
    bool accumulated;    /* the backward adds to its gradient itself */
    tt_tensor *gradient; /* that the backward computed; held */
} tu_meeting;

typedef struct tu_fake_storage {
    struct tu_fake_storage *next;
    tu_storage *storage; /* held */
    int number;
    uint32_t version;   /* with which it began */
    tu_value *any;      /* one value on it; NULL until an operator used one */
    tt_tensor *example; /* the tensor of that value; lent by the capture's list */
} tu_fake_storage;

/* A holder that the function changes: what it had, and what it has when the function has ended. */
typedef struct tu_change {
    struct tu_change *next;
    tu_holder holder;
    tt_tensor *before, *after; /* held */
    bool ended;
} tu_change;

typedef struct tu_capture {
    tu_call_recorder recorder;
    const char *who;
    tt_graph *graph;
    tu_captured *made;
    tu_meeting *meetings;
    tu_fake_storage *storages;
    tu_change *changes;
    tu_map by_real;         /* real tensor: meeting */
    tu_map by_fake;         /* stand-in: meeting */
    tu_map storage_of_real; /* real storage: fake storage */
    tu_map storage_of_fake; /* fake storage: fake storage */
    tu_map values;          /* tensor on a fake storage: value */
    tu_map storage_of_value;
    tt_tensor **held; /* those tensors, so that none of them ends while the capture runs */
    size_t held_count, held_capacity;
    bool backward; /* the function has ended, and its backward is traced */
    int result_count;
    tt_tensor **results;   /* stand-ins of the function's results; lent */
    tt_tensor **gradients; /* of results that are leaves made inside; held */
} tu_capture;

/* The value of a tensor on a fake storage. */
tutti_status tu_capture_value(tu_capture *to, tt_tensor *x, tu_value **value);
/* A fake storage that the capture remembers, under a number of its own. */
tu_fake_storage *tu_capture_storage(tu_capture *to, tu_storage *storage, uint32_t version);
tutti_status tu_capture_bind(tu_capture *to, tt_tensor *x, tu_value *value);
/* The backward of the results, from gradients that are inputs of the graph (joint.c). */
tutti_status tu_capture_backward(tu_capture *to);
/* A gradient has reached a leaf, or the entrance of an input, while the backward is traced (joint.c). */
tutti_status tu_capture_arrival(tu_capture *to, tt_tensor *leaf, tt_tensor *grad);
/* A hook asks for a gradient meanwhile (joint.c). */
tutti_status tu_capture_question(tu_capture *to, tu_meeting *met);

#endif
