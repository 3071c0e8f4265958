/* SPDX-License-Identifier: Apache-2.0
 *
 * The backward graph: nodes, edges, what they save, and the history that hangs on tensors.
 */
#ifndef TU_AUTOGRAD_NODE_H
#define TU_AUTOGRAD_NODE_H

#include <pthread.h>
#include <stdatomic.h>

#include <tutti/autograd.h>

#include "tensor/history.h"
#include "tensor/map.h"
#include "tensor/operator.h"

typedef struct tu_node tu_node;

/* Where a gradient goes: slot `slot` of a node, or a leaf. Both NULL: nowhere. Holds a reference. */
typedef struct tu_edge {
    tu_node *node;
    tt_tensor *leaf;
    int slot;
} tu_edge;

#define TU_NO_OUTPUT (-1)

typedef struct tu_saved_tensor {
    uint32_t which; /* TU_INPUT or TU_OUTPUT bit of an operator; 0 for custom functions, which go by position */
    uint32_t version;
    tt_tensor *tensor; /* a leaf itself, else an alias without history; see tu_save */
    tu_node *source;   /* that computed it, held; NULL for a leaf and for outputs of the node that saves */
    int output;        /* which output of the source, or of the node that saves, it is; or TU_NO_OUTPUT */
    bool released;
    tt_saved_hooks *hooks; /* who packed it, or NULL */
    void *packed;
    tt_tensor *lifted; /* what was unpacked, while a backward is captured: given out instead; lent. Else NULL */
} tu_saved_tensor;

/* Who is told what a backward depends on, so that one that was captured can be known again. */
typedef struct tu_collector {
    void (*word)(struct tu_collector *collector, uintptr_t word);
    /* A tensor that changes from run to run; NULL: there is none. */
    void (*tensor)(struct tu_collector *collector, tt_tensor *tensor);
    /* An object whose address was told as a word: it is held as long as the words are remembered, so that no other
     * takes its address. Takes the reference. */
    void (*keep)(struct tu_collector *collector, void *object, void (*release)(void *object));
    /* It cannot be captured, and why. */
    void (*refuse)(struct tu_collector *collector, const char *why);
} tu_collector;

struct tu_hook_list;
struct tt_hook {
    atomic_int references;
    struct tu_hook_list *list; /* it stands in, which holds a reference; NULL once removed. Under the lock of hooks */
    void (*function)(void);
    void *user;
    void (*release)(void *user); /* of `user`, with the hook; or NULL */
    /* Tells what `user` stands for, where that is a record of the library's own; NULL: `user` is what it is. */
    void (*describe)(void *user, tu_collector *collector);
    bool opaque; /* as its options say */
    bool inside; /* of a leaf: where a function is compiled with its backward, the gradient is added and the hook runs
                  * inside of that, though the leaf stands outside */
    size_t captured_count;
    tt_tensor *captured[];
};

/* Changed under the lock of hooks; whoever runs hooks takes a snapshot. */
typedef struct tu_hook_list {
    _Atomic int count;        /* read without the lock to see that there are none: relaxed */
    _Atomic uint32_t changes; /* how often a hook was added or removed; read without the lock: relaxed */
    int capacity;
    tt_hook **at;
} tu_hook_list;
static inline int tu_hook_count(const tu_hook_list *list) {
    return atomic_load_explicit(&list->count, memory_order_relaxed);
}

static inline uint32_t tu_hook_changes(const tu_hook_list *list) {
    return atomic_load_explicit(&list->changes, memory_order_relaxed);
}

typedef struct tu_node_hooks {
    tu_hook_list pre, post;
    tu_hook_list *tensor; /* one list per output */
    tt_tensor **retained; /* per output: who wants its gradient kept. Not held: the tensor clears it when it goes */
} tu_node_hooks;

/* Computes gradients of the inputs: `results` has input_count entries, NULL on entry; what is put there is held by the
 * current scope. */
typedef void tu_node_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results);

struct tu_node {
    atomic_int references;
    uint64_t sequence;
    const char *name;
    const tu_operator *entry; /* NULL for other kinds */
    tu_node_run *run;
    void (*release)(tu_node *node); /* of `detail`, with the node; may be NULL */
    void *detail;
    /* Tells what `detail` stands for, where there is one. */
    void (*describe)(const tu_node *node, tu_collector *collector);
    tu_node *inner;   /* a node that runs inside this one, or NULL; held */
    tu_node *outer;   /* of an inner node: the one that it runs inside. Not held: it holds this one */
    void *attributes; /* of the call, kept; see tu_attributes_copy */
    int input_count, output_count, saved_count;
    int changed;       /* of a node that changes a view in place: which input is the view, or its base */
    uint32_t saves;    /* TU_INPUT and TU_OUTPUT bits of what it saves */
    bool *needs;       /* of the inputs */
    tu_edge *next;     /* of the inputs */
    tu_shape *inputs;  /* their shapes */
    tu_shape *outputs; /* shapes of the outputs: what gradients must look like */
    tu_saved_tensor *saved;
    bool released;     /* what it saved is gone */
    bool sees_nothing; /* runs also when no gradient arrived */
    tu_node_hooks *hooks;
    tu_place *place; /* where it was made, or NULL; held */
    tu_node *dead_next;
};

enum {
    TU_MARK_NORMAL,
    TU_MARK_NO_GRAD, /* a view made without recording */
    TU_MARK_CUSTOM   /* made inside a custom function, or by a hook wrapper */
};

struct tu_history {
    pthread_mutex_t grad_lock; /* guards `grad` of leaves: several threads may run a backward that ends in one */
    tt_tensor *grad;
    tu_node *node; /* that computed the tensor; held */
    int output;
    tt_tensor *base; /* of a view: the tensor that is no view; held */
    uint8_t mark;
    bool retains_grad;
    uint32_t generation;                         /* how often `node` was replaced */
    uint32_t seen;                               /* of a view: the generation of its base that `node` is about */
    tu_hook_list tensor_hooks, accumulate_hooks; /* of leaves */
};
typedef struct tu_history tu_history;

/* What hangs on a tensor, or NULL. */
static inline tu_history *tu_history_at(const tt_tensor *x) {
    return x->history;
}

/* ---- nodes ---- */

/* NULL with the thread's error written. Edges are empty, needs false. */
tu_node *tu_node_new_with(const char *name, int inputs, int outputs, int saved, size_t attribute_bytes);
static inline tu_node *tu_node_new(const char *name, int inputs, int outputs, int saved) {
    return tu_node_new_with(name, inputs, outputs, saved, 0);
}
void tu_node_drop(tu_node *node);
/* The shape of an input that is not there. (The rest of it is left as it is: it is long.) */
static inline void tu_shape_absent(tu_shape *shape) {
    shape->ndim = 0;
    shape->dtype = (tutti_dtype)0;
    shape->device = 0;
}
static inline tu_node *tu_node_hold(tu_node *node) {
    if (node != NULL)
        atomic_fetch_add_explicit(&node->references, 1, memory_order_relaxed);
    return node;
}
/* "linear (node 12) of module "blocks.0" (Linear)": how messages call a node. */
typedef struct tu_node_label {
    char text[320];
} tu_node_label;
tu_node_label tu_node_label_of(const tu_node *node);
/* Says that what the node saved is gone. */
tutti_status tu_node_freed_error(const tu_node *node);
void tu_edge_drop(tu_edge *edge);
/* Frees what the node saved. */
void tu_node_release_saved(tu_node *node);

/* `output` tells which output of the saving node the tensor is, or TU_NO_OUTPUT. */
tutti_status tu_save(tu_saved_tensor *saved, tt_tensor *tensor, int output, uint32_t which);
/* The tensor, in the scope; NULL with the pending error set. */
tt_tensor *tu_saved_get(tu_node *node, tu_saved_tensor *saved);

/* ---- history ---- */

tu_history *tu_history_of(tt_tensor *x);       /* made where there is none; NULL with the thread's error written */
tutti_status tu_history_require(tt_tensor *x); /* a leaf that is to get a gradient */
/* A view whose base was changed in place by something that requires grad since requires grad too. */
void tu_history_refresh(tt_tensor *x);
tt_tensor *tu_history_own(tt_tensor *view);
bool tu_history_guards(const tt_tensor *x);
/* A view made without recording. */
tutti_status tu_history_note_view(tt_tensor *base, tt_tensor *view);
/* For gradient formulas; the record of a tu_gradient is its node. */
tt_tensor *tu_node_saved(tu_gradient *gradient, uint32_t which);
const tu_shape *tu_node_input_shape(const tu_gradient *gradient, int input);
tt_tensor *tu_node_input(tu_gradient *gradient, int input);
void tu_node_through(tu_gradient *gradient, tt_tensor *output, int count, tt_tensor *const *inputs);
/* The node that computed x, made anew for a view that was overtaken by an in-place change. *node may be NULL: a
 * leaf. */
tutti_status tu_history_node(tt_tensor *x, tu_node **node);
/* Whether there is one, without making it. */
bool tu_history_has_node(const tt_tensor *x);
/* The edge to x, held. */
tutti_status tu_edge_to(tt_tensor *x, tu_edge *edge);
/* Makes x the output-th result of node. */
tutti_status tu_history_set(tt_tensor *x, tu_node *node, int output);
/* After an in-place change by `node`, whose edge `changed` leads to x as it was: x becomes its output-th result. Where
 * x is a view its base gets the new history, and the node must have one output. */
tutti_status tu_history_rebase(tt_tensor *x, tu_node *node, int changed, int output);
tutti_status tu_history_check_write(const char *who, tt_tensor *x);
static inline tt_tensor *tu_base_of(const tt_tensor *x) {
    return x->history != NULL ? tu_history_at(x)->base : NULL;
}

/* ---- views (view.c) ---- */

/* Makes `of`, or what it is a view of, the base of `view`. */
tutti_status tu_view_set_base(tt_tensor *view, tt_tensor *of, uint8_t mark);
/* The view's node is about its base as it is now. Nothing happens to a tensor that is no view. */
void tu_view_is_current(tt_tensor *view);
void tu_view_gradient(tu_gradient *gradient); /* of as_strided */
tutti_status tu_view_rebase(tt_tensor *x, tu_node *inner, int changed);
/* Makes x, which has the shape of what the inner node computed, that part of the outer node's result. */
tutti_status tu_view_of_outer(tt_tensor *x, tu_node *inner);

/* ---- a backward that somebody else runs ---- */

/* Asked at the beginning of every backward of its thread that runs in no other, collects all leaves and creates no
 * graph. True where it has run it, or failed; then *status tells. */
typedef struct tu_backward_runner {
    bool (*run)(struct tu_backward_runner *runner, tt_tensor_list roots, tt_tensor_list grads, bool retain_graph,
                tutti_status *status);
} tu_backward_runner;
/* Installs a runner for the calling thread (NULL: none) and returns the one before. */
tu_backward_runner *tu_backward_runner_set(tu_backward_runner *runner);
/* The backward of these tensors themselves, while a function is captured; nodes keep what they saved. */
tutti_status tu_backward_traced(tt_tensor_list roots, tt_tensor_list grads);
/* What identifies the hooks of a list, and the tensors that they captured. */
void tu_hooks_describe(tu_hook_list *list, tu_collector *collector);

/* ---- walks (walk.c) ---- */

/* Puts every leaf that a backward from these tensors would reach into the map, under its own address. */
tutti_status tu_leaves_of(tt_tensor_list outputs, tu_map *leaves);

/* ---- hooks ---- */

/* Appends a hook, or puts it first; its handle goes to *handle where wanted. */
tutti_status tu_hook_add(tu_hook_list *list, void (*function)(void), void *user, const tt_hook_options *options,
                         tt_hook **handle);
/* Copies a caller's options, checked; false with the error pending. `always` says whether that field has a meaning. */
bool tu_hook_options_take(const char *who, const tt_hook_options *options, bool always, tt_hook_options *full);
void tu_hook_list_free(tu_hook_list *list);
/* Whether a hook of this function stands in it. */
bool tu_hook_list_has(tu_hook_list *list, void (*function)(void));
/* A copy of the list as it is now, each hook held: hooks that are added or removed meanwhile do not matter. Ends with
 * tu_hook_list_free. */
tutti_status tu_hook_list_snapshot(tu_hook_list *list, tu_hook_list *copy);
/* Whether `from` keeps `x` alive, through gradients and what hooks captured. */
bool tu_keeps_alive(const tt_tensor *from, const tt_tensor *x);
tu_node_hooks *tu_node_hooks_of(tu_node *node);
/* Runs the hooks that wait for the gradient of a leaf, which has a history. */
tutti_status tu_run_accumulate_hooks(tt_tensor *leaf);
/* Tells backwards apart: that of the outermost one that this thread runs; 0: none. */
uint64_t tu_backward_number(void);
/* Runs tensor hooks on *grad (held), which they may replace. */
tutti_status tu_run_tensor_hooks(const char *who, tu_hook_list *list, tt_tensor **grad);

#endif
