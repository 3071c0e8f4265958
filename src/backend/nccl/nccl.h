/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the NCCL backend: one communicator per (group, device), collectives on it, and symmetric memory by windows.
 *
 * What is no business of NCCL's (devices, streams, events, signals, puts and gets through the addresses of peers) is
 * the CUDA backend's: its host side and its kernels are part of this plug-in, and a tu_nccl begins with a tu_cuda.
 *
 * NCCL waits for ever where a rank does not come, and two ranks that call different things hang or corrupt memory. So
 * nobody enters it before Tutti has seen on the host that all ranks make the same call (tu_device_executor.meets), and
 * a watcher ends a group's communicator when a rank has died, the group has ended, or the stream has been in an
 * operation until its deadline.
 *
 * Communicators are made in NCCL's non-blocking mode, so that the call comes back whatever the other ranks do. There
 * each operation is done by a thread that NCCL starts for it, which takes five times as long as the operation. So where
 * a communicator can be stopped by another thread without being freed (ncclCommRevoke, 2.28), operations are called on
 * a blocking one that is split from the first; the watcher stops it when a call stays inside until its deadline.
 */
#ifndef TU_NCCL_NCCL_H
#define TU_NCCL_NCCL_H

#include "cuda.h"
#include "library.h"

typedef struct tu_nccl_group tu_nccl_group;

/* A communicator of the program's, for a group that has not used NCCL yet. */
typedef struct tu_nccl_brought {
    const tutti_group *group;
    ncclComm_t comm;
    struct tu_nccl_brought *next;
} tu_nccl_brought;

typedef struct tu_nccl {
    tu_cuda cuda; /* first: functions of the CUDA backend take this for theirs */
    tu_nccl_library library;
    pthread_mutex_t lock;       /* the list of groups */
    pthread_cond_t lock_change; /* one was made, or was not */
    tu_nccl_group *groups;      /* under lock, and so is: */
    tu_nccl_brought *brought;
    pthread_t watcher; /* watch.c */
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    bool watch_stop, watched; /* under watch_lock */
} tu_nccl;

/* How far streams have come in a group's operations: counted up by kernels before and behind each operation. */
typedef struct tu_nccl_passed {
    uint64_t begun, ended;
} tu_nccl_passed;

/* In pinned memory. Graphs count for themselves, since they run any number of times: so the n-th operation that was not
 * captured is the one that a stream is in while n have begun. */
typedef struct tu_nccl_marks {
    tu_nccl_passed eager, graphs;
} tu_nccl_marks;

#define TU_NCCL_REMEMBERED 256
#define TU_NCCL_SCRATCH ((size_t)1 << 20) /* bytes that a group has from the beginning */

/* What was put into streams, for messages. */
typedef struct tu_nccl_said {
    uint64_t number; /* from 1, of this group's operations in streams; 0: of a graph */
    uint64_t sequence;
    uint32_t operation;
    int64_t timeout_ns;
} tu_nccl_said;

typedef struct tu_nccl_spent {
    CUdeviceptr memory;
    struct tu_nccl_spent *next;
} tu_nccl_spent;

/* A group on a device: its communicator. */
struct tu_nccl_group {
    tu_nccl *nccl;
    tutti_group *group;
    int rank, size;
    int device_index;
    tu_cuda_device *device;
    char name[64];
    bool brought; /* the communicator is the program's: never freed here */
    tu_nccl_group *next;
    bool made; /* under tu_nccl.lock: all members have it; until then it is its maker's alone */

    /* Until when the call of NCCL that holds `lock` may stay inside; 0: there is none, it comes back by itself, or the
     * watcher has stopped it. */
    _Atomic int64_t inside_until;
    pthread_mutex_t stop_lock; /* the watcher stops a call of another thread: comm does not go away meanwhile */
    bool revoked;              /* under stop_lock: comm was stopped; once is enough */

    pthread_mutex_t lock; /* everything below: calls of NCCL on this communicator come one after the other */
    ncclComm_t parent;    /* non-blocking: from which comm, a blocking one, was split; NULL: comm is not blocking */
    ncclComm_t comm;      /* NULL: not made, or aborted */
    bool aborted;
    int windows;          /* that are mapped: kernels may be at them, also when the group has ended */
    ncclComm_t doomed;    /* comm, stopped while there were windows: freed with the last of them; NULL: none */
    CUstream last_stream; /* of the last operation, where last_event has been recorded */
    CUevent last_event;
    bool last_recorded;
    CUdeviceptr scratch; /* on the device; for barriers and inputs in place */
    size_t scratch_bytes;
    bool scratch_captured;  /* a graph has its address: it stays until the group goes */
    tu_nccl_spent *spent;   /* scratch that was outgrown, and has been captured */
    tu_nccl_marks *marks;   /* pinned */
    CUdeviceptr marks_here; /* the same for kernels */
    uint64_t number;        /* operations so far that were not captured */
    tu_nccl_said said[TU_NCCL_REMEMBERED];

    /* The watcher's own. */
    tu_nccl_marks seen;                /* at its last look */
    int64_t eager_since, graphs_since; /* when it first saw these */
};

/* ---- group.c ---- */
/* Collective and bounded on first need. device_index -1 is the current one. On a group that is there for another GPU it
 * fails on this rank alone, and *result is the group. */
tutti_status tu_nccl_group_get(tu_nccl *nccl, tutti_group *group, int device_index, int64_t deadline,
                               tu_nccl_group **result);
/* The same where it has been made, else NULL. */
tu_nccl_group *tu_nccl_group_find(tu_nccl *nccl, const tutti_group *group);
/* A communicator of the program's for the group: taken at its first use. */
tutti_status tu_nccl_bring(void *state, tutti_group *group, void *communicator);
/* Stops what is under way, and later calls of NCCL. What windows map stays until they go. The caller holds on->lock. */
void tu_nccl_abort(tu_nccl_group *on);
/* A window is gone, and nothing on the device uses it: frees what waited for the last one. Likewise. */
void tu_nccl_window_gone(tu_nccl_group *on);
/* Frees another thread from a call of NCCL that went inside until `until`, if it is still there; that thread aborts. */
void tu_nccl_stop(tu_nccl_group *on, int64_t until);
/* Around calls of NCCL that may stay inside; the caller holds on->lock. Coming out takes what the call returned, and
 * gives what counts: whatever NCCL says of a communicator that was stopped meanwhile, the operation is lost. */
void tu_nccl_go_inside(tu_nccl_group *on, int64_t deadline);
ncclResult_t tu_nccl_come_out(tu_nccl_group *on, ncclResult_t result);
void tu_nccl_forget(void *state, tutti_group *group);
void tu_nccl_groups_free(tu_nccl *nccl);

/* What the last call of NCCL returned, as this thread's error. */
tutti_status tu_nccl_error(const tu_nccl_group *on, ncclResult_t result, const char *what);
/* Waits, bounded, until NCCL has done what `result` says is under way. Aborts the communicator when it has not. The
 * caller holds on->lock. */
tutti_status tu_nccl_settle(tu_nccl_group *on, ncclResult_t result, int64_t deadline, const char *what);

/* ---- watch.c ---- */
void tu_nccl_watch_start(tu_nccl *nccl);
void tu_nccl_watch(tu_nccl *nccl); /* the thread, on first need */
void tu_nccl_watch_stop(tu_nccl *nccl);

/* ---- memory.c ---- */
extern const tu_backend_memory tu_nccl_memory;

/* ---- collective.c ---- */
extern const tu_device_executor tu_nccl_executor;
/* What ended the group, as this thread's error. */
tutti_status tu_nccl_check(void *state, tutti_group *group);

#endif
