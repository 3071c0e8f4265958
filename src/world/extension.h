/* SPDX-License-Identifier: Apache-2.0
 *
 * Room on a world for a library that stands on libtutti. Exported under the version TUTTI_PRIVATE, and no part of the
 * API: libtutti-tensor keeps its collectives in flight here.
 */
#ifndef TU_WORLD_EXTENSION_H
#define TU_WORLD_EXTENSION_H

#include <tutti/world.h>

#include "base/error.h"

typedef struct tu_extension {
    /* Makes what the world keeps, on first need. */
    tutti_status (*make)(tutti_world *world, void **state);
    /* The world closes: writes what is still unfinished, in words, and returns whether there is something. */
    bool (*unfinished)(void *state, char *text, size_t size);
    /* Ends it, with the world's memory. */
    void (*end)(void *state);
} tu_extension;

/* What the world keeps for this extension; one load and a comparison once it is made. The extension itself must stay
 * valid as long as the world. */
TU_SHARED tutti_status tu_world_extend(tutti_world *world, const tu_extension *extension, void **state);

#endif
