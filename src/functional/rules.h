/* SPDX-License-Identifier: Apache-2.0
 *
 * What the shape rules and gradients of collectives share.
 */
#ifndef TU_FUNCTIONAL_RULES_H
#define TU_FUNCTIONAL_RULES_H

#include "tensor/operator.h"

/* A form that writes a tensor of the caller's cannot be differentiated: an error where that is wanted. */
tutti_status tu_rule_no_gradient(const tu_call *call);
/* x must be contiguous. */
tutti_status tu_rule_dense(const tu_call *call, const tt_tensor *x);
/* The result is like the first input, which the in-place form writes where it lies. */
tutti_status tu_rule_same_shape(tu_call *call);
/* The reduction must be one that x's dtype has. */
tutti_status tu_rule_reduction(const tu_call *call, tutti_reduction reduction, const tt_tensor *x);
/* The shapes of x from all ranks along dim, and of this rank's part of it. A 0-dim x is gathered as one row. */
tutti_status tu_rule_gathered(const tu_call *call, const tt_tensor *x, int dim, tutti_group *group, tu_shape *result);
tutti_status tu_rule_scattered(const tu_call *call, const tt_tensor *x, tutti_reduction reduction, int dim,
                               tutti_group *group, tu_shape *result);
/* Input 0 is where the result goes: dense, of the wanted dtype and number of elements. Input 1 is what it is made of.
 */
tutti_status tu_rule_out(tu_call *call, const tu_shape *wanted, tutti_group *group);

/* Sum and avg have a gradient; else the pending error says so. */
bool tu_rule_has_gradient(const tu_gradient *gradient, tutti_reduction reduction);
/* premul_sum without its factor is an error: true, with it pending. */
bool tu_rule_needs_factor(const char *who, tutti_reduction reduction);

/* Starts a collective of one tensor, or notes it in the thread's batch. `factor` is premul_sum's; `dim` is in range. */
tutti_status tu_start_reduce(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor,
                             tutti_group *group);
tutti_status tu_start_gather(const tt_tensor *x, tt_tensor *out, int dim, tutti_group *group);
tutti_status tu_start_scatter(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor, int dim,
                              tutti_group *group);

#endif
