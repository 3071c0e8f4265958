/* SPDX-License-Identifier: Apache-2.0
 *
 * The ready-made modules.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "nn/module.h"

/* Adds a parameter made in a scope of its own; true on success. */
static bool add_parameter(tt_module *module, const char *name, tt_tensor *values) {
    return tt_module_set_parameter(module, name, tt_parameter(values, true));
}

/* Gives up a module that could not be finished. */
static tt_module *checked(tt_module *module) {
    if (tu_self()->pending == TUTTI_OK)
        return module;
    tt_module_release(module);
    return NULL;
}

/* ---- Linear ---- */

static int linear_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    bool bias = tt_module_user(module) != NULL;
    outputs[0] = tt_linear(inputs.count > 0 ? inputs.at[0] : NULL, tt_module_parameter(module, "weight"),
                           bias ? tt_module_parameter(module, "bias") : NULL);
    return 1;
}

tt_module *tt_linear_module(int64_t in, int64_t out, bool bias, tutti_dtype dtype) {
    static const tt_module_type type = { sizeof type, "Linear", linear_forward, NULL };
    static const char with_bias; /* its address says so */
    tt_module *module = tt_module_new(&type, bias ? (void *)(uintptr_t)&with_bias : NULL);
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    double bound = in > 0 ? 1 / sqrt((double)in) : 0;
    add_parameter(module, "weight", tt_uniform_(tt_empty(tt_shape(out, in), dtype, NULL), -bound, bound));
    if (bias)
        add_parameter(module, "bias", tt_uniform_(tt_empty(tt_shape(out), dtype, NULL), -bound, bound));
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return checked(module);
}

/* ---- Embedding ---- */

static int embedding_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_embedding(tt_module_parameter(module, "weight"), inputs.count > 0 ? inputs.at[0] : NULL);
    return 1;
}

tt_module *tt_embedding_module(int64_t count, int64_t size, tutti_dtype dtype) {
    static const tt_module_type type = { sizeof type, "Embedding", embedding_forward, NULL };
    tt_module *module = tt_module_new(&type, NULL);
    tt_scope scope = tt_scope_open();
    add_parameter(module, "weight", tt_randn(tt_shape(count, size), dtype, NULL));
    tu_scope_leave(&scope);
    return checked(module);
}

/* ---- LayerNorm, RMSNorm, Dropout: each is one number and its forward ---- */

/* A module whose user is that number. */
static tt_module *module_of_number(const tt_module_type *type, double number) {
    double *kept = tu_self()->pending == TUTTI_OK ? malloc(sizeof *kept) : NULL;
    if (kept == NULL) {
        if (tu_self()->pending == TUTTI_OK)
            tu_pending_take(tu_error_memory("a module", sizeof *kept));
        return NULL;
    }
    *kept = number;
    tt_module *module = tt_module_new(type, kept);
    if (module == NULL)
        free(kept);
    return module;
}

static int layer_norm_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const double *epsilon = tt_module_user(module);
    outputs[0] = tt_layer_norm(inputs.count > 0 ? inputs.at[0] : NULL, tt_module_parameter(module, "weight"),
                               tt_module_parameter(module, "bias"), *epsilon);
    return 1;
}

static tt_module *norm_module(const tt_module_type *type, int64_t size, double epsilon, bool bias, tutti_dtype dtype) {
    tt_module *module = module_of_number(type, epsilon);
    tt_scope scope = tt_scope_open();
    add_parameter(module, "weight", tt_ones(tt_shape(size), dtype, NULL));
    if (bias)
        add_parameter(module, "bias", tt_zeros(tt_shape(size), dtype, NULL));
    tu_scope_leave(&scope);
    return checked(module);
}

tt_module *tt_layer_norm_module(int64_t size, double epsilon, tutti_dtype dtype) {
    static const tt_module_type type = { sizeof type, "LayerNorm", layer_norm_forward, free };
    return norm_module(&type, size, epsilon, true, dtype);
}

static int rms_norm_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const double *epsilon = tt_module_user(module);
    outputs[0] = tt_rms_norm(inputs.count > 0 ? inputs.at[0] : NULL, tt_module_parameter(module, "weight"), *epsilon);
    return 1;
}

tt_module *tt_rms_norm_module(int64_t size, double epsilon, tutti_dtype dtype) {
    static const tt_module_type type = { sizeof type, "RMSNorm", rms_norm_forward, free };
    return norm_module(&type, size, epsilon, false, dtype);
}

static int dropout_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const double *share = tt_module_user(module);
    tt_tensor *x = inputs.count > 0 ? inputs.at[0] : NULL;
    outputs[0] = tt_module_training(module) && *share > 0 ? tt_dropout(x, *share) : x;
    return 1;
}

tt_module *tt_dropout_module(double p) {
    static const tt_module_type type = { sizeof type, "Dropout", dropout_forward, free };
    if (tu_self()->pending == TUTTI_OK && !(p >= 0 && p < 1))
        tu_fail(TUTTI_ERROR_ARGUMENT, "dropout_module: p is %g and must be in [0, 1)", p);
    return module_of_number(&type, p);
}

/* ---- a function ---- */

typedef struct one_function {
    tt_tensor *(*function)(tt_tensor *x);
} one_function;

static int function_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const one_function *user = tt_module_user(module);
    outputs[0] = user->function(inputs.count > 0 ? inputs.at[0] : NULL);
    return 1;
}

tt_module *tt_function_module(const char *name, tt_tensor *(*function)(tt_tensor *x)) {
    tt_module_type type = { sizeof type, name, function_forward, free };
    if (function == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "function_module: \"%s\" has no function", name != NULL ? name : "");
    one_function *user = tu_self()->pending == TUTTI_OK ? malloc(sizeof *user) : NULL;
    if (user == NULL) {
        if (tu_self()->pending == TUTTI_OK)
            tu_pending_take(tu_error_memory("a module", sizeof *user));
        return NULL;
    }
    user->function = function;
    tt_module *module = tt_module_new(&type, user);
    if (module == NULL)
        free(user);
    return module;
}

/* ---- Sequential ---- */

static int sequential_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor_list passed = inputs;
    for (int i = 0; i < module->child_count; i++)
        passed = tt_module_call_all(module->children[i].module, passed);
    if (passed.count > 0) /* none where an error is pending */
        memcpy(outputs, passed.at, passed.count * sizeof *outputs);
    return (int)passed.count;
}

tt_module *tt_sequential_module(int count, tt_module *const *modules) {
    static const tt_module_type type = { sizeof type, "Sequential", sequential_forward, NULL };
    tt_module *module = tt_module_new(&type, NULL);
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        tt_module_add_child(module, name, modules[i]);
    }
    return checked(module);
}
