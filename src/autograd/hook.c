/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks: counted records in lists, and how they are registered, removed and run.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"

void tu_hook_drop(tt_hook *hook) {
    if (hook == NULL || atomic_fetch_sub_explicit(&hook->references, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < hook->captured_count; i++)
        tu_tensor_drop(hook->captured[i]);
    if (hook->release != NULL)
        hook->release(hook->user);
    free(hook);
}

/* A computed tensor leads, by its history, back to the node or leaf that the hook hangs on: captured with it, the two
 * would keep each other alive for ever. It is captured without; a leaf is captured as it is. */
static tt_tensor *capture(tt_tensor *x) {
    if (x->history == NULL || (x->history->node == NULL && x->history->base == NULL))
        return tu_tensor_hold(x);
    tu_shape shape = tu_shape_of(x);
    return tu_tensor_alias(x, &shape);
}

tutti_status tu_hook_add(tu_hook_list *list, void (*function)(void), void *user, tt_tensor_list captured,
                         tt_hook **handle) {
    for (size_t i = 0; i < captured.count; i++) {
        tutti_status status = tu_tensor_check("hook", "captured", captured.at[i]);
        if (status != TUTTI_OK)
            return status;
    }
    if (list->count == list->capacity) {
        int capacity = list->capacity == 0 ? 2 : list->capacity * 2;
        tt_hook **at = realloc(list->at, (size_t)capacity * sizeof *at);
        if (at == NULL)
            return tu_error_memory("a list of hooks", (size_t)capacity * sizeof *at);
        list->at = at;
        list->capacity = capacity;
    }
    tt_hook *hook = malloc(sizeof *hook + captured.count * sizeof hook->captured[0]);
    if (hook == NULL)
        return tu_error_memory("a hook", sizeof *hook);
    *hook = (tt_hook){ .function = function, .user = user, .captured_count = captured.count };
    atomic_init(&hook->references, handle != NULL ? 2 : 1);
    for (size_t i = 0; i < captured.count; i++) {
        hook->captured[i] = capture(captured.at[i]);
        if (hook->captured[i] == NULL) {
            hook->captured_count = i;
            atomic_store(&hook->references, 1);
            tu_hook_drop(hook);
            return TUTTI_ERROR_MEMORY;
        }
    }
    list->at[list->count++] = hook;
    if (handle != NULL)
        *handle = hook;
    return TUTTI_OK;
}

void tu_hook_list_free(tu_hook_list *list) {
    for (int i = 0; i < list->count; i++)
        tu_hook_drop(list->at[i]);
    free(list->at);
    *list = (tu_hook_list){ 0 };
}

tutti_status tu_hook_list_snapshot(const tu_hook_list *list, tu_hook_list *copy) {
    *copy = (tu_hook_list){ 0 };
    if (list->count == 0)
        return TUTTI_OK;
    copy->at = malloc((size_t)list->count * sizeof *copy->at);
    if (copy->at == NULL)
        return tu_error_memory("a list of hooks", (size_t)list->count * sizeof *copy->at);
    for (int i = 0; i < list->count; i++) {
        if (list->at[i]->removed)
            continue;
        atomic_fetch_add_explicit(&list->at[i]->references, 1, memory_order_relaxed);
        copy->at[copy->count++] = list->at[i];
    }
    return TUTTI_OK;
}

void tt_hook_remove(tt_hook **hook) {
    if (hook == NULL || *hook == NULL)
        return;
    (*hook)->removed = true;
    tt_hook_release(hook);
}

void tt_hook_release(tt_hook **hook) {
    if (hook == NULL)
        return;
    tu_hook_drop(*hook);
    *hook = NULL;
}

tu_node_hooks *tu_node_hooks_of(tu_node *node) {
    if (node->hooks != NULL)
        return node->hooks;
    size_t outputs = (size_t)node->output_count;
    tu_node_hooks *hooks = calloc(1, sizeof *hooks + outputs * (sizeof *hooks->tensor + sizeof *hooks->retained));
    if (hooks == NULL) {
        tu_error_memory("a node's hooks", sizeof *hooks);
        return NULL;
    }
    hooks->tensor = (tu_hook_list *)(hooks + 1);
    hooks->retained = (tt_tensor **)(hooks->tensor + outputs);
    node->hooks = hooks;
    return hooks;
}

/* ---- registering ---- */

/* A hook is given its own tensor, or its gradient, anyway; capturing it would keep it alive for ever. */
static bool captures_itself(const char *who, const tt_tensor *x, tt_tensor_list captured) {
    for (size_t i = 0; i < captured.count; i++)
        if (captured.at[i] == x) {
            tu_fail(TUTTI_ERROR_ARGUMENT, "%s: a hook on %s cannot capture that tensor itself", who, tu_describe(x));
            return true;
        }
    return false;
}

bool tt_hook_tensor(tt_tensor *x, tt_tensor_hook *function, void *user, tt_tensor_list captured, tt_hook **hook) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("hook_tensor", "x", x)) != TUTTI_OK)
        return false;
    if (captures_itself("hook_tensor", x, captured))
        return false;
    tu_history_refresh(x);
    if (!(x->flags & TU_REQUIRES_GRAD)) {
        tu_fail(TUTTI_ERROR_STATE, "hook_tensor: cannot register a hook on %s, which doesn't require gradient",
                tu_describe(x));
        return false;
    }
    tu_node *node;
    if (tu_pending_take(tu_history_node(x, &node)) != TUTTI_OK)
        return false;
    tu_hook_list *list;
    if (node != NULL) {
        tu_node_hooks *hooks = tu_node_hooks_of(node);
        list = hooks != NULL ? &hooks->tensor[x->history->output] : NULL;
    } else {
        tu_history *history = tu_history_of(x);
        list = history != NULL ? &history->tensor_hooks : NULL;
    }
    tutti_status status =
        list == NULL ? TUTTI_ERROR_MEMORY : tu_hook_add(list, (void (*)(void))function, user, captured, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

bool tt_hook_accumulate(tt_tensor *leaf, tt_accumulate_hook *function, void *user, tt_tensor_list captured,
                        tt_hook **hook) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("hook_accumulate", "leaf", leaf)) != TUTTI_OK)
        return false;
    if (captures_itself("hook_accumulate", leaf, captured))
        return false;
    if (!(leaf->flags & TU_REQUIRES_GRAD) || !tt_is_leaf(leaf)) {
        tu_fail(TUTTI_ERROR_STATE,
                "hook_accumulate: %s is no leaf that requires grad; post accumulate grad hooks cannot be registered on "
                "others",
                tu_describe(leaf));
        return false;
    }
    tu_history *history = tu_history_of(leaf);
    tutti_status status = history == NULL
                              ? TUTTI_ERROR_MEMORY
                              : tu_hook_add(&history->accumulate_hooks, (void (*)(void))function, user, captured, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

static bool hook_node(const char *who, tt_node *opaque, bool post, void (*function)(void), void *user,
                      tt_tensor_list captured, tt_hook **hook) {
    tu_node *node = (tu_node *)(void *)opaque;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (node == NULL || function == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: node or function is NULL; a leaf has no node", who);
        return false;
    }
    tu_node_hooks *hooks = tu_node_hooks_of(node);
    tutti_status status = hooks == NULL
                              ? TUTTI_ERROR_MEMORY
                              : tu_hook_add(post ? &hooks->post : &hooks->pre, function, user, captured, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

bool tt_hook_node_pre(tt_node *node, tt_node_pre_hook *function, void *user, tt_tensor_list captured, tt_hook **hook) {
    return hook_node("hook_node_pre", node, false, (void (*)(void))function, user, captured, hook);
}

bool tt_hook_node_post(tt_node *node, tt_node_post_hook *function, void *user, tt_tensor_list captured,
                       tt_hook **hook) {
    return hook_node("hook_node_post", node, true, (void (*)(void))function, user, captured, hook);
}

/* ---- running ---- */

static tutti_status check_replacement(const char *who, const tt_tensor *grad, const tt_tensor *replacement) {
    if (grad == NULL)
        return tu_error(TUTTI_ERROR_STATE, "a hook on %s replaced an absent gradient by %s", who,
                        tu_describe(replacement));
    if (!tu_same_sizes(grad, replacement) || grad->dtype != replacement->dtype || grad->device != replacement->device)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "a hook on %s replaced the gradient %s by %s: hooks must keep shape, dtype and device", who,
                        tu_describe(grad), tu_describe(replacement));
    return TUTTI_OK;
}

tutti_status tu_run_tensor_hooks(const char *who, const tu_hook_list *list, tt_tensor **grad) {
    tu_hook_list snapshot;
    tutti_status status = tu_hook_list_snapshot(list, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK && *grad != NULL; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        tt_tensor *replacement = ((tt_tensor_hook *)hook->function)(&context, *grad);
        status = tu_self()->pending;
        if (status == TUTTI_OK && replacement != NULL) {
            status = check_replacement(who, *grad, replacement);
            if (status == TUTTI_OK && replacement != *grad) {
                tu_tensor_hold(replacement);
                tu_tensor_drop(*grad);
                *grad = replacement;
            }
        }
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
    return status;
}
