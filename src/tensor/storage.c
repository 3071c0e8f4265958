/* SPDX-License-Identifier: Apache-2.0
 *
 * Storages: counted blocks of bytes that can be resized under all tensors on them at once.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

#define SPARE_STORAGES 512

static tu_storage *take(tu_thread *self) {
    tu_storage *storage = self->spare_storages;
    if (storage != NULL) {
        self->spare_storages = storage->owner;
        self->spare_storage_count--;
    } else if ((storage = malloc(sizeof *storage)) == NULL) {
        return NULL;
    }
    *storage = (tu_storage){ .device = TUTTI_CPU };
    atomic_init(&storage->references, 1);
    tu_tally(self, &self->storages, 1);
    return storage;
}

static void give(tu_thread *self, tu_storage *storage) {
    tu_tally(self, &self->storages, -1);
    if (self->spare_storage_count >= SPARE_STORAGES || !self->registered) {
        free(storage);
        return;
    }
    storage->owner = self->spare_storages;
    self->spare_storages = storage;
    self->spare_storage_count++;
}

void tu_storage_trim(tu_thread *self) {
    while (self->spare_storages != NULL) {
        tu_storage *storage = self->spare_storages;
        self->spare_storages = storage->owner;
        free(storage);
    }
    self->spare_storage_count = 0;
}

tu_storage *tu_storage_new(tutti_device device, size_t bytes) {
    tu_thread *self = tu_self();
    if (self->source != NULL && device == self->source->device && bytes > 0)
        return self->source->make(self->source, bytes);
    tu_storage *storage = take(self);
    if (storage == NULL) {
        tu_error_memory("a storage", sizeof *storage);
        return NULL;
    }
    storage->device = device;
    storage->bytes = bytes;
    if (device == TUTTI_META || bytes == 0)
        return storage;
    if (tu_is_remote(device)) {
        if (tu_device_allocate(storage, bytes) == TUTTI_OK)
            return storage;
        give(self, storage);
        return NULL;
    }
    storage->data = tu_block_alloc(self, bytes);
    if (storage->data == NULL) {
        give(self, storage);
        tu_error_memory("a tensor", bytes);
        return NULL;
    }
    return storage;
}

tu_storage *tu_storage_new_fake(tutti_device device, size_t bytes) {
    tu_storage *storage = take(tu_self());
    if (storage == NULL) {
        tu_error_memory("a storage", sizeof *storage);
        return NULL;
    }
    storage->device = device;
    storage->bytes = bytes;
    storage->fake = true;
    return storage;
}

tu_storage *tu_storage_wrap(void *data, size_t bytes, void (*release)(void *owner), void *owner) {
    tu_storage *storage = take(tu_self());
    if (storage == NULL) {
        tu_error_memory("a storage", sizeof *storage);
        return NULL;
    }
    storage->data = data;
    storage->bytes = bytes;
    storage->fixed = true;
    storage->release = release;
    storage->owner = owner;
    return storage;
}

void tu_storage_drop(tu_storage *storage) {
    if (storage == NULL || atomic_fetch_sub_explicit(&storage->references, 1, memory_order_acq_rel) != 1)
        return;
    tu_thread *self = tu_self();
    if (storage->pinned_by != NULL)
        tu_storage_unpin(storage);
    if (storage->fixed) {
        if (storage->uses != NULL)
            tu_device_await_uses(storage);
        if (storage->release != NULL)
            storage->release(storage->owner);
    } else if (tu_is_remote(storage->device)) {
        tu_device_release(storage);
    } else {
        tu_block_free(self, storage->data, storage->bytes);
    }
    give(self, storage);
}

/* The new block is there before anything changes, so that a failure leaves the storage as it was. */
tutti_status tu_storage_set_bytes(tu_storage *storage, size_t bytes) {
    tu_thread *self = tu_self();
    if (storage->fixed)
        return tu_error(TUTTI_ERROR_STATE,
                        "this storage of %zu bytes is not resizable: its memory is foreign or symmetric",
                        storage->bytes);
    if (atomic_load_explicit(&storage->exports, memory_order_acquire) > 0)
        return tu_error(TUTTI_ERROR_STATE,
                        "this storage of %zu bytes is not resizable while another library holds it (DLPack)",
                        storage->bytes);
    tutti_status status = tu_storage_wait_write(storage);
    if (status != TUTTI_OK || bytes == storage->bytes)
        return status;
    if (tu_is_remote(storage->device) && !storage->fake)
        return tu_device_resize(storage, bytes);
    void *data = NULL;
    if (storage->device == TUTTI_CPU && !storage->fake && bytes > 0) {
        data = tu_block_alloc(self, bytes);
        if (data == NULL)
            return tu_error_memory("a larger storage", bytes);
        size_t kept = bytes < storage->bytes ? bytes : storage->bytes;
        if (kept > 0)
            memcpy(data, storage->data, kept);
    }
    tu_block_free(self, storage->data, storage->bytes);
    storage->data = data;
    storage->bytes = bytes;
    return TUTTI_OK;
}

size_t tt_storage_bytes(const tt_tensor *x) {
    if (tt_error_pending() != TUTTI_OK || tu_pending_take(tu_tensor_check("storage_bytes", "x", x)) != TUTTI_OK)
        return 0;
    tt_tensor *asked = tu_stand_in(x);
    return asked != NULL && tu_note_asked(asked, TU_ASKED_BYTES) ? asked->storage->bytes : 0;
}

tutti_status tu_storage_resize_shape(tu_call *call) {
    const tu_storage_resize_attributes *attributes = call->attributes;
    if (call->inputs[0]->storage->fake && !tu_is_capturing())
        return tu_call_error(call, TUTTI_ERROR_CAPTURE, "%s stood for a tensor while a function was captured",
                             tu_describe(call->inputs[0]));
    if (attributes->bytes >= 0)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_RANGE, "%zu bytes cannot be represented", (size_t)attributes->bytes);
}

tutti_status tu_storage_resize_cpu(tu_call *call) {
    const tu_storage_resize_attributes *attributes = call->attributes;
    return tu_storage_set_bytes(call->inputs[0]->storage, (size_t)attributes->bytes);
}

tt_tensor *tu_storage_resize_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_clone(tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0)));
    return tt_storage_resize(x, 1024) ? x : NULL;
}

bool tt_storage_resize(tt_tensor *x, size_t bytes) {
    return tu_storage_resize(x, (int64_t)bytes, NULL);
}

bool tt_same_storage(const tt_tensor *left, const tt_tensor *right) {
    if (tt_error_pending() != TUTTI_OK || tu_pending_take(tu_tensor_check("same_storage", "a", left)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check("same_storage", "b", right)) != TUTTI_OK)
        return false;
    left = tu_stand_in(left), right = tu_stand_in(right);
    return left != NULL && right != NULL && left->storage == right->storage;
}
