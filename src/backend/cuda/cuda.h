/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CUDA backend: this rank's devices, its groups on them, and what the files of this folder offer each other.
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
#define TU_CUDA_GROUPS 4096 /* of one rank on one device, at one time */
#define TU_CUDA_BOUNCES 8
#define TU_CUDA_BOUNCE ((size_t)256 << 10) /* bytes of a slot */
#define TU_CUDA_USERS 32                   /* streams that a rank copies on at one time, where ranks share a process */

typedef enum tu_cuda_kernel {
#define KERNEL(id, name) TU_CUDA_##id,
#include "kernels.def"
#undef KERNEL
    TU_CUDA_KERNEL_COUNT
} tu_cuda_kernel;

const char *tu_cuda_kernel_name(tu_cuda_kernel kernel);

/* The last copy that Tutti put into a stream. */
typedef struct tu_cuda_use {
    uint64_t stream; /* tu_cuda_stream_id; 0: this entry is free */
    CUevent event;
} tu_cuda_use;

typedef struct tu_cuda_device {
    bool open;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernels[TU_CUDA_KERNEL_COUNT];
    CUstream
        stream; /* of the backend's own, for small things that wait for nobody. It has a high priority: so it shares
                   no queue of the hardware with the streams of users, whose kernels may wait for other ranks */
    int processors;
    int major;
    int handle_type; /* for sharing: fabric or descriptor; 0 until tried; under tu_cuda.lock */
    bool multicast, rdma;
    CUuuid uuid;

    CUdeviceptr words;        /* tu_cuda_words[TU_CUDA_GROUPS] */
    tu_cuda_report *reports;  /* tu_cuda_report[TU_CUDA_GROUPS], pinned */
    CUdeviceptr reports_here; /* the same for kernels */
    bool *words_taken;        /* which are in use; under tu_cuda.lock */
    tu_cuda_words *answer;    /* of a test, or of a group's words, pinned; under answer_lock */
    CUdeviceptr answer_here;
    pthread_mutex_t answer_lock;

    unsigned char *bounce;   /* TU_CUDA_BOUNCES slots of pinned memory, for bytes of the host on their way to peers */
    CUdeviceptr bounce_here; /* the same for kernels */
    CUevent bounced[TU_CUDA_BOUNCES]; /* behind the last use of each slot; NULL: none yet; under bounce_lock */
    unsigned next_bounce;
    pthread_mutex_t bounce_lock;

    pthread_mutex_t use_lock; /* the uses: of copies, not of operations */
    tu_cuda_use uses[TU_CUDA_USERS];
    int next_use;
} tu_cuda_device;

typedef struct tu_cuda_group tu_cuda_group;

typedef struct tu_cuda {
    const tu_backend_host *host;
    tutti_world *world;
    tu_cuda_driver driver;
    int device_count;
    pthread_mutex_t lock; /* opening devices, the list of groups; never held while the driver may wait for the device */
    tu_cuda_device devices[TU_CUDA_DEVICES];
    tu_cuda_group *groups;       /* under lock */
    uint64_t groups_made;        /* likewise */
    _Atomic bool shared_process; /* another rank of this process uses these devices: never wait for a whole context, its
                                    kernels may wait for us */
    pthread_t watcher;           /* watch.c */
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    bool watch_stop; /* under watch_lock */
    _Atomic bool watched;
} tu_cuda;

/* Whose turn it is: one word that the thread which has the turn owns. Nobody else asks for it unless two threads of a
 * rank use the same group at the same moment; then one waits for the other's launch. */
typedef struct tu_cuda_turn {
    _Atomic bool taken;
} tu_cuda_turn;

#define TU_CUDA_ASIDES 44

/* A group on a device, as this rank uses it: what went wrong there, and the order of what is launched. */
struct tu_cuda_group {
    tu_cuda *cuda;
    tutti_group *group;
    int device_index;
    tu_cuda_device *device;
    int slot;           /* of the words and the report */
    CUdeviceptr words;  /* tu_cuda_words on the device */
    CUdeviceptr report; /* device address of `told` */
    tu_cuda_report *told;
    _Atomic uint32_t expired_told; /* signals that ran out of time and were returned as errors */
    _Atomic bool end_passed_on;    /* the group's own end has been told to the kernels */
    bool software;                 /* TUTTI_MULTICAST=software: the processors stand in for the switch */
    tu_cuda_group *next;

    tu_cuda_turn turn;         /* taken over each launch: everything below */
    _Atomic uint64_t launched; /* thread blocks of eager kernels so far; also read without the turn */
    CUstream last_stream;      /* of the last eager one, where launched > 0 */
    CUevent captured;          /* behind the last captured one */
    uint64_t capture;          /* that it was captured in; 0: none yet */
    CUstream captured_stream;
    uint64_t settled; /* of `launched`, known to have ended; under tu_cuda.lock */
    uint64_t number;  /* no other group of this rank has it */

    tu_backend_block
        asides[TU_CUDA_ASIDES]; /* aside.c: the last one is in use. Under the turn of who runs collectives */
    int aside_count;
};

/* Ranks that are threads of one process, on one device: their streams share queues of the hardware. What a rank puts
 * into its stream behind a kernel that waits must not stand before the kernel that it waits for. So a rank that
 * launched a wait goes on when the partner has launched what is waited for, or after TU_CUDA_HOLD_NS: calls stay
 * asynchronous. These are the counts of launches that they look at; every word has one writer. */
#define TU_CUDA_HOLD_NS INT64_C(1000000000)

typedef struct tu_cuda_desk {
    _Atomic int references;
    _Atomic(_Atomic uint32_t *) counts; /* of a signal area: made by the first that attaches; see signal.c */
} tu_cuda_desk;

/* A block: physical memory, its handle, where it is mapped. */
typedef struct tu_cuda_block {
    CUmemGenericAllocationHandle memory;
    CUdeviceptr address;
    size_t bytes; /* rounded to the granularity */
    int device;
    CUevent cleared;    /* behind the clearing on the caller's stream; NULL: it is clear */
    tu_cuda_desk *desk; /* for ranks of this process; made by export */
} tu_cuda_block;

/* What a rank tells the others about its block. */
typedef struct tu_cuda_ticket {
    uint64_t bytes; /* of the physical memory */
    uint64_t block; /* address of the tu_cuda_block in the sender's process */
    int32_t pid;
    int32_t handle_type;
    int32_t multicast; /* whether its device can, and nobody switched it off */
    int32_t device;
    CUuuid uuid;
    unsigned char fabric[64];
} tu_cuda_ticket;
_Static_assert(sizeof(tu_cuda_ticket) <= TU_BACKEND_TICKET_BYTES, "a ticket must fit");

/* All members' blocks, mapped into one range. */
typedef struct tu_cuda_map {
    tu_cuda *cuda;
    tu_cuda_device *device;
    CUdeviceptr base; /* member r's at base + r * stride */
    size_t stride;
    int count;
    CUmemGenericAllocationHandle *handles; /* imported, 0 for none */
    bool *mapped;
    bool *near;                             /* members that are threads of this process, on this device */
    int sharing;                            /* members on the device that has most of them */
    tu_cuda_desk *desk;                     /* theirs and ours; NULL: there are none */
    CUmemGenericAllocationHandle multicast; /* 0: none */
    CUdeviceptr multicast_address;
    bool multicast_bound;
} tu_cuda_map;

/* ---- driver.c ---- */
tutti_status tu_cuda_driver_load(const tu_backend_host *host, tu_cuda_driver *driver);
/* The error that says which call of the driver failed, and how. */
tutti_status tu_cuda_driver_error(const tu_backend_host *host, const tu_cuda_driver *driver, CUresult result,
                                  const char *what);
static inline tutti_status tu_cuda_error(const tu_cuda *cuda, CUresult result, const char *what) {
    return tu_cuda_driver_error(cuda->host, &cuda->driver, result, what);
}

/* ---- world.c ---- */
tutti_status tu_cuda_probe(const tu_backend_host *host, int *device_count);
/* Into memory of the caller's, which is zeroed; after an error there is nothing to close. */
tutti_status tu_cuda_open(const tu_backend_host *host, tutti_world *world, tu_cuda *cuda);
void tu_cuda_close(tu_cuda *cuda);

/* ---- agree.c ---- */
/* Collective and bounded, where each rank did something alone before: `own` is how it went here. When it went wrong
 * anywhere all fail: with its own words there, and with that rank's name and words elsewhere. */
tutti_status tu_cuda_agree(const tu_backend_host *host, tutti_group *group, const char *purpose, int64_t deadline,
                           tutti_status own);

/* ---- device.c ---- */
/* Makes a device ready; index -1 is the current one. */
tutti_status tu_cuda_device_open(tu_cuda *cuda, int index, tu_cuda_device **device, int *chosen);
void tu_cuda_device_close(tu_cuda *cuda, tu_cuda_device *device);
/* Around every use of a device. */
tutti_status tu_cuda_enter(tu_cuda *cuda, tu_cuda_device *device);
void tu_cuda_leave(tu_cuda *cuda);

/* Bounded: TIMEOUT when another thread of this rank keeps the turn that long. */
tutti_status tu_cuda_turn_take(tu_cuda *cuda, tu_cuda_turn *turn, int64_t timeout_ns);
void tu_cuda_turn_give(tu_cuda_turn *turn);

/* ---- group.c ---- */
tutti_status tu_cuda_group_get(tu_cuda *cuda, tutti_group *group, int device_index, tu_cuda_group **result);
/* What the kernels of the group found, as this thread's error; also tells them when the group itself has ended. Signals
 * that ran out of time are not told here. */
tutti_status tu_cuda_group_check(tu_cuda_group *group);
/* For tutti_group_check: on all devices, and each expired signal once. */
tutti_status tu_cuda_check(void *state, tutti_group *group);
void tu_cuda_forget(void *state, tutti_group *group);
void tu_cuda_groups_free(tu_cuda *cuda);
/* Waits for every eager kernel that this rank's groups have on the device. The context is entered. */
void tu_cuda_await_kernels(tu_cuda *cuda, tu_cuda_device *device);

/* ---- aside.c ---- */
/* Memory of this rank's own for collectives in place: `name`. In a capture there must be enough already. */
tutti_status tu_cuda_aside_get(tu_cuda_group *on, uint64_t bytes, uint64_t capture, const char *name, uint64_t *at);
void tu_cuda_asides_free(tu_cuda_group *on);
bool tu_cuda_overlaps(const void *one, uint64_t one_bytes, const void *other, uint64_t other_bytes);
/* Of a move among `size` members: how many bytes of its input a copy must have, because they would be overwritten
 * before they are read; 0: none. */
uint64_t tu_cuda_overwritten(const tu_device_task *task, int size);

/* ---- order.c ---- */
/* Launches of a group come one after the other, whichever streams they are on: begin makes the stream wait for what
 * other streams have of the group; end says how many thread blocks were launched (0: nothing was). Between them the
 * caller launches, with `order->words` in the arguments. */
typedef struct tu_cuda_order {
    tu_cuda_group *group;
    CUstream stream;
    uint64_t capture; /* 0: the stream does not capture */
    bool joined;      /* in the capture the stream waits for another one */
    tu_cuda_group_words words;
} tu_cuda_order;
/* capture: tu_cuda_capture of the stream. */
tutti_status tu_cuda_order_begin(tu_cuda_group *group, CUstream stream, uint64_t capture, int64_t timeout_ns,
                                 uint32_t operation, uint64_t sequence, tu_cuda_order *order);
void tu_cuda_order_end(tu_cuda_order *order, unsigned blocks);
/* How a kernel is launched: with nothing special; as one of ranks that are all on this device, which order their memory
 * among each other; or as such a one that comes onto the device while the kernel in front of it on the stream ends. */
typedef enum tu_cuda_manner {
    TU_CUDA_APART,
    TU_CUDA_TOGETHER,
    TU_CUDA_OVERLAPPING
} tu_cuda_manner;
/* Where the device's context is not the current one, the driver refuses, and the launch is made again with it. */
tutti_status tu_cuda_launch(tu_cuda *cuda, tu_cuda_device *device, tu_cuda_kernel kernel, unsigned blocks,
                            unsigned threads, void *args, CUstream stream, tu_cuda_manner manner);
/* Waits until *count has reached `due`, the group has ended, or the hold or the timeout is over. False: it has not. */
bool tu_cuda_hold(tu_cuda_group *group, const _Atomic uint32_t *count, uint32_t due, int64_t timeout_ns);
/* Notes that this rank put a copy into the stream. await_uses waits for all such copies, and for all kernels of this
 * rank's groups: for memory that is to be unmapped while other ranks of the process use the device. */
void tu_cuda_note_use(tu_cuda *cuda, tu_cuda_device *device, CUstream stream);
void tu_cuda_await_uses(tu_cuda *cuda, tu_cuda_device *device);

/* ---- streams.c ---- */
extern const tu_backend_streams tu_cuda_streams;
/* Tells streams apart, also when a handle is used again. Never 0. A question to the driver: not for every call. */
uint64_t tu_cuda_stream_id(const tu_cuda *cuda, CUstream stream);
/* Of the capture that the stream is in; 0: none. */
uint64_t tu_cuda_capture(tu_cuda *cuda, CUstream stream);

/* ---- watch.c ---- */
void tu_cuda_watch_start(tu_cuda *cuda);
void tu_cuda_watch(tu_cuda *cuda); /* the thread, on first need */
void tu_cuda_watch_stop(tu_cuda *cuda);

/* ---- memory.c ---- */
extern const tu_backend_memory tu_cuda_memory;
tutti_status tu_cuda_allocate(void *state, const tu_backend_request *request, tu_backend_block *block);
void tu_cuda_free(void *state, tu_backend_block *block);
tutti_status tu_cuda_export(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
void tu_cuda_unexport(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
tutti_status tu_cuda_import(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                            tu_backend_ticket *tickets, tu_backend_map *map);
void tu_cuda_unmap(void *state, tu_backend_map *map);
tutti_status tu_cuda_clear(void *state, const tu_backend_block *block, size_t offset, size_t bytes);
/* Member r's block of an imported map lies at base + r * stride. */
void tu_cuda_map_plan(const tu_backend_map *map, uint64_t *base, uint64_t *stride);
CUresult tu_cuda_map_at(tu_cuda *cuda, tu_cuda_device *device, CUdeviceptr address, size_t bytes,
                        CUmemGenericAllocationHandle memory);

/* One reference less. */
void tu_cuda_desk_drop(tu_cuda_desk *desk);

/* ---- multicast.c ---- */
/* One address that writes to all members and reduces over them. Whatever fails, all members go on without it together.
 * `broken`: this rank's own mapping failed already; it takes part only so that nobody waits for it. */
tutti_status tu_cuda_multicast_make(tu_cuda_map *map, tutti_group *group, const tu_cuda_block *own, int rank,
                                    const tu_cuda_ticket *tickets, bool broken, int64_t deadline);
void tu_cuda_multicast_drop(tu_cuda_map *map);
bool tu_cuda_has_multicast(void *state, int device_index);

/* ---- copy.c ---- */
tutti_status tu_cuda_put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                         const tu_backend_call *call);
tutti_status tu_cuda_get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                         const tu_backend_call *call);
tutti_status tu_cuda_copy(void *state, int device, void *to, const void *from, size_t bytes,
                          const tu_backend_call *call);
tutti_status tu_cuda_set32(void *state, int device, uint32_t *words, uint32_t value, size_t count,
                           const tu_backend_call *call);
tutti_status tu_cuda_write32(void *state, int device, uint32_t *word, uint32_t value, const tu_backend_call *call);

/* ---- signal.c ---- */
extern const tu_backend_remote tu_cuda_remote;

/* ---- collective.c ---- */
extern const tu_device_executor tu_cuda_executor;

/* ---- nvml.c ---- */
tutti_status tu_cuda_links(const tu_backend_host *host, int *matrix, int count);

/* The image of the kernels: image.S. */
extern const unsigned char tu_cuda_image[];

#endif
