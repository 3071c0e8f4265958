/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds libnccl.so.2 and its functions. Nothing here is linked against NCCL. Where the program has loaded NCCL itself
 * (PyTorch does), that one is used.
 */
#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "memory/backend.h"

#define INSTALL                                                                                                  \
    "install NCCL 2.27 or newer (Debian and Ubuntu: libnccl2; Python: nvidia-nccl-cu13) and name its folder in " \
    "LD_LIBRARY_PATH"

static tutti_status not_loaded(const tu_backend_host *host, const char *why) {
    bool absent = strstr(why, "libnccl.so.2: cannot open shared object file") != NULL;
    return absent ? host->error(TUTTI_ERROR_NOT_FOUND, "there is no libnccl.so.2: " INSTALL)
                  : host->error(TUTTI_ERROR_BACKEND, "libnccl.so.2 is there, but cannot be loaded (%s): " INSTALL, why);
}

static tutti_status too_old(const tu_backend_host *host, const tu_nccl_library *library) {
    int version = library->version;
    return host->error(TUTTI_ERROR_BACKEND, "NCCL %d.%d.%d (%s) is too old for Tutti: " INSTALL, version / 10000,
                       version / 100 % 100, version % 100, library->path);
}

tutti_status tu_nccl_library_load(const tu_backend_host *host, tu_nccl_library *library) {
    Dl_info where;
    const char *missing = NULL;
    *library = (tu_nccl_library){ .handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL) };
    if (library->handle == NULL)
        return not_loaded(host, dlerror());
#define X(since, name, result, parameters)                        \
    *(void **)&library->name = dlsym(library->handle, #name);     \
    if ((since) == 0 && library->name == NULL && missing == NULL) \
        missing = #name;
    TU_NCCL_FUNCTIONS(X)
#undef X
    if (library->ncclGetVersion != NULL && dladdr((void *)(uintptr_t)library->ncclGetVersion, &where) != 0 &&
        where.dli_fname != NULL)
        snprintf(library->path, sizeof library->path, "%s", where.dli_fname);
    /* The library stays loaded: it may have threads, and PyTorch may use it. */
    if (library->ncclGetVersion == NULL || library->ncclGetVersion(&library->version) != ncclSuccess)
        return host->error(TUTTI_ERROR_BACKEND, "%s does not tell its version: " INSTALL,
                           library->path[0] != 0 ? library->path : "libnccl.so.2");
    if (library->version < TU_NCCL_OLDEST)
        return too_old(host, library);
#define X(since, name, result, parameters) \
    if ((since) > library->version)        \
        library->name = NULL;
    TU_NCCL_FUNCTIONS(X)
#undef X
    if (missing != NULL)
        return host->error(TUTTI_ERROR_BACKEND, "NCCL %d.%d.%d (%s) lacks %s: " INSTALL, library->version / 10000,
                           library->version / 100 % 100, library->version % 100, library->path, missing);
    return TUTTI_OK;
}

void tu_nccl_library_describe(const tu_nccl_library *library, char *text, size_t bytes) {
    snprintf(text, bytes, "NCCL %d.%d.%d (%s): collectives, windows; pointers of peers %s, of all at once %s; %s",
             library->version / 10000, library->version / 100 % 100, library->version % 100, library->path,
             library->ncclGetPeerDevicePointer != NULL ? "by the host"
             : library->ncclTeamLsa != NULL            ? "from the window"
                                                       : "none (from 2.28 on)",
             library->ncclGetLsaMultimemDevicePointer != NULL ? "by the host" : "none (from 2.29 on)",
             library->ncclCommRevoke != NULL ? "communicators of the program" : "no communicators of the program");
}
