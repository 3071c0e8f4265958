/* SPDX-License-Identifier: Apache-2.0
 *
 * Pinned memory of the host, and copies between it and devices for which nobody waits. A copy that is under way stands
 * in a list of the host's storage, with an event behind it. Whoever uses the memory on the host waits for that event,
 * as for collectives that use it: by the storage's waiter, or by its reader where the copy only reads.
 */
#include <stdlib.h>

#include <tutti/streams.h>

#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/process.h"

/* ---- copies under way ---- */

struct tu_device_copy {
    tu_device_copy *next;
    const tu_device *device;
    void *event;    /* behind it */
    bool writes;    /* the memory of the host; else it reads it */
    int references; /* the list's, and one per thread that waits; under the storage's lock */
};

static tutti_status wait_for_writes(tu_storage *storage) {
    return tu_device_copies_wait(storage, false);
}

static tutti_status wait_for_all(tu_storage *storage) {
    return tu_device_copies_wait(storage, true);
}

static tu_device_copy *first_copy(const tu_storage *storage, bool all) {
    tu_device_copy *one = storage->copies;
    while (one != NULL && !all && !one->writes)
        one = one->next;
    return one;
}

tu_storage_waiter *tu_device_copies_waiter(const tu_storage *storage) {
    return first_copy(storage, false) != NULL ? wait_for_writes : NULL;
}

tu_storage_waiter *tu_device_copies_reader(const tu_storage *storage) {
    return storage->copies != NULL ? wait_for_all : NULL;
}

/* Under the storage's lock. Where collectives use the memory, their waiters wait for copies too. Release pairs with the
 * acquire of those who find nothing to wait for. */
static void tell(tu_storage *storage) {
    if (storage->writers == 0)
        atomic_store_explicit(&storage->waiter, tu_device_copies_waiter(storage), memory_order_release);
    if (storage->readers == 0)
        atomic_store_explicit(&storage->reader, tu_device_copies_reader(storage), memory_order_release);
}

/* Takes a copy that is over out of the list, unless another thread did, and ends it with the last who waits. */
static void leave(tu_storage *storage, tu_device_copy *over) {
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    pthread_mutex_lock(lock);
    tu_device_copy **link = &storage->copies;
    while (*link != NULL && *link != over)
        link = &(*link)->next;
    if (*link == over) {
        *link = over->next;
        over->references--;
        tell(storage);
    }
    bool last = --over->references == 0;
    pthread_mutex_unlock(lock);
    if (!last)
        return;
    over->device->table->unmark(over->device->state, over->device->index, over->event);
    free(over);
}

tutti_status tu_device_copies_wait(tu_storage *storage, bool all) {
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    tutti_status status = TUTTI_OK;
    for (;;) {
        pthread_mutex_lock(lock);
        tu_device_copy *one = first_copy(storage, all);
        if (one != NULL)
            one->references++;
        pthread_mutex_unlock(lock);
        if (one == NULL)
            return status;
        tutti_status waited = one->device->table->wait(one->device->state, one->device->index, one->event);
        status = status == TUTTI_OK ? waited : status;
        leave(storage, one);
    }
}

/* Notes the copy that the stream was given last; where that cannot be, the host waits for it here. */
static tutti_status note_copy(const tu_device *device, void *stream, tu_storage *storage, bool writes) {
    tu_device_copy *made = malloc(sizeof *made);
    if (made == NULL)
        return device->table->synchronize(device->state, device->index, stream);
    *made = (tu_device_copy){ .device = device, .writes = writes, .references = 1 };
    tutti_status status = device->table->mark(device->state, device->index, stream, &made->event);
    if (status != TUTTI_OK) {
        free(made);
        return device->table->synchronize(device->state, device->index, stream);
    }
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    pthread_mutex_lock(lock);
    made->next = storage->copies;
    storage->copies = made;
    tell(storage);
    pthread_mutex_unlock(lock);
    return TUTTI_OK;
}

/* ---- pinned memory ---- */

typedef struct pinned {
    const tu_device *device;
    void *data;
    tu_storage *storage; /* whose memory this is: lent */
} pinned;

/* Before the memory goes. */
static void end_copies(tu_storage *storage) {
    tutti_error_copy error;
    if (storage->copies == NULL)
        return;
    tu_error_save(&error);
    tutti_status status = tu_device_copies_wait(storage, true);
    (void)status; /* a copy that failed is over too */
    (void)tu_error_restore(&error);
}

static void unpin(void *owner) {
    pinned *memory = owner;
    if (memory->storage != NULL)
        end_copies(memory->storage);
    memory->device->table->unpin(memory->device->state, memory->data);
    free(memory);
}

static bool is_pinned(const tt_tensor *x) {
    return x->storage->pinned_by != NULL || (x->storage->fixed && x->storage->release == unpin);
}

tutti_status tu_storage_pin(tu_storage *storage, const tu_device *device) {
    tutti_status status = device->table->pin_there(device->state, storage->data, storage->bytes);
    if (status == TUTTI_OK)
        storage->pinned_by = device;
    return status;
}

void tu_storage_unpin(tu_storage *storage) {
    end_copies(storage);
    storage->pinned_by->table->unpin_there(storage->pinned_by->state, storage->data);
    storage->pinned_by = NULL;
}

tt_tensor *tt_empty_pinned(tt_dims shape, tutti_dtype dtype) {
    tu_device *device = NULL;
    tu_shape described = { 0 };
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_device_get(TUTTI_CUDA, &device)) != TUTTI_OK ||
        tu_pending_take(tu_shape_from("empty_pinned", shape, dtype, TUTTI_CPU, &described)) != TUTTI_OK)
        return NULL;
    pinned *memory = calloc(1, sizeof *memory);
    if (memory == NULL) {
        tu_pending_take(tu_error_memory("pinned memory", sizeof *memory));
        return NULL;
    }
    memory->device = device;
    size_t bytes = (size_t)tu_shape_numel(&described) * tu_dtype_bytes[dtype];
    if (tu_pending_take(device->table->pin(device->state, bytes, &memory->data)) != TUTTI_OK) {
        free(memory);
        return NULL;
    }
    tt_tensor *x = tt_wrap(memory->data, shape, dtype, unpin, memory);
    if (x == NULL)
        unpin(memory);
    else
        memory->storage = x->storage;
    return x;
}

/* ---- copies that nobody waits for ---- */

/* Whether the bytes of one can be moved to the other as they are, without the host; else sets the pending error. */
static bool can_copy(const tt_tensor *x, const tt_tensor *source) {
    const tt_tensor *there = tu_on_device(x) ? x : source, *other = there == x ? source : x;
    if (tu_is_capturing())
        tu_fail(TUTTI_ERROR_CAPTURE, "copy_async_: it depends on streams, and cannot be captured; tt_copy_ can");
    else if (!tu_on_device(there))
        tu_fail(TUTTI_ERROR_ARGUMENT, "copy_async_: neither %s nor %s is on a GPU", tu_describe(x),
                tu_describe(source));
    else if (x->dtype != source->dtype || !tu_same_sizes(x, source) || !(x->flags & source->flags & TU_CONTIGUOUS))
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "copy_async_: %s and %s must have one shape and dtype and lie row by row; tt_copy_ takes others",
                tu_describe(x), tu_describe(source));
    else if (tu_on_device(other) ? other->device != there->device : !is_pinned(other))
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "copy_async_: %s is neither on %s nor in pinned memory, and the host would wait: make it by "
                "tt_empty_pinned, or use tt_copy_",
                tu_describe(other), tutti_device_name((tutti_device)there->device));
    else if (x->flags & TU_REQUIRES_GRAD && !tu_self()->grad_disabled)
        tu_fail(TUTTI_ERROR_STATE, "copy_async_: %s requires grad, and this copy records none; tt_copy_ does",
                tu_describe(x));
    return tu_self()->pending == TUTTI_OK;
}

tt_tensor *tt_copy_async_(tt_tensor *x, tt_tensor *source) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("copy_async_", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check("copy_async_", "source", source)) != TUTTI_OK || !can_copy(x, source) ||
        tu_pending_take(tu_tensor_ready("copy_async_", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_ready("copy_async_", "source", source)) != TUTTI_OK)
        return NULL;
    const tu_device *device = tu_device_of(tu_on_device(x) ? x : source);
    void *stream = tu_device_stream(device);
    tu_storage *host = !tu_on_device(x) ? x->storage : !tu_on_device(source) ? source->storage : NULL;
    tutti_status status = tu_storage_wait_write(x->storage);
    tu_device_note_use(device, x->storage, stream);
    tu_device_note_use(device, source->storage, stream);
    if (status == TUTTI_OK && x->numel > 0)
        status = device->table->copy(device->state, device->index, stream, tu_pointer(x), tu_pointer(source),
                                     (size_t)x->numel * tu_dtype_bytes[x->dtype]);
    if (status == TUTTI_OK && host != NULL && !tu_device_capturing(device)) /* a graph copies when it runs */
        status = note_copy(device, stream, host, host == x->storage);
    if (tu_pending_take(status) != TUTTI_OK)
        return NULL;
    tu_bump(x);
    return x;
}
