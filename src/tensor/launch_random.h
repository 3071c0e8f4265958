/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels of random numbers get: see random.c.
 */
#ifndef TU_TENSOR_LAUNCH_RANDOM_H
#define TU_TENSOR_LAUNCH_RANDOM_H

#include "tensor/launch.h"

typedef struct tu_launch_drawn {
    tu_launch_random draw;
    uint64_t state; /* not 0: where seed, counter and rank are, as three words; those of `draw` do not count then */
} tu_launch_drawn;

#endif
