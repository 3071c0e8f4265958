/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers inside.
 */
#ifndef TU_NN_OPTIMIZER_H
#define TU_NN_OPTIMIZER_H

#include <stdatomic.h>

#include <tutti/optimizer.h>

#include "tensor/operators.h"
#include "tensor/step.h"

#define TU_STEP_STATES 2 /* tensors that are remembered for one parameter, at most */

typedef struct tu_member {
    char *name; /* of the parameter in its module */
    tt_tensor *parameter, *states[TU_STEP_STATES];
    int group;
} tu_member;

typedef struct tu_member_group {
    tt_tensor *rate;
    double base_rate; /* what schedules multiply */
    double weight_decay;
} tu_member_group;

struct tt_optimizer {
    atomic_int references; /* the caller's, and one per sharding that protects it */
    const struct tu_step_kind *kind;
    double numbers[3]; /* momentum, or beta1, beta2 and epsilon */
    tt_tensor *steps;
    size_t member_count;
    tu_member *members;
    int group_count;
    tu_member_group *groups;
    tu_step_batch batch;
};

/* One more reference, which tt_optimizer_release gives back. */
tt_optimizer *tu_optimizer_keep(tt_optimizer *optimizer);
/* Whether a call on it can go on; else the pending error is set. */
bool tu_optimizer_usable(const char *who, const tt_optimizer *optimizer);

/* For clipping (clip.c). What the norm of all gradients there are is made of, a 0-dim f64: the sum of their p-th
 * powers, or the largest absolute value; of several lists, and of several ranks. */
tt_tensor *tu_grad_powers(tt_tensor_list parameters, double p);
tt_tensor *tu_powers_of_both(tt_tensor *left, tt_tensor *right, double p);
tt_tensor *tu_powers_of_all(tt_tensor *powers, double p, tutti_group *group);
/* The norm; NULL with the error pending where it must be finite and is not. */
tt_tensor *tu_norm_of(tt_tensor *powers, const tt_clip_options *options);
/* Scales gradients by the norm of all, where that is above the limit. */
void tu_grad_scale(tt_tensor_list parameters, tt_tensor *norm, double limit);
/* Puts the default where there is none, and refuses what cannot work. */
void tu_settle_clip(const char *who, double limit, const tt_clip_options *options, tt_clip_options *full);

/* A tensor of one f64 that goes with tensors of any device. */
tt_tensor *tu_step_number(double value);
/* Puts defaults where options are 0, and refuses what cannot work. */
bool tu_settle_sgd(const tt_sgd *options, tt_sgd *full);
bool tu_settle_adamw(const tt_adamw *options, tt_adamw *full);
/* Puts a default where one option is 0. */
bool tu_settle(const char *who, const char *field, double *value, double instead, double below);

#endif
