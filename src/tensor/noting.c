/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host does before each run of a noted step: see noting.h.
 */
#include "tensor/noting.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/loop.h"

#define PAGE_BYTES ((size_t)16 << 10)

/* Numbers that travel together. */
typedef struct page {
    struct page *next;
    tu_device_block there;
    size_t bytes, used;
    _Alignas(16) unsigned char here[];
} page;

/* A tensor of the host, and what it held before. */
typedef struct guarded {
    struct guarded *next;
    tt_tensor *x;
    unsigned char bytes[];
} guarded;

struct tu_noted {
    const tu_device *device;
    void *stream; /* that is noted: the graph's memory comes in order with it */
    tu_noted *outer;
    tu_noted_act *first, **last;
    page *pages;
    guarded *guards;
    uint64_t seed, counter; /* of the generator, before */
    uint32_t seed_rank;
};

tutti_status tu_noted_begin(const tu_device *device, tu_noted **made) {
    tu_thread *self = tu_self();
    tu_noted *noted = calloc(1, sizeof *noted);
    if (noted == NULL)
        return tu_error_memory("a replay", sizeof *noted);
    *noted = (tu_noted){ .device = device,
                         .stream = tu_device_stream(device),
                         .outer = self->noting,
                         .seed = self->seed,
                         .counter = self->counter,
                         .seed_rank = self->seed_rank };
    noted->last = &noted->first;
    self->noting = *made = noted;
    return TUTTI_OK;
}

void tu_noted_close(tu_noted *noted) {
    tu_thread *self = tu_self();
    tu_noted **link = &self->noting, *inner = NULL;
    while (*link != noted) {
        inner = *link;
        link = &inner->outer;
    }
    *link = noted->outer;
    if (inner == NULL) {
        self->seed = noted->seed;
        self->counter = noted->counter;
        self->seed_rank = noted->seed_rank;
    } else { /* who began later goes back as far */
        inner->seed = noted->seed;
        inner->counter = noted->counter;
        inner->seed_rank = noted->seed_rank;
    }
    while (noted->guards != NULL) {
        guarded *one = noted->guards;
        noted->guards = one->next;
        memcpy(one->x->storage->data, one->bytes, one->x->storage->bytes);
        tu_tensor_drop(one->x);
        free(one);
    }
}

tutti_status tu_noted_run(tu_noted *noted, void *stream) {
    const tu_device *device = noted->device;
    tutti_status status = TUTTI_OK;
    if (noted->first != NULL && device->table->capturing(device->state, device->index, stream))
        return tu_error(TUTTI_ERROR_STATE, "a replay that takes numbers from the host (random numbers, an optimizer's "
                                           "count) cannot be part of another capture: they would be frozen in it");
    for (tu_noted_act *act = noted->first; act != NULL && status == TUTTI_OK; act = act->next)
        status = act->run(act);
    for (const page *one = noted->pages; one != NULL && status == TUTTI_OK; one = one->next)
        status = device->table->copy(device->state, device->index, stream, one->there.data, one->here, one->used);
    return status;
}

void tu_noted_end(tu_noted *noted) {
    if (noted == NULL)
        return;
    while (noted->first != NULL) {
        tu_noted_act *act = noted->first;
        noted->first = act->next;
        act->end(act);
    }
    while (noted->pages != NULL) {
        page *one = noted->pages;
        noted->pages = one->next;
        noted->device->table->release(noted->device->state, noted->device->index, &one->there);
        free(one);
    }
    free(noted);
}

void tu_noted_drop(const tu_device *device, const void *stream) {
    tu_noted *noted = tu_self()->noting;
    while (noted != NULL && (noted->device != device || noted->stream != stream))
        noted = noted->outer;
    if (noted != NULL)
        tu_noted_close(noted);
    tu_noted_end(noted);
}

tu_noted *tu_noting(const tu_device *device) {
    tu_noted *noted = tu_self()->noting;
    return noted != NULL && noted->device == device && tu_device_stream(device) == noted->stream ? noted : NULL;
}

void tu_noted_add(tu_noted *noted, tu_noted_act *act) {
    act->next = NULL;
    *noted->last = act;
    noted->last = &act->next;
}

void *tu_noted_room(tu_noted *noted, size_t bytes, uint64_t *there) {
    const tu_device *device = noted->device;
    page *one = noted->pages;
    bytes = (bytes + 15) / 16 * 16;
    if (one == NULL || one->bytes - one->used < bytes) {
        size_t size = bytes > PAGE_BYTES ? bytes : PAGE_BYTES;
        one = calloc(1, sizeof *one + size);
        if (one == NULL) {
            tu_error_memory("numbers of a replay", size);
            return NULL;
        }
        if (device->table->allocate(device->state, device->index, noted->stream, size, &one->there) != TUTTI_OK) {
            free(one);
            return NULL;
        }
        one->bytes = size;
        one->next = noted->pages;
        noted->pages = one;
    }
    void *here = one->here + one->used;
    *there = tu_place_of((const char *)one->there.data + one->used);
    one->used += bytes;
    return here;
}

tutti_status tu_noted_guard(tu_noted *noted, tt_tensor *x) {
    for (const guarded *one = noted->guards; one != NULL; one = one->next)
        if (one->x->storage == x->storage)
            return TUTTI_OK;
    guarded *made = malloc(sizeof *made + x->storage->bytes);
    if (made == NULL)
        return tu_error_memory("what a replay puts back", x->storage->bytes);
    made->x = tu_tensor_hold(x);
    memcpy(made->bytes, x->storage->data, x->storage->bytes);
    made->next = noted->guards;
    noted->guards = made;
    return TUTTI_OK;
}
