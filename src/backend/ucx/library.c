/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading libucp. Its constructor installs handlers for SIGSEGV and its like; a library has no business there, so what
 * was installed before is put back. Only signals whose handler changed are touched.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "ucx.h"

#define SIGNALS 32 /* those that have names; UCX takes no others */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tu_ucx_library library;
static bool loaded; /* under the lock; stays: libucp cannot be unloaded safely */

static void remember_handlers(struct sigaction before[SIGNALS]) {
    memset(before, 0, SIGNALS * sizeof *before);
    for (int number = 1; number < SIGNALS; number++)
        (void)sigaction(number, NULL, &before[number]);
}

static bool same_handler(const struct sigaction *one, const struct sigaction *other) {
    return one->sa_handler == other->sa_handler && one->sa_flags == other->sa_flags;
}

static void restore_handlers(const struct sigaction before[SIGNALS]) {
    for (int number = 1; number < SIGNALS; number++) {
        struct sigaction now;
        if (sigaction(number, NULL, &now) == 0 && !same_handler(&before[number], &now))
            (void)sigaction(number, &before[number], NULL);
    }
}

static tutti_status load(const tu_backend_host *host) {
    struct sigaction before[SIGNALS];
    remember_handlers(before);
    void *handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    restore_handlers(before);
    if (handle == NULL)
        return host->error(TUTTI_ERROR_NOT_FOUND,
                           "libucp.so.0 cannot be loaded (%s): install UCX (Debian: libucx0) on every host", dlerror());
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
