/* SPDX-License-Identifier: Apache-2.0
 *
 * Which rank the calling thread is part of, as far as the process knows, for those above who keep something per rank.
 */
#ifndef TU_WORLD_HERE_H
#define TU_WORLD_HERE_H

#include "base/error.h"

typedef struct tu_here {
    int rank;             /* -1: not known, or it is alone */
    const void *identity; /* of ranks that are threads, each has its own; compared only. NULL: not known */
} tu_here;
/* Exported under the version TUTTI_PRIVATE, for libtutti-tensor. */
TU_SHARED tu_here tu_rank_here(void);

#endif
