/* SPDX-License-Identifier: Apache-2.0
 *
 * What a layer above keeps with a world or with a group, for as long as that lives: the memory layer its tables, the
 * collective layer a group's state, libtutti-tensor its collectives in flight. The owner knows none of them: an
 * attachment is found by the address of its description.
 */
#ifndef TU_WORLD_ATTACHMENT_H
#define TU_WORLD_ATTACHMENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include <tutti/group.h>
#include <tutti/world.h>

#include "base/error.h"
#include "base/settings.h"

/* The description, and by its address the key. It must stay valid as long as the owner. */
typedef struct tu_attachment {
    /* Makes what the owner (a tutti_world or a tutti_group) keeps, on first need, under the lock of its attachments: it
     * may attach something to another owner, not to the same. */
    tutti_status (*make)(void *owner, void **state);
    /* Ends it, with the owner's memory. What was attached last ends first, so who needs another attachment until its
     * own end gets that one before. */
    void (*end)(void *state);
    /* The world closes: writes what is still unfinished, in words, and returns whether there is something. NULL: there
     * never is. */
    bool (*unfinished)(void *state, char *text, size_t size);
    /* The world begins to close: lets go of handles of the world that it holds for nobody. NULL: it holds none. */
    void (*let_go)(void *state);
} tu_attachment;

typedef struct tu_attached {
    const tu_attachment *attachment;
    void *state;
    struct tu_attached *next; /* attached before this one; set before it is published */
} tu_attached;

typedef struct tu_attachments {
    void *owner;
    _Atomic(tu_attached *) newest; /* the list only grows while the owner lives */
    pthread_mutex_t lock;          /* held while one is made */
} tu_attachments;

void tu_attachments_init(tu_attachments *attachments, void *owner);
void tu_attachments_end(tu_attachments *attachments);
bool tu_attachments_unfinished(tu_attachments *attachments, char *text, size_t size);
void tu_attachments_let_go(tu_attachments *attachments);

/* What is attached already, or NULL: a load and a comparison or two, for hot paths. */
static inline void *tu_attachment_find(const tu_attachments *attachments, const tu_attachment *attachment) {
    /* Acquire pairs with the release in tu_attachment_get. */
    const tu_attached *one = atomic_load_explicit(&attachments->newest, memory_order_acquire);
    while (one != NULL && one->attachment != attachment)
        one = one->next;
    return one != NULL ? one->state : NULL;
}

/* The same, made where it is missing. */
tutti_status tu_attachment_get(tu_attachments *attachments, const tu_attachment *attachment, void **state);

/* The same on a world or a group, for a library that stands on libtutti: exported under the version TUTTI_PRIVATE, and
 * no part of the API. */
TU_SHARED tutti_status tu_world_attachment(tutti_world *world, const tu_attachment *attachment, void **state);
TU_SHARED tutti_status tu_group_attachment(tutti_group *group, const tu_attachment *attachment, void **state);
/* Likewise the text of a setting of a world, which lends it; "" when unset. */
TU_SHARED const char *tu_world_setting(const tutti_world *world, tu_setting setting);

#endif
