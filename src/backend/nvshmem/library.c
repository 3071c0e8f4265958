/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading NVSHMEM's host library, once per process; it cannot be unloaded. Where the program has loaded one itself,
 * it is that one.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "inner.h"

#define INSTALL                                                                                               \
    "install NVSHMEM 3.4 or newer (Python: nvidia-nvshmem-cu13, or NVIDIA's package) and name its folder of " \
    "libraries "                                                                                              \
    "in LD_LIBRARY_PATH"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tu_nvshmem_library library;
static bool loaded; /* under the lock */

static tutti_status find_functions(const tu_backend_host *host, void *handle) {
#define X(result, name, parameters)                                                                        \
    library.name = (result(*) parameters)(uintptr_t)dlsym(handle, #name);                                  \
    if (library.name == NULL)                                                                              \
        return host->error(TUTTI_ERROR_BACKEND, "%s has no %s: it is older than 3.4, or broken: " INSTALL, \
                           TU_NVSHMEM_LIBRARY, #name);
    TU_NVSHMEM_FUNCTIONS(X)
#undef X
    return TUTTI_OK;
}

static tutti_status not_loaded(const tu_backend_host *host, const char *why) {
    bool absent = strstr(why, TU_NVSHMEM_LIBRARY ": cannot open shared object file") != NULL;
    return absent ? host->error(TUTTI_ERROR_NOT_FOUND, "there is no " TU_NVSHMEM_LIBRARY ": " INSTALL)
                  : host->error(TUTTI_ERROR_BACKEND,
                                TU_NVSHMEM_LIBRARY " is there, but cannot be loaded (%s): " INSTALL, why);
}

static tutti_status load(const tu_backend_host *host) {
    void *handle = dlopen(TU_NVSHMEM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return not_loaded(host, dlerror());
    tutti_status status = find_functions(host, handle);
    int major = 0, minor = 0, patch = 0;
    if (status == TUTTI_OK)
        library.nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    library.version = major * 10000 + minor * 100 + patch;
    if (status == TUTTI_OK && library.version < TU_NVSHMEM_OLDEST)
        status =
            host->error(TUTTI_ERROR_BACKEND, "NVSHMEM %d.%d.%d is too old for Tutti: " INSTALL, major, minor, patch);
    if (status != TUTTI_OK)
        dlclose(handle);
    return status;
}

tutti_status tu_nvshmem_library_get(const tu_backend_host *host, const tu_nvshmem_library **result) {
    pthread_mutex_lock(&lock);
    tutti_status status = loaded ? TUTTI_OK : load(host);
    loaded = loaded || status == TUTTI_OK;
    pthread_mutex_unlock(&lock);
    *result = &library;
    return status;
}
