/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: their parameters, children, hooks and calls.
 */
#include "nn/module.h"

#include <stdlib.h>
#include <string.h>

static bool usable(const char *who, const tt_module *module) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (module == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: module is NULL", who);
    return module != NULL;
}

/* ---- life ---- */

tt_module *tt_module_new(const tt_module_type *type, void *user) {
    tt_module_type full = { .size = sizeof full };
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_module_type", type, &full, sizeof full)) != TUTTI_OK)
        return NULL;
    if (full.forward == NULL || full.name == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "module_new: a type needs a name and a forward");
        return NULL;
    }
    tt_module *module = calloc(1, sizeof *module);
    if (module == NULL) {
        tu_pending_take(tu_error_memory("a module", sizeof *module));
        return NULL;
    }
    atomic_init(&module->references, 1);
    module->type = full;
    module->user = user;
    if (tu_pending_take(tu_module_renew_paths(module)) != TUTTI_OK) {
        free(module);
        return NULL;
    }
    return module;
}

tt_module *tt_module_keep(tt_module *module) {
    if (module != NULL)
        atomic_fetch_add_explicit(&module->references, 1, memory_order_relaxed);
    return module;
}

void tt_module_release(tt_module *module) {
    if (module == NULL || atomic_fetch_sub_explicit(&module->references, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < module->slot_count; i++) {
        tu_tensor_drop(module->slots[i].parameter);
        free(module->slots[i].name);
    }
    for (int i = 0; i < module->child_count; i++) {
        if (module->children[i].module->parent == module)
            module->children[i].module->parent = NULL;
        tt_module_release(module->children[i].module);
        free(module->children[i].name);
    }
    tu_hook_list_free(&module->forward_pre);
    tu_hook_list_free(&module->forward);
    tu_hook_list_free(&module->forward_always);
    tu_hook_list_free(&module->backward_pre);
    tu_hook_list_free(&module->backward);
    free(module->slots);
    free(module->children);
    if (module->type.release != NULL)
        module->type.release(module->user);
    tu_place_drop(module->place);
    free(module);
}

void *tt_module_user(const tt_module *module) {
    return module != NULL ? module->user : NULL;
}

const char *tt_module_name(const tt_module *module) {
    return module != NULL ? module->type.name : "";
}

/* ---- parameters ---- */

static tu_slot *find_slot(const tt_module *module, const char *name) {
    for (int i = 0; i < module->slot_count; i++)
        if (strcmp(module->slots[i].name, name) == 0)
            return &module->slots[i];
    return NULL;
}

static tu_slot *add_slot(tt_module *module, const char *name) {
    tu_slot *slots = realloc(module->slots, ((size_t)module->slot_count + 1) * sizeof *slots);
    if (slots != NULL) {
        module->slots = slots;
        char *copy = strdup(name);
        if (copy != NULL) {
            slots[module->slot_count] = (tu_slot){ copy, NULL };
            // cppcheck-suppress memleak // the slot owns the copy
            return &slots[module->slot_count++];
        }
    }
    tu_pending_take(tu_error_memory("a parameter's slot", sizeof *slots));
    return NULL;
}

bool tt_module_set_parameter(tt_module *module, const char *name, tt_tensor *parameter) {
    if (!usable("module_set_parameter", module))
        return false;
    if (name == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "module_set_parameter: name is NULL");
        return false;
    }
    if (parameter != NULL &&
        tu_pending_take(tu_tensor_check("module_set_parameter", "parameter", parameter)) != TUTTI_OK)
        return false;
    tu_slot *slot = find_slot(module, name);
    if (slot == NULL && (slot = add_slot(module, name)) == NULL)
        return false;
    tu_tensor_hold(parameter);
    tu_tensor_drop(slot->parameter);
    slot->parameter = parameter;
    return tu_pending_take(tu_module_name_parameter(module, slot)) == TUTTI_OK;
}

tt_tensor *tt_module_parameter(const tt_module *module, const char *name) {
    if (!usable("module_parameter", module))
        return NULL;
    tu_slot *slot = name != NULL ? find_slot(module, name) : NULL;
    if (slot == NULL) {
        tu_fail(TUTTI_ERROR_NOT_FOUND, "module_parameter: %s has no parameter \"%s\"", module->place->text,
                name != NULL ? name : "(NULL)");
        return NULL;
    }
    return slot->parameter == NULL ? NULL : tu_scope_own(tu_tensor_hold(slot->parameter));
}

static tt_module *find_child(const tt_module *module, const char *name) {
    for (int i = 0; i < module->child_count; i++)
        if (strcmp(module->children[i].name, name) == 0)
            return module->children[i].module;
    return NULL;
}

static bool is_below(const tt_module *module, const tt_module *sought) {
    if (module == sought)
        return true;
    for (int i = 0; i < module->child_count; i++)
        if (is_below(module->children[i].module, sought))
            return true;
    return false;
}

static tutti_status add_child(tt_module *module, const char *name, tt_module *child) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "module_add_child: name is NULL");
    if (find_child(module, name) != NULL || find_slot(module, name) != NULL)
        return tu_error(TUTTI_ERROR_EXISTS, "module_add_child: %s has a %s \"%s\" already", module->place->text,
                        find_child(module, name) != NULL ? "child" : "parameter", name);
    if (is_below(child, module))
        return tu_error(TUTTI_ERROR_ARGUMENT, "module_add_child: %s is, or holds, the module that \"%s\" would be in",
                        child->place->text, name);
    tu_child *children = realloc(module->children, ((size_t)module->child_count + 1) * sizeof *children);
    if (children == NULL)
        return tu_error_memory("a child", sizeof *children);
    module->children = children;
    char *copy = strdup(name);
    if (copy == NULL)
        return tu_error_memory("a child", strlen(name) + 1);
    children[module->child_count++] = (tu_child){ copy, tt_module_keep(child) };
    child->parent = module;
    // cppcheck-suppress memleak // the child's entry owns the copy
    return tu_module_renew_paths(child);
}

bool tt_module_add_child(tt_module *module, const char *name, tt_module *child) {
    bool added = usable("module_add_child", module) && usable("module_add_child", child) &&
                 tu_pending_take(add_child(module, name, child)) == TUTTI_OK;
    tt_module_release(child);
    return added;
}

tt_module *tt_module_child(const tt_module *module, const char *name) {
    if (!usable("module_child", module))
        return NULL;
    tt_module *child = name != NULL ? find_child(module, name) : NULL;
    if (child == NULL)
        tu_fail(TUTTI_ERROR_NOT_FOUND, "module_child: %s has no child \"%s\"", module->place->text,
                name != NULL ? name : "(NULL)");
    return child;
}

static size_t count_parameters(const tt_module *module) {
    size_t count = 0;
    for (int i = 0; i < module->slot_count; i++)
        count += module->slots[i].parameter != NULL;
    for (int i = 0; i < module->child_count; i++)
        count += count_parameters(module->children[i].module);
    return count;
}

/* Parameters as they are listed: each once, though several modules may share one. */
typedef struct listing {
    size_t count, table_size; /* a power of two, more than twice the number of slots */
    tt_tensor **tensors;
    const char **names;
    tt_tensor **table; /* of those that are listed, by address */
} listing;

static bool is_new(listing *list, tt_tensor *parameter) {
    size_t at = ((uintptr_t)parameter >> 6) & (list->table_size - 1);
    for (; list->table[at] != NULL; at = (at + 1) & (list->table_size - 1))
        if (list->table[at] == parameter)
            return false;
    list->table[at] = parameter;
    return true;
}

static const char *joined(const char *prefix, const char *name, const char *end) {
    size_t bytes = strlen(prefix) + strlen(name) + strlen(end) + 1;
    char *text = tu_scope_memory(bytes);
    if (text != NULL)
        snprintf(text, bytes, "%s%s%s", prefix, name, end);
    return text;
}

static void list_parameters(const tt_module *module, const char *prefix, listing *list) {
    for (int i = 0; i < module->slot_count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_slot *slot = &module->slots[i];
        if (slot->parameter == NULL || !is_new(list, slot->parameter))
            continue;
        list->names[list->count] = joined(prefix, slot->name, "");
        list->tensors[list->count++] = tu_scope_own(tu_tensor_hold(slot->parameter));
    }
    for (int i = 0; i < module->child_count && tu_self()->pending == TUTTI_OK; i++) {
        const char *below = joined(prefix, module->children[i].name, ".");
        if (below != NULL)
            list_parameters(module->children[i].module, below, list);
    }
}

tt_named_list tt_module_parameters(const tt_module *module) {
    tt_named_list none = { 0, NULL, NULL };
    if (!usable("module_parameters", module))
        return none;
    size_t most = count_parameters(module);
    listing list = { .table_size = 16 };
    while (list.table_size <= 2 * most)
        list.table_size *= 2;
    list.tensors = tu_scope_memory((most + 1) * sizeof *list.tensors);
    list.names = tu_scope_memory((most + 1) * sizeof *list.names);
    list.table = tu_scope_memory(list.table_size * sizeof *list.table);
    if (list.tensors == NULL || list.names == NULL || list.table == NULL)
        return none;
    memset(list.table, 0, list.table_size * sizeof *list.table);
    list_parameters(module, "", &list);
    return tu_self()->pending == TUTTI_OK ? (tt_named_list){ list.count, list.tensors, list.names } : none;
}

void tt_module_zero_grad(tt_module *module) {
    tt_scope scope = tt_scope_open();
    tt_named_list parameters = tt_module_parameters(module);
    for (size_t i = 0; i < parameters.count; i++)
        tt_set_grad(parameters.at[i], NULL);
    tu_scope_leave(&scope);
}

/* ---- hooks ---- */

static bool add_hook(const char *who, tt_module *module, tu_hook_list *list, void (*function)(void), void *user,
                     const tt_hook_options *options, tt_hook **hook) {
    tt_hook_options full;
    if (!usable(who, module) || !tu_hook_options_take(who, options, false, &full))
        return false;
    return tu_pending_take(tu_hook_add(list, function, user, &full, hook)) == TUTTI_OK;
}

bool tt_hook_forward_pre(tt_module *module, tt_forward_pre_hook *function, void *user, const tt_hook_options *options,
                         tt_hook **hook) {
    return add_hook("hook_forward_pre", module, module != NULL ? &module->forward_pre : NULL, (void (*)(void))function,
                    user, options, hook);
}

bool tt_hook_forward(tt_module *module, tt_forward_hook *function, void *user, const tt_hook_options *options,
                     tt_hook **hook) {
    tt_hook_options full;
    if (!usable("hook_forward", module) || !tu_hook_options_take("hook_forward", options, true, &full))
        return false;
    tu_hook_list *list = full.always ? &module->forward_always : &module->forward;
    return tu_pending_take(tu_hook_add(list, (void (*)(void))function, user, &full, hook)) == TUTTI_OK;
}

bool tt_hook_backward_pre(tt_module *module, tt_backward_pre_hook *function, void *user, const tt_hook_options *options,
                          tt_hook **hook) {
    return add_hook("hook_backward_pre", module, module != NULL ? &module->backward_pre : NULL,
                    (void (*)(void))function, user, options, hook);
}

bool tt_hook_backward(tt_module *module, tt_backward_hook *function, void *user, const tt_hook_options *options,
                      tt_hook **hook) {
    return add_hook("hook_backward", module, module != NULL ? &module->backward : NULL, (void (*)(void))function, user,
                    options, hook);
}

/* ---- calling ---- */

/* Each hook runs in a scope of its own; what it put in place of an entry moves to the caller's. */
static void run_forward_pre(tt_module *module, size_t count, tt_tensor **inputs) {
    tu_hook_list snapshot;
    tu_pending_take(tu_hook_list_snapshot(&module->forward_pre, &snapshot));
    for (int i = 0; i < snapshot.count && tu_self()->pending == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        ((tt_forward_pre_hook *)hook->function)(&context, module, count, inputs);
        for (size_t k = 0; k < count; k++)
            tt_scope_return(inputs[k]);
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
}

static void run_forward_hooks(tu_hook_list *list, tt_module *module, tt_tensor_list inputs, size_t count,
                              tt_tensor **outputs) {
    tu_hook_list snapshot;
    tu_pending_take(tu_hook_list_snapshot(list, &snapshot));
    for (int i = 0; i < snapshot.count && tu_self()->pending == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        ((tt_forward_hook *)hook->function)(&context, module, inputs, count, outputs);
        for (size_t k = 0; k < count; k++)
            tt_scope_return(outputs[k]);
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
}

/* Hooks that run in any case do so with the error set aside; it comes back afterwards. */
static void run_always(tt_module *module, tt_tensor_list inputs, size_t count, tt_tensor **outputs) {
    tu_pending_copy error;
    if (tu_hook_count(&module->forward_always) == 0)
        return;
    tu_pending_save(&error);
    run_forward_hooks(&module->forward_always, module, inputs, error.status == TUTTI_OK ? count : 0, outputs);
    tu_pending_restore(&error);
}

/* Forward with its hooks; what it returns belongs to the caller's scope. */
static tt_tensor_list call_with_hooks(tt_module *module, tt_tensor_list inputs, tt_tensor **given,
                                      tt_tensor **outputs) {
    tu_backward_hooks *hooks = NULL;
    if (inputs.count > 0)
        memcpy(given, inputs.at, inputs.count * sizeof *given);
    run_forward_pre(module, inputs.count, given);
    tt_tensor_list wrapped = tu_wrap_inputs(module, tt_tensors_of(inputs.count, given), &hooks);
    int count = tu_self()->pending == TUTTI_OK ? module->type.forward(module, wrapped, outputs) : 0;
    if (tu_self()->pending == TUTTI_OK && (count < 0 || count > TT_FUNCTION_TENSORS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "forward returned %d results", count);
    if (tu_self()->pending == TUTTI_OK)
        run_forward_hooks(&module->forward, module, wrapped, (size_t)count, outputs);
    run_always(module, wrapped, (size_t)(count > 0 ? count : 0), outputs);
    return tu_wrap_outputs(tt_tensors_of((size_t)(count > 0 ? count : 0), outputs), hooks);
}

/* The innermost module in which an error came up names itself. */
static void blame(const tt_module *module) {
    tutti_status status = tt_error_show();
    if (strstr(tutti_error_message(), ", in module ") != NULL)
        return;
    tu_error_append(", in %s", module->place->text);
    tt_error_clear();
    tu_pending_take(status);
}

tt_tensor_list tt_module_call_all(tt_module *module, tt_tensor_list inputs) {
    tt_tensor_list none = { 0, NULL };
    tu_thread *self = tu_self();
    if (!usable("module_call", module) || !tu_scope_check())
        return none;
    if (inputs.count > TT_FUNCTION_TENSORS) {
        tu_fail(TUTTI_ERROR_LIMIT, "module_call: %zu inputs; at most %d are possible, in %s", inputs.count,
                TT_FUNCTION_TENSORS, module->place->text);
        return none;
    }
    tt_tensor **given = tu_scope_memory((inputs.count + 1) * sizeof *given);
    tt_tensor **outputs = tu_scope_memory(TT_FUNCTION_TENSORS * sizeof *outputs);
    if (given == NULL || outputs == NULL)
        return none;
    tu_place *outer = self->place, *place = tu_place_hold(module->place); /* a hook may move the module */
    self->place = place;
    tt_tensor_list result = call_with_hooks(module, inputs, given, outputs);
    self->place = outer;
    tu_place_drop(place);
    if (self->pending == TUTTI_OK)
        return result;
    blame(module);
    return none;
}

tt_tensor *tt_module_call(tt_module *module, tt_tensor *x) {
    tt_tensor_list outputs = tt_module_call_all(module, tt_tensors_of(1, &x));
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (outputs.count != 1) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "module_call: %s returned %zu results; use tt_module_call_all",
                module->place->text, outputs.count);
        return NULL;
    }
    return outputs.at[0];
}
