/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading libucp. Its constructors install handlers for SIGSEGV and its like and patch mmap and its like in libc, for
 * caches of registered memory that Tutti does not use. A library has no business there. Only variables of the
 * environment keep the constructors from it, so the process has another environment while they run: a copy with those
 * variables, which stays valid for whoever reads it meanwhile; the program's own is not changed. Where the program has
 * loaded UCX itself, all that is its own business, and stays.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ucx.h"

static const char *const quiet[] = {
    "UCX_ERROR_SIGNALS=",          "UCX_HANDLE_ERRORS=none", "UCX_MEM_EVENTS=n",
    "UCX_MEM_MMAP_HOOK_MODE=none", "UCX_MEM_MALLOC_HOOKS=n", "UCX_MEM_MALLOC_RELOC=n"
};
#define QUIET (sizeof quiet / sizeof *quiet)
/* That a connection broke is told in words of Tutti's, to whom it concerns; and a peer that has left is no error. */
static char log_level[] = "UCX_LOG_LEVEL=fatal";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tu_ucx_library library;
static bool loaded; /* under the lock; stays: libucp cannot be unloaded safely */
static char **lent; /* the environment while libucp was loaded: kept, since somebody may still look at it */

static bool is_loaded(const char *name) {
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle != NULL)
        dlclose(handle);
    return handle != NULL;
}

/* Whether a variable of the program is one of those. */
static bool is_replaced(const char *variable) {
    for (size_t i = 0; i < QUIET; i++) {
        size_t name = strcspn(quiet[i], "=") + 1;
        if (strncmp(variable, quiet[i], name) == 0)
            return true;
    }
    return false;
}

static char **quiet_environment(void) {
    size_t count = 0, used = 0;
    while (environ != NULL && environ[count] != NULL)
        count++;
    char **made = calloc(count + QUIET + 2, sizeof *made);
    for (size_t i = 0; i < count && made != NULL; i++)
        if (!is_replaced(environ[i]))
            made[used++] = environ[i];
    for (size_t i = 0; i < QUIET && made != NULL; i++)
        made[used++] = (char *)(uintptr_t)quiet[i];
    if (made != NULL && getenv("UCX_LOG_LEVEL") == NULL)
        made[used++] = log_level;
    return made;
}

static tutti_status open_library(const tu_backend_host *host, void **handle) {
    char **own = environ;
    if (!is_loaded("libucs.so.0")) {
        if (lent == NULL)
            lent = quiet_environment();
        if (lent == NULL)
            return host->error(TUTTI_ERROR_MEMORY, "out of memory for loading UCX");
        environ = lent;
    }
    *handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    environ = own;
    return *handle != NULL ? TUTTI_OK
                           : host->error(TUTTI_ERROR_NOT_FOUND,
                                         "libucp.so.0 cannot be loaded (%s): install UCX (Debian: libucx0) on every "
                                         "host",
                                         dlerror());
}

static tutti_status load(const tu_backend_host *host) {
    void *handle;
    tutti_status status = open_library(host, &handle);
    if (status != TUTTI_OK)
        return status;
    const char *missing = NULL;
#define FIND(name)                                  \
    *(void **)&library.name = dlsym(handle, #name); \
    missing = library.name == NULL && missing == NULL ? #name : missing;
    TU_UCX_FUNCTIONS(FIND)
#undef FIND
    if (missing == NULL)
        return TUTTI_OK;
    dlclose(handle);
    return host->error(TUTTI_ERROR_BACKEND, "the libucp.so.0 of this host lacks %s: install UCX 1.13 or newer",
                       missing);
}

tutti_status tu_ucx_load(const tu_backend_host *host, const tu_ucx_library **found) {
    pthread_mutex_lock(&lock);
    tutti_status status = loaded ? TUTTI_OK : load(host);
    loaded = status == TUTTI_OK;
    pthread_mutex_unlock(&lock);
    *found = &library;
    return status;
}
