/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: their parameters, children, hooks and calls.
 */
#include "nn/module.h"

#include <stdlib.h>
#include <string.h>

#include "autograd/function.h"

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
        tu_tensor_drop(module->slots[i].tensor);
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

/* ---- parameters and buffers ---- */

static tu_module_slot *find_slot(const tt_module *module, const char *name) {
    for (int i = 0; i < module->slot_count; i++)
        if (strcmp(module->slots[i].name, name) == 0)
            return &module->slots[i];
    return NULL;
}

static tt_module *find_child(const tt_module *module, const char *name) {
    for (int i = 0; i < module->child_count; i++)
        if (strcmp(module->children[i].name, name) == 0)
            return module->children[i].module;
    return NULL;
}

/* What a name of the module is already: for messages. */
static const char *use_of(const tt_module *module, const char *name) {
    const tu_module_slot *slot = find_slot(module, name);
    return find_child(module, name) != NULL ? "child" : slot == NULL ? NULL : slot->buffer ? "buffer" : "parameter";
}

static tu_module_slot *add_slot(tt_module *module, const char *name, bool buffer) {
    tu_module_slot *slots = realloc(module->slots, ((size_t)module->slot_count + 1) * sizeof *slots);
    if (slots != NULL) {
        module->slots = slots;
        char *copy = strdup(name);
        if (copy != NULL) {
            slots[module->slot_count] = (tu_module_slot){ copy, NULL, buffer };
            // cppcheck-suppress memleak // the slot owns the copy
            return &slots[module->slot_count++];
        }
    }
    tu_pending_take(tu_error_memory("a module's slot", sizeof *slots));
    return NULL;
}

static tutti_status put(tt_module *module, tu_module_slot *slot, tt_tensor *tensor) {
    tu_tensor_hold(tensor);
    tu_tensor_drop(slot->tensor);
    slot->tensor = tensor;
    return tu_module_name_slot(module, slot);
}

/* ---- slots as a capture sees them ---- */

static tt_tensor *held_get(void *module, int index) {
    return ((tt_module *)module)->slots[index].tensor;
}

static tutti_status held_set(void *module, int index, tt_tensor *tensor) {
    return put(module, &((tt_module *)module)->slots[index], tensor);
}

static void held_keep(void *module) {
    tt_module_keep(module);
}

static void held_release(void *module) {
    tt_module_release(module);
}

static tu_holder holder_of(const tt_module *module, const tu_module_slot *slot) {
    return (tu_holder){ (tt_module *)module, (int)(slot - module->slots), held_get, held_set, held_keep, held_release };
}

/* ---- what else a captured function depends on ---- */

static uint64_t mix(uint64_t stamp, uint64_t more) {
    return (stamp ^ more) * 0x9E3779B97F4A7C15u;
}

/* Another number when hooks, children, the training flag or the set of slots that hold something have changed. */
static uint64_t stamp_of(void *owner) {
    const tt_module *module = owner;
    const tu_hook_list *lists[] = { &module->forward_pre, &module->forward, &module->forward_always,
                                    &module->backward_pre, &module->backward };
    uint64_t stamp = mix((uint64_t)module->slot_count << 32 | (uint32_t)module->child_count, module->resting);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        stamp = mix(stamp, tu_hook_changes(lists[i]));
    for (int i = 0; i < module->slot_count; i++)
        stamp = mix(stamp, module->slots[i].tensor != NULL);
    for (int i = 0; i < module->child_count; i++)
        stamp = mix(stamp, (uint64_t)(uintptr_t)module->children[i].module);
    return stamp;
}

/* A capture learns that the function looks at this module. False with the pending error set. */
static bool note_look(const tt_module *module) {
    tu_witness witness = { (tt_module *)module, stamp_of, held_keep, held_release };
    return tu_note_state(&witness);
}

/* A reference of the scope to what is in the slot, which is not empty. */
static tt_tensor *lend(const tt_module *module, const tu_module_slot *slot) {
    if (tu_is_capturing()) {
        tu_holder holder = holder_of(module, slot);
        if (tu_pending_take(tu_self()->recorder->note_read(tu_self()->recorder, &holder, slot->tensor)) != TUTTI_OK)
            return NULL;
    }
    return tu_scope_own(tu_tensor_hold(slot->tensor));
}

static bool set_slot(const char *who, tt_module *module, const char *name, tt_tensor *tensor, bool buffer) {
    if (!usable(who, module))
        return false;
    if (name == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: name is NULL", who);
        return false;
    }
    if (tensor != NULL && tu_pending_take(tu_tensor_check(who, buffer ? "buffer" : "parameter", tensor)) != TUTTI_OK)
        return false;
    tu_module_slot *slot = find_slot(module, name);
    if (slot != NULL ? slot->buffer != buffer : find_child(module, name) != NULL) {
        tu_fail(TUTTI_ERROR_EXISTS, "%s: %s has a %s \"%s\" already", who, module->place->text, use_of(module, name),
                name);
        return false;
    }
    if (slot == NULL && (slot = add_slot(module, name, buffer)) == NULL)
        return false;
    if (tu_is_capturing()) {
        tu_holder holder = holder_of(module, slot);
        if (tu_pending_take(tu_self()->recorder->note_write(tu_self()->recorder, &holder)) != TUTTI_OK)
            return false;
    }
    return tu_pending_take(put(module, slot, tensor)) == TUTTI_OK;
}

static tt_tensor *get_slot(const char *who, const tt_module *module, const char *name, bool buffer) {
    if (!usable(who, module))
        return NULL;
    const tu_module_slot *slot = name != NULL ? find_slot(module, name) : NULL;
    if (slot == NULL || slot->buffer != buffer) {
        tu_fail(TUTTI_ERROR_NOT_FOUND, "%s: %s has no %s \"%s\"", who, module->place->text,
                buffer ? "buffer" : "parameter", name != NULL ? name : "(NULL)");
        return NULL;
    }
    if (!note_look(module))
        return NULL;
    return slot->tensor == NULL ? NULL : lend(module, slot);
}

bool tt_module_set_parameter(tt_module *module, const char *name, tt_tensor *parameter) {
    return set_slot("module_set_parameter", module, name, parameter, false);
}

tt_tensor *tt_module_parameter(const tt_module *module, const char *name) {
    return get_slot("module_parameter", module, name, false);
}

bool tt_module_set_buffer(tt_module *module, const char *name, tt_tensor *buffer) {
    return set_slot("module_set_buffer", module, name, buffer, true);
}

tt_tensor *tt_module_buffer(const tt_module *module, const char *name) {
    return get_slot("module_buffer", module, name, true);
}

/* ---- children ---- */

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
    if (use_of(module, name) != NULL)
        return tu_error(TUTTI_ERROR_EXISTS, "module_add_child: %s has a %s \"%s\" already", module->place->text,
                        use_of(module, name), name);
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

bool tt_module_set_training(tt_module *module, bool training) {
    if (!usable("module_set_training", module))
        return false;
    module->resting = !training;
    for (int i = 0; i < module->child_count; i++)
        tt_module_set_training(module->children[i].module, training);
    return true;
}

bool tt_module_training(const tt_module *module) {
    return module != NULL && note_look(module) && !module->resting;
}

/* ---- lists of all ---- */

static size_t count_slots(const tt_module *module) {
    size_t count = (size_t)module->slot_count;
    for (int i = 0; i < module->child_count; i++)
        count += count_slots(module->children[i].module);
    return count;
}

/* Parameters or buffers as they are listed: each once, though several modules may share one. */
typedef struct listing {
    bool buffers;
    size_t count, table_size; /* a power of two, more than twice the number of slots */
    tt_tensor **tensors;
    const char **names;
    tt_tensor **table; /* of those that are listed, by address */
} listing;

static bool is_new(listing *list, tt_tensor *tensor) {
    size_t at = ((uintptr_t)tensor >> 6) & (list->table_size - 1);
    for (; list->table[at] != NULL; at = (at + 1) & (list->table_size - 1))
        if (list->table[at] == tensor)
            return false;
    list->table[at] = tensor;
    return true;
}

static const char *joined(const char *prefix, const char *name, const char *end) {
    size_t bytes = strlen(prefix) + strlen(name) + strlen(end) + 1;
    char *text = tu_scope_memory(bytes);
    if (text != NULL)
        snprintf(text, bytes, "%s%s%s", prefix, name, end);
    return text;
}

static void list_slots(const tt_module *module, const char *prefix, listing *list) {
    bool noted = note_look(module);
    for (int i = 0; noted && i < module->slot_count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_module_slot *slot = &module->slots[i];
        if (slot->tensor == NULL || slot->buffer != list->buffers || !is_new(list, slot->tensor))
            continue;
        list->names[list->count] = joined(prefix, slot->name, "");
        list->tensors[list->count++] = lend(module, slot);
    }
    for (int i = 0; i < module->child_count && tu_self()->pending == TUTTI_OK; i++) {
        const char *below = joined(prefix, module->children[i].name, ".");
        if (below != NULL)
            list_slots(module->children[i].module, below, list);
    }
}

static tt_named_list list_all(const char *who, const tt_module *module, bool buffers) {
    tt_named_list none = { 0, tu_nothing, tu_no_names };
    if (!usable(who, module))
        return none;
    size_t most = count_slots(module);
    listing list = { .buffers = buffers, .table_size = 16 };
    while (list.table_size <= 2 * most)
        list.table_size *= 2;
    list.tensors = tu_scope_memory((most + 1) * sizeof *list.tensors);
    list.names = tu_scope_memory((most + 1) * sizeof *list.names);
    list.table = tu_scope_memory(list.table_size * sizeof *list.table);
    if (list.tensors == NULL || list.names == NULL || list.table == NULL)
        return none;
    memset(list.table, 0, list.table_size * sizeof *list.table);
    list_slots(module, "", &list);
    return tu_self()->pending == TUTTI_OK ? (tt_named_list){ list.count, list.tensors, list.names } : none;
}

tt_named_list tt_module_parameters(const tt_module *module) {
    return list_all("module_parameters", module, false);
}

tt_named_list tt_module_buffers(const tt_module *module) {
    return list_all("module_buffers", module, true);
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
    tu_pending_take(tu_hooks_to_run(&module->forward_pre, &snapshot));
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
    tu_pending_take(tu_hooks_to_run(list, &snapshot));
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
static tt_tensor_list call_with_hooks(tt_module *module, tt_module_method *method, tt_tensor_list inputs,
                                      tt_tensor **given, tt_tensor **outputs) {
    tu_backward_hooks *hooks = NULL;
    if (inputs.count > 0)
        memcpy(given, inputs.at, inputs.count * sizeof *given);
    run_forward_pre(module, inputs.count, given);
    tt_tensor_list wrapped = tu_wrap_inputs(module, tt_tensors_of(inputs.count, given), &hooks);
    int count = tu_self()->pending == TUTTI_OK ? method(module, wrapped, outputs) : 0;
    if (tu_self()->pending == TUTTI_OK && (count < 0 || count > TT_FUNCTION_TENSORS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s returned %d results", method == module->type.forward ? "forward" : "a method",
                count);
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

/* The module is usable. */
static tt_tensor_list call_by(tt_module *module, tt_module_method *method, tt_tensor_list inputs) {
    tt_tensor_list none = { 0, tu_nothing };
    tu_thread *self = tu_self();
    if (!tu_scope_check())
        return none;
    if (inputs.count > TT_FUNCTION_TENSORS) {
        tu_fail(TUTTI_ERROR_LIMIT, "module_call: %zu inputs; at most %d are possible, in %s", inputs.count,
                TT_FUNCTION_TENSORS, module->place->text);
        return none;
    }
    tt_tensor **given = tu_scope_memory((inputs.count + 1) * sizeof *given);
    tt_tensor **outputs = tu_scope_memory(TT_FUNCTION_TENSORS * sizeof *outputs);
    if (given == NULL || outputs == NULL || !note_look(module))
        return none;
    tu_place *outer = self->place, *place = tu_place_hold(module->place); /* a hook may move the module */
    self->place = place;
    tt_tensor_list result = call_with_hooks(module, method, inputs, given, outputs);
    self->place = outer;
    tu_place_drop(place);
    if (self->pending == TUTTI_OK)
        return result;
    blame(module);
    return none;
}

tt_tensor_list tt_module_call_all(tt_module *module, tt_tensor_list inputs) {
    return usable("module_call", module) ? call_by(module, module->type.forward, inputs)
                                         : (tt_tensor_list){ 0, tu_nothing };
}

tt_tensor_list tt_module_call_method(tt_module *module, tt_module_method *method, tt_tensor_list inputs) {
    tt_tensor_list none = { 0, tu_nothing };
    if (!usable("module_call_method", module))
        return none;
    if (method == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "module_call_method: method is NULL");
        return none;
    }
    return call_by(module, method, inputs);
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

static int call_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_module_call(user, inputs.at[0]);
    return 1;
}

static void release_region(void *user) {
    tt_module_release(user);
}

tt_tensor *tt_module_call_checkpointed(tt_module *module, tt_tensor *x) {
    if (!usable("module_call_checkpointed", module))
        return NULL;
    tt_tensor_list outputs = tt_checkpoint(call_region, tt_module_keep(module), release_region, tt_tensors_of(1, &x));
    return outputs.count == 1 ? outputs.at[0] : NULL;
}
