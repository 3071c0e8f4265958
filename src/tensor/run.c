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
    const tu_operator *op = tu_table_at(index);
    tt_operator_info full = {
        .size = info->size,
        .name = op->name,
        .schema = op->schema,
        .summary = op->summary,
        .family = op->family,
        .in_place = (op->flags & TU_HAS_IN_PLACE) != 0,
        .view = (op->flags & TU_VIEW) != 0,
        .differentiable = op->gradient != NULL || (op->flags & TU_COMPOSITE) != 0,
        .pure = (op->flags & (TU_IMPURE | TU_WRITES)) == 0,
    };
    memcpy(info, &full, info->size < sizeof full ? info->size : sizeof full);
    return TUTTI_OK;
}

/* ---- errors ---- */

static const char *display_name(const tu_args *args, char *buffer, size_t size) {
    snprintf(buffer, size, "%s%s", args->op->name, args->in_place ? "_" : "");
    return buffer;
}

tutti_status tu_args_error(const tu_args *args, tutti_status status, const char *format, ...) {
    char name[64], text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return tu_error(status, "%s: %s", display_name(args, name, sizeof name), text);
}

const char *tu_argument_name(const tu_operator *op, int input, char *buffer, size_t size) {
    const char *at = strchr(op->schema, '(');
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

static tutti_status bad_input(const tu_args *args, int i,
                              tutti_status (*check)(const char *, const char *, const tt_tensor *)) {
    char name[64], argument[64];
    return check(display_name(args, name, sizeof name), tu_argument_name(args->op, i, argument, sizeof argument),
                 args->inputs[i]);
}

static tutti_status check_inputs(tu_args *args, bool grad_mode) {
    const tu_operator *op = args->op;
    tutti_device device = TUTTI_CPU;
    bool wants = false, cpu = false;
    for (int i = 0; i < args->input_count; i++) {
        tt_tensor *x = args->inputs[i];
        if (x == NULL) {
            if (op->optional & TU_INPUT(i))
                continue;
            return bad_input(args, i, tu_tensor_check);
        }
        if (x->magic != TU_MAGIC_ALIVE)
            return bad_input(args, i, tu_tensor_check);
        if (x->device == TUTTI_META)
            device = TUTTI_META;
        else if (!(x->flags & TU_NUMBER))
            cpu = true;
        if (x->history != NULL && !(x->flags & TU_REQUIRES_GRAD))
            tu_history_refresh(x);
        wants = wants || (x->flags & TU_REQUIRES_GRAD) != 0;
    }
    if (device == TUTTI_META && cpu)
        return tu_args_error(args, TUTTI_ERROR_ARGUMENT,
                             "some arguments are on the device cpu and some on meta; expected all on one");
    args->device = device;
    args->wants_grad = wants && grad_mode;
    return TUTTI_OK;
}

static tutti_status check_ready(const tu_args *args) {
    for (int i = 0; i < args->input_count; i++) {
        const tt_tensor *x = args->inputs[i];
        if (x == NULL)
            continue;
        if ((args->in_place && i == 0) || args->op->written & TU_INPUT(i)) {
            tutti_status status = tu_storage_wait_write(x->storage);
            if (status != TUTTI_OK)
                return status;
        }
        if (atomic_load_explicit(&x->storage->waiter, memory_order_relaxed) != NULL ||
            tu_tensor_need(x) > x->storage->bytes) {
            tutti_status status = bad_input(args, i, tu_tensor_ready);
            if (status != TUTTI_OK)
                return status;
        }
    }
    return TUTTI_OK;
}

/* A result written in place keeps the sizes and the dtype of what it is written to. */
static tutti_status check_in_place(tu_args *args) {
    const tt_tensor *x = args->inputs[0];
    const tu_shape *result = &args->results[0];
    if (result->ndim != x->ndim || memcmp(result->sizes, x->sizes, (size_t)x->ndim * sizeof x->sizes[0]) != 0)
        return tu_args_error(args, TUTTI_ERROR_ARGUMENT, "the result has shape %s and cannot be written to %s",
                             tu_dims_text(result->ndim, result->sizes), tu_describe(x));
    if (tu_promote_pair(result->dtype, x->dtype) != x->dtype &&
        !(tu_is_float(x->dtype) && tu_is_float(result->dtype)) &&
        !(tu_is_integer(x->dtype) && tu_is_integer(result->dtype)) && !(tu_is_complex(x->dtype)))
        return tu_args_error(args, TUTTI_ERROR_TYPE, "a result of type %s cannot be written to %s",
                             tutti_dtype_name(result->dtype), tu_describe(x));
    for (int i = 0; i < x->ndim; i++)
        if (x->strides[i] == 0 && x->sizes[i] > 1)
            return tu_args_error(args, TUTTI_ERROR_ARGUMENT,
                                 "%s is expanded: several of its elements share one memory location, so it "
                                 "cannot be written; clone it first",
                                 tu_describe(x));
    return args->wants_grad ? tu_history_check_in_place(args) : TUTTI_OK;
}

static void drop_outputs(tu_args *args, int count) {
    for (int i = 0; i < count; i++)
        tu_tensor_drop(args->outputs[i]);
}

static tutti_status make_outputs(tu_args *args) {
    for (int i = 0; i < args->output_count; i++) {
        tt_tensor *output = args->op->flags & TU_VIEW ? tu_tensor_alias(args->inputs[0], &args->results[i])
                                                      : tu_tensor_new(&args->results[i]);
        if (output == NULL) {
            drop_outputs(args, i);
            tutti_error_info info = TUTTI_ERROR_INFO_INIT;
            return tutti_error_detail(&info) == TUTTI_OK ? info.status : TUTTI_ERROR_MEMORY;
        }
        args->outputs[i] = output;
    }
    return TUTTI_OK;
}

static tutti_status compute(tu_args *args) {
    const tu_operator *op = args->op;
    tutti_status status = TUTTI_OK;
    if (args->in_place)
        args->outputs[0] = tu_tensor_hold(args->inputs[0]);
    else if ((status = make_outputs(args)) != TUTTI_OK)
        return status;
    if (args->device == TUTTI_CPU && op->cpu != NULL)
        status = op->cpu(args);
    if (status == TUTTI_OK && args->in_place)
        tu_bump(args->outputs[0]);
    if (status == TUTTI_OK && op->flags & TU_WRITES)
        for (int i = 0; i < args->input_count; i++)
            if (op->written & TU_INPUT(i) && args->inputs[i] != NULL)
                tu_bump(args->inputs[i]);
    if (status == TUTTI_OK) {
        if (args->wants_grad && !(op->flags & TU_WRITES))
            status = tu_history_record(args);
        else if (op->flags & TU_VIEW)
            status = tu_history_note_view(args->inputs[0], args->outputs[0]);
    }
    if (status != TUTTI_OK)
        drop_outputs(args, args->output_count);
    return status;
}

static tutti_status run(tu_args *args, const tu_thread *self) {
    tutti_status status = check_inputs(args, !self->grad_disabled);
    if (status == TUTTI_OK && args->device == TUTTI_CPU && !(args->op->flags & TU_VIEW))
        status = check_ready(args);
    if (status == TUTTI_OK)
        status = args->op->shape(args);
    if (status == TUTTI_OK && args->in_place)
        status = check_in_place(args);
    return status == TUTTI_OK ? compute(args) : status;
}

bool tu_run_args(tu_args *args) {
    tu_thread *self = tu_self();
    if (self->pending != TUTTI_OK || (self->scope_count == 0 && !tu_scope_check()))
        return false;
    tutti_status status = run(args, self);
    if (status != TUTTI_OK) {
        tu_pending_take(status);
        return false;
    }
    for (int i = 0; i < args->output_count; i++) {
        if (tu_scope_own(args->outputs[i]) == NULL) {
            for (int j = i + 1; j < args->output_count; j++)
                tu_tensor_drop(args->outputs[j]);
            return false;
        }
    }
    return true;
}

tt_tensor *tu_run1(const tu_operator *op, tt_tensor *a) {
    tu_args args;
    tu_args_init(&args, op, 1, &a);
    return tu_run(&args);
}

tt_tensor *tu_run2(const tu_operator *op, tt_tensor *a, tt_tensor *b) {
    tt_tensor *inputs[] = { a, b };
    tu_args args;
    tu_args_init(&args, op, 2, inputs);
    return tu_run(&args);
}

tt_tensor *tu_run1_(const tu_operator *op, tt_tensor *a) {
    tu_args args;
    tu_args_init(&args, op, 1, &a);
    args.in_place = true;
    return tu_run(&args);
}

tt_tensor *tu_run2_(const tu_operator *op, tt_tensor *a, tt_tensor *b) {
    tt_tensor *inputs[] = { a, b };
    tu_args args;
    tu_args_init(&args, op, 2, inputs);
    args.in_place = true;
    return tu_run(&args);
}
