/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on devices other than the CPU: see on_device.h.
 */
#include "tensor/on_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "memory/backend.h"
#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/operators.h"
#include "tensor/pointwise.h"
#include "tensor/process.h"

/* ---- devices ---- */

/* Kernels of one pointwise operator: for any layout by compute type, for dense operands by their type. */
enum {
    ANY_F32,
    ANY_F64,
    ANY_I64,
    ANY_U64,
    ANY_C128,
    DENSE_F32,
    DENSE_F64,
    DENSE_BF16,
    DENSE_F16,
    FORMS
};
static const char *const form_names[FORMS] = { "f32",       "f64",       "i64",        "u64",      "c128",
                                               "dense_f32", "dense_f64", "dense_bf16", "dense_f16" };

static tutti_status make_device(const tu_process_devices *devices, int index, tu_device **found) {
    const tu_device_tensors *table = devices->opened.table->tensors;
    tu_device *device = calloc(1, sizeof *device);
    if (device != NULL)
        device->pointwise = calloc((size_t)TU_POINTWISE_COUNT * FORMS, sizeof *device->pointwise);
    if (device == NULL || device->pointwise == NULL) {
        free(device);
        return tu_error_memory("a device", sizeof *device);
    }
    device->table = table;
    device->state = devices->opened.state;
    device->index = index;
    device->number = tutti_device_at(TUTTI_CUDA, index);
    *found = device;
    return TUTTI_OK;
}

/* Opens the plug-in where that was not done. The caller holds the lock of devices. */
static tutti_status open_backend(tu_process_devices *devices) {
    if (devices->opened.table != NULL)
        return TUTTI_OK;
    tutti_status status = tu_backend_open_apart("tensor-cuda", &devices->opened);
    if (status == TUTTI_OK && devices->opened.table->tensors == NULL) {
        tu_backend_close_apart(&devices->opened);
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "the plug-in tensor-cuda has no tensors");
    }
    return status;
}

static tutti_status open_device(tu_process_devices *devices, int index, tu_device **found) {
    tutti_status status = open_backend(devices);
    if (status != TUTTI_OK)
        return status;
    const tu_device_tensors *table = devices->opened.table->tensors;
    int count = table->count(devices->opened.state);
    if (index < 0)
        index = table->current(devices->opened.state);
    if (index >= count || index >= TU_DEVICES)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "there is no device cuda:%d: this process sees %d GPU%s", index, count,
                        count == 1 ? "" : "s");
    *found = atomic_load_explicit(&devices->at[index], memory_order_relaxed);
    if (*found != NULL)
        return TUTTI_OK;
    status = make_device(devices, index, found);
    if (status == TUTTI_OK)
        atomic_store_explicit(&devices->at[index], *found, memory_order_release); /* pairs with known_device */
    return status;
}

static tu_device *known_device(tutti_device number) {
    int index = number - TUTTI_CUDA_AT(0);
    if (index < 0 || index >= TU_DEVICES)
        return NULL;
    return atomic_load_explicit(&tu_process_devices_get()->at[index],
                                memory_order_acquire); /* pairs with open_device */
}

/* For the first time, or the current one. */
static __attribute__((noinline)) tutti_status find_device(tutti_device number, tu_device **found) {
    tu_process_devices *devices = tu_process_devices_get();
    pthread_mutex_lock(&devices->lock);
    tutti_status status = open_device(devices, tutti_device_index(number), found);
    pthread_mutex_unlock(&devices->lock);
    if (status == TUTTI_OK || status == TUTTI_ERROR_MEMORY)
        return status;
    return tu_error(TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device %s: %s", tutti_device_name(number),
                    tutti_error_message());
}

tutti_status tu_device_get(tutti_device number, tu_device **found) {
    *found = known_device(number);
    return __builtin_expect(*found != NULL, 1) ? TUTTI_OK : find_device(number, found);
}

tu_device *tu_device_of(const tt_tensor *x) {
    return known_device(x->device);
}

/* With what the holder did there before: pairs with tu_devices_close. */
void tu_devices_drop(void) {
    atomic_fetch_sub_explicit(&tu_process_devices_get()->holders, 1, memory_order_release);
}

void tu_devices_hold(void) {
    atomic_fetch_add_explicit(&tu_process_devices_get()->holders, 1, memory_order_relaxed);
}

/* Nothing lies on a device any more. */
void tu_devices_close(tu_process_devices *devices) {
    pthread_mutex_lock(&devices->lock);
    bool held = atomic_load_explicit(&devices->holders, memory_order_acquire) > 0; /* pairs with tu_devices_drop */
    for (int i = 0; i < TU_DEVICES && !held; i++) {
        tu_device *device = atomic_load_explicit(&devices->at[i], memory_order_relaxed);
        atomic_store_explicit(&devices->at[i], NULL, memory_order_relaxed);
        for (int k = 0; device != NULL && k < TU_DEVICE_NAMES; k++)
            free((char *)(uintptr_t)atomic_load_explicit(&device->named[k].name, memory_order_relaxed));
        if (device != NULL)
            free(device->pointwise);
        free(device);
    }
    if (devices->opened.table != NULL && !held)
        tu_backend_close_apart(&devices->opened);
    pthread_mutex_unlock(&devices->lock);
}

void *tu_device_stream(const tu_device *device) {
    const tu_thread *self = tu_self();
    return self->streams == NULL ? NULL : self->streams[device->index];
}

/* Counted before the handle can be another stream's. */
void tu_device_stream_end(tu_device *device, void *stream) {
    if (stream == NULL)
        return;
    atomic_fetch_add_explicit(&device->streams_ended, 1, memory_order_relaxed);
    device->table->stream_end(device->state, device->index, stream);
}

void tu_device_meet(tu_device *device) {
    const tu_device_tensors *table = device->table;
    if (__builtin_expect(atomic_load_explicit(&device->loaded, memory_order_acquire), 1) || tu_pool_worlds() < 2 ||
        table->load == NULL)
        return;
    pthread_mutex_t *lock = &tu_process_devices_get()->lock;
    pthread_mutex_lock(lock); /* the others wait until it is done */
    if (!atomic_load_explicit(&device->loaded, memory_order_relaxed))
        table->load(device->state, device->index);
    atomic_store_explicit(&device->loaded, true, memory_order_release); /* pairs with the look above */
    pthread_mutex_unlock(lock);
}

/* ---- memory ---- */

tutti_status tu_device_allocate(tu_storage *storage, size_t bytes) {
    tu_device *device;
    tu_device_block block = { 0 };
    tutti_status status = tu_device_get(storage->device, &device);
    if (status != TUTTI_OK)
        return status;
    storage->stream = tu_device_stream(device);
    storage->streams_ended = atomic_load_explicit(&device->streams_ended, memory_order_relaxed);
    status = device->table->allocate(device->state, device->index, storage->stream, bytes, &block);
    if (status != TUTTI_OK)
        return status;
    storage->data = block.data;
    storage->owner = block.handle;
    storage->bytes = bytes;
    return TUTTI_OK;
}

void tu_device_release(tu_storage *storage) {
    tu_device *device = known_device(storage->device);
    tu_device_block block = { storage->data, storage->owner };
    if (storage->data != NULL && device != NULL)
        device->table->release(device->state, device->index, &block);
    storage->data = storage->owner = NULL;
}

tutti_status tu_device_resize(tu_storage *storage, size_t bytes) {
    tu_storage fresh = { .device = storage->device };
    size_t kept = bytes < storage->bytes ? bytes : storage->bytes;
    tutti_status status = bytes > 0 ? tu_device_allocate(&fresh, bytes) : TUTTI_OK;
    if (status == TUTTI_OK && kept > 0) {
        const tu_device *device = known_device(storage->device);
        status = device->table->copy(device->state, device->index, fresh.stream, fresh.data, storage->data, kept);
    }
    if (status != TUTTI_OK) {
        tu_device_release(&fresh);
        return status;
    }
    if (kept > 0)
        tu_device_note_use(known_device(storage->device), storage, fresh.stream);
    tu_device_release(storage);
    storage->zero_gaps = false;
    storage->data = fresh.data;
    storage->owner = fresh.owner;
    storage->stream = fresh.stream;
    storage->streams_ended = fresh.streams_ended;
    storage->bytes = bytes;
    return TUTTI_OK;
}

/* Memory belongs to the stream that it was allocated on: for sure if that is the default one, or if no stream has ended
 * since, whose handle this one could have. Else the allocator knows whose it is. */
static bool belongs_to(const tu_device *device, const tu_storage *storage, void *stream) {
    return storage->stream == stream &&
           (stream == NULL ||
            storage->streams_ended == atomic_load_explicit(&device->streams_ended, memory_order_relaxed));
}

void tu_device_note_use(const tu_device *device, const tu_storage *storage, void *stream) {
    void *handle = storage->fixed ? storage->uses : storage->owner;
    if (belongs_to(device, storage, stream) || handle == NULL || storage->data == NULL ||
        storage->device != device->number)
        return;
    tu_device_block block = { storage->data, handle };
    device->table->used(device->state, device->index, &block, stream);
}

tutti_status tu_device_note_uses(tu_storage *storage) {
    tu_storage small = { .device = storage->device };
    tutti_status status = tu_device_allocate(&small, 1);
    storage->uses = small.owner;
    storage->stream = small.stream;
    storage->streams_ended = small.streams_ended;
    return status;
}

void tu_device_await_uses(tu_storage *storage) {
    const tu_device *device = known_device(storage->device);
    tu_device_block block = { NULL, storage->uses };
    if (device == NULL || storage->uses == NULL)
        return;
    tu_device_note_use(device, storage, tu_device_stream(device));
    device->table->release_behind(device->state, device->index, &block);
    storage->uses = NULL;
}

tutti_status tu_device_begin(const tu_call *call) {
    tu_device *device;
    tutti_status status = tu_device_get(call->device, &device);
    if (status != TUTTI_OK)
        return status;
    void *stream = tu_device_stream(device);
    for (int i = 0; i < call->input_count; i++)
        if (call->inputs[i] != NULL)
            tu_device_note_use(device, call->inputs[i]->storage, stream);
    return TUTTI_OK;
}

bool tu_device_capturing(const tu_device *device) {
    return device->table->capturing(device->state, device->index, tu_device_stream(device));
}

/* ---- waiting ---- */

static tutti_status tell_fault(const tu_device *device) {
    static const char *const names[] = {
        [TU_INDEX_SELECT] = "index_select", [TU_INDEX_ADD] = "index_add",       [TU_INDEX_GATHER] = "gather_dim",
        [TU_INDEX_SCATTER] = "scatter_add", [TU_INDEX_EMBEDDING] = "embedding", [TU_INDEX_TARGET] = "cross_entropy"
    };
    tu_device_fault fault;
    if (!device->table->fault(device->state, device->index, &fault))
        return TUTTI_OK;
    bool known = fault.operation > 0 && fault.operation < (int)(sizeof names / sizeof names[0]);
    return tu_error(TUTTI_ERROR_RANGE,
                    "%s: index %lld at position %lld is out of range for size %lld; found on %s after the call had "
                    "returned, its results are not valid",
                    known ? names[fault.operation] : "a kernel", (long long)fault.index, (long long)fault.position,
                    (long long)fault.limit, tutti_device_name(device->number));
}

void tu_device_watch_add(tu_device_watch *watch) {
    tu_process_devices *devices = tu_process_devices_get();
    pthread_mutex_lock(&devices->lock);
    watch->next = devices->watches;
    devices->watches = watch;
    pthread_mutex_unlock(&devices->lock);
}

tu_device_watch *tu_device_watch_take(const tu_thread *thread, const void *owner, const void *about) {
    tu_process_devices *devices = tu_process_devices_get();
    pthread_mutex_lock(&devices->lock);
    tu_device_watch **link = &devices->watches, *found;
    while ((found = *link) != NULL &&
           ((thread != NULL && found->thread != thread) || (owner != NULL && found->owner != owner) ||
            (about != NULL && found->about != about)))
        link = &found->next;
    if (found != NULL)
        *link = found->next;
    pthread_mutex_unlock(&devices->lock);
    return found;
}

/* All are asked; the first error counts. */
static tutti_status ask_watches(void) {
    tutti_status status = TUTTI_OK;
    tutti_error_copy first;
    for (tu_device_watch *one; (one = tu_device_watch_take(tu_self(), NULL, NULL)) != NULL;) {
        tutti_status found = one->ask(one);
        if (found != TUTTI_OK && status == TUTTI_OK) {
            status = found;
            tu_error_save(&first);
        }
    }
    return status == TUTTI_OK ? TUTTI_OK : tu_error_restore(&first);
}

tutti_status tu_device_wait(const tu_device *device) {
    tutti_status status = device->table->synchronize(device->state, device->index, tu_device_stream(device));
    if (status == TUTTI_OK)
        status = ask_watches();
    return status == TUTTI_OK ? tell_fault(device) : status;
}

/* A stream that is captured cannot be waited for. The copy must not be noted either: each run of the graph would use
 * memory of the host that was good for this call alone. */
tutti_status tu_device_write(const tu_device *device, void *to, const void *from, size_t bytes) {
    if (tu_device_capturing(device))
        return tu_device_wait(device);
    tutti_status status = device->table->copy(device->state, device->index, tu_device_stream(device), to, from, bytes);
    return status == TUTTI_OK ? tu_device_wait(device) : status;
}

tutti_status tu_device_read(const tu_device *device, void *to, const void *from, size_t bytes) {
    return tu_device_write(device, to, from, bytes); /* the direction is in the addresses */
}

/* ---- kernels ---- */

/* Of the last sixteen characters, in which names differ, eight at a time; every call that has no kernel at hand looks
 * one up. */
static uint64_t hash_of(const char *name) {
    uint64_t words[2] = { 0, 0 };
    size_t length = strlen(name), last = length < 8 ? length : 8, before = length - last < 8 ? length - last : 8;
    memcpy(&words[0], name + length - last, last);
    memcpy(&words[1], name + length - last - before, before);
    uint64_t hash = (words[0] ^ words[1] * 0x9e3779b97f4a7c15u ^ length) * 0xff51afd7ed558ccdu;
    return hash ^ hash >> 32;
}

/* Looks the name up in the plug-in, and remembers it while there is room: a search ends at a free place. */
static tutti_status learn(tu_device *device, const char *name, size_t at, void **kernel) {
    pthread_mutex_t *lock = &tu_process_devices_get()->lock;
    tutti_status status = device->table->find(device->state, device->index, name, kernel);
    if (status != TUTTI_OK || *kernel == NULL)
        return status;
    char *copy = strdup(name);
    if (copy == NULL)
        return TUTTI_OK; /* it is looked up again next time */
    pthread_mutex_lock(lock);
    while (atomic_load_explicit(&device->named[at].name, memory_order_relaxed) != NULL &&
           strcmp(atomic_load_explicit(&device->named[at].name, memory_order_relaxed), name) != 0)
        at = (at + 1) % TU_DEVICE_NAMES;
    if (atomic_load_explicit(&device->named[at].name, memory_order_relaxed) == NULL &&
        device->names < TU_DEVICE_NAMES / 2) {
        device->names++;
        device->named[at].kernel = *kernel;
        atomic_store_explicit(&device->named[at].name, copy, memory_order_release); /* pairs with find_kernel */
        copy = NULL;
    }
    pthread_mutex_unlock(lock);
    free(copy);
    return TUTTI_OK;
}

static tutti_status find_kernel(tu_device *device, const char *name, void **kernel) {
    size_t at = hash_of(name) % TU_DEVICE_NAMES;
    for (;; at = (at + 1) % TU_DEVICE_NAMES) {
        const char *known = atomic_load_explicit(&device->named[at].name, memory_order_acquire); /* pairs with learn */
        if (known == NULL)
            break;
        if (strcmp(known, name) == 0) {
            *kernel = device->named[at].kernel;
            return TUTTI_OK;
        }
    }
    tutti_status status = learn(device, name, at, kernel);
    if (status == TUTTI_OK && *kernel == NULL)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "the plug-in of %s has no kernel %s: it is older than this library",
                          tutti_device_name(device->number), name);
    return status;
}

#define MOST_BLOCKS 65535 /* kernels go on with what is left */

static tutti_status launch_named(tu_device *device, void *stream, const char *name, int64_t blocks, unsigned threads,
                                 unsigned shared, const void *arguments) {
    void *kernel = NULL;
    if (blocks <= 0)
        return TUTTI_OK;
    if (blocks > INT32_MAX)
        return tu_error(TUTTI_ERROR_RANGE, "%s on %s would need %lld thread blocks", name,
                        tutti_device_name(device->number), (long long)blocks);
    tutti_status status = find_kernel(device, name, &kernel);
    return status == TUTTI_OK ? device->table->launch(device->state, device->index, stream, kernel, (unsigned)blocks,
                                                      threads, shared, arguments)
                              : status;
}

tutti_status tu_device_launch_on(tu_device *device, void *stream, const char *name, int64_t blocks, unsigned threads,
                                 const void *arguments) {
    return launch_named(device, stream, name, blocks, threads, 0, arguments);
}

tutti_status tu_device_launch_shared(tu_device *device, const char *name, int64_t blocks, unsigned threads,
                                     unsigned shared, const void *arguments) {
    return launch_named(device, tu_device_stream(device), name, blocks, threads, shared, arguments);
}

tutti_status tu_device_launch_blocks(tu_device *device, const char *name, int64_t blocks, unsigned threads,
                                     const void *arguments) {
    return tu_device_launch_on(device, tu_device_stream(device), name, blocks, threads, arguments);
}

static int64_t blocks_for(int64_t items, unsigned threads) {
    int64_t blocks = (items + threads - 1) / threads;
    return blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS;
}

tutti_status tu_device_launch(tu_device *device, const char *name, int64_t items, unsigned threads,
                              const void *arguments) {
    return tu_device_launch_blocks(device, name, blocks_for(items, threads), threads, arguments);
}

uint64_t tu_device_fault_place(const tu_device *device) {
    return tu_place_of(device->table->fault_place(device->state, device->index));
}

const char *tu_kernel_name_of(char buffer[TU_KERNEL_NAME], int count, const char *const *parts) {
    char *at = buffer, *end = buffer + TU_KERNEL_NAME - 1;
    for (int i = -1; i < count; i++) {
        const char *part = i < 0 ? "kernel" : parts[i];
        size_t length = strlen(part), room = (size_t)(end - at);
        if (i >= 0 && room > 0) {
            *at++ = '_';
            room--;
        }
        length = length < room ? length : room; /* what is cut off has no kernel, and the error says its name */
        memcpy(at, part, length);
        at += length;
    }
    *at = 0;
    return buffer;
}

const char *tu_kernel_name(char buffer[TU_KERNEL_NAME], const char *name, tutti_dtype dtype) {
    return tu_kernel_name_of(buffer, 2, (const char *const[]){ name, tutti_dtype_name(dtype) });
}

tutti_status tu_device_launch_rows(tu_device *device, const char *name, tutti_dtype dtype, const tu_launch_rows *rows) {
    enum {
        THREADS = 128
    };
    char full[TU_KERNEL_NAME];
    int64_t each = dtype == TUTTI_F64 ? 8 : 4; /* rows of a block: a team of 16 or 32 threads has one */
    return tu_device_launch_blocks(device, tu_kernel_name(full, name, dtype), (rows->count + each - 1) / each, THREADS,
                                   rows);
}

tutti_status tu_device_launch_held(tu_device *device, const char *name, tutti_dtype dtype, const tu_launch_rows *rows) {
    enum {
        THREADS = 128,
        EACH = 4 /* rows of a block */
    };
    char full[TU_KERNEL_NAME];
    static const char *const slots[] = { [8] = "held8", [16] = "held16", [24] = "held24", [32] = "held32" };
    int width = TU_HELD_WIDTH(tu_dtype_bytes[dtype]);
    bool norm = strcmp(name, "softmax") != 0, plain = rows->bias == 0 || rows->wide_weight == rows->wide_bias;
    if (dtype == TUTTI_F64 || rows->size > TU_HELD_MOST || rows->size % 256 != 0 ||
        (norm && (rows->weight == 0 || !plain)) ||
        ((rows->x | rows->other | rows->out | rows->weight | rows->bias) & (width > 1 ? 7 : 3)) != 0)
        return tu_device_launch_rows(device, name, dtype, rows);
    tu_kernel_name_of(full, 3, (const char *const[]){ name, slots[rows->size / 32], tutti_dtype_name(dtype) });
    return tu_device_launch_blocks(device, full, (rows->count + EACH - 1) / EACH, (unsigned)(THREADS / width), rows);
}

/* ---- loops ---- */

/* The loop as a kernel gets it. */
static tu_launch_loop flat_loop(const tu_loop *loop) {
    tu_launch_loop flat = { .total = 1, .ndim = loop->ndim, .operands = loop->operands };
    for (int dim = 0; dim < loop->ndim; dim++) {
        flat.sizes[dim] = loop->sizes[dim];
        flat.total *= loop->sizes[dim];
    }
    for (int k = 0; k < loop->operands; k++) {
        flat.at[k].data = tu_place_of(loop->at[k].data);
        flat.at[k].dtype = (int32_t)loop->at[k].dtype;
        memcpy(flat.at[k].strides, loop->at[k].strides, (size_t)loop->ndim * sizeof flat.at[k].strides[0]);
    }
    return flat;
}

static bool is_dense(const tu_launch_loop *loop, int operand) {
    return loop->ndim == 1 && loop->at[operand].strides[0] == 1;
}

/* The quick conversions between dense tensors; NULL: there is none. */
static const char *quick_conversion(tutti_dtype from, tutti_dtype to) {
    if (from == TUTTI_F32)
        return to == TUTTI_BF16 ? "kernel_convert_f32_bf16" : to == TUTTI_F16 ? "kernel_convert_f32_f16" : NULL;
    if (to == TUTTI_F32)
        return from == TUTTI_BF16 ? "kernel_convert_bf16_f32" : from == TUTTI_F16 ? "kernel_convert_f16_f32" : NULL;
    return NULL;
}

/* Elements of `size` bytes that are neighbours in both operands, as units of sixteen bytes, where all lie so. */
static size_t widen_elements(tu_launch_loop *flat, size_t size) {
    int last = flat->ndim - 1;
    int64_t each = (int64_t)(16 / size);
    bool fits = last >= 0 && flat->sizes[last] % each == 0 && ((flat->at[0].data | flat->at[1].data) & 15) == 0;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < flat->ndim && fits; i++)
            fits = i == last ? flat->at[k].strides[i] == 1 : flat->at[k].strides[i] % each == 0;
    if (!fits || size == 16)
        return size;
    flat->sizes[last] /= each;
    flat->total /= each;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < last; i++)
            flat->at[k].strides[i] /= each;
    return 16;
}

tutti_status tu_device_copy_on(tu_device *device, void *stream, const tt_tensor *to, const tt_tensor *x) {
    static const char *const moves[] = { [1] = "kernel_copy_1",
                                         [2] = "kernel_copy_2",
                                         [4] = "kernel_copy_4",
                                         [8] = "kernel_copy_8",
                                         [16] = "kernel_copy_16" };
    tu_loop loop;
    tt_tensor *in[] = { (tt_tensor *)x };
    if (to->numel == 0)
        return TUTTI_OK;
    tu_loop_init(&loop, to, 1, in);
    tu_launch_loop flat = flat_loop(&loop);
    bool same = to->dtype == x->dtype && x->dtype != TUTTI_BOOL, dense = is_dense(&flat, 0) && is_dense(&flat, 1);
    size_t size = tu_dtype_bytes[to->dtype];
    if (same && dense && flat.at[0].data == flat.at[1].data)
        return TUTTI_OK;
    if (same && dense)
        return device->table->copy(device->state, device->index, stream, loop.at[0].data, loop.at[1].data,
                                   (size_t)flat.total * size);
    const char *quick = !same && dense ? quick_conversion(x->dtype, to->dtype) : NULL;
    if (quick != NULL) /* a thread converts eight at once */
        return tu_device_launch_on(device, stream, quick, blocks_for((flat.total + 7) / 8, TU_DEVICE_THREADS),
                                   TU_DEVICE_THREADS, &flat);
    if (same)
        size = widen_elements(&flat, size);
    return tu_device_launch_on(device, stream, same ? moves[size] : "kernel_convert",
                               blocks_for(flat.total, TU_DEVICE_THREADS), TU_DEVICE_THREADS, &flat);
}

tutti_status tu_device_fill(const tt_tensor *x, double value) {
    tu_device *device = tu_device_of(x);
    tu_loop loop;
    if (x->numel == 0)
        return TUTTI_OK;
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (bits == 0 && x->flags & TU_CONTIGUOUS)
        return device->table->clear(device->state, device->index, tu_device_stream(device), tu_pointer(x),
                                    (size_t)x->numel * tu_dtype_bytes[x->dtype]);
    tu_loop_init(&loop, x, 0, NULL);
    tu_launch_loop flat = flat_loop(&loop);
    flat.operands = 2;
    flat.at[1] = (tu_launch_operand){ .data = bits, .dtype = TUTTI_F64, .literal = 1 };
    return tu_device_launch(device, "kernel_convert", flat.total, TU_DEVICE_THREADS, &flat);
}

/* ---- between host and device ---- */

/* x, dense, with its own shape and dtype, where it lies: x itself, held, or a copy. */
static tt_tensor *dense_of(const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return tu_tensor_hold((tt_tensor *)x);
    tu_shape shape = tu_shape_of(x);
    if (shape.device == 0)
        shape.device = TUTTI_CPU;
    if (tu_shape_contiguous("copy", &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *copy = tu_tensor_new(&shape);
    if (copy != NULL && tu_copy_tensor(copy, x) != TUTTI_OK) {
        tu_tensor_drop(copy);
        copy = NULL;
    }
    return copy;
}

/* A new dense tensor like x on another device. */
static tt_tensor *like_on(const tt_tensor *x, tutti_device device) {
    tu_shape shape = tu_shape_of(x);
    shape.device = device;
    return tu_shape_contiguous("copy", &shape) == TUTTI_OK ? tu_tensor_new(&shape) : NULL;
}

/* The bytes of one dense tensor into another of the same shape and dtype, of which one at least is on a device. */
static tutti_status move_bytes(const tt_tensor *to, const tt_tensor *x) {
    size_t bytes = (size_t)x->numel * tu_dtype_bytes[x->dtype];
    if (bytes == 0)
        return TUTTI_OK;
    if (!tu_on_device(to))
        return tu_device_read(tu_device_of(x), tu_pointer(to), tu_pointer(x), bytes);
    const tu_device *device = tu_device_of(to);
    if (tu_on_device(x)) { /* another device: what it computes must be there */
        tutti_status status = tu_device_wait(tu_device_of(x));
        return status == TUTTI_OK ? tu_device_write(device, tu_pointer(to), tu_pointer(x), bytes) : status;
    }
    return tu_device_write(device, tu_pointer(to), tu_pointer(x), bytes);
}

static bool alike(const tt_tensor *to, const tt_tensor *x) {
    return to->dtype == x->dtype && x->dtype != TUTTI_BOOL && tu_same_sizes(to, x) && to->flags & TU_CONTIGUOUS;
}

/* Dense at home, over as bytes, and there broadcast and converted into place. */
tutti_status tu_device_copy_tensor(const tt_tensor *to, const tt_tensor *x) {
    if (tu_on_device(to) && to->device == x->device)
        return tu_device_copy_on(tu_device_of(to), tu_device_stream(tu_device_of(to)), to, x);
    tt_tensor *dense = dense_of(x);
    if (dense == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status;
    if (alike(to, dense)) {
        status = move_bytes(to, dense);
    } else {
        tt_tensor *there = like_on(x, tu_on_device(to) ? (tutti_device)to->device : TUTTI_CPU);
        status = there != NULL ? move_bytes(there, dense) : TUTTI_ERROR_MEMORY;
        if (status == TUTTI_OK)
            status = tu_copy_tensor(to, there);
        tu_tensor_drop(there);
    }
    tu_tensor_drop(dense);
    return status;
}

tt_tensor *tu_on_host(const tt_tensor *x) {
    if (!tu_on_device(x))
        return tu_tensor_hold((tt_tensor *)x);
    tt_tensor *copy = like_on(x, TUTTI_CPU);
    if (copy != NULL && tu_device_copy_tensor(copy, x) != TUTTI_OK) {
        tu_tensor_drop(copy);
        copy = NULL;
    }
    return copy;
}

tutti_status tu_read_number(const tt_tensor *x, double *number) {
    char element[16];
    const void *at = tu_pointer(x);
    if (tu_on_device(x)) {
        tutti_status status = tu_device_read(tu_device_of(x), element, at, tu_dtype_bytes[x->dtype]);
        if (status != TUTTI_OK)
            return status;
        at = element;
    }
    return tutti_convert(at, x->dtype, number, TUTTI_F64, 1);
}

/* ---- pointwise operators ---- */

static int any_form(tutti_dtype compute) {
    return compute == TUTTI_F32    ? ANY_F32
           : compute == TUTTI_F64  ? ANY_F64
           : compute == TUTTI_U64  ? ANY_U64
           : compute == TUTTI_C128 ? ANY_C128
                                   : ANY_I64;
}

static int dense_form_of(tutti_dtype dtype) {
    return dtype == TUTTI_F32    ? DENSE_F32
           : dtype == TUTTI_F64  ? DENSE_F64
           : dtype == TUTTI_BF16 ? DENSE_BF16
           : dtype == TUTTI_F16  ? DENSE_F16
                                 : -1;
}

/* The form for dense operands of one type, or -1. */
static int dense_form(const tu_launch_loop *loop) {
    int32_t dtype = loop->at[0].dtype;
    int form = dense_form_of(dtype);
    if (loop->ndim != 1)
        return -1;
    for (int k = 0; k < loop->operands; k++) {
        const tu_launch_operand *operand = &loop->at[k];
        if (operand->literal)
            continue;
        bool repeated = operand->strides[0] == 0 && k > 0;
        if (operand->dtype != dtype || (operand->strides[0] != 1 && !repeated) ||
            (!repeated && operand->data % 16 != 0))
            return -1;
    }
    return form;
}

static tutti_status pointwise_kernel(tu_device *device, const tu_call *call, int form, void **kernel) {
    _Atomic(void *) *place = &device->pointwise[call->entry->pointwise * FORMS + form];
    *kernel = atomic_load_explicit(place, memory_order_relaxed);
    if (__builtin_expect(*kernel != NULL, 1))
        return TUTTI_OK;
    char name[TU_KERNEL_NAME];
    tu_kernel_name_of(name, 2, (const char *const[]){ call->entry->name, form_names[form] });
    tutti_status status = find_kernel(device, name, kernel);
    if (status == TUTTI_OK)
        atomic_store_explicit(place, *kernel, memory_order_relaxed);
    return status;
}

/* A number of the host, in the compute type; the imaginary part of a complex one is in the place of a stride. */
static tutti_status make_literal(tu_launch_operand *operand, const tt_tensor *x, tutti_dtype compute) {
    uint64_t bits[2] = { 0, 0 };
    tutti_status status = tutti_convert(tu_pointer(x), x->dtype, bits, compute, 1);
    *operand = (tu_launch_operand){ .data = bits[0], .dtype = (int32_t)compute, .literal = 1 };
    operand->strides[0] = (int64_t)bits[1];
    return status;
}

/* The attributes of a pointwise operator are numbers, in the order of its arguments. */
static void take_numbers(const tu_call *call, double *numbers) {
    int count = 0;
    for (int i = 0; i < call->entry->argument_count; i++) {
        const tu_argument *argument = &call->entry->arguments[i];
        if (argument->type == TT_ARGUMENT_DOUBLE && count < TU_LAUNCH_NUMBERS)
            numbers[count++] = *(const double *)((const char *)call->attributes + argument->offset);
    }
}

static bool lies_dense(const tt_tensor *x, const tt_tensor *out) {
    return x->flags & TU_CONTIGUOUS && x->numel == out->numel && x->dtype == out->dtype &&
           tu_place_of(tu_pointer(x)) % 16 == 0;
}

/* The usual call: dense tensors of one type and of one size, and numbers of the host. It is read off them, without a
 * loop in between, and what its kernel does not read is not set. Its form; -1: this is no such call. */
static int plain_call(const tu_call *call, tutti_dtype compute, tu_launch_dense *dense, tutti_status *status) {
    const tt_tensor *out = call->outputs[0];
    int form = lies_dense(out, out) ? dense_form_of(out->dtype) : -1;
    for (int i = 0; i < call->input_count && form >= 0; i++)
        if (tu_on_device(call->inputs[i]) && !lies_dense(call->inputs[i], out))
            form = -1;
    if (form < 0)
        return -1;
    dense->total = out->numel;
    dense->literals = dense->repeated = 0;
    dense->data[0] = tu_place_of(tu_pointer(out));
    for (int k = 1; k <= call->input_count && *status == TUTTI_OK; k++) {
        const tt_tensor *x = call->inputs[k - 1];
        tu_launch_operand literal;
        dense->data[k] = tu_place_of(tu_pointer(x));
        if (tu_on_device(x))
            continue;
        *status = make_literal(&literal, x, compute);
        dense->data[k] = literal.data;
        dense->literals |= 1u << k;
    }
    return form;
}

/* Any other: by a loop. The form, as above, and then `dense` has it too. */
static int looped_call(const tu_call *call, tutti_dtype compute, tu_launch_loop *flat, tu_launch_dense *dense,
                       tutti_status *status) {
    tu_loop loop;
    tu_loop_init(&loop, call->outputs[0], call->input_count, call->inputs);
    *flat = flat_loop(&loop);
    for (int i = 0; i < call->input_count && *status == TUTTI_OK; i++)
        if (!tu_on_device(call->inputs[i]))
            *status = make_literal(&flat->at[i + 1], call->inputs[i], compute);
    int form = dense_form(flat);
    dense->total = flat->total;
    dense->literals = dense->repeated = 0;
    for (int k = 0; k < flat->operands && form >= 0; k++) {
        dense->data[k] = flat->at[k].data;
        dense->literals |= (uint32_t)(flat->at[k].literal != 0) << k;
        dense->repeated |= (uint32_t)(flat->at[k].strides[0] == 0 && !flat->at[k].literal) << k;
    }
    return form;
}

tutti_status tu_pointwise_cuda(tu_call *call) {
    tutti_dtype compute = tu_pointwise_compute(call);
    const tt_tensor *out = call->outputs[0];
    tu_device *device = tu_device_of(out);
    tu_launch_loop flat;
    tu_launch_dense dense;
    tutti_status status = TUTTI_OK;
    void *kernel = NULL;
    if (out->numel == 0)
        return TUTTI_OK;
    int form = plain_call(call, compute, &dense, &status);
    if (form < 0)
        form = looped_call(call, compute, &flat, &dense, &status);
    take_numbers(call, form < 0 ? flat.numbers : dense.numbers);
    int64_t each = form < 0 ? 1 : 16 / tu_dtype_bytes[out->dtype];
    if (status == TUTTI_OK)
        status = pointwise_kernel(device, call, form < 0 ? any_form(compute) : form, &kernel);
    return status == TUTTI_OK
               ? device->table->launch(device->state, device->index, tu_device_stream(device), kernel,
                                       (unsigned)blocks_for(dense.total / each + each, TU_DEVICE_THREADS),
                                       TU_DEVICE_THREADS, 0, form < 0 ? (const void *)&flat : (const void *)&dense)
               : status;
}
