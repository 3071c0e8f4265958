/* SPDX-License-Identifier: Apache-2.0
 *
 * GPUs of NVIDIA, by CUDA C: one text for all nests of a device, which the device's plug-in compiles in this process
 * and loads. Images are kept in the folder of the cache like everything that is built: named by the hash of the text,
 * of the compiler with its version and options, and of what it builds for. Of several ranks one builds, the others
 * wait.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "loops/build.h"
#include "loops/cache.h"
#include "loops/emit.h"
#include "loops/hash.h"
#include "loops/target.h"
#include "tensor/on_device.h"
#include "tensor/process.h"

/* What runs a nest. */
typedef struct loop {
    tu_device *device;
    void *kernel, *second;
    tu_emitted emitted;
} loop;

/* The nests of one device, or of a program without those of other devices. */
typedef struct loaded {
    struct loaded *next;
    tu_device *device;
    void *module;
    int count;
    loop loops[];
} loaded;

static void warn(tu_warning warning, const char *what, const char *reason) {
    if (tu_process_tell_once(warning))
        TU_LOG(TUTTI_LOG_WARN, NULL, "loops", "%s: %s", what, reason);
}

/* ---- images ---- */

typedef struct image {
    const tu_device *device;
    const char *text;
    tu_cache cache;
    bool cached; /* there is a folder */
    char name[TU_HASH_TEXT + 8];
    int lock;
    void *data; /* to be freed */
    size_t bytes;
} image;

static tutti_status name_image(image *own) {
    char compiler[512], hash_text[TU_HASH_TEXT];
    tutti_status status =
        own->device->table->compiler(own->device->state, own->device->index, compiler, sizeof compiler);
    if (status != TUTTI_OK)
        return status;
    tu_hash key = tu_hash_begin();
    tu_hash_add(&key, compiler, strlen(compiler) + 1);
    tu_hash_add(&key, own->text, strlen(own->text));
    tu_hash_text(&key, hash_text);
    snprintf(own->name, sizeof own->name, "%s.cubin", hash_text);
    return TUTTI_OK;
}

/* From the cache, or the right to build it; where another builds, it is waited for as long as a build may take. */
static void look_for(image *own, int64_t milliseconds) {
    int64_t deadline = tu_build_clock() + milliseconds;
    own->data = tu_cache_read(&own->cache, own->name, &own->bytes);
    while (own->data == NULL) {
        own->lock = tu_cache_lock(&own->cache, own->name);
        own->data = tu_cache_read(&own->cache, own->name, &own->bytes); /* also finished between the two looks */
        if (own->data != NULL || own->lock != TU_CACHE_TAKEN || tu_build_clock() >= deadline)
            return;
        poll(NULL, 0, 5);
    }
}

/* What cannot be kept is built all the same, in every process again. */
static void keep(const image *own, int64_t cache_bytes) {
    char reason[600] = "";
    if (tu_cache_store(&own->cache, own->name, own->data, own->bytes, reason, sizeof reason))
        tu_cache_trim(&own->cache, cache_bytes);
    else
        warn(TU_WARN_NO_CACHE, "loops for GPUs are built, and not kept for other processes", reason);
}

static tutti_status get_image(image *own) {
    char reason[600] = "";
    tu_build_limits limits = tu_build_limits_get();
    tutti_status status = TUTTI_OK;
    own->lock = TU_CACHE_NONE;
    own->cached = tu_cache_open(&own->cache, reason, sizeof reason);
    if (own->cached)
        look_for(own, limits.milliseconds);
    else
        warn(TU_WARN_NO_CACHE, "loops for GPUs are built, and not kept for other processes", reason);
    if (own->data == NULL) {
        status =
            own->device->table->compile(own->device->state, own->device->index, own->text, &own->data, &own->bytes);
        if (status == TUTTI_OK && own->cached)
            keep(own, limits.cache_bytes);
    }
    tu_cache_unlock(own->lock);
    if (own->cached)
        tu_cache_close(&own->cache);
    return status;
}

/* ---- loading ---- */

static tutti_status find_kernels(loaded *made) {
    const tu_device_tensors *table = made->device->table;
    tutti_status status = TUTTI_OK;
    char name[64];
    for (int i = 0; i < made->count && status == TUTTI_OK; i++) {
        loop *own = &made->loops[i];
        own->device = made->device;
        tu_emit_cuda_name(name, sizeof name, own->emitted.kernel, false);
        status = table->module_find(made->device->state, made->device->index, made->module, name, &own->kernel);
        tu_emit_cuda_name(name, sizeof name, own->emitted.kernel, true);
        if (status == TUTTI_OK && own->emitted.more_blocks > 0)
            status = table->module_find(made->device->state, made->device->index, made->module, name, &own->second);
    }
    return status;
}

static tutti_status load(loaded *made, const char *text) {
    const tu_device_tensors *table = made->device->table;
    if (table->size < offsetof(tu_device_tensors, module_find) + sizeof table->module_find || table->compile == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "the plug-in of %s has no compiler",
                        tutti_device_name(made->device->number));
    image own = { .device = made->device, .text = text };
    tutti_status status = name_image(&own);
    if (status == TUTTI_OK) /* this process may have it already */
        status = table->module(made->device->state, made->device->index, own.name, NULL, &made->module);
    if (status == TUTTI_OK && made->module == NULL) {
        status = get_image(&own);
        if (status == TUTTI_OK)
            status = table->module(made->device->state, made->device->index, own.name, own.data, &made->module);
        free(own.data);
    }
    return status == TUTTI_OK ? find_kernels(made) : status;
}

/* ---- the table's functions ---- */

/* Those of one device that can be written, and their text. */
static tutti_status write_text(tu_nest *const *nests, int nest_count, tu_emitted *emitted, FILE *copy, char **text) {
    size_t bytes = 0;
    FILE *to = open_memstream(text, &bytes);
    if (to == NULL)
        return tu_error_memory("the text of loops", 1);
    tu_emit_cuda(to, nests, nest_count, emitted);
    if (fclose(to) != 0 || *text == NULL)
        return tu_error_memory("the text of loops", bytes);
    if (copy != NULL)
        fputs(*text, copy);
    return TUTTI_OK;
}

/* *made is NULL where there is no code, which a warning tells. */
static tutti_status make_for(tutti_device device, tu_nest *const *nests, int nest_count, FILE *copy, loaded **made) {
    char *text = NULL;
    tu_emitted *emitted = calloc((size_t)nest_count, sizeof *emitted);
    loaded *code = *made = calloc(1, sizeof *code + (size_t)nest_count * sizeof *code->loops);
    tutti_status status = emitted == NULL || code == NULL
                              ? tu_error_memory("the code of loops", (size_t)nest_count * sizeof *code->loops)
                              : tu_device_get(device, &code->device);
    if (status == TUTTI_OK)
        status = write_text(nests, nest_count, emitted, copy, &text);
    if (status == TUTTI_OK) {
        code->count = nest_count;
        for (int i = 0; i < nest_count; i++)
            code->loops[i].emitted = emitted[i];
        if (load(code, text) != TUTTI_OK) {
            warn(TU_WARN_NO_KERNELS,
                 "loops are not compiled for the GPU: their operators run one after the other, which is slower",
                 tutti_error_message());
            free(code);
            *made = code = NULL;
        }
    }
    for (int i = 0; status == TUTTI_OK && code != NULL && i < nest_count; i++)
        nests[i]->loop = &code->loops[i];
    if (status != TUTTI_OK) {
        free(code);
        *made = NULL;
    }
    if (*made != NULL)
        tu_devices_hold();
    free(emitted);
    free(text);
    return status;
}

static tutti_status make(tu_nest *const *nests, int nest_count, FILE *copy, void **made) {
    tutti_status status = TUTTI_OK;
    tu_nest **own = calloc((size_t)nest_count, sizeof *own);
    if (own == NULL)
        return tu_error_memory("the code of loops", (size_t)nest_count * sizeof *own);
    for (int first = 0; first < nest_count && status == TUTTI_OK; first++) {
        int count = 0;
        bool done = false;
        for (int i = 0; i < first; i++)
            done = done || nests[i]->device == nests[first]->device;
        for (int i = first; i < nest_count && !done; i++)
            if (nests[i]->device == nests[first]->device && tu_emit_cuda_knows(nests[i]))
                own[count++] = nests[i];
        loaded *code = NULL;
        if (count > 0)
            status = make_for(nests[first]->device, own, count, copy, &code);
        if (code != NULL) {
            code->next = *made;
            *made = code;
        }
    }
    free(own);
    return status;
}

static void end(void *made) {
    for (loaded *code = made, *next; code != NULL; code = next) {
        next = code->next;
        tu_devices_drop();
        free(code);
    }
}

static bool has_code(const tu_nest *nest) {
    return nest->loop != NULL;
}

static tutti_status run(const tu_nest *nest, tt_tensor *const *tensors) {
    const loop *own = nest->loop;
    const tu_device_tensors *table = own->device->table;
    void *state = own->device->state, *stream = tu_device_stream(own->device);
    int index = own->device->index;
    void *places[TU_NEST_TENSORS + 1] = { NULL };
    tu_device_block scratch = { NULL };
    for (int i = 0; i < nest->tensor_count; i++) {
        tu_device_note_use(own->device, tensors[i]->storage, stream);
        places[i] = tu_pointer(tensors[i]);
    }
    tutti_status status =
        own->emitted.scratch > 0 ? table->allocate(state, index, stream, own->emitted.scratch, &scratch) : TUTTI_OK;
    places[nest->tensor_count] = scratch.data;
    if (status == TUTTI_OK)
        status =
            table->launch(state, index, stream, own->kernel, (unsigned)own->emitted.blocks, TU_EMIT_THREADS, 0, places);
    if (status == TUTTI_OK && own->second != NULL)
        status = table->launch(state, index, stream, own->second, (unsigned)own->emitted.more_blocks, TU_EMIT_THREADS,
                               0, places);
    if (scratch.handle != NULL)
        table->release(state, index, &scratch);
    return status;
}

const tu_target tu_target_cuda = {
    .ending = "cu", .runs_without_code = false, .make = make, .end = end, .has_code = has_code, .run = run
};
