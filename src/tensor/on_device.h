/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on devices other than the CPU, as the rest of this library uses them: finding the device, its memory, its
 * copies, its kernels. The device's own side is the table of tensor/device.h, in a plug-in.
 *
 * Work goes to the calling thread's current stream of the device and is not waited for, except where the host reads.
 * What a kernel finds wrong after its call has returned (an index out of range) is told by the next wait.
 */
#ifndef TU_TENSOR_ON_DEVICE_H
#define TU_TENSOR_ON_DEVICE_H

#include "tensor/device.h"
#include "tensor/launch.h"
#include "tensor/operator.h"

#define TU_DEVICES 64        /* of one kind */
#define TU_DEVICE_NAMES 2048 /* kernels by name; a power of two, at most half full */

/* One device that is in use. */
typedef struct tu_device {
    const tu_device_tensors *table;
    void *state;
    tutti_device number; /* TUTTI_CUDA_AT(index) */
    int index;
    atomic_bool loaded;         /* all kernels are: see tu_device_meet */
    atomic_uint streams_ended;  /* so far: a new stream may have the handle of one of them */
    _Atomic(void *) *pointwise; /* kernels of pointwise operators: see on_device.c */
    struct {
        _Atomic(const char *) name; /* set last */
        void *kernel;
    } named[TU_DEVICE_NAMES];
    int names; /* that are remembered; under the lock of devices */
} tu_device;

/* Whether tensors of that device lie elsewhere than in memory of the host. */
static inline bool tu_is_remote(tutti_device device) {
    return device >= TUTTI_CUDA;
}
static inline bool tu_on_device(const tt_tensor *x) {
    return tu_is_remote(x->device);
}

/* The device, opened on first need. TUTTI_CUDA is the thread's current one. UNSUPPORTED where there is no such device,
 * no driver or no plug-in; the message says which. */
tutti_status tu_device_get(tutti_device device, tu_device **found);
/* That of a tensor that lies there. */
tu_device *tu_device_of(const tt_tensor *x);

/* By whoever keeps a device beyond a call, or a stream, an event, kernels or a graph of one: devices stay, also behind
 * tt_finalize, until all have dropped them. Tensors hold them by themselves. */
void tu_devices_hold(void);
void tu_devices_drop(void);

/* The thread's current stream of the device. */
void *tu_device_stream(const tu_device *device);
/* Waits for what a stream of ours holds, and ends it. NULL is nothing to do. */
void tu_device_stream_end(tu_device *device, void *stream);

/* Storages' memory; `storage` is new, or has none. */
tutti_status tu_device_allocate(tu_storage *storage, size_t bytes);
void tu_device_release(tu_storage *storage);
tutti_status tu_device_resize(tu_storage *storage, size_t bytes);
/* Before a kernel of the call runs: its device is there, and memory that belongs to another stream than this one is not
 * given out before this one is past it. */
tutti_status tu_device_begin(const tu_call *call);

/* The same of one storage, which that stream uses from now on; nothing where it is no memory of this device's. */
void tu_device_note_use(const tu_device *device, const tu_storage *storage, void *stream);
/* Of a storage on memory of a device that another allocator gives: uses of it are noted from now on; waits for them,
 * those of the current stream too, and notes no more. */
tutti_status tu_device_note_uses(tu_storage *storage);
void tu_device_await_uses(tu_storage *storage);
/* Whether the thread's current stream is captured into a graph. */
bool tu_device_capturing(const tu_device *device);

/* Before this thread's rank begins something in which kernels of ranks wait for each other. Ranks that are threads
 * share the device's context, and there the driver loads a kernel, at its first launch, when nothing runs: not while a
 * kernel of one rank waits for that very launch of another's. So the first of such ranks that comes here loads all
 * kernels. */
void tu_device_meet(tu_device *device);

/* Waits for the thread's current stream, and tells what kernels found wrong, or those who watch. */
tutti_status tu_device_wait(const tu_device *device);
/* Something that is asked, once, when its thread has waited: whether what the thread began went well. */
typedef struct tu_device_watch {
    struct tu_device_watch *next;
    const tu_thread *thread;
    const void *owner, *about;                          /* of whoever made it */
    tutti_status (*ask)(struct tu_device_watch *watch); /* ends it */
} tu_device_watch;
void tu_device_watch_add(tu_device_watch *watch);
/* One of that thread, of that owner and about that, taken off the list; NULL stands for any. NULL: there is none. */
tu_device_watch *tu_device_watch_take(const tu_thread *thread, const void *owner, const void *about);
/* Bytes to and from the host; both have arrived on return. */
tutti_status tu_device_write(const tu_device *device, void *to, const void *from, size_t bytes);
tutti_status tu_device_read(const tu_device *device, void *to, const void *from, size_t bytes);

/* Copies between a device and pinned memory of the host that were given to a stream (pinned.c). */
typedef struct tu_device_copy tu_device_copy;
/* Waits on the host for copies that write the memory, or for all. */
tutti_status tu_device_copies_wait(tu_storage *storage, bool all);
/* Waiters of storages for the same; NULL where nothing is under way. Under the storage's lock. */
tu_storage_waiter *tu_device_copies_waiter(const tu_storage *storage);
tu_storage_waiter *tu_device_copies_reader(const tu_storage *storage);

/* Makes memory of the host, which is there and cannot be resized, pinned until its storage goes: whole pages. */
tutti_status tu_storage_pin(tu_storage *storage, const tu_device *device);
void tu_storage_unpin(tu_storage *storage);

/* to = x, broadcast and converted, one of them on a device at least. */
tutti_status tu_device_copy_tensor(const tt_tensor *to, const tt_tensor *x);
/* The same of two on that device, on a stream of the caller's. */
tutti_status tu_device_copy_on(tu_device *device, void *stream, const tt_tensor *to, const tt_tensor *x);
tutti_status tu_device_fill(const tt_tensor *x, double value);
/* x itself, held, where it is on the host; else a copy there, dense. NULL with the error written. */
tt_tensor *tu_on_host(const tt_tensor *x);
/* The one element of x as a double, from wherever it lies. */
tutti_status tu_read_number(const tt_tensor *x, double *number);

/* Launches a kernel by name with `items` threads' work, `threads` of them in a block; an error where there is none. */
tutti_status tu_device_launch(tu_device *device, const char *name, int64_t items, unsigned threads,
                              const void *arguments);
/* The same with so many blocks. */
tutti_status tu_device_launch_blocks(tu_device *device, const char *name, int64_t blocks, unsigned threads,
                                     const void *arguments);
/* The same, each block with so many bytes of shared memory beside what the kernel declares. */
tutti_status tu_device_launch_shared(tu_device *device, const char *name, int64_t blocks, unsigned threads,
                                     unsigned shared, const void *arguments);
/* The same on a stream of the caller's. */
tutti_status tu_device_launch_on(tu_device *device, void *stream, const char *name, int64_t blocks, unsigned threads,
                                 const void *arguments);
/* A kernel on rows, "softmax" of f32 or f64, "norm" of bf16 and f16 too: see tu_launch_rows. */
tutti_status tu_device_launch_rows(tu_device *device, const char *name, tutti_dtype dtype, const tu_launch_rows *rows);
/* The same by kernels that keep rows in registers, where these fit and lie so; else as above. */
tutti_status tu_device_launch_held(tu_device *device, const char *name, tutti_dtype dtype, const tu_launch_rows *rows);
/* A product by the vendor's library where it has such, else by a kernel of our own (matmul.c). */
tutti_status tu_device_multiply(tu_device *device, const tu_device_product *product);
/* A product with scales, a bias and a scale of the result, as tt_scaled_matmul has them: f32 on the device, dense. */
typedef struct tu_device_scaled {
    tu_device_product product;                             /* without scales; batch is 1 where rows have theirs */
    const void *row_scales, *column_scales, *bias, *whole; /* the last two may be NULL */
    bool scales_rows, scales_columns;                      /* there is one per row, per column; else one */
} tu_device_scaled;
/* By the vendor's library where it has such, else the product in f32, then its scales and one rounding. */
tutti_status tu_device_multiply_scaled(tu_device *device, const tu_device_scaled *scaled);
/* Where kernels of that device write what is wrong. */
uint64_t tu_device_fault_place(const tu_device *device);
#define TU_DEVICE_THREADS 256
/* The type in which kernels of norms and cross entropy take rows of x: its own, or f32 of what is narrower still. */
static inline tutti_dtype tu_device_rows_dtype(const tt_tensor *x) {
    bool own = x->dtype == TUTTI_F64 || x->dtype == TUTTI_BF16 || x->dtype == TUTTI_F16;
    return own ? (tutti_dtype)x->dtype : TUTTI_F32;
}

static inline uint64_t tu_place_of(const void *pointer) {
    return (uint64_t)(uintptr_t)pointer;
}
/* The name of a kernel from its parts: "fold", "rows", "sum", "f32": "kernel_fold_rows_sum_f32". Returns buffer. Not by
 * snprintf, which takes longer than the rest of a tiny call. */
#define TU_KERNEL_NAME 64
const char *tu_kernel_name_of(char buffer[TU_KERNEL_NAME], int count, const char *const *parts);
/* "softmax" and f32: "kernel_softmax_f32". */
const char *tu_kernel_name(char buffer[TU_KERNEL_NAME], const char *name, tutti_dtype dtype);

#endif
