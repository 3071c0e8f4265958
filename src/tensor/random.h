/* SPDX-License-Identifier: Apache-2.0
 *
 * The random generator inside: a key and a position.
 */
#ifndef TU_TENSOR_RANDOM_H
#define TU_TENSOR_RANDOM_H

#include <stdint.h>

typedef struct tu_random {
    uint64_t seed, counter;
    uint32_t rank;
} tu_random;

/* The thread's generator as it is, moved on by `count` elements. */
tu_random tu_random_take(int64_t count);
/* Elements first.. of the draw, in [0, 1). */
void tu_random_uniform(tu_random state, int64_t first, int64_t count, double *out);

#endif
