/* SPDX-License-Identifier: Apache-2.0
 *
 * Capturing: the function runs once, and every operator that it calls becomes a vertex.
 *
 * A real tensor that is met gets a stand-in: a tensor with the same metadata on a fake storage, which real tensors that
 * share memory share too. The stand-in takes the tensor's place in operators and in questions about what changes:
 * gradients, versions, storage sizes. So the function sees its own effects, autograd works as ever, and no real tensor
 * changes. An input of the graph is made when an operator first uses the stand-in.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "autograd/operators.h"
#include "functional/operators.h"
#include "graph/capture.h"
#include "graph/passes.h"
#include "tensor/map.h"

/* ---- storages ---- */

/* A fake begins with the version of what it stands for: a number between that and what it has become, set again, is
 * taken for one that the function read, and becomes relative to what the version is when the graph runs. */
static tu_fake_storage *add_storage(tu_capture *to, tu_storage *storage, int number, uint32_t version) {
    tu_fake_storage *known = calloc(1, sizeof *known);
    if (known == NULL || tu_map_set(&to->storage_of_fake, storage, known) != TUTTI_OK) {
        free(known);
        tu_error_memory("what a capture remembers", sizeof *known);
        return NULL;
    }
    *known = (tu_fake_storage){ .next = to->storages, .storage = tu_storage_hold(storage), .number = number };
    known->version = version;
    atomic_store_explicit(&storage->version, known->version, memory_order_relaxed);
    to->storages = known;
    return known;
}

tu_fake_storage *tu_capture_storage(tu_capture *to, tu_storage *storage, uint32_t version) {
    return add_storage(to, storage, to->graph->storage_count++, version);
}

static tu_fake_storage *stand_in_storage(tu_capture *to, tu_storage *real) {
    tu_fake_storage *known = tu_map_get(&to->storage_of_real, real);
    if (known != NULL)
        return known;
    tu_storage *fake = tu_storage_new_fake(real->device, real->bytes);
    uint32_t version = atomic_load_explicit(&real->version, memory_order_relaxed);
    known = fake != NULL ? tu_capture_storage(to, fake, version) : NULL;
    tu_storage_drop(fake); /* the capture holds it now */
    if (known != NULL && tu_map_set(&to->storage_of_real, real, known) != TUTTI_OK)
        return NULL;
    return known;
}

/* ---- tensors ---- */

static tutti_status hold(tu_capture *to, tt_tensor *x) {
    if (to->held_count == to->held_capacity) {
        size_t capacity = to->held_capacity == 0 ? 64 : to->held_capacity * 2;
        tt_tensor **held = realloc(to->held, capacity * sizeof *held);
        if (held == NULL)
            return tu_error_memory("what a capture remembers", capacity * sizeof *held);
        to->held = held;
        to->held_capacity = capacity;
    }
    to->held[to->held_count++] = tu_tensor_hold(x);
    return TUTTI_OK;
}

tutti_status tu_capture_bind(tu_capture *to, tt_tensor *x, tu_value *value) {
    tutti_status status = hold(to, x);
    if (status == TUTTI_OK)
        status = tu_map_set(&to->values, x, value);
    tu_fake_storage *storage = tu_map_get(&to->storage_of_fake, x->storage);
    if (status == TUTTI_OK && storage != NULL)
        status = tu_map_set(&to->storage_of_value, value, storage);
    if (status == TUTTI_OK && storage != NULL && storage->any == NULL) {
        storage->any = value;
        storage->example = x;
    }
    return status;
}

static void leave_graph(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_meeting *met = node->detail;
    tu_capture *to = (tu_capture *)tu_self()->recorder;
    (void)results;
    if (met == NULL || !tu_is_capturing() || !to->backward)
        tu_fail(TUTTI_ERROR_CAPTURE,
                "capture: a backward inside the function reaches %s, which was computed outside of it; compile both "
                "together, or detach it",
                met != NULL ? tu_describe(met->real) : "an input");
    else
        tu_pending_take(tu_capture_arrival(to, met->fake, grads[0]));
}

/* What was computed outside of the function has a history there. Its stand-in has a node in the place of that, so that
 * it may be written as the real one may, and where gradients arrive. */
static tutti_status make_entrance(tu_meeting *met) {
    tu_node *node = tu_node_new("input", 0, 1, 0);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = leave_graph;
    node->detail = met;
    node->outputs[0] = tu_shape_of(met->fake);
    met->entrance = node;
    return tu_history_set(met->fake, node, 0);
}

/* Another handle like `real` on a fake storage, with the hooks of the real one. */
static tt_tensor *make_fake(tu_capture *to, tt_tensor *real) {
    tu_shape shape = tu_shape_of(real);
    tu_fake_storage *storage = stand_in_storage(to, real->storage);
    tu_fake_storage *home = storage != NULL ? stand_in_storage(to, real->version_home) : NULL;
    tt_tensor *fake = home != NULL ? tu_tensor_on(tu_storage_hold(storage->storage), &shape) : NULL;
    if (fake == NULL)
        return NULL;
    if (home != storage)
        fake->version_home = tu_storage_hold(home->storage);
    fake->flags |= real->flags & (TU_REQUIRES_GRAD | TU_IS_PARAMETER | TU_NUMBER);
    fake->name = real->name != NULL ? strdup(real->name) : NULL;
    if (fake->flags & TU_REQUIRES_GRAD) {
        tu_history *history = tu_history_of(fake);
        bool made = history != NULL;
        if (made && real->history != NULL && tu_history_at(real)->node == NULL)
            made =
                tu_hook_list_snapshot(&tu_history_at(real)->tensor_hooks, &history->tensor_hooks) == TUTTI_OK &&
                tu_hook_list_snapshot(&tu_history_at(real)->accumulate_hooks, &history->accumulate_hooks) == TUTTI_OK;
        if (!made) {
            tu_tensor_drop(fake);
            return NULL;
        }
    }
    return fake;
}

static tu_meeting *meet(tu_capture *to, tt_tensor *real, tu_input_kind kind);

/* The gradient of a leaf that is met stands beside it. */
static tutti_status meet_gradient(tu_capture *to, tu_meeting *leaf) {
    tu_history *history = leaf->real->history;
    if (history == NULL)
        return TUTTI_OK;
    pthread_mutex_lock(&history->grad_lock);
    tt_tensor *grad = tu_tensor_hold(history->grad);
    pthread_mutex_unlock(&history->grad_lock);
    if (grad == NULL)
        return TUTTI_OK;
    tu_meeting *met = tu_map_get(&to->by_real, grad);
    if (met == NULL && (met = meet(to, grad, TU_INPUT_GRADIENT)) != NULL)
        met->leaf = leaf;
    tu_tensor_drop(grad); /* the meeting holds it */
    tu_history *own = met != NULL ? tu_history_of(leaf->fake) : NULL;
    if (own == NULL)
        return TUTTI_ERROR_MEMORY;
    own->grad = tu_tensor_hold(met->fake);
    return TUTTI_OK;
}

static tu_meeting *meet(tu_capture *to, tt_tensor *real, tu_input_kind kind) {
    tu_meeting *met = calloc(1, sizeof *met);
    tt_tensor *fake = met != NULL ? make_fake(to, real) : NULL;
    if (fake == NULL) {
        if (met == NULL)
            tu_error_memory("what a capture remembers", sizeof *met);
        free(met);
        return NULL;
    }
    *met = (tu_meeting){ .next = to->meetings, .real = tu_tensor_hold(real), .fake = fake, .kind = kind, .input = -1 };
    to->meetings = met;
    if (fake->history != NULL)
        met->hooks =
            tu_hook_count(&tu_history_at(fake)->tensor_hooks) + tu_hook_count(&tu_history_at(fake)->accumulate_hooks);
    if (tu_history_has_node(real) && make_entrance(met) != TUTTI_OK)
        return NULL;
    if (tu_map_set(&to->by_real, real, met) != TUTTI_OK || tu_map_set(&to->by_fake, fake, met) != TUTTI_OK ||
        (kind != TU_INPUT_GRADIENT && meet_gradient(to, met) != TUTTI_OK))
        return NULL;
    return met;
}

static tt_tensor *stand_in(tu_call_recorder *recorder, tt_tensor *x) {
    tu_capture *to = (tu_capture *)recorder;
    if (x->flags & TU_LITERAL || x->storage->fake)
        return x;
    tu_meeting *met = tu_map_get(&to->by_real, x);
    if (met == NULL)
        met = meet(to, x, TU_INPUT_CONSTANT);
    return met != NULL ? met->fake : NULL;
}

/* ---- values ---- */

/* Letters, digits, points and underscores; others would not be read back. */
static const char *input_name(const tu_meeting *met, char *buffer, size_t size) {
    const char *given = met->real->name;
    if (met->kind == TU_INPUT_GRADIENT)
        given = met->leaf->real->name;
    size_t length = 0;
    for (; given != NULL && given[length] != 0 && length + 8 < size; length++) {
        char one = given[length];
        bool letter = (one >= 'a' && one <= 'z') || (one >= 'A' && one <= 'Z') || one == '_';
        buffer[length] = letter || ((one == '.' || (one >= '0' && one <= '9')) && length > 0) ? one : '_';
    }
    buffer[length] = 0;
    static const char *const taken[] = { "none", "inf", "nan", "infinity" }; /* words of the text */
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (strcmp(buffer, taken[i]) == 0)
            strcat(buffer, "_");
    if (length == 0)
        strcpy(buffer, met->kind == TU_INPUT_ARGUMENT ? "input" : met->kind == TU_INPUT_HELD ? "slot" : "constant");
    if (met->kind == TU_INPUT_GRADIENT)
        strcat(buffer, length > 0 ? ".grad" : "_grad");
    return buffer;
}

static tutti_status add_input(tu_capture *to, tu_meeting *met, tu_value **value) {
    char name[128];
    tu_shape shape = tu_shape_of(met->fake);
    tu_fake_storage *storage = tu_map_get(&to->storage_of_fake, met->fake->storage);
    tu_value *leaf = NULL;
    tutti_status status = TUTTI_OK;
    if (met->kind == TU_INPUT_GRADIENT)
        status = tu_capture_value(to, met->leaf->fake, &leaf);
    tu_value *made = status == TUTTI_OK
                         ? tu_graph_value(to->graph, input_name(met, name, sizeof name), &shape, storage->number)
                         : NULL;
    tu_graph_input *input = made != NULL ? tu_graph_input_add(to->graph, met->kind, made) : NULL;
    if (input == NULL)
        return status != TUTTI_OK ? status : TUTTI_ERROR_MEMORY;
    made->flags = met->real->flags & (TU_REQUIRES_GRAD | TU_IS_PARAMETER);
    met->input = made->place;
    if (met->kind == TU_INPUT_CONSTANT)
        input->tensor = tu_tensor_hold(met->real);
    if (met->kind == TU_INPUT_GRADIENT)
        input->index = leaf->place;
    if (met->kind == TU_INPUT_HELD) {
        input->holder = met->holder;
        met->holder.keep(met->holder.owner);
    }
    *value = made;
    return tu_capture_bind(to, met->fake, made);
}

/* A tensor that no operator made: another handle on memory that the graph knows, such as what a node saved. It is the
 * value of that shape, or a view of one. */
static tutti_status find_alias(tu_capture *to, tt_tensor *x, tu_value **value) {
    tu_shape shape = tu_shape_of(x);
    tu_fake_storage *storage = tu_map_get(&to->storage_of_fake, x->storage);
    for (tu_meeting *met = to->meetings; storage != NULL && storage->any == NULL && met != NULL; met = met->next)
        if (met->fake->storage == x->storage) { /* only other handles on it were met */
            tutti_status status = add_input(to, met, value);
            if (status != TUTTI_OK)
                return status;
        }
    if (storage == NULL || storage->any == NULL)
        return tu_error(TUTTI_ERROR_CAPTURE, "capture: %s was not made by the function that is captured",
                        tu_describe(x));
    for (tu_value *other = to->graph->values; other != NULL; other = other->next)
        if (tu_map_get(&to->storage_of_value, other) == storage && tu_shape_equal(&other->shape, &shape) &&
            other->shape.offset == shape.offset) {
            *value = other;
            return tu_capture_bind(to, x, other);
        }
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tt_tensor *view = storage->example->dtype == x->dtype
                          ? tt_as_strided(storage->example, tt_dims_of(shape.ndim, shape.sizes),
                                          tt_dims_of(shape.ndim, shape.strides), shape.offset)
                          : NULL;
    tutti_status status = tu_self()->pending;
    if (status == TUTTI_OK)
        status = view == NULL ? tu_error(TUTTI_ERROR_CAPTURE, "capture: %s looks at memory that the graph knows as %s",
                                         tu_describe(x), tu_describe(storage->example))
                              : tu_capture_value(to, view, value);
    if (status == TUTTI_OK)
        status = tu_capture_bind(to, x, *value);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return status;
}

tutti_status tu_capture_value(tu_capture *to, tt_tensor *x, tu_value **value) {
    *value = tu_map_get(&to->values, x);
    if (*value != NULL)
        return TUTTI_OK;
    tu_meeting *met = tu_map_get(&to->by_fake, x);
    return met != NULL ? add_input(to, met, value) : find_alias(to, x, value);
}

static tutti_status operand_of(tu_capture *to, tt_tensor *x, tu_operand *operand) {
    *operand = (tu_operand){ .value = NULL };
    if (x == NULL)
        return TUTTI_OK;
    if (!(x->flags & TU_LITERAL)) /* numbers that are computed or kept, such as a learning rate, are values */
        return tu_capture_value(to, x, &operand->value);
    operand->number = (tutti_dtype)x->dtype;
    if (x->dtype == TUTTI_I64)
        operand->at.whole = *(const int64_t *)tu_pointer(x);
    else
        operand->at.real = *(const double *)tu_pointer(x);
    return TUTTI_OK;
}

/* ---- recording ---- */

/* What a row brings, such as a peer's memory, may be the memory of its input, and others may write both: they count as
 * one storage. */
static tu_fake_storage *add_result_storage(tu_capture *to, const tu_call *call, tu_storage *made) {
    const tu_fake_storage *first = call->entry->flags & TU_BRINGS && call->input_count > 0 && call->inputs[0] != NULL
                                       ? tu_map_get(&to->storage_of_fake, call->inputs[0]->storage)
                                       : NULL;
    return add_storage(to, made, first != NULL ? first->number : to->graph->storage_count++, 0);
}

static tutti_status record_results(tu_capture *to, tu_vertex *vertex, const tu_call *call) {
    for (int i = 0; i < vertex->result_count; i++) {
        tt_tensor *output = call->outputs[i];
        tu_shape shape = tu_shape_of(output);
        tu_fake_storage *storage = tu_map_get(&to->storage_of_fake, output->storage);
        if (storage == NULL)
            storage = add_result_storage(to, call, output->storage);
        tu_value *value =
            storage != NULL ? tu_graph_value(to->graph, call->entry->name, &shape, storage->number) : NULL;
        if (value == NULL)
            return TUTTI_ERROR_MEMORY;
        value->maker = vertex;
        value->place = i;
        vertex->results[i] = value;
        tutti_status status = tu_capture_bind(to, output, value);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

/* Operands first: they may need inputs of the graph, or views, which come before the vertex. */
static tutti_status record_vertex(tu_capture *to, const tu_call *call, tu_vertex **made) {
    tu_operand few[TU_INPUTS];
    tu_operand *operands = call->input_count <= TU_INPUTS ? few : calloc((size_t)call->input_count, sizeof *operands);
    tutti_status status = operands != NULL ? TUTTI_OK : tu_error_memory("operands", sizeof *operands);
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = operand_of(to, call->inputs[i], &operands[i]);
    tu_vertex *vertex = NULL;
    if (status == TUTTI_OK) {
        vertex = tu_graph_vertex(to->graph, call->entry, call->input_count, call->in_place ? 0 : call->output_count,
                                 call->attributes, NULL);
        status = vertex != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    }
    if (status == TUTTI_OK) {
        vertex->in_place = call->in_place;
        memcpy(vertex->operands, operands, (size_t)call->input_count * sizeof *operands);
        status = record_results(to, vertex, call);
    }
    if (operands != few)
        free(operands);
    *made = vertex;
    return status;
}

static tutti_status record_wait(tu_capture *to, tu_value *value) {
    tu_wait_attributes none;
    memset(&none, 0, sizeof none);
    tu_vertex *wait = tu_graph_vertex(to->graph, &tu_operator_wait, 1, 0, &none, NULL);
    if (wait == NULL)
        return TUTTI_ERROR_MEMORY;
    wait->operands[0].value = value;
    return TUTTI_OK;
}

/* A collective is a start, and waits for what it writes, which sink to their places when the function has ended. */
static tutti_status record_waits(tu_capture *to, const tu_vertex *vertex) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
        status = record_wait(to, vertex->results[i]);
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
        if (tu_vertex_writes(vertex, i))
            status = record_wait(to, vertex->operands[i].value);
    return status;
}

static bool same_strides(const tt_tensor *left, const tt_tensor *right) {
    return memcmp(left->strides, right->strides, (size_t)left->ndim * sizeof left->strides[0]) == 0;
}

/* What a backward does with a leaf: its gradient is set, or added to in place where it has one. */
static tutti_status record_accumulation(tt_tensor *leaf, tt_tensor *grad) {
    tu_history *history = tu_history_of(leaf);
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    tt_scope scope = tt_scope_open();
    if (history->grad != NULL) {
        if (tt_grad_enabled())
            tt_set_grad(leaf, tt_add(history->grad, grad));
        else
            tt_add_(history->grad, grad);
    } else if (tt_grad_enabled() || !tu_is_dense(leaf) || same_strides(leaf, grad)) {
        tt_set_grad(leaf, tt_clone(grad));
    } else {
        tt_options options = TT_OPTIONS_INIT;
        options.device = leaf->device;
        tt_set_grad(leaf, tt_copy_(tt_empty_strided(tu_sizes(leaf), tu_strides(leaf), leaf->dtype, &options), grad));
    }
    tutti_status status = tu_self()->pending;
    tu_scope_leave(&scope);
    return status;
}

/* Versions that the function read before are kept as what was added to them, below zero. */
static void record_versions(tu_capture *to, tu_vertex *vertex, const tu_call *call) {
    tu_version_set_attributes *attributes = vertex->attributes;
    for (int i = 0; i < call->input_count; i++) {
        const tu_fake_storage *storage = tu_map_get(&to->storage_of_fake, call->inputs[i]->version_home);
        int64_t *version = (int64_t *)attributes->versions.at + i;
        if (storage != NULL && *version >= storage->version && *version <= tu_version(call->inputs[i]))
            *version = -(*version - storage->version) - 1;
    }
}

/* The leaf that a gradient is set of or added to: whether that depends on the gradient that it had. */
static void note_gradient(tu_capture *to, tt_tensor *leaf, bool sets) {
    tu_meeting *met = tu_map_get(&to->by_fake, leaf);
    if (met == NULL)
        return;
    met->asks_gradient = met->asks_gradient || (!sets && !met->sets_gradient);
    met->sets_gradient = true;
}

static tutti_status record_arrival(tu_capture *to, tt_tensor *leaf, tt_tensor *grad) {
    if (to->backward)
        return tu_capture_arrival(to, leaf, grad);
    note_gradient(to, leaf, false);
    return record_accumulation(leaf, grad);
}

static tutti_status record(tu_call_recorder *recorder, tu_call *call) {
    tu_capture *to = (tu_capture *)recorder;
    tu_vertex *vertex;
    to->made->inner_backward = to->made->inner_backward || (tu_self()->backward != NULL && !to->backward);
    call->computed = true;
    if (call->entry == &tu_operator_accumulate_grad)
        return record_arrival(to, call->inputs[0], call->inputs[1]);
    if (call->entry == &tu_operator_set_grad)
        note_gradient(to, call->inputs[0], true);
    tutti_status status = record_vertex(to, call, &vertex);
    if (status == TUTTI_OK && call->entry->flags & TU_STARTS)
        status = record_waits(to, vertex);
    if (status == TUTTI_OK && call->entry == &tu_operator_version_set)
        record_versions(to, vertex, call);
    call->computed = !(call->entry->flags & TU_ANY_DEVICE); /* such kernels work on fakes too, and must */
    return status;
}

/* ---- holders ---- */

static tu_change *find_change(const tu_capture *to, const tu_holder *holder) {
    for (tu_change *one = to->changes; one != NULL; one = one->next)
        if (one->holder.owner == holder->owner && one->holder.index == holder->index)
            return one;
    return NULL;
}

/* What the function itself has put there is no input that each run would find there: it is met as a constant. */
static tutti_status note_read(tu_call_recorder *recorder, const tu_holder *holder, tt_tensor *x) {
    tu_capture *to = (tu_capture *)recorder;
    const tu_change *change = find_change(to, holder);
    if (x->storage->fake || x->flags & TU_LITERAL || tu_map_get(&to->by_real, x) != NULL ||
        (change != NULL && change->before != x))
        return TUTTI_OK;
    tu_meeting *met = meet(to, x, TU_INPUT_HELD);
    if (met == NULL)
        return TUTTI_ERROR_MEMORY;
    met->holder = *holder;
    holder->keep(holder->owner);
    return TUTTI_OK;
}

static tutti_status note_write(tu_call_recorder *recorder, const tu_holder *holder) {
    tu_capture *to = (tu_capture *)recorder;
    if (find_change(to, holder) != NULL)
        return TUTTI_OK;
    tu_change *one = malloc(sizeof *one);
    if (one == NULL)
        return tu_error_memory("what a capture remembers", sizeof *one);
    *one = (tu_change){ .next = to->changes, .holder = *holder };
    one->before = tu_tensor_hold(holder->get(holder->owner, holder->index));
    holder->keep(holder->owner);
    to->changes = one;
    return TUTTI_OK;
}

/* That a gradient is read makes its leaf an input, so that each run looks whether there is one. */
static tutti_status note_asked(tu_call_recorder *recorder, tt_tensor *x, tu_question question) {
    tu_capture *to = (tu_capture *)recorder;
    if (question == TU_ASKED_SIZES) {
        const tu_meeting *argument = x->storage->fake ? NULL : tu_map_get(&to->by_real, x);
        bool own = x->flags & TU_LITERAL || (!x->storage->fake && argument == NULL);
        to->made->asks_sizes = to->made->asks_sizes || !own;
        return TUTTI_OK;
    }
    tu_meeting *met = tu_map_get(&to->by_fake, x);
    tu_value *value;
    if (met == NULL || (question == TU_ASKED_GRADIENT && met->sets_gradient))
        return TUTTI_OK;
    if (question == TU_ASKED_GRADIENT && to->backward)
        return tu_capture_question(to, met);
    if (question == TU_ASKED_GRADIENT)
        met->asks_gradient = true;
    else
        met->asks_bytes = true;
    return tu_capture_value(to, x, &value);
}

static tutti_status note_state(tu_call_recorder *recorder, const tu_witness *witness) {
    tu_captured *made = ((tu_capture *)recorder)->made;
    for (int i = 0; i < made->witness_count; i++)
        if (made->witnesses[i].owner == witness->owner)
            return TUTTI_OK;
    size_t count = (size_t)made->witness_count + 1;
    tu_witness *witnesses = realloc(made->witnesses, count * sizeof *witnesses);
    if (witnesses != NULL)
        made->witnesses = witnesses;
    uint64_t *stamps = realloc(made->stamps, count * sizeof *stamps);
    if (stamps != NULL)
        made->stamps = stamps;
    if (witnesses == NULL || stamps == NULL)
        return tu_error_memory("what a capture remembers", count * sizeof *witnesses);
    witness->keep(witness->owner);
    witnesses[made->witness_count] = *witness;
    stamps[made->witness_count++] = witness->stamp(witness->owner);
    return TUTTI_OK;
}

static tutti_status record_effect(tu_capture *to, const tu_change *one) {
    tt_tensor *now = one->holder.get(one->holder.owner, one->holder.index);
    if (now == (one->ended ? one->after : one->before))
        return TUTTI_OK;
    tt_graph *graph = to->graph;
    tu_graph_effect *effects = realloc(graph->effects, ((size_t)graph->effect_count + 1) * sizeof *effects);
    if (effects == NULL)
        return tu_error_memory("effects of a graph", sizeof *effects);
    graph->effects = effects;
    tu_value *value = NULL;
    tt_tensor *fake = now != NULL ? stand_in(&to->recorder, now) : NULL;
    tutti_status status = now == NULL    ? TUTTI_OK
                          : fake == NULL ? TUTTI_ERROR_MEMORY
                                         : tu_capture_value(to, fake, &value);
    if (status != TUTTI_OK)
        return status;
    effects[graph->effect_count++] = (tu_graph_effect){ one->holder, value };
    one->holder.keep(one->holder.owner);
    return TUTTI_OK;
}

/* Whatever happened, holders have again what they had. */
static tutti_status undo_changes(tu_capture *to) {
    tutti_status status = TUTTI_OK;
    for (tu_change *one = to->changes, *next; one != NULL; one = next) {
        next = one->next;
        tutti_status undone = one->holder.set(one->holder.owner, one->holder.index, one->before);
        status = status == TUTTI_OK ? undone : status;
        tu_tensor_drop(one->before);
        tu_tensor_drop(one->after);
        one->holder.release(one->holder.owner);
        free(one);
    }
    return status;
}

/* ---- one capture ---- */

static tutti_status begin(tu_capture *to, tt_tensor_list inputs, tt_tensor **fakes) {
    to->recorder = (tu_call_recorder){ record, stand_in, note_read, note_write, note_asked, note_state };
    to->made->graph = to->graph = tu_graph_new();
    tutti_status status = to->graph != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    for (size_t i = 0; i < inputs.count && status == TUTTI_OK; i++) {
        tu_value *value;
        status = tu_tensor_check(to->who, "inputs", inputs.at[i]);
        if (status == TUTTI_OK && tu_map_get(&to->by_real, inputs.at[i]) != NULL)
            status = tu_error(TUTTI_ERROR_ARGUMENT, "%s: input %zu, %s, is given twice", to->who, i,
                              tu_describe(inputs.at[i]));
        tu_meeting *met = status == TUTTI_OK ? meet(to, inputs.at[i], TU_INPUT_ARGUMENT) : NULL;
        if (met == NULL)
            return status != TUTTI_OK ? status : TUTTI_ERROR_MEMORY;
        fakes[i] = met->fake;
        status = add_input(to, met, &value);
    }
    return status;
}

/* What the changes since the last call of this leave in holders. */
static tutti_status record_effects(tu_capture *to) {
    tutti_status status = TUTTI_OK;
    for (tu_change *one = to->changes; one != NULL && status == TUTTI_OK; one = one->next) {
        status = record_effect(to, one);
        tu_tensor_drop(one->after);
        one->after = tu_tensor_hold(one->holder.get(one->holder.owner, one->holder.index));
        one->ended = true;
    }
    return status;
}

static tutti_status take_outputs(tu_capture *to, int count, tt_tensor **outputs) {
    if (count < 0 || count > TT_GRAPH_OUTPUTS)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the function returned %d results; 0 to %d are possible", to->who,
                        count, TT_GRAPH_OUTPUTS);
    to->graph->outputs = calloc((size_t)count + 1, sizeof *to->graph->outputs);
    if (to->graph->outputs == NULL)
        return tu_error_memory("outputs of a graph", (size_t)count * sizeof *to->graph->outputs);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < count && status == TUTTI_OK; i++) {
        tu_operand *output = &to->graph->outputs[to->graph->output_count++];
        if (outputs[i] == NULL)
            continue;
        status = tu_tensor_check(to->who, "outputs", outputs[i]);
        tt_tensor *fake = status == TUTTI_OK ? stand_in(&to->recorder, outputs[i]) : NULL;
        if (status == TUTTI_OK)
            status = fake != NULL ? operand_of(to, fake, output) : TUTTI_ERROR_MEMORY;
        outputs[i] = fake;
    }
    to->result_count = to->made->result_count = count;
    to->results = outputs;
    return status == TUTTI_OK ? record_effects(to) : status;
}

/* The function has ended: what follows belongs to its backward. */
static tutti_status finish_function(tu_capture *to, int count, tt_tensor **outputs) {
    tutti_status status = take_outputs(to, count, outputs);
    to->made->input_count = to->graph->input_count;
    to->made->effect_count = to->graph->effect_count;
    to->made->last = to->graph->last;
    return status;
}

static tutti_status run_function(tu_capture *to, tt_compile_function *function, void *user, tt_tensor_list fakes,
                                 bool joint) {
    tt_tensor **outputs = calloc(TT_GRAPH_OUTPUTS, sizeof(tt_tensor *));
    if (outputs == NULL)
        return tu_error_memory("outputs of a function", TT_GRAPH_OUTPUTS * sizeof *outputs);
    tt_scope scope = tt_scope_open();
    tu_call_recorder *before = tu_call_recorder_set(&to->recorder);
    int count = function(fakes, outputs, user);
    tutti_status status = tu_self()->pending;
    if (status == TUTTI_OK)
        status = finish_function(to, count, outputs);
    if (status == TUTTI_OK && joint)
        status = tu_capture_backward(to);
    if (status == TUTTI_OK && joint)
        status = record_effects(to);
    tu_call_recorder_set(before);
    tu_scope_leave(&scope);
    free(outputs);
    return status;
}

/* What each run must find again of an input, besides its metadata. */
static void note_facts(tu_capture *to) {
    for (const tu_meeting *met = to->meetings; met != NULL; met = met->next) {
        if (met->input < 0)
            continue;
        tu_graph_input *input = &to->graph->inputs[met->input];
        tu_history *history = met->real->history;
        input->bytes = met->real->storage->bytes;
        input->asks_bytes = met->asks_bytes;
        input->has_node = met->entrance != NULL;
        input->asks_gradient = met->asks_gradient;
        input->has_gradient = history != NULL && history->grad != NULL;
    }
    for (const tu_vertex *vertex = to->graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; vertex->entry == &tu_operator_storage_resize && i < to->graph->input_count; i++)
            if (to->graph->inputs[i].value->storage == vertex->operands[0].value->storage)
                to->graph->inputs[i].asks_bytes = true;
}

static void end(tu_capture *to) {
    for (tu_meeting *met = to->meetings, *next; met != NULL; met = next) {
        next = met->next;
        if (met->kind == TU_INPUT_HELD && met->holder.release != NULL)
            met->holder.release(met->holder.owner);
        tu_tensor_drop(met->real);
        tu_tensor_drop(met->fake);
        tu_tensor_drop(met->gradient);
        if (met->entrance != NULL)
            met->entrance->detail = NULL;
        tu_node_drop(met->entrance);
        free(met);
    }
    for (size_t i = 0; i < to->held_count; i++)
        tu_tensor_drop(to->held[i]);
    for (tu_fake_storage *storage = to->storages, *next; storage != NULL; storage = next) {
        next = storage->next;
        storage->storage->bytes = 0; /* a handle that the function kept is an error from now on */
        tu_storage_drop(storage->storage);
        free(storage);
    }
    free(to->held);
    tu_map_free(&to->by_real);
    tu_map_free(&to->by_fake);
    tu_map_free(&to->storage_of_real);
    tu_map_free(&to->storage_of_fake);
    tu_map_free(&to->values);
    tu_map_free(&to->storage_of_value);
}

static tutti_status check_call(const char *who, tt_compile_function *function, tt_tensor_list inputs) {
    if (function == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: function is NULL", who);
    if (inputs.count > 0 && inputs.at == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: inputs are %zu, and their list is NULL", who, inputs.count);
    if (tu_is_capturing())
        return tu_error(TUTTI_ERROR_CAPTURE, "%s: this thread is capturing a function already", who);
    return TUTTI_OK;
}

tutti_status tu_capture_function(const char *who, tt_compile_function *function, void *user, tt_tensor_list inputs,
                                 bool joint, tu_captured *made) {
    *made = (tu_captured){ .graph = NULL };
    tutti_status status = check_call(who, function, inputs);
    if (status != TUTTI_OK)
        return status;
    tu_capture to = { .who = who, .made = made };
    tt_tensor **fakes = calloc(inputs.count + 1, sizeof *fakes);
    status = fakes != NULL ? begin(&to, inputs, fakes) : tu_error_memory("inputs", sizeof *fakes);
    if (status == TUTTI_OK)
        status = run_function(&to, function, user, tt_tensors_of(inputs.count, fakes), joint);
    tutti_status undone = undo_changes(&to);
    if (status == TUTTI_OK)
        status = undone;
    if (to.graph != NULL)
        note_facts(&to);
    end(&to);
    free(fakes);
    return status == TUTTI_OK ? tu_graph_check(who, made->graph) : status;
}

void tu_captured_end(tu_captured *made) {
    for (int i = 0; i < made->witness_count; i++)
        made->witnesses[i].release(made->witnesses[i].owner);
    free(made->witnesses);
    free(made->stamps);
    free(made->tangents);
    free(made->targets);
    tt_graph_release(&made->graph);
    *made = (tu_captured){ .graph = NULL };
}

bool tt_capture(tt_compile_function *function, void *user, tt_tensor_list inputs, tt_graph **graph) {
    tu_captured made;
    if (graph != NULL)
        *graph = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (graph == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "capture: graph is NULL");
        return false;
    }
    tutti_status status = tu_capture_function("capture", function, user, inputs, false, &made);
    /* Waits stand where the function would have waited: what it started first may need what it starts next. */
    if (status == TUTTI_OK)
        status = tu_pass_sink(made.graph, 0);
    if (tu_pending_take(status) == TUTTI_OK) {
        *graph = made.graph;
        made.graph = NULL;
    }
    tu_captured_end(&made);
    return *graph != NULL;
}
