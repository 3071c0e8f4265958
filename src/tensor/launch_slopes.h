/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernel of the gradient of cross entropy gets: see loss.c.
 */
#ifndef TU_TENSOR_LAUNCH_SLOPES_H
#define TU_TENSOR_LAUNCH_SLOPES_H

#include "tensor/launch.h"

typedef struct tu_launch_slopes {
    tu_launch_rows rows;
    int64_t distance; /* between rows of the result, in elements; what lies between them becomes 0 */
    int32_t last;     /* and what lies behind the last one, up to that distance */
} tu_launch_slopes;

#endif
