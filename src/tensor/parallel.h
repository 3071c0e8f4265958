/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads on one loop: the process's pool (base/pool.h). As many as TUTTI_THREADS and the CPU set allow, and no
 * more than the BLAS uses (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS).
 */
#ifndef TU_TENSOR_PARALLEL_H
#define TU_TENSOR_PARALLEL_H

#include <stdint.h>

typedef void tu_parallel_body(void *context, int64_t begin, int64_t end);

/* Calls body over [0, count) in pieces, on several threads at once where a piece would have at least `grain` items.
 * When all threads are busy with other loops, and inside a body, the caller does it alone. */
void tu_parallel(int64_t count, int64_t grain, tu_parallel_body *body, void *context);

#endif
