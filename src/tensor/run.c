/* SPDX-License-Identifier: Apache-2.0
 *
 * The one place where operators run: check the inputs, ask the row for the results' shapes, make the results, ask the
 * thread's recorder, compute with the device's kernel, record for autograd. Budget for a tiny call: no system call, no
 * malloc once warm, no lock.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tensor/history.h"
#include "tensor/on_device.h"

/* ---- errors ---- */

static const char *display_name(const tu_call *call, char *buffer, size_t size) {
    snprintf(buffer, size, "%s%s", call->entry->name, call->in_place ? "_" : "");
    return buffer;
}

tutti_status tu_call_error(const tu_call *call, tutti_status status, const char *format, ...) {
    char name[64], text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return tu_error(status, "%s: %s", display_name(call, name, sizeof name), text);
}

static tutti_status bad_input(const tu_call *call, int i,
                              tutti_status (*check)(const char *, const char *, const tt_tensor *)) {
    char name[64];
    return check(display_name(call, name, sizeof name), tu_argument_name(call->entry, i), call->inputs[i]);
}

/* ---- checks ---- */

static bool is_optional(const tu_operator *entry, int input) {
    return input < TU_INPUTS && entry->optional & TU_INPUT(input);
}

static bool is_written(const tu_call *call, int input) {
    return (call->in_place && input < call->output_count) ||
           (input < TU_INPUTS && call->entry->written & TU_INPUT(input));
}

/* The device of a call is that of its first placed input; the others must be on the very same, unless the row says that
 * it does not matter. Numbers adopt it. */
static tutti_status check_device(tu_call *call, int input, int *first) {
    const tt_tensor *x = call->inputs[input];
    if (x->flags & TU_NUMBER)
        return TUTTI_OK;
    if (!call->placed) {
        call->placed = true;
        call->device = x->device;
        *first = input;
        return TUTTI_OK;
    }
    return x->device == call->device || call->entry->flags & TU_APART
               ? TUTTI_OK
               : tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                               "%s (input %d) is on the device %s and %s (input %d) on %s; expected all on one",
                               tu_argument_name(call->entry, *first), *first, tutti_device_name(call->device),
                               tu_argument_name(call->entry, input), input, tutti_device_name(x->device));
}

static tutti_status check_inputs(tu_call *call, bool grad_mode) {
    bool wants = false;
    int first = 0;
    call->device = TUTTI_CPU; /* where numbers are */
    call->placed = false;
    for (int i = 0; i < call->input_count; i++) {
        tt_tensor *x = call->inputs[i];
        if (x == NULL && is_optional(call->entry, i))
            continue;
        if (x == NULL || x->magic != TU_MAGIC_ALIVE)
            return bad_input(call, i, tu_tensor_check);
        tutti_status status = check_device(call, i, &first);
        if (status != TUTTI_OK)
            return status;
        if (x->history != NULL && !(x->flags & TU_REQUIRES_GRAD))
            tu_historian_table.refresh(x);
        wants = wants || (x->flags & TU_REQUIRES_GRAD) != 0;
    }
    call->wants_grad = wants && grad_mode && !(call->entry->flags & TU_NO_HISTORY);
    return TUTTI_OK;
}

static tutti_status check_ready(const tu_call *call) {
    bool writes = call->in_place || call->entry->written != 0;
    for (int i = 0; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x == NULL)
            continue;
        if (writes && is_written(call, i)) {
            tutti_status status = tu_storage_wait_write(x->storage);
            if (status != TUTTI_OK)
                return status;
        }
        if (atomic_load_explicit(&x->storage->waiter, memory_order_relaxed) != NULL ||
            tu_tensor_need(x) > x->storage->bytes) {
            tutti_status status = bad_input(call, i, tu_tensor_ready);
            if (status != TUTTI_OK)
                return status;
        }
    }
    return TUTTI_OK;
}

/* A result written in place keeps the sizes and the dtype of what it is written to. */
static tutti_status check_written(const tu_call *call, int output) {
    const tt_tensor *x = call->inputs[output];
    const tu_shape *result = &call->results[output];
    if (result->ndim != x->ndim || memcmp(result->sizes, x->sizes, (size_t)x->ndim * sizeof x->sizes[0]) != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the result has shape %s and cannot be written to %s",
                             tu_dims_text(result->ndim, result->sizes), tu_describe(x));
    if (tu_promote_pair(result->dtype, x->dtype) != x->dtype &&
        !(tu_is_float(x->dtype) && tu_is_float(result->dtype)) &&
        !(tu_is_integer(x->dtype) && tu_is_integer(result->dtype)) && !(tu_is_complex(x->dtype)))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "a result of type %s cannot be written to %s",
                             tutti_dtype_name(result->dtype), tu_describe(x));
    if (tu_overlaps_itself(x))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "several elements of %s, with strides %s, share one memory location, so it cannot be "
                             "written; clone it first",
                             tu_describe(x), tu_dims_text(x->ndim, x->strides));
    for (int i = 0; i < call->input_count; i++)
        if (i != output && call->inputs[i] != NULL && tu_partly_overlaps(x, call->inputs[i]))
            return tu_call_error(
                call, TUTTI_ERROR_ARGUMENT,
                "%s, %s, shares some memory with %s, which is written, but not element by element: the "
                "result would depend on the order; clone it first",
                tu_argument_name(call->entry, i), tu_describe(call->inputs[i]), tu_describe(x));
    bool recording =
        call->wants_grad || (x->history != NULL && !tu_self()->grad_disabled && tu_historian_table.guards(x));
    if (!recording)
        return TUTTI_OK;
    tu_call one = *call; /* as though this input were the only one */
    one.inputs = &call->inputs[output];
    return tu_historian_table.check_in_place(&one);
}

static tutti_status check_in_place(const tu_call *call) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->output_count && status == TUTTI_OK; i++)
        status = check_written(call, i);
    return status;
}

/* ---- results ---- */

static void drop_outputs(tu_call *call, int count) {
    for (int i = 0; i < count; i++)
        tu_tensor_drop(call->outputs[i]);
}

static tt_tensor *make_output(const tu_call *call, const tu_shape *shape, bool fake) {
    if (call->entry->flags & TU_VIEW)
        return tu_tensor_alias(call->inputs[0], shape);
    if (fake)
        return tu_tensor_new_fake(shape);
    if (call->entry->flags & TU_BRINGS)
        return tu_tensor_on(tu_storage_new(shape->device, 0), shape);
    return tu_tensor_new(shape);
}

/* Whether the results belong to any device: the operator says so, or it computes with what does. Literals alone make a
 * tensor of the CPU, as ever. */
static bool is_anywhere(const tu_call *call) {
    bool found = false;
    for (int i = 0; i < call->input_count && !call->placed && call->entry->expression != NULL; i++)
        found = found || (call->inputs[i] != NULL && !(call->inputs[i]->flags & TU_LITERAL));
    return found || call->entry->flags & TU_ANYWHERE;
}

static tutti_status make_outputs(tu_call *call, bool fake) {
    if (call->in_place) {
        for (int i = 0; i < call->output_count; i++)
            call->outputs[i] = tu_tensor_hold(call->inputs[i]);
        return TUTTI_OK;
    }
    for (int i = 0; i < call->output_count; i++) {
        tt_tensor *output = make_output(call, &call->results[i], fake);
        if (output == NULL) {
            drop_outputs(call, i);
            tutti_error_info info = TUTTI_ERROR_INFO_INIT;
            return tutti_error_detail(&info) == TUTTI_OK ? info.status : TUTTI_ERROR_MEMORY;
        }
        if (is_anywhere(call))
            output->flags |= TU_NUMBER;
        call->outputs[i] = output;
    }
    return TUTTI_OK;
}

/* ---- the kernel ---- */

/* The kernel for the kind of the call's device. NULL where there is nothing to compute: on meta, and in views; a row
 * that has no kernel for a device that computes cannot run there. */
static tutti_status find_kernel(const tu_call *call, tu_device_kernel **kernel) {
    const tu_operator *entry = call->entry;
    tutti_device kind = entry->flags & TU_ANY_DEVICE ? TUTTI_CPU : call->device;
    if (kind != TUTTI_CPU)
        kind = tutti_device_kind(kind);
    *kernel = kind == TUTTI_CPU ? entry->kernels[TU_ON_CPU] : kind == TUTTI_CUDA ? entry->kernels[TU_ON_CUDA] : NULL;
    if (*kernel != NULL || kind == TUTTI_META || entry->flags & (TU_VIEW | TU_NO_KERNEL))
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_UNSUPPORTED, "there is no kernel for the device %s",
                         tutti_device_name(call->device));
}

static tutti_status compute(tu_call *call, tu_device_kernel *kernel) {
    if (tu_is_remote(call->device) && !(call->entry->flags & TU_ANY_DEVICE)) {
        tutti_status status = tu_device_begin(call);
        if (status != TUTTI_OK)
            return status;
    }
    return kernel(call);
}

/* A recorder is asked before the kernel runs, and does not see what that runs in turn. */
static tutti_status record_and_compute(tu_call *call, tu_call_recorder *recorder) {
    tutti_status status = recorder->record(recorder, call);
    if (status != TUTTI_OK)
        return status;
    if (call->computed)
        return TUTTI_OK;
    tu_device_kernel *kernel;
    status = find_kernel(call, &kernel);
    if (status != TUTTI_OK)
        return status;
    tu_call_recorder_set(NULL);
    status = kernel != NULL ? compute(call, kernel) : TUTTI_OK;
    tu_call_recorder_set(recorder);
    return status;
}

/* What was written has a new version. */
static void bump_written(tu_call *call) {
    for (int i = 0; call->in_place && i < call->output_count; i++)
        tu_bump(call->outputs[i]);
    for (int i = 0; call->entry->written != 0 && i < call->input_count; i++)
        if (call->inputs[i] != NULL && call->entry->written & TU_INPUT(i))
            tu_bump(call->inputs[i]);
}

/* Makes the results and fills them. What the gradient needs is saved before the kernel runs, which may write it. The
 * kernel is found first, so that a call that cannot run makes nothing; a recorder may have no need of one. */
static tutti_status perform(tu_call *call, tu_call_recorder *recorder) {
    const tu_operator *entry = call->entry;
    void *record = NULL;
    tu_device_kernel *kernel = NULL;
    bool records = call->wants_grad && entry->written == 0;
    tutti_status status = recorder == NULL ? find_kernel(call, &kernel) : TUTTI_OK;
    if (status == TUTTI_OK && records)
        status = tu_historian_table.prepare(call, &record);
    if (status == TUTTI_OK)
        status = make_outputs(call, recorder != NULL && recorder->stand_in != NULL);
    if (status != TUTTI_OK) {
        tu_historian_table.cancel(record);
        return status;
    }
    status = recorder != NULL ? record_and_compute(call, recorder) : kernel != NULL ? compute(call, kernel) : TUTTI_OK;
    if (status == TUTTI_OK) {
        bump_written(call);
        if (tu_self()->anomaly && !call->computed)
            status = tu_anomaly_check(call);
    }
    if (status == TUTTI_OK) {
        if (record != NULL)
            status = tu_historian_table.attach(call, record);
        else if (entry->flags & TU_VIEW && !(entry->flags & TU_NO_HISTORY) && !records)
            status = tu_historian_table.note_view(call->inputs[0], call->outputs[0]);
    } else {
        tu_historian_table.cancel(record);
    }
    if (status != TUTTI_OK)
        drop_outputs(call, call->output_count);
    return status;
}

/* While a function is captured, its stand-ins take the places of the tensors. */
static tutti_status stand_in(tu_call *call, tu_call_recorder *recorder, tt_tensor **few) {
    tt_tensor **inputs = few;
    if (call->input_count > TU_INPUTS && (inputs = tu_scope_memory((size_t)call->input_count * sizeof *inputs)) == NULL)
        return TUTTI_ERROR_MEMORY;
    for (int i = 0; i < call->input_count; i++) {
        tt_tensor *x = call->inputs[i];
        bool alive = x != NULL && x->magic == TU_MAGIC_ALIVE; /* others are named by the checks to come */
        inputs[i] = alive ? recorder->stand_in(recorder, x) : x;
        if (alive && inputs[i] == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    call->inputs = inputs;
    return TUTTI_OK;
}

static tutti_status run(tu_call *call, const tu_thread *self) {
    tt_tensor *few[TU_INPUTS];
    tutti_status status = TUTTI_OK;
    if (self->recorder != NULL && self->recorder->stand_in != NULL)
        status = stand_in(call, self->recorder, few);
    if (status == TUTTI_OK)
        status = check_inputs(call, !self->grad_disabled);
    if (status == TUTTI_OK && call->device != TUTTI_META && !(call->entry->flags & (TU_VIEW | TU_NO_READ)))
        status = check_ready(call);
    if (status == TUTTI_OK)
        status = call->entry->shape(call);
    if (status == TUTTI_OK && !call->placed && call->output_count > 0)
        call->device = call->results[0].device;
    if (status == TUTTI_OK && call->in_place)
        status = check_in_place(call);
    return status == TUTTI_OK ? perform(call, self->recorder) : status;
}

bool tu_run(tu_call *call) {
    tu_thread *self = tu_self();
    if (self->pending != TUTTI_OK || (self->scope_count == 0 && call->output_count > 0 && !tu_scope_check()))
        return false;
    tutti_status status = run(call, self);
    if (status != TUTTI_OK) {
        tu_pending_take(status);
        return false;
    }
    for (int i = 0; i < call->output_count; i++) {
        if (tu_scope_own(call->outputs[i]) == NULL) {
            for (int j = i + 1; j < call->output_count; j++)
                tu_tensor_drop(call->outputs[j]);
            return false;
        }
    }
    return true;
}

tt_tensor *tu_run_new(const tu_operator *entry, int input_count, tt_tensor *const *inputs, const void *attributes) {
    tu_call call;
    tu_call_init(&call, entry, input_count, inputs, attributes);
    return tu_run(&call) ? call.outputs[0] : NULL;
}

tt_tensor *tu_run_in_place(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                           const void *attributes) {
    tu_call call;
    tu_call_init(&call, entry, input_count, inputs, attributes);
    call.in_place = true;
    return tu_run(&call) ? call.outputs[0] : NULL;
}

bool tu_run_many(const tu_operator *entry, int input_count, tt_tensor *const *inputs, const void *attributes,
                 tt_tensor **results) {
    tu_call call;
    tu_call_init(&call, entry, input_count, inputs, attributes);
    if (!tu_run(&call))
        return false;
    for (int i = 0; i < entry->results; i++)
        results[i] = call.outputs[i];
    return true;
}

static bool list_is_good(const tu_operator *entry, tt_tensor_list list) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (list.count > 0 && list.count <= INT32_MAX && list.at != NULL)
        return true;
    tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s must be a list of at least one tensor, and has %zu", entry->name,
            tu_argument_name(entry, 0), list.count);
    return false;
}

tt_tensor *tu_run_list(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return list_is_good(entry, list) ? tu_run_new(entry, (int)list.count, list.at, attributes) : NULL;
}

bool tu_run_all(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return list_is_good(entry, list) && tu_run_many(entry, (int)list.count, list.at, attributes, NULL);
}

static tt_tensor_list run_each(const tu_operator *entry, tt_tensor_list list, const void *attributes, bool in_place) {
    tt_tensor_list none = { 0, tu_nothing };
    if (!list_is_good(entry, list))
        return none;
    tu_call call;
    tu_call_init(&call, entry, (int)list.count, list.at, attributes);
    call.in_place = in_place;
    call.output_count = call.input_count;
    call.results = tu_scope_memory(list.count * sizeof *call.results);
    call.outputs = tu_scope_memory(list.count * sizeof *call.outputs);
    if (call.results == NULL || call.outputs == NULL || !tu_run(&call))
        return none;
    return tt_tensors_of(list.count, call.outputs);
}

tt_tensor_list tu_run_each(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return run_each(entry, list, attributes, false);
}

tt_tensor_list tu_run_each_in_place(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return run_each(entry, list, attributes, true);
}

/* ---- what gradient formulas ask of the record of their call ---- */

tt_tensor *tu_saved(tu_gradient *gradient, uint32_t which) {
    return tu_historian_table.saved(gradient, which);
}

const tu_shape *tu_input_shape(const tu_gradient *gradient, int input) {
    return tu_historian_table.input_shape(gradient, input);
}

tt_tensor *tu_gradient_input(tu_gradient *gradient, int input) {
    return tu_historian_table.input(gradient, input);
}

void tu_gradient_through(tu_gradient *gradient, tt_tensor *output, int count, tt_tensor *const *inputs) {
    tu_historian_table.through(gradient, output, count, inputs);
}

tt_tensor *tu_gradient_zeros(const tu_gradient *gradient) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = tu_input_shape(gradient, 0)->device;
    return tt_zeros(tu_input_dims(gradient, 0), gradient->grads[0]->dtype, &options);
}

tu_call_recorder *tu_call_recorder_set(tu_call_recorder *recorder) {
    tu_thread *self = tu_self();
    tu_call_recorder *before = self->recorder;
    self->recorder = recorder;
    return before;
}
