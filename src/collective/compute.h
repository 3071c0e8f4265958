/* SPDX-License-Identifier: Apache-2.0
 *
 * Large reductions and copies by several threads of a rank, where it has cores to spare.
 */
#ifndef TU_COLLECTIVE_COMPUTE_H
#define TU_COLLECTIVE_COMPUTE_H

#include "collective/collective.h"

/* As the kernels of the same name. Short ones, and all when no core is free, run on the calling thread. */
void tu_compute_reduce(tu_collective *state, void *const *to, int to_count, const void *const *from, int from_count,
                       size_t count, tutti_dtype dtype, tutti_reduction reduction, const double *factors,
                       unsigned flags);
void tu_compute_copy(tu_collective *state, void *to, const void *from, size_t bytes, unsigned flags);

/* How many threads besides the caller's a rank of this world may use. */
int tu_compute_threads(const tutti_world *world);

#endif
