/* SPDX-License-Identifier: Apache-2.0
 *
 * DLPack in and out. An export is one allocation that holds the storage until its deleter runs; an import is a foreign
 * storage whose release is the producer's deleter. Nothing of a foreign struct is believed before it is checked, its
 * version first.
 */
#include <tutti/dlpack.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/history.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

/* By dtype. */
static const tt_dlpack_type types[] = {
    [TUTTI_F64] = { TT_DLPACK_FLOAT, 64, 1 },
    [TUTTI_F32] = { TT_DLPACK_FLOAT, 32, 1 },
    [TUTTI_F16] = { TT_DLPACK_FLOAT, 16, 1 },
    [TUTTI_BF16] = { TT_DLPACK_BFLOAT, 16, 1 },
    [TUTTI_F8_E4M3] = { TT_DLPACK_F8_E4M3FN, 8, 1 },
    [TUTTI_F8_E5M2] = { TT_DLPACK_F8_E5M2, 8, 1 },
    [TUTTI_I8] = { TT_DLPACK_INT, 8, 1 },
    [TUTTI_I16] = { TT_DLPACK_INT, 16, 1 },
    [TUTTI_I32] = { TT_DLPACK_INT, 32, 1 },
    [TUTTI_I64] = { TT_DLPACK_INT, 64, 1 },
    [TUTTI_U8] = { TT_DLPACK_UINT, 8, 1 },
    [TUTTI_U16] = { TT_DLPACK_UINT, 16, 1 },
    [TUTTI_U32] = { TT_DLPACK_UINT, 32, 1 },
    [TUTTI_U64] = { TT_DLPACK_UINT, 64, 1 },
    [TUTTI_BOOL] = { TT_DLPACK_BOOL, 8, 1 },
    [TUTTI_C64] = { TT_DLPACK_COMPLEX, 64, 1 },
    [TUTTI_C128] = { TT_DLPACK_COMPLEX, 128, 1 },
};
/* For messages: the codes and devices of DLPack 1.1, by number. */
static const char *const code_names[] = { "int",
                                          "uint",
                                          "float",
                                          "opaque handle",
                                          "bfloat",
                                          "complex",
                                          "bool",
                                          "float8_e3m4",
                                          "float8_e4m3",
                                          "float8_e4m3b11fnuz",
                                          "float8_e4m3fn",
                                          "float8_e4m3fnuz",
                                          "float8_e5m2",
                                          "float8_e5m2fnuz",
                                          "float8_e8m0fnu",
                                          "float6_e2m3fn",
                                          "float6_e3m2fn",
                                          "float4_e2m1fn" };
static const char *const device_names[] = { [1] = "cpu",
                                            [2] = "cuda",
                                            [3] = "pinned cuda memory",
                                            [4] = "opencl",
                                            [7] = "vulkan",
                                            [8] = "metal",
                                            [9] = "vpi",
                                            [10] = "rocm",
                                            [11] = "pinned rocm memory",
                                            [12] = "an extension",
                                            [13] = "managed cuda memory",
                                            [14] = "oneapi",
                                            [15] = "webgpu",
                                            [16] = "hexagon",
                                            [17] = "maia",
                                            [18] = "trainium" };
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* ---- out ---- */

typedef struct export {
    tt_dlpack_managed managed; /* first: the deleter gets its address */
    tu_storage *storage;
    int64_t shape[TT_MAX_DIMS], strides[TT_MAX_DIMS];
}
export;

static void export_delete(tt_dlpack_managed *self) {
    export *handle = (export *)self;
    (void)tu_thread_register(); /* a thread of the other library may be here for the first time; without it only
                                   tt_count is off */
    /* Pairs with the acquire in tu_storage_set_bytes: what the other library did is done before the memory may move. */
    atomic_fetch_sub_explicit(&handle->storage->exports, 1, memory_order_release);
    tu_storage_drop(handle->storage);
    free(handle);
}

static tutti_status export_check(const tt_tensor *x, uint64_t flags) {
    tutti_status status = tu_tensor_check("to_dlpack", "x", x);
    if (status != TUTTI_OK)
        return status;
    if (flags & ~TT_DLPACK_READ_ONLY)
        return tu_error(TUTTI_ERROR_ARGUMENT, "to_dlpack: flags 0x%llx are not 0 or TT_DLPACK_READ_ONLY",
                        (unsigned long long)flags);
    if (x->device == TUTTI_META)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "to_dlpack: %s has a shape but no data", tu_describe(x));
    tu_historian_table.refresh((tt_tensor *)x);
    if (x->flags & TU_REQUIRES_GRAD)
        return tu_error(TUTTI_ERROR_STATE,
                        "to_dlpack: %s requires grad, which another library would not know: give it tt_detach(x)",
                        tu_describe(x));
    status = tu_tensor_ready("to_dlpack", "x", x);
    if (status == TUTTI_OK && flags == 0)
        status = tu_storage_wait_write(x->storage); /* the other library may write */
    if (status == TUTTI_OK && tu_on_device(x))
        status = tu_device_wait(tu_device_of(x)); /* it does not know our stream */
    return status;
}

tt_dlpack_managed *tt_dlpack_export(tt_tensor *x, uint64_t flags) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(export_check(x, flags)) != TUTTI_OK)
        return NULL;
    export *handle = calloc(1, sizeof *handle);
    if (handle == NULL) {
        tu_pending_take(tu_error_memory("a DLPack handle", sizeof *handle));
        return NULL;
    }
    handle->storage = tu_storage_hold(x->storage);
    atomic_fetch_add_explicit(&x->storage->exports, 1, memory_order_relaxed);
    memcpy(handle->shape, x->sizes, sizeof handle->shape[0] * x->ndim);
    memcpy(handle->strides, x->strides, sizeof handle->strides[0] * x->ndim);
    handle->managed = (tt_dlpack_managed){ .major = TT_DLPACK_MAJOR,
                                           .minor = TT_DLPACK_MINOR,
                                           .deleter = export_delete,
                                           .flags = flags,
                                           .tensor = { .data = x->numel == 0 ? NULL : tu_pointer(x),
                                                       .device_type = tu_on_device(x) ? TT_DLPACK_CUDA : TT_DLPACK_CPU,
                                                       .device_id = tu_on_device(x) ? tutti_device_index(x->device) : 0,
                                                       .ndim = x->ndim,
                                                       .dtype = types[x->dtype],
                                                       .shape = handle->shape,
                                                       .strides = handle->strides } };
    return &handle->managed;
}

void *tt_to_dlpack(tt_tensor *x) {
    return tt_dlpack_export(x, 0);
}

/* ---- in ---- */

static tutti_status import_dtype(tt_dlpack_type type, tutti_dtype *dtype) {
    for (size_t i = 1; i < COUNT(types); i++) {
        if (types[i].code == type.code && types[i].bits == type.bits && type.lanes == 1) {
            *dtype = (tutti_dtype)i;
            return TUTTI_OK;
        }
    }
    return tu_error(
        TUTTI_ERROR_TYPE, "from_dlpack: elements of type %s (code %d), %d bits, %d lanes have no dtype here",
        type.code < COUNT(code_names) ? code_names[type.code] : "unknown", type.code, type.bits, type.lanes);
}

/* Strides as given, and the bytes that they reach. */
static tutti_status import_strides(const tt_dlpack_tensor *from, tu_shape *shape, size_t *bytes) {
    int64_t last = 0, numel = tu_shape_numel(shape);
    for (int i = 0; i < shape->ndim; i++) {
        int64_t stride = from->strides == NULL ? shape->strides[i] : from->strides[i], reach;
        if (numel == 0 || shape->sizes[i] == 1)
            continue; /* never multiplied with anything but 0: row-major is as good */
        if (stride < 0)
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "from_dlpack: stride %lld of dimension %d is negative; copy the array there first",
                            (long long)stride, i);
        if (__builtin_mul_overflow(shape->sizes[i] - 1, stride, &reach) || __builtin_add_overflow(last, reach, &last) ||
            last >= PTRDIFF_MAX / 16)
            return tu_error(TUTTI_ERROR_RANGE,
                            "from_dlpack: stride %lld of dimension %d, of size %lld, is too large to address",
                            (long long)stride, i, (long long)shape->sizes[i]);
        shape->strides[i] = stride;
    }
    *bytes = numel == 0 ? 0 : (size_t)(last + 1) * tu_dtype_bytes[shape->dtype];
    return TUTTI_OK;
}

static tutti_status import_data(const tt_dlpack_tensor *from, const tu_shape *shape, size_t bytes, void **data) {
    uintptr_t address = (uintptr_t)from->data;
    size_t alignment = tu_dtype_bytes[shape->dtype] / (tu_is_complex(shape->dtype) ? 2 : 1);
    *data = NULL;
    if (bytes == 0)
        return TUTTI_OK;
    if (from->data == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "from_dlpack: data is NULL for %s of %s", tutti_dtype_name(shape->dtype),
                        tu_dims_text(shape->ndim, shape->sizes));
    if (from->byte_offset > UINTPTR_MAX - address || bytes > UINTPTR_MAX - address - from->byte_offset)
        return tu_error(TUTTI_ERROR_RANGE, "from_dlpack: byte offset %llu and %zu bytes reach past the end of memory",
                        (unsigned long long)from->byte_offset, bytes);
    if ((address + from->byte_offset) % alignment != 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "from_dlpack: the first element, at %p + %llu, is not aligned to %zu bytes as %s needs; "
                        "copy the array there first",
                        from->data, (unsigned long long)from->byte_offset, alignment, tutti_dtype_name(shape->dtype));
    *data = (char *)from->data + from->byte_offset;
    return TUTTI_OK;
}

static tutti_device device_of(const tt_dlpack_tensor *from) {
    return from->device_type == TT_DLPACK_CUDA
               ? tutti_device_at(TUTTI_CUDA, from->device_id < 0 ? 255 : from->device_id)
               : TUTTI_CPU;
}

static tutti_status import_check(const tt_dlpack_managed *managed, tu_shape *shape, size_t *bytes, void **data) {
    if (managed == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "from_dlpack: managed is NULL");
    if (managed->major != TT_DLPACK_MAJOR)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "from_dlpack: this is DLPack %u.%u, and only %d.x is understood here; ask the producer for "
                        "max_version (%d, %d)",
                        managed->major, managed->minor, TT_DLPACK_MAJOR, TT_DLPACK_MAJOR, TT_DLPACK_MINOR);
    const tt_dlpack_tensor *from = &managed->tensor;
    if (from->device_type != TT_DLPACK_CPU && from->device_type != TT_DLPACK_CUDA) {
        const char *name = from->device_type > 0 && (size_t)from->device_type < COUNT(device_names)
                               ? device_names[from->device_type]
                               : NULL;
        return tu_error(
            TUTTI_ERROR_UNSUPPORTED,
            "from_dlpack: the array lies on device type %d (%s), and only memory of the cpu and of cuda can be "
            "shared; copy it to the cpu first",
            from->device_type, name != NULL ? name : "unknown");
    }
    if (from->ndim < 0 || from->ndim > TT_MAX_DIMS || (from->ndim > 0 && from->shape == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "from_dlpack: an array of %d dimensions%s cannot be a tensor, which has 0 to %d", from->ndim,
                        from->ndim > 0 && from->shape == NULL ? " without a shape" : "", TT_MAX_DIMS);
    tutti_dtype dtype = (tutti_dtype)0;
    tutti_status status = import_dtype(from->dtype, &dtype);
    if (status == TUTTI_OK)
        status = tu_shape_from("from_dlpack", tt_dims_of(from->ndim, from->shape), dtype, device_of(from), shape);
    if (status == TUTTI_OK)
        status = import_strides(from, shape, bytes);
    return status == TUTTI_OK ? import_data(from, shape, *bytes, data) : status;
}

static void import_release(void *owner) {
    tt_dlpack_managed *managed = owner;
    if (managed->deleter != NULL)
        managed->deleter(managed);
}

/* A copy of read-only memory, owned by nobody yet. */
static tt_tensor *import_copy(tt_tensor *source) {
    tu_shape shape = tu_shape_of(source);
    if (tu_shape_contiguous("from_dlpack", &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *copy = tu_tensor_new(&shape);
    tutti_status status = copy != NULL && copy->numel > 0 ? tu_copy_tensor(copy, source) : TUTTI_OK;
    if (status == TUTTI_OK && copy != NULL && tu_on_device(copy))
        status = tu_device_wait(tu_device_of(copy)); /* the producer gets its memory back */
    if (status == TUTTI_OK)
        return copy;
    tu_tensor_drop(copy);
    return NULL;
}

tt_tensor *tt_from_dlpack(void *managed_pointer) {
    tt_dlpack_managed *managed = managed_pointer;
    tu_shape shape = { 0 };
    size_t bytes = 0;
    void *data = NULL;
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(import_check(managed, &shape, &bytes, &data)) != TUTTI_OK)
        return NULL;
    bool read_only = (managed->flags & TT_DLPACK_READ_ONLY) != 0;
    tu_storage *storage = tu_storage_wrap(data, bytes, NULL, NULL);
    if (storage != NULL)
        storage->device = shape.device;
    if (storage != NULL && tu_is_remote(shape.device) && tu_device_note_uses(storage) != TUTTI_OK) {
        tu_storage_drop(storage);
        storage = NULL;
    }
    tt_tensor *x = tu_tensor_on(storage, &shape);
    if (x != NULL && read_only) {
        tt_tensor *copy = import_copy(x);
        tu_tensor_drop(x);
        x = copy;
    }
    if (x == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    x = tu_scope_own(x);
    if (x == NULL)
        return NULL;
    if (read_only) { /* only now, so that a failure leaves it with the caller */
        import_release(managed);
    } else {
        storage->release = import_release;
        storage->owner = managed;
    }
    return x;
}
