/* SPDX-License-Identifier: Apache-2.0
 *
 * Running an operator: check the arguments, ask the entry for the result's shape, allocate, compute, record for
 * autograd. Budget for a tiny call: no system call, no malloc once warm, no lock.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tensor/history.h"
#include "tensor/operator.h"

extern const tu_operator *const __start_tu_operators[] __attribute__((visibility("hidden")));
extern const tu_operator *const __stop_tu_operators[] __attribute__((visibility("hidden")));

/* ---- the table ---- */

int tu_table_count(void) {
    // cppcheck-suppress comparePointers // two ends of one section, which the linker names
    return (int)(__stop_tu_operators - __start_tu_operators);
}

const tu_operator *tu_table_at(int index) {
    return __start_tu_operators[index];
}

int tt_operator_count(void) {
    return tu_table_count();
}

tutti_status tt_operator_at(int index, tt_operator_info *info) {
    if (index < 0 || index >= tu_table_count())
        return tu_error(TUTTI_ERROR_RANGE, "operator_at: index %d must be in [0, %d)", index, tu_table_count());
    if (info == NULL || info->size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "operator_at: info is NULL or its size is 0");
    const tu_operator *operator= tu_table_at(index);
    tt_operator_info full = {
        .size = info->size,
        .name = operator->name,
        .schema = operator->schema,
        .summary = operator->summary,
        .family = operator->family,
        .in_place = (operator->flags & TU_HAS_IN_PLACE) != 0,
        .view = (operator->flags & TU_VIEW) != 0,
        .differentiable = operator->gradient != NULL ||(operator->flags & TU_COMPOSITE) != 0,
        .pure = (operator->flags &(TU_IMPURE | TU_WRITES)) == 0,
    };
    memcpy(info, &full, info->size < sizeof full ? info->size : sizeof full);
    return TUTTI_OK;
}

/* ---- errors ---- */

static const char *display_name(const tu_call *call, char *buffer, size_t size) {
    snprintf(buffer, size, "%s%s", call->operator->name, call->in_place ? "_" : "");
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

const char *tu_argument_name(const tu_operator *operator, int input, char *buffer, size_t size) {
    const char *at = strchr(operator->schema, '(');
    for (int i = 0; at != NULL && i < input; i++)
        at = strchr(at + 1, ',');
    if (at == NULL) {
        snprintf(buffer, size, "%d", input);
        return buffer;
    }
    at += 1 + strspn(at + 1, " ");
    snprintf(buffer, size, "%.*s", (int)strcspn(at, ",)=[ "), at);
    return buffer;
}

/* ---- one call ---- */

static tutti_status bad_input(const tu_call *call, int i,
                              tutti_status (*check)(const char *, const char *, const tt_tensor *)) {
    char name[64], argument[64];
    return check(display_name(call, name, sizeof name), tu_argument_name(call->operator, i, argument, sizeof argument),
                 call->inputs[i]);
}

static tutti_status check_inputs(tu_call *call, bool grad_mode) {
    const tu_operator *operator= call->operator;
    tutti_device device = TUTTI_CPU;
    bool wants = false, cpu = false;
    for (int i = 0; i < call->input_count; i++) {
        tt_tensor *x = call->inputs[i];
        if (x == NULL) {
            if (operator->optional & TU_INPUT(i))
                continue;
            return bad_input(call, i, tu_tensor_check);
        }
        if (x->magic != TU_MAGIC_ALIVE)
            return bad_input(call, i, tu_tensor_check);
        if (x->device == TUTTI_META)
            device = TUTTI_META;
        else if (!(x->flags & TU_NUMBER))
            cpu = true;
        if (x->history != NULL && !(x->flags & TU_REQUIRES_GRAD))
            tu_history_refresh(x);
        wants = wants || (x->flags & TU_REQUIRES_GRAD) != 0;
    }
    if (device == TUTTI_META && cpu)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "some arguments are on the device cpu and some on meta; expected all on one");
    call->device = device;
    call->wants_grad = wants && grad_mode;
    return TUTTI_OK;
}

static tutti_status check_ready(const tu_call *call) {
    for (int i = 0; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x == NULL)
            continue;
        if ((call->in_place && i == 0) || call->operator->written & TU_INPUT(i)) {
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
static tutti_status check_in_place(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    const tu_shape *result = &call->results[0];
    if (result->ndim != x->ndim || memcmp(result->sizes, x->sizes, (size_t)x->ndim * sizeof x->sizes[0]) != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the result has shape %s and cannot be written to %s",
                             tu_dims_text(result->ndim, result->sizes), tu_describe(x));
    if (tu_promote_pair(result->dtype, x->dtype) != x->dtype &&
        !(tu_is_float(x->dtype) && tu_is_float(result->dtype)) &&
        !(tu_is_integer(x->dtype) && tu_is_integer(result->dtype)) && !(tu_is_complex(x->dtype)))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "a result of type %s cannot be written to %s",
                             tutti_dtype_name(result->dtype), tu_describe(x));
    for (int i = 0; i < x->ndim; i++)
        if (x->strides[i] == 0 && x->sizes[i] > 1)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                 "%s is expanded: several of its elements share one memory location, so it "
                                 "cannot be written; clone it first",
                                 tu_describe(x));
    return call->wants_grad ? tu_history_check_in_place(call) : TUTTI_OK;
}

static void drop_outputs(tu_call *call, int count) {
    for (int i = 0; i < count; i++)
        tu_tensor_drop(call->outputs[i]);
}

static tutti_status make_outputs(tu_call *call) {
    for (int i = 0; i < call->output_count; i++) {
        tt_tensor *output = call->operator->flags & TU_VIEW ? tu_tensor_alias(call->inputs[0], &call->results[i])
                                                            : tu_tensor_new(&call->results[i]);
        if (output == NULL) {
            drop_outputs(call, i);
            tutti_error_info info = TUTTI_ERROR_INFO_INIT;
            return tutti_error_detail(&info) == TUTTI_OK ? info.status : TUTTI_ERROR_MEMORY;
        }
        call->outputs[i] = output;
    }
    return TUTTI_OK;
}

/* What was written has a new version. */
static void bump_written(tu_call *call) {
    if (call->in_place)
        tu_bump(call->outputs[0]);
    for (int i = 0; call->operator->flags & TU_WRITES && i<call->input_count; i++)
        if (call->operator->written & TU_INPUT(i) && call->inputs[i] != NULL)
            tu_bump(call->inputs[i]);
}

static tutti_status compute(tu_call *call) {
    const tu_operator *operator= call->operator;
    struct tu_node *node = NULL;
    bool records = call->wants_grad && !(operator->flags & TU_WRITES);
    tutti_status status = records ? tu_history_prepare(call, &node) : TUTTI_OK;
    if (status == TUTTI_OK && call->in_place)
        call->outputs[0] = tu_tensor_hold(call->inputs[0]);
    else if (status == TUTTI_OK)
        status = make_outputs(call);
    if (status != TUTTI_OK) {
        tu_history_cancel(node);
        return status;
    }
    if (call->device == TUTTI_CPU && operator->cpu != NULL)
        status = operator->cpu(call);
    if (status == TUTTI_OK) {
        bump_written(call);
        if (node != NULL)
            status = tu_history_attach(call, node);
        else if (operator->flags & TU_VIEW && !records)
            status = tu_history_note_view(call->inputs[0], call->outputs[0]);
    } else {
        tu_history_cancel(node);
    }
    if (status != TUTTI_OK)
        drop_outputs(call, call->output_count);
    return status;
}

static tutti_status run(tu_call *call, const tu_thread *self) {
    tutti_status status = check_inputs(call, !self->grad_disabled);
    if (status == TUTTI_OK && call->device == TUTTI_CPU && !(call->operator->flags & TU_VIEW))
        status = check_ready(call);
    if (status == TUTTI_OK)
        status = call->operator->shape(call);
    if (status == TUTTI_OK && call->in_place)
        status = check_in_place(call);
    return status == TUTTI_OK ? compute(call) : status;
}

bool tu_run_call(tu_call *call) {
    tu_thread *self = tu_self();
    if (self->pending != TUTTI_OK || (self->scope_count == 0 && !tu_scope_check()))
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

tt_tensor *tu_run1(const tu_operator *operator, tt_tensor * a) {
    tu_call call;
    tu_call_init(&call, operator, 1, &a);
    return tu_run(&call);
}

tt_tensor *tu_run2(const tu_operator *operator, tt_tensor * a, tt_tensor *b) {
    tt_tensor *inputs[] = { a, b };
    tu_call call;
    tu_call_init(&call, operator, 2, inputs);
    return tu_run(&call);
}

tt_tensor *tu_run1_(const tu_operator *operator, tt_tensor * a) {
    tu_call call;
    tu_call_init(&call, operator, 1, &a);
    call.in_place = true;
    return tu_run(&call);
}

tt_tensor *tu_run2_(const tu_operator *operator, tt_tensor * a, tt_tensor *b) {
    tt_tensor *inputs[] = { a, b };
    tu_call call;
    tu_call_init(&call, operator, 2, inputs);
    call.in_place = true;
    return tu_run(&call);
}
