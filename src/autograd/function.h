/* SPDX-License-Identifier: Apache-2.0
 *
 * Custom functions inside: what modules add to them.
 */
#ifndef TU_AUTOGRAD_FUNCTION_H
#define TU_AUTOGRAD_FUNCTION_H

#include "autograd/node.h"

/* One node over all tensors of `list` (entries may be NULL), whose results are views of them: where module hooks hang.
 * *node is lent by the results. Nothing is wrapped, *node is NULL and the list itself comes back, where gradient mode
 * is off or none requires grad. */
tt_tensor_list tu_wrap_together(const char *name, tt_tensor_list list, tu_node **node);

/* While a function is captured: what stands for the tensors of a list, in `few`. False with the error pending. */
bool tu_stand_in_all(tt_tensor_list *list, tt_tensor **few);

/* A copy of the list, as tu_hook_list_snapshot gives it, for whoever runs the hooks now. While a function is captured,
 * a hook that is opaque is an error. */
tutti_status tu_hooks_to_run(tu_hook_list *list, tu_hook_list *copy);

#endif
