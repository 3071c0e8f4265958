/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward hooks of modules. One record per call travels with two wrapper nodes: around the outputs, where the
 * gradients enter the module, and around the inputs, where they leave it.
 */
#include <stdlib.h>

#include "autograd/function.h"
#include "nn/module.h"

struct tu_backward_hooks {
    int references; /* the call's, and one per wrapper node */
    tt_module *module;
    tu_hook_list pre, post; /* as they were at the forward */
    size_t input_count, output_count;
    bool has_inputs; /* there is a wrapper around the inputs */
    bool arrived;    /* the gradients of the outputs, held, are in `grads` */
    tt_tensor *grads[TT_FUNCTION_TENSORS];
    bool present_in[TT_FUNCTION_TENSORS], present_out[TT_FUNCTION_TENSORS]; /* which arguments are tensors */
};

static void forget(tu_backward_hooks *hooks) {
    for (size_t i = 0; i < hooks->output_count; i++) {
        tu_tensor_drop(hooks->grads[i]);
        hooks->grads[i] = NULL;
    }
    hooks->arrived = false;
}

static void drop(void *user) {
    tu_backward_hooks *hooks = user;
    if (--hooks->references > 0)
        return;
    forget(hooks);
    tu_hook_list_free(&hooks->pre);
    tu_hook_list_free(&hooks->post);
    tt_module_release(hooks->module);
    free(hooks);
}

/* Spreads the gradients of a wrapper, which knows tensors only, over all positions; and back. */
static void spread(const bool *present, size_t count, tt_tensor *const *from, tt_tensor **to) {
    for (size_t i = 0, at = 0; i < count; i++)
        to[i] = present[i] ? from[at++] : NULL;
}
static void collect(const bool *present, size_t count, tt_tensor *const *from, tt_tensor **to) {
    for (size_t i = 0, at = 0; i < count; i++)
        if (present[i])
            to[at++] = from[i];
}

static void run_post(tu_backward_hooks *hooks, tt_tensor **grad_inputs) {
    for (int i = 0; i < tu_hook_count(&hooks->post) && tu_self()->pending == TUTTI_OK; i++) {
        tt_hook *hook = hooks->post.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        ((tt_backward_hook *)hook->function)(&context, hooks->module, hooks->input_count, grad_inputs,
                                             tt_tensors_of(hooks->output_count, hooks->grads));
        for (size_t k = 0; k < hooks->input_count; k++)
            tt_scope_return(grad_inputs[k]);
        tu_scope_leave(&scope);
    }
}

/* After the wrapper of the outputs ran: `results` go on into the module. */
static void entered(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                    tt_tensor *const *grads) {
    tu_backward_hooks *hooks = context->user;
    tt_tensor *all[TT_FUNCTION_TENSORS];
    (void)result_count, (void)grad_count, (void)grads;
    spread(hooks->present_out, hooks->output_count, results, all);
    for (int i = 0; i < tu_hook_count(&hooks->pre) && tu_self()->pending == TUTTI_OK; i++) {
        tt_hook *hook = hooks->pre.at[i];
        tt_hook_context own = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        ((tt_backward_pre_hook *)hook->function)(&own, hooks->module, hooks->output_count, all);
        for (size_t k = 0; k < hooks->output_count; k++)
            tt_scope_return(all[k]);
        tu_scope_leave(&scope);
    }
    if (tu_self()->pending != TUTTI_OK)
        return;
    forget(hooks);
    for (size_t i = 0; i < hooks->output_count; i++)
        hooks->grads[i] = tu_tensor_hold(all[i]);
    hooks->arrived = true;
    collect(hooks->present_out, hooks->output_count, all, results);
    if (hooks->has_inputs)
        return;
    /* No input requires grad: the hooks after run here, and have nothing to replace. */
    tt_tensor *none[TT_FUNCTION_TENSORS] = { NULL };
    run_post(hooks, none);
    for (size_t i = 0; i < hooks->input_count && tu_self()->pending == TUTTI_OK; i++)
        if (none[i] != NULL)
            tu_fail(TUTTI_ERROR_STATE,
                    "a backward hook of module %s returned a gradient for input %zu, but no input requires grad",
                    hooks->module->type.name, i);
    forget(hooks);
}

/* After the wrapper of the inputs ran: `results` leave the module. */
static void left(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                 tt_tensor *const *grads) {
    tu_backward_hooks *hooks = context->user;
    tt_tensor *all[TT_FUNCTION_TENSORS];
    (void)result_count, (void)grad_count, (void)grads;
    if (!hooks->arrived)
        return; /* a gradient that did not come through the outputs */
    spread(hooks->present_in, hooks->input_count, results, all);
    run_post(hooks, all);
    if (tu_self()->pending == TUTTI_OK)
        collect(hooks->present_in, hooks->input_count, all, results);
    forget(hooks);
}

static void release_module(void *module) {
    tt_module_release(module);
}

/* The record of a call is another one each time; what it stands for is the module and its hooks. */
static void describe(void *user, tu_collector *collector) {
    tu_backward_hooks *hooks = user;
    collector->word(collector, (uintptr_t)hooks->module);
    collector->keep(collector, tt_module_keep(hooks->module), release_module);
    collector->word(collector, hooks->has_inputs);
    for (size_t i = 0; i < hooks->input_count; i++)
        collector->word(collector, hooks->present_in[i]);
    for (size_t i = 0; i < hooks->output_count; i++)
        collector->word(collector, hooks->present_out[i]);
    tu_hooks_describe(&hooks->pre, collector);
    tu_hooks_describe(&hooks->post, collector);
}

static void hang(tu_node *node, tu_backward_hooks *hooks, tt_node_post_hook *function) {
    tu_node_hooks *list = tu_node_hooks_of(node);
    tt_hook *handle = NULL;
    tutti_status status = list == NULL ? TUTTI_ERROR_MEMORY
                                       : tu_hook_add(&list->post, (void (*)(void))function, hooks,
                                                     TUTTI_OPTIONS(tt_hook_options, ), &handle);
    if (tu_pending_take(status) != TUTTI_OK)
        return;
    handle->release = drop;
    handle->describe = describe;
    hooks->references++;
    tt_hook_release(&handle);
}

tt_tensor_list tu_wrap_inputs(tt_module *module, tt_tensor_list inputs, tu_backward_hooks **made) {
    *made = NULL;
    if (tu_hook_count(&module->backward_pre) + tu_hook_count(&module->backward) == 0 || !tt_grad_enabled() ||
        tu_self()->pending != TUTTI_OK)
        return inputs;
    tu_backward_hooks *hooks = calloc(1, sizeof *hooks);
    if (hooks == NULL) {
        tu_pending_take(tu_error_memory("a module's backward hooks", sizeof *hooks));
        return inputs;
    }
    hooks->references = 1;
    hooks->module = tt_module_keep(module);
    hooks->input_count = inputs.count;
    for (size_t i = 0; i < inputs.count; i++)
        hooks->present_in[i] = inputs.at[i] != NULL;
    *made = hooks;
    if (tu_pending_take(tu_hooks_to_run(&module->backward_pre, &hooks->pre)) != TUTTI_OK ||
        tu_pending_take(tu_hooks_to_run(&module->backward, &hooks->post)) != TUTTI_OK)
        return inputs;
    tu_node *node;
    tt_tensor_list wrapped = tu_wrap_together("module_inputs", inputs, &node);
    if (node != NULL) {
        hooks->has_inputs = true;
        hang(node, hooks, left);
    }
    return wrapped;
}

tt_tensor_list tu_wrap_outputs(tt_tensor_list outputs, tu_backward_hooks *hooks) {
    if (hooks == NULL)
        return outputs;
    tt_tensor_list wrapped = outputs;
    if (tu_self()->pending == TUTTI_OK) {
        tu_node *node;
        hooks->output_count = outputs.count;
        for (size_t i = 0; i < outputs.count; i++)
            hooks->present_out[i] = outputs.at[i] != NULL;
        wrapped = tu_wrap_together("module_outputs", outputs, &node);
        if (node != NULL)
            hang(node, hooks, entered);
    }
    drop(hooks);
    return wrapped;
}
