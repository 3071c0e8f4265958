/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparing each run of an entry with eager code: the captured graph runs operator by operator on copies of the inputs,
 * and what both made is compared value by value, by their names, in the order of the graph that is run.
 */
#include "compile/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "functional/operators.h"
#include "tensor/on_device.h"

/* ---- making ---- */

/* A copy with every value as one more output. Effects on holders are left out where the copy runs beside the other. */
static tutti_status expose(const tt_graph *from, bool effects, tt_graph **made) {
    tu_graph_copy copy;
    tutti_status status = tu_graph_copy_begin(&copy, from);
    if (status != TUTTI_OK)
        return status;
    status = tu_graph_copy_first(&copy, from->input_count, NULL, from->output_count, effects ? from->effect_count : 0);
    for (const tu_vertex *vertex = from->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
            status = tu_graph_copy_output(&copy, &(tu_operand){ .value = vertex->results[i] });
    return tu_graph_copy_end(&copy, status, made);
}

tutti_status tu_comparison_make(const tt_graph *before, const tt_graph *after, const tu_program_options *options,
                                tu_comparison **made) {
    tu_comparison *comparison = calloc(1, sizeof *comparison);
    if (comparison == NULL)
        return tu_error_memory("a comparison with eager code", sizeof *comparison);
    comparison->known = after->output_count;
    comparison->strict = options->strict;
    tutti_status status = expose(before, false, &comparison->eager);
    if (status == TUTTI_OK)
        status = expose(after, true, &comparison->exposed);
    if (status == TUTTI_OK)
        status = tu_program_make(comparison->exposed, options, &comparison->program);
    if (status != TUTTI_OK) {
        tu_comparison_end(comparison);
        return status;
    }
    *made = comparison;
    return TUTTI_OK;
}

void tu_comparison_end(tu_comparison *comparison) {
    if (comparison == NULL)
        return;
    tu_program_release(comparison->program);
    tt_graph_release(&comparison->eager);
    tt_graph_release(&comparison->exposed);
    free(comparison);
}

/* ---- copies of the inputs ---- */

/* Tensors that share memory have copies that share it. */
static tutti_status copy_storage(tt_tensor *const *inputs, tt_tensor **copies, int index, tu_storage **made) {
    tu_storage *from = inputs[index]->storage;
    for (int i = 0; i < index; i++)
        if (inputs[i]->storage == from) {
            *made = tu_storage_hold(copies[i]->storage);
            return TUTTI_OK;
        }
    tutti_status status = tu_storage_wait(from);
    if (status != TUTTI_OK)
        return status;
    *made = tu_storage_new(from->device, from->bytes);
    if (*made == NULL)
        return TUTTI_ERROR_MEMORY;
    if (from->data == NULL || from->bytes == 0)
        return TUTTI_OK;
    if (tu_is_remote(from->device)) {
        tu_device *device;
        status = tu_device_get((tutti_device)from->device, &device);
        return status == TUTTI_OK ? tu_device_write(device, (*made)->data, from->data, from->bytes) : status;
    }
    memcpy((*made)->data, from->data, from->bytes);
    return TUTTI_OK;
}

static tutti_status copy_inputs(const tt_graph *graph, tt_tensor *const *inputs, tt_tensor **copies) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->input_count && status == TUTTI_OK; i++) {
        tu_storage *storage;
        tu_shape shape = tu_shape_of(inputs[i]);
        status = copy_storage(inputs, copies, i, &storage);
        if (status == TUTTI_OK && (copies[i] = tu_tensor_on(storage, &shape)) == NULL)
            status = TUTTI_ERROR_MEMORY;
    }
    return status;
}

/* ---- comparing ---- */

static bool is_written(const tt_graph *graph, int storage) {
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count && vertex->entry != &tu_operator_wait; i++)
            if (vertex->operands[i].value != NULL && vertex->operands[i].value->storage == storage &&
                tu_vertex_writes(vertex, i))
                return true;
    return false;
}

/* By how much elements may differ that were rounded at other places. */
static double tolerance_of(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F64:
    case TUTTI_C128:
        return 1e-12;
    case TUTTI_F16:
        return 4e-3;
    case TUTTI_BF16:
        return 3e-2;
    case TUTTI_F8_E4M3:
    case TUTTI_F8_E5M2:
        return 0.25;
    default:
        return 2e-5;
    }
}

static bool is_close(double left, double right, double largest, double tolerance) {
    if (isnan(left) || isnan(right))
        return isnan(left) && isnan(right);
    return left == right || fabs(left - right) <= tolerance * (1 + largest);
}

/* The first element that differs; -1: none does. */
static int64_t first_difference(tt_tensor *made, tt_tensor *eager, bool strict, double *left, double *right) {
    tt_scope scope = tt_scope_open();
    tt_tensor *first = tt_contiguous(made), *second = tt_contiguous(eager);
    size_t bytes = first != NULL ? (size_t)first->numel * tu_dtype_bytes[first->dtype] : 0;
    int64_t at = -1;
    bool same = first == NULL || second == NULL || bytes == 0 || memcmp(tt_data(first), tt_data(second), bytes) == 0;
    if (!same && !tu_is_complex(made->dtype)) {
        tt_tensor *lefts = tt_to(first, TUTTI_F64), *rights = tt_to(second, TUTTI_F64);
        const double *of_left = tt_data(lefts), *of_right = tt_data(rights);
        double largest = 0, tolerance = tolerance_of((tutti_dtype)made->dtype);
        for (int64_t i = 0; of_left != NULL && of_right != NULL && i < lefts->numel; i++)
            if (isfinite(of_right[i]) && fabs(of_right[i]) > largest)
                largest = fabs(of_right[i]);
        for (int64_t i = 0; of_left != NULL && of_right != NULL && i < lefts->numel && at < 0; i++) {
            bool close = strict ? memcmp(&of_left[i], &of_right[i], sizeof *of_left) == 0 ||
                                      (isnan(of_left[i]) && isnan(of_right[i]))
                                : is_close(of_left[i], of_right[i], largest, tolerance);
            if (!close) {
                at = i;
                *left = of_left[i];
                *right = of_right[i];
            }
        }
    } else if (!same && strict) {
        at = 0;
    }
    tu_scope_leave(&scope);
    return at;
}

/* The same of tensors that lie on a device, by copies on the host. */
static tutti_status find_difference(tt_tensor *made, tt_tensor *eager, bool strict, int64_t *at, double *left,
                                    double *right) {
    if (!tu_same_sizes(made, eager) || made->dtype != eager->dtype) {
        *at = 0;
        return TUTTI_OK;
    }
    tt_tensor *first = tu_on_host(made), *second = first != NULL ? tu_on_host(eager) : NULL;
    tutti_status status = first != NULL && second != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK)
        *at = first_difference(first, second, strict, left, right);
    tu_tensor_drop(first);
    tu_tensor_drop(second);
    return status == TUTTI_OK && *at < 0 ? tu_self()->pending : status;
}

static tutti_status compare_pair(const char *name, const char *what, bool strict, tt_tensor *made, tt_tensor *eager) {
    double left = 0, right = 0;
    int64_t at = -1;
    if (made == NULL || eager == NULL || (made->device != TUTTI_CPU && !tu_on_device(made)) ||
        made->storage->bytes < tu_tensor_need(made) || eager->storage->bytes < tu_tensor_need(eager))
        return TUTTI_OK;
    tutti_status status = find_difference(made, eager, strict, &at, &left, &right);
    if (status != TUTTI_OK || at < 0)
        return status;
    return tu_error(TUTTI_ERROR_STATE,
                    "compiled %s differs from eager code (TUTTI_COMPILE_COMPARE) first in %s: element %lld "
                    "of %s is %.17g, and eager code has %.17g",
                    name, what, (long long)at, tu_describe(made), left, right);
}

static const tu_value *named(const tt_graph *graph, const char *name, int *output, int known) {
    for (int i = known; i < graph->output_count; i++)
        if (strcmp(graph->outputs[i].value->name, name) == 0) {
            *output = i;
            return graph->outputs[i].value;
        }
    return NULL;
}

static tutti_status compare_values(const char *name, const tu_comparison *of, tt_tensor *const *made,
                                   tt_tensor *const *eager) {
    const tt_graph *exposed = of->exposed;
    int known = of->eager->output_count;
    for (const tu_vertex *vertex = of->eager->first; vertex != NULL; vertex = vertex->next)
        known -= vertex->result_count;
    tutti_status status = TUTTI_OK;
    for (int i = of->known; i < exposed->output_count && status == TUTTI_OK; i++) {
        const tu_value *value = exposed->outputs[i].value;
        int output = 0;
        const tu_value *twin = named(of->eager, value->name, &output, known);
        if (twin == NULL || is_written(of->eager, twin->storage) || is_written(exposed, value->storage))
            continue;
        tu_text text;
        status = tu_text_begin(&text);
        if (status != TUTTI_OK)
            return status;
        tu_vertex_print(text.to, value->maker);
        char *line = tu_text_end(&text);
        status = line != NULL ? compare_pair(name, line, of->strict, made[i], eager[output]) : TUTTI_ERROR_MEMORY;
        free(line);
    }
    return status;
}

static tutti_status compare_ends(const char *name, const tu_comparison *of, tt_tensor *const *inputs,
                                 tt_tensor *const *copies, tt_tensor *const *made, tt_tensor *const *eager) {
    char what[64];
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < of->known && i < of->eager->output_count && status == TUTTI_OK; i++) {
        snprintf(what, sizeof what, "output %d", i);
        status = compare_pair(name, what, of->strict, made[i], eager[i]);
    }
    for (int i = 0; i < of->eager->input_count && status == TUTTI_OK; i++) {
        snprintf(what, sizeof what, "input %s afterwards", of->eager->inputs[i].value->name);
        status = compare_pair(name, what, of->strict, inputs[i], copies[i]);
    }
    return status;
}

/* ---- running ---- */

typedef struct both {
    tt_tensor **copies, **eager, **made;
} both;

static tutti_status run_both(tu_comparison *of, tt_tensor *const *inputs, const both *at) {
    tu_thread *self = tu_self();
    uint64_t seed = self->seed, counter = self->counter;
    uint32_t rank = self->seed_rank;
    tutti_status status = copy_inputs(of->eager, inputs, at->copies);
    if (status == TUTTI_OK)
        status = tu_graph_interpret(of->eager, at->copies, at->eager);
    self->seed = seed;
    self->counter = counter;
    self->seed_rank = rank;
    return status == TUTTI_OK ? tu_program_run(of->program, inputs, at->made) : status;
}

static void drop_all(tt_tensor **list, int count) {
    for (int i = 0; list != NULL && i < count; i++)
        tu_tensor_drop(list[i]);
    free(list);
}

tutti_status tu_comparison_run(const char *name, tu_comparison *of, tt_tensor *const *inputs, tt_tensor **outputs) {
    both at = { calloc((size_t)of->eager->input_count + 1, sizeof(tt_tensor *)),
                calloc((size_t)of->eager->output_count + 1, sizeof(tt_tensor *)),
                calloc((size_t)of->exposed->output_count + 1, sizeof(tt_tensor *)) };
    tutti_status status = at.copies != NULL && at.eager != NULL && at.made != NULL
                              ? run_both(of, inputs, &at)
                              : tu_error_memory("a comparison with eager code", sizeof at);
    if (status == TUTTI_OK)
        status = compare_values(name, of, at.made, at.eager);
    if (status == TUTTI_OK)
        status = compare_ends(name, of, inputs, at.copies, at.made, at.eager);
    for (int i = 0; status == TUTTI_OK && i < of->known; i++)
        outputs[i] = tu_tensor_hold(at.made[i]);
    drop_all(at.copies, of->eager->input_count);
    drop_all(at.eager, of->eager->output_count);
    drop_all(at.made, of->exposed->output_count);
    return status;
}
