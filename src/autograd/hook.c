/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks: counted records in lists, and how they are registered, removed and run.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/function.h"
#include "autograd/node.h"
#include "tensor/process.h"

static void hook_drop(tt_hook *hook) {
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
    if (x->history == NULL || (tu_history_at(x)->node == NULL && tu_history_at(x)->base == NULL))
        return tu_tensor_hold(x);
    tu_shape shape = tu_shape_of(x);
    return tu_tensor_alias(x, &shape);
}

static tutti_status make_room(tu_hook_list *list) {
    if (tu_hook_count(list) < list->capacity)
        return TUTTI_OK;
    int capacity = list->capacity == 0 ? 2 : list->capacity * 2;
    tt_hook **at = realloc(list->at, (size_t)capacity * sizeof *at);
    if (at == NULL)
        return tu_error_memory("a list of hooks", (size_t)capacity * sizeof *at);
    list->at = at;
    list->capacity = capacity;
    return TUTTI_OK;
}

/* The list takes the caller's reference over, unless this fails. */
static tutti_status insert(tu_hook_list *list, tt_hook *hook, bool first) {
    pthread_mutex_lock(tu_process_hooks_lock());
    tutti_status status = make_room(list);
    int count = tu_hook_count(list), at = first ? 0 : count;
    if (status == TUTTI_OK) {
        memmove(list->at + at + 1, list->at + at, (size_t)(count - at) * sizeof *list->at);
        list->at[at] = hook;
        hook->list = list;
        atomic_store_explicit(&list->count, count + 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&list->changes, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(tu_process_hooks_lock());
    return status;
}

bool tu_hook_options_take(const char *who, const tt_hook_options *options, bool always, tt_hook_options *full) {
    *full = (tt_hook_options)TT_HOOK_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_hook_options", options, full, sizeof *full)) != TUTTI_OK)
        return false;
    if (full->always && !always) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: tt_hook_options.always is for tt_hook_forward alone", who);
        return false;
    }
    return true;
}

tutti_status tu_hook_add(tu_hook_list *list, void (*function)(void), void *user, const tt_hook_options *options,
                         tt_hook **handle) {
    tt_tensor_list captured = options->captured;
    if (function == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "hook: argument function is NULL");
    for (size_t i = 0; i < captured.count; i++) {
        tutti_status status = tu_tensor_check("hook", "captured", captured.at[i]);
        if (status != TUTTI_OK)
            return status;
    }
    tt_hook *hook = malloc(sizeof *hook + captured.count * sizeof hook->captured[0]);
    if (hook == NULL)
        return tu_error_memory("a hook", sizeof *hook);
    *hook = (tt_hook){ .function = function, .user = user, .opaque = options->opaque };
    atomic_init(&hook->references, 1);
    tutti_status status = TUTTI_OK;
    for (; hook->captured_count < captured.count && status == TUTTI_OK; hook->captured_count++) {
        hook->captured[hook->captured_count] = capture(captured.at[hook->captured_count]);
        if (hook->captured[hook->captured_count] == NULL)
            status = TUTTI_ERROR_MEMORY;
    }
    if (status == TUTTI_OK)
        status = insert(list, hook, options->first);
    if (status != TUTTI_OK) {
        hook_drop(hook);
        return status;
    }
    if (handle != NULL) {
        atomic_fetch_add_explicit(&hook->references, 1, memory_order_relaxed);
        *handle = hook;
    }
    return TUTTI_OK;
}

void tu_hook_list_free(tu_hook_list *list) {
    if (list->at == NULL)
        return;
    pthread_mutex_lock(tu_process_hooks_lock());
    for (int i = 0; i < tu_hook_count(list); i++)
        if (list->at[i]->list == list) /* a snapshot only borrows its hooks from their own list */
            list->at[i]->list = NULL;
    pthread_mutex_unlock(tu_process_hooks_lock());
    for (int i = 0; i < tu_hook_count(list); i++)
        hook_drop(list->at[i]);
    free(list->at);
    *list = (tu_hook_list){ 0 };
}

tutti_status tu_hook_list_snapshot(tu_hook_list *list, tu_hook_list *copy) {
    *copy = (tu_hook_list){ 0 };
    if (tu_hook_count(list) == 0)
        return TUTTI_OK;
    pthread_mutex_lock(tu_process_hooks_lock());
    int count = tu_hook_count(list);
    copy->at = malloc((size_t)(count > 0 ? count : 1) * sizeof *copy->at);
    for (int i = 0; copy->at != NULL && i < count; i++) {
        atomic_fetch_add_explicit(&list->at[i]->references, 1, memory_order_relaxed);
        copy->at[i] = list->at[i];
        atomic_store_explicit(&copy->count, i + 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(tu_process_hooks_lock());
    return copy->at != NULL ? TUTTI_OK : tu_error_memory("a list of hooks", (size_t)count * sizeof *copy->at);
}

bool tu_hook_list_has(tu_hook_list *list, void (*function)(void)) {
    bool found = false;
    pthread_mutex_lock(tu_process_hooks_lock());
    for (int i = 0; i < tu_hook_count(list) && !found; i++)
        found = list->at[i]->function == function;
    pthread_mutex_unlock(tu_process_hooks_lock());
    return found;
}

/* Takes the hook off its list; true where it stood in one, whose reference is the caller's now. */
static bool take_off(tt_hook *hook) {
    pthread_mutex_lock(tu_process_hooks_lock());
    tu_hook_list *list = hook->list;
    int count = list != NULL ? tu_hook_count(list) : 0, at = 0;
    while (at < count && list->at[at] != hook)
        at++;
    if (at < count) {
        memmove(list->at + at, list->at + at + 1, (size_t)(count - at - 1) * sizeof *list->at);
        atomic_store_explicit(&list->count, count - 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&list->changes, 1, memory_order_relaxed);
    }
    hook->list = NULL;
    pthread_mutex_unlock(tu_process_hooks_lock());
    return at < count;
}

void tt_hook_remove(tt_hook **hook) {
    if (hook == NULL || *hook == NULL)
        return;
    if (take_off(*hook))
        hook_drop(*hook);
    tt_hook_release(hook);
}

void tt_hook_release(tt_hook **hook) {
    if (hook == NULL)
        return;
    hook_drop(*hook);
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

static bool keeps_alive(const tt_tensor *from, const tt_tensor *x);

static bool any_keeps_alive(const tu_hook_list *list, const tt_tensor *x) {
    for (int i = 0; i < tu_hook_count(list); i++)
        for (size_t k = 0; k < list->at[i]->captured_count; k++)
            if (keeps_alive(list->at[i]->captured[k], x))
                return true;
    return false;
}

/* Ends: what is asked here before each registration keeps the ways free of circles. */
static bool keeps_alive(const tt_tensor *from, const tt_tensor *x) {
    if (from == NULL || from == x)
        return from != NULL;
    const tu_history *history = from->history;
    return history != NULL && (keeps_alive(history->grad, x) || any_keeps_alive(&history->tensor_hooks, x) ||
                               any_keeps_alive(&history->accumulate_hooks, x));
}

bool tu_keeps_alive(const tt_tensor *from, const tt_tensor *x) {
    pthread_mutex_lock(tu_process_hooks_lock());
    bool keeps = keeps_alive(from, x);
    pthread_mutex_unlock(tu_process_hooks_lock());
    return keeps;
}

/* A hook is given its own tensor, or its gradient, anyway; capturing it, by itself or through the hooks of another
 * leaf, would keep both alive for ever. */
static bool captures_itself(const char *who, const tt_tensor *x, tt_tensor_list captured) {
    for (size_t i = 0; i < captured.count; i++) {
        const tt_tensor *other = captured.at[i];
        if (other == NULL || tu_tensor_check(who, "captured", other) != TUTTI_OK || !tu_keeps_alive(other, x))
            continue;
        if (other == x)
            tu_fail(TUTTI_ERROR_ARGUMENT, "%s: a hook on %s cannot capture that tensor itself", who, tu_describe(x));
        else
            tu_fail(TUTTI_ERROR_ARGUMENT,
                    "%s: a hook on %s cannot capture %s, whose own hooks or gradient hold that tensor: they would keep "
                    "each other alive for ever. Give one of them through the hook's user pointer",
                    who, tu_describe(x), tu_describe(other));
        return true;
    }
    return false;
}

bool tt_hook_tensor(tt_tensor *x, tt_tensor_hook *function, void *user, const tt_hook_options *options,
                    tt_hook **hook) {
    tt_hook_options full;
    if (!tu_hook_options_take("hook_tensor", options, false, &full) ||
        tu_pending_take(tu_tensor_check("hook_tensor", "x", x)) != TUTTI_OK)
        return false;
    if ((x = tu_stand_in(x)) == NULL || captures_itself("hook_tensor", x, full.captured))
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
        list = hooks != NULL ? &hooks->tensor[tu_history_at(x)->output] : NULL;
    } else {
        tu_history *history = tu_history_of(x);
        list = history != NULL ? &history->tensor_hooks : NULL;
    }
    tutti_status status =
        list == NULL ? TUTTI_ERROR_MEMORY : tu_hook_add(list, (void (*)(void))function, user, &full, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

bool tt_hook_accumulate(tt_tensor *leaf, tt_accumulate_hook *function, void *user, const tt_hook_options *options,
                        tt_hook **hook) {
    tt_hook_options full;
    if (!tu_hook_options_take("hook_accumulate", options, false, &full) ||
        tu_pending_take(tu_tensor_check("hook_accumulate", "leaf", leaf)) != TUTTI_OK)
        return false;
    if ((leaf = tu_stand_in(leaf)) == NULL || captures_itself("hook_accumulate", leaf, full.captured))
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
                              : tu_hook_add(&history->accumulate_hooks, (void (*)(void))function, user, &full, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

static bool hook_node(const char *who, tt_node *opaque, bool post, void (*function)(void), void *user,
                      const tt_hook_options *options, tt_hook **hook) {
    tu_node *node = (tu_node *)(void *)opaque;
    tt_hook_options full;
    if (!tu_hook_options_take(who, options, false, &full))
        return false;
    if (node == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: node is NULL; a leaf has no node", who);
        return false;
    }
    tu_node_hooks *hooks = tu_node_hooks_of(node);
    tutti_status status = hooks == NULL ? TUTTI_ERROR_MEMORY
                                        : tu_hook_add(post ? &hooks->post : &hooks->pre, function, user, &full, hook);
    return tu_pending_take(status) == TUTTI_OK;
}

bool tt_hook_node_pre(tt_node *node, tt_node_pre_hook *function, void *user, const tt_hook_options *options,
                      tt_hook **hook) {
    return hook_node("hook_node_pre", node, false, (void (*)(void))function, user, options, hook);
}

bool tt_hook_node_post(tt_node *node, tt_node_post_hook *function, void *user, const tt_hook_options *options,
                       tt_hook **hook) {
    return hook_node("hook_node_post", node, true, (void (*)(void))function, user, options, hook);
}

/* ---- running ---- */

static tutti_status check_replacement(const char *who, const tt_tensor *grad, const tt_tensor *replacement) {
    tutti_status status = tu_tensor_check(who, "gradient of a hook", replacement);
    if (status != TUTTI_OK)
        return status;
    if (grad == NULL)
        return tu_error(TUTTI_ERROR_STATE, "a hook on %s replaced an absent gradient by %s", who,
                        tu_describe(replacement));
    if (!tu_same_sizes(grad, replacement) || grad->dtype != replacement->dtype || grad->device != replacement->device)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "a hook on %s replaced the gradient %s by %s: hooks must keep shape, dtype and device", who,
                        tu_describe(grad), tu_describe(replacement));
    return TUTTI_OK;
}

tutti_status tu_hooks_to_run(tu_hook_list *list, tu_hook_list *copy) {
    tutti_status status = tu_hook_list_snapshot(list, copy);
    for (int i = 0; status == TUTTI_OK && tu_is_capturing() && i < tu_hook_count(copy); i++)
        if (copy->at[i]->opaque)
            status = tu_error(TUTTI_ERROR_CAPTURE,
                              "capture: an opaque hook runs inside the function, which no graph can look into; run the "
                              "function as it is, or let the hook be captured");
    if (status != TUTTI_OK)
        tu_hook_list_free(copy);
    return status;
}

tutti_status tu_run_tensor_hooks(const char *who, tu_hook_list *list, tt_tensor **grad) {
    tu_hook_list snapshot;
    tutti_status status = tu_hooks_to_run(list, &snapshot);
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

void tu_hooks_describe(tu_hook_list *list, tu_collector *collector) {
    tu_hook_list snapshot;
    if (tu_pending_take(tu_hook_list_snapshot(list, &snapshot)) != TUTTI_OK)
        return;
    collector->word(collector, (uintptr_t)snapshot.count);
    for (int i = 0; i < snapshot.count; i++) {
        tt_hook *hook = snapshot.at[i];
        if (hook->opaque)
            collector->refuse(collector, "a hook of it is opaque");
        collector->word(collector, (uintptr_t)hook->function);
        collector->word(collector, hook->captured_count);
        if (hook->describe != NULL)
            hook->describe(hook->user, collector);
        else
            collector->word(collector, (uintptr_t)hook->user);
        for (size_t k = 0; k < hook->captured_count; k++)
            collector->tensor(collector, hook->captured[k]);
    }
    tu_hook_list_free(&snapshot);
}
