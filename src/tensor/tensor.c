/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor handles: their making and end, and what can be asked of them.
 */
#include "tensor/tensor.h"
#include "tensor/on_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/handle.h"
#include "tensor/history.h"
#include "tensor/thread.h"

/* A table of this library's own: a call into the other one for each element size would be felt. */
const uint8_t tu_dtype_bytes[] = {
#define DTYPE(id, name, bytes, ...) [TUTTI_##id] = bytes,
#include "base/dtypes.def"
#undef DTYPE
};

tt_tensor *const tu_nothing[TU_NOTHING_COUNT] = { NULL };
const char *const tu_no_names[TU_NOTHING_COUNT] = { NULL };

/* ---- life ---- */

static tt_tensor *take(tu_thread *self) {
    tt_tensor *x = tu_handle_new(self);
    if (x == NULL)
        return NULL;
    atomic_store_explicit(&x->magic, TU_MAGIC_ALIVE, memory_order_relaxed);
    atomic_init(&x->references, 1);
    x->history = NULL;
    x->name = NULL;
    x->flags = 0;
    tu_tally(self, &self->tensors, 1);
    return x;
}

/* The dead handle keeps the beginning of its name, in place of its strides, for the message to who uses it. */
static void bury_name(tt_tensor *x) {
    snprintf((char *)x->strides, sizeof x->strides, "%s", x->name);
    free(x->name);
    x->name = (char *)x->strides;
}

static void set_shape(tt_tensor *x, const tu_shape *shape) {
    x->dtype = (uint8_t)shape->dtype;
    x->device = (uint16_t)shape->device;
    x->ndim = (uint8_t)shape->ndim;
    x->offset = shape->offset;
    int64_t numel = 1;
    bool contiguous = true;
    for (int i = shape->ndim - 1; i >= 0; i--) {
        contiguous = contiguous && (shape->strides[i] == numel || shape->sizes[i] == 1);
        numel *= shape->sizes[i];
        x->sizes[i] = shape->sizes[i];
        x->strides[i] = shape->strides[i];
    }
    x->numel = numel;
    if (contiguous || numel == 0)
        x->flags |= TU_CONTIGUOUS;
}

tt_tensor *tu_tensor_on(tu_storage *storage, const tu_shape *shape) {
    if (storage == NULL)
        return NULL;
    tt_tensor *x = take(tu_self());
    if (x == NULL) {
        tu_storage_drop(storage);
        tu_error_memory("a tensor handle", sizeof *x);
        return NULL;
    }
    x->storage = x->version_home = storage;
    set_shape(x, shape);
    return x;
}

void tu_tensor_move(tt_tensor *x, tu_storage *storage) {
    tu_storage_drop(x->storage);
    x->storage = x->version_home = storage;
}

size_t tu_shape_bytes(const tu_shape *shape) {
    int64_t last = 0;
    for (int i = 0; i < shape->ndim; i++) {
        if (shape->sizes[i] == 0)
            return 0;
        last += (shape->sizes[i] - 1) * shape->strides[i];
    }
    return (size_t)(last + 1) * tu_dtype_bytes[shape->dtype];
}

tt_tensor *tu_tensor_new(const tu_shape *shape) {
    return tu_tensor_on(tu_storage_new(shape->device, tu_shape_bytes(shape)), shape);
}

tt_tensor *tu_tensor_new_fake(const tu_shape *shape) {
    return tu_tensor_on(tu_storage_new_fake(shape->device, tu_shape_bytes(shape)), shape);
}

tt_tensor *tu_tensor_alias(const tt_tensor *x, const tu_shape *shape) {
    tt_tensor *alias = tu_tensor_on(tu_storage_hold(x->storage), shape);
    if (alias != NULL && x->version_home != x->storage)
        alias->version_home = tu_storage_hold(x->version_home);
    return alias;
}

tt_tensor tu_tensor_look(const tt_tensor *x, const tu_shape *shape) {
    tt_tensor look = { .magic = TU_MAGIC_ALIVE, .storage = x->storage, .version_home = x->version_home };
    atomic_init(&look.references, 1);
    set_shape(&look, shape);
    return look;
}

void tu_tensor_drop(tt_tensor *x) {
    if (x == NULL || atomic_fetch_sub_explicit(&x->references, 1, memory_order_acq_rel) != 1)
        return;
    if (x->history != NULL)
        tu_historian_table.end(x);
    if (x->name != NULL)
        bury_name(x);
    if (x->version_home != x->storage)
        tu_storage_drop(x->version_home);
    tu_storage_drop(x->storage);
    tu_thread *self = tu_self();
    tu_tally(self, &self->tensors, -1);
    tu_handle_end(self, x);
}

tt_tensor *tt_keep(tt_tensor *x) {
    if (tt_error_pending() != TUTTI_OK || x == NULL ||
        tu_pending_take(tu_tensor_check("keep", "tensor", x)) != TUTTI_OK)
        return NULL;
    return tu_tensor_hold(x);
}

/* Works also with an error pending: cleaning up must. */
void tt_release(tt_tensor *x) {
    if (x != NULL && tu_tensor_check("release", "tensor", x) == TUTTI_OK)
        tu_tensor_drop(x);
}

/* ---- checks ---- */

static tutti_status dead(const char *who, const char *what, const tt_tensor *x) {
    char was[256];
    return tu_error(TUTTI_ERROR_HANDLE,
                    "%s: argument %s is no live tensor%s: its scope was closed, or it was released once too often "
                    "(tt_keep or tt_scope_return make it live longer)",
                    who, what, tu_handle_was(x, was, sizeof was));
}

tutti_status tu_tensor_check(const char *who, const char *what, const tt_tensor *x) {
    if (x == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: argument %s is NULL, and a tensor is required there", who, what);
    return x->magic == TU_MAGIC_ALIVE ? TUTTI_OK : dead(who, what, x);
}

tutti_status tu_tensors_check(const char *who, const char *what, tt_tensor *const *list, size_t count) {
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < count && status == TUTTI_OK; i++)
        if (list[i] != NULL)
            status = tu_tensor_check(who, what, list[i]);
    return status;
}

size_t tu_tensor_need(const tt_tensor *x) {
    if (x->numel == 0)
        return 0;
    if (x->flags & TU_CONTIGUOUS)
        return (size_t)(x->offset + x->numel) * tu_dtype_bytes[x->dtype];
    int64_t last = x->offset;
    for (int i = 0; i < x->ndim; i++)
        last += (x->sizes[i] - 1) * x->strides[i];
    return (size_t)(last + 1) * tu_dtype_bytes[x->dtype];
}

tutti_status tu_tensor_ready(const char *who, const char *what, const tt_tensor *x) {
    tutti_status status = tu_storage_wait(x->storage);
    if (status != TUTTI_OK)
        return status;
    size_t need = tu_tensor_need(x);
    if (need > x->storage->bytes && x->storage->fake && tu_self()->recorder == NULL)
        return tu_error(TUTTI_ERROR_CAPTURE,
                        "%s: argument %s, %s, stood for a tensor while a function was captured, and has no data. A "
                        "captured function must not keep tensors; it returns them",
                        who, what, tu_describe(x));
    if (need > x->storage->bytes)
        return tu_error(TUTTI_ERROR_FREED,
                        "%s: the storage of argument %s, %s, is freed or too small: it needs %zu bytes and has %zu. "
                        "Grow it with tt_storage_resize and refill it first",
                        who, what, tu_describe(x), need, x->storage->bytes);
    if (x->storage->fake)
        return tu_error(TUTTI_ERROR_CAPTURE,
                        "%s: argument %s, %s, has no data yet: a function is being captured, and what it reads on the "
                        "host would be frozen. Compute with operators instead, or read after the call",
                        who, what, tu_describe(x));
    return TUTTI_OK;
}

tutti_status tu_wrap_dim(const char *who, int64_t dim, int ndim, int *wrapped) {
    int limit = ndim == 0 ? 1 : ndim;
    if (dim < -limit || dim >= limit)
        return tu_error(TUTTI_ERROR_RANGE, "%s: dim %lld is out of range: expected to be in range of [%d, %d]", who,
                        (long long)dim, -limit, limit - 1);
    *wrapped = (int)(dim < 0 ? dim + limit : dim);
    return TUTTI_OK;
}

/* ---- shapes ---- */

tt_dims tt_dims_of(int count, const int64_t *entries) {
    tt_dims dims = { .count = count };
    for (int i = 0; i < count && i < TT_MAX_DIMS; i++)
        dims.at[i] = entries[i];
    return dims;
}

tt_dims tt_no_dims(void) {
    return (tt_dims){ .count = -1 };
}

tt_tensor_list tt_tensors_of(size_t count, tt_tensor *const *tensors) {
    return (tt_tensor_list){ count, tensors };
}

tu_shape tu_shape_of(const tt_tensor *x) {
    tu_shape shape = { .dtype = x->dtype, .device = x->device, .ndim = x->ndim, .offset = x->offset };
    memcpy(shape.sizes, x->sizes,
           sizeof shape.sizes); /* as a whole, which is fewer instructions than the part in use */
    memcpy(shape.strides, x->strides, sizeof shape.strides);
    return shape;
}

int64_t tu_shape_numel(const tu_shape *shape) {
    int64_t numel = 1;
    for (int i = 0; i < shape->ndim; i++)
        numel *= shape->sizes[i];
    return numel;
}

tutti_status tu_shape_contiguous(const char *who, tu_shape *shape) {
    int64_t numel = 1;
    bool empty = false, overflow = false;
    shape->offset = 0;
    for (int i = shape->ndim - 1; i >= 0; i--) {
        shape->strides[i] = numel;
        if (shape->sizes[i] == 0)
            empty = true;
        else
            overflow = __builtin_mul_overflow(numel, shape->sizes[i], &numel) || overflow;
    }
    if (overflow || (!empty && numel > PTRDIFF_MAX / 16)) /* an empty one has strides too */
        return tu_error(TUTTI_ERROR_RANGE, "%s: a tensor of shape %s is too large to address", who,
                        tu_dims_text(shape->ndim, shape->sizes));
    return TUTTI_OK;
}

tutti_status tu_shape_from(const char *who, tt_dims dims, tutti_dtype dtype, tutti_device device, tu_shape *shape) {
    if (!tu_dtype_valid(dtype))
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype", who, (int)dtype);
    if (tutti_device_kind(device) == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %d is no device", who, device);
    if (tu_is_remote(device)) { /* found, and the current one by its number */
        tu_device *found;
        tutti_status status = tu_device_get(device, &found);
        if (status != TUTTI_OK)
            return status;
        device = found->number;
    }
    if (dims.count < 0 || dims.count > TT_MAX_DIMS)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: a shape has 0 to %d dimensions, not %d", who, TT_MAX_DIMS,
                        dims.count);
    shape->dtype = dtype;
    shape->device = device;
    shape->ndim = dims.count;
    for (int i = 0; i < dims.count; i++) {
        if (dims.at[i] < 0)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: size %lld of dimension %d is negative", who,
                            (long long)dims.at[i], i);
        shape->sizes[i] = dims.at[i];
    }
    return tu_shape_contiguous(who, shape);
}

int tu_stride_order(int dim_count, const int64_t *sizes, const int64_t *strides, int *order) {
    int count = 0;
    for (int i = 0; i < dim_count; i++) {
        if (sizes[i] == 1)
            continue;
        int at = count++;
        for (; at > 0 && strides[order[at - 1]] > strides[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    return count;
}

bool tu_is_dense(const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return true;
    int order[TT_MAX_DIMS], count = tu_stride_order(x->ndim, x->sizes, x->strides, order);
    int64_t expected = 1;
    for (int i = 0; i < count; i++) {
        if (x->strides[order[i]] != expected)
            return false;
        expected *= x->sizes[order[i]];
    }
    return true;
}

bool tu_same_sizes(const tt_tensor *left, const tt_tensor *right) {
    return left->ndim == right->ndim &&
           memcmp(left->sizes, right->sizes, (size_t)left->ndim * sizeof left->sizes[0]) == 0;
}

static char *text_buffer(size_t *size) {
    tu_thread_texts *texts = tu_texts();
    *size = sizeof texts->text[0];
    return texts->text[texts->next++ % 4];
}

/* "[2, 3]" from `used` on; returns where the text ends. */
static size_t write_dims(char *text, size_t size, size_t used, int count, const int64_t *at) {
    used += (size_t)snprintf(text + used, size - used, "[");
    for (int i = 0; i < count && i < TT_MAX_DIMS && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i > 0 ? ", " : "", (long long)at[i]);
    if (used < size)
        used += (size_t)snprintf(text + used, size - used, "]");
    return used;
}

const char *tu_dims_text(int count, const int64_t *at) {
    size_t size;
    char *text = text_buffer(&size);
    write_dims(text, size, 0, count, at);
    return text;
}

const char *tu_describe(const tt_tensor *x) {
    if (x == NULL)
        return "NULL";
    size_t size, used = 0;
    char *text = text_buffer(&size);
    if (x->name != NULL) /* a long name must leave room for the shape */
        used = (size_t)snprintf(text, size, "\"%.100s\" ", x->name);
    used += (size_t)snprintf(text + used, size - used, "%s ", tutti_dtype_name(x->dtype));
    used = write_dims(text, size, used, x->ndim, x->sizes);
    if (x->device == TUTTI_META && used < size)
        snprintf(text + used, size - used, " on meta");
    return text;
}
