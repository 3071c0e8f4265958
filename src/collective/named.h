/* SPDX-License-Identifier: Apache-2.0
 *
 * What the named operations share.
 */
#ifndef TU_COLLECTIVE_NAMED_H
#define TU_COLLECTIVE_NAMED_H

#include "collective/collective.h"

/* The memory must be symmetric; it is rendezvoused with the group, unless it has been. `what` is for messages:
 * "input". */
tutti_status tu_named_symmetric(tutti_group *group, tu_operation operation, const char *what, const void *pointer,
                                size_t bytes);

/* Runs of tasks that are no plain shape. */
tutti_status tu_split_last_dim(tu_collective *state, tu_task *task);

#endif
