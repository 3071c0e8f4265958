/* SPDX-License-Identifier: Apache-2.0
 *
 * Clipping of gradients, by norm and by value. Nothing is read back: norm and factor stay tensors.
 */
#include <math.h>

#include <tutti/functional.h>
#include <tutti/optimizer.h>

#include "nn/optimizer.h"

static void check_arguments(const char *who, tt_tensor_list parameters, double limit) {
    if (tu_self()->pending == TUTTI_OK && parameters.count > 0 && parameters.at == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: the list of %zu parameters is NULL", who, parameters.count);
    if (tu_self()->pending == TUTTI_OK && !(limit > 0))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: limit is %g and must be above 0", who, limit);
}

/* The gradients there are. */
static tt_tensor_list gradients_of(tt_tensor_list parameters) {
    tt_tensor_list none = { 0, tu_nothing };
    tt_tensor **gradients =
        tu_self()->pending == TUTTI_OK ? tu_scope_memory((parameters.count + 1) * sizeof *gradients) : NULL;
    size_t count = 0;
    for (size_t i = 0; gradients != NULL && i < parameters.count && tu_self()->pending == TUTTI_OK; i++)
        if ((gradients[count] = tt_grad(parameters.at[i])) != NULL)
            count++;
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, gradients) : none;
}

/* Narrow floats are squared as f32, since their own range is too small. */
tt_tensor *tu_grad_squares(tt_tensor_list parameters) {
    tt_tensor_list gradients = gradients_of(parameters);
    tt_tensor **squares = tu_scope_memory((gradients.count + 1) * sizeof *squares);
    if (squares == NULL || tu_self()->pending != TUTTI_OK)
        return NULL;
    for (size_t i = 0; i < gradients.count; i++) {
        tt_tensor *gradient = gradients.at[i];
        tutti_dtype dtype = tt_dtype(gradient);
        bool narrow = tu_is_float(dtype) && dtype != TUTTI_F32 && dtype != TUTTI_F64;
        squares[i] = tt_square(tt_to(tt_norm(narrow ? tt_to(gradient, TUTTI_F32) : gradient), TUTTI_F64));
    }
    if (gradients.count > 0)
        return tt_sum(tt_stack(tt_tensors_of(gradients.count, squares), 0));
    tutti_device device = parameters.count > 0 ? tt_device_of(parameters.at[0]) : 0; /* where others may have some */
    return tt_zeros(tt_shape(), TUTTI_F64, TUTTI_OPTIONS(tt_options, .device = device));
}

void tu_grad_scale(tt_tensor_list parameters, tt_tensor *norm, double limit) {
    tt_tensor_list gradients = gradients_of(parameters);
    tt_tensor *factor = tt_clamp(tt_div(tt_number(limit), tt_add_scalar(norm, 1e-6)), 0, 1);
    for (size_t i = 0; i < gradients.count; i++)
        tt_mul_(gradients.at[i], factor);
}

tt_tensor *tt_clip_grad_norm(tt_tensor_list parameters, double limit, tutti_group *group) {
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    check_arguments("clip_grad_norm", parameters, limit);
    tt_tensor *squares = tu_grad_squares(parameters);
    if (group != NULL) /* also with an error pending, which the other ranks must hear of */
        squares = tt_all_reduce(squares, TUTTI_SUM, group);
    tt_tensor *norm = tt_sqrt(squares);
    tu_grad_scale(parameters, norm, limit);
    tt_scope_return(norm);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return tu_self()->pending == TUTTI_OK ? norm : NULL;
}

bool tt_clip_grad_value(tt_tensor_list parameters, double limit) {
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    check_arguments("clip_grad_value", parameters, limit);
    tt_tensor_list gradients = gradients_of(parameters);
    for (size_t i = 0; i < gradients.count; i++)
        tt_clamp_(gradients.at[i], -limit, limit);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return tu_self()->pending == TUTTI_OK;
}
