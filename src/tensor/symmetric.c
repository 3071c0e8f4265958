/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on symmetric memory of this rank: making them, and finding out whether one is.
 */
#include "tensor/symmetric.h"

#include <tutti/streams.h>
#include <tutti/symmetric.h>

#include "tensor/history.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"

/* ---- making them ---- */

static void release_block(void *owner) {
    tutti_memory_release(owner);
}

/* libtutti waits for its own work when it unmaps memory of a device; what operators do there is noted here. */
tu_storage *tu_symm_storage(tutti_memory *memory, size_t bytes) {
    tu_storage *storage = tu_storage_wrap(tutti_memory_data(memory), bytes, release_block, memory);
    if (storage == NULL) {
        tutti_memory_release(memory);
        return NULL;
    }
    storage->device = tutti_memory_device(memory);
    if (!tu_is_remote(storage->device) || tu_device_note_uses(storage) == TUTTI_OK)
        return storage;
    tu_storage_drop(storage);
    return NULL;
}

/* The device of the options: the CPU, or a GPU, which is there. */
static bool find_device(tutti_device wanted, tutti_device *device) {
    tu_device *found;
    *device = wanted == 0 ? tt_default_device() : wanted;
    if (*device == TUTTI_CPU)
        return true;
    if (tutti_device_kind(*device) != TUTTI_CUDA) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: there is no symmetric memory on the device %s, but on cpu and cuda",
                tutti_device_name(*device));
        return false;
    }
    if (tu_pending_take(tu_device_get(*device, &found)) != TUTTI_OK)
        return false;
    *device = found->number;
    return true;
}

static tt_tensor *on_block(tutti_world *world, const tu_shape *shape, size_t bytes, const tt_symm_options *options) {
    tutti_memory_options wanted = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_memory *memory;
    wanted.group = options->group;
    wanted.device = shape->device;
    wanted.persistent = options->persistent;
    wanted.persistent_id = options->persistent_id;
    if (tu_pending_take(tutti_memory_alloc(world, bytes, &wanted, &memory)) != TUTTI_OK)
        return NULL;
    tt_tensor *x = tu_tensor_on(tu_symm_storage(memory, bytes), shape);
    if (x == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    x = tu_scope_own(x);
    if (x != NULL && options->requires_grad)
        tu_pending_take(tu_historian_table.require(x));
    return tu_self()->pending == TUTTI_OK ? x : NULL;
}

tt_tensor *tt_symm_empty_strided(tutti_world *world, tt_dims shape, tt_dims strides, tutti_dtype dtype,
                                 const tt_symm_options *options) {
    tt_symm_options full = TT_SYMM_OPTIONS_INIT;
    tu_shape described;
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_options_copy("tt_symm_options", options, &full, sizeof full)) != TUTTI_OK ||
        tu_pending_take(tu_shape_from("symm_empty", shape, dtype, TUTTI_CPU, &described)) != TUTTI_OK ||
        !find_device(full.device, &described.device))
        return NULL;
    if (world == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: world is NULL");
        return NULL;
    }
    if (full.persistent_id != 0 && !full.persistent) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "symm_empty: persistent_id is %llu, and persistent is not set: set both, or neither",
                (unsigned long long)full.persistent_id);
        return NULL;
    }
    if (full.requires_grad && !tu_is_float(dtype) && !tu_is_complex(dtype)) {
        tu_fail(TUTTI_ERROR_TYPE,
                "symm_empty: requires_grad is set, and only floats and complex numbers have gradients, "
                "not %s",
                tutti_dtype_name(dtype));
        return NULL;
    }
    if (strides.count >= 0 && strides.count != shape.count) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: %d strides given for %d dimensions", strides.count, shape.count);
        return NULL;
    }
    int64_t last = 0;
    for (int i = 0; i < described.ndim; i++) {
        int64_t stride = strides.count >= 0 ? strides.at[i] : described.strides[i], extent;
        if (stride < 0 || __builtin_mul_overflow(stride, described.sizes[i], &extent) || extent > PTRDIFF_MAX / 256) {
            tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: stride %lld of dimension %d cannot be used", (long long)stride,
                    i);
            return NULL;
        }
        described.strides[i] = stride;
        last += described.sizes[i] > 0 ? (described.sizes[i] - 1) * stride : 0;
    }
    size_t bytes = tu_shape_numel(&described) == 0 ? 0 : (size_t)(last + 1) * tu_dtype_bytes[dtype];
    return on_block(world, &described, bytes, &full);
}

tt_tensor *tt_symm_empty(tutti_world *world, tt_dims shape, tutti_dtype dtype, const tt_symm_options *options) {
    return tt_symm_empty_strided(world, shape, tt_no_dims(), dtype, options);
}

tutti_memory *tt_symm_memory(const tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("symm_memory", "x", x)) != TUTTI_OK)
        return NULL;
    return x->storage->release == release_block ? x->storage->owner : NULL;
}

/* ---- finding out ---- */

/* A storage that was made here knows its block; any other one is looked up by its address. */
bool tu_symm_find(const tt_tensor *x, tutti_world *world, tu_symm_place *place) {
    const char *pointer = tu_pointer(x);
    if (x->device == TUTTI_META || pointer == NULL)
        return false;
    bool known = x->storage->release == release_block;
    tutti_memory *memory = known ? x->storage->owner : world != NULL ? tutti_memory_find(world, pointer) : NULL;
    if (memory == NULL)
        return false;
    size_t offset = (size_t)(pointer - (const char *)tutti_memory_data(memory));
    size_t need = tu_tensor_need(x) - (size_t)x->offset * tu_dtype_bytes[x->dtype];
    if (x->numel > 0 && offset + need > tutti_memory_bytes(memory))
        return false;
    *place = (tu_symm_place){ memory, offset };
    return true;
}

tutti_status tu_symm_require(const char *who, const char *what, const tt_tensor *x, tutti_world *world,
                             tu_symm_place *place) {
    if (tu_symm_find(x, world, place))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: %s must be allocated with empty_strided_p2p(), that is tt_symm_empty, tt_symm_empty_strided "
                    "or inside tt_symm_pool_begin: %s lies in ordinary memory",
                    who, what, tu_describe(x));
}

/* The buffer is met as a constant while a graph is captured, and so is made once. */
tt_tensor *tu_symm_input(tt_tensor *x, tutti_group *group) {
    tu_symm_place place;
    tutti_world *world = tutti_group_world(group);
    if (!x->storage->fake && tu_symm_find(x, world, &place))
        return x;
    tt_symm_options options = TT_SYMM_OPTIONS_INIT;
    options.group = group;
    tt_tensor *buffer = tt_symm_empty(world, tu_sizes(x), (tutti_dtype)x->dtype, &options);
    tt_copy_(buffer, x);
    return buffer;
}
