/* SPDX-License-Identifier: Apache-2.0
 *
 * The one object that libtutti-tensor keeps for the whole process. It has no constructor: its parts are made on first
 * need and end with tt_finalize. What it holds:
 *
 *   threads      those that use tensors, for tt_count, and what ended ones left on the books
 *   pool         a hold on the pool of threads that compute, which libtutti owns (base/pool.h)
 *   handles      the window of addresses where handles lie (tensor/handle.h), which outlives tt_finalize
 *   large        the segments that large blocks of memory are cut from (tensor/large.h)
 *   devices      the plug-in for tensors on GPUs, and those that are in use (tensor/on_device.h)
 *   told         which of the warnings that are given once were given
 *   numbered     names that were asked for, and how often (of functions that leave files for those who look inside)
 *   locks        for the lists of hooks, and for the lists of collectives that hang on storages
 *
 * Everything else belongs to a thread (tensor/thread.h: scopes, errors, spare memory, the random generator, the open
 * batch, an engine of oneDNN) or to a world (functional/registry.c: collectives in flight). A forked child starts with
 * fresh locks and one thread. Beside it stand what is computed once and never changes, the table of CRC-32
 * (zip_parse.c), and what other libraries were told, once, of the instruction set (kernels.c): it holds for them,
 * whatever becomes of this one. scripts/check-state looks for anything else.
 */
#ifndef TU_TENSOR_PROCESS_H
#define TU_TENSOR_PROCESS_H

#include <pthread.h>

#include "memory/backend.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

/* Makes the calling thread known; called once per thread. An errno, or 0. */
int tu_process_add_thread(tu_thread *self);

/* Where handles lie. */
struct tu_handle_window *tu_process_handles(void);

/* Segments of large blocks. */
struct tu_large *tu_process_large(void);

/* The devices other than the CPU. Opening is under the lock; a device that is there stays until tt_finalize, and behind
 * it where somebody holds them. */
typedef struct tu_process_devices {
    pthread_mutex_t lock;
    tu_backend_opened opened;
    _Atomic(struct tu_device *) at[64];
    struct tu_device_watch *watches; /* that threads have not asked yet */
    atomic_int holders;              /* see tu_devices_hold */
} tu_process_devices;
tu_process_devices *tu_process_devices_get(void);
void tu_devices_close(tu_process_devices *devices);

/* How many threads may compute at once, the caller's included. */
int tu_process_compute_threads(void);

/* True for the first who asks: what is said once. */
typedef enum tu_warning {
    TU_WARN_NO_COMPILER, /* loops are not compiled */
    TU_WARN_NO_KERNELS,  /* the same on a GPU */
    TU_WARN_NO_CACHE,    /* what is built for a GPU is not kept */
    TU_WARN_NO_FILES,    /* nothing can be written for those who look inside */
    TU_WARNINGS
} tu_warning;
bool tu_process_tell_once(tu_warning warning);

/* How often this name was asked for, this time included. Without memory to count, 1. */
int tu_process_number(const char *name);

/* Guards the lists that hooks stand in. Never held while a hook runs or ends. */
pthread_mutex_t *tu_process_hooks_lock(void);
/* Guards the list of flights of this storage. Held for a few stores only. */
pthread_mutex_t *tu_process_storage_lock(const tu_storage *storage);

#endif
