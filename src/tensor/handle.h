/* SPDX-License-Identifier: Apache-2.0
 *
 * Where tensor handles lie, so that a dead one is never taken for a living one. The address is the generation: handles
 * are cut, one after the other, from chunks of a large window of addresses, and an address is given out once; it comes
 * again only when the whole window has been used (with 16 TiB that is after ninety thousand million handles). Memory is
 * used again all the same: when all handles of a chunk are dead its pages move to the next fresh addresses, and what
 * they leave behind reads as zeros for ever. So a user's pointer may always be read, and says by its magic number
 * whether it is alive.
 *
 * A chunk is filled by one thread, its owner; any thread may end a handle.
 */
#ifndef TU_TENSOR_HANDLE_H
#define TU_TENSOR_HANDLE_H

#include <pthread.h>

#include "tensor/tensor.h"
#include "tensor/thread.h"

/* The head of a chunk, at its first address. */
typedef struct tu_handle_chunk {
    /* The thread that fills it; only that thread writes it, and only its own address matters to a reader: relaxed. */
    _Atomic(tu_thread *) owner;
    /* Handles that are alive or not made yet, and one while it has an owner or stands in a list. Pair: release when a
     * handle ends, acquire by who brings it to zero. The owner's own are subtracted when it leaves the chunk. */
    _Atomic uint32_t live;
    uint32_t died; /* handles that the owner ended; written by the owner alone */
    char *next;    /* the next handle, while nobody owns it */
    struct tu_handle_chunk *link;
} tu_handle_chunk;

#define TU_HANDLE_CHUNK ((size_t)2 << 20) /* a whole page directory entry: moving a chunk moves one pointer */

/* The process's window; it is reserved at the first handle and stays until the process ends. */
typedef struct tu_handle_window {
    pthread_mutex_t lock; /* guards all of it; taken once per chunk, not per handle */
    char *base;
    size_t ranges, next;      /* addresses for so many chunks; the range to look at first for the next one */
    uint64_t *taken;          /* a bit per range: a chunk lies there */
    tu_handle_chunk *partial; /* of threads that have ended, not full */
    tu_handle_chunk *spare;   /* full of dead handles: their pages are used next */
    int spare_count;
    tu_handle_chunk *waiting_first, *waiting_last; /* full, with handles alive when they became so */
    int waiting_count;
} tu_handle_window;

/* What the two below do once per chunk, or for another thread's handle. */
bool tu_handle_next_chunk(tu_thread *self);
void tu_handle_end_foreign(tu_handle_chunk *chunk);

/* Memory for a handle of this thread, with nothing in it set; NULL when there is none. */
static inline tt_tensor *tu_handle_new(tu_thread *self) {
    if (__builtin_expect(self->next_handle == self->last_handle, 0) && !tu_handle_next_chunk(self))
        return NULL;
    char *at = self->next_handle;
    self->next_handle = at + sizeof(tt_tensor);
    /* Four handles ahead: what comes next lies there, in memory that was last touched a chunk ago. */
    __builtin_prefetch(at + 4 * sizeof(tt_tensor), 1);
    __builtin_prefetch(at + 4 * sizeof(tt_tensor) + 64, 1);
    __builtin_prefetch(at + 4 * sizeof(tt_tensor) + 128, 1);
    return (tt_tensor *)(void *)at;
}

/* The handle is dead from now on. What it was can still be asked for a while: see tu_handle_was. */
static inline void tu_handle_end(tu_thread *self, tt_tensor *x) {
    tu_handle_chunk *chunk = (tu_handle_chunk *)((uintptr_t)x & ~(TU_HANDLE_CHUNK - 1));
    atomic_store_explicit(&x->magic, TU_MAGIC_DEAD, memory_order_release);
    if (__builtin_expect(atomic_load_explicit(&chunk->owner, memory_order_relaxed) == self, 1))
        chunk->died++;
    else
        tu_handle_end_foreign(chunk);
}

/* " (it was f32 [2, 3] \"weight\")" of a dead handle, or "" where that is not known any more. */
const char *tu_handle_was(const tt_tensor *x, char *buffer, size_t size);

/* At the thread's end: another one fills its chunk. */
void tu_handle_leave(tu_thread *self);
/* Gives memory that is not in use back to the system. */
void tu_handle_trim(void);

#endif
