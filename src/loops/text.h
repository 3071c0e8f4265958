/* SPDX-License-Identifier: Apache-2.0
 *
 * The headers that the code of loops includes, as texts inside the library: compiled code needs no source tree, and
 * cannot come from another version of it.
 */
#ifndef TU_LOOPS_TEXT_H
#define TU_LOOPS_TEXT_H

#include <stdio.h>

#include "base/instructions.h"

/* One text with everything that a level needs, each header once. */
void tu_lanes_write(FILE *to, tu_instructions level);
/* The same for GPUs: nothing is included. */
void tu_device_text_write(FILE *to);

#endif
