/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizer steps of one parameter: in place, outside the graph. The kernels are in tensor/optimizer.c.
 */
#include "nn/optimizer.h"
#include "tensor/create.h"

/* What cannot work would make every parameter a NaN. */
bool tu_settle(const char *who, const char *field, double *value, double instead, double below) {
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

bool tu_settle_sgd(const tt_sgd *options, tt_sgd *full) {
    *full = (tt_sgd)TT_SGD_INIT;
    return tu_self()->pending == TUTTI_OK &&
           tu_pending_take(tu_options_copy("tt_sgd", options, full, sizeof *full)) == TUTTI_OK &&
           tu_settle("tt_sgd", "learning_rate", &full->learning_rate, 0.01, HUGE_VAL) &&
           tu_settle("tt_sgd", "momentum", &full->momentum, 0, 1) &&
           tu_settle("tt_sgd", "weight_decay", &full->weight_decay, 0, HUGE_VAL);
}

bool tu_settle_adamw(const tt_adamw *options, tt_adamw *full) {
    *full = (tt_adamw)TT_ADAMW_INIT;
    return tu_self()->pending == TUTTI_OK &&
           tu_pending_take(tu_options_copy("tt_adamw", options, full, sizeof *full)) == TUTTI_OK &&
           tu_settle("tt_adamw", "learning_rate", &full->learning_rate, 0.001, HUGE_VAL) &&
           tu_settle("tt_adamw", "beta1", &full->beta1, 0.9, 1) &&
           tu_settle("tt_adamw", "beta2", &full->beta2, 0.999, 1) &&
           tu_settle("tt_adamw", "epsilon", &full->epsilon, 1e-8, HUGE_VAL) &&
           tu_settle("tt_adamw", "weight_decay", &full->weight_decay, 0.01, HUGE_VAL);
}

tt_tensor *tu_step_number(double value) {
    tt_tensor *number = tt_full(tt_shape(), value, TUTTI_F64, TU_OF_HOST);
    if (number != NULL)
        number->flags |= TU_NUMBER;
    return number;
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
    tt_sgd full;
    if (!tu_settle_sgd(options, &full) || !has_gradient("sgd_step", parameter, gradient))
        return false;
    if (full.momentum != 0 && velocity == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "sgd_step: argument velocity is NULL, and momentum %g needs it", full.momentum);
        return false;
    }
    tt_scope scope = tt_scope_open();
    bool done = tu_sgd_step(parameter, gradient, full.momentum != 0 ? velocity : NULL,
                            tu_step_number(full.learning_rate), full.momentum, full.weight_decay, NULL);
    tu_scope_leave(&scope);
    return done;
}

bool tt_adamw_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *m, tt_tensor *v, int64_t count,
                   const tt_adamw *options) {
    tt_adamw full;
    if (!tu_settle_adamw(options, &full) || !has_gradient("adamw_step", parameter, gradient))
        return false;
    if (count < 1) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "adamw_step: step is %lld and counts from 1", (long long)count);
        return false;
    }
    tt_scope scope = tt_scope_open();
    bool done =
        tu_adamw_step(parameter, gradient, m, v, tu_step_number((double)count), tu_step_number(full.learning_rate),
                      full.beta1, full.beta2, full.epsilon, full.weight_decay, NULL);
    tu_scope_leave(&scope);
    return done;
}
