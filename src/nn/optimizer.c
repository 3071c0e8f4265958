/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizer steps: in place, outside the graph. The kernels are in tensor/optimizer.c.
 */
#include "tensor/operators.h"

/* Puts a default where an option is 0, and refuses what cannot work: it would make every parameter a NaN. */
static bool settle(const char *who, const char *field, double *value, double instead, double below) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (!(*value >= 0) || !(*value < below)) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s.%s is %g; it must be 0 (%g), TUTTI_ZERO or a positive number below %g", who,
                field, *value, instead, below);
        return false;
    }
    *value = tu_option_number(*value, instead);
    return true;
}

/* A parameter that no backward reached has no gradient: the message must say which one. */
static bool has_gradient(const char *who, const tt_tensor *parameter, const tt_tensor *gradient) {
    if (tu_pending_take(tu_tensor_check(who, "parameter", parameter)) != TUTTI_OK)
        return false;
    if (gradient == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "%s: argument gradient is NULL for the parameter %s: no backward has reached it since its gradient was "
                "removed. Leave it out of the step",
                who, tu_describe(parameter));
    return gradient != NULL;
}

bool tt_sgd_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *velocity, const tt_sgd *options) {
    tt_sgd full = TT_SGD_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_sgd", options, &full, sizeof full)) != TUTTI_OK ||
        !settle("tt_sgd", "learning_rate", &full.learning_rate, 0.01, HUGE_VAL) ||
        !settle("tt_sgd", "momentum", &full.momentum, 0, 1) ||
        !settle("tt_sgd", "weight_decay", &full.weight_decay, 0, HUGE_VAL))
        return false;
    if (!has_gradient("sgd_step", parameter, gradient))
        return false;
    if (full.momentum != 0 && velocity == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "sgd_step: argument velocity is NULL, and momentum %g needs it", full.momentum);
        return false;
    }
    return tu_sgd_step(parameter, gradient, full.momentum != 0 ? velocity : NULL, full.learning_rate, full.momentum,
                       full.weight_decay, NULL);
}

bool tt_adamw_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *m, tt_tensor *v, int64_t count,
                   const tt_adamw *options) {
    tt_adamw full = TT_ADAMW_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_adamw", options, &full, sizeof full)) != TUTTI_OK ||
        !settle("tt_adamw", "learning_rate", &full.learning_rate, 0.001, HUGE_VAL) ||
        !settle("tt_adamw", "beta1", &full.beta1, 0.9, 1) || !settle("tt_adamw", "beta2", &full.beta2, 0.999, 1) ||
        !settle("tt_adamw", "epsilon", &full.epsilon, 1e-8, HUGE_VAL) ||
        !settle("tt_adamw", "weight_decay", &full.weight_decay, 0.01, HUGE_VAL))
        return false;
    if (!has_gradient("adamw_step", parameter, gradient))
        return false;
    if (count < 1) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "adamw_step: step is %lld and counts from 1", (long long)count);
        return false;
    }
    return tu_adamw_step(parameter, gradient, m, v, count, full.learning_rate, full.beta1, full.beta2, full.epsilon,
                         full.weight_decay, NULL);
}
