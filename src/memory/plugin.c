/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding plug-ins, loading them, and taking their tables over: a table or part that is smaller than ours is completed
 * with NULL, one that is larger is cut, so that the rest of the library sees one size.
 *
 * A loaded plug-in stays loaded: its code may be on some thread's stack, and drivers do not like to be unloaded.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "memory/tables.h"

#ifndef TUTTI_PLUGIN_FOLDER
#define TUTTI_PLUGIN_FOLDER ""
#endif

#define SYMBOL "tutti_backend_v2"

/* ---- taking a table over ---- */

/* Copies what both sides know; the rest of `own` stays zero. Both begin with their size. */
static void adopt(void *own, size_t own_bytes, const void *given) {
    size_t bytes;
    memcpy(&bytes, given, sizeof bytes);
    memset(own, 0, own_bytes);
    memcpy(own, given, bytes < own_bytes ? bytes : own_bytes);
    memcpy(own, &own_bytes, sizeof own_bytes);
}

/* The first function that the part cannot do without and does not have, or NULL. */
static const char *missing_function(const tu_backend *backend) {
    const tu_backend_memory *memory = backend->memory;
    const tu_backend_remote *remote = backend->remote;
    const tu_backend_streams *streams = backend->streams;
#define NEEDS(part, function)                     \
    if (part != NULL && (part)->function == NULL) \
    return #part "->" #function
    NEEDS(backend, probe);
    NEEDS(backend, open);
    NEEDS(backend, close);
    NEEDS(memory, allocate);
    NEEDS(memory, free);
    NEEDS(memory, export_block);
    NEEDS(memory, unexport_block);
    NEEDS(memory, import_blocks);
    NEEDS(memory, unmap);
    NEEDS(memory, clear);
    NEEDS(memory, copy);
    NEEDS(memory, set32);
    NEEDS(memory, write32);
    NEEDS(remote, area_bytes);
    NEEDS(remote, attach);
    NEEDS(remote, detach);
    NEEDS(remote, reset);
    NEEDS(remote, put);
    NEEDS(remote, get);
    NEEDS(remote, signal);
    NEEDS(remote, wait_signal);
    NEEDS(remote, test_signal);
    NEEDS(remote, barrier);
    NEEDS(streams, recognise);
    NEEDS(streams, capturing);
    NEEDS(streams, create);
    NEEDS(streams, destroy);
    NEEDS(streams, mark);
    NEEDS(streams, join);
    NEEDS(streams, test);
    NEEDS(streams, unmark);
#undef NEEDS
    return NULL;
}

tu_backend_entry *tu_backend_adopt(const tu_backend *given) {
    tu_backend_entry *entry = calloc(1, sizeof *entry);
    if (entry == NULL)
        return NULL;
    tu_backend *table = &entry->table;
    adopt(table, sizeof *table, given);
    if (table->memory != NULL) {
        adopt(&entry->memory, sizeof entry->memory, table->memory);
        table->memory = &entry->memory;
    }
    if (table->remote != NULL) {
        adopt(&entry->remote, sizeof entry->remote, table->remote);
        table->remote = &entry->remote;
    }
    if (table->streams != NULL) {
        adopt(&entry->streams, sizeof entry->streams, table->streams);
        table->streams = &entry->streams;
    }
    return entry;
}

/* ---- finding ---- */

/* Why no file would do, for the error. */
typedef struct search {
    char tried[1024];
} search;

static void note(search *search, const char *path, const char *why) {
    size_t used = strlen(search->tried);
    snprintf(search->tried + used, sizeof search->tried - used, "%s%.300s: %s", used > 0 ? "; " : "", path, why);
}

/* Why the table of a file is not taken; empty when it is, and then *entry is it. */
static void examine(const tu_backend *given, const char *name, tu_backend_entry **entry, char why[160]) {
    const char *missing;
    why[0] = 0;
    if (given == NULL)
        snprintf(why, 160, "exports no %s", SYMBOL);
    else if (given->version != TU_BACKEND_VERSION || given->size < offsetof(tu_backend, probe))
        snprintf(why, 160, "has version %u, this libtutti version %d", given->version, TU_BACKEND_VERSION);
    else if (strcmp(given->name, name) != 0)
        snprintf(why, 160, "is backend %s, not %s", given->name, name);
    else if ((*entry = tu_backend_adopt(given)) == NULL)
        snprintf(why, 160, "there is no memory for its table");
    else if ((missing = missing_function(&(*entry)->table)) != NULL)
        snprintf(why, 160, "lacks %s", missing);
    else
        return;
    free(*entry);
    *entry = NULL;
}

static tu_backend_entry *load(const char *path, const char *name, search *search) {
    if (access(path, F_OK) != 0) {
        note(search, path, "no such file");
        return NULL;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        note(search, path, dlerror());
        return NULL;
    }
    tu_backend_entry *entry = NULL;
    char why[160];
    examine(dlsym(library, SYMBOL), name, &entry, why);
    if (entry == NULL) {
        note(search, path, why);
        dlclose(library);
    }
    return entry;
}

/* Whether the folder at `at` stands in the list before: the folder beside the library is often the installed one. */
static bool seen_before(const char *folders, const char *at, size_t length) {
    for (const char *earlier = folders; earlier < at; earlier += strcspn(earlier, ":") + 1)
        if (strcspn(earlier, ":") == length && strncmp(earlier, at, length) == 0)
            return true;
    return false;
}

/* Looks in each folder of a list separated by ':', once. */
static tu_backend_entry *search_folders(const char *folders, const char *name, search *search) {
    for (const char *at = folders; *at != 0;) {
        size_t length = strcspn(at, ":");
        char path[PATH_MAX];
        int written = snprintf(path, sizeof path, "%.*s/libtutti-%s.so", (int)length, at, name);
        if (length > 0 && written < (int)sizeof path && !seen_before(folders, at, length)) {
            tu_backend_entry *entry = load(path, name, search);
            if (entry != NULL)
                return entry;
        }
        at += length + (at[length] == ':');
    }
    return NULL;
}

/* lib/tutti beside the libtutti that runs, or beside the bin/ of the program that holds it: an installation may have
 * been moved. */
static bool folder_beside(char folder[PATH_MAX]) {
    Dl_info info;
    if (dladdr((void *)(uintptr_t)tu_backend_load, &info) == 0 || info.dli_fname == NULL)
        return false;
    char path[PATH_MAX];
    if (realpath(info.dli_fname, path) == NULL)
        return false;
    char *last = strrchr(path, '/');
    if (last == NULL)
        return false;
    *last = 0;
    const char *parent = strrchr(path, '/');
    int above = parent != NULL ? (int)(parent - path) : 0;
    return snprintf(folder, PATH_MAX, "%s/tutti:%.*s/lib/tutti", path, above, path) < PATH_MAX;
}

/* The folders to look in, in order, separated by ':'. */
static void all_folders(const tu_settings *settings, char *folders, size_t bytes) {
    char beside[PATH_MAX];
    if (!folder_beside(beside))
        beside[0] = 0;
    snprintf(folders, bytes, "%s:%s:%s", tu_settings_text(settings, TU_SETTING_PLUGIN_PATH), beside,
             TUTTI_PLUGIN_FOLDER);
}

static tutti_status load_by(const tu_settings *settings, const char *name, tu_backend_entry **result) {
    search search = { "" };
    tu_backend_entry *entry = NULL;
    char folders[3 * PATH_MAX];
    all_folders(settings, folders, sizeof folders);
    if (name[0] == 0 || strchr(name, '/') != NULL)
        note(&search, name, "is no name of a backend");
    else
        entry = search_folders(folders, name, &search);
    if (entry == NULL)
        return tu_error(TUTTI_ERROR_NOT_FOUND,
                        "Tutti does not find allocation backend \"%s\" (%s): install the plug-in libtutti-%s.so, which "
                        "Tutti's build makes where it finds what that needs (see the README), or name its folder in "
                        "TUTTI_PLUGIN_PATH",
                        name, search.tried[0] != 0 ? search.tried : "there is no folder to look in", name);
    *result = entry;
    return TUTTI_OK;
}

tutti_status tu_backend_load(tutti_world *world, const char *name, tu_backend_entry **result) {
    tutti_status status = load_by(&world->settings, name, result);
    if (status == TUTTI_OK)
        TU_LOG(TUTTI_LOG_INFO, world->log, "memory", "backend %s loaded", name);
    return status;
}

/* ---- without a world ---- */

tutti_status tu_backend_open_apart(const char *name, tu_backend_opened *opened) {
    tu_settings settings;
    tu_backend_entry *entry = NULL;
    tutti_status status = tu_settings_load(&settings);
    if (status != TUTTI_OK)
        return status;
    status = load_by(&settings, name, &entry);
    tu_settings_free(&settings);
    if (status == TUTTI_OK)
        status = entry->table.open(&tu_backend_host_table, NULL, &entry->state);
    if (status != TUTTI_OK) {
        free(entry);
        return status;
    }
    *opened = (tu_backend_opened){ &entry->table, entry->state };
    return TUTTI_OK;
}

void tu_backend_close_apart(tu_backend_opened *opened) {
    tu_backend_entry *entry = (tu_backend_entry *)(uintptr_t)opened->table; /* its first member */
    entry->table.close(entry->state);
    free(entry);
    *opened = (tu_backend_opened){ 0 };
}

/* ---- listing ---- */

#define LISTED 32

typedef struct listing {
    char names[LISTED][64];
    int count;
} listing;

/* "cuda" of "libtutti-cuda.so"; false for other files. */
static bool plugin_name(const char *file, char name[64]) {
    static const char prefix[] = "libtutti-", suffix[] = ".so";
    size_t length = strlen(file), around = sizeof prefix - 1 + sizeof suffix - 1;
    if (length <= around || length - around > 63 || strncmp(file, prefix, sizeof prefix - 1) != 0 ||
        strcmp(file + length - (sizeof suffix - 1), suffix) != 0)
        return false;
    snprintf(name, 64, "%.*s", (int)(length - around), file + sizeof prefix - 1);
    return true;
}

static void list_folder(const char *path, listing *all) {
    DIR *folder = opendir(path);
    struct dirent *file;
    char name[64];
    while (folder != NULL && (file = readdir(folder)) != NULL) {
        bool known = !plugin_name(file->d_name, name);
        for (int i = 0; i < all->count && !known; i++)
            known = strcmp(all->names[i], name) == 0;
        if (!known && all->count < LISTED)
            memcpy(all->names[all->count++], name, sizeof name);
    }
    if (folder != NULL)
        closedir(folder);
}

void tu_backend_list(tutti_world *world, void (*found)(const char *name, void *argument), void *argument) {
    char folders[3 * PATH_MAX], *rest = folders, *folder;
    listing all = { .count = 0 };
    all_folders(&world->settings, folders, sizeof folders);
    while ((folder = strsep(&rest, ":")) != NULL)
        if (*folder != 0)
            list_folder(folder, &all);
    for (int i = 0; i < all.count; i++)
        found(all.names[i], argument);
}
