/* SPDX-License-Identifier: Apache-2.0
 *
 * The backward engine. It finds the nodes below the roots, counts how many gradients each will get, and runs those that
 * are complete: the one created last first, and leaves before all nodes. A gradient buffer is added to in place where
 * nobody else can see it.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/function.h"
#include "autograd/node.h"
#include "autograd/operators.h"

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
    bool traced; /* a capture runs it on the roots themselves, and not on what stands for them */
    task *tasks;
    size_t task_count, task_capacity;
    size_t *table; /* open addressing: index + 1 of the task of a pointer, 0 for none */
    size_t table_size;
    size_t *ready; /* heap of task indices */
    size_t ready_count, ready_capacity;
    wish *wishes;
    size_t wish_count;
    uint64_t number; /* of the outermost one, of all in this thread */
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

static size_t place_of(const backward *run, const void *key) {
    size_t at = ((uintptr_t)key >> 4) * (size_t)0x9E3779B97F4A7C15u >> 20 & (run->table_size - 1);
    while (run->table[at] != 0) {
        const task *one = &run->tasks[run->table[at] - 1];
        if (one->node == key || one->leaf == key)
            break;
        at = (at + 1) & (run->table_size - 1);
    }
    return at;
}

static tutti_status rehash(backward *run) {
    size_t size = run->table_size == 0 ? 256 : run->table_size * 2;
    size_t *table = calloc(size, sizeof *table);
    if (table == NULL)
        return tu_error_memory("a backward", size * sizeof *table);
    free(run->table);
    run->table = table;
    run->table_size = size;
    for (size_t i = 0; i < run->task_count; i++)
        run->table[place_of(run, run->tasks[i].node != NULL ? (void *)run->tasks[i].node : run->tasks[i].leaf)] = i + 1;
    return TUTTI_OK;
}

static task *find_task(const backward *run, const tu_edge *edge) {
    const void *key = edge->node != NULL ? (const void *)edge->node : edge->leaf;
    if (key == NULL || run->table_size == 0)
        return NULL;
    size_t index = run->table[place_of(run, key)];
    return index == 0 ? NULL : &run->tasks[index - 1];
}

/* The task of an edge's target, made where there is none; *made tells. */
static tutti_status take_task(backward *run, const tu_edge *edge, size_t *index, bool *made) {
    tutti_status status;
    const void *key = edge->node != NULL ? (const void *)edge->node : edge->leaf;
    if (run->task_count * 2 >= run->table_size && (status = rehash(run)) != TUTTI_OK)
        return status;
    size_t at = place_of(run, key);
    *made = run->table[at] == 0;
    if (!*made) {
        *index = run->table[at] - 1;
        return TUTTI_OK;
    }
    if (run->task_count == run->task_capacity &&
        (status = grow((void **)&run->tasks, sizeof *run->tasks, &run->task_capacity)) != TUTTI_OK)
        return status;
    int slots = edge->node != NULL ? edge->node->output_count : 1;
    tt_tensor **grads = calloc((size_t)slots, sizeof *grads);
    if (grads == NULL)
        return tu_error_memory("a backward", (size_t)slots * sizeof *grads);
    *index = run->task_count++;
    run->tasks[*index] =
        (task){ .node = tu_node_hold(edge->node), .leaf = tu_tensor_hold(edge->leaf), .slots = slots, .grads = grads };
    run->table[at] = *index + 1;
    return TUTTI_OK;
}

/* Everything below the tasks there are, breadth first; counts the gradients that will arrive. */
static tutti_status discover(backward *run) {
    for (size_t i = 0; i < run->task_count; i++) {
        tu_node *node = run->tasks[i].node;
        for (int k = 0; node != NULL && k < node->input_count; k++) {
            size_t index;
            bool made;
            if (node->next[k].node == NULL && node->next[k].leaf == NULL)
                continue;
            tutti_status status = take_task(run, &node->next[k], &index, &made);
            if (status != TUTTI_OK)
                return status;
            run->tasks[index].waiting++;
        }
    }
    return TUTTI_OK;
}

/* ---- who is needed ---- */

static bool wished(const backward *run, const task *one) {
    for (size_t i = 0; i < run->wish_count; i++)
        if (run->wishes[i].key == (one->node != NULL ? (void *)one->node : (void *)one->leaf))
            return true;
    return false;
}

/* Marks tasks from which a wish can be reached, by repeated sweeps from the bottom; graphs are nearly sorted, so that
 * few are needed. */
static void mark_needed(backward *run) {
    bool changed = true;
    while (changed) {
        changed = false;
        for (size_t i = run->task_count; i-- > 0;) {
            task *one = &run->tasks[i];
            for (int k = 0; one->node != NULL && !one->needed && k < one->node->input_count; k++) {
                const task *next = find_task(run, &one->node->next[k]);
                if (next != NULL && (next->needed || wished(run, next)))
                    one->needed = changed = true;
            }
        }
    }
}

/* ---- the heap of ready tasks ---- */

static uint64_t rank_of(const task *one) {
    return one->node != NULL ? one->node->sequence : UINT64_MAX;
}

/* Higher sequence first; of leaves, the one that was found first. */
static bool before(const backward *run, size_t left, size_t right) {
    uint64_t of_left = rank_of(&run->tasks[left]), of_right = rank_of(&run->tasks[right]);
    return of_left != of_right ? of_left > of_right : left < right;
}

static tutti_status push_ready(backward *run, size_t index) {
    tutti_status status;
    if (run->ready_count == run->ready_capacity &&
        (status = grow((void **)&run->ready, sizeof *run->ready, &run->ready_capacity)) != TUTTI_OK)
        return status;
    size_t at = run->ready_count++;
    for (; at > 0 && before(run, index, run->ready[(at - 1) / 2]); at = (at - 1) / 2)
        run->ready[at] = run->ready[(at - 1) / 2];
    run->ready[at] = index;
    return TUTTI_OK;
}

static size_t pop_ready(backward *run) {
    size_t top = run->ready[0], last = run->ready[--run->ready_count], at = 0;
    for (;;) {
        size_t child = at * 2 + 1;
        if (child >= run->ready_count)
            break;
        if (child + 1 < run->ready_count && before(run, run->ready[child + 1], run->ready[child]))
            child++;
        if (before(run, last, run->ready[child]))
            break;
        run->ready[at] = run->ready[child];
        at = child;
    }
    run->ready[at] = last;
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
    tt_tensor *grad = *result;
    tt_tensor *fitted = grad;
    if (grad->ndim != shape->ndim ||
        memcmp(grad->sizes, shape->sizes, (size_t)grad->ndim * sizeof grad->sizes[0]) != 0) {
        fitted = tt_sum_to(grad, tt_dims_of(shape->ndim, shape->sizes));
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
        return tu_error(TUTTI_ERROR_ARGUMENT, "the gradient %s of an input of %s is on another device",
                        tu_describe(grad), node->name);
    *result = fitted;
    return fitted == NULL ? tu_self()->pending : TUTTI_OK;
}

/* ---- leaves ---- */

static bool same_layout(const tt_tensor *left, const tt_tensor *right) {
    for (int i = 0; i < left->ndim; i++)
        if (left->sizes[i] > 1 && left->strides[i] != right->strides[i])
            return false;
    return true;
}

/* Whether grad can become the gradient of leaf as it is: nobody else has it, and it lies as it should. */
static bool can_keep(const tt_tensor *leaf, const tt_tensor *grad) {
    if (!is_alone(grad) || grad->offset != 0)
        return false;
    return tu_is_dense(leaf) ? same_layout(leaf, grad) : (grad->flags & TU_CONTIGUOUS) != 0;
}

static tt_tensor *copy_for(tt_tensor *leaf, tt_tensor *grad) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = leaf->device;
    tt_tensor *copy = tu_is_dense(leaf) ? tt_empty_strided(tu_sizes(leaf), tu_strides(leaf), leaf->dtype, &options)
                                        : tt_empty(tu_sizes(leaf), leaf->dtype, &options);
    tt_copy_(copy, grad);
    if (copy != NULL && copy->version_home == copy->storage)
        atomic_store_explicit(&copy->storage->version, 0, memory_order_relaxed);
    return copy;
}

/* Unless an error is pending, `updated` takes the place of the gradient. */
static void replace_grad(tu_history *history, tt_tensor *updated) {
    if (tu_self()->pending != TUTTI_OK)
        return;
    tu_tensor_hold(updated);
    tu_tensor_drop(history->grad);
    history->grad = updated;
}

/* Under the lock of the leaf. */
static tutti_status add_to_leaf(tt_tensor *leaf, tt_tensor *grad) {
    tu_history *history = leaf->history;
    tt_scope scope = tt_scope_open();
    if (history->grad != NULL && !tt_grad_enabled()) {
        tt_add_(history->grad, grad);
    } else {
        replace_grad(history, history->grad != NULL ? tt_add(history->grad, grad)
                              : tt_grad_enabled()   ? tt_clone(grad)
                                                    : copy_for(leaf, grad));
    }
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* Adds into the leaf's own gradient, or makes `grad` itself that gradient. Several threads may end their backwards in
 * one leaf: each addition is whole. */
static tutti_status accumulate(tt_tensor *leaf, tt_tensor *grad) {
    tu_history *history = tu_history_of(leaf);
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&history->grad_lock);
    if (history->grad == NULL && !tt_grad_enabled() && can_keep(leaf, grad))
        history->grad = tu_tensor_hold(grad);
    else
        status = add_to_leaf(leaf, grad);
    pthread_mutex_unlock(&history->grad_lock);
    return status;
}

tutti_status tu_accumulate_grad_everywhere(tu_call *call) {
    return accumulate(call->inputs[0], call->inputs[1]);
}

tt_tensor *tu_accumulate_grad_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    tu_accumulate_grad(x, tt_mul_scalar(x, 2), NULL);
    tu_accumulate_grad(x, x, NULL);
    return tt_detach(tt_grad(x));
}

tutti_status tu_run_accumulate_hooks(tt_tensor *leaf) {
    tu_hook_list snapshot;
    if (leaf->history == NULL) /* while a capture runs: its gradient is that of what stands for it */
        return TUTTI_OK;
    tutti_status status = tu_hooks_to_run(&tu_history_at(leaf)->accumulate_hooks, &snapshot);
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

/* Whether the input of a wish has its gradient already: one that retains it, and one that was named before. A leaf
 * collects by itself. */
static bool has_collected(const backward *run, size_t number) {
    const tt_tensor *input = run->wishes[number].input;
    bool collected = input->history != NULL && tu_history_at(input)->retains_grad;
    for (size_t i = 0; i < number; i++)
        collected = collected || (run->wishes[i].input == input && run->wishes[i].result == NULL);
    return collected;
}

/* Hands the complete gradient of (key, slot) to whom wants it. Returns in *caught whether a leaf's gradient went there
 * instead of into the leaf. */
static tutti_status grant(backward *run, const void *key, int slot, tt_tensor *grad, bool *caught) {
    tutti_status status = TUTTI_OK;
    *caught = false;
    for (size_t i = 0; i < run->wish_count && status == TUTTI_OK; i++) {
        wish *wanted = &run->wishes[i];
        if (wanted->key != key || wanted->slot != slot || grad == NULL)
            continue;
        if (wanted->result != NULL) {
            tu_tensor_drop(*wanted->result);
            *wanted->result = tu_tensor_hold(grad);
            *caught = true;
        } else if (key != wanted->input && !has_collected(run, i)) {
            tu_accumulate_grad(wanted->input, grad, NULL);
            status = tu_self()->pending;
        }
    }
    return status;
}

/* ---- running a task ---- */

static tutti_status run_leaf(backward *run, task *one) {
    tt_tensor *leaf = one->leaf, *grad = one->grads[0];
    bool caught;
    if (grad == NULL || !(leaf->flags & TU_REQUIRES_GRAD))
        return TUTTI_OK;
    tutti_status status =
        leaf->history != NULL
            ? tu_run_tensor_hooks(tu_describe(leaf), &tu_history_at(leaf)->tensor_hooks, &one->grads[0])
            : TUTTI_OK;
    grad = one->grads[0];
    if (status == TUTTI_OK)
        status = grant(run, leaf, 0, grad, &caught);
    if (status != TUTTI_OK || (run->restricted && (caught || !wished(run, one))))
        return status;
    bool good = tu_accumulate_grad(leaf, grad, NULL);
    tu_tensor_drop(grad); /* a hook may take it off the leaf: then its memory goes, and not with the whole backward */
    one->grads[0] = NULL;
    return good ? tu_run_accumulate_hooks(leaf) : tu_self()->pending;
}

static tutti_status retain(tt_tensor *x, tt_tensor *grad) {
    tu_history *history = x->history;
    tt_scope scope = tt_scope_open();
    replace_grad(history, history->grad == NULL ? tt_clone(tt_contiguous(grad)) : tt_add(history->grad, grad));
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* Tensor hooks, then retained gradients, of all slots. */
static tutti_status before_node(task *one) {
    tu_node_hooks *hooks = one->node->hooks;
    tutti_status status = TUTTI_OK;
    for (int i = 0; hooks != NULL && i < one->slots && status == TUTTI_OK; i++)
        status = tu_run_tensor_hooks(one->node->name, &hooks->tensor[i], &one->grads[i]);
    for (int i = 0; hooks != NULL && i < one->slots && status == TUTTI_OK; i++)
        if (hooks->retained[i] != NULL && one->grads[i] != NULL)
            status = retain(hooks->retained[i], one->grads[i]);
    return status;
}

static tutti_status run_pre_hooks(task *one) {
    tu_hook_list snapshot;
    if (one->node->hooks == NULL)
        return TUTTI_OK;
    tutti_status status = tu_hooks_to_run(&one->node->hooks->pre, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        tt_scope scope = tt_scope_open();
        tt_tensor *grads[TT_FUNCTION_TENSORS] = { NULL };
        int count = one->slots < TT_FUNCTION_TENSORS ? one->slots : TT_FUNCTION_TENSORS;
        memcpy(grads, one->grads, (size_t)count * sizeof *grads);
        ((tt_node_pre_hook *)hook->function)(&context, (size_t)count, grads);
        status = tu_self()->pending;
        if (status == TUTTI_OK)
            status = tu_pending_take(tu_tensors_check(one->node->name, "gradient of a hook", grads, (size_t)count));
        for (int k = 0; k < count && status == TUTTI_OK; k++) {
            if (grads[k] == one->grads[k])
                continue;
            tu_tensor_hold(grads[k]);
            tu_tensor_drop(one->grads[k]);
            one->grads[k] = grads[k];
        }
        tu_scope_leave(&scope);
    }
    tu_hook_list_free(&snapshot);
    return status;
}

/* `results` are the scope's; hooks may put others there. */
static tutti_status run_post_hooks(task *one, tt_tensor **results) {
    tu_hook_list snapshot;
    if (one->node->hooks == NULL)
        return TUTTI_OK;
    tutti_status status = tu_hooks_to_run(&one->node->hooks->post, &snapshot);
    for (int i = 0; i < snapshot.count && status == TUTTI_OK; i++) {
        tt_hook *hook = snapshot.at[i];
        tt_hook_context context = { hook->user, { hook->captured_count, hook->captured } };
        ((tt_node_post_hook *)hook->function)(&context, (size_t)one->node->input_count, results, (size_t)one->slots,
                                              one->grads);
        status = tu_self()->pending;
        if (status == TUTTI_OK)
            status = tu_pending_take(
                tu_tensors_check(one->node->name, "gradient of a hook", results, (size_t)one->node->input_count));
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

static tutti_status compute(backward *run, task *one, tt_tensor **results) {
    tu_node *node = one->node;
    bool any = false;
    for (int i = 0; i < one->slots; i++)
        any = any || one->grads[i] != NULL;
    bool runs = any || node->sees_nothing;
    if (runs && node->released)
        return tu_pending_take(tu_node_freed_error(node));
    if (runs)
        node->run(node, one->grads, results);
    tutti_status status = tu_self()->pending;
    for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
        if (!node->needs[i] && node->next[i].node == NULL && node->next[i].leaf == NULL)
            results[i] = NULL;
        if (results[i] != NULL)
            status = fit_gradient(node, i, &results[i]);
    }
    if (status == TUTTI_OK)
        status = run_post_hooks(one, results);
    if (!run->retain_graph)
        tu_node_release_saved(node);
    return status;
}

/* Passes results on to the tasks they belong to. */
static tutti_status deliver(backward *run, tu_node *node, tt_tensor **results) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
        const tu_edge *edge = &node->next[i];
        task *next = find_task(run, edge);
        if (next == NULL)
            continue;
        status = add_gradient(&next->grads[edge->node != NULL ? edge->slot : 0], results[i]);
        if (status == TUTTI_OK && --next->waiting == 0)
            status = push_ready(run, (size_t)(next - run->tasks));
    }
    return status;
}

static tutti_status run_node(backward *run, task *one) {
    tu_node *node = one->node;
    bool caught;
    tutti_status status = before_node(one);
    for (int i = 0; i < one->slots && status == TUTTI_OK && run->wish_count > 0; i++)
        status = grant(run, node, i, one->grads[i], &caught);
    tt_tensor *few[16] = { NULL };
    tt_tensor **results = node->input_count <= 16 ? few : calloc((size_t)node->input_count, sizeof *results);
    if (status == TUTTI_OK && results == NULL)
        status = tu_error_memory("gradients of a node", (size_t)node->input_count * sizeof *results);
    bool runs = !run->restricted || one->needed;
    if (status == TUTTI_OK && runs && (status = run_pre_hooks(one)) == TUTTI_OK) {
        tt_scope scope = tt_scope_open();
        status = compute(run, one, results);
        for (int i = 0; i < node->input_count; i++)
            results[i] = status == TUTTI_OK ? tu_tensor_hold(results[i]) : NULL;
        tu_scope_leave(&scope);
    }
    for (int i = 0; i < one->slots;
         i++) { /* before delivery, so that a gradient passed through is seen by its new holder alone */
        tu_tensor_drop(one->grads[i]);
        one->grads[i] = NULL;
    }
    size_t index = (size_t)(one - run->tasks);
    if (status == TUTTI_OK)
        status = deliver(run, node, results);
    for (int i = 0; results != NULL && i < node->input_count; i++)
        tu_tensor_drop(results[i]);
    if (results != few)
        free(results);
    return status == TUTTI_OK ? status : blame(run->tasks[index].node, status);
}

static tutti_status run_all(backward *run) {
    tutti_status status = TUTTI_OK;
    while (run->ready_count > 0 && status == TUTTI_OK) {
        task *one = &run->tasks[pop_ready(run)];
        status = one->node != NULL ? run_node(run, one) : run_leaf(run, one);
    }
    for (size_t i = 0; i < run->callback_count && status == TUTTI_OK; i++) { /* a callback may queue more */
        tt_scope scope = tt_scope_open();
        run->callbacks[i].function(run->callbacks[i].user);
        tu_scope_leave(&scope);
        status = tu_self()->pending;
    }
    return status;
}

/* ---- one backward ---- */

static void finish(backward *run) {
    for (size_t i = 0; i < run->task_count; i++) {
        task *one = &run->tasks[i];
        for (int k = 0; k < one->slots; k++)
            tu_tensor_drop(one->grads[k]);
        free(one->grads);
        tu_tensor_drop(one->leaf);
        tu_node_drop(one->node);
    }
    free(run->tasks);
    free(run->table);
    free(run->ready);
    free(run->callbacks);
}

static tutti_status seed(backward *run, tt_tensor *root, tt_tensor *grad) {
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
            grad = tt_sum_to(grad, tu_sizes(root));
        if (grad != NULL && grad->dtype != root->dtype)
            grad = tt_to(grad, root->dtype);
    }
    if (grad == NULL)
        return tu_self()->pending;
    tu_edge edge;
    size_t index;
    bool made;
    tutti_status status = tu_edge_to(root, &edge);
    if (status == TUTTI_OK && (status = take_task(run, &edge, &index, &made)) == TUTTI_OK)
        status = add_gradient(&run->tasks[index].grads[edge.node != NULL ? edge.slot : 0], grad);
    tu_edge_drop(&edge);
    return status;
}

static tutti_status seed_all(backward *run, tt_tensor_list roots, tt_tensor_list grads) {
    if (roots.count == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "backward: no roots given");
    if (grads.count != 0 && grads.count != roots.count)
        return tu_error(TUTTI_ERROR_ARGUMENT, "backward: %zu gradients given for %zu roots", grads.count, roots.count);
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < roots.count && status == TUTTI_OK; i++) {
        status = tu_tensor_check("backward", "roots", roots.at[i]);
        tt_tensor *root = status != TUTTI_OK ? NULL : run->traced ? roots.at[i] : tu_stand_in(roots.at[i]);
        if (status == TUTTI_OK)
            status = root == NULL ? TUTTI_ERROR_MEMORY : seed(run, root, grads.count == 0 ? NULL : grads.at[i]);
    }
    return status;
}

static tutti_status make_wishes(backward *run, tt_tensor_list inputs, tt_tensor **results) {
    for (size_t i = 0; i < inputs.count; i++) {
        tt_tensor *x = inputs.at[i];
        tu_edge edge;
        tutti_status status = tu_tensor_check("backward", "inputs", x);
        if (status == TUTTI_OK && (x = tu_stand_in(x)) == NULL)
            status = TUTTI_ERROR_MEMORY;
        if (status == TUTTI_OK)
            tu_history_refresh(x);
        if (status == TUTTI_OK && !(x->flags & TU_REQUIRES_GRAD))
            status = tu_error(TUTTI_ERROR_STATE, "backward: input %s does not require grad", tu_describe(x));
        if (status == TUTTI_OK)
            status = tu_edge_to(x, &edge);
        if (status != TUTTI_OK)
            return status;
        run->wishes[i] = (wish){ edge.node != NULL ? (void *)edge.node : (void *)edge.leaf,
                                 edge.node != NULL ? edge.slot : 0, x, results != NULL ? &results[i] : NULL };
        tu_edge_drop(&edge); /* the input itself keeps it alive */
        run->wish_count++;
    }
    return TUTTI_OK;
}

static tutti_status run_backward(backward *run, tt_tensor_list roots, tt_tensor_list grads, tt_tensor_list inputs,
                                 tt_tensor **results) {
    tutti_status status = seed_all(run, roots, grads);
    if (status == TUTTI_OK && inputs.count > 0) {
        run->restricted = true;
        run->wishes = calloc(inputs.count, sizeof *run->wishes);
        status = run->wishes == NULL ? tu_error_memory("a backward", inputs.count * sizeof *run->wishes)
                                     : make_wishes(run, inputs, results);
    }
    size_t root_count = run->task_count;
    if (status == TUTTI_OK)
        status = discover(run);
    if (status == TUTTI_OK && run->restricted)
        mark_needed(run);
    for (size_t i = 0; i < root_count && status == TUTTI_OK; i++)
        if (run->tasks[i].waiting == 0)
            status = push_ready(run, i);
    return status == TUTTI_OK ? run_all(run) : status;
}

static tutti_status run_here(tt_tensor_list roots, tt_tensor_list grads, tt_tensor_list inputs, tt_tensor **results,
                             const tt_backward_options *options, bool traced) {
    tu_thread *self = tu_self();
    backward *outer = self->backward;
    backward run = { .outer = outer,
                     .number = outer != NULL ? outer->number : ++self->backwards,
                     .depth = outer != NULL ? outer->depth + 1 : 1,
                     .create_graph = options->create_graph,
                     .retain_graph = options->retain_graph || options->create_graph,
                     .traced = traced };
    if (run.depth > DEEPEST)
        return tu_fail(TUTTI_ERROR_LIMIT, "backward: %d backwards run inside each other, which is the limit", DEEPEST);
    bool recording = tt_grad_mode(options->create_graph);
    tt_scope scope = tt_scope_open();
    self->backward = &run;
    tutti_status status = tu_pending_take(run_backward(&run, roots, grads, inputs, results));
    self->backward = outer;
    free(run.wishes);
    finish(&run);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return status;
}

tu_backward_runner *tu_backward_runner_set(tu_backward_runner *runner) {
    tu_backward_runner *before = tu_self()->backward_runner;
    tu_self()->backward_runner = runner;
    return before;
}

uint64_t tu_backward_number(void) {
    const backward *run = tu_self()->backward;
    return run != NULL ? run->number : 0;
}

tutti_status tu_backward_traced(tt_tensor_list roots, tt_tensor_list grads) {
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.retain_graph = true;
    return run_here(roots, grads, (tt_tensor_list){ 0, NULL }, NULL, &options, true);
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
    tt_tensor_list wanted = inputs.count > 0 ? inputs : options.inputs;
    tu_backward_runner *runner = self->backward_runner;
    if (runner != NULL && self->backward == NULL && !tu_is_capturing() && wanted.count == 0 && !options.create_graph &&
        runner->run(runner, roots, grads, options.retain_graph, &status))
        return tu_pending_take(status);
    return self->pending != TUTTI_OK ? self->pending : run_here(roots, grads, wanted, results, &options, false);
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
    tt_tensor_list none = { 0, tu_nothing };
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
    backward *run = tu_self()->backward;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (run == NULL) {
        tu_fail(
            TUTTI_ERROR_STATE,
            "backward_callback: final callbacks can only be installed during a backward, and none runs in this thread");
        return false;
    }
    if (run->callback_count == run->callback_capacity &&
        tu_pending_take(grow((void **)&run->callbacks, sizeof *run->callbacks, &run->callback_capacity)) != TUTTI_OK)
        return false;
    run->callbacks[run->callback_count++] = (callback){ function, user };
    return true;
}
