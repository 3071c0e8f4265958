/* SPDX-License-Identifier: Apache-2.0
 *
 * Guards: when an entry may run. They are looked at in every call: one pass over the inputs, and one over the modules
 * that the function looked at. Budget: two microseconds, and fifty nanoseconds an input.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "compile/entry.h"
#include "tensor/operators.h"

#define FLAGS (TU_REQUIRES_GRAD | TU_IS_PARAMETER)

/* ---- making ---- */

static uint32_t hooks_of(const tt_tensor *x) {
    const tu_history *history = x->history;
    return history == NULL ? 0 : tu_hook_changes(&history->tensor_hooks) + tu_hook_changes(&history->accumulate_hooks);
}

/* Whether an absolute offset into the storage is part of the graph. */
static bool has_offsets(const tt_graph *graph, int storage) {
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        if (vertex->entry == &tu_operator_as_strided && vertex->operands[0].value->storage == storage)
            return true;
    return false;
}

static void describe(tu_guard *guard, const tt_tensor *x, int64_t *dims) {
    guard->device = x->device;
    guard->dtype = x->dtype;
    guard->dim_count = x->ndim;
    guard->flags = x->flags & FLAGS;
    guard->offset = -1;
    guard->row_major = x->flags & TU_CONTIGUOUS;
    guard->is_short = tu_tensor_need(x) > x->storage->bytes;
    memcpy(dims, x->sizes, (size_t)x->ndim * sizeof *dims);
    memcpy(dims + x->ndim, x->strides, (size_t)x->ndim * sizeof *dims);
    guard->dims = dims;
}

static tutti_status make_room(tu_guards *guards, int count, int position_count, const int *first) {
    guards->count = count;
    guards->position_count = position_count;
    guards->grad_mode = tt_grad_enabled();
    guards->first = calloc((size_t)position_count + 1, sizeof *guards->first);
    guards->list = calloc((size_t)count + 1, sizeof *guards->list);
    guards->dims = calloc((size_t)count * 2 * TT_MAX_DIMS + 1, sizeof *guards->dims);
    if (guards->first == NULL || guards->list == NULL || guards->dims == NULL)
        return tu_error_memory("guards", (size_t)count * sizeof *guards->list);
    if (position_count > 0)
        memcpy(guards->first, first, (size_t)position_count * sizeof *first);
    for (guards->table_size = 8; guards->table_size < 2 * count; guards->table_size *= 2)
        ;
    return TUTTI_OK;
}

/* Where the index-th tensor that is no repetition stands among the inputs of a call. */
static int position_of(const tu_guards *guards, int index) {
    int position = 0;
    while (guards->first[position] != position || index-- > 0)
        position++;
    return position;
}

static void take_witnesses(tu_guards *guards, tu_captured *captured) {
    guards->witness_count = captured->witness_count;
    guards->witnesses = captured->witnesses;
    guards->stamps = captured->stamps;
    captured->witness_count = 0;
    captured->witnesses = NULL;
    captured->stamps = NULL;
}

tutti_status tu_guards_make(tu_guards *guards, tu_captured *captured, int position_count, const int *first,
                            tt_tensor *const *inputs) {
    const tt_graph *graph = captured->graph;
    tutti_status status = make_room(guards, captured->input_count, position_count, first);
    if (status != TUTTI_OK)
        return status;
    guards->inner_backward = captured->inner_backward;
    guards->storage_count = graph->storage_count;
    int64_t *dims = guards->dims;
    for (int i = 0; i < guards->count; i++) {
        const tu_graph_input *input = &graph->inputs[i];
        tu_guard *guard = &guards->list[i];
        *guard = (tu_guard){ .kind = input->kind, .index = input->index, .tensor = input->tensor };
        if (input->kind == TU_INPUT_ARGUMENT)
            guard->index = position_of(guards, input->index);
        describe(guard, inputs[i], dims);
        dims += 2 * inputs[i]->ndim;
        guard->holder = &input->holder;
        guard->storage = input->value->storage;
        guard->has_node = input->has_node;
        guard->asks_gradient = input->asks_gradient;
        guard->has_gradient = input->has_gradient;
        guard->asks_bytes = input->asks_bytes;
        guard->bytes = input->bytes;
        guard->hooks = hooks_of(inputs[i]);
        if (has_offsets(graph, guard->storage))
            guard->offset = inputs[i]->offset;
    }
    take_witnesses(guards, captured);
    return TUTTI_OK;
}

tutti_status tu_guards_of_arguments(tu_guards *guards, tu_captured *captured, tt_tensor_list arguments,
                                    const int *first) {
    int count = 0;
    take_witnesses(guards, captured);
    for (size_t i = 0; i < arguments.count; i++)
        count += first[i] == (int)i;
    tutti_status status = make_room(guards, count, (int)arguments.count, first);
    int64_t *dims = guards->dims;
    for (int i = 0, at = 0; i < (int)arguments.count && status == TUTTI_OK; i++) {
        if (first[i] != i)
            continue;
        tt_tensor *x = arguments.at[i];
        tu_guard *guard = &guards->list[at];
        *guard = (tu_guard){ .kind = TU_INPUT_ARGUMENT, .index = i, .storage = -1 };
        describe(guard, x, dims);
        guard->has_node = tu_history_has_node(x);
        dims += 2 * x->ndim;
        at++;
    }
    return status;
}

void tu_guards_end(tu_guards *guards) {
    for (int i = 0; i < guards->witness_count; i++)
        guards->witnesses[i].release(guards->witnesses[i].owner);
    free(guards->witnesses);
    free(guards->stamps);
    free(guards->first);
    free(guards->list);
    free(guards->dims);
    *guards = (tu_guards){ .count = 0 };
}

/* ---- words ---- */

typedef struct why {
    bool any_sizes; /* sizes of arguments are not looked at */
    tt_miss *miss;
    char *words;
    size_t size;
} why;

static bool fails(const why *because, tt_miss miss, const char *format, ...) TUTTI_PRINTF(3, 4);
static bool fails(const why *because, tt_miss miss, const char *format, ...) {
    *because->miss = miss;
    if (because->words != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(because->words, because->size, format, arguments);
        va_end(arguments);
    }
    return false;
}

/* "input 2", "a module's slot" … */
static const char *place_of(const tu_guard *guard, char *buffer, size_t size) {
    if (guard->kind == TU_INPUT_ARGUMENT)
        snprintf(buffer, size, "input %d", guard->index);
    else
        snprintf(buffer, size, "%s",
                 guard->kind == TU_INPUT_HELD       ? "what a module's slot holds"
                 : guard->kind == TU_INPUT_GRADIENT ? "a gradient"
                                                    : "a constant");
    return buffer;
}

/* ---- looking ---- */

static tt_tensor *fetch(const tu_guard *guard, tt_tensor_list arguments, tt_tensor *const *inputs) {
    switch (guard->kind) {
    case TU_INPUT_ARGUMENT:
        return tu_tensor_hold(arguments.at[guard->index]);
    case TU_INPUT_CONSTANT:
        return tu_tensor_hold(guard->tensor);
    case TU_INPUT_HELD:
        return tu_tensor_hold(guard->holder->get(guard->holder->owner, guard->holder->index));
    case TU_INPUT_GRADIENT: {
        tu_history *history = inputs[guard->index]->history;
        if (history == NULL)
            return NULL;
        pthread_mutex_lock(&history->grad_lock);
        tt_tensor *grad = tu_tensor_hold(history->grad);
        pthread_mutex_unlock(&history->grad_lock);
        return grad;
    }
    default:
        return NULL;
    }
}

static bool shape_holds(const tu_guard *guard, const tt_tensor *x, const why *because) {
    char place[64];
    size_t bytes = (size_t)guard->dim_count * sizeof *guard->dims;
    if (x->dtype != guard->dtype || x->device != guard->device)
        return fails(because, TT_MISS_DTYPE, "%s is %s on %s, and was %s on %s", place_of(guard, place, sizeof place),
                     tu_describe(x), tutti_device_name(x->device), tutti_dtype_name((tutti_dtype)guard->dtype),
                     tutti_device_name(guard->device));
    if (because->any_sizes && guard->kind == TU_INPUT_ARGUMENT)
        return x->ndim == guard->dim_count && guard->row_major && x->flags & TU_CONTIGUOUS && guard->offset < 0;
    if (x->ndim != guard->dim_count || memcmp(x->sizes, guard->dims, bytes) != 0)
        return fails(because, TT_MISS_SIZES, "%s is %s, and was %s", place_of(guard, place, sizeof place),
                     tu_describe(x), tu_dims_text(guard->dim_count, guard->dims));
    if (memcmp(x->strides, guard->dims + guard->dim_count, bytes) != 0)
        return fails(because, TT_MISS_SIZES, "%s, %s, has strides %s, and had %s", place_of(guard, place, sizeof place),
                     tu_describe(x), tu_dims_text(x->ndim, x->strides),
                     tu_dims_text(guard->dim_count, guard->dims + guard->dim_count));
    if (guard->offset >= 0 && guard->offset != x->offset)
        return fails(because, TT_MISS_SIZES, "%s, %s, begins at element %lld of its storage, and began at %lld",
                     place_of(guard, place, sizeof place), tu_describe(x), (long long)x->offset,
                     (long long)guard->offset);
    return true;
}

static bool history_holds(const tu_guards *guards, const tu_guard *guard, tt_tensor *x, const why *because) {
    char place[64];
    if (x->history != NULL && !(x->flags & TU_REQUIRES_GRAD))
        tu_history_refresh(x);
    if ((x->flags & FLAGS) != guard->flags || tu_history_has_node(x) != guard->has_node)
        return fails(because, TT_MISS_REQUIRES_GRAD,
                     "%s, %s, %s; it was%s a parameter, required%s grad and was%s computed",
                     place_of(guard, place, sizeof place), tu_describe(x),
                     x->flags & TU_REQUIRES_GRAD ? "requires grad" : "does not require grad",
                     guard->flags & TU_IS_PARAMETER ? "" : " not", guard->flags & TU_REQUIRES_GRAD ? "" : " no",
                     guard->has_node ? "" : " not");
    if (guard->asks_gradient) {
        const tu_history *history = x->history;
        bool there = history != NULL && history->grad != NULL;
        if (there != guard->has_gradient)
            return fails(because, TT_MISS_GRADIENT, "%s, %s, has %s gradient, and had %s",
                         place_of(guard, place, sizeof place), tu_describe(x), there ? "a" : "no",
                         there ? "none" : "one");
    }
    if (guards->inner_backward && hooks_of(x) != guard->hooks)
        return fails(because, TT_MISS_HOOKS, "%s, %s, has other hooks", place_of(guard, place, sizeof place),
                     tu_describe(x));
    return true;
}

static bool storage_holds(const tu_guard *guard, const tt_tensor *x, const why *because) {
    char place[64];
    size_t bytes = x->storage->bytes;
    if (guard->asks_bytes ? bytes != guard->bytes : (tu_tensor_need(x) > bytes) != guard->is_short)
        return fails(because, TT_MISS_STORAGE, "the storage of %s, %s, has %zu bytes%s",
                     place_of(guard, place, sizeof place), tu_describe(x), bytes,
                     guard->asks_bytes ? ", and had others" : "");
    return true;
}

/* One slot per storage that was met: its number, and the argument that is on it. */
typedef struct seat {
    const tu_storage *storage;
    int number;
} seat;

static bool sharing_holds(const tu_guards *guards, tt_tensor *const *inputs, const why *because) {
    seat few[256];
    const tu_storage *few_owners[128];
    size_t size = (size_t)guards->table_size, numbers = (size_t)guards->storage_count;
    seat *table = size <= 256 ? few : malloc(size * sizeof *table);
    const tu_storage **owners = numbers <= 128 ? few_owners : malloc(numbers * sizeof *owners);
    bool hold = table != NULL && owners != NULL;
    if (hold) {
        memset(table, 0, size * sizeof *table);
        for (int i = 0; i < guards->count; i++)
            if (guards->list[i].storage >= 0)
                owners[guards->list[i].storage] = NULL;
    }
    for (int i = 0; i < guards->count && hold; i++) {
        const tu_storage *storage = inputs[i]->storage;
        int number = guards->list[i].storage;
        if (number < 0)
            continue;
        size_t at = ((uintptr_t)storage >> 6) & (size - 1);
        while (table[at].storage != NULL && table[at].storage != storage)
            at = (at + 1) & (size - 1);
        hold = table[at].storage == NULL ? owners[number] == NULL : table[at].number == number;
        table[at] = (seat){ storage, number };
        owners[number] = storage;
    }
    if (table != few)
        free(table);
    if (owners != few_owners)
        free(owners);
    return hold || fails(because, TT_MISS_SHARING, "other inputs share memory than did before");
}

static bool positions_hold(const tu_guards *guards, tt_tensor_list arguments, const why *because) {
    if (arguments.count != (size_t)guards->position_count)
        return fails(because, TT_MISS_COUNT, "%zu inputs are given, and there were %d", arguments.count,
                     guards->position_count);
    for (int i = 0; i < guards->position_count; i++)
        if (guards->first[i] != i ? arguments.at[i] != arguments.at[guards->first[i]] : false)
            return fails(because, TT_MISS_SHARING, "inputs %d and %d are two tensors, and were one", guards->first[i],
                         i);
    for (int i = 1; i < guards->position_count; i++) /* two handles that have become one: on one storage only */
        for (int k = 0; k < i; k++)
            if (arguments.at[i] == arguments.at[k] && guards->first[i] != guards->first[k])
                return fails(because, TT_MISS_SHARING, "inputs %d and %d are one tensor, and were two", k, i);
    return true;
}

static bool witnesses_hold(const tu_guards *guards, const why *because) {
    for (int i = 0; i < guards->witness_count; i++)
        if (guards->witnesses[i].stamp(guards->witnesses[i].owner) != guards->stamps[i])
            return fails(because, TT_MISS_MODULE,
                         "a module that the function calls has other hooks, slots or children, or another training "
                         "flag");
    return true;
}

static bool look(const tu_guards *guards, tt_tensor_list arguments, tt_tensor **inputs, const why *because) {
    if (!positions_hold(guards, arguments, because))
        return false;
    if (guards->grad_mode != tt_grad_enabled())
        return fails(because, TT_MISS_MODE, "gradient mode is %s, and was not", guards->grad_mode ? "off" : "on");
    char place[64];
    int count = 0;
    bool hold = true;
    for (; count < guards->count && hold; count++) {
        const tu_guard *guard = &guards->list[count];
        tt_tensor *x = inputs[count] = fetch(guard, arguments, inputs);
        hold = x == NULL ? fails(because, guard->kind == TU_INPUT_GRADIENT ? TT_MISS_GRADIENT : TT_MISS_MODULE,
                                 "%s is not there any more", place_of(guard, place, sizeof place))
                         : shape_holds(guard, x, because) && history_holds(guards, guard, x, because) &&
                               storage_holds(guard, x, because);
    }
    hold = hold && sharing_holds(guards, inputs, because) && witnesses_hold(guards, because);
    for (int i = 0; i < count && !hold; i++) {
        tu_tensor_drop(inputs[i]);
        inputs[i] = NULL;
    }
    return hold;
}

bool tu_guards_hold(const tu_guards *guards, tt_tensor_list arguments, tt_tensor **inputs, tt_miss *miss, char *words,
                    size_t size) {
    return look(guards, arguments, inputs, &(why){ false, miss, words, size });
}

bool tu_guards_hold_but_sizes(const tu_guards *guards, tt_tensor_list arguments, tt_tensor **inputs) {
    tt_miss miss;
    return look(guards, arguments, inputs, &(why){ true, &miss, NULL, 0 });
}
