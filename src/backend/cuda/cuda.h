/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CUDA backend: this rank's devices, and the team of a group.
 *
 * One tu_cuda per world. A device is used through its primary context, which is pushed for each call and popped after
 * it: the caller's current device stays what it was.
 */
#ifndef TU_CUDA_CUDA_H
#define TU_CUDA_CUDA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "collective/device.h"
#include "driver.h"
#include "memory/backend.h"
#include "params.h"

#define TU_CUDA_DEVICES 16

typedef enum tu_cuda_kernel {
#define KERNEL(id, name) TU_CUDA_##id,
#include "kernels.def"
#undef KERNEL
    TU_CUDA_KERNEL_COUNT
} tu_cuda_kernel;

const char *tu_cuda_kernel_name(tu_cuda_kernel kernel);

typedef struct tu_cuda_device {
    bool open;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernels[TU_CUDA_KERNEL_COUNT];
    CUstream stream; /* of the backend's own: clears memory, fills tables, tells kernels that their group ended */
    int processors;
    int major;
    int handle_type; /* for sharing: fabric or descriptor; 0 until tried */
    bool multicast;
    CUuuid uuid;
} tu_cuda_device;

typedef struct tu_cuda {
    const tu_backend_host *host;
    tutti_world *world;
    tu_cuda_driver driver;
    int device_count;
    pthread_mutex_t lock; /* opening devices */
    tu_cuda_device devices[TU_CUDA_DEVICES];
    struct tu_cuda_fate *fates;  /* under lock */
    _Atomic bool shared_process; /* another rank of this process uses these devices: never wait for a whole context, its
                                    kernels may wait for us */
    pthread_t watcher;           /* watch.c */
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    bool watch_stop; /* under watch_lock */
    _Atomic bool watched;
} tu_cuda;

/* What went wrong in a group on a device: the word that its kernels look at, and its copy in pinned memory. Lives as
 * long as the world: kernels may still be about to look. */
typedef struct tu_cuda_fate {
    tutti_group *group;
    char name[64];
    int device;
    CUdeviceptr fault; /* tu_cuda_fault on the device */
    tu_cuda_fault *host;
    CUdeviceptr host_address; /* of `host`, for kernels */
    bool ended;               /* the group's own end has been passed on to the device */
    struct tu_cuda_fate *next;
} tu_cuda_fate;

tutti_status tu_cuda_fate_get(tu_cuda *cuda, tutti_group *group, int device, tu_cuda_fate **fate);
void tu_cuda_fates_free(tu_cuda *cuda);
/* The fault of the group on any device, as this thread's error; also passes the group's own end on to the kernels. */
tutti_status tu_cuda_check(void *state, tutti_group *group);

/* A block: physical memory, its handle, where it is mapped. */
typedef struct tu_cuda_block {
    CUmemGenericAllocationHandle memory;
    CUdeviceptr address;
    size_t bytes; /* rounded to the granularity */
    int device;
    int exported; /* descriptor while exported, -1 */
} tu_cuda_block;

tutti_status tu_cuda_driver_load(const tu_backend_host *host, tu_cuda_driver *driver);
tutti_status tu_cuda_error(const tu_cuda *cuda, CUresult result, const char *what);

/* Makes a device ready; index -1 is the current one. */
tutti_status tu_cuda_device_open(tu_cuda *cuda, int index, tu_cuda_device **device, int *chosen);
/* Around every use of a device. */
tutti_status tu_cuda_enter(tu_cuda *cuda, tu_cuda_device *device);
void tu_cuda_leave(tu_cuda *cuda);

/* watch.c */
void tu_cuda_watch_start(tu_cuda *cuda);
void tu_cuda_watch(tu_cuda *cuda); /* the thread, on first need */
void tu_cuda_watch_stop(tu_cuda *cuda);
void tu_cuda_forget(void *state, tutti_group *group);

/* memory.c */
tutti_status tu_cuda_allocate(void *state, const tu_backend_request *request, tu_backend_block *block);
void tu_cuda_free(void *state, tu_backend_block *block);
tutti_status tu_cuda_export(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
void tu_cuda_unexport(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
tutti_status tu_cuda_import(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                            tu_backend_ticket *tickets, tu_backend_map *map);
void tu_cuda_unmap(void *state, tu_backend_map *map);
tutti_status tu_cuda_clear(void *state, const tu_backend_block *block, size_t offset, size_t bytes);
bool tu_cuda_has_multicast(void *state, int device_index);
/* Member r's block of an imported map lies at base + r * stride. */
void tu_cuda_map_plan(const tu_backend_map *map, uint64_t *base, uint64_t *stride);

/* signal.c */
size_t tu_cuda_area_bytes(int size, int channels);
tutti_status tu_cuda_attach(tu_backend_peers *peers);
void tu_cuda_detach(tu_backend_peers *peers);
void tu_cuda_reset(const tu_backend_peers *peers);
tutti_status tu_cuda_signal_put(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call);
tutti_status tu_cuda_signal_wait(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call);
tutti_status tu_cuda_signal_test(const tu_backend_peers *peers, int from, int channel, bool *arrived);
tutti_status tu_cuda_barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call);
tutti_status tu_cuda_put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                         const tu_backend_call *call);
tutti_status tu_cuda_get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                         const tu_backend_call *call);
tutti_status tu_cuda_copy(void *state, int device, void *to, const void *from, size_t bytes,
                          const tu_backend_call *call);
tutti_status tu_cuda_set32(void *state, int device, uint32_t *words, uint32_t value, size_t count,
                           const tu_backend_call *call);
tutti_status tu_cuda_write32(void *state, int device, uint32_t *word, uint32_t value, const tu_backend_call *call);

/* team.c */
extern const tu_device_executor tu_cuda_executor;

/* streams.c */
extern const tu_backend_streams tu_cuda_streams;

/* nvml.c: links between visible devices, count * count entries. */
tutti_status tu_cuda_links(const tu_backend_host *host, int *matrix, int count);

/* The kernels, embedded. */
extern const unsigned char tu_cuda_image[];

#endif
