/* SPDX-License-Identifier: Apache-2.0
 *
 * Training a module: gradients are clipped, an optimizer makes a step, a schedule sets the next learning rate.
 *
 *     tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 3e-4));
 *     tt_schedule schedule = { sizeof schedule, TT_SCHEDULE_COSINE, .warm_up = 100, .steps = 10000 };
 *     for (…) {
 *         tt_schedule_apply(&schedule, optimizer);
 *         tt_backward(loss, NULL);
 *         tt_clip_grad_norm(weights, 1, NULL);
 *         tt_optimizer_step(optimizer);
 *         tt_optimizer_zero_grad(optimizer);
 *     }
 *     tt_optimizer_release(optimizer);
 *
 * The number of steps and the learning rates are tensors of one f64, so that a step that was recorded once can run
 * again with others. The functions follow the tt_ conventions: an error stays pending, and nothing is changed while one
 * is.
 */
#ifndef TUTTI_OPTIMIZER_H
#define TUTTI_OPTIMIZER_H

#include <tutti/module.h>
#include <tutti/ops.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- gradients that are too large ---- */

/* The norm of all gradients together, a 0-dim f64 tensor; where it is above `limit` all of them are scaled in place so
 * that it is `limit`. Parameters without a gradient are skipped; each must be listed once. With a group every rank
 * holds other parameters, or other parts of them, and the norm is over all ranks, which must call it together; NULL for
 * none. Nothing waits for the numbers: a norm that is not finite makes gradients that are not, and the caller sees it
 * in the result. */
TUTTI_API tt_tensor *tt_clip_grad_norm(tt_tensor_list parameters, double limit, tutti_group *group);

typedef struct tt_clip_options {
    size_t size;
    double p;    /* of the norm, above 0; 0: 2. INFINITY: the largest absolute value */
    bool finite; /* the norm is read, and one that is not finite is TUTTI_ERROR_STATE: gradients stay as they are */
} tt_clip_options;
#define TT_CLIP_OPTIONS_INIT TUTTI_DEFAULTS(tt_clip_options)
/* TT_CLIP_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_clip_options_init(tt_clip_options *options, size_t size);
/* tt_clip_grad_norm by other norms: the p-th root of the sum of all elements' p-th powers. options may be NULL. */
TUTTI_API tt_tensor *tt_clip_grad_norm_by(tt_tensor_list parameters, double limit, tutti_group *group,
                                          const tt_clip_options *options);
/* Brings every element of every gradient into [-limit, limit]. Parameters without a gradient are skipped. */
TUTTI_API bool tt_clip_grad_value(tt_tensor_list parameters, double limit);

/* ---- optimizers ---- */

typedef struct tt_optimizer tt_optimizer;

/* Stochastic gradient descent over the parameters that the module has now and that require grad. Options as for
 * tt_sgd_step; NULL: defaults. The optimizer holds the parameters, not the module. */
TUTTI_API tt_optimizer *tt_sgd_optimizer(const tt_module *module, const tt_sgd *options);
/* The same with AdamW; options as for tt_adamw_step. */
TUTTI_API tt_optimizer *tt_adamw_optimizer(const tt_module *module, const tt_adamw *options);
/* Ends it. NULL is allowed. */
TUTTI_API void tt_optimizer_release(tt_optimizer *optimizer);

/* What a group of parameters has of its own. */
typedef struct tt_parameter_group {
    size_t size;
    double learning_rate; /* 0: that of the optimizer's options */
    double weight_decay;  /* 0: that of the optimizer's options; TUTTI_ZERO: none */
} tt_parameter_group;
#define TT_PARAMETER_GROUP_INIT TUTTI_DEFAULTS(tt_parameter_group)
/* TT_PARAMETER_GROUP_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_parameter_group_init(tt_parameter_group *group, size_t size);
/* Moves these parameters of the optimizer to a new group and returns its number; TUTTI_NONE on failure. All parameters
 * are in group 0 at first. One that the optimizer does not have is an error, and none is moved. */
TUTTI_API int tt_optimizer_add_group(tt_optimizer *optimizer, tt_tensor_list parameters,
                                     const tt_parameter_group *options);
/* How many groups there are; at least 1. 0 for NULL. */
TUTTI_API int tt_optimizer_group_count(const tt_optimizer *optimizer);

/* One step with the gradients that are there, in one walk over all parameters. A parameter without one is left as it
 * is; where no parameter has one, it is an error that names the first. Where
 * parameters share memory, the result is that of single steps in their order. Memory of a parameter, a gradient or a
 * state that was freed is found before anything is computed: then nothing has changed. After another error, of which
 * lack of memory is one, no dense parameter of f32 or f64 in the memory of the host has changed that shares no memory
 * with others, unless anomaly mode stopped the step. A step that failed is not counted. */
TUTTI_API bool tt_optimizer_step(tt_optimizer *optimizer);
/* Removes the gradients of all its parameters. */
TUTTI_API void tt_optimizer_zero_grad(tt_optimizer *optimizer);
/* How many steps were made, a tensor of one f64: the optimizer's own. */
TUTTI_API tt_tensor *tt_optimizer_steps(const tt_optimizer *optimizer);
/* The learning rate of a group, a tensor of one f64: the optimizer's own. What is written to it counts from the next
 * step on. */
TUTTI_API tt_tensor *tt_optimizer_learning_rate(const tt_optimizer *optimizer, int group);
/* Everything that it remembers: "step", "learning_rate.0", … and for each parameter "velocity.<name>", or "m.<name>"
 * and "v.<name>". They are its own tensors: writing them changes it. */
TUTTI_API tt_named_list tt_optimizer_state(const tt_optimizer *optimizer);

/* ---- schedules ---- */

typedef enum tt_schedule_kind {
    TT_SCHEDULE_CONSTANT = 0, /* as it is */
    TT_SCHEDULE_LINEAR = 1,   /* falls in a straight line to `last` */
    TT_SCHEDULE_STEP = 2,     /* times `factor` after every `every` steps */
    TT_SCHEDULE_COSINE = 3    /* falls in half a cosine wave to `last` */
} tt_schedule_kind;

/* A schedule is a pure function of the number of steps: it has no state, so nothing of it is saved. */
typedef struct tt_schedule {
    size_t size;
    tt_schedule_kind kind;
    int64_t warm_up; /* steps in which the rate rises in a straight line from 1 / warm_up of it; 0: none */
    int64_t steps;   /* LINEAR, COSINE: where `last` is reached, counted with the warm-up; needed there */
    int64_t every;   /* STEP: needed there */
    double factor;   /* STEP; 0: 0.1 */
    double last;     /* LINEAR, COSINE: share of the rate that is left at the end and stays */
} tt_schedule;
#define TT_SCHEDULE_INIT TUTTI_DEFAULTS(tt_schedule)
/* TT_SCHEDULE_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_schedule_init(tt_schedule *schedule, size_t size);
/* By what the learning rate is multiplied in the step that follows `done` steps; NaN with the pending error set. */
TUTTI_API double tt_schedule_factor(const tt_schedule *schedule, int64_t done);
/* Sets the learning rate of every group for the next step: what the group was made with, times the factor. */
TUTTI_API bool tt_schedule_apply(const tt_schedule *schedule, tt_optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
