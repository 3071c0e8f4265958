/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory for tensor data. Small blocks are reused within a thread: a training step asks for the same sizes again and
 * again. A block is rounded up to its class: multiples of 64 bytes up to 1 KiB, then eight steps per power of two. At
 * most SPARE_LIMIT bytes are kept. Large blocks are cut from segments: see large.c.
 */
#include <stdlib.h>

#include "tensor/large.h"
#include "tensor/thread.h"

#define SPARE_LIMIT ((size_t)1 << 30)

typedef struct tu_block {
    struct tu_block *next;
} tu_block;

/* The class of a size below TU_LARGE_BYTES, and its rounded size. */
static int class_of(size_t bytes, size_t *rounded) {
    if (bytes <= 1024) {
        size_t steps = bytes == 0 ? 1 : (bytes + 63) / 64;
        *rounded = steps * 64;
        return (int)steps - 1;
    }
    int power = 63 - __builtin_clzll(bytes - 1); /* 2^power < bytes <= 2^(power + 1) */
    size_t step = ((size_t)1 << power) / 8;
    size_t steps = (bytes - ((size_t)1 << power) + step - 1) / step; /* 1..8 */
    *rounded = ((size_t)1 << power) + steps * step;
    return 16 + (power - 10) * 8 + (int)steps - 1;
}
_Static_assert(TU_BINS == 16 + 9 * 8 && TU_LARGE_BYTES == 1 << 19, "a bin for each class of small blocks");

/* What this thread keeps goes back first where the system has no more. */
static void *alloc_large(tu_thread *self, size_t bytes) {
    void *data = tu_large_alloc(bytes);
    if (data == NULL && self->spare_bytes > 0) {
        tu_block_trim(self);
        data = tu_large_alloc(bytes);
    }
    return data;
}

void *tu_block_alloc(tu_thread *self, size_t bytes) {
    if (bytes >= TU_LARGE_BYTES)
        return alloc_large(self, bytes);
    size_t rounded;
    int bin = class_of(bytes, &rounded);
    if (self->registered && self->bins[bin] != NULL) {
        tu_block *block = self->bins[bin];
        self->bins[bin] = block->next;
        self->spare_bytes -= rounded;
        return block;
    }
    void *data = aligned_alloc(64, rounded);
    if (data == NULL) {
        tu_block_trim(self);
        tu_large_trim(); /* which may hold far more */
        data = aligned_alloc(64, rounded);
    }
    return data;
}

void tu_block_free(tu_thread *self, void *data, size_t bytes) {
    if (data == NULL)
        return;
    if (bytes >= TU_LARGE_BYTES) {
        tu_large_free(data, bytes);
        return;
    }
    size_t rounded;
    int bin = class_of(bytes, &rounded);
    if (!self->registered || self->spare_bytes + rounded > SPARE_LIMIT) {
        free(data);
        return;
    }
    tu_block *block = data;
    block->next = self->bins[bin];
    self->bins[bin] = block;
    self->spare_bytes += rounded;
}

void tu_block_trim(tu_thread *self) {
    for (int bin = 0; self->registered && bin < TU_BINS; bin++) {
        while (self->bins[bin] != NULL) {
            tu_block *block = self->bins[bin];
            self->bins[bin] = block->next;
            free(block);
        }
    }
    self->spare_bytes = 0;
}
