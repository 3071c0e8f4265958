/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds libcuda.so.1 and its functions. Nothing here is linked against CUDA.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"

/* cuGetProcAddress_v2: (symbol, function out, CUDA version, flags, status out). */
typedef CUresult get_proc_address(const char *symbol, void **function, int version, uint64_t flags, int *status);

static void *find(void *library, get_proc_address *get, const char *name, int since) {
    void *function = NULL;
    if (get != NULL && get(name, &function, since > 11030 ? since : 11030, 0, NULL) == CUDA_SUCCESS && function != NULL)
        return function;
    return dlsym(library, name);
}

tutti_status tu_cuda_driver_load(const tu_backend_host *host, tu_cuda_driver *driver) {
    memset(driver, 0, sizeof *driver);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return host->error(TUTTI_ERROR_UNSUPPORTED, "no CUDA driver: %s", dlerror());
    get_proc_address *get = (get_proc_address *)(uintptr_t)dlsym(library, "cuGetProcAddress_v2");
#define X(required, name, since, parameters)                                                                    \
    driver->name = (CUresult(*) parameters)(uintptr_t)find(library, get, #name, since);                         \
    if (required && driver->name == NULL) {                                                                     \
        dlclose(library);                                                                                       \
        return host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver has no %s: it is older than 12.3", #name); \
    }
    TU_CUDA_FUNCTIONS(X)
#undef X
    CUresult result = driver->cuInit(0);
    if (result != CUDA_SUCCESS) {
        const char *text = NULL;
        driver->cuGetErrorString(result, &text);
        host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver does not start: %s (%d)", text != NULL ? text : "?",
                    result);
        dlclose(library);
        return TUTTI_ERROR_UNSUPPORTED;
    }
    driver->cuDriverGetVersion(&driver->version);
    driver->library = library;
    return TUTTI_OK;
}

tutti_status tu_cuda_driver_error(const tu_backend_host *host, const tu_cuda_driver *driver, CUresult result,
                                  const char *what) {
    const char *name = NULL, *text = NULL;
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &text);
    return host->error(result == CUDA_ERROR_OUT_OF_MEMORY ? TUTTI_ERROR_MEMORY : TUTTI_ERROR_BACKEND,
                       "CUDA: %s failed: %s (%s, %d)", what, text != NULL ? text : "?", name != NULL ? name : "?",
                       result);
}
