/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads on one loop. As many as the BLAS uses (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS), started on first need.
 */
#ifndef TU_TENSOR_PARALLEL_H
#define TU_TENSOR_PARALLEL_H

#include <stdint.h>

typedef void tu_parallel_body(void *context, int64_t begin, int64_t end);

/* Calls body over [0, count) in pieces, on several threads at once where a piece would have at least `grain` items.
 * When all threads are busy with another rank's loop, and inside a body, the caller does it alone. */
void tu_parallel(int64_t count, int64_t grain, tu_parallel_body *body, void *context);
int tu_parallel_threads(void);

#endif
