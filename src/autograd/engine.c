/* SPDX-License-Identifier: Apache-2.0
 *
 * The backward engine. It finds the nodes below the roots, counts how many gradients each will get, and runs those that
 * are complete: the one created last first, and leaves before all nodes. A gradient buffer is added to in place where
 * nobody else can see it.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "autograd/operators.h"

bool tu_engine_reversed;

#define DEEPEST 60 /* backwards inside backwards */

/* A node or a leaf that takes part. */
typedef struct task {
    tu_node *node;
    tt_tensor *leaf;
    int waiting; /* gradients that have yet to arrive */
    bool needed; /* on the way to a wanted input, or everything is wanted */
    int slots;
    tt_tensor **grads; /* per slot; held */
} task;

typedef struct callback {
    void (*function)(void *user);
    void *user;
} callback;

typedef struct wish { /* an input whose gradient is wanted */
    const void *key;  /* its node or leaf */
    int slot;
    tt_tensor *input;
    tt_tensor **result; /* where to put it; NULL: add to the input's own gradient */
} wish;

typedef struct backward {
    struct backward *outer;
    int depth;
    bool create_graph, retain_graph, restricted;
    task *tasks;
    size_t task_count, task_capacity;
    size_t *table; /* open addressing: index + 1 of the task of a pointer, 0 for none */
    size_t table_size;
    size_t *ready; /* heap of task indices */
    size_t ready_count, ready_capacity;
    wish *wishes;
    size_t wish_count;
    callback *callbacks;
    size_t callback_count, callback_capacity;
} backward;

/* ---- tasks ---- */

static tutti_status grow(void **array, size_t entry, size_t *capacity) {
    size_t larger = *capacity == 0 ? 64 : *capacity * 2;
    void *moved = realloc(*array, larger * entry);
    if (moved == NULL)
        return tu_error_memory("a backward", larger * entry);
    *array = moved;
    *capacity = larger;
    return TUTTI_OK;
}

static size_t place_of(const backward *b, const void *key) {
    size_t at = ((uintptr_t)key >> 4) * (size_t)0x9E3779B97F4A7C15u >> 20 & (b->table_size - 1);
    while (b->table[at] != 0) {
        const task *t = &b->tasks[b->table[at] - 1];
        if (t->node == key || t->leaf == key)
            break;
        at = (at + 1) & (b->table_size - 1);
    }
    return at;
}

static tutti_status rehash(backward *b) {
    size_t size = b->table_size == 0 ? 256 : b->table_size * 2;
    size_t *table = calloc(size, sizeof *table);
    if (table == NULL)
        return tu_error_memory("a backward", size * sizeof *table);
    free(b->table);
    b->table = table;
    b->table_size = size;
    for (size_t i = 0; i < b->task_count; i++)
        b->table[place_of(b, b->tasks[i].node != NULL ? (void *)b->tasks[i].node : b->tasks[i].leaf)] = i + 1;
    return TUTTI_OK;
}

static task *find_task(const backward *b, const tu_edge *edge) {
    const void *key = edge->node != NULL ? (const void *)edge->node : edge->leaf;
    if (key == NULL || b->table_size == 0)
        return NULL;
    size_t index = b->table[place_of(b, key)];
    return index == 0 ? NULL : &b->tasks[index - 1];
}

/* The task of an edge's target, made where there is none; *made tells. */
static tutti_status take_task(backward *b, const tu_edge *edge, size_t *index, bool *made) {
    tutti_status status;
    const void *key = edge->node != NULL ? (const void *)edge->node : edge->leaf;
    if (b->task_count * 2 >= b->table_size && (status = rehash(b)) != TUTTI_OK)
        return status;
    size_t at = place_of(b, key);
    *made = b->table[at] == 0;
    if (!*made) {
        *index = b->table[at] - 1;
        return TUTTI_OK;
    }
    if (b->task_count == b->task_capacity &&
        (status = grow((void **)&b->tasks, sizeof *b->tasks, &b->task_capacity)) != TUTTI_OK)
        return status;
    int slots = edge->node != NULL ? edge->node->output_count : 1;
    tt_tensor **grads = calloc((size_t)slots, sizeof *grads);
    if (grads == NULL)
        return tu_error_memory("a backward", (size_t)slots * sizeof *grads);
    *index = b->task_count++;
    b->tasks[*index] =
        (task){ .node = tu_node_hold(edge->node), .leaf = tu_tensor_hold(edge->leaf), .slots = slots, .grads = grads };
    b->table[at] = *index + 1;
    return TUTTI_OK;
}

/* Everything below the tasks there are, breadth first; counts the gradients that will arrive. */
static tutti_status discover(backward *b) {
    for (size_t i = 0; i < b->task_count; i++) {
        tu_node *node = b->tasks[i].node;
        for (int k = 0; node != NULL && k < node->input_count; k++) {
            size_t index;
            bool made;
            if (node->next[k].node == NULL && node->next[k].leaf == NULL)
                continue;
            tutti_status status = take_task(b, &node->next[k], &index, &made);
            if (status != TUTTI_OK)
                return status;
            b->tasks[index].waiting++;
        }
    }
    return TUTTI_OK;
}

/* ---- who is needed ---- */

static bool wished(const backward *b, const task *t) {
    for (size_t i = 0; i < b->wish_count; i++)
        if (b->wishes[i].key == (t->node != NULL ? (void *)t->node : (void *)t->leaf))
            return true;
    return false;
}

/* Marks tasks from which a wish can be reached, by repeated sweeps from the bottom; graphs are nearly sorted, so that
 * few are needed. */
static void mark_needed(backward *b) {
    bool changed = true;
    while (changed) {
        changed = false;
        for (size_t i = b->task_count; i-- > 0;) {
            task *t = &b->tasks[i];
            for (int k = 0; t->node != NULL && !t->needed && k < t->node->input_count; k++) {
                const task *next = find_task(b, &t->node->next[k]);
                if (next != NULL && (next->needed || wished(b, next)))
                    t->needed = changed = true;
            }
        }
    }
}

/* ---- the heap of ready tasks ---- */

static uint64_t rank_of(const task *t) {
    uint64_t rank = t->node != NULL ? t->node->sequence : UINT64_MAX;
    return tu_engine_reversed ? UINT64_MAX - rank : rank;
}

/* Higher sequence first; of leaves, the one that was found first. */
static bool before(const backward *b, size_t left, size_t right) {
    uint64_t of_left = rank_of(&b->tasks[left]), of_right = rank_of(&b->tasks[right]);
    return of_left != of_right ? of_left > of_right : left < right;
}

static tutti_status push_ready(backward *b, size_t index) {
    tutti_status status;
    if (b->ready_count == b->ready_capacity &&
        (status = grow((void **)&b->ready, sizeof *b->ready, &b->ready_capacity)) != TUTTI_OK)
        return status;
    size_t at = b->ready_count++;
    for (; at > 0 && before(b, index, b->ready[(at - 1) / 2]); at = (at - 1) / 2)
        b->ready[at] = b->ready[(at - 1) / 2];
    b->ready[at] = index;
    return TUTTI_OK;
}

static size_t pop_ready(backward *b) {
    size_t top = b->ready[0], last = b->ready[--b->ready_count], at = 0;
    for (;;) {
        size_t child = at * 2 + 1;
        if (child >= b->ready_count)
            break;
        if (child + 1 < b->ready_count && before(b, b->ready[child + 1], b->ready[child]))
            child++;
        if (before(b, last, b->ready[child]))
            break;
        b->ready[at] = b->ready[child];
        at = child;
    }
    b->ready[at] = last;
    return top;
}

/* ---- gradients ---- */

/* Whether nobody but its one holder can see x. Collectives that still write it, or read it, do not count: whoever uses
 * the data waits for them. */
static bool is_alone(const tt_tensor *x) {
    int held = atomic_load(&x->storage->references) - atomic_load(&x->storage->flights);
    return atomic_load(&x->references) == 1 && held == 1 && !x->storage->fixed;
}
static bool is_private(const tt_tensor *x) {
    return is_alone(x) && tu_is_dense(x);
}

/* *to += from, where *to may be empty. Holds what it keeps. */
static tutti_status add_gradient(tt_tensor **to, tt_tensor *from) {
    if (from == NULL)
        return TUTTI_OK;
    if (*to == NULL) {
        *to = tu_tensor_hold(from);
        return TUTTI_OK;
    }
    tt_scope scope = tt_scope_open();
    if (!tt_grad_enabled() && is_private(*to) && (*to)->dtype == from->dtype) {
        tt_add_(*to, from);
    } else {
        tt_tensor *sum = tt_add(*to, from);
        if (sum != NULL) {
            tu_tensor_hold(sum);
            tu_tensor_drop(*to);
            *to = sum;
        }
    }
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* A result of node, brought to the shape and dtype that the input has: held. */
static tutti_status fit_gradient(const tu_node *node, int input, tt_tensor **result) {
    const tu_shape *shape = &node->inputs[input];
    tt_tensor *g = *result;
    tt_tensor *fitted = g;
    if (g->ndim != shape->ndim || memcmp(g->sizes, shape->sizes, (size_t)g->ndim * sizeof g->sizes[0]) != 0) {
        fitted = tt_sum_to(g, tt_dims_of(shape->ndim, shape->sizes));
        if (fitted == NULL)
            return tu_pending_take(TUTTI_ERROR_ARGUMENT);
    }
    if (fitted->dtype != shape->dtype) {
        if (tu_is_complex(fitted->dtype) && !tu_is_complex(shape->dtype)) {
            tt_tensor *real = tt_select(tt_view_as_real(fitted), -1, 0);
            fitted = tt_to(real, shape->dtype);
        } else {
            fitted = tt_to(fitted, shape->dtype);
        }
    }
    if (fitted != NULL && fitted->device != shape->device)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the gradient %s of an input of %s is on another device", tu_describe(g),
                        node->name);
    *result = fitted;
    return fitted == NULL ? tu_self()->pending : TUTTI_OK;
}

/* ---- leaves ---- */

static bool same_layout(const tt_tensor *a, const tt_tensor *b) {
    for (int i = 0; i < a->ndim; i++)
        if (a->sizes[i] > 1 && a->strides[i] != b->strides[i])
            return false;
    return true;
}

/* Whether g can become the gradient of leaf as it is: nobody else has it, and it lies as it should. */
static bool can_keep(const tt_tensor *leaf, const tt_tensor *g) {
    if (!is_alone(g) || g->offset != 0)
        return false;
    return tu_is_dense(leaf) ? same_layout(leaf, g) : (g->flags & TU_CONTIGUOUS) != 0;
}

static tt_tensor *copy_for(tt_tensor *leaf, tt_tensor *g) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = leaf->device;
    tt_tensor *copy = tu_is_dense(leaf) ? tt_empty_strided(tt_sizes(leaf), tt_strides(leaf), leaf->dtype, &options)
                                        : tt_empty(tt_sizes(leaf), leaf->dtype, &options);
    tt_copy_(copy, g);
    if (copy != NULL && copy->version_home == copy->storage)
        atomic_store_explicit(&copy->storage->version, 0, memory_order_relaxed);
    return copy;
}

/* Under the lock of the leaf. */
static tutti_status add_to_leaf(tt_tensor *leaf, tt_tensor *grad) {
    tu_history *history = leaf->history;
    tt_scope scope = tt_scope_open();
    if (history->grad != NULL && !tt_grad_enabled()) {
        tt_add_(history->grad, grad);
    } else {
        tt_tensor *updated = history->grad != NULL ? tt_add(history->grad, grad)
                             : tt_grad_enabled()   ? tt_clone(grad)
                                                   : copy_for(leaf, grad);
        if (tu_self()->pending == TUTTI_OK) {
            tu_tensor_hold(updated);
            tu_tensor_drop(history->grad);
            history->grad = updated;
        }
    }
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* Adds into the leaf's own gradient. Where *kept is set, the leaf has taken `grad` itself, and the reference for it is
 * the caller's to add.
 * Several threads may end their backwards in one leaf: each addition is whole. */
static tutti_status accumulate(tt_tensor *leaf, tt_tensor *grad, bool *kept) {
    tu_history *history = tu_history_of(leaf);
    *kept = false;
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&history->grad_lock);
    if (history->grad == NULL && !tt_grad_enabled() && can_keep(leaf, grad)) {
        history->grad = grad;
        *kept = true;
    } else {
        status = add_to_leaf(leaf, grad);
    }
    pthread_mutex_unlock(&history->grad_lock);
    return status;
}

tutti_status tu_accumulate_grad_cpu(tu_call *call) {
    bool kept;
    tutti_status status = accumulate(call->inputs[0], call->inputs[1], &kept);
    if (kept)
        tu_tensor_hold(call->inputs[1]); /* the leaf's own reference */
    return status;
}

tt_tensor *tu_accumulate_grad_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    tu_accumulate_grad(x, tt_mul_scalar(x, 2), NULL);
    tu_accumulate_grad(x, x, NULL);
    return tt_detach(tt_grad(x));
}

static tutti_status run_accumulate_hooks(tt_tensor *leaf) {
    tu_hook_list snapshot;
    tutti_status status = tu_hook_list_snapshot(&leaf->history->accumulate_hooks, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        ((tt_accumulate_hook *)hook->function)(&context, leaf);
        status = tu_self()->pending;
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
    return status;
}

/* ---- wishes ---- */

/* Hands the complete gradient of (key, slot) to whom wants it. Returns in *caught whether a leaf's gradient went there
 * instead of into the leaf. */
static tutti_status grant(backward *b, const void *key, int slot, tt_tensor *g, bool *caught) {
    tutti_status status = TUTTI_OK;
    *caught = false;
    for (size_t i = 0; i < b->wish_count && status == TUTTI_OK; i++) {
        wish *w = &b->wishes[i];
        if (w->key != key || w->slot != slot || g == NULL)
            continue;
        if (w->result != NULL) {
            tu_tensor_drop(*w->result);
            *w->result = tu_tensor_hold(g);
            *caught = true;
        } else if (key != w->input) { /* an input with history collects here; a leaf does so by itself */
            tu_accumulate_grad(w->input, g, NULL);
            status = tu_self()->pending;
        }
    }
    return status;
}

/* ---- running a task ---- */

static tutti_status run_leaf(backward *b, task *t) {
    tt_tensor *leaf = t->leaf, *g = t->grads[0];
    bool caught;
    if (g == NULL || !(leaf->flags & TU_REQUIRES_GRAD))
        return TUTTI_OK;
    tutti_status status = leaf->history != NULL
                              ? tu_run_tensor_hooks(tu_describe(leaf), &leaf->history->tensor_hooks, &t->grads[0])
                              : TUTTI_OK;
    g = t->grads[0];
    if (status == TUTTI_OK)
        status = grant(b, leaf, 0, g, &caught);
    if (status != TUTTI_OK || (b->restricted && (caught || !wished(b, t))))
        return status;
    return tu_accumulate_grad(leaf, g, NULL) ? run_accumulate_hooks(leaf) : tu_self()->pending;
}

static tutti_status retain(tt_tensor *x, tt_tensor *g) {
    tu_history *history = x->history;
    tt_scope scope = tt_scope_open();
    tt_tensor *updated = history->grad == NULL ? tt_clone(tt_contiguous(g)) : tt_add(history->grad, g);
    if (tu_self()->pending == TUTTI_OK) {
        tu_tensor_hold(updated);
        tu_tensor_drop(history->grad);
        history->grad = updated;
    }
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* Tensor hooks, then retained gradients, of all slots. */
static tutti_status before_node(task *t) {
    tu_node_hooks *hooks = t->node->hooks;
    tutti_status status = TUTTI_OK;
    for (int i = 0; hooks != NULL && i < t->slots && status == TUTTI_OK; i++)
        status = tu_run_tensor_hooks(t->node->name, &hooks->tensor[i], &t->grads[i]);
    for (int i = 0; hooks != NULL && i < t->slots && status == TUTTI_OK; i++)
        if (hooks->retained[i] != NULL && t->grads[i] != NULL)
            status = retain(hooks->retained[i], t->grads[i]);
    return status;
}

static tutti_status run_pre_hooks(task *t) {
    tu_hook_list snapshot;
    if (t->node->hooks == NULL)
        return TUTTI_OK;
    tutti_status status = tu_hook_list_snapshot(&t->node->hooks->pre, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        tt_tensor *grads[TT_FUNCTION_TENSORS] = { NULL };
        int count = t->slots < TT_FUNCTION_TENSORS ? t->slots : TT_FUNCTION_TENSORS;
        memcpy(grads, t->grads, (size_t)count * sizeof *grads);
        ((tt_node_pre_hook *)hook->function)(&context, (size_t)count, grads);
        status = tu_self()->pending;
        for (int k = 0; k < count && status == TUTTI_OK; k++) {
            if (grads[k] == t->grads[k])
                continue;
            tu_tensor_hold(grads[k]);
            tu_tensor_drop(t->grads[k]);
            t->grads[k] = grads[k];
        }
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
    return status;
}

/* `results` are the scope's; hooks may put others there. */
static tutti_status run_post_hooks(task *t, tt_tensor **results) {
    tu_hook_list snapshot;
    if (t->node->hooks == NULL)
        return TUTTI_OK;
    tutti_status status = tu_hook_list_snapshot(&t->node->hooks->post, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        ((tt_node_post_hook *)hook->function)(&context, (size_t)t->node->input_count, results, (size_t)t->slots,
                                              t->grads);
        status = tu_self()->pending;
    }
    tu_hook_list_free(&snapshot);
    return status;
}

/* Says in which node an error happened; those that name it already are left. */
static tutti_status blame(const tu_node *node, tutti_status status) {
    tu_node_label label = tu_node_label_of(node);
    if (tt_error_show() == TUTTI_OK)
        return tu_pending_take(status);
    if (strstr(tutti_error_message(), label.text) == NULL) {
        tu_error_append(", in the backward of %s", label.text);
        tt_error_clear();
        tu_pending_take(status);
    }
    return status;
}

static tutti_status compute(backward *b, task *t, tt_tensor **results) {
    tu_node *node = t->node;
    bool any = false;
    for (int i = 0; i < t->slots; i++)
        any = any || t->grads[i] != NULL;
    if (node->released)
        return tu_pending_take(tu_node_freed_error(node));
    if (any || node->sees_nothing)
        node->run(node, t->grads, results);
    tutti_status status = tu_self()->pending;
    for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
        if (!node->needs[i] && node->next[i].node == NULL && node->next[i].leaf == NULL)
            results[i] = NULL;
        if (results[i] != NULL)
            status = fit_gradient(node, i, &results[i]);
    }
    if (status == TUTTI_OK)
        status = run_post_hooks(t, results);
    if (!b->retain_graph)
        tu_node_release_saved(node);
    return status;
}

/* Passes results on to the tasks they belong to. */
static tutti_status deliver(backward *b, tu_node *node, tt_tensor **results) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
        const tu_edge *edge = &node->next[i];
        task *next = find_task(b, edge);
        if (next == NULL)
            continue;
        status = add_gradient(&next->grads[edge->node != NULL ? edge->slot : 0], results[i]);
        if (status == TUTTI_OK && --next->waiting == 0)
            status = push_ready(b, (size_t)(next - b->tasks));
    }
    return status;
}

static tutti_status run_node(backward *b, task *t) {
    tu_node *node = t->node;
    bool caught;
    tutti_status status = before_node(t);
    for (int i = 0; i < t->slots && status == TUTTI_OK && b->wish_count > 0; i++)
        status = grant(b, node, i, t->grads[i], &caught);
    tt_tensor *few[16] = { NULL };
    tt_tensor **results = node->input_count <= 16 ? few : calloc((size_t)node->input_count, sizeof *results);
    if (status == TUTTI_OK && results == NULL)
        status = tu_error_memory("gradients of a node", (size_t)node->input_count * sizeof *results);
    bool runs = !b->restricted || t->needed;
    if (status == TUTTI_OK && runs && (status = run_pre_hooks(t)) == TUTTI_OK) {
        tt_scope scope = tt_scope_open();
        status = compute(b, t, results);
        for (int i = 0; i < node->input_count; i++)
            results[i] = status == TUTTI_OK ? tu_tensor_hold(results[i]) : NULL;
        tu_scope_leave(&scope);
    }
    for (int i = 0; i < t->slots;
         i++) { /* before delivery, so that a gradient passed through is seen by its new holder alone */
        tu_tensor_drop(t->grads[i]);
        t->grads[i] = NULL;
    }
    size_t index = (size_t)(t - b->tasks);
    if (status == TUTTI_OK)
        status = deliver(b, node, results);
    for (int i = 0; results != NULL && i < node->input_count; i++)
        tu_tensor_drop(results[i]);
    if (results != few)
        free(results);
    return status == TUTTI_OK ? status : blame(b->tasks[index].node, status);
}

static tutti_status run_all(backward *b) {
    tutti_status status = TUTTI_OK;
    while (b->ready_count > 0 && status == TUTTI_OK) {
        task *t = &b->tasks[pop_ready(b)];
        status = t->node != NULL ? run_node(b, t) : run_leaf(b, t);
    }
    for (size_t i = 0; i < b->callback_count && status == TUTTI_OK; i++) { /* a callback may queue more */
        tt_scope scope = tt_scope_open();
        b->callbacks[i].function(b->callbacks[i].user);
        tu_scope_leave(&scope);
        status = tu_self()->pending;
    }
    return status;
}

/* ---- one backward ---- */

static void finish(backward *b) {
    for (size_t i = 0; i < b->task_count; i++) {
        task *t = &b->tasks[i];
        for (int k = 0; k < t->slots; k++)
            tu_tensor_drop(t->grads[k]);
        free(t->grads);
        tu_tensor_drop(t->leaf);
        tu_node_drop(t->node);
    }
    free(b->tasks);
    free(b->table);
    free(b->ready);
    free(b->callbacks);
}

static tutti_status seed(backward *b, tt_tensor *root, tt_tensor *grad) {
    tu_history_refresh(root);
    if (!(root->flags & TU_REQUIRES_GRAD))
        return tu_error(TUTTI_ERROR_STATE, "backward: %s does not require grad and does not have a grad_fn",
                        tu_describe(root));
    if (grad == NULL) {
        if (root->numel != 1)
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "backward: grad can be implicitly created only for scalar outputs, and %s has %lld "
                            "elements: give its gradient",
                            tu_describe(root), (long long)root->numel);
        grad = tt_ones_like(root);
    } else {
        tutti_status status = tu_tensor_check("backward", "grad", grad);
        if (status != TUTTI_OK)
            return status;
        if (!tu_same_sizes(root, grad)) /* what broadcast from the root's shape is summed down to it */
            grad = tt_sum_to(grad, tt_sizes(root));
        if (grad != NULL && grad->dtype != root->dtype)
            grad = tt_to(grad, root->dtype);
    }
    if (grad == NULL)
        return tu_self()->pending;
    tu_edge edge;
    size_t index;
    bool made;
    tutti_status status = tu_edge_to(root, &edge);
    if (status == TUTTI_OK && (status = take_task(b, &edge, &index, &made)) == TUTTI_OK)
        status = add_gradient(&b->tasks[index].grads[edge.node != NULL ? edge.slot : 0], grad);
    tu_edge_drop(&edge);
    return status;
}

static tutti_status seed_all(backward *b, tt_tensor_list roots, tt_tensor_list grads) {
    if (roots.count == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "backward: no roots given");
    if (grads.count != 0 && grads.count != roots.count)
        return tu_error(TUTTI_ERROR_ARGUMENT, "backward: %zu gradients given for %zu roots", grads.count, roots.count);
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < roots.count && status == TUTTI_OK; i++) {
        status = tu_tensor_check("backward", "roots", roots.at[i]);
        if (status == TUTTI_OK)
            status = seed(b, roots.at[i], grads.count == 0 ? NULL : grads.at[i]);
    }
    return status;
}

static tutti_status make_wishes(backward *b, tt_tensor_list inputs, tt_tensor **results) {
    for (size_t i = 0; i < inputs.count; i++) {
        tt_tensor *x = inputs.at[i];
        tu_edge edge;
        tutti_status status = tu_tensor_check("backward", "inputs", x);
        if (status == TUTTI_OK)
            tu_history_refresh(x);
        if (status == TUTTI_OK && !(x->flags & TU_REQUIRES_GRAD))
            status = tu_error(TUTTI_ERROR_STATE, "backward: input %s does not require grad", tu_describe(x));
        if (status == TUTTI_OK)
            status = tu_edge_to(x, &edge);
        if (status != TUTTI_OK)
            return status;
        b->wishes[i] = (wish){ edge.node != NULL ? (void *)edge.node : (void *)edge.leaf,
                               edge.node != NULL ? edge.slot : 0, x, results != NULL ? &results[i] : NULL };
        tu_edge_drop(&edge); /* the input itself keeps it alive */
        b->wish_count++;
    }
    return TUTTI_OK;
}

static tutti_status run_backward(backward *b, tt_tensor_list roots, tt_tensor_list grads, tt_tensor_list inputs,
                                 tt_tensor **results) {
    tutti_status status = seed_all(b, roots, grads);
    if (status == TUTTI_OK && inputs.count > 0) {
        b->restricted = true;
        b->wishes = calloc(inputs.count, sizeof *b->wishes);
        status = b->wishes == NULL ? tu_error_memory("a backward", inputs.count * sizeof *b->wishes)
                                   : make_wishes(b, inputs, results);
    }
    size_t root_count = b->task_count;
    if (status == TUTTI_OK)
        status = discover(b);
    if (status == TUTTI_OK && b->restricted)
        mark_needed(b);
    for (size_t i = 0; i < root_count && status == TUTTI_OK; i++)
        if (b->tasks[i].waiting == 0)
            status = push_ready(b, i);
    return status == TUTTI_OK ? run_all(b) : status;
}

static tutti_status go(tt_tensor_list roots, tt_tensor_list grads, tt_tensor_list inputs, tt_tensor **results,
                       const tt_backward_options *given) {
    tu_thread *self = tu_self();
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    if (self->pending != TUTTI_OK)
        return self->pending;
    if (!tu_scope_check())
        return self->pending;
    tutti_status status = tu_options_copy("tt_backward_options", given, &options, sizeof options);
    if (status != TUTTI_OK)
        return tu_pending_take(status);
    backward *outer = self->backward;
    backward b = { .outer = outer,
                   .depth = outer != NULL ? outer->depth + 1 : 1,
                   .create_graph = options.create_graph,
                   .retain_graph = options.retain_graph || options.create_graph };
    if (b.depth > DEEPEST)
        return tu_fail(TUTTI_ERROR_LIMIT, "backward: %d backwards run inside each other, which is the limit", DEEPEST);
    bool recording = tt_grad_mode(options.create_graph);
    tt_scope scope = tt_scope_open();
    self->backward = &b;
    status = tu_pending_take(run_backward(&b, roots, grads, inputs.count > 0 ? inputs : options.inputs, results));
    self->backward = outer;
    free(b.wishes);
    finish(&b);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return status;
}

/* ---- the calls ---- */

bool tt_backward(tt_tensor *root, tt_tensor *grad) {
    return tt_backward_from(tt_tensors_of(1, &root), tt_tensors_of(grad != NULL, &grad), NULL);
}

bool tt_backward_from(tt_tensor_list roots, tt_tensor_list grads, const tt_backward_options *options) {
    return go(roots, grads, (tt_tensor_list){ 0, NULL }, NULL, options) == TUTTI_OK;
}

tt_tensor_list tt_gradients(tt_tensor_list outputs, tt_tensor_list inputs, tt_tensor_list grads,
                            const tt_backward_options *options) {
    tt_tensor_list none = { 0, NULL };
    if (tu_self()->pending != TUTTI_OK)
        return none;
    if (inputs.count == 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "gradients: requires non-empty inputs");
        return none;
    }
    tt_tensor **results = tu_scope_memory(inputs.count * sizeof *results);
    if (results == NULL)
        return none;
    memset(results, 0, inputs.count * sizeof *results);
    tutti_status status = go(outputs, grads, inputs, results, options);
    for (size_t i = 0; i < inputs.count; i++)
        results[i] = tu_scope_own(results[i]);
    return status == TUTTI_OK && tu_self()->pending == TUTTI_OK ? tt_tensors_of(inputs.count, results) : none;
}

bool tt_backward_callback(void (*function)(void *user), void *user) {
    backward *b = tu_self()->backward;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (b == NULL) {
        tu_fail(
            TUTTI_ERROR_STATE,
            "backward_callback: final callbacks can only be installed during a backward, and none runs in this thread");
        return false;
    }
    if (b->callback_count == b->callback_capacity &&
        tu_pending_take(grow((void **)&b->callbacks, sizeof *b->callbacks, &b->callback_capacity)) != TUTTI_OK)
        return false;
    b->callbacks[b->callback_count++] = (callback){ function, user };
    return true;
}
