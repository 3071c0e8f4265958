/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on GPUs: streams, waiting, and memory. A tensor is made on a GPU by its options, or copied there:
 *
 *     tt_tensor *x = tt_randn(tt_shape(1024, 1024), TUTTI_BF16, TUTTI_OPTIONS(tt_options, .device = TUTTI_CUDA));
 *     tt_tensor *y = tt_matmul(x, tt_to_device(weight, TUTTI_CUDA));
 *     printf("%g\n", tt_item(tt_sum(y)));           // reading waits
 *
 * Operators on a GPU enqueue their work on the calling thread's current stream of it and return; at first that is the
 * default stream. What reads a tensor on the host (tt_item, tt_read, tt_print, files, tt_to_device) waits. The order
 * between streams is the program's, by events; memory is safe by itself: a tensor may be released while any stream
 * still uses it. An index that is out of range is found by the kernel, and told by the next call that waits.
 *
 * The plug-in libtutti-tensor-cuda.so is loaded when the first of these is needed; without it, a driver or a GPU, a
 * call is TUTTI_ERROR_UNSUPPORTED and says what is missing. Functions that return bool or a pointer set the pending
 * error, as operators do. A stream is a CUstream (a cudaStream_t) as `void *`, and may come from elsewhere; whoever
 * made it ends it when it has done what Tutti gave it (tt_synchronize), since a new stream may get its handle, and when
 * no tensor is left on symmetric or imported memory that it used, or was current for when that came: their end marks
 * it.
 */
#ifndef TUTTI_STREAMS_H
#define TUTTI_STREAMS_H

#include <tutti/device.h>
#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether tensors can be on that device now. Sets no error. */
TUTTI_API bool tt_device_available(tutti_device device);

/* Where the calling thread makes tensors whose options name no device, and parameters of modules: TUTTI_CPU at first.
 * Numbers, files and what tt_wrap takes stay on the CPU. */
TUTTI_API tutti_device tt_default_device(void);
/* Changes that, in this thread; 0 is TUTTI_CPU again. A device that is not there is TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API bool tt_default_device_set(tutti_device device);

/* The calling thread's current stream of the device; NULL is the default one. */
TUTTI_API void *tt_stream(tutti_device device);
/* Makes another one current, in this thread. */
TUTTI_API bool tt_stream_set(tutti_device device, void *stream);
/* A new one, which waits for no other; NULL with the pending error set. */
TUTTI_API void *tt_stream_new(tutti_device device);
/* Waits for what it holds, and ends it; where it is current in this thread, the default one becomes so. A replay that
 * was begun on it and has not ended is dropped. */
TUTTI_API void tt_stream_release(tutti_device device, void *stream);

/* Waits until the current stream has done what it holds. */
TUTTI_API bool tt_synchronize(tutti_device device);

/* A mark in a stream, behind which others can wait. */
typedef struct tt_event tt_event;
/* One behind what the current stream holds; to be released. NULL with the pending error set. */
TUTTI_API tt_event *tt_event_record(tutti_device device);
/* Work that comes to the current stream from now on begins after the mark; the host does not wait. */
TUTTI_API bool tt_event_join(const tt_event *event);
/* The host waits for it. */
TUTTI_API bool tt_event_wait(const tt_event *event);
/* Whether it was passed; never waits. */
TUTTI_API bool tt_event_done(const tt_event *event);
/* Ends it, whether it was passed or not; NULL is nothing to do. */
TUTTI_API void tt_event_release(tt_event *event);

/* ---- steps that are run again ----
 *
 * A step of a program that has run before is noted once, as a CUDA graph, and then run again as a whole, for the cost
 * of one launch:
 *
 *     tt_stream_set(TUTTI_CUDA, stream);                 // not the default one
 *     step(); tt_wait_all(world);                        // once as it is: memory, plans, rendezvous
 *     tt_replay_begin(TUTTI_CUDA);
 *     step();                                            // is noted, and does not run
 *     tt_replay *replay = tt_replay_end(TUTTI_CUDA);
 *     while (more()) { tt_copy_(input, batch()); tt_replay_run(replay); }
 *
 * It works on the very memory that was used while it was noted: new data is copied into the tensors that it read, and
 * results are in those that it wrote. Tensors that were made before must live as long as the replay; those that were
 * made inside live in memory of the replay's, which later runs write again. Random numbers and the count and rates of
 * an optimizer are new at each run, as if the step were called; every other number of the host is what it was when the
 * step was noted. Whatever would wait for the stream on the host (tt_item, tt_read, files, printing) is an error
 * inside. Collectives may be inside when the group has met on the device before, and every rank runs its replays in the
 * same order. */
typedef struct tt_replay tt_replay;
/* From here on, what this thread gives to its current stream of the device is noted. */
TUTTI_API bool tt_replay_begin(tutti_device device);
/* Ends that; to be released. With an error pending it drops what was noted, and returns NULL. Of several that a thread
 * has begun, on streams of their own, the last one ends first: else TUTTI_ERROR_STATE, and all go on. */
TUTTI_API tt_replay *tt_replay_end(tutti_device device);
/* Runs it on the current stream; the host does not wait. */
TUTTI_API bool tt_replay_run(tt_replay *replay);
/* Waits for its last run, and ends it; NULL is nothing to do. */
TUTTI_API void tt_replay_release(tt_replay *replay);

/* ---- copies that overlap ----
 *
 * tt_copy_ and tt_to_device between host and GPU wait until the bytes have arrived. With pinned memory nobody has to:
 *
 *     tt_tensor *here = tt_empty_pinned(shape, TUTTI_F32), *there = tt_empty(shape, TUTTI_F32, &on_cuda);
 *     tt_stream_set(TUTTI_CUDA, loader);                  // beside the stream that computes
 *     fill(tt_data_mut(here));                            // waits until the copy before has read it
 *     tt_copy_async_(there, here);                        // returns at once
 *     tt_event *arrived = tt_event_record(TUTTI_CUDA);    // for tt_event_join of the stream that computes
 */

/* On the CPU, contents undefined, in memory that copies to and from GPUs reach directly. Releasing it waits for copies
 * that still use it: make it once, and use it again. */
TUTTI_API tt_tensor *tt_empty_pinned(tt_dims shape, tutti_dtype dtype);
/* x = source, enqueued on the current stream of the GPU; the host does not wait. One of them is on a GPU and the other
 * there too or in pinned memory; both have one shape and dtype and lie row by row, anything else is an error: tt_copy_
 * does it. Functions that read pinned memory which a copy writes, or write what a copy reads, wait for it by
 * themselves; whoever keeps a pointer into it uses an event. Records no gradient; an x that requires grad is an error
 * while gradient mode is on. Between tt_replay_begin and _end every run of the replay copies, from and to what the
 * pinned memory is then. Returns x, or NULL. */
TUTTI_API tt_tensor *tt_copy_async_(tt_tensor *x, tt_tensor *source);

/* ---- how exactly products are computed ---- */

/* While it is on in this thread, matrix products of f32 on a GPU (matmul, linear, fused products, attention where it
 * multiplies by the vendor's library) may round their elements to tf32, ten binary digits behind the point, and add in
 * f32: several times faster, with errors near 3e-4. It is off at first. Products of other types and those of the CPU
 * stay as they are. Returns what it was; works also with an error pending. */
TUTTI_API bool tt_tf32_mode(bool on);

/* The memory of tensors on a device, in bytes but for the last three, which count. */
typedef struct tt_device_memory {
    size_t size;
    size_t allocated, reserved;           /* in tensors; taken of the driver, and kept for reuse */
    size_t peak_allocated, peak_reserved; /* the most at one time */
    size_t limit;                         /* of reserved; 0: none */
    uint64_t allocations, reservations;   /* given out; taken of the driver */
    uint64_t retries;                     /* after what was spare had gone back */
} tt_device_memory;
#define TT_DEVICE_MEMORY_INIT TUTTI_DEFAULTS(tt_device_memory)
/* TT_DEVICE_MEMORY_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_device_memory_init(tt_device_memory *memory, size_t size);
/* Writes them to *memory, whose size is set. */
TUTTI_API TUTTI_CHECKED tutti_status tt_device_memory_get(tutti_device device, tt_device_memory *memory);
/* The most that may be reserved; 0: no limit but the device's. A tensor that does not fit is TUTTI_ERROR_MEMORY. */
TUTTI_API TUTTI_CHECKED tutti_status tt_device_memory_limit(tutti_device device, size_t bytes);
/* Gives what is spare back to the driver. */
TUTTI_API void tt_device_memory_trim(tutti_device device);

#ifdef __cplusplus
}
#endif
#endif
