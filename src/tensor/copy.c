/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies: clone, contiguous, conversions, and writing into a tensor.
 */
#include <math.h>
#include <string.h>

#include "tensor/create.h"
#include "tensor/loop.h"

#define FAMILY "copies"

static tutti_status copy_cpu(tu_call *call) {
    tu_copy_tensor(call->outputs[0], call->inputs[0]);
    return TUTTI_OK;
}
static void pass_on(tu_gradient *gradient) {
    gradient->results[0] = gradient->grads[0];
}

/* ---- clone ---- */

static tutti_status clone_shape(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    call->results[0].offset = 0;
    return tu_is_dense(call->inputs[0]) ? TUTTI_OK : tu_shape_contiguous(call->operator->name, &call->results[0]);
}
static tt_tensor *clone_sample(tu_sampler *s) {
    return tt_clone(tu_normal(s, tt_shape(s->n, 3)));
}
TU_OPERATOR(clone) = { .name = "clone",
                       .schema = "clone(x) -> tensor",
                       .summary = "a copy; strides kept where x is dense",
                       .family = FAMILY,
                       .shape = clone_shape,
                       .cpu = copy_cpu,
                       .gradient = pass_on,
                       .sample = clone_sample };
tt_tensor *tt_clone(tt_tensor *x) {
    return tu_run1(&tu_operator_clone, x);
}

static tt_tensor *contiguous_sample(tu_sampler *s) {
    return tt_contiguous(tt_transpose(tu_normal(s, tt_shape(s->n, 3)), 0, 1));
}
TU_OPERATOR(contiguous) = { .name = "contiguous",
                            .schema = "contiguous(x) -> tensor",
                            .summary = "a row-major copy, or x itself",
                            .family = FAMILY,
                            .shape = tu_shape_like_first,
                            .cpu = copy_cpu,
                            .gradient = pass_on,
                            .sample = contiguous_sample };
tt_tensor *tt_contiguous(tt_tensor *x) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->flags & TU_CONTIGUOUS)
        return x;
    return tu_run1(&tu_operator_contiguous, x);
}

/* ---- to ---- */

static tutti_status to_shape(tu_call *call) {
    tutti_dtype dtype = (tutti_dtype)call->params.integer[0];
    if (!tu_dtype_valid(dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "%d is no dtype", (int)dtype);
    tutti_status status = clone_shape(call);
    call->results[0].dtype = dtype;
    return status;
}
static tt_tensor *to_sample(tu_sampler *s) {
    return tt_to(tu_normal(s, tt_shape(s->n, 3)), TUTTI_C128);
}
TU_OPERATOR(to) = { .name = "to",
                    .schema = "to(x, dtype) -> tensor",
                    .summary = "x in another dtype; x itself where it has it",
                    .family = FAMILY,
                    .shape = to_shape,
                    .cpu = copy_cpu,
                    .gradient = pass_on,
                    .sample = to_sample };
tt_tensor *tt_to(tt_tensor *x, tutti_dtype dtype) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->dtype == dtype &&
        !(x->flags & TU_NUMBER))
        return x;
    tu_call call;
    tu_call_init(&call, &tu_operator_to, 1, &x);
    call.params.integer[0] = dtype;
    return tu_run(&call);
}

/* ---- copy_, fill_ ---- */

static tutti_status into_first(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return TUTTI_OK;
}
static tutti_status copy_into_shape(tu_call *call) {
    const tt_tensor *to = call->inputs[0], *from = call->inputs[1];
    tu_shape result;
    tutti_status status = tu_broadcast(call, 0, &result);
    if (status != TUTTI_OK)
        return status;
    if (result.ndim != to->ndim || memcmp(result.sizes, to->sizes, (size_t)to->ndim * sizeof to->sizes[0]) != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s does not fit into %s", tu_describe(from), tu_describe(to));
    return into_first(call);
}
static tutti_status copy_into_cpu(tu_call *call) {
    tu_copy_tensor(call->outputs[0], call->inputs[1]);
    return TUTTI_OK;
}
static void copy_into_gradient(tu_gradient *gradient) {
    if (gradient->needs[0])
        gradient->results[0] = tt_zeros_like(gradient->grads[0]);
    gradient->results[1] = gradient->grads[0];
}
static tt_tensor *copy_sample(tu_sampler *s) {
    tt_tensor *x = tt_clone(tu_normal(s, tt_shape(s->n, 3)));
    return tt_copy_(x, tu_normal(s, tt_shape(3)));
}
TU_OPERATOR(copy) = { .name = "copy",
                      .schema = "copy(x, from) -> tensor",
                      .summary = "writes from into x; broadcasts and converts",
                      .family = FAMILY,
                      .flags = TU_HAS_IN_PLACE,
                      .shape = copy_into_shape,
                      .cpu = copy_into_cpu,
                      .gradient = copy_into_gradient,
                      .sample = copy_sample };
tt_tensor *tt_copy_(tt_tensor *x, tt_tensor *from) {
    return tu_run2_(&tu_operator_copy, x, from);
}

static tutti_status fill_cpu(tu_call *call) {
    tu_fill(call->outputs[0], call->params.number[0]);
    return TUTTI_OK;
}
static void fill_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_zeros_like(gradient->grads[0]);
}
static tt_tensor *fill_sample(tu_sampler *s) {
    return tt_fill_(tt_clone(tu_normal(s, tt_shape(s->n, 3))), 2.5);
}
TU_OPERATOR(fill) = { .name = "fill",
                      .schema = "fill(x, value) -> tensor",
                      .summary = "writes one value into x",
                      .family = FAMILY,
                      .flags = TU_HAS_IN_PLACE,
                      .shape = into_first,
                      .cpu = fill_cpu,
                      .gradient = fill_gradient,
                      .sample = fill_sample };
tt_tensor *tt_fill_(tt_tensor *x, double value) {
    tu_call call;
    tu_call_init(&call, &tu_operator_fill, 1, &x);
    call.params.number[0] = value;
    call.in_place = true;
    return tu_run(&call);
}
tt_tensor *tt_zero_(tt_tensor *x) {
    return tt_fill_(x, 0);
}

/* ---- restride ---- */

static tutti_status restride_shape(tu_call *call) {
    int dim;
    tu_shape *result = &call->results[0];
    tutti_status status = tu_wrap_dim("restride", call->params.integer[0], call->inputs[0]->ndim, &dim);
    if (status == TUTTI_OK)
        status = tu_shape_like_first(call);
    if (status != TUTTI_OK || result->ndim == 0)
        return status;
    int64_t stride = 1;
    for (int i = result->ndim - 1; i >= 0; i--) {
        if (i == dim)
            continue;
        result->strides[i] = stride;
        stride *= result->sizes[i] > 0 ? result->sizes[i] : 1;
    }
    result->strides[dim] = stride;
    return TUTTI_OK;
}
static tt_tensor *restride_sample(tu_sampler *s) {
    return tt_restride(tu_normal(s, tt_shape(2, s->n, 3)), 1);
}
TU_OPERATOR(restride) = { .name = "restride",
                          .schema = "restride(x, dim) -> tensor",
                          .summary = "the same values, laid out so that moving dim to the front is contiguous",
                          .family = FAMILY,
                          .shape = restride_shape,
                          .cpu = copy_cpu,
                          .gradient = pass_on,
                          .sample = restride_sample };
tt_tensor *tt_restride(tt_tensor *x, int dim) {
    tu_call call;
    tu_call_init(&call, &tu_operator_restride, 1, &x);
    call.params.integer[0] = dim;
    return tu_run(&call);
}
