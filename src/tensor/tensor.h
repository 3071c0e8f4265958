/* SPDX-License-Identifier: Apache-2.0
 *
 * Storages and tensors inside. A storage is a counted block of bytes with the version that its aliases share; a tensor
 * is a counted handle: dtype, sizes, strides and offset over a storage, and a history where autograd has to do with it.
 *
 * Functions here return or take plain references, not scope-owned ones: what they make belongs to the caller.
 */
#ifndef TU_TENSOR_TENSOR_H
#define TU_TENSOR_TENSOR_H

#include <stdatomic.h>

#include <tutti/tensor.h>

#include "base/error.h"

/* Asynchronous work that still writes a storage; made by functional/. */
typedef struct tu_storage tu_storage;
typedef tutti_status tu_storage_waiter(tu_storage *storage);

/* Something that is under way with a storage's data and outlives the call that began it: whoever begins it makes this a
 * part of what it keeps. */
typedef struct tu_storage_use {
    struct tu_storage_use *next, *previous;
} tu_storage_use;

struct tu_storage {
    atomic_int references;
    _Atomic uint32_t version; /* of the tensors whose version_home this is */
    tutti_device device;
    bool fixed;         /* foreign, mapped or exported memory: cannot be resized */
    bool zero_gaps;     /* on a device: what lies between the rows of its tensor is 0, up to the last: see matmul.c */
    bool fake;          /* stands for memory while a function is captured: it has a size and no data */
    atomic_int exports; /* DLPack handles alive on it: cannot be resized either */
    size_t bytes;
    void *data;                   /* NULL for meta, for fakes and for 0 bytes */
    void (*release)(void *owner); /* foreign memory: instead of freeing data */
    void *owner;                  /* of foreign memory; on a device, the handle of its block */
    void *uses;                   /* of foreign memory on a device: the handle of a block that streams use with it */
    void *stream;                 /* on a device: the one that the memory is in order with */
    unsigned streams_ended;       /* of the device when it was allocated: see tu_device_note_use */
    /* Set while collectives write here, cleared by the waiter; read by every use of the data. Pair: release when set,
     * acquire here. */
    _Atomic(tu_storage_waiter *) waiter;
    /* The same while collectives read here: only those who write, resize or free the data wait. */
    _Atomic(tu_storage_waiter *) reader;
    /* What is under way with the data, oldest first. Under the lock of the storage. */
    tu_storage_use *first_use, *last_use;
    uint32_t writers, readers;
    atomic_int flights;                /* references that they hold, of those above */
    const struct tu_device *pinned_by; /* whose driver reaches the memory directly, by tu_storage_pin; or NULL */
    struct tu_device_copy *copies;     /* of pinned memory, by devices, under way; under the same lock: pinned.c */
};

#define TU_MAGIC_ALIVE 0x54545421u
#define TU_MAGIC_DEAD 0xdeadbeefu

enum {
    TU_CONTIGUOUS = 1,    /* row-major without gaps */
    TU_REQUIRES_GRAD = 2, /* leaf: asked for; non-leaf: has a node */
    TU_IS_PARAMETER = 4,
    TU_NUMBER = 8,           /* adopts type and device of what it meets */
    TU_NAMED_BY_MODULE = 16, /* its name is its path in a module, and follows it */
    TU_LITERAL = 32,         /* a number that the program wrote (tt_number), and nobody will change */
    TU_SHARD = 64            /* a parameter that is this rank's part of a whole one */
};

struct tt_tensor {
    /* Whether it is alive; may be read through any pointer that was ever a handle: see handle.h. */
    _Alignas(64) _Atomic uint32_t magic;
    atomic_int references;
    uint16_t device; /* the numbers of GPUs need more than eight bits */
    uint8_t dtype, ndim, flags;
    tu_storage *storage;
    tu_storage *version_home; /* whose version counts: the storage itself (then not counted twice), or another one */
    int64_t offset, numel;
    int64_t sizes[TT_MAX_DIMS], strides[TT_MAX_DIMS];
    void *history; /* the historian's part (tensor/history.h), or NULL */
    char *name;
};

/* ---- storages ---- */

/* With `bytes` of uninitialised memory; NULL with the thread's error written. */
tu_storage *tu_storage_new(tutti_device device, size_t bytes);
/* One that has `bytes` in name only. */
tu_storage *tu_storage_new_fake(tutti_device device, size_t bytes);
tu_storage *tu_storage_wrap(void *data, size_t bytes, void (*release)(void *owner), void *owner);
tutti_status tu_storage_set_bytes(tu_storage *storage, size_t bytes);
void tu_storage_drop(tu_storage *storage);
static inline tu_storage *tu_storage_hold(tu_storage *storage) {
    atomic_fetch_add_explicit(&storage->references, 1, memory_order_relaxed);
    return storage;
}
/* Waits for collectives that still write here. */
static inline tutti_status tu_storage_wait(tu_storage *storage) {
    tu_storage_waiter *waiter = atomic_load_explicit(&storage->waiter, memory_order_acquire);
    return waiter == NULL ? TUTTI_OK : waiter(storage);
}
/* And for those that still read here: before the data is written. */
static inline tutti_status tu_storage_wait_write(tu_storage *storage) {
    tutti_status status = tu_storage_wait(storage);
    tu_storage_waiter *reader = atomic_load_explicit(&storage->reader, memory_order_acquire);
    return status != TUTTI_OK || reader == NULL ? status : reader(storage);
}

/* ---- tensors ---- */

/* The shape of a tensor to be. Strides are set by tu_shape_contiguous or by hand. */
typedef struct tu_shape {
    tutti_dtype dtype;
    tutti_device device;
    int ndim;
    int64_t sizes[TT_MAX_DIMS], strides[TT_MAX_DIMS];
    int64_t offset; /* of views */
} tu_shape;

/* A new tensor on new storage; NULL with the thread's error written. */
tt_tensor *tu_tensor_new(const tu_shape *shape);
tt_tensor *tu_tensor_new_fake(const tu_shape *shape); /* on a fake one */
/* Another handle on `x`'s storage and version. */
tt_tensor *tu_tensor_alias(const tt_tensor *x, const tu_shape *shape);
tt_tensor *tu_tensor_on(tu_storage *storage, const tu_shape *shape); /* takes over the reference, also on failure */
/* x's memory in another shape, as a handle on the caller's stack: for kernels, while x lives. */
tt_tensor tu_tensor_look(const tt_tensor *x, const tu_shape *shape);
/* Puts a tensor that nobody else has yet on another storage and its version; takes over the reference. */
void tu_tensor_move(tt_tensor *x, tu_storage *storage);
void tu_tensor_drop(tt_tensor *x);
static inline tt_tensor *tu_tensor_hold(tt_tensor *x) {
    if (x != NULL)
        atomic_fetch_add_explicit(&x->references, 1, memory_order_relaxed);
    return x;
}

tu_shape tu_shape_of(const tt_tensor *x);
/* What tt_sizes, tt_strides and tt_size tell the program, for the library itself: a capture does not take it for
 * something that the program asked. NULL has none. */
static inline tt_dims tu_sizes(const tt_tensor *x) {
    return x != NULL ? tt_dims_of(x->ndim, x->sizes) : tt_no_dims();
}
static inline tt_dims tu_strides(const tt_tensor *x) {
    return x != NULL ? tt_dims_of(x->ndim, x->strides) : tt_no_dims();
}
static inline int64_t tu_size(const tt_tensor *x, int dim) {
    return x != NULL ? x->sizes[dim < 0 ? dim + x->ndim : dim] : 0;
}
/* Sets row-major strides; an error where the byte size does not fit. */
tutti_status tu_shape_contiguous(const char *who, tu_shape *shape);
tutti_status tu_shape_from(const char *who, tt_dims dims, tutti_dtype dtype, tutti_device device, tu_shape *shape);
int64_t tu_shape_numel(const tu_shape *shape);
/* Bytes from the first element to the last. */
size_t tu_shape_bytes(const tu_shape *shape);
/* The dimensions of more than one element, smallest stride first; returns how many there are. */
int tu_stride_order(int dim_count, const int64_t *sizes, const int64_t *strides, int *order);
/* Whether the elements fill a block without gaps or overlap, in any order of dimensions. */
bool tu_is_dense(const tt_tensor *x);
bool tu_same_sizes(const tt_tensor *first, const tt_tensor *second);
/* Bytes that the storage must have for x to be read. */
size_t tu_tensor_need(const tt_tensor *x);
/* "f32 [2, 3]", with the name where there is one. In a buffer of the thread; four may be in use at once. */
const char *tu_describe(const tt_tensor *x);
const char *tu_dims_text(int count, const int64_t *at);

/* Whether x is there, alive and readable by kernels: waits for collectives, checks the bytes. `who` and `what` are for
 * the message. */
tutti_status tu_tensor_check(const char *who, const char *what, const tt_tensor *x);
/* The same of each of a list that is not NULL. */
tutti_status tu_tensors_check(const char *who, const char *what, tt_tensor *const *list, size_t count);
tutti_status tu_tensor_ready(const char *who, const char *what, const tt_tensor *x);

extern const uint8_t tu_dtype_bytes[];

/* What lists of none point to: a caller who takes an element out of a failed call's list gets NULL. */
#define TU_NOTHING_COUNT 1024
extern tt_tensor *const tu_nothing[TU_NOTHING_COUNT];
extern const char *const tu_no_names[TU_NOTHING_COUNT];
static inline void *tu_pointer(const tt_tensor *x) {
    return x->storage->data == NULL ? NULL : (char *)x->storage->data + x->offset * tu_dtype_bytes[x->dtype];
}
static inline void tu_bump(tt_tensor *x) {
    atomic_fetch_add_explicit(&x->version_home->version, 1, memory_order_relaxed);
}
static inline uint32_t tu_version(const tt_tensor *x) {
    return atomic_load_explicit(&x->version_home->version, memory_order_relaxed);
}

static inline bool tu_dtype_valid(tutti_dtype dtype) {
    return dtype >= TUTTI_F64 && dtype <= TUTTI_C128;
}
static inline bool tu_is_float(tutti_dtype dtype) {
    return dtype >= TUTTI_F64 && dtype <= TUTTI_F8_E5M2;
}
static inline bool tu_is_complex(tutti_dtype dtype) {
    return dtype == TUTTI_C64 || dtype == TUTTI_C128;
}
static inline bool tu_is_integer(tutti_dtype dtype) {
    return dtype >= TUTTI_I8 && dtype <= TUTTI_U64;
}

/* A negative dim counted from the end; an error that names both where it is out of range. `ndim` 0 accepts 0 and -1. */
tutti_status tu_wrap_dim(const char *who, int64_t dim, int ndim, int *wrapped);

#endif
