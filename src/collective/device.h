/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on device memory: what the collective layer asks of a backend (tu_backend.executor).
 *
 * A call whose buffers lie on a device is not run by the host: it is checked, described as a tu_device_task and handed
 * to the backend, which enqueues it on the caller's stream and returns. Errors that the device finds later are sticky
 * per group: tutti_group_check returns them. A backend for memory of the CPU may have such a part too: there `run` is
 * over when it returns, and calls of a group come one after the other.
 */
#ifndef TU_COLLECTIVE_DEVICE_H
#define TU_COLLECTIVE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/dtype.h>
#include <tutti/group.h>

#include "memory/backend.h"

/* Where a buffer lies when it is part of a block that was rendezvoused with the group. */
typedef struct tu_device_place {
    const tu_backend_map *map; /* NULL: not symmetric */
    uint32_t index;            /* of the rendezvous in the group, the same on all members, from 1 */
    size_t offset;             /* in the block */
} tu_device_place;

#define TU_DEVICE_RANKS 512 /* of a group on devices */

typedef enum tu_device_shape {
    TU_DEVICE_BARRIER = 1,
    TU_DEVICE_REDUCE = 2,         /* all_reduce (root -1) and reduce */
    TU_DEVICE_REDUCE_SCATTER = 3, /* by `parts`, or by `row` when the last dimension is split */
    TU_DEVICE_MOVE = 4,           /* everything that only moves data: parts per peer */
    TU_DEVICE_VDEV = 5,           /* all_to_all_vdev and its 2d forms: splits on the device */
    TU_DEVICE_SEND = 6,           /* `count` bytes to member `root`, with `tag` */
    TU_DEVICE_RECEIVE = 7,        /* the same from it */
    TU_DEVICE_TILES = 8           /* parts of symmetric matrices, taken where they lie */
} tu_device_shape;

/* A part of a matrix that comes to this rank. */
typedef struct tu_device_tile {
    int source;         /* -1: reduced over all members */
    uint64_t in_offset; /* bytes from the beginning of everybody's input */
    uint64_t rows, columns, in_pitch, out_pitch;
    void *out;
} tu_device_tile;

typedef struct tu_device_task {
    size_t size;
    tu_device_shape shape;
    uint32_t operation; /* tu_operation, for faults */
    const char *name;   /* "all_reduce": for messages */
    uint64_t sequence;
    uint32_t signature; /* must be equal on all ranks */
    const void *in;
    void *out;
    tu_device_place in_place, out_place;
    tutti_algorithm algorithm;
    bool multicast;     /* one store shall reach all members, one load reduce over them */
    bool copy_engines;  /* leave the processors free where copy engines can do it */
    int64_t timeout_ns; /* chosen: positive */
    void *stream;

    tutti_algorithm ran; /* written by run: what it chose */

    /* reductions */
    tutti_dtype dtype;
    tutti_reduction reduction;
    uint64_t count;        /* elements of the whole input */
    uint64_t row;          /* reduce_scatter that splits the last dimension: elements of a row */
    const uint64_t *parts; /* reduce_scatter: where each rank's part begins, and the end: size + 1 entries */
    int root;              /* -1: everybody; of a send or receive: the other member */
    int tag;               /* of a send or receive */
    double factor;

    /* moves: bytes and offsets of what goes to and comes from each member, tutti_group_size entries */
    const uint64_t *send_offset, *send_bytes, *receive_offset, *receive_bytes;

    /* vdev */
    const void *in_splits; /* int64 on the device */
    void *out_splits;
    uint64_t row_bytes, in_rows, out_rows;
    int64_t major_align;
    int experts, form; /* form: 0 flat, 1 2d, 2 2d_offset */

    /* a send or receive whose elements lie apart: in blocks of block_bytes, each stride_bytes after the last; else 0 */
    uint64_t block_bytes, stride_bytes;

    /* tiles: this rank's, tile(task, i, &one) for i < tile_count. All inputs lie at in_place of their blocks. A
     * reduction is that of the task; 0: every tile has a source. */
    void (*tile)(const struct tu_device_task *task, size_t i, tu_device_tile *one);
    const void *tiles;
    size_t tile_count;
    uint64_t element_bytes;
} tu_device_task;

typedef struct tu_device_executor {
    size_t size;
    uint32_t version;

    /* This rank's side of a group on a device; *device_index -1 becomes the current one. Collective and bounded; not
     * while a stream captures. */
    tutti_status (*prepare)(void *state, tutti_group *group, int *device_index, int64_t deadline, void **prepared);
    void (*end)(void *prepared);

    /* Enqueues. While the stream captures, what would need an allocation or a rendezvous is TUTTI_ERROR_STATE naming
     * the call to make earlier. */
    tutti_status (*run)(void *prepared, tu_device_task *task);
    /* Tells the device about a block, so that a captured call may use it. */
    tutti_status (*add_block)(void *prepared, const tu_device_place *place);

    /* Whether it runs such a task, by what is equal on all ranks: buffers and their places, the stream, and what goes
     * to and comes from each member are not told. NULL: it runs all but messages. */
    bool (*serves)(void *state, const tutti_group *group, const tu_device_task *task);
    /* What the device found in operations that were enqueued: sticky, written as this thread's error. NULL: it is asked
     * through the backend. */
    tutti_status (*check)(void *prepared);
    bool strided; /* sends and receives whose elements lie apart; false in older plug-ins, which do not know of them */
    /* `run` wants all members to have come on the host, with the same call: its library hangs or worse when one does
     * not. Then calls of a group come one after the other, and each waits for all ranks before it is enqueued. */
    bool meets;
    bool own_order; /* reductions add in an order of its own: not the same bits as ever, which tutti_group_ran says */
} tu_device_executor;

/* ---- the way there: device.c ---- */

typedef struct tu_task tu_task;
struct tu_executors;

/* Finds out whether the call's buffers lie on a device of this world: by tutti_call.device, or by the block of
 * symmetric memory that they are in, without a lock; else the driver is asked, once for each buffer. Then *executors
 * are those that serve the group there; else it stays as it is. */
tutti_status tu_device_executors(tu_task *task, const tutti_call *call, const struct tu_executors **executors);
/* The executor of a backend of that name for memory of this kind, opened and made on first need. NULL where there is no
 * such backend, or where it has no executor for this memory. */
struct tu_executor;
tutti_status tu_device_executor_named(tutti_group *group, tutti_device kind, const char *name,
                                      const struct tu_executor **executor);
/* tutti_group_prepare's part: makes what the backend needs of the group and tells the device about every block met so
 * far. Nothing where no device is used. */
tutti_status tu_device_prepare(tutti_group *group, int64_t deadline);

#endif
