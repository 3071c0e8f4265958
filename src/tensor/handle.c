/* SPDX-License-Identifier: Apache-2.0
 *
 * Handles at addresses that are given out once: see handle.h.
 *
 * Cost: making and ending a handle is a few loads and stores without a lock or an atomic operation, as long as a thread
 * ends what it made; a chunk of 10921 handles costs two system calls, which move page tables and clear nothing.
 */
#include "tensor/handle.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "tensor/process.h"

#define CHUNK TU_HANDLE_CHUNK
#define PAGE ((size_t)4096) /* pages may be larger; releasing less than one then does nothing */
#define SPARE_CHUNKS 2
#define WAITING_CHUNKS 2

#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
#define WINDOW ((size_t)1 << 32) /* their shadow memory is the larger part of the address space */
#else
#define WINDOW ((size_t)1 << 44)
#endif
#define LEAST_WINDOW (16 * CHUNK)

#define FIRST_SLOT ((sizeof(tu_handle_chunk) + sizeof(tt_tensor) - 1) / sizeof(tt_tensor) * sizeof(tt_tensor))
#define SLOTS ((CHUNK - FIRST_SLOT) / sizeof(tt_tensor))
_Static_assert(sizeof(tt_tensor) % 64 == 0, "handles lie on whole cache lines");

static char *end_of(const tu_handle_chunk *chunk) {
    return (char *)chunk + FIRST_SLOT + SLOTS * sizeof(tt_tensor);
}

/* ---- the window ---- */

/* The leak checker looks for pointers in memory from malloc alone, unless it is told. */
#if defined __SANITIZE_ADDRESS__
void __lsan_register_root_region(const void *begin, size_t size);
void __lsan_unregister_root_region(const void *begin, size_t size);
static void tell_leak_checker(const void *chunk, bool used) {
    if (used)
        __lsan_register_root_region(chunk, CHUNK);
    else
        __lsan_unregister_root_region(chunk, CHUNK);
}
#else
static void tell_leak_checker(const void *chunk, bool used) {
    (void)chunk;
    (void)used;
}
#endif

static void *map(void *at, size_t bytes, int protection, int flags) {
    void *data = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

/* As large as the system allows: limits of address space are respected. */
static bool reserve(tu_handle_window *window) {
    for (size_t bytes = WINDOW; bytes >= LEAST_WINDOW; bytes /= 2) {
        char *base = map(NULL, bytes + CHUNK, PROT_NONE, MAP_NORESERVE);
        if (base == NULL)
            continue;
        size_t ranges = bytes / CHUNK, words = (ranges + 63) / 64;
        window->taken = map(NULL, words * sizeof *window->taken, PROT_READ | PROT_WRITE, MAP_NORESERVE);
        if (window->taken == NULL) {
            munmap(base, bytes + CHUNK);
            continue;
        }
        window->base = (char *)(((uintptr_t)base + CHUNK - 1) & ~(CHUNK - 1));
        window->ranges = ranges;
        return true;
    }
    return false;
}

/* Addresses for a chunk: the next ones where no chunk lies. */
static char *take_range(tu_handle_window *window) {
    if (window->base == NULL && !reserve(window))
        return NULL;
    for (size_t tried = 0; tried < window->ranges; tried++) {
        size_t range = window->next++ % window->ranges;
        if (window->taken[range / 64] >> range % 64 & 1)
            continue;
        window->taken[range / 64] |= (uint64_t)1 << range % 64;
        return window->base + range * CHUNK;
    }
    return NULL;
}

/* Only zeros can be read there from now on. */
static void leave_range(tu_handle_window *window, char *at) {
    size_t range = (size_t)(at - window->base) / CHUNK;
    map(at, CHUNK, PROT_READ, MAP_FIXED | MAP_NORESERVE);
    window->taken[range / 64] &= ~((uint64_t)1 << range % 64);
}

/* ---- chunks; all with the lock held ---- */

static bool move_spare(tu_handle_window *window, char *to) {
    tu_handle_chunk *chunk = window->spare;
    if (chunk == NULL)
        return false;
    window->spare = chunk->link;
    window->spare_count--;
    bool moved = false;
#ifdef MREMAP_DONTUNMAP /* the old addresses are never without memory, which another thread might read just then */
    moved = mremap(chunk, CHUNK, CHUNK, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == (void *)to;
#endif
    leave_range(window, (char *)chunk);
    return moved;
}

static tu_handle_chunk *new_chunk(tu_handle_window *window) {
    char *at = take_range(window);
    if (at == NULL)
        return NULL;
    if (!move_spare(window, at) && map(at, CHUNK, PROT_READ | PROT_WRITE, MAP_FIXED) == NULL) {
        leave_range(window, at);
        return NULL;
    }
    tell_leak_checker(at, true);
    tu_handle_chunk *chunk = (tu_handle_chunk *)(void *)at;
    atomic_init(&chunk->live, (uint32_t)SLOTS + 1);
    chunk->next = at + FIRST_SLOT;
    return chunk;
}

/* All of its handles are dead. */
static void retire(tu_handle_window *window, tu_handle_chunk *chunk) {
    tell_leak_checker(chunk, false);
    if (window->spare_count >= SPARE_CHUNKS) {
        leave_range(window, (char *)chunk);
        return;
    }
    chunk->link = window->spare;
    window->spare = chunk;
    window->spare_count++;
}

static bool dead_between(const tu_handle_chunk *chunk, size_t from, size_t to) {
    size_t first = from <= FIRST_SLOT ? 0 : (from - FIRST_SLOT) / sizeof(tt_tensor);
    for (size_t i = first; i < SLOTS && FIRST_SLOT + i * sizeof(tt_tensor) < to; i++) {
        const tt_tensor *x = (const tt_tensor *)(const void *)((const char *)chunk + FIRST_SLOT) + i;
        if (atomic_load_explicit(&x->magic, memory_order_acquire) == TU_MAGIC_ALIVE)
            return false;
    }
    return true;
}

/* A few handles that live long keep a full chunk; the pages of the others go. */
static void release_dead_pages(tu_handle_chunk *chunk) {
    for (size_t at = PAGE, end; at < CHUNK; at = end) {
        for (end = at; end < CHUNK && dead_between(chunk, end, end + PAGE);)
            end += PAGE;
        if (end > at)
            madvise((char *)chunk + at, end - at, MADV_DONTNEED);
        else
            end += PAGE;
    }
}

static void drop_reference(tu_handle_window *window, tu_handle_chunk *chunk) {
    if (atomic_fetch_sub_explicit(&chunk->live, 1, memory_order_acq_rel) == 1)
        retire(window, chunk);
}

/* A full chunk waits, while its last handles die, until some others are full. */
static void wait_for_dead(tu_handle_window *window, tu_handle_chunk *chunk) {
    if (atomic_load_explicit(&chunk->live, memory_order_acquire) == 1) {
        drop_reference(window, chunk);
        return;
    }
    chunk->link = NULL;
    if (window->waiting_count == 0)
        window->waiting_first = chunk;
    else
        window->waiting_last->link = chunk;
    window->waiting_last = chunk;
    if (++window->waiting_count <= WAITING_CHUNKS)
        return;
    tu_handle_chunk *oldest = window->waiting_first;
    window->waiting_first = oldest->link;
    window->waiting_count--;
    if (atomic_load_explicit(&oldest->live, memory_order_acquire) > 1)
        release_dead_pages(oldest);
    drop_reference(window, oldest);
}

/* The owner gives the chunk up: what it ended itself is subtracted now. */
static void disown(tu_handle_chunk *chunk) {
    atomic_store_explicit(&chunk->owner, NULL, memory_order_relaxed);
    atomic_fetch_sub_explicit(&chunk->live, chunk->died, memory_order_acq_rel);
    chunk->died = 0;
}

/* ---- handles ---- */

/* The thread's chunk is full, or it has none: another one. */
bool tu_handle_next_chunk(tu_thread *self) {
    tu_handle_window *window = tu_process_handles();
    if (tu_thread_register() != TUTTI_OK)
        return false;
    pthread_mutex_lock(&window->lock);
    if (self->handles != NULL) {
        disown(self->handles);
        wait_for_dead(window, self->handles);
    }
    tu_handle_chunk *chunk = window->partial;
    if (chunk != NULL)
        window->partial = chunk->link;
    else
        chunk = new_chunk(window);
    pthread_mutex_unlock(&window->lock);
    self->handles = chunk;
    self->next_handle = self->last_handle = NULL;
    if (chunk == NULL)
        return false;
    chunk->died = 0;
    atomic_store_explicit(&chunk->owner, self, memory_order_relaxed);
    self->next_handle = chunk->next;
    self->last_handle = end_of(chunk);
    return true;
}

void tu_handle_end_foreign(tu_handle_chunk *chunk) {
    if (atomic_fetch_sub_explicit(&chunk->live, 1, memory_order_acq_rel) != 1)
        return;
    tu_handle_window *window = tu_process_handles();
    pthread_mutex_lock(&window->lock);
    retire(window, chunk);
    pthread_mutex_unlock(&window->lock);
}

const char *tu_handle_was(const tt_tensor *x, char *buffer, size_t size) {
    buffer[0] = '\0';
    if (atomic_load_explicit(&x->magic, memory_order_acquire) == TU_MAGIC_DEAD)
        snprintf(buffer, size, " (it was %s)", tu_describe(x));
    return buffer;
}

void tu_handle_leave(tu_thread *self) {
    tu_handle_chunk *chunk = self->handles;
    if (chunk == NULL)
        return;
    tu_handle_window *window = tu_process_handles();
    pthread_mutex_lock(&window->lock);
    disown(chunk);
    chunk->next = self->next_handle;
    if (self->next_handle == self->last_handle) {
        wait_for_dead(window, chunk);
    } else {
        chunk->link = window->partial;
        window->partial = chunk;
    }
    pthread_mutex_unlock(&window->lock);
    self->handles = NULL;
    self->next_handle = self->last_handle = NULL;
}

void tu_handle_trim(void) {
    tu_handle_window *window = tu_process_handles();
    pthread_mutex_lock(&window->lock);
    while (window->spare != NULL) {
        tu_handle_chunk *chunk = window->spare;
        window->spare = chunk->link;
        window->spare_count--;
        leave_range(window, (char *)chunk);
    }
    pthread_mutex_unlock(&window->lock);
}
