/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizer steps: in place, outside the graph. The kernels are in tensor/optimizer.c.
 */
#include "tensor/optimizer.h"

#define FAMILY "optimizers"

static tt_tensor *sgd_sample(tu_sampler *s) {
    tt_tensor *p = tt_clone(tu_normal(s, tt_shape(s->n, 3))), *g = tu_normal(s, tt_shape(s->n, 3));
    tt_tensor *velocity = tt_clone(tu_normal(s, tt_shape(s->n, 3)));
    tt_sgd options = TT_SGD_INIT;
    options.momentum = 0.9;
    options.weight_decay = 0.1;
    tt_sgd_step(tt_detach(p), tt_detach(g), tt_detach(velocity), &options);
    return tt_detach(p);
}
static tt_tensor *adamw_sample(tu_sampler *s) {
    tt_tensor *p = tt_clone(tu_normal(s, tt_shape(s->n, 3))), *g = tu_normal(s, tt_shape(s->n, 3));
    tt_tensor *m = tt_clone(tu_normal(s, tt_shape(s->n, 3))), *v = tt_clone(tu_positive(s, tt_shape(s->n, 3)));
    tt_adamw_step(tt_detach(p), tt_detach(g), tt_detach(m), tt_detach(v), 3, NULL);
    return tt_detach(p);
}
TU_OPERATOR(sgd_step) = {
    .name = "sgd_step",
    .schema = "sgd_step(parameter, gradient, velocity=NULL, options)",
    .summary = "velocity = momentum velocity + gradient + decay parameter; parameter -= rate velocity",
    .family = FAMILY,
    .flags = TU_WRITES,
    .optional = TU_INPUT(2),
    .written = TU_INPUT(0) | TU_INPUT(2),
    .shape = tu_step_shape,
    .cpu = tu_sgd_cpu,
    .sample = sgd_sample
};
TU_OPERATOR(adamw_step) = { .name = "adamw_step",
                            .schema = "adamw_step(parameter, gradient, m, v, step, options)",
                            .summary = "AdamW with bias correction and decoupled decay",
                            .family = FAMILY,
                            .flags = TU_WRITES,
                            .written = TU_INPUT(0) | TU_INPUT(2) | TU_INPUT(3),
                            .shape = tu_step_shape,
                            .cpu = tu_adamw_cpu,
                            .sample = adamw_sample };

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

bool tt_sgd_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *velocity, const tt_sgd *options) {
    tt_sgd full = TT_SGD_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_sgd", options, &full, sizeof full)) != TUTTI_OK ||
        !settle("tt_sgd", "learning_rate", &full.learning_rate, 0.01, HUGE_VAL) ||
        !settle("tt_sgd", "momentum", &full.momentum, 0, 1) ||
        !settle("tt_sgd", "weight_decay", &full.weight_decay, 0, HUGE_VAL))
        return false;
    if (full.momentum != 0 && velocity == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "sgd_step: argument velocity is NULL, and momentum %g needs it", full.momentum);
        return false;
    }
    tt_tensor *inputs[] = { parameter, gradient, full.momentum != 0 ? velocity : NULL };
    tu_call call;
    tu_call_init(&call, &tu_operator_sgd_step, 3, inputs);
    call.params.number[0] = full.learning_rate;
    call.params.number[1] = full.momentum;
    call.params.number[2] = full.weight_decay;
    return tu_run(&call) != NULL;
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
    if (count < 1) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "adamw_step: step is %lld and counts from 1", (long long)count);
        return false;
    }
    tt_tensor *inputs[] = { parameter, gradient, m, v };
    tu_call call;
    tu_call_init(&call, &tu_operator_adamw_step, 4, inputs);
    call.params.number[0] = full.learning_rate;
    call.params.number[1] = full.beta1;
    call.params.number[2] = full.beta2;
    call.params.number[3] = full.epsilon;
    call.params.integer[0] = count;
    __builtin_memcpy(&call.params.integer[1], &full.weight_decay, sizeof full.weight_decay);
    return tu_run(&call) != NULL;
}
