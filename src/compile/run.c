/* SPDX-License-Identifier: Apache-2.0
 *
 * Running an entry: the forward without recording, then one node for all results, whose backward runs the other graph.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "compile/compare.h"
#include "compile/entry.h"

/* ---- backward ---- */

/* One way to run a backward: the whole one, or one for which some gradients are absent. */
typedef struct way {
    const tt_graph *graph;
    tu_program *program; /* NULL: the entry's own */
} way;

static tu_partial *find_partial(tu_entry *entry, const bool *arrived) {
    size_t bytes = (size_t)entry->captured.tangent_count * sizeof *arrived;
    tu_partial *partial = entry->partials;
    while (partial != NULL && memcmp(partial->arrived, arrived, bytes) != 0)
        partial = partial->next;
    return partial;
}

static tutti_status choose(tu_entry *entry, tt_tensor *const *grads, way *chosen) {
    int count = entry->captured.tangent_count, present = 0;
    *chosen = (way){ entry->backward, NULL };
    bool *arrived = tu_scope_memory((size_t)count * sizeof *arrived);
    if (arrived == NULL)
        return TUTTI_ERROR_MEMORY;
    for (int i = 0; i < count; i++)
        present += arrived[i] = grads[i] != NULL;
    if (present == count)
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&entry->lock);
    tu_partial *partial = find_partial(entry, arrived);
    if (partial == NULL && (status = tu_build_partial(entry, arrived, &partial)) == TUTTI_OK) {
        partial->next = entry->partials;
        entry->partials = partial;
    }
    pthread_mutex_unlock(&entry->lock);
    if (status == TUTTI_OK)
        *chosen = (way){ partial->graph, partial->program };
    return status;
}

/* An absent gradient is an input that nobody uses: any tensor will do. Others lie row by row, as they were captured. */
static tt_tensor *tangent_of(const tu_node *node, tt_tensor *const *grads, int index) {
    if (grads[index] != NULL)
        return tt_contiguous(grads[index]);
    tt_options options = TT_OPTIONS_INIT;
    options.device = node->outputs[index].device;
    return tt_empty(tt_dims_of(node->outputs[index].ndim, node->outputs[index].sizes), node->outputs[index].dtype,
                    &options);
}

/* What the backward alone has met is fetched now; lent by the scope. */
static tt_tensor *own_input(const tu_graph_input *input, tt_tensor *const *inputs) {
    tt_tensor *x = NULL;
    if (input->kind == TU_INPUT_CONSTANT)
        x = input->tensor;
    else if (input->kind == TU_INPUT_HELD)
        x = input->holder.get(input->holder.owner, input->holder.index);
    else if (input->kind == TU_INPUT_GRADIENT)
        return tt_grad(inputs[input->index]);
    return x != NULL ? tu_scope_own(tu_tensor_hold(x)) : NULL;
}

static tutti_status check_own(const tu_entry *entry, const tu_graph_input *input, tt_tensor *x) {
    tu_shape shape;
    if (x != NULL) {
        shape = tu_shape_of(x);
        if (tu_shape_equal(&shape, &input->value->shape))
            return TUTTI_OK;
    }
    return tu_error(
        TUTTI_ERROR_STATE, "the compiled backward of %s needs %s, which is %s; when it was captured it was %s %s",
        entry->name, input->value->name, x != NULL ? tu_describe(x) : "not there any more",
        tutti_dtype_name(input->value->shape.dtype), tu_dims_text(input->value->shape.ndim, input->value->shape.sizes));
}

static tutti_status gather(const tu_entry *entry, const tt_graph *graph, tu_node *node, tt_tensor *const *grads,
                           tt_tensor **inputs) {
    int saved = 0;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->input_count && status == TUTTI_OK; i++) {
        tu_source_kind kind = i < entry->source_count ? entry->sources[i].kind : TU_FROM_ITSELF;
        if (kind == TU_FROM_ITSELF) {
            inputs[i] = own_input(&graph->inputs[i], inputs);
            status = check_own(entry, &graph->inputs[i], inputs[i]);
            continue;
        }
        inputs[i] = kind == TU_FROM_TANGENT ? tangent_of(node, grads, entry->sources[i].index)
                                            : tu_saved_get(node, &node->saved[saved++]);
        if (inputs[i] == NULL)
            status = tu_self()->pending != TUTTI_OK ? tu_self()->pending : TUTTI_ERROR_MEMORY;
    }
    return status;
}

static void run_backward(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_entry *entry = node->detail;
    if (tt_grad_enabled()) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED,
                "the backward of compiled %s cannot be differentiated: call the function itself where a "
                "backward with create_graph runs",
                entry->name);
        return;
    }
    way chosen;
    tutti_status status = choose(entry, grads, &chosen);
    size_t count = status == TUTTI_OK ? (size_t)chosen.graph->input_count + 1 : 1;
    tt_tensor **inputs = tu_scope_memory(count * sizeof *inputs);
    tt_tensor **outputs = tu_scope_memory(((size_t)node->input_count + 1) * sizeof *outputs);
    if (inputs == NULL || outputs == NULL)
        return;
    memset(inputs, 0, count * sizeof *inputs);
    memset(outputs, 0, ((size_t)node->input_count + 1) * sizeof *outputs);
    if (status == TUTTI_OK)
        status = gather(entry, chosen.graph, node, grads, inputs);
    if (status == TUTTI_OK) /* a capture takes it in vertex by vertex */
        status = tu_is_capturing()        ? tu_graph_interpret(chosen.graph, inputs, outputs)
                 : chosen.program != NULL ? tu_program_run(chosen.program, inputs, outputs)
                                          : tu_entry_compute(entry, TT_BACKWARD, inputs, outputs);
    for (int i = 0; i < node->input_count; i++)
        if (outputs[i] != NULL)
            results[i] = tu_scope_own(outputs[i]);
    tu_pending_take(status);
}

static void release_node(tu_node *node) {
    tu_entry_drop(node->detail);
}

static void drop_entry(void *entry) {
    tu_entry_drop(entry);
}

static void describe_node(const tu_node *node, tu_collector *collector) {
    collector->word(collector, (uintptr_t)node->detail);
    collector->keep(collector, tu_entry_hold(node->detail), drop_entry);
}

/* ---- forward ---- */

static tutti_status save_all(const tu_entry *entry, tu_node *node, tt_tensor *const *inputs,
                             tt_tensor *const *outputs) {
    int saved = 0;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < entry->source_count && status == TUTTI_OK; i++) {
        const tu_backward_source *source = &entry->sources[i];
        if (source->kind == TU_FROM_INPUT)
            status = tu_save(&node->saved[saved++], inputs[source->index], TU_NO_OUTPUT, 0);
        else if (source->kind == TU_FROM_OUTPUT)
            status = tu_save(&node->saved[saved++], outputs[source->index], TU_NO_OUTPUT, 0);
    }
    return status;
}

static tt_tensor *at_target(const tu_gradient_target *target, tt_tensor *const *inputs, tt_tensor *const *outputs) {
    return target->input >= 0 ? inputs[target->input] : outputs[target->result];
}

static tu_node *make_node(tu_entry *entry, tt_tensor *const *inputs, tt_tensor *const *outputs) {
    const tu_captured *captured = &entry->captured;
    int saved = 0;
    for (int i = 0; i < entry->source_count; i++)
        saved += entry->sources[i].kind == TU_FROM_INPUT || entry->sources[i].kind == TU_FROM_OUTPUT;
    tu_node *node = tu_node_new(entry->name, captured->target_count, captured->tangent_count, saved);
    if (node == NULL)
        return NULL;
    tutti_status status = save_all(entry, node, inputs, outputs);
    for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
        tt_tensor *x = at_target(&captured->targets[i], inputs, outputs);
        node->inputs[i] = tu_shape_of(x);
        status = tu_edge_to(x, &node->next[i]);
        node->needs[i] = node->next[i].node != NULL || node->next[i].leaf != NULL;
    }
    for (int i = 0; i < node->output_count; i++)
        node->outputs[i] = tu_shape_of(at_target(&captured->tangents[i], inputs, outputs));
    node->run = run_backward;
    if (status != TUTTI_OK) {
        tu_node_drop(node);
        return NULL;
    }
    node->detail = tu_entry_hold(entry);
    node->release = release_node;
    node->describe = describe_node;
    return node;
}

/* Results become results of the node, and so do inputs that the function wrote. One that is a view cannot be written in
 * place with a gradient: the node does not know of the change. Views come last: a base with a new node would take it
 * for a change. */
static tutti_status attach(tu_entry *entry, tt_tensor *const *inputs, tt_tensor *const *outputs) {
    tu_node *node = make_node(entry, inputs, outputs);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = TUTTI_OK;
    for (int views = 0; views < 2; views++)
        for (int i = 0; i < node->output_count && status == TUTTI_OK; i++) {
            tt_tensor *x = at_target(&entry->captured.tangents[i], inputs, outputs);
            if ((tu_base_of(x) != NULL) != (views == 1))
                continue;
            if (views == 1)
                tu_history_at(x)->mark = TU_MARK_CUSTOM;
            status = tu_history_set(x, node, i);
        }
    tu_node_drop(node);
    return status;
}

/* Inputs behind those of the capture are constants that passes brought. */
static tutti_status fetch_more(const tu_entry *entry, tt_tensor *const *given, tt_tensor **inputs) {
    int known = entry->captured.input_count;
    memcpy(inputs, given, (size_t)known * sizeof *inputs);
    for (int i = known; i < entry->forward->input_count; i++)
        inputs[i] = entry->forward->inputs[i].tensor;
    return TUTTI_OK;
}

tutti_status tu_entry_compute(tu_entry *entry, tt_direction direction, tt_tensor *const *inputs, tt_tensor **outputs) {
    bool forward = direction == TT_FORWARD;
    tu_comparison *comparison = forward ? entry->compare_forward : entry->compare_backward;
    if (comparison != NULL)
        return tu_comparison_run(entry->name, comparison, inputs, outputs);
    return tu_program_run(forward ? entry->run_forward : entry->run_backward, inputs, outputs);
}

tutti_status tu_entry_run(tu_entry *entry, tt_tensor *const *given, tt_tensor **results) {
    const tt_graph *graph = entry->forward;
    size_t input_count = (size_t)graph->input_count + 1, output_count = (size_t)graph->output_count + 1;
    tt_tensor **inputs = tu_scope_memory(input_count * sizeof *inputs);
    tt_tensor **outputs = tu_scope_memory(output_count * sizeof *outputs);
    if (inputs == NULL || outputs == NULL)
        return TUTTI_ERROR_MEMORY;
    memset(outputs, 0, output_count * sizeof *outputs);
    bool ran = false;
    tutti_status status = fetch_more(entry, given, inputs);
    if (status == TUTTI_OK && entry->replay != NULL)
        status = tu_replay_try(entry, inputs, outputs, &ran);
    if (ran)
        atomic_fetch_add_explicit(&entry->replays, 1, memory_order_relaxed);
    else if (status == TUTTI_OK)
        status = tu_entry_compute(entry, TT_FORWARD, inputs, outputs);
    if (status == TUTTI_OK && entry->backward != NULL)
        status = attach(entry, inputs, outputs);
    for (int i = 0; i < graph->output_count; i++) {
        if (status == TUTTI_OK && i < entry->captured.result_count)
            results[i] = outputs[i] != NULL ? tu_scope_own(outputs[i]) : NULL;
        else
            tu_tensor_drop(outputs[i]);
    }
    return status == TUTTI_OK ? tu_self()->pending : status;
}
