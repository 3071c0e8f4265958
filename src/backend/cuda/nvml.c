/* SPDX-License-Identifier: Apache-2.0
 *
 * NVLinks between the visible GPUs, through NVML, which is loaded for the question and closed after it.
 *
 * A link leads to another GPU, or to a switch; all switches are taken to be connected, so two GPUs with links to
 * switches have as many between them as the one that has fewer. What NVML does not tell counts as no link.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cuda.h"

#define LINKS 64
enum {
    NVML_SUCCESS = 0,
    NVML_REMOTE_GPU = 0,
    NVML_REMOTE_SWITCH = 2
};

typedef struct nvml_pci {
    char short_id[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char id[32];
} nvml_pci;
typedef void *nvml_device;

typedef struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *bus, nvml_device *device);
    int (*link_state)(nvml_device device, unsigned link, unsigned *active);
    int (*remote_type)(nvml_device device, unsigned link, int *type);
    int (*remote_pci)(nvml_device device, unsigned link, nvml_pci *pci);
} nvml;

static bool load(nvml *functions) {
    functions->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (functions->library == NULL)
        return false;
    functions->init = (int (*)(void))(uintptr_t)dlsym(functions->library, "nvmlInit_v2");
    functions->shutdown = (int (*)(void))(uintptr_t)dlsym(functions->library, "nvmlShutdown");
    functions->by_bus =
        (int (*)(const char *, nvml_device *))(uintptr_t)dlsym(functions->library, "nvmlDeviceGetHandleByPciBusId_v2");
    functions->link_state =
        (int (*)(nvml_device, unsigned, unsigned *))(uintptr_t)dlsym(functions->library, "nvmlDeviceGetNvLinkState");
    functions->remote_type = (int (*)(nvml_device, unsigned, int *))(uintptr_t)dlsym(
        functions->library, "nvmlDeviceGetNvLinkRemoteDeviceType");
    functions->remote_pci = (int (*)(nvml_device, unsigned, nvml_pci *))(uintptr_t)dlsym(
        functions->library, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
    if (functions->init != NULL && functions->shutdown != NULL && functions->by_bus != NULL &&
        functions->link_state != NULL && functions->remote_type != NULL && functions->remote_pci != NULL &&
        functions->init() == NVML_SUCCESS)
        return true;
    dlclose(functions->library);
    return false;
}

/* Counts the links of one GPU: to each other one, and to switches. */
static void count_links(const nvml *functions, const char (*bus)[32], int index, int count, int *row, int *switches) {
    nvml_device device;
    if (functions->by_bus(bus[index], &device) != NVML_SUCCESS)
        return;
    for (unsigned link = 0; link < LINKS; link++) {
        unsigned active = 0;
        int type;
        nvml_pci pci;
        if (functions->link_state(device, link, &active) != NVML_SUCCESS)
            return;
        if (!active || functions->remote_type(device, link, &type) != NVML_SUCCESS)
            continue;
        if (type == NVML_REMOTE_SWITCH)
            ++*switches;
        if (type != NVML_REMOTE_GPU || functions->remote_pci(device, link, &pci) != NVML_SUCCESS)
            continue;
        for (int other = 0; other < count; other++)
            if (other != index && strcasecmp(pci.id, bus[other]) == 0)
                row[other]++;
    }
}

tutti_status tu_cuda_links(const tu_backend_host *host, int *matrix, int count) {
    tu_cuda_driver driver;
    nvml functions = { 0 };
    tutti_status status = tu_cuda_driver_load(host, &driver);
    if (status != TUTTI_OK)
        return status;
    memset(matrix, 0, (size_t)count * (size_t)count * sizeof *matrix);
    if (!load(&functions))
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "NVML (libnvidia-ml.so.1) is not there: the links between GPUs are not known");
    char(*bus)[32] = calloc((size_t)count, sizeof *bus);
    int *switches = calloc((size_t)count, sizeof *switches);
    if (bus == NULL || switches == NULL) {
        status = host->error(TUTTI_ERROR_MEMORY, "out of memory for the links of %d GPUs", count);
        goto close;
    }
    for (int i = 0; i < count; i++) {
        CUdevice device;
        if (driver.cuDeviceGet(&device, i) == CUDA_SUCCESS)
            driver.cuDeviceGetPCIBusId(bus[i], sizeof bus[i], device);
    }
    for (int i = 0; i < count; i++)
        count_links(&functions, (const char(*)[32])bus, i, count, matrix + (size_t)i * (size_t)count, &switches[i]);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++)
            if (i != j)
                matrix[(size_t)i * (size_t)count + (size_t)j] += switches[i] < switches[j] ? switches[i] : switches[j];
close:
    free(bus);
    free(switches);
    functions.shutdown();
    dlclose(functions.library);
    return status;
}
