/* SPDX-License-Identifier: Apache-2.0
 *
 * The backends of a world: which are known, which are open, and which one has a device's memory.
 *
 * Backends are added to the world's list and never leave it before the world ends, so that it can be walked without a
 * lock. Opening and choosing happen under backend_lock.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "memory/tables.h"

/* ---- the list ---- */

static tu_backend_entry *first_entry(tu_memory_world *tables) {
    /* Pairs with the release in add. */
    return atomic_load_explicit(&tables->backends, memory_order_acquire);
}

static void add(tu_memory_world *tables, tu_backend_entry *entry) {
    entry->next = atomic_load_explicit(&tables->backends, memory_order_relaxed);
    atomic_store_explicit(&tables->backends, entry, memory_order_release); /* pairs with first_entry */
}

/* The entry of that name, found and loaded where it is not known yet. The caller holds backend_lock. */
static tutti_status find(tu_memory_world *tables, const char *name, tu_backend_entry **result) {
    for (tu_backend_entry *entry = first_entry(tables); entry != NULL; entry = entry->next) {
        if (strcmp(entry->table.name, name) == 0) {
            *result = entry;
            return TUTTI_OK;
        }
    }
    if (strcmp(name, tu_backend_shm.name) == 0)
        *result = tu_backend_adopt(&tu_backend_shm);
    else if (tu_backend_load(tables->world, name, result) != TUTTI_OK)
        return TUTTI_ERROR_NOT_FOUND;
    if (*result == NULL)
        return tu_error_memory("a backend's table", sizeof **result);
    add(tables, *result);
    return TUTTI_OK;
}

static bool is_open(const tu_backend_entry *entry) {
    return atomic_load_explicit(&entry->opened, memory_order_acquire); /* pairs with the release in open_entry */
}

/* For tutti_group_check. */
static tutti_status check_devices(tutti_group *group) {
    tu_memory_world *tables;
    tutti_status status = tu_memory_world_get(group->world, &tables);
    if (status != TUTTI_OK)
        return status;
    for (tu_backend_entry *entry = first_entry(tables); status == TUTTI_OK && entry != NULL; entry = entry->next) {
        if (is_open(entry) && entry->table.check != NULL)
            status = entry->table.check(entry->state, group);
    }
    return status;
}

/* The caller holds backend_lock. */
static tutti_status open_entry(tu_memory_world *tables, tu_backend_entry *entry) {
    if (is_open(entry))
        return TUTTI_OK;
    const tu_backend *table = &entry->table;
    int devices = 0;
    tutti_status status = table->probe(&tu_backend_host_table, &devices);
    if (status == TUTTI_OK && devices == 0)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s finds no device", table->name);
    if (status == TUTTI_OK)
        status = table->open(&tu_backend_host_table, tables->world, &entry->state);
    if (status != TUTTI_OK)
        return status;
    atomic_store_explicit(&entry->opened, true, memory_order_release); /* pairs with is_open */
    if (table->check != NULL)
        atomic_store_explicit(&tables->world->devices, check_devices, memory_order_release);
    return TUTTI_OK;
}

void tu_backends_forget(tu_memory_world *tables, tutti_group *group) {
    for (tu_backend_entry *entry = first_entry(tables); entry != NULL; entry = entry->next) {
        if (is_open(entry) && entry->table.forget != NULL)
            entry->table.forget(entry->state, group);
    }
}

void tu_backends_end(tu_memory_world *tables) {
    tu_backend_entry *entry = first_entry(tables);
    while (entry != NULL) {
        tu_backend_entry *next = entry->next;
        if (is_open(entry))
            entry->table.close(entry->state);
        free(entry);
        entry = next;
    }
}

/* ---- choosing ---- */

tutti_status tu_backend_device(tutti_device device, tutti_device *kind) {
    tutti_device found = device == 0 ? TUTTI_CPU : tutti_device_kind(device);
    if (found != TUTTI_CPU && found != TUTTI_CUDA)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "symmetric memory does not support device type %s (%d)",
                        tutti_device_name(device), device);
    if (kind != NULL)
        *kind = found;
    return TUTTI_OK;
}

/* Where the choice for a device is kept. */
static tu_backend_entry **choice_of(tu_memory_world *tables, tutti_device kind) {
    return kind == TUTTI_CPU ? &tables->cpu_backend : &tables->cuda_backend;
}

/* The backend that has the device's memory: the chosen one, or the default. The caller holds backend_lock. */
static tutti_status choose(tu_memory_world *tables, tutti_device device, tu_backend_entry **entry) {
    tu_backend_entry **choice = choice_of(tables, device);
    tutti_status status = TUTTI_OK;
    if (*choice == NULL)
        status = find(tables, device == TUTTI_CPU ? "shm" : "cuda", choice);
    *entry = *choice;
    return status;
}

/* What all calls here begin with: the tables of the world, locked. */
static tutti_status begin(tutti_world *world, tu_memory_world **tables) {
    tutti_status status = tu_memory_world_get(world, tables);
    if (status == TUTTI_OK)
        pthread_mutex_lock(&(*tables)->backend_lock);
    return status;
}

tutti_status tu_backend_find(tutti_world *world, const char *name, const tu_backend **backend) {
    tu_memory_world *tables;
    tu_backend_entry *entry;
    tutti_status status = begin(world, &tables);
    if (status != TUTTI_OK)
        return status;
    status = find(tables, name, &entry);
    pthread_mutex_unlock(&tables->backend_lock);
    if (status == TUTTI_OK)
        *backend = &entry->table;
    return status;
}

static tutti_status give(tutti_status status, const tu_backend_entry *entry, const tu_backend **backend, void **state) {
    if (status == TUTTI_OK) {
        *backend = &entry->table;
        *state = entry->state;
    }
    return status;
}

tutti_status tu_backend_open(tutti_world *world, const char *name, const tu_backend **backend, void **state) {
    tu_memory_world *tables;
    tu_backend_entry *entry = NULL;
    tutti_status status = begin(world, &tables);
    if (status != TUTTI_OK)
        return status;
    status = find(tables, name, &entry);
    if (status == TUTTI_OK)
        status = open_entry(tables, entry);
    pthread_mutex_unlock(&tables->backend_lock);
    return give(status, entry, backend, state);
}

tutti_status tu_backend_get(tutti_world *world, tutti_device device, const tu_backend **backend, void **state) {
    tu_memory_world *tables;
    tu_backend_entry *entry = NULL;
    tutti_status status = tu_backend_device(device, &device);
    if (status == TUTTI_OK)
        status = begin(world, &tables);
    if (status != TUTTI_OK)
        return status;
    status = choose(tables, device, &entry);
    if (status == TUTTI_OK)
        status = open_entry(tables, entry);
    pthread_mutex_unlock(&tables->backend_lock);
    return give(status, entry, backend, state);
}

tutti_status tutti_memory_backend(tutti_world *world, tutti_device device, const char **name) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_backend needs a place for its result");
    tu_memory_world *tables;
    tu_backend_entry *entry;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_backend_device(device, &device);
    if (status == TUTTI_OK)
        status = begin(world, &tables);
    if (status != TUTTI_OK)
        return status;
    status = choose(tables, device, &entry);
    pthread_mutex_unlock(&tables->backend_lock);
    if (status == TUTTI_OK)
        *name = entry->table.name;
    return status;
}

/* The caller holds backend_lock. */
static tutti_status set_backend(tu_memory_world *tables, tutti_device device, const char *name) {
    tu_backend_entry **choice = choice_of(tables, device), *found;
    tutti_status status = find(tables, name, &found);
    if (status != TUTTI_OK)
        return status;
    if (found->table.device != device)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s does not support device type %s", name,
                        tutti_device_name(device));
    if (found->table.memory == NULL || found->table.remote == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s has no memory of its own to allocate", name);
    if (*choice != NULL && is_open(*choice) && found != *choice)
        return tu_error(TUTTI_ERROR_STATE, "the backend of device %s can not be changed after use: it is %s",
                        tutti_device_name(device), (*choice)->table.name);
    *choice = found;
    return TUTTI_OK;
}

tutti_status tutti_memory_set_backend(tutti_world *world, tutti_device device, const char *name) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_set_backend needs a name");
    tu_memory_world *tables;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_backend_device(device, &device);
    if (status == TUTTI_OK)
        status = begin(world, &tables);
    if (status != TUTTI_OK)
        return status;
    status = set_backend(tables, device, name);
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}
