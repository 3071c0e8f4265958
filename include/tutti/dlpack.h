/* SPDX-License-Identifier: Apache-2.0
 *
 * DLPack 1.x: tensors handed to other array libraries and taken from them, without a copy.
 *
 *     tt_dlpack_managed *managed = tt_dlpack_export(x, 0);    // the other library ends it: managed->deleter(managed)
 *     tt_tensor *y = tt_from_dlpack(theirs);                  // its deleter runs when the last tensor on it goes
 *
 * tt_to_dlpack and tt_from_dlpack in <tutti/tensor.h> speak of a plain pointer; these are the structs behind it. Their
 * layout is that of DLPack's own header, under other names, so that a program may include both.
 *
 * LIFETIME. An export holds the storage, not the handle: scopes may close and tensors may go. While an export is alive
 * the storage cannot be resized. The deleter may be called by any thread, once. On a GPU the deleter of an import runs
 * when the streams on which operators used it have done what they hold, or, while tt_replay_begin has one captured,
 * what it held before: the host waits for them. Where another library captures a stream nothing tells, and nobody
 * waits.
 *
 * WRITING. What the other library writes is seen at once and counted in no version: autograd cannot notice it.
 */
#ifndef TUTTI_DLPACK_H
#define TUTTI_DLPACK_H

#include <stdint.h>

#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What Tutti writes. It reads every 1.x; another major version has another layout and is refused. */
#define TT_DLPACK_MAJOR 1
#define TT_DLPACK_MINOR 1

/* The devices that Tutti exports or imports; others are TUTTI_ERROR_UNSUPPORTED with their name. Work on cuda that was
 * enqueued before an export is over when it returns; a tensor made by an import is used on the importer's streams. */
#define TT_DLPACK_CPU 1
#define TT_DLPACK_CUDA 2

/* Kinds of elements; `bits` says how large they are. Those that Tutti has: */
enum {
    TT_DLPACK_INT = 0,
    TT_DLPACK_UINT = 1,
    TT_DLPACK_FLOAT = 2,
    TT_DLPACK_BFLOAT = 4,
    TT_DLPACK_COMPLEX = 5,
    TT_DLPACK_BOOL = 6, /* 8 bits */
    TT_DLPACK_F8_E4M3FN = 10,
    TT_DLPACK_F8_E5M2 = 12
};

/* What `flags` of a handle may hold. */
enum {
    TT_DLPACK_READ_ONLY = 1, /* the consumer must not write */
    TT_DLPACK_COPIED = 2     /* nobody but the consumer sees this memory */
};

typedef struct tt_dlpack_type {
    uint8_t code, bits;
    uint16_t lanes; /* 1 */
} tt_dlpack_type;

typedef struct tt_dlpack_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    tt_dlpack_type dtype;
    int64_t *shape;
    int64_t *strides;     /* in elements; NULL, which older producers write, is row-major */
    uint64_t byte_offset; /* from data to the first element */
} tt_dlpack_tensor;

typedef struct tt_dlpack_managed {
    uint32_t major, minor;
    void *context;                                   /* the producer's own */
    void (*deleter)(struct tt_dlpack_managed *self); /* NULL: nothing to do */
    uint64_t flags;
    tt_dlpack_tensor tensor;
} tt_dlpack_managed;

/* Waits for pending collectives and returns a handle on x's memory; NULL with the pending error set. `flags` is 0 or
 * TT_DLPACK_READ_ONLY. Needs no scope. A tensor that requires grad must be detached first, a meta tensor has nothing to
 * give. */
TUTTI_API tt_dlpack_managed *tt_dlpack_export(tt_tensor *x, uint64_t flags);

/* tt_dlpack_export without flags, as a `void *`: what Python puts into a capsule. The other library calls the deleter
 * when it is done; the storage lives until then and cannot be resized meanwhile. */
TUTTI_API void *tt_to_dlpack(tt_tensor *x);

/* A tensor on the memory of `managed`, a tt_dlpack_managed, which it owns from then on: the deleter runs when the last
 * tensor on it goes. Memory that is marked read-only is copied, because every tensor of Tutti can be written; its
 * deleter then runs before tt_from_dlpack returns. On an error `managed` still is the caller's. Errors name what is in
 * the way: the version, the device, the element type, a negative stride, more than TT_MAX_DIMS dimensions, memory not
 * aligned to its elements. */
TUTTI_API tt_tensor *tt_from_dlpack(void *managed);

#ifdef __cplusplus
}
#endif
#endif
