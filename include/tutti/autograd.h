/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients: who asks for them, how a backward runs, and the hooks on its way.
 *
 *     tt_tensor *w = tt_randn(tt_shape(3, 3), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
 *     tt_tensor *loss = tt_sum(tt_square(tt_matmul(w, x)));
 *     tt_backward(loss, NULL);                     (tt_grad(w) is there now)
 *
 * An operator records a node when gradient mode is on and one of its inputs requires grad. A backward runs the nodes on
 * the calling thread, always the one created last among those that are ready, and adds into a leaf as soon as its
 * gradient is complete: the order is part of the contract, because hooks have side effects.
 *
 * What a node saved is checked when it is used: a tensor that was changed in place since (its version moved), whose
 * storage is freed, or whose graph was released by an earlier backward, is an error that names tensor and node.
 *
 * Every hook runs in a scope of its own, with gradient mode off unless the backward was asked to create a graph.
 */
#ifndef TUTTI_AUTOGRAD_H
#define TUTTI_AUTOGRAD_H

#include <tutti/tensor.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_FUNCTION_TENSORS 16 /* inputs or outputs of one function, at most */

/* ---- leaves, parameters, gradients ---- */

/* Makes a leaf require grad, or not. An error for integers and bool, and for "not" on a tensor with history. */
TUTTI_API tt_tensor *tt_require_grad(tt_tensor *x, bool on);
/* Whether backwards compute a gradient of x. */
TUTTI_API bool tt_requires_grad(const tt_tensor *x);
/* A leaf has no history: it was not computed, or without gradients. */
TUTTI_API bool tt_is_leaf(const tt_tensor *x);
/* A new leaf on x's storage, marked as a parameter. */
TUTTI_API tt_tensor *tt_parameter(tt_tensor *x, bool requires_grad);
/* Whether x was made by tt_parameter. */
TUTTI_API bool tt_is_parameter(const tt_tensor *x);

/* The gradient collected so far; NULL, and no error, where there is none. The same handle as long as it is added to. */
TUTTI_API tt_tensor *tt_grad(const tt_tensor *x);
/* NULL removes it; else shape, dtype and device must be x's. */
TUTTI_API void tt_set_grad(tt_tensor *x, tt_tensor *grad);
/* Keeps the gradient of a tensor that is no leaf; the next backward stores a copy. */
TUTTI_API void tt_retain_grad(tt_tensor *x);

/* Switches recording on or off in this thread and returns what it was. Works also with an error pending. */
TUTTI_API bool tt_grad_mode(bool on);
/* Whether this thread records. */
TUTTI_API bool tt_grad_enabled(void);

/* ---- backward ---- */

typedef struct tt_backward_options {
    size_t size;
    bool retain_graph;     /* keep what nodes saved, for another backward */
    bool create_graph;     /* record the backward itself, so that it can be differentiated; implies retain_graph */
    tt_tensor_list inputs; /* only these collect gradients, and only the way to them runs; empty: all leaves */
} tt_backward_options;
#define TT_BACKWARD_OPTIONS_INIT TUTTI_DEFAULTS(tt_backward_options)
/* TT_BACKWARD_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_backward_options_init(tt_backward_options *options, size_t size);

/* From one tensor. Without `grad` (NULL) it must have one element, and its gradient is 1. */
TUTTI_API bool tt_backward(tt_tensor *root, tt_tensor *grad);
/* From several, with options. grads is empty, or has one entry per root, which may be NULL. */
TUTTI_API bool tt_backward_from(tt_tensor_list roots, tt_tensor_list grads, const tt_backward_options *options);
/* The gradients of the outputs with respect to the inputs, touching no tt_grad. Entries are NULL where no way leads to
 * an input. */
TUTTI_API tt_tensor_list tt_gradients(tt_tensor_list outputs, tt_tensor_list inputs, tt_tensor_list grads,
                                      const tt_backward_options *options);

/* From inside a backward (a hook, a custom function): runs `callback` after the last node, in order of queueing. */
TUTTI_API bool tt_backward_callback(void (*callback)(void *user), void *user);

/* ---- hooks ---- */

/* What a hook is given besides gradients: its user pointer and the tensors it was registered with, which it keeps
 * alive. Leaves are kept as they are; computed tensors without their history (tt_detach), since that could lead back to
 * where the hook hangs. */
typedef struct tt_hook_context {
    void *user;
    tt_tensor_list captured;
} tt_hook_context;

typedef struct tt_hook tt_hook;
/* Ends a hook and sets *hook to NULL; a second call does nothing. The round of hooks that is running is not
 * affected. */
TUTTI_API void tt_hook_remove(tt_hook **hook);
/* Gives the handle up; the hook stays. */
TUTTI_API void tt_hook_release(tt_hook **hook);

/* How a hook is registered. */
typedef struct tt_hook_options {
    size_t size;
    tt_tensor_list captured; /* tensors that the hook needs, which it keeps alive */
    bool first;              /* before the hooks that are there already; else after them */
    bool always;             /* also when the forward failed: tt_hook_forward alone has it */
    bool opaque;             /* must run on the host each time: what would run it cannot be captured */
} tt_hook_options;
#define TT_HOOK_OPTIONS_INIT TUTTI_DEFAULTS(tt_hook_options)
/* TT_HOOK_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_hook_options_init(tt_hook_options *options, size_t size);

/* The functions that register a hook take the user's pointer, options (NULL: defaults) and `hook`, where to put a
 * handle for tt_hook_remove (NULL: none wanted). */

/* On a tensor: called when its gradient is complete. Returns NULL for no change, or another gradient of the same shape,
 * dtype and device. */
typedef tt_tensor *tt_tensor_hook(const tt_hook_context *context, tt_tensor *grad);
/* Registers such a hook on x, which must require grad. */
TUTTI_API bool tt_hook_tensor(tt_tensor *x, tt_tensor_hook *function, void *user, const tt_hook_options *options,
                              tt_hook **hook);

/* On a leaf: called after its gradient was updated. */
typedef void tt_accumulate_hook(const tt_hook_context *context, tt_tensor *leaf);
/* Registers such a hook on a leaf that requires grad. */
TUTTI_API bool tt_hook_accumulate(tt_tensor *leaf, tt_accumulate_hook *function, void *user,
                                  const tt_hook_options *options, tt_hook **hook);

/* What computes one step of a backward. */
typedef struct tt_node tt_node;
/* On a node, before it runs: may replace entries of `grads`, the gradients of its outputs. */
typedef void tt_node_pre_hook(const tt_hook_context *context, size_t count, tt_tensor **grads);
/* On a node, after it ran: may replace entries of `results`, the gradients of its inputs. */
typedef void tt_node_post_hook(const tt_hook_context *context, size_t result_count, tt_tensor **results,
                               size_t grad_count, tt_tensor *const *grads);
/* Registers a hook that runs before the node. */
TUTTI_API bool tt_hook_node_pre(tt_node *node, tt_node_pre_hook *function, void *user, const tt_hook_options *options,
                                tt_hook **hook);
/* Registers a hook that runs after the node. */
TUTTI_API bool tt_hook_node_post(tt_node *node, tt_node_post_hook *function, void *user, const tt_hook_options *options,
                                 tt_hook **hook);

/* The node that computed x; NULL, and no error, for a leaf. Lent: valid while x lives and is not changed in place. */
TUTTI_API tt_node *tt_grad_fn(tt_tensor *x);
/* Of the operator or function that it differentiates: "mul". Lent. */
TUTTI_API const char *tt_node_name(const tt_node *node);
TUTTI_API uint64_t tt_node_sequence(const tt_node *node); /* creation number within its thread */

/* What becomes of tensors that nodes save, in this thread, from push to pop. pack turns a tensor into anything (and
 * must not change it); unpack turns it back, each time it is needed; release ends it. */
typedef struct tt_saved_hooks {
    size_t size;
    void *(*pack)(void *user, tt_tensor *tensor);
    tt_tensor *(*unpack)(void *user, void *packed);
    void (*release)(void *user, void *packed);
    void *user;
} tt_saved_hooks;
#define TT_SAVED_HOOKS_INIT TUTTI_DEFAULTS(tt_saved_hooks)
/* TT_SAVED_HOOKS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_saved_hooks_init(tt_saved_hooks *hooks, size_t size);
/* Applies `hooks` to what this thread saves from now on, instead of those that were pushed before. */
TUTTI_API bool tt_saved_hooks_push(const tt_saved_hooks *hooks);
/* Ends the hooks that were pushed last; what they packed is still unpacked by them. */
TUTTI_API void tt_saved_hooks_pop(void);

/* ---- checkpoints: less memory for more time ---- */

/* A part of a forward: writes its results to `outputs` (room for TT_FUNCTION_TENSORS) and returns how many there are.
 */
typedef int tt_region(void *user, tt_tensor_list inputs, tt_tensor **outputs);
/* Runs a region whose nodes keep nothing for the backward: when that needs something, the region runs once more, from
 * the same inputs and with the same random numbers, and must compute the same. Parameters that it uses need not be
 * among the inputs. `release` (may be NULL) ends `user` when the graph is done with it, also after a failure. Hooks of
 * modules run in both rounds. An input that was changed in place meanwhile is TUTTI_ERROR_VERSION; a backward with
 * create_graph is TUTTI_ERROR_UNSUPPORTED. Gradients are the same bits as without it. */
TUTTI_API tt_tensor_list tt_checkpoint(tt_region *region, void *user, void (*release)(void *user),
                                       tt_tensor_list inputs);

/* ---- finding a NaN ---- */

/* While it is on in this thread, an operator whose result holds a NaN is an error at once (TUTTI_ERROR_STATE) that
 * names the operator, the module, and in a backward the node; it tells whether an input held one already. Floats on the
 * CPU are looked at, all of them: it is slow. What tt_empty makes, and what a collective is still writing, is not
 * looked at. Returns what it was; works also with an error pending. */
TUTTI_API bool tt_anomaly_mode(bool on);

/* ---- functions with a gradient of one's own ---- */

typedef struct tt_function_context tt_function_context;

typedef struct tt_function {
    size_t size;
    const char *name; /* must stay valid */
    /* Runs without recording. Writes its results to `outputs` and returns how many there are; below 0 or with an error
     * pending: failed. */
    int (*forward)(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs);
    /* Writes one gradient per input (NULL: none) and returns how many it wrote, which must be the number of inputs. */
    int (*backward)(tt_function_context *context, tt_tensor_list grads, tt_tensor **results);
    void (*release)(void *user); /* of `user`, when the graph is done with it; may be NULL */
    /* Inputs that forward needs in symmetric memory of `group`: bit i for input i. One that lies elsewhere is copied
     * there, and forward gets the copy, so it cannot change that input in place; a graph has its buffer once and for
     * all, and copies at each run. */
    uint64_t symmetric;
    tutti_group *group; /* must stay valid; NULL where symmetric is 0 */
} tt_function;
#define TT_FUNCTION_INIT TUTTI_DEFAULTS(tt_function)
/* TT_FUNCTION_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_function_init(tt_function *function, size_t size);

/* Entries of inputs may be NULL. The results, with history where an input requires grad. */
TUTTI_API tt_tensor_list tt_apply(const tt_function *function, tt_tensor_list inputs, void *user);

/* The `user` that tt_apply was given. */
TUTTI_API void *tt_function_user(const tt_function_context *context);
/* In forward, at most once; entries may be NULL. */
TUTTI_API bool tt_save_for_backward(tt_function_context *context, tt_tensor_list tensors);
/* In backward: what was saved, checked. */
TUTTI_API tt_tensor_list tt_saved_tensors(tt_function_context *context);
/* In backward: whether anybody wants the gradient of that input. */
TUTTI_API bool tt_needs_input_grad(const tt_function_context *context, int input);
/* Default true: absent gradients arrive as zeros; false: as NULL. */
TUTTI_API void tt_materialize_grads(tt_function_context *context, bool on);
/* An input that forward changed in place and returns. */
TUTTI_API void tt_mark_dirty(tt_function_context *context, tt_tensor *tensor);
/* An output of forward that has no gradient: an index, a mask. */
TUTTI_API void tt_mark_non_differentiable(tt_function_context *context, tt_tensor *tensor);

#ifdef __cplusplus
}
#endif
#endif
