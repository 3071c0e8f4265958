/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric blocks: allocating, finding and releasing them. All of it is local to the rank.
 *
 * A block's memory is one piece: the data, then, at the next multiple of 128, the signal pad. It has users (references
 * of the program) and references (one for all users together, one per peers handle): without users it cannot be found
 * any more, without references its memory goes.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "memory/tables.h"

#define PAD_ALIGNMENT 128
#define DEFAULT_ALIGNMENT 128
#define MAX_ALIGNMENT ((size_t)2 << 20)

tutti_status tu_memory_options_check(const tutti_memory_options *options) {
    tutti_status status = tu_backend_device(options->device, NULL);
    if (status != TUTTI_OK)
        return status;
    if (options->alignment != 0 &&
        ((options->alignment & (options->alignment - 1)) != 0 || options->alignment > MAX_ALIGNMENT))
        return tu_error(TUTTI_ERROR_ARGUMENT, "an alignment must be a power of two up to %zu, not %zu", MAX_ALIGNMENT,
                        options->alignment);
    if (options->signal_pad_bytes % 4 != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a signal pad is made of 32-bit words: %zu bytes are no multiple of 4",
                        options->signal_pad_bytes);
    if (options->huge_pages != 0 && options->huge_pages != TUTTI_NO && options->huge_pages != TUTTI_YES)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_memory_options.huge_pages must be TUTTI_YES, TUTTI_NO or 0 (when they help), not %d",
                        (int)options->huge_pages);
    return TUTTI_OK;
}

static tutti_status choose_huge_pages(const tutti_world *world, tutti_choice option, int *huge) {
    const char *setting = tu_settings_text(&world->settings, TU_SETTING_HUGE_PAGES);
    *huge = option != 0 ? option == TUTTI_YES : strcmp(setting, "yes") == 0 ? 1 : strcmp(setting, "no") == 0 ? 0 : -1;
    if (*huge == -1 && setting[0] != 0 && strcmp(setting, "auto") != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_HUGE_PAGES is \"%s\"; it must be auto, yes or no", setting);
    return TUTTI_OK;
}

/* Makes a block that nobody can find yet, with one reference and no user. */
tutti_status tu_memory_create(tu_memory_world *tables, size_t bytes, const tutti_memory_options *options,
                              tutti_memory **result) {
    size_t pad_bytes =
        options->signal_pad_bytes != 0 ? options->signal_pad_bytes : tutti_memory_signal_pad_bytes(tables->world);
    if (pad_bytes == 0 || pad_bytes % 4 != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "TUTTI_SIGNAL_PAD is %zu: a signal pad has a multiple of 4 bytes, and some", pad_bytes);
    if (bytes > SIZE_MAX / 4 || pad_bytes > SIZE_MAX / 4)
        return tu_error(TUTTI_ERROR_MEMORY, "no machine has %zu bytes for a block and %zu for its signal pad", bytes,
                        pad_bytes);
    int huge;
    tutti_status status = choose_huge_pages(tables->world, options->huge_pages, &huge);
    if (status != TUTTI_OK)
        return status;
    tutti_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return tu_error_memory("a block", sizeof *memory);
    status = tu_backend_device(options->device, &memory->device);
    if (status == TUTTI_OK)
        status = tu_backend_get(tables->world, memory->device, &memory->backend, &memory->backend_state);
    if (status != TUTTI_OK)
        goto free_memory;
    memory->world = tables->world;
    memory->tables = tables;
    memory->bytes = bytes;
    memory->pad_bytes = pad_bytes;
    memory->pad_offset = tu_round_up(bytes == 0 ? 1 : bytes, PAD_ALIGNMENT);
    memory->alignment = options->alignment < DEFAULT_ALIGNMENT ? DEFAULT_ALIGNMENT : options->alignment;
    memory->persistent = options->persistent;
    memory->persistent_id = options->persistent_id;
    tu_backend_request request = {
        .bytes = memory->pad_offset + pad_bytes,
        .alignment = memory->alignment,
        .device_index = tutti_device_index(options->device),
        .huge_pages = huge,
        .what = "a block",
        .stream = options->stream,
    };
    status = memory->backend->memory->allocate(memory->backend_state, &request, &memory->block);
    if (status != TUTTI_OK)
        goto free_memory;
    atomic_init(&memory->references, 1);
    pthread_mutex_lock(&tables->lock);
    memory->serial = ++tables->serial;
    pthread_mutex_unlock(&tables->lock);
    *result = memory;
    return TUTTI_OK;

free_memory:
    free(memory);
    return status;
}

tutti_status tu_memory_list(tutti_memory *memory, tutti_group *group) {
    tu_memory_world *tables = memory->tables;
    pthread_mutex_lock(&tables->lock);
    tutti_status status = tu_order_insert(&tables->blocks, (uintptr_t)memory->block.address, memory);
    if (status == TUTTI_OK) {
        atomic_store_explicit(&memory->users, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&tables->generation, 1, memory_order_release); /* pairs with tu_symmetric_find */
    }
    pthread_mutex_unlock(&tables->lock);
    if (status != TUTTI_OK)
        return status;
    memory->group = group == NULL ? NULL : tutti_group_keep(group);
    tu_world_handle(memory->world, "memory", 1);
    return TUTTI_OK;
}

/* An id that is known keeps its memory, whatever the other options say now; only the default group is the new one. */
static tutti_status persistent_again(tutti_memory *memory, size_t bytes, tutti_group *group) {
    if (atomic_load_explicit(&memory->users, memory_order_acquire) != 0)
        return tu_error(TUTTI_ERROR_STATE,
                        "the memory of persistent id %llu is still active: release it before allocating it again",
                        (unsigned long long)memory->persistent_id);
    if (memory->bytes != bytes)
        return tu_error(TUTTI_ERROR_ARGUMENT, "persistent id %llu has %zu bytes; %zu were asked for",
                        (unsigned long long)memory->persistent_id, memory->bytes, bytes);
    return tu_memory_list(memory, group);
}

static tutti_status persistent_first(tu_memory_world *tables, size_t bytes, const tutti_memory_options *options,
                                     tutti_memory **memory) {
    tutti_status status = tu_memory_create(tables, bytes, options, memory);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&tables->lock);
    status = tu_order_insert(&tables->persistent, options->persistent_id, *memory);
    pthread_mutex_unlock(&tables->lock);
    if (status != TUTTI_OK) {
        tu_memory_drop(*memory);
        return status;
    }
    return tu_memory_list(*memory, options->group); /* failing, it stays known, unused */
}

static tutti_status persistent_alloc(tu_memory_world *tables, size_t bytes, const tutti_memory_options *options,
                                     tutti_memory **memory) {
    pthread_mutex_lock(&tables->persistent_lock);
    pthread_mutex_lock(&tables->lock);
    *memory = tu_order_get(&tables->persistent, options->persistent_id);
    pthread_mutex_unlock(&tables->lock);
    tutti_status status = *memory != NULL ? persistent_again(*memory, bytes, options->group)
                                          : persistent_first(tables, bytes, options, memory);
    pthread_mutex_unlock(&tables->persistent_lock);
    return status;
}

tutti_status tutti_memory_alloc(tutti_world *world, size_t bytes, const tutti_memory_options *options,
                                tutti_memory **memory) {
    if (world == NULL || memory == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_alloc needs a world and a place for its result");
    tutti_memory_options full = TUTTI_MEMORY_OPTIONS_INIT;
    tu_memory_world *tables;
    tutti_memory *made;
    tutti_status status = tu_options_copy("tutti_memory_options", options, &full, sizeof full);
    if (status == TUTTI_OK)
        status = tu_memory_options_check(&full);
    if (status == TUTTI_OK && full.group != NULL && tutti_group_world(full.group) != world)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "the default group %s belongs to another world",
                          tutti_group_name(full.group));
    TU_INSIDE(world);
    if (status == TUTTI_OK)
        status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_memory_world_get(world, &tables);
    if (status != TUTTI_OK)
        return status;
    if (full.persistent) {
        status = persistent_alloc(tables, bytes, &full, &made);
    } else {
        status = tu_memory_create(tables, bytes, &full, &made);
        if (status == TUTTI_OK) {
            status = tu_memory_list(made, full.group);
            if (status != TUTTI_OK)
                tu_memory_drop(made);
        }
    }
    if (status == TUTTI_OK)
        *memory = made;
    return status;
}

tutti_memory *tutti_memory_keep(tutti_memory *memory) {
    if (memory != NULL)
        atomic_fetch_add_explicit(&memory->users, 1, memory_order_relaxed);
    return memory;
}

void tu_memory_forget_peers(tutti_memory *memory) {
    tutti_peers *doomed = NULL;
    pthread_mutex_lock(&memory->tables->lock);
    for (tutti_peers *peers = memory->first_peers, *next; peers != NULL; peers = next) {
        next = peers->next_of_memory;
        tu_peers_unlink(peers, &doomed);
    }
    atomic_fetch_add_explicit(&memory->tables->generation, 1, memory_order_release); /* pairs with tu_symmetric_find */
    pthread_mutex_unlock(&memory->tables->lock);
    tu_peers_free(doomed);
}

void tu_memory_drop(tutti_memory *memory) {
    if (atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1)
        return;
    memory->backend->memory->free(memory->backend_state, &memory->block);
    free(memory);
}

void tutti_memory_release(tutti_memory *memory) {
    if (memory == NULL || tu_world_forked(memory->world))
        return;
    tutti_world *world = memory->world;
    tu_memory_world *tables = memory->tables;
    if (atomic_fetch_sub_explicit(&memory->users, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_lock(&tables->lock);
    tu_order_remove(&tables->blocks, (uintptr_t)memory->block.address);
    atomic_fetch_add_explicit(&tables->generation, 1, memory_order_release); /* pairs with tu_symmetric_find */
    pthread_mutex_unlock(&tables->lock);
    tutti_group *group = memory->group;
    tutti_pool *pool = memory->pool;
    memory->group = NULL;
    if (!memory->persistent && !(pool != NULL && tu_pool_take_back(pool, memory))) {
        tu_memory_forget_peers(memory);
        tu_memory_drop(memory);
    }
    if (pool != NULL)
        tu_pool_drop(pool);
    if (group != NULL)
        tutti_group_release(group);
    tu_world_handle(world, "memory", -1); /* last: the world may go with it */
}

bool tu_memory_can(const tutti_memory *memory, tu_ability ability) {
    return memory->backend->can != NULL && memory->backend->can(memory->backend_state, ability);
}

void *tutti_memory_data(const tutti_memory *memory) {
    return memory->block.address;
}

size_t tutti_memory_bytes(const tutti_memory *memory) {
    return memory->bytes;
}

void *tutti_memory_signal_pad(const tutti_memory *memory) {
    return (char *)memory->block.address + memory->pad_offset;
}

size_t tutti_memory_pad_bytes(const tutti_memory *memory) {
    return memory->pad_bytes;
}

tutti_device tutti_memory_device(const tutti_memory *memory) {
    return memory->device == TUTTI_CPU ? TUTTI_CPU : tutti_device_at(memory->device, memory->block.device_index);
}

tutti_memory *tutti_memory_find(tutti_world *world, const void *pointer) {
    tu_memory_world *tables;
    if (world == NULL || pointer == NULL || tu_memory_world_get(world, &tables) != TUTTI_OK)
        return NULL;
    pthread_mutex_lock(&tables->lock);
    tutti_memory *memory = tu_order_floor(&tables->blocks, (uintptr_t)pointer);
    pthread_mutex_unlock(&tables->lock);
    if (memory == NULL)
        return NULL;
    size_t offset = (size_t)((uintptr_t)pointer - (uintptr_t)memory->block.address);
    return offset < (memory->bytes == 0 ? 1 : memory->bytes) ? memory : NULL;
}

size_t tutti_memory_signal_pad_bytes(const tutti_world *world) {
    tu_memory_world *tables;
    bool known = tu_memory_world_get((tutti_world *)world, &tables) == TUTTI_OK;
    size_t bytes = known ? atomic_load_explicit(&tables->pad_bytes, memory_order_relaxed) : 0;
    return bytes != 0 ? bytes : (size_t)tu_settings_number(&world->settings, TU_SETTING_SIGNAL_PAD);
}

tutti_status tutti_memory_set_signal_pad_bytes(tutti_world *world, size_t bytes) {
    if (world == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_set_signal_pad_bytes needs a world");
    if (bytes % 4 != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a signal pad is made of 32-bit words: %zu bytes are no multiple of 4",
                        bytes);
    tu_memory_world *tables;
    tutti_status status = tu_memory_world_get(world, &tables);
    if (status == TUTTI_OK)
        atomic_store_explicit(&tables->pad_bytes, bytes, memory_order_relaxed);
    return status;
}

bool tutti_memory_has_multicast_support(tutti_world *world, tutti_device device) {
    if (world == NULL || device == TUTTI_CPU || device == 0)
        return false;
    tutti_error_copy before;
    tu_error_save(&before);
    const tu_backend *backend;
    void *state;
    bool has = tu_backend_get(world, device, &backend, &state) == TUTTI_OK && backend->memory->has_multicast != NULL &&
               backend->memory->has_multicast(state, tutti_device_index(device));
    (void)tu_error_restore(&before); /* a question is no error */
    return has;
}
