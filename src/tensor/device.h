/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on devices other than the CPU. The `tensors` part of a backend (memory/backend.h passes it on) is the table
 * below: memory by stream, copies, streams and events, kernels by name, matrix products. libtutti-tensor links none of
 * it: the plug-in libtutti-tensor-<kind>.so is found and opened when the first tensor of that device is made.
 *
 * The table belongs to no world, so the backend is opened with none. `index` is the number of the device among those of
 * its kind; `stream` is the device's own kind of stream, NULL its default one. Every function that can fail writes its
 * error and returns its status. All may be called from several threads at once.
 *
 * Memory is ordered by streams: what a stream has released may be given out again for the same stream at once, since
 * the work that comes later runs later. Who uses a block on another stream than it was allocated for says so (used),
 * and its release waits for that stream too.
 */
#ifndef TU_TENSOR_DEVICE_H
#define TU_TENSOR_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/status.h>

#define TU_DEVICE_GRAIN 512 /* blocks are whole multiples of so many bytes, and begin at one */
typedef struct tu_device_block {
    void *data;
    void *handle; /* the backend's own */
} tu_device_block;

/* Of one device, in bytes unless it says otherwise. */
typedef struct tu_device_usage {
    size_t allocated, reserved, peak_allocated, peak_reserved, limit;
    uint64_t allocations, reservations, retries; /* counted: given out, taken of the driver, after making room */
} tu_device_usage;

/* What a kernel found wrong: an index out of range. The first is kept until it is told. */
typedef struct tu_device_fault {
    int64_t position, index, limit;
    int32_t operation; /* of tensor/launch.h; 0: nothing is wrong */
} tu_device_fault;

/* out (rows, columns) = left (rows, depth) right (depth, columns), `batch` times. Element (i, j) of an operand lies at
 * data[i * row + j * column], the next product `step` further; one of row and column is 1 (or 0, of an extent of 1). */
typedef struct tu_device_matrix {
    const void *data;
    int64_t row, column, step;
    bool zero_gaps; /* what lies between one row, or column, and the next is memory of its own, and 0 */
} tu_device_matrix;
typedef struct tu_device_product {
    int64_t rows, columns, depth, batch;
    tu_device_matrix left, right, out; /* out is written */
    tutti_dtype dtype, result;         /* of the inputs; of out */
    /* Of f8 alone: f32 on the device that the product is multiplied with, one, or one per row of left and column of
     * right. NULL: 1. */
    const void *left_scale, *right_scale;
    bool scales_rows, scales_columns; /* there is one per row, per column */
    const void *bias;                 /* of the result's type, added to each row before it is rounded; NULL: none */
    bool tf32;                        /* elements of f32 may be rounded to eleven digits before they are multiplied */
    bool fast;                        /* of f8: sums may have the digits that the device's are quickest with */
} tu_device_product;

struct tu_device_together;
struct tu_backend_kernel;

typedef struct tu_device_tensors {
    size_t size;
    /* How many there are, and the one that is current in this thread. */
    int (*count)(void *state);
    int (*current)(void *state);

    tutti_status (*allocate)(void *state, int index, void *stream, size_t bytes, tu_device_block *block);
    void (*release)(void *state, int index, tu_device_block *block);
    void (*used)(void *state, int index, const tu_device_block *block, void *stream);
    /* As release, and waits until the streams that used it have done what they hold now. */
    void (*release_behind)(void *state, int index, tu_device_block *block);
    void (*trim)(void *state, int index); /* gives back what is spare */
    tutti_status (*usage)(void *state, int index, tu_device_usage *usage);
    tutti_status (*set_limit)(void *state, int index, size_t bytes); /* 0: none */
    tutti_status (*pin)(void *state, size_t bytes, void **data);     /* memory of the host that copies reach directly */
    void (*unpin)(void *state, void *data);
    tutti_status (*pin_there)(void *state, void *data, size_t bytes); /* makes memory such: whole pages */
    void (*unpin_there)(void *state, void *data);

    tutti_status (*stream_new)(void *state, int index, void **stream);
    void (*stream_end)(void *state, int index, void *stream); /* waits for what it holds */
    tutti_status (*synchronize)(void *state, int index, void *stream);
    /* An event behind what the stream holds; join orders a stream after it, wait waits for it on the host. */
    tutti_status (*mark)(void *state, int index, void *stream, void **event);
    tutti_status (*join)(void *state, int index, void *stream, void *event);
    tutti_status (*wait)(void *state, int index, void *event);
    tutti_status (*test)(void *state, int index, void *event, bool *complete);
    void (*unmark)(void *state, int index, void *event);

    /* Between any two of: memory of the device, of another one, of the host. From memory of the host that is not pinned
     * the bytes have been read on return; a graph keeps them. Pinned memory is read when the copy runs. */
    tutti_status (*copy)(void *state, int index, void *stream, void *to, const void *from, size_t bytes);
    tutti_status (*clear)(void *state, int index, void *stream, void *to, size_t bytes);

    /* A kernel by name, NULL where there is none of it; its argument is one struct, and `shared` the bytes of memory
     * that each block has beside what the kernel declares. */
    tutti_status (*find)(void *state, int index, const char *name, void **kernel);
    tutti_status (*launch)(void *state, int index, void *stream, void *kernel, unsigned blocks, unsigned threads,
                           unsigned shared, const void *arguments);
    /* Kernels that are written at run time, in CUDA C. What the compiler is, with its version, its options and what it
     * builds for: the image of a text depends on nothing else. UNSUPPORTED: there is none, and why. */
    tutti_status (*compiler)(void *state, int index, char *name, size_t size);
    /* The image of a text, to be freed; the error has the compiler's first message. */
    tutti_status (*compile)(void *state, int index, const char *text, void **image, size_t *bytes);
    /* The module of that name, loaded from the image where it was not before; *module is NULL where it was not and the
     * image is NULL. It stays as long as the device is open: graphs may have its kernels. */
    tutti_status (*module)(void *state, int index, const char *name, const void *image, void **module);
    tutti_status (*module_find)(void *state, int index, void *module, const char *name, void **kernel);

    /* What kernels of this device found wrong since it was last asked; and where they write it. */
    bool (*fault)(void *state, int index, tu_device_fault *fault);
    tu_device_fault *(*fault_place)(void *state, int index);

    /* By the vendor's library. UNSUPPORTED, with nothing enqueued, for types and layouts that it has not, and where it
     * is not there. NULL: there is none. */
    tutti_status (*product)(void *state, int index, void *stream, const tu_device_product *product);

    /* A product of several ranks in one kernel: tensor/together.h. Which one there is for these sizes, types and places
     * on this device (tu_together_kernel); and its launch, by tu_peers_run. NULL: there is none. */
    int (*can_together)(void *state, int index, const struct tu_device_together *product);
    tutti_status (*together)(void *state, int index, void *stream, const struct tu_device_together *product,
                             const struct tu_backend_kernel *kernel, unsigned *blocks);

    /* Graphs. From begin to end the work that comes to the stream, a named one, is noted and does not run; memory that
     * is allocated for it belongs to the graph until the graph ends, which waits for its last run. */
    bool (*capturing)(void *state, int index, void *stream);
    tutti_status (*capture_begin)(void *state, int index, void *stream);
    tutti_status (*capture_end)(void *state, int index, void *stream, void **graph); /* graph NULL: it is dropped */
    tutti_status (*graph_run)(void *state, int index, void *stream, void *graph);
    void (*graph_end)(void *state, int index, void *graph);

    /* Loads all kernels, those that are written later too, instead of each at its first launch. What cannot be loaded
     * is tried again there, and fails there. */
    void (*load)(void *state, int index);

    /* Whether the vendor's library of products is there. */
    bool (*has_library)(void *state, int index);
} tu_device_tensors;

#endif
