/* SPDX-License-Identifier: Apache-2.0
 *
 * The backends of a world: which are known, which are open, and which one has a device's memory.
 *
 * Backends are added to the world's list and never leave it before the world ends, so that it can be walked without a
 * lock. Opening and choosing happen under backend_lock.
 */
#include <dlfcn.h>
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
    return atomic_load_explicit(&entry->opened, memory_order_acquire); /* pairs with the release in set_open */
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

/* From now on it is used. The caller holds backend_lock. */
static void set_open(tu_memory_world *tables, tu_backend_entry *entry) {
    atomic_store_explicit(&entry->opened, true, memory_order_release); /* pairs with is_open */
    if (entry->table.check != NULL)
        atomic_store_explicit(&tables->world->devices, check_devices, memory_order_release);
}

/* This rank's part of opening. The caller holds backend_lock. */
static tutti_status begin_entry(tu_memory_world *tables, tu_backend_entry *entry) {
    if (entry->begun)
        return TUTTI_OK;
    const tu_backend *table = &entry->table;
    int devices = 0;
    tutti_status status = table->probe(&tu_backend_host_table, &devices);
    if (status == TUTTI_OK && devices == 0)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s finds no device", table->name);
    if (status == TUTTI_OK)
        status = table->open(&tu_backend_host_table, tables->world, &entry->state);
    entry->begun = status == TUTTI_OK;
    if (entry->begun && table->join == NULL)
        set_open(tables, entry);
    return status;
}

/* The caller holds backend_lock. */
static tutti_status open_entry(tu_memory_world *tables, tu_backend_entry *entry) {
    if (is_open(entry))
        return TUTTI_OK;
    if (entry->table.join != NULL)
        return tu_error(TUTTI_ERROR_STATE,
                        "backend %s is opened by all ranks together: call tutti_backend_open(world, \"%s\", NULL) on "
                        "every rank first",
                        entry->table.name, entry->table.name);
    return begin_entry(tables, entry);
}

tutti_status tu_backend_begin(tu_memory_world *tables, const char *name, tu_backend_entry **entry, bool *opened) {
    pthread_mutex_lock(&tables->backend_lock);
    tutti_status status = find(tables, name, entry);
    if (status == TUTTI_OK)
        status = begin_entry(tables, *entry);
    *opened = status == TUTTI_OK && is_open(*entry);
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}

void tu_backend_opens(tu_memory_world *tables, tu_backend_entry *entry) {
    pthread_mutex_lock(&tables->backend_lock);
    set_open(tables, entry);
    pthread_mutex_unlock(&tables->backend_lock);
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
        if (entry->begun)
            entry->table.close(entry->state);
        free(entry);
        entry = next;
    }
}

/* ---- choosing ---- */

/* The kinds of devices that symmetric memory has, the backend that serves each unless another is chosen, and the
 * library whose presence in the process says that the program uses such a device. */
static const struct kind {
    tutti_device device;
    const char *backend;
    const char *library; /* NULL: there is none to look for */
} kinds[TU_BACKEND_KINDS] = {
    { TUTTI_CPU, "shm", NULL },
    { TUTTI_CUDA, "cuda", "libcuda.so.1" },
};

tutti_device tu_backend_kind_at(int row) {
    return kinds[row].device;
}

const char *tu_backend_default(tutti_device kind) {
    return kinds[tu_backend_row(kind)].backend;
}

int tu_backend_row(tutti_device kind) {
    for (int row = 0; row < TU_BACKEND_KINDS; row++) {
        if (kinds[row].device == kind)
            return row;
    }
    return -1;
}

tutti_status tu_backend_device(tutti_device device, tutti_device *kind) {
    tutti_device found = device == 0 ? TUTTI_CPU : tutti_device_kind(device);
    if (tu_backend_row(found) < 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "symmetric memory does not support device type %s (%d)",
                        tutti_device_name(device), device);
    if (kind != NULL)
        *kind = found;
    return TUTTI_OK;
}

/* The backend that has the device's memory: the chosen one, or the default. The caller holds backend_lock. */
static tutti_status choose(tu_memory_world *tables, tutti_device kind, tu_backend_entry **entry) {
    int row = tu_backend_row(kind);
    tutti_status status = TUTTI_OK;
    if (tables->chosen[row] == NULL)
        status = find(tables, kinds[row].backend, &tables->chosen[row]);
    *entry = tables->chosen[row];
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

/* Checks what a program gave, makes the device its kind, and takes backend_lock. */
static tutti_status begin_with(tutti_world *world, tutti_device *device, tu_memory_world **tables) {
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_backend_device(*device, device);
    return status == TUTTI_OK ? begin(world, tables) : status;
}

tutti_status tutti_memory_backend(tutti_world *world, tutti_device device, const char **name) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_backend needs a place for its result");
    tu_memory_world *tables;
    tu_backend_entry *entry;
    tutti_status status = begin_with(world, &device, &tables);
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
    tu_backend_entry **choice = &tables->chosen[tu_backend_row(device)], *found;
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
    tutti_status status = begin_with(world, &device, &tables);
    if (status != TUTTI_OK)
        return status;
    status = set_backend(tables, device, name);
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}

/* ---- for executors ---- */

int tu_backends_of(tutti_world *world, tutti_device kind, tu_backend_opened *list, int room) {
    tu_memory_world *tables;
    int count = 0;
    if (begin(world, &tables) != TUTTI_OK)
        return 0;
    tu_backend_entry *chosen = tables->chosen[tu_backend_row(kind)];
    if (chosen != NULL && is_open(chosen) && count < room)
        list[count++] = (tu_backend_opened){ &chosen->table, chosen->state };
    for (tu_backend_entry *entry = first_entry(tables); entry != NULL && count < room; entry = entry->next) {
        if (entry != chosen && is_open(entry) && entry->table.device == kind)
            list[count++] = (tu_backend_opened){ &entry->table, entry->state };
    }
    pthread_mutex_unlock(&tables->backend_lock);
    return count;
}

void tu_backend_discover(tutti_world *world) {
    for (int row = 0; row < TU_BACKEND_KINDS && !world->fake; row++) {
        void *library = kinds[row].library == NULL ? NULL : dlopen(kinds[row].library, RTLD_LAZY | RTLD_NOLOAD);
        if (library == NULL)
            continue;
        dlclose(library);
        tutti_error_copy before;
        const tu_backend *backend;
        void *state;
        tu_error_save(&before); /* without a backend, nothing is on a device as far as this world can know */
        if (tu_backend_get(world, kinds[row].device, &backend, &state) != TUTTI_OK)
            TU_LOG(TUTTI_LOG_DEBUG, world->log, "memory", "this process uses %s, but: %s", kinds[row].library,
                   tutti_error_message());
        (void)tu_error_restore(&before);
    }
}
