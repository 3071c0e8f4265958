/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ways to train in parallel share.
 */
#ifndef TU_PARALLEL_PARALLEL_H
#define TU_PARALLEL_PARALLEL_H

#include <tutti/parallel.h>

#include "tensor/operator.h"

/* A collective: whether all ranks have tensors of the same names, shapes and dtypes, and the same in `cuts`, the
 * dimension along which each is cut (NULL: none is). Else TUTTI_ERROR_MISMATCH, on every rank, which names the first
 * that differs. */
tutti_status tu_parallel_agree(const char *who, tt_named_list tensors, const int *cuts, tutti_group *group);
/* A collective: whether the random generators of all ranks are in the same state. Else TUTTI_ERROR_MISMATCH, on every
 * rank. Failed with the error pending. */
bool tu_parallel_agree_random(const char *who, tutti_group *group);
/* A collective: the values of rank `root` in everybody's tensors. Failed with the error pending. */
void tu_parallel_broadcast(tt_tensor_list tensors, int root, tutti_group *group);

/* A collective: TUTTI_OK where all ranks have it; else this rank's own failure, or one that says in `others` what
 * another rank's means. An error that is pending counts as a failure, and stays pending. */
tutti_status tu_parallel_all(tutti_status status, const char *others, tutti_group *group);

#endif
