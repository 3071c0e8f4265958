/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: named parameters, children, a forward function, and hooks around it and around its backward.
 *
 *     tt_module *layers[2];
 *     layers[0] = tt_linear_module(784, 128, true, TUTTI_F32);
 *     layers[1] = tt_linear_module(128, 10, true, TUTTI_F32);
 *     tt_module *net = tt_sequential_module(2, layers);
 *     tt_tensor *logits = tt_module_call(net, x);
 *
 * A module is a reference of its maker's and ends with tt_module_release; a parent holds its children, and whoever
 * trains it in parallel the module. Handles may be released in any order. With the last reference its memory goes, so
 * that a call with a pointer to it is not told, as it is of a tensor, but undefined: keep one (tt_module_keep) where it
 * is needed longer. Its functions follow the tt_ conventions: an error stays pending.
 */
#ifndef TUTTI_MODULE_H
#define TUTTI_MODULE_H

#include <tutti/autograd.h>
#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tt_module tt_module;

typedef struct tt_module_type {
    size_t size;
    const char *name; /* must stay valid */
    /* Writes its results to `outputs` (room for TT_FUNCTION_TENSORS) and returns how many there are. */
    int (*forward)(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs);
    void (*release)(void *user); /* of `user`, with the module; may be NULL */
} tt_module_type;
#define TT_MODULE_TYPE_INIT TUTTI_DEFAULTS(tt_module_type)
/* TT_MODULE_TYPE_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_module_type_init(tt_module_type *type, size_t size);

/* A module of that type, without parameters and children. `user` is what its forward needs. */
TUTTI_API tt_module *tt_module_new(const tt_module_type *type, void *user);
/* Another reference to the module. */
TUTTI_API tt_module *tt_module_keep(tt_module *module);
/* Ends one reference. NULL is allowed. */
TUTTI_API void tt_module_release(tt_module *module);
/* The `user` that tt_module_new was given. */
TUTTI_API void *tt_module_user(const tt_module *module);
TUTTI_API const char *tt_module_name(const tt_module *module); /* of its type */

/* ---- parameters and children ---- */

/* Writes the slot of that name, made on first use; held by the module. NULL empties it. Nothing is checked: this is how
 * a sharded parameter takes the place of a whole one and back. */
TUTTI_API bool tt_module_set_parameter(tt_module *module, const char *name, tt_tensor *parameter);
/* NULL, and no error, for an empty slot; a name that was never set is an error. */
TUTTI_API tt_tensor *tt_module_parameter(const tt_module *module, const char *name);
/* The parent takes the caller's reference over, also on failure. A name that a child or a parameter has already is an
 * error. A parameter without a name of its own is called by its path, "blocks.0.weight", in messages. */
TUTTI_API bool tt_module_add_child(tt_module *module, const char *name, tt_module *child);
TUTTI_API tt_module *tt_module_child(const tt_module *module, const char *name); /* lent */
/* All parameters, its own first, then its children's in order of adding; names are joined by dots. One that several
 * modules share is listed once, by its first name. */
TUTTI_API tt_named_list tt_module_parameters(const tt_module *module);
/* Removes the gradients of all of them. */
TUTTI_API void tt_module_zero_grad(tt_module *module);

/* A buffer is a tensor that belongs to the module's state and is not trained: a running mean, a table of angles. Slots
 * are written as those of parameters are; a name is a parameter's, a buffer's or a child's, and another use of it is an
 * error. */
TUTTI_API bool tt_module_set_buffer(tt_module *module, const char *name, tt_tensor *buffer);
/* NULL, and no error, for an empty slot; a name that was never set is an error. */
TUTTI_API tt_tensor *tt_module_buffer(const tt_module *module, const char *name);
/* All buffers, in the order and with the names that tt_module_parameters would give them. */
TUTTI_API tt_named_list tt_module_buffers(const tt_module *module);

/* ---- training or not ---- */

/* Says to the module and to all below it whether they are trained, which a new module is, or only used: dropout rests
 * then. A child that is added later keeps its own flag. */
TUTTI_API bool tt_module_set_training(tt_module *module, bool training);
/* Whether the module is being trained; false for NULL. */
TUTTI_API bool tt_module_training(const tt_module *module);

/* ---- calling ---- */

/* Runs a module of one input and one output, with its hooks. */
TUTTI_API tt_tensor *tt_module_call(tt_module *module, tt_tensor *x);
/* Runs a module with several inputs and outputs, with its hooks. */
TUTTI_API tt_tensor_list tt_module_call_all(tt_module *module, tt_tensor_list inputs);
/* A function of a module, as its forward is one: writes its results to `outputs` (room for TT_FUNCTION_TENSORS) and
 * returns how many there are. */
typedef int tt_module_method(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs);
/* Runs another function of the module in the place of its forward, with the hooks of a forward around it and around its
 * backward: parameters that are fully sharded are whole in it, say. */
TUTTI_API tt_tensor_list tt_module_call_method(tt_module *module, tt_module_method *method, tt_tensor_list inputs);

/* tt_module_call as a checkpoint (tt_checkpoint): the module keeps nothing for the backward and runs once more then. */
TUTTI_API tt_tensor *tt_module_call_checkpointed(tt_module *module, tt_tensor *x);

/* Order of one call: forward-pre hooks; then, where backward hooks exist and something requires grad, the inputs are
 * passed through one wrapper node; forward; forward hooks; the outputs pass through another wrapper node. Hooks run in
 * order of registration, or first when tt_hook_options.first is set. Backward hooks are those there were at the
 * forward; removing one later does not stop it for that forward. Wrapped tensors cannot be changed in place. */

/* May replace entries of `inputs`. */
typedef void tt_forward_pre_hook(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs);
/* May replace entries of `outputs`. */
typedef void tt_forward_hook(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                             tt_tensor **outputs);
/* When the gradients of all outputs are known; may replace them. */
typedef void tt_backward_pre_hook(const tt_hook_context *context, tt_module *module, size_t count,
                                  tt_tensor **grad_outputs);
/* When the gradients of the inputs are known; may replace them. Where no input requires grad they are all NULL, and
 * must stay so. */
typedef void tt_backward_hook(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grad_inputs,
                              tt_tensor_list grad_outputs);

/* Registers a hook that runs before the module's forward. */
TUTTI_API bool tt_hook_forward_pre(tt_module *module, tt_forward_pre_hook *function, void *user,
                                   const tt_hook_options *options, tt_hook **hook);
/* Registers a hook that runs after the module's forward; with options->always also when that failed, with no outputs
 * and the error set aside. */
TUTTI_API bool tt_hook_forward(tt_module *module, tt_forward_hook *function, void *user, const tt_hook_options *options,
                               tt_hook **hook);
/* Registers a hook that runs before the module's backward. */
TUTTI_API bool tt_hook_backward_pre(tt_module *module, tt_backward_pre_hook *function, void *user,
                                    const tt_hook_options *options, tt_hook **hook);
/* Registers a hook that runs after the module's backward. */
TUTTI_API bool tt_hook_backward(tt_module *module, tt_backward_hook *function, void *user,
                                const tt_hook_options *options, tt_hook **hook);

/* ---- ready-made ---- */

/* "weight" (out, in) and "bias" (out), uniform within 1 / sqrt(in). */
TUTTI_API tt_module *tt_linear_module(int64_t in, int64_t out, bool bias, tutti_dtype dtype);
/* "weight" (count, size), normal. */
TUTTI_API tt_module *tt_embedding_module(int64_t count, int64_t size, tutti_dtype dtype);
/* "weight" ones and "bias" zeros, of `size`. */
TUTTI_API tt_module *tt_layer_norm_module(int64_t size, double epsilon, tutti_dtype dtype);
/* "weight" ones, of `size`. */
TUTTI_API tt_module *tt_rms_norm_module(int64_t size, double epsilon, tutti_dtype dtype);
/* tt_dropout with the share p, from 0 to below 1, while the module is trained; its input itself else. */
TUTTI_API tt_module *tt_dropout_module(double p);

/* How an attention module is made. */
typedef struct tt_attention_options {
    size_t size;
    int64_t heads;     /* divides the width; 0: 1 */
    bool sees_all;     /* every position sees all; else itself and those before it */
    bool bias;         /* the two linear layers have one */
    double rope_base;  /* queries and keys are turned by their positions (tt_rope); 0: they are not */
    double dropout;    /* share of the result that is dropped while training */
    tutti_dtype dtype; /* 0: TUTTI_F32 */
} tt_attention_options;
#define TT_ATTENTION_OPTIONS_INIT TUTTI_DEFAULTS(tt_attention_options)
/* TT_ATTENTION_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_attention_options_init(tt_attention_options *options, size_t size);
/* Attention of x (…, length, width) to itself, with several heads: children "qkv" (width to 3 width), "out" (width to
 * width) and "dropout". options may be NULL. */
TUTTI_API tt_module *tt_attention_module(int64_t width, const tt_attention_options *options);
/* Applies a function of one tensor: tt_relu, tt_gelu, … */
TUTTI_API tt_module *tt_function_module(const char *name, tt_tensor *(*function)(tt_tensor *x));
/* One after the other; named "0", "1", …. Takes the references over. */
TUTTI_API tt_module *tt_sequential_module(int count, tt_module *const *modules);

#ifdef __cplusplus
}
#endif
#endif
