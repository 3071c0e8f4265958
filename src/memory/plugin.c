/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backend serves a device: the built-in one, or a plug-in found and loaded at run time; and what libtutti lends
 * to it.
 *
 * A loaded plug-in stays loaded: its code may be on some thread's stack, and drivers do not like to be unloaded.
 */
#include <dlfcn.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "memory/tables.h"

#ifndef TUTTI_PLUGIN_FOLDER
#define TUTTI_PLUGIN_FOLDER ""
#endif

/* ---- what libtutti lends ---- */

static void host_log(tutti_world *world, tutti_log_level level, const char *backend, const char *format, ...) {
    tu_log *log = world == NULL ? NULL : world->log;
    if (!tu_log_wants(log, level, "backend"))
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    tu_log_write(log, level, "backend", "%s: %s", backend, text);
}

static const char *host_setting(tutti_world *world, const char *name) {
    for (int i = 0; i < TU_SETTING_COUNT; i++) {
        if (strcmp(tu_setting_rows[i].environment, name) == 0)
            return tu_settings_text(&world->settings, (tu_setting)i);
    }
    return NULL;
}

static const _Atomic uint64_t *host_group_state(tutti_group *group) {
    return &group->page->state;
}

static void host_group_end(tutti_group *group) {
    tu_group_end(group, NULL);
}

static int64_t host_timeout(tutti_group *group, int64_t call_timeout_ns) {
    int64_t timeout_ns = 0;
    if (tu_timeout_choose("timeout_ns", call_timeout_ns, group->timeout_ns, group->world->timeout_ns, &timeout_ns) !=
        TUTTI_OK)
        return -1;
    return timeout_ns;
}

static tutti_status host_exchange(tutti_group *group, const char *purpose, const void *payload, size_t bytes, int fd,
                                  int64_t deadline, void *payloads, int *fds) {
    tu_operation_info info = { .operation = TU_OPERATION_RENDEZVOUS, .root = -1, .group_key = group->key };
    return tu_group_exchange_descriptors(group, &info, purpose, payload, bytes, fd, deadline, payloads, fds);
}

static const char *host_operation_name(uint32_t operation) {
    return tu_operation_name((tu_operation)operation);
}

static uint32_t host_operation_find(const char *name) {
    return (uint32_t)tu_operation_find(name);
}

static tutti_status host_group_look(tutti_group *group) {
    if (group->world->fake || tu_group_ended(group))
        return TUTTI_OK;
    for (int member = 0; member < group->size; member++) {
        /* One that closed its world may have enqueued all it had to; one that died may not. */
        if (member == group->rank || group->job_ranks[member] < 0 ||
            tu_rank_probe(group->world->job, group->job_ranks[member]) != TU_RANK_DEAD)
            continue;
        char doing[128];
        snprintf(doing, sizeof doing, "while group %s was in use on a GPU", group->name);
        tutti_status status = tu_death_error(group->world->job, group->job_ranks[member], doing);
        tu_error_at_fault(member);
        tu_group_end(group, NULL);
        return status;
    }
    return TUTTI_OK;
}

const tu_backend_host tu_backend_host_table = {
    .size = sizeof(tu_backend_host),
    .version = TU_BACKEND_VERSION,
    .error = tu_error,
    .error_system = tu_error_system,
    .error_append = tu_error_append,
    .error_at_fault = tu_error_at_fault,
    .log = host_log,
    .now = tu_clock_now,
    .setting = host_setting,
    .exchange = host_exchange,
    .local_rank = tutti_world_local_rank,
    .group_rank = tutti_group_rank,
    .group_size = tutti_group_size,
    .group_name = tutti_group_name,
    .operation_name = host_operation_name,
    .operation_find = host_operation_find,
    .group_look = host_group_look,
    .group_state = host_group_state,
    .group_cause = tu_group_cause,
    .group_end = host_group_end,
    .timeout = host_timeout,
};

/* ---- finding ---- */

/* Why no file would do, for the error. */
typedef struct search {
    char tried[1024];
} search;

static void note(search *search, const char *path, const char *why) {
    size_t used = strlen(search->tried);
    snprintf(search->tried + used, sizeof search->tried - used, "%s%s: %s", used > 0 ? "; " : "", path, why);
}

static const tu_backend *load(const char *path, const char *name, search *search) {
    if (access(path, F_OK) != 0) {
        note(search, path, "no such file");
        return NULL;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        note(search, path, dlerror());
        return NULL;
    }
    const tu_backend *backend = dlsym(library, "tutti_backend_v1");
    char why[160] = "";
    if (backend == NULL)
        snprintf(why, sizeof why, "exports no tutti_backend_v1");
    else if (backend->version != TU_BACKEND_VERSION || backend->size != sizeof *backend)
        snprintf(why, sizeof why, "has version %u and %zu bytes, this libtutti version %d and %zu", backend->version,
                 backend->size, TU_BACKEND_VERSION, sizeof *backend);
    else if (strcmp(backend->name, name) != 0)
        snprintf(why, sizeof why, "is backend %s, not %s", backend->name, name);
    if (why[0] == 0)
        return backend;
    note(search, path, why);
    dlclose(library);
    return NULL;
}

/* Looks in each folder of a list separated by ':'. */
static const tu_backend *search_folders(const char *folders, const char *name, search *search) {
    while (*folders != 0) {
        size_t length = strcspn(folders, ":");
        char path[PATH_MAX];
        int written = snprintf(path, sizeof path, "%.*s/libtutti-%s.so", (int)length, folders, name);
        if (length > 0 && written < (int)sizeof path) {
            const tu_backend *backend = load(path, name, search);
            if (backend != NULL)
                return backend;
        }
        folders += length + (folders[length] == ':');
    }
    return NULL;
}

/* lib/tutti beside the libtutti that runs, or beside the bin/ of the program that holds it: an installation may have
 * been moved. */
static bool folder_beside(char folder[PATH_MAX]) {
    Dl_info info;
    if (dladdr((void *)(uintptr_t)tu_backend_find, &info) == 0 || info.dli_fname == NULL)
        return false;
    char path[PATH_MAX];
    if (realpath(info.dli_fname, path) == NULL)
        return false;
    char *last = strrchr(path, '/');
    if (last == NULL)
        return false;
    *last = 0;
    return snprintf(folder, PATH_MAX, "%s/tutti:%s/../lib/tutti", path, path) < PATH_MAX;
}

tutti_status tu_backend_find(tutti_world *world, const char *name, const tu_backend **result) {
    if (strcmp(name, tu_backend_shm.name) == 0) {
        *result = &tu_backend_shm;
        return TUTTI_OK;
    }
    search search = { "" };
    const tu_backend *backend = NULL;
    if (name[0] == 0 || strchr(name, '/') != NULL)
        note(&search, name, "is no name of a backend");
    else
        backend = search_folders(tu_settings_text(&world->settings, TU_SETTING_PLUGIN_PATH), name, &search);
    char beside[PATH_MAX];
    if (backend == NULL && strchr(name, '/') == NULL && folder_beside(beside))
        backend = search_folders(beside, name, &search);
    if (backend == NULL && strchr(name, '/') == NULL)
        backend = search_folders(TUTTI_PLUGIN_FOLDER, name, &search);
    if (backend == NULL)
        return tu_error(TUTTI_ERROR_NOT_FOUND,
                        "Tutti does not find allocation backend \"%s\" (%s): install the plug-in libtutti-%s.so, or "
                        "name its folder in "
                        "TUTTI_PLUGIN_PATH",
                        name, search.tried[0] != 0 ? search.tried : "there is no folder to look in", name);
    TU_LOG(TUTTI_LOG_INFO, world->log, "memory", "backend %s loaded", name);
    *result = backend;
    return TUTTI_OK;
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

/* What a world keeps about a kind of device. */
static tu_device_backend *slot_of(tu_memory_world *tables, tutti_device kind) {
    return &tables->devices[kind == TUTTI_CPU ? 0 : 1];
}

/* The backend that a device gets when nobody chose. The caller holds the lock. */
static tutti_status choose(tu_memory_world *tables, tutti_device device) {
    tu_device_backend *slot = slot_of(tables, device);
    if (slot->backend != NULL)
        return TUTTI_OK;
    return tu_backend_find(tables->world, device == TUTTI_CPU ? "shm" : "cuda", &slot->backend);
}

/* For tutti_group_check. */
static tutti_status check_devices(tutti_group *group) {
    tu_memory_world *tables;
    tutti_status status = tu_memory_world_get(group->world, &tables);
    for (int device = 0; status == TUTTI_OK && device < TU_DEVICES; device++) {
        const tu_device_backend *slot = &tables->devices[device];
        if (slot->opened && slot->backend->check != NULL)
            status = slot->backend->check(slot->state, group);
    }
    return status;
}

static tutti_status open_backend(tu_memory_world *tables, tutti_device device) {
    tu_device_backend *slot = slot_of(tables, device);
    int devices = 0;
    tutti_status status = choose(tables, device);
    if (status != TUTTI_OK || slot->opened)
        return status;
    status = slot->backend->probe(&tu_backend_host_table, &devices);
    if (status == TUTTI_OK && devices == 0)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s finds no device", slot->backend->name);
    if (status == TUTTI_OK)
        status = slot->backend->open(&tu_backend_host_table, tables->world, &slot->state);
    slot->opened = status == TUTTI_OK;
    if (slot->opened && device != TUTTI_CPU)
        atomic_store_explicit(&tables->world->devices, check_devices, memory_order_release);
    return status;
}

tutti_status tu_backend_get(tutti_world *world, tutti_device device, const tu_backend **backend, void **state) {
    tu_memory_world *tables;
    tutti_status status = tu_backend_device(device, &device);
    if (status == TUTTI_OK)
        status = tu_memory_world_get(world, &tables);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&tables->backend_lock);
    status = open_backend(tables, device);
    if (status == TUTTI_OK) {
        *backend = slot_of(tables, device)->backend;
        *state = slot_of(tables, device)->state;
    }
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}

tutti_status tutti_memory_backend(tutti_world *world, tutti_device device, const char **name) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_backend needs a place for its result");
    tu_memory_world *tables;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_backend_device(device, &device);
    if (status == TUTTI_OK)
        status = tu_memory_world_get(world, &tables);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&tables->backend_lock);
    status = choose(tables, device);
    if (status == TUTTI_OK)
        *name = slot_of(tables, device)->backend->name;
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}

/* The caller holds the lock. */
static tutti_status set_backend(tu_memory_world *tables, tutti_device device, const char *name) {
    tu_device_backend *slot = slot_of(tables, device);
    const tu_backend *found;
    if (slot->backend != NULL && strcmp(slot->backend->name, name) == 0)
        return TUTTI_OK;
    tutti_status status = tu_backend_find(tables->world, name, &found);
    if (status != TUTTI_OK)
        return status;
    if (found->device != device)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s does not support device type %s", name,
                        tutti_device_name(device));
    if (slot->opened && found != slot->backend)
        return tu_error(TUTTI_ERROR_STATE, "the backend of device %s can not be changed after use: it is %s",
                        tutti_device_name(device), slot->backend->name);
    slot->backend = found;
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
        status = tu_memory_world_get(world, &tables);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&tables->backend_lock);
    status = set_backend(tables, device, name);
    pthread_mutex_unlock(&tables->backend_lock);
    return status;
}
