/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric memory: blocks that every rank of a group can map.
 *
 *     tutti_memory *block;
 *     tutti_peers *peers;
 *     tutti_memory_alloc(world, 4096, NULL, &block);                       // local: no other rank is involved
 *     tutti_memory_rendezvous(block, tutti_world_group(world), &peers);    // collective: each maps the blocks of all
 *     float *theirs = tutti_peers_buffer(peers, 1);                        // from here on, plain loads and stores
 *
 * A block is data that the user sees, and a signal pad: words for the user's own synchronisation. Both start zeroed.
 * Memory is reserved when it is allocated: too much is TUTTI_ERROR_MEMORY, a limit of the system (descriptors,
 * mappings, address space) is TUTTI_ERROR_LIMIT and named, and nothing fails later at the first touch.
 *
 * LIFETIME. tutti_memory_release ends the caller's reference: the block can no longer be found, but its memory stays
 * while a tutti_peers of it lives, on this rank or on another. Freeing a block that a peer still has mapped is safe for
 * the peer. On a GPU the release waits for what Tutti itself put into streams; kernels of the caller's or of another
 * library that use the block must have ended before.
 *
 * THREADS. All functions here may be called from any thread of the rank. In a forked child they return
 * TUTTI_ERROR_FORKED, and releases do nothing.
 *
 * What plain loads, stores, puts, signals and barriers order is written in tutti/peers.h.
 */
#ifndef TUTTI_MEMORY_H
#define TUTTI_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/group.h>
#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tutti_memory tutti_memory;
typedef struct tutti_peers tutti_peers;

/* ---- allocating ---- */

typedef struct tutti_memory_options {
    size_t size;
    tutti_device device;     /* 0: TUTTI_CPU */
    size_t alignment;        /* of the data: a power of two up to 2 MiB; 0: 128 */
    size_t signal_pad_bytes; /* a multiple of 4; 0: the world's (tutti_memory_signal_pad_bytes) */
    tutti_group *group;      /* default group of a later rendezvous, kept by the block; NULL: none */
    bool persistent;         /* the block belongs to `persistent_id`: see below */
    uint64_t persistent_id;
    tutti_choice huge_pages; /* 0: TUTTI_HUGE_PAGES, else when they help */
    void *stream;            /* a CUstream on which device memory is cleared, without the host waiting: it is clear for
                                what comes after on it. NULL: it is clear when the call returns */
} tutti_memory_options;
#define TUTTI_MEMORY_OPTIONS_INIT TUTTI_DEFAULTS(tutti_memory_options)
/* TUTTI_MEMORY_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_memory_options_init(tutti_memory_options *options, size_t size);

/* A zeroed block of `bytes` bytes; zero bytes are allowed. Local: it never communicates.
 *
 * Persistent blocks: an id of a world names memory that keeps its address for as long as the world lives. The first
 * allocation makes it; after the release another allocation with that id and the same byte size gets the same address,
 * its contents and its pad as they were, and its rendezvous still stands. While it is allocated a second allocation is
 * TUTTI_ERROR_STATE ("still active"), and another byte size is TUTTI_ERROR_ARGUMENT showing both. The ranks of a
 * rendezvous must use the same id. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_memory_alloc(tutti_world *world, size_t bytes,
                                                        const tutti_memory_options *options, tutti_memory **memory);

/* Another reference to the block. */
TUTTI_API tutti_memory *tutti_memory_keep(tutti_memory *memory);
/* Ends one reference; NULL is allowed. */
TUTTI_API void tutti_memory_release(tutti_memory *memory);

/* The data, at least 128-byte aligned on this rank; an address of the block's device. Never NULL, also for zero
 * bytes. */
TUTTI_API void *tutti_memory_data(const tutti_memory *memory);
/* Bytes of the data, as they were asked for. */
TUTTI_API size_t tutti_memory_bytes(const tutti_memory *memory);
TUTTI_API void *tutti_memory_signal_pad(const tutti_memory *memory); /* this rank's own */
TUTTI_API size_t tutti_memory_pad_bytes(const tutti_memory *memory); /* of this block, as it was allocated */
/* Where it lies, a GPU with its number. */
TUTTI_API tutti_device tutti_memory_device(const tutti_memory *memory);

/* The block whose data holds `pointer`, or NULL: is this pointer symmetric? O(log n). Lent: valid while the block is
 * allocated. */
TUTTI_API tutti_memory *tutti_memory_find(tutti_world *world, const void *pointer);

/* Bytes of the signal pad that blocks get which ask for none; blocks keep the size that they were allocated with. The
 * default is TUTTI_SIGNAL_PAD, or 9216. */
TUTTI_API size_t tutti_memory_signal_pad_bytes(const tutti_world *world);
/* Sets it for blocks that are allocated later. 0 restores the default; a size must be a multiple of 4. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_memory_set_signal_pad_bytes(tutti_world *world, size_t bytes);

/* ---- meeting ---- */

/* Collective over the group, bounded by its deadline: every member maps the blocks of all. NULL is the block's default
 * group; a block without one is TUTTI_ERROR_ARGUMENT. The result is cached per (block, group): later calls involve
 * nobody else.
 *
 * Members whose blocks differ in size, pad size, alignment, device or persistent id get TUTTI_ERROR_MISMATCH naming
 * them, and so does everybody else: this agreement ends nothing, and neither does a member that runs out of memory or
 * mappings (all get its status, and its name). A death, a deadline or an abort ends the group. Members on other hosts
 * are not mapped, but reached by the calls of tutti/peers.h; that needs the plug-in tutti-ucx on all of them, else it
 * is TUTTI_ERROR_UNSUPPORTED, also for everybody. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_memory_rendezvous(tutti_memory *memory, tutti_group *group,
                                                             tutti_peers **peers);

/* ---- backends ---- */

/* Which backend serves a device in this world: "shm" for the CPU. A device without one is TUTTI_ERROR_UNSUPPORTED.
 * Lent. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_memory_backend(tutti_world *world, tutti_device device, const char **name);

/* Chooses the backend of a device. The one that is chosen already is no change; one that does not exist is
 * TUTTI_ERROR_NOT_FOUND, and after the first allocation on that device any other is TUTTI_ERROR_STATE. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_memory_set_backend(tutti_world *world, tutti_device device,
                                                              const char *name);

/* Whether the device can write to all its peers at once. False for the CPU and for a device that is not there; never
 * fails. */
TUTTI_API bool tutti_memory_has_multicast_support(tutti_world *world, tutti_device device);

/* ---- 32-bit words in order ---- */

#define TUTTI_VIEW_DIMS 8

/* A typed look at memory: what the functions of tutti/peers.h return, and what the two below take. */
typedef struct tutti_view {
    size_t size;
    void *data; /* of the first element */
    tutti_dtype dtype;
    tutti_device device; /* 0: TUTTI_CPU */
    int dim_count;
    int64_t shape[TUTTI_VIEW_DIMS];
    int64_t strides[TUTTI_VIEW_DIMS]; /* in elements */
} tutti_view;
#define TUTTI_VIEW_INIT TUTTI_DEFAULTS(tutti_view)
/* TUTTI_VIEW_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_view_init(tutti_view *view, size_t size);

/* Number of elements of a view; 0 for NULL. */
TUTTI_API int64_t tutti_view_count(const tutti_view *view);
/* Number of bytes of a view's elements; 0 for NULL. */
TUTTI_API size_t tutti_view_bytes(const tutti_view *view);

/* A contiguous view of CPU memory. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_view_of(void *data, tutti_dtype dtype, const int64_t *shape, int dim_count,
                                                   tutti_view *view);

/* Sets `count` words from word `offset` on. The view must be flat (one dimension), contiguous and u32; the checks are,
 * in this order: the view, offset, count, value, and that offset + count stays inside. Each word is a relaxed atomic
 * store. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_view_memset32(tutti_world *world, const tutti_view *view, int64_t offset,
                                                         int64_t value, int64_t count, const tutti_call *call);

/* Writes one word after everything that this thread (or, on a GPU, the stream) did before: a release store. Same
 * checks. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_view_write_value32(tutti_world *world, const tutti_view *view,
                                                              int64_t offset, int64_t value, const tutti_call *call);

#ifdef __cplusplus
}
#endif
#endif
