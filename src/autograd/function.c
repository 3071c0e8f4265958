/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions with a gradient of their user's own.
 */
#include "autograd/function.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/symmetric.h"

struct tt_function_context {
    tt_function function;
    void *user;
    tu_node *node; /* lent; NULL while forward runs */
    bool materialize, saved;
    int input_count;
    bool needs[TT_FUNCTION_TENSORS];
    int save_count, dirty_count, constant_count;
    tt_tensor *to_save[TT_FUNCTION_TENSORS];                               /* held until the node saves them */
    tt_tensor *dirty[TT_FUNCTION_TENSORS], *constant[TT_FUNCTION_TENSORS]; /* not held: compared only, within apply */
};

static void context_free(tt_function_context *context) {
    for (int i = 0; i < context->save_count; i++)
        tu_tensor_drop(context->to_save[i]);
    if (context->function.release != NULL)
        context->function.release(context->user);
    free(context);
}

/* ---- what forward and backward may ask ---- */

void *tt_function_user(const tt_function_context *context) {
    return context->user;
}

bool tt_needs_input_grad(const tt_function_context *context, int input) {
    return input >= 0 && input < context->input_count && context->needs[input];
}

void tt_materialize_grads(tt_function_context *context, bool on) {
    context->materialize = on;
}

static void mark(const char *who, tt_tensor **list, int *count, tt_tensor *tensor) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "tensor", tensor)) != TUTTI_OK)
        return;
    if (*count == TT_FUNCTION_TENSORS) {
        tu_fail(TUTTI_ERROR_LIMIT, "%s: more than %d tensors", who, TT_FUNCTION_TENSORS);
        return;
    }
    list[(*count)++] = tensor;
}

void tt_mark_dirty(tt_function_context *context, tt_tensor *tensor) {
    mark("mark_dirty", context->dirty, &context->dirty_count, tensor);
}

void tt_mark_non_differentiable(tt_function_context *context, tt_tensor *tensor) {
    mark("mark_non_differentiable", context->constant, &context->constant_count, tensor);
}

bool tt_save_for_backward(tt_function_context *context, tt_tensor_list tensors) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (context->node != NULL || context->saved || tensors.count > TT_FUNCTION_TENSORS) {
        tu_fail(TUTTI_ERROR_STATE, "save_for_backward: may be called once, in forward, with at most %d tensors",
                TT_FUNCTION_TENSORS);
        return false;
    }
    context->saved = true;
    for (size_t i = 0; i < tensors.count; i++) {
        if (tensors.at[i] != NULL &&
            tu_pending_take(tu_tensor_check("save_for_backward", "tensors", tensors.at[i])) != TUTTI_OK)
            return false;
        context->to_save[context->save_count++] = tu_tensor_hold(tensors.at[i]);
    }
    return true;
}

tt_tensor_list tt_saved_tensors(tt_function_context *context) {
    tt_tensor_list none = { 0, tu_nothing };
    tu_node *node = context->node;
    if (tu_self()->pending != TUTTI_OK)
        return none;
    if (node == NULL) {
        tu_fail(TUTTI_ERROR_STATE, "saved_tensors: nothing is saved before backward");
        return none;
    }
    tt_tensor **list = tu_scope_memory(((size_t)node->saved_count + 1) * sizeof *list);
    for (int i = 0; list != NULL && i < node->saved_count; i++)
        list[i] = tu_saved_get(node, &node->saved[i]);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of((size_t)node->saved_count, list) : none;
}

/* ---- backward ---- */

static tt_tensor *zeros_of(const tu_shape *shape) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    return tt_zeros(tt_dims_of(shape->ndim, shape->sizes), shape->dtype, &options);
}

static void function_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tt_function_context *context = node->detail;
    tt_tensor *given[TT_FUNCTION_TENSORS];
    for (int i = 0; i < node->output_count; i++)
        given[i] = grads[i] != NULL || !context->materialize ? grads[i] : zeros_of(&node->outputs[i]);
    if (tu_self()->pending != TUTTI_OK)
        return;
    int count = context->function.backward(context, tt_tensors_of((size_t)node->output_count, given), results);
    if (tu_self()->pending == TUTTI_OK && count != node->input_count)
        tu_fail(TUTTI_ERROR_ARGUMENT, "function %s returned an incorrect number of gradients (expected %d, got %d)",
                node->name, node->input_count, count);
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(tu_tensors_check(node->name, "gradient", results, (size_t)node->input_count));
}

static void function_describe(const tu_node *node, tu_collector *collector) {
    const tt_function_context *context = node->detail;
    collector->word(collector, (uintptr_t)context->function.backward);
    collector->word(collector, (uintptr_t)context->user);
    collector->word(collector, context->materialize);
}

static void function_release(tu_node *node) {
    context_free(node->detail);
}

/* ---- apply ---- */

static bool in_list(tt_tensor *const *list, size_t count, const tt_tensor *x) {
    for (size_t i = 0; i < count; i++)
        if (list[i] == x)
            return true;
    return false;
}

static bool differentiable(const tt_function_context *context, const tt_tensor *x) {
    return (tu_is_float(x->dtype) || tu_is_complex(x->dtype)) &&
           !in_list(context->constant, (size_t)context->constant_count, x);
}

static bool is_dirty(const tt_function_context *context, const tt_tensor *x) {
    return in_list(context->dirty, (size_t)context->dirty_count, x);
}

static int place_in(tt_tensor *const *list, size_t count, const tt_tensor *x) {
    for (size_t i = 0; i < count; i++)
        if (list[i] == x)
            return (int)i;
    return -1;
}

/* An input that forward returned unchanged comes back as a view of itself; detached, as a tensor of its own on the same
 * memory. *output is held, and replaced. */
static tutti_status pass_through(tt_tensor **output, bool detached) {
    tt_tensor *input = *output;
    tu_shape shape = tu_shape_of(input);
    tt_tensor *alias = tu_tensor_alias(input, &shape);
    if (alias == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = detached ? TUTTI_OK : tu_history_note_view(input, alias);
    tu_tensor_drop(input);
    *output = alias;
    return status;
}

/* Gives one output its history. */
static tutti_status attach(tt_function_context *context, tu_node *node, tt_tensor_list inputs, int index,
                           tt_tensor **output) {
    tt_tensor *x = *output;
    int input = place_in(inputs.at, inputs.count, x);
    node->outputs[index] = tu_shape_of(x);
    if (!differentiable(context, x))
        return TUTTI_OK;
    if (is_dirty(context, x))
        return tu_history_rebase(x, node, input, index);
    tutti_status status = input >= 0 ? pass_through(output, false) : TUTTI_OK;
    if (status != TUTTI_OK)
        return status;
    x = *output;
    if (tu_base_of(x) != NULL)
        tu_history_at(x)->mark = TU_MARK_CUSTOM;
    return tu_history_set(x, node, index);
}

static tutti_status check_dirty(const tt_function_context *context, tt_tensor_list inputs, tt_tensor_list outputs) {
    const char *name = context->function.name;
    for (int i = 0; i < context->dirty_count; i++) {
        tt_tensor *x = context->dirty[i];
        tutti_status status = tu_history_check_write(name, x);
        if (status != TUTTI_OK)
            return status;
        if (!in_list(inputs.at, inputs.count, x))
            return tu_error(TUTTI_ERROR_ARGUMENT, "function %s: %s was marked dirty and is none of its inputs", name,
                            tu_describe(x));
        if (!in_list(outputs.at, outputs.count, x))
            return tu_error(TUTTI_ERROR_STATE, "function %s: %s was marked dirty and must be returned", name,
                            tu_describe(x));
        if (tu_base_of(x) != NULL && outputs.count > 1)
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "function %s: %s is a view that was changed in place, so it must be the only result, and "
                            "there are %zu. Clone it before, or split the function",
                            name, tu_describe(x), outputs.count);
    }
    return TUTTI_OK;
}

/* Which output a tensor to save is. An input that was passed through is saved as the input. */
static int output_to_save(const tt_function_context *context, tt_tensor_list inputs, tt_tensor_list outputs,
                          const tt_tensor *x) {
    if (x == NULL || (in_list(inputs.at, inputs.count, x) && !is_dirty(context, x)))
        return TU_NO_OUTPUT;
    return place_in(outputs.at, outputs.count, x);
}

static tutti_status save_all(const tt_function_context *context, tu_node *node, tt_tensor_list inputs,
                             tt_tensor_list outputs) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < context->save_count && status == TUTTI_OK; i++) {
        tt_tensor *x = context->to_save[i];
        status = tu_save(&node->saved[i], x, output_to_save(context, inputs, outputs, x), 0);
    }
    return status;
}

/* *taken: the context is a node's, and gone with it where no result needs the node. */
static tutti_status record(tt_function_context *context, tt_tensor_list inputs, int count, tt_tensor **outputs,
                           bool *taken) {
    tutti_status status = check_dirty(context, inputs, tt_tensors_of((size_t)count, outputs));
    if (status != TUTTI_OK)
        return status;
    tu_node *node = tu_node_new(context->function.name, (int)inputs.count, count, context->save_count);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = function_run;
    node->sees_nothing = true;
    for (size_t i = 0; i < inputs.count && status == TUTTI_OK; i++) {
        if (inputs.at[i] == NULL) {
            tu_shape_absent(&node->inputs[i]);
            continue;
        }
        node->inputs[i] = tu_shape_of(inputs.at[i]);
        node->needs[i] = context->needs[i];
        status = tu_edge_to(inputs.at[i], &node->next[i]);
    }
    if (status == TUTTI_OK)
        status = save_all(context, node, inputs, tt_tensors_of((size_t)count, outputs));
    for (int i = 0; i < count && status == TUTTI_OK; i++)
        status = attach(context, node, inputs, i, &outputs[i]);
    if (status == TUTTI_OK) {
        node->detail = context;
        node->release = function_release;
        node->describe = function_describe;
        context->node = node;
        *taken = true;
        for (int i = 0; i < context->save_count; i++) {
            tu_tensor_drop(context->to_save[i]);
            context->to_save[i] = NULL;
        }
        context->save_count = 0;
    }
    tu_node_drop(node);
    return status;
}

/* Inputs as forward wants them; `lent` has room for them. */
static tt_tensor_list symmetric_inputs(const tt_function *function, tt_tensor_list inputs, tt_tensor **lent) {
    if (function->symmetric == 0)
        return inputs;
    for (size_t i = 0; i < inputs.count; i++) {
        bool wanted = function->symmetric >> i & 1 && inputs.at[i] != NULL;
        lent[i] = wanted ? tu_symm_input(inputs.at[i], function->group) : inputs.at[i];
    }
    return tt_tensors_of(inputs.count, lent);
}

/* Runs forward without recording, in a scope of its own; its results come out held. */
static int run_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *lent[TT_FUNCTION_TENSORS];
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    tt_tensor_list given = symmetric_inputs(&context->function, inputs, lent);
    int count = tu_self()->pending == TUTTI_OK ? context->function.forward(context, given, outputs) : -1;
    if (tu_self()->pending == TUTTI_OK && (count < 0 || count > TT_FUNCTION_TENSORS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "function %s: forward returned %d results; 0 to %d are possible",
                context->function.name, count, TT_FUNCTION_TENSORS);
    for (int i = 0; tu_self()->pending == TUTTI_OK && i < count; i++)
        if (tu_pending_take(tu_tensor_check(context->function.name, "result", outputs[i])) == TUTTI_OK)
            tu_tensor_hold(outputs[i]);
        else
            for (int k = 0; k < i; k++)
                tu_tensor_drop(outputs[k]);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return tu_self()->pending == TUTTI_OK ? count : -1;
}

bool tu_stand_in_all(tt_tensor_list *list, tt_tensor **few) {
    if (!tu_is_capturing() || list->count > TT_FUNCTION_TENSORS)
        return true;
    for (size_t i = 0; i < list->count; i++) {
        few[i] = list->at[i];
        if (few[i] == NULL || few[i]->magic != TU_MAGIC_ALIVE) /* what comes next names it */
            continue;
        if ((few[i] = tu_stand_in(few[i])) == NULL) {
            tu_pending_take(TUTTI_ERROR_MEMORY);
            return false;
        }
    }
    list->at = few;
    return true;
}

static tutti_status check_symmetric(const tt_function *function, size_t count) {
    if (function->group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "apply: function %s wants inputs in symmetric memory, and has no group",
                        function->name);
    if (count < 64 && function->symmetric >> count != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "apply: function %s wants an input in symmetric memory that there is not: there are %zu",
                        function->name, count);
    return TUTTI_OK;
}

static tt_function_context *context_new(const tt_function *function, tt_tensor_list inputs, void *user, bool *wants) {
    tt_function full = { .size = sizeof full };
    tutti_status status = tu_options_copy("tt_function", function, &full, sizeof full);
    if (status == TUTTI_OK && (function == NULL || full.forward == NULL || full.backward == NULL || full.name == NULL))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "apply: a function needs a name, forward and backward");
    if (status == TUTTI_OK && inputs.count > TT_FUNCTION_TENSORS)
        status = tu_error(TUTTI_ERROR_LIMIT, "apply: %zu inputs; at most %d are possible", inputs.count,
                          TT_FUNCTION_TENSORS);
    if (status == TUTTI_OK && full.symmetric != 0)
        status = check_symmetric(&full, inputs.count);
    if (status == TUTTI_OK)
        status = tu_tensors_check(full.name, "input", inputs.at, inputs.count);
    tt_function_context *context = status == TUTTI_OK ? calloc(1, sizeof *context) : NULL;
    if (context == NULL) {
        tu_pending_take(status != TUTTI_OK ? status : tu_error_memory("a function's context", sizeof *context));
        return NULL;
    }
    *context =
        (tt_function_context){ .function = full, .user = user, .materialize = true, .input_count = (int)inputs.count };
    *wants = false;
    for (size_t i = 0; i < inputs.count; i++) {
        context->needs[i] = inputs.at[i] != NULL && tt_grad_enabled() && tt_requires_grad(inputs.at[i]);
        *wants = *wants || context->needs[i];
    }
    return context;
}

tt_tensor_list tt_apply(const tt_function *function, tt_tensor_list inputs, void *user) {
    tt_tensor_list none = { 0, tu_nothing };
    bool wants, taken = false;
    tt_tensor *few[TT_FUNCTION_TENSORS];
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() || !tu_stand_in_all(&inputs, few))
        return none;
    tt_function_context *context = context_new(function, inputs, user, &wants);
    if (context == NULL)
        return none;
    tt_tensor **outputs = tu_scope_memory(TT_FUNCTION_TENSORS * sizeof *outputs);
    int count = outputs == NULL ? -1 : run_forward(context, inputs, outputs);
    tutti_status status = count < 0 ? tu_self()->pending : TUTTI_OK;
    if (count >= 0 && wants)
        status = record(context, inputs, count, outputs, &taken);
    for (int i = 0; i < count && !wants && status == TUTTI_OK; i++)
        if (in_list(inputs.at, inputs.count, outputs[i]) && !is_dirty(context, outputs[i]))
            status = pass_through(&outputs[i], tt_requires_grad(outputs[i])); /* its history ends here */
    if (!taken)
        context_free(context);
    for (int i = 0; i < count; i++)
        outputs[i] = tu_scope_own(outputs[i]);
    tu_pending_take(status);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of((size_t)count, outputs) : none;
}

/* ---- the wrapper of module hooks ---- */

static int pass_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    int count = 0;
    for (size_t i = 0; i < inputs.count; i++) {
        if (!tt_requires_grad(inputs.at[i]))
            tt_mark_non_differentiable(context, inputs.at[i]);
        outputs[count++] = inputs.at[i];
    }
    tt_materialize_grads(context, false);
    return count;
}

static int pass_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)context;
    memcpy(results, grads.at, grads.count * sizeof *results);
    return (int)grads.count;
}

tt_tensor_list tu_wrap_together(const char *name, tt_tensor_list list, tu_node **node) {
    bool wants = false;
    tt_tensor *present[TT_FUNCTION_TENSORS];
    size_t count = 0;
    *node = NULL;
    for (size_t i = 0; i < list.count && i < TT_FUNCTION_TENSORS; i++) {
        if (list.at[i] == NULL)
            continue;
        wants = wants || (tt_grad_enabled() && tt_requires_grad(list.at[i]));
        present[count++] = list.at[i];
    }
    if (!wants || tu_self()->pending != TUTTI_OK)
        return list;
    tt_function function = {
        .size = sizeof function, .name = name, .forward = pass_forward, .backward = pass_backward
    };
    tt_tensor_list wrapped = tt_apply(&function, tt_tensors_of(count, present), NULL);
    tt_tensor **result = tu_scope_memory(list.count * sizeof *result);
    if (wrapped.count != count || result == NULL)
        return (tt_tensor_list){ 0, tu_nothing };
    for (size_t i = 0, at = 0; i < list.count; i++) {
        result[i] = list.at[i] == NULL ? NULL : wrapped.at[at++];
        if (result[i] != NULL && result[i]->history != NULL && tu_history_at(result[i])->node != NULL &&
            result[i]->flags & TU_REQUIRES_GRAD)
            *node = tu_history_at(result[i])->node;
    }
    return tt_tensors_of(list.count, result);
}
