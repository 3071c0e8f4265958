/* SPDX-License-Identifier: Apache-2.0
 *
 * The heap: pieces carved from permanent segments. Each chunk (a segment and its books) is divided into granules; a
 * block is a run of them. The books are arrays beside the chunk, in memory that no peer can reach, so that
 * a peer that writes wild can spoil contents but not the heap; allocation takes no memory of its own.
 *
 * A block in the segment:   [ padding ][ counts of mappings, one per rank ][ the piece ]
 *
 * A freed block whose counts are not all zero stays in limbo until they are, or until their ranks are dead.
 *
 * Chunks stay mapped, here and at the peers, but the memory of one that is free goes back to the system, all but one of
 * them: it is reserved anew, which may fail, when the chunk is used again.
 * Budget: alloc and free are O(log n) without system calls, clearing the memory aside; a new chunk costs what reserving
 * does.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "job/inner.h"

#define GRANULE ((size_t)256)
#define FIRST_CHUNK ((size_t)256 << 10)
#define LARGEST_CHUNK ((size_t)8 << 20) /* a new one costs its first user 2 ms here */
#define BINS 24
#define NOBODY UINT32_MAX
#define QUICK_TRIES 16

typedef struct block_books {
    uint32_t length; /* at the first and last granule of a block: how many granules it has */
    uint32_t next;   /* at the first, free: next in its bin; in limbo: next there */
    uint32_t before; /* at the first: previous in its bin while free; offset of the piece in units of 64 while used */
    uint32_t start;  /* at the granule where the piece begins, used: the first granule of the block */
} block_books;

typedef struct tu_chunk {
    struct tu_chunk *next;
    tu_segment *segment;
    uint32_t granules;
    bool empty;          /* its memory was given back */
    uint32_t fresh;      /* granules from here on have never been used and are zero */
    uint32_t limbo;      /* first block there */
    uint32_t bins[BINS]; /* free blocks of 2^i granules and more */
    uint8_t *used;       /* at the first and last granule of a block: whether it is used (or in limbo) */
    block_books books[];
} tu_chunk;

struct tu_heap {
    tu_job *job;
    pthread_mutex_t lock;
    tu_chunk *chunks; /* newest, and so largest, first */
    size_t next_bytes;
};

static size_t chunk_bytes(const tu_chunk *chunk) {
    return (size_t)chunk->granules * GRANULE;
}

tutti_status tu_heap_create(tu_job *job, tu_heap **made) {
    tu_heap *heap = calloc(1, sizeof *heap);
    if (heap == NULL)
        return tu_error_memory("the heap of shared memory", sizeof *heap);
    heap->job = job;
    heap->next_bytes = FIRST_CHUNK;
    pthread_mutex_init(&heap->lock, NULL);
    *made = heap;
    return TUTTI_OK;
}

void tu_heap_free(tu_heap *heap) {
    if (heap == NULL)
        return;
    while (heap->chunks != NULL) {
        tu_chunk *chunk = heap->chunks;
        heap->chunks = chunk->next;
        tu_ledger_return(heap->job, chunk->segment->bytes - (chunk->empty ? chunk_bytes(chunk) : 0));
        tu_segment_drop(chunk->segment); /* lives on while somebody of this process maps a piece of it */
        free(chunk);
    }
    pthread_mutex_destroy(&heap->lock);
    free(heap);
}

/* ---- free blocks ---- */

static int bin_of(uint32_t length) {
    int bin = 31 - __builtin_clz(length);
    return bin < BINS ? bin : BINS - 1;
}

static void set_block(tu_chunk *chunk, uint32_t start, uint32_t length, bool used) {
    chunk->books[start].length = chunk->books[start + length - 1].length = length;
    chunk->used[start] = chunk->used[start + length - 1] = used;
}

static void put_into_bin(tu_chunk *chunk, uint32_t start, uint32_t length) {
    uint32_t *bin = &chunk->bins[bin_of(length)];
    set_block(chunk, start, length, false);
    chunk->books[start].before = NOBODY;
    chunk->books[start].next = *bin;
    if (*bin != NOBODY)
        chunk->books[*bin].before = start;
    *bin = start;
}

static void take_from_bin(tu_chunk *chunk, uint32_t start) {
    block_books *block = &chunk->books[start];
    if (block->before == NOBODY)
        chunk->bins[bin_of(block->length)] = block->next;
    else
        chunk->books[block->before].next = block->next;
    if (block->next != NOBODY)
        chunk->books[block->next].before = block->before;
}

/* Makes a block free and joins it with free neighbours; true when the whole chunk is free now. */
static bool give_back_block(tu_chunk *chunk, uint32_t start) {
    uint32_t length = chunk->books[start].length;
    if (start > 0 && !chunk->used[start - 1]) {
        uint32_t left = chunk->books[start - 1].length;
        start -= left;
        take_from_bin(chunk, start);
        length += left;
    }
    if (start + length < chunk->granules && !chunk->used[start + length]) {
        uint32_t right = chunk->books[start + length].length;
        take_from_bin(chunk, start + length);
        length += right;
    }
    put_into_bin(chunk, start, length);
    return length == chunk->granules;
}

/* ---- chunks that are free ---- */

static bool is_free(const tu_chunk *chunk) {
    return !chunk->used[0] && chunk->books[0].length == chunk->granules;
}

/* Gives the memory of a free chunk back, unless it is the only free one that has any. */
static void empty_chunk(tu_heap *heap, tu_chunk *chunk) {
    const tu_chunk *other = heap->chunks;
    while (other != NULL && (other == chunk || other->empty || !is_free(other)))
        other = other->next;
    if (other == NULL || chunk->empty ||
        fallocate(chunk->segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)chunk_bytes(chunk)) != 0)
        return;
    chunk->empty = true;
    chunk->fresh = 0; /* it will be zero again */
    tu_ledger_return(heap->job, chunk_bytes(chunk));
}

/* Reserves the memory of an empty chunk anew. */
static tutti_status fill_chunk(tu_heap *heap, tu_chunk *chunk, const char *what) {
    size_t bytes = chunk_bytes(chunk);
    tutti_status status = tu_ledger_begin(heap->job, what, bytes);
    if (status != TUTTI_OK)
        return status;
    int error;
    do
        error = fallocate(chunk->segment->fd, 0, 0, (off_t)bytes) == 0 ? 0 : errno;
    while (error == EINTR);
    tu_ledger_end(heap->job, bytes, error == 0);
    chunk->empty = error != 0;
    if (error == ENOSPC || error == ENOMEM)
        return tu_error(TUTTI_ERROR_MEMORY, "out of memory: %zu bytes of shared memory for %s could not be reserved",
                        bytes, what);
    return error == 0 ? TUTTI_OK
                      : tu_error_system(error, "cannot reserve %zu bytes of shared memory for %s", bytes, what);
}

/* ---- limbo ---- */

static bool is_held(tu_heap *heap, const tu_chunk *chunk, uint32_t start) {
    uint64_t offset = (uint64_t)chunk->books[start].before * 64;
    for (int rank = 0; rank < heap->job->size; rank++) {
        /* Acquire pairs with the release of tu_mapping_release: what that rank did there is over. */
        if (atomic_load_explicit(tu_piece_holds(heap->job, chunk->segment, offset, rank), memory_order_acquire) != 0 &&
            !tu_rank_exited(heap->job, rank))
            return true;
    }
    return false;
}

static void sweep_limbo(tu_heap *heap) {
    for (tu_chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next) {
        uint32_t *at = &chunk->limbo;
        while (*at != NOBODY) {
            uint32_t start = *at;
            if (is_held(heap, chunk, start)) {
                at = &chunk->books[start].next;
            } else {
                *at = chunk->books[start].next;
                if (give_back_block(chunk, start))
                    empty_chunk(heap, chunk);
            }
        }
    }
}

/* ---- taking a block ---- */

typedef struct wanted {
    size_t bytes, alignment;
    uint32_t granules; /* enough for any place */
} wanted;

/* The first block that is long enough. In the bin of its own size only `tries` are looked at; any of a higher bin will
 * do. */
static uint32_t find_block(const tu_chunk *chunk, uint32_t granules, int tries) {
    int bin = bin_of(granules);
    for (uint32_t at = chunk->bins[bin]; at != NOBODY && tries-- > 0; at = chunk->books[at].next)
        if (chunk->books[at].length >= granules)
            return at;
    while (++bin < BINS)
        if (chunk->bins[bin] != NOBODY)
            return chunk->bins[bin];
    return NOBODY;
}

/* Cuts the piece out of a free block, gives back what is over, and clears it. */
static void carve(tu_heap *heap, tu_chunk *chunk, uint32_t start, const wanted *want, tu_piece *piece) {
    uint32_t length = chunk->books[start].length;
    size_t holds = tu_holds_bytes(heap->job);
    size_t offset = (start * GRANULE + holds + want->alignment - 1) / want->alignment * want->alignment;
    uint32_t end = (uint32_t)((offset + (want->bytes > 0 ? want->bytes : 1) + GRANULE - 1) / GRANULE);
    take_from_bin(chunk, start);
    if (end < start + length)
        put_into_bin(chunk, end, start + length - end);
    set_block(chunk, start, end - start, true);
    chunk->books[start].before = (uint32_t)(offset / 64);
    chunk->books[offset / GRANULE].start = start;
    char *base = chunk->segment->base;
    size_t used_before = (size_t)chunk->fresh * GRANULE;
    if (offset - holds < used_before) {
        size_t stop = offset + want->bytes < used_before ? offset + want->bytes : used_before;
        memset(base + offset - holds, 0, stop - (offset - holds));
    }
    if (end > chunk->fresh)
        chunk->fresh = end;
    *piece = (tu_piece){ .address = base + offset, .bytes = want->bytes, .segment = chunk->segment, .offset = offset };
}

static bool take(tu_heap *heap, const wanted *want, int tries, tu_piece *piece) {
    for (tu_chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next) {
        uint32_t start = chunk->empty ? NOBODY : find_block(chunk, want->granules, tries);
        if (start != NOBODY) {
            carve(heap, chunk, start, want, piece);
            return true;
        }
    }
    return false;
}

static tutti_status add_chunk(tu_heap *heap, const char *what, const wanted *want) {
    for (tu_chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next)
        if (chunk->empty && chunk->granules >= want->granules)
            return fill_chunk(heap, chunk, what);
    size_t bytes = heap->next_bytes;
    while (bytes < want->granules * GRANULE)
        bytes *= 2;
    uint32_t granules = (uint32_t)(bytes / GRANULE);
    size_t room = sizeof(tu_chunk) + granules * (sizeof(block_books) + 1);
    tu_chunk *chunk = calloc(1, room);
    if (chunk == NULL)
        return tu_error_memory("the books of the shared heap", room);
    tutti_status status = tu_segment_make(heap->job, what, bytes, (size_t)2 << 20, 0, true, &chunk->segment);
    if (status != TUTTI_OK) {
        free(chunk);
        return status;
    }
    chunk->granules = granules;
    chunk->used = (uint8_t *)&chunk->books[granules];
    chunk->limbo = NOBODY;
    for (int bin = 0; bin < BINS; bin++)
        chunk->bins[bin] = NOBODY;
    put_into_bin(chunk, 0, granules);
    chunk->next = heap->chunks;
    heap->chunks = chunk;
    if (heap->next_bytes < LARGEST_CHUNK)
        heap->next_bytes *= 2;
    return TUTTI_OK;
}

tutti_status tu_heap_alloc(tu_heap *heap, const char *what, size_t bytes, size_t alignment, tu_piece *piece) {
    wanted want = { .bytes = bytes, .alignment = alignment };
    size_t slack = alignment > GRANULE ? alignment : GRANULE;
    want.granules = (uint32_t)((tu_holds_bytes(heap->job) + slack + bytes + GRANULE - 1) / GRANULE + 1);
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&heap->lock);
    if (!take(heap, &want, QUICK_TRIES, piece)) {
        sweep_limbo(heap);
        while (status == TUTTI_OK && !take(heap, &want, INT_MAX, piece))
            status = add_chunk(heap, what, &want);
    }
    pthread_mutex_unlock(&heap->lock);
    return status;
}

void tu_heap_give_back(tu_heap *heap, const tu_piece *piece) {
    pthread_mutex_lock(&heap->lock);
    tu_chunk *chunk = heap->chunks;
    while (chunk->segment != piece->segment)
        chunk = chunk->next;
    uint32_t start = chunk->books[piece->offset / GRANULE].start;
    if (is_held(heap, chunk, start)) {
        chunk->books[start].next = chunk->limbo;
        chunk->limbo = start;
    } else if (give_back_block(chunk, start)) {
        empty_chunk(heap, chunk);
    }
    pthread_mutex_unlock(&heap->lock);
}

void tu_heap_send_again(tu_heap *heap, uint64_t id, int rank) {
    pthread_mutex_lock(&heap->lock);
    for (tu_chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next)
        if (chunk->segment->id == id)
            atomic_store_explicit(&chunk->segment->sent[rank], false, memory_order_relaxed);
    pthread_mutex_unlock(&heap->lock);
}

void tu_heap_forget(tu_heap *heap, int rank) {
    pthread_mutex_lock(&heap->lock);
    for (tu_chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next) {
        atomic_store_explicit(&chunk->segment->sent[rank], false, memory_order_relaxed);
        for (uint32_t start = 0; start < chunk->granules; start += chunk->books[start].length)
            if (chunk->used[start]) /* the dead rank's mappings ended with it */
                atomic_store_explicit(
                    tu_piece_holds(heap->job, chunk->segment, (uint64_t)chunk->books[start].before * 64, rank), 0,
                    memory_order_relaxed);
    }
    pthread_mutex_unlock(&heap->lock);
}
