/* SPDX-License-Identifier: Apache-2.0
 *
 * Clipping of gradients, by norm and by value. Nothing is read back unless it is asked for: norm and factor stay
 * tensors.
 */
#include <math.h>

#include <tutti/functional.h>
#include <tutti/optimizer.h>

#include "nn/optimizer.h"

static void check_list(const char *who, tt_tensor_list parameters) {
    if (tu_self()->pending == TUTTI_OK && parameters.count > 0 && parameters.at == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: the list of %zu parameters is NULL", who, parameters.count);
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

/* ---- norms ---- */

void tu_settle_clip(const char *who, double limit, const tt_clip_options *options, tt_clip_options *full) {
    *full = (tt_clip_options)TT_CLIP_OPTIONS_INIT;
    if (tu_self()->pending == TUTTI_OK && !(limit > 0))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: limit is %g and must be above 0", who, limit);
    if (tu_self()->pending == TUTTI_OK && options != NULL)
        tu_pending_take(tu_options_copy("tt_clip_options", options, full, sizeof *full));
    if (tu_self()->pending == TUTTI_OK && !(full->p >= 0))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: tt_clip_options.p is %g and must be above 0, or 0 for 2", who, full->p);
    full->p = full->p == 0 ? 2 : full->p;
}

/* Of one gradient. Narrow floats are taken as f32, since their own range is too small. */
static tt_tensor *powers_of(tt_tensor *gradient, double p) {
    tutti_dtype dtype = tt_dtype(gradient);
    bool narrow = tu_is_float(dtype) && dtype != TUTTI_F32 && dtype != TUTTI_F64;
    tt_tensor *wide = narrow ? tt_to(gradient, TUTTI_F32) : gradient;
    if (p == 2)
        return tt_square(tt_to(tt_norm(wide), TUTTI_F64));
    if (tt_numel(gradient) == 0)
        return tt_zeros(tt_shape(), TUTTI_F64, TUTTI_OPTIONS(tt_options, .device = tt_device_of(gradient)));
    tt_tensor *sizes = tt_abs(wide);
    return isinf(p) ? tt_to(tt_amax(sizes, tt_shape(), false), TUTTI_F64)
                    : tt_sum(tt_pow_scalar(tt_to(sizes, TUTTI_F64), p));
}

tt_tensor *tu_grad_powers(tt_tensor_list parameters, double p) {
    tt_tensor_list gradients = gradients_of(parameters);
    tt_tensor **powers = tu_scope_memory((gradients.count + 1) * sizeof *powers);
    if (powers == NULL || tu_self()->pending != TUTTI_OK)
        return NULL;
    for (size_t i = 0; i < gradients.count; i++)
        powers[i] = powers_of(gradients.at[i], p);
    tt_tensor *all = gradients.count > 0 ? tt_stack(tt_tensors_of(gradients.count, powers), 0) : NULL;
    if (all != NULL)
        return isinf(p) ? tt_amax(all, tt_shape(), false) : tt_sum(all);
    tutti_device device = parameters.count > 0 ? tt_device_of(parameters.at[0]) : 0; /* where others may have some */
    return tt_zeros(tt_shape(), TUTTI_F64, TUTTI_OPTIONS(tt_options, .device = device));
}

tt_tensor *tu_powers_of_both(tt_tensor *left, tt_tensor *right, double p) {
    return isinf(p) ? tt_maximum(left, right) : tt_add(left, right);
}

tt_tensor *tu_powers_of_all(tt_tensor *powers, double p, tutti_group *group) {
    return tt_all_reduce(powers, isinf(p) ? TUTTI_MAX : TUTTI_SUM, group);
}

tt_tensor *tu_norm_of(tt_tensor *powers, const tt_clip_options *options) {
    double p = options->p;
    tt_tensor *norm = p == 2 ? tt_sqrt(powers) : isinf(p) ? powers : tt_pow_scalar(powers, 1 / p);
    if (options->finite && tu_self()->pending == TUTTI_OK) {
        double value = tt_item(norm);
        if (tu_self()->pending == TUTTI_OK && !isfinite(value))
            tu_fail(TUTTI_ERROR_STATE, "clip_grad_norm: the norm of all gradients is %g; they stay as they are", value);
    }
    return tu_self()->pending == TUTTI_OK ? norm : NULL;
}

void tu_grad_scale(tt_tensor_list parameters, tt_tensor *norm, double limit) {
    tt_tensor_list gradients = gradients_of(parameters);
    tt_tensor *factor = tt_clamp(tt_div(tt_number(limit), tt_add_scalar(norm, 1e-6)), 0, 1);
    for (size_t i = 0; i < gradients.count; i++)
        tt_mul_(gradients.at[i], factor);
}

tt_tensor *tt_clip_grad_norm_by(tt_tensor_list parameters, double limit, tutti_group *group,
                                const tt_clip_options *options) {
    tt_clip_options full;
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    check_list("clip_grad_norm", parameters);
    tu_settle_clip("clip_grad_norm", limit, options, &full);
    tt_tensor *powers = tu_grad_powers(parameters, full.p);
    if (group != NULL) /* also with an error pending, which the other ranks must hear of */
        powers = tu_powers_of_all(powers, full.p, group);
    tt_tensor *norm = tu_norm_of(powers, &full);
    tu_grad_scale(parameters, norm, limit);
    tt_scope_return(norm);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return tu_self()->pending == TUTTI_OK ? norm : NULL;
}

tt_tensor *tt_clip_grad_norm(tt_tensor_list parameters, double limit, tutti_group *group) {
    return tt_clip_grad_norm_by(parameters, limit, group, NULL);
}

bool tt_clip_grad_value(tt_tensor_list parameters, double limit) {
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    check_list("clip_grad_value", parameters);
    if (tu_self()->pending == TUTTI_OK && !(limit > 0))
        tu_fail(TUTTI_ERROR_ARGUMENT, "clip_grad_value: limit is %g and must be above 0", limit);
    tt_tensor_list gradients = gradients_of(parameters);
    for (size_t i = 0; i < gradients.count; i++)
        tt_clamp_(gradients.at[i], -limit, limit);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    return tu_self()->pending == TUTTI_OK;
}
