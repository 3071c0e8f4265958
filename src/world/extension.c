/* SPDX-License-Identifier: Apache-2.0
 *
 * What libraries above keep on a world: see extension.h. The list only grows while the world is open.
 */
#include "world/extension.h"

#include <stdlib.h>
#include <string.h>

#include "world/world.h"

struct tu_extended {
    const tu_extension *extension;
    void *state;
    tu_extended *next; /* set before it is published */
};

static void *find(const tutti_world *world, const tu_extension *extension) {
    /* Acquire pairs with the release in tu_world_extend. */
    for (tu_extended *one = atomic_load_explicit(&world->extended, memory_order_acquire); one != NULL; one = one->next)
        if (one->extension == extension)
            return one->state;
    return NULL;
}

tutti_status tu_world_extend(tutti_world *world, const tu_extension *extension, void **state) {
    void *found = find(world, extension);
    if (found != NULL) {
        *state = found;
        return TUTTI_OK;
    }
    tu_extended *made = malloc(sizeof *made);
    if (made == NULL)
        return tu_error_memory("an extension of a world", sizeof *made);
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&world->room_lock);
    found = find(world, extension); /* another thread may have been quicker */
    if (found == NULL) {
        *made = (tu_extended){ .extension = extension, .next = atomic_load(&world->extended) };
        status = extension->make(world, &made->state);
        if (status == TUTTI_OK) {
            found = made->state;
            atomic_store_explicit(&world->extended, made, memory_order_release); /* pairs with find */
            made = NULL;
        }
    }
    pthread_mutex_unlock(&world->room_lock);
    free(made);
    if (status == TUTTI_OK)
        *state = found;
    return status;
}

bool tu_world_unfinished(tutti_world *world, char *text, size_t size) {
    for (tu_extended *one = atomic_load_explicit(&world->extended, memory_order_acquire); one != NULL; one = one->next)
        if (one->extension->unfinished(one->state, text, size))
            return true;
    return false;
}

void tu_world_end_extensions(tutti_world *world) {
    for (tu_extended *one = atomic_load(&world->extended), *next; one != NULL; one = next) {
        next = one->next;
        one->extension->end(one->state);
        free(one);
    }
}
