/* SPDX-License-Identifier: Apache-2.0
 *
 * What layers above keep with a world or a group: see attachment.h.
 */
#include "world/attachment.h"

#include <stdlib.h>

#include "world/world.h"

void tu_attachments_init(tu_attachments *attachments, void *owner) {
    *attachments = (tu_attachments){ .owner = owner };
    pthread_mutex_init(&attachments->lock, NULL);
}

void tu_attachments_end(tu_attachments *attachments) {
    for (tu_attached *one = atomic_load(&attachments->newest), *next; one != NULL; one = next) {
        next = one->next;
        one->attachment->end(one->state);
        free(one);
    }
    pthread_mutex_destroy(&attachments->lock);
}

bool tu_attachments_unfinished(tu_attachments *attachments, char *text, size_t size) {
    /* Acquire pairs with the release in tu_attachment_get. */
    const tu_attached *one = atomic_load_explicit(&attachments->newest, memory_order_acquire);
    while (one != NULL && (one->attachment->unfinished == NULL || !one->attachment->unfinished(one->state, text, size)))
        one = one->next;
    return one != NULL;
}

void tu_attachments_let_go(tu_attachments *attachments) {
    /* Acquire pairs with the release in tu_attachment_get. */
    for (const tu_attached *one = atomic_load_explicit(&attachments->newest, memory_order_acquire); one != NULL;
         one = one->next)
        if (one->attachment->let_go != NULL)
            one->attachment->let_go(one->state);
}

static tutti_status attach(tu_attachments *attachments, const tu_attachment *attachment, void **state) {
    tu_attached *made = malloc(sizeof *made);
    if (made == NULL)
        return tu_error_memory("an attachment", sizeof *made);
    *made = (tu_attached){ .attachment = attachment, .next = atomic_load(&attachments->newest) };
    tutti_status status = attachment->make(attachments->owner, &made->state);
    if (status != TUTTI_OK) {
        free(made);
        return status;
    }
    *state = made->state;
    atomic_store_explicit(&attachments->newest, made, memory_order_release); /* pairs with tu_attachment_find */
    return TUTTI_OK;
}

tutti_status tu_attachment_get(tu_attachments *attachments, const tu_attachment *attachment, void **state) {
    *state = tu_attachment_find(attachments, attachment);
    if (__builtin_expect(*state != NULL, 1))
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&attachments->lock);
    *state = tu_attachment_find(attachments, attachment); /* another thread may have been quicker */
    if (*state == NULL)
        status = attach(attachments, attachment, state);
    pthread_mutex_unlock(&attachments->lock);
    return status;
}

tutti_status tu_world_attachment(tutti_world *world, const tu_attachment *attachment, void **state) {
    return tu_attachment_get(&world->attachments, attachment, state);
}

tutti_status tu_group_attachment(tutti_group *group, const tu_attachment *attachment, void **state) {
    return tu_attachment_get(&group->attachments, attachment, state);
}

const char *tu_world_setting(const tutti_world *world, tu_setting setting) {
    return tu_settings_text(&world->settings, setting);
}
